"""Write the test vectors again: `python -m format_spec.generate_vectors [FOLDER]`.

Each `valid/NAME.lynx` has a `NAME.json` beside it with the digests of what it decodes to, each `invalid/NAME.lynx`
one that says how it must be refused. The bytes depend on numpy's arithmetic only, not on any compressor.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from format_spec.generator.invalid import invalid
from format_spec.generator.valid import valid
from format_spec.generator.writer import Document, Files

VECTORS = Path(__file__).parent / "vectors"


def summary(values: npt.NDArray[Any]) -> Document:
    """SHA-256 of a decoded tensor's little-endian bytes, and its first 16 bytes in hexadecimal."""
    data = np.ascontiguousarray(values, values.dtype.newbyteorder("<")).tobytes()
    return {"sha256": hashlib.sha256(data).hexdigest(), "first": data[:16].hex()}


def build() -> Files:
    """All files of `vectors/`, by path."""
    files: Files = {}

    def add(name: str, cache: Files, expected: Document) -> None:
        for file, data in cache.items():
            beside = file.startswith("../")
            files[f"{name.split('/')[0]}/{file[3:]}" if beside else f"{name}.lynx/{file}"] = data
        files[f"{name}.json"] = (json.dumps(expected, indent=1) + "\n").encode()

    for name, draft, cache in valid():
        tensors: Document = {}
        for key, values in draft.expected.items():
            tensors[key] = {"shape": list(values["full"].shape)}
            tensors[key] |= {precision: summary(array) for precision, array in values.items()}
        add(f"valid/{name}", cache, {"dtype": draft.document["dtype"], "tensors": tensors})
    for vector in invalid():
        expected: Document = {"kind": vector.kind, "precision": vector.precision}
        expected |= {"clause": vector.clause, "why": vector.why}
        flags: Document = {"unread": vector.unread, "decoded": vector.decoded}
        expected |= {flag: True for flag, value in flags.items() if value}
        add(f"invalid/{vector.name}", vector.files, expected)
        for name, cache in vector.beside.items():
            files.update({f"invalid/{name}/{file}": data for file, data in cache.items()})
    return files


def main() -> None:
    """Replace the vectors in the given folder."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else VECTORS
    files = build()
    for path in [*folder.glob("*/*.lynx/*"), *folder.glob("*/*.json"), *folder.glob("*/basis-*")]:
        if path.relative_to(folder).as_posix() not in files:
            path.unlink()
            if path.parent.suffix == ".lynx" and not any(path.parent.iterdir()):
                path.parent.rmdir()
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    print(f"{len(files)} files, {sum(map(len, files.values()))} bytes in {folder}")


if __name__ == "__main__":
    main()
