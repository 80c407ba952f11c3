"""Plots: a figure without a window, and its file.

Scope: the one place that imports matplotlib and says how to install it.
Not here: what is drawn (`apps/`, `train/data_parallel/overlap_views.py`).
Owner: the caller owns its figure; there is no current figure, and no state.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tierstore.errors import ConfigError, StorageError
from tierstore.whole_file import whole_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DOTS_PER_INCH = 120


def new_figure(width_inches: float, height_inches: float) -> Figure:
    """An empty figure.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("a plot needs matplotlib: pip install matplotlib") from None
    return Figure(figsize=(width_inches, height_inches), dpi=_DOTS_PER_INCH, layout="constrained")


def check_name(path: str | os.PathLike[str]) -> str:
    """The file extension of a plot, in lower case.

    Raises:
        ConfigError: the extension is neither `.png` nor `.svg`.
    """
    ending = os.path.splitext(os.fspath(path))[1].lower()
    if ending not in (".png", ".svg"):
        raise ConfigError(f"a plot is a .png or .svg file, and {os.fspath(path)} is named as neither")
    return ending


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Writes a PNG or an SVG file, according to its extension. On a failure an existing file stays as it was.

    Raises:
        ConfigError: the extension is another one.
        StorageError: the file cannot be written.
    """
    ending = check_name(path)
    try:
        with whole_file(path) as file:
            figure.savefig(file, format=ending.removeprefix("."))
    except OSError as error:
        raise StorageError(f"cannot write the plot {os.fspath(path)}: {error.strerror or error}") from error
