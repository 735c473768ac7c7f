"""`lynxkv bench decode`: from opening a cache to its k-th verified token, for several ways to keep one.

All systems answer the same questions over the same simulated link, in turns. The model and the kernels are warm; a
clock starts when a cache is opened. Texts are greedy and go on past an end of text, so that all have k tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal, Protocol

import torch

from lynxkv.bench.baselines import BASELINES
from lynxkv.bench.codec import Progress
from lynxkv.bench.documents import Document
from lynxkv.bench.measure import rounded
from lynxkv.bench.methods import parse_methods
from lynxkv.bench.stored import Method, StoredCache
from lynxkv.choices import Verify, parse_codec
from lynxkv.codecs import get_codec
from lynxkv.draft import Speculate
from lynxkv.encoder import encode
from lynxkv.errors import InputError
from lynxkv.events import Event, GenerateResult, Verified
from lynxkv.fetch import CacheReader, SegmentPayload, SegmentStream, open_cache
from lynxkv.integrations.hf import LynxCache, Model
from lynxkv.integrations.hf.templates import open_turn, suffix
from lynxkv.kv import KV, KVLayer
from lynxkv.models import Prefilled, prefill_with_logits
from lynxkv.pace import Pace
from lynxkv.proof import prove
from lynxkv.runner import generate
from lynxkv.store import Link

Mode = Literal["progressive", "whole", "layers", "exact", "draft", "held"]
# What a mode asks of `generate`; None drafts k tokens. Layers: of caches without Residual, there is no draft, but steps
# run behind what arrives. Draft and held differ only in whether the Residual is refined in meanwhile.
MODES: dict[Mode, tuple[Speculate | None, Verify]] = {
    "progressive": ("auto", "full"),
    "whole": ("off", "full"),
    "layers": ("auto", "full"),
    "exact": ("auto", "exact"),
    "draft": (None, "full"),
    "held": (None, "full"),
}
DEFAULT_SYSTEMS = (
    "raw@whole",
    "int8@whole",
    "int8@layers",
    "int4@whole",
    "byte-planes@whole",
    "kivi:bits=4@whole",
    "alg1:alpha=100,chunk_dtype=f32@progressive",
    "default@progressive",
    "default@whole",
    "quality@progressive",
    "fast@progressive",
    "default@exact",
    "prefill",
)
QUICK_SYSTEMS = ("raw@whole", "int8@whole", "default@progressive", "default@whole", "fast@progressive")
# With a chat template's closing tokens a suffix of at most 16 tokens.
QUESTIONS = (
    "What is this about?",
    "Summarise it.",
    "Who is it for?",
    "Name one fact.",
    "Why does it matter?",
    "Give an example.",
    "What comes first?",
    "Explain one rule.",
)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One answer: seconds since the cache was opened, and what `generate` counts. None: there was no draft."""

    first_draft_s: float | None
    first_verified_s: float
    kth_verified_s: float
    drafted: int
    accepted: int
    peak_bytes: int
    equal: bool | None

    @property
    def first_token_s(self) -> float:
        """The first token of any kind."""
        return self.first_verified_s if self.first_draft_s is None else self.first_draft_s


