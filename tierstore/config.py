"""Validated configuration of tiers and optimizer.

Scope: pydantic models, sizes as text ("8GiB"), and closed sets as enums; checked once, at construction.
Not here: decisions that follow from a configuration (see `plan/`).
"""

from __future__ import annotations

import enum
import math
import os
import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar, runtime_checkable

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    ValidationError,
    model_validator,
)

from tierstore.cores import MOST_UPDATE_THREADS
from tierstore.errors import ConfigError, advice_on

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "pb": 10**15,
          "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "pib": 2**50}  # fmt: skip
DEVICE = re.compile(r"cpu|cuda(:(0|[1-9][0-9]?))?")
"""Not every name that torch takes: of a larger number it keeps 8 bits, so `cuda:256` would be the first GPU."""
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_size(value: int | str) -> int:
    """Bytes of `8GiB`, `512 MiB`, `2GB` or a plain number of bytes.

    Raises:
        ConfigError: not a size.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ConfigError(f"not a size: {value!r}; write a number of bytes or text such as '8GiB'")
    if isinstance(value, int):
        size = value
    else:
        match = _SIZE.fullmatch(value)
        if match is None or match[2].lower() not in _UNITS:
            raise ConfigError(f"not a size: {value!r}; write a number of bytes or text such as '8GiB' or '512MiB'")
        size = int(Fraction(match[1]) * _UNITS[match[2].lower()])  # a float would round above 2**53
    if size < 0:
        raise ConfigError(f"a size cannot be negative: {value!r}")
    if size >= 2**63:
        raise ConfigError("a size of 8 EiB or more does not exist; check its digits and unit")
    return size


def format_size(size_bytes: float) -> str:
    """A size for people to read, with three significant digits: `1.46 GiB`."""
    value, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 999.5 else f"{value:.3g} {unit}"


def format_decimal(size_bytes: float) -> str:
    """A size in powers of ten, as links and disks are sold, with three significant digits: `2.1 TB`."""
    for unit, name in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size_bytes >= 0.9995 * unit:
            value = size_bytes / unit
            return f"{value:.3g} {name}" if value < 999.5 else f"{value:.0f} {name}"
    return f"{size_bytes:.0f} B"


def enough(size_bytes: float) -> int:
    """The size rounded up to three significant digits, for advice to the user."""
    unit = int(10 ** max(0, len(str(math.ceil(size_bytes))) - 3))
    return math.ceil(size_bytes / unit) * unit


class Tier(enum.Enum):
    """Where bytes live."""

    GPU = "gpu"
    CPU = "cpu"
    NVME = "nvme"


class Codec(enum.Enum):
    """How a chunk is stored. AUTO is resolved to one of the others for each kind of chunk."""

    NONE = "none"
    LZ4 = "lz4"
    LZ4_BITSHUFFLE = "lz4-bitshuffle"
    ZSTD_BITSHUFFLE = "zstd-bitshuffle"
    AUTO = "auto"


class UpdateSchedule(enum.Enum):
    """When the optimizer update of a step runs."""

    AUTO = "auto"
    STEP = "step"
    FORWARD = "forward"
    BACKWARD = "backward"
    SPECULATIVE = "speculative"
    DELAYED = "delayed"


class MicroBatchSchedule(enum.StrEnum):
    """The order in which the micro-batches of a step go through the model.

    Attributes:
        HORIZONTAL: each micro-batch goes through all groups, forward and backward, before the next one starts. The
            activations of one micro-batch are held.
        VERTICAL: all micro-batches go through one group before any goes on to the next group. Weights are fetched once
            per pass for all micro-batches, and the activations of all are held.
    """

    HORIZONTAL = "horizontal"
    VERTICAL = "vertical"


class Durability(enum.Enum):
    """Whether steps are committed to the store."""

    COMMIT = "commit"
    NONE = "none"


class Resume(enum.Enum):
    """What to do with a store that already holds a generation."""

    NEVER = "never"
    AUTO = "auto"
    MUST = "must"
    PREVIOUS = "previous"


E = TypeVar("E", bound=enum.Enum)


def choice(kind: type[E], name: str, value: object) -> E:
    """The enum member that an option names.

    Raises:
        ConfigError: there is no such member.
    """
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(f"{name} must be one of {', '.join(k.value for k in kind)}, not {value!r}") from None


@runtime_checkable
class MeasuredRates(Protocol):
    """Measured rates as the engine takes them; `plan.bandwidth.BandwidthTable` implements this."""

    @property
    def read_bytes_per_s(self) -> float:
        """Rate of NVMe reads while nothing is written."""


def _rates(value: Any) -> Any:
    if value is None or isinstance(value, MeasuredRates):
        return value
    if value == "" or not isinstance(value, (str, os.PathLike)):
        raise ValueError(f"give the file that tierstore probe --json wrote, or a BandwidthTable (got {value!r})")
    return _absolute(Path(value))


def at_home(path: Path) -> Path:
    """The path with a leading `~/` expanded to the home directory. (A shell does not expand it behind a `=`.)

    Raises:
        ConfigError: there is no home directory.
    """
    if path.parts[:1] != ("~",):
        return path
    try:
        return path.expanduser()
    except RuntimeError:
        raise ConfigError(f"{path}: there is no home directory here; write out the path that is meant") from None


def _directory(value: Any) -> Any:
    if value == "":  # an unset shell variable would otherwise become the current directory
        raise ValueError("an empty path is not a directory")
    return value


def _absolute(path: Path) -> Path:
    return at_home(path).absolute()


Size = Annotated[int, BeforeValidator(parse_size)]
Directory = Annotated[Path, BeforeValidator(_directory), AfterValidator(_absolute)]
"""Absolute, so that it stays the same when the process changes its working directory later."""
Rates = Annotated[Path | MeasuredRates, BeforeValidator(_rates)]
_USUAL_BYTES = 2**30


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            options = list(type(self).model_fields)
            raise ConfigError(
                "; ".join(_sentence(type(self).__name__, item, options) for item in error.errors())
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise ConfigError(f"{type(self).__name__}.{name} cannot be changed after construction; make another one")


def _sentence(owner: str, item: Any, options: list[str]) -> str:
    """A problem that pydantic found, in terms that the user who set the option understands."""
    field = ".".join(str(part) for part in item["loc"])
    kind, given = item["type"], item["input"]
    if kind == "extra_forbidden":
        return f"{owner}.{field}: there is no such option; {advice_on(field, options, 'the options are')}"
    if kind == "value_error":  # our own message, which already shows the value
        text = str(item["ctx"]["error"])
        return f"{owner}.{field}: {text}" if field else f"{owner}: {text}"
    if kind == "tuple_type":
        return f"{owner}.{field}: must be a list (got {given!r})"
    if kind == "missing":
        return f"{owner}.{field}: is missing"
    text = item["msg"].replace("Input should be", "must be").replace("Input is not", "is not")
    if "memory" in field or field.endswith("_bytes"):
        text = re.sub(r"\d+$", lambda match: format_size(int(match[0])), text)
    return f"{owner}.{field}: {text} (got {given!r})"


class TierConfig(_Model):
    """Budgets and places of the three tiers.

    Attributes:
        device: "cpu", "cuda" or "cuda:N". Without CUDA the GPU tier is a part of host memory.
        gpu_memory: bytes for parameters, gradients and optimizer state on the compute device (not activations). None:
            1 GiB, except that an engine on a CPU without `state_on_gpu` takes a part of `cpu_memory` (see
            `plan/one_memory.py`).
        cpu_memory: bytes of the pinned arena. (With CUDA each update thread may pin 4 MiB beside it.)
        nvme: directories of the store, which is striped over them. Empty: no store, everything in memory.
        codec: how chunks are stored. "auto" measures, when the store is made, which codec pays for each kind of chunk.
        chunk_bytes: upper bound of a chunk; None lets the planner choose (up to 32 MiB, without `nvme` 128 MiB).
        io_threads: threads per directory that read and write.
        update_threads: threads that run the optimizer. None: one per core up to 8; with more cores, all but two, from 8
            to 16; ranks that may run on the same cores share them.
        prefetch_depth: how many groups are prefetched; None: computed from measured bandwidths.
        bandwidth: measured rates: a `plan.bandwidth.BandwidthTable`, or its file as `tierstore probe --json` writes it.
            None: the engine reads some chunks at start-up to measure, and then goes by the transfers of the run.
        accumulation_steps: expected backward passes per step. A gradient on disk is read and written in each pass, so
            with several passes gradients get CPU memory first. A vertical step has one pass.
        state_on_gpu: whether optimizer state and its gradients may live in `gpu_memory` beside all weights, and be
            updated there. None: yes on a GPU where Triton works. Not with several ranks, nor under update="delayed".
        timeout_s: a wait is given up when nothing has moved for so long.
    """

    device: str = "cpu"
    gpu_memory: Size | None = None
    cpu_memory: Size = _USUAL_BYTES
    nvme: tuple[Directory, ...] = ()
    codec: Codec = Codec.NONE
    chunk_bytes: Annotated[int, BeforeValidator(parse_size), Field(ge=2**16, le=2**25)] | None = None
    io_threads: Annotated[int, Field(ge=1, le=64)] = 4
    update_threads: Annotated[int, Field(ge=1, le=MOST_UPDATE_THREADS)] | None = None
    prefetch_depth: Annotated[int, Field(ge=0, le=64)] | None = None
    bandwidth: Rates | None = None
    accumulation_steps: Annotated[int, Field(ge=1, le=2**40)] = 1
    state_on_gpu: bool | None = None
    timeout_s: Annotated[float, Field(gt=0)] = 300.0

    if TYPE_CHECKING:  # the constructor accepts more types than the fields hold

        def __init__(
            self,
            *,
            device: str = ...,
            gpu_memory: int | str | None = ...,
            cpu_memory: int | str = ...,
            nvme: Sequence[str | os.PathLike[str]] = ...,
            codec: Codec | str = ...,
            chunk_bytes: int | str | None = ...,
            io_threads: int = ...,
            update_threads: int | None = ...,
            prefetch_depth: int | None = ...,
            bandwidth: MeasuredRates | str | os.PathLike[str] | None = ...,
            accumulation_steps: int = ...,
            state_on_gpu: bool | None = ...,
            timeout_s: float = ...,
        ) -> None: ...

    @model_validator(mode="after")
    def _check(self) -> TierConfig:
        if not DEVICE.fullmatch(self.device):
            raise ValueError(f"device must be 'cpu', 'cuda' or 'cuda:N', not {self.device!r}")
        stores = [Path(os.path.realpath(path)) for path in self.nvme]
        if len(set(stores)) != len(stores):
            raise ValueError("a directory is listed twice in nvme")
        if any(inner != outer and inner.is_relative_to(outer) for inner in stores for outer in stores):
            raise ValueError("a directory in nvme lies in another one, which holds nothing but a store")
        return self

    @property
    def is_one_memory(self) -> bool:
        """Whether an engine takes both tiers from `cpu_memory`."""
        return self.gpu_memory is None and self.device == "cpu" and not self.state_on_gpu

    @property
    def gpu_budget_bytes(self) -> int:
        """The budget of the GPU tier where it is not a part of `cpu_memory`."""
        return _USUAL_BYTES if self.gpu_memory is None else self.gpu_memory

    @property
    def memory_bytes(self) -> int:
        """The budgets of both tiers together."""
        return self.cpu_memory + (0 if self.is_one_memory else self.gpu_budget_bytes)

    @property
    def may_update_on_gpu(self) -> bool:
        """Whether `state_on_gpu` allows updates on this device."""
        return self.device != "cpu" if self.state_on_gpu is None else self.state_on_gpu


class AdamWConfig(_Model):
    """Hyper-parameters of Adam.

    Attributes:
        lr: learning rate; a scheduler sets it in the groups of `engine.optimizer`.
        betas: decay of the first and the second moment.
        eps: added to the root of the second moment.
        weight_decay: coefficient of the weight decay.
        decoupled: True is AdamW (Loshchilov and Hutter, 2019), False is Adam with L2 regularization.
    """

    lr: Annotated[float, Field(ge=0)] = 1e-3
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    eps: Annotated[float, Field(ge=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 1e-2
    decoupled: StrictBool = True
