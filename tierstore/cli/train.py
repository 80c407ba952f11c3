"""`tierstore train`: its options, one rank or several, and what is said at the end.

Not here: the run (`apps/train.py`). Torch is imported inside, so that `--help` answers at once.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from tierstore.apps.files import read_object
from tierstore.apps.launch import Launch
from tierstore.apps.options import MODELS, FreedMemory, Precision, Preset, TrainOptions, options_of_object
from tierstore.apps.output_files import check_outputs
from tierstore.apps.stopping import StopRequest
from tierstore.cli.common import Debug, directory, file_option, given_options, say, size_option, told
from tierstore.config import Codec, Durability, MicroBatchSchedule, Resume, UpdateSchedule
from tierstore.errors import ConfigError
from tierstore.garbage import loading


def train(
    context: typer.Context,
    options: Annotated[
        Path | None,
        file_option("JSON object of options by name; options on the command line override it."),
    ] = None,
    preset: Annotated[Preset | None, typer.Option(help="Architecture with new weights [default: 25m].")] = None,
    config: Annotated[Path | None, file_option("config.json of any Hugging Face causal LM, with new weights.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(parser=directory, metavar="DIR", help="Local safetensors checkpoint to fine-tune.")
    ] = None,
    data: Annotated[
        Path | None,
        file_option("Training text, read as bytes [default: Python's own library source].", "FILE|DIR"),
    ] = None,
    gpu_memory: Annotated[
        int | None,
        size_option(
            "Budget of the GPU tier, per rank: weights, gradients, on a GPU the optimizer state that fits; no "
            "activations [default: 1GiB; without a GPU the part of --cpu-memory that serves best]."
        ),
    ] = None,
    cpu_memory: Annotated[int, size_option("Budget of the (pinned) CPU tier, per rank [default: 1GiB].")] = 2**30,
    nvme: Annotated[
        list[Path] | None,
        typer.Option(
            parser=directory,
            metavar="DIR",
            help="Directory of the store; repeat it for several disks [default: nothing is kept].",
        ),
    ] = None,
    zero: Annotated[
        int,
        typer.Option(
            metavar="0-3",
            help="What several ranks share out: 1 optimizer state, 2 gradients too, 3 weights too; 0 nothing.",
        ),
    ] = 3,
    dtype: Annotated[Precision, typer.Option(help="Dtype of weights and gradients.")] = Precision.BF16,
    batch: Annotated[int, typer.Option(help="Samples per micro-batch, of all ranks together.")] = 8,
    sequence: Annotated[
        int | None, typer.Option(help="Bytes per sample [default: the model's context, at most 1024].")
    ] = None,
    accumulate: Annotated[int, typer.Option(help="Micro-batches per step.")] = 1,
    micro_batches: Annotated[
        MicroBatchSchedule,
        typer.Option(help="One after the other, or side by side: weights are read once, all activations are held."),
    ] = MicroBatchSchedule.HORIZONTAL,
    steps: Annotated[int, typer.Option(help="Step to stop at, counted from the first run.")] = 100,
    lr: Annotated[float, typer.Option(help="Learning rate of AdamW.")] = 3e-4,
    weight_decay: Annotated[float, typer.Option(help="Decay of matrices; vectors do not decay.")] = 0.1,
    warmup: Annotated[int, typer.Option(help="Steps of linear warm-up; constant afterwards.")] = 0,
    clip: Annotated[float, typer.Option(help="Bound of the global gradient norm; 0 is none.")] = 1.0,
    update: Annotated[UpdateSchedule, typer.Option(help="When the optimizer runs.")] = UpdateSchedule.AUTO,
    prefetch_depth: Annotated[
        int | None, typer.Option(help="Groups fetched ahead [default: computed from measured rates].")
    ] = None,
    chunk: Annotated[int | None, size_option("Largest unit of I/O and update [default: planned].")] = None,
    commit_every: Annotated[int, typer.Option(help="Steps per committed generation.")] = 1,
    snapshot_every: Annotated[
        int | None, typer.Option(help="Steps per snapshot, a store of its own: snapshots/step-N in --nvme.")
    ] = None,
    codec: Annotated[Codec, typer.Option(help="How the store keeps chunks; auto measures what pays.")] = Codec.NONE,
    durability: Annotated[
        Durability, typer.Option(help="none: half the disk space, and a killed run is lost.")
    ] = Durability.COMMIT,
    resume: Annotated[
        Resume, typer.Option(help="What to do with a store that holds a run: refuse, go on, insist, step back.")
    ] = Resume.NEVER,
    seed: Annotated[int, typer.Option(help="Seed of weights, dropout and data order.")] = 0,
    workers: Annotated[int, typer.Option(help="Processes that load data.")] = 0,
    dropout: Annotated[float, typer.Option(help="Dropout, wherever the model has one.")] = 0.0,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Recompute activations in backward instead of keeping them.")
    ] = False,
    evaluate: Annotated[int, typer.Option(help="Held-out samples, before and after; 0 is none.")] = 16,
    export: Annotated[
        Path | None,
        typer.Option(parser=directory, metavar="DIR", help="Write the final weights as Hugging Face reads them."),
    ] = None,
    json: Annotated[Path | None, file_option("A line of JSON per step, written before its commit.")] = None,
    trace: Annotated[Path | None, file_option("Chrome trace with a track per link and tier.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N; with several ranks each takes a GPU.")] = "cpu",
    threads: Annotated[
        int | None,
        typer.Option(
            help="Threads of torch, and of the update [default: all cores; of more than 8 the update takes 8 to 16, "
            "and leaves two; ranks share the cores]."
        ),
    ] = None,
    freed_memory: Annotated[
        FreedMemory,
        typer.Option(
            help="keep what a step frees for the next one, faster on a CPU; or return it to the system; auto: keep it "
            "if no update needs the disk, else only small buffers."
        ),
    ] = FreedMemory.AUTO,
    bandwidth: Annotated[
        Path | None,
        file_option("Rates from tierstore probe --json; the first depth follows from them [default: measured]."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Train a causal language model within the given memory. End with Ctrl-C, go on with --resume auto.

    Several ranks: torchrun --nproc-per-node 2 -m tierstore.cli train ... Memory is then per rank, --batch is that of
    all ranks together, and a store opens on any number of ranks.
    """
    values = {name: value for name, value in locals().items() if name not in ("context", "options", "debug")}
    values["nvme"] = tuple(nvme or ())
    with told(debug):
        launch = Launch.of(os.environ)
        # From here on signals are handled, because importing torch alone takes seconds.
        with StopRequest(rank=launch.rank, ranks=launch.count) as stop:
            _run_training(_checked(launch, values, options, context), launch, stop)