class System(Protocol):
    """A way to come from a stored prompt to an answer."""

    @property
    def label(self) -> str: ...

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes before the first token, and in all."""

    def publish(self, filled: Prefilled, folder: Path) -> None:
        """Store the prompt."""

    def answer(self, suffix_ids: Sequence[int], tokens: int, link: Link | None, *, check: bool) -> Timing:
        """Answer over `link`; `check` compares the text with plain decoding, after the clock has stopped."""


@dataclass
class CacheSystem:
    """A lynxkv cache of some codec, in one of the modes."""

    label: str
    codec: str
    mode: Mode
    model: Model
    pace: Pace = field(default_factory=Pace)
    sizes: tuple[int, int] = (0, 0)
    url: str = ""

    def publish(self, filled: Prefilled, folder: Path) -> None:
        """Encode it into `folder`."""
        choice, exact = parse_codec(self.codec), self.mode == "exact"
        name = "".join(character if character.isalnum() else "-" for character in self.label)
        report = encode(
            filled.kv,
            folder / f"{name}.lynx",
            codec=get_codec(choice.name, **choice.params),
            identity=self.model.identity,
            exact=exact,
        )
        total = report.bytes_anchor + report.bytes_residual + report.bytes_exact
        waits_for_all = self.mode in ("whole", "layers")
        self.url, self.sizes = report.url, (total if waits_for_all else report.bytes_anchor, total)

    def answer(self, suffix_ids: Sequence[int], tokens: int, link: Link | None, *, check: bool) -> Timing:
        """Open, fetch, draft, verify, decode on."""
        speculate, verify = MODES[self.mode]
        verified_s: list[float] = []
        open_reader = _HeldReader if self.mode == "held" else open_cache
        with open_reader(self.url, link=link) as reader:

            def on_event(event: Event) -> None:
                if isinstance(event, Verified):
                    verified_s.extend([time.perf_counter() - reader.opened_at] * len(event.token_ids))

            result = generate(
                reader,
                self.model,
                suffix_ids,
                max_new_tokens=tokens,
                speculate=tokens if speculate is None else speculate,
                verify=verify,
                pace=self.pace,
                on_event=on_event,
            )
        return Timing(
            first_draft_s=result.first_draft_s,
            first_verified_s=result.first_verified_s,
            kth_verified_s=verified_s[tokens - 1],
            drafted=result.drafted,
            accepted=result.accepted,
            peak_bytes=result.peak_bytes,
            equal=self._is_plain(suffix_ids, result) if check else None,
        )

    def _is_plain(self, suffix_ids: Sequence[int], result: GenerateResult) -> bool:
        with open_cache(self.url) as reader:
            return prove(reader, self.model, suffix_ids, result).equal


class _HeldReader(CacheReader):
    """Fetches as others do, but keeps the Residual out of the cache until somebody waits for it."""

    def start_residual(self, *, exact: bool = False) -> Any:
        """A stream of which nothing is ever ready."""
        return _HeldStream(super().start_residual(exact=exact))


class _HeldStream:
    def __init__(self, stream: SegmentStream) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def ready(self) -> list[SegmentPayload]:
        return []


@dataclass
class BaselineSystem:
    """Somebody else's way to store a cache (`lynxkv.bench.baselines`), all of it fetched before it is decoded.

    As many bytes as it takes come through the loader that the others use, from a cache that holds just them; its values
    come from the baseline's own code, which has decoded them before: what decoding would take is not counted.
    """

    label: str
    method: Method
    model: Model
    prompt_tokens: int = 0
    sizes: tuple[int, int] = (0, 0)
    url: str = ""
    kept: ExitStack = field(default_factory=ExitStack)
    stored: StoredCache | None = None

    def publish(self, filled: Prefilled, folder: Path) -> None:
        """Keep the cache as the baseline does, and store as many bytes."""
        self.prompt_tokens = filled.kv.tokens
        self.stored = self.kept.enter_context(self.method.store(rounded(filled.kv)))
        size = self.stored.sizes.total_bytes
        rows = torch.zeros(1, -(-size // 128), 64, dtype=torch.bfloat16)
        layer = KVLayer(tensors={"latent": rows}, start=0, stop=rows.shape[1], kind="full")
        name = "".join(character if character.isalnum() else "-" for character in self.label)
        report = encode(KV(layers=[layer], start=0, stop=rows.shape[1]), folder / f"{name}.lynx", codec="raw")
        self.url, self.sizes = report.url, (report.bytes_anchor, report.bytes_anchor)

    def answer(self, suffix_ids: Sequence[int], tokens: int, link: Link | None, *, check: bool) -> Timing:
        """Fetch all, then decode."""
        assert self.stored is not None
        cache = self.model.new_cache(self.prompt_tokens, len(suffix_ids) + tokens)
        with open_cache(self.url, link=link) as reader:
            began = reader.opened_at
            for _ in reader.stream_anchor():
                pass
        for _ in self.stored.decode(cache):
            pass
        return _answered(self.model, cache, suffix_ids, tokens, began, check=check)


@dataclass
class PrefillSystem:
    """No cache at all: the prompt is computed again."""

    model: Model
    label: str = "prefill"
    sizes: tuple[int, int] = (0, 0)
    prompt_ids: list[int] = field(default_factory=list)

    def publish(self, filled: Prefilled, folder: Path) -> None:
        """Keep the token ids."""
        assert filled.kv.token_ids is not None
        self.prompt_ids = filled.kv.token_ids

    def answer(self, suffix_ids: Sequence[int], tokens: int, link: Link | None, *, check: bool) -> Timing:
        """Prefill, then decode."""
        began = time.perf_counter()
        cache = self.model.new_cache(0, len(self.prompt_ids) + len(suffix_ids) + tokens)
        return _answered(self.model, cache, [*self.prompt_ids, *suffix_ids], tokens, began, check=check)


def _answered(
    model: Model, cache: LynxCache, pending: Sequence[int], tokens: int, began: float, *, check: bool
) -> Timing:
    """Greedy tokens after `pending`, one by one; such a text is that of plain decoding."""
    verified_s: list[float] = []
    while len(verified_s) < tokens:
        pending = [int(model.step(cache, pending)[0].argmax())]
        verified_s.append(time.perf_counter() - began)
    return Timing(
        first_draft_s=None,
        first_verified_s=verified_s[0],
        kth_verified_s=verified_s[-1],
        drafted=0,
        accepted=0,
        peak_bytes=cache.nbytes,
        equal=True if check else None,
    )


@dataclass(frozen=True, kw_only=True)
class DecodePlan:
    """What is measured. Every repeat asks the next of `QUESTIONS`."""

    document: Document
    tokens: tuple[int, ...] = (2048,)
    links: tuple[str, ...] = ("200mbit/20ms", "25mbit/20ms")
    kth: int = 32
    repeats: int = 8


@dataclass(frozen=True, kw_only=True)
class DecodeRow:
    """Medians of one system's repeats. Limits are what bytes, link and a warm model allow at best.

    Attributes:
        limit_first_draft_s: bytes before the first token over the link's rate, two round trips, a step on the suffix.
        limit_first_verified_s: all bytes over the rate, two round trips, a step on the suffix.
        text_equal: every text was that of plain decoding from the same cache.
    """

    system: str
    link_bit_per_s: float
    rtt_s: float
    tokens: int
    repeats: int
    first_draft_s: float | None
    first_token_s: float
    first_verified_s: float
    kth_verified_s: float
    bytes_anchor: int
    bytes_total: int
    drafted: float
    accepted: float
    text_equal: bool
    limit_first_draft_s: float
    limit_first_verified_s: float
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class Speedup:
    """How many times sooner than a baseline, pair by pair: median, and the extremes."""

    system: str
    baseline: str
    link_bit_per_s: float
    tokens: int
    first_token: tuple[float, float, float]
    kth_verified: tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)
class DecodeBench:
    """All rows, and the pairs that speed-ups are made of."""

    model: str
    plan: DecodePlan
    rows: tuple[DecodeRow, ...]
    timings: dict[tuple[str, int, str], tuple[Timing, ...]]

    def speedups(self, baseline: str) -> list[Speedup]:
        """Of every other system over `baseline`, link by link."""
        out = []
        for (link, tokens, label), timings in self.timings.items():
            if label == baseline or (link, tokens, baseline) not in self.timings:
                continue
            pairs = list(zip(self.timings[link, tokens, baseline], timings, strict=True))
            out.append(
                Speedup(
                    system=label,
                    baseline=baseline,
                    link_bit_per_s=Link.parse(link).bit_per_s,
                    tokens=tokens,
                    first_token=_spread([old.first_token_s / new.first_token_s for old, new in pairs]),
                    kth_verified=_spread([old.kth_verified_s / new.kth_verified_s for old, new in pairs]),
                )
            )
        return out


def parse_systems(texts: Sequence[str], model: Model) -> list[System]:
    """Systems from `prefill` or `CODEC@MODE`; a codec alone is progressive.

    Raises:
        InputError: a text is not of that form, or comes twice.
    """
    if len(set(texts)) < len(texts):
        raise InputError("a system is given twice", hint="name each once")
    return [_system(text, model) for text in texts]


def bench_decode(
    model: Model,
    systems: Sequence[str],
    plan: DecodePlan,
    *,
    progress: Progress = lambda stage, done, total: None,
) -> DecodeBench:
    """Measure `systems` as `plan` says: they take turns within each repeat.

    Raises:
        InputError: a system or link cannot be read, or the document is too short.
    """
    endless = replace(model, eos_token_ids=frozenset())
    for link in plan.links:
        Link.parse(link)
    parse_systems(systems, endless)
    questions = [suffix(model.tokenizer, question) for question in QUESTIONS]
    timings: dict[tuple[str, int, str], tuple[Timing, ...]] = {}
    rows: list[DecodeRow] = []
    done, total = 0, len(plan.tokens) * len(plan.links) * plan.repeats * len(systems)
    for tokens in plan.tokens:
        with _published(endless, parse_systems(systems, endless), plan.document, tokens, progress) as (ready, step_s):
            for link in plan.links:
                measured: dict[str, list[Timing]] = {system.label: [] for system in ready}
                for repeat in range(plan.repeats):
                    question = questions[repeat % len(questions)]
                    for system in ready:
                        progress("decode", done, total)
                        # A text is checked once: it does not depend on the link.
                        check = link == plan.links[0] and repeat < len(questions)
                        timing = system.answer(question, plan.kth, Link.parse(link), check=check)
                        measured[system.label].append(timing)
                        done += 1
                for system in ready:
                    timings[link, tokens, system.label] = tuple(measured[system.label])
                    rows.append(_row(system, Link.parse(link), tokens, measured[system.label], step_s))
    progress("decode", total, total)
    return DecodeBench(
        model=model.identity.model_id or "unnamed", plan=plan, rows=_with_equality(rows), timings=timings
    )


def _system(text: str, model: Model) -> System:
    if text == "prefill":
        return PrefillSystem(model)
    codec, _, mode = text.rpartition("@") if "@" in text else (text, "", "progressive")
    if mode not in MODES:
        raise InputError(
            f"there is no system {text!r}", hint=f"write prefill, or CODEC@MODE with a mode of {', '.join(MODES)}"
        )
    if codec.partition(":")[0] in BASELINES:
        if mode != "whole":
            raise InputError(f"{text}: baselines are fetched whole", hint=f"write {codec}@whole")
        return BaselineSystem(text, parse_methods([codec])[0], model)
    choice = parse_codec(codec)
    get_codec(choice.name, **choice.params)
    return CacheSystem(text, codec, next(known for known in MODES if known == mode), model)


@contextmanager
def _published(
    model: Model, systems: Sequence[System], document: Document, tokens: int, progress: Progress
) -> Iterator[tuple[Sequence[System], float]]:
    """The systems, each with the prompt stored and everything warm, and the seconds of a step on a question."""
    ids = open_turn(model.tokenizer, document.text)
    if len(ids) < tokens:
        raise InputError(f"{document.name} has {len(ids)} tokens, {tokens} are needed", hint="give a longer document")
    filled = prefill_with_logits(
        model, ids[:tokens], progress=lambda done, total: progress(f"prefill {tokens}", done, total)
    )
    question = suffix(model.tokenizer, QUESTIONS[0])
    with TemporaryDirectory(prefix="lynxkv-bench-") as folder:
        for system in systems:
            system.publish(filled, Path(folder))
            if isinstance(system, CacheSystem):
                system.answer(question, 4, None, check=False)
        try:
            yield systems, _step_seconds(model, filled, question)
        finally:
            for system in systems:
                if isinstance(system, BaselineSystem):
                    system.kept.close()


def _step_seconds(model: Model, filled: Prefilled, suffix_ids: list[int]) -> float:
    """Of a step on `suffix_ids` after the prompt: the median of five."""
    tokens = filled.kv.tokens
    cache = LynxCache.allocate(model, tokens, len(suffix_ids))
    for number, layer in enumerate(filled.kv.layers):
        for name, tensor in layer.tensors.items():
            cache.target(number, name).copy_(tensor)
    seconds = []
    for _ in range(5):
        cache.rollback(tokens)
        began = time.perf_counter()
        model.step(cache, suffix_ids)
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def _row(system: System, link: Link, tokens: int, timings: Sequence[Timing], step_s: float) -> DecodeRow:
    first, total = system.sizes
    drafts = [timing.first_draft_s for timing in timings if timing.first_draft_s is not None]
    fixed_s = 2 * link.rtt_s + step_s
    return DecodeRow(
        system=system.label,
        link_bit_per_s=link.bit_per_s,
        rtt_s=link.rtt_s,
        tokens=tokens,
        repeats=len(timings),
        first_draft_s=median(drafts) if drafts else None,
        first_token_s=median(timing.first_token_s for timing in timings),
        first_verified_s=median(timing.first_verified_s for timing in timings),
        kth_verified_s=median(timing.kth_verified_s for timing in timings),
        bytes_anchor=first,
        bytes_total=total,
        drafted=sum(timing.drafted for timing in timings) / len(timings),
        accepted=sum(timing.accepted for timing in timings) / len(timings),
        text_equal=all(timing.equal for timing in timings if timing.equal is not None),
        limit_first_draft_s=first * 8 / link.bit_per_s + fixed_s,
        limit_first_verified_s=total * 8 / link.bit_per_s + fixed_s,
        peak_bytes=max(timing.peak_bytes for timing in timings),
    )


def _with_equality(rows: Sequence[DecodeRow]) -> tuple[DecodeRow, ...]:
    """What was checked over the first link holds for the others."""
    unequal = {(row.system, row.tokens) for row in rows if not row.text_equal}
    return tuple(replace(row, text_equal=(row.system, row.tokens) not in unequal) for row in rows)


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    return median(values), min(values), max(values)
