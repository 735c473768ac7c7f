"""The public names, that they come lazily, and that imports point one way."""

from __future__ import annotations

import ast
import builtins
import importlib.metadata
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import lynxkv

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "numba", "triton", "transformers", "rich", "typer"}

NAMES = [
    "KV",
    "BindingError",
    "CacheExistsError",
    "CacheNotFoundError",
    "ChecksumError",
    "ContentError",
    "FetchError",
    "FetchOptions",
    "FormatError",
    "HeaderError",
    "IdentityError",
    "InputError",
    "Link",
    "LynxCache",
    "LynxError",
    "NonFiniteError",
    "Sampling",
    "StoreError",
    "TruncatedError",
    "UnsupportedFormatError",
    "UnsupportedModelError",
    "WriterStoppedError",
    "__version__",
    "calibrate",
    "check",
    "compare",
    "continuation",
    "dequantize",
    "encode",
    "encode_prompt",
    "export",
    "generate",
    "generate_batch",
    "inspect",
    "list_caches",
    "load",
    "load_basis",
    "load_model",
    "open",
    "open_async",
    "prefill",
    "prefill_with_logits",
    "prune",
    "quantize",
    "remove",
    "remove_chain",
]


def loaded_by(code: str) -> set[str]:
    """The heavy modules that a fresh interpreter has loaded after `code`."""
    report = f"{code}\nimport sys\nprint('\\n' + ' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", report], check=True, capture_output=True, text=True)
    return HEAVY & set(done.stdout.splitlines()[-1].split())


def imports_of(path: Path) -> set[str]:
    """Top-level names of all packages that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


def test_the_public_names_are_these() -> None:
    assert sorted([*lynxkv.__all__, "open"]) == sorted(NAMES)


def test_importing_all_names_leaves_those_of_python_alone() -> None:
    assert set(lynxkv.__all__).isdisjoint(dir(builtins))


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(lynxkv, name) is not None
    assert name in dir(lynxkv)


def test_what_type_checkers_see_is_what_is_loaded() -> None:
    tree = ast.parse(Path(lynxkv.__file__).read_text("utf-8"))
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        node.names[0].asname: f"{node.module}.{node.names[0].name}"
        for node in guarded.body
        if isinstance(node, ast.ImportFrom)
    }
    assert {"open" if name == "_open_cache" else name: place for name, place in seen.items()} == lynxkv._LAZY
    assert "open = _open_cache" in map(ast.unparse, guarded.body)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = lynxkv.nothing


def test_importing_lynxkv_loads_nothing_heavy() -> None:
    assert loaded_by("import lynxkv") == set()


@pytest.mark.parametrize("module", ["errors", "layout", "format", "store", "fetch", "report", "planning", "shapes"])
def test_modules_that_need_no_torch_load_none(module: str) -> None:
    assert loaded_by(f"import lynxkv.{module}") == set()


def test_no_module_has_the_name_of_a_function() -> None:
    # Importing `lynxkv.encode` would bind the module to that name and hide the function behind it.
    modules = {path.stem for path in (ROOT / "lynxkv").iterdir()}
    assert modules.isdisjoint(lynxkv._LAZY)


@pytest.mark.parametrize("path", sorted((ROOT / "lynxkv").rglob("*.py")), ids=str)
def test_the_library_knows_nothing_of_the_command_line(path: Path) -> None:
    assert imports_of(path).isdisjoint({"typer", "rich", "click", "lynxkv_cli"})


@pytest.mark.parametrize("path", sorted((ROOT / "cli").rglob("*.py")), ids=str)
def test_the_command_line_uses_typer_by_its_public_names(path: Path) -> None:
    text = path.read_text("utf-8")
    assert "click" not in imports_of(path)
    assert "typer._" not in text
    assert "typer.core" not in text


@pytest.mark.parametrize("module", ["encoder", "decoder", "draft", "fidelity", "models", "runner", "verify"])
def test_the_core_knows_models_by_protocol_alone(module: str) -> None:
    assert "transformers" not in loaded_by(f"import lynxkv.{module}")


def test_a_wheel_installs_two_packages_and_no_cli(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    top = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"lynxkv", "lynxkv_cli"}
    names = zipfile.ZipFile(wheel).namelist()
    assert "lynxkv/py.typed" in names
    assert "lynxkv_cli/py.typed" in names


def test_the_version_is_the_installed_one() -> None:
    try:
        installed = importlib.metadata.version("lynxkv")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("lynxkv is on the path, not installed")
    assert installed == lynxkv.__version__
