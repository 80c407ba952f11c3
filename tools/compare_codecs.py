#!/usr/bin/env python3
"""What each codec makes of your own weights and optimizer state; the same as `tierstore codecs`."""

from tierstore.cli import app

if __name__ == "__main__":
    import sys

    app(["codecs", *sys.argv[1:]], prog_name="tools/compare_codecs.py")
