"""Goodness of fit, for tests that sampled text follows a distribution."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")

# Cells below this expected count are merged: the chi-square approximation needs it.
MIN_EXPECTED = 5.0


def chi_square_z(counts: Mapping[T, int], probabilities: Mapping[T, float]) -> float:
    """How many standard deviations the chi-square statistic lies above its mean (Wilson-Hilferty approximation).

    Infinite if something was counted that has no probability. Fixed seeds make a threshold of 4 (one in 30,000 by
    chance) a stable test.
    """
    if any(probabilities.get(cell, 0.0) <= 0 for cell, count in counts.items() if count):
        return math.inf
    total = sum(counts.values())
    statistic, cells = 0.0, 0
    rest_expected, rest_count = 0.0, 0
    for cell, probability in probabilities.items():
        expected, count = probability * total, counts.get(cell, 0)
        if expected < MIN_EXPECTED:
            rest_expected, rest_count = rest_expected + expected, rest_count + count
        else:
            statistic += (count - expected) ** 2 / expected
            cells += 1
    if rest_expected >= MIN_EXPECTED:
        statistic += (rest_count - rest_expected) ** 2 / rest_expected
        cells += 1
    freedom = cells - 1
    if freedom < 1:
        return 0.0
    spread = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5)
