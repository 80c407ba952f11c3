"""What is known of each storage that a constructor makes, and the memory that parameters do not get.

Scope: storages by address, hollow tensors, constants and their limit.
Not here: how a storage's values come about (`recording.py`, `program.py`).
Owner: one `Records` per recorder.

[Note: hollow] A parameter stays an ordinary CPU tensor while the model is built, so that a constructor cannot tell the
difference (on the meta device several initializers skip their work). Its storage is a mapping whose pages nobody
touches: a call that would write it is written down instead, and a call that needs its values gets them computed from
what was written down. When the constructor has returned, the model's parameters become meta tensors; any other hollow
tensor that is still alive is filled with its values where it lies.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map

from tierstore.config import format_size
from tierstore.errors import ConfigError
from tierstore.train.deferred.program import Request, Step, View, tensors_of

ADVICE = "construct the model ordinarily, without `deferred`, or load a checkpoint"
_PRUNE_EVERY = 4096
_MAP_NORESERVE = 0x4000  # Linux; the mmap module has no name for it


@dataclass(eq=False, slots=True)
class Record:
    """What is known of a storage.

    Attributes:
        origin: the dtype of the zeros that `steps` begin with.
        steps: how its values came about; None: only its bytes tell.
        label: for messages.
        is_hollow: see [Note: hollow].
    """

    dtype: torch.dtype
    elements: int
    origin: torch.dtype
    steps: tuple[Step, ...] | None
    label: str = "a tensor"
    is_hollow: bool = False

    @property
    def flat(self) -> View:
        return View((self.elements,), (1,), 0)

    def request(self, name: str, view: View | None = None) -> Request:
        return Request(name, self.steps or (), self.elements, self.origin, view or self.flat)

    def is_whole(self, tensor: torch.Tensor) -> bool:
        return tensor.dtype == self.dtype and View.of(tensor).interval == (0, self.elements)


class Records:
    """Storages by address; one record may have several storages.

    Args:
        constant_limit_bytes: memory that constants may take.
    """

    def __init__(self, constant_limit_bytes: int) -> None:
        self._known: dict[int, tuple[StorageWeakRef, Record]] = {}
        self._prune_at = _PRUNE_EVERY
        self._constant_limit_bytes = constant_limit_bytes
        self._constant_bytes = 0

    def of(self, tensor: torch.Tensor) -> Record | None:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return None
        known = self._known.get(tensor.untyped_storage()._cdata)
        return None if known is None else known[1]

    def is_hollow(self, tensor: torch.Tensor) -> bool:
        record = self.of(tensor)
        return record is not None and record.is_hollow

    def keep(self, storage: torch.UntypedStorage, record: Record) -> None:
        """From now on `storage` is described by `record`."""
        # The weak reference keeps the storage's address from being given to another while the record is there.
        self._known[storage._cdata] = (StorageWeakRef(storage), record)  # type: ignore[no-untyped-call]
        if len(self._known) > self._prune_at:
            self._known = {key: item for key, item in self._known.items() if not _is_gone(item[0])}
            self._prune_at = 2 * len(self._known) + _PRUNE_EVERY

    def drop(self, storage: torch.UntypedStorage) -> None:
        self._known.pop(storage._cdata, None)

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """From now on only their bytes tell what these tensors hold."""
        for tensor in tensors:
            if (record := self.of(tensor)) is not None:
                record.steps = None

    def hollow(self, record: Record) -> torch.Tensor:
        """A flat tensor for `record` that takes address space, not memory."""
        nbytes = record.elements * record.dtype.itemsize
        if nbytes:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            tensor = torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=record.dtype)
        else:
            tensor = torch.empty(0, dtype=record.dtype, device="cpu")
        self.keep(tensor.untyped_storage(), record)
        return tensor

    def living_hollow(self, is_wanted: Callable[[int], bool]) -> Iterator[tuple[Record, torch.Tensor]]:
        """Flat tensors of the hollow storages that are in use, by their addresses."""
        for address, (weak, record) in list(self._known.items()):
            if record.is_hollow and is_wanted(address) and not _is_gone(weak):
                storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
                if storage is not None:
                    yield record, torch.empty(0, dtype=record.dtype, device="cpu").set_(storage)

    def frozen(self, value: Any, what: str, others: Iterable[Step] = ()) -> Any:
        """`value` with its tensors copied, so that what happens to them later does not matter.

        Args:
            what: whose constants they are, for the message.
            others: steps that belong to no storage, for the count.

        Raises:
            ConfigError: the copies would exceed the limit.
        """
        tensors = list(tensors_of(value))
        if not tensors:
            return value
        asked = sum(tensor.nbytes for tensor in tensors)
        if self._constant_bytes + asked > self._constant_limit_bytes:
            self._constant_bytes = self._count(others)  # without those that were overwritten meanwhile
        self._constant_bytes += asked
        if self._constant_bytes > self._constant_limit_bytes:
            raise ConfigError(
                f"{what}: {format_size(asked)} of values that cannot be produced again later; with them "
                f"{format_size(self._constant_bytes)} would be kept in memory, over the limit of "
                f"{format_size(self._constant_limit_bytes)} (constant_limit_bytes); {ADVICE}"
            )
        return tree_map(lambda item: item.detach().clone() if isinstance(item, torch.Tensor) else item, value)

    def refusal(self, what: str, tensors: Iterable[torch.Tensor]) -> ConfigError:
        """The error that `what` was done to a hollow tensor among `tensors`."""
        records = [record for tensor in tensors if (record := self.of(tensor)) is not None and record.is_hollow]
        labels = ", ".join(sorted({record.label for record in records}))
        return ConfigError(f"{what} on {labels}: this cannot be done later; {ADVICE}")

    def _count(self, others: Iterable[Step]) -> int:
        living = [record for weak, record in self._known.values() if not _is_gone(weak)]
        steps = [*others, *(step for record in living for step in record.steps or ())]
        return sum({id(item): item.nbytes for step in steps for item in step.constants()}.values())


def _is_gone(weak: StorageWeakRef) -> bool:
    gone: bool = weak.expired()  # type: ignore[no-untyped-call]
    return gone
