#!/usr/bin/env python3
"""Train a model that does not fit in memory; the same as `tierstore train`."""

from tierstore.cli import app

if __name__ == "__main__":
    import sys

    app(["train", *sys.argv[1:]], prog_name="tools/train.py")
