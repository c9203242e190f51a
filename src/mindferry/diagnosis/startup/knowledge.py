"""The knowledge base of start-up failures: declarations in knowledge/*.yaml, read once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from mindferry.errors import printable

# Read in this order; within a text the first entry that matches wins, so specific entries stand first.
FILES = ("environment", "configuration", "network", "data", "checkpoint", "parallel", "consequences")
_SHOWN = 120


@dataclass(frozen=True)
class Entry:
    """One known failure.

    Attributes:
        id: stable name, e.g. "operator.flash-attention".
        kind: what is at fault; "version" makes the report name the package versions.
        patterns: any of them, searched in the root exception (type and message) or the error line.
        frames: when set, must be found in the stack's file names and functions too.
        title, cause, remedy: for the person; in the title {name} stands for a named group of the pattern that
            matched, {headline} for the exception itself.
        plain: the title to use when the log does not state a {name} of `title`.
        follows: the article's section or the document this is from.
        any_framework: also true of logs of other frameworks.
        consequence: what other processes report after one failed; never the root when anything else is there.
        sample: a text that this entry must be named for.
    """

    id: str
    kind: str
    patterns: tuple[re.Pattern[str], ...]
    title: str
    cause: str
    remedy: str
    follows: str
    sample: str
    plain: str = ""
    frames: re.Pattern[str] | None = None
    any_framework: bool = False
    consequence: bool = False


@dataclass(frozen=True)
class Match:
    """An entry and the words of the log that filled it in."""

    entry: Entry
    words: dict[str, str]

    @property
    def title(self) -> str:
        """The entry's title with the log's own words in it."""
        title = self._filled(self.entry.title)
        return self._filled(self.entry.plain) if _HOLE.search(title) else title

    @property
    def remedy(self) -> str:
        """The entry's remedy with the log's own words in it."""
        return self._filled(self.entry.remedy)

    def _filled(self, text: str) -> str:
        return _HOLE.sub(lambda hole: self.words.get(hole.group(1)) or hole.group(0), text)


_HOLE = re.compile(r"\{(\w+)\}")


def _entry(raw: dict[str, Any]) -> Entry:
    flags = re.DOTALL
    return Entry(
        id=raw["id"],
        kind=raw["kind"],
        patterns=tuple(re.compile(pattern, flags) for pattern in raw["patterns"]),
        title=raw["title"].strip(),
        cause=raw["cause"].strip(),
        remedy=raw["remedy"].strip(),
        follows=raw["follows"].strip(),
        sample=raw["sample"],
        plain=raw.get("plain", "").strip(),
        frames=re.compile(raw["frames"]) if "frames" in raw else None,
        any_framework=bool(raw.get("any_framework", False)),
        consequence=bool(raw.get("consequence", False)),
    )


@cache
def entries() -> tuple[Entry, ...]:
    """Every entry, in the order of matching."""
    from ruamel.yaml import YAML

    found = []
    for name in FILES:
        text = resources.files("mindferry.diagnosis").joinpath(f"knowledge/{name}.yaml").read_text("utf-8")
        found += [_entry(raw) for raw in YAML(typ="safe", pure=True).load(text)]
    return tuple(found)


Scope = Literal["own", "foreign"]


def match(texts: list[str], headline: str, frames: str = "", scope: Scope = "own") -> Match | None:
    """The first entry that knows one of `texts` (the most telling text first), or None."""
    own = {"headline": printable(headline)[:_SHOWN]}
    for text in texts:
        for entry in entries():
            if scope == "foreign" and not entry.any_framework:
                continue
            if entry.frames is not None and not entry.frames.search(frames):
                continue
            for pattern in entry.patterns:
                found = pattern.search(text)
                if found:
                    words = {
                        name: printable(" ".join(value.split()))[:_SHOWN]
                        for name, value in found.groupdict().items()
                        if value
                    }
                    return Match(entry, own | words)
    return None
