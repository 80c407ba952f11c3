"""CPUAdam as a drop-in for torch's optimizers."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from concurrent.futures import Future, wait

import pytest
import torch
from mappings import asks_for_huge_pages, needs_huge_pages
from runs import default_dtype

from tierstore.errors import ConfigError
from tierstore.train import cpu_adam
from tierstore.train.cpu_adam import CPUAdam

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((), (3,), (17, 5), (0,), (1031,))


def parameters_of(dtype, seed=0, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def set_gradients(parameters, step, scale=0.1):
    generator = torch.Generator().manual_seed(1000 + step)
    for parameter in parameters:
        parameter.grad = (torch.randn(parameter.shape, generator=generator) * scale).to(parameter.dtype)


def train(optimizer, parameters, steps, first=0):
    for step in range(first, first + steps):
        set_gradients(parameters, step)
        optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


def optimizer_of(parameters, **options):
    optimizer = CPUAdam(parameters, **{"lr": 1e-2, "threads": 1, **options})
    return optimizer, parameters


def assert_equal(left, right):
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("lr", [1e-3, 0.1])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.5)])
@pytest.mark.parametrize("eps", [1e-8, 1e-2])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_fp32_agrees_with_torch(decoupled, lr, betas, eps, weight_decay):
    options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    ours, theirs = parameters_of(torch.float32), parameters_of(torch.float32)
    reference = (torch.optim.AdamW if decoupled else torch.optim.Adam)(theirs, foreach=False, **options)
    got = train(CPUAdam(ours, decoupled=decoupled, threads=1, **options), ours, 10)
    for a, b in zip(got, train(reference, theirs, 10), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6 * lr + 1e-7)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_16_bit_masters_agree_with_torch_in_fp32(dtype, decoupled):
    optimizer, ours = optimizer_of(parameters_of(dtype), decoupled=decoupled)
    theirs = [torch.nn.Parameter(parameter.detach().float()) for parameter in ours]
    options = {"lr": 1e-2, "weight_decay": 1e-2, "foreach": False}
    reference = (torch.optim.AdamW if decoupled else torch.optim.Adam)(theirs, **options)
    for step in range(20):
        set_gradients(ours, step)
        for mine, other in zip(ours, theirs, strict=True):
            other.grad = mine.grad.float()
        optimizer.step()
        reference.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(optimizer.read_master(mine), other.detach(), rtol=2e-6, atol=2e-7)
        torch.testing.assert_close(mine.detach(), other.detach().to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_steps_below_the_precision_of_the_weights_add_up(dtype):
    parameter = torch.nn.Parameter(torch.ones(8, dtype=dtype))
    optimizer = CPUAdam([parameter], lr=1e-5, weight_decay=0.0, threads=1)
    for _ in range(1000):
        parameter.grad = torch.ones(8, dtype=dtype)
        optimizer.step()
    torch.testing.assert_close(parameter.detach().float(), torch.full((8,), 0.99), rtol=4e-3, atol=0)
    torch.testing.assert_close(optimizer.read_master(parameter), torch.full((8,), 0.99), rtol=5e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_no_bit(dtype, monkeypatch):
    monkeypatch.setattr(cpu_adam, "_PIECE", 100)
    shapes = ((1031,), (7,), (333, 3))
    results = []
    for threads in (1, 2, 5):
        optimizer, parameters = optimizer_of(parameters_of(dtype, shapes=shapes), threads=threads)
        weights = train(optimizer, parameters, 3)
        results.append(weights + [optimizer.read_master(parameter) for parameter in parameters])
        optimizer.close()
    assert_equal(results[0], results[1])
    assert_equal(results[0], results[2])


def test_a_failure_in_a_thread_is_raised(monkeypatch):
    def fail(*_):
        raise ZeroDivisionError

    optimizer, parameters = optimizer_of(parameters_of(torch.float32, shapes=((4,), (4,))), threads=2)
    monkeypatch.setattr(cpu_adam, "update_views", fail)
    with pytest.raises(ZeroDivisionError):
        train(optimizer, parameters, 1)
    optimizer.close()


def test_nothing_changes_any_more_after_an_interrupt(monkeypatch):
    begun, goes_on, waits, ended = threading.Semaphore(0), threading.Event(), [], []

    def update(*_):
        begun.release()
        assert goes_on.wait(30)
        ended.append(threading.current_thread())

    def interrupted(future, timeout=None):
        for _ in range(2):
            assert begun.acquire(timeout=30)
        raise KeyboardInterrupt

    def interrupted_too(futures):
        waits.append(futures)
        if len(waits) == 1:
            raise KeyboardInterrupt
        goes_on.set()
        return wait(futures)

    optimizer, parameters = optimizer_of(parameters_of(torch.float32, shapes=((4,),) * 6), threads=2)
    monkeypatch.setattr(cpu_adam, "update_views", update)
    monkeypatch.setattr(Future, "result", interrupted)
    monkeypatch.setattr(cpu_adam, "wait", interrupted_too)
    with pytest.raises(KeyboardInterrupt):
        train(optimizer, parameters, 1)
    ended_with_the_step = len(ended)
    goes_on.set()
    optimizer.close()
    assert (ended_with_the_step, len(ended)) == (2, 2)
    assert not any(optimizer.state[parameter]["step"] for parameter in parameters)


def test_close_joins_and_a_later_step_works(monkeypatch):
    optimizer, parameters = optimizer_of(parameters_of(torch.float32), threads=2)
    train(optimizer, parameters, 1)
    workers = list(optimizer._pool._threads)
    optimizer.close()
    optimizer.close()
    assert not any(worker.is_alive() for worker in workers)
    train(optimizer, parameters, 1, first=1)
    monkeypatch.setattr(os, "getpid", lambda: -1)  # as in a forked child, where the threads are gone
    before = optimizer._pool
    train(optimizer, parameters, 1, first=2)
    assert optimizer._pool is not before
    optimizer.close()
    before.shutdown()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("through", ["state_dict", "torch.save", "pickle", "deepcopy"])
def test_a_restored_optimizer_goes_on_bit_for_bit(dtype, through, tmp_path):
    optimizer, parameters = optimizer_of(parameters_of(dtype))
    train(optimizer, parameters, 3)
    if through in ("pickle", "deepcopy"):
        clone = copy.deepcopy if through == "deepcopy" else lambda item: pickle.loads(pickle.dumps(item))
        other, twins = clone((optimizer, parameters))
    else:
        saved = {"optimizer": optimizer.state_dict(), "weights": [p.detach() for p in parameters]}
        if through == "torch.save":
            torch.save(saved, tmp_path / "state.pt")
            saved = torch.load(tmp_path / "state.pt", weights_only=True)
        twins = [torch.nn.Parameter(item.clone()) for item in saved["weights"]]
        other, _ = optimizer_of(twins, lr=123.0)
        other.load_state_dict(saved["optimizer"])
    assert_equal(train(other, twins, 3, first=3), train(optimizer, parameters, 3, first=3))
    assert_equal([other.read_master(p) for p in twins], [optimizer.read_master(p) for p in parameters])


def test_loaded_state_is_a_copy_in_fp32():
    optimizer, parameters = optimizer_of(parameters_of(torch.bfloat16))
    train(optimizer, parameters, 2)
    saved = optimizer.state_dict()
    other, twins = optimizer_of(parameters_of(torch.bfloat16))
    other.load_state_dict(saved)
    state, original = other.state[twins[4]], saved["state"][4]
    assert {name: item.dtype for name, item in state.items()} == {
        "step": torch.float32,
        "exp_avg": torch.float32,
        "exp_avg_sq": torch.float32,
        "residual": torch.int16,
    }
    for name, item in state.items():
        assert torch.equal(item, original[name])
        assert item.data_ptr() != original[name].data_ptr()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_state_dict_of_torch_fits(dtype):
    parameters = parameters_of(dtype)
    reference = torch.optim.AdamW(parameters, lr=1e-2)
    train(reference, parameters, 4)
    twins = copy.deepcopy(parameters)
    optimizer, _ = optimizer_of(twins, lr=1.0, weight_decay=0.0)
    optimizer.load_state_dict(reference.state_dict())
    assert optimizer.param_groups[0]["decoupled"]
    tolerance = {"rtol": 2e-6, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-3}
    for a, b in zip(train(optimizer, twins, 2, 4), train(reference, parameters, 2, 4), strict=True):
        torch.testing.assert_close(a, b, **tolerance)


def test_our_fp32_state_fits_torch():
    optimizer, parameters = optimizer_of(parameters_of(torch.float32))
    train(optimizer, parameters, 3)
    twins = copy.deepcopy(parameters)
    reference = torch.optim.AdamW(twins, lr=1e-2)
    saved = copy.deepcopy(optimizer.state_dict())  # torch takes the tensors as they are
    saved["param_groups"] = [{**reference.state_dict()["param_groups"][0]}]
    reference.load_state_dict(saved)
    for a, b in zip(train(optimizer, parameters, 2, 3), train(reference, twins, 2, 3), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_another_default_device_is_not_that_of_the_state(dtype):
    parameter = torch.ones(8, dtype=dtype, requires_grad=True)
    parameter.grad = torch.ones(8, dtype=dtype)
    optimizer = CPUAdam([parameter], lr=0.5, weight_decay=0.0)
    with torch.device("meta"):
        optimizer.step()
        state = copy.deepcopy(optimizer.state_dict())
        state["state"][0]["step"] = 1.0
        optimizer.load_state_dict(state)
        optimizer.step()
        master = optimizer.read_master(parameter)
    assert {one.device.type for one in optimizer.state[parameter].values()} == {"cpu"}
    assert optimizer.state[parameter]["step"] == 2
    torch.testing.assert_close(master, torch.zeros(8), atol=1e-3, rtol=0)


def test_reading_a_master_changes_no_state():
    """Not even while the parameter has other weights for a while, as averaged ones in an evaluation."""
    optimizer, (parameter,) = optimizer_of(parameters_of(torch.float16, shapes=[(1000,)]))
    [kept] = train(optimizer, [parameter], 2)
    master = optimizer.read_master(parameter)
    with torch.no_grad():
        parameter.fill_(0.5)
        assert torch.equal(optimizer.read_master(parameter), torch.full((1000,), 0.5))
        parameter.copy_(kept)
    assert torch.equal(optimizer.read_master(parameter), master)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_another_default_dtype_is_not_that_of_the_state(default):
    """In bf16 the count of steps would stay 256 for ever, and so would the bias correction."""
    optimizer, (parameter,) = optimizer_of(parameters_of(torch.float32, shapes=[(3,)]))
    set_gradients([parameter], 0)
    with default_dtype(default):
        for _ in range(258):
            optimizer.step()
    step = optimizer.state[parameter]["step"]
    assert (step.item(), step.dtype) == (258.0, torch.float32)


def test_hooks_of_load_see_tensors_and_may_change_them():
    optimizer, parameters = optimizer_of(parameters_of(torch.bfloat16))
    train(optimizer, parameters, 1)
    other, twins = optimizer_of(parameters_of(torch.bfloat16))
    seen = []

    def before(_, state_dict):
        state_dict["state"][1]["exp_avg"] = torch.full_like(state_dict["state"][1]["exp_avg"], 0.123)

    other.register_load_state_dict_pre_hook(before)
    other.register_load_state_dict_post_hook(lambda it: seen.append(it.state[twins[1]]["exp_avg"].dtype))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert seen == [torch.float32]
    assert torch.equal(other.state[twins[1]]["exp_avg"], torch.full((3,), 0.123))


def test_a_parameter_that_is_given_twice_is_refused():
    parameter = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(ConfigError, match=r"a parameter of shape \(3,\) is given twice"):
        CPUAdam([parameter, parameter])


def test_a_state_that_does_not_fit_is_refused():
    optimizer, parameters = optimizer_of(parameters_of(torch.float32))
    train(optimizer, parameters, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["amsgrad"] = True
    with pytest.raises(ConfigError, match="amsgrad"):
        optimizer.load_state_dict(saved)
    saved["param_groups"][0]["amsgrad"] = False
    saved["state"][2]["exp_avg"] = torch.zeros(5, 17)
    with pytest.raises(ConfigError, match=r"\[5, 17\]"):
        optimizer.load_state_dict(saved)
    unlikely = copy.deepcopy(optimizer.state_dict())
    unlikely["param_groups"][0]["lr"] = -1.0
    with pytest.raises(ConfigError, match="lr: must be greater than or equal to 0"):
        optimizer.load_state_dict(unlikely)
    with pytest.raises(ConfigError, match="it has no param_groups and no state"):
        optimizer.load_state_dict({"weight": torch.zeros(3)})
    with pytest.raises(ConfigError, match="another kind of optimizer"):
        optimizer.load_state_dict(torch.optim.SGD(parameters, lr=0.1).state_dict())
    with pytest.raises(ConfigError, match="another kind of optimizer"):
        optimizer.load_state_dict(torch.optim.SparseAdam(parameters).state_dict())  # no weight decay
    for kind in (torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam):
        other = kind(parameters)
        train(other, parameters, 1)
        with pytest.raises(ConfigError, match="another kind of optimizer"):
            optimizer.load_state_dict(other.state_dict())
    assert int(optimizer.state[parameters[2]]["step"]) == 1


def test_groups_and_steps_are_per_parameter():
    ours, theirs = parameters_of(torch.float32), parameters_of(torch.float32)

    def groups(items):
        return [{"params": items[:2], "lr": 0.1, "weight_decay": 0.0}, {"params": items[2:], "betas": (0.5, 0.9)}]

    optimizer, reference = CPUAdam(groups(ours), threads=1), torch.optim.AdamW(groups(theirs), foreach=False)
    for step in range(6):
        for parameters, item in ((ours, optimizer), (theirs, reference)):
            set_gradients(parameters, step)
            if step % 2:
                parameters[2].grad = None  # a module that was skipped
            item.step()
            item.param_groups[0]["lr"] *= 0.9
    assert int(optimizer.state[ours[2]]["step"]) == 3
    assert int(optimizer.state[ours[1]]["step"]) == 6
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-7)


def test_closure_and_scheduler():
    parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = CPUAdam([parameter], lr=0.1, weight_decay=0.0, threads=1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    def closure():
        optimizer.zero_grad()
        loss = (parameter**2).sum()
        loss.backward()
        return loss.detach()

    assert float(optimizer.step(closure)) == 5.0
    torch.testing.assert_close(parameter.detach(), torch.tensor([0.9, -1.9]))  # a first step is lr * sign
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert optimizer.step() is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_layouts_change_no_bit(dtype):
    base = torch.randn(6, 4, 3, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    layouts = [
        base.clone(),
        base.clone(memory_format=torch.channels_last),
        base.clone().transpose(0, 3).contiguous().transpose(0, 3),
        torch.zeros(12, 4, 3, 5, dtype=dtype)[::2].copy_(base),
    ]
    results = [train(*optimizer_of([torch.nn.Parameter(item)]), 3)[0] for item in layouts]
    assert_equal(results[:1] * 3, results[1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [0.0, -0.0, 0.5])
def test_a_weight_changed_from_outside_counts(dtype, value):
    optimizer, parameters = optimizer_of(parameters_of(dtype, shapes=((1031,),)), weight_decay=0.0)
    train(optimizer, parameters, 3)
    parameters[0].data.fill_(value)
    torch.testing.assert_close(
        optimizer.read_master(parameters[0]), torch.full((1031,), value), rtol=torch.finfo(dtype).eps, atol=1e-38
    )
    (after,) = train(optimizer, parameters, 1, first=3)
    assert ((after - value).abs() < 0.05).all()


def test_autograd_notices_an_update_of_what_it_saved():
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = CPUAdam([parameter], threads=1)
    loss = (parameter * parameter).sum()
    parameter.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_nothing_changes_when_a_gradient_is_refused():
    first, second = parameters_of(torch.float32, shapes=((4,), (4,)))
    optimizer = CPUAdam([first, second], threads=1)
    first.grad, second.grad = torch.ones(4), torch.ones(4).to_sparse()
    before = first.detach().clone()
    with pytest.raises(ConfigError, match="sparse"):
        optimizer.step()
    assert torch.equal(first, before)
    assert not optimizer.state[first]


@pytest.mark.parametrize("now", [torch.zeros(1 << 20), torch.zeros(6), torch.zeros(4, dtype=torch.bfloat16),
                                 torch.zeros(4, dtype=torch.float16)])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_parameter_that_has_changed_its_form_is_refused(dtype, now):
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=dtype))
    optimizer = CPUAdam([parameter], threads=1)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    parameter.grad = None
    parameter.data = now.clone()
    parameter.grad = torch.ones_like(parameter)
    if now.shape == (4,) and now.dtype == dtype:
        optimizer.step()
    else:
        with pytest.raises(ConfigError, match="which its state does not fit"):
            optimizer.step()
        assert torch.equal(parameter, now)


def test_a_gradient_of_another_size_changes_nothing():
    first, second = parameters_of(torch.float32, shapes=((4,), (4,)))
    optimizer = CPUAdam([first, second], threads=1)
    first.grad, second.grad = torch.ones(4), torch.ones(4)
    second.grad.data = torch.ones(2)
    before = first.detach().clone()
    with pytest.raises(ConfigError, match=r"of \(4,\) has a gradient of \(2,\)"):
        optimizer.step()
    assert torch.equal(first, before)


def test_groups_of_torch_are_taken():
    parameters = parameters_of(torch.float32)
    of_torch = torch.optim.AdamW(parameters).param_groups
    for group in ({"params": parameters, "fused": True, "maximize": False}, *of_torch):
        CPUAdam([dict(group)])
    for kind, decoupled in ((torch.optim.AdamW, True), (torch.optim.Adam, False)):
        groups = [dict(group) for group in kind(parameters).param_groups]
        assert CPUAdam(groups).param_groups[0]["decoupled"] is decoupled
    with pytest.raises(ConfigError, match="amsgrad=True is not supported"):
        CPUAdam([{"params": parameters, "amsgrad": True}])


def test_a_negated_view_is_a_gradient_as_any_other():
    twins = [torch.nn.Parameter(torch.zeros(4)) for _ in range(2)]
    gradients = torch._neg_view(torch.ones(4)), -torch.ones(4)
    for parameter, gradient in zip(twins, gradients):
        parameter.grad = gradient
        CPUAdam([parameter], threads=1).step()
    assert torch.equal(*twins)


@pytest.mark.parametrize("through", ["load_state_dict", "deepcopy", "pickle"])
def test_a_group_can_be_added_to_an_optimizer_that_was_restored(through):
    """Torch then gives it defaults that are no options of ours."""
    first, second = parameters_of(torch.float32, shapes=((3,), (4,)))
    optimizer = CPUAdam([first], lr=0.25)
    if through == "load_state_dict":
        optimizer.load_state_dict(optimizer.state_dict())
    else:
        optimizer = copy.deepcopy(optimizer) if through == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
    optimizer.add_param_group({"params": [second], "weight_decay": 0.5})
    group = optimizer.param_groups[1]
    assert (group["params"], group["lr"], group["weight_decay"]) == ([second], 0.25, 0.5)


def test_options_of_torch_that_change_nothing_are_taken_and_the_others_are_refused():
    CPUAdam(parameters_of(torch.float32), amsgrad=False, maximize=False, foreach=None, fused=True)
    optimizer = CPUAdam([torch.ones(2, requires_grad=True)])
    optimizer.param_groups[0]["maximize"] = True
    with pytest.raises(ConfigError, match="maximize=True is not supported"):
        optimizer.step()
    for name, said in (("amsgrad", "not supported"), ("maximize", "not supported"), ("lamb", "no option 'lamb'")):
        with pytest.raises(ConfigError, match=said):
            CPUAdam(parameters_of(torch.float32), **{name: True})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr"),
        ({"betas": (1.0, 0.9)}, "betas"),
        ({"eps": -1e-8}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"threads": 0}, "threads"),
        ({"threads": 2.5}, "threads"),
        ({"lr": None}, "lr"),
        ({"lr": torch.tensor([0.1, 0.2])}, "one number"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ConfigError, match=message):
        CPUAdam(parameters_of(torch.float32), **options)


@pytest.mark.parametrize("bad", [torch.zeros(2, dtype=torch.float64), torch.zeros(2, device="meta")])
def test_parameters_are_checked(bad):
    optimizer = CPUAdam(parameters_of(torch.float32), threads=1)
    with pytest.raises(ConfigError, match="dense fp32, bf16 or fp16 tensors in CPU memory"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(bad)]})
    assert len(optimizer.param_groups) == 1


def test_named_parameters_are_taken():
    model = torch.nn.Linear(2, 3)
    optimizer = CPUAdam(model.named_parameters(), threads=1)
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"maximize": True}, "maximize=True is not supported"),
        ({"amsgrad": True}, "amsgrad=True is not supported"),
        ({"betas": (1.5, 0.9)}, "betas.0: must be less than 1"),
        ({"lr": -1.0}, "lr: must be greater than or equal to 0"),
        ({"lr": torch.tensor(-1.0)}, "lr: must be greater than or equal to 0"),
        ({"eps": None}, "eps: must be a valid number"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_options_of_a_group_are_refused(options, said):
    first, second = parameters_of(torch.float32, shapes=((3,), (4,)))
    with pytest.raises(ConfigError, match=said):
        CPUAdam([{"params": [first], **options}])
    optimizer = CPUAdam([first])
    with pytest.raises(ConfigError, match=said):
        optimizer.add_param_group({"params": [second], **options})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("group", [[1], {"lr": 1.0}], ids=["a list", "no params"])
def test_what_is_no_group_is_refused(group):
    optimizer = CPUAdam(parameters_of(torch.float32, shapes=((3,),)))
    with pytest.raises(ConfigError, match="is a dictionary with 'params'"):
        optimizer.add_param_group(group)


def test_a_group_keeps_its_name_and_a_learning_rate_that_is_a_tensor():
    rate, parameter = torch.tensor(0.1), parameters_of(torch.float32, shapes=((3,),))
    (group,) = CPUAdam([{"params": parameter, "name": "all", "lr": rate, "betas": [0.5, 0.5]}]).param_groups
    assert group["name"] == "all"
    assert group["lr"] is rate
    assert group["betas"] == (0.5, 0.5)


@needs_huge_pages
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_state_is_in_huge_pages(dtype):
    optimizer, parameters = optimizer_of(parameters_of(dtype, shapes=((2**20 + 7,), (5,))))
    train(optimizer, parameters, 2)
    other, twins = optimizer_of(copy.deepcopy(parameters))
    other.load_state_dict(optimizer.state_dict())
    for one, (large, _) in ((optimizer, parameters), (other, twins)):
        states = {name: item.data_ptr() for name, item in one.state[large].items() if name != "step"}
        assert len(states) == (2 if dtype == torch.float32 else 3)
        assert all(asks_for_huge_pages(address) for address in states.values())
        assert all(item.untyped_storage().nbytes() == item.nbytes for item in one.state[large].values())
    assert_equal(train(other, twins, 2, first=2), train(optimizer, parameters, 2, first=2))


def test_a_step_of_several_elements_is_refused():
    optimizer, parameters = optimizer_of(parameters_of(torch.float32))
    train(optimizer, parameters, 1)
    saved = optimizer.state_dict()
    saved["state"][1]["step"] = torch.ones(2)
    before = copy.deepcopy(optimizer.state)
    with pytest.raises(ConfigError, match=r"state 'step' has shape \[2\]"):
        optimizer.load_state_dict(saved)
    assert_equal([optimizer.state[p]["exp_avg"] for p in parameters], [before[p]["exp_avg"] for p in before])
