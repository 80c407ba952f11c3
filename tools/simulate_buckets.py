#!/usr/bin/env python3
"""Step time against the size of gradient buckets, on paper; the same as `tierstore simulate buckets`."""

from tierstore.cli import app

if __name__ == "__main__":
    import sys

    app(["simulate", "buckets", *sys.argv[1:]], prog_name="tools/simulate_buckets.py")
