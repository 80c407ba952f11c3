"""PrefetchingLoader: order, nesting, errors at their batch, and the position of a killed and resumed run."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import random
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
)

from tierstore.errors import ConfigError
from tierstore.pack import tree
from tierstore.train import loading
from tierstore.train.capture import plain, random_states, restore_random_states, with_tensors
from tierstore.train.loading import PrefetchingLoader

pytestmark = pytest.mark.usefixtures("no_leaks")

Pair = namedtuple("Pair", "inputs targets")


class Numbers(Dataset[torch.Tensor]):
    """Sample i is the number i; `noisy` ones add a random number of the process that makes them."""

    def __init__(self, count: int, noisy: bool = False) -> None:
        self.count = count
        self.noisy = noisy

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.rand(()) + random.random() if self.noisy else 0.0
        return torch.tensor(float(index)) + noise


class Stream:
    """An iterable that knows its position, which is one past the batch that it gave last."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.state = {"next": 0}
        self.asked = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.state["next"] < self.count:
            self.state["next"] += 1
            self.asked += 1
            yield torch.tensor(float(self.state["next"] - 1))
        self.state["next"] = 0

    def state_dict(self) -> dict[str, int]:
        return self.state  # not a copy

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state.update(state)


class Letters(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(10.0))


class Shuffling(Stream):
    """Draws random numbers when it goes on at a position, as one that makes an iterator there."""

    def load_state_dict(self, state: dict[str, int]) -> None:
        torch.rand(())
        super().load_state_dict(state)


class WithWorkers(Shuffling):
    """Draws the seed of its workers when a pass begins or goes on; they make the batches."""

    num_workers = 1

    def __iter__(self) -> Iterator[torch.Tensor]:
        torch.rand(())
        return super().__iter__()


class Turning(Sampler[int]):
    """Its state is the direction of the next pass."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.step = 1

    def __iter__(self) -> Iterator[int]:
        step, self.step = self.step, -self.step
        return iter(range(self.count)[::step])

    def __len__(self) -> int:
        return self.count

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class Counting(Sampler[int]):
    """Its state is how many it has given in its pass: all of them at the end."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.given = self.first = 0

    def __iter__(self) -> Iterator[int]:
        self.given, self.first = self.first, 0
        while self.given < self.count:
            self.given += 1
            yield self.given - 1

    def __len__(self) -> int:
        return self.count

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["given"]


