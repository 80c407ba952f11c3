"""`tierstore codecs`: the right bytes are tried, and the table says on which disk a codec pays."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from tierstore.apps.codec_samples import read_samples
from tierstore.cli import app
from tierstore.config import AdamWConfig, TierConfig
from tierstore.errors import ChecksumMismatch, ConfigError, FormatError
from tierstore.plan.bandwidth import BandwidthTable, DirectoryRates, Rate
from tierstore.plan.costs import pays_below_bytes_per_s
from tierstore.plan.placement import Kind
from tierstore.store.stripes import dealt
from tierstore.train.engine import Engine

SIZE = 384  # 147,456 weights: three chunks, two of them whole


def made_store(path: Path, codec: str, shares: Sequence[int] = (1,)) -> torch.Tensor:
    """Trains a layer for a step, on as many disks as there are shares; returns its weights."""
    torch.manual_seed(0)
    model = torch.nn.Linear(SIZE, SIZE, bias=False).bfloat16()
    nvme = [path, *(path.with_name(f"{path.name}{i}") for i in range(1, len(shares)))]
    rates = [Rate(share * 1e9, share * 1e9, share * 1e9) for share in shares]
    rows = [DirectoryRates(str(disk), rate, rate, rate, 2**23, 4, 2**23, 4) for disk, rate in zip(nvme, rates)]
    table = BandwidthTable(1e9, 1e9, 1e9, 1e10, 1e10, 1e10, 1e9, directories=tuple(rows))
    tiers = TierConfig(
        gpu_memory="8MiB", cpu_memory="64MiB", nvme=nvme, codec=codec, chunk_bytes=2**19, bandwidth=table
    )
    with Engine(model, tiers, AdamWConfig(), update="step") as engine:
        engine.backward(engine(torch.ones(1, SIZE, dtype=torch.bfloat16)).float().square().sum())
        engine.step()
        engine.flush()
        return torch.cat([value.flatten() for value in engine.state_dict().values()])


@pytest.mark.parametrize(
    ("codec", "shares"),
    [("none", (1,)), ("lz4-bitshuffle", (1,)), ("zstd-bitshuffle", (1, 1)), ("none", (4, 1)), ("lz4", (1, 2))],
)
def test_the_bytes_of_a_store_are_those_that_were_trained(codec: str, shares: Sequence[int], tmp_path: Path) -> None:
    weights = made_store(tmp_path / "run", codec, shares)
    samples = {(sample.kind, sample.dtype): sample for sample in read_samples(tmp_path / "run", 2**30)}
    assert set(samples) == {(Kind.WEIGHTS, "bf16"), (Kind.STATE, "bf16")}
    found = [torch.from_numpy(part).view(torch.bfloat16) for part in samples[Kind.WEIGHTS, "bf16"].parts]
    chunks = weights.bfloat16().split(2**16)
    chunks = [chunk for chunk, disk in zip(chunks, dealt(len(chunks), shares)) if disk == 0]
    assert len(found) == len(chunks)
    for part, chunk in zip(found, chunks):
        assert torch.equal(part[: chunk.numel()], chunk)
    assert [samples[key].item_bytes for key in sorted(samples)] == [4, 2]
    assert len(read_samples(tmp_path / "run", 1)[0].parts) == 1


def test_a_damaged_store_is_not_tried(tmp_path: Path) -> None:
    made_store(tmp_path / "run", "none")
    for path in (tmp_path / "run").glob("weights.*.safetensors"):
        data = bytearray(path.read_bytes())
        data[8192] ^= 1
        path.write_bytes(data)
    with pytest.raises(ChecksumMismatch, match="damaged, or just being written: chunk"):
        read_samples(tmp_path / "run", 2**30)


def test_the_packs_of_a_store_are_not_tried_as_a_checkpoint(tmp_path: Path) -> None:
    save_file({"w": torch.randn(3)}, tmp_path / "weights.a.safetensors")
    with pytest.raises(ConfigError, match="no safetensors file; of a store over several directories the first comes"):
        read_samples(tmp_path, 1)
    assert read_samples(tmp_path / "weights.a.safetensors", 1)[0].nbytes == 12


def test_safetensors_files_are_tried_by_dtype(tmp_path: Path) -> None:
    first = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16()}
    save_file(first, tmp_path / "1.safetensors")
    save_file({"c": torch.randn(11).bfloat16()}, tmp_path / "2.safetensors")
    sizes = {sample.dtype: (sample.item_bytes, sample.nbytes) for sample in read_samples(tmp_path, 2**30)}
    assert sizes == {"f32": (4, 60), "bf16": (2, 36)}
    one = read_samples(tmp_path / "1.safetensors", 2**30)
    assert one[0].parts[0].tobytes() == first["a"].numpy().tobytes()


def test_what_cannot_be_tried_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        read_samples(tmp_path / "nothing", 1)
    with pytest.raises(ConfigError, match="holds no generation of a store and no safetensors file"):
        read_samples(tmp_path, 1)
    (tmp_path / "x.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(FormatError):
        read_samples(tmp_path, 1)


def test_a_file_that_was_not_finished_is_told_as_one(tmp_path: Path) -> None:
    save_file({"a": torch.randn(3)}, tmp_path / "m.safetensors.partial")
    result = _codecs(tmp_path / "m.safetensors.partial")
    assert (result.exit_code, "is not finished; if nobody writes it now" in result.stderr) == (1, True), result.output


def _codecs(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["codecs", *map(str, arguments)])


def test_the_command_shows_ratios_and_on_which_disk_a_codec_pays(tmp_path: Path) -> None:
    weights = torch.randn(2**17, generator=torch.Generator().manual_seed(0)).bfloat16()
    save_file({"w": weights}, tmp_path / "w.safetensors")
    result = _codecs(tmp_path, "--disk", "1", "--cores", "2", "--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    assert "weights bf16: zstd-bitshuffle; 1.3" in result.output
    found = json.loads((tmp_path / "out.json").read_text())["kinds"][0]
    for one in found["codecs"]:  # like the table: with all of these cores
        pays = pays_below_bytes_per_s(one["ratio"], 2 * one["encode_bytes_per_s"])
        assert one["write_pays_below_bytes_per_s"] == pays
    ratios = {one["codec"]: one["ratio"] for one in found["codecs"]}
    assert ratios["lz4"] == 1
    assert 1.2 < ratios["lz4-bitshuffle"] < ratios["zstd-bitshuffle"] < 1.45
    assert found["auto"]["codec"] == "zstd-bitshuffle"
    fast = _codecs(tmp_path, "--disk", "1000TB")
    assert "weights bf16: none; " in fast.output
    assert "yes" not in fast.output
    assert "pays below: rate of a disk" in _codecs(tmp_path).output


def test_what_is_hardly_smaller_does_not_pay(tmp_path: Path) -> None:
    weights = torch.randn(2**17, generator=torch.Generator().manual_seed(0)).bfloat16()
    weights[:1000] = 0
    save_file({"w": weights}, tmp_path / "w.safetensors")
    result = _codecs(tmp_path, "--disk", "1MB", "--overlapped")
    (row,) = [re.findall(r"[\w.]+", line) for line in result.output.splitlines() if re.search(r"\blz4 ", line)]
    assert row[-2:] == ["no", "no"]
    assert 1.0 < float(row[3]) < 1.05


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "tierstore: nowhere does not exist; give a store or a safetensors file"),
        ([".", "--disk", "0/s"], "tierstore: --disk must be at least 1, not 0"),
        ([".", "--overlapped"], "tierstore: --overlapped says how a codec pays on a disk: give --disk, too"),
        ([".", "--disk", "fast"], "Invalid value for '--disk': not a size: 'fast'"),
        ([], "Missing argument 'PATH'"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], sentence: str) -> None:
    result = _codecs(*arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr
