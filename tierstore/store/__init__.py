"""Names, tiers, leases and generations: the async floor that owns all tier state.

Scope: training state, as `training` puts it together, by what its modules do:
    weights     `weights`, on the device and at rest; `changing`
    gradients   `gradients`, `gradient_memory`, `pieces`
    updates     `updates`, each chunk's trip; `rounds`, `trip_bytes`, `trip_leases`; on the GPU `gpu_updates`, `on_gpu`
    generations `commits` and `manifest_files`; `manifest`, what they say; `team`, of several ranks
                `snapshots` of them, that stay
    at rest     `store_files`, `slots`, `at_rest`; `layout`, the grid of chunks; `stripes`, over several disks
the store without a model, as `tensors` puts it together:
    its bytes   `entries`, `extents`, `routes`, `copies`, `acquired`, `buffers`
    its files   `shelf`; `owner`, the one loop that may use it
and what both have: `directories`, `lock`, `names`, `removal`, `verification`, `budget`, `marks`.
Not here: modules and autograd (`train/`), bytes of files (`pack/`), which goes where (`plan/`).
Owner: the loop thread.
"""
