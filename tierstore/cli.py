"""The command line: parses, calls `apps/`, turns errors into one sentence and an exit code.

Scope: commands and their options. Exit codes: 0 done, 1 the run failed, 2 an option or a budget cannot work,
130 and 143 stopped by SIGINT and SIGTERM.
Not here: anything that works. Torch is imported inside a command, so that `--help` answers at once.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tierstore.apps.launch import Launch
from tierstore.apps.options import Precision, Preset, TrainOptions
from tierstore.apps.stopping import StopRequest
from tierstore.config import Durability, Resume, UpdateSchedule, parse_size
from tierstore.errors import BudgetError, ConfigError, TierstoreError

app = typer.Typer(
    add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)  # fmt: skip


# What the engine calls its arguments, with their values or alone; not a part of a path.
_ARGUMENT = re.compile(
    r"(?<![\w/.-])(?:(resume|update|durability|commit_every|zero)='?(\w+)'?|(gpu_memory|cpu_memory|nvme)(?![\w/.-]))"
)


def _size(text: int | str) -> int:
    try:
        return parse_size(text)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None


def _directory(text: str) -> Path:
    if not text:  # an unset shell variable would otherwise become the current directory
        raise typer.BadParameter("an empty path is not a directory")
    return Path(text)


@app.callback()
def _root() -> None:
    """Train models whose state does not fit in memory."""


@app.command()
def train(
    preset: Annotated[Preset | None, typer.Option(help="Architecture with new weights [default: 25m].")] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="config.json of any Hugging Face causal LM, with new weights.")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Local safetensors checkpoint to fine-tune.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="FILE|DIR", help="Training text, read as bytes [default: Python's own library source]."),
    ] = None,
    gpu_memory: Annotated[
        int,
        typer.Option(
            parser=_size,
            metavar="SIZE",
            show_default=False,
            help="Budget of the GPU tier, per rank: weights, gradients, staging; not activations [default: 1GiB].",
        ),
    ] = 2**30,
    cpu_memory: Annotated[
        int,
        typer.Option(
            parser=_size,
            metavar="SIZE",
            show_default=False,
            help="Budget of the (pinned) CPU tier, per rank [default: 1GiB].",
        ),
    ] = 2**30,
    nvme: Annotated[
        list[Path] | None,
        typer.Option(
            parser=_directory,
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
    steps: Annotated[int, typer.Option(help="Step to stop at, counted from the first run.")] = 100,
    lr: Annotated[float, typer.Option(help="Learning rate of AdamW.")] = 3e-4,
    weight_decay: Annotated[float, typer.Option(help="Decay of matrices; vectors do not decay.")] = 0.1,
    warmup: Annotated[int, typer.Option(help="Steps of linear warm-up; constant afterwards.")] = 0,
    clip: Annotated[float, typer.Option(help="Bound of the global gradient norm; 0 is none.")] = 1.0,
    update: Annotated[UpdateSchedule, typer.Option(help="When the optimizer runs.")] = UpdateSchedule.AUTO,
    commit_every: Annotated[int, typer.Option(help="Steps per committed generation.")] = 1,
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
        Path | None, typer.Option(metavar="DIR", help="Write the final weights as Hugging Face reads them.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A line of JSON per step, written before its commit.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Chrome trace with a track per link and tier.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N; of several ranks each takes its own GPU.")] = "cpu",
    threads: Annotated[
        int | None, typer.Option(help="Threads of torch, and of the update [default: all cores, shared by ranks].")
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error was raised.")] = False,
) -> None:
    """Train a causal language model within the given memory; end with Ctrl-C, go on with --resume auto.

    Several ranks: torchrun --nproc-per-node 2 -m tierstore.cli train ... Memory is then per rank, --batch is that of
    all ranks together, and a store opens on any number of ranks.
    """
    values = {name: value for name, value in locals().items() if name not in ("debug", "nvme")}
    try:
        launch = Launch.of(os.environ)
        # From here on: importing torch alone takes seconds.
        with StopRequest(rank=launch.rank, ranks=launch.count) as stop:
            _run_training(_checked(launch, nvme=tuple(nvme or ()), **values), launch, stop)
    except TierstoreError as error:
        if debug:
            raise
        _fail(_as_options(str(error)), 2 if isinstance(error, (ConfigError, BudgetError)) else 1)


@app.command()
def simulate(
    layer: Annotated[
        list[str] | None,
        typer.Option(metavar="SIZE:MS[xN]", help="Layers in the order of backward; repeat it [default: 25MB:3x48]."),
    ] = None,
    alpha: Annotated[float, typer.Option(metavar="US", help="Fixed cost of a collective, microseconds.")] = 200.0,
    beta: Annotated[str, typer.Option(metavar="SIZE", help="Bytes per second of the interconnect.")] = "12GB",
    launch: Annotated[float, typer.Option(metavar="US", help="What a launch takes from the compute.")] = 0.0,
    before: Annotated[float, typer.Option(metavar="MS", help="Time of a step before backward.")] = 0.0,
    bucket: Annotated[
        list[str] | None, typer.Option(metavar="SIZE", help="Bucket size; repeat it [default: a range of them].")
    ] = None,
    first_bucket: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Size of the first bucket [default: as the others].")
    ] = None,
    in_flight: Annotated[int, typer.Option(help="Collectives at once.")] = 1,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Step time against bucket size.")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="All figures, in bytes and seconds.")] = None,
) -> None:
    """Step time against the size of gradient buckets, on any interconnect, from the bucket timeline."""
    from rich.console import Console

    from tierstore.apps.buckets import SweepOptions, as_table, parse_layers
    from tierstore.apps.buckets import simulate as run
    from tierstore.plan.cost_model import CostModel

    try:
        options = SweepOptions(
            layers=tuple(one for text in layer or ["25MB:3x48"] for one in parse_layers(text)),
            link=CostModel(alpha / 1e6, parse_size(beta.removesuffix("/s")), launch / 1e6), before_s=before / 1e3,
            bucket=tuple(map(parse_size, bucket or ())), in_flight=in_flight,
            first_bucket=None if first_bucket is None else parse_size(first_bucket), plot=plot, json=json,
        )  # fmt: skip
        Console().print(as_table(options, run(options)))
    except TierstoreError as error:
        _fail(" ".join(str(error).split()), 2 if isinstance(error, ConfigError) else 1)


def _checked(launch: Launch, **values: Any) -> TrainOptions:
    """The options of this rank; what is wrong with them is said once per machine, for its ranks do not know others."""
    try:
        return launch.options(TrainOptions(**values))
    except ConfigError:
        if launch.local_rank > 0:
            raise typer.Exit(2) from None
        raise


def _run_training(options: TrainOptions, launch: Launch, stop: StopRequest) -> None:
    from rich.console import Console

    from tierstore.apps.crew import joined
    from tierstore.apps.report import Reporter
    from tierstore.apps.train import train as run

    console = Console() if launch.rank == 0 else Console(quiet=True, force_terminal=False)
    with joined(launch, options.device) as crew:
        outcome = run(options, Reporter(console), stop=stop, crew=crew)
        if outcome.stopped_by is not None and crew.leads:
            step = outcome.totals.last_step
            kept = options.why_nothing_is_kept or "it is committed: go on with --resume auto"
            _say(f"stopped by {outcome.stopped_by.name} after step {step} of {options.steps}; {kept}")
    if outcome.stopped_by is not None:
        raise typer.Exit(128 + outcome.stopped_by)


def _as_options(text: str) -> str:
    """One line, and the engine's arguments as a person gives them here: `resume='auto'` is `--resume auto`."""

    def option(found: re.Match[str]) -> str:
        name, value, budget = found.groups()
        return f"--{(name or budget).replace('_', '-')}" + (f" {value}" if name else "")

    return _ARGUMENT.sub(option, " ".join(text.split()).removeprefix("TierConfig: "))


def _say(sentence: str) -> None:
    if sentence:
        typer.echo(f"tierstore: {sentence}", err=True)


def _fail(sentence: str, code: int) -> None:
    _say(sentence)
    raise typer.Exit(code)


def main() -> None:
    """Entry point of the command `tierstore`."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        app()
    try:  # the other ranks of a machine say nothing of a wrong option
        sys.exit(app(standalone_mode=False) or 0)
    except Exception as error:
        if not hasattr(error, "exit_code"):  # click's, which typer brings along or not
            raise
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