def _of_file(path: Path, context: typer.Context) -> dict[str, Any]:
    """The file's values of the options that the command line leaves out."""
    values = read_object(path, "options")
    if isinstance(values.get("train"), dict):  # in a file that has the arguments of classes, too
        values = values["train"]
    given = options_of_object(values, str(path))
    stated = set(given_options(context))
    if not stated.isdisjoint(MODELS):
        stated.update(MODELS)
    return {name: value for name, value in given.items() if name not in stated}


def _checked(launch: Launch, values: dict[str, Any], file: Path | None, context: typer.Context) -> TrainOptions:
    """The options of this rank; an error is told once per machine, because ranks do not know other machines yet."""
    try:
        if file is not None:
            values |= _of_file(file, context)
            if launch.rank == 0:  # this rank writes them
                check_outputs([file], json=values["json"], trace=values["trace"])
        return launch.options(TrainOptions(**values))
    except ConfigError:
        if launch.local_rank > 0:
            raise typer.Exit(2) from None
        raise


def _run_training(options: TrainOptions, launch: Launch, stop: StopRequest) -> None:
    from tierstore.apps.console import RunConsole
    from tierstore.apps.progress import spinner
    from tierstore.apps.spinning import ask_for_short_spins

    ask_for_short_spins()
    console = RunConsole() if launch.rank == 0 else RunConsole(quiet=True, force_terminal=False)
    with spinner(console, "importing torch and transformers"), loading():
        from tierstore.apps.crew import joined
        from tierstore.apps.heap import ask_for_huge_pages
        from tierstore.apps.report import Reporter
        from tierstore.apps.train import train as run

    ask_for_huge_pages()  # before the ranks meet, which makes tensors
    with joined(launch, options.device) as crew:
        outcome = run(options, Reporter(console), stop=stop, crew=crew)
        if outcome.stopped_by is not None and crew.leads:
            step = outcome.totals.last_step
            kept = options.why_nothing_is_kept or "it is committed: go on with --resume auto"
            if options.why_nothing_is_kept and options.export is not None and outcome.totals.steps:
                kept += f" but {options.export}"
            say(f"stopped by {outcome.stopped_by.name} after step {step} of {options.steps}; {kept}")
    if outcome.stopped_by is not None:
        raise typer.Exit(128 + outcome.stopped_by)
