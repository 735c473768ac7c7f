"""Caches by formula for the test vectors: documents, and the arrays of all their tensors. SPEC sections 4 and 6."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from format_spec.generator.bases import Basis, reference
from format_spec.generator.formulas import (
    STORED_DTYPE,
    Compress,
    Formulas,
    Tensor,
    book,
    entropy,
    exact,
    f32,
    fixed,
    over,
    plain_values,
    raw,
    stored_raw,
)
from format_spec.generator.writer import CacheDraft, Document, Draft, Files, typed


@dataclass(kw_only=True)
class ResidualArrays:
    """Arrays of the Residual, of keys (and latents) or of values (SPEC 4.6)."""

    residual: list[Draft] = field(default_factory=list)
    exact: list[Draft] = field(default_factory=list)


def coding(scheme: str, **fields: Any) -> Document:
    """A coding with the scheme's fields, defaults where not given."""
    common = {"scheme": scheme, "segment_tokens": 64, "sink_tokens": 0, "exact": False}
    own: Document = {"raw": {}, "entropy": {"radix": 5}}.get(scheme, {})
    if scheme == "fixed":
        own = {
            "anchor_bits": 4,
            "residual_bits": 4,
            "codebook": "book",
            "chunk_tokens": 4,
            "page_tokens": 16,
            "group": "channel",
            "chunk_dtype": "u8",
            "offset": True,
        }
    return common | own | fields


def layer(heads: int = 2, head_dim: int = 8, use: int = 0, **fields: Any) -> Document:
    """A layer of the document with K and V of one shape; `start` and `stop` are filled in later."""
    spec = {"heads": heads, "head_dim": head_dim, "coding": use}
    return {"kind": "full", "tensors": {"k": dict(spec), "v": dict(spec)}} | fields


def latent(heads: int = 2, head_dim: int = 8, use: int = 0, **fields: Any) -> Document:
    """The same with one `latent` tensor."""
    return layer(**fields, tensors={"latent": {"heads": heads, "head_dim": head_dim, "coding": use}})


def token_ids(start: int, stop: int) -> npt.NDArray[np.uint32]:
    """Ids of the positions [start, stop)."""
    return ((np.arange(start, stop, dtype=np.uint64) * 2654435761 + 12345) % 50_000).astype(np.uint32)


def digest(number: int) -> str:
    """A digest that means nothing."""
    return hashlib.sha256(f"vector {number}".encode()).hexdigest()


IDENTITY: Document = {
    "model_id": "example/model",
    "revision": None,
    "fingerprint": digest(1),
    "tokenizer_sha256": None,
    "chat_template_sha256": None,
    "turn": "open",
    "rope": {"rope_type": "default", "rope_theta": 10000.0},
    "adapter": None,
    "salt_sha256": None,
}


