"""Every gradient is counted, no rank waits for ever, and an error names what cannot work."""

from __future__ import annotations

import gc
import itertools
import math
import re
import signal
import warnings

import pytest
import torch
from ranks import call, outcomes_of, run_in_turn, run_ranks
from reducing import (
    called_directly,
    failed,
    honest,
    in_every_order,
    lost,
    misused,
    odd,
    recomputed,
    refused,
    with_wrong_hook,
)
from torch import distributed, nn

from tierstore import Engine, GradientReducer, OverlapProfiler, TierConfig
from tierstore.errors import ClosedError, ConfigError, GraphError
from tierstore.garbage import no_garbage_collection
from tierstore.trace import Tracer
from tierstore.train.data_parallel.launching import Launcher

TIMEOUT_S = 2.0
REPORT_S = 4.0  # to find out which rank is missing: a few heart beats


def test_two_of_one_bucket_in_both_orders_and_one_late() -> None:
    orders = [("left", "left"), ("right", "right"), ("left", "right")]  # of each rank
    for firsts, ranks in zip(orders, run_in_turn(2, honest, [call(firsts) for firsts in orders])):
        for first, found in zip(firsts, ranks):
            assert found["same"]
            assert found["never"] is None
            assert found["unused"] == ["never"]
            record = found["record"]
            assert record.order == (first, "right" if first == "left" else "left", "late")
            pair, rest = record.buckets
            assert pair.parameters == ("left", "right")
            assert rest.parameters == ("late", "never")
            assert pair.launched_s <= record.last_gradient_s < rest.launched_s


def test_every_order_with_one_left_out() -> None:
    found = run_in_turn(2, in_every_order, [call(capacity) for capacity in (1, 2, 3)])
    assert found == [[True, True]] * 3


def test_ranks_that_differ_are_told_on_all() -> None:
    cases = {
        "shape": "layers.1.weight is (25, 24) float32 trained on rank 1, (24, 24) float32 trained on rank 0",
        "missing": "parameter extra is (2,) float32 trained on rank 1, missing on rank 0",
        "dtype": "layers.2.weight is (24, 24) float64",
        "order": "(4, 3, 3, 3) float32 trained in channels_last on rank 1, (4, 3, 3, 3) float32 trained on rank 0",
        "option": "option bucket is 2048 on rank 1, 1024 on rank 0",
        "buffers": "option broadcast_buffers is False on rank 1, True on rank 0",
    }
    for words, messages in zip(cases.values(), run_in_turn(2, refused, [call(case) for case in cases])):
        assert [words in message for message in messages] == [True, True], messages


def test_what_cannot_be_followed_is_named() -> None:
    cases = {
        "static, fewer": ["not that of the first", "layers.2.weight got 0 of 1 gradients"],
        "static, more": ["layers.2.weight got more gradients than in the first backward (1)"],
        "all used": ["left parameters out", "layers.2.weight got 0 of 1 gradients"],
        "twice": ["layers.2.weight got its gradient twice", "static_graph"],
        "delayed": ["zero_grad(set_to_none=True)"],
        "higher": ["create_graph=True"],
    }
    for words, messages in zip(cases.values(), run_in_turn(2, misused, [call(case) for case in cases])):
        assert all(word in message for word in words for message in messages), messages


def test_parameters_of_every_kind() -> None:
    assert run_ranks(2, odd) == [[], []]


def test_after_a_backward_that_failed() -> None:
    """A failure before the first gradient costs nothing; after a later one each backward says that it cannot go on."""
    both = run_in_turn(2, failed, [call(by_reducer) for by_reducer in (False, True)])
    for early, late in itertools.chain(*both):
        assert early == [True, True]
        for message in late:
            assert "after one that failed, in which ranks may" in message


