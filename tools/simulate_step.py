#!/usr/bin/env python3
"""Layers that are fetched ahead of their use, on paper, with a Gantt chart; the same as `tierstore simulate step`."""

from tierstore.cli import app

if __name__ == "__main__":
    import sys

    app(["simulate", "step", *sys.argv[1:]], prog_name="tools/simulate_step.py")
