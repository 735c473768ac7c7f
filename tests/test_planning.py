"""Estimates against sums by hand, the choices that follow, and constants that are those of the notes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from lynxkv.choices import Target, parse_codec
from lynxkv.codecs import get_codec
from lynxkv.errors import InputError
from lynxkv.planning import (
    INT8,
    PROFILES,
    RAW,
    WHOLE,
    Estimate,
    Plan,
    Profile,
    Speeds,
    Workload,
    expected_accepted,
    plan,
)
from lynxkv.store import Link

NOTES = Path(__file__).parents[1] / "docs" / "codec-notes.md"
CACHE = Workload(tokens=2048, elements=2048 * 11520, channels=11520)  # SmolLM2
LARGE = Workload(tokens=2048, elements=2048 * 65536, channels=65536)
SPEEDS = Speeds(token_s=0.02)


def by_name(found: Plan) -> dict[str, Estimate]:
    return {item.name: item for item in found.estimates}


def test_the_constants_are_those_of_the_notes() -> None:
    section = NOTES.read_text("utf-8").partition("## What plans reckon with")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| `")]
    stated = {row[0].strip("`"): row[1:] for row in rows}
    assert set(stated) == {profile.codec for profile in (*PROFILES, *WHOLE, INT8, RAW)}
    for profile in (*PROFILES, *WHOLE, INT8, RAW):
        anchor, full, exact, channel, error, accepted = stated[profile.codec]
        assert (float(anchor or full), float(full)) == (profile.anchor_bits, profile.full_bits)
        assert (float(exact) if exact else None) == profile.exact_bits
        assert float(channel) == profile.channel_bits
        assert float(error) == profile.attn_nmse
        assert (float(accepted) if accepted else None) == profile.accepted


@pytest.mark.parametrize("profile", [*PROFILES, *WHOLE, INT8, RAW], ids=lambda profile: profile.codec)
def test_every_profile_is_a_codec_of_its_kind(profile: Profile) -> None:
    choice = parse_codec(profile.codec)
    coding = get_codec(choice.name, **choice.params).coding("k", 64)
    assert (coding.scheme == "entropy") is profile.entropy
    assert coding.has_residual is profile.split
    assert get_codec(choice.name, **choice.params).needs_basis is profile.needs_basis


def test_bytes_are_bits_and_what_a_channel_takes_once() -> None:
    assert CACHE.bytes(8.0, 100.0) == CACHE.elements
    short = Workload(tokens=256, elements=256 * 64, channels=64)
    assert short.bytes(4.0, 128.0) == round((256 * 64 * 4 + 64 * 128 * (1 - 256 / 2048)) / 8)
    assert CACHE.original_bytes == 2 * CACHE.elements


@pytest.mark.parametrize("mean", [0.5, 5.2, 21.9, 31.9])
def test_accepted_tokens_have_the_measured_mean(mean: float) -> None:
    assert expected_accepted(mean, 32) == pytest.approx(mean, abs=1e-6)
    lengths = [expected_accepted(mean, count) for count in range(33)]
    assert lengths[0] == 0
    assert all(0 < later - earlier < 1 for earlier, later in itertools.pairwise(lengths))


def test_an_estimate_by_hand() -> None:
    link = Link(bit_per_s=80e6, rtt_s=0.05)  # 10 MB/s
    found = by_name(plan(CACHE, link, "int8", replace(SPEEDS, prefill_token_s=1024)))
    fast = found["fast"]
    anchor_s = 2 * 0.05 + fast.anchor_bytes / 10e6
    wait_s = 0.05 + fast.residual_bytes / 10e6
    assert fast.first_draft_s == pytest.approx(anchor_s + 0.02)
    assert fast.first_verified_s == pytest.approx(anchor_s + wait_s + 0.02)
    assert fast.drafted == 32
    assert fast.accepted == pytest.approx(19.8, abs=1e-4)
    assert fast.last_verified_s == pytest.approx(fast.first_verified_s + (31 - fast.accepted) * 0.02)
    int8 = found["int8"]
    assert (int8.first_draft_s, int8.residual_bytes) == (None, 0)
    assert int8.last_verified_s == pytest.approx(0.1 + int8.anchor_bytes / 10e6 + 32 * 0.02)
    assert found["prefill"].last_verified_s == pytest.approx(2 + 32 * 0.02)


def test_a_decoder_slower_than_the_link_sets_the_time() -> None:
    found = by_name(plan(LARGE, Link(bit_per_s=1e12), "int8", replace(SPEEDS, entropy_byte_s=1e9, fixed_byte_s=2e9)))
    assert found["default"].first_verified_s == pytest.approx(LARGE.original_bytes / 1e9 * 1.6 + 0.02)
    assert found["fixed"].first_verified_s == pytest.approx(LARGE.original_bytes / 2e9 * 1.6 + 0.02)
    assert found["compact"].first_verified_s == pytest.approx(LARGE.original_bytes / 0.55e9 * 1.6 + 0.02)
    assert found["raw"].first_verified_s == pytest.approx(found["raw"].anchor_bytes * 8 / 1e12 + 0.02)  # only copied


@pytest.mark.parametrize(
    ("target", "codec"),
    [("int8", "fast"), ("default", "default"), ("bf16", "quality"), ("exact", "fast:exact=true")],
)
def test_a_slow_link_takes_the_least_bytes_that_the_target_allows(target: Target, codec: str) -> None:
    found = plan(CACHE, Link(bit_per_s=1e6, rtt_s=0.02), target, SPEEDS)
    assert found.choice.codec == codec
    assert found.choice.meets_target
    assert "expected first" in found.why


def test_a_calibrated_model_takes_the_smaller_cache() -> None:
    link = Link(bit_per_s=1e6, rtt_s=0.02)
    calibrated = plan(CACHE, link, "default", SPEEDS, basis=True)
    assert calibrated.choice.codec == "compact"
    assert by_name(calibrated) == by_name(plan(CACHE, link, "default", SPEEDS))


def test_fixed_rate_codes_where_an_entropy_decoder_is_slower_than_the_link() -> None:
    link = Link(bit_per_s=40e9, rtt_s=0.0001)
    slow = plan(LARGE, link, "default", replace(SPEEDS, entropy_byte_s=1e9, fixed_byte_s=1e11))
    assert slow.choice.codec == "fixed"
    assert "slower than this link" in slow.why
    assert plan(LARGE, link, "default", replace(SPEEDS, entropy_byte_s=1e11, fixed_byte_s=1e11)).choice.codec != "fixed"


@pytest.mark.parametrize("target", ["int8", "default", "bf16", "exact"])
def test_a_cache_too_small_to_be_split_is_stored_whole(target: Target) -> None:
    latent = Workload(tokens=512, elements=512 * 27 * 576, channels=27 * 576)
    found = plan(latent, Link(bit_per_s=10e9, rtt_s=0.03), target, SPEEDS)
    assert found.choice.residual_bytes == 0
    assert found.choice.meets_target
    assert found.why.startswith("in one shard: ")
    assert "a round trip of 30 ms" in found.why
    assert (found.choice.codec == "raw") is (target in ("bf16", "exact"))
    split = plan(latent, Link(bit_per_s=10e6, rtt_s=0.03), target, SPEEDS)
    assert split.choice.residual_bytes > 0


def test_a_draft_that_starts_sooner_is_worth_more_bytes() -> None:
    # In one shard there are fewer bits in all, but no token before the last of them.
    link = Link(bit_per_s=1e6, rtt_s=0.02)
    found = plan(CACHE, link, "int8", SPEEDS)
    whole = by_name(found)[WHOLE[0].codec]
    assert whole.last_verified_s < found.choice.last_verified_s
    assert found.choice.first_draft_s is not None
    assert found.choice.first_draft_s < whole.first_verified_s - link.rtt_s


def test_what_would_be_sooner_still_is_said() -> None:
    found = plan(CACHE, Link(bit_per_s=1e6), "default", replace(SPEEDS, prefill_token_s=1e5))
    assert found.choice.codec == "default"
    assert "prefill is expected to be sooner" in found.why
    assert "raw" not in found.why


def test_nothing_to_plan_for_is_refused() -> None:
    with pytest.raises(InputError, match="nothing"):
        Workload(tokens=0, elements=1, channels=1)
