"""Seeing what a constructor does: torch's modes, its registration hook, and one initializer taken whole.

Scope: everything that is put in place around `build()` and taken away again.
Not here: what follows from it (`recording.py`).
Owner: `watching` undoes what it did, also after an error. Only the calling thread is watched; the hook and the
initializer are torch's own globals, and pass calls of other threads on.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tierstore.train.deferred.recording import Recorder


@contextlib.contextmanager
def watching(recorder: Recorder) -> Iterator[None]:
    """Shows `recorder` every operator call, and each parameter when it is registered."""
    thread = threading.get_ident()

    def registered(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if threading.get_ident() == thread and not is_lazy(parameter):
            with recorder.passing():
                recorder.empty(parameter, f"parameter {name!r} of a {type(module).__name__}")

    hook = register_module_parameter_registration_hook(registered)
    try:
        with _Escapes(recorder), _Operations(recorder), _whole_truncation(recorder):
            yield
    finally:
        hook.remove()


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorder.handle(func, args, dict(kwargs or {}))


class _Escapes(TorchFunctionMode):
    """Ways to a tensor's bytes that are not operators."""

    _READS = (torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__deepcopy__, torch.Tensor.__reduce_ex__)
    _SHARES = (torch.Tensor.numpy, torch.Tensor.__dlpack__)

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._READS:
            args = self._recorder.readable(args)
        elif func in self._SHARES:
            if self._recorder.records.is_hollow(args[0]):
                raise self._recorder.records.refusal(func.__name__, args[:1])
            self._recorder.records.forget(args[:1])
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _whole_truncation(recorder: Recorder) -> Iterator[None]:
    """`trunc_normal_` as one draw: it rejects and draws anew until every number is within its bounds.

    Followed call by call, its result would be a constant. Every caller of it goes through this one function.
    """
    original, thread = nn.init._no_grad_trunc_normal_, threading.get_ident()

    def run(target: torch.Tensor, mean: float, std: float, a: float, b: float) -> None:
        original(target, mean, std, a, b)

    def truncated(
        tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        if generator is not None or threading.get_ident() != thread or tensor.device.type != "cpu":
            return original(tensor, mean, std, a, b, generator)
        with torch.no_grad(), recorder.passing():
            recorder.draw_into(tensor, run, (mean, std, a, b), {})
        return tensor

    nn.init._no_grad_trunc_normal_ = truncated
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = original
