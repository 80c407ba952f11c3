"""Compiling a loop, with numba's cache on disk where it works.

Scope: the decorator, and what becomes of a cache that cannot be read or written.
Not here: the loops (`compiled.py`).
Owner: numba, whose files the cache is.

The cache saves seconds, and nothing else depends on it. A file that a power cut has left empty (numba renames without a
sync), or that holds the code for other types, is replaced after a new compilation. On a full disk, or where nothing can
be written, each process compiles for itself.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import numba
from numba.core.caching import FunctionCache
from numba.core.sigutils import normalize_signature

Function = TypeVar("Function", bound=Callable[..., Any])


class _Cache(FunctionCache):  # type: ignore[misc]
    """Unpickling damaged bytes can raise anything, so any exception means that the cache does not work."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            found = super().load_overload(sig, target_context)
        except Exception:
            with contextlib.suppress(Exception):
                self.flush()
            return None
        # Processes that fill an empty cache at one time, unlocked, may give two signatures the same file.
        is_of_others = found is not None and tuple(found.signature.args) != tuple(normalize_signature(sig)[0])
        return None if is_of_others else found

    def save_overload(self, sig: Any, data: Any) -> None:
        with contextlib.suppress(Exception):
            super().save_overload(sig, data)


def compiled(function: Function) -> Function:
    """A loop as machine code, compiled at the first call with arguments of new types."""
    loop = numba.njit(nogil=True, error_model="numpy")(function)
    try:
        loop._cache = _Cache(function)  # what `cache=True` does (numba 0.68), with a cache that may fail
    except RuntimeError:
        _tell_of_no_cache()
    return loop  # type: ignore[no-any-return]


@functools.cache
def _tell_of_no_cache() -> None:
    warnings.warn(
        "kernels are compiled anew by each process, which takes some seconds: their cache can be written neither "
        "beside the package nor in the home directory; NUMBA_CACHE_DIR names another one",
        stacklevel=3,
    )
