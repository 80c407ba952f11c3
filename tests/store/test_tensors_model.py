"""Stores of named tensors against a plain dict: any order of calls, small budgets, crashes between.

`pytest --hypothesis-profile=long tests/store/test_tensors_model.py` runs up to 200,000 steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import shutil
import tempfile
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tensor_stores import CHUNK, TIERS, QuickBackend, assert_at_rest, config, named_files, pack_files, settled

from tierstore import TensorStore, Tier
from tierstore.errors import BudgetError

T = TypeVar("T")
NAMES = st.sampled_from(["a", "b", "c", "d"])
ELEMENTS = st.sampled_from([0, 100, 9000, 16384, 20000, 40000])
GPU_BYTES, CPU_BYTES = 5 * CHUNK, 7 * CHUNK


@dataclass(eq=False)
class Item:
    """What an entry is expected to be; replaced, but never reused, by a put."""

    elements: int
    value: float
    home: Tier


@dataclass(eq=False)
class Held:
    item: Item
    tensors: dict[str, torch.Tensor]
    release: AbstractAsyncContextManager[dict[str, torch.Tensor]]


class StoreMachine(RuleBasedStateMachine):
    """Every rule does the same to the store and to a dict."""

    @initialize(codec=st.sampled_from(["none", "lz4"]), disks=st.integers(1, 2))
    def begin(self, codec: str, disks: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.path = Path(tempfile.mkdtemp(prefix="tensors-"))
        self.codec, self.disks = codec, disks
        self.items: dict[str, Item] = {}
        self.committed: dict[str, Item] = {}
        self.held: list[Held] = []
        self.value = 0.0
        self.open()

    def open(self) -> None:
        nvme = [self.path / "store", self.path / "other"][: self.disks]
        tiers = config(self.path, nvme=nvme, codec=self.codec, gpu_memory=GPU_BYTES, cpu_memory=CPU_BYTES)
        self.store = TensorStore.open(tiers, backend=QuickBackend())
        self.run(self.store.__aenter__())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, 30))

    def tensors(self, elements: int) -> dict[str, torch.Tensor]:
        self.value += 1
        return {"w": torch.full((elements,), self.value), "count": torch.tensor(elements)}

    def try_it(self, work: Coroutine[Any, Any, T]) -> bool:
        """Whether there was room. Waits for loads and removals first, so that Hypothesis can repeat the result."""
        self.run(settled(self.store))
        try:
            self.run(work)
        except BudgetError:
            return False
        return True

    @rule(name=NAMES, elements=ELEMENTS, tier=st.sampled_from(TIERS))
    def put(self, name: str, elements: int, tier: Tier) -> None:
        if self.try_it(self.store.put(name, self.tensors(elements), tier=tier)):
            self.items[name] = Item(elements, self.value, tier)
        else:
            assert tier is not Tier.NVME

    @rule(name=NAMES)
    def acquire(self, name: str) -> None:
        if name not in self.items:
            with pytest.raises(KeyError):
                self.run(self.store.acquire(name).__aenter__())
            return
        block = self.store.acquire(name)
        try:
            self.held.append(Held(self.items[name], self.run(block.__aenter__()), block))
        except BudgetError:
            pinned = {id(held.item): held.item for held in self.held}
            pinned |= {id(item): item for item in self.items.values() if item.home is Tier.GPU}
            needed = sum(item.elements * 4 + 8 for item in [*pinned.values(), self.items[name]])
            assert id(self.items[name]) not in pinned
            assert needed > GPU_BYTES

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.held))
        self.held.remove(held)
        self.run(held.release.__aexit__(None, None, None))

    @rule(name=NAMES, modify=st.booleans(), fails=st.booleans())
    def change(self, name: str, modify: bool, fails: bool) -> None:
        item = self.items.get(name)
        if item is None or any(held.item is item for held in self.held):
            return

        async def change() -> None:
            with contextlib.suppress(ZeroDivisionError):
                async with self.store.acquire(name, modify=modify) as tensors:
                    tensors["w"].fill_(-self.value)
                    if fails:
                        raise ZeroDivisionError

        if self.try_it(change()) and ((modify and not fails) or item.home is Tier.GPU):
            self.items[name].value = -self.value

    @rule(name=NAMES, tier=st.sampled_from(TIERS))
    def move(self, name: str, tier: Tier) -> None:
        if name not in self.items:
            with pytest.raises(KeyError):
                self.run(self.store.move(name, tier))
        elif self.try_it(self.store.move(name, tier)):
            self.items[name].home = tier

    @rule(names=st.lists(NAMES, max_size=4))
    def prefetch(self, names: list[str]) -> None:
        if set(names) <= self.items.keys():
            accepted = self.run(self.store.prefetch(names))
            assert set(accepted) <= set(names)
        else:
            with pytest.raises(KeyError):
                self.run(self.store.prefetch(names))

    @rule(names=st.lists(NAMES, min_size=2, max_size=6), commits=st.booleans())
    def use_at_once(self, names: list[str], commits: bool) -> None:
        async def use(name: str) -> None:
            with contextlib.suppress(BudgetError):
                async with self.store.acquire(name) as tensors:
                    await asyncio.sleep(0)
                    check(tensors, self.items[name])

        async def everything() -> None:
            work = [use(name) for name in names if name in self.items]
            await asyncio.gather(*work, *([self.store.commit()] if commits else []))

        self.run(everything())
        if commits:
            self.committed = copy.deepcopy(self.items)

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        if name in self.items:
            self.run(self.store.delete(name))
            del self.items[name]

    @rule()
    def commit(self) -> None:
        self.run(self.store.commit())
        self.committed = copy.deepcopy(self.items)

    @rule()
    def reopen(self) -> None:
        self.let_go()
        self.run(self.store.__aexit__(None, None, None))
        self.committed = copy.deepcopy(self.items)
        assert pack_files(self.path) == named_files(self.path)
        self.open()
        self.read_everything()

    @rule()
    def crash(self) -> None:
        """Go on from a copy of the directories, as they are now."""
        self.let_go()
        self.run(settled(self.store))
        left = Path(tempfile.mkdtemp(prefix="tensors-"))
        for directory in self.path.iterdir():
            shutil.copytree(directory, left / directory.name, ignore=shutil.ignore_patterns("lock"))
        self.run(self.store.__aexit__(ZeroDivisionError, ZeroDivisionError(), None))
        shutil.rmtree(self.path)
        self.path = left
        self.items = copy.deepcopy(self.committed)
        self.open()
        self.read_everything()

    def let_go(self) -> None:
        while self.held:
            self.run(self.held.pop().release.__aexit__(None, None, None))

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "store"):
            return

        async def look() -> None:
            usage = self.store.usage()
            for tier in TIERS:
                capacity = usage[tier].capacity_bytes
                assert capacity is None or usage[tier].peak_bytes <= capacity
                items = [item for item in self.items.values() if item.home is tier]
                assert usage[tier].count == len(items)
                assert usage[tier].bytes == sum(item.elements * 4 + 8 for item in items)
            for entry in self.store._entries.values():
                whole = {Tier.GPU: entry.copy, Tier.CPU: entry.host, Tier.NVME: entry.pack}
                assert whole[entry.home] is not None, f"{entry.name} has no current copy"
            assert {name: self.store.home(name) for name in self.store.names()} == {
                name: item.home for name, item in self.items.items()
            }

        self.run(look())
        for held in self.held:
            check(held.tensors, held.item)

    @precondition(lambda self: not self.held)
    @rule()
    def read_everything(self) -> None:
        async def read() -> None:
            await settled(self.store)
            for name, item in self.items.items():
                try:
                    async with self.store.acquire(name) as tensors:
                        check(tensors, item)
                except BudgetError:
                    at_home = sum(i.elements * 4 + 8 for i in self.items.values() if i.home is Tier.GPU)
                    assert at_home + item.elements * 4 + 8 > GPU_BYTES
            assert_at_rest(self.store)

        self.run(read())

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.let_go()
            self.run(self.store.__aexit__(None, None, None))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()
            shutil.rmtree(self.path)


def check(tensors: dict[str, torch.Tensor], item: Item) -> None:
    assert list(tensors) == ["w", "count"]
    assert tensors["count"].item() == item.elements
    assert tensors["w"].shape == (item.elements,)
    assert bool((tensors["w"] == item.value).all()), f"{tensors['w'].unique().tolist()}, not {item.value}"


TestStoreMachine = pytest.mark.usefixtures("no_leaks")(StoreMachine.TestCase)
if settings.get_current_profile_name() != "long":
    TestStoreMachine.settings = settings(max_examples=40, stateful_step_count=30)
