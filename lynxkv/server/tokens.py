"""What single tokens stand for."""

from __future__ import annotations

import re

from transformers import PreTrainedTokenizerBase

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenBytes:
    """The bytes of each token of a tokenizer, which may be a part of a character.

    A tokenizer spells its tokens: byte-level ones with a printable character for each byte, others with a bar for a
    space and `<0xE2>` for bytes that are no characters of theirs. Added tokens are spelled as they are.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._spelled = {number: token for token, number in tokenizer.get_vocab().items()}
        self._added = frozenset(tokenizer.added_tokens_decoder)
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        self._byte_level = "ByteLevel" in repr(decoder)

    def __call__(self, token_id: int) -> bytes:
        """The bytes of a token; none if the tokenizer does not have it, as models may have more than it."""
        token = self._spelled.get(token_id, "")
        if token_id in self._added:
            return token.encode()
        if self._byte_level:
            return bytes(map(_BYTE_OF.__getitem__, token))
        byte = _BYTE.fullmatch(token)
        return bytes.fromhex(byte[1]) if byte else token.replace("\u2581", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """Of byte-level tokenizers: bytes that are printable in Latin-1 stand for themselves, others, in order, for the
    characters from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
