"""transformers' quantised caches, by the packages that implement them (`pip install 'lynxkv[baselines]'`)."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lynxkv.bench.baselines.base import Coded, TensorBaseline
from lynxkv.codecs.base import check_range
from lynxkv.errors import InputError
from lynxkv.layout import TensorName


def is_installed(package: str) -> bool:
    """Whether `package`, which may lie in another, can be imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


@dataclass(frozen=True, kw_only=True)
class _Packaged(TensorBaseline):
    """A layer of transformers' cache quantises the whole tensor; its codes are counted with the scales it made.

    `axis` is the package's: what shares a scale.
    """

    package: ClassVar[str]
    requirement: ClassVar[str]
    axes: ClassVar[tuple[int, int]]

    bits: int = 4
    group: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in (2, 4):
            raise InputError(f"bits is {self.bits}", hint="it is 2 or 4")
        check_range("group", self.group, 8, 1024)
        if not is_installed(self.package):
            raise InputError(f"{self.name} needs {self.requirement}", hint="pip install 'lynxkv[baselines]'")

    def code(self, x: Tensor, tensor: TensorName, depth: float) -> Coded:
        axis = self.axes[tensor == "v"]
        layer = self.layer_class()(
            nbits=self.bits, axis_key=self.axes[0], axis_value=self.axes[1], q_group_size=self.group
        )
        # As from a model in bf16, so that scales are what such a cache would hold.
        batch = x.to(torch.bfloat16)[None].contiguous()
        layer.lazy_initialization(batch, batch)
        quantised = layer._quantize(batch, axis=axis)
        full = layer._dequantize(quantised)[0].to(torch.float32)
        return Coded(full=full, bits=x.numel() * self.bits + 8 * self.parameter_bytes(quantised))

    def layer_class(self) -> Any:
        """The class of transformers that quantises a layer."""
        raise NotImplementedError

    def parameter_bytes(self, quantised: Any) -> int:
        """Bytes of all scales and offsets."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Quanto(_Packaged):
    """transformers with optimum-quanto."""

    name: ClassVar[str] = "quanto"
    package: ClassVar[str] = "optimum.quanto"
    requirement: ClassVar[str] = "optimum-quanto"
    axes: ClassVar[tuple[int, int]] = (0, 0)

    def layer_class(self) -> Any:
        """`QuantoQuantizedLayer`."""
        from transformers.cache_utils import QuantoQuantizedLayer

        return QuantoQuantizedLayer

    def parameter_bytes(self, quantised: Any) -> int:
        """Of its scale and shift."""
        return int(quantised._scale.nbytes + quantised._shift.nbytes)


@dataclass(frozen=True, kw_only=True)
class Hqq(_Packaged):
    """transformers with HQQ."""

    name: ClassVar[str] = "hqq"
    package: ClassVar[str] = "hqq"
    requirement: ClassVar[str] = "hqq"
    axes: ClassVar[tuple[int, int]] = (1, 1)

    def layer_class(self) -> Any:
        """`HQQQuantizedLayer`."""
        from transformers.cache_utils import HQQQuantizedLayer

        return HQQQuantizedLayer

    def parameter_bytes(self, quantised: Any) -> int:
        """Of its scale and zero."""
        return int(quantised[1]["scale"].nbytes + quantised[1]["zero"].nbytes)
