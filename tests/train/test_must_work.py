"""Models that do more than call one block after another: the same losses as plain torch, under two schedules.

Not here: the other of the two schedules of each model, on a device whose kernels are late (`test_stream_order.py`).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import Run, disk, smallest_budgets, train, train_plain, worst_difference
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tierstore.errors import BudgetError

STEPS = 3
WIDTH = 16
SCHEDULES = [("forward", 1.0), ("backward", None), ("speculative", 0.1)]

pytestmark = pytest.mark.usefixtures("no_leaks", "one_thread")


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resets WIDTH in a worker that has imported `zero_models.py`, which makes it larger."""
    monkeypatch.setitem(globals(), "WIDTH", 16)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = WIDTH  # read here, not at import: `zero_models.py` makes it larger
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(functional.relu(self.up(self.norm(x)))))


class Stack(nn.Module):
    """An entry, layers and a head; subclasses change the layers, or what happens between them."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class CalledTwice(Stack):
    def forward(self, x: torch.Tensor) -> Any:
        x = self.enter(self.enter(x))
        for layer in [*self.layers, self.layers[0], self.layers[2], self.layers[2]]:
            x = layer(x)
        return self.head(x)


class Checkpointed(Stack):
    reentrant = False

    def forward(self, x: torch.Tensor) -> Any:
        x = self.enter(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(x)


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class CheckpointedTwice(Stack):
    """A layer in two reentrant checkpoints: its gradients arrive twice."""

    def forward(self, x: torch.Tensor) -> Any:
        x = self.enter(x)
        for layer in [*self.layers, self.layers[1]]:
            x = checkpoint(layer, x, use_reentrant=True)
        return self.head(x)


class CheckpointedInPairs(Stack):
    """Several groups are recomputed together."""

    def forward(self, x: torch.Tensor) -> Any:
        x = self.enter(x)
        for reentrant, pair in ((True, self.layers[:2]), (False, self.layers[2:])):
            x = checkpoint(nn.Sequential(*pair), x, use_reentrant=reentrant)
        return self.head(x)


class InParts(Stack):
    """Calls the modules inside of the layers, never the layers themselves; some of these calls are recomputed."""

    def forward(self, x: torch.Tensor) -> Any:
        x = self.enter(x)
        for number, layer in enumerate(self.layers):
            inner = nn.Sequential(layer.norm, layer.up, nn.ReLU())
            h = inner(x) if number == 1 else checkpoint(inner, x, use_reentrant=number > 1)
            x = x + layer.down(h)
        return self.head(x)


class RecomputedInParts(Layer):
    reentrant = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = checkpoint(lambda x: functional.relu(self.up(self.norm(x))), x, use_reentrant=self.reentrant)
        return x + self.dropout(self.down(h))


class LayersRecomputeParts(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(RecomputedInParts() for _ in range(4))
        self.layers[1].reentrant = self.layers[3].reentrant = False  # type: ignore[assignment]


class CallsOthers(Layer):
    others: tuple[nn.Module, ...] = ()

    def forward(self, x: torch.Tensor, rest: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> torch.Tensor:
        for other in self.others:
            x = x + other(x)[..., :WIDTH]
        return rest(super().forward(x)) + self.norm.bias


class InOneAnother(Stack):
    """Layers that call modules of other groups and one another, and read their own weights again afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CallsOthers() for _ in range(4))
        self.extra = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(3))
        for layer in self.layers:
            layer.others = tuple(self.extra)  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> Any:
        def run(number: int, x: torch.Tensor) -> torch.Tensor:
            rest = [lambda x: run(number + 1, x)] if number < 3 else []
            return self.layers[number](x, *rest)

        return self.head(run(0, self.enter(x)))


class InPlace(Stack):
    def forward(self, x: torch.Tensor) -> Any:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
            x.mul_(0.5)
            x.add_(1.0).relu_()
        return self.head(x)


class WithDict(Layer):
    def forward(self, given: Any) -> Any:
        return {"x": super().forward(given["x"]), "seen": [*given["seen"], given["x"].mean()]}


