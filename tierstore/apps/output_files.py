"""Checks, before a command's work begins, that it can write its files and that they overwrite nothing of value.

Scope: paths of files and directories by the option that names them.
Not here: what `train` writes (`apps/outputs.py`), the writing itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from tierstore.errors import ConfigError
from tierstore.io.directories import why_no_directory
from tierstore.store.names import holds_data

COMPANION_KINDS = (
    ("config.json", "generation_config.json"),
    ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt",
     "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
     "spiece.model", "spm.model", "spm_char.model", "sentencepiece.model", "sentencepiece.bpe.model", "tiktoken.model",
     "tekken.json", "source.spm", "target.spm", "target_vocab.json", "vocab-src.json", "vocab-tgt.json", "bpe.codes",
     "dict.txt", "emoji.json", "normalizer.json", "entity_vocab.json", "byte_maps.json", "word_shape.json",
     "word_pronunciation.json", "prophetnet.tokenizer", "audio_tokenizer_config.json", "processor_config.json",
     "preprocessor_config.json", "video_preprocessor_config.json"),
)  # fmt: skip
"""Files that transformers and tokenizers read beside weights: of the model; of what makes its input."""
COMPANIONS = tuple(name for kind in COMPANION_KINDS for name in kind)
_CHECKPOINTS = (".safetensors", ".index.json", ".pt", ".pth", ".bin", ".ckpt")


def check_outputs(taken: Iterable[Path | None] = (), **files: Path | None) -> None:
    """Check that every file can be written and every picture drawn, so that no work is lost to a missing directory.

    Refused are paths that would overwrite a checkpoint, lie in a store, or that the command itself reads or makes.

    Args:
        taken: paths that the command reads, or makes besides.
        files: paths by the name of the option; `plot` is a picture.

    Raises:
        ConfigError: names the option and the path; nothing was written.
    """
    ours = {os.path.realpath(path) for path in taken if path is not None}
    seen: dict[str, str] = {}
    for field, path in files.items():
        if path is None:
            continue
        name = field.replace("_", "-")
        if os.path.isdir(path):
            raise ConfigError(f"cannot write --{name} {path}: it is a directory; give the name of a file")
        check_writable(name, path)
        place = os.path.realpath(path)
        is_beside = os.path.basename(place) in COMPANIONS and os.path.dirname(place) in ours
        if place in ours or is_beside:
            raise ConfigError(f"--{name} {path} is what this command itself reads or makes: name another file")
        if place.lower().endswith(_CHECKPOINTS):
            raise ConfigError(f"--{name} {path} has the name of a checkpoint: name another file")
        refuse_store(name, path, Path(place).parent)
        if os.path.exists(path) and not os.path.isfile(path):
            continue  # /dev/null takes everything
        other = seen.setdefault(place, name)
        if other != name:
            raise ConfigError(f"--{other} and --{name} would both write {path}: name two files")
    if (plot := files.get("plot")) is not None:
        from tierstore.plots import check_name, new_figure

        check_name(plot)
        new_figure(1, 1)  # raises without matplotlib


def check_directory(name: str, path: Path) -> None:
    """Check that the path is a directory, or that one can be made there.

    Raises:
        ConfigError: names the option and the path.
    """
    if reason := why_no_directory(path):
        raise ConfigError(f"cannot use --{name} {path}: {reason}")


def check_writable(name: str, path: Path) -> None:
    """Check that a file can be written at this path.

    Raises:
        ConfigError: names the option and the path.
    """
    if path == Path("-"):
        raise ConfigError(f"cannot write --{name} -: standard output is for what is shown; give the name of a file")
    if os.path.islink(os.path.realpath(path)):
        raise ConfigError(f"cannot write --{name} {path}: the link leads back to itself")
    parent = os.path.dirname(os.path.realpath(path))
    # Not by methods of Path, which raise where access is denied.
    is_there = os.path.exists(path)
    is_writable = os.access(path, os.W_OK) if is_there else os.path.isdir(parent) and os.access(parent, os.W_OK)
    if not is_writable:
        raise ConfigError(f"cannot write --{name} {path}: its directory is missing or not writable")


def refuse_store(name: str, path: Path, directory: Path) -> None:
    """Refuse a path in a store, which may hold nothing else.

    Raises:
        ConfigError: the directory is a store; names the option and the path.
    """
    if os.access(directory, os.R_OK) and directory.is_dir() and any(map(holds_data, os.listdir(directory))):
        raise ConfigError(f"--{name} {path} lies in a store, {directory}, which holds nothing else; name another place")
