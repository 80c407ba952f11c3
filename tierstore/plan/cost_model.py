"""What a collective costs: alpha and beta of an interconnect, and their fit to timed collectives.

Scope: `T(n) = alpha + n / beta`, the sizes that follow from it, a robust fit with its residual.
Not here: the timing (`train/data_parallel/collective_costs.py`), when collectives run (`plan/buckets.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from tierstore.errors import ConfigError

_ROUNDS = 50
_HUBER = 1.345  # times the scale of the residuals: 95 % as efficient as least squares on normal errors (Huber, 1981)
_MAD_TO_SIGMA = 1.4826


@dataclass(frozen=True, slots=True)
class CostModel:
    """Time of one collective on a free channel, `T(n) = alpha + n / beta`.

    Attributes:
        alpha_s: fixed cost of a message.
        beta_bytes_per_s: bytes of the tensor (not of the wire) per second.
        launch_s: time that launching a collective takes from the compute.
        cores: share of the computing cores that a collective takes while it runs: 0 on a GPU whose network card does
            the work, 1 where one thread computes and sums by turns.

    Source: Hockney, "The communication challenge for MPP" (Parallel Computing, 1994).
    """

    alpha_s: float
    beta_bytes_per_s: float
    launch_s: float = 0.0
    cores: float = 0.0

    def __post_init__(self) -> None:
        fixed = (self.alpha_s, self.launch_s)
        if min(fixed) < 0 or not all(map(math.isfinite, fixed)) or not self.beta_bytes_per_s > 0:
            raise ConfigError(
                f"an interconnect has costs that are not negative and a positive rate, not alpha {self.alpha_s} s, "
                f"launch {self.launch_s} s, beta {self.beta_bytes_per_s} B/s"
            )
        if not 0 <= self.cores <= 1:
            raise ConfigError(f"a collective takes a share of the cores, from 0 to 1, not {self.cores}")

    def seconds(self, nbytes: float) -> float:
        """Time of one collective of `nbytes`."""
        return self.alpha_s + nbytes / self.beta_bytes_per_s

    def smallest_bytes(self, efficiency: float) -> float:
        """The smallest message that spends this share of its time on bytes: `e / (1 - e) * alpha * beta`.

        Raises:
            ConfigError: not `0 <= efficiency < 1`.
        """
        if not 0 <= efficiency < 1:
            raise ConfigError(f"the efficiency of a message is at least 0 and below 1, not {efficiency}")
        bytes_s = efficiency / (1 - efficiency) * self.alpha_s
        return bytes_s * self.beta_bytes_per_s if bytes_s else 0.0

    def efficiency(self, nbytes: float) -> float:
        """Share of a message's time that its bytes take; 1 if messages cost nothing."""
        seconds = self.seconds(nbytes)
        return nbytes / self.beta_bytes_per_s / seconds if seconds > 0 else 1.0


@dataclass(frozen=True, slots=True)
class Timing:
    """The median time of a collective of `nbytes` on a free channel."""

    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted interconnect, and how far it may be trusted.

    Attributes:
        timings: the timings that it was fitted to, by size.
        residual: median of `|predicted - measured| / measured`.
        worst_residual: the largest of these errors; outliers, which count little in the fit, count here.
    """

    model: CostModel
    timings: tuple[Timing, ...]
    residual: float
    worst_residual: float


def fit_timings(timings: Sequence[Timing]) -> Fit:
    """Alpha and beta with the least relative errors; outliers get less weight.

    Errors are relative, so that small messages, which alone determine alpha, count as much as large ones. Neither part
    is negative: where the best line would make one so, it goes through the origin (alpha 0) or is level (beta
    infinite).

    Source: iteratively reweighted least squares with Huber's weights, from a start by repeated medians (Siegel, 1982).

    Raises:
        ConfigError: fewer than two sizes, or a time that is not positive.
    """
    points = sorted(timings, key=lambda timing: timing.nbytes)
    sizes = {point.nbytes for point in points}
    if len(sizes) < 2:
        raise ConfigError(f"alpha and beta need timings of at least two sizes, not of {len(sizes)}")
    if bad := [point for point in points if not (point.seconds > 0 and math.isfinite(point.seconds))]:
        raise ConfigError(f"a collective of {bad[0].nbytes} B cannot have taken {bad[0].seconds} s")
    alpha_s, s_per_byte = _repeated_medians(points)
    for _ in range(_ROUNDS):
        previous = alpha_s, s_per_byte
        alpha_s, s_per_byte = _weighted_line(points, _weights(points, alpha_s, s_per_byte))
        if math.isclose(alpha_s, previous[0], rel_tol=1e-12) and math.isclose(s_per_byte, previous[1], rel_tol=1e-12):
            break
    errors = [abs(error) for error in _errors(points, alpha_s, s_per_byte)]
    model = CostModel(alpha_s, 1 / s_per_byte if s_per_byte > 0 else math.inf)
    return Fit(model, tuple(points), median(errors), max(errors))


def _errors(points: Sequence[Timing], alpha_s: float, s_per_byte: float) -> list[float]:
    return [(alpha_s + point.nbytes * s_per_byte) / point.seconds - 1 for point in points]


def _repeated_medians(points: Sequence[Timing]) -> tuple[float, float]:
    """A line that outliers cannot pull away, up to half of the points."""
    slopes = []
    for one in points:
        of_one = [
            (other.seconds - one.seconds) / (other.nbytes - one.nbytes) for other in points
            if other.nbytes != one.nbytes
        ]  # fmt: skip
        slopes.append(median(of_one))
    s_per_byte = max(0.0, median(slopes))
    return max(0.0, median(point.seconds - point.nbytes * s_per_byte for point in points)), s_per_byte


def _weights(points: Sequence[Timing], alpha_s: float, s_per_byte: float) -> list[float]:
    errors = [abs(error) for error in _errors(points, alpha_s, s_per_byte)]
    # If most points lie exactly on the line, the scale is 0: a floor keeps the other points from losing all weight.
    limit = max(_HUBER * _MAD_TO_SIGMA * median(errors), 1e-6)
    return [min(1.0, limit / error) if error else 1.0 for error in errors]


def _weighted_line(points: Sequence[Timing], weights: Sequence[float]) -> tuple[float, float]:
    """Minimises the weighted squares of `(alpha + n * s) / t - 1`, alpha and s not negative."""
    # Around the weighted mean: with sizes six decades apart, plain sums of squares would cancel to nothing.
    scales = [weight / point.seconds**2 for point, weight in zip(points, weights)]
    mean_bytes = sum(scale * point.nbytes for point, scale in zip(points, scales)) / sum(scales)
    mean_s = sum(scale * point.seconds for point, scale in zip(points, scales)) / sum(scales)
    spread = slope = 0.0
    for point, scale in zip(points, scales):
        away_bytes = point.nbytes - mean_bytes
        spread += scale * away_bytes**2
        slope += scale * away_bytes * (point.seconds - mean_s)
    s_per_byte = max(0.0, slope / spread) if spread > 0 else 0.0
    alpha_s = mean_s - mean_bytes * s_per_byte
    if alpha_s >= 0:
        return alpha_s, s_per_byte
    squares = sum(scale * point.nbytes**2 for point, scale in zip(points, scales))
    return 0.0, sum(scale * point.nbytes * point.seconds for point, scale in zip(points, scales)) / squares
