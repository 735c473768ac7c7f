"""Which profile suits a cache, a link and a wish: expected bytes and times, reckoned from what was measured.

Bits, errors and accepted lengths are those of the table "What plans reckon with" in docs/codec-notes.md, of one small
model: another model's differ, and the table says by how much lengths change them. Rates of decoding are the caller's;
their defaults are in docs/kernels.md. Nothing here touches torch, a model or a network.

The clock starts when the cache is opened. Bytes come at the rate of the link, decoded as they come; two round trips
pass before the first, and one more before those of a second shard. The draft grows by a token a step while the
Residual is on its way, and is verified in one step.
"""

from __future__ import annotations

from dataclasses import dataclass

from lynxkv.choices import Target
from lynxkv.errors import InputError
from lynxkv.store import Link

DRAFT_TOKENS = 32
MEASURED_TOKENS = 2048
ORIGINAL_BITS = 16
OPENING_TRIPS, RESIDUAL_TRIPS = 2, 1


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A codec as it was measured, at 2,048 tokens.

    Bits an element, all included, are those up to the anchor, up to full precision and with the exact section;
    `channel_bits` of a channel do not grow with its tokens (means, sinks, indexes), so short caches take more bits an
    element. `attn_nmse` is full precision's; `accepted` is of a draft of 32 tokens on the anchor. With `needs_basis`
    the model has to be calibrated; readers fetch its basis once, which is not counted. `decode_rate` is a share of what
    other codecs of its kind reach.
    """

    codec: str
    anchor_bits: float
    full_bits: float
    exact_bits: float | None
    channel_bits: float
    attn_nmse: float
    accepted: float | None
    entropy: bool
    needs_basis: bool = False
    decode_rate: float = 1.0

    @property
    def split(self) -> bool:
        """Whether there is a Residual."""
        return self.accepted is not None


PROFILES = (
    Profile(
        codec="default", anchor_bits=4.01, full_bits=7.01, exact_bits=11.05, channel_bits=150,
        attn_nmse=4.2e-5, accepted=21.9, entropy=True,
    ),
    Profile(
        codec="quality", anchor_bits=4.57, full_bits=8.07, exact_bits=11.24, channel_bits=148,
        attn_nmse=8.5e-6, accepted=26.4, entropy=True,
    ),
    Profile(
        codec="fast", anchor_bits=3.86, full_bits=6.21, exact_bits=11.00, channel_bits=188,
        attn_nmse=1.4e-4, accepted=19.8, entropy=True,
    ),
    Profile(
        codec="compact", anchor_bits=3.28, full_bits=6.28, exact_bits=10.35, channel_bits=150,
        attn_nmse=4.5e-5, accepted=21.0, entropy=True, needs_basis=True, decode_rate=0.55,
    ),
    Profile(
        codec="fixed", anchor_bits=4.66, full_bits=8.66, exact_bits=11.74, channel_bits=58,
        attn_nmse=1.9e-5, accepted=18.8, entropy=False,
    ),
)  # fmt: skip
WHOLE = (
    Profile(
        codec="default:key_step=0.042,value_step=0.091,radix=1", anchor_bits=6.02, full_bits=6.02, exact_bits=None,
        channel_bits=137, attn_nmse=1.4e-4, accepted=None, entropy=True,
    ),
    Profile(
        codec="default:key_step=0.0235,value_step=0.0512,radix=1", anchor_bits=7.08, full_bits=7.08, exact_bits=None,
        channel_bits=138, attn_nmse=4.2e-5, accepted=None, entropy=True,
    ),
)  # fmt: skip
"""In one shard: as fine as `fast` and `default` in full. Finer ones would escape too often: raw is the next."""
INT8 = Profile(
    codec="int8", anchor_bits=8.34, full_bits=8.34, exact_bits=None, channel_bits=11,
    attn_nmse=2.2e-4, accepted=None, entropy=False,
)  # fmt: skip
RAW = Profile(
    codec="raw", anchor_bits=16.01, full_bits=16.01, exact_bits=16.01, channel_bits=0,
    attn_nmse=0.0, accepted=None, entropy=False,
)  # fmt: skip

# The largest attention error that still is what was wished for: that of `int8`; of `default`, or of `compact`, which is
# made to equal it; of rounding to bf16 itself; none.
TARGETS: dict[Target, float] = {"int8": INT8.attn_nmse, "default": 4.5e-5, "bf16": 1.2e-5, "exact": 0.0}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A cache to be: its numbers in all, and of them those kept a token (channels of all tensors)."""

    tokens: int
    elements: int
    channels: int

    def __post_init__(self) -> None:
        if min(self.tokens, self.elements, self.channels) < 1:
            raise InputError("there is nothing to plan for", hint="a cache has at least one token")

    @property
    def original_bytes(self) -> int:
        """Of the cache in bf16."""
        return self.elements * ORIGINAL_BITS // 8

    def bytes(self, bits: float, channel_bits: float) -> int:
        """Of all elements at so many bits, of which `channel_bits` a channel were spread over the measured tokens."""
        fixed = channel_bits * (self.channels - self.elements / MEASURED_TOKENS)
        return round((self.elements * bits + fixed) / 8)


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """What a machine does: seconds a model step, bytes of bf16 a second that the decoders of entropy-coded and of
    fixed-rate anchors put out, and the tokens a second of a prefill, if known.

    Defaults of the decoders are four cores at the rates a core of docs/kernels.md (fetch and decode, anchor). Refining
    takes `refine` times as long as decoding the anchor.
    """

    token_s: float = 0.02
    entropy_byte_s: float = 4 * 0.70e9
    fixed_byte_s: float = 4 * 1.0e9
    prefill_token_s: float | None = None
    refine: float = 0.6


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What is expected of one way to come to an answer. `codec` is for `encode --codec`; None is a prefill.

    `residual_bytes` come after the Anchor, up to the precision that the text is verified at. `drafted` and `accepted`
    are expected numbers of tokens; `needs_basis`: the model has to be calibrated first.
    """

    name: str
    codec: str | None
    anchor_bytes: int
    residual_bytes: int
    attn_nmse: float
    meets_target: bool
    first_draft_s: float | None
    first_verified_s: float
    last_verified_s: float
    drafted: int
    accepted: float
    needs_basis: bool = False


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every way with its estimate, the one to take and why. `last_verified_s` is that of the 32nd token."""

    target: Target
    estimates: tuple[Estimate, ...]
    choice: Estimate
    why: str


