"""Bootstrap confidence intervals: prompts are resampled within their document, pairs stay together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
Statistic = Callable[[F64], F64]

RESAMPLES = 10_000
LEVEL = 0.95


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate and its 95 % percentile interval."""

    value: float
    low: float
    high: float


def mean(means: F64) -> F64:
    """Of the first column."""
    out: F64 = means[..., 0]
    return out


def difference(means: F64) -> F64:
    """First column less the second, paired."""
    out: F64 = means[..., 0] - means[..., 1]
    return out


def ratio(means: F64) -> F64:
    """First column over the second, paired: the ratio of means, not the mean of ratios."""
    with np.errstate(divide="ignore", invalid="ignore"):
        out: F64 = means[..., 0] / means[..., 1]
    return out


def bootstrap(
    strata: Sequence[npt.ArrayLike], statistic: Statistic, *, resamples: int = RESAMPLES, seed: int = 0
) -> Interval | None:
    """The statistic of the column means over all units, with its interval; None where it is not finite.

    Args:
        strata: for each stratum its units [n, columns]; units are drawn with replacement within their stratum.
        statistic: maps column means [..., columns] to values [...].
    """
    arrays = [np.asarray(stratum, np.float64) for stratum in strata]
    total = sum(len(array) for array in arrays)
    rng = np.random.default_rng(seed)
    sums: Any = 0.0
    for array in arrays:
        # How often each unit is drawn: the same distribution as drawing indices, in one matrix product.
        counts = rng.multinomial(len(array), np.full(len(array), 1 / len(array)), size=resamples)
        sums = sums + counts @ array
    value = float(statistic(sum((array.sum(0) for array in arrays), np.zeros(arrays[0].shape[1])) / total))
    tail = (1 - LEVEL) / 2
    # Of values, not between them: a resample may well divide by zero.
    low, high = np.quantile(statistic(sums / total), [tail, 1 - tail], method="nearest")
    if not np.isfinite([value, low, high]).all():
        return None
    return Interval(value=value, low=float(low), high=float(high))
