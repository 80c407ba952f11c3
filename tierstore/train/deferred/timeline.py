"""Where the generator would be by now, while a constructor's draws are put off.

Scope: the order of all draws, the generator's own state, and values that are needed before their time.
Not here: which draws are put off (`recording.py`); how one is repeated (`program.py`).
Owner: one `Timeline` per recorder; it alone sets the default generator while the constructor runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence

import torch

from tierstore.errors import ConfigError
from tierstore.train.deferred.program import Draw, Request, Reseed, walk
from tierstore.train.filling import Piece

_SNAPSHOTS = 64


class Timeline:
    """All uses of the default CPU generator since it was made, in order.

    The generator itself lags behind: put-off draws are walked through only when something real must be drawn.
    """

    def __init__(self) -> None:
        self.initial_state = torch.get_rng_state()
        self.events: list[Draw | Reseed] = []
        self._places: dict[Draw, int] = {}
        self._actual = self.initial_state  # what the default generator holds, unless the constructor changed it
        self._walked = (0, self.initial_state)  # the farthest place whose state is known
        self._snapshots: deque[tuple[int, torch.Tensor]] = deque(maxlen=_SNAPSHOTS)
        self._outdated: set[int] = set()

    def put_off(self, draw: Draw) -> None:
        """Note that `draw` will be done later."""
        self.notice_reseed()
        # From here on the generator's own state is older than the constructor believes.
        self._outdated.add(_fingerprint(self._actual))
        self._append(draw)

    def catch_up(self) -> None:
        """Brings the generator to where the constructor believes it to be: something is drawn now."""
        self.notice_reseed()
        place, state = self._walked
        if place < len(self.events):
            self._reached(len(self.events), _exhaust(walk(self.events[place:], state, ()), {}))
        self._actual = self._walked[1]
        torch.set_rng_state(self._actual)

    def drawn(self, draw: Draw) -> None:
        """Note that `draw` was done, after the generator had caught up."""
        self._append(draw)
        self._actual = torch.get_rng_state()
        self._reached(len(self.events), self._actual)

    def notice_reseed(self) -> None:
        """Looks whether the constructor has set the generator.

        Raises:
            ConfigError: it has, to a state that it had read before draws that are put off.
        """
        state = torch.get_rng_state()
        if torch.equal(state, self._actual):
            return
        if _fingerprint(state) in self._outdated:
            raise ConfigError(
                "build() put the random generator back to a state read earlier in it (fork_rng, set_rng_state, or the "
                "same manual_seed twice), so what follows cannot be reproduced. Seed once, or construct ordinarily"
            )
        self.events.append(Reseed(state))
        self._actual = state
        self._reached(len(self.events), state)

    def compute(self, requests: Sequence[Request], into: Sequence[torch.Tensor]) -> None:
        """Writes the values of `requests` into flat tensors of the same sizes. The generator stays as it is."""
        targets = {request.name: target for request, target in zip(requests, into, strict=True)}
        places = sorted(self._places[draw] for request in requests for draw in request.draws)
        first, last = (places[0], places[-1] + 1) if places else (0, 0)
        known = [(0, self.initial_state), *self._snapshots, self._walked]
        start, state = max((item for item in known if item[0] <= first), key=lambda item: item[0])
        if self._walked[0] < first:
            # Kept: the same parameter is often read several times in a row.
            state = _exhaust(walk(self.events[start:first], state, ()), {})
            start = first
            self._reached(start, state)
        state = _exhaust(walk(self.events[start:last], state, requests), targets)
        if last > self._walked[0]:
            self._reached(last, state)

    def _append(self, draw: Draw) -> None:
        self._places[draw] = len(self.events)
        self.events.append(draw)

    def _reached(self, place: int, state: torch.Tensor) -> None:
        self._snapshots.append(self._walked)
        self._walked = (place, state)


def _exhaust(pieces: Generator[Piece, None, torch.Tensor], targets: dict[str, torch.Tensor]) -> torch.Tensor:
    while True:
        try:
            piece = next(pieces)
        except StopIteration as stop:
            state: torch.Tensor = stop.value
            return state
        targets[piece.name][piece.offset : piece.offset + piece.values.numel()] = piece.values


def _fingerprint(state: torch.Tensor) -> int:
    return hash(state.numpy().tobytes())