def test_a_loss_that_autograd_refuses_costs_nothing(alone: object) -> None:
    module, x = nn.Linear(2, 2), torch.ones(1, 2)
    with GradientReducer(module) as reducer:
        with pytest.raises(RuntimeError, match="only for scalar outputs"):
            reducer.backward(reducer(x))
        with pytest.raises(RuntimeError, match="does not require grad"):
            reducer.backward(x.sum())
        reducer.backward(reducer(x), gradient=torch.ones(1, 2))
        assert module.bias.grad.tolist() == [1.0, 1.0]


def test_what_another_reducer_has_may_be_frozen_in_a_module(alone: object) -> None:
    """As a discriminator behind the generator. And a reducer that cannot be made closes no other reducer."""
    judge, maker, x = nn.Linear(2, 1), nn.Linear(2, 2), torch.ones(1, 2)
    with GradientReducer(judge) as first:
        judge.requires_grad_(False)
        with GradientReducer(nn.Sequential(maker, judge)) as second:
            second.backward(second(x).sum())
        judge.requires_grad_(True)
        with pytest.raises(ConfigError, match="max_in_flight"):
            GradientReducer(judge, max_in_flight=0)
        first.backward(first(x).sum())
        assert judge.bias.grad.tolist() == [1.0]


def test_without_the_reducers_forward_and_backward() -> None:
    assert run_ranks(2, called_directly) == [True, True]


def test_static_graph_with_reentrant_checkpoints() -> None:
    assert run_ranks(2, recomputed) == [True, True]


@pytest.mark.parametrize(
    ("sign", "kind", "victim"),
    [
        (signal.SIGKILL, "plain", 2),
        (signal.SIGKILL, "hook", 0),
        (signal.SIGSTOP, "delayed", 2),
    ],
)
def test_a_lost_rank_is_named_in_time(sign: signal.Signals, kind: str, victim: int) -> None:
    stopped = [victim] if sign == signal.SIGSTOP else []
    wait_s = TIMEOUT_S + REPORT_S + 4
    outcomes = outcomes_of(3, lost, victim, sign, kind, timeout_s=TIMEOUT_S, wait_s=wait_s, stopped=stopped)
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            assert not outcome.is_finished
            continue
        assert outcome.error is not None
        said = re.search(
            rf"after ([\d.]+) s: rank {rank} of 3 waited for the (.+), and rank ([\d, ]+) do", outcome.error
        )
        assert said is not None, outcome.error
        assert float(said[1]) < TIMEOUT_S + REPORT_S
        assert "bucket" in said[2] or "used parameters" in said[2]
        assert str(victim) in said[3].split(", ")  # another rank may have reported and ended, and be named, too


@pytest.fixture
def alone(tmp_path: object) -> object:
    """A group of one rank."""
    with no_garbage_collection():
        distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
        yield
        distributed.destroy_process_group()
        # A reducer is a cycle of objects: if the fork of a later test collected it, the end of its group would hang.
        # It is still in the youngest generation; a full collection takes 0.6 s.
        gc.collect(0)


def test_options_that_cannot_work(alone: object) -> None:
    for module, options, word in (
        (nn.Linear(2, 2).requires_grad_(False), {}, "no parameter"),
        (nn.Embedding(2, 2, sparse=True), {}, "sparse=False"),
        (nn.Linear(2, 2), {"max_in_flight": 0}, "^max_in_flight is a whole number of at least 1, not 0"),
        (nn.Linear(2, 2), {"max_in_flight": "3"}, "^max_in_flight is a whole number"),
        (nn.Linear(2, 2), {"bucket": 0}, "^bucket is a whole number"),
        (nn.Linear(2, 2), {"bucket": "auto"}, "cost="),
        (nn.Linear(2, 2), {"bucket": "auto", "cost": 3}, "cost="),
        (nn.Linear(2, 2), {"reduce": "gather"}, "reduce must be"),
        (nn.Linear(2, 2), {"order": ["weight", "wieght"]}, "order= has wieght"),
        (nn.Linear(2, 2), {"order": ["weight", "weight"]}, "order= has a name twice"),
        (nn.Linear(2, 2), {"reduce": "reduce_scatter", "timed": True}, "only NCCL tells when a reduce-scatter ends"),
        (nn.Sequential(nn.parallel.DistributedDataParallel(nn.Linear(2, 2))), {}, "DDP averages .* already"),
        (nn.Linear(2, 2), {"process_group": "mesh"}, "process_group must be a .*ProcessGroup, not a str"),
        (nn.Linear(2, 2), {"process_group": distributed.GroupMember.NON_GROUP_MEMBER}, "this rank is not in the"),
        (None, {}, "module must be a torch.nn.Module, not a NoneType"),
    ):
        with pytest.raises(ConfigError, match=word):
            GradientReducer(module, **options)


