"""The `lynxkv` command: one file per command, one output sink, one table of errors."""
