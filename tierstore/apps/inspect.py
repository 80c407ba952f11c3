"""What `tierstore inspect` shows: groups and tensors of a pack or a store as a tree, and a map of the file.

Scope: records to a tree, a map and JSON. Reads headers and manifests, no data.
Not here: the checksums (`apps/verify.py`).
Owner: nothing is kept between calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.text import Text
from rich.tree import Tree

from tierstore.apps.verify import is_store
from tierstore.archive.opening import ArchiveFile, open_archive, refuse_idle
from tierstore.archive.sources import refuse_unfinished
from tierstore.config import format_size
from tierstore.errors import FormatError
from tierstore.pack.archive import ARCHIVE_KEY
from tierstore.pack.layout import TensorEntry, TensorSpec, quoted
from tierstore.pack.validate import read_header
from tierstore.plots import new_figure, save_figure
from tierstore.store.verification import committed_chunks, is_of_tensors, tensors_of

FIRST_TENSORS = 40
_MAP_CELLS = 64
_SHADES = "█▒"
_COLORS = ("cyan", "magenta", "yellow", "green", "blue", "red")


@dataclass(frozen=True, slots=True)
class Part:
    """A group, or a kind of chunks, in a file; `begin` is in bytes from the start of the file."""

    name: str
    codec: str
    begin: int
    content_bytes: int
    stored_bytes: int
    chunks: int
    tensors: tuple[TensorEntry | TensorSpec, ...]

    @property
    def ratio(self) -> float:
        return self.content_bytes / self.stored_bytes if self.stored_bytes else 1.0


@dataclass(frozen=True, slots=True)
class Content:
    """What a path holds; `facts` are shown beside its name."""

    what: str
    facts: dict[str, Any]
    files: tuple[tuple[Path, int, tuple[Part, ...]], ...]


def look(paths: Sequence[Path]) -> Content:
    """What a pack, an ordinary safetensors file or a store holds.

    Raises:
        ConfigError: one of several paths is no part of what the first one holds.
        FormatError, StorageError: it is none of them, or cannot be read.
    """
    if is_store(paths[0]):
        return _store(paths)
    refuse_unfinished(paths[0])
    if paths[0].is_file() and ARCHIVE_KEY not in (header := read_header(paths[0])).metadata:
        refuse_idle(paths, [paths[0]])
        tensors = tuple(header.tensors.values())
        size = header.file_bytes - header.data_start
        part = Part("tensors", "none", header.data_start, size, size, 0, tensors)
        return Content("safetensors file, no pack", {"checksums": "none"}, ((paths[0], header.file_bytes, (part,)),))
    files = open_archive(paths)
    first = files[0].archive
    facts = {"archive": first.identity, "order": first.order, "chunk_bytes": first.chunk_bytes,
             "aliases": {alias: name for file in files for alias, name in file.archive.aliases.items()}}  # fmt: skip
    return Content(
        f"pack of {len(files)} files" if len(files) > 1 else "pack",
        facts,
        tuple((file.path, file.header.file_bytes, tuple(_parts(file))) for file in files),
    )


def _parts(file: ArchiveFile) -> Iterator[Part]:
    begin = file.header.data_start
    for group in file.archive.groups:
        stored, count = group.stored_bytes, len(group.chunks)
        yield Part(group.name, group.codec.value, begin, group.content_bytes, stored, count, group.tensors)
        begin += group.stored_bytes


def _store(paths: Sequence[Path]) -> Content:
    generation, chunks = committed_chunks(paths)
    rows = {group: tuple(TensorSpec(*one) for one in tensors) for group, tensors in tensors_of(generation).items()}
    files = []
    for path in sorted({chunk.path for chunk in chunks}):
        mine = [chunk for chunk in chunks if chunk.path == path]
        parts = []
        for name in dict.fromkeys(chunk.group for chunk in mine):
            of_group = [chunk for chunk in mine if chunk.group == name]
            content = sum(chunk.padded_bytes for chunk in of_group)
            stored = sum(chunk.stored_bytes for chunk in of_group)
            parts.append(
                Part(name, of_group[0].codec, of_group[0].offset, content, stored, len(of_group), rows.get(name, ()))
            )
        files.append((path, path.stat().st_size, tuple(parts)))
    facts = {"generation": generation.number, "groups": len(rows), "directories": generation.layout["directories"]}
    what = "store of named tensors" if is_of_tensors(generation) else "training store"
    return Content(what, facts, tuple(files))


def tree(content: Content, *, tensors: bool | None = None) -> Tree:
    """Files, their maps, groups and tensors.

    Args:
        tensors: True names all tensors, False none; None names the first ones, and says how many more there are.
    """
    total = sum(len(part.tensors) for _, _, parts in content.files for part in parts)
    left = total if tensors else 0 if tensors is False else FIRST_TENSORS
    facts = ", ".join(f"{key} {value}" for key, value in content.facts.items() if value != {})
    root = Tree(escape(f"{content.what} ({facts})"))
    for path, size, parts in content.files:
        stored = sum(part.stored_bytes for part in parts)
        ratio = sum(part.content_bytes for part in parts) / stored if stored else 1.0
        branch = root.add(escape(f"{path}: {format_size(size)}, groups {len(parts)}, ratio {ratio:.3f}"))
        branch.add(_map(parts, size))
        for number, part in enumerate(parts):
            title = Text("■ ", style=_COLORS[number % len(_COLORS)])
            title.append(
                f"{part.name}: tensors {len(part.tensors)}, {format_size(part.content_bytes)}, chunks {part.chunks}, "
                f"{part.codec}, ratio {part.ratio:.3f}, at byte {part.begin}", style="default",
            )  # fmt: skip
            leaf = branch.add(title)
            for row in part.tensors[:left]:
                leaf.add(escape(f"{quoted(row.name)} {row.dtype} {list(row.shape)}"))
            left -= min(left, len(part.tensors))
    for alias, name in content.facts.get("aliases", {}).items():
        root.add(escape(f"{quoted(alias)} is {quoted(name)}"))
    if tensors is None and total > FIRST_TENSORS:
        root.add(f"{total - FIRST_TENSORS:,} more lines of tensors: --tensors shows all")
    return root


def _map(parts: Sequence[Part], file_bytes: int) -> Text:
    """The file from first byte to last, one cell for each 1/64 of it, in the shade of the group at the cell's start."""
    text = Text()
    shown: list[int] = []  # groups so far: neighbours have different shades, also without colours
    for cell in range(_MAP_CELLS):
        at = cell * file_bytes // _MAP_CELLS
        number = next((i for i, part in reversed(list(enumerate(parts))) if part.begin <= at), None)
        if number is None:
            text.append("·")
            continue
        if not shown or shown[-1] != number:
            shown.append(number)
        text.append(_SHADES[len(shown) % len(_SHADES)], style=_COLORS[number % len(_COLORS)])
    return text


