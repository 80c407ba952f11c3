#!/usr/bin/env python3
"""This package, its peers and the limits of the machine in one run; the same as `tierstore bench`."""

from tierstore.cli import app

if __name__ == "__main__":
    import sys

    app(["bench", *sys.argv[1:]], prog_name="tools/bench.py")
