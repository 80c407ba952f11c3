"""The README's snippets run as they stand, but for their directories, device and length."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import torch
import transformers

from tierstore.apps import presets
from tierstore.apps.options import Precision

README = Path(__file__).parents[2] / "README.md"
TINY = {"vocab_size": 256, "n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 32, "bos_token_id": 0,
        "eos_token_id": 0}  # fmt: skip


def run_snippet(word: str, changes: dict[str, str], names: dict[str, Any]) -> None:
    """Executes the first Python block that holds `word`, after replacing parts of it."""
    snippets = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    source = next(snippet for snippet in snippets if word in snippet)
    for found, instead in changes.items():
        assert found in source, found
        source = source.replace(found, instead)
    exec(compile(source, str(README), "exec"), names)


def test_the_loop_exports_a_model_that_can_be_loaded(disk_path: Path) -> None:
    model = presets.build(transformers.GPT2Config(**TINY), Precision.FP32)
    tokens = torch.randint(0, 256, (2, 16))
    batches = itertools.repeat({"input_ids": tokens, "labels": tokens})
    changes = {'"cuda"': '"cpu"', "8GiB": "8MiB", "32GiB": "32MiB", "/mnt/nvme0": str(disk_path), "1000": "2",
               "out/": f"{disk_path}/out"}  # fmt: skip
    run_snippet("save_pretrained", changes, {"model": model, "batches": batches})
    loaded = transformers.AutoModelForCausalLM.from_pretrained(disk_path / "out")
    assert torch.isfinite(loaded(input_ids=tokens, labels=tokens).loss)


def test_the_store_without_a_model(disk_path: Path, capsys: Any) -> None:
    run_snippet("TensorStore", {"/mnt/nvme0": str(disk_path)}, {})
    assert capsys.readouterr().out.splitlines() == ["gpu 0 0 0%", "cpu 1 262144 25%", "nvme 3 786432 75%"]
