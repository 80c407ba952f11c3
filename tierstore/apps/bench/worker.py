"""A contestant of our own: `python -m tierstore.apps.bench.worker MODULE OPTIONS_JSON`.

Scope: finds `contend` of a module of this package, and serves it.
"""

from __future__ import annotations

import importlib
import sys

from tierstore.apps.bench.serve import serve

if __name__ == "__main__":
    serve(importlib.import_module(f"tierstore.apps.bench.{sys.argv[1]}").contend)
