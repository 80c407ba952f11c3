"""Deferred construction gives, bit for bit, what ordinary construction gives: weights, buffers, generator state."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from tierstore.errors import ConfigError
from tierstore.train.deferred.program import PIECE_ELEMENTS
from tierstore.train.filling import Source
from tierstore.train.materialize import deferred

SEED = 5
WORDS = 97
Build = Callable[[], nn.Module]
_SMALL = {"num_hidden_layers": 2, "hidden_size": 48, "intermediate_size": 50, "num_attention_heads": 4}


def assembled(source: Source, model: nn.Module) -> dict[str, torch.Tensor]:
    """All values that a source gives, each element exactly once."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    values: dict[str, torch.Tensor] = {}
    seen = {name: torch.zeros(shape.numel(), dtype=torch.int8) for name, shape in shapes.items()}
    for name, offset, piece in source.stream():
        assert piece.dim() == 1
        assert piece.nbytes <= 32 * 2**20
        target = values.setdefault(name, torch.empty(shapes[name].numel(), dtype=piece.dtype))
        target[offset : offset + piece.numel()] = piece
        seen[name][offset : offset + piece.numel()] += 1
    assert all(bool((count == 1).all()) for count in seen.values())
    assert source.names() == shapes.keys()
    return {name: value.view(shapes[name]) for name, value in values.items()}


def check(build: Build) -> nn.Module:
    """Compares an ordinary build with a deferred one, its twin, and returns the twin."""
    torch.manual_seed(SEED)
    before = torch.get_rng_state()
    ordinary = build()
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    model, source = deferred(build)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.is_meta for parameter in model.parameters())
    values = assembled(source, model)
    assert torch.equal(torch.get_rng_state(), after)
    compare_parameters(ordinary, model, values)
    expected, found = dict(ordinary.named_buffers()), dict(model.named_buffers())
    assert expected.keys() == found.keys()
    for name, buffer in expected.items():
        assert found[name].dtype == buffer.dtype
        assert torch.equal(found[name], buffer), name
    return model


def compare_parameters(ordinary: nn.Module, model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    everywhere = list(ordinary.named_parameters(remove_duplicate=False))
    twins = dict(model.named_parameters(remove_duplicate=False))
    assert [name for name, _ in everywhere] == list(twins)
    for name, parameter in ordinary.named_parameters():
        twin = twins[name]
        assert type(twin) is type(parameter)
        assert (twin.shape, twin.dtype, twin.requires_grad) == (
            parameter.shape,
            parameter.dtype,
            parameter.requires_grad,
        )
        if parameter.numel():
            assert values[name].dtype == parameter.dtype
            assert torch.equal(values[name], parameter.detach()), name
    for first, parameter in everywhere:  # tied parameters stay one parameter
        for second, other in everywhere:
            assert (parameter is other) == (twins[first] is twins[second])


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=2, n_embd=48, n_head=4, vocab_size=WORDS, n_positions=33, bos_token_id=1, eos_token_id=1
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SMALL, vocab_size=WORDS, pad_token_id=3))


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**_SMALL, num_key_value_heads=2, vocab_size=WORDS, num_local_experts=4)
    return transformers.MixtralForCausalLM(config)


def t5() -> nn.Module:
    config = transformers.T5Config(num_layers=2, d_model=48, d_ff=50, num_heads=4, vocab_size=WORDS, d_kv=12)
    return transformers.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(**_SMALL, image_size=32, patch_size=8))


def mamba() -> nn.Module:
    config = transformers.MambaConfig(num_hidden_layers=2, hidden_size=32, state_size=4, vocab_size=WORDS)
    return transformers.MambaForCausalLM(config)


def half_gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=1, n_embd=48, n_head=4, vocab_size=WORDS, n_positions=33, bos_token_id=1, eos_token_id=1
    )
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        nn.init.kaiming_normal_(self.first.weight, mode="fan_out", nonlinearity="relu")


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 7), nn.BatchNorm2d(8), Block(8), Block(8), nn.Flatten(), nn.Linear(8, 5))


@pytest.mark.parametrize("build", [gpt2, llama, mixtral, t5, vit, mamba, half_gpt2, convolutional])
def test_models(build: Build) -> None:
    check(build)


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Embedding(40, 7, padding_idx=2),
        lambda: nn.Transformer(32, 4, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=40, batch_first=True),
        lambda: nn.LSTM(5, 7, 2, bidirectional=True),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 7)),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 7)),
        lambda: nn.Sequential(nn.Linear(9, 5).half(), nn.Linear(9, 5).double(), nn.Linear(600, 50).bfloat16()),
        lambda: nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last),
    ],
)
def test_modules(build: Build) -> None:
    check(build)


def parameter_of(*size: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.empty(*size, dtype=dtype))


class OneByOne(nn.Module):
    """A module with a parameter that `fill` sets after its registration, and a randomly initialized layer behind it."""

    def __init__(self, make: Callable[[], nn.Parameter], fill: Callable[[nn.Parameter], object]) -> None:
        super().__init__()
        self.weight = make()
        fill(self.weight)
        self.behind = nn.Linear(3, 3)


