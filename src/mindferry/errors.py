"""Errors that say where, what was found, what was expected, and the way out."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable


def printable(text: object) -> str:
    """`text` with control and bidirectional-override characters shown as escapes.

    Tensor names, file names and log lines come from files nobody vouches for; printed raw they could
    move the cursor, recolour the terminal or hide what stands before them.
    """
    return "".join(
        ch
        if ch == "\t" or unicodedata.category(ch) not in ("Cc", "Cf", "Cs", "Zl", "Zp")
        else ch.encode("unicode_escape", "surrogatepass").decode("ascii")
        for ch in str(text)
    )


class MindferryError(Exception):
    """A problem found in what the person gave us. One line, with the way out.

    Args:
        message: where and what, in one line ("run.yaml: key 'x': found 3, expected a float").
        remedy: what to do about it.
        cause: why it is so, where that is not obvious.
        id: short stable name for machines ("config.unknown-key").
        evidence: the raw value or excerpt, where it helps.
    """

    exit_code = 1

    def __init__(
        self, message: str, *, remedy: str = "", cause: str = "", id: str = "error", evidence: str = ""
    ) -> None:
        super().__init__(printable(message))
        self.message = printable(message)
        self.remedy = printable(remedy)
        self.cause = printable(cause)
        self.evidence = printable(evidence)
        self.id = id

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message


class UsageError(MindferryError):
    """Wrong use: arguments, paths or settings that cannot work as given. Exit code 2."""

    exit_code = 2


def nearest(word: str, known: Iterable[str], n: int = 3, cutoff: float = 0.5) -> list[str]:
    """The names in `known` that look most like `word`, best first; `cutoff` 1 is the word itself."""
    return difflib.get_close_matches(word, list(known), n=n, cutoff=cutoff)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A sentence fragment naming the nearest known names, or '' when none is near."""
    close = nearest(word, known)
    return f"did you mean {' or '.join(repr(name) for name in close)}?" if close else ""
