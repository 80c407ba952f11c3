"""Fixtures for all tests: leaks are failures, and GPU tests need a GPU.

Scope: `no_leaks` (use it by `pytestmark = pytest.mark.usefixtures("no_leaks")`), `runtime`; the order of the files.
Not here: faulty storage (see `tests/faults.py`).
"""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import typer.main
import typer.testing

from tierstore.garbage import loading
from tierstore.io import directories
from tierstore.io.runtime import Runtime

hypothesis.settings.register_profile("default", deadline=None)  # the machine may be busy
hypothesis.settings.load_profile("default")
hypothesis.settings.register_profile("long", max_examples=2000, stateful_step_count=100)
JOIN_S = 5.0
LONGEST = (
    "train/test_zero_models.py", "train/test_clean.py", "apps/test_for_real.py", "train/test_zero.py",
    "train/test_exact.py", "store/test_faults.py", "apps/test_ranks.py", "train/test_really.py",
    "train/test_lost_ranks.py", "store/test_power_cut.py", "train/test_stream_order.py", "train/test_reducer_hooks.py",
    "train/test_right.py", "train/test_reducer.py", "train/test_never_lost.py", "train/test_two_hosts.py",
)  # fmt: skip
"""Files with few tests that take long. They begin first: else one worker ends with them while the other is idle.

Files whose tests run several ranks, which wait for one another, stand between files whose tests do not.
"""


def pytest_configure(config: pytest.Config) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts tests in the background ignores it
    gc.set_threshold(50_000, 20, 20)  # four of the files took 4 to 6 % less time (2 cores, 2026-11-29)
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # xdist's own order is by the number of tests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch  # here: it takes seconds, and most runs collect no GPU test

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    with loading():  # 17 s without, 13 with it; and a collection in a test would examine all that is imported here
        return (yield)


@pytest.fixture(autouse=True, scope="session")
def _the_directory_of_tests_is_a_disk() -> Iterator[None]:
    """Also where the directory is in memory, because an engine would warn of that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(directories, "_MOUNTS", Path("/dev/null"))
        yield


@pytest.fixture(autouse=True, scope="session")
def _commands_are_built_once() -> Iterator[None]:
    """Otherwise typer reads the signatures of all commands, which takes 0.1 s, each time that a test invokes one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", functools.cache(typer.main.get_command))
        yield


@pytest.fixture(autouse=True, scope="session")
def _no_seeds_for_missing_devices() -> Iterator[None]:
    """Torch would keep them with the stack of their caller, whose text takes 1.5 ms in each `torch.manual_seed`."""
    import torch  # here: it takes seconds

    with pytest.MonkeyPatch.context() as patch:
        for devices in (torch.cuda, torch.xpu, torch.mtia):
            if not devices.is_available():
                patch.setattr(devices, "manual_seed_all", lambda seed: None)
        yield


@pytest.fixture(autouse=True)
def _small_groups_stand_for_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers copy the groups of small test models, as they copy those of real models, instead of the caller."""
    from tierstore.device.transfers import CpuDevice  # here: it takes torch

    monkeypatch.setattr(CpuDevice, "at_once_bytes", 2**16)


def open_descriptors() -> dict[int, str]:
    """Descriptors of this process and what they are open on."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return found


@pytest.fixture
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a thread or a descriptor behind."""
    if request.node.get_closest_marker("gpu"):
        import torch

        torch.zeros(1, device="cuda")  # the driver keeps what it opens
    threads, descriptors = _threads(), open_descriptors()
    yield
    for thread in _threads() - threads:
        thread.join(JOIN_S)  # one that is just ending is no leak
    if _opened(descriptors):
        gc.collect()
    alive = [thread.name for thread in _threads() - threads]
    assert not alive, f"threads left: {alive}"
    opened = _opened(descriptors)
    assert not opened, f"descriptors left: {opened}"


def _threads() -> set[threading.Thread]:
    """Threads that Python started. (Autograd's GPU thread stays, and Python lists it once a hook has run there.)"""
    return {thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}


def _opened(before: dict[int, str]) -> dict[int, str]:
    found = {number: path for number, path in open_descriptors().items() if before.get(number) != path}
    return {number: path for number, path in found.items() if not path.startswith("/dev/nvidia")}  # the driver's


@pytest.fixture
def runtime(no_leaks: None) -> Iterator[Runtime]:
    """A running loop thread; fails a test that leaves a task, or an error that nobody saw."""
    running = Runtime("test", timeout_s=30.0).start()
    yield running
    if running.loop.is_running():
        left = running.call(_other_tasks)
        assert not left, f"tasks left: {left}"
    running.close(timeout_s=10.0)


async def _other_tasks() -> list[str]:
    return [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]


@pytest.fixture
def disk_path() -> Iterator[Path]:
    """An empty directory on a disk that takes O_DIRECT, for tests that need it; skips elsewhere.

    Other temporary files may be in memory, where there is no page cache to bypass, and where nothing takes time.
    """
    if not os.path.isdir("/var/tmp"):
        pytest.skip("no /var/tmp, where a disk is looked for")
    with tempfile.TemporaryDirectory(prefix="tierstore-test-", dir="/var/tmp") as made:
        path = Path(made)
        try:
            os.close(os.open(path / "probe", os.O_CREAT | os.O_RDWR | os.O_DIRECT))
        except OSError:
            pytest.skip(f"no O_DIRECT in {path}")
        (path / "probe").unlink()
        yield path


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Torch computes in one thread: the same bits and time on every machine. Runs before the module's own fixtures."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
