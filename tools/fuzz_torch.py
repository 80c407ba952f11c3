"""Targets of `tools/fuzz.py` in the formats of torch: files of torch.save, and distributed checkpoints."""

from __future__ import annotations

import io
import random
import zipfile
from pathlib import Path

from fuzz_changes import Failure, Mutate, blind, changed_pickle

# --- files of torch -------------------------------------------------------------------------------------------------


def read_torch(data: bytes, folder: Path) -> None:
    from tierstore.archive.sources import open_source

    source = open_source(folder / "a.pt")
    for tensor in source.tensors.values():
        for piece in tensor.pieces:
            if not 0 <= piece.begin <= piece.begin + piece.nbytes <= len(data):
                raise Failure(f"{piece} is not in a file of {len(data)} B")


def torch_seeds(folder: Path) -> dict[str, bytes]:
    import torch

    whole = torch.arange(60.0).view(6, 10)
    states = {
        "plain": {"a": whole, "b": whole.t(), "c": whole[1:3], "d": torch.zeros(0, 3), "e": torch.ones(()).bfloat16()},
        "nested": {"epoch": 3, "model": {"w": torch.nn.Parameter(whole)}, "state": [{"x": (1, 2.5, None)}, "text"]},
        "sparse": {"a": whole.to_sparse()},
    }
    seeds = {}
    for name, state in states.items():
        file = io.BytesIO()
        torch.save(state, file)
        seeds[name] = file.getvalue()
    return seeds


def change_torch(data: bytes, rng: random.Random, mutate: Mutate) -> bytes:
    """Records changed and the archive written anew, with right checksums; or bytes anywhere."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            records = [(info.filename, archive.read(info)) for info in archive.infolist()]
    except Exception:  # whatever zipfile makes of it
        return blind(data, rng, mutate)
    if not records or rng.random() < 0.1:
        return blind(data, rng, mutate)
    at = 0 if rng.random() < 0.7 else rng.randrange(len(records))
    name, content = records[at]
    which = rng.random()
    if which < 0.8:
        records[at] = (name, changed_pickle(content, rng, mutate) if name.endswith(".pkl") else mutate(content))
    elif which < 0.9:
        records.insert(rng.randrange(len(records)), (rng.choice(["archive/DATA.PKL", "../x", "/x", name]), content))
    else:
        del records[at]
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for record in records:
            archive.writestr(zipfile.ZipInfo(record[0]), record[1])
    return out.getvalue()


# --- distributed checkpoints: the metadata --------------------------------------------------------------------------


def read_distributed(data: bytes, folder: Path) -> None:
    from tierstore.archive.sources import open_source

    open_source(folder)


def distributed_seeds(folder: Path) -> dict[str, bytes]:
    return {"plain": (distributed_checkpoint(folder) / ".metadata").read_bytes()}


def distributed_checkpoint(folder: Path) -> Path:
    """Saves a small one."""
    import warnings

    import torch
    from torch.distributed.checkpoint import state_dict_saver

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state_dict_saver.save({"w": torch.ones(3, 4), "epoch": 1}, checkpoint_id=folder / "saved", no_dist=True)
    return folder / "saved"


def change_distributed(data: bytes, rng: random.Random, mutate: Mutate) -> bytes:
    return changed_pickle(data, rng, mutate)
