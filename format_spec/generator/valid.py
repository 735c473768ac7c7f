"""Caches that every reader must read: each exercises a clause of the SPEC at its boundary."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from format_spec.generator.bases import Basis
from format_spec.generator.caches import cache, coding, digest, latent, layer, parent_of
from format_spec.generator.formulas import Formulas, f32
from format_spec.generator.writer import CacheDraft, Document, Files, Hooks, sha256, write, zstd_frame


def valid() -> Iterator[tuple[str, CacheDraft, Files]]:
    """Name, draft and files of each vector."""
    for name, draft in drafts():
        yield name, draft, write(draft)
    yield generous_document()
    yield from chain()


def chain() -> Iterator[tuple[str, CacheDraft, Files]]:
    """SPEC 9.4: three caches as one, of different codings, the third going on before the second ends."""
    codings = [coding("entropy", sink_tokens=4, exact=True), coding("fixed", sink_tokens=4), coding("raw")]
    parts = [(0, 200), (200, 300), (280, 530)]
    spans: list[tuple[str, Files, int]] = []
    decoded: dict[str, dict[str, Any]] = {}
    for number, (start, stop) in enumerate(parts):
        name = f"chain-{number}"
        parent = parent_of(spans, precision=("full", "computed")[number % 2]) if spans else None
        part_of = {"name": "chain-2.lynx", "stop": 530} if number == 0 else None
        draft = cache([codings[number]], start=start, stop=stop, parent=parent, part_of=part_of)
        for key, values in draft.expected.items():
            before = decoded.get(key, {precision: array[:, :0] for precision, array in values.items()})
            decoded[key] = {
                precision: np.concatenate([before[precision][:, :start], array], axis=1)
                for precision, array in values.items()
            }
        draft.expected = dict(decoded)
        files = write(draft)
        yield name, draft, files
        spans.append((f"{name}.lynx", files, [*parts[1:], (stop, stop)][number][0]))


def drafts() -> Iterator[tuple[str, CacheDraft]]:
    """The caches that are written as they are."""
    # SPEC 11.
    yield "entropy-small", cache([coding("entropy", segment_tokens=128, sink_tokens=4)], stop=70)
    for radix in (1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 16, 17, 32):
        yield f"entropy-radix-{radix}", cache([coding("entropy", radix=radix)], [latent(1, 4)], stop=13)
    yield "entropy-segments", cache([coding("entropy", segment_tokens=16, sink_tokens=1)], stop=70)
    yield "entropy-escapes", escapes()
    yield "entropy-compressed", compressed()
    yield (
        "entropy-compressed-by-zstd",
        cache([coding("entropy", segment_tokens=128)], stop=48, formulas=Formulas(q=skewed), compress=by_zstd),
    )
    yield "entropy-extremes", extremes("bf16")
    yield "entropy-extremes-fp16", extremes("fp16")
    # 3 * fl(1/3) rounds to 1: the sum is 0 unless multiplication and addition are fused.
    yield (
        "entropy-no-fused-multiply-add",
        cache(
            [coding("entropy", radix=2)],
            stop=6,
            formulas=Formulas(
                q=lambda y, t, z: 3 * (1 - 2 * (y % 2)),
                digit=lambda y, t, z, radix: y % 2,
                mean=lambda x, z: 1 - 2 * (x % 2),
                steps=lambda z, radix: (1 / 3, 1 / 11),
            ),
        ),
    )
    yield "single-token", cache([coding("entropy")], stop=1)
    yield "all-sinks-entropy", cache([coding("entropy", sink_tokens=4)], stop=3)
    yield "all-sinks-fixed", cache([coding("fixed", sink_tokens=3)], stop=3)
    yield "start-inside-sinks", cache([coding("entropy", sink_tokens=4)], start=3, stop=9)
    yield "start-after-sinks", cache([coding("fixed", sink_tokens=4)], start=300, stop=560, layers=[latent(1, 2)])
    yield from fixed()
    for dtype in ("bf16", "fp16", "fp32"):
        # 7 tokens of 15 channels are no multiple of 64 bytes: segments follow each other without gap.
        raw = coding("raw", segment_tokens=7)
        yield f"raw-{dtype}", cache([raw], [layer(3, 5)], stop=16, dtype=dtype)
    yield "mixed-layers", mixed()
    yield "token-ids-not-stored", cache([coding("entropy")], stop=5, stored=False)
    yield "token-ids-unknown", cache([coding("entropy", segment_tokens=300)], [latent(1, 1)], stop=260, known=False)
    yield "logits-of-one-token", cache([coding("raw")], [latent(1, 1)], stop=1, logits=1)
    yield "logits-between-codebooks-and-layers", cache([coding("fixed")], [latent(1, 4)], stop=3, logits=100)
    yield from exact()
    yield from components()
    long = {"adapter": "some-lora", "salt_sha256": digest(3)}
    few = [layer(1, 1)]
    yield "prefix-one-block", cache([coding("entropy", segment_tokens=256)], few, stop=256)
    yield "prefix-two-blocks", cache([coding("entropy", segment_tokens=300)], few, stop=767, identity=long)
    unknown: Document = {"fingerprint": None, "stored": False}
    yield (
        "prefix-ids-not-stored",
        cache([coding("entropy", segment_tokens=512)], few, stop=300, identity=unknown, stored=False),
    )


def fixed() -> Iterator[tuple[str, CacheDraft]]:
    """SPEC 8.3: splits, pages, groups, chunk types, odd head dims, partial pages and chunks."""
    shapes: dict[str, tuple[Document, tuple[int, int], int, str]] = {
        "fixed-3-5": ({}, (2, 8), 70, "bf16"),
        "fixed-4-4-token": ({"group": "token", "chunk_dtype": "f32", "page_tokens": 0}, (2, 16), 32, "fp16"),
        "fixed-5-3-no-offset": ({"offset": False}, (1, 12), 21, "bf16"),
        "fixed-6-2-no-pages": ({"page_tokens": 0, "segment_tokens": 12}, (2, 5), 27, "bf16"),
        "fixed-8-0": ({"chunk_dtype": "f32"}, (1, 8), 17, "fp16"),
        "fixed-4-0-token": ({"group": "token", "offset": False}, (2, 8), 18, "bf16"),
        "fixed-7-1": ({"chunk_tokens": 1, "page_tokens": 5, "segment_tokens": 10}, (1, 3), 23, "fp16"),
        "fixed-1-1": ({"chunk_dtype": "f32", "offset": False, "page_tokens": 0}, (3, 1), 9, "bf16"),
        "fixed-2-6-head-dim-80": ({"chunk_tokens": 16, "group": "token"}, (1, 80), 20, "bf16"),
        "fixed-3-0-one-chunk": ({"chunk_tokens": 64, "page_tokens": 64}, (2, 9), 64, "fp16"),
    }
    for name, (fields, shape, stop, dtype) in shapes.items():
        bits = {"anchor_bits": int(name[6]), "residual_bits": int(name[8])}
        yield name, cache([coding("fixed", **bits, **fields)], [latent(*shape)], stop=stop, dtype=dtype)
    for dtype in ("bf16", "fp16"):
        yield f"fixed-rounding-{dtype}", rounding(dtype, pages=False)
        yield f"fixed-overflow-{dtype}", rounding(dtype, pages=True)
        yield f"exact-edges-{dtype}", rounding(dtype, pages=False, exact=True, stop=1)
    # V * scale is -0 and there is no offset: the sum with +0 is +0, with and without pages whose mean is -0.
    for name, pages in (("fixed-zeros", 0), ("fixed-zeros-pages", 4)):
        own = coding("fixed", anchor_bits=2, residual_bits=1, chunk_dtype="f32", offset=False, page_tokens=pages)
        formulas = Formulas(
            book=lambda i, size: i - size // 2,
            chunk_scale=lambda x, c: -1.0,
            page_mean=lambda x, p: np.where(x % 2, -0.0, 0.0),
            page_scale=lambda x, p: np.where(x % 3, -2.0, 2.0),
        )
        yield name, cache([own], stop=6, formulas=formulas)


def components() -> Iterator[tuple[str, CacheDraft]]:
    """SPEC 8.8: blocks, ropes of part of a head, positions across a multiple of 64, sums beyond 2^24, exact arrays."""
    own = coding("entropy", segment_tokens=16, sink_tokens=2, exact=True)
    yield "components", cache([own], stop=37, basis=Basis(pairs=4))
    yield "components-without-rope", cache([coding("entropy", radix=3)], [layer(3, 5)], stop=9, basis=Basis())
    blocks = Basis(blocks=2, pairs=3)
    yield "components-in-blocks", cache([coding("entropy", sink_tokens=4)], start=60, stop=70, basis=blocks)
    half = coding("entropy", radix=1, segment_tokens=8)
    yield (
        "components-fp16",
        cache([half], [layer(1, 6)], start=120, stop=133, dtype="fp16", basis=Basis(pairs=2, positions=192)),
    )
    sliding = layer(2, 4, kind="sliding", window=5, start=66)
    yield "components-of-a-window", cache([own], [layer(2, 4), sliding], stop=71, basis=Basis(pairs=2))
    large = Formulas(q=lambda y, t, z: np.where((t + y) % 5 == 2, 2**18 - 1 - t - y, (t + y) % 9 - 4))
    wide = Basis(rows=lambda y, c, z: np.where((y + c) % 2, 127, -128 + y), pairs=4)
    yield "components-beyond-24-bits", cache([coding("entropy", radix=32)], stop=6, formulas=large, basis=wide)
    some = cache([coding("entropy"), coding("raw")], [layer(2, 4), layer(2, 4, 1)], stop=5, basis=Basis(pairs=2))
    yield "components-of-some-layers", some


def exact() -> Iterator[tuple[str, CacheDraft]]:
    """SPEC 8.7: both schemes and dtypes, with and without residual codes, segments, odd head dims, every size of z."""
    yield (
        "exact-entropy",
        cache(
            [coding("entropy", exact=True, segment_tokens=16, sink_tokens=2)],
            [layer(2, 5)],
            stop=37,
            logits=11,
        ),
    )
    entropy = coding("entropy", radix=3, exact=True, segment_tokens=8)
    yield "exact-entropy-fp16", cache([entropy], [layer(1, 7)], stop=21, dtype="fp16")
    yield "exact-entropy-radix-1", cache([coding("entropy", radix=1, exact=True)], [layer(3, 3)], stop=6)
    fixed = coding("fixed", exact=True, segment_tokens=16)
    yield "exact-fixed", cache([fixed], [latent(3, 3)], stop=23)
    fixed = coding("fixed", residual_bits=0, anchor_bits=5, chunk_dtype="f32", group="token", exact=True)
    yield "exact-fixed-5-0-fp16", cache([fixed], [layer(2, 5)], stop=19, dtype="fp16")
    yield "exact-single-token", cache([coding("entropy", exact=True)], [layer(1, 3)], stop=1)
    yield "exact-all-sinks", cache([coding("entropy", exact=True, sink_tokens=4)], [layer(1, 4)], stop=3)
    yield "exact-of-some-tensors", exact_of_some()
    for dtype in ("bf16", "fp16"):
        yield f"exact-zeros-{dtype}", exact_zeros(dtype)
        yield f"exact-large-{dtype}", exact_large(dtype)
    yield (
        "exact-compressed",
        cache(
            [coding("entropy", exact=True, radix=2, segment_tokens=24)],
            [layer(2, 4)],
            stop=70,
            formulas=Formulas(correction=lambda x, t, z: x // 3 + 300 * (t % 9 == 0)),
            compress=exact_frames,
        ),
    )


def exact_of_some() -> CacheDraft:
    """Exact keys beside values that are not, exact values alone, an exact latent with sinks; no two alike."""
    codings = [
        coding("entropy", exact=True, segment_tokens=8),
        coding("entropy", segment_tokens=8, sink_tokens=3),
        coding("raw"),
        coding("fixed", exact=True, anchor_bits=3, residual_bits=0, page_tokens=0, segment_tokens=12, sink_tokens=1),
        coding("entropy", radix=1),
    ]

    def pair(k: int, v: int, **fields: Any) -> Document:
        tensors = {"k": {"heads": 1, "head_dim": 4, "coding": k}, "v": {"heads": 2, "head_dim": 3, "coding": v}}
        return layer(**fields, tensors=tensors)

    layers = [pair(0, 1), pair(2, 3), pair(4, 0, kind="sliding", window=9, start=11), latent(1, 5, 3), pair(1, 2)]
    return cache(codings, layers, stop=20)


def exact_zeros(dtype: str) -> CacheDraft:
    """Full values of both zeros, led to the other zero, to the numbers beside them, and left as they are."""
    own = coding("fixed", anchor_bits=2, residual_bits=1, chunk_dtype="f32", page_tokens=0, exact=True)
    formulas = Formulas(
        book=lambda i, size: i - size // 2,
        chunk_scale=lambda x, c: np.where(x % 2, -1.0, 1.0),
        chunk_offset=lambda x, c: -0.0,
        code=lambda x, t, z: 4 + t * (x > 1),
        correction=lambda x, t, z: (t + x) % 5,
    )
    return cache([own], [layer(1, 4)], stop=11, dtype=dtype, formulas=formulas)


def exact_large(dtype: str) -> CacheDraft:
    """Corrections of every size, both ends of i16 among them; half of them wrap around modulo 2^16."""
    ends = np.array([65535, 65534, 65533, 32768, 32767, 32766, 256, 255])
    formulas = Formulas(
        steps=lambda z, radix: (64.0, 64.0 / (2 * radix)),
        correction=lambda x, t, z: np.where(t % 2, ends[(t // 2 + x) % 8], 40503 * t + 9973 * x + z),
    )
    own = coding("entropy", exact=True, segment_tokens=32)
    return cache([own], [layer(2, 3)], stop=33, dtype=dtype, formulas=formulas)


def exact_frames(part: str, number: int, raw: bytes) -> bytes | None:
    """Frames for the first exact segment and the last; the one between stays as it is."""
    if part != "exact" or number == 1:
        return None
    return zstd_frame(raw, size_bytes=4, window_log=12) if number else zstd_frame(raw, size_bytes=8)


def escapes() -> CacheDraft:
    """Escapes in first and last place, at both ends of the range, and where none was needed."""
    ends = np.array([0, 127, -127, 128, -128, 2**18 - 1, 1 - 2**18, 255, -255])
    return cache(
        [coding("entropy", radix=32, segment_tokens=5)],
        [layer(1, 3)],
        stop=13,
        dtype="fp16",
        formulas=Formulas(
            q=lambda y, t, z: ends[(t + 4 * y + z) % 9],
            digit=lambda y, t, z, radix: (31 * t + y) % radix,
            steps=lambda z, radix: (2.0**-9, 2.0**-15),
            escaped=lambda q, y, t: (np.abs(q) > 127) | ((q == 0) & (t % 2 == 0)),
        ),
    )


def compressed() -> CacheDraft:
    """Every form of zstd frame header over raw and run-length blocks, beside uncompressed segments."""

    def compress(part: str, number: int, raw: bytes) -> bytes | None:
        if number == 1:
            return zstd_frame(raw, size_bytes=8)
        if number == 2:
            return zstd_frame(raw, size_bytes=4, window_log=23)
        if number == 3:
            return zstd_frame(raw, size_bytes=2 if len(raw) >= 256 else 1)
        if number == 4:
            return zstd_frame(raw, size_bytes=4, window_log=10)
        return None

    return cache(
        [coding("entropy", segment_tokens=20)],
        stop=100,
        formulas=Formulas(q=lambda y, t, z: (t // 20 + y // 4) * (t % 20 < 12) + 200 * (t == 41) * (y == 3)),
        compress=compress,
    )


def skewed(y: Any, t: Any, z: int) -> Any:
    """Symbols of an uneven distribution, without runs: what an entropy coder is for."""
    mixed = (t * 48271 + y * 16807 + t * y * 2477 + z * 97) % 65537 % 64
    return np.where(mixed < 32, 0, np.where(mixed < 48, 1, np.where(mixed < 56, -1, mixed - 60)))


def by_zstd(part: str, number: int, raw: bytes) -> bytes | None:
    """What a real compressor made of the two anchor segments; the others stay as they are."""
    return REAL_FRAMES[sha256(raw)] if part == "anchor" else None


def extremes(dtype: str) -> CacheDraft:
    """Steps at both ends of f32: products that overflow, subnormal ones, and a mean of -0."""
    steps = [(1e38, 1e37), (2.0**-149, 2.0**-149), (2.0**-140, 2.0**-143), (2.0**-18, 2.0**-25)]
    return cache(
        [coding("entropy", radix=3)],
        [layer(1, 6), layer(1, 6)],
        stop=11,
        dtype=dtype,
        formulas=Formulas(
            steps=lambda z, radix: steps[z],
            mean=lambda x, z: np.array([-0.0, 0.0, 3e38, -3e38, 2.0**-133, -(2.0**-24)])[x],
        ),
    )


# f32 bits around the ties, the subnormals and the largest values of bf16 and fp16.
EDGES = [
    *(0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0x7F7F7FFF, 0x7F7F8000, 0x7F7F0000),
    *(0x00000001, 0x00008000, 0x00008001, 0x00018000, 0x007FFFFF, 0x007F8000, 0x00800000, 0x00000000),
    *(0x38800000, 0x387FFFFF, 0x387FE000, 0x387FF000, 0x33000000, 0x33000001, 0x32FFFFFF, 0x33800000),
    *(0x33C00000, 0x33BFFFFF, 0x34200000, 0x38001000, 0x477FE000, 0x477FEFFF, 0x477FF000, 0x47800000),
    *(0x3F801000, 0x3F803000, 0x3F801001, 0x3F802FFF, 0x387FD000, 0x38802000, 0x38801000, 0x38803000),
]


def rounding(dtype: str, *, pages: bool, exact: bool = False, stop: int = 4) -> CacheDraft:
    """SPEC 8.5 on the values of EDGES; with pages, products and offsets that overflow to infinity and NaN.

    Exact arrays are sorted by every exponent there is, and lead away from each of the values.
    """
    values = np.array([edge | sign for edge in EDGES for sign in (0, 0x80000000)], np.uint32).view(np.float32)
    table = np.concatenate([values, f32(np.arange(256 - values.size) - 88)])
    own = coding(
        "fixed",
        anchor_bits=8,
        residual_bits=0,
        chunk_dtype="f32",
        chunk_tokens=1,
        page_tokens=1 if pages else 0,
        segment_tokens=2 if pages else 64,
        exact=exact,
    )
    return cache(
        [own],
        [latent(2, len(values) // 2 + 8)],
        stop=stop,
        dtype=dtype,
        formulas=Formulas(
            book=lambda i, size: table[i],
            code=lambda x, t, z: x,
            chunk_scale=lambda x, c: np.array([1.0, 2.0, -0.5, 3e38])[c],
            chunk_offset=lambda x, c: np.array([0.0, -0.0, 2.0**-26, -3e38])[c] * np.where(x % 2, 1, -1),
            page_mean=lambda x, p: np.array([0.0, -0.0, 3e38, 1.0])[p],
            page_scale=lambda x, p: np.array([1.0, 0.0, -3e38, 3e38])[p],
            correction=lambda x, t, z: 37 * x % 1024,
        ),
    )


def mixed() -> CacheDraft:
    """Layers and tensors that differ in everything that may differ, V before K in the JSON, a coding unused."""
    codings = [
        coding("entropy", sink_tokens=4, segment_tokens=16),
        coding("raw", segment_tokens=33),
        coding("fixed", codebook="a-1", anchor_bits=3, residual_bits=5),
        coding("fixed", codebook="a-1", anchor_bits=3, residual_bits=5, sink_tokens=2, segment_tokens=32),
        coding("fixed", codebook="unused", anchor_bits=1, residual_bits=0),
        coding("entropy", radix=1),
    ]
    layers = [
        {
            "kind": "full",
            "tensors": {
                "v": {"heads": 1, "head_dim": 6, "coding": 1},
                "k": {"heads": 2, "head_dim": 4, "coding": 0},
            },
        },
        layer(3, 4, 2, kind="sliding", window=16, start=24),
        latent(1, 20, 3),
        layer(1, 2, 5, kind="sliding", window=100),
        layer(1, 2, 0, kind="sliding", window=1, start=39),
    ]
    return cache(codings, layers, stop=40)


def generous_document() -> tuple[str, CacheDraft, Files]:
    """What a reader must ignore or bear: a later minor version, unknown fields and keys, free order, depth 16, long
    strings, escapes.
    """
    draft = cache([coding("entropy")], [layer(1, 4)], stop=3, identity={"adapter": 'Lüchse "\U0001f408"'})
    nested: Any = "level 16 is the list around this"
    for _ in range(15):
        nested = [nested]

    def document(role: str, body: Document) -> None:
        # Level 1 is the document, so 15 lists end at level 16.
        body |= {"unknown": nested, "large": -(2**53) + 1, "float": 1.5e-7}
        if role == "anchor":
            body["version"] = "1.999999"
            body["long"] = "é" * 4096
            body["tokens"]["unknown"] = body["layers"][0]["unknown"] = {"NaN": "Infinity"}

    def entries(role: str, body: Document) -> None:
        body["__metadata__"]["format"] = "pt"
        items = list(body.items())
        body.clear()
        body |= dict(reversed(items))

    def document_text(role: str, text: str) -> str:
        return json.dumps(json.loads(text), ensure_ascii=False, indent=1) + "  "

    def header_text(role: str, text: str) -> str:
        return json.dumps(json.loads(text), ensure_ascii=False)

    hooks = Hooks(document=document, document_text=document_text, entries=entries, header_text=header_text)
    return "document-generous", draft, write(draft, hooks)


# Frames of zstd 1.5.7 by the digest of their content: level 19 for K, level 3 with a checksum for V. Stored, because
# the next version of the compressor may write other bytes.
REAL_FRAMES = {
    "820aca45cfae3aa149ea16e98cb4db0eca45d12247459b17158d05e2a486ddeb": base64.b64decode(
        "KLUv/WAAAvUFALYbIQ3ApdABTabd+P//f1YDGwAcAB0AIkmqqu50FuzszrIzsbOwsfOvEhH8VQn/JQ30qQ/1Ij2QPqlPvdQzwG0GbY"
        "rbrBWWE9e5sYSPEo0ysUSchIz/qx6lM9sGZttLL/HKeMkrvBK8AK8E63LhcrnGPXH5Y/ifSKpWBAWaczdNc3dDUBiwBhYgoAIjZR30"
        "zyi7QBLG0O39pvOlc44Z5NVBbbZJ0o1tHnZ5MfefOZZDhh3HzDckhISO13yp5CM="
    ),
    "b26715ad2b553d6b1e6f400be7e690f838b9f50b52d825c4f411cd6308bd22f5": base64.b64decode(
        "KLUv/WQAAgUHAFIIDgng6VumtAcAACMK1SlBa8ERfTy12AWjxz8zlOjw80drfy07C6gDcc30ZuMFa66YJaks9IN+6kcFXqjAVk3SAb"
        "ACIZOxAxIgVlUtmVQx7LWfAWgXrK/WqtLNhcodIRHIpPi8yOcCPD4wvUkukDwaRYL34C4qg2rHU/qdDzblxhnorDndXjqAtem1l12s"
        "6DXVdHPGsRS0BgexC2PKge1TvFIt9ZalydFLgtViq7GUsdPqsXlybzo0A7HhYKMnEAIYTqmHS7DTctI2mUGf9ZYu1zwVJIK8AE0A8o"
        "CdecPIpvtR7Q=="
    ),
}
