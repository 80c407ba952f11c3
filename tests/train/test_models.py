"""Hugging Face models of text and images: losses as in plain torch, on a device that holds a part of the model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import Run, disk, smallest_budgets, train, train_plain, worst_difference
from torch import nn

transformers = pytest.importorskip("transformers")

STEPS = 4
VOCABULARY = 64

pytestmark = [
    pytest.mark.usefixtures("no_leaks", "one_thread"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """No warnings about special tokens that the tiny vocabularies lack."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


@dataclass(frozen=True)
class Case:
    """How to make a model, and how to draw a batch for it."""

    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], dict[str, torch.Tensor]]


def text(generator: torch.Generator) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (2, 12), generator=generator)
    return {"input_ids": ids, "labels": ids}


def pairs(generator: torch.Generator) -> dict[str, torch.Tensor]:
    source = torch.randint(0, VOCABULARY, (2, 9), generator=generator)
    return {"input_ids": source, "labels": torch.randint(0, VOCABULARY, (2, 7), generator=generator)}


def images(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        "pixel_values": torch.randn(4, 3, 32, 32, generator=generator),
        "labels": torch.randint(0, 5, (4,), generator=generator),
    }


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=3, n_embd=48, n_head=4, vocab_size=VOCABULARY, n_positions=32)
    )


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=VOCABULARY, max_position_embeddings=32,
        )
    )  # fmt: skip


def mixtral() -> nn.Module:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=VOCABULARY, max_position_embeddings=32, num_local_experts=16, num_experts_per_tok=1,
            output_router_logits=True,
        )
    )  # fmt: skip


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=VOCABULARY, decoder_start_token_id=0
        )
    )


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64, image_size=32,
            patch_size=8, num_labels=5,
        )
    )  # fmt: skip


def resnet() -> nn.Module:
    return transformers.ResNetForImageClassification(
        transformers.ResNetConfig(
            embedding_size=16, hidden_sizes=[16, 16, 16, 16], depths=[1, 2, 2, 1], layer_type="basic", num_labels=5
        )
    )


CASES = {
    "gpt2": Case(gpt2, text),
    "llama": Case(llama, text),
    "mixtral": Case(mixtral, text),
    "t5": Case(t5, pairs),
    "vit": Case(vit, images),
    "resnet": Case(resnet, images),
}


def make(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.make()


def batches_of(case: Case) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [case.batch(generator) for _ in range(STEPS)]


def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch).loss


EXPECTED: dict[tuple[str, float | None], Run] = {}


def expected(name: str, clip: float | None) -> Run:
    if (name, clip) not in EXPECTED:
        case = CASES[name]
        EXPECTED[name, clip] = train_plain(make(case), batches_of(case), loss_of, max_grad_norm=clip)
    return EXPECTED[name, clip]


SCHEDULES = [("forward", 0.5), ("backward", None), ("speculative", 0.5)]


@pytest.mark.parametrize(
    ("name", "update", "clip"),
    [(name, *way) for name, left_out in zip(CASES, itertools.cycle(SCHEDULES)) for way in SCHEDULES if way != left_out],
)
def test_losses_are_those_of_plain_torch(name: str, update: str, clip: float | None, tmp_path: Path) -> None:
    case = CASES[name]
    gpu, cpu = smallest_budgets(make(case), nvme=["unused"], update=update)
    tiers = disk(tmp_path, gpu_memory=gpu, cpu_memory=cpu)
    found = train(make(case), batches_of(case), tiers, loss_of, update=update, max_grad_norm=clip)
    assert worst_difference(found.losses, expected(name, clip).losses) < 1e-5
    weight_bytes = sum(p.numel() * 4 for p in make(case).parameters())
    assert gpu < weight_bytes
    assert found.moved["h2d"] > (STEPS - 1) * weight_bytes  # groups came and went
    assert found.moved["nvme_read"] > 0
    for key, value in expected(name, clip).weights.items():
        assert found.weights[key].shape == value.shape
        if not value.is_floating_point():
            assert torch.equal(found.weights[key], value), key
        elif "running" in key:
            torch.testing.assert_close(found.weights[key], value, rtol=1e-4, atol=1e-5)
