#!/usr/bin/env python3
"""Step time against the size of gradient buckets, on paper; the same as `tierstore simulate`."""

from tierstore.cli import app

if __name__ == "__main__":
    import sys

    app(["simulate", *sys.argv[1:]], prog_name="tools/simulate.py")
