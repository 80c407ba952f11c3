#!/usr/bin/env python3
"""Measure disks, links, codecs and the optimizer of this machine; the same as `tierstore probe`."""

from tierstore.cli import app

if __name__ == "__main__":
    import sys

    app(["probe", *sys.argv[1:]], prog_name="tools/measure_bandwidth.py")
