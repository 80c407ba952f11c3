#!/usr/bin/env python3
"""Write a pack back as an ordinary checkpoint; the same as `tierstore unpack`."""

from tierstore.cli import app

if __name__ == "__main__":
    import sys

    app(["unpack", *sys.argv[1:]], prog_name="tools/unpack_checkpoint.py")
