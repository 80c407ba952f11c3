"""Bytes, file descriptors, threads and the event loop.

Scope: the arena, block files, worker threads, the loop thread, small files.
Not here: torch (see `device/`); what the bytes mean (see `store/`).
Owner: nothing; each module names its own.
"""
