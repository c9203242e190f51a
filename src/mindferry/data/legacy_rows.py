"""Rows as the GPT-2 of mindformers 1.x takes them: seq_length + 1 tokens, which it moves on itself.

It also takes an attention mask, 1 for tokens that count. Without that column it masks every token equal to
eos_token_id, documents' ends included, so the column is always written.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

COLUMNS = ("input_ids", "attention_mask")
_ROWS = 256


def rewrite(source: Path, out: Path, seq_length: int) -> int:
    """Write the rows of the MindRecord `source`, whose labels are moved on already, to `out`; their number.

    Tokens [seq_length + 1] int32: the inputs and the last label. Mask [seq_length + 1] int32: what counts in the
    loss, and 1 for the first token, which is no target.

    Raises:
        OSError, RuntimeError: the disk is full, or MindSpore cannot write.
    """
    from mindspore.mindrecord import FileWriter

    writer = FileWriter(str(out), shard_num=1, overwrite=True)
    writer.add_schema({name: {"type": "int32", "shape": [seq_length + 1]} for name in COLUMNS}, "mindferry")
    written = 0
    each = _rows(source)
    while batch := list(itertools.islice(each, _ROWS)):
        writer.write_raw_data(batch)
        written += len(batch)
    writer.commit()
    return written


def _rows(source: Path) -> Iterator[dict[str, Any]]:
    from mindspore.mindrecord import FileReader

    reader = FileReader(str(source), num_consumer=1)
    try:
        for row in reader.get_next():
            tokens = np.append(row["input_ids"], row["labels"][-1])
            mask = np.append(1, row["loss_mask"])
            yield {"input_ids": tokens.astype(np.int32), "attention_mask": mask.astype(np.int32)}
    finally:
        reader.close()
