from __future__ import annotations

import inspect
import os
import runpy
import signal
import subprocess
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

import tierstore.apps.train
from tierstore.apps.bench import step_worker
from tierstore.apps.options import Precision, Preset, TrainOptions
from tierstore.apps.report import Reporter, Totals
from tierstore.apps.stopping import let_go
from tierstore.apps.train import Outcome
from tierstore.cli import app
from tierstore.cli.common import directory, file, told
from tierstore.cli.interrupts import interruptible
from tierstore.config import Codec, Durability, Resume, UpdateSchedule
from tierstore.errors import BudgetError, CheckpointWarning, ConfigError, MachineWarning, StorageFull
from tierstore.store import slots


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options that the training application was given. It returns or raises an item that a test puts in before."""
    answers: list[Any] = []

    def answer(options: TrainOptions, reporter: Any, stop: Any, crew: Any) -> Outcome:
        result = answers.pop(0) if answers else Outcome()
        answers.append(options)
        if isinstance(result, BaseException):
            raise result
        return result

    monkeypatch.setattr(tierstore.apps.train, "train", answer)
    return answers


def _train(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["train", *arguments])


def test_without_options_the_defaults_of_the_record_hold(asked: list[Any]) -> None:
    assert _train().exit_code == 0
    assert asked == [TrainOptions()]


def test_every_option_arrives(asked: list[Any]) -> None:
    given = """
        --preset 124m --data text --gpu-memory 256MiB --cpu-memory 1GB --zero 2 --nvme a --nvme b --dtype fp16 --batch 2
        --sequence 64 --accumulate 3 --steps 7 --lr 0.5 --weight-decay 0.2 --warmup 4 --clip 0 --update delayed
        --commit-every 5 --codec auto --durability none --resume auto --seed 9 --workers 2 --dropout 0.1 --checkpointing
        --evaluate 0 --export out --json steps --trace trace --device cuda:1 --threads 3
        --bandwidth rates
    """
    result = _train(*given.split())
    assert result.exit_code == 0, result.output
    expected = TrainOptions(
        preset=Preset.P124M, data=Path("text"), gpu_memory=256 * 2**20, cpu_memory=10**9, zero=2,
        nvme=(Path("a"), Path("b")), dtype=Precision.FP16, batch=2, sequence=64, accumulate=3, steps=7, lr=0.5,
        weight_decay=0.2, warmup=4, clip=0, update=UpdateSchedule.DELAYED, commit_every=5, codec=Codec.AUTO,
        durability=Durability.NONE,
        resume=Resume.AUTO, seed=9, workers=2, dropout=0.1, checkpointing=True, evaluate=0, export=Path("out"),
        json=Path("steps"), trace=Path("trace"), device="cuda:1", threads=3,
        bandwidth=Path("rates"),
    )  # fmt: skip
    assert asked == [expected]
    asked.clear()
    assert _train("--config", "c.json").exit_code == 0
    assert asked[-1].config == Path("c.json")
    asked.clear()
    assert _train("--checkpoint", "folder").exit_code == 0
    assert asked[-1].checkpoint == Path("folder")


def test_options_of_a_file_give_way_to_those_of_the_command_line(asked: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "options.json"
    path.write_text(
        '{"preset": "124m", "cpu-memory": "2GiB", "gpu_memory": 1000, "nvme": ["a", "b"], "batch": 2, "lr": 1,'
        ' "dtype": "fp16", "checkpointing": true, "update": "delayed", "export": null, "steps": 9}'
    )
    result = _train("--options", str(path), "--batch", "8", "--update", "auto", "--steps", "100")
    assert result.exit_code == 0, result.output
    expected = TrainOptions(
        preset=Preset.P124M, cpu_memory=2 * 2**30, gpu_memory=1000, nvme=(Path("a"), Path("b")), batch=8, lr=1.0,
        dtype=Precision.FP16, checkpointing=True, update=UpdateSchedule.AUTO, steps=100,
    )  # fmt: skip
    assert asked == [expected]
    asked.clear()
    assert _train("--options", str(path), "--checkpoint", "folder").exit_code == 0
    assert (asked[0].preset, asked[0].checkpoint, asked[0].batch) == (None, Path("folder"), 2)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "cannot read the options"),
        ("[1]", "must be a JSON object, not list"),
        ('{"batch": 1', "not valid JSON"),
        ('{"cpu_memry": 1}', "train has no option 'cpu_memry'; did you mean 'cpu_memory'?"),
        ('{"x": 1}', "train has no option 'x'; the options are 'preset', 'config', "),
        ('{"x": 1}', ", 'gpu_memory', 'cpu_memory', 'nvme', "),
        ('{"options": "x"}', "train has no option 'options'"),
        ('{"cpu_memory": 1, "cpu-memory": 2}', "'cpu_memory' is given twice"),
        ('{"cpu_memory": "8GX"}', "'cpu_memory' = '8GX': not a size"),
        ('{"batch": "many"}', "'batch' = 'many' should be a valid integer"),
        ('{"batch": true}', "'batch' = True: cannot be true or false"),
        ('{"checkpointing": 1}', "'checkpointing' = 1: must be true or false"),
        ('{"dtype": "fp8"}', "'dtype' = 'fp8' should be 'fp32', 'bf16' or 'fp16'"),
        ('{"nvme": "a"}', "'nvme' = 'a' should be a list"),
        ('{"nvme": [1]}', "'nvme' = [1] is not a valid path"),
        ('{"batch": 0}', "--batch must be at least 1"),
        ('{"export": ""}', "'export' = '': empty text is no value; leave the option out"),
        ('{"nvme": ["a", ""]}', "'nvme' = ['a', '']: empty text is no value; leave the option out"),
    ],
)
def test_a_bad_file_of_options_is_one_sentence(
    asked: list[Any], tmp_path: Path, text: str | None, sentence: str
) -> None:
    path = tmp_path / "options.json"
    if text is not None:
        path.write_text(text)
    result = _train("--options", str(path))
    assert result.exit_code in (1, 2)
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1
    assert asked == []


@pytest.mark.parametrize("option", ["--json", "--trace"])
def test_the_file_of_options_is_not_written_over(asked: list[Any], tmp_path: Path, option: str) -> None:
    path = tmp_path / "options.json"
    path.write_text("{}")
    result = _train("--options", str(path), option, str(path))
    assert (result.exit_code, asked, path.read_text()) == (2, [], "{}")
    assert f"tierstore: {option} {path} is what this command itself reads or makes" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--update", "sometimes"], "Invalid value for '--update'"),
        (["--gpu-memory", "8GX"], "Invalid value for '--gpu-memory': not a size: '8GX'"),
        (["--zero", "4"], "tierstore: --zero must be at most 3, not 4"),
        (["--batch", "0"], "tierstore: --batch must be at least 1, not 0"),
        (["--lr", "fast"], "Invalid value for '--lr'"),
        (["--nvm", "x"], "No such option: --nvm"),
        (["--preset", "25m", "--config", "x"], "tierstore: --preset and --config exclude each other"),
        (["--nvme", ""], "Invalid value for '--nvme': an empty path is not a directory"),
        (["--export", ""], "Invalid value for '--export': an empty path is not a directory"),
        (["--data", ""], "Invalid value for '--data': an empty path is not a file"),
        (["--lr", "nan"], "tierstore: --lr must be a number that is not negative, not nan"),
    ],
)
def test_a_bad_option_is_a_usage_error(asked: list[Any], arguments: list[str], sentence: str) -> None:
    result = _train(*arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr
    assert asked == []


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("no such\n  thing"), 2), (BudgetError("no such thing"), 2), (StorageFull("no such thing"), 1)],
)
def test_an_error_is_one_sentence(asked: list[Any], error: Exception, code: int) -> None:
    asked.append(error)
    result = _train()
    assert (result.exit_code, result.stderr) == (code, "tierstore: no such thing\n")


def test_debug_shows_where_it_was_raised(asked: list[Any]) -> None:
    asked.append(StorageFull("full"))
    result = _train("--debug")
    assert isinstance(result.exception, StorageFull)


def callbacks() -> list[Any]:
    """The functions of all commands."""
    commands = [*app.registered_commands, *(one for group in app.registered_groups if group.typer_instance
                                            for one in group.typer_instance.registered_commands)]  # fmt: skip
    return [one.callback for one in commands]


def test_every_command_can_show_it() -> None:
    assert all("debug" in inspect.signature(callback).parameters for callback in callbacks())


def test_no_empty_path_becomes_the_current_directory() -> None:
    hints = [hint for callback in callbacks() for hint in get_type_hints(callback, include_extras=True).values()]
    paths = [hint.__metadata__[0] for hint in hints if get_origin(hint) is Annotated and "Path" in str(hint)]
    assert len(paths) > 30
    for option in paths:
        with pytest.raises(typer.BadParameter, match="an empty path is not a"):
            option.parser("")


@pytest.mark.parametrize(
    ("nvme", "sentence"),
    [
        (["--nvme", "x"], "stopped by SIGINT after step 3 of 9; it is committed: go on with --resume auto"),
        (
            ["--nvme", "x", "--durability", "none"],
            "stopped by SIGINT after step 3 of 9; nothing is kept with --durability none",
        ),
        ([], "stopped by SIGINT after step 3 of 9; nothing is kept without --nvme"),
        (["--export", "out"], "stopped by SIGINT after step 3 of 9; nothing is kept without --nvme but out"),
    ],
)
def test_a_stopped_run_says_what_is_kept(asked: list[Any], nvme: list[str], sentence: str) -> None:
    asked.append(Outcome(Totals(last_step=3, steps=3), signal.SIGINT))
    result = _train("--steps", "9", *nvme)
    assert (result.exit_code, result.stderr) == (130, f"tierstore: {sentence}\n")
    asked[:] = [Outcome(Totals(last_step=3), signal.SIGTERM)]
    assert _train("--steps", "9", *nvme).exit_code == 143


def test_an_interrupt_during_the_imports_is_one_sentence(tmp_path: Path) -> None:
    # A stand-in for torch: its import is interrupted in a weakref callback, where an exception is printed and lost.
    (tmp_path / "torch.py").write_text(
        "import os, signal, weakref\n"
        "class Importing: pass\n"
        "importing = Importing()\n"
        "reference = weakref.ref(importing, lambda _: os.kill(os.getpid(), signal.SIGINT))\n"
        "del importing\n"
        "raise SystemExit('went on')\n"
    )
    root = Path(tierstore.__file__).parents[1]
    result = subprocess.run([sys.executable, "-m", "tierstore.cli", "train"], cwd=root, capture_output=True, text=True,
                            env={"PYTHONPATH": f"{tmp_path}:{root}"}, timeout=60)  # fmt: skip
    assert (result.returncode, result.stderr) == (130, "tierstore: interrupted before training began\n")


@pytest.mark.parametrize("start", [["-m", "tierstore.cli"], ["-c", "from tierstore.cli import main; main()"]])
def test_an_interrupt_before_any_command_runs_is_one_sentence(start: list[str], tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    root = Path(tierstore.__file__).parents[1]
    for handler, expected in ((signal.default_int_handler, (130, "tierstore: interrupted\n")), (signal.SIG_IGN, None)):
        before = signal.signal(signal.SIGINT, handler)  # the child starts with the default action or ignores SIGINT
        try:
            result = subprocess.run([sys.executable, *start, "--help"], cwd=root, capture_output=True, text=True,
                                    env={"PYTHONPATH": f"{tmp_path}:{root}"}, timeout=60)  # fmt: skip
        finally:
            signal.signal(signal.SIGINT, before)
        assert ((result.returncode, result.stderr) == expected) if expected else "AttributeError" in result.stderr


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_no_file_takes_the_place_of_a_standard_stream_that_is_closed(closed: str, tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(
        "import os, sys\n"
        "opened = os.open('opened', os.O_CREAT)\n"
        "sys.stdin.isatty(), print('shown'), print('told', file=sys.stderr)\n"
        "os._exit(opened if all(map(os.get_inheritable, range(3))) else 1)\n"
    )
    ended = subprocess.run(["bash", "-c", f'exec "$0" -c "from tierstore.cli import main; main()" {closed}',
                            sys.executable], cwd=tmp_path, capture_output=True, timeout=60,
                            env={"PYTHONPATH": f"{tmp_path}:{Path(tierstore.__file__).parents[1]}"})  # fmt: skip
    assert ended.returncode > 2, ended.stderr


@pytest.mark.parametrize("arguments", [["plan", "--params", "7e9"], ["--help"]])
def test_what_cannot_be_shown_for_want_of_room_is_one_sentence(arguments: list[str]) -> None:
    root = Path(tierstore.__file__).parents[1]
    with open("/dev/full", "w") as full:
        result = subprocess.run([sys.executable, "-m", "tierstore.cli", *arguments], cwd=root,
                                stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)  # fmt: skip
    said = "tierstore: cannot write what is to be shown: No space left on device\n"
    assert (result.returncode, result.stderr) == (1, said)


@pytest.mark.parametrize(("params", "leaves", "code"), [("7e9", "stdout", 0), ("many", "stderr", 2)])
def test_a_reader_that_has_left_changes_no_exit_code(params: str, leaves: str, code: int) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, leaves: writer}
    result = subprocess.run([sys.executable, "-m", "tierstore.cli", "plan", "--params", params], **streams, timeout=60,
                            cwd=Path(tierstore.__file__).parents[1])  # fmt: skip
    os.close(writer)
    assert (result.returncode, result.stdout or b"", result.stderr or b"") == (code, b"", b"")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_training_goes_on_when_its_output_cannot_be_written(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk, or on a terminal that is gone."""

    def work(options: TrainOptions, reporter: Reporter, **_: Any) -> Outcome:
        warnings.simplefilter("always")
        warnings.warn("no room", MachineWarning, stacklevel=1)
        reporter.start(0, 9)
        reporter.say("the model")
        reporter.stop()
        return Outcome(Totals(last_step=3), signal.SIGINT)

    monkeypatch.setattr(tierstore.apps.train, "train", work)
    monkeypatch.setenv("FORCE_COLOR", "1")  # a live line, with a thread that writes, too
    terminal, descriptor = os.openpty() if is_terminal else (os.open("/dev/full", os.O_RDWR), os.open("/dev/full", 1))
    os.close(terminal)
    with open(descriptor, "w") as output, open(os.dup(descriptor), "w") as errors:
        monkeypatch.setattr("tierstore.cli.common.let_go", lambda number: let_go(errors.fileno()))  # not the tests' own
        monkeypatch.setattr(sys, "stdout", output)
        monkeypatch.setattr(sys, "stderr", errors)
        assert app(["train"], standalone_mode=False) == 130


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_has_its_exit_code_wherever_it_comes(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "stopped.py").write_text(
        "import signal, sys, typer\n"
        "from tierstore.cli.interrupts import interruptible\n"
        f"signal.signal({number:d}, signal.SIG_DFL if {number:d} != signal.SIGINT else signal.default_int_handler)\n"
        "try:\n"
        "    with interruptible('interrupted'):\n"
        f"        exec('signal.raise_signal({number:d})')  # as where a dataclass is made\n"
        "except typer.Exit as end:\n"
        "    sys.exit(end.exit_code)\n"
    )
    root = Path(tierstore.__file__).parents[1]
    result = subprocess.run([sys.executable, "-m", "stopped"], cwd=tmp_path, capture_output=True, text=True,
                            env={"PYTHONPATH": str(root)}, timeout=60)  # fmt: skip
    assert (result.returncode, result.stderr) == (128 + number, "tierstore: interrupted\n")