def as_json(content: Content) -> dict[str, Any]:
    """The same for a program, in bytes."""
    return {
        "what": content.what,
        **content.facts,
        "files": [
            {
                "path": str(path),
                "file_bytes": size,
                "groups": [
                    {"name": part.name, "codec": part.codec, "begin": part.begin, "content_bytes": part.content_bytes,
                     "stored_bytes": part.stored_bytes, "ratio": part.ratio, "chunks": part.chunks,
                     "tensors": [[row.name, row.dtype, list(row.shape)] for row in part.tensors]}
                    for part in parts
                ],
            }
            for path, size, parts in content.files
        ],
    }  # fmt: skip


def draw(content: Content, path: Path) -> None:
    """The map as a picture: each file a bar, each group a stretch of it.

    Raises:
        FormatError: there is nothing to draw.
    """
    if not content.files:
        raise FormatError("there are no files to draw")
    figure = new_figure(10, 1.6 + 0.6 * len(content.files))
    axes = figure.add_subplot()
    for number, (_, _, parts) in enumerate(content.files):
        for index, part in enumerate(parts):
            width = part.stored_bytes / 2**20
            axes.barh(number, width, left=part.begin / 2**20, height=0.6, color=f"C{index % 10}", edgecolor="white",
                      linewidth=0.3)  # fmt: skip
    names = ["/".join(file.absolute().parts[-2:]) for file, _, _ in content.files]  # file names repeat in a store
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("position in the file, MiB")
    axes.set_title(f"{content.what}: a colour for each group")
    save_figure(figure, path)
