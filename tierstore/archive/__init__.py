"""Checkpoints in files, without a model: finding their tensors, packing, verifying, loading and unpacking them.

Scope: bytes from files to files or to memory, a chunk at a time, within a bounded memory.
Not here: the format of a pack (`pack/`), the order of its groups (`plan/order.py`), training state (`store/`), what a
person sees (`apps/`).
Owner: each call opens, and closes, what it uses; nothing is kept between calls.
"""