@pytest.mark.parametrize("command", [["-m", "tierstore.cli"], ["tools/train.py"], ["tools/plan_memory.py"]])
def test_the_scripts_run(command: list[str]) -> None:
    root = Path(tierstore.__file__).parents[1]
    arguments = [*command, *(["train"] if command[0] == "-m" else []), "--update", "sometimes"]
    result = subprocess.run([sys.executable, *arguments], cwd=root, env={"PYTHONPATH": str(root)}, capture_output=True,
                            text=True, timeout=60)  # fmt: skip
    assert result.returncode == 2
    assert "Invalid value for '--update'" in result.stderr


def tool(name: str, monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    monkeypatch.setattr(sys, "path", sys.path[:])  # a script may change it
    script = typer.Typer()
    script.command()(runpy.run_path(str(Path(tierstore.__file__).parents[1] / "tools" / f"{name}.py"))[name])
    return script


def test_the_help_of_a_tool_shows_its_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, defaults in (("checksum_cost", ("a temporary one",)), ("crash_loop", ("200", "all", "a temporary one"))):
        result = CliRunner().invoke(tool(name, monkeypatch), ["--help"], env={"COLUMNS": "200"})
        assert [f"[default: {default}]." in result.output for default in defaults] == [True] * len(defaults)


def test_a_measurement_that_is_interrupted_says_so_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(options: dict[str, Any]) -> None:
        assert list(tmp_path.iterdir()) == [Path(options["train"]["nvme"][0])]
        raise KeyboardInterrupt

    monkeypatch.setattr(slots.ChunkRecord, "checksum_of", slots.ChunkRecord.checksum_of)  # the tool puts its own there
    monkeypatch.setattr(step_worker, "contend", interrupted)
    result = CliRunner().invoke(tool("checksum_cost", monkeypatch), ["--nvme", str(tmp_path)])
    assert (result.exit_code, result.stderr) == (130, "tierstore: interrupted; nothing is left behind\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", [["probe", "--nvme", "."], ["bench", "disk"], ["codecs", "."]])
def test_a_command_that_is_interrupted_while_it_imports_says_so(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow:
        def __getattr__(self, name: str) -> Any:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "tierstore.apps.progress", Slow())
    result = CliRunner().invoke(app, command)
    assert (result.exit_code, result.stderr) == (130, "tierstore: interrupted\n")


def test_only_a_third_interrupt_ends_what_cleans_up(capfd: pytest.CaptureFixture[str]) -> None:
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for background jobs
    left: list[int] = []
    cleaned: list[str] = []

    def interrupted() -> None:
        with interruptible("interrupted", left.append):
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                for number in (signal.SIGTERM, signal.SIGINT):
                    signal.raise_signal(number)
                cleaned.extend(["all"] if not left else [])
                signal.raise_signal(signal.SIGINT)

    try:
        with pytest.raises(typer.Exit) as ended:
            interrupted()
    finally:
        signal.signal(signal.SIGINT, usual)
    assert (ended.value.exit_code, left, cleaned) == (130, [130], ["all"])
    assert capfd.readouterr().err == (
        "tierstore: cleaning up; Ctrl-C again ends at once\n"
        "tierstore: interrupted at once; unfinished files may be left\n"
        "tierstore: interrupted\n"
    )


def test_the_version_is_that_of_the_package() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"tierstore {version('tierstore')}\n")


