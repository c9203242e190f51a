"""Megatron files for several processes on a CPU, in Megatron's order, read with numpy.

mindformers' own loader lets its processes wait for each other with the operator Barrier, which has no CPU kernel.
The order is that of mindferry.data.order, which tests hold against mindformers' GPTDataset.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindspore.dataset import GeneratorDataset

from mindferry.data.blend import Blend, BlendedSamples


class _Rows:
    """Samples as rows of COLUMNS, each int32 [seq_length]."""

    def __init__(self, samples: BlendedSamples, config: dict[str, Any]) -> None:
        self._samples = samples
        self._pad = config.get("pad", -1)
        self._masked = config.get("eod", -1) if config.get("eod_mask_loss") else None
        self._reset = config.get("eod", -1) if config.get("reset_position_ids") else None

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, number: int) -> tuple[np.ndarray, ...]:
        tokens = self._samples[int(number)].astype(np.int32)
        ids, labels = tokens[:-1].copy(), tokens[1:].copy()
        mask = labels != self._pad
        if self._masked is not None:
            mask &= ids != self._masked
        positions = np.arange(len(ids), dtype=np.int32)
        if self._reset is not None:  # positions begin anew behind every end of a document
            starts = np.where(np.concatenate([[False], ids[:-1] == self._reset]), positions, 0)
            positions = (positions - np.maximum.accumulate(starts)).astype(np.int32)
        for column in (ids, labels):
            column[column == self._pad] = 0
        return ids, labels, mask.astype(np.int32), positions


@MindFormerRegister.register(MindFormerModuleType.DATASET_LOADER)
class OrderedMegatronLoader:
    """Takes the keys of BlendedMegatronDatasetDataLoader; process r of N reads samples r, r + N, ..."""

    def __new__(
        cls,
        sizes: list[int],
        config: dict[str, Any],
        column_names: list[str],
        num_shards: int | None = None,
        shard_id: int | None = None,
        **_: Any,
    ) -> GeneratorDataset:
        blend = Blend.of({"sizes": sizes, "config": config}, Path())
        return GeneratorDataset(
            _Rows(BlendedSamples(blend), config),
            column_names=column_names,
            shuffle=False,
            num_shards=num_shards,
            shard_id=shard_id,
        )
