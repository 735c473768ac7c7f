"""The stored form: safetensors shards, the lynxkv document, the segment index (SPEC sections 4 to 7)."""
