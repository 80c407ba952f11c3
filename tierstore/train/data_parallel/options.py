"""What the user of a reducer chose, validated.

Scope: the options that must be the same on all ranks. Not here: what follows from them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import nn

from tierstore.config import parse_size
from tierstore.errors import ConfigError
from tierstore.plan.cost_model import CostModel
from tierstore.train.owners import TAKEN, refuse_ddp, refuse_reduced

_DEFAULT_BUCKET = "25MiB"  # of "auto", until times are known


@dataclass(frozen=True, kw_only=True, slots=True)
class ReducerOptions:
    """See `GradientReducer`."""

    bucket: int | str
    cost: CostModel | None
    first_bucket: int | str | None
    max_in_flight: int
    reduce: str
    find_unused: bool
    static_graph: bool
    delayed: bool
    broadcast_buffers: bool
    order: list[str] | None

    @property
    def is_auto(self) -> bool:
        """Whether the size of buckets is chosen by what a collective costs."""
        return self.bucket == "auto"

    @property
    def scatters(self) -> bool:
        """Whether each rank gets its part of a bucket only."""
        return self.reduce == "reduce_scatter"

    @property
    def cap_bytes(self) -> int:
        """Bytes at which a bucket is full."""
        return parse_size(_DEFAULT_BUCKET if self.is_auto else self.bucket)

    @property
    def first_cap_bytes(self) -> int | None:
        """Bytes at which the first bucket is full, if it has a cap of its own."""
        return None if self.first_bucket is None else parse_size(self.first_bucket)

    def lines(self) -> dict[str, str]:
        """The options by name, to be compared between ranks."""
        return {f"option {field.name}": repr(getattr(self, field.name)) for field in fields(self)}

    def check(self, module: nn.Module) -> None:
        """Refuse options that cannot work with this module.

        Raises:
            ConfigError: they cannot.
        """
        if not isinstance(module, nn.Module):
            raise ConfigError(f"module must be a torch.nn.Module, not a {type(module).__name__}")
        if name := next((name for name, p in module.named_parameters() if TAKEN in p.__dict__), None):
            raise ConfigError(
                f"{name} belongs to an Engine, perhaps a closed one, which averages gradients itself where several "
                "ranks make it; for a reducer build the module anew"
            )
        refuse_reduced(((name, p) for name, p in module.named_parameters() if p.requires_grad), but_of=module)
        refuse_ddp(module)
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if stepping := [name for name, p in parameters.items() if hasattr(p, "_in_backward_optimizers")]:
            raise ConfigError(f"an optimizer steps {stepping[0]} in backward, before its gradient is averaged")
        if not parameters:
            raise ConfigError("no parameter of the module needs a gradient")
        if meta := [name for name, p in parameters.items() if p.is_meta]:
            raise ConfigError(f"{meta[0]} holds no values (meta device): give it some before the reducer is made")
        devices = {str(p.device) for p in parameters.values()}
        if len(devices) > 1:
            raise ConfigError(f"the parameters are on {', '.join(sorted(devices))}: a reducer is for one device")
        check_reduce(self.reduce)
        for name, child in module.named_modules():
            if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse and child.weight.requires_grad:
                why = "makes sparse gradients, which cannot be reduced in buckets: use sparse=False"
                raise ConfigError(f"{name} {why}")
        if len(set(self.order or ())) < len(self.order or ()):
            raise ConfigError("order= has a name twice")
        if unknown := [name for name in self.order or () if name not in parameters]:
            raise ConfigError(f"order= has {unknown[0]}, which is no parameter that needs a gradient")
        if self.is_auto and not isinstance(self.cost, CostModel):
            raise ConfigError("bucket='auto' needs cost=, as fit_cost_model(...).model measures it")
        for name, value in (
            ("bucket", self.cap_bytes), ("first_bucket", self.first_cap_bytes), ("max_in_flight", self.max_in_flight)
        ):  # fmt: skip
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name} is a whole number of at least 1, not {value!r}")


def check_reduce(reduce: str) -> None:
    """Refuse a word that names no collective.

    Raises:
        ConfigError: it is none of the two names.
    """
    if reduce not in ("all_reduce", "reduce_scatter"):
        raise ConfigError(f"reduce must be 'all_reduce' or 'reduce_scatter', not {reduce!r}")
