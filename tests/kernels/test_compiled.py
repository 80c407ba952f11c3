"""The compiled code itself: what it may call, and that it lets other threads run."""

from __future__ import annotations

import re
import subprocess
import sys

import numba
import numpy as np
import pytest
from llvmlite import binding

from tierstore import kernels
from tierstore.errors import ConfigError
from tierstore.kernels import compiled


def test_warm_up_compiles_everything_an_update_needs():
    kernels.warm_up(["fp32", "bf16", "fp16"])
    names = ("adam", "square_sums", "copy_all_squares", "add_into")
    before = {name: len(getattr(compiled, name).signatures) for name in names}
    kernels.warm_up(["bf16", "fp16", "fp32"])
    assert before == {"adam": 6, "square_sums": 3, "copy_all_squares": 3, "add_into": 3}  # Adam with a copy and without
    assert before == {name: len(getattr(compiled, name).signatures) for name in before}


def test_an_optimizer_of_plain_arrays_compiles_no_more_than_it_uses():
    code = (
        "import sys\nfrom tierstore import kernels\nfrom tierstore.kernels import compiled\n"
        "kernels.warm_up_adam(['bf16'])\n"
        "print(*(name for name, item in vars(compiled).items() if getattr(item, 'signatures', None)))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert set(told.split()) == {"adam", "join_bf16"}


@pytest.mark.parametrize("broken", ["read-only", "with gaps", "float64"])
@pytest.mark.parametrize("place", range(6), ids=["weights", "gradient", "m", "v", "complement", "copy"])
def test_what_addresses_would_misread_is_refused(place: int, broken: str) -> None:
    """The compiler refuses it: it sees the types, and nothing looks at them afterwards."""
    arrays = [np.zeros(64, dtype) for dtype in (np.uint16, np.uint16, np.float32, np.float32, np.int16, np.uint16)]
    if broken == "read-only":
        arrays[place].flags.writeable = False
    else:
        arrays[place] = np.zeros(128, arrays[place].dtype)[::2] if broken == "with gaps" else np.zeros(64)
    scalars = compiled.Scalars(*[np.float32(1)] * 10)
    if (place, broken) == (1, "read-only"):  # the gradient is only read
        compiled.adam(*arrays, scalars)
        return
    with pytest.raises(numba.TypingError):
        compiled.adam(*arrays, scalars)
    assert not any(array.any() for array in arrays)


def test_every_loop_releases_the_gil_and_is_cached():
    loops = [item for item in vars(compiled).values() if hasattr(item, "targetoptions")]
    assert len(loops) >= 10
    for loop in loops:
        assert loop.targetoptions["nogil"]
        assert not loop.targetoptions.get("fastmath")
        assert not loop.targetoptions.get("parallel")


def test_machine_code_has_no_contraction_and_no_library_call():
    scalars = compiled.Scalars(*[np.float32(1)] * 10)
    state, half = np.zeros(8, np.float32), np.zeros(8, np.int16)
    loop = numba.njit(nogil=True, error_model="numpy")(compiled.adam.py_func)
    for copy in (None, half.copy()):
        loop(half, half.copy(), state, state.copy(), state.copy(), copy, scalars)
    code = " ".join(loop.inspect_asm().values())
    assert "sqrt" in code
    assert not re.search(r"vfn?m(add|sub)|fmla|\bfmadd", code)
    assert not re.search(r"__(extendhfsf2|truncsfhf2|gnu_[hf]2[hf]_ieee)", code)


def test_fp16_without_its_instructions_is_refused(monkeypatch):
    monkeypatch.setattr(compiled.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: {"f16c": False})
    with pytest.raises(ConfigError, match="F16C"):
        compiled._require_half_instructions()
