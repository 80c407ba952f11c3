"""`import tierstore` and `--help` answer at once: they import no torch."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

import tierstore


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "statement",
    [
        "import tierstore; tierstore.TierConfig, tierstore.AdamWConfig, tierstore.Tier, tierstore.Tracer",
        "from tierstore.cli import app\n"
        "for command in app.registered_commands:\n"
        "    app([command.callback.__name__, '--help'], standalone_mode=False)\n"
        "for command in ('step', 'buckets'):\n"
        "    app(['simulate', command, '--help'], standalone_mode=False)",
        "from tierstore.cli import app\n"
        "app(['plan', '--params', '1T', '--gpus', '512', '--checkpointing'], standalone_mode=False)",
    ],
)
def test_heavy_packages_are_not_imported(statement: str) -> None:
    heavy = "{'torch', 'numba', 'transformers', 'numpy'}"
    result = _python("-c", f"{statement}\nimport sys\nsys.exit(' '.join({heavy} & set(sys.modules)) or None)")
    assert (result.returncode, result.stderr) == (0, "")


def test_public_names_are_consistent() -> None:
    assert sorted(tierstore.__all__) == sorted(tierstore._HOME)
    assert set(tierstore.__all__) <= set(dir(tierstore))
    for name, home in tierstore._HOME.items():
        assert importlib.util.find_spec(f"tierstore.{home}") is not None, f"{name} has no home {home}"


def test_public_names_resolve() -> None:
    for name in tierstore.__all__:
        assert getattr(tierstore, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'tierstore' has no attribute 'Motor'"):
        tierstore.Motor
