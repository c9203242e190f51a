"""mindferry map"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mindferry.cli.choices import assumed
from mindferry.cli.console import Result, command
from mindferry.errors import printable
from mindferry.findings import Finding

if TYPE_CHECKING:
    from mindferry.sources.mapping import Mapping, Module

EXAMPLE = "Example: mindferry map gpt2/"


@command("map")
def map_source(
    source: Path = typer.Argument(
        ..., metavar="SRC", help="Model to look at: a directory or a checkpoint file."
    ),
    assume: list[str] = typer.Option(
        [],
        "--assume",
        metavar="FIELD=VALUE",
        help="A value the source does not state (activation=gelu_tanh).",
    ),
    json_output: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> Result:
    """Show what would become what, layer by layer, before anything is written.

    Every module of the source and its parameters, the MindSpore Transformers module they go to, the shapes
    before and after, and what needs attention. Reads headers only.
    """
    from mindferry.sources import open_source
    from mindferry.sources.mapping import draw

    picture = draw(open_source(source, assume=assumed(assume), check_tensors=False))
    findings = [Finding("map.attention", "warning", text) for text in picture.attention]
    if picture.problem is not None:
        err = picture.problem
        findings.insert(0, Finding(err.id, "problem", err.message, err.cause, err.remedy))
    return Result(
        verdict="good" if picture.problem is None else "problem",
        findings=findings,
        extra=_json(picture),
        text=_text(picture),
    )


def _json(picture: Mapping) -> dict[str, Any]:
    source = picture.source
    return {
        "source": str(source.path),
        "format": source.format,
        "family": source.family,
        "parameters": source.spec.num_parameters(),
        "model": source.spec.model_dump(),
        "layout": source.rules.geometry.layout.config(),
        "config": [vars(item) for item in source.decisions],
        "modules": [
            {
                "source": module.source,
                "target": module.target,
                "class": module.cls,
                "called": module.called,
                "settings": module.settings,
                "parameters": module.parameters,
            }
            for module in picture.modules
        ],
        "ignored": [{"source": name, "reason": reason} for name, reason in picture.ignored.items()],
    }


def _text(picture: Mapping) -> str:
    source = picture.source
    lines = [
        f"{source.path}: {source.declaration.title if source.declaration else source.family} "
        f"({source.format}), {source.spec.num_parameters():,} parameters"
    ]
    for first, last, module in _grouped(picture.modules):
        called = f" ({module.called})" if module.called else ""
        lines += ["", f"{_span(module.target, first, last)}: {module.cls}{called}"]
        if module.source:
            lines.append(f"  from {_span(module.source, first, last)}")
        shown = "  ".join(f"{key}={_short(value)}" for key, value in module.settings.items())
        lines.append(f"  {shown}")
        for row in module.parameters:
            lines += _parameter(row, module)
    if picture.ignored:
        lines += ["", f"not carried over: {len(picture.ignored)}"]
        reasons: dict[str, list[str]] = {}
        for name, reason in picture.ignored.items():
            reasons.setdefault(reason, []).append(name)
        lines += [f"  {names[0]}{_more(names)}: {reason}" for reason, names in reasons.items()]
    lines += ["", "configuration:"]
    for item in source.decisions:
        lines.append(f"  {_decision(item)}")
    return "\n".join(printable(line) for line in lines)


def _parameter(row: dict[str, Any], module: Module) -> list[str]:
    own = row["target"][len(module.target) + 1 :]
    after = "x".join(map(str, row["target_shape"]))
    if not row["source"]:
        return [f"    {own:<22} {after:<14} {row['transform']}"]
    names = " + ".join(name[len(module.source) + 1 :] or name for name in row["source"])
    before = " + ".join("x".join(map(str, shape)) for shape in row["source_shapes"])
    return [f"    {own:<22} {after:<14} <- {names}  {before}  {row['dtype']}  {row['transform']}"]


def _grouped(modules: list[Module]) -> list[tuple[int, int, Module]]:
    """(first layer, last layer, module) with neighbouring equal layers as one; -1 outside layers."""
    groups: dict[tuple[str, str], tuple[int, int, Module]] = {}
    for module in modules:
        found = re.search(r"\.layers\.([0-9]+)\.", module.target + ".")
        if not found:
            groups[(module.target, "")] = (-1, -1, module)
            continue
        number = int(found.group(1))
        same = str(module.settings) + str(
            [(r["transform"], r["source_shapes"], r["target_shape"], r["dtype"]) for r in module.parameters]
        )
        key = (module.target.replace(f".layers.{number}.", ".layers.{}."), same)
        first = groups[key][0] if key in groups else number
        groups[key] = (first, number, groups[key][2] if key in groups else module)
    return list(groups.values())


def _span(name: str, first: int, last: int) -> str:
    """`decoder.layers.0.mlp` as `decoder.layers.0-11.mlp`."""
    if first < 0 or first == last:
        return name
    return re.sub(rf"(?<=\.){first}(?=\.|$)", f"{first}-{last}", "." + name, count=1)[1:]


def _short(value: Any) -> str:
    return ",".join(f"{k}:{v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _decision(item: Any) -> str:
    left = f"{item.source_key} = {item.source_value!r}" if item.source_key else "(no key)"
    right = f" -> {item.target_key} = {item.target_value!r}" if item.target_key else ""
    return left + right + (f"  [{item.note}]" if item.note else "")


def register(app: typer.Typer) -> None:
    app.command("map", epilog=EXAMPLE)(map_source)
