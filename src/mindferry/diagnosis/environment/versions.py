"""Which releases of mindformers, MindSpore, Python and CANN go together; the table is knowledge/versions.yaml."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from mindferry.errors import UsageError, nearest


@dataclass(frozen=True)
class Release:
    """A release of mindformers and what it goes with.

    Attributes:
        mindspore: versions it supports, the preferred first.
        python: Pythons its documentation or classifiers name.
        pypi: it can be had with pip.
        needs: further packages it depends on.
        source: where the row is from.
    """

    mindformers: str
    mindspore: tuple[str, ...]
    cann: str
    driver: str | None
    python: tuple[str, ...]
    pypi: bool
    gpt2: bool
    stable: bool
    needs: tuple[str, ...]
    source: str


@dataclass(frozen=True)
class Undeclared:
    """A requirement that a wheel does not state."""

    package: str
    versions: str
    needs: str
    why: str
    only_for: str = ""


@cache
def _table() -> dict[str, Any]:
    from ruamel.yaml import YAML

    text = resources.files("mindferry.diagnosis").joinpath("knowledge/versions.yaml").read_text("utf-8")
    loaded: dict[str, Any] = YAML(typ="safe", pure=True).load(text)
    return loaded


@cache
def releases() -> tuple[Release, ...]:
    """All known releases, oldest first."""
    return tuple(
        Release(
            mindformers=str(row["mindformers"]),
            mindspore=tuple(str(item) for item in row["mindspore"]),
            cann=str(row["cann"]),
            driver=row["driver"] and str(row["driver"]),
            python=tuple(row["python"]),
            pypi=row["pypi"],
            gpt2=row["gpt2"],
            stable=row["stable"],
            needs=tuple(row.get("needs", ())),
            source=row["from"],
        )
        for row in _table()["releases"]
    )


@cache
def undeclared() -> tuple[Undeclared, ...]:
    """Requirements that wheels do not state."""
    return tuple(Undeclared(**row) for row in _table()["undeclared"])


def release(version: str) -> Release | None:
    """The row of a mindformers version; a post or patch release takes the row it stems from."""
    rows = {row.mindformers: row for row in releases()}
    return rows.get(version) or rows.get(base(version))


def base(version: str) -> str:
    """'2.7.1.post1' -> '2.7.1'."""
    try:
        return Version(version).base_version
    except InvalidVersion:
        return version


def same(one: str, other: str) -> bool:
    """Versions that differ in nothing but a post or local part (a release candidate is another release)."""
    try:
        a, b = Version(one), Version(other)
    except InvalidVersion:
        return one == other
    return (a.release, a.pre) == (b.release, b.pre)


def fits(mindformers: str, mindspore: str) -> bool | None:
    """Whether the two go together; None when the table does not know this mindformers."""
    row = release(mindformers)
    return None if row is None else any(same(mindspore, wanted) for wanted in row.mindspore)


def partners(mindspore: str) -> list[Release]:
    """The mindformers releases that support a MindSpore version, newest first."""
    return [row for row in reversed(releases()) if any(same(mindspore, item) for item in row.mindspore)]


def satisfies(version: str, specifier: str) -> bool:
    """`version` lies in `specifier` ("<2", "~=2.9.0"); pre-releases count by their number."""
    try:
        return SpecifierSet(specifier).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return True


def parse_target(text: str) -> str:
    """The version in "mindformers==X" or "X".

    Raises:
        UsageError: another package, another operator, or a version that the table does not know.
    """
    match = re.fullmatch(r"(?:mindformers\s*==\s*)?v?(\d[\w.+-]{0,40})", text.strip())
    if match is None:
        raise UsageError(
            f"--for: found {text!r}, expected mindformers==VERSION", remedy="for example mindformers==1.9.0"
        )
    if release(match.group(1)) is None:
        known = [row.mindformers for row in releases()]
        close = nearest(match.group(1), known) or known[-3:]
        raise UsageError(
            f"--for: mindformers {match.group(1)} is not in the table",
            remedy=f"nearest: {', '.join(close)}; all: {', '.join(known)}",
            id="env.unknown-release",
        )
    return match.group(1)


def obstacles(row: Release, python: str) -> list[str]:
    """Why pip cannot install this release and its MindSpore on Python `python` ("3.11"); empty when it can."""
    found = []
    missing = set(_table()["not_on_pypi"])
    wheels: Mapping[str, list[str]] = {str(k): v for k, v in _table()["mindspore_wheels"].items()}
    if not row.pypi:
        found.append(f"mindformers {row.mindformers} is not on PyPI")
    pythons = next((wheels[version] for version in row.mindspore if version in wheels), None)
    if pythons is None:
        found.append(f"mindspore {row.mindspore[0]} is not on PyPI (mindspore.cn has its wheels)")
    elif python not in pythons:
        found.append(f"mindspore {row.mindspore[0]} has wheels for Python {', '.join(pythons)} only")
    found += [f"{need} is not on PyPI" for need in row.needs if re.split(r"[~=<>]", need)[0] in missing]
    return found


def pip_line(row: Release, graph_kernel: bool = True) -> str:
    """The command that installs the release with its MindSpore and what both leave unsaid."""
    parts = [f"mindformers=={row.mindformers}", f"mindspore=={row.mindspore[0]}"]
    for rule in undeclared():
        if (not rule.only_for or graph_kernel) and satisfies(row.mindspore[0], rule.versions):
            parts.append(rule.needs)
    return "pip install " + " ".join(f'"{part}"' if re.search(r"[<>]", part) else part for part in parts)


def best(python: str) -> Release | None:
    """The newest release that pip can install on this Python."""
    return next((row for row in reversed(releases()) if row.stable and not obstacles(row, python)), None)
