"""Small files that commands read and write: JSON objects, and text.

Scope: one object per file, errors in one sentence, and writing that an interrupt cannot leave half done.
Not here: what the objects mean.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tierstore.errors import ConfigError, FormatError, StorageError
from tierstore.pack.strict_json import parse_json
from tierstore.whole_file import whole_file


def read_object(path: Path, what: str) -> dict[str, Any]:
    """The JSON object of a file.

    Raises:
        ConfigError: no such file, or it holds something else.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the {what} {path}: {error.strerror}") from None
    try:
        value = parse_json(text, f"the {what} {path}")
    except FormatError as error:
        raise ConfigError(str(error)) from None
    if not isinstance(value, dict):
        raise ConfigError(f"the {what} {path} must be a JSON object, not {type(value).__name__}")
    return value


def write_object(path: Path, value: dict[str, Any], option: str) -> None:
    """Writes the JSON object that `option` asked for; see `write_text`."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n", option)


def write_text(path: Path, text: str, option: str) -> None:
    """Writes the file that `option` asked for: either all of it is written, or the previous file stays.

    Raises:
        StorageError: it cannot be written.
    """
    try:
        with whole_file(path) as file:
            file.write(text.encode(errors="backslashreplace"))  # names of files may be any bytes
    except OSError as error:
        raise StorageError(f"cannot write {option} {path}: {error.strerror}") from error
