"""What the package says of itself is true: the maps of its floors are complete, and modules that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tierstore"


@pytest.mark.parametrize("floor", ["plan", "store", "train"])
def test_a_map_names_every_module_and_no_other(floor: str) -> None:
    text = (PACKAGE / floor / "__init__.py").read_text(encoding="utf-8").split("Not here:")[0]
    named = {name.rstrip("/") for name in re.findall(r"`([a-z_]+/?)`", text)}
    modules = {path.stem for path in (PACKAGE / floor).glob("*.py") if path.stem != "__init__"}
    packages = {path.parent.name for path in (PACKAGE / floor).glob("*/__init__.py")}
    assert named == modules | packages


def test_modules_that_are_named_are_there() -> None:
    sources = [path.resolve() for folder in ("tierstore", "tools", "tests") for path in (ROOT / folder).rglob("*.py")]
    named = [(path, name) for path in sources for name in re.findall(r"`([a-z_/]+\.py)`", path.read_text("utf-8"))]
    # A name is a path from a folder above the module, or from the package.
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, name in named
        if not any((folder / name).is_file() for folder in (*path.parents, PACKAGE))
    ]
    assert named
    assert not missing
