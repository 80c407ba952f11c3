"""Adam and AdamW for tensors in CPU memory, as an ordinary `torch.optim.Optimizer`.

Scope: fp32, bf16 and fp16 parameters with gradients of the same dtype; fp32 moments and, for 16-bit weights, what
    completes them to an fp32 master; a few threads of its own.
Not here: state that lives on other tiers (see `optimizer.py`), the arithmetic (see `kernels/adam.py`).
Owner: the thread that calls `step()`; its threads work only while that call lasts.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch

from tierstore import kernels
from tierstore.cores import update_threads
from tierstore.errors import ConfigError
from tierstore.io.memory import HUGE_PAGE_BYTES, huge_pages
from tierstore.kernels.adam import (
    STATE_SECTIONS,
    AdamCoefficients,
    StateViews,
    adopt_weights,
    read_master_views,
    update_views,
)
from tierstore.plan.placement import BLOCK
from tierstore.train.groups import DTYPES
from tierstore.train.parameter_groups import (
    IGNORED,
    UNSUPPORTED,
    checked_options,
    coefficients_of,
    refuse_unsupported,
    validate_options,
)

_TENSORS = {"F32": torch.float32, "I16": torch.int16}
_OPTIONS = {"lr", "betas", "eps", "weight_decay"}
_MOMENTS = {"exp_avg", "exp_avg_sq"}
_TENSORS_OF_STATE = {name for sections in STATE_SECTIONS.values() for name, _ in sections}
_LINE = 64  # bytes of a cache line; each tensor of a state begins on one
_PIECE = 16 * BLOCK  # elements of one job, about 1 ms of work; jobs of 4 blocks were 10 % slower (2-core Xeon, 2026)


@dataclass(frozen=True, slots=True)
class _Verbatim:
    """A tensor of a state dict that torch must not cast to the dtype of its parameter."""

    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Job:
    """One parameter in one step."""

    parameter: torch.Tensor
    weights: torch.Tensor  # the parameter itself, or a contiguous copy to be written back
    gradient: torch.Tensor
    state: dict[str, Any]
    coefficients: AdamCoefficients

    def pieces(self) -> list[Callable[[], None]]:
        weights, gradient = _array(self.weights), _array(self.gradient)
        run = partial(self._run, DTYPES[self.weights.dtype], weights, _views(self.state), gradient)
        return [partial(run, start, min(start + _PIECE, weights.size)) for start in range(0, weights.size, _PIECE)]

    def _run(self, dtype: str, weights: Any, views: StateViews, gradient: Any, start: int, stop: int) -> None:
        adopt_weights(dtype, weights, views, start, stop)
        update_views(dtype, weights, views, gradient, start, stop, self.coefficients)

    def finish(self) -> None:
        self.state["step"] += 1
        if self.weights is not self.parameter:
            self.parameter.copy_(self.weights)
        else:
            torch.autograd.graph.increment_version(self.parameter)  # written behind torch's back


class CPUAdam(torch.optim.Optimizer):
    """AdamW (or Adam with L2 regularization) with one fused pass per parameter; a drop-in for `torch.optim.AdamW`.

    16-bit parameters are trained against fp32 masters: the state of a bf16 parameter holds the int16 `residual` that
    completes it losslessly (10 bytes per element), that of an fp16 parameter the `master` itself (12). A weight that
    was changed from outside between two steps is taken over; at most what its master held beyond the weight's precision
    is lost.

    Results are bit-identical for every number of threads, provided that `torch.set_flush_denormal`, if used, is called
    before the first step: the threads inherit it. The square of a gradient has to be finite in fp32: one above 1.8e19
    makes the second moment of its parameter infinite.

    Args:
        params, lr, betas, eps, weight_decay: as of `torch.optim.AdamW`.
        decoupled: True is AdamW, False adds `weight_decay * p` to the gradient, as `torch.optim.Adam` does.
        threads: None is one per available core up to 8, and with more cores all but two, at most 16.
        of_torch: other options of `torch.optim.AdamW`; `foreach` and `fused` are ignored, the others must be off.

    Raises:
        ConfigError: an option makes no sense, or an option or a kind of parameter is not supported.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        decoupled: bool = True,
        threads: int | None = None,
        **of_torch: bool | None,
    ) -> None:
        for name in of_torch.keys() - {*UNSUPPORTED, *IGNORED}:
            raise ConfigError(f"CPUAdam has no option {name!r}")
        refuse_unsupported(of_torch, "by CPUAdam")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "decoupled": decoupled}
        checked_options(defaults)
        if threads is not None and (type(threads) is not int or threads < 1):
            raise ConfigError(f"threads must be a whole number of at least 1, got {threads!r}")
        self._threads = update_threads(threads)
        self._pool: ThreadPoolExecutor | None = None
        self._pool_pid = 0
        super().__init__(params, defaults)
        kernels.warm_up_adam(sorted({DTYPES[p.dtype] for group in self.param_groups for p in group["params"]}))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's.

        Raises:
            ConfigError: this is no dictionary with `params`, a parameter is not a dense fp32, bf16 or fp16 tensor in
                CPU memory, or an option is bad; the group was not added.
        """
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise ConfigError(f"a parameter group is a dictionary with 'params', got {param_group!r}")
        validate_options(param_group, self.defaults)
        parameters = param_group["params"]
        param_group["params"] = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        seen = set()
        for item in param_group["params"]:
            parameter = item[1] if isinstance(item, tuple) else item
            if isinstance(parameter, torch.Tensor):
                _check_tensor("parameter", parameter)
                if id(parameter) in seen:
                    shape = tuple(parameter.shape)
                    raise ConfigError(f"a parameter of shape {shape} is given twice: give list(dict.fromkeys(params))")
                seen.add(id(parameter))
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates every parameter that has a gradient.

        Raises:
            ConfigError: a gradient is not dense, or not of its parameter's dtype; a parameter is of another shape or
                dtype than when its state was made; an option that is not supported was set. Nothing was changed.
            KeyboardInterrupt: some weights were updated and others were not; the threads have stopped updating.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, group in enumerate(self.param_groups):
            refuse_unsupported(group, f"(in parameter_groups[{index}])")
        due = [(group, p, p.grad) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for _, parameter, gradient in due:
            self._check(parameter, gradient)
        new = [parameter for _, parameter, _ in due if not self.state.get(parameter)]
        for parameter, state in zip(new, _new_states(new)):
            self.state[parameter].update(state)
        jobs = [self._job(*one) for one in due]
        self._run(deque(itertools.chain.from_iterable(job.pieces() for job in jobs)))
        for job in jobs:
            job.finish()
        return loss

    @torch.no_grad()
    def read_master(self, parameter: torch.Tensor) -> torch.Tensor:
        """A copy of the fp32 master of a parameter; before its first step, the parameter itself in fp32."""
        if not self.state.get(parameter):
            return parameter.detach().to(torch.float32, copy=True)
        out = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
        dtype, views = DTYPES[parameter.dtype], _views(self.state[parameter])
        weights, master = _array(parameter.detach().contiguous()), _array(out)
        read_master_views(dtype, weights, views, master)
        adopt_weights(dtype, weights, replace(views, complement=master), 0, weights.size)  # in the copy only
        return out

    def close(self) -> None:
        """Joins the threads; a later `step()` starts new ones. They also end with the optimizer itself."""
        pool, self._pool = self._pool, None
        if pool is not None and self._pool_pid == os.getpid():
            pool.shutdown()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but keeps fp32 state of 16-bit parameters; a state dict of `torch.optim.AdamW` fits too.

        Raises:
            ConfigError: an option that this optimizer lacks is on, or one makes no sense, or a state has another shape,
                or comes from another kind of optimizer; nothing was changed.
        """
        if lacking := {"state", "param_groups"} - state_dict.keys():
            raise ConfigError(f"the loaded state is that of no optimizer: it has no {' and no '.join(sorted(lacking))}")
        of_others = any(entry and not entry.keys() >= _MOMENTS for entry in state_dict["state"].values())
        for group in state_dict["param_groups"]:
            is_nadam_or_radam = "decoupled_weight_decay" in group and "amsgrad" not in group
            if of_others or is_nadam_or_radam or not group.keys() >= _OPTIONS:
                raise ConfigError("the loaded state is that of another kind of optimizer")
            refuse_unsupported(group, "by CPUAdam, and the loaded state has it")
            checked_options({name: group[name] for name in _OPTIONS})
        handle = self.register_load_state_dict_pre_hook(lambda _, loaded: _protect(loaded))
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_threads": self._threads}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Called by load_state_dict with protected tensors, and by pickle and deepcopy with ordinary ones.
        restored = dict(state["state"])
        parameters = [key for key, entry in restored.items() if isinstance(key, torch.Tensor) and entry]
        for parameter, fresh in zip(parameters, _new_states(parameters)):
            _fill(fresh, parameter, restored[parameter])
            restored[parameter] = fresh
        self.__dict__.setdefault("_pool", None)
        self.__dict__.setdefault("_pool_pid", 0)
        super().__setstate__({**state, "state": defaultdict(dict, restored)})
        for group in self.param_groups:
            group.setdefault("decoupled", group.get("decoupled_weight_decay", self.defaults["decoupled"]))

    def _check(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Refuse what does not fit together: the kernels do not check the shapes of a state."""
        _check_tensor("parameter", parameter)
        if gradient.dtype != parameter.dtype:
            raise ConfigError(f"a parameter of {parameter.dtype} needs a gradient of its dtype, got {gradient.dtype}")
        _check_tensor("gradient", gradient)
        if gradient.shape != parameter.shape:
            raise ConfigError(
                f"a parameter of {tuple(parameter.shape)} has a gradient of {tuple(gradient.shape)}; make another one"
            )
        kept = {name: value for name, value in self.state.get(parameter, {}).items() if name in _TENSORS_OF_STATE}
        forms = {name: (value.shape, value.dtype) for name, value in kept.items()}
        if forms and forms != _forms_of_state(parameter):
            raise ConfigError(
                f"a parameter is {parameter.dtype} {tuple(parameter.shape)} now, which its state does not fit: "
                f"{', '.join(f'{name} {dtype} {tuple(shape)}' for name, (shape, dtype) in forms.items())}; "
                "make another optimizer when shapes or dtypes change"
            )

    def _job(self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor) -> _Job:
        state = self.state[parameter]
        coefficients = coefficients_of(group, int(state["step"]) + 1)
        weights = parameter if parameter.is_contiguous() else parameter.contiguous()
        return _Job(parameter, weights, gradient.resolve_neg().contiguous(), state, coefficients)

    def _run(self, pieces: deque[Callable[[], None]]) -> None:
        """Run all pieces, in any order: a worker takes the next one as soon as it is free."""
        if self._threads == 1 or len(pieces) <= 1:
            _drain(pieces)
            return
        if self._pool is None or self._pool_pid != os.getpid():  # the threads of a forked process are gone
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="tierstore-adam")
            self._pool_pid = os.getpid()
        futures: list[Future[None]] = []
        try:
            futures.extend(self._pool.submit(_drain, pieces) for _ in range(self._threads))
            for future in futures:
                future.result()
        except BaseException:
            pieces.clear()
            while not all(future.done() for future in futures):
                with contextlib.suppress(KeyboardInterrupt):  # another one; the first is on its way
                    wait(futures)
            raise


def _drain(pieces: deque[Callable[[], None]]) -> None:
    while True:
        try:
            piece = pieces.popleft()
        except IndexError:
            return
        piece()


def _check_tensor(what: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in DTYPES or tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise ConfigError(
            f"CPUAdam takes dense fp32, bf16 or fp16 tensors in CPU memory; "
            f"got a {what} of {tensor.dtype}, {tensor.layout}, on {tensor.device}"
        )


def _array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The memory of a contiguous tensor as a flat array; 16-bit floats as uint16."""
    flat = tensor.detach().view(-1)
    return np.asarray((flat.view(torch.uint16) if flat.dtype in (torch.bfloat16, torch.float16) else flat).numpy())


def _views(state: dict[str, Any]) -> StateViews:
    m, v = _array(state["exp_avg"]), _array(state["exp_avg_sq"])
    complement = state.get("residual", state.get("master"))
    return StateViews(m, v, m[:0] if complement is None else _array(complement))


def _forms_of_state(parameter: torch.Tensor) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (parameter.shape, _TENSORS[kind]) for name, kind in STATE_SECTIONS[DTYPES[parameter.dtype]]}


