"""An engine that keeps everything in memory: plain torch, with the interface that the training loop uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tierstore.config import Tier
from tierstore.errors import TierstoreError
from tierstore.plan.placement import Kind, UsageRow


@dataclass
class FakeReport:
    step: int
    grad_norm: float | None
    lr: list[float]
    loss_scale: float = 1.0
    skipped: bool = False
    seconds: dict[str, float] = field(
        default_factory=lambda: {"forward": 0.3, "backward": 0.5, "update": 0.1, "wait": 0.2, "total": 1.0}
    )
    bytes: dict[str, int] = field(default_factory=lambda: {"nvme_read": 10**9, "nvme_write": 5 * 10**8, "h2d": 0})
    peak_bytes: dict[str, int] = field(default_factory=lambda: {"gpu": 2**20, "cpu": 2**21})
    prefetch_depth: int = 2
    schedule: str = "forward"
    loss: float | None = None


@dataclass
class FakePlacement:
    updates_in_memory = False

    def usage(self) -> tuple[UsageRow, ...]:
        return (UsageRow(Kind.WEIGHTS, Tier.NVME, 3, 3 * 2**20),)


class FakeStore(dict[str, Any]):
    """The last generation: what outlives an engine."""


class FakeEngine:
    """Plain torch behind the engine's interface; a generation is a dictionary in `store`."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        store: FakeStore,
        before_commit: Callable[[int], None] = lambda _: None,
        buffered: Sequence[str] = (),
        not_on_gpu: str | None = None,
        refuses_snapshots: TierstoreError | None = None,
        **arguments: Any,
    ) -> None:
        self.arguments = arguments
        self.buffered = buffered
        self.not_on_gpu = not_on_gpu
        self._refuses_snapshots = refuses_snapshots
        self.placement = FakePlacement()
        self.calls: list[str] = []
        self.step_count = 0
        self._model, self._store, self._before_commit = model, store, before_commit
        self._callbacks: list[Callable[[Any], None]] = []
        self._syncs: list[Callable[[], None]] = []
        self.optimizer = torch.optim.AdamW(arguments["parameter_groups"], lr=arguments["optimizer"].lr)
        self._scheduler = arguments["lr_scheduler"](self.optimizer)
        if store and arguments["resume"] in ("auto", "must"):
            self._load()
        else:
            self._save()

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.calls.append("close")

    def __call__(self, **batch: Any) -> Any:
        self.calls.append("forward" if torch.is_grad_enabled() else "evaluate")
        return self._model(**batch)

    def train_step(self, batches: Sequence[Any], schedule: str) -> FakeReport:
        self.calls.append(schedule)
        losses = []
        for batch in batches:
            losses.append(self(**batch).loss)
            self.calls.append("backward")
            (losses[-1] / len(batches)).backward()
        return self.step(float(torch.stack(losses).detach().mean()))

    def before_commit(self, callback: Callable[[], None]) -> None:
        self._syncs.append(callback)

    def on_step(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    def step(self, loss: float | None = None) -> FakeReport:
        self.calls.append("step")
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self.arguments["max_grad_norm"] or 1e9)
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._scheduler.step()
        self.step_count += 1
        report = FakeReport(self.step_count, float(norm), rates, loss=loss)
        for callback in self._callbacks:
            callback(report)
        for sync in self._syncs:
            sync()
        self._before_commit(self.step_count)
        self._save()
        return report

    def statistics(self) -> dict[str, Any]:
        return {"buffered_directories": self.buffered, "not_on_gpu": self.not_on_gpu}

    def flush(self) -> None:
        self.calls.append("flush")

    def snapshot(self, name: str) -> None:
        self.calls.append(f"snapshot {name}")
        if self._refuses_snapshots is not None:
            raise self._refuses_snapshots

    def apply_pending(self) -> None:
        self.calls.append("apply pending")

    def export(self, directory: Any) -> None:
        self.calls.append(f"export {directory.name}")
        self._model.save_pretrained(directory)
        (directory / "config.json").unlink()
        (directory / "generation_config.json").unlink()

    def _save(self) -> None:
        clone = lambda state: torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, state)  # noqa: E731
        self._store.update(
            step=self.step_count, model=clone(self._model.state_dict()), optimizer=clone(self.optimizer.state_dict()),
            registered={name: value.state_dict() for name, value in self.arguments["registered"].items()},
            scheduler=self._scheduler.state_dict(), rng=torch.get_rng_state(),
        )  # fmt: skip
        for directory in self.arguments["tiers"].nvme:  # these files show that a store is there
            directory.mkdir(exist_ok=True)
            (directory / f"manifest-{self.step_count:012}.json").touch()

    def _load(self) -> None:
        self.step_count = self._store["step"]
        self._model.load_state_dict(self._store["model"])
        self.optimizer.load_state_dict(self._store["optimizer"])
        for name, value in self.arguments["registered"].items():
            value.load_state_dict(self._store["registered"][name])
        torch.set_rng_state(self._store["rng"])
        self._scheduler.load_state_dict(self._store["scheduler"])
