"""Bad input gets one clear sentence, and nothing is lost: no weights of the model, no byte on the disk."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import psutil
import pytest
import resuming
import torch
from faults import ENOSPC, FaultyBackend
from resuming import DISK, MEMORY, Way, opened
from runs import VOCABULARY, Block, TinyModel
from torch import nn
from torch.utils.checkpoint import checkpoint

from tierstore.config import TierConfig, format_size
from tierstore.errors import (
    BudgetError,
    ConfigError,
    FormatError,
    GraphError,
    MachineWarning,
    StorageError,
    StorageFull,
    TierstoreError,
)
from tierstore.io.backend import Backend
from tierstore.store.tensors import TensorStore
from tierstore.train.engine import Engine

WAY = Way(width=96)

pytestmark = pytest.mark.usefixtures("no_leaks", "one_thread")


def refuse(kind: type[TierstoreError], folder: Path, way: Way = WAY, **changes: Any) -> str:
    """The message of an engine that cannot be made; checks that it is one short line, and the model is unchanged."""
    model = changes.setdefault("model", way.model())
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with pytest.raises(kind) as refusal, opened(way, folder, **changes):
        pass
    message = str(refusal.value)
    print(message)  # for the reader of `pytest -s`
    assert "\n" not in message
    assert len(message) < 400
    after = model.state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    return message


class TestDirectories:
    def test_that_hold_something_else(self, tmp_path: Path) -> None:
        (tmp_path / "store0").mkdir()
        (tmp_path / "store0" / "thesis.tex").write_text("years of work")
        message = refuse(ConfigError, tmp_path)
        assert "store0 is not a store: it holds 'thesis.tex'; give an empty or a new directory" in message
        assert [path.name for path in (tmp_path / "store0").iterdir()] == ["thesis.tex"]

    def test_that_hold_named_tensors(self, tmp_path: Path) -> None:
        async def put() -> None:
            async with TensorStore.open(TierConfig(nvme=[tmp_path / "store0"])) as store:
                await store.put("a", {"x": torch.ones(3)}, tier="nvme")

        asyncio.run(put())
        message = refuse(ConfigError, tmp_path, resume="auto")
        assert "store0 holds named tensors and no training; open it with TensorStore" in message

    def test_that_are_files(self, tmp_path: Path) -> None:
        (tmp_path / "store0").write_text("a file")
        assert "it is not a directory" in refuse(StorageError, tmp_path)
        assert (tmp_path / "store0").read_text() == "a file"

    @pytest.mark.parametrize("resume", ["auto", "never"])
    @pytest.mark.parametrize("path", ["/dev/null/store", "/proc/store", "/" + "x" * 300], ids=["file", "proc", "long"])
    def test_that_cannot_be_made(self, path: str, resume: str, tmp_path: Path) -> None:
        assert f"cannot use {path} as a store: " in refuse(StorageError, tmp_path, nvme=[path], resume=resume)

    def test_that_cannot_be_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("os.access", lambda path, mode: False)  # tests may run as root, whom no mode stops
        assert "no permission to write" in refuse(StorageError, tmp_path)
        flags = os.statvfs(tmp_path).f_flag | os.ST_RDONLY
        monkeypatch.setattr("os.statvfs", lambda path: SimpleNamespace(f_flag=flags))
        assert "is read-only" in refuse(StorageError, tmp_path)


class TestFullDisk:
    @pytest.mark.parametrize("at", range(4))
    def test_before_the_first_step_leaves_nothing(self, at: int, tmp_path: Path) -> None:
        backend = FaultyBackend(ENOSPC, at=at, kinds=("allocate",))
        message = refuse(StorageFull, tmp_path, backend=backend)
        assert "allocation of " in message
        assert "No space left on device" in message
        assert not any((tmp_path / "store0").iterdir())
        with opened(WAY, tmp_path):
            took = sum(path.stat().st_size for path in (tmp_path / "store0").glob("*.safetensors"))
        assert message.endswith(f"all files of the store take {format_size(took)}")

    def test_before_the_first_step_of_a_resumed_run(self, tmp_path: Path) -> None:
        way = replace(WAY, cpu_memory=DISK, blocks=4)
        with opened(way, tmp_path) as run:
            run.until(1)
        before = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
        backend = FaultyBackend(ENOSPC, at=0, kinds=("allocate",))  # of the spilled gradients
        refuse(StorageFull, tmp_path, way, backend=backend)
        assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == before

    def test_while_it_is_filled_leaves_nothing(self, tmp_path: Path) -> None:
        backend = FaultyBackend(ENOSPC, at=5, kinds=("pwrite",))
        with pytest.raises(StorageFull), opened(WAY, tmp_path, backend):
            pass
        assert not any((tmp_path / "store0").iterdir())


class TiedBlocks(TinyModel):
    """A layer needs weights of its own block and of another one."""

    def __init__(self) -> None:
        super().__init__()
        first, last = cast("tuple[Block, Block]", (self.blocks[0], self.blocks[2]))
        last.up.weight = first.up.weight


class ScaledModel(TinyModel):
    """The model has a weight of its own, which stays while its blocks run."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64, VOCABULARY))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * self.scale.mean(0)