def cache(
    codings: list[Document],
    layers: list[Document] | None = None,
    *,
    stop: int,
    start: int = 0,
    dtype: str = "bf16",
    stored: bool = True,
    known: bool = True,
    logits: int = 0,
    identity: Document | None = None,
    parent: Document | None = None,
    part_of: Document | None = None,
    formulas: Formulas | None = None,
    compress: Compress = stored_raw,
    basis: Basis | None = None,
) -> CacheDraft:
    """A whole cache by formula, with what it decodes to; `logits` is the size of the vocabulary, 0 for none.

    Token ids that are not `known` are not stored either. What a `parent` decodes to is left out.
    """
    layers = [{"start": start, "stop": stop} | one for one in layers or [layer()]]
    ids = token_ids(start, stop)
    document: Document = {
        "version": "1.0",
        "role": "anchor",
        "required": [],
        "dtype": dtype,
        "tokens": {
            "start": start,
            "stop": stop,
            "sha256": hashlib.sha256(ids.astype("<u4").tobytes()).hexdigest() if known else None,
            "stored": stored and known,
        },
        "codec": {"name": "by-formula", "params": {}},
        "codings": codings,
        "layers": layers,
        "residual": None,
        "identity": IDENTITY | (identity or {}),
        "writer": {"tool": "generate_vectors.py", "version": "0.1"},
        "parent": parent,
        "transform": None,
        "logits": {"tokens": logits} if logits else None,
    }
    beside: Files = {}
    if basis is not None:
        stored_basis = basis.file(layers)
        document |= {"transform": reference(stored_basis), "required": ["transform"]}
        beside[document["transform"]["name"]] = stored_basis
    document |= {} if part_of is None else {"part_of": part_of}
    formulas = formulas or Formulas()
    body: list[Draft] = []
    keys, values = ResidualArrays(), ResidualArrays()
    steps: list[tuple[float, float]] = []
    expected: dict[str, dict[str, npt.NDArray[Any]]] = {}
    for number, one in enumerate(layers):
        for name in ("k", "v", "latent"):
            if name not in one["tensors"]:
                continue
            spec = one["tensors"][name]
            heads, head_dim, own = spec["heads"], spec["head_dim"], codings[spec["coding"]]
            tokens = one["stop"] - one["start"]
            sinks = min(max(own["sink_tokens"] - one["start"], 0), tokens)
            tensor = Tensor(
                z=len(steps),
                key=f"layer.{number}.{name}",
                heads=heads,
                head_dim=head_dim,
                coding=own,
                coded=tokens - sinks,
                dtype=dtype,
                formulas=formulas,
                compress=compress,
                first=one["start"] + sinks,
                basis=basis,
            )
            sink = plain_values(dtype, (sinks, heads, head_dim), tensor.z)
            if sinks:
                body.append(typed(f"{tensor.key}.sink", STORED_DTYPE[dtype], sink))
            decoded = {"raw": raw, "fixed": fixed, "entropy": entropy}[own["scheme"]](tensor)
            body += decoded.anchor
            arrays = values if name == "v" else keys
            if decoded.residual:
                arrays.residual.append(decoded.residual)
            at_exact = decoded.at_full
            if own["exact"] and tensor.coded:
                draft, at_exact = exact(tensor, decoded.at_full)
                arrays.exact.append(draft)
            steps.append(decoded.steps)
            shape = (tensor.coded, heads, head_dim)
            by_precision = {"anchor": decoded.at_anchor, "full": decoded.at_full, "exact": at_exact}
            expected[tensor.key] = {
                precision: np.concatenate([sink, coded.reshape(shape)]).transpose(1, 0, 2)
                for precision, coded in by_precision.items()
            }
    head = prefix_digests(document, token_ids(0, stop)) + codebooks(codings, formulas)
    if any(codings[t["coding"]]["scheme"] == "entropy" for one in layers for t in one["tensors"].values()):
        head.append(typed("steps", "F32", np.array(steps, np.float32)))
    if logits:
        head.append(typed("logits", "F32", f32(over(formulas.logit(np.arange(logits)), np.arange(logits)))))
    tail = [typed("token_ids", "U32", ids)] if stored and known else []
    residual = keys.residual + values.residual + keys.exact + values.exact
    return CacheDraft(document=document, anchor=head + body + tail, residual=residual, expected=expected, beside=beside)


def parent_of(spans: list[tuple[str, Files, int]], *, precision: str = "full", known: bool = True) -> Document:
    """SPEC 9.4: what a cache continues; each span by name, files and where it stops."""
    ids = token_ids(0, spans[-1][2]).astype("<u4")
    return {
        "precision": precision,
        "tokens_sha256": hashlib.sha256(ids.tobytes()).hexdigest() if known else None,
        "spans": [{"name": name, "header_sha256": header_sha256(files), "stop": stop} for name, files, stop in spans],
    }


def header_sha256(files: Files) -> str:
    """Of an Anchor's bytes [0, 8 + n)."""
    anchor = files["anchor.safetensors"]
    return hashlib.sha256(anchor[: 8 + int.from_bytes(anchor[:8], "little")]).hexdigest()


def prefix_digests(document: Document, ids: npt.NDArray[np.uint32]) -> list[Draft]:
    """SPEC 9.2, from the ids of all positions from 0 on."""
    blocks = ids.size // 256
    before = document["tokens"]["start"] == 0 or (document["parent"] or {}).get("tokens_sha256") is not None
    if not before or document["tokens"]["sha256"] is None or blocks == 0:
        return []
    identity = document["identity"]
    text = "lynxkv-prefix-1\n"
    text += "\n".join(identity[name] or "" for name in ("fingerprint", "adapter", "salt_sha256"))
    chain = [hashlib.sha256(text.encode()).digest()]
    for block in range(blocks):
        chain.append(hashlib.sha256(chain[-1] + ids[256 * block : 256 * block + 256].astype("<u4").tobytes()).digest())
    return [typed("prefix_sha256", "U8", np.frombuffer(b"".join(chain[1:]), np.uint8).reshape(blocks, 32))]


def codebooks(codings: list[Document], formulas: Formulas) -> list[Draft]:
    """The codebook arrays of all fixed codings (SPEC 4.1, 4.6)."""
    out: dict[str, Draft] = {}
    for own in codings:
        if own["scheme"] != "fixed":
            continue
        tables = {"anchor": book(formulas, own["anchor_bits"])}
        if own["residual_bits"]:
            tables["full"] = book(formulas, own["anchor_bits"] + own["residual_bits"])
        if own["chunk_dtype"] == "u8":
            tables["scale"] = f32(formulas.scale_book(np.arange(256)))
            if own["offset"]:
                tables["offset"] = f32(formulas.offset_book(np.arange(256)))
        for part, table in tables.items():
            name = f"codebook.{own['codebook']}.{part}"
            out.setdefault(name, typed(name, "F32", table))
    return list(out.values())
