"""Every Triton kernel compiles for every card we name, and the artefacts hold what the design asks for."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("under the interpreter nothing is compiled", allow_module_level=True)

from lynxkv.kernels.triton.static import CASES, TARGETS, Case, Target, compile_case


@pytest.mark.parametrize("target", TARGETS, ids=[target.name for target in TARGETS])
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_artefact(case: Case, target: Target) -> None:
    made = compile_case(case, target)
    assert made.spilled_bytes == 0
    assert made.local_bytes == 0
    assert any(_is_vector(name) for name in made.loads) or case.name.startswith("pack")
    assert any(_is_vector(name) for name in made.stores) or case.name.startswith(("pack", "quantize fixed, tokens"))
    if case.decodes:
        assert made.fused_multiply_adds == 0
        # Nothing goes byte by byte. A single 32-bit word is four codes of a thread, or a value that is looked up.
        assert not [name for name in (*made.loads, *made.stores) if _is_narrow(name)]
        assert all(_is_vector(name) for name in made.stores)


def _is_vector(name: str) -> bool:
    """Whether an instruction moves more than one 32-bit word."""
    return ".v" in name or name.endswith(("x2", "x3", "x4"))


def _is_narrow(name: str) -> bool:
    return name.endswith((".b8", ".u8", ".b16", ".u16", "ubyte", "sbyte", "ushort", "sshort", "_byte", "_short"))
