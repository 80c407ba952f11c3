"""Warnings that point to the user's line that called tierstore.

Scope: finding that line. Not here: the texts of the warnings.
"""

from __future__ import annotations

import sys
import warnings

_NOT_THE_CALLER = ("tierstore", "torch", "contextlib")
"""Packages whose frames are skipped. (`skip_file_prefixes` of Python 3.12 does the same.)"""


def warn_caller(text: str, kind: type[Warning] = UserWarning) -> None:
    """Warn at the line that called tierstore, directly or through torch or contextlib."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_CALLER:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, kind, stacklevel=level)
