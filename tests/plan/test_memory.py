"""Memory: the worked numbers of well-known models, ZeRO shares, degrees, activations."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import ConfigError
from tierstore.kernels.adam import state_bytes_per_element
from tierstore.plan.memory import (
    PARAMETER_BYTES,
    Attention,
    Job,
    Layout,
    activation_bytes,
    components,
    gpu_bytes,
    group_needs,
    stage_parts,
)
from tierstore.plan.model_size import from_config, from_parameters
from tierstore.plan.placement import BLOCK

GPT3 = from_config(
    {"model_type": "gpt2", "n_embd": 12288, "n_layer": 96, "n_head": 96, "vocab_size": 51200, "n_positions": 2048}
)


def test_175_billion_parameters() -> None:
    found = components(Job(from_parameters(175e9), "fp16"))
    assert (found["weights"], found["gradients"]) == (350e9, 350e9)
    assert found["fp32 master"] + found["momentum"] + found["variance"] == 2.1e12


@pytest.mark.parametrize("dtype", PARAMETER_BYTES)
def test_the_state_is_as_the_kernels_keep_it(dtype: str) -> None:
    each = PARAMETER_BYTES[dtype]
    assert each.total == 16
    assert each.state == state_bytes_per_element(dtype)


def test_zero_shares_of_the_paper() -> None:
    # Rajbhandari et al. (2020), figure 1: 7.5 billion parameters on 64 GPUs.
    job = Job(from_parameters(7.5e9), "fp16")
    found = [gpu_bytes(job, Layout(nodes=8, gpus=8, zero=stage)).total / 1e9 for stage in range(4)]
    assert found == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)


def test_degrees_divide() -> None:
    job = Job(from_parameters(1e12))
    found = gpu_bytes(job, Layout(nodes=64, gpus=8, tensor=8, pipeline=8))
    assert found.total == pytest.approx(16e12 / 512, rel=0.05)  # the fullest stage has a little more


def test_the_fullest_stage_has_an_end_and_its_share_of_the_blocks() -> None:
    shape = from_config({"model_type": "gpt2", "n_layer": 5, "n_embd": 64, "n_head": 2, "vocab_size": 1000})
    parts = stage_parts(shape, Layout(gpus=4, tensor=2, pipeline=2))
    blocks = [f"transformer.h.{index}" for index in range(3)]
    assert [part.name for part in parts] == ["transformer.wte", "transformer.wpe", *blocks]
    assert parts[0].parameters == 1000 * 64 // 2


@given(parameters=st.integers(10**6, 10**11), ranks=st.integers(1, 64), zero=st.integers(0, 3))
def test_ranks_keep_everything_once(parameters: int, ranks: int, zero: int) -> None:
    job = Job(from_parameters(parameters))
    needs = group_needs(job, Layout(gpus=ranks, zero=zero))
    for need, part in zip(needs, job.shape.parts, strict=True):
        owners = ranks if zero else 1
        assert need.elements * owners >= part.parameters
        assert (need.elements - BLOCK) * owners < part.parameters
        assert need.device_bytes >= 2 * part.parameters


def test_activations_of_the_paper() -> None:
    # Korthikanti et al. (2022): the 22B model keeps s b h L (34 + 5 a s / h), 5 a s / h = 80 for GPT-3.
    job = Job(GPT3, sequence=2048, attention=Attention.EAGER)
    assert 5 * GPT3.heads * 2048 / GPT3.hidden == 80
    logits = 4 * 2048 * 51200
    unit = 2048 * 12288
    assert activation_bytes(job, Layout()) == unit * 96 * (34 + 80) + logits
    assert activation_bytes(job, Layout(gpus=8, tensor=8)) == pytest.approx(unit * 96 * (10 + 3 + 10) * 1 + logits / 8)
    fused = Job(GPT3, sequence=2048)
    assert activation_bytes(fused, Layout()) == unit * 96 * 34 + logits
    assert activation_bytes(Job(GPT3, sequence=2048, checkpointing=True), Layout()) == unit * (2 * 96 + 34) + logits


def test_activations_of_ranks_and_stages() -> None:
    eight = Job(GPT3, batch=8, accumulate=4)
    one = Job(GPT3)
    assert activation_bytes(eight, Layout(gpus=8)) == activation_bytes(one, Layout())
    staged = activation_bytes(Job(GPT3, accumulate=4), Layout(gpus=8, pipeline=8))
    assert staged == 2048 * 12288 * 34 * (96 / 8) * 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Job(GPT3, dtype="fp8"), "dtype is one of bf16, fp16, fp32, not 'fp8'"),
        (lambda: Job(GPT3, batch=0), "--batch must be at least 1"),
        (lambda: Job(GPT3, sequence=4096), "--sequence 4096 is longer than the model's context of 2048"),
        (lambda: Layout(gpus=0), "must be at least 1, not 0"),
        (lambda: Layout(zero=4), "ZeRO stage is 0 to 3"),
        (lambda: Layout(gpus=8, tensor=3), "8 GPUs cannot be divided into tensor x pipeline = 3 x 1"),
        (lambda: Layout(nodes=2, gpus=4, tensor=8), "--tensor-parallel 8 does not divide the 4 GPUs of a node"),
        (lambda: stage_parts(GPT3, Layout(gpus=97, pipeline=97)), "more than the model has layers: 96"),
    ],
)
def test_what_cannot_be(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
