"""A simulated link, for trying out what a slower one would do."""

from __future__ import annotations

import re
import threading
import time

from lynxkv.errors import InputError

_LINK = re.compile(r"(\d+(?:\.\d+)?)(k|m|g)bit(?:/(\d+(?:\.\d+)?)ms)?", re.IGNORECASE)
_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}


class Link:
    """A simulated link: one token bucket that all reads share, and a round trip before each answer.

    Requests are served in the order they arrive, as one saturated link would.
    """

    def __init__(self, *, bit_per_s: float, rtt_s: float = 0.0) -> None:
        if not (1 <= bit_per_s <= 1e15 and 0 <= rtt_s <= 3600):
            raise InputError(
                f"a link of {bit_per_s:g} bit/s and {rtt_s:g} s cannot be simulated",
                hint="use 1 to 1e15 bit/s and a round trip of at most an hour",
            )
        self.bit_per_s = bit_per_s
        self.rtt_s = rtt_s
        self._free_at = 0.0
        self._lock = threading.Lock()

    @classmethod
    def parse(cls, text: str) -> Link:
        """A link from `200mbit`, `1gbit/20ms` and the like.

        Raises:
            InputError: text is not of that form.
        """
        match = _LINK.fullmatch(text.strip())
        bit_per_s = float(match[1]) * _UNITS[match[2].lower()] if match else 0.0
        rtt_s = float(match[3] or 0) / 1e3 if match else 0.0
        if match is None or not 1 <= bit_per_s <= 1e15 or rtt_s > 3600:
            raise InputError(f"cannot read the link {text!r}", hint="write it like 200mbit or 1gbit/20ms")
        return cls(bit_per_s=bit_per_s, rtt_s=rtt_s)

    def delay_s(self, size_bytes: int) -> float:
        """How long from now one more answer of `size_bytes` would take, after all those asked for before."""
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now + self.rtt_s) + size_bytes * 8 / self.bit_per_s
            return self._free_at - now
