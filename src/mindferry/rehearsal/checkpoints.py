"""The checkpoints of a rehearsal, cut and merged by mindferry.partition, as `reshard` does it."""

from __future__ import annotations

import filecmp
from pathlib import Path

import numpy as np

from mindferry.partition.checkpoint import Checkpoint, Spread
from mindferry.partition.layout import Grid, Stages
from mindferry.partition.network import Network
from mindferry.partition.rank_files import file_name
from mindferry.partition.rules import cuts
from mindferry.partition.writing import write_ranks
from mindferry.rehearsal.plan import Plan
from mindferry.spec import ModelSpec
from mindferry.weights.tensor_store import SafetensorsStore

FIRST = "0_0"


def rank_file(directory: Path, spec: ModelSpec, rank: int, suffix: str) -> Path:
    """A rank's file as mindformers names it; `suffix` is "{epoch}_{step}"."""
    return directory / f"rank_{rank}" / file_name(spec.family, rank, suffix)


def _one_stage(spec: ModelSpec) -> Stages:
    return Stages((tuple(range(spec.num_layers)),), spec.tie_word_embeddings)


def cut(plan: Plan, stages: Stages, weights: dict[str, np.ndarray], out: Path) -> None:
    """Write whole `weights` as rank_0, rank_1, ... and partition.json into the new directory `out`."""
    from safetensors.numpy import save_file

    out.mkdir(parents=True)
    file = out.with_name(f"{out.name}.safetensors")
    save_file(weights, file)
    single = Spread(plan.spec, plan.layout, Grid(), _one_stage(plan.spec))
    network = Network(plan.spec, plan.layout, Grid(), 0, 1, str(plan.run.yaml))
    write_ranks(
        Checkpoint(file, single, [SafetensorsStore([file])]),
        Spread(plan.spec, plan.layout, plan.grid, stages),
        network,
        plan.offset,
        1,
        out,
        lambda done, name: None,
    )
    file.unlink()


def merge(
    plan: Plan, stages: Stages, directory: Path, suffix: str
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Whole weights from the files of all ranks, and what differed among copies.

    Raises:
        MindferryError: a file is missing, has another shape, or holds other numbers than its copy.
    """
    files = [rank_file(directory, plan.spec, rank, suffix) for rank in range(plan.grid.ranks)]
    stores = [SafetensorsStore([file]) for file in files]
    found = Checkpoint(directory, Spread(plan.spec, plan.layout, plan.grid, stages), stores)
    found.check()
    whole = {
        name: np.array(found.share(name, one, 0)) for name, one in cuts(plan.spec, plan.layout, 1).items()
    }
    return whole, found.warnings


def same(plan: Plan, left: tuple[Path, str], right: tuple[Path, str]) -> list[int]:
    """Ranks whose tensors differ, bit for bit, between two (directory, suffix)."""
    from safetensors.numpy import load_file

    odd = []
    for rank in range(plan.grid.ranks):
        one, other = (rank_file(at, plan.spec, rank, suffix) for at, suffix in (left, right))
        if filecmp.cmp(one, other, shallow=False):
            continue
        a, b = load_file(one), load_file(other)
        if a.keys() != b.keys() or any(a[name].tobytes() != b[name].tobytes() for name in a):
            odd.append(rank)
    return odd
