"""`tierstore pack` and `tierstore unpack`: their options.

Not here: the work (`apps/pack.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tierstore.apps.plain import show_plain
from tierstore.cli.common import Debug, directory, file_option, rate, say, size_option, told
from tierstore.cli.interrupts import interruptible
from tierstore.config import Codec, format_size
from tierstore.errors import ConfigError

_MEMORY = size_option("The most memory this process may take [default: 1GiB].")
_TIMEOUT = typer.Option(
    min=1.0, metavar="SECONDS", help="Fail if the disk does not answer one call for so long, and say where."
)
_JSON = file_option("What was done, in bytes and seconds.")
_INTERRUPTED = "interrupted; what was not finished is removed"


def pack(
    source: Annotated[
        Path, typer.Argument(parser=directory, metavar="SRC", help="Checkpoint: safetensors, .pt, .bin, distributed.")
    ],
    destinations: Annotated[
        list[Path],
        typer.Argument(
            parser=directory, metavar="DST...", help="A name ending in .safetensors; or directories, one for each disk."
        ),
    ],
    codec: Annotated[Codec, typer.Option(help="Codec of all chunks; auto: what pays for each dtype.")] = Codec.NONE,
    read_rate: Annotated[
        int | None,
        size_option(
            "With --codec auto: bytes per second of the disk to read from; the fastest to load is taken "
            "[default: the smallest].",
            "RATE",
            rate,
        ),
    ] = None,
    shards: Annotated[
        int | None, typer.Option(min=1, help="Files of about equal bytes, cut at groups [default: one for each DST].")
    ] = None,
    memory: Annotated[int, _MEMORY] = 2**30,
    chunk: Annotated[int, size_option("Unit of checksums [default: 8MiB].")] = 2**23,
    below: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Only what the checkpoint holds below this key, such as state_dict."),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", help="Replace a pack that is there; in a directory its configuration and tokenizer, too."
        ),
    ] = False,
    timeout: Annotated[float, _TIMEOUT] = 1800.0,
    json: Annotated[Path | None, _JSON] = None,
    debug: Debug = False,
) -> None:
    """Pack a checkpoint in the order in which a step uses it. Every chunk has its checksum.

    The groups are spread over several DST, so that all disks are read at once.
    """
    from tierstore.apps.console import Console

    with told(debug):
        from tierstore.apps.files import write_object
        from tierstore.apps.output_files import check_outputs
        from tierstore.apps.pack import pack_json, run_pack, show_pack
        from tierstore.archive.packing import PackOptions
        from tierstore.pack.layout import listed

        console = Console()
        options = PackOptions(
            tuple(destinations), shards=shards, memory_bytes=memory, chunk_bytes=chunk, overwrite=overwrite
        )
        check_outputs([source, *destinations], json=json)
        with interruptible(_INTERRUPTED):
            summary = run_pack(source, options, codec, read_rate, console, below=below, timeout_s=timeout)
        show_pack(summary, console)
        if json is not None:
            write_object(json, pack_json(summary), "--json")
        if left_out := summary.source.left_out:
            say(f"left out, because they are not tensors: {listed(left_out)}")
        if nested := summary.source.nested:
            say(f"names begin with {listed(nested)}: --below {nested[0]} packs what is there, under its own names")


def unpack(
    sources: Annotated[
        list[Path],
        typer.Argument(
            parser=directory,
            metavar="SRC... DST",
            help="A pack, or its directories; then a directory, or a name ending in .safetensors, .pt or .bin.",
        ),
    ],
    shard_size: Annotated[int | None, size_option("Size of each file in a directory [default: 5GB].")] = None,
    memory: Annotated[int, _MEMORY] = 2**30,
    timeout: Annotated[float, _TIMEOUT] = 1800.0,
    json: Annotated[Path | None, _JSON] = None,
    debug: Debug = False,
) -> None:
    """Write a pack back as an ordinary checkpoint, bit for bit."""
    from tierstore.apps.console import Console

    with told(debug):
        from tierstore.apps.files import write_object
        from tierstore.apps.output_files import check_outputs
        from tierstore.apps.pack import run_unpack
        from tierstore.archive.unpacking import UnpackOptions

        *packs, destination = sources
        if not packs:
            raise ConfigError("give a pack and a destination: tierstore unpack SRC DST")
        options = UnpackOptions(destination, 5 * 10**9 if shard_size is None else shard_size, memory)
        if options.shard_bytes < 2**16:
            raise ConfigError(f"--shard-size must be at least 64KiB, not {format_size(options.shard_bytes)}")
        if shard_size is not None and options.names_a_file:
            raise ConfigError(f"--shard-size needs a directory, and {destination} is the name of one file")
        check_outputs(sources, json=json)
        console = Console()
        with interruptible(_INTERRUPTED):
            written, seconds = run_unpack(packs, options, console, timeout_s=timeout)
        for path in written:
            show_plain(console, str(path))
        if json is not None:
            write_object(json, {"files": [str(path) for path in written], "seconds": seconds}, "--json")
