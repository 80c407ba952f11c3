"""The synchronous floor that knows modules: groups, hooks, the optimizer and the engine."""
