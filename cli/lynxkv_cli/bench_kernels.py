"""`lynxkv bench kernels`: how fast they are here, or what compilers for GPUs make of them."""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lynxkv.errors import InputError
from lynxkv_cli._errors import UsageProblem
from lynxkv_cli._options import Json, Quiet
from lynxkv_cli._output import Output
from lynxkv_cli._tables import table

if TYPE_CHECKING:
    from lynxkv.bench.kernels import KernelRow

HELP = """Example: lynxkv bench kernels --mib 64

Measure quantising, decoding and refining beside a plain copy of the same bytes.

Rates count bytes of 16-bit tensors: those read when quantising, those written when decoding. All operations
take turns, on as many threads as torch has; shown are the median over the repeats and, in brackets, the
extremes. gb_per_core_s counts processor time of all threads instead, which tells more on a busy machine. The
reference is measured on a sixteenth of the data. Where there is a GPU, the Triton kernels run on it, beside a
copy within its memory.

Encoding quantises segments while others are compressed; beside it are these parts alone, on one thread. Fetching
and decoding is all of loading: from a store in memory, with digests, zstd and the kernels.

With --static nothing is run: the Triton kernels are compiled for four kinds of GPU, and the table says what
came out, and how long 2^20 elements take if memory bandwidth is all that counts.
"""


def kernels(
    shapes: Annotated[
        list[str] | None,
        typer.Option("--shape", metavar="HxD", help="KV heads and head dim, 3x64 and 8x128 by default; repeatable."),
    ] = None,
    codecs: Annotated[
        list[str] | None,
        typer.Option("--codec", metavar="NAME", help="Measure this one; default, alg1 and int4 by default."),
    ] = None,
    backends: Annotated[
        list[str] | None,
        typer.Option("--backend", metavar="NAME", help="Measure this one; cpu and reference by default."),
    ] = None,
    mib: Annotated[int, typer.Option(metavar="N", min=1, help="MiB of bf16 tensors.")] = 256,
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="Times that everything is measured.")] = 5,
    static: Annotated[bool, typer.Option("--static", help="Compile the Triton kernels, run nothing.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure the kernels."""
    output = Output.of(as_json=as_json, quiet=quiet)
    if static:
        if find_spec("triton") is None:
            raise InputError("triton is not installed", hint="it comes for Linux: pip install triton")
        from lynxkv.kernels.triton.static import CASES, TARGETS, compile_case

        with output.progress() as bars:
            compiled = []
            for done, case in enumerate(CASES):
                bars("compile", done, len(CASES))
                compiled += [compile_case(case, target) for target in TARGETS]
            bars("compile", len(CASES), len(CASES))
        output.result({"compiled": [asdict(row) for row in compiled]})
        output.data(table(STATIC, compiled, left=2).rstrip())
        return
    import torch

    from lynxkv.bench.kernels import BACKENDS, CODECS, SHAPES, bench_kernels

    with output.progress() as bars:
        rows = bench_kernels(
            shapes=[_shape(text) for text in shapes] if shapes else SHAPES,
            codecs=codecs or CODECS,
            backends=backends or BACKENDS,
            data_bytes=mib << 20,
            repeats=repeats,
            progress=lambda done, total: bars("measure", done, total),
        )
    about = {"machine": platform.machine(), "threads": torch.get_num_threads(), "repeats": repeats}
    output.result({**about, "rows": [asdict(row) for row in rows]})
    output.note(f"{about['machine']}, {about['threads']} threads, {repeats} repeats")
    for sentence in _overlap(rows):
        output.note(sentence)
    output.data(table(COLUMNS, rows, left=5).rstrip())


def _shape(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,3})", text)
    if not found:
        raise UsageProblem(f"{text!r} is not a shape", hint="write heads and head dim like 8x128")
    return int(found[1]), int(found[2])


def _overlap(rows: Sequence[KernelRow]) -> list[str]:
    """A sentence a shape and codec."""
    from lynxkv.bench.kernels import larger_part

    said = []
    for key, own in groupby(rows, key=lambda row: (row.heads, row.head_dim, row.codec)):
        share = larger_part(list(own))
        if share is not None:
            said.append(
                f"{key[0]}x{key[1]} {key[2]}: encoding takes {share:.2f} of the time of its larger part on one thread"
            )
    return said


COLUMNS: dict[str, Any] = {
    "shape": lambda row: f"{row.heads}x{row.head_dim}",
    "codec": lambda row: row.codec,
    "device": lambda row: row.device,
    "backend": lambda row: row.backend,
    "op": lambda row: row.op,
    "gb_per_s": lambda row: f"{row.gb_per_s:.2f} [{row.low:.2f}, {row.high:.2f}]",
    "copy_gb_per_s": lambda row: f"{row.copy_gb_per_s:.2f}",
    "ratio_to_copy": lambda row: f"{row.ratio_to_copy:.3f}",
    "gb_per_core_s": lambda row: f"{row.gb_per_core_s:.2f}" if row.gb_per_core_s is not None else "",
}
STATIC: dict[str, Any] = {
    "kernel": lambda row: row.case,
    "target": lambda row: row.target,
    "registers": lambda row: str(row.registers),
    "shared bytes": lambda row: str(row.shared_bytes),
    "spilled bytes": lambda row: str(row.spilled_bytes),
    "read, bytes": lambda row: f"{row.read_bytes:.2f}",
    "written, bytes": lambda row: f"{row.written_bytes:.2f}",
    "us per 2^20": lambda row: f"{row.us_per_mib_elements:.2f}",
}
