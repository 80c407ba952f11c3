"""A byte budget: a waiter gets its turn, and a cancelled waiter takes nothing."""

from __future__ import annotations

import asyncio

import pytest

from tierstore.store.budget import ByteBudget


def test_cancelled_in_the_turn_in_which_room_is_made() -> None:
    async def main() -> None:
        budget = ByteBudget(10)
        await budget.take(10)
        first, second = (asyncio.create_task(budget.take(5)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        budget.give(10)
        with pytest.raises(asyncio.CancelledError):
            await first
        await second
        assert budget.used_bytes == 5

    asyncio.run(main())
