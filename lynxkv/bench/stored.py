"""What is measured: anything that stores a KV cache in few bytes and decodes it again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from lynxkv.kv import KV
from lynxkv.layout import Precision, TensorName


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes of a stored cache, everything included: up to the anchor, up to full, and in all."""

    anchor_bytes: int
    full_bytes: int
    total_bytes: int

    def up_to(self, precision: Precision) -> int:
        """Bytes that have to be fetched for `precision`."""
        return {"anchor": self.anchor_bytes, "full": self.full_bytes, "exact": self.total_bytes}[precision]


class TensorDestination(Protocol):
    """Where decoded tensors go: a live cache, or plain tensors."""

    def target(self, layer: int, tensor: TensorName) -> Tensor:
        """A view [H, stop - start, D], any float dtype."""


class SparseFetch(Protocol):
    """Attention that fetches part of a stored cache, as its queries ask for it, and counts what it fetches."""

    def attend(
        self,
        stock: Any,
        module: Any,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        **settings: Any,
    ) -> tuple[Tensor, None]:
        """Stands in for the model's attention function (`integrations.hf.queries.replaced_attention`)."""

    def answer(self, cache: Any) -> AbstractContextManager[None]:
        """While it lasts, one answer from the tokens that the live cache holds; its bytes count."""


class StoredCache(Protocol):
    """A cache as a method keeps it."""

    @property
    def sizes(self) -> Sizes:
        """For a sparse fetch, full is the mean of what the answers so far have fetched."""

    @property
    def sparse(self) -> SparseFetch | None:
        """How to attend to the decoded cache, if it is not as the model does."""

    def decode(self, destination: TensorDestination) -> Iterator[Precision]:
        """Write it to `destination` and yield each precision once all of it is there: full at least."""


class Method(Protocol):
    """A way to store a KV cache. `label` names it in results; `settings` are all its parameters, defaults included."""

    @property
    def label(self) -> str: ...

    @property
    def settings(self) -> Mapping[str, Any]: ...

    def store(self, kv: KV) -> AbstractContextManager[StoredCache]:
        """Keep `kv` while the context lasts."""
