"""A transformers model as lynxkv sees it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lynxkv.checkpoints import Checkpoint, resolve
from lynxkv.errors import InputError
from lynxkv.identity import EDGE_BYTES, Digests, TensorEdges, fingerprint, text_sha256
from lynxkv.integrations.hf import support
from lynxkv.integrations.hf.batch_cache import BatchCache
from lynxkv.integrations.hf.cache import ROLLBACK_TOKENS, LynxCache
from lynxkv.integrations.hf.quiet import quiet
from lynxkv.layout import Identity, LayerSpec
from lynxkv.models import CHUNK_TOKENS, LayerShape

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Model:
    """A decoder-only model, its tokenizer and its identity. Make one with `load_model` or `Model.wrap`."""

    hf: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    identity: Identity
    shapes: tuple[LayerShape, ...]
    context_tokens: int | None
    eos_token_ids: frozenset[int]
    cache_argument: str = field(default="past_key_values")

    @classmethod
    def wrap(
        cls,
        hf: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        source: str | Checkpoint | None = None,
        model_id: str | None = None,
        adapter: str | None = None,
    ) -> Model:
        """Use a model that is in memory already.

        Args:
            source: what it was loaded from, named as for `load_model`. Its identity is then that of the files, and
                caches fit all who load the same files. None: the identity is that of the weights in memory.
            model_id: overrides the name that `source` gives.
            adapter: name or digest of what was put on the weights of `source`, a LoRA say. Caches belong to the model
                with this adapter alone (SPEC 9.1).

        Raises:
            InputError: there is no such source, or the model carries an adapter that is not in its files and has no
                name here.
            UnsupportedModelError: its layers do not keep K and V per head.
        """
        support.refuse_unsupported(hf.config)
        hf.eval()  # type: ignore[no-untyped-call]
        argument = "cache" if "cache" in inspect.signature(hf.forward).parameters else "past_key_values"
        if adapter is not None and not adapter:
            raise InputError("the adapter's name is empty", hint="give its name or digest, or leave it out")
        if source is not None and adapter is None and getattr(hf, "peft_config", None):
            raise InputError(
                "the model carries an adapter: its caches would pass for those of the model without it",
                hint="name it with adapter=, or leave source= out",
            )
        checkpoint = resolve(source) if isinstance(source, str) else source
        digests = checkpoint.digests if checkpoint else memory_digests(hf, tokenizer)
        return cls(
            hf=hf,
            tokenizer=tokenizer,
            identity=Identity(
                model_id=model_id or (checkpoint.model_id if checkpoint else None),
                revision=checkpoint.revision if checkpoint else None,
                fingerprint=digests.fingerprint,
                tokenizer_sha256=digests.tokenizer_sha256,
                chat_template_sha256=digests.chat_template_sha256,
                turn="open" if tokenizer.chat_template else "none",
                rope=support.rope_identity(hf.config),
                adapter=adapter,
            ),
            shapes=_layer_shapes(hf, argument),
            context_tokens=support.context_tokens(hf.config),
            eos_token_ids=_eos_token_ids(hf, tokenizer),
            cache_argument=argument,
        )

    @property
    def vocab_tokens(self) -> int:
        """Rows of the embedding: every id below is one the model can take."""
        weight: Any = self.hf.get_input_embeddings().weight
        return int(weight.shape[0])

    @property
    def device(self) -> torch.device:
        """Where its logits are."""
        return torch.device(self.hf.device)

    def layer_specs(self) -> tuple[LayerShape, ...]:
        """Kind, window and tensor shapes of each layer, as a forward pass shows them."""
        return self.shapes

    def new_cache(
        self,
        tokens: int,
        new_tokens: int,
        *,
        layers: Sequence[LayerSpec] | None = None,
        rollback_tokens: int = ROLLBACK_TOKENS,
    ) -> LynxCache:
        """See `LynxCache.allocate`."""
        return LynxCache.allocate(self, tokens, new_tokens, layers=layers, rollback_tokens=rollback_tokens)

    @torch.inference_mode()
    def step(self, cache: Any, token_ids: Sequence[int], *, rows: int = 1) -> Tensor:
        """Run `token_ids` after what `cache` holds; logits f32 [rows, V] of the last `rows` positions.

        Long inputs run in chunks of 512 tokens, so that masks and activations stay small.
        """
        start = 0
        while len(token_ids) - start - CHUNK_TOKENS >= max(rows, 1):
            self._forward(cache, token_ids[start : start + CHUNK_TOKENS], 1)
            start += CHUNK_TOKENS
        return _finished(self._forward(cache, token_ids[start:], rows)[0])

    def new_batch_cache(self, stored: Sequence[Sequence[LayerSpec]], new_slots: int) -> BatchCache:
        """See `BatchCache.allocate`."""
        return BatchCache.allocate(self, stored, new_slots)

    @torch.inference_mode()
    def batch_step(self, cache: BatchCache, token_ids: Sequence[Sequence[int]], *, rows: int = 1) -> Tensor:
        """Run each row's tokens after what `cache` holds; logits f32 [B, rows, V] of the last `rows` positions.

        Rows may differ in length, even be empty: they end together, and shorter ones are padded in front. Long inputs
        run in chunks, as those of `step` do.
        """
        longest = max(map(len, token_ids))
        ids = torch.tensor([[0] * (longest - len(row)) + list(row) for row in token_ids], device=self.hf.device)
        lengths = torch.tensor([[len(row)] for row in token_ids], device=self.hf.device)
        present = torch.arange(longest, device=self.hf.device) >= longest - lengths
        start = 0
        while longest - start - CHUNK_TOKENS >= max(rows, 1):
            chunk = slice(start, start + CHUNK_TOKENS)
            self._batch_forward(cache, ids[:, chunk], present[:, chunk], 1)
            start += CHUNK_TOKENS
        return _finished(self._batch_forward(cache, ids[:, start:], present[:, start:], rows))

    def _forward(self, cache: Any, token_ids: Sequence[int], rows: int) -> Tensor:
        ids = torch.tensor([list(token_ids)], device=self.hf.device)
        output = self.hf(ids, use_cache=True, logits_to_keep=rows, **{self.cache_argument: cache})
        logits: Tensor = output.logits[:, -rows:]
        return logits

    def _batch_forward(self, cache: BatchCache, ids: Tensor, present: Tensor, rows: int) -> Tensor:
        positions, masks = cache.step_inputs(present)
        output = self.hf(
            ids,
            position_ids=positions,
            attention_mask=masks,
            use_cache=True,
            logits_to_keep=rows,
            **{self.cache_argument: cache},
        )
        logits: Tensor = output.logits[:, -rows:]
        return logits

    def to_text(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`, special tokens left out."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _finished(logits: Tensor) -> Tensor:
    """Logits in f32, once they are there: whoever takes the time of a step shall not take that of its launch."""
    out = logits.float()
    if out.is_cuda:
        torch.cuda.current_stream(out.device).synchronize()
    return out


def load_checkpoint(
    checkpoint: Checkpoint, *, dtype: str = "float32", device: str = "cpu", adapter: str | None = None
) -> Model:
    """Load a resolved checkpoint without touching the network; `adapter` as for `load_model`.

    Raises:
        InputError: the folder cannot be loaded, its weights are not all that its configuration wants, it has no
            tokenizer, or `dtype` or `device` is unknown.
        UnsupportedModelError: told from the configuration, before weights are read.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype} is unknown", hint=f"use one of {', '.join(DTYPES)}")
    folder = str(checkpoint.folder)
    with quiet():
        try:
            support.refuse_own_code(PretrainedConfig.get_config_dict(folder, local_files_only=True)[0])
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            support.refuse_unsupported(config)
            tokenizer = _load_tokenizer(folder)
            _refuse_too_few_weights(checkpoint.folder, config)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=DTYPES[dtype],
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
            hf, info = loaded
            if info["missing_keys"]:
                raise _incomplete(folder, f"{min(info['missing_keys'])} is missing")
            hf.to(device)
        except InputError:
            raise
        except Exception as error:
            # Damaged configurations and weights make the loaders raise almost anything.
            raise InputError(
                f"cannot load the model in {folder}: {' '.join(str(error).split()) or type(error).__name__}",
                hint="check that the folder is a complete Hugging Face model, and that there is a device of that name",
            ) from error
    return Model.wrap(hf, tokenizer, source=checkpoint, adapter=adapter)