@pytest.mark.parametrize(
    "fill",
    [
        nn.init.zeros_,
        nn.init.ones_,
        nn.init.eye_,
        nn.init.xavier_normal_,
        nn.init.kaiming_uniform_,
        nn.init.orthogonal_,
        lambda weight: nn.init.sparse_(weight, 0.3),
        lambda weight: nn.init.trunc_normal_(weight, std=0.02),
        lambda weight: nn.init.trunc_normal_(weight, std=1.0, a=-1.0, b=1.5),
        lambda weight: nn.init.trunc_normal_(weight, mean=3.0, std=1.0, a=-1.0, b=1.0),
        lambda weight: weight.data.uniform_().erfinv_().mul_(0.3).add_(1).clamp_(0, 1.2),
        lambda weight: weight.data.exponential_().log_(),
        lambda weight: weight.data.bernoulli_(0.3),
        lambda weight: weight.data.normal_().t().mul_(torch.arange(30.0)),
        lambda weight: nn.init.normal_(weight.data.uniform_()[3:7], std=2),
        lambda weight: weight.data.uniform_()[:, 2].fill_(4.0),
        lambda weight: weight.data.normal_().t().normal_(),
        lambda weight: weight.data.normal_()[2].copy_(torch.randn(20)),
        lambda weight: weight.data.normal_().div_(weight.data.norm()),
        lambda weight: weight.data.copy_(torch.randn(30, 20, dtype=torch.float64)),
        lambda weight: weight.data.normal_()[torch.tensor([1, 4])].sum().item() and weight.data.mul_(2),
        lambda weight: weight.data.normal_() and None if weight.data.numel() == 1 else weight.data.normal_().tolist(),
        lambda weight: setattr(weight, "data", torch.rand(30, 20)),
        lambda weight: setattr(weight, "data", weight.data.normal_().clone() * 2),
    ],
)
def test_initializers(fill: Callable[[nn.Parameter], object]) -> None:
    check(lambda: OneByOne(lambda: parameter_of(30, 20), fill))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Parameter(torch.randn(70, 30) * 0.02),
        lambda: nn.Parameter(torch.rand(9, 9).exp().t()),
        lambda: nn.Parameter(torch.ones(5)),
        lambda: nn.Parameter(torch.zeros(3, 4), requires_grad=False),
        lambda: nn.Parameter(torch.full((6,), 2.5)),
        lambda: nn.Parameter(torch.tensor(0.5)),
        lambda: nn.Parameter(torch.empty(0, 3)),
        lambda: nn.Parameter(torch.empty(6, 6).normal_().t()),
        lambda: nn.Parameter(torch.log(torch.arange(1.0, 9)).repeat(2, 1)),
        lambda: nn.Parameter(torch.nn.functional.dropout(torch.ones(9))),
        lambda: nn.Parameter(torch.randint(0, 9, (20,)).float() + torch.randperm(20)),
        lambda: nn.Parameter(torch.randn(40)[5:25]),
    ],
)
def test_parameters_with_values_from_the_start(make: Callable[[], nn.Parameter]) -> None:
    check(lambda: OneByOne(make, lambda weight: None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("draw", [nn.init.normal_, nn.init.uniform_])
def test_pieces_follow_the_stream(
    draw: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draws that are overwritten, final draws and incomplete last pieces, with sizes around every piece boundary."""
    monkeypatch.setattr("tierstore.train.deferred.program.PIECE_ELEMENTS", 64)
    monkeypatch.setattr("tierstore.train.filling.PIECE_ELEMENTS", 64)

    class Drawn(nn.Module):
        def __init__(self, elements: int) -> None:
            super().__init__()
            self.weight = parameter_of(elements, dtype=dtype)
            for initializer in (draw, nn.init.normal_, draw):
                initializer(self.weight)
            self.behind = parameter_of(7)
            draw(self.behind)

    for elements in (1, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65, 79, 80, 81, 127, 128, 143, 144, 145, 1000):
        check(lambda elements=elements: Drawn(elements))


def test_a_parameter_of_several_pieces() -> None:
    check(lambda: nn.Embedding(PIECE_ELEMENTS // 8 + 3, 17, padding_idx=PIECE_ELEMENTS // 17))


def test_what_torch_leaves_undefined_is_zero() -> None:
    model, source = deferred(lambda: OneByOne(lambda: parameter_of(5, 3), lambda weight: weight.data[2].fill_(1)))
    weight = assembled(source, model)["weight"]
    assert torch.equal(weight, torch.tensor([0.0, 0, 1, 0, 0]).repeat(3, 1).t())


class Held(nn.Module):
    """Holds its parameter also under other names than the registered one, and values that are not parameters."""

    def __init__(self) -> None:
        super().__init__()
        weight = nn.Parameter(torch.empty(8, 8))
        self.weight = weight
        nn.init.normal_(weight)
        self.listed = [weight]
        self.average: torch.Tensor
        self.register_buffer("average", self.weight.detach().clone())
        self.register_buffer("noise", torch.rand(3, 5), persistent=False)
        self.copied = copy.deepcopy(self.listed[0])
        self.copied.data[0].zero_()
        self.plain = self.weight.detach() * 2
        self.scale = float(self.weight.detach()[1, 1])
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.weight


def test_other_holders_of_a_parameter() -> None:
    model = check(Held)
    torch.manual_seed(SEED)
    ordinary = Held()
    assert model.listed[0] is model.weight is model.tied.weight
    assert torch.equal(model.plain, ordinary.plain.detach())
    assert model.scale == ordinary.scale


def test_a_source_can_be_streamed_again_with_the_generator_in_use() -> None:
    torch.manual_seed(SEED)
    model, source = deferred(gpt2)
    first = assembled(source, model)
    pieces = source.stream()
    second: dict[str, list[torch.Tensor]] = {name: [] for name in source.names()}
    for name, _, values in pieces:
        second[name].append(values)
        torch.rand(3)  # the receiver's own draws do not change the stream
    assert all(torch.equal(torch.cat(parts), first[name].view(-1)) for name, parts in second.items())


def test_seeding_inside_the_constructor() -> None:
    def seeded() -> nn.Module:
        nn.Linear(3, 3)
        torch.manual_seed(9)
        inner = nn.Linear(4, 4)
        torch.manual_seed(11)
        return nn.Sequential(inner, nn.Linear(4, 5))

    check(seeded)


def test_a_forked_generator_is_refused() -> None:
    def forked() -> nn.Module:
        first = nn.Linear(3, 3)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            second = nn.Linear(3, 3)
        return nn.Sequential(first, second, nn.Linear(3, 3))

    with pytest.raises(ConfigError, match="fork_rng"):
        deferred(forked)


def test_constants_over_the_limit_name_parameter_and_operator() -> None:
    with pytest.raises(ConfigError, match=r"copy_ on parameter 'weight' of a OneByOne: 2.34 KiB .* ordinarily"):
        deferred(lambda: OneByOne(lambda: parameter_of(30, 20), nn.init.orthogonal_), constant_limit_bytes=1000)


def test_overwritten_constants_do_not_count() -> None:
    def build() -> nn.Module:
        layers = [OneByOne(lambda: nn.Parameter(torch.arange(200.0).cos()), nn.init.normal_) for _ in range(5)]
        return nn.Sequential(*layers)

    deferred(build, constant_limit_bytes=1000)


@pytest.mark.parametrize(
    ("fill", "message"),
    [
        (lambda weight: weight.data.normal_(generator=torch.Generator()), "normal_ on parameter 'weight'"),
        (lambda weight: weight.detach().numpy(), "numpy on parameter 'weight'"),
        (lambda weight: weight.data.resize_(3), "resize_ on parameter 'weight'"),
        (lambda weight: weight.data.view(torch.int32).fill_(3), "writing torch.int32 into torch.float32"),
    ],
)
def test_refusals(fill: Callable[[nn.Parameter], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        deferred(lambda: OneByOne(lambda: parameter_of(30, 20), fill))


def test_parameters_elsewhere_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"parameter 'weight' of a Linear is on the meta device: .*from_config"):
        deferred(lambda: nn.Linear(3, 3, device="meta"))
    with pytest.raises(ConfigError, match="lazy"):
        deferred(lambda: nn.LazyLinear(3))


def test_other_threads_and_later_constructions_are_left_alone() -> None:
    others: list[nn.Module] = []

    def build() -> nn.Module:
        thread = threading.Thread(
            target=lambda: others.append(OneByOne(lambda: parameter_of(4, 4), nn.init.trunc_normal_))
        )
        thread.start()
        thread.join()
        return nn.Linear(2, 2)

    original = nn.init._no_grad_trunc_normal_
    deferred(build)
    with pytest.raises(ZeroDivisionError):
        deferred(lambda: nn.Linear(2, 2 // 0))
    assert nn.init._no_grad_trunc_normal_ is original
    for module in (others[0], nn.Linear(2, 2)):
        assert all(not parameter.is_meta and bool(parameter.abs().sum()) for parameter in module.parameters())


def resident_bytes(field: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split(f"{field}:")[1].split()[0]) * 1024


def test_memory_stays_far_below_the_model() -> None:
    config = transformers.GPT2Config(n_layer=12, n_embd=768)
    gpt2()  # imports and caches
    reset = Path("/proc/self/clear_refs")
    reset.write_text("5", encoding="ascii")
    before = resident_bytes("VmRSS")
    model, source = deferred(lambda: transformers.GPT2LMHeadModel(config))
    model_bytes = sum(parameter.nbytes for parameter in model.parameters())
    elements = sum(values.numel() for _, _, values in source.stream())
    growth = resident_bytes("VmHWM") - before
    print(f"\n{model_bytes / 2**20:.0f} MiB of parameters, resident memory grew by {growth / 2**20:.1f} MiB")
    assert elements * 4 == model_bytes
    assert growth < model_bytes // 5