def test_a_module_has_one_reducer_at_a_time(alone: object) -> None:
    """Two would divide its gradients twice, as when a notebook cell is run again, or two modules share a part."""
    shared, x = nn.Linear(2, 2), torch.ones(1, 2)
    first, second = nn.Sequential(shared), nn.Sequential(shared, nn.Linear(2, 2))
    before = GradientReducer(first)
    with GradientReducer(first) as reducer:
        reducer.backward(reducer(x).sum())
        for call in (lambda: before(x), lambda: before.no_sync().__enter__()):
            with pytest.raises(ClosedError, match="the reducer was closed"):
                call()
        with pytest.raises(ConfigError, match="a loss is a tensor that depends on the weights, not int"):
            reducer.backward(3)  # type: ignore[arg-type]
        averaged = r"the GradientReducer of a Sequential averages the gradient of 0.weight: close\(\) it first"
        with pytest.raises(ConfigError, match=averaged):
            GradientReducer(second)
        with pytest.raises(ConfigError, match=averaged):
            Engine(second, TierConfig())
    GradientReducer(second).close()
    averages = r"0.weight belongs to an Engine, perhaps a closed one, which averages gradients itself"
    with Engine(second, TierConfig()) as engine, engine.gathered(""), pytest.raises(ConfigError, match=averages):
        GradientReducer(first)


def test_an_optimizer_that_steps_in_backward_is_refused(alone: object) -> None:
    module = nn.Linear(2, 2)
    module.weight._in_backward_optimizers = [torch.optim.SGD([module.weight])]  # as torch marks it
    with pytest.raises(ConfigError, match="an optimizer steps weight in backward, before its gradient is averaged"):
        GradientReducer(module)


@pytest.mark.parametrize("options", [{"find_unused": False}, {"static_graph": True}])
@pytest.mark.parametrize("by_reducer", [False, True])
def test_newcomers_are_refused_also_where_no_graph_is_searched(
    alone: object, options: dict[str, bool], by_reducer: bool
) -> None:
    module, x = nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2)
    with GradientReducer(module, **options) as reducer:
        module.append(nn.Linear(2, 2))
        with pytest.raises(GraphError, match=r"1.weight was put into the module after the reducer was made"):
            reducer.backward(module(x).sum()) if by_reducer else reducer(x).sum().backward()


def test_a_delayed_reducer_loses_nothing_in_its_first_steps(alone: object) -> None:
    """Also when its buckets are rebuilt."""
    module, x = nn.Linear(2, 2), torch.ones(1, 2)
    with GradientReducer(module, delayed=True) as reducer:
        reducer.backward(reducer(x).sum())
        reducer.flush()
        with pytest.raises(GraphError, match="needs zero_grad"):
            reducer.backward(reducer(x).sum())
    with GradientReducer(module, delayed=True) as reducer:
        module.zero_grad()
        reducer.backward(reducer(x).sum())
        with reducer.no_sync():
            reducer.backward(reducer(x).sum())
        with pytest.raises(GraphError, match=r"was accumulated in no_sync\(\), and would be lost"):
            reducer.flush()
        reducer.backward(reducer(x).sum())
        module.zero_grad()
        reducer.flush()
        assert module.bias.grad.tolist() == [2.0, 2.0]


