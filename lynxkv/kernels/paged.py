"""Where kernels write to: a tensor [H, T, D], or the tokens of a sequence in a cache of pages."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lynxkv.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Paged:
    """Tokens [first, first + tokens) of a sequence in a cache of pages: token i of the sequence lies in slot i % S of
    page `table[i // S]`.

    `pages` is [pages, H, S, D], any strides: an engine's cache is brought into that form by indexing and permuting,
    without a copy. `table` [n] is in host memory, as int64. Only the slots of these tokens are ever written.

    The table is checked when this is made, not for each `span` of it: a destination does well to keep one a tensor.

    Raises:
        InputError: `pages` has not four dims, or `table` names a page that there is not, one page twice, or too few.
    """

    pages: Tensor
    table: npt.NDArray[np.int64]
    tokens: int
    first: int = 0

    def __post_init__(self) -> None:
        if self.pages.ndim != 4 or not all(self.pages.shape):
            raise InputError(f"pages of shape {tuple(self.pages.shape)} are not [pages, heads, slots, head_dim]")
        if self.table.ndim != 1 or self.table.dtype != np.int64:
            raise InputError(f"a block table of {self.table.dtype} {self.table.shape} is not int64 [n]")
        used = self.table[: -(-(self.first + self.tokens) // self.slots)]
        if self.first < 0 or self.tokens < 1 or used.size * self.slots < self.first + self.tokens:
            raise InputError(
                f"a block table of {self.table.size} pages of {self.slots} does not hold tokens "
                f"[{self.first}, {self.first + self.tokens})"
            )
        if used.min() < 0 or used.max() >= self.pages.shape[0] or np.unique(used).size < used.size:
            raise InputError(f"a block table does not name different pages of {self.pages.shape[0]}")
        # A copy: an engine may go on with its own, and what is not checked again must not change.
        own = used.copy()
        own.flags.writeable = False
        object.__setattr__(self, "table", own)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H, T, D), as of a tensor that holds these tokens alone."""
        return self.pages.shape[1], self.tokens, self.pages.shape[3]

    @property
    def slots(self) -> int:
        """Tokens a page."""
        return self.pages.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        return self.pages.dtype

    @property
    def device(self) -> torch.device:
        return self.pages.device

    @property
    def used(self) -> npt.NDArray[np.int64]:
        """The pages of these tokens: of them, token i is in slot j % S of page `used[j // S]`, j = `first` % S + i."""
        return self.table[self.first // self.slots : -(-(self.first + self.tokens) // self.slots)]

    def span(self, start: int, stop: int) -> Paged:
        """Tokens [start, stop) of these.

        Raises:
            InputError: there are no such tokens.
        """
        if not 0 <= start < stop <= self.tokens:
            raise InputError(f"a part of a cache of pages that has {self.tokens} tokens cannot be [{start}, {stop})")
        part = copy(self)  # checked already: it uses nothing of the table that the whole does not
        object.__setattr__(part, "first", self.first + start)
        object.__setattr__(part, "tokens", stop - start)
        return part

    def places(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(page, slot) of each token."""
        position = np.arange(self.first, self.first + self.tokens)
        return self.table[position // self.slots], position % self.slots

    def indices(self) -> tuple[Tensor, Tensor]:
        """`places` on the device of the pages."""
        page, slot = (torch.from_numpy(part).to(self.device) for part in self.places())
        return page, slot

    def write(self, values: Tensor) -> None:
        """Store values [H, T, D] of any dtype, from any device."""
        self.pages.transpose(1, 2)[self.indices()] = values.transpose(0, 1).to(self.device, self.dtype)

    def read(self) -> Tensor:
        """A copy [H, T, D]."""
        tokens_first: Tensor = self.pages.transpose(1, 2)[self.indices()]
        return tokens_first.transpose(0, 1)


Out = Tensor | Paged
"""A destination: a tensor [H, T, D], any strides, or paged tokens."""


def span(out: Out, start: int, stop: int) -> Out:
    """Tokens [start, stop) of `out`."""
    if isinstance(out, Tensor):
        return out[:, start:stop]
    return out.span(start, stop)


def write(out: Out, values: Tensor) -> None:
    """Store values [H, T, D], cast to the dtype of `out`."""
    if isinstance(out, Tensor):
        out.copy_(values)
    else:
        out.write(values)


def scatter(out: Out, head: Tensor, token: Tensor, d: Tensor, values: Tensor) -> None:
    """Store values [n] at `out[head, token, d]`, all int64 [n] and on its device."""
    if isinstance(out, Tensor):
        out[head, token, d] = values
        return
    page, slot = out.indices()
    out.pages[page[token], head, slot[token], d] = values


def read(out: Out) -> Tensor:
    """The values [H, T, D] of `out`: itself, or a copy of what is in pages."""
    return out if isinstance(out, Tensor) else out.read()
