"""reshard: against slices made by hand, there and back, and from one strategy to another."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from mindferry.errors import MindferryError
from mindferry.partition.layout import Grid
from mindferry.partition.opening import Asked
from mindferry.partition.reshard import Wanted, reshard
from mindferry.spec import ModelSpec

from ..support import gpt2_spec
from .making import rank_file, read_rank, read_whole, same, tensors_of, write_whole, write_yaml
from .reference import share
from .test_rules import models

WHOLE = Grid()


def spec_for(**changes: object) -> ModelSpec:
    """Two layers that two ranks divide."""
    return gpt2_spec(**{"num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 4, **changes})


def cut(path: Path, out: Path, grid: Grid, config: Path | None = None, **wanted: object) -> Path:
    reshard(path, out, Asked(config=config), Wanted(grid, **wanted))  # type: ignore[arg-type]
    return out


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("contiguous", [False, True])
def test_each_rank_has_what_a_hand_would_give_it(tmp_path: Path, tied: bool, contiguous: bool) -> None:
    spec = spec_for(tie_word_embeddings=tied, gated_linear_unit=True, activation="silu", num_layers=3)
    made = tensors_of(spec, moments=True)
    config = write_yaml(
        tmp_path / "run.yaml", spec, contiguous_qkv=contiguous, interleaved_mlp=not contiguous
    )
    out = cut(write_whole(tmp_path / "a", made), tmp_path / "cut", Grid(2, 2, 2), config, offset=[0, 1])
    for rank in range(8):
        found = read_rank(out, rank)
        stage, tensor = rank // 4, rank % 2
        held = {0: (".0.", "embedding."), 1: (".1.", ".2.", "final_layernorm", "output_layer")}[stage]
        if tied:
            held = (*held, "word_embeddings")
        expected = {n for n in made if any(part in n for part in held)} | {"global_step"}
        assert found.keys() == expected | {"step_num", "epoch_num"}
        for name in expected:
            np.testing.assert_array_equal(
                found[name], share(name, made[name], 2, tensor, spec, contiguous), err_msg=name
            )
        # 12 steps of 5 an epoch: the second step of the third.
        assert (int(found["step_num"]), int(found["epoch_num"])) == (12, 3)
        assert rank_file(out, rank).name == f"gpt2_rank_{rank}-3_2.safetensors"
    assert rank_file(out, 0).samefile(rank_file(out, 2))
    assert same(read_whole(cut(out, tmp_path / "back", WHOLE)), made)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_way_between_strategies_gives_the_same_files(data: st.DataObject) -> None:
    """whole -> A -> B equals whole -> B, and whole -> A -> whole is the identity."""
    mp = data.draw(st.sampled_from([2, 4]))
    spec = data.draw(models(mp)).model_copy(update={"num_layers": data.draw(st.integers(3, 5))})
    one, other = (
        Grid(
            data.draw(st.integers(1, 2)), data.draw(st.sampled_from([1, 2, mp])), data.draw(st.integers(1, 3))
        )
        for _ in range(2)
    )
    flat, interleaved = data.draw(st.booleans()), data.draw(st.booleans())
    dtype = data.draw(st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16]))
    moments = data.draw(st.booleans())

    def offset(grid: Grid) -> list[int]:
        """Extra layers to the last stages."""
        left = spec.num_layers % grid.pipeline_stage
        return [int(i >= grid.pipeline_stage - left) for i in range(grid.pipeline_stage)]

    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        made = tensors_of(spec, moments=moments, dtype=dtype)
        whole = write_whole(root / "whole", made)
        config = write_yaml(root / "run.yaml", spec, contiguous_qkv=flat, interleaved_mlp=interleaved)
        first = cut(whole, root / "first", one, config, offset=offset(one))
        again = {"config": config} if one == WHOLE else {}
        assert same(read_whole(cut(first, root / "back", WHOLE, **again)), made)  # type: ignore[arg-type]
        if other == WHOLE:
            return
        direct = cut(whole, root / "direct", other, config, offset=offset(other))
        around = cut(first, root / "around", other, offset=offset(other), **again)  # type: ignore[arg-type]
        for rank in range(other.ranks):
            assert same(read_rank(direct, rank), read_rank(around, rank)), rank


def test_a_checkpoint_without_the_manifest_merges_by_the_yaml(tmp_path: Path) -> None:
    """As mindformers leaves one: no partition.json, the strategy in the YAML's parallel_config."""
    spec = spec_for(num_layers=4)
    made = tensors_of(spec, moments=True)
    plain = write_yaml(tmp_path / "run.yaml", spec)
    out = cut(write_whole(tmp_path / "a", made), tmp_path / "cut", Grid(2, 2, 2), plain)
    (out / "partition.json").unlink()
    config = write_yaml(tmp_path / "cluster.yaml", spec, data_parallel=2, model_parallel=2, pipeline_stage=2)
    merged = read_whole(cut(out, tmp_path / "back", WHOLE, config))
    assert merged.pop("step_num") == 12
    assert merged.pop("epoch_num") == 3
    assert same(merged, made)
    # The strategy by --from, where the YAML has none.
    reshard(out, tmp_path / "by-option", Asked(config=plain, grid=Grid(2, 2, 2)), Wanted(Grid(1, 2, 1)))
    assert (tmp_path / "by-option" / "rank_1").is_dir()


