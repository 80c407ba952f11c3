"""Models that an engine or a store cannot take are refused by name, before anything is changed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from resuming import Way, opened
from runs import TinyModel, tiny
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tierstore.errors import ConfigError
from tierstore.garbage import no_garbage_collection
from tierstore.train.filling import Piece, weights_of

WAY = Way()

pytestmark = pytest.mark.usefixtures("no_leaks", "one_thread")


def refused(model: nn.Module, folder: Path, said: str) -> None:
    """The engine refuses the model before it makes a directory, and leaves all weights as they are."""
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(ConfigError, match=said), opened(WAY, folder, model=model):
        pass
    assert not any(folder.iterdir())
    assert all(torch.equal(parameter, old) for parameter, old in zip(model.parameters(), before))


class TestSharedMemory:
    def test_of_two_parameters_is_refused(self, tmp_path: Path) -> None:
        model = tiny(blocks=2)
        first, second = model.blocks[0].up, model.blocks[1].up
        second.weight.data = first.weight.data
        refused(model, tmp_path, r"blocks\.0\.up\.weight and parameter blocks\.1\.up\.weight .* the same memory")

    def test_of_parts_of_two_parameters_is_refused(self, tmp_path: Path) -> None:
        model, memory = nn.Linear(4, 4), torch.randn(19)
        model.weight.data, model.bias.data = memory[:16].view(4, 4), memory[15:]
        refused(model, tmp_path, "parameter weight and parameter bias")

    def test_of_a_buffer_and_a_parameter_is_refused(self, tmp_path: Path) -> None:
        model = tiny()
        model.register_buffer("seen", model.head.weight.detach()[3], persistent=False)
        refused(model, tmp_path, "parameter embedding.weight and buffer seen")

    def test_of_neighbours_in_one_storage_is_fine(self, tmp_path: Path) -> None:
        model, memory = nn.Linear(4, 4), torch.randn(24)
        model.weight.data, model.bias.data = memory[:16].view(4, 4), memory[16:20]
        model.register_buffer("last", memory[20:])
        model.register_buffer("also_last", memory[22:])  # two buffers may share
        with opened(WAY, tmp_path, model=model) as run:
            assert torch.equal(run.engine.state_dict()["bias"], memory[16:20])


class Scripted(TinyModel):
    def __init__(self) -> None:
        super().__init__(blocks=1)
        self.norm = torch.jit.script(nn.LayerNorm(96))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning", "ignore:.torch.jit:FutureWarning")
def test_a_scripted_block_is_refused(tmp_path: Path) -> None:
    refused(Scripted(), tmp_path, "module norm went through torch.jit")


def test_a_lazy_module_is_refused_until_it_has_weights(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4))
    with pytest.raises(ConfigError, match=r"parameter 1\.weight has no shape yet"), opened(WAY, tmp_path, model=model):
        pass
    assert not any(tmp_path.iterdir())
    with torch.no_grad():
        model(torch.ones(1, 4))
    with opened(WAY, tmp_path, model=model):
        pass


@pytest.mark.parametrize("make", [nn.Identity, lambda: nn.ParameterList([torch.zeros(0, 3)])], ids=["none", "empty"])
def test_a_model_without_parameters_is_refused(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    refused(make(), tmp_path, "the model has no parameters")


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_model_that_another_engine_has_taken_is_refused(is_closed: bool, tmp_path: Path) -> None:
    said = (
        r"parameter embedding\.weight of the model belongs to another engine, perhaps a closed one: a module, shared "
        "or not, belongs to one engine; build it anew"
    )
    with opened(WAY, tmp_path / "first") as run:
        if is_closed:
            run.until(1)
            run.engine.close()
        with pytest.raises(ConfigError, match=said), opened(WAY, tmp_path / "other", model=run.engine.model):
            pass
        shared = nn.Sequential(nn.Linear(4, 4), run.engine.model.get_submodule("norm"))
        with pytest.raises(ConfigError, match=r"parameter 1\.weight of"), opened(WAY, tmp_path / "other", model=shared):
            pass
        if not is_closed:
            run.until(2)
    if is_closed:  # also when the weights come from the store
        with pytest.raises(ConfigError, match=said), opened(WAY, tmp_path / "first", model=run.engine.model):
            pass
        with opened(WAY, tmp_path / "first") as run:
            assert run.engine.step_count == 1


def test_a_meta_model_without_a_source_is_refused(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = WAY.model()
    said = "parameter embedding.weight holds no values .* `initialize`"
    with pytest.raises(ConfigError, match=said), opened(WAY, tmp_path, model=model):
        pass


class OfModule:
    """A source that a user wrote: the parameters of a module."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def names(self) -> set[str]:
        return {name for name, _ in self._model.named_parameters()}

    def stream(self) -> Iterator[Piece]:
        return weights_of(self._model)


@pytest.mark.parametrize("is_own", [True, False])
def test_a_module_is_a_source(is_own: bool, tmp_path: Path) -> None:
    """Also the trained model itself, whose memory is released while the source is read. One parameter is a scalar."""

    def make() -> nn.Module:
        model = WAY.model()
        model.register_parameter("temperature", nn.Parameter(torch.tensor(2.5)))
        return model

    model = make()
    expected = {name: weight.clone() for name, weight in model.state_dict().items()}
    source = OfModule(model)
    if not is_own:
        with torch.device("meta"):
            model = make()
    with opened(WAY, tmp_path, model=model, initialize=source) as run:
        state = run.engine.state_dict()
    assert all(torch.equal(state[name], weight) for name, weight in expected.items())


class Pair(nn.Module):
    def __init__(self, names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(16, 16))


def test_modules_in_another_order_are_said_to_be_so(tmp_path: Path) -> None:
    with opened(WAY, tmp_path, model=Pair("ab")):
        pass
    said = r"parameters are registered in another order, a\.weight before b\.weight, which is after it here"
    with pytest.raises(ConfigError, match=said), opened(WAY, tmp_path, model=Pair("ba")):
        pass


@pytest.fixture
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of one rank."""
    meeting = tmp_path_factory.mktemp("meeting") / "point"
    with no_garbage_collection():
        distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
        yield
        distributed.destroy_process_group()
        gc.collect(0)  # DDP is a cycle of objects: if a fork collected it, the end of its group would hang


@pytest.mark.usefixtures("alone")
class TestAModelThatTorchDistributes:
    @pytest.mark.parametrize("inside", [False, True])
    def test_by_ddp(self, inside: bool, tmp_path: Path) -> None:
        model: nn.Module = DistributedDataParallel(tiny())
        refused(nn.Sequential(model) if inside else model, tmp_path, "DDP averages the gradients .* it was made of")

    def test_by_fully_shard(self, tmp_path: Path) -> None:
        model = tiny()
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        refused(model, tmp_path, r"parameter embedding\.weight is a DTensor, .* the engine shards it itself")
