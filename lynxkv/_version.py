"""The version of the library, the command line and the `writer` field of what they write."""

__version__ = "0.1.0"