@pytest.mark.parametrize(("of", "command"), [([], "train"), (["simulate"], "buckets")])
def test_help_names_the_commands_with_a_whole_sentence_each(of: list[str], command: str) -> None:
    result = CliRunner().invoke(app, [*of, "--help"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    commands = result.output.partition("Commands:")[2]
    assert command in commands
    assert "..." not in commands


def test_ctrl_c_in_a_command_that_has_nothing_to_clean_up_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, told():
        raise KeyboardInterrupt
    assert (ended.value.exit_code, capsys.readouterr().err) == (130, "tierstore: interrupted\n")


@pytest.mark.parametrize("kind", [MachineWarning, CheckpointWarning])
@pytest.mark.parametrize(("rank", "shown"), [(None, NOTE := "tierstore: note: no room\n"), ("0", NOTE), ("1", "")])
def test_what_a_person_can_do_something_about_is_a_note_of_one_rank(
    rank: str | None, shown: str, kind: type[Warning], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)

    def work() -> None:
        warnings.simplefilter("default")
        warnings.warn("no room", kind, stacklevel=1)
        warnings.warn("of a library", UserWarning, stacklevel=1)

    with pytest.warns(UserWarning, match="of a library") as others, told():
        work()
    assert (capsys.readouterr().err, len(others)) == (shown, 1)


def test_paths_begin_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert directory("~/run1") == Path("/home/me/run1")
    assert file("~/steps.jsonl") == Path("/home/me/steps.jsonl")
    assert directory("./~root") == Path("~root")
