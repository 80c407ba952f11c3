#!/usr/bin/env python3
"""Pack a checkpoint in execution order; the same as `tierstore pack`."""

from tierstore.cli import app

if __name__ == "__main__":
    import sys

    app(["pack", *sys.argv[1:]], prog_name="tools/pack_checkpoint.py")
