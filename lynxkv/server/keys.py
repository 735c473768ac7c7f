"""API keys: who asks, and what may be seen of the store."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lynxkv.errors import InputError
from lynxkv.layout import Identity
from lynxkv.server.problems import Refusal

_LINE = re.compile(r"(?P<name>[\w.-]{1,64})\s+(?P<sha256>[0-9a-f]{64})(?:\s+(?P<salt>\S+))?")
SHARED = "shared"


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Who asks. `salt_sha256`: of the caches that are the caller's own; None: the caller has none of its own."""

    name: str
    salt_sha256: str | None = None

    def identities(self, model: Identity) -> list[Identity]:
        """Of the caches that the caller may read: the caller's own first, then those that are everybody's."""
        own = [] if self.salt_sha256 is None else [replace(model, salt_sha256=self.salt_sha256)]
        return [*own, model]


@dataclass(frozen=True, kw_only=True)
class _Key:
    sha256: bytes
    caller: Caller


ANYBODY = Caller(name="anybody")


class Keys:
    """The keys that a server takes; without any, everybody is `ANYBODY`."""

    def __init__(self, keys: Sequence[_Key] = ()) -> None:
        self._keys = keys

    @classmethod
    def read(cls, path: Path) -> Keys:
        """Keys from a file, one a line: a name, the SHA-256 of the key in hex, and perhaps a salt.

        Without a salt the digest is one; `shared` means that the key has no caches of its own.

        Raises:
            InputError: the file cannot be read, or a line is of another form.
        """
        try:
            lines = path.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read the keys in {path}: {error}", hint="give a text file") from error
        keys = []
        for number, line in enumerate(lines, 1):
            text = line.partition("#")[0].strip()
            if not text:
                continue
            found = _LINE.fullmatch(text)
            if found is None:
                hint = "write NAME SHA256 [SALT]; printf %s KEY | sha256sum makes the digest"
                raise InputError(f"{path}, line {number}: not a name and a SHA-256", hint=hint)
            salt = found["salt"] or found["sha256"]
            salted = None if salt == SHARED else hashlib.sha256(salt.encode()).hexdigest()
            caller = Caller(name=found["name"], salt_sha256=salted)
            keys.append(_Key(sha256=bytes.fromhex(found["sha256"]), caller=caller))
        if not keys:
            raise InputError(f"{path} holds no keys", hint="write NAME SHA256 [SALT], a key a line")
        return cls(keys)

    @property
    def wanted(self) -> bool:
        """Whether requests need a key."""
        return bool(self._keys)

    def caller(self, authorization: str | None) -> Caller:
        """Who sends this header. How long it takes says nothing about the keys.

        Raises:
            Refusal: the key is missing or wrong.
        """
        if not self._keys:
            return ANYBODY
        scheme, _, token = (authorization or "").partition(" ")
        digest = hashlib.sha256(token.strip().encode("utf-8", "surrogateescape")).digest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.sha256, digest):
                found = key.caller
        if found is None or scheme.lower() != "bearer":
            raise Refusal("the API key is missing or wrong", status=401, code="invalid_api_key")
        return found
