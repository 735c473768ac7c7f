"""Doubles and makers for tests, of lynxkv and of programs that use it."""