def plan(
    workload: Workload, link: Link, target: Target = "default", speeds: Speeds | None = None, *, basis: bool = False
) -> Plan:
    """Reckon what each profile would do, and choose the one whose 32nd verified token is expected first.

    The choice is among the profiles that meet `target`. Where none of them has a draft that starts sooner, by more than
    the round trip that its Residual costs, than a cache in one shard would be here, such caches are chosen from too;
    as plain bf16 only if no coarser one meets the target. INT8, bf16 and a prefill are there to be compared with.

    Args:
        basis: the model has one, so that `compact` can be chosen.
    """
    speeds = speeds or Speeds()
    limit = TARGETS[target]
    exact = target == "exact"
    split, whole, others = (
        [_estimate(profile, workload, link, speeds, limit, exact=exact) for profile in profiles]
        for profiles in (PROFILES, WHOLE, (INT8, RAW))
    )
    fit_split = [item for item in split if item.meets_target and (basis or not item.needs_basis)]
    fit_whole = [item for item in whole if item.meets_target] or [item for item in others if item.meets_target]
    if speeds.prefill_token_s is not None:
        others.append(_prefill(workload, speeds))
    at_once_s = min(item.first_verified_s for item in fit_whole)
    saved_s = max(at_once_s - (item.first_draft_s or at_once_s) for item in fit_split)
    pays = saved_s > RESIDUAL_TRIPS * link.rtt_s
    choice = min(fit_split if pays else (*fit_split, *fit_whole), key=lambda item: item.last_verified_s)
    if choice in fit_whole:
        why = (
            f"in one shard: with a Residual the first token would be here {_time(max(saved_s, 0.0))} sooner, "
            f"as a draft, and asking for it costs a round trip of {_time(link.rtt_s)}"
        )
    elif choice.name == "fixed" and workload.original_bytes / speeds.entropy_byte_s > _on(link, choice.anchor_bytes):
        why = "fixed-rate codes: an entropy decoder is slower than this link"
    else:
        why = "of all that is as close to the original as asked for, its 32nd verified token is expected first"
    for other in others:
        if other.meets_target and other.last_verified_s < choice.last_verified_s:
            why += f"; {other.name} is expected to be sooner still, after {_time(other.last_verified_s)}"
    return Plan(target=target, estimates=(*split, *whole, *others), choice=choice, why=why)