class Dictionaries(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(WithDict() for _ in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        found = {"x": self.enter(x), "seen": []}
        for layer in self.layers:
            found = layer(found)
        return self.head(found["x"]) + torch.stack(found["seen"]).sum()


class ReadElsewhere(Stack):
    """A layer's weights used by another module, and by the model itself."""

    def forward(self, x: torch.Tensor) -> Any:
        x = functional.linear(self.enter(x), self.layers[3].up.weight)[..., :WIDTH]
        for layer in self.layers:
            x = layer(x)
        x = x * self.layers[1].norm.weight + self.layers[0].down.bias
        return functional.linear(x, self.enter.weight[:3]) + self.head(x)


class Copies(Stack):
    """Copies a layer in forward, before the engine has fetched its weights."""

    def forward(self, x: torch.Tensor) -> Any:
        copied = copy.deepcopy(self.layers[2])
        return super().forward(x) + self.head(copied(self.enter(x)))


class OwnParameters(Stack):
    """Parameters of the model itself, and layers in nested containers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.shift = nn.ParameterList(nn.Parameter(torch.zeros(WIDTH)) for _ in range(2))
        self.inner = nn.Sequential(nn.Sequential(Layer(), nn.Linear(WIDTH, WIDTH)), Layer())

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(self.inner(x * self.scale) + self.shift[0] + self.shift[1])


class Late(Stack):
    """Uses some parameters of every layer before it calls the first one, so that their gradients are complete last."""

    def __init__(self) -> None:
        super().__init__(layers=8)

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = functional.layer_norm(x + layer.down.bias, (WIDTH,), layer.norm.weight)
        return super().forward(x)


class Buffers(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("factor", torch.tensor(0.5), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        x = self.enter(x)
        for layer, norm in zip(self.layers, self.norms):
            x = layer(norm(functional.relu(x)) * self.factor)
        return self.head(x)


class Lora(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + functional.linear(functional.linear(x, self.a), self.b)


class Adapted(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for layer in self.layers:
            layer.up, layer.down = Lora(layer.up), Lora(layer.down)


class FirstFrozen(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.enter.requires_grad_(False)
        self.layers[0].requires_grad_(False)


class SomeFrozen(Stack):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.up.weight.requires_grad_(False)
        self.layers[2].requires_grad_(False)


class Skipping(Stack):
    """Which layers run depends on the batch."""

    def forward(self, x: torch.Tensor) -> Any:
        chosen = int(x.detach().abs().sum() * 1000) % 4
        x = self.enter(x)
        for position, layer in enumerate(self.layers):
            if position != chosen:
                x = layer(x)
        return self.head(x)


class Mixture(Stack):
    """Blocks with a gate, which every batch uses, and a list of experts, of which each batch uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.layer() for _ in range(2))

    @staticmethod
    def layer() -> nn.ModuleDict:
        experts = nn.ModuleList(Layer() for _ in range(4))
        return nn.ModuleDict({"gate": nn.Linear(WIDTH, 4), "experts": experts})

    def forward(self, x: torch.Tensor) -> Any:
        x = self.enter(x)
        for layer in self.layers:
            scores = layer["gate"](x).softmax(-1)
            chosen = scores.argmax(-1)
            out = torch.zeros_like(x)
            for index in chosen.unique().tolist()[:2]:
                mask = chosen == index
                out[mask] = layer["experts"][index](x[mask]) * scores[mask][:, index : index + 1]
            x = x + out
        return self.head(x)


class Growing(Stack):
    """Every call uses one part more of each block than the call before; no call uses the last part."""

    recomputes = False

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList(Layer() for _ in range(STEPS + 1)) for _ in range(3))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        x = self.enter(x)
        for block in self.layers:
            for part in block[: self.calls]:
                x = checkpoint(part, x, use_reentrant=True) if self.recomputes else part(x)
        return self.head(x)


class GrowingRecomputed(Growing):
    recomputes = True


class Tied(Stack):
    """One parameter under two names in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3].down.weight = self.layers[0].down.weight
        self.layers[2] = self.layers[1]


class Unusual(Stack):
    """Saves a sparse tensor for backward, and gets gradients with torch's negative bit set, because of a conjugate."""

    def __init__(self) -> None:
        super().__init__()
        self.real, self.imaginary = nn.Parameter(torch.tensor(0.8)), nn.Parameter(torch.tensor(0.3))

    def forward(self, x: torch.Tensor) -> Any:
        rows = torch.eye(len(x), device=x.device).roll(1, 0).to_sparse()
        x = torch.sparse.mm(rows, self.enter(x))
        x = x + (torch.complex(self.real, self.imaginary).conj() * torch.fft.fft(x)).imag
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class WeightsInSparse(Stack):
    """Saves sparse tensors whose values are weights; the weights' storage does not count compressed ones as uses."""

    is_compressed = False

    def forward(self, x: torch.Tensor) -> Any:
        x, places, size = self.enter(x), torch.arange(WIDTH, device=x.device), (WIDTH, WIDTH)
        for layer in self.layers:
            weight = layer.norm.weight
            if self.is_compressed:
                starts = torch.arange(WIDTH + 1, device=x.device)
                scales = torch.sparse_csr_tensor(starts, places, weight, size, check_invariants=False)
            else:
                both = torch.stack([places, places])
                scales = torch.sparse_coo_tensor(both, weight, size, check_invariants=False)
            x = layer(x) + torch.sparse.mm(scales, x.t()).t()
        return self.head(x)


class WeightsInCompressedSparse(WeightsInSparse):
    is_compressed = True


