"""Rates of this machine: disks, links, codecs, the optimizer; alone and beside each other.

Scope: work that is repeated and timed, on threads, files and memory like those of the engine.
Not here: the table of results (`plan/bandwidth.py`), the options of a user and the display (`apps/probe.py`).
Owner: nothing is kept between measurements; a temporary file has no name while it is used.
"""
