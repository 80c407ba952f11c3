"""A DeepSpeed configuration as tierstore's own, with a reason for everything that is left out.

Scope: from `ds_config.json` to the arguments of `TierConfig`, `AdamWConfig` and `Engine`, and the options of `train`.
Not here: why keys are needless (`apps/deepspeed_keys.py`).
Owner: nothing is kept between calls.
"""

from __future__ import annotations

import difflib
import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tierstore.apps.deepspeed_keys import NEEDLESS
from tierstore.apps.files import read_object
from tierstore.apps.options import TrainOptions, as_option, options_of_object
from tierstore.config import AdamWConfig, TierConfig
from tierstore.errors import ConfigError

_AUTO = "auto"  # of the Hugging Face integration: the trainer fills it in
_SECTIONS = {
    "zero_optimization", "zero_optimization.offload_param", "zero_optimization.offload_optimizer", "aio", "bf16",
    "fp16", "bfloat16", "optimizer", "optimizer.params", "scheduler", "scheduler.params", "activation_checkpointing",
}  # fmt: skip
_TRANSLATED = {
    "zero_optimization.stage", "zero_optimization.offload_param.device",
    "zero_optimization.offload_param.nvme_path", "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_optimizer.nvme_path", "bf16.enabled", "fp16.enabled", "bfloat16.enabled",
    "fp16.loss_scale", "gradient_clipping", "gradient_accumulation_steps", "train_batch_size",
    "train_micro_batch_size_per_gpu", "optimizer.type", "scheduler.type",
    *(f"optimizer.params.{name}" for name in ("lr", "betas", "eps", "weight_decay", "adam_w_mode",
                                              "bias_correction", "amsgrad")),
    "scheduler.params.warmup_max_lr", "scheduler.params.warmup_num_steps",
}  # fmt: skip
_BETAS, _EPS = [0.9, 0.999], 1e-8
_WARMUP_LRS = {"WarmupLR": 1e-3, "WarmupDecayLR": 1e-3}  # regardless of the optimizer's own
_WARMUP_STEPS = {"WarmupLR": 1000, "WarmupDecayLR": 1000, "WarmupCosineLR": 100}
_ADAMS = {"adam", "adamw", "cpuadam", "deepspeedcpuadam", "fusedadam"}


