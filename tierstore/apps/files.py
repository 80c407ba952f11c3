"""Small JSON files that commands read and write.

Scope: one object per file, and what is wrong with it in one sentence.
Not here: what the objects mean.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tierstore.errors import ConfigError, FormatError, StorageError
from tierstore.pack.strict_json import parse_json


def read_object(path: Path, what: str) -> dict[str, Any]:
    """The JSON object of a file.

    Raises:
        ConfigError: no such file.
        FormatError: it holds something else.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the {what} {path}: {error.strerror}") from None
    value = parse_json(text, f"the {what} {path}")
    if not isinstance(value, dict):
        raise FormatError(f"the {what} {path} must be a JSON object, not {type(value).__name__}")
    return value


def write_object(path: Path, value: dict[str, Any], option: str) -> None:
    """Writes the JSON object that `option` asked for.

    Raises:
        StorageError: it cannot be written.
    """
    try:
        path.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {option} {path}: {error.strerror}") from error
