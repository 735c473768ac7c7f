"""Hugging Face transformers: models, live caches and chat templates."""

from lynxkv.checkpoints import load_model
from lynxkv.integrations.hf.batch_cache import BatchCache
from lynxkv.integrations.hf.cache import LynxCache, LynxLayer
from lynxkv.integrations.hf.model import Model, load_checkpoint
from lynxkv.integrations.hf.templates import conversation, open_turn, suffix
from lynxkv.models import prefill

__all__ = [
    "BatchCache",
    "LynxCache",
    "LynxLayer",
    "Model",
    "conversation",
    "load_checkpoint",
    "load_model",
    "open_turn",
    "prefill",
    "suffix",
]