def expected_accepted(accepted: float, drafted: int) -> float:
    """Tokens accepted of `drafted` if `accepted` are of 32: a token passes with one chance, if all before it did."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _passed(middle, DRAFT_TOKENS) < accepted else (low, middle)
    return _passed(low, drafted)


def _passed(chance: float, drafted: int) -> float:
    return sum(chance**k for k in range(1, drafted + 1))


def _estimate(
    profile: Profile, workload: Workload, link: Link, speeds: Speeds, limit: float, *, exact: bool
) -> Estimate:
    to_exact = exact and profile.exact_bits is not None
    bits = profile.exact_bits if exact and profile.exact_bits is not None else profile.full_bits
    anchor = workload.bytes(profile.anchor_bits, profile.channel_bits)
    total = workload.bytes(bits, profile.channel_bits)
    rate = profile.decode_rate * (speeds.entropy_byte_s if profile.entropy else speeds.fixed_byte_s)
    decode_s = workload.original_bytes / rate
    anchor_s = OPENING_TRIPS * link.rtt_s + max(_on(link, anchor), decode_s if profile.codec != RAW.codec else 0.0)
    if not profile.split:
        return Estimate(
            name=profile.codec,
            codec=profile.codec,
            anchor_bytes=anchor,
            residual_bytes=0,
            attn_nmse=profile.attn_nmse,
            meets_target=profile.attn_nmse <= limit,
            first_draft_s=None,
            first_verified_s=anchor_s + speeds.token_s,
            last_verified_s=anchor_s + DRAFT_TOKENS * speeds.token_s,
            drafted=0,
            accepted=0.0,
        )
    stages = 2 if to_exact else 1
    wait_s = RESIDUAL_TRIPS * link.rtt_s + max(_on(link, total - anchor), stages * speeds.refine * decode_s)
    drafted = min(DRAFT_TOKENS, int(wait_s / speeds.token_s))
    assert profile.accepted is not None
    accepted = expected_accepted(profile.accepted, drafted)
    verified_s = anchor_s + wait_s + speeds.token_s
    return Estimate(
        name=profile.codec,
        codec=f"{profile.codec}:exact=true" if to_exact else profile.codec,
        anchor_bytes=anchor,
        residual_bytes=total - anchor,
        attn_nmse=0.0 if to_exact else profile.attn_nmse,
        meets_target=to_exact or profile.attn_nmse <= limit,
        first_draft_s=anchor_s + speeds.token_s if drafted else None,
        first_verified_s=verified_s,
        # The pass verifies what is accepted and a token more.
        last_verified_s=verified_s + max(0.0, DRAFT_TOKENS - 1 - accepted) * speeds.token_s,
        drafted=drafted,
        accepted=accepted,
        needs_basis=profile.needs_basis,
    )


def _prefill(workload: Workload, speeds: Speeds) -> Estimate:
    assert speeds.prefill_token_s is not None
    first_s = workload.tokens / speeds.prefill_token_s + speeds.token_s
    return Estimate(
        name="prefill",
        codec=None,
        anchor_bytes=0,
        residual_bytes=0,
        attn_nmse=0.0,
        meets_target=True,
        first_draft_s=None,
        first_verified_s=first_s,
        last_verified_s=first_s + (DRAFT_TOKENS - 1) * speeds.token_s,
        drafted=0,
        accepted=0.0,
    )


def _on(link: Link, size_bytes: int) -> float:
    return size_bytes * 8 / link.bit_per_s


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
