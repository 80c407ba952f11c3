"""Sentences on a console.

Scope: one call. Not here: tables and bars (each report has its own); errors (`cli/common.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def show_plain(console: Console, sentence: str) -> None:
    """Print a sentence as it is, even if it is longer than a line or looks like markup."""
    console.print(sentence, soft_wrap=True, markup=False, highlight=False)
