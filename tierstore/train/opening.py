"""Which generation of a store a run goes on from, and opening it.

Scope: the user's wish against the generations that exist, at all ranks; refusing those that this run cannot continue.
Not here: how a store is opened (`store/training.py`).
Owner: the thread that makes the engine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

from tierstore.config import Durability, Resume, TierConfig, UpdateSchedule
from tierstore.errors import ChecksumMismatch, ConfigError, FormatError, StorageError
from tierstore.io.backend import Backend
from tierstore.io.runtime import Runtime
from tierstore.store.directories import part_of_a_store
from tierstore.store.layout import GroupSpec, check_same_frozen, check_same_model
from tierstore.store.lock import StoreLock
from tierstore.store.manifest import Generation
from tierstore.store.manifest_files import COMMIT, Manifests
from tierstore.store.names import UNFINISHED
from tierstore.store.team import Team, leads
from tierstore.store.training import TrainingStore
from tierstore.store.verification import is_of_tensors
from tierstore.train.capture import check_captured
from tierstore.train.options import Options
from tierstore.train.partition import Partition


def find_generation(
    runtime: Runtime,
    tiers: TierConfig,
    options: Options,
    backend: Backend,
    lock: StoreLock,
    partition: Partition,
    team: Team,
) -> Generation | None:
    """The generation that the user wants to resume; the store is then locked, so that it stays the one to resume.

    Each node has manifests of its own: with several nodes it is the newest that all have from the same commit. If some
    were lost before they had their first one, the others give theirs up, and the run begins anew.
    """
    if not tiers.nvme:
        _refuse_nothing(options.resume, [], backend)
        return None
    directory = Path(tiers.nvme[0])
    manifests = Manifests(directory, backend)

    def look() -> list[int] | None:
        return _numbers(manifests, options, lock) if leads(team) else None

    told = partition.all_succeed("the generations of the store", look)
    found = {rank: numbers for rank, numbers in enumerate(told) if numbers is not None}
    if not any(found.values()):
        _refuse_nothing(options.resume, [Path(path) for path in tiers.nvme], backend)
        return None
    common = sorted(set.intersection(*map(set, found.values())), reverse=True)
    is_previous = options.resume is Resume.PREVIOUS
    if is_previous and len(common) == 1:
        raise ConfigError(f"{directory} holds only generation {common[0]}; there is none before it")
    for number in common[1 if is_previous else 0 :]:
        if (generation := _read(runtime, manifests, number, partition)) is not None:
            if is_previous:
                _check_can_look_back(runtime, manifests, common[0], generation, options.schedule)
            return generation
    own = found.get(team.rank)
    if options.resume is Resume.AUTO and _are_unfinished(runtime, manifests, found.values(), own, partition):
        partition.all_succeed("giving up generation 0", lambda: runtime.call(manifests.abandon, 0) if own else None)
        return None
    raise _nothing_in_common(found, f" before {common[0]}" if is_previous and common else "")


def _are_unfinished(
    runtime: Runtime,
    manifests: Manifests,
    found: Collection[Sequence[int]],
    own: Sequence[int] | None,
    partition: Partition,
) -> bool:
    """Whether the stores hold nothing but weights that a run began with: it ended before all had generation 0.

    The mark of an unfinished store goes when all nodes have published that generation.

    Args:
        own: the generations of this node, at the rank that leads it.
    """
    if any(numbers not in ([], [0]) for numbers in found):
        return False

    def is_unfinished() -> bool:
        if not own or not (manifests.directory / UNFINISHED).is_file():
            return not own
        generation = runtime.call(manifests.read, 0)
        return not is_of_tensors(generation) and generation.captured.get("step") == 0

    return all(partition.all_succeed("the stores that were begun", is_unfinished))


def _read(runtime: Runtime, manifests: Manifests, number: int, partition: Partition) -> Generation | None:
    """A generation; None if the nodes have it from different commits: of different runs, or because one went on alone.

    Commits of older releases have no name.
    """
    read: list[Generation] = []

    def name() -> str:
        read.append(runtime.call(manifests.read, number))
        if is_of_tensors(read[0]):
            raise ConfigError(f"{manifests.directory} holds named tensors and no training; open it with TensorStore")
        check_captured(read[0].captured)
        return str(read[0].captured.get(COMMIT))

    names = partition.all_succeed(f"generation {number} of the store", name)
    return read[0] if len(set(names)) == 1 else None


def _nothing_in_common(found: Mapping[int, Sequence[int]], before: str) -> ConfigError:
    """The error that lists the generations of each store, by the rank that leads it."""
    have = [f"rank {rank} {', '.join(map(str, sorted(numbers))) or 'none'}" for rank, numbers in found.items()]
    return ConfigError(
        f"the stores of the nodes have no generation in common{before} (by number, at {'; '.join(have)}): they "
        "are of different runs, or one is new, or went on alone; copy the directories of the one to go on from to all "
        "other nodes"
    )


def _refuse_nothing(resume: Resume, directories: Sequence[Path], backend: Backend) -> None:
    if resume not in (Resume.MUST, Resume.PREVIOUS):
        return
    told = f"resume='{resume.value}': there is no generation in {directories[0] if directories else 'memory'}"
    for directory in filter(Path.is_dir, directories):
        if (part := part_of_a_store(backend.names(directory))) is not None:
            raise ConfigError(
                f"{told}, but {directory} holds {part} of a store: give all directories of that store in their order; "
                "if these are all, its manifests are gone"
            )
    raise ConfigError(told)


def _numbers(manifests: Manifests, options: Options, lock: StoreLock) -> list[int]:
    """The generations that are there, newest first; locks the store if there are any."""
    if not manifests.numbers(missing_ok=True):
        return []
    directory = manifests.directory
    lock.add([directory])
    numbers = manifests.numbers(missing_ok=True)
    if not numbers:  # the store was removed meanwhile
        return []
    if options.durability is Durability.NONE:
        raise ConfigError(
            f"{directory} holds generation {numbers[0]}, which durability='none' would overwrite; "
            "use durability='commit', or choose another directory"
        )
    if options.resume is Resume.NEVER:
        raise ConfigError(
            f"{directory} already holds generation {numbers[0]}; continue it with resume='auto', "
            "or choose another directory"
        )
    return numbers


def _check_can_look_back(
    runtime: Runtime, manifests: Manifests, newest: int, previous: Generation, schedule: UpdateSchedule
) -> None:
    """Refuse to open the previous generation if that would lose pending gradients of the newest one."""
    try:
        newer = runtime.call(manifests.read, newest)
        check_captured(newer.captured)
    except (FormatError, StorageError):
        return  # the newest is damaged, or cannot be read: it has nothing to lose
    if newer.captured["pending"] is None:
        return
    if newer.records.keys() != previous.records.keys() or schedule is not UpdateSchedule.DELAYED:
        raise ConfigError(
            f"generation {newest} of {manifests.directory} holds gradients of update='delayed', which going back with "
            f"update={schedule.value!r} would lose; resume generation {newest} with update='delayed' first"
        )


def open_generation(runtime: Runtime, store: TrainingStore, generation: Generation, *, is_previous: bool) -> None:
    if not is_previous:
        runtime.call(store.open, generation)
        return
    try:
        runtime.call(partial(store.open, is_previous=True), generation)
        runtime.call(store.verify, generation)
    except ChecksumMismatch as error:
        damage = str(error).rpartition("; ")[0]  # without its advice, which is what is done here
        raise ChecksumMismatch(
            f"generation {generation.number} is not whole any more: {damage}; resume='auto' opens the newest, if that "
            "is whole; else take a copy of the store"
        ) from None


def check_same_store(
    generation: Generation, groups: Sequence[GroupSpec], tiers: TierConfig, schedule: UpdateSchedule
) -> None:
    """Refuse a generation that this run cannot continue; nothing was changed.

    Raises:
        ConfigError: it is the store of another model, or was made in another way.
    """
    layout = generation.layout
    check_same_frozen(layout, groups, str(tiers.nvme[0]))
    check_same_model(layout, groups, f"{tiers.nvme[0]} is the store of another model")
    if generation.captured["pending"] is not None and schedule is not UpdateSchedule.DELAYED:
        raise ConfigError(
            f"the store in {tiers.nvme[0]} was trained with update='delayed', and the gradients of its last step are "
            f"not applied yet; update={schedule.value!r} would lose them: resume it with update='delayed', and call "
            "apply_pending() (`tierstore train` does when it reaches its last step)"
        )
    if layout["directories"] != len(tiers.nvme):
        raise ConfigError(
            f"the store in {tiers.nvme[0]} is striped over {layout['directories']} directories, {len(tiers.nvme)} are "
            "given; give all of them, in their order"
        )
    if layout["codec"] != tiers.codec.value:
        raise ConfigError(
            f"the store in {tiers.nvme[0]} was made with codec {layout['codec']!r}, not {tiers.codec.value!r}; "
            "give the same codec, or choose another directory"
        )
