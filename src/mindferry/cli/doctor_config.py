"""mindferry doctor config"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from mindferry.cli.console import Result, command
from mindferry.findings import Finding

EXAMPLE = "Example: mindferry doctor config run/run.yaml"


@command("doctor config")
def config(
    path: Path = typer.Argument(..., metavar="RUN.YAML", help="A run.yaml, or the run directory."),
    json_output: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> Result:
    """Audit a run.yaml against the tuning list: what is on, off, or wrong for this hardware and model.

    Names the line to change; changes nothing.
    """
    items, findings = look(path)
    wrong = any(item.state == "wrong" for item in items)
    extra = {"checked": [vars(item) for item in items]}
    return Result("problem" if wrong else "good", findings, extra, table(items))


def look(path: Path) -> tuple[list[Any], list[Finding]]:
    """The audited items of the run.yaml (or run directory) at `path`, and what to say about them."""
    from mindferry.diagnosis.config_audit import audit

    items = audit(path)
    findings = [
        Finding(
            f"config.{item.name.replace(' ', '-')}",
            "problem" if item.state == "wrong" else "info",
            f"{_place(item)}: found {item.found!r}, {item.why}",
            remedy=f"set {item.key}: {_yaml(item.wanted)}",
        )
        for item in items
        if item.state in ("wrong", "off") and item.wanted != ""
    ]
    return items, findings


def table(items: list[Any]) -> str:
    """One line for each item."""
    return "\n".join(f"{item.state:6} {item.name:26} {_place(item)} = {_yaml(item.found)}" for item in items)


def _place(item: Any) -> str:
    return f"line {item.line}: {item.key}" if item.line else item.key


def _yaml(value: Any) -> str:
    words = {"True": "true", "False": "false", "None": "not set"}
    return words.get(str(value), str(value))


def register(app: typer.Typer) -> None:
    app.command("config", epilog=EXAMPLE)(config)
