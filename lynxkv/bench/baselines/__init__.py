"""Baselines by name: other people's ways to store a KV cache, measured beside the codecs."""

from __future__ import annotations

from lynxkv.bench.baselines.base import Baseline, BaselineMethod
from lynxkv.bench.baselines.cachegen import CacheGen
from lynxkv.bench.baselines.kivi import Kivi
from lynxkv.bench.baselines.kvquant import KVQuant
from lynxkv.bench.baselines.packages import Hqq, Quanto
from lynxkv.bench.baselines.plain import BytePlanes, LinearSplit
from lynxkv.bench.baselines.sparq import SparQ
from lynxkv.bench.baselines.turboquant import TurboQuant

BASELINES: dict[str, type[Baseline]] = {
    baseline.name: baseline
    for baseline in (LinearSplit, Kivi, KVQuant, TurboQuant, CacheGen, SparQ, BytePlanes, Quanto, Hqq)
}

__all__ = ["BASELINES", "Baseline", "BaselineMethod"]
