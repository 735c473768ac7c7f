"""zstd frames with their size known and bounded (SPEC 5.1 rule 3)."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt
import zstandard

from lynxkv.errors import ContentError
from lynxkv.format.limits import MAX_ZSTD_WINDOW_BYTES

U8 = npt.NDArray[np.uint8]

# Entropy-coded symbols hardly repeat: what zstd takes for matches is chance, larger and slower to decode. Level 1 with
# a small table and long matches finds the fewest of them; runs and repeated rows, where there are some, it still finds.
_PARAMETERS = zstandard.ZstdCompressionParameters(
    compression_level=1, hash_log=10, min_match=7, target_length=0, write_content_size=True
)
_BLOCK_BYTES = 32 << 10
_local = threading.local()


def compress(raw: U8, row_bytes: int | None = None) -> bytes:
    """One zstd frame with its content size.

    Args:
        row_bytes: length of rows that differ in their statistics. The frame's blocks, each of which has a Huffman
            table of its own, then end where rows do, after about 32 KiB rather than the usual 128: finer than that
            the tables cost more than they save.
    """
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
    block_bytes = max(1, _BLOCK_BYTES // row_bytes) * row_bytes if row_bytes else raw.size
    if block_bytes >= raw.size:
        frame: bytes = _local.compressor.compress(raw)
        return frame
    writer = _local.compressor.compressobj(size=raw.size)
    parts = []
    for start in range(0, raw.size, block_bytes):
        parts += [writer.compress(raw[start : start + block_bytes]), writer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)]
    return b"".join([*parts, writer.flush()])


def decompress(frame: bytes | memoryview, raw_bytes: int, *, where: str) -> U8:
    """The content of a checked frame.

    Raises:
        ContentError: not one frame of exactly `raw_bytes` bytes within the window limit.
    """
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW_BYTES)
    try:
        parameters = zstandard.get_frame_parameters(frame)
        if parameters.content_size != raw_bytes or parameters.dict_id or parameters.window_size > MAX_ZSTD_WINDOW_BYTES:
            raise ContentError(f"{where}: the zstd frame does not state {raw_bytes} bytes within an 8 MiB window")
        raw = _local.decompressor.decompress(frame, max_output_size=raw_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ContentError(f"{where}: not a zstd frame: {error}") from error
    if len(raw) != raw_bytes:
        raise ContentError(f"{where}: the zstd frame holds {len(raw)} bytes, not {raw_bytes}")
    return np.frombuffer(raw, np.uint8)
