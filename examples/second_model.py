"""Train a small model of another family than SmolLM2's, to see whether what helps one helps the other.

    python examples/second_model.py MODEL_FOLDER
    lynxkv calibrate --model MODEL_FOLDER --tokens 1024
    lynxkv bench codec --model MODEL_FOLDER --tokens 1024

Qwen2's architecture (biases on queries, keys and values, two key-value heads under four), byte-level BPE, contexts of
1,024 tokens, trained on the standard library's sources but for the modules that `lynxkv bench codec` and calibration
read. It hardly learns to write; its keys and values are a trained model's all the same.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

# What codecs are measured and bases are calibrated on, and what else has been used to try codecs.
HELD_OUT = {
    "argparse",
    "statistics",
    "zipfile",
    "tarfile",
    "difflib",
    "ast",
    "inspect",
    "typing",
    "textwrap",
    "heapq",
    "topics",
}
VOCABULARY, CONTEXT, BATCH = 4096, 1024, 4


def sources() -> list[str]:
    """The standard library's modules, tests and what is held out apart."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    unwanted = {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings"}
    return [
        path.read_text(encoding="utf-8", errors="replace")
        for path in sorted(folder.rglob("*.py"))
        if not unwanted & set(path.relative_to(folder).parts) and path.stem not in HELD_OUT
    ]


def tokenizer_of(texts: list[str]) -> Any:
    """A byte-level BPE of these texts."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=VOCABULARY, special_tokens=["<|end|>"], show_progress=False)
    made: Any = PreTrainedTokenizerFast
    return made(tokenizer_object=tokenizer._tokenizer, bos_token="<|end|>", eos_token="<|end|>")


def main() -> None:
    """Train for the time that is given, telling the loss, and save the model and its tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=25.0)
    arguments = parser.parse_args()

    texts = sources()
    tokenizer = tokenizer_of(texts)
    ids = torch.tensor([token for text in texts for token in [*tokenizer(text)["input_ids"], 0]])
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    print(f"{len(ids)} tokens, {sum(p.numel() for p in model.parameters()) / 1e6:.1f} million parameters")

    began, step = time.monotonic(), 0
    while (part := (time.monotonic() - began) / (60 * arguments.minutes)) < 1:
        for group in optimiser.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 40) * (0.1 + 0.9 * (1 + math.cos(math.pi * part)) / 2)
        starts = torch.randint(len(ids) - CONTEXT, (BATCH,))
        batch = torch.stack([ids[start : start + CONTEXT] for start in starts.tolist()])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        if step % 20 == 0:
            print(f"{time.monotonic() - began:5.0f} s, step {step}: loss {loss.item():.3f}", flush=True)
        step += 1
    model.save_pretrained(arguments.folder)
    tokenizer.save_pretrained(arguments.folder)
    print(f"{step} steps, {step * BATCH * CONTEXT / 1e6:.1f} million tokens; saved in {arguments.folder}")


if __name__ == "__main__":
    main()
