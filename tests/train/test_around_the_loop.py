"""What people do around the training loop: look into the model, evaluate, load data, export."""

from __future__ import annotations

import contextlib
import copy
import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from runs import TinyModel, disk, next_token_loss, smallest_budgets, tiny, tokens, train_plain, worst_difference
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from tierstore.config import AdamWConfig
from tierstore.errors import BudgetError, ConfigError, FormatError, GraphError
from tierstore.train.engine import Engine

SCHEDULES = [("forward", 1.0), ("backward", None)]

pytestmark = pytest.mark.usefixtures("no_leaks", "one_thread")
each_schedule = pytest.mark.parametrize(("update", "clip"), SCHEDULES)
each_schedule_and_dtype = pytest.mark.parametrize(
    ("update", "clip", "dtype"), [("forward", 1.0, torch.bfloat16), ("backward", None, torch.float32)]
)


@contextmanager
def opened(
    tmp_path: Path, update: str = "forward", clip: float | None = None, room: int = 0, model: Any = None, **options: Any
) -> Iterator[Engine]:
    """An engine with everything on NVMe; the device holds one block and `room` bytes more."""
    gpu, cpu = smallest_budgets(tiny(), nvme=["unused"], update=update)
    tiers = disk(tmp_path, gpu_memory=gpu + room, cpu_memory=cpu)
    config = AdamWConfig(lr=1e-3)
    with Engine(model or tiny(), tiers, config, update=update, max_grad_norm=clip, **options) as engine:
        yield engine


def one_step(engine: Engine, batch: torch.Tensor) -> float:
    loss = next_token_loss(engine, batch)
    engine.backward(loss)
    engine.step()
    return loss.item()


# --- parameters outside of forward ----------------------------------------------------------------------------------

READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "sum": lambda p: p.sum(),
    "item": lambda p: p[0, 0].item(),
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "numpy": lambda p: p.detach().numpy(),
    "array": np.asarray,
    "tolist": lambda p: p.tolist(),
    "clone": lambda p: p.clone(),
    "to": lambda p: p.to(torch.float64),
    "matmul": lambda p: torch.ones(1, p.shape[0]) @ p,
    "equal": lambda p: torch.equal(p, p),
    "stack": lambda p: torch.stack([p, p]),
    "add_": lambda p: p.data.add_(1.0),
    "copy_": lambda p: nn.init.zeros_(p),
    "deepcopy": copy.deepcopy,
    "save": lambda p: torch.save(p, io.BytesIO()),
    "data_ptr": lambda p: p.data_ptr(),
    "dlpack": torch.from_dlpack,
    "iter": list,
    "bool": lambda p: bool((p > 0).all()),
    "as_subclass": lambda p: p.as_subclass(torch.Tensor),
    "parameter": lambda p: nn.Parameter(p),
    "view_as": lambda p: torch.zeros(p.numel()).view_as(p) + p,
}


def raises_by_name(read: Callable[[nn.Parameter], Any], weight: nn.Parameter) -> bool:
    try:
        read(weight)
    except GraphError as error:
        return "gathered(['blocks.1.up.weight']" in str(error)
    return False


@pytest.mark.parametrize(("room", "update", "clip"), [(2**24, "forward", 1.0), (0, "backward", None)])
def test_a_parameter_read_outside_of_forward_raises_by_name(
    room: int, update: str, clip: float | None, tmp_path: Path
) -> None:
    """Never a crash, and never a value that an update is about to change, also with room for all on the device."""
    with opened(tmp_path, update, clip, room) as engine:
        for batch in tokens(2):
            one_step(engine, batch)
        weight = engine.model.blocks[1].up.weight
        assert [name for name, read in READS.items() if not raises_by_name(read, weight)] == []
        assert weight.shape == (384, 96)
        assert weight.numel() == 384 * 96
        assert weight.dtype == torch.float32
        assert weight.requires_grad
        assert weight.grad is None
        assert one_step(engine, tokens(1)[0]) > 0


