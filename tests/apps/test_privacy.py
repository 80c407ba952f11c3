"""What a run prints, or writes outside its store, shows nothing of tensors or data; only the owner can read the store.

Not here: what a run writes on purpose: exported weights, and the losses of `--json`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shutil
import stat
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tensor_stores
import torch
from runs import next_token_loss, tiny
from test_train import TINY_GPT2
from typer.testing import CliRunner

from tierstore.cli import app
from tierstore.config import Tier, TierConfig
from tierstore.errors import TierstoreError
from tierstore.train.engine import Engine

MARK = 75.3125  # exact in every dtype
TOKEN = 753190864208
MARKS = re.compile(r"75\.3125|7\.53125e|753190864208")
SECRET = re.compile(r"secretword|83\D{1,3}101\D{1,3}99\D{1,3}114", re.IGNORECASE)  # or its tokens, which are bytes


def told(text: str) -> list[str]:
    return MARKS.findall(text)


def everything(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def damage(directory: Path) -> None:
    for path in directory.glob("*.[ab].safetensors"):
        data = bytearray(path.read_bytes())
        data[-4096:] = bytes(byte ^ 1 for byte in data[-4096:])
        path.write_bytes(data)


def engine(store: Path, **options: Any) -> Engine:
    """An engine whose model has the value `MARK` in all weights."""
    model = tiny(blocks=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(MARK)
    tiers = TierConfig(gpu_memory="4MiB", cpu_memory="3MiB", nvme=[store])
    return Engine(model, tiers, **options)


def errors(store: Path) -> Iterator[BaseException]:
    """Errors that a user of the engine may see."""
    with engine(store) as running:
        running.backward(next_token_loss(running, torch.randint(0, 8, (2, 8))))
        running.step()
    attempts: list[dict[str, Any]] = [{"resume": "never"}, {"resume": "auto", "update": "nothing"}]
    damage(store)
    for options in [*attempts, {"resume": "must"}, {"resume": "previous"}]:
        try:
            with engine(store, **options) as running:
                next_token_loss(running, torch.full((2, 8), TOKEN))
        except Exception as error:
            yield error


def test_errors_say_nothing_of_weights_or_tokens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    found = list(errors(tmp_path / "store"))
    assert len(found) == 4
    for error in found:
        assert isinstance(error, TierstoreError), everything(error)
        assert not told(everything(error))
    assert not told(caplog.text)


def test_errors_of_named_tensors_say_nothing_of_them(tmp_path: Path) -> None:
    async def run() -> None:
        async with tensor_stores.opened(tmp_path) as store:
            await store.put("h", {"w": torch.full((3000,), MARK)}, tier=Tier.NVME)
        damage(tmp_path / "store")
        async with tensor_stores.opened(tmp_path) as store:
            sparse = torch.full((9,), MARK).to_sparse()
            for work in (store.acquire("h").__aenter__(), store.put("x", {"w": sparse}, tier=Tier.CPU)):
                with pytest.raises(TierstoreError) as refusal:
                    await work
                assert not told(everything(refusal.value) + repr(store) + repr(store.usage()))

    asyncio.run(run())


def test_a_run_prints_and_traces_nothing_of_its_text(tmp_path: Path) -> None:
    text, store, log, trace = (tmp_path / name for name in ("text.txt", "store", "log", "trace"))
    text.write_text("SecretWord " * 3000)
    (tmp_path / "config").write_text(json.dumps(TINY_GPT2))
    options = {"config": tmp_path / "config", "data": text, "nvme": store, "json": log, "trace": trace}
    arguments = ["train", "--steps", "3", "--batch", "2", "--sequence", "16", "--dtype", "fp32"]
    arguments += [f"--{name}={value}" for name, value in options.items()]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    refused = CliRunner().invoke(app, [*arguments, "--debug"])  # the store holds a run
    shown = result.output + refused.output + everything(refused.exception or Exception())
    assert refused.exit_code != 0
    assert not SECRET.search(shown + log.read_text() + trace.read_text())
    assert {key for line in log.read_text().splitlines() for key in json.loads(line)} >= {"loss"}
    for path in store.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert stat.S_IMODE(store.stat().st_mode) == 0o700
    copies = [path for path in tmp_path.rglob("*") if path.is_file() and path != text and store not in path.parents]
    assert not [path for path in copies if b"SecretWord" in path.read_bytes()]


def test_every_file_of_a_store_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with engine(tmp_path / "store") as running:
            running.flush()
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "store").iterdir()}
    finally:
        os.umask(before)
    assert set(modes.values()) == {0o600}, modes
    assert "lock" in modes
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o700
    shutil.rmtree(tmp_path / "store")
