"""torch.compile of blocks, and of the whole model, which is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runs import disk, smallest_budgets, tiny, tokens, train, train_plain, worst_difference
from torch import nn
from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics

import tierstore
from tierstore.errors import ConfigError
from tierstore.train.engine import Engine

# Not `no_leaks`: torch starts a thread for progress bars when it first compiles.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@pytest.mark.parametrize(
    ("backend", "update", "clip"), [("aot_eager", "forward", 1.0), ("eager", "backward", None)]
)
def test_one_block_may_be_compiled(backend: str, update: str, clip: float | None, tmp_path: Path) -> None:
    torch._dynamo.reset()
    batches, model = tokens(4), tiny()
    expected = train_plain(tiny(), batches, max_grad_norm=clip)
    model.blocks[1] = torch.compile(model.blocks[1], backend=backend, fullgraph=True)
    gpu, cpu = smallest_budgets(tiny(), nvme=["unused"], update=update)
    found = train(model, batches, disk(tmp_path, gpu_memory=gpu, cpu_memory=cpu), update=update, max_grad_norm=clip)
    assert worst_difference(found.losses, expected.losses) < 1e-5


def test_every_block_may_be_compiled_in_place(tmp_path: Path) -> None:
    torch._dynamo.reset()
    batches, model = tokens(4), tiny()
    expected = train_plain(tiny(), batches, max_grad_norm=1.0)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    gpu, cpu = smallest_budgets(tiny(), nvme=["unused"], update="forward")
    tiers = disk(tmp_path, gpu_memory=gpu, cpu_memory=cpu)
    found = train(model, batches, tiers, update="forward", max_grad_norm=1.0)
    assert worst_difference(found.losses, expected.losses) < 1e-5


@torch._dynamo.disable(recursive=False)
def uncompiled(inside: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return inside(x)


class PartlyCompiled(nn.Module):
    """A block that calls an uncompiled function, in which weights and activations are saved for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + uncompiled(self.inside, x)


def test_what_a_compiled_block_calls_uncompiled_compiles_no_hook(tmp_path: Path) -> None:
    torch._dynamo.reset()
    clear_compilation_metrics()
    model = nn.Sequential(PartlyCompiled(), PartlyCompiled())
    for block in model:
        block.compile(backend="eager")
    with Engine(model, disk(tmp_path)) as engine:
        engine.backward(engine(torch.randn(2, 8)).sum())
        engine.step()
    compiled = {Path(found.co_filename) for found in get_compilation_metrics() if found.co_filename}
    assert Path(__file__) in compiled
    assert not [file for file in compiled if file.is_relative_to(Path(tierstore.__file__).parent)]


def test_a_compiled_model_is_refused(tmp_path: Path) -> None:
    in_place = tiny()
    in_place.compile(backend="eager")
    for model in (torch.compile(tiny(), backend="eager"), in_place):
        with pytest.raises(ConfigError, match=r"torch\.compile.*blocks"):
            Engine(model, disk(tmp_path))
    assert not (tmp_path / "store").exists()


def test_a_compiled_function_calls_the_engine_uncompiled(tmp_path: Path) -> None:
    torch._dynamo.reset()
    clear_compilation_metrics()
    x = torch.randn(2, 8)
    with Engine(nn.Sequential(nn.Linear(8, 8)), disk(tmp_path)) as engine:

        @torch.compile(backend="eager")
        def step(x: torch.Tensor) -> torch.Tensor:
            loss = engine(2 * x).square().mean()
            engine.backward(loss)
            engine.step()
            return loss.detach() / 2

        assert step(x) > step(x)
        assert engine.step_count == 2
        with pytest.raises(torch._dynamo.exc.Unsupported, match="an engine cannot be compiled, only blocks"):
            torch.compile(engine, backend="eager", fullgraph=True)(x)
    compiled = {Path(found.co_filename) for found in get_compilation_metrics() if found.co_filename}
    assert Path(__file__) in compiled


class CompiledLoss(nn.Module):
    """A compiled function reads a weight of a module that is not called."""

    def __init__(self, fullgraph: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 64)
        self.loss = torch.compile(lambda x, w: (x @ w).square().mean(), backend="eager", fullgraph=fullgraph)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.loss(x, self.head.weight)


def test_a_weight_that_comes_while_a_function_is_compiled_needs_a_break(tmp_path: Path) -> None:
    gpu, cpu = smallest_budgets(CompiledLoss(False), nvme=["unused"])
    x = torch.randn(2, 64)
    for fullgraph in (False, True):
        torch._dynamo.reset()
        tiers = disk(tmp_path / str(fullgraph), gpu_memory=gpu + 2**15, cpu_memory=cpu)
        with Engine(CompiledLoss(fullgraph), tiers) as engine:
            if fullgraph:
                with pytest.raises(torch._dynamo.exc.Unsupported, match="leave fullgraph=True out"):
                    engine(x)
            else:
                engine.backward(engine(x))
                assert engine.step().grad_norm
