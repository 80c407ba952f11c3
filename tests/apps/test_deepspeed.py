"""A DeepSpeed configuration becomes arguments that the classes take, and every other key is named."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tierstore.apps.deepspeed import Translation, translate
from tierstore.apps.options import TrainOptions, options_of_object
from tierstore.cli import app
from tierstore.config import AdamWConfig, TierConfig
from tierstore.errors import ConfigError
from tierstore.train.engine import Engine

FULL: dict[str, Any] = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-7, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-4, "warmup_num_steps": 100}},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "offload_param": {"device": "nvme", "nvme_path": "/a", "pin_memory": True, "buffer_count": 5},
        "offload_optimizer": {"device": "nvme", "nvme_path": "/b", "pipeline_read": True, "ratio": 0.3},
    },
    "aio": {"block_size": 262144},
    "activation_checkpointing": {"cpu_checkpointing": True},
    "gradient_clipping": 0.5,
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "tensorboard": {"enabled": True},
    "gradient_acumulation_steps": 2,
    "frobnicate": 1,
}


def of(values: dict[str, Any], tmp_path: Path, ranks: int = 1, **budgets: int) -> Translation:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(values))
    return translate(path, ranks=ranks, **budgets)


def test_an_optimizer_that_is_null_is_none(tmp_path: Path) -> None:
    found = of({"optimizer": None}, tmp_path)
    assert found.optimizer == {}
    assert dict(found.notes)["optimizer"].startswith("none is given")


def test_a_full_configuration(tmp_path: Path) -> None:
    found = of(FULL, tmp_path, 8, gpu_memory=10**9, cpu_memory=10**10)
    tiers = TierConfig(**found.tiers)
    assert (tiers.nvme, tiers.gpu_memory, tiers.cpu_memory) == ((Path("/a"), Path("/b")), 10**9, 10**10)
    assert AdamWConfig(**found.optimizer) == AdamWConfig(lr=2e-4, betas=(0.9, 0.95), eps=1e-7, weight_decay=0.1)
    assert found.engine == {"zero": 3, "loss_scale": "dynamic", "max_grad_norm": 0.5}
    assert found.engine.keys() <= inspect.signature(Engine).parameters.keys()
    options = TrainOptions(**options_of_object(found.train, "here"))
    assert (options.batch, options.accumulate, options.clip, options.warmup) == (32, 2, 0.5, 100)
    assert (options.lr, options.weight_decay, options.dtype.value) == (2e-4, 0.1, "fp16")
    notes = dict(found.notes)
    assert notes["zero_optimization.offload_param.buffer_count"] == "tierstore sizes its buffers itself"
    for key in ("zero_optimization.overlap_comm", "zero_optimization.offload_optimizer.ratio", "aio.block_size",
                "activation_checkpointing.cpu_checkpointing", "tensorboard", "fp16.initial_scale_power"):  # fmt: skip
        assert "unknown" not in notes[key]
    assert notes["gradient_acumulation_steps"].endswith("did you mean gradient_accumulation_steps?")
    assert notes["frobnicate"] == "unknown, and not used"
    assert notes["bf16.enabled"].startswith("auto")


def test_every_key_is_translated_or_named(tmp_path: Path) -> None:
    notes = dict(
        of({"bf16": {"enabled": True}, "zero_optimization": {"stage": 2, "x": 1}, "aio": {"y": 2}}, tmp_path).notes
    )
    assert {"zero_optimization.x", "aio.y"} <= notes.keys()


def test_defaults_are_deepspeeds_own(tmp_path: Path) -> None:
    found = of({}, tmp_path)
    assert found.engine == {"zero": 0, "max_grad_norm": None}
    assert (found.train["dtype"], found.train["clip"], found.train["accumulate"]) == ("fp32", 0.0, 1)
    assert "nvme" not in found.tiers
    assert dict(found.notes)["cpu_memory"].startswith("DeepSpeed has no budgets")


def test_what_is_auto_leaves_the_defaults_of_tierstore(tmp_path: Path) -> None:
    auto = {"optimizer": {"type": "auto"}, "zero_optimization": {"stage": "auto", "offload_param": {"device": "cpu"}}}
    found = of(auto, tmp_path)
    assert not {"zero", "lr", "weight_decay"} & found.train.keys()
    assert "zero" not in found.engine
    given = of({"optimizer": {"type": "auto", "params": {"lr": 0.5}}}, tmp_path)
    assert given.train["lr"] == 0.5
    assert "weight_decay" not in given.train


def test_all_auto_of_hugging_face(tmp_path: Path) -> None:
    auto = {
        "bf16": {"enabled": "auto"}, "gradient_clipping": "auto", "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto",
                                                           "warmup_max_lr": "auto"}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "offload_optimizer": {"device": "cpu"}},
    }  # fmt: skip
    found = of(auto, tmp_path)
    assert found.train == {"zero": 3, "device": "cuda", "accumulate": 1}
    assert found.optimizer == {"eps": 1e-8, "decoupled": True}
    assert found.engine == {"zero": 3}
    assert "lr_scheduler" in dict(found.notes)["scheduler"]


@pytest.mark.parametrize(
    ("scheduler", "lr", "warmup", "defaults"),
    [
        ({"type": "WarmupLR"}, 1e-3, 1000, 2),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}}, 3e-4, None, 0),
        ({"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_num_steps": 5}}, 1e-3, 5, 1),
        ({"type": "WarmupCosineLR", "params": {"total_num_steps": 9}}, 3e-4, 100, 1),
        ({"type": "OneCycle"}, 3e-4, None, 0),
    ],
)
def test_schedules(scheduler: dict[str, Any], lr: float, warmup: int | None, defaults: int, tmp_path: Path) -> None:
    found = of({"optimizer": {"type": "AdamW", "params": {"lr": 3e-4}}, "scheduler": scheduler}, tmp_path)
    assert (found.train["lr"], found.optimizer["lr"], found.train.get("warmup")) == (lr, lr, warmup)
    for name in scheduler.get("params", {}):
        if name not in ("warmup_max_lr", "warmup_num_steps") or warmup is None:
            assert f"scheduler.params.{name}" in dict(found.notes)
    assert "scheduler" in dict(found.notes)
    told = {name: note for name, note in found.notes if "left out: " in note and name.startswith("scheduler")}
    assert sum("DeepSpeed's default" in note for note in told.values()) == defaults


def test_what_a_schedule_has_and_train_has_not_is_named(tmp_path: Path) -> None:
    params = {"warmup_min_lr": 1e-5, "warmup_type": "log", "last_batch_iteration": 3}
    notes = dict(of({"scheduler": {"type": "WarmupLR", "params": params}}, tmp_path).notes)
    assert {f"scheduler.params.{name}" for name in params} <= notes.keys()
    assert notes["scheduler.params.warmup_min_lr"] == "train warms up linearly, from 0"


@pytest.mark.parametrize(
    ("kind", "params", "expected"),
    [
        ("AdamW", {}, (0.0, True)),
        ("AdamW", {"torch_adam": True}, (0.01, True)),
        ("AdamW", {"adam_w_mode": False}, (0.0, True)),
        ("Adam", {}, (0.0, True)),
        ("Adam", {"adam_w_mode": False, "torch_adam": True}, (0.0, False)),
    ],
)
def test_decay_is_deepspeeds(kind: str, params: dict[str, Any], expected: tuple[float, bool], tmp_path: Path) -> None:
    values = of({"optimizer": {"type": kind, "params": params}}, tmp_path).optimizer
    assert (values["weight_decay"], values["decoupled"]) == expected


def test_stage_0_offloads_nothing(tmp_path: Path) -> None:
    offload = {"device": "nvme", "nvme_path": "/a"}
    found = of({"zero_optimization": {"stage": 0, "offload_optimizer": offload}}, tmp_path)
    assert "nvme" not in found.train
    assert "stage 0" in dict(found.notes)["zero_optimization.offload_optimizer.device"]


def test_several_nodes(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text('{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}')
    result = CliRunner().invoke(app, ["plan", "--deepspeed", str(path), "--nodes", "2", "--gpus", "8"])
    command = result.output.splitlines()[0]
    assert command.startswith("torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29400 --nproc-per-node 8 ")
    assert "--batch 32" in command


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--gpus", "-1", "--cpu-memory", "10GB"], "--gpus must be at least 1, not -1"),
        (["--nodes", "0"], "--nodes must be at least 1, not 0"),
        (["--json", "x", "--plot", "y.png", "--zero", "3"], "--zero, --json, --plot cannot be used with --deepspeed"),
        (["--nvme-capacity", "1TB"], "--nvme-capacity cannot be used with --deepspeed"),
    ],
)
def test_options_that_a_translation_does_not_take(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text("{}")
    result = CliRunner().invoke(app, ["plan", "--deepspeed", str(path), *arguments])
    assert result.exit_code == 2
    assert sentence in result.stderr


def test_batches_of_two_factors(tmp_path: Path) -> None:
    found = of({"train_batch_size": 64, "gradient_accumulation_steps": 4}, tmp_path, 2)
    assert (found.train["batch"], found.train["accumulate"]) == (16, 4)
    assert found.tiers["accumulation_steps"] == 4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"version": 3, "read_bytes_per_s": 1e9}, "is no DeepSpeed configuration: no key of it is one of DeepSpeed's"),
        ({"zero_optimization": {"stag": 3}, "fp16": {"enabled": 2}}, "fp16.enabled = 2 must be true or false"),
        ({"gradient_clipin": 1, "fp16_": {"x": 1}, "bf16": {"enabled": 2}}, "bf16.enabled = 2 must be true or false"),
        ({"zero_optimization": 3}, "zero_optimization = 3 must be an object"),
        ({"zero_optimization": {"stage": "3"}}, "zero_optimization.stage = '3' must be a whole number"),
        ({"zero_optimization": {"stage": 7}}, "zero_optimization.stage = 7 must be at most 3"),
        ({"optimizer": {"params": {"betas": [2, -1]}}}, r"betas\.0: must be less than 1"),
        ({"gradient_clipping": True}, "gradient_clipping = True must be a number"),
        ({"gradient_clipping": -1}, "gradient_clipping = -1 must be a number that is not negative"),
        ({"bf16": {"enabled": 1}}, "bf16.enabled = 1 must be true or false"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "exclude each other"),
        ({"optimizer": {"type": "Lamb"}}, "'Lamb' has no counterpart"),
        ({"optimizer": {"params": {"amsgrad": True}}}, "amsgrad has no counterpart"),
        ({"optimizer": {"params": {"betas": [0.9]}}}, "must be a list of two numbers"),
        ({"zero_optimization": {"offload_param": {"device": "disk"}}}, "must be 'none', 'cpu' or 'nvme'"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "needs an nvme_path"),
        ({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}, "cannot be divided by 4"),
        (
            {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4},
            "train_batch_size 8 is not micro-batch 4 x accumulation 4 x 1 ranks",
        ),
    ],
)
def test_what_cannot_be_translated(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        of(values, tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ['{"a": 1} // comment', '{"a": 1, /* x */ "b": 2}', "[1]", '{"a": 1, "a": 2}', "\x00"])
def test_a_file_that_is_not_json(text: str, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"ds_config\.json"):
        translate(path, ranks=1)


def test_the_command_writes_what_train_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, written = tmp_path / "ds_config.json", tmp_path / "tierstore.json"
    many_digits = {"gradient_clipping": 1 / 3, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-4 / 3}}}
    given.write_text(json.dumps(FULL | many_digits))
    arguments = ["plan", "--deepspeed", str(given), "--gpus", "8", "--cpu-memory", "80GB", "--gpu-memory", "20GB",
                 "--write", str(written)]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    command = result.output.splitlines()[0]
    assert command.startswith("torchrun --nproc-per-node 8 -m tierstore.cli train --zero 3 --nvme /a --nvme /b")
    tiers = json.loads(written.read_text())["TierConfig"]
    assert (tiers["cpu_memory"], tiers["gpu_memory"]) == (9 * 10**9, 18 * 10**9)
    assert "* --gpu-memory: nine tenths of what was given; subtract what activations take" in result.output

    asked: list[TrainOptions] = []
    monkeypatch.setattr("tierstore.cli.train._run_training", lambda options, launch, stop: asked.append(options))
    from_file = CliRunner().invoke(app, ["train", "--options", str(written)])
    assert from_file.exit_code == 0, from_file.output
    from_words = CliRunner().invoke(app, command.split()[5:])
    assert from_words.exit_code == 0, from_words.output
    assert asked[0] == asked[1]
