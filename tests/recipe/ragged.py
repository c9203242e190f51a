"""A small run whose rows have unequal numbers of unmasked tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..support import make_run, make_source

VOCAB, SEQ = 290, 32


def ragged_run(room: Path, rows: int = 96, **choices: Any) -> tuple[Path, Path]:
    """(source without dropout, run) below `room`."""
    from mindspore.mindrecord import FileWriter

    (room / "c.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    dropout = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
    source = make_source(room / "src", n_layer=1, **dropout)
    run = make_run(source, room / "c.txt", room / "run", seq_length=SEQ, **choices)
    for file in (run / "data").glob("train.mindrecord*"):
        file.unlink()
    rng = np.random.default_rng(0)
    writer = FileWriter(str(run / "data" / "train.mindrecord"), 1)
    columns = ("input_ids", "labels", "loss_mask", "position_ids")
    writer.add_schema({name: {"type": "int32", "shape": [SEQ]} for name in columns})
    for number in range(rows):
        ids = rng.integers(0, VOCAB, SEQ + 1).astype(np.int32)
        mask = (np.arange(SEQ) < 1 + (7 * number) % SEQ).astype(np.int32)
        row = (ids[:-1], ids[1:], mask, np.arange(SEQ, dtype=np.int32))
        writer.write_raw_data([dict(zip(columns, row, strict=True))])
    writer.commit()
    return source, run
