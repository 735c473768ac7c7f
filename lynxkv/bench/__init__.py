"""Measurements that can be run again: `lynxkv bench`."""
