"""The progress of long work is shown on a terminal, and nowhere else."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tierstore.apps.progress import spinner


@pytest.mark.parametrize("told", [[], ["reading [y].json"]])
def test_a_terminal_shows_what_goes_on(told: list[str]) -> None:
    screen = io.StringIO()
    with spinner(Console(file=screen, force_terminal=True, width=60), "reading [x].json") as tell:
        for what in told:
            tell(what)
    shown = screen.getvalue()
    assert (told or ["reading [x].json"])[-1] in shown  # not taken for markup
    assert shown.endswith("\x1b[?25h\r\x1b[1A\x1b[2K"), shown[-40:]  # the cursor is back, and the line is gone


def test_elsewhere_nothing_is_written() -> None:
    page = io.StringIO()
    with spinner(Console(file=page), "reading") as tell:
        tell("reading on")
    assert page.getvalue() == ""
