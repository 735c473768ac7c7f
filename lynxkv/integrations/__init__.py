"""Bridges to model libraries. Nothing else in lynxkv depends on one being installed."""
