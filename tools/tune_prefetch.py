#!/usr/bin/env python3
"""Prefetch depth and update schedule for a model on this machine; the same as `tierstore tune`."""

from tierstore.cli import app

if __name__ == "__main__":
    import sys

    app(["tune", *sys.argv[1:]], prog_name="tools/tune_prefetch.py")
