"""What is in a data set: a look at a sample of its tokens, as a person would take one before a long run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mindferry.data.inputs import Reading, Source, find_sources, pieces
from mindferry.data.mindrecord import inspect_mindrecord
from mindferry.data.mindrecord_rows import integer_rows
from mindferry.data.tokenizer import Tokenizer
from mindferry.errors import UsageError
from mindferry.findings import Finding

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Below this entropy of single tokens, text repeats itself or is no text.
_LOW_ENTROPY_BITS = 5.0

# What is worth a word: repeated windows, padding, unknown tokens.
_MANY_REPEATED, _MUCH_PADDING, _MANY_UNKNOWN = 0.2, 0.5, 0.01

# Tokens of the sample that are shown as text.
_SHOWN = 64

# Length of the windows that are looked at for repetition.
_WINDOW = 32


@dataclass
class TokenStatistics:
    """Of a sample of `tokens` tokens.

    Attributes:
        largest: the largest id seen.
        out_of_range: ids that are negative or not below the vocabulary.
        distinct: different ids seen.
        entropy_bits: entropy of the distribution of single ids; log2(vocab_size) at most. English in a
            vocabulary of 50,000 lies near 10; below 5 something repeats.
        repeated_share: share of the windows of 32 tokens, one at every token, that occurred before in the sample:
            duplicated text, wherever it begins.
        eod_share, unknown_share: share of the end-of-document and of the unknown token; None: not known which it is.
        padding_share: share of the positions of its rows that hold no token (loss_mask 0); None: no rows of ours.
        tokens_per_document: mean distance of end-of-document tokens.
        common: the ten most frequent ids as (id, share, text).
        text: the first tokens, decoded.
    """

    tokens: int = 0
    largest: int = -1
    out_of_range: int = 0
    distinct: int = 0
    entropy_bits: float = 0.0
    repeated_share: float = 0.0
    eod_share: float | None = None
    unknown_share: float | None = None
    padding_share: float | None = None
    tokens_per_document: float | None = None
    common: list[tuple[int, float, str]] = field(default_factory=list)
    text: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for json.dumps."""
        return asdict(self)


def sample_tokens(path: Path, limit: int = 1 << 20, raw_dtype: str | None = None) -> NDArray[np.int64]:
    """The first `limit` tokens of a data set of ids: Megatron, nanoGPT or MindRecord.

    `raw_dtype` is the width of ids in a .bin without index; None: uint16 that looks like it.

    Raises:
        UsageError: `path` holds text, or nothing.
        MindferryError: the data set is damaged.
    """
    source = find_sources([path])[0]
    if source.has_text:
        raise UsageError(
            f"{path}: holds text, expected tokens", remedy="make tokens of it with `mindferry data build`"
        )
    parts: list[NDArray[np.int64]] = []
    size = 0
    for ids in _ids(source, raw_dtype):
        parts.append(ids)
        size += len(ids)
        if size >= limit:
            break
    if not size:
        raise UsageError(f"{path}: no tokens in it", id="data.empty")
    return np.concatenate(parts)[:limit]


def _ids(source: Source, raw_dtype: str | None) -> Iterator[NDArray[np.int64]]:
    for piece in pieces(source, Reading(raw_dtype=raw_dtype), None):
        if piece.ids is not None and len(piece.ids):
            yield piece.ids


def token_statistics(
    tokens: NDArray[np.int64],
    vocab_size: int | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    eod_token_id: int | None = None,
    unknown_token_id: int | None = None,
) -> TokenStatistics:
    """Look at `tokens` (int64, one dimension); what needs a tokenizer or a vocabulary is left out without one."""
    result = TokenStatistics(tokens=len(tokens))
    if not len(tokens):
        return result
    values, counts = np.unique(tokens, return_counts=True)
    shares = counts / len(tokens)
    result.largest, result.distinct = int(values[-1]), len(values)
    bad = (values < 0) | (values >= vocab_size) if vocab_size is not None else values < 0
    result.out_of_range = int(counts[bad].sum())
    result.entropy_bits = float(-(shares * np.log2(shares)).sum())
    result.repeated_share = _repeated(tokens)

    def share_of(token: int | None) -> float | None:
        return None if token is None else float(shares[values == token].sum())

    result.eod_share, result.unknown_share = share_of(eod_token_id), share_of(unknown_token_id)
    if result.eod_share:
        result.tokens_per_document = 1.0 / result.eod_share
    for i in np.argsort(-counts, kind="stable")[:10]:
        token = int(values[i])
        text = _text(tokenizer, [token])
        result.common.append((token, float(shares[i]), text))
    result.text = _text(tokenizer, tokens[:_SHOWN].tolist())
    return result


def padding_share(path: Path, limit: int = 256) -> float | None:
    """Share of the positions of the first `limit` rows that are padding; None: `path` has no column loss_mask."""
    if not path.is_file() or "loss_mask" not in inspect_mindrecord(path).columns:
        return None
    rows = itertools.islice(integer_rows(path, ["loss_mask"]), limit)
    masks = [row["loss_mask"] for row in rows]
    return float(1.0 - np.concatenate(masks).astype(bool).mean()) if masks else None


def judge(found: TokenStatistics, where: object, vocab_size: int | None) -> list[Finding]:
    """What a person should know of the sample `found` of `where`."""
    findings = []

    def warn(name: str, text: str, **more: str) -> None:
        findings.append(Finding(f"data.{name}", "warning", f"{where}: {text}", **more))

    if found.out_of_range:
        text = (
            f"{where}: {found.out_of_range} of {found.tokens} tokens are not below vocab_size {vocab_size} "
            f"(largest {found.largest})"
        )
        cause = "another tokenizer than the model's, or ids read in the wrong width"
        remedy = "build the data with the model's tokenizer; for a .bin without .idx state --raw-dtype"
        findings.append(Finding("data.token-range", "problem", text, cause=cause, remedy=remedy))
    if found.tokens > 10_000 and found.entropy_bits < _LOW_ENTROPY_BITS:
        text = f"single tokens carry {found.entropy_bits:.1f} bits, text has about 10"
        warn("entropy", text, cause="the text repeats itself, or is no text")
    if found.repeated_share > _MANY_REPEATED:
        text = f"{found.repeated_share:.0%} of the windows of 32 tokens were there before"
        warn("repeated", text, remedy="remove duplicated documents")
    if (found.unknown_share or 0) > _MANY_UNKNOWN:
        text = f"{found.unknown_share:.1%} of the tokens are the unknown one"
        warn("unknown", text, remedy="use a tokenizer that covers the text (byte-level, byte fallback)")
    if (found.padding_share or 0) > _MUCH_PADDING:
        text = f"{found.padding_share:.0%} of the positions are padding: computed on, and not trained on"
        warn("padding", text, remedy="build it with --packing pack, or a shorter --seq-length")
    return findings


def _text(tokenizer: Tokenizer | None, ids: list[int]) -> str:
    if tokenizer is None:
        return ""
    return tokenizer.decode([token for token in ids if 0 <= token < tokenizer.size])


def _repeated(tokens: NDArray[np.int64]) -> float:
    """Share of the windows of _WINDOW tokens, one at every position, that equal an earlier one."""
    count = len(tokens) - _WINDOW + 1
    if count < 1:
        return 0.0
    # A polynomial over the integers modulo 2^64 tells the windows of a million tokens apart.
    hashed = np.zeros(count, np.uint64)
    mixed = tokens.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    for i in range(_WINDOW):
        hashed = hashed * np.uint64(0xD6E8FEB86659FD93) + mixed[i : i + count]
    return 1.0 - len(np.unique(hashed)) / count
