"""Imports go one way: the command line is on top, what everybody shares knows nobody."""

from __future__ import annotations

import ast
from pathlib import Path

import mindferry

ROOT = Path(mindferry.__file__).parent
# Programs of their own, which print as the commands do.
TOP = ("cli/", "demo/", "__main__.py")
GROUND = ("errors.py", "findings.py")


def imported(path: Path) -> set[str]:
    """Modules of mindferry that `path` imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.startswith("mindferry.")}


def test_no_room_imports_the_command_line():
    upward = {
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        if not str(path.relative_to(ROOT)).startswith(TOP)
        and any(name.startswith("mindferry.cli") for name in imported(path))
    }
    assert upward == set()


def test_errors_and_findings_import_nothing_of_ours():
    for name in GROUND:
        assert imported(ROOT / name) == set()
