"""Running README's Python blocks, in this process or at several ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

README = Path(__file__).parents[2] / "README.md"
ENDING = {"dist.destroy_process_group()": "pass"}  # the group that the snippets run in goes on


def run_snippet(word: str, changes: dict[str, str], names: dict[str, Any]) -> None:
    """Executes the first Python block that holds `word`, after replacing parts of it."""
    snippets = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    source = next(snippet for snippet in snippets if word in snippet)
    for found, instead in changes.items():
        assert found in source, found
        source = source.replace(found, instead)
    exec(compile(source, str(README), "exec"), names)


class Model(torch.nn.Module):
    """With the face of a causal language model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Embedding(256, 32), torch.nn.Linear(32, 256)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.second(self.first(input_ids))
        return type("Output", (), {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())})


def engine_of_ranks(rank: int, ranks: int, directory: str) -> int:
    """The loop of several ranks; returns the steps that the store has seen."""
    generator = torch.Generator().manual_seed(0)
    names = {
        "model": Model(), "batch_of": lambda step: torch.randint(0, 256, (4, 8), generator=generator),
    }  # fmt: skip
    changes = {
        '"cuda", int(os.environ["LOCAL_RANK"])': '"cpu"', "torch.cuda.set_device(device)": "pass",
        'dist.init_process_group("nccl")': "pass",
        "8GiB": "8MiB", "32GiB": "32MiB", "/mnt/nvme0": directory, "1000": "3", "out2/": f"{directory}/out",
    }  # fmt: skip
    run_snippet("zero=3", changes | ENDING, names)
    return int(names["engine"].step_count)  # type: ignore[attr-defined]


def reducer_of_ranks(rank: int, ranks: int, directory: str) -> str:
    """The loop of the reducer; returns the profiler's report."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    names: dict[str, Any] = {
        "device": "cpu", "module": module, "batches": [torch.randn(4, 64) for _ in range(4)],
        "optimizer": torch.optim.SGD(module.parameters(), lr=0.1),
    }  # fmt: skip
    changes = {"steps.json": f"{directory}/{rank}.json", 'dist.init_process_group("gloo")': "pass"}
    run_snippet("GradientReducer", changes | ENDING, names)
    return str(names["profiler"].report())
