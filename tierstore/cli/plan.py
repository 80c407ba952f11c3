"""`tierstore plan`: will it fit, and how fast.

Not here: the plan (`apps/plan.py`), its tables (`apps/plan_report.py`). No torch, at any time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tierstore.apps.options import Precision, Preset, as_option
from tierstore.cli.common import Debug, file_option, given_options, rate, size_option, told
from tierstore.config import UpdateSchedule
from tierstore.errors import ConfigError
from tierstore.plan.machine import NODES
from tierstore.plan.memory import Attention

_NOT_OF_A_PLAN = ("context", "deepspeed", "write", "json", "plot", "debug")

_OF_DEEPSPEED = ("deepspeed", "write", "gpus", "nodes", "gpu_memory", "cpu_memory", "debug")


def plan(
    context: typer.Context,
    params: Annotated[str | None, typer.Option(metavar="COUNT", help="Parameters: 70e9, 70B, 1.5T.")] = None,
    config: Annotated[
        Path | None,
        file_option("config.json of a gpt2, llama, mistral, qwen2 or mixtral: counted exactly."),
    ] = None,
    preset: Annotated[Preset | None, typer.Option(help="A model of `tierstore train`.")] = None,
    machine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"A node by name, which the next options change: {', '.join(NODES)} [default: dgx-h100].",
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            help="GPUs of each node; without --nodes, all GPUs, on as many nodes as that takes [default: the "
            "machine's, or 1 with --bandwidth alone]."
        ),
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="Machines [default: as many as --gpus takes].")] = None,
    gpu_memory: Annotated[
        int | None, size_option("Memory of each GPU; for rates measured without a GPU, a part of --cpu-memory.")
    ] = None,
    cpu_memory: Annotated[int | None, size_option("CPU memory of a node.")] = None,
    nvme_capacity: Annotated[int | None, size_option("Capacity of a node's disks together; 0: no disks.")] = None,
    nvme_read: Annotated[int | None, size_option("Bytes per second of a node's disks together.", "RATE", rate)] = None,
    nvme_write: Annotated[int | None, size_option("Likewise [default: as --nvme-read].", "RATE", rate)] = None,
    disks: Annotated[int | None, typer.Option(help="Drives of a node, each like the machine's own.")] = None,
    link: Annotated[
        int | None, size_option("Bytes per second between CPU memory and GPUs, each way, of each link.", "RATE", rate)
    ] = None,
    links: Annotated[int | None, typer.Option(help="Number of these links in a node.")] = None,
    flops: Annotated[
        float | None,
        typer.Option(
            help="Flop/s of a GPU, as training reaches it [default: that of --bandwidth without --machine, or half its "
            "data sheet's]."
        ),
    ] = None,
    bandwidth: Annotated[Path | None, file_option("Measured rates, as `tierstore probe --json` writes them.")] = None,
    endurance: Annotated[
        int | None,
        size_option("Bytes that may be written to a node's disks in their life: TBW, or DWPD x days x size."),
    ] = None,
    dtype: Annotated[Precision, typer.Option(help="Dtype of weights and gradients.")] = Precision.BF16,
    zero: Annotated[int, typer.Option(metavar="0-3", help="What data-parallel ranks share out.")] = 3,
    tensor_parallel: Annotated[int, typer.Option(help="GPUs that share every layer.")] = 1,
    pipeline_parallel: Annotated[int, typer.Option(help="Stages of layers.")] = 1,
    batch: Annotated[
        int | None, typer.Option(help="Samples per micro-batch, of all GPUs together [default: one per rank].")
    ] = None,
    sequence: Annotated[
        int | None, typer.Option(help="Tokens per sample [default: the model's context, at most 2048].")
    ] = None,
    accumulate: Annotated[int, typer.Option(help="Micro-batches per step.")] = 1,
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="Recompute activations in backward.")] = False,
    attention: Annotated[
        Attention, typer.Option(help="eager keeps matrices of sequence x sequence for backward.")
    ] = Attention.FUSED,
    update: Annotated[
        UpdateSchedule, typer.Option(help="When the optimizer runs; auto: as in train with clipping.")
    ] = UpdateSchedule.AUTO,
    commit_every: Annotated[int, typer.Option(help="Steps per committed generation.")] = 1,
    deepspeed: Annotated[
        Path | None,
        file_option("Translate a ds_config.json instead; uses only --gpus, --nodes, --gpu-memory, --cpu-memory."),
    ] = None,
    write: Annotated[Path | None, file_option("With --deepspeed: write the arguments of tierstore as JSON.")] = None,
    json: Annotated[Path | None, file_option("All figures, in bytes and seconds.")] = None,
    plot: Annotated[Path | None, file_option("Bytes by tier, seconds by phase.", "FILE.png|svg")] = None,
    debug: Debug = False,
) -> None:
    """Tell whether a model fits, and how fast it trains.

    It shows bytes per tier and component, step time by phase, every strategy, and what would help.
    """
    values = {name: value for name, value in locals().items() if name not in _NOT_OF_A_PLAN}
    with told(debug):
        if deepspeed is not None:
            _refuse_options_of_a_plan(context)
            for name, count in (("gpus", gpus), ("nodes", nodes)):
                if count is not None and count < 1:
                    raise ConfigError(f"--{name} must be at least 1, not {count}")
            _translate(deepspeed, write, (gpus or 1) * (nodes or 1), nodes or 1, gpu_memory, cpu_memory)
            return
        if write is not None:
            raise ConfigError("--write belongs to --deepspeed: a plan itself is written by --json FILE")
        from tierstore.apps.console import Console
        from tierstore.apps.files import write_object
        from tierstore.apps.output_files import check_outputs
        from tierstore.apps.plan import PlanOptions
        from tierstore.apps.plan import plan as run
        from tierstore.apps.plan_picture import draw
        from tierstore.apps.plan_report import as_json, heading, sentences, tables

        options = PlanOptions(**values)
        check_outputs([options.config, options.bandwidth], json=json, plot=plot)
        found = run(options)
        console = Console(highlight=False)
        console.print(heading(found.situation), markup=False)
        for table in tables(found):
            console.print(table)
        for sentence in sentences(found):
            console.print(f"* {sentence}", markup=False)
        if json is not None:
            write_object(json, as_json(found), "--json")
        if plot is not None:
            draw(found, plot)


def _refuse_options_of_a_plan(context: typer.Context) -> None:
    given = [as_option(name) for name in given_options(context) if name not in _OF_DEEPSPEED]
    if given:
        raise ConfigError(f"{', '.join(given)} cannot be used with --deepspeed: a translation is no plan")


def _translate(
    path: Path, write: Path | None, ranks: int, nodes: int, gpu_memory: int | None, cpu_memory: int | None
) -> None:
    """Translates and shows; budgets are per GPU and per node here, as in a plan, and per rank in the translation."""
    from tierstore.apps.console import Console
    from tierstore.apps.deepspeed import translate
    from tierstore.apps.files import write_object
    from tierstore.apps.output_files import check_outputs
    from tierstore.plan.strategies import USABLE

    check_outputs([path], write=write)
    budgets = {
        "gpu_memory": None if gpu_memory is None else int(USABLE * gpu_memory),
        "cpu_memory": None if cpu_memory is None else int(USABLE * cpu_memory * nodes / ranks),
    }
    found = translate(path, ranks=ranks, **budgets)
    if write is not None:
        write_object(write, found.as_json(), "--write")
    console = Console(highlight=False, soft_wrap=True)
    several = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29400 " if nodes > 1 else ""
    launcher = "" if ranks == 1 else f"torchrun {several}--nproc-per-node {ranks // nodes} -m tierstore.cli train "
    command = found.command()
    console.print(launcher + command.removeprefix("tierstore train ") if launcher else command, markup=False)
    if several:
        console.print("* HOST: the name of the first node; the same command on every node", markup=False)
    if gpu_memory is not None:
        console.print("* --gpu-memory: nine tenths of what was given; subtract what activations take", markup=False)
    for key, reason in found.notes:
        console.print(f"* {key}: {reason}", markup=False)