def test_files_without_redundancy(tmp_path: Path) -> None:
    """Each share on one of the ranks that hold it, as MindSpore saves with remove_redundancy."""
    spec = spec_for(tie_word_embeddings=True)
    made = tensors_of(spec, moments=True)
    config = write_yaml(tmp_path / "run.yaml", spec)
    out = cut(write_whole(tmp_path / "a", made), tmp_path / "cut", Grid(2, 2, 2), config)
    (out / "partition.json").unlink()
    held = {rank: read_rank(out, rank) for rank in range(8)}
    seen: set[tuple[str, bytes]] = set()
    for rank in sorted(held, key=lambda rank: (rank % 3, rank)):  # no order that a reader could count on
        mine = {}
        for name, array in held[rank].items():
            key = (name, array.tobytes())
            if key not in seen:
                seen.add(key)
                mine[name] = array
        path = rank_file(out, rank)
        path.unlink()
        save_file(mine or {"global_step": made["global_step"]}, path, metadata={"remove_redundancy": "True"})
    asked = Asked(config=config, grid=Grid(2, 2, 2))
    reshard(out, tmp_path / "back", asked, Wanted(WHOLE))
    merged = read_whole(tmp_path / "back")
    assert same({name: merged[name] for name in made}, made)
    lost = next(
        rank for rank in range(8) if any("linear_fc1.weight" in name for name in read_rank(out, rank))
    )
    tensors = {n: a for n, a in read_rank(out, lost).items() if "linear_fc1.weight" not in n}
    rank_file(out, lost).unlink()
    save_file(
        tensors,
        out / f"rank_{lost}" / f"gpt2_rank_{lost}-3_2.safetensors",
        metadata={"remove_redundancy": "True"},
    )
    with pytest.raises(MindferryError, match="no rank has share"):
        reshard(out, tmp_path / "again", asked, Wanted(WHOLE))


def test_padding_of_the_vocabulary_comes_and_goes(tmp_path: Path) -> None:
    spec = spec_for(vocab_size=51)
    made = tensors_of(spec, moments=True)
    config = write_yaml(tmp_path / "run.yaml", spec)
    out = cut(write_whole(tmp_path / "a", made), tmp_path / "cut", Grid(1, 2, 1), config, pad_vocab=True)
    tables = [read_rank(out, rank)["embedding.word_embeddings.weight"] for rank in range(2)]
    rows = len(np.concatenate(tables))
    assert rows % 2 == 0
    assert rows > 51
    np.testing.assert_array_equal(np.concatenate(tables)[:51], made["embedding.word_embeddings.weight"])
    assert not np.concatenate(tables)[51:].any()
    assert same(read_whole(cut(out, tmp_path / "back", WHOLE)), made)


def test_virtual_stages(tmp_path: Path) -> None:
    spec = spec_for(num_layers=4)
    made = tensors_of(spec, moments=False)
    config = write_yaml(tmp_path / "run.yaml", spec)
    out = cut(write_whole(tmp_path / "a", made), tmp_path / "cut", Grid(1, 1, 2), config, virtual=2)
    layers = [{n.split(".")[2] for n in read_rank(out, rank) if "layers" in n} for rank in range(2)]
    assert layers == [{"0", "2"}, {"1", "3"}]
    assert same(read_whole(cut(out, tmp_path / "back", WHOLE)), made)


def test_nan_payloads_and_signed_zeros_survive(tmp_path: Path) -> None:
    spec = spec_for()
    made = tensors_of(spec, moments=False)
    words = made["decoder.layers.0.mlp.linear_fc2.weight"].view(np.uint32).reshape(-1)
    words[:4] = (0x7FC00001, 0xFFC12345, 0x80000000, 0x7F800000)
    config = write_yaml(tmp_path / "run.yaml", spec)
    out = cut(write_whole(tmp_path / "a", made), tmp_path / "cut", Grid(1, 2, 2), config)
    assert same(read_whole(cut(out, tmp_path / "back", WHOLE)), made)


@pytest.mark.long
def test_memory_stays_at_one_tensor(tmp_path: Path) -> None:
    """0.87 GB, the largest tensor 34 MB: a third of it and less is in memory, Python and its libraries included."""
    spec = spec_for(hidden_size=1024, vocab_size=8192, ffn_hidden_size=4096, num_layers=16)
    config = write_yaml(tmp_path / "run.yaml", spec)
    write_whole(tmp_path / "whole", tensors_of(spec, moments=False))
    common = ("reshard", "--config", config, "--to")
    assert peak(*common, "dp=2,mp=2,pp=2", tmp_path / "whole", "--out", tmp_path / "cut") < 0.25e9
    assert peak("reshard", tmp_path / "cut", "--to", "dp=1", "--out", tmp_path / "back") < 0.3e9


def peak(*arguments: str | Path) -> int:
    """Bytes that the command had at most, mapped files included."""
    code = "import resource, subprocess, sys; subprocess.run([sys.executable, '-m', 'mindferry', *sys.argv[1:]], "
    code += "check=True, stdout=subprocess.DEVNULL); print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=True
    )
    return int(done.stdout) * 1024
