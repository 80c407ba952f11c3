"""`tierstore tune`: depth and schedule for a model on this machine.

Not here: the work (`apps/tune.py`), tables and plots (`apps/tune_views.py`). Torch is imported only where steps run.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from tierstore.apps.launch import Launch
from tierstore.apps.options import FreedMemory, Precision, Preset, TrainOptions, as_option
from tierstore.cli.common import Debug, directory, file_option, given_options, say, size_option, told
from tierstore.cli.interrupts import interruptible
from tierstore.config import UpdateSchedule
from tierstore.errors import ConfigError
from tierstore.garbage import loading

_OF_MEASURE = ("depth", "rounds", "steps")


def tune(
    context: typer.Context,
    bandwidth: Annotated[Path | None, file_option("Rates, as `probe --json` writes them [default: measured].")] = None,
    preset: Annotated[Preset | None, typer.Option(help="Architecture, as in train [default: 25m].")] = None,
    config: Annotated[Path | None, file_option("config.json of a Hugging Face model.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(parser=directory, metavar="DIR", help="Local safetensors checkpoint.")
    ] = None,
    gpu_memory: Annotated[int | None, size_option("Budget of the GPU tier [default: as in train].")] = None,
    cpu_memory: Annotated[int, size_option("Budget of the CPU tier [default: 1GiB].")] = 2**30,
    nvme: Annotated[
        list[Path] | None,
        typer.Option(parser=directory, metavar="DIR", help="Directory of the store; trials use one below it."),
    ] = None,
    dtype: Annotated[Precision, typer.Option(help="Dtype of weights and gradients.")] = Precision.BF16,
    batch: Annotated[int, typer.Option(help="Samples per step.")] = 8,
    sequence: Annotated[
        int | None, typer.Option(help="Bytes per sample [default: the model's context, at most 1024].")
    ] = None,
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="Recompute activations in backward.")] = False,
    clip: Annotated[float, typer.Option(help="Bound of the global gradient norm; 0 is none.")] = 1.0,
    update: Annotated[UpdateSchedule, typer.Option(help="Schedule; auto compares those that fit.")] = (
        UpdateSchedule.AUTO
    ),
    chunk: Annotated[int | None, size_option("Largest chunk [default: as planned].")] = None,
    commit_every: Annotated[int, typer.Option(help="Steps per committed generation.")] = 1,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    threads: Annotated[
        int | None, typer.Option(help="Threads of torch and of the update [default: as in train].")
    ] = None,
    freed_memory: Annotated[
        FreedMemory, typer.Option(help="Whether the run keeps or returns what a step frees; see train.")
    ] = FreedMemory.AUTO,
    record: Annotated[Path | None, file_option("Recorded step [default: record one now, with the engine].")] = None,
    save_record: Annotated[Path | None, file_option("Keep the recorded step.")] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Run the choice and other depths for real.")] = False,
    depth: Annotated[
        list[int] | None,
        typer.Option(metavar="N", help="Depths that --measure runs, beside the chosen one [default: 0 1 2 4 8]."),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Rounds of --measure.")] = 3,
    steps: Annotated[int, typer.Option(help="Steps of each depth in a round.")] = 3,
    write: Annotated[Path | None, file_option("The choice as a JSON object of train's options.")] = None,
    plot: Annotated[Path | None, file_option("Step time against depth.", "FILE.png|svg")] = None,
    json: Annotated[Path | None, file_option("All figures, in bytes and seconds.")] = None,
    debug: Debug = False,
) -> None:
    """Choose prefetch depth and schedule for a model on this machine.

    It predicts the time of a step for every depth, and says what bounds it; --measure checks the prediction.
    """
    with told(debug), interruptible("interrupted; its files in --nvme are gone"):
        if Launch.of(os.environ).count > 1:
            raise ConfigError("tune runs on one rank: start it without torchrun")
        if not measure and (unread := [name for name in given_options(context) if name in _OF_MEASURE]):
            raise ConfigError(f"{as_option(unread[0])} needs --measure")
        train = TrainOptions(
            preset=preset, config=config, checkpoint=checkpoint, gpu_memory=gpu_memory, cpu_memory=cpu_memory,
            nvme=tuple(nvme or ()), dtype=dtype, batch=batch, sequence=sequence, checkpointing=checkpointing, clip=clip,
            update=update, chunk=chunk, commit_every=commit_every, device=device, threads=threads,
            freed_memory=freed_memory, bandwidth=bandwidth,
        )  # fmt: skip

        from tierstore.apps.console import Console
        from tierstore.apps.progress import spinner
        from tierstore.apps.spinning import ask_for_short_spins

        ask_for_short_spins()

        console = Console()
        with spinner(console, "beginning"), loading():
            from tierstore.apps import tune_views
            from tierstore.apps.tune import TuneOptions, rates_for, run, save

        options = TuneOptions(
            train=train, record=record, save_record=save_record, measure=measure, rounds=rounds,
            depths=tuple(depth or (0, 1, 2, 4, 8)),
            steps=steps, write=write, plot=plot, json=json,
        )  # fmt: skip
        outcome = run(options, rates_for(train), say)
        console.print(tune_views.as_table(outcome))
        console.print(tune_views.as_words(outcome), highlight=False, markup=False)
        save(options, outcome)
