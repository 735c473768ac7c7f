"""What ties a cache to a model (SPEC 9.1): digests of weights, tokenizer and chat template, and their comparison.

The fingerprint covers the configuration and, of each checkpoint tensor, name, dtype, shape and the first and last
4 KiB. Reading 8 KiB a tensor takes milliseconds where hashing all weights takes seconds to minutes.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from lynxkv.errors import IdentityError, InputError
from lynxkv.layout import Identity

EDGE_BYTES = 4096
# Fields that change with the tool that wrote the file, or with how it was loaded, but not with the model.
VOLATILE = {"transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache", "quantization_config"}
# Fields whose absence is a statement.
BINDING = {"adapter", "salt_sha256"}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "spiece.model")
MAX_HEADER_BYTES = 100 << 20


@dataclass(frozen=True, kw_only=True)
class Digests:
    """SHA-256 in hex; None where the checkpoint has no such part."""

    fingerprint: str
    tokenizer_sha256: str | None
    chat_template_sha256: str | None


@dataclass(frozen=True, kw_only=True)
class TensorEdges:
    """What the fingerprint sees of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    first: bytes
    last: bytes


def check_identity(cache: Identity, model: Identity) -> None:
    """Return if `cache` was made for `model`: no field that both sides know differs.

    Model id and revision are compared only where one side has no fingerprint: equal weights under another name are
    the same model. Adapter and salt must be equal even so: a model without an adapter, or a reader without the salt, is
    not one of whom nothing is known.

    Raises:
        IdentityError: a field differs; it is named, with both values.
    """
    known = cache.fingerprint is not None and model.fingerprint is not None
    names = [] if known else ["model_id", "revision"]
    for field in ["fingerprint", *names, "tokenizer_sha256", "chat_template_sha256", "rope", "adapter", "salt_sha256"]:
        stated, own = getattr(cache, field), getattr(model, field)
        unknown = stated is None or own is None
        if stated == own or (unknown and field not in BINDING):
            continue
        raise IdentityError(
            f"the cache belongs to another model: {field} is {_shown(stated)} in the cache of {cache.model_id}, "
            f"{_shown(own)} in {model.model_id}",
            field=field,
            hint="use the model that the cache was made with, or encode the prompt again with this one",
        )


def fingerprint(config: Mapping[str, Any], tensors: Iterable[TensorEdges]) -> str:
    """SHA-256 over the canonical JSON of `config` without volatile fields, and the tensors in order of name."""
    digest = hashlib.sha256(canonical_json(without_volatile(config)))
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        digest.update(canonical_json([tensor.name, tensor.dtype, list(tensor.shape)]))
        digest.update(tensor.first)
        digest.update(tensor.last)
    return digest.hexdigest()


def canonical_json(value: Any) -> bytes:
    """One byte string for equal values: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode()


def without_volatile(value: Any) -> Any:
    """`value` with the volatile fields left out at every depth (multimodal configurations are nested)."""
    if isinstance(value, Mapping):
        return {key: without_volatile(item) for key, item in value.items() if key not in VOLATILE}
    if isinstance(value, list | tuple):
        return [without_volatile(item) for item in value]
    return value


def text_sha256(text: str | None) -> str | None:
    """SHA-256 of a text's UTF-8, None for None."""
    return None if text is None else hashlib.sha256(text.encode()).hexdigest()


def folder_digests(folder: Path) -> Digests:
    """Digests of a Hugging Face folder.

    Raises:
        InputError: the folder has no safetensors weights, or a file in it cannot be read.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InputError(
            f"{folder} has no safetensors weights", hint="pickled .bin checkpoints are not loaded; convert them first"
        )
    try:
        config = json.loads((folder / "config.json").read_text())
        tensors = [tensor for file in files for tensor in _safetensors_edges(file)]
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise InputError(f"{folder} is not a readable model: {error}", hint="download it again") from error
    return Digests(
        fingerprint=fingerprint(config, tensors),
        tokenizer_sha256=_tokenizer_sha256(folder),
        chat_template_sha256=text_sha256(_chat_template(folder)),
    )


def gguf_digests(path: Path) -> Digests:
    """Digests of a GGUF file: its metadata stands for configuration and tokenizer."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    template = fields.pop("tokenizer.chat_template", None)
    tokenizer = {name: value for name, value in fields.items() if name.startswith("tokenizer.")}
    config = {name: value for name, value in fields.items() if name not in tokenizer}
    tensors = (
        TensorEdges(
            name=tensor.name,
            dtype=tensor.tensor_type.name,
            shape=tuple(int(size) for size in tensor.shape),
            first=tensor.data.reshape(-1).view("u1")[:EDGE_BYTES].tobytes(),
            last=tensor.data.reshape(-1).view("u1")[-EDGE_BYTES:].tobytes(),
        )
        for tensor in reader.tensors
    )
    return Digests(
        fingerprint=fingerprint(config, tensors),
        tokenizer_sha256=hashlib.sha256(canonical_json(tokenizer)).hexdigest() if tokenizer else None,
        chat_template_sha256=text_sha256(template),
    )


def _safetensors_edges(path: Path) -> Iterator[TensorEdges]:
    with path.open("rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        if header_bytes > MAX_HEADER_BYTES:
            raise ValueError(f"{path.name} has a header of {header_bytes} bytes")
        header = json.loads(file.read(header_bytes))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            edge = min(EDGE_BYTES, stop - start)
            yield TensorEdges(
                name=name,
                dtype=entry["dtype"],
                shape=tuple(entry["shape"]),
                first=_read_at(file, 8 + header_bytes + start, edge),
                last=_read_at(file, 8 + header_bytes + stop - edge, edge),
            )


def _shown(value: Any) -> str:
    """A digest by its first 16 digits, anything else whole."""
    if value is None:
        return "not set"
    text = value if isinstance(value, str) else canonical_json(value).decode()
    return f"{text[:16]}..." if len(text) == 64 else text


def _read_at(file: BinaryIO, offset: int, count: int) -> bytes:
    file.seek(offset)
    data = file.read(count)
    if len(data) != count:
        raise ValueError("a weights file is shorter than its header says")
    return data


def _tokenizer_sha256(folder: Path) -> str | None:
    """Of `tokenizer.json`, or else of all files of an older tokenizer format."""
    present = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if not present:
        return None
    files = present[:1] if present[0].name == "tokenizer.json" else present
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _chat_template(folder: Path) -> str | None:
    """The template's text, from the file of its own or from the tokenizer's configuration."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text()
    config = folder / "tokenizer_config.json"
    template = json.loads(config.read_text()).get("chat_template") if config.is_file() else None
    return template if isinstance(template, str) else None
