"""Exported Megatron checkpoints in the real Megatron-core: strict loading, and transformers' logits.

Every rank is a process of its own with gloo between them, on the CPU, with Megatron-core's local layer spec.
"""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindferry.checking import sides
from mindferry.recipes.optimizer_state import read_state
from mindferry.sources import open_source
from mindferry.spec import OptimizerSpec
from mindferry.weights.exporting import Cut, export

from .test_export import migrated
from .test_families import IDS, build, logits_of

torch = pytest.importorskip("torch")
if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

WORKER = Path(__file__).with_name("megatron_core_worker.py")


def in_megatron(iteration: Path, tmp_path: Path, out: Path) -> None:
    """Start all ranks of the checkpoint and wait for them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    np.save(tmp_path / "ids.npy", np.asarray(IDS[None], np.int64))
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                WORKER,
                iteration,
                str(rank),
                str(port),
                tmp_path / "ids.npy",
                out,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(len(list(iteration.glob("mp_rank_*"))))
    ]
    try:
        said = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), "\n".join(said)[-4000:]


def logits_in_megatron(iteration: Path, tmp_path: Path) -> np.ndarray:
    in_megatron(iteration, tmp_path, tmp_path / "out.npy")
    return np.load(tmp_path / "out.npy")[0]


CASES: list[Any] = [
    ("gpt2", {}, Cut()),
    ("gpt2", {"n_head": 2, "n_inner": 36, "activation_function": "gelu"}, Cut(2, 2)),
    ("llama", {"intermediate_size": 36}, Cut(2, 2)),
    ("llama-linear", {}, Cut()),
    ("qwen2", {}, Cut()),
    ("qwen3", {}, Cut()),
]


@pytest.mark.parametrize(
    ("case", "changes", "cut"),
    CASES,
    ids=[f"{c}-{k.tensor_parallel}x{k.pipeline_stages}" for c, _, k in CASES],
)
def test_megatron_core_loads_the_export(tmp_path: Path, case: str, changes: dict[str, Any], cut: Cut) -> None:
    model = build(tmp_path / "src", case, **changes)
    export(migrated(tmp_path), "megatron", tmp_path / "meg", cut=cut)
    (iteration,) = (tmp_path / "meg").glob("iter_*")
    found = logits_in_megatron(iteration, tmp_path)
    wanted = logits_of(model)
    assert found.shape[-1] % (128 * cut.tensor_parallel) == 0, "the vocabulary is padded as Megatron pads it"
    found = found[..., : wanted.shape[-1]].reshape(wanted.shape)
    assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()


def test_a_wrong_packing_shows(tmp_path: Path) -> None:
    """Negative control: the rows of the first layer's q/k/v rolled by one head load as well, and the logits part."""
    model = build(tmp_path / "src", "llama")
    export(migrated(tmp_path), "megatron", tmp_path / "meg")
    (file,) = (tmp_path / "meg").glob("iter_*/*/model_optim_rng.pt")
    tree = torch.load(file, weights_only=False)
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    tree["model"][name] = torch.roll(tree["model"][name], 4, 0)
    torch.save(tree, file)
    wanted = logits_of(model)
    found = logits_in_megatron(file.parent.parent, tmp_path)[..., : wanted.shape[-1]].reshape(wanted.shape)
    assert np.abs(found - wanted).max() > 1e-3 * np.abs(wanted).max()


@pytest.mark.parametrize("case", ["gpt2", "llama"])
def test_megatron_cores_optimizer_is_read(tmp_path: Path, case: str) -> None:
    """One step of its own AdamW, saved by it: the moments are those of torch's AdamW on the model it came from."""
    model = build(tmp_path / "src", case).float()
    export(migrated(tmp_path), "megatron", tmp_path / "meg")
    (iteration,) = (tmp_path / "meg").glob("iter_*")
    (tmp_path / "after").mkdir()
    in_megatron(iteration, tmp_path, tmp_path / "after")
    found = read_state(tmp_path / "after", open_source(tmp_path / "after"), OptimizerSpec(weight_decay=0.1))
    assert (found.step, found.masters, found.warnings) == (1, {}, [])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.tensor(IDS[None])
    torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:]).backward()
    optimizer.step()
    source = open_source(tmp_path / "src")
    for kind, values in (("exp_avg", found.exp_avg), ("exp_avg_sq", found.exp_avg_sq)):
        arrays = sides.torch_arrays(model, source, lambda p, kind=kind: optimizer.state[p][kind])
        wanted = sides.map_to_target(source, arrays)
        assert values.keys() == wanted.keys()
        largest = max(float(np.abs(value).max()) for value in wanted.values())
        for name, value in wanted.items():
            assert np.abs(values[name] - value).max() <= 1e-5 * largest, (kind, name)
            assert np.linalg.norm(values[name] - value) <= 1e-3 * np.linalg.norm(value) + 1e-7 * largest, name
