"""Values that all ranks must have been given alike."""

from __future__ import annotations

import pytest

from tierstore.errors import ConfigError
from tierstore.train.ranks import refuse_different


@pytest.mark.parametrize("told", [[{"a": 1, "b": 2}, {"a": 1}], [{"a": 1}, {"a": 1, "b": 2}]])
def test_what_one_rank_alone_was_given_is_a_difference(told: list[dict[str, object]]) -> None:
    """Two configurations of one kind of model need not have the same keys."""
    with pytest.raises(ConfigError, match="b is "):
        refuse_different(told)
