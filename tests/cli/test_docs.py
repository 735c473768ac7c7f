"""Help and documents say what the commands do today."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = [
    "encode", "calibrate", "inspect", "check", "generate", "serve", "plan", "ls", "rm", "prune", "export",
    "bench batch", "bench codec", "bench decode", "bench fetch", "bench kernels", "bench tasks",
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


def rows_of_modules() -> dict[str, int]:
    """The modules and folders of the page on structure, each with its row in the table; row 0 is empty."""
    text = (ROOT / "docs" / "structure.md").read_text("utf-8")
    rows = [row.split("|")[1] for row in text.partition("## The modules")[2].split("\n") if row.startswith("|")]
    line = next(number for number, row in enumerate(rows) if not row.strip())
    return {
        name: number - line for number, row in enumerate(rows) for name in re.findall(r"`(\w+)(?:\.py|/)[\w/]*`", row)
    }


def imported(path: Path) -> set[str]:
    """What a module imports when it is loaded: `torch`, `lynxkv.kv` and the like."""
    found: set[str] = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "lynxkv":
            found |= {f"lynxkv.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def test_imports_go_up_the_table_of_modules() -> None:
    rows = rows_of_modules()
    assert len(rows) > 30
    wrong = []
    for path in sorted((ROOT / "lynxkv").rglob("*.py")):
        name = path.relative_to(ROOT / "lynxkv").parts[0].removesuffix(".py")
        if name.startswith("_"):
            continue
        for other in imported(path):
            package, _, rest = other.partition(".")
            module = rest.split(".")[0]
            too_late = package == "lynxkv" and not module.startswith("_") and rows[module] > rows[name]
            if too_late or (package == "torch" and rows[name] < 0):
                wrong.append(f"{path.relative_to(ROOT)} imports {other}")
    assert wrong == []
