"""Loading the model that a command's options name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lynxkv.choices import ModelDtype
    from lynxkv.integrations import hf


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """What `--model`, `--model-dtype` and `--device` say."""

    ref: str
    dtype: ModelDtype
    device: str

    def load(self, note: Callable[[str], None]) -> hf.Model:
        """The model; `note` is told what takes its time.

        Raises:
            InputError: there is no such model or device, or it cannot be loaded.
            UnsupportedModelError: its layers do not keep K and V per head.
        """
        import lynxkv

        note(f"loading {self.ref}")
        return lynxkv.load_model(self.ref, dtype=self.dtype, device=self.device, report=note)
