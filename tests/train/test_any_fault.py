"""Any order of calls on disks that fail: what was flushed is never lost, and a resume goes on from a state of the run.

A serial engine in memory makes every call, too. A call that meets a fault may raise; the test then does what a user
does: try again, close, and resume. The resumed state must be that after the last flush or after a later call, bit for
bit. A call that does not raise must have done what the serial engine's call did. No call raises without a fault.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import EAGAIN, EINTR, EIO, ENOSPC, FLIP, NOTHING, PART, UNALIGNED, Fault, FaultyBackend
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from test_any_order import CLIP, DTYPES, MICRO_BATCHES, ROOMS, Net, least, loss_of, seen

from tierstore.config import AdamWConfig, TierConfig
from tierstore.errors import TierstoreError
from tierstore.io.backend import Backend
from tierstore.train.engine import Engine

FAULTS = {
    "pread": [EIO, EINTR, EAGAIN, NOTHING, UNALIGNED, PART, FLIP],
    "pwrite": [EIO, ENOSPC, EINTR, NOTHING, UNALIGNED, PART],
    "fdatasync": [EIO], "fsync": [EIO], "replace": [EIO, ENOSPC], "open": [EIO], "unlink": [EIO], "allocate": [ENOSPC],
}  # fmt: skip
Call = Callable[[Engine], Any]


@dataclass(frozen=True)
class Trouble:
    """From call number `at` of this kind on, counted from now, `times` calls fail."""

    kind: str
    fault: Fault
    at: int
    times: int

    def of(self, disk: FaultyBackend) -> None:
        disk.kinds, disk.fault, disk.counted, disk.at, disk.times = (self.kind,), self.fault, 0, self.at, self.times


TROUBLE = st.one_of(
    st.builds(
        Trouble, st.just(kind), st.sampled_from(faults), st.integers(0, 1) | st.integers(0, 8) | st.integers(0, 40),
        st.sampled_from([1, 1, 2, 10**9]),
    )
    for kind, faults in FAULTS.items()
)  # fmt: skip


@dataclass(frozen=True)
class Way:
    """How an engine is made."""

    update: str
    room: str
    every: int


WAYS = st.builds(
    Way, st.sampled_from(["step", "forward", "speculative", "auto"]),
    st.sampled_from(["least", "least", "some", "all"]), st.sampled_from([1, 1, 3]),
)  # fmt: skip


def scheduler_of(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)


class AnyFault(RuleBasedStateMachine):
    """One engine on disks that fail, and the serial one, without a store.

    `calls` holds the calls that changed something, `states` the states before and after each of them. A resume must
    bring back state number `durable` or a later one.
    """

    @initialize(
        dtype=st.sampled_from(list(DTYPES)), clips=st.booleans(), codec=st.sampled_from(["none", "lz4"]),
        disks=st.integers(1, 2), ways=st.lists(WAYS, min_size=3, max_size=3),
    )  # fmt: skip
    def begin(self, dtype: str, clips: bool, codec: str, disks: int, ways: list[Way]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="any-fault-"))
        self.dtype, self.clip, self.codec, self.disks, self.ways = dtype, CLIP if clips else None, codec, disks, ways
        self.calls: list[Call] = []
        self.disk = FaultyBackend()
        self.engine, self.serial = self.made(self.disk), self.made(None)
        self.states = [self.state_of(self.serial)]
        self.durable = 0

    def made(self, disk: Backend | None) -> Engine:
        """The next engine with a store, on this disk; without a disk, the serial engine."""
        if disk is None:
            way, nvme = Way("step", "all", 1), []
        else:
            self.ways = [*self.ways[1:], self.ways[0]]
            way, nvme = self.ways[0], [self.folder / f"store{n}" for n in range(self.disks)]
            if way.update == "speculative":
                way = Way(way.update, way.room, 1)
        gpu, cpu = least(self.dtype, way.update, self.clip, self.codec, False)
        more_gpu, more_cpu = ROOMS[way.room]
        tiers = TierConfig(
            gpu_memory=gpu + more_gpu, cpu_memory=cpu + more_cpu, nvme=nvme, timeout_s=20.0,
            codec=self.codec if nvme else "none",
        )  # fmt: skip
        return Engine(
            Net(DTYPES[self.dtype]), tiers, AdamWConfig(lr=1e-2, weight_decay=0.1), update=way.update,
            max_grad_norm=self.clip, commit_every=way.every if nvme else 1, overlap=bool(nvme),
            lr_scheduler=scheduler_of, resume="auto" if nvme else "never", backend=disk,
        )  # fmt: skip

    def go_on_from(self, number: int) -> None:
        """Bring the serial engine to where the other one was after so many calls."""
        self.durable = number
        if number == len(self.calls):
            return
        del self.calls[number:], self.states[number + 1 :]
        self.serial.close()
        self.serial = self.made(None)
        for call in self.calls:
            call(self.serial)

    @staticmethod
    def state_of(engine: Engine) -> Any:
        rates = [group["lr"] for group in engine.optimizer.param_groups]
        return engine.step_count, rates, {name: value.clone() for name, value in engine.state_dict().items()}

    @staticmethod
    def are_same(one: Any, other: Any) -> bool:
        return one[:2] == other[:2] and all(torch.equal(value, other[2][name]) for name, value in one[2].items())

    # --- calls --------------------------------------------------------------------------------------------------

    def change(self, call: Call) -> None:
        """Both engines do it. If a fault broke it, the one with a store may have done it; both do it again."""
        found = self.tried(call)
        expected = self.follow(call)
        if found is not None:
            assert repr(found) == repr(expected)
            return
        self.tried(call)
        self.follow(call)
        self.resume()

    def tried(self, call: Call) -> Any:
        with self.forgiving():
            return call(self.engine)
        return None

    @contextlib.contextmanager
    def forgiving(self) -> Iterator[None]:
        """Errors of tierstore are suppressed if there was a fault since this engine was made."""
        try:
            yield
        except TierstoreError:
            if self.disk.hit is None:
                raise

    def follow(self, call: Call) -> Any:
        """The serial engine does it, too; the call and the state after it are noted."""
        found = call(self.serial)
        self.calls.append(call)
        self.states.append(self.state_of(self.serial))
        return found

    @rule(micro=MICRO_BATCHES)
    def train_step(self, micro: list[tuple[int, list[int]]]) -> None:
        batches = [{"x": self.inputs(seed), "way": way} for seed, way in micro]
        self.change(lambda engine: seen(engine.train_step(batches, loss_of)))

    @rule(seed=st.integers(0, 2**16), way=st.lists(st.integers(0, 3), min_size=1, max_size=5))
    def step(self, seed: int, way: list[int]) -> None:
        def call(engine: Engine) -> Any:
            loss = loss_of(engine(self.inputs(seed), way))
            engine.backward(loss)
            return loss.item(), seen(engine.step())

        self.change(call)

    @rule(name=st.sampled_from(["layers.0.weight", "layers.2.bias", "scale"]), factor=st.sampled_from([0.5, 2.0]))
    def multiply(self, name: str, factor: float) -> None:
        def call(engine: Engine) -> bool:
            with engine.gathered([name], modify=True), torch.no_grad():
                engine.model.get_parameter(name).mul_(factor)
            return True

        self.change(call)

    @rule()
    def flush(self) -> None:
        if self.tried(lambda engine: (engine.flush(),)):
            self.durable = len(self.calls)
        else:
            self.resume()

    @rule()
    def look(self) -> None:
        found = self.tried(self.state_of)
        if found is None:
            self.resume()
        else:
            assert self.are_same(found, self.states[-1])

    @rule()
    def close(self) -> None:
        with self.forgiving():
            self.engine.close()
            self.durable = len(self.calls)
        self.resume()

    # --- faults -------------------------------------------------------------------------------------------------

    @rule(trouble=TROUBLE, micro=MICRO_BATCHES)
    def fail_step(self, trouble: Trouble, micro: list[tuple[int, list[int]]]) -> None:
        trouble.of(self.disk)
        self.train_step(micro)

    @rule(trouble=TROUBLE)
    def fail_look(self, trouble: Trouble) -> None:
        trouble.of(self.disk)
        self.look()

    @rule(trouble=TROUBLE)
    def fail_resume(self, trouble: Trouble) -> None:
        trouble.of(self.disk)
        with self.forgiving():
            self.engine.close()
            self.durable = len(self.calls)
        self.disk = FaultyBackend()
        trouble.of(self.disk)
        with self.forgiving():
            self.engine = self.made(self.disk)
            self.take_up()
            return
        self.resume()

    def resume(self) -> None:
        """Close, and resume on disks that work again."""
        with self.forgiving():
            self.engine.close()
        self.disk = FaultyBackend()
        self.engine = self.made(self.disk)
        self.take_up()

    def take_up(self) -> None:
        found = self.state_of(self.engine)
        alike = [n for n in range(self.durable, len(self.states)) if self.are_same(found, self.states[n])]
        assert alike, f"step {found[0]} of {[state[0] for state in self.states]}, of which {self.durable} was flushed"
        self.go_on_from(alike[-1])

    # ------------------------------------------------------------------------------------------------------------

    @staticmethod
    def inputs(seed: int) -> torch.Tensor:
        return torch.randn(2, 16, generator=torch.Generator().manual_seed(seed))

    @invariant()
    def has_no_gradients(self) -> None:
        assert all(parameter.grad is None for parameter in self.engine.model.parameters())

    def teardown(self) -> None:
        for name in ("engine", "serial"):
            with contextlib.suppress(TierstoreError, AttributeError):
                getattr(self, name).close()
        shutil.rmtree(getattr(self, "folder", "nothing"), ignore_errors=True)


TestAnyFault = pytest.mark.usefixtures("no_leaks", "one_thread")(AnyFault.TestCase)
if settings.get_current_profile_name() != "long":
    # Shrinking a failing example takes minutes: only the long profile does that.
    found = (Phase.explicit, Phase.generate)
    TestAnyFault.settings = settings(max_examples=6, stateful_step_count=25, derandomize=True, phases=found)