MODELS = [
    Stack, CalledTwice, Checkpointed, CheckpointedReentrant, CheckpointedTwice, CheckpointedInPairs, InPlace, InParts,
    LayersRecomputeParts, Dictionaries, ReadElsewhere, Copies, OwnParameters, Buffers, Adapted, FirstFrozen,
    SomeFrozen, Skipping, Mixture, Growing, Late, Tied,
]  # fmt: skip
LATE = list(zip(MODELS, itertools.cycle(SCHEDULES)))
"""These are compared on a device whose kernels are late, in `test_stream_order.py`."""
OTHERS = list(zip(MODELS, itertools.cycle(SCHEDULES[1:] + SCHEDULES[:1])))
IN_ONE_PIECE = (
    Stack, Checkpointed, CheckpointedReentrant, InPlace, LayersRecomputeParts, Dictionaries, Copies, Buffers,
)  # fmt: skip
"""Each group of these gets all its gradients at once, in the graph's order: where it is updated does not matter."""
IN_PART = (Skipping, Mixture, Growing, GrowingRecomputed, Late, Tied)
"""Run under the third schedule, too: some of their groups are complete later than others, or never."""


def make(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def batches(steps: int = STEPS) -> list[Any]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(8, WIDTH, generator=generator), torch.randint(0, 3, (8,), generator=generator))
        for _ in range(steps)
    ]


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    inputs, labels = batch
    # Reentrant checkpointing needs an input with a gradient.
    return functional.cross_entropy(model(inputs.clone().requires_grad_()).float(), labels)


def compare(
    kind: Callable[[], nn.Module], update: str, clip: float | None, tmp_path: Path, room: int = 2, device: str = "cpu",
    **options: Any,
) -> Run:  # fmt: skip
    """Train by the engine and in plain torch, and compare; the device has the smallest budget + `room` times 4 KiB."""
    steps = [tuple(one.to(device) for one in batch) for batch in batches(options.pop("steps", STEPS))]
    accumulate = options.get("accumulate", 1)
    expected = train_plain(make(kind).to(device), steps, loss_of, max_grad_norm=clip, accumulate=accumulate)
    model = make(kind)
    gpu, cpu = smallest_budgets(model, nvme=["unused"], update=update, device=device)
    tiers = disk(tmp_path, gpu_memory=gpu + room * 4096, cpu_memory=cpu, device=device)
    found = train(model, steps, tiers, loss_of, update=update, max_grad_norm=clip, **options)
    assert worst_difference(found.losses, expected.losses) < 1e-5
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    assert found.moved["h2d"] > weight_bytes * 2  # groups came and went
    assert found.reports[-1].peak_bytes["gpu"] <= tiers.gpu_memory
    assert found.reports[-1].peak_bytes["cpu"] <= tiers.cpu_memory
    for name, value in expected.weights.items():
        if "running" in name or not value.is_floating_point():
            torch.testing.assert_close(found.weights[name], value.cpu())
    return found


@pytest.mark.parametrize(
    ("kind", "way"),
    OTHERS + [way for way in itertools.product(IN_PART, SCHEDULES) if way not in LATE + OTHERS],
)
def test_losses_are_those_of_plain_torch(kind: type[nn.Module], way: tuple[str, float | None], tmp_path: Path) -> None:
    compare(kind, *way, tmp_path)


@pytest.mark.parametrize("update", ["forward", "backward"])
def test_sparse_tensors_and_gradients_of_a_conjugate(update: str, tmp_path: Path) -> None:
    compare(Unusual, update, None, tmp_path)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("kind", [WeightsInSparse, WeightsInCompressedSparse])
def test_weights_in_a_sparse_tensor_stay_until_backward(kind: type[nn.Module], tmp_path: Path) -> None:
    compare(kind, "forward", 1.0, tmp_path / "enough", room=4)
    with pytest.raises(BudgetError, match="stays there because somebody holds a view of its weights"):
        compare(kind, "forward", 1.0, tmp_path / "little", room=1)


@pytest.mark.parametrize(("update", "clip"), SCHEDULES)
def test_blocks_that_call_others_need_no_more_than_the_smallest_budgets(
    update: str, clip: float | None, tmp_path: Path
) -> None:
    compare(InOneAnother, update, clip, tmp_path, room=0)


@pytest.mark.parametrize(
    "kind",
    [
        CalledTwice, Checkpointed, CheckpointedTwice, CheckpointedInPairs, InPlace, LayersRecomputeParts, ReadElsewhere,
        OwnParameters, Buffers, SomeFrozen, Skipping, Mixture, Late, Tied,
    ],
)  # fmt: skip
def test_micro_batches_side_by_side_give_the_same_losses(kind: type[nn.Module], tmp_path: Path) -> None:
    def make_model() -> nn.Module:
        model = kind()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0  # its random numbers would come in another order
        return model

    compare(make_model, "forward", 1.0, tmp_path, steps=6, accumulate=2, is_vertical=True)
