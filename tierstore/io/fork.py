"""What happens to threads, mappings and loops in the child of a fork.

Scope: marking objects of the parent as unusable in the child, without taking any lock there.
Not here: what each object does when it is used anyway (it raises `ClosedError`).
Owner: the registry holds weak references; only the child keeps inherited objects alive.

[Note: inherited objects live as long as the child]
Closing an inherited event loop could change an epoll set that the kernel shares with the parent (the loops of
`io/loop.py` have none). And a mapping under MADV_DONTFORK does not exist in the child: soon something newer may lie at
its address, such as a heap of the interpreter, and finalizing the inherited object would unmap that. So the child never
finalizes inherited objects. It keeps a reference to each object that belongs to its parent, and to each mapping one
more that is never dropped: the end of the interpreter drops the others, and a mapping may outlive its closed arena
through a view that waits for the garbage collector.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

from tierstore.errors import ClosedError

_registered: weakref.WeakSet[ForkAware] = weakref.WeakSet()
_inherited: list[ForkAware] = []
_unshared: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


class ForkAware:
    """Base of objects that belong to the process that made them."""

    def __init__(self) -> None:
        self.is_inherited = False
        _registered.add(self)

    def check_process(self) -> None:
        """Raises:
        ClosedError: in the child of a fork; nothing was touched, no lock was taken.
        """
        if self.is_inherited:
            raise ClosedError(
                f"{type(self).__name__} belongs to the parent of this forked process (pid {os.getpid()}); "
                "make a new one here, or start workers before it"
            )

    def let_go(self) -> None:
        """Called in the child of a fork: closes the child's copies of what must end with the parent, such as a lock."""


def unshare(mapping: mmap.mmap) -> None:
    """Excludes a mapping from every child of a fork; the child never finalizes the inherited object."""
    mapping.madvise(mmap.MADV_DONTFORK)
    _unshared.add(mapping)


def _mark_inherited() -> None:
    # Only the forking thread exists in the child, so nothing can change the sets meanwhile.
    for mapping in list(_unshared):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping))
    for item in list(_registered):
        item.is_inherited = True
        _inherited.append(item)
        item.let_go()


os.register_at_fork(after_in_child=_mark_inherited)
