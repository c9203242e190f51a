"""MindSpore's and mindformers' own readers on what reshard wrote: the independent judges of the cut."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mindferry.partition.layout import Grid
from mindferry.partition.opening import Asked
from mindferry.partition.reshard import Wanted, reshard
from mindferry.spec import ModelSpec

from ..support import gpt2_spec
from .making import read_whole, same, tensors_of, write_whole, write_yaml

# MindSpore counts the axes of its device matrix [dp, mp] from the right: 0 is mp, -1 is not cut.
MP, NOT = 0, -1
MAPS = {
    "linear_qkv.weight": [MP, NOT],
    "linear_fc1.weight": [MP, NOT],
    "word_embeddings.weight": [MP, NOT],
    "position_embeddings.weight": [MP, NOT],
    "output_layer.weight": [MP, NOT],
    "linear_proj.weight": [NOT, MP],
    "linear_fc2.weight": [NOT, MP],
    "linear_qkv.bias": [MP],
    "linear_fc1.bias": [MP],
}


def tensor_map(name: str, whole: np.ndarray) -> list[int]:
    """The line of the table for `name`; what has none is whole everywhere."""
    return next((found for end, found in MAPS.items() if name.endswith(end)), [NOT] * whole.ndim)


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return gpt2_spec(num_layers=3, num_attention_heads=4, num_query_groups=2, kv_channels=4)


@pytest.fixture(scope="module")
def made(spec: ModelSpec) -> dict[str, np.ndarray]:
    return tensors_of(spec, moments=True)


@pytest.fixture(scope="module")
def cut(spec: ModelSpec, made: dict[str, np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cut")
    config = write_yaml(root / "run.yaml", spec)
    write_whole(root / "whole", made)
    reshard(root / "whole", root / "cut", Asked(config=config), Wanted(Grid(2, 2, 2), [0, 1]))
    return root / "cut"


def layouts(made: dict[str, np.ndarray], stage: int) -> dict[str, object]:
    """What MindSpore's strategy file of a stage says, from the table above."""
    held = (".0.", "embedding.") if stage == 0 else (".1.", ".2.", "final_layernorm", "output_layer")
    items = {}
    for name, whole in made.items():
        if name == "global_step" or not any(part in name for part in held):
            continue
        items[f"{stage}-{name}"] = {
            "field": 0,
            "opt_weight_shard_size": 0,
            "opt_weight_shard_step": 0,
            "dev_matrix": [2, 2],
            "tensor_map": tensor_map(name, whole),
            "param_split_shape": [],
            "indices_offset": [],
        }
    return items


