"""Finds the files of a cut checkpoint: rank_N/{prefix}_rank_{N}-{epoch}_{step}.safetensors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from mindferry.errors import MindferryError, UsageError
from mindferry.partition.layout import MAX_RANKS
from mindferry.weights.tensor_store import check_link, listing

_DIRECTORY = re.compile(r"rank_(0|[1-9][0-9]{0,5})")
_FILE = re.compile(r"(.+)_rank_([0-9]{1,6})(?:_[0-9]+)?-([0-9]{1,12})_([0-9]{1,12})\.safetensors")
_REMEDY = "bring the missing files; a checkpoint is whole only with every rank of every stage"


@dataclass(frozen=True)
class RankFiles:
    """One file a rank, all of the same step.

    Attributes:
        prefix: beginning of the names, '' where they follow another pattern.
        epoch, step: from the names; mindformers counts steps within the epoch.
        passed_over: what lies there besides and was not taken.
    """

    files: tuple[Path, ...]
    prefix: str = ""
    epoch: int = 0
    step: int = 0
    passed_over: tuple[str, ...] = ()


def is_cut(directory: Path) -> bool:
    """Whether `directory` is a cut checkpoint, by mindformers' own rule: an entry starts with rank_."""
    return directory.is_dir() and any(entry.name.startswith("rank_") for entry in directory.iterdir())


def file_name(prefix: str, rank: int, suffix: str) -> str:
    """Name of a rank's file; `suffix` is "{epoch}_{step}"."""
    return f"{prefix}_rank_{rank}-{suffix}.safetensors"


def find(directory: Path, expected: int | None, suffix: str | None = None) -> RankFiles:
    """The files of the newest step that every rank has.

    Args:
        expected: number of ranks, where it is known.
        suffix: "{epoch}_{step}" to take instead of the newest.

    Raises:
        MindferryError: a rank is missing, or no step is complete.
        UsageError: more ranks than the strategy has.
    """
    folders = _folders(directory, expected)
    named = [_named(directory, folder, rank) for rank, folder in enumerate(folders)]
    if any(not table for table in named):
        return RankFiles(tuple(_only(directory, folder) for folder in folders))
    common = set.intersection(*(set(table) for table in named))
    everywhere = sorted(set.union(*(set(table) for table in named)))
    if suffix is not None:
        common = {key for key in common if f"{key[0]}_{key[1]}" == suffix}
    if not common:
        found = "; ".join(
            f"rank_{rank}: {', '.join(f'{e}_{s}' for e, s, _ in sorted(table))}"
            for rank, table in list(enumerate(named))[:4]
        )
        raise MindferryError(
            f"{directory}: no step is there for every rank"
            + (f" (asked for {suffix})" if suffix else "")
            + f"; found {found}",
            cause="files of different steps are no checkpoint",
            remedy=_REMEDY if suffix is None else "give --step EPOCH_STEP of a step that every rank has",
            id="partition.mixed-steps",
        )
    newest = max(common)
    passed = tuple(f"{e}_{s}" for e, s, _ in everywhere if (e, s) != newest[:2])
    return RankFiles(tuple(table[newest] for table in named), newest[2], newest[0], newest[1], passed)


def _folders(directory: Path, expected: int | None) -> list[Path]:
    found = {}
    for entry in directory.iterdir():
        match = _DIRECTORY.fullmatch(entry.name)
        if match and entry.is_dir():
            found[int(match.group(1))] = entry
        elif entry.name.startswith("rank_"):
            raise MindferryError(
                f"{entry}: not a directory of a rank (rank_0, rank_1, ...)",
                remedy="remove it or bring the whole checkpoint again",
                id="partition.odd-entry",
            )
    count = expected if expected is not None else max(found, default=-1) + 1
    missing = [f"rank_{number}" for number in range(min(count, MAX_RANKS)) if number not in found]
    if missing:
        raise MindferryError(
            f"{directory}: {len(missing)} of {count} ranks are missing: {listing(missing)}",
            remedy=_REMEDY,
            id="partition.missing-rank",
        )
    surplus = sorted(number for number in found if number >= count)
    if surplus:
        raise UsageError(
            f"{directory}: the strategy has {count} ranks, found also {listing([f'rank_{n}' for n in surplus])}",
            remedy="give the strategy that the checkpoint was written under as --from",
            id="partition.surplus-rank",
        )
    return [found[number] for number in range(count)]


def _named(directory: Path, folder: Path, rank: int) -> dict[tuple[int, int, str], Path]:
    """(epoch, step, prefix) -> file, for the files that follow mindformers' pattern."""
    table = {}
    for path in sorted(folder.glob("*.safetensors")):
        match = _FILE.fullmatch(path.name)
        if match is None:
            continue
        if int(match.group(2)) != rank:
            raise MindferryError(
                f"{path}: the file of rank {match.group(2)} lies in the directory of rank {rank}",
                remedy="put it where it belongs",
                id="partition.wrong-rank",
            )
        check_link(directory, path)
        table[int(match.group(3)), int(match.group(4)), match.group(1)] = path
    return table


def _only(directory: Path, folder: Path) -> Path:
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        older = sorted(folder.glob("*.ckpt"))
        raise MindferryError(
            f"{folder}: {len(files)} safetensors files, expected one"
            + (f"; {older[0].name} is MindSpore's own format" if older and not files else ""),
            remedy="convert it with mindspore.ckpt_to_safetensors" if older and not files else _REMEDY,
            id="partition.rank-file",
        )
    check_link(directory, files[0])
    return files[0]
