"""The draft window: what one more token costs and gains, from speeds that a test states."""

from __future__ import annotations

import pytest

from lynxkv.pace import Pace


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