LOADERS: dict[str, Callable[[], Any]] = {
    "list": lambda: [torch.tensor(float(index)) for index in range(7)],
    "stream": lambda: Stream(7),
    "stream that draws": lambda: Shuffling(7),
    "stream with workers": lambda: WithWorkers(7),
    "in order": lambda: DataLoader(Numbers(14), batch_size=2),
    "shuffled": lambda: DataLoader(Numbers(14), batch_size=2, shuffle=True),
    "shuffled by a generator": lambda: DataLoader(
        Numbers(14), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "sampler with a generator": lambda: DataLoader(
        Numbers(14), batch_size=2, sampler=RandomSampler(Numbers(14), generator=torch.Generator().manual_seed(3))
    ),
    "sampler with a state": lambda: DataLoader(Numbers(14), batch_size=2, sampler=Turning(14)),
    "noisy": lambda: DataLoader(Numbers(14, noisy=True), batch_size=2, shuffle=True),
    "iterable": lambda: DataLoader(Letters(), batch_size=2),
}


def trained(loader: PrefetchingLoader[Any], steps: int, passes: int = 9) -> tuple[list[Any], dict[str, Any]]:
    """Batches and random numbers of some steps, and what a generation holds after the last of them."""
    seen: list[Any] = []
    for _ in range(passes):
        for batch in loader:
            seen.append((batch.tolist(), torch.rand(()).item(), random.random()))  # dropout, say
            if len(seen) == steps:
                return seen, {"data": loader.state_dict(), "random": random_states()}
    raise AssertionError("too few batches")


def stored(state: dict[str, Any]) -> dict[str, Any]:
    """As it comes back from a manifest."""
    return with_tensors(tree.decode(*tree.encode(plain(state), "state")))


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("killed_after", [1, 3, 6, 7, 8, 15])
def test_a_resumed_run_sees_what_the_killed_one_has_not(kind: str, killed_after: int) -> None:
    torch.manual_seed(1)
    random.seed(1)
    expected, _ = trained(PrefetchingLoader(LOADERS[kind]()), 20)
    torch.manual_seed(1)
    random.seed(1)
    before, state = trained(PrefetchingLoader(LOADERS[kind]()), killed_after)
    torch.manual_seed(99)  # another process
    random.seed(99)
    resumed = PrefetchingLoader(LOADERS[kind]())
    resumed.load_state_dict(stored(state["data"]))
    restore_random_states(state["random"])
    resumed.load_state_dict(stored(state["data"]))  # also after the engine was made, by engine.register()
    after, _ = trained(resumed, 20 - killed_after)
    assert before + after == expected


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("passes", [0, 1, 2])
def test_a_run_resumed_between_passes(kind: str, passes: int) -> None:
    """As where the last batches of a pass are stepped after its end."""
    torch.manual_seed(1)
    random.seed(1)
    loader = PrefetchingLoader(LOADERS[kind]())
    for _ in range(passes):
        assert len(list(loader)) in (5, 7)
    position, states = stored(loader.state_dict()), random_states()
    expected, _ = trained(loader, 10)
    resumed = PrefetchingLoader(LOADERS[kind]())
    for _ in range(2):  # also after the engine was made, by engine.register()
        resumed.load_state_dict(position)
        restore_random_states(states)
    assert trained(resumed, 10)[0] == expected


def test_a_position_between_passes_over_a_sampler_that_is_at_its_end_is_before_a_whole_pass() -> None:
    def make() -> PrefetchingLoader[torch.Tensor]:
        return PrefetchingLoader(DataLoader(Numbers(6), batch_size=2, sampler=Counting(6)))

    torch.manual_seed(1)
    loader = make()
    assert len(list(loader)) == 3
    position, states = loader.state_dict(), random_states()
    expected, _ = trained(loader, 5)
    resumed = make()
    resumed.load_state_dict(position)
    restore_random_states(states)
    assert trained(resumed, 5)[0] == expected


@pytest.mark.parametrize("killed_after", [2, 7])
def test_with_workers(killed_after: int) -> None:
    def make() -> PrefetchingLoader[torch.Tensor]:
        return PrefetchingLoader(DataLoader(Numbers(14, noisy=True), batch_size=2, shuffle=True, num_workers=2))

    torch.manual_seed(1)
    expected, _ = trained(make(), 9)
    torch.manual_seed(1)
    before, state = trained(make(), killed_after)
    torch.manual_seed(99)
    resumed = make()
    resumed.load_state_dict(stored(state["data"]))
    restore_random_states(state["random"])
    after, _ = trained(resumed, 9 - killed_after)
    assert [batch for batch, _, _ in before + after] == [batch for batch, _, _ in expected]
    assert [number for _, number, _ in before + after] == [number for _, number, _ in expected]


@settings(max_examples=30)
@given(st.sampled_from(sorted(LOADERS)), st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_killed_again_and_again(kind: str, runs: list[int]) -> None:
    torch.manual_seed(1)
    random.seed(1)
    expected, _ = trained(PrefetchingLoader(LOADERS[kind]()), sum(runs))
    torch.manual_seed(1)
    random.seed(1)
    seen: list[Any] = []
    state: dict[str, Any] | None = None
    for steps in runs:
        loader = PrefetchingLoader(LOADERS[kind]())
        if state is not None:
            loader.load_state_dict(state["data"])
            restore_random_states(state["random"])
        more, state = trained(loader, steps)
        seen += more
    assert seen == expected


@pytest.mark.parametrize("kind", LOADERS)
def test_the_same_batches_as_without_it(kind: str) -> None:
    if kind == "noisy":
        pytest.skip("its numbers are drawn one batch earlier")
    torch.manual_seed(1)
    expected = [batch.tolist() for source in [LOADERS[kind]()] for _ in range(2) for batch in source]
    torch.manual_seed(1)
    loader = PrefetchingLoader(LOADERS[kind]())
    assert [batch.tolist() for _ in range(2) for batch in loader] == expected


def test_one_batch_is_taken_ahead() -> None:
    stream = Stream(5)
    loader = PrefetchingLoader(stream)
    batches = iter(loader)
    assert stream.asked == 0  # nothing before the first is asked for
    next(batches)
    assert (stream.asked, stream.state["next"]) == (2, 2)
    assert loader.state_dict()["source"] == {"next": 1}
    loader.close()


def test_a_stream_that_is_broken_off_loses_nothing() -> None:
    loader = PrefetchingLoader(Stream(4))
    seen = []
    while len(seen) < 4:
        for batch in loader:
            seen.append(batch.item())
            break
    assert seen == [0, 1, 2, 3]


def test_a_counted_pass_that_is_broken_off_begins_anew() -> None:
    loader = PrefetchingLoader([torch.tensor(0.0), torch.tensor(1.0)])
    assert [next(iter(loader)).item() for _ in range(2)] == [0, 0]


def test_a_pass_that_another_one_ends_says_so() -> None:
    """As where a loop evaluates over the loader that it trains with: the rest of the epoch would be missing."""
    loader = PrefetchingLoader([torch.tensor(float(number)) for number in range(3)])
    outer, seen = iter(loader), []
    seen.append(next(outer).item())
    assert [batch.item() for batch in loader] == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(ConfigError, match="another pass over this PrefetchingLoader has begun, which ended this"):
            next(outer)
    whole = iter(loader)
    assert len(list(whole)) == 3
    later = iter(loader)
    assert next(whole, None) is None  # it had ended by itself
    seen = []
    for batch in loader:  # an evaluation after the last batch of an epoch loses none
        seen.append(batch.item())
        if len(seen) == 3:
            assert len(list(loader)) == 3
    assert seen == [0, 1, 2]
    with pytest.raises(ConfigError, match="another pass"):
        list(zip(loader, loader, strict=True))
    later = iter(loader)
    assert next(later) == 0
    loader.close()
    assert next(later, None) is None


@pytest.mark.parametrize("bad", [0, 1, 3])
def test_an_error_is_raised_at_its_batch(bad: int) -> None:
    def make() -> Iterator[int]:
        for index in range(4):
            if index == bad:
                raise ValueError(f"sample {index} is damaged")
            yield index

    batches = iter(PrefetchingLoader(make()))
    assert [next(batches) for _ in range(bad)] == list(range(bad))
    with pytest.raises(ValueError, match=f"sample {bad} is damaged"):
        next(batches)


def test_a_batch_that_was_not_handed_out_is_not_counted() -> None:
    """Ctrl-C while the batch after it is being read."""

    class Interrupted(list[int]):
        def __iter__(self) -> Iterator[int]:
            yield from (0, 1)
            raise KeyboardInterrupt

    seen: list[int] = []
    loader = PrefetchingLoader(Interrupted())
    with contextlib.suppress(KeyboardInterrupt):
        seen.extend(loader)
    resumed = PrefetchingLoader([0, 1, 2, 3])
    resumed.load_state_dict(loader.state_dict())
    assert seen + list(resumed) == [0, 1, 2, 3]


def interrupt(loader: PrefetchingLoader[Any], at: int) -> None:
    """Begin a pass in which Ctrl-C comes while batch `at` is read, before any is handed out."""
    countdown = iter([False] * at + [True])

    def interrupts(source: Iterator[Any]) -> Iterator[Any]:
        for batch in source:
            if next(countdown, False):
                raise KeyboardInterrupt
            yield batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "iter", lambda source: interrupts(iter(source)), raising=False)
        with pytest.raises(KeyboardInterrupt):
            next(iter(loader))


@pytest.mark.parametrize(
    ("kind", "interrupted_at"),
    [*itertools.product(["list", "shuffled", "noisy"], range(5)), *itertools.product(["stream"], range(2))],
)
def test_a_position_is_kept_until_a_batch_is_handed_out(kind: str, interrupted_at: int) -> None:
    """Ctrl-C while the batches before it are skipped, or while the first ones are read."""
    torch.manual_seed(1)
    random.seed(1)
    expected, _ = trained(PrefetchingLoader(LOADERS[kind]()), 6)
    torch.manual_seed(1)
    random.seed(1)
    _, state = trained(PrefetchingLoader(LOADERS[kind]()), 3)
    resumed = PrefetchingLoader(LOADERS[kind]())
    resumed.load_state_dict(stored(state["data"]))
    restore_random_states(state["random"])
    interrupt(resumed, interrupted_at)
    restore_random_states(state["random"])
    found, _ = trained(resumed, 3)
    assert found == expected[3:]


@pytest.mark.parametrize("interrupted_at", [0, 1])
def test_a_pass_that_fails_to_begin_is_begun_again(interrupted_at: int) -> None:
    """From a position between passes, where the random numbers of the pass are still to be drawn."""
    torch.manual_seed(1)
    loader = PrefetchingLoader(LOADERS["shuffled"]())
    list(loader)
    position, begin = loader.state_dict(), random_states()
    expected, _ = trained(loader, 3)
    resumed = PrefetchingLoader(LOADERS["shuffled"]())
    resumed.load_state_dict(position)
    interrupt(resumed, interrupted_at)
    restore_random_states(begin)
    found, _ = trained(resumed, 3)
    assert found == expected


@pytest.mark.parametrize("before", ["nothing", "a pass", "a break", "a position", "an interrupt"])
@pytest.mark.parametrize("fails", ["0", "1", "moving"])
def test_a_loader_with_a_state_loses_no_batch_when_a_pass_ends_before_its_first(
    fails: str, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Ctrl-C in the loader, at the first batch or at the one after it, or by an error in moving the first."""
    stream = Stream(4)
    loader = PrefetchingLoader(stream)

    begin = {"a break": 1, "a position": 2}.get(before, 0)
    if before == "a pass":
        assert len(list(loader)) == 4
    elif before == "a break":
        next(iter(loader))
    elif before == "a position":
        other = PrefetchingLoader(Stream(4))
        loader.load_state_dict([other.state_dict() for _ in itertools.islice(other, 2)][1])
    elif before == "an interrupt":
        interrupt(loader, 0)
    if fails == "moving":
        with monkeypatch.context() as patch:
            patch.setattr(loader._mover, "_moved", lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                next(iter(loader))
    else:
        interrupt(loader, int(fails))
    assert loader.state_dict()["source"] == {"next": begin}
    assert [batch.item() for batch in loader] == list(range(begin, 4))
    assert [batch.item() for batch in loader] == [0, 1, 2, 3]


def test_between_passes_a_loader_with_a_state_may_be_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own position holds then, also if the pass that begins there is broken off."""
    stream = Stream(4)
    loader = PrefetchingLoader(stream)
    assert len(list(loader)) == 4
    stream.state["next"] = 2
    with monkeypatch.context() as patch:
        patch.setattr(loader._mover, "_moved", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            next(iter(loader))
    assert [batch.item() for batch in loader] == [2, 3]


@pytest.mark.parametrize("end", ["break", "close", "with", "error"])
def test_an_early_end_leaves_no_worker(end: str) -> None:
    loader = PrefetchingLoader(DataLoader(Numbers(40), batch_size=2, num_workers=1))
    if end == "break":
        for _ in loader:
            break
    elif end == "close":
        next(iter(loader))
        loader.close()
        loader.close()
    elif end == "with":
        with loader:
            next(iter(loader))
    else:
        with pytest.raises(ZeroDivisionError):
            _fail_in(loader)
    assert multiprocessing.active_children() == []


def _fail_in(loader: PrefetchingLoader[torch.Tensor]) -> None:
    for batch in loader:
        1 / (batch.sum() * 0).long().item()


@dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    label: str


class Rows(list[Any]):
    """A list of a library's own."""


class Columns(tuple[Any, ...]):
    """A tuple of a library's own."""


class Movable:
    def __init__(self) -> None:
        self.moves: list[tuple[torch.device, bool]] = []

    def to(self, device: torch.device, non_blocking: bool = False) -> Movable:
        self.moves.append((device, non_blocking))
        return self


def test_nested_batches_keep_their_shape() -> None:
    tensor, movable = torch.ones(2), Movable()
    batch = {
        "pair": Pair(tensor, [tensor, "text"]),
        "more": OrderedDict(a=tensor, b=None),
        "library": UserDict(ids=tensor),
        "sample": Sample(tensor, "cat"),
        "tuple": (tensor, 3),
        "rows": Rows([tensor]),
        "columns": Columns([tensor]),
        "size": torch.Size([2]),
        "view": MappingProxyType({"x": tensor}),
        "movable": movable,
        "packed": pack_sequence([torch.ones(2), torch.ones(1)]),
    }
    [moved] = PrefetchingLoader([batch], "meta")
    assert type(moved["pair"]) is Pair
    assert type(moved["more"]) is OrderedDict
    assert type(moved["library"]) is UserDict
    assert type(moved["sample"]) is Sample
    leaves = [moved["pair"].inputs, moved["pair"].targets[0], moved["more"]["a"], moved["library"]["ids"],
              moved["sample"].image, moved["tuple"][0], moved["packed"].data, moved["rows"][0], moved["columns"][0],
              moved["view"]["x"]]  # fmt: skip
    assert (type(moved["rows"]), type(moved["columns"]), type(moved["size"])) == (Rows, Columns, torch.Size)
    assert {leaf.device.type for leaf in leaves} == {"meta"}
    assert (moved["pair"].targets[1], moved["more"]["b"], moved["sample"].label, moved["tuple"][1]) == (
        "text",
        None,
        "cat",
        3,
    )
    assert movable.moves == [(torch.device("meta"), True)]
    assert batch["more"]["a"] is tensor  # type: ignore[index]
    assert batch["library"]["ids"] is tensor  # type: ignore[index]


def test_length() -> None:
    assert len(PrefetchingLoader(DataLoader(Numbers(14), batch_size=4))) == 4


def part_of(rank: int, ranks: int) -> PrefetchingLoader[torch.Tensor]:
    data = Numbers(24)
    return PrefetchingLoader(DataLoader(data, batch_size=2, sampler=DistributedSampler(data, ranks, rank)))


def test_a_position_in_a_part_of_the_data_is_not_one_in_another_part() -> None:
    """Otherwise samples would be left out, or seen twice, where a run goes on with another number of ranks."""
    loader = part_of(0, 2)
    begun = [loader.state_dict() for _ in loader]
    for ranks in (1, 4):
        with pytest.raises(ConfigError, match=rf"1 batches of one of 2 parts of the data, and this .* one of {ranks}:"):
            part_of(0, ranks).load_state_dict(begun[0])
    with pytest.raises(ConfigError, match="one of 2 parts of the data, and this loader has one of 1:"):
        PrefetchingLoader(DataLoader(Numbers(24), batch_size=2, shuffle=True)).load_state_dict(begun[0])
    older = {**begun[0], "begin": {name: value for name, value in begun[0]["begin"].items() if name != "parts"}}
    for state in (stored(begun[0]), older):
        resumed = part_of(1, 2)
        resumed.load_state_dict(state)
        assert len(list(resumed)) == 5
    between = part_of(3, 4)
    between.load_state_dict(loader.state_dict())  # between passes any number is fine
    assert len(list(between)) == 3


def test_positions_that_do_not_fit() -> None:
    counted = PrefetchingLoader(DataLoader(Numbers(14), batch_size=2))
    next(iter(counted))
    with pytest.raises(ConfigError, match="that of a loader with state_dict, and this one has none"):
        PrefetchingLoader(Stream(3)).load_state_dict(counted.state_dict())
    with pytest.raises(ConfigError, match="counts 1 batches of 2 samples"):
        PrefetchingLoader(DataLoader(Numbers(14), batch_size=4)).load_state_dict(counted.state_dict())
    sampled, others = (
        PrefetchingLoader(DataLoader(Numbers(14), batch_sampler=BatchSampler(range(14), size, drop_last=False)))
        for size in (2, 4)
    )
    next(iter(sampled))
    with pytest.raises(ConfigError, match="counts 1 batches of 2 samples; with batches of 4"):
        others.load_state_dict(sampled.state_dict())
    untold = {**sampled.state_dict(), "batch_size": None}  # as an older position
    sampled.load_state_dict(untold)
    with pytest.raises(ConfigError, match="counts 1 batches of None samples; with batches of 2"):
        counted.load_state_dict(untold)
    assert len(list(counted)) == 7
    between = counted.state_dict()
    larger = PrefetchingLoader(DataLoader(Numbers(14), batch_size=7))
    larger.load_state_dict(between)  # between passes any size is fine
    assert len(list(larger)) == 2
    with pytest.raises(ConfigError, match="the saved position is not that of a PrefetchingLoader"):
        larger.load_state_dict({})
    shuffled = PrefetchingLoader(
        DataLoader(Numbers(14), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3))
    )
    next(iter(shuffled))
    plainly = PrefetchingLoader(DataLoader(Numbers(14), batch_size=2))
    plainly.load_state_dict(shuffled.state_dict())
    with pytest.raises(ConfigError, match="other samplers or generators"):
        next(iter(plainly))
    assert len(list(shuffled)) == 7
    plainly.load_state_dict(shuffled.state_dict())  # between passes any order is fine
    assert [batch.tolist()[0] for batch in plainly] == [0, 2, 4, 6, 8, 10, 12]
    shorter = PrefetchingLoader([torch.tensor(0)])
    longer = PrefetchingLoader([torch.tensor(0)] * 3)
    shorter.load_state_dict([longer.state_dict() for _ in longer][1])
    with pytest.raises(ConfigError, match="after batch 2 of a pass, and this loader has 1"):
        next(iter(shorter))


class Graph:
    """A batch of a library, with tensors that only itself knows."""

    def __init__(self, x: torch.Tensor) -> None:
        self._held = {"x": x}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._held[name]

    def to(self, device: torch.device, non_blocking: bool = False) -> Graph:
        return Graph(self["x"].to(device, non_blocking=non_blocking))


class LateStream:
    """A stream of a GPU; it knows how many kernels of other streams have run before what it queues next."""

    def __init__(self, device: object = None) -> None:
        self.queued = 0
        self.have_run: dict[LateStream, int] = {}

    def wait_stream(self, other: LateStream) -> None:
        self.have_run[other] = other.queued

    def record_event(self) -> object:
        return object()

    def wait_event(self, event: object) -> None:
        pass


def test_memory_of_a_freed_batch_is_not_written_while_kernels_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy may get the memory of any batch before the last one, also of one that was kept for later steps."""
    first, have_run = LateStream(), list[int]()
    current = first

    @contextlib.contextmanager
    def copying(stream: LateStream) -> Iterator[None]:
        have_run.append(stream.have_run.get(first, 0))
        yield

    monkeypatch.setattr(torch.cuda, "Stream", LateStream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current)
    monkeypatch.setattr(torch.cuda, "stream", copying)
    for _ in PrefetchingLoader([Movable()] * 6, "cuda"):
        first.queued += 1  # a kernel that reads the first batch
        current = LateStream()
    assert have_run == [0, 0, 1, 2, 3, 4]


@pytest.mark.gpu
@pytest.mark.parametrize("made", [dict, Graph])
def test_on_a_gpu_the_copy_is_not_read_before_it_has_ended(made: Callable[..., Any]) -> None:
    batches = [torch.full((4 << 20,), float(index)) for index in range(6)]
    device = torch.device("cuda")
    sums = []
    for batch in PrefetchingLoader(made(x=one) for one in batches):
        assert batch["x"].device.type == "cpu"
    for batch in PrefetchingLoader((made(x=one) for one in batches), device):
        torch.cuda._sleep(20_000_000)  # the batch is used long after it was handed out, while others are copied
        sums.append(batch["x"].sum())
        del batch
    assert [one.item() / (4 << 20) for one in sums] == [0, 1, 2, 3, 4, 5]
