"""The files that a command writes at its end, checked before its work begins.

Scope: paths by the option that names them. Not here: what `train` writes (`apps/outputs.py`), the writing.
"""

from __future__ import annotations

import os
from pathlib import Path

from tierstore.errors import ConfigError


def check_outputs(**files: Path | None) -> None:
    """Every file can be written, and the pictures drawn, so that no work is lost for want of a directory.

    Args:
        files: by the name of the option; `plot` is a picture.

    Raises:
        ConfigError: names the option and the path; nothing was written.
    """
    seen: dict[Path, str] = {}
    for field, path in files.items():
        if path is None:
            continue
        name = field.replace("_", "-")
        if path.is_dir():
            raise ConfigError(f"cannot write --{name} {path}: it is a directory; give the name of a file")
        check_writable(name, path)
        other = seen.setdefault(path.resolve(), name)
        if other != name:
            raise ConfigError(f"--{other} and --{name} would both write {path}: name two files")
    if (plot := files.get("plot")) is not None:
        from tierstore.plots import check_name, new_figure

        check_name(plot)
        new_figure(1, 1)  # matplotlib is there


def check_writable(name: str, path: Path) -> None:
    """A file or a directory of this path can be written.

    Raises:
        ConfigError: names the option and the path.
    """
    parent = path.absolute().parent
    is_writable = os.access(path, os.W_OK) if path.exists() else parent.is_dir() and os.access(parent, os.W_OK)
    if not is_writable:
        raise ConfigError(f"cannot write --{name} {path}: its directory is missing or not writable")
