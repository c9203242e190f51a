"""What building a data set found out: the numbers that migration.json and `--json` carry."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class SplitReport:
    """Counts of one split, train or valid."""

    documents: int = 0
    tokens: int = 0
    sequences: int = 0
    leftover_tokens: int = 0
    padding_tokens: int = 0


@dataclass
class DataReport:
    """Counts of one data set, all splits together unless said otherwise.

    Attributes:
        tokens: all tokens of the stream, end-of-document tokens included.
        documents: documents in the stream.
        skipped_documents: empty or blank documents left out.
        sequences: rows of `seq_length` tokens for training (split "train").
        leftover_tokens: tokens at the end of the stream that fill no whole row.
        padding_tokens: positions that hold no token, where documents are padded.
        invalid_utf8_bytes: bytes (or lone surrogates in JSON) that are no text, each replaced by U+FFFD.
        eod_token_id: token that closes every document; None: documents run into each other.
        text_field: field of the records that held the text, where there were records.
        token_dtype: how ids are stored in .bin; rows of a MindRecord are int32.
        columns: column name -> {"dtype", "shape"} of the rows.
        files: file names, relative to the output directory.
        warnings: what a person should look at.
    """

    tokens: int = 0
    documents: int = 0
    skipped_documents: int = 0
    sequences: int = 0
    leftover_tokens: int = 0
    padding_tokens: int = 0
    invalid_utf8_bytes: int = 0
    seq_length: int = 0
    vocab_size: int = 0
    eod_token_id: int | None = None
    tokenizer: str = ""
    text_field: str | None = None
    token_dtype: str = ""
    output: str = "mindrecord"
    packing: str = "pack"
    splits: dict[str, SplitReport] = field(default_factory=dict)
    columns: dict[str, dict[str, Any]] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for json.dumps."""
        return asdict(self)
