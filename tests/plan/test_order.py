"""Groups are in the order of a forward pass, and are shared out evenly."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.plan.order import execution_order, natural_key, share_out

LLAMA = ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"] + [
    f"model.layers.{i}.{part}.weight" for i in range(11) for part in ("mlp.up_proj", "self_attn.q_proj")
]
GPT2 = ["wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias"] + [f"h.{i}.attn.c_attn.weight" for i in range(11)]
BERT = [
    "bert.embeddings.word_embeddings.weight", "bert.encoder.layer.0.output.dense.weight",
    "bert.encoder.layer.1.attention.self.query.weight", "bert.pooler.dense.weight", "cls.predictions.bias",
]  # fmt: skip
T5 = [
    "shared.weight", "encoder.block.0.layer.0.SelfAttention.q.weight", "encoder.block.1.layer.1.Dense.wi.weight",
    "encoder.final_layer_norm.weight", "decoder.block.0.layer.2.Dense.wo.weight",
    "decoder.final_layer_norm.weight", "lm_head.weight",
]  # fmt: skip
LLAVA = [
    "vision_tower.vision_model.embeddings.patch_embedding.weight", "vision_tower.vision_model.encoder.layers.0.fc.bias",
    "multi_modal_projector.linear_1.weight", "language_model.model.embed_tokens.weight",
    "language_model.model.layers.0.mlp.up_proj.weight", "language_model.model.norm.weight",
    "language_model.lm_head.weight",
]  # fmt: skip


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        (LLAMA, ["embeddings", *(f"model.layers.{i}" for i in range(11)), "norm", "head"]),
        (GPT2, ["embeddings", *(f"h.{i}" for i in range(11)), "norm"]),
        (BERT, ["embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1", "head"]),
        (
            T5,
            ["embeddings", "encoder.block.0", "encoder.block.1", "encoder.norm", "decoder.block.0", "decoder.norm",
             "head"],
        ),
        (
            LLAVA,
            ["vision_tower.embeddings", "vision_tower.vision_model.encoder.layers.0", "multi_modal_projector.rest",
             "language_model.embeddings", "language_model.model.layers.0", "language_model.norm",
             "language_model.head"],
        ),
    ],
    ids=["llama", "gpt2", "bert", "t5", "llava"],
)  # fmt: skip
def test_models_in_execution_order(names: list[str], groups: list[str]) -> None:
    shuffled = random.Random(1).sample(names, len(names))
    assert [group.name for group in execution_order(shuffled).groups] == groups


def test_a_configuration_tells_layers_from_what_is_numbered_outside_them() -> None:
    # Without the configuration, the two stages look like the blocks.
    names = [f"stages.{s}.layers.{i}.mlp.weight" for s in range(2) for i in range(3)]
    assert len(execution_order(names).groups) == 2
    order = execution_order(names, {"model_type": "staged", "text_config": {"num_hidden_layers": 3}})
    assert [group.name for group in order.groups] == [f"stages.{s}.layers.{i}" for s in range(2) for i in range(3)]
    assert order.reason == "from config.json: staged, 3 layers"


def test_a_configuration_that_does_not_fit_is_said() -> None:
    order = execution_order(GPT2, {"model_type": "gpt2", "n_layer": 40})
    assert order.groups == execution_order(GPT2).groups
    assert order.reason == "from the names of the tensors: config.json (gpt2) gives no number of layers that fits them"


@given(st.lists(st.text("ab.01", max_size=9), unique=True, max_size=20))
def test_every_name_is_in_one_group(names: list[str]) -> None:
    groups = execution_order(names).groups
    assert sorted(name for group in groups for name in group.tensors) == sorted(names)
    assert len({group.name for group in groups}) == len(groups)


def test_numbers_sort_as_numbers() -> None:
    assert sorted(["h.10", "h.9", "h", "h.²"], key=natural_key) == ["h", "h.9", "h.10", "h.²"]


@given(st.lists(st.integers(0, 100), max_size=30), st.integers(1, 4), st.integers(1, 3))
def test_groups_are_shared_out_evenly(sizes: list[int], places: int, per_place: int) -> None:
    files = share_out(sizes, places, places * per_place)
    assert sorted(index for file in files for index in file) == list(range(len(sizes)))
    assert all(file == sorted(file) for file in files)
    totals = [sum(sizes[i] for file in files[place::places] for i in file) for place in range(places)]
    assert max(totals) - min(totals) <= max(sizes, default=0)
    if places == 1:
        assert [index for file in files for index in file] == list(range(len(sizes)))


def test_shards_are_of_about_equal_bytes() -> None:
    assert share_out([10] * 12, 1, 3) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert share_out([40, 10, 10, 10, 10], 1, 2) == [[0], [1, 2, 3, 4]]
    assert share_out([1, 1], 1, 3) == [[0], [1], []]
    assert share_out([10] * 8, 2, 4) == [[0, 2], [1, 3], [4, 6], [5, 7]]
