"""Rates of this machine: disks, links, codecs, the optimizer; alone and beside each other.

Scope: what is repeated and timed, on the threads, files and memory that the engine uses.
Not here: the table of results (`plan/bandwidth.py`), which options a person has and what is shown (`apps/probe.py`).
Owner: nothing is kept between measurements; a temporary file has no name while it is used.
"""
