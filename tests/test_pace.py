"""The draft window: what one more token costs and gains, from speeds that a test states."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest

from lynxkv.pace import Pace, at_most


def pace(*, token_s: float = 0.03, row_s: float = 0.001) -> Pace:
    return Pace(token_s=token_s, row_s=row_s)


def window(pace: Pace, left_s: float = 1e9, tail_s: float = 0.0) -> int:
    """Tokens that a draft has when it stops paying, the target being so far away at every step."""
    drafted = 0
    while pace.pays("full", drafted=drafted, pending=1, suffix=1, left_s=left_s, tail_s=tail_s):
        drafted += 1
    return drafted


def test_speeds_come_from_steps_of_any_order() -> None:
    pace = Pace()
    pace.stepped(11, 0.05)
    assert (pace.token_s, pace.row_s) == (None, 0.0)
    pace.stepped(1, 0.03)
    assert pace.token_s == 0.03
    assert pace.row_s == pytest.approx(0.002)
    pace.stepped(1, 0.04)
    assert pace.token_s == pytest.approx(0.033)


def test_without_a_measurement_a_step_tells() -> None:
    assert Pace().pays("full", drafted=0, pending=500, suffix=500, left_s=0.0)


def test_a_draft_ends_where_a_row_costs_more_than_the_token_gains() -> None:
    # 0.96^n * 30 ms > 1 ms up to n = 83
    assert window(pace()) == 83
    assert window(pace(row_s=0.01)) == 26
    assert window(pace(row_s=0.03)) == 0


def test_a_step_may_not_delay_the_verification_by_more_than_it_gains() -> None:
    def first(pending: int, left_s: float) -> bool:
        return pace().pays("full", drafted=0, pending=pending, suffix=max(1, pending), left_s=left_s)

    assert first(1, 0.003)
    assert not first(1, 0.001)
    # a suffix of 100 tokens takes 129 ms: waiting is better if the target is due in 90
    assert first(100, 0.11)
    assert not first(100, 0.09)
    # with the suffix run already the first token costs a row only
    assert first(0, 0.0)


def test_rows_are_free_while_the_pass_runs_behind_the_last_tensors() -> None:
    # 30 ms and 1 ms a row end within the tail of 200 ms as long as there are 170 rows
    assert window(pace(), tail_s=0.2) > window(pace())
    # close to the target a step keeps the pass from starting: 0.96 * 30 ms does not pay for a delay of 30 ms
    near = {"drafted": 0, "pending": 1, "suffix": 1, "left_s": 0.03}
    assert pace().pays("full", **near)  # type: ignore[arg-type]
    assert not pace().pays("full", **near, tail_s=0.03)  # type: ignore[arg-type]


def test_verifications_move_the_window() -> None:
    good, bad = pace(), pace()
    for _ in range(10):
        good.verified("full", 30, 30)
        bad.verified("full", 30, 20.5)
    assert good.acceptance("full") > 0.99 > 0.75 > bad.acceptance("full")
    assert window(good) > window(pace()) > window(bad)
    assert bad.acceptance("exact") == pace().acceptance("exact")


def test_a_poor_draft_is_one_that_the_estimate_makes_unlikely() -> None:
    # Of 48 tokens 96 % are 46.1, with a standard deviation of 1.4.
    assert pace().is_poor("full", 48, 41.2)
    assert not pace().is_poor("full", 48, 43)
    assert pace().is_poor("full", 8, 5)
    assert not pace().is_poor("full", 8, 6)
    assert not pace().is_poor("full", 7, 0)
    assert not pace().is_poor("full", 0, 0)
    assert pace().is_poor("exact", 50, 46)
    used_to_it = pace()
    for _ in range(30):
        used_to_it.verified("full", 48, 38)
    assert not used_to_it.is_poor("full", 48, 38)


def exactly_at_most(most: int, tokens: int, passes: Fraction) -> float:
    """The binomial distribution in whole numbers, summed from its shorter end."""

    def up_to(most: int, yes: int, no: int) -> int:
        ways, total = 1, 0
        for count in range(most + 1):
            total += ways * yes**count * no ** (most - count)
            ways = ways * (tokens - count) // (count + 1)
        return int(total * no ** (tokens - most))

    yes, of = passes.numerator, passes.denominator
    if most < tokens / 2:
        return float(Fraction(up_to(most, yes, of - yes), of**tokens))
    return float(1 - Fraction(up_to(tokens - most - 1, of - yes, yes), of**tokens))


@pytest.mark.parametrize(
    ("tokens", "mosts"),
    [
        (1, [0, 1]),
        (8, range(9)),
        (100, range(101)),
        (1100, [0, 100, 550, 1030, 1057, 1099, 1100]),
    ],
)
@pytest.mark.parametrize("passes", [Fraction(24, 25), Fraction(1, 2), Fraction(1, 7), Fraction(199, 200)])
def test_how_likely_so_few_are(tokens: int, mosts: list[int], passes: Fraction) -> None:
    for most in mosts:
        right = exactly_at_most(most, tokens, passes)
        assert at_most(most, tokens, float(passes)) == pytest.approx(right, rel=1e-9, abs=1e-300)


def test_drafts_of_any_length_are_judged() -> None:
    passes = Fraction(1999, 2000)  # of 60,000 tokens 30 fail
    for failed in (10, 30, 31, 60, 90):
        right = exactly_at_most(60_000 - failed, 60_000, passes)
        assert at_most(60_000 - failed, 60_000, float(passes)) == pytest.approx(right, rel=1e-8)
    for tokens in (1031, 1100, 60_000):
        assert not pace().is_poor("full", tokens, tokens)
        assert not pace().is_poor("full", tokens, round(tokens * 0.96))
        assert pace().is_poor("full", tokens, round(tokens * 0.9))
        assert pace().is_poor("full", tokens, 0)


@pytest.mark.parametrize("tokens", [1, 100, 1100, 60_000])
def test_more_tokens_are_never_less_likely(tokens: int) -> None:
    found = [at_most(most, tokens, 0.96) for most in range(0, tokens + 1, max(1, tokens // 200))]
    assert all(low <= high for low, high in pairwise(found))
    assert at_most(tokens, tokens, 0.96) == 1.0
    assert 0.0 <= found[0] <= 0.04 + 1e-12


def test_a_draft_that_refutes_the_estimate_takes_the_prior_away() -> None:
    refuted = pace()
    refuted.verified("full", 32, 16)
    assert refuted.acceptance("full") == pytest.approx(16.96 / 33)
    used_to_it = pace()
    used_to_it.verified("full", 32, 30)
    assert used_to_it.acceptance("full") == pytest.approx(54 / 57)


def test_where_hardly_anything_passes_there_is_no_draft_even_where_it_costs_nothing() -> None:
    hopeless = pace(row_s=0.0)
    hopeless.verified("full", 32, 0)
    windows = 0
    while not hopeless.is_hopeless("full"):
        drafted = window(hopeless)
        assert 1 <= drafted <= 2
        hopeless.verified("full", drafted, 0)
        windows += 1
    assert windows == 16
    assert window(hopeless) == 0
    assert not hopeless.pays("full", drafted=0, pending=500, suffix=500, left_s=1e9, tail_s=1e9)
    assert not hopeless.is_hopeless("exact")
    hopeless.token_s = None
    assert not hopeless.pays("full", drafted=0, pending=1, suffix=1, left_s=1e9)


def test_what_hardly_passed_is_tried_again_after_some_runs_that_waited() -> None:
    tried = pace(row_s=0.0)
    for _ in range(20):
        tried.verified("full", 32, 0)
    waits = 0
    while tried.is_hopeless("full"):
        tried.waited("full")
        waits += 1
    # 640 failed tokens fade to 47 of 48.
    assert waits == 20
    assert window(tried) == 1
    tried.verified("full", 1, 1)
    assert window(tried) >= 1


def test_a_token_that_hardly_ever_stands_is_not_proposed() -> None:
    # 0.96^95 is 2.07 %
    assert window(pace(row_s=0.0)) == 95
