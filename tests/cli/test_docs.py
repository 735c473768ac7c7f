"""Help and documents say what the commands do today."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = [
    "encode", "inspect", "check", "generate", "ls", "rm", "prune", "export",
    "bench batch", "bench codec", "bench decode", "bench fetch", "bench kernels",
]  # fmt: skip


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_cli", ROOT / "docs" / "generate_cli.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_help_in_the_docs_is_current(generator: ModuleType) -> None:
    page = generator.PAGE.read_text("utf-8")
    assert generator.render(page) == page, "run `make docs`"


def test_every_command_is_documented(generator: ModuleType) -> None:
    listed = re.findall(r"^  (\w+)  ", generator.help_text("").partition("Commands:")[2], re.MULTILINE)
    assert sorted(listed) == sorted({command.split()[0] for command in COMMANDS})
    assert sorted(command for command in generator.COMMANDS if command) == sorted(COMMANDS)
    schemas = {path.name.split(".")[0] for path in (ROOT / "docs" / "schemas").iterdir()}
    assert schemas == {*(command.replace(" ", "-") for command in COMMANDS), "error"}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_leads_with_an_example(generator: ModuleType, command: str) -> None:
    text = generator.help_text(command)
    body = text.split("\n\n")[1].strip()
    assert body.startswith(f"Example: lynxkv {command} ")
    assert "--json" in text
    assert "--quiet" in text


@pytest.mark.parametrize("command", ["", "--version", *COMMANDS])
def test_help_loads_nothing_heavy(command: str) -> None:
    arguments = [*command.split(), *(["--help"] if command != "--version" else [])]
    code = f"""
import sys
from lynxkv_cli.main import run
assert run({arguments!r}) == 0
heavy = {{"torch", "numba", "triton", "transformers", "numpy", "rich"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize("command", ["inspect", "check"])
def test_looking_at_a_cache_loads_no_torch(command: str, tmp_path: Path) -> None:
    from lynxkv import encode
    from lynxkv.testing.kv import random_kv

    encode(random_kv(), str(tmp_path / "small.lynx"))
    code = f"""
import sys
from lynxkv_cli.main import run
assert run([{command!r}, {str(tmp_path / "small.lynx")!r}]) == 0
heavy = {{"torch", "numba", "triton", "transformers"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def links() -> list[tuple[Path, str]]:
    """Relative links in all documents."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "format_spec").glob("*.md")]
    found = []
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text("utf-8")):
            if "://" not in target:
                found.append((page, target))
    return found


@pytest.mark.parametrize(("page", "target"), links(), ids=lambda value: str(getattr(value, "name", value)))
def test_links_lead_somewhere(page: Path, target: str) -> None:
    assert (page.parent / target).exists()


def test_the_page_on_structure_names_every_module() -> None:
    text = (ROOT / "docs" / "structure.md").read_text("utf-8")
    library = ROOT / "lynxkv"
    modules = [path.name for path in library.glob("*.py") if not path.name.startswith("_")]
    folders = [f"{path.name}/" for path in library.iterdir() if (path / "__init__.py").exists()]
    assert [name for name in modules + folders if f"`{name}" not in text] == []
    listed = re.findall(r"`([a-z_]+\.py)`", text.partition("## The modules")[2].partition("Beside the library")[0])
    assert [name for name in listed if not (library / name).exists()] == []
