"""An answer, and where it came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lynxkv.events import GenerateResult, TokenLogprobs

Source = Literal["cache", "prefill", "recompute"]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer, and where it came from.

    Attributes:
        source: "cache"; "prefill" if no cache was used; "recompute" if one could not be loaded.
        cache: the name of the cache, if there was one.
        load_failure: the code of what went wrong when it was loaded.
        together: requests that were decoded together, this one included.
        logprobs: of the tokens of the answer, where they were asked for.
    """

    result: GenerateResult
    source: Source
    cache: str | None
    cached_tokens: int
    prompt_tokens: int
    load_failure: str | None = None
    together: int = 1
    logprobs: Sequence[TokenLogprobs] | None = None
