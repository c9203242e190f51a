"""What building a data set found out: the numbers that migration.json and `--json` carry."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class DataReport:
    """Counts of one data set.

    Attributes:
        tokens: all tokens of the stream, end-of-document tokens included.
        documents: documents in the stream.
        skipped_documents: empty or blank documents left out.
        sequences: rows of `seq_length` tokens written for training.
        leftover_tokens: tokens at the end of the stream that fill no whole row.
        invalid_utf8_bytes: bytes that are not UTF-8, each replaced by U+FFFD.
        eod_token_id: token that closes every document; None: documents run into each other.
        columns: column name -> {"dtype", "shape"} of the written rows.
        files: file names, relative to the output directory.
        warnings: what a person should look at.
    """

    tokens: int = 0
    documents: int = 0
    skipped_documents: int = 0
    sequences: int = 0
    leftover_tokens: int = 0
    invalid_utf8_bytes: int = 0
    seq_length: int = 0
    vocab_size: int = 0
    eod_token_id: int | None = None
    tokenizer: str = ""
    columns: dict[str, dict[str, Any]] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for json.dumps."""
        return asdict(self)
