"""The compute device: CUDA, or its CPU twin with the same interface.

Scope: memory of the device, copies to and from it, and the order between them and the compute stream.
Not here: what is on the device when (see `store/`, `train/`).
Owner: the device object owns its streams.
"""
