"""Files that a command writes at its end overwrite no checkpoint, no store, and nothing that it reads itself."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from tierstore.apps.files import write_object
from tierstore.apps.output_files import check_outputs
from tierstore.cli import app
from tierstore.config import TierConfig
from tierstore.errors import ConfigError
from tierstore.plan.bandwidth import BandwidthTable
from tierstore.train.engine import Engine

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint, its pack, a store, a configuration, rates; links to the first two, to itself and to nothing."""
    monkeypatch.chdir(tmp_path)
    save_file({"h.0.w": torch.ones(10, 10)}, "model")
    save_file({"h.0.w": torch.ones(10, 10)}, "m.safetensors")
    assert CliRunner().invoke(app, ["pack", "m.safetensors", "p.safetensors", "--memory", "1TiB"]).exit_code == 0
    Path("p.safetensors").rename("p")
    tiers = TierConfig(gpu_memory="1MiB", cpu_memory="16MiB", nvme=["store", "second"])
    with Engine(torch.nn.Linear(8, 8), tiers) as engine:
        engine.backward(engine(torch.ones(1, 8)).sum())
        engine.step()
    Path("folder").mkdir()
    save_file({"h.0.w": torch.ones(10, 10)}, "folder/model.safetensors")
    Path("folder/config.json").write_text('{"model_type": "gpt2"}')
    Path("config").write_text('{"model_type": "gpt2"}')
    write_object(Path("rates"), BandwidthTable(1e9, 1e9, 1e9, 1e10, 1e10, 1e10, 1e9).to_json(), "--json")
    Path("link").symlink_to("p")
    Path("other").symlink_to("m.safetensors")
    Path("loop").symlink_to("loop")
    Path("dangling").symlink_to("away/file")
    return tmp_path


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("verify p --json p", "--json p is what this command itself reads or makes"),
        ("verify link --json p", "is what this command itself reads or makes"),
        ("inspect p --json link", "is what this command itself reads or makes"),
        ("codecs model --json model", "is what this command itself reads or makes"),
        ("plan --config config --json config", "is what this command itself reads or makes"),
        ("plan --deepspeed config --write config", "is what this command itself reads or makes"),
        ("pack m.safetensors new.safetensors --json m.safetensors", "is what this command itself reads or makes"),
        ("pack m.safetensors new.safetensors --json new.safetensors", "is what this command itself reads or makes"),
        ("unpack p new --json new", "is what this command itself reads or makes"),
        ("simulate step --bandwidth rates --json rates", "is what this command itself reads or makes"),
        ("tune --checkpoint folder --bandwidth rates --json folder/config.json", "is what this command itself reads"),
        ("tune --checkpoint folder --bandwidth rates --write folder/config.json", "is what this command itself reads"),
        ("verify p --json m.safetensors", "--json m.safetensors has the name of a checkpoint"),
        ("verify p --json other", "--json other has the name of a checkpoint"),
        ("verify p --json model.safetensors.index.json", "has the name of a checkpoint"),
        ("verify store --json store/manifest-000000000001.json", "lies in a store, "),
        ("simulate step --json store/new", "lies in a store, "),
        ("train --config config --trace config", "is what this command itself reads or makes"),
        ("train --json both --trace both", "--json and --trace would both write both"),
        ("train --export new --json new", "is what this command itself reads or makes"),
        ("train --export store", "lies in a store, "),
        ("pack folder new --json folder/config.json", "is what this command itself reads or makes"),
        ("simulate step --json second/new", "lies in a store, "),
        ("verify p --json M.SAFETENSORS", "has the name of a checkpoint"),
        ("train --nvme new --trace store/weights.a.safetensors", "has the name of a checkpoint"),
        ("train --trace loop", "cannot write --trace loop"),
        ("verify p --json dangling", "cannot write --json dangling: its directory is missing or not writable"),
        ("delete loop", "loop is a link to "),
        ("verify p --json -", "cannot write --json -: standard output is for what is shown; give the name of a file"),
        ("unpack p -", "nothing is read from or written to a pipe"),
    ],
)
def test_nothing_is_written_over(there: Path, arguments: str, said: str) -> None:
    before = content(there)
    result = CliRunner().invoke(app, arguments.split(), env={"COLUMNS": "200"})
    print(result.output)
    assert said in result.output
    assert result.exit_code == 2, result.exception
    assert content(there) == before


def test_where_one_may_not_look_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed, stat, access = tmp_path / "closed", os.stat, os.access
    closed.mkdir()

    def refuse(path: Any, *rest: Any, **options: Any) -> os.stat_result:
        if Path(path).is_relative_to(closed) and Path(path) != closed:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return stat(path, *rest, **options)

    def deny(path: Any, mode: int) -> bool:
        return not Path(path).is_relative_to(closed) and access(path, mode)

    monkeypatch.setattr(os, "stat", refuse)  # root may look everywhere
    monkeypatch.setattr(os, "access", deny)
    with pytest.raises(ConfigError, match=r"cannot write --json .*x: its directory is missing or not writable"):
        check_outputs(json=closed / "x")


def test_what_takes_everything_may_be_named_twice(tmp_path: Path) -> None:
    check_outputs(json=Path(os.devnull), trace=Path(os.devnull))
    (tmp_path / "old").write_text("of the run before")
    check_outputs([tmp_path / "other"], json=tmp_path / "old", trace=tmp_path / "new")
    with pytest.raises(ConfigError, match="name two files"):
        check_outputs(json=tmp_path / "old", trace=tmp_path / ".." / tmp_path.name / "old")
