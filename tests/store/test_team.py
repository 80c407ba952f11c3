"""What the ranks of one store tell each other of their failures."""

from __future__ import annotations

import pickle

import pytest

from tierstore.errors import CheckpointWarning, ConfigError, FormatError, TierstoreError
from tierstore.store.team import outcome, results


class Detailed(FormatError):
    """A user's own, which cannot be made of a message alone."""

    def __init__(self, path: str, line: int) -> None:
        super().__init__(f"{path}: line {line}")


def unknown_elsewhere() -> tuple[Exception, Exception]:
    class Local(Exception): ...

    class LocalOfOurs(ConfigError): ...

    return Local("a bad file"), LocalOfOurs("a bad file")


@pytest.mark.parametrize(
    ("failure", "kind", "told"),
    [
        (ConfigError("a bad file"), ConfigError, "a bad file"),
        (KeyError("a bad file"), TierstoreError, "'a bad file'"),
        (CheckpointWarning("a bad file"), TierstoreError, "a bad file"),  # where warnings are errors
        (Detailed("a.txt", 3), FormatError, "a.txt: line 3"),
        (unknown_elsewhere()[0], TierstoreError, "a bad file"),
        (unknown_elsewhere()[1], ConfigError, "a bad file"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_failure_of_any_class_is_told_to_the_other_ranks(
    failure: Exception, kind: type[Exception], told: str
) -> None:
    sent = pickle.dumps(outcome(None, failure))
    with pytest.raises(TierstoreError) as caught:
        results([(7, None), pickle.loads(sent)], None)
    assert type(caught.value) is kind
    assert str(caught.value) == f"rank 1: {told}"
    with pytest.raises(type(failure)) as own:
        results([(7, None), pickle.loads(sent)], failure)
    assert own.value is failure