@dataclass(frozen=True, slots=True)
class Translation:
    """The result of translating a configuration.

    Attributes:
        tiers, optimizer, engine: arguments of `TierConfig`, `AdamWConfig` and `Engine`.
        train: options of `tierstore train`, by name.
        notes: each key that has no counterpart, or needs work by hand, and why.
    """

    tiers: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    notes: list[tuple[str, str]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The arguments by class, and the options of `train` as `train --options` reads them."""
        return {"TierConfig": self.tiers, "AdamWConfig": self.optimizer, "Engine": self.engine, "train": self.train}

    def command(self) -> str:
        """The equivalent command line."""
        words = ["tierstore", "train"]
        for name, value in self.train.items():
            for one in value if isinstance(value, list) else [value]:
                words += [as_option(name), str(one)]
        return shlex.join(words)


def translate(path: Path, *, ranks: int, gpu_memory: int | None = None, cpu_memory: int | None = None) -> Translation:
    """Reads a configuration.

    Args:
        ranks: number of ranks that train together; DeepSpeed's micro-batch is that of one rank.
        gpu_memory, cpu_memory: budgets of a rank, in bytes, which DeepSpeed does not have.

    Raises:
        ConfigError: no such file or not a JSON object; a value of the wrong type, or one that the engine refuses; an
            optimizer other than Adam.
    """
    given = _Given(read_object(path, "DeepSpeed configuration"), str(path))
    if given.is_foreign:
        raise ConfigError(f"{path} is no DeepSpeed configuration: no key of it is one of DeepSpeed's")
    found = Translation()
    _tiers(given, found, gpu_memory, cpu_memory)
    _precision(given, found)
    _optimizer(given, found)
    _schedule(given, found)
    _batch(given, found, ranks)
    if not given.is_auto("gradient_clipping"):
        clip = given.number("gradient_clipping", 0.0)
        found.engine["max_grad_norm"] = clip or None
        found.train["clip"] = clip
    found.notes.extend(given.unused())
    TierConfig(**found.tiers)
    AdamWConfig(**found.optimizer)
    TrainOptions(**options_of_object(found.train, str(path)))
    return found


class _Given:
    """Values by dotted path, checked as they are read; "auto" counts as not given."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._source = source
        self._values = dict(_flat(values, ""))
        for section in _SECTIONS & self._values.keys():
            if self._values[section] is not None:
                self._refuse(section, "an object")

    @property
    def is_foreign(self) -> bool:
        """Whether no key is known, or close to a known one; False for an empty configuration."""
        known = {key.partition(".")[0] for key in _TRANSLATED | _SECTIONS | NEEDLESS.keys()}
        names = {key.partition(".")[0] for key in self._values}
        return bool(names) and not any(difflib.get_close_matches(name, known, n=1, cutoff=0.8) for name in names)

    def is_auto(self, key: str) -> bool:
        """Whether the value is left to the run, so that tierstore's own default holds."""
        return bool(self._values.get(key) == _AUTO)

    def has(self, section: str) -> bool:
        """Whether a key is given, or anything of a section."""
        values = self._values.items()
        return any(key == section or key.startswith(f"{section}.") for key, value in values if value is not None)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            self._refuse(key, "true or false")
        return bool(value)

    def number(self, key: str, default: float) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value >= 0):
            self._refuse(key, "a number that is not negative")
        return float(value)

    def whole(self, key: str, default: int | None, least: int = 1, most: int = 2**40) -> int | None:
        value = self._get(key, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self._refuse(key, f"a whole number of at least {least}")
        if value > most:
            self._refuse(key, f"at most {most}")
        return int(value)

    def text(self, key: str, default: str) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            self._refuse(key, "text")
        return str(value)

    def rates(self, key: str, default: list[float]) -> list[float]:
        value = self._get(key, default)
        if not (isinstance(value, list) and len(value) == 2 and all(type(one) in (int, float) for one in value)):
            self._refuse(key, "a list of two numbers")
        return [float(one) for one in value]

    def unused(self) -> Iterator[tuple[str, str]]:
        """Keys that were not translated, and why; also those that are "auto"."""
        known = sorted(_TRANSLATED | NEEDLESS.keys())
        for key, value in self._values.items():
            if key in _TRANSLATED and value == _AUTO:
                yield key, "auto: left out, so that the default of tierstore holds"
            elif key in NEEDLESS:
                yield key, NEEDLESS[key]
            elif key not in _TRANSLATED and key not in _SECTIONS:
                close = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
                yield key, f"unknown, and not used{f': did you mean {close[0]}?' if close else ''}"

    def _get(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        return default if value is None or value == _AUTO else value

    def _refuse(self, key: str, expected: str) -> None:
        raise ConfigError(f"{self._source}: {key} = {self._values[key]!r} must be {expected}")


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and f"{prefix}{name}" in _SECTIONS:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _tiers(given: _Given, found: Translation, gpu_memory: int | None, cpu_memory: int | None) -> None:
    stage = given.whole("zero_optimization.stage", 0, least=0, most=3)
    if given.is_auto("zero_optimization.stage"):
        stage = None  # the default of tierstore
    else:
        found.engine["zero"] = found.train["zero"] = stage
    directories: list[str] = []
    for section in ("zero_optimization.offload_param", "zero_optimization.offload_optimizer"):
        device = given.text(f"{section}.device", "none")
        if device not in ("none", "cpu", "nvme"):
            raise ConfigError(f"{section}.device = {device!r} must be 'none', 'cpu' or 'nvme'")
        path = given.text(f"{section}.nvme_path", "")
        if device == "nvme" and not path:
            raise ConfigError(f"{section}.device is 'nvme', so it needs an nvme_path")
        if device != "none" and stage == 0:
            found.notes.append((f"{section}.device", "not used: at stage 0 DeepSpeed offloads nothing"))
            continue
        if device == "nvme" and Path(path) not in map(Path, directories):
            directories.append(path)
        if device == "cpu":
            found.notes.append((f"{section}.device", "what is in CPU memory follows from cpu_memory"))
    if directories:
        found.tiers["nvme"] = found.train["nvme"] = directories
    found.tiers["device"] = found.train["device"] = "cuda"
    for name, value in (("gpu_memory", gpu_memory), ("cpu_memory", cpu_memory)):
        if value is None:
            found.notes.append((name, f"DeepSpeed has no budgets: give {as_option(name)}"))
        else:
            found.tiers[name] = found.train[name] = value


def _precision(given: _Given, found: Translation) -> None:
    is_fp16 = given.flag("fp16.enabled")
    is_bf16 = given.flag("bf16.enabled") or given.flag("bfloat16.enabled")
    if is_fp16 and is_bf16:
        raise ConfigError("fp16.enabled and bf16.enabled exclude each other")
    if not (is_fp16 or is_bf16) and (given.is_auto("bf16.enabled") or given.is_auto("fp16.enabled")):
        return
    found.train["dtype"] = "fp16" if is_fp16 else "bf16" if is_bf16 else "fp32"
    found.notes.append(("bf16, fp16", f"give the engine a model of dtype {found.train['dtype']}: it trains as it is"))
    if is_fp16:
        found.engine["loss_scale"] = given.number("fp16.loss_scale", 0.0) or "dynamic"
        if found.engine["loss_scale"] != "dynamic":
            found.notes.append(("fp16.loss_scale", "an argument of Engine; train scales dynamically"))


def _optimizer(given: _Given, found: Translation) -> None:
    if not given.has("optimizer"):
        found.notes.append(("optimizer", "none is given: the defaults of tierstore hold, as --lr and --weight-decay"))
        return
    kind = given.text("optimizer.type", "AdamW")
    if kind.lower() not in _ADAMS:
        raise ConfigError(f"optimizer.type {kind!r} has no counterpart: tierstore trains with Adam or AdamW")
    if given.flag("optimizer.params.amsgrad"):
        raise ConfigError("optimizer.params.amsgrad has no counterpart: tierstore trains with plain Adam or AdamW")
    if not given.flag("optimizer.params.bias_correction", True):
        raise ConfigError("optimizer.params.bias_correction = false has no counterpart: tierstore corrects the bias")
    values = found.optimizer
    values["lr"] = given.number("optimizer.params.lr", 1e-3)
    values["betas"] = given.rates("optimizer.params.betas", _BETAS)
    values["eps"] = given.number("optimizer.params.eps", _EPS)
    # As in DeepSpeed's engine: AdamW by its name or its mode; its own Adams decay by 0 by default, torch's by 0.01.
    values["decoupled"] = given.flag("optimizer.params.adam_w_mode", True) or kind.lower() == "adamw"
    decay = 0.01 if values["decoupled"] and given.flag("optimizer.params.torch_adam") else 0.0
    values["weight_decay"] = given.number("optimizer.params.weight_decay", decay)
    is_open = given.is_auto("optimizer.type")  # then the defaults are not DeepSpeed's either
    for key in ("lr", "betas", "eps", "weight_decay"):
        if given.is_auto(f"optimizer.params.{key}") or (is_open and not given.has(f"optimizer.params.{key}")):
            del values[key]
    found.train.update({name: values[name] for name in ("lr", "weight_decay") if name in values})
    if not values["decoupled"] or values.get("betas", _BETAS) != _BETAS or values.get("eps", _EPS) != _EPS:
        found.notes.append(("optimizer.params", "betas, eps and L2 decay are arguments of AdamWConfig, not of train"))


def _schedule(given: _Given, found: Translation) -> None:
    kind = given.text("scheduler.type", "")
    if not kind:
        return
    if kind in _WARMUP_LRS and not given.is_auto("scheduler.params.warmup_max_lr"):
        found.optimizer["lr"] = found.train["lr"] = given.number("scheduler.params.warmup_max_lr", _WARMUP_LRS[kind])
    if kind in _WARMUP_STEPS and not given.is_auto("scheduler.params.warmup_num_steps"):
        found.train["warmup"] = given.whole("scheduler.params.warmup_num_steps", _WARMUP_STEPS[kind], least=0)
    defaults = {"warmup_num_steps": _WARMUP_STEPS.get(kind), "warmup_max_lr": _WARMUP_LRS.get(kind)}
    for name, default in defaults.items():
        if default is not None and not given.has(key := f"scheduler.params.{name}"):
            found.notes.append((key, f"left out: {default:g}, DeepSpeed's default"))
    if kind == "WarmupLR":
        advice = "in a loop of your own: Engine(lr_scheduler=...); train warms up linearly, DeepSpeed by default by log"
    else:
        advice = f"{kind}: give Engine(lr_scheduler=optimizer -> a scheduler of torch); train does not decay the rate"
    found.notes.append(("scheduler", advice))


def _batch(given: _Given, found: Translation, ranks: int) -> None:
    """Any two of micro-batch, accumulation and whole batch give the third, as in DeepSpeed."""
    whole = given.whole("train_batch_size", None)
    micro = given.whole("train_micro_batch_size_per_gpu", None)
    steps = given.whole("gradient_accumulation_steps", None)
    if micro is None and whole is not None:
        micro = _divided(whole, ranks * (steps or 1))
    if steps is None and whole is not None and micro is not None:
        steps = _divided(whole, ranks * micro)
    if whole is not None and micro is not None and steps is not None and whole != micro * steps * ranks:
        raise ConfigError(
            f"train_batch_size {whole} is not micro-batch {micro} x accumulation {steps} x {ranks} ranks: "
            "give the number of ranks as --gpus"
        )
    if micro is not None:
        found.train["batch"] = micro * ranks
    found.train["accumulate"] = steps or 1
    if found.train["accumulate"] > 1:
        found.tiers["accumulation_steps"] = found.train["accumulate"]
        found.notes.append(("gradient_accumulation_steps", "in a loop of your own: with engine.no_sync()"))


def _divided(whole: int, parts: int) -> int:
    if whole % parts:
        raise ConfigError(
            f"train_batch_size {whole} cannot be divided by {parts} (ranks x the other factor): give the number of "
            "ranks as --gpus"
        )
    return whole // parts