class Borrowing(TinyModel):
    """A block uses a weight of another module together with one of its own, which the module tree does not tell."""

    def __init__(self, *, own_first: bool) -> None:
        super().__init__()
        self.other = nn.Linear(96, 64)
        up = cast("Block", self.blocks[1]).up

        def scaled(module: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
            weights = [up.weight, self.other.weight] if own_first else [self.other.weight, up.weight]
            return inputs[0] * nn.functional.linear(*weights).mean()

        up.register_forward_pre_hook(scaled)


class AdaptedBlocks(TinyModel):
    """Backward recomputes each block, of frozen and trained weights: it needs all weights of the block at once."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            cast("Block", block).up.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return cast("torch.Tensor", self.head(self.norm(x)))


def numbers(message: str) -> list[int]:
    return [int(number) for number in re.findall(r"the smallest that fits is (\d+) B", message)]


class TestBudgets:
    @pytest.mark.parametrize(
        "way",
        [
            Way("forward", width=96),
            Way("step", width=96, dtype=torch.bfloat16),
            Way("backward", width=96, blocks=2),
            Way("speculative", width=96),
            Way("delayed", width=96),
            Way("forward", width=96, codec="lz4"),
            Way("backward", width=96, codec="lz4", dtype=torch.bfloat16),
            Way("speculative", width=96, directories=2, dtype=torch.float16),
        ],
        ids=lambda way: f"{way.update}-{way.codec}-{way.dtype}",
    )
    def test_the_smallest_that_is_named_works_and_less_does_not(self, way: Way, tmp_path: Path) -> None:
        message = refuse(BudgetError, tmp_path, way, gpu_memory=1, cpu_memory=1)
        assert not any(tmp_path.iterdir())
        gpu, cpu = numbers(message)
        assert numbers(refuse(BudgetError, tmp_path, way, gpu_memory=gpu - 1, cpu_memory=cpu)) == [gpu]
        assert numbers(refuse(BudgetError, tmp_path, way, gpu_memory=gpu, cpu_memory=cpu - 1)) == [cpu]
        with opened(way, tmp_path, gpu_memory=gpu, cpu_memory=cpu) as run:
            run.until(3)
            peaks = run.engine.statistics()["peak_bytes"]
        assert peaks["gpu"] <= gpu
        assert peaks["cpu"] <= cpu

    @pytest.mark.parametrize(
        ("make", "update"), [(TiedBlocks, "forward"), (ScaledModel, "backward"), (AdaptedBlocks, "speculative")]
    )
    def test_of_groups_that_are_needed_together(self, make: type[TinyModel], update: str, tmp_path: Path) -> None:
        way = Way(update, width=96)
        gpu, cpu = numbers(refuse(BudgetError, tmp_path, way, gpu_memory=1, cpu_memory=1, model=make()))
        with opened(way, tmp_path, gpu_memory=gpu, cpu_memory=cpu, model=make()) as run:
            run.until(3)
            assert run.engine.statistics()["peak_bytes"]["gpu"] <= gpu
            record = run.engine.record()  # from which `tune` places
        gradient = max(need.device_bytes for need in record.groups if need.trainable)
        assert record.acquired_bytes == gpu - gradient

    @pytest.mark.parametrize("own_first", [True, False])
    def test_a_model_that_uses_weights_of_other_modules_in_a_block_is_told_how_much_more_it_needs(
        self, own_first: bool, tmp_path: Path
    ) -> None:
        def opened_with(gpu: int) -> AbstractContextManager[resuming.Run]:
            return opened(way, tmp_path, gpu_memory=gpu, cpu_memory=cpu, model=Borrowing(own_first=own_first))

        way, model = Way("forward", width=96), Borrowing(own_first=own_first)
        message = refuse(BudgetError, tmp_path, way, gpu_memory=1, cpu_memory=1, model=model)
        assert message.endswith("blocks that read weights of other modules need more gpu_memory")
        gpu, cpu = numbers(message)
        with opened_with(gpu) as run, pytest.raises(BudgetError, match="raise gpu_memory by") as refused:
            run.step()
        (more,) = re.findall(rf"raise gpu_memory by (\d+) B \(it is {gpu} B\)", str(refused.value))
        with opened_with(gpu + int(more)) as run:
            run.until(2)

    def test_a_list_that_nobody_calls_holds_no_weights(self, tmp_path: Path) -> None:
        model = TinyModel()
        model.blocks.scale = nn.Parameter(torch.ones(64, VOCABULARY))
        named = [
            numbers(refuse(BudgetError, tmp_path, WAY, gpu_memory=1, cpu_memory=1, model=one))[0]
            for one in (model, TinyModel())
        ]
        assert named[0] == named[1]

    def test_that_the_machine_does_not_have(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        memory = SimpleNamespace(total=2**20, available=2**20)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
        message = refuse(BudgetError, tmp_path)
        assert re.match("a run with these budgets takes .* MiB of CPU memory, and the machine.* allows 1 MiB", message)
        assert not any(tmp_path.iterdir())
        memory.total = 2**40
        short = "MiB of CPU memory will be taken, and 1 MiB are free now"
        with pytest.warns(MachineWarning, match=short) as told, opened(WAY, tmp_path) as run:
            run.until(1)
        assert [warning.filename for warning in told] == [resuming.__file__]  # the line that has made the engine

    def test_in_memory(self, tmp_path: Path) -> None:
        way = Way("forward", width=96)
        message = refuse(BudgetError, tmp_path, way, cpu_memory="1MiB", nvme=[])
        assert message.endswith("with an nvme directory less cpu_memory is needed")
        (cpu,) = numbers(message)
        with opened(way, tmp_path, cpu_memory=cpu, nvme=[]) as run:
            run.until(2)

    def test_of_a_resumed_run(self, tmp_path: Path) -> None:
        way = Way("forward", width=96, blocks=2)
        with opened(way, tmp_path) as run:
            run.until(1)
        (cpu,) = numbers(refuse(BudgetError, tmp_path, way, cpu_memory=4096))
        with opened(way, tmp_path, cpu_memory=cpu) as run:
            run.until(2)


class TestOptions:
    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"update": "late"}, "update must be one of auto, step, forward, backward, speculative, delayed, not "),
            ({"durability": "maybe"}, "durability must be one of commit, none, not 'maybe'"),
            ({"resume": "yes"}, "resume must be one of never, auto, must, previous, not 'yes'"),
            ({"commit_every": 0}, "commit_every must be at least 1, not 0"),
            ({"commit_every": 1.5}, "commit_every must be a whole number, not 1.5"),
            ({"max_grad_norm": 0.0}, "max_grad_norm must be above 0, not 0.0"),
            ({"max_grad_norm": float("nan")}, "max_grad_norm must be above 0, not nan"),
            ({"loss_scale": "huge"}, "loss_scale must be 'dynamic' or above 0, not 'huge'"),
            ({"loss_scale": 0}, "loss_scale must be 'dynamic' or above 0, not 0"),
            ({"update": "backward", "max_grad_norm": 1.0}, "use 'forward' or 'speculative'"),
            ({"loss_scale": float("inf")}, "loss_scale must be 'dynamic' or above 0, not inf"),
            ({"update": "speculative", "commit_every": 2}, "it needs commit_every=1 and durability='commit'"),
            ({"update": "speculative", "durability": "none"}, "it needs commit_every=1 and durability='commit'"),
            ({"update": "speculative", "nvme": []}, "needs a store: give nvme a directory"),
            ({"update": "delayed", "overlap": False}, "leave overlap=False out"),
            ({"resume": "must", "nvme": []}, "there is no generation in memory"),
            ({"registered": {"data": 3}}, "cannot register 'data': int has no state_dict and load_state_dict"),
            ({"device": "tpu"}, "device must be 'cpu', 'cuda' or 'cuda:N', not 'tpu'"),
            ({"codec": "zip"}, "or 'auto' (got 'zip')"),
            ({"cpu_memory": "much"}, "not a size: 'much'"),
            ({"chunk_bytes": 3}, "must be greater than or equal to 64 KiB (got 3)"),
            ({"prefetch_depth": -1}, "must be greater than or equal to 0 (got -1)"),
            ({"io_threads": 0}, "must be greater than or equal to 1 (got 0)"),
            ({"bandwidth": "/no/rates"}, "cannot read the bandwidth table /no/rates: No such file or directory"),
            ({"nvme": ["/tmp/a", "/tmp/../tmp/a"]}, "a directory is listed twice"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_an_unknown_value(self, changes: Mapping[str, Any], said: str, tmp_path: Path) -> None:
        way = Way()
        model = way.model()
        with pytest.raises(ConfigError) as refusal, opened(way, tmp_path, **({"model": model} | changes)):
            pass
        print(refusal.value)
        assert said in str(refusal.value)
        assert not any(tmp_path.iterdir())
        assert all(parameter.numel() == parameter.untyped_storage().nbytes() // 4 for parameter in model.parameters())

    def test_an_option_that_does_not_exist(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="did you mean cpu_memory"):
            TierConfig(cpu_memroy="1GiB")
        with pytest.raises(TypeError):
            Engine(Way().model(), TierConfig(), upadte="forward")  # type: ignore[call-arg]

    def test_an_option_of_a_parameter_group_that_does_not_exist(self, tmp_path: Path) -> None:
        model = Way().model()
        groups = [{"params": list(model.parameters()), "momentum": 0.9}]
        message = refuse_late(Way(), tmp_path, model=model, parameter_groups=groups)
        assert message == (
            "AdamWConfig.momentum: there is no such option; the options are lr, betas, eps, weight_decay, decoupled "
            "(in a parameter group)"
        )

    def test_a_model_with_a_dtype_that_cannot_be_trained(self, tmp_path: Path) -> None:
        assert "has dtype torch.float64; fp32, bf16 and fp16 can be trained" in refuse(
            ConfigError, tmp_path, model=Way().model().double()
        )


@pytest.mark.filterwarnings("ignore")  # of torch: these are beta, or will go
class TestOddTensors:
    @pytest.mark.parametrize(
        ("make", "parameter", "buffer"),
        [
            (lambda dense: dense.to_sparse(), "is torch.sparse_coo; only dense", "torch.float32, torch.sparse_coo"),
            (lambda dense: dense.to_sparse_csr(), "is torch.sparse_csr; only dense", "torch.float32, torch.sparse_csr"),
            (lambda dense: torch.nested.nested_tensor([dense]), "is nested; only dense", "torch.float32"),
            (
                lambda dense: torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8),
                "has dtype torch.qint8; fp32, bf16 and fp16 can", "torch.qint8",
            ),
            (lambda dense: dense.to(torch.complex128), "has dtype torch.complex128; fp32,", "complex128"),
        ],
        ids=["coo", "csr", "nested", "quantized", "complex"],
    )  # fmt: skip
    def test_are_named(self, make: Callable[[torch.Tensor], Any], parameter: str, buffer: str, tmp_path: Path) -> None:
        model = WAY.model()
        model.register_parameter("odd", nn.Parameter(make(torch.eye(4)), requires_grad=False))
        assert f"parameter odd {parameter}" in refuse_late(WAY, tmp_path, model=model)
        model = WAY.model()
        model.register_buffer("odd", make(torch.eye(4)))
        said = refuse_late(WAY, tmp_path, model=model)
        assert re.search(rf"buffer odd(\.data)?: cannot store .* of {buffer}.*; register_buffer\(.*persistent=F", said)
        assert all(one.untyped_storage().nbytes() for one in model.parameters()), "the weights were not taken"

    def test_a_buffer_is_kept_where_no_generation_is_written(self, tmp_path: Path) -> None:
        model = WAY.model()
        model.register_buffer("odd", torch.eye(4).to_sparse())
        with opened(WAY, tmp_path, model=model, durability="none") as run:
            run.step()
        assert model.get_buffer("odd").layout is torch.sparse_coo

    def test_a_buffer_without_values(self, tmp_path: Path) -> None:
        model = WAY.model()
        model.register_buffer("odd", torch.ones(2, device="meta"), persistent=False)
        assert "buffer odd holds no values (meta device)" in refuse_late(WAY, tmp_path, model=model)


def refuse_late(way: Way, folder: Path, **changes: Any) -> str:
    with pytest.raises(ConfigError) as refusal, opened(way, folder, **changes):
        pass
    assert not any(path for path in folder.rglob("*") if path.is_file())
    return str(refusal.value)


class TestStateDict:
    def test_a_missing_a_strange_and_a_misshapen_tensor(self, tmp_path: Path) -> None:
        with opened(Way(cpu_memory=MEMORY), tmp_path) as run:
            run.until(1)
            whole = run.engine.state_dict()
            name = "blocks.0.up.weight"
            for broken in (
                {key: value for key, value in whole.items() if key != name},
                whole | {name: whole[name].T.contiguous()},
            ):
                with pytest.raises(FormatError, match=re.escape(name)) as refusal:
                    run.engine.load_state_dict(broken)
                print(refusal.value)
            assert all(torch.equal(value, whole[key]) for key, value in run.engine.state_dict().items())
            run.until(2)


class TestKinds:
    """An argument of another kind is refused with its name, not by an error from deep inside."""

    @pytest.mark.parametrize(
        ("name", "value", "told"),
        [
            ("model", None, "model must be a torch.nn.Module, not NoneType"),
            ("model", nn.Linear, "not the class Linear"),
            ("tiers", {}, "tiers must be a TierConfig, not dict"),
            ("optimizer", 1e-3, "optimizer must be an AdamWConfig, not float"),
            ("max_grad_norm", "1", "max_grad_norm must be above 0, not '1'"),
            ("max_grad_norm", 10**400, "max_grad_norm must be above 0, not 1000"),
            ("max_grad_norm", torch.ones(2), r"max_grad_norm must be above 0, not tensor\(\[1., 1.\]\)"),
            ("max_grad_norm", [1.0], r"max_grad_norm must be above 0, not \[1.0\]"),
            ("loss_scale", [1], "loss_scale must be 'dynamic' or above 0"),
            ("loss_scale", True, "loss_scale must be 'dynamic' or above 0"),
            ("initialize", 3, "initialize must be a source of weights"),
            ("registered", [1], "registered must be a mapping"),
            ("registered", {3: nn.Linear(1, 1)}, "a name that is text, not 3"),
            ("lr_scheduler", 3, "lr_scheduler must be a function"),
            ("overlap", "no", "overlap is True or False"),
            ("process_group", 3, "process_group must be a torch.distributed.ProcessGroup, not int"),
            ("device_mesh", (2, 2), "device_mesh must be a DeviceMesh, as init_device_mesh makes one, not tuple"),
            ("tracer", "trace.json", "tracer must be a Tracer, not str"),
            ("clock", 3, "clock must be a function that tells seconds, not int"),
            ("backend", Backend, "backend must be a Backend, not the class Backend"),
            ("parameter_groups", 3, "parameter_groups are parameters, or mappings with 'params'"),
            ("parameter_groups", [{"params": 3}], "parameter_groups are parameters, or mappings with 'params'"),
            ("parameter_groups", [{"params": [[]]}], "parameter_groups are parameters, or mappings with 'params'"),
            ("parameter_groups", torch.tensor(1.0), "parameter_groups are parameters, or mappings with 'params'"),
            ("parameter_groups", [{"params": torch.tensor(1.0)}], "that the model does not have; what is outside"),
            ("parameter_groups", [{"parms": []}], "parameter_groups are parameters, or mappings with 'params'"),
            ("parameter_groups", [], "parameter_groups hold no parameters"),
            ("parameter_groups", [{"params": []}], "parameter_groups hold no parameters"),
            ("parameter_groups", [{"params": iter(())}], r"parameter_groups\[0\] is an iterator that gives no param"),
        ],
    )
    def test_of_the_engine(self, name: str, value: Any, told: str) -> None:
        arguments: dict[str, Any] = {"model": WAY.model(), "tiers": TierConfig()} | {name: value}
        with pytest.raises(ConfigError, match=told):
            Engine(**arguments)

    @pytest.mark.parametrize("kind", [Decimal, np.float32, torch.tensor])
    def test_a_norm_is_any_number(self, kind: Callable[[float], Any]) -> None:
        found = []
        for norm in (0.125, kind(0.125)):
            torch.manual_seed(0)
            with Engine(nn.Linear(4, 4), TierConfig(), max_grad_norm=norm) as engine:
                engine.backward(engine(torch.ones(2, 4)).square().sum())
                engine.step()
                found.append(engine.state_dict()["weight"])
        assert torch.equal(*found)

    def test_of_its_calls(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        x = torch.ones(2, 4)
        with Engine(model, TierConfig()) as engine:
            arrays = {name: value.numpy() for name, value in engine.state_dict().items()}
            calls: list[tuple[Callable[[], Any], str]] = [
                (lambda: engine.gathered(5).__enter__(), "gathered.. takes names"),  # type: ignore[arg-type]
                (lambda: engine.train_step(None), "train_step takes a list"),  # type: ignore[arg-type]
                (lambda: engine.load_state_dict(None), "takes tensors by name"),  # type: ignore[arg-type]
                (lambda: engine.load_state_dict(arrays), "0.weight no tensor, expected"),  # type: ignore[arg-type]
                (lambda: engine.load_state_dict({3: x}), "0.weight missing.*; 3 is not in the model"),  # type: ignore[dict-item]
                (lambda: engine.export(""), "takes a directory"),
                (lambda: engine.train_step(iter(())), "was given no micro-batches"),
                (lambda: engine.fix_prefetch_depth(-1), "from 0 on, not -1"),
                (lambda: engine.fix_prefetch_depth("2"), "from 0 on, not '2'"),  # type: ignore[arg-type]
            ]
            for call, told in calls:
                with pytest.raises((ConfigError, FormatError), match=told):
                    call()
            with pytest.raises(ConfigError, match=r"has no \.loss; give labels, loss_of or"):
                engine.train_step([x])
            with pytest.raises(ConfigError, match="a loss is a tensor"):
                engine.backward(1.5)  # type: ignore[arg-type]

    def test_of_a_model_made_for_inference(self) -> None:
        with torch.inference_mode():
            model = nn.Linear(2, 2)
        with pytest.raises(ConfigError, match=r"weight was made in torch\.inference_mode"):
            Engine(model, TierConfig())

    def test_of_an_engine_made_in_inference_mode(self) -> None:
        model = nn.Linear(2, 2)
        with torch.inference_mode(), pytest.raises(ConfigError, match="make it outside of that"):
            Engine(model, TierConfig())
        Engine(model, TierConfig()).close()  # it has kept its weights

    def test_parameters_may_be_named_as_torch_takes_them(self) -> None:
        for named in (lambda m: m.named_parameters(), lambda m: [{"params": m.named_parameters()}, {"params": []}]):
            model = nn.Sequential(nn.Linear(4, 4))
            with Engine(model, TierConfig(), parameter_groups=named(model)) as engine:
                before = engine.state_dict()["0.weight"]
                engine.backward(engine(torch.ones(1, 4)).sum())
                engine.step()
                assert not torch.equal(engine.state_dict()["0.weight"], before)


class InPlace(nn.Module):
    """Changes in place what `exp` has saved as its result and the next layer as its input."""

    def __init__(self, change: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.change = change
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.blocks[0](x).exp()
        second = self.blocks[1](first)
        self.change(first)
        return cast(torch.Tensor, second.sum() + first.sum())


@pytest.mark.parametrize("update", ["forward", "backward"])
@pytest.mark.parametrize(
    "change", [lambda y: y.mul_(10), lambda y: y[0].zero_(), lambda y: y.detach().add_(1), lambda y: y.relu_()]
)
def test_what_backward_needs_is_not_changed_in_place(change: Callable[[torch.Tensor], Any], update: str) -> None:
    """Plain torch refuses this, but does not check where there are hooks for saved tensors."""
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        InPlace(change)(torch.ones(2, 4)).backward()
    tiers = TierConfig(gpu_memory="1MiB", cpu_memory="16MiB", nvme=())
    with (
        Engine(InPlace(change), tiers, update=update) as engine,
        pytest.raises(GraphError, match=r"shape \(2, 4\) that backward needs was changed in place"),
    ):
        engine.backward(engine(torch.ones(2, 4)))
