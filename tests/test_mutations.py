"""The list of `tools/mutations.py` does not rot: each mutation still applies, and the test that it names is there."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_applies_and_names_a_test() -> None:
    mutations = load("mutations").MUTATIONS
    for mutation in mutations:
        source = (ROOT / mutation.path).read_text()
        assert mutation.of(source) != source
        file, *names = mutation.test.split("::")
        text = (ROOT / "tests" / file).read_text()
        for name in names:
            assert f"class {name}" in text or f"def {name}(" in text, mutation.test
    assert len({mutation.name for mutation in mutations}) == len(mutations) >= 60


def test_a_name_that_none_has_runs_no_test(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    load("mutations")  # mutate.py imports it
    mutate = load("mutate")
    monkeypatch.setattr(sys, "argv", ["mutate.py", "--only", "no such name"])
    monkeypatch.setattr(mutate, "run_tests", lambda *given: (0, ""))
    with pytest.raises(SystemExit, match="2"):
        mutate.main()
    assert "no mutation has that in its name or place" in capsys.readouterr().err