def test_mindspore_unifies_the_ranks_to_the_whole(
    cut: Path, made: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """unified_safetensors with a strategy written by hand finds every number where it was."""
    import mindspore as ms

    content = {
        "parallel_strategy_item": {},
        "parallel_layout_item": {**layouts(made, 0), **layouts(made, 1)},
    }
    strategy = tmp_path / "strategy.json"
    strategy.write_text(json.dumps(content))
    ms.parallel.unified_safetensors(str(cut), str(strategy), str(tmp_path / "unified"))
    found: dict[str, np.ndarray] = {}
    for path in (tmp_path / "unified").glob("*.safetensors"):
        found |= load_file(path)
    cut_ones = made.keys() - {"global_step"}
    assert same({name: found[name] for name in cut_ones}, {name: made[name] for name in cut_ones})
    assert np.asarray(found["global_step"]).reshape(-1).tolist() == [12]


@pytest.mark.parametrize("count", [2, 4])
def test_shared_out_optimizers_are_merged_as_mindspore_merges_them(
    spec: ModelSpec, made: dict[str, np.ndarray], tmp_path: Path, count: int
) -> None:
    """dp 4, mp 2: each replica's file has its piece of a share; MindSpore's merge and ours find the same whole."""
    import mindspore as ms

    config = write_yaml(tmp_path / "run.yaml", spec, data_parallel=4, model_parallel=2, pipeline_stage=1)
    write_whole(tmp_path / "whole", made)
    reshard(tmp_path / "whole", tmp_path / "cut", Asked(config=config), Wanted(Grid(4, 2, 1)))
    (tmp_path / "cut" / "partition.json").unlink()
    items = {}
    for rank in range(8):
        (path,) = (tmp_path / "cut" / f"rank_{rank}").glob("*.safetensors")
        tensors = load_file(path)
        path.unlink()  # a hard link: writing would change the other replicas
        for name, array in tensors.items():
            shares = name in made and array.ndim > 0 and array.shape[0] % count == 0
            cut_by_mp = name in made and MP in tensor_map(name, made[name])
            replica = rank // 2 if cut_by_mp else rank
            if shares:
                tensors[name] = np.split(array, count)[replica % count].copy()
            if name in made and name != "global_step":
                items[f"0-{name}"] = {
                    "field": 0,
                    "opt_weight_shard_size": count if shares else 0,
                    "opt_weight_shard_step": (2 if cut_by_mp else 1) if shares else 0,
                    "dev_matrix": [4, 2],
                    "tensor_map": tensor_map(name, made[name]),
                    "param_split_shape": [],
                    "indices_offset": [],
                }
        save_file(tensors, path)
    strategy = tmp_path / "strategy.json"
    strategy.write_text(json.dumps({"parallel_strategy_item": {}, "parallel_layout_item": items}))
    ms.parallel.unified_safetensors(str(tmp_path / "cut"), str(strategy), str(tmp_path / "unified"))
    theirs: dict[str, np.ndarray] = {}
    for path in (tmp_path / "unified").glob("*.safetensors"):
        theirs |= load_file(path)
    report = reshard(tmp_path / "cut", tmp_path / "merged", Asked(config=config), Wanted(Grid()))
    ours = read_whole(tmp_path / "merged")
    names = made.keys() - {"global_step"}
    assert same({name: theirs[name] for name in names}, {name: made[name] for name in names})
    assert same({name: ours[name] for name in names}, {name: made[name] for name in names})
    assert any("shared out over the replicas" in text for text in report.warnings)


def test_mindspore_loads_a_rank(cut: Path) -> None:
    import mindspore as ms

    for rank in (0, 3, 7):
        (path,) = (cut / f"rank_{rank}").glob("*.safetensors")
        loaded = ms.load_checkpoint(str(path), format="safetensors")
        for name, array in load_file(path).items():
            np.testing.assert_array_equal(loaded[name].asnumpy(), array, err_msg=name)


def test_mindformers_takes_the_directory_for_a_cut_one(cut: Path) -> None:
    """Its functions that choose the mode and the file; the suffix is what its merge passes to MindSpore."""
    from mindformers.utils import load_checkpoint_utils as utils

    config = SimpleNamespace(checkpoint=SimpleNamespace(load_path=str(cut)), load_ckpt_format="safetensors")
    mode = utils._get_checkpoint_mode(config)
    assert mode == utils.CheckpointFileMode.MULTI_CHECKPOINT_FILE_WITH_RANK_ID.value
    utils.validate_config_with_file_mode(mode, use_parallel=True, auto_trans_ckpt=False)
    taken = utils._get_src_file(str(cut), None, "safetensors")
    assert Path(taken).parent.name == "rank_0"
    assert utils.extract_suffix(taken) == "-3_2"


def test_mindspores_own_slices_are_ours(cut: Path, made: dict[str, np.ndarray]) -> None:
    """The other way round: the formula by which MindSpore slices a whole tensor, on every rank."""
    import mindspore as ms
    from mindspore.parallel._tensor import _load_tensor

    for rank in range(8):
        (path,) = (cut / f"rank_{rank}").glob("*.safetensors")
        held = {
            name: array for name, array in load_file(path).items() if name in made and name != "global_step"
        }
        assert held
        for name, array in held.items():
            sliced = _load_tensor(
                ms.Tensor(made[name]), [2, 2], tensor_map(name, made[name]), rank_id=rank % 4
            )
            np.testing.assert_array_equal(np.asarray(sliced), array, err_msg=name)
