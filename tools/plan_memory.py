#!/usr/bin/env python3
"""Will it fit, and how fast: a plan before the run; the same as `tierstore plan`."""

from tierstore.cli import app

if __name__ == "__main__":
    import sys

    app(["plan", *sys.argv[1:]], prog_name="tools/plan_memory.py")
