"""Paths of a training run, checked before anything is built; and what an export holds besides the weights.

Scope: the paths of --nvme, --json, --trace and --export; whether a store holds a run; small files beside weights.
Not here: the lines of --json (`apps/metrics.py`), weights (`train/`), how a store is opened (`store/`).
Owner: nothing is kept between calls.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tierstore.apps.options import TrainOptions
from tierstore.apps.output_files import COMPANION_KINDS, check_directory, check_outputs, refuse_store
from tierstore.archive.publish import turn
from tierstore.config import format_size
from tierstore.errors import ConfigError
from tierstore.io.backend import Backend, storage_errors
from tierstore.io.directories import nearest
from tierstore.io.files import make_anew
from tierstore.store.manifest_files import Manifests

_UNFINISHED = ".companions-unfinished"


def check_paths(options: TrainOptions, *, writes: bool) -> None:
    """Check the paths, so that an unusable one is found before the first step, not after the last.

    Args:
        writes: whether this rank is the one that writes the files outside the store.

    Raises:
        ConfigError: names the option and the path; nothing was changed.
    """
    for store in options.nvme:
        check_directory("nvme", store)
    if not writes:
        return
    if options.export is not None:
        check_directory("export", options.export)
        refuse_store("export", options.export, options.export)
    taken = (options.export, options.config, options.checkpoint, options.data, options.bandwidth)
    check_outputs(taken, json=options.json, trace=options.trace)
    for name in ("export", "json", "trace"):
        path = getattr(options, name)
        for store in options.nvme:
            if path is not None and Path(os.path.realpath(path)).is_relative_to(os.path.realpath(store)):
                raise ConfigError(f"--{name} {path} lies in --nvme {store}, which holds nothing but a store")


def holds_a_run(store: Sequence[Path]) -> bool:
    """Whether the directories hold a generation, so that a run goes on from it or is refused."""
    if not store or not store[0].is_dir():
        return False
    return bool(Manifests(store[0], Backend()).numbers())


def write_configuration(configuration: Any, directory: Path) -> None:
    """Writes the configuration beside exported weights.

    A link named config.json is replaced, as are links with the weights' names; the file that the link leads to stays,
    because it may belong to another model.

    Raises:
        StorageError: the system refused.
    """
    with storage_errors("write", directory / "config.json"), _whole(directory) as made:
        configuration.save_pretrained(made)


@contextlib.contextmanager
def _whole(directory: Path) -> Iterator[Path]:
    """A temporary directory; its files move into `directory` at the end of a block without an error, each one whole.

    Blocks: while another writer does the same there, or renames weights.
    """
    made = directory / _UNFINISHED
    with turn(directory, Backend()):
        make_anew(made, Backend())
        try:
            yield made
            for path in made.iterdir():
                os.replace(path, directory / path.name)
        finally:
            shutil.rmtree(made, ignore_errors=True)


def little_room(directory: Path, nbytes: int) -> list[str]:
    """A warning before the run if `directory` has less room than `nbytes`, the most that the exported weights take."""
    free_bytes = shutil.disk_usage(nearest(directory)).free
    if free_bytes >= nbytes:
        return []
    return [
        f"--export {directory} has {format_size(free_bytes)} free, and the weights may take {format_size(nbytes)}: "
        "make room before the run ends, or they are lost"
    ]


def copy_companions(source: Path, directory: Path, *, replace: bool = False) -> None:
    """Copy the files that are read beside the weights, the configuration too.

    Args:
        replace: False: files that are there already stay. True: they may describe weights that are no more, so of each
            kind of which the source has a file, only its files are there in the end.

    Raises:
        ConfigError: another writer does not end.
        StorageError: the system refused.
    """
    for kind in COMPANION_KINDS:
        names = [name for name in kind if (source / name).is_file()]
        for name in names:
            if replace or not (directory / name).exists():
                with storage_errors(f"copy to {directory}", source / name), _whole(directory) as made:
                    # Another writer may have made it while this one waited.
                    if replace or not (directory / name).exists():
                        shutil.copyfile(source / name, made / name)
        for name in kind if replace and names else ():
            if name not in names and os.path.lexists(directory / name):
                with storage_errors("removal", directory / name):
                    os.unlink(directory / name)
