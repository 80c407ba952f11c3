"""Names, tiers, leases and generations: the async floor that owns all tier state."""
