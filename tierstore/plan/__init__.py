"""Decisions as plain functions on plain data.

Scope: placement, prefetch, simulation, rates, costs.
Not here: torch, threads, clocks, files; whatever carries a decision out.
Owner: the running engine and the simulator both call the policies of this package.
"""
