"""What a loop of faults has found: claims that hold or do not, and the figures behind them."""

from __future__ import annotations

from dataclasses import dataclass, field


class Broken(Exception):
    """Something is not as it was promised; the loop ends here."""


@dataclass(frozen=True)
class Claim:
    """A sentence, whether it holds, and what was seen."""

    text: str
    holds: bool
    seen: str


@dataclass
class Findings:
    """Attributes: `rows`, names and values for a table; `claims`; `figures`, for a program."""

    title: str
    rows: list[tuple[str, str]] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    figures: dict[str, object] = field(default_factory=dict)

    def claim(self, text: str, holds: bool, seen: str) -> None:
        self.claims.append(Claim(text, bool(holds), seen))
