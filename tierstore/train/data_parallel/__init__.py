"""Data parallel training without the engine: a reducer in place of DDP, and how well communication hides.

Scope: averaging gradients in buckets (`reducer`, and what it names), what a collective costs (`collective_costs`), how
much communication hides behind backward, here and under DDP or FSDP (`overlap`).
Not here: the ranks of the engine, which does not use this (`train/partition.py`, `train/reduction.py`).
"""
