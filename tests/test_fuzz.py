"""What `tools/fuzz.py` has found, and its good inputs: each is read or refused, within a second and its memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from test_mutations import ROOT, load

from tierstore.errors import FormatError

sys.path.insert(0, str(ROOT / "tools"))
fuzz = load("fuzz")
REFUSED = {"pack": {"plain", "empty"}, "index": {"sealed"}, "torch": {"sparse"}}
"""Good inputs that are refused, because they are ordinary safetensors files, or that of a pack, or sparse."""


@pytest.mark.filterwarnings("ignore")  # a crafted file makes zipfile and torch warn
@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_the_corpus_is_read_or_refused(name: str) -> None:
    found = {path.name: path.read_bytes() for path in sorted((fuzz.CORPUS / name).glob("*"))}
    refusals = fuzz.replay(name, found)
    refused = {key for key in refusals.keys() - found.keys() if refusals[key]}
    assert refused == REFUSED.get(name, set()), "good inputs are read"


def test_what_may_not_happen_is_a_failure(tmp_path: Path) -> None:
    def writes(data: bytes, folder: Path) -> None:
        (folder / "new").write_bytes(data)

    def hoards(data: bytes, folder: Path) -> None:
        bytearray(2**26)

    def refuses(data: bytes, folder: Path) -> None:
        raise FormatError("not this")

    for read, message in ((writes, r"it did open"), (hoards, "B were allocated for 1 B")):
        with pytest.raises(fuzz.Failure, match=message):
            fuzz.try_input(fuzz.Target(read, None, None), b"x", tmp_path, is_measured=True)
    assert fuzz.try_input(fuzz.Target(refuses, None, None), b"x", tmp_path, is_measured=True) == "not this"
