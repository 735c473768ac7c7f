"""Kernels compiled ahead of time, without a GPU: what the compiler made of them, for each kind of card."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lynxkv.kernels.triton.entropy import dequantize_entropy_kernel, quantize_entropy_kernel
from lynxkv.kernels.triton.fixed import dequantize_fixed_kernel, quantize_fixed_kernel, quantize_token_kernel
from lynxkv.kernels.triton.launch import EXACT
from lynxkv.kernels.triton.launch_entropy import BLOCK_CHANNELS, BLOCK_TOKENS, BLOCK_TOKENS_REFINING
from lynxkv.kernels.triton.launch_fixed import BLOCK_ELEMENTS
from lynxkv.kernels.triton.planes import pack_kernel
from lynxkv.packing import radix_group

NUM_WARPS = 4


@dataclass(frozen=True, kw_only=True)
class Target:
    """A kind of card and its memory bandwidth in GB/s, by its data sheet."""

    name: str
    card: str
    gb_per_s: float
    gpu: Any


TARGETS = (
    Target(name="sm_80", card="A100 80 GB SXM", gb_per_s=2039, gpu=GPUTarget("cuda", 80, 32)),
    Target(name="sm_90", card="H100 SXM", gb_per_s=3350, gpu=GPUTarget("cuda", 90, 32)),
    Target(name="sm_100", card="B200", gb_per_s=8000, gpu=GPUTarget("cuda", 100, 32)),
    Target(name="gfx942", card="MI300X", gb_per_s=5300, gpu=GPUTarget("hip", "gfx942", 64)),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kernel with its constants, for a bf16 cache of 64 or 128 channels a head and whole pages.

    `arguments` are Triton types by name; `aligned` names those that are multiples of 16, pointers apart, which all are.
    `gathers`: whether it looks values up one by one. `decodes`: whether its arithmetic is what the SPEC fixes.
    `read_bytes` and `written_bytes` are of an element.
    """

    name: str
    kernel: Any
    arguments: dict[str, str]
    aligned: tuple[str, ...]
    constants: dict[str, Any]
    read_bytes: float
    written_bytes: float
    gathers: bool = False
    decodes: bool = True


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What a case became on a target. Spills and local memory are bytes a thread, instructions are as the assembler
    names them; `us_per_mib_elements` is 2^20 elements at the card's bandwidth.
    """

    case: str
    target: str
    card: str
    registers: int
    shared_bytes: int
    spilled_bytes: int
    local_bytes: int
    fused_multiply_adds: int
    loads: tuple[str, ...]
    stores: tuple[str, ...]
    read_bytes: float
    written_bytes: float
    us_per_mib_elements: float


_PLACE = {**dict.fromkeys(("head_stride", "token_stride", "first", "page_stride"), "i32"), "table": "*i64"}
_ENTROPY = {
    **dict.fromkeys(("symbols", "residual"), "*u8"),
    "row_of": "*i64",
    "mean": "*fp32",
    "out": "*i16",
    "found": "*i32",
    "step": "fp32",
    **dict.fromkeys(("tokens", "per_row", "unit_blocks", "channels", "dim"), "i32"),
    **_PLACE,
}
_FIXED = {
    **dict.fromkeys(("codes", "residual", "scales", "offsets"), "*u8"),
    **dict.fromkeys(("book", "scale_table", "offset_table", "page_scales", "page_means"), "*fp32"),
    "out": "*i16",
    "found": "*i32",
    **dict.fromkeys(("tokens", "heads", "dim", "unit_blocks"), "i32"),
    **_PLACE,
}
_CACHE = ("tokens", "per_row", "channels", "dim", "head_stride", "token_stride", "page_stride")
# An 8-bit scale and offset for 32 tokens, an f32 scale and mean for 256.
_PARAMETER_BYTES = 2 / 32 + 8 / 256


def _entropy(radix: int, slots: int = 0) -> Case:
    group, bits = radix_group(radix) if radix > 1 else (1, 0)
    precision = f"full, R = {radix}" if radix > 1 else "anchor"
    return Case(
        name=f"dequantize entropy {precision}{', paged' if slots else ''}",
        kernel=dequantize_entropy_kernel,
        arguments=_ENTROPY,
        aligned=_CACHE,
        constants={
            "SLOTS": slots,
            "RADIX": radix,
            "GROUP": group,
            "BITS": bits,
            "LIMIT": radix**group,
            "KIND": 0,
            "ALIGN": 16,
            "BLOCK_T": BLOCK_TOKENS if radix == 1 else BLOCK_TOKENS_REFINING,
            "BLOCK_D": BLOCK_CHANNELS,
        },
        read_bytes=1 + bits / group / 8,
        written_bytes=2,
    )


def _fixed(low_bits: int, slots: int = 0) -> Case:
    unit = 16
    precision = "full" if low_bits else "anchor"
    return Case(
        name=f"dequantize fixed {precision}, 4 + {low_bits} bits{', paged' if slots else ''}",
        kernel=dequantize_fixed_kernel,
        arguments=_FIXED,
        aligned=_CACHE,
        constants={
            "SLOTS": slots,
            "BITS": 4,
            "LOW_BITS": low_bits,
            "CHUNK": 32,
            "PAGE": 256,
            "SHARED": False,
            "U8": True,
            "OFFSET": True,
            "KIND": 0,
            "ALIGN": unit,
            "BLOCK_T": BLOCK_ELEMENTS // unit,
            "BLOCK_K": unit,
        },
        read_bytes=(4 + low_bits) / 8 + _PARAMETER_BYTES,
        written_bytes=2,
        gathers=True,
    )


CASES = (
    *(_entropy(radix) for radix in (1, 3, 5, 8, 11)),
    *(_fixed(low_bits) for low_bits in (0, 4)),
    *(_entropy(radix, slots=16) for radix in (1, 8)),
    _fixed(4, slots=16),
    Case(
        name="quantize entropy, R = 8",
        kernel=quantize_entropy_kernel,
        arguments={
            "x": "*i16",
            "row_of": "*i64",
            "mean": "*fp32",
            "symbols": "*u8",
            "digits": "*u8",
            "step": "fp32",
            **dict.fromkeys(("tokens", "dim", "head_stride", "token_stride"), "i32"),
        },
        aligned=_CACHE,
        constants={"RADIX": 8, "BF16_BITS": True, "BLOCK_T": BLOCK_TOKENS, "BLOCK_D": BLOCK_CHANNELS},
        read_bytes=2,
        written_bytes=2,
        decodes=False,
    ),
    Case(
        name="quantize fixed, 4 + 4 bits",
        kernel=quantize_fixed_kernel,
        arguments={
            "x": "*i16",
            "codes": "*u8",
            "scales": "*u8",
            "offsets": "*u8",
            "buckets": "*u8",
            "peak": "fp32",
            **dict.fromkeys(("scale_table", "offset_table", "page_scales", "page_means", "edges"), "*fp32"),
            **dict.fromkeys(("tokens", "heads", "dim", "head_stride", "token_stride"), "i32"),
        },
        aligned=_CACHE,
        constants={
            "CHUNK": 32,
            "CHUNKS": 8,
            "PAGE": 256,
            "U8": True,
            "OFFSET": True,
            "BLOCK_N": 8,
            "BLOCK_C": 32,
            "BLOCK_D": 16,
        },
        read_bytes=2,
        written_bytes=1 + _PARAMETER_BYTES,
        gathers=True,
        decodes=False,
    ),
    Case(
        name="quantize fixed, tokens",
        kernel=quantize_token_kernel,
        arguments={
            "x": "*i16",
            "codes": "*u8",
            "scales": "*fp32",
            "offsets": "*fp32",
            "edges": "*fp32",
            "buckets": "*u8",
            "peak": "fp32",
            **dict.fromkeys(("heads", "dim", "head_stride", "token_stride"), "i32"),
        },
        aligned=_CACHE,
        constants={"BF16_BITS": True, "BLOCK_H": 8, "BLOCK_D": 128, "OFFSET": True},
        read_bytes=2,
        written_bytes=1,
        gathers=True,
        decodes=False,
    ),
    Case(
        name="pack, R = 8",
        kernel=pack_kernel,
        arguments={
            "digits": "*u8",
            "packed": "*u8",
            **dict.fromkeys(("rows", "count", "per_row", "unit_blocks"), "i32"),
        },
        aligned=("count", "per_row"),
        constants={
            "SHIFT": 0,
            "BITS": 3,
            "RADIX": 8,
            "GROUP": 1,
            "ALIGN": 16,
            "BLOCK_R": 8,
            "BLOCK_K": 128,
        },
        read_bytes=1,
        written_bytes=3 / 8,
        decodes=False,
    ),
)


def compile_case(case: Case, target: Target) -> Compiled:
    """Compile a kernel for a card that need not be here, and read what came out."""
    names = case.kernel.arg_names
    multiples = [name for name in names if case.arguments.get(name, "").startswith("*") or name in case.aligned]
    source = ASTSource(
        fn=case.kernel,
        signature={name: case.arguments.get(name, "constexpr") for name in names},
        constexprs=case.constants,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in multiples},
    )
    made = triton.compile(source, target=target.gpu, options={**EXACT, "num_warps": NUM_WARPS})
    found = _nvidia(made.asm) if "ptx" in made.asm else _amd(made.asm)
    return Compiled(
        case=case.name,
        target=target.name,
        card=target.card,
        shared_bytes=made.metadata.shared,
        read_bytes=case.read_bytes,
        written_bytes=case.written_bytes,
        us_per_mib_elements=(case.read_bytes + case.written_bytes) * 2**20 / target.gb_per_s / 1e3,
        **found,
    )


def _nvidia(asm: Any) -> dict[str, Any]:
    ptx = asm["ptx"]
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    used = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return {
        "registers": used["REG"],
        "spilled_bytes": used["STACK"],
        "local_bytes": used["LOCAL"],
        "fused_multiply_adds": len(re.findall(r"\bfma\.", ptx)),
        "loads": tuple(sorted(set(re.findall(r"ld\.global\S*", ptx)))),
        "stores": tuple(sorted(set(re.findall(r"st\.global\S*", ptx)))),
    }


def _amd(asm: Any) -> dict[str, Any]:
    text = asm["amdgcn"]

    def number(name: str) -> int:
        return sum(int(value) for value in re.findall(rf"\.{name}:\s+(\d+)", text))

    return {
        "registers": number("vgpr_count"),
        "spilled_bytes": 4 * (number("vgpr_spill_count") + number("sgpr_spill_count")),
        "local_bytes": number("private_segment_fixed_size"),
        "fused_multiply_adds": len(re.findall(r"\bv_(?:pk_)?(?:fma|fmac|mad|mac)_(?:mix_)?f\d", text)),
        "loads": tuple(sorted(set(re.findall(r"(?:global|buffer|flat)_load_\w+", text)))),
        "stores": tuple(sorted(set(re.findall(r"(?:global|buffer|flat)_store_\w+", text)))),
    }
