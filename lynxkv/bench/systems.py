"""What `lynxkv bench decode` sets side by side: ways to come from a stored prompt to an answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from lynxkv.bench.baselines import BASELINES
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
from lynxkv.kv import KV, KVLayer
from lynxkv.models import Prefilled
from lynxkv.pace import Pace
from lynxkv.proof import prove
from lynxkv.runner import generate
from lynxkv.store import Link
from lynxkv.trace import Trace

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


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One answer: seconds since the cache was opened, and what `generate` counts. None: there was no draft.

    `bookkeeping` is that of `lynxkv.trace`.
    """

    first_draft_s: float | None
    first_verified_s: float
    kth_verified_s: float
    drafted: int
    accepted: int
    peak_bytes: int
    equal: bool | None
    bookkeeping: float | None = None

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

    def recall(self, timing: Timing) -> None:
        """Learn from an answer of an earlier run: of its draft, what was accepted and the token that was not."""
        self.pace.verified("full", min(timing.drafted, timing.accepted + 1), timing.accepted)

    def answer(self, suffix_ids: Sequence[int], tokens: int, link: Link | None, *, check: bool) -> Timing:
        """Open, fetch, draft, verify, decode on."""
        speculate, verify = MODES[self.mode]
        verified_s: list[float] = []
        trace = Trace()
        open_reader = _HeldReader if self.mode == "held" else open_cache
        with open_reader(self.url, link=link) as reader:

            def on_event(event: Event) -> None:
                trace.on_event(event)
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
            bookkeeping=trace.bookkeeping,
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


def parse_systems(texts: Sequence[str], model: Model) -> list[System]:
    """Systems from `prefill` or `CODEC@MODE`; a codec alone is progressive.

    Raises:
        InputError: a text is not of that form, or comes twice.
    """
    if len(set(texts)) < len(texts):
        raise InputError("a system is given twice", hint="name each once")
    return [_system(text, model) for text in texts]


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