def test_no_method_of_a_tensor_goes_past_the_guard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each method that gives a tensor asks the guard first; else the tensor would be a view of memory that is gone."""

    class Asked(Exception):
        pass

    def ask(*_: Any) -> None:
        raise Asked

    past = []
    with opened(tmp_path) as engine:
        one_step(engine, tokens(1)[0])
        weight = engine.model.blocks[1].up.weight
        with monkeypatch.context() as patch:
            patch.setattr(type(weight), "__torch_function__", classmethod(ask))
            methods = {name: getattr(torch.Tensor, name) for name in dir(torch.Tensor)}
            for name, method in methods.items():
                for given in ((), (1,), (weight,), (torch.Tensor,), (torch.zeros(2),)) if callable(method) else ():
                    with contextlib.suppress(Exception):
                        if isinstance(getattr(type(weight), name, method)(weight, *given), torch.Tensor):
                            past.append(name)
    assert past == []


def test_whole_models_are_read_through_the_engine(tmp_path: Path) -> None:
    with opened(tmp_path) as engine:
        one_step(engine, tokens(1)[0])
        reads: list[Callable[[nn.Module], Any]] = [
            copy.deepcopy,
            lambda model: model.state_dict(),
            lambda model: nn.utils.parameters_to_vector(model.parameters()),
            lambda model: model.double(),
        ]
        for read in reads:
            with pytest.raises(GraphError, match="gathered"):
                read(engine.model)
        assert sum(p.numel() for p in engine.model.parameters()) == sum(p.numel() for p in tiny().parameters())
        assert "TinyModel" in repr(engine.model)


def test_a_weight_can_be_shown_everywhere(tmp_path: Path) -> None:
    model = nn.EmbeddingBag(3, 4)  # its repr makes the text of its weight, and throws that away
    with Engine(model, disk(tmp_path)) as engine:
        assert "engine.gathered(['weight'])" in repr(model.weight)
        assert str(model) == str(nn.EmbeddingBag(3, 4))
        with engine.gathered("weight"):
            assert "containing:" in repr(model.weight)
    assert "is closed" in repr(model.weight)


@each_schedule
def test_gathered_reads_what_training_made(update: str, clip: float | None, tmp_path: Path) -> None:
    with opened(tmp_path, update, clip) as engine:
        for batch in tokens(3):
            one_step(engine, batch)
            with engine.gathered(["blocks.2.up.weight", "blocks.2.norm_in.bias"]):
                read = engine.model.blocks[2].up.weight.detach().clone()
                engine.model.blocks[2].norm_in.bias.sum().item()
            assert torch.equal(engine.state_dict()["blocks.2.up.weight"], read)
            with pytest.raises(GraphError):
                engine.model.blocks[2].up.weight.sum()


def test_gathered_that_only_reads_commits_nothing(tmp_path: Path) -> None:
    with opened(tmp_path, commit_every=50) as engine:
        engine.flush()
        before = engine.statistics()["generation"]
        for batch in tokens(2):
            one_step(engine, batch)
            with engine.gathered("head"):
                read = engine.model.head.weight.detach().clone()
            assert engine.statistics()["generation"] == before
        assert torch.equal(engine.state_dict()["head.weight"], read)
        assert engine.statistics()["generation"] == before + 1


def test_what_an_engine_has_is_not_pickled(tmp_path: Path) -> None:
    with opened(tmp_path, room=2**24) as engine, engine.gathered(""):
        for value in (engine.model, engine.model.head.weight):
            with pytest.raises(GraphError, match=r"cannot be pickled, .* save engine\.state_dict\(\)"):
                torch.save(value, io.BytesIO())
        torch.save(engine.model.head.weight.detach(), io.BytesIO())
        torch.save(engine.model.state_dict(), io.BytesIO())
        copy.deepcopy(engine.model)


@each_schedule_and_dtype
def test_gathered_modifies(update: str, clip: float | None, dtype: torch.dtype, tmp_path: Path) -> None:
    """Training goes on from changed weights; weights that were not changed keep every bit of their masters."""
    gpu, cpu = smallest_budgets(tiny(dtype), nvme=["unused"], update=update)
    tiers = disk(tmp_path, gpu_memory=gpu, cpu_memory=cpu)
    with Engine(tiny(dtype), tiers, AdamWConfig(lr=1e-3), update=update, max_grad_norm=clip) as engine:
        one_step(engine, tokens(1)[0])
        before = engine.state_dict()
        with (
            pytest.raises(GraphError, match="changed inside gathered"),
            engine.gathered(["blocks.0.up.weight"]),
            torch.no_grad(),
        ):
            engine.model.blocks[0].up.weight.fill_(7.0)  # without modify the change is lost
        assert torch.equal(engine.state_dict()["blocks.0.up.weight"], before["blocks.0.up.weight"])
        with engine.gathered(["blocks.0.up.weight"], modify=True), torch.no_grad():
            engine.model.blocks[0].up.weight[:5] = 0.5
        after = engine.state_dict()
        assert torch.equal(after["blocks.0.up.weight"][:5], torch.full((5, 96), 0.5))
        assert torch.equal(after["blocks.0.up.weight"][5:], before["blocks.0.up.weight"][5:])
        assert torch.equal(after["blocks.0.down.weight"], before["blocks.0.down.weight"])
        for zero in (0.0, -0.0):
            with engine.gathered(["blocks.0.up.bias"], modify=True), torch.no_grad():
                engine.model.blocks[0].up.bias[0] = zero
            after = engine.state_dict()
            assert str(after["blocks.0.up.bias"][0].item()) == str(zero)
        with torch.no_grad():
            changed = next_token_loss(engine, tokens(1)[0]).item()
        expected = tiny(dtype)
        expected.load_state_dict({name: value.to(dtype) for name, value in after.items()})
        assert changed == pytest.approx(next_token_loss(expected, tokens(1)[0]).item(), rel=1e-5)
        one_step(engine, tokens(1)[0])
        assert not torch.equal(engine.state_dict()["blocks.0.up.weight"][:5], after["blocks.0.up.weight"][:5])


@pytest.mark.parametrize(
    ("update", "clip", "room"),
    [("forward", 1.0, 0), ("backward", None, 2**24), ("speculative", 1e-3, 0), ("speculative", 1e-3, 2**24)],
)
def test_weights_changed_between_steps_are_trained_on_from(
    update: str, clip: float | None, room: int, tmp_path: Path
) -> None:
    """Also where every guess is wrong, and the update goes back to the changed weights."""
    batches, model = tokens(3), tiny()
    expected = train_plain(model, batches[:2], max_grad_norm=clip)
    with opened(tmp_path, update, clip, room) as engine:
        found = [one_step(engine, batch) for batch in batches[:2]]
        with engine.gathered(["head.weight"], modify=True), torch.no_grad():
            engine.model.head.weight.mul_(0.5)
        engine.backward(next_token_loss(engine, batches[2]))
        engine.step()
        weights = engine.state_dict()
    assert worst_difference(found, expected.losses) < 1e-5
    step = (weights["head.weight"] - 0.5 * model.head.weight.detach()).abs()
    assert 1e-4 < float(step.mean()) <= float(step.max()) < 3e-3


def test_weights_do_not_change_in_the_middle_of_a_step(tmp_path: Path) -> None:
    with opened(tmp_path) as engine:
        engine.backward(next_token_loss(engine, tokens(1)[0]))
        with pytest.raises(ConfigError, match="middle"), engine.gathered(["head.weight"], modify=True):
            pass
        with pytest.raises(ConfigError, match="middle"):
            engine.load_state_dict(tiny().state_dict())
        with engine.gathered(["head.weight"]):
            engine.model.head.weight.sum()
        engine.step()


def test_gathered_refuses_what_is_not_there(tmp_path: Path) -> None:
    with opened(tmp_path) as engine:
        for name in ("nothing.weight", "block", "blocks.1.up.weigh", "w"):
            with pytest.raises(ConfigError, match=f"'{re.escape(name)}'"), engine.gathered([name]):
                pass
        one_step(engine, tokens(1)[0])


def test_gathered_takes_the_name_of_a_module_for_all_below_it(tmp_path: Path) -> None:
    with opened(tmp_path, room=2**24) as engine:
        one_step(engine, tokens(1)[0])
        expected = engine.state_dict()
        for name in ("blocks.1", "blocks", "head", ""):
            with engine.gathered(name):
                for own, parameter in engine.model.get_submodule(name).named_parameters():
                    full_name = f"{name}.{own}" if name else own
                    assert torch.equal(parameter.detach().float(), expected[full_name]), full_name
        with engine.gathered(["blocks.1"]), pytest.raises(GraphError, match=r"blocks\.2"):
            engine.model.blocks[2].up.weight.sum()
        for name, module in engine.model.named_modules():
            if not list(module.parameters()):
                with engine.gathered(name):  # nothing is below it
                    pass


def test_gathered_says_at_once_how_much_memory_a_module_needs(tmp_path: Path) -> None:
    with opened(tmp_path / "small") as engine:
        one_step(engine, tokens(1)[0])
        with pytest.raises(BudgetError, match=r"'blocks' are \d+ B of weights") as told, engine.gathered("blocks"):
            pass
        ((wanted, present),) = re.findall(r"give a gpu_memory of (\d+) B \(it is (\d+) B\)", str(told.value))
        one_step(engine, tokens(1)[0])
    with opened(tmp_path / "large", room=int(wanted) - int(present)) as engine:
        one_step(engine, tokens(1)[0])
        with engine.gathered("blocks"):
            assert engine.model.blocks[0].up.weight.sum().isfinite()


def test_tied_parameters_have_two_names(tmp_path: Path) -> None:
    with opened(tmp_path) as engine:
        one_step(engine, tokens(1)[0])
        with engine.gathered(["head.weight"]):
            assert engine.model.head.weight is engine.model.embedding.weight
            read = engine.model.head.weight.detach().clone()
        loss = next_token_loss(engine, tokens(1)[0])
        engine.backward(loss)
        assert torch.equal(engine.gradient("head.weight"), engine.gradient("embedding.weight"))
        engine.step()
        assert read.shape == (64, 96)


# --- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("update", "dtype"), [("step", torch.float32), ("forward", torch.bfloat16), ("speculative", torch.bfloat16)]
)
def test_gradients_are_those_of_autograd(update: str, dtype: torch.dtype, tmp_path: Path) -> None:
    plain, batches = tiny(dtype), tokens(2)
    for batch in batches:
        next_token_loss(plain, batch).backward()
    gpu, cpu = smallest_budgets(tiny(dtype), nvme=["unused"], update=update)
    with Engine(tiny(dtype), disk(tmp_path, gpu_memory=gpu, cpu_memory=cpu), update=update) as engine:
        with engine.no_sync():
            engine.backward(next_token_loss(engine, batches[0]))
        engine.backward(next_token_loss(engine, batches[1]))
        for name, parameter in plain.named_parameters():
            assert torch.equal(engine.gradient(name), parameter.grad.float()), name
        assert all(parameter.grad is None for parameter in engine.model.parameters())
        engine.step()


@pytest.mark.parametrize("is_frozen", [False, True])
def test_the_gradient_of_a_parameter_without_elements_has_none(tmp_path: Path, is_frozen: bool) -> None:
    model = tiny(blocks=1)
    model.embedding.requires_grad_(not is_frozen)
    model.blocks[0].none = model.none = torch.nn.Parameter(torch.empty(0, 3, dtype=torch.bfloat16))
    with Engine(model, disk(tmp_path), update="forward") as engine:
        with pytest.raises(ConfigError, match=r"none has no gradient: there was no backward"):
            engine.gradient("none")
        engine.backward(next_token_loss(engine, tokens(1)[0]) + engine.model.none.sum())
        for name in ("none", "blocks.0.none"):
            found = engine.gradient(name)
            assert (found.shape, found.dtype) == ((0, 3), torch.float32)
        with pytest.raises(ConfigError, match="no parameter 'other'"):
            engine.gradient("other")
        engine.step()


# --- evaluation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("update", "clip", "guard"),
    [("forward", 1.0, torch.no_grad), ("backward", None, torch.inference_mode),
     ("speculative", 1.0, torch.inference_mode)],
)  # fmt: skip
def test_evaluation_between_steps_changes_nothing(
    update: str, clip: float | None, guard: Callable[[], Any], tmp_path: Path
) -> None:
    batches = tokens(4)
    expected, evaluated = tiny(), []

    def look(model: nn.Module, run: Any) -> float:
        model.eval()
        with guard():
            loss = next_token_loss(run, batches[0]).item()
        model.train()
        return loss

    optimizer = torch.optim.AdamW(expected.parameters(), lr=1e-3, weight_decay=1e-2)
    losses = []
    for batch in batches:
        evaluated.append(look(expected, expected))
        loss = next_token_loss(expected, batch)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(expected.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item(), look(expected, expected)]
    found, looked = [], []
    with opened(tmp_path, update, clip) as engine:
        for batch in batches:
            looked.append(look(engine.model, engine))
            loss = next_token_loss(engine, batch)
            engine.backward(loss)
            engine.step()
            found += [loss.item(), look(engine.model, engine)]
    assert worst_difference(found, losses) < 1e-5
    assert worst_difference(looked, evaluated) < 1e-5


def test_hooks_of_the_optimizer_come_before_and_after_each_step(tmp_path: Path) -> None:
    seen: list[str] = []
    with opened(tmp_path, "step") as engine:
        engine.optimizer.register_step_pre_hook(lambda *_: seen.append(f"before {engine.step_count}"))
        engine.optimizer.register_step_post_hook(lambda *_: seen.append(f"after {engine.step_count}"))
        engine.on_step(lambda report: seen.append(f"in {report.step}"))
        first, second, third = tokens(3)
        engine.backward(next_token_loss(engine, first))
        engine.step()
        engine.backward(next_token_loss(engine, second))
        engine.optimizer.step()
        engine.train_step([third], lambda output: output.square().mean())
    assert seen == [text for n in range(3) for text in (f"before {n}", f"in {n + 1}", f"after {n + 1}")]


def test_a_wrapper_of_the_optimizers_step_need_not_return_anything(tmp_path: Path) -> None:
    """As the wrapper of a timer; but a wrapper has to call the step."""
    first, second = tokens(2)
    with opened(tmp_path, "step") as engine:
        step = engine.optimizer.step

        def timed() -> None:
            step()

        engine.optimizer.step = timed  # type: ignore[method-assign]
        engine.backward(next_token_loss(engine, first))
        assert engine.step().step == 1
        engine.optimizer.step = lambda: None  # type: ignore[method-assign]
        engine.backward(next_token_loss(engine, second))
        with pytest.raises(ConfigError, match=r"optimizer\.step was replaced by something that does not call it"):
            engine.step()
        engine.zero_grad()


@each_schedule
def test_the_model_itself_may_be_called_to_evaluate(update: str, clip: float | None, tmp_path: Path) -> None:
    """As `model.generate` does."""
    with opened(tmp_path, update, clip) as engine:
        one_step(engine, tokens(1)[0])
        with torch.no_grad():
            direct, through = engine.model(tokens(1)[0]), engine(tokens(1)[0])
            block = engine.model.blocks[1](torch.ones(1, 2, 96))
        assert torch.equal(direct, through)
        assert block.shape == (1, 2, 96)
        one_step(engine, tokens(1)[0])


@each_schedule
def test_evaluation_between_forward_and_backward(update: str, clip: float | None, tmp_path: Path) -> None:
    batches = tokens(3)
    expected = train_plain(tiny(), batches, max_grad_norm=clip)
    found = []
    with opened(tmp_path, update, clip) as engine:
        for batch in batches:
            loss = next_token_loss(engine, batch)
            with torch.no_grad():
                next_token_loss(engine, batches[0])
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
    assert worst_difference(found, expected.losses) < 1e-5


@each_schedule
def test_a_forward_without_backward_is_forgotten(update: str, clip: float | None, tmp_path: Path) -> None:
    batches = tokens(3)
    expected = train_plain(tiny(), batches, max_grad_norm=clip)
    found = []
    with opened(tmp_path, update, clip) as engine:
        for batch in batches:
            next_token_loss(engine, batches[0])
            found.append(one_step(engine, batch))
        next_token_loss(engine, batches[0])
    assert worst_difference(found, expected.losses) < 1e-5


@each_schedule
def test_an_error_in_forward_leaves_the_engine_in_order(update: str, clip: float | None, tmp_path: Path) -> None:
    batches = tokens(3)
    expected = train_plain(tiny(), batches, max_grad_norm=clip)
    found = []
    with opened(tmp_path, update, clip) as engine:
        for batch in batches:
            with pytest.raises(IndexError):
                engine(torch.full((1, 4), 10**6))
            found.append(one_step(engine, batch))
    assert worst_difference(found, expected.losses) < 1e-5


def test_a_step_needs_a_backward(tmp_path: Path) -> None:
    with opened(tmp_path) as engine:
        with pytest.raises(ConfigError, match="backward"):
            engine.step()
        one_step(engine, tokens(1)[0])
        with pytest.raises(ConfigError, match="backward"):
            engine.step()


# --- data, export, state_dict ---------------------------------------------------------------------------------------


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))


def test_data_comes_from_worker_processes(tmp_path: Path) -> None:
    def loader(workers: int) -> DataLoader[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        return DataLoader(Numbers(), 2, shuffle=True, num_workers=workers, generator=generator)

    with opened(tmp_path) as engine:
        found = [one_step(engine, batch) for _ in range(2) for batch in loader(2)]
    expected = train_plain(tiny(), [batch for _ in range(2) for batch in loader(0)])
    assert worst_difference(found, expected.losses) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exported_weights_are_those_that_compute(dtype: torch.dtype, tmp_path: Path) -> None:
    gpu, cpu = smallest_budgets(tiny(dtype), nvme=["unused"], update="forward")
    with Engine(tiny(dtype), disk(tmp_path, gpu_memory=gpu, cpu_memory=cpu), update="forward") as engine:
        for batch in tokens(3):
            one_step(engine, batch)
        engine.export(tmp_path / "out")
        with torch.no_grad():
            expected = engine(tokens(1)[0])
    tensors = {}
    for path in sorted((tmp_path / "out").glob("*.safetensors")):
        tensors |= safetensors.torch.load_file(path)
    model = tiny(dtype, seed=1)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert set(missing) <= {"head.weight", "embedding.weight"}
    assert all(value.dtype == dtype for value in tensors.values())
    assert torch.equal(model(tokens(1)[0]), expected)


@each_schedule_and_dtype
def test_loaded_weights_are_trained_on_from(
    update: str, clip: float | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    other = tiny(dtype, seed=1)
    gpu, cpu = smallest_budgets(tiny(dtype), nvme=["unused"], update=update)
    tiers = disk(tmp_path, gpu_memory=gpu, cpu_memory=cpu)
    with Engine(tiny(dtype), tiers, update=update, max_grad_norm=clip) as engine:
        one_step(engine, tokens(1)[0])
        engine.load_state_dict(other.state_dict())
        for name, value in engine.state_dict().items():
            assert torch.equal(value, other.state_dict()[name].float()), name
        assert one_step(engine, tokens(1)[0]) == pytest.approx(next_token_loss(other, tokens(1)[0]).item(), rel=1e-6)
        with pytest.raises(FormatError, match=r"norm\.weight"):
            engine.load_state_dict({name: v for name, v in other.state_dict().items() if name != "norm.weight"})
        one_step(engine, tokens(1)[0])


def test_what_is_loaded_as_bf16_is_kept_exactly_or_if_frozen_converted_as_torch_does(tmp_path: Path) -> None:
    model = tiny(torch.bfloat16)
    model.blocks[0].requires_grad_(False)
    halfway = {name: value.view(torch.int16).int() * 2**16 | 2**15 for name, value in model.state_dict().items()}
    given = {name: bits.view(torch.float32) for name, bits in halfway.items()}
    with Engine(model, disk(tmp_path)) as engine:
        engine.load_state_dict(given)
        for name, value in engine.state_dict().items():
            expected = given[name].bfloat16().float() if name.startswith("blocks.0.") else given[name]
            assert torch.equal(value, expected), name


# --- accumulation ---------------------------------------------------------------------------------------------------


class Branching(TinyModel):
    """Its first block runs only if `is_whole`."""

    is_whole = True

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.embedding(batch)
        for block in self.blocks if self.is_whole else self.blocks[1:]:
            x = block(x)
        return functional.linear(self.norm(x), self.head.weight)


@pytest.mark.parametrize(("update", "clip"), [*SCHEDULES, ("speculative", 1e-3), ("speculative", 1e3), ("step", 1.0)])
def test_a_block_that_only_the_first_micro_batch_reaches(update: str, clip: float | None, tmp_path: Path) -> None:
    def branching() -> Branching:
        torch.manual_seed(0)
        return Branching()

    def run(step: Callable[[Any, int], float]) -> list[float]:
        return [step(batch, position) for position, batch in enumerate(tokens(6))]

    plain = branching()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=1e-2)

    def plainly(batch: torch.Tensor, position: int) -> float:
        plain.is_whole = position % 2 == 0
        loss = next_token_loss(plain, batch)
        (loss / 2).backward()
        if position % 2:
            if clip is not None:
                nn.utils.clip_grad_norm_(plain.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    expected = run(plainly)
    with opened(tmp_path, update, clip, model=branching()) as engine:

        def by_engine(batch: torch.Tensor, position: int) -> float:
            engine.model.is_whole = position % 2 == 0
            if position % 2:
                loss = next_token_loss(engine, batch)
                engine.backward(loss / 2)
                engine.step()
            else:
                with engine.no_sync():
                    loss = next_token_loss(engine, batch)
                    engine.backward(loss / 2)
            return loss.item()

        found = run(by_engine)
    assert worst_difference(found, expected) < 1e-5


def test_a_relative_directory_is_that_of_the_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process may change to a directory in which another run has a store of the same name."""
    for name in "ab":
        (tmp_path / name / "run").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a")
    with Engine(tiny(), disk(Path("run"), gpu_memory="4MiB", cpu_memory="4MiB"), update="forward") as engine:
        for step, batch in enumerate(tokens(3)):
            engine.backward(next_token_loss(engine, batch))
            engine.step()
            if step == 0:
                monkeypatch.chdir(tmp_path / "b")
    assert not list((tmp_path / "b" / "run").iterdir())
    tiers = disk(tmp_path / "a" / "run", gpu_memory="4MiB", cpu_memory="4MiB")
    with Engine(tiny(), tiers, update="forward", resume="must") as engine:
        assert engine.step_count == 3


def test_what_is_unpacked_keeps_its_group_and_what_is_saved_does_not(tmp_path: Path) -> None:
    with opened(tmp_path) as engine, engine.gathered("norm"):
        group, spec = engine._parts.groups.locate("norm.weight")
        hooks, parameter = engine._parts.hooks, engine.model.get_parameter(spec.name)
        packed = [hooks._pack(parameter), hooks._pack(parameter.view(-1, 1))]
        assert (group.saved_views(), group.is_viewed()) == (2, False)
        unpacked = hooks._unpack(packed[1])
        assert torch.equal(unpacked.flatten(), parameter)
        assert (group.saved_views(), group.is_viewed()) == (2, True)
        del unpacked
        assert not group.is_viewed()
        hooks.step_ended()
        with pytest.raises(GraphError, match="as they were before"):  # the error keeps its frames
            hooks._unpack(packed[1])
        assert (group.saved_views(), group.is_viewed()) == (2, False)
        packed.clear()
        assert group.saved_views() == 0
