"""The parameters that autograd says a backward will reach are those that a walk over the graph finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tierstore.train.graph import KnownLeaves, leaves_of


def parameters(count: int = 4) -> dict[int, nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return {number: nn.Parameter(torch.randn(3, generator=generator)) for number in range(count)}


def asked(leaves: KnownLeaves[int], loss: torch.Tensor, **options: Any) -> list[int]:
    answers: list[list[int]] = []
    leaves.ask(loss, answers.append)
    loss.backward(**options)  # type: ignore[no-untyped-call]
    assert len(answers) == 1
    return answers[0]


LOSSES: dict[str, Callable[[dict[int, nn.Parameter]], torch.Tensor]] = {
    "some": lambda p: (p[0] * p[2]).sum(),
    "twice": lambda p: (p[1] * p[1] + p[1]).sum() + p[3].sum(),
    "none of them": lambda p: torch.ones(3, requires_grad=True).sum(),
    "detached": lambda p: (p[0] * p[1].detach()).sum(),
    "recomputed": lambda p: checkpoint(lambda x: x * p[1], p[0], use_reentrant=False).sum(),
    "a leaf": lambda p: p[2].sum() * 1,
}


@pytest.mark.parametrize("name", LOSSES)
def test_it_is_what_a_walk_finds(name: str) -> None:
    known = parameters()
    leaves = KnownLeaves(known)
    for _ in range(2):
        loss = LOSSES[name](known)
        walked = {id(leaf) for leaf in leaves_of([loss])}
        assert asked(leaves, loss) == [key for key, one in known.items() if id(one) in walked]


def test_a_nested_backward_is_a_graph_of_its_own() -> None:
    known = parameters()
    loss = checkpoint(lambda x: x * known[1], known[0], use_reentrant=True).sum() + known[3].sum()
    assert asked(KnownLeaves(known), loss) == [0, 3]
    assert known[1].grad is not None  # it gets a gradient all the same


def test_a_loss_that_is_a_parameter_itself() -> None:
    known = {0: nn.Parameter(torch.ones(())), 1: nn.Parameter(torch.ones(()))}
    assert asked(KnownLeaves(known), known[1]) == [1]


def test_what_is_frozen_is_not_reached_until_it_is_trained_again() -> None:
    known = parameters(2)
    leaves = KnownLeaves(known)
    for trained in (False, True, False):
        known[1].requires_grad_(trained)
        assert asked(leaves, (known[0] * known[1]).sum()) == ([0, 1] if trained else [0])


def test_who_asks_again_before_backward_is_answered_once() -> None:
    known = parameters(2)
    leaves, loss, stale = KnownLeaves(known), known[0].sum(), list[Any]()
    leaves.ask(loss, stale.append)
    leaves.ask(known[1].sum(), stale.append)
    assert asked(leaves, loss, retain_graph=True) == [0]
    loss.backward()  # type: ignore[no-untyped-call]
    leaves.ask(loss, stale.append)
    leaves.forget()
    assert stale == []
