#!/usr/bin/env python3
"""What a pack or a store holds; the same as `tierstore inspect`."""

from tierstore.cli import app

if __name__ == "__main__":
    import sys

    app(["inspect", *sys.argv[1:]], prog_name="tools/inspect_pack.py")
