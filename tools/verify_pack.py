#!/usr/bin/env python3
"""Read every byte of a pack or a store, and name what is damaged; the same as `tierstore verify`."""

from tierstore.cli import app

if __name__ == "__main__":
    import sys

    app(["verify", *sys.argv[1:]], prog_name="tools/verify_pack.py")
