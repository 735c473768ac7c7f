"""Where caches live: any fsspec URL, local folders first among them. Reads are ranged, publishing is atomic."""

from lynxkv.store.link import Link
from lynxkv.store.prefix import SUFFIX, ObjectInfo, Store, Url

__all__ = ["SUFFIX", "Link", "ObjectInfo", "Store", "Url"]
