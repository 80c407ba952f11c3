"""Bytes at rest: layout, validation and codecs of packs, and nested state as text.

Scope: pure functions on bytes and numpy arrays, and the reading of one file's header.
Not here: tensors of a framework, asynchronous I/O, which chunk goes where (see `store/`).
Owner: none; nothing here keeps state.
"""
