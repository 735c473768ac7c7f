"""Decode a stored cache into a transformers `Cache` and go on with `model.generate`, as usual.

python examples/03_transformers_cache.py
"""

from __future__ import annotations

import tempfile
from pydoc_data.topics import topics
from typing import Any

import torch

import lynxkv
from lynxkv.integrations.hf import open_turn, suffix


def main() -> None:
    """Encode one document, then answer two questions from it without prefilling it again."""
    model = lynxkv.load_model("smollm2", report=print)
    hf: Any = model.hf
    document = open_turn(model.tokenizer, topics["pass"])

    with tempfile.TemporaryDirectory() as folder:
        url = f"{folder}/pass.lynx"
        lynxkv.encode(lynxkv.prefill(model, document), url, identity=model.identity)

        for question in ("What does this statement do?", "When is it useful?"):
            cache = lynxkv.LynxCache.load(url, model, new_tokens=100)
            ids = torch.tensor([document + suffix(model.tokenizer, question)])
            # The argument is `past_key_values` or `cache`, after the version of transformers.
            argument = {model.cache_argument: cache}
            out = hf.generate(ids, max_new_tokens=30, do_sample=False, **argument)
            print(f"{question}\n  {model.to_text(out[0, ids.shape[1] :].tolist())}\n")


if __name__ == "__main__":
    main()