def _new_states(parameters: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
    """The state of each before its first step, in which an fp16 master that differs from its weight is replaced.

    All lie in one mapping, of huge pages if they fill one: a process may not have a mapping for each.
    """
    forms = [_forms_of_state(parameter) for parameter in parameters]
    sizes = [shape.numel() * dtype.itemsize for each in forms for shape, dtype in each.values()]
    starts = [0, *itertools.accumulate(-(-size // _LINE) * _LINE for size in sizes)]
    memory = huge_pages(starts[-1])[1] if starts[-1] >= HUGE_PAGE_BYTES else np.zeros(starts[-1], np.uint8)
    # A storage for each, so that pickling one does not pickle all of them. An empty one is a tensor of its own: as a
    # part of the memory it would have the address of another one, and `torch.save` tells storages apart by address.
    rooms = (
        torch.from_numpy(memory[start : start + size]) if size else torch.empty(0, dtype=torch.uint8, device="cpu")
        for start, size in zip(starts, sizes)
    )
    return [
        {"step": torch.tensor(0.0, dtype=torch.float32, device="cpu")}
        | {name: next(rooms).view(dtype).view(shape) for name, (shape, dtype) in each.items()}
        for each in forms
    ]


def _protect(state_dict: dict[str, Any]) -> dict[str, Any]:
    state = {
        key: {name: _Verbatim(item) if isinstance(item, torch.Tensor) else item for name, item in entry.items()}
        for key, entry in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _fill(state: dict[str, Any], parameter: torch.Tensor, entry: dict[str, Any]) -> None:
    """Fill a new state from a loaded entry, as far as the entry goes: one of another optimizer may lack something."""
    for name, fresh in state.items():
        item = entry.get(name)
        if item is None:
            continue
        value = item.tensor if isinstance(item, _Verbatim) else torch.as_tensor(item, device="cpu")
        if value.numel() != 1 if name == "step" else value.shape != parameter.shape:
            raise ConfigError(f"state {name!r} has shape {list(value.shape)}, its parameter {list(parameter.shape)}")
        fresh.copy_(value.detach().reshape(fresh.shape))