def _refuse_too_few_weights(folder: Path, config: PretrainedConfig) -> None:
    """Refuse weights that are far from what the configuration wants before room is made for them.

    transformers would fill the rest with random values. Quantised weights pack several in an element.
    """
    if getattr(config, "quantization_config", None):
        return
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    wanted = sum(parameter.numel() for parameter in hf.parameters())
    held = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            held += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    if held < 0.9 * wanted:
        raise _incomplete(str(folder), f"they hold {held:,} values, the configuration wants {wanted:,}")


def _incomplete(folder: str, why: str) -> InputError:
    return InputError(
        f"the weights in {folder} are not those of its configuration: {why}",
        hint="download the model again, whole",
    )


def _load_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        # Tokenizer libraries raise bare Exception for files they cannot parse.
        raise InputError(f"{folder} has no tokenizer that loads", hint="add tokenizer.json to the folder") from error
    if not len(tokenizer):
        raise InputError(f"{folder} has no tokenizer that loads", hint="add tokenizer.json to the folder")
    return tokenizer


def memory_digests(hf: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Digests:
    """Digests of a model that has no files: from its configuration and state dict."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return Digests(
        fingerprint=fingerprint(hf.config.to_dict(), map(_edges, hf.state_dict().keys(), hf.state_dict().values())),
        tokenizer_sha256=text_sha256(backend.to_str() if backend is not None else str(sorted(tokenizer.get_vocab()))),
        chat_template_sha256=text_sha256(tokenizer.chat_template or None),
    )


def _edges(name: str, tensor: Tensor) -> TensorEdges:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return TensorEdges(
        name=name,
        dtype=str(tensor.dtype),
        shape=tuple(tensor.shape),
        first=data[:EDGE_BYTES].tobytes(),
        last=data[-EDGE_BYTES:].tobytes(),
    )


@torch.inference_mode()
def _layer_shapes(hf: PreTrainedModel, argument: str) -> tuple[LayerShape, ...]:
    """What two tokens leave in a stock cache: the one statement on shapes that every family makes alike."""
    cache = DynamicCache(config=hf.config)
    ids = torch.tensor([[0, 1]], device=hf.device)
    both = hf(ids, use_cache=True, **{argument: cache}).logits[0, 0].float()
    alone = hf(ids[:, :1], use_cache=False).logits[0, 0].float()
    # Far above rounding in any dtype, far below what seeing another token does.
    if (both - alone).abs().max() > 0.05 * alone.abs().max():
        raise support.refusal(hf.config.model_type, "a token sees later ones, so there is nothing to cache")
    shapes = []
    for number, (layer, window) in enumerate(zip(cache.layers, support.layer_windows(hf.config), strict=True)):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.ndim != 4 or not keys.shape[-2] == values.shape[-2] > 0:
            raise support.refusal(hf.config.model_type, f"layer {number} keeps no K and V per head")
        shapes.append(
            LayerShape(
                kind="full" if window is None else "sliding",
                window=window,
                tensors={"k": (keys.shape[1], keys.shape[3]), "v": (values.shape[1], values.shape[3])},
            )
        )
    return tuple(shapes)


def _eos_token_ids(hf: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """All ids that end a text: of the generation settings, the configuration and the tokenizer."""
    ids: set[int] = set()
    for source in (hf.generation_config, support.text_config(hf.config), tokenizer):
        stated = getattr(source, "eos_token_id", None)
        ids.update(stated if isinstance(stated, list | tuple) else [] if stated is None else [stated])
    return frozenset(ids)
