#!/usr/bin/env python3
"""Remove a store, all of it and only it; the same as `tierstore delete`."""

from tierstore.cli import app

if __name__ == "__main__":
    import sys

    app(["delete", *sys.argv[1:]], prog_name="tools/delete_store.py")