def test_a_delayed_reducer_is_not_profiled(alone: object) -> None:
    reducer = GradientReducer(nn.Linear(2, 2), delayed=True, timed=True)
    with reducer, pytest.raises(ConfigError, match="a step sees no end of its own collectives"):
        OverlapProfiler(reducer)
    with pytest.raises(ConfigError, match="takes a GradientReducer, not a Linear"):
        OverlapProfiler(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_an_error_of_a_comm_hook_is_told() -> None:
    for told in run_ranks(2, with_wrong_hook):
        assert "init_process_group a longer timeout, and start all ranks again (what a hook says)" in told


def test_a_reducer_that_was_interrupted_says_so(alone: object, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = nn.Linear(2, 2), torch.ones(1, 2)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with GradientReducer(module) as reducer:
        monkeypatch.setattr(Launcher, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            reducer.backward(reducer(x).sum())
        with pytest.raises(ClosedError, match="a step was broken off by KeyboardInterrupt: close this reducer"):
            reducer(x)


def test_a_model_with_parts_that_are_not_reduced(alone: object) -> None:
    """A frozen embedding makes no sparse gradient; a buffer may be of a dtype that gloo does not know."""
    module = nn.Sequential(nn.Embedding(2, 2, sparse=True).requires_grad_(False), nn.Linear(2, 2))
    module.register_buffer("counts", torch.tensor([1, -2], dtype=torch.int16))
    module.register_buffer("table", torch.tensor([1 + 2j]))
    with GradientReducer(module) as reducer:
        reducer(torch.tensor([1])).sum().backward()
    assert module.counts.tolist() == [1, -2]
    assert module[1].weight.grad is not None


def holding(value: object) -> torch.futures.Future:
    future = torch.futures.Future()
    future.set_result(value)
    return future


@pytest.mark.parametrize(
    ("hook", "word"),
    [
        (None, "NoneType cannot be"), (lambda _, bucket: None, "future"), (lambda _, b: b.buffer(), "Tensor"),
        (lambda _, bucket: holding(None), "6 elements, not NoneType"),
        (lambda _, bucket: holding(torch.zeros(3)), r"6 elements, not \(3,\)"),
    ],
)
def test_comm_hooks_that_would_reduce_nothing(alone: object, hook: object, word: str) -> None:
    module = nn.Linear(2, 2)

    def step(reducer: GradientReducer) -> None:
        reducer.register_comm_hook(None, hook)
        reducer.backward(reducer(torch.ones(1, 2)).sum())

    with GradientReducer(module) as reducer, pytest.raises(ConfigError, match=word):
        step(reducer)


def test_a_parameter_that_was_frozen_is_named(alone: object) -> None:
    module = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    with GradientReducer(module) as reducer:
        reducer.backward(reducer(torch.ones(1, 2)).sum())
        module[0].bias.requires_grad_(True)
        with pytest.raises(GraphError, match=r"0\.bias was frozen when the reducer was made"):
            reducer.backward(reducer(torch.ones(1, 2)).sum())


@pytest.mark.parametrize("way", ["added", "replaced"])
def test_a_parameter_that_came_later_is_named(alone: object, way: str) -> None:
    """Otherwise each rank would go on with a gradient of its own."""
    module, other = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)
    with GradientReducer(module) as reducer:
        reducer.backward(other(reducer(torch.ones(1, 2))).sum())  # parameters of another module do not matter
        if way == "added":
            module.append(nn.Linear(2, 2))
        else:
            module[0].bias = nn.Parameter(torch.ones(2))
        with pytest.raises(GraphError, match="1.weight was put into" if way == "added" else "0.bias was put into"):
            reducer.backward(reducer(torch.ones(1, 2)).sum())


def test_a_gradient_that_is_gone_is_not_called_sparse(alone: object) -> None:
    module = nn.Linear(2, 2)
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with GradientReducer(module) as reducer, pytest.raises(GraphError, match="taken away by a hook"):
        reducer.backward(module(torch.ones(1, 2)).sum())


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch gives gradients no dtype of their own")
def test_a_gradient_of_another_dtype_is_named(alone: object) -> None:
    module = nn.Linear(2, 2).bfloat16()
    module.weight.grad_dtype = torch.float32
    said = r"weight is torch.float32, and the parameter torch.bfloat16, because"
    with GradientReducer(module) as reducer, pytest.raises(GraphError, match=said):
        reducer.backward(module(torch.ones(1, 2).bfloat16()).sum())


class GivesWeight(nn.Module):
    """One of its outputs is a parameter, and a function of its has an attribute `variable`, as nodes of autograd do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 3.0))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return KeepsVariable.apply(x.clone().requires_grad_()), self.weight


class KeepsVariable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.variable = [x.shape]
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_a_parameter_as_output(alone: object) -> None:
    module = GivesWeight()
    with GradientReducer(module) as reducer:
        for _ in range(3):
            module.zero_grad()
            x, weight = reducer(torch.ones(2))
            (x * weight).sum().backward()
            assert module.weight.grad.tolist() == [1, 1]
        assert not module.weight._backward_hooks  # otherwise one hook for each forward would stay


def test_outputs_without_a_backward_are_let_go(alone: object) -> None:
    """The hook on the outputs does not hold the graph."""
    module = nn.Linear(2, 2)
    with GradientReducer(module) as reducer:
        freed = []
        x = torch.ones(1, 2, requires_grad=True)
        y = x * 2
        output = reducer(Watched.apply(y, freed))
        del output, y
        assert freed == ["freed"]


class _Flag:
    def __init__(self, freed: list[str]) -> None:
        self._freed = freed

    def __del__(self) -> None:
        self._freed.append("freed")


class Watched(torch.autograd.Function):
    """Says when its node of the graph is gone."""

    @staticmethod
    def forward(ctx, x, freed):
        ctx.flag = _Flag(freed)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def test_spans(alone: object) -> None:
    ticks = iter(range(1000))
    tracer = Tracer(lambda: float(next(ticks)))
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with GradientReducer(module, bucket=64, tracer=tracer, clock=tracer.clock) as reducer:
        reducer(torch.ones(1, 4)).sum().backward()
    names = [span.name for span in tracer.spans if span.track == "reduce"]
    assert names == [f"bucket {index}" for index in range(len(reducer.layout()))]


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"delayed": True}, {"reduce": "reduce_scatter"}, {"static_graph": True}])
def test_on_one_gpu(tmp_path: object, options: dict[str, object]) -> None:
    """World size 1 on NCCL: gradients are those of plain torch, launched under backward on a stream of their own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
        try:
            torch.manual_seed(0)
            module = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).cuda()
            with GradientReducer(module, bucket="1MiB", timed=True, **options) as reducer:
                seen: list[list[torch.Tensor]] = []
                for step in range(6):
                    module.zero_grad()
                    x = torch.full((64, 512), 1.0 + step, device="cuda")
                    expected = torch.autograd.grad(module(x).square().mean(), list(module.parameters()))
                    seen.append(list(expected))
                    reducer.backward(reducer(x).square().mean())
                    record = reducer.last_step()
                    assert all(not math.isnan(bucket.done_s) for bucket in record.buckets)
                    of = seen[step - 1] if "delayed" in options else expected
                    if options.get("reduce") == "reduce_scatter":
                        named = dict(zip(dict(module.named_parameters()), of, strict=True))
                        for names, shard in zip(reducer.layout(), reducer.shards(), strict=True):
                            assert torch.equal(shard, torch.cat([named[name].reshape(-1) for name in names]))
                    elif step or "delayed" not in options:
                        for parameter, gradient in zip(module.parameters(), of, strict=True):
                            assert torch.equal(parameter.grad, gradient)
        finally:
            distributed.destroy_process_group()
