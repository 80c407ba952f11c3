"""`tierstore codecs`: its options, the table, the sentences.

Not here: the run (`apps/codecs.py`). Heavy modules are imported inside, so that `--help` answers at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tierstore.apps.plain import show_plain
from tierstore.cli.common import Debug, directory, file_option, rate, size_option, told
from tierstore.cli.interrupts import interruptible


def codecs(
    path: Annotated[
        Path,
        typer.Argument(
            parser=directory, metavar="PATH", help="Store (its first directory), safetensors file, or a folder of such."
        ),
    ],
    disk: Annotated[
        int | None, size_option("Bytes per second of a disk, such as 500MB: tells what pays there.", "RATE", rate)
    ] = None,
    cores: Annotated[int, typer.Option(help="How many encode and decode at once.")] = 1,
    overlapped: Annotated[
        bool, typer.Option("--overlapped", help="Those cores have nothing else to do, as beside a GPU.")
    ] = False,
    sample: Annotated[int, size_option("Bytes to try of each kind and dtype [default: 64MiB].")] = 2**26,
    json: Annotated[Path | None, file_option("All figures, in bytes and seconds.")] = None,
    debug: Debug = False,
) -> None:
    """Try every codec on your own weights and optimizer state. Shown: ratio, rates, the disks on which it pays."""
    with told(debug):
        from tierstore.apps.codecs import CodecOptions, as_json, as_table, compare, legend, sentences
        from tierstore.apps.console import Console
        from tierstore.apps.files import write_object
        from tierstore.apps.progress import share_bar

        options = CodecOptions(path=path, disk=disk, cores=cores, overlapped=overlapped, sample=sample, json=json)
        console = Console()
        with interruptible("interrupted"), share_bar(console) as tell:
            tried = compare(options, tell)
        console.print(as_table(options, tried))
        for sentence in (legend(options, tried), *sentences(tried)):
            show_plain(console, sentence)
        if json is not None:
            write_object(json, as_json(options, tried), "--json")
