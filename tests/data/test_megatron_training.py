"""`train` on Megatron files: their order, resume, several files with weights, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindferry.data import DataOptions, build_dataset, megatron_train_dataset
from mindferry.data.blend import Blend, BlendedSamples
from mindferry.data.megatron import MegatronWriter, open_megatron
from mindferry.data.order import GPTSampleOrder, blend_order
from mindferry.errors import UsageError
from mindferry.targets import run_yaml
from mindferry.targets.run_directory import RunDirectory
from mindferry.training import data_source
from mindferry.training.engine import Options, train

from ..support import SEQ_LENGTH, make_run, make_source, run_cli

STEPS, BATCH, SEED = 60, 4, 77
WEIGHTS = (3, 1)


@pytest.fixture(scope="module")
def base(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without dropout whose train_dataset reads two Megatron data sets in its own data/."""
    directory = tmp_path_factory.mktemp("megatron")
    source = make_source(directory / "gpt2", embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0)
    run = make_run(source, corpus, directory / "run", batch_size=BATCH, steps=STEPS)
    texts = sorted(corpus.iterdir())
    for name, part in (("a", texts[:3]), ("b", texts[3:])):
        build_dataset(
            part,
            {"tokenizer.json": run / "tokenizer/tokenizer.json"},
            run / "data" / name,
            seq_length=SEQ_LENGTH,
            vocab_size=300,
            eos_token_id=0,
            options=DataOptions(output="megatron"),
        )
    prefixes = [run / "data" / name / "train" for name in "ab"]
    block = megatron_train_dataset(
        list(zip(WEIGHTS, prefixes, strict=True)), seq_length=SEQ_LENGTH, samples=STEPS * BATCH, seed=SEED
    )
    block["data_loader"]["config"]["data_path"] = ["3", "./data/a/train", "1", "data/b/train.idx"]
    content = run_yaml.load_yaml(run / "run.yaml")
    content["train_dataset"] = block
    (run / "run.yaml").write_text(run_yaml.dump(content), encoding="utf-8")
    return run


@pytest.fixture
def run(base: Path, tmp_path: Path) -> Path:
    """A copy, moved: its paths are relative."""
    return Path(shutil.copytree(base, tmp_path / "moved"))


def change(run: Path, **changes: Any) -> None:
    """Set keys of data_loader, or of its config."""
    content = run_yaml.load_yaml(run / "run.yaml")
    loader = content["train_dataset"]["data_loader"]
    for key, value in changes.items():
        (loader if key in ("sizes", "type", "dataset_files") else loader["config"])[key] = value
    (run / "run.yaml").write_text(run_yaml.dump(content), encoding="utf-8")


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def expected_tokens(run: Path, count: int) -> np.ndarray:
    """Samples of training by the rule of mindferry.data.order, [count, SEQ_LENGTH + 1]."""
    which, number, built = blend_order(WEIGHTS, STEPS * BATCH)
    orders = [
        GPTSampleOrder(open_megatron(run / "data" / name / "train"), SEQ_LENGTH, size, SEED)
        for name, size in zip("ab", built, strict=True)
    ]
    return np.stack([orders[which[k]].tokens(int(number[k])) for k in range(count)])


def test_every_batch_is_megatrons_and_resume_goes_on_with_the_next(run: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(run, tmp_path / "broken"))
    seen: dict[int, tuple[np.ndarray, ...]] = {}

    def keep(step: int, batch: tuple[Any, ...]) -> None:
        seen[step] = tuple(column.asnumpy().copy() for column in batch)

    train(RunDirectory.open(run), Options(steps=9, on_batch=keep))
    tokens = expected_tokens(run, 9 * BATCH)
    assert sorted(seen) == list(range(1, 10))
    for step, (ids, labels, mask, positions) in seen.items():
        rows = tokens[(step - 1) * BATCH : step * BATCH]
        np.testing.assert_array_equal(ids, rows[:, :-1])
        np.testing.assert_array_equal(labels, rows[:, 1:])
        np.testing.assert_array_equal(mask, np.ones_like(ids))
        np.testing.assert_array_equal(positions, np.tile(np.arange(SEQ_LENGTH), (BATCH, 1)))
    assert len(np.unique(np.concatenate([ids for ids, *_ in seen.values()]), axis=0)) == 9 * BATCH
    train(RunDirectory.open(broken), Options(steps=4))
    train(RunDirectory.open(broken), Options(steps=9, resume=True))
    assert losses(broken) == losses(run)


def test_resume_refuses_another_order(run: Path) -> None:
    directory = RunDirectory.open(run)
    train(directory, Options(steps=2))
    change(run, seed=SEED + 1)
    with pytest.raises(UsageError, match=r"step-00000002.*seed or split changed"):
        train(directory, Options(steps=4, resume=True))
    change(run, seed=SEED, sizes=[STEPS * BATCH + 40, 0, 0])
    with pytest.raises(UsageError, match="the next batch would not be the one that follows"):
        train(directory, Options(steps=4, resume=True))


def test_the_command_where_python3_is_another(run: Path, tmp_path: Path) -> None:
    """mindformers' Makefile asks `python3`; here that is one that knows no pybind11, as the system's often is."""
    for name in ("python3", "python3-config"):
        fake = tmp_path / "bin" / name
        fake.parent.mkdir(exist_ok=True)
        fake.write_text("#!/bin/sh\nexit 1\n")
        fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    env = dict(os.environ, PATH=f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    done = run_cli("train", run, "--steps", "3", "--json", env=env)
    assert done.returncode == 0, done.stderr + done.stdout
    assert len(losses(run)) == 3
    assert sorted(path.name for path in (run / "data").iterdir() if path.is_dir()) == [
        *("a", "b", "index-cache")
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sizes": [STEPS * BATCH - 1, 0, 0]}, "found 239 samples, expected at least 240: 60 steps of 4"),
        ({"seq_length": 16}, "seq_length: found 16, expected the model's 32"),
        ({"data_path": ["./data/a/train", "./data/b/train"]}, "a weight before each"),
        ({"data_path": ["1", "./data/a/train", "0", "./data/b/train"]}, "expected positive numbers"),
        ({"data_path": ["./data/a/none"]}, r"none\.(bin|idx): no such file"),
        ({"split": "0,1,0"}, "0 tokens in train of split"),
        ({"create_attention_mask": True}, "create_attention_mask: found True"),
        ({"data_paths": ["x"]}, "unknown key .*data_paths.* - did you mean 'data_path'"),
        ({"dataset_files": ["x"]}, "dataset_files belong to another loader"),
        ({"type": "MindDataset"}, "datasets_type, sizes, config belong to another loader"),
    ],
)
def test_refused_before_the_first_step(run: Path, changes: dict[str, Any], message: str) -> None:
    change(run, **changes)
    with pytest.raises(UsageError, match=message):
        train(RunDirectory.open(run), Options(steps=2))
    assert not (run / "checkpoints").exists()


def test_a_damaged_index_is_one_line(run: Path) -> None:
    index = run / "data/a/train.idx"
    index.write_bytes(index.read_bytes()[:-8])
    done = run_cli("train", run, "--steps", "2")
    assert done.returncode == 1
    assert "train.idx: byte" in done.stderr
    assert "Traceback" not in done.stderr


def test_data_use_writes_the_block(run: Path, corpus: Path, tmp_path: Path) -> None:
    """From a run on MindRecord to one on Megatron files; the rest of run.yaml stays, comments too."""
    content = run_yaml.load_yaml(run / "run.yaml")
    (run / "run.yaml").unlink()
    content["train_dataset"]["data_loader"] = {
        "type": "MindDataset",
        "dataset_files": ["./data/train.mindrecord"],
    }
    content["train_dataset"]["prefetch_size"] = 3
    (run / "run.yaml").write_text(run_yaml.dump(content) + "# the last word\n", encoding="utf-8")
    before = run_yaml.load_yaml(run / "run.yaml")
    a, b = run / "data/a/train", run.parent / "b"
    for end in (".bin", ".idx"):
        shutil.copy(run / f"data/b/train{end}", b.with_suffix(end))
    done = run_cli("data", "use", run, "3", a, "1", f"{b}.bin", "--seed", str(SEED), "--json")
    assert done.returncode == 0, done.stderr
    after = run_yaml.read(run / "run.yaml")
    loader = after["train_dataset"]["data_loader"]
    assert loader["config"]["data_path"] == [
        "0.75",
        "./data/a/train",
        "0.25",
        str(b.resolve()),
    ]  # inside RUN it moves with it
    assert loader["sizes"] == [STEPS * BATCH, 0, 0]
    assert (loader["config"]["seed"], after["train_dataset"]["prefetch_size"]) == (SEED, 3)
    assert json.loads(done.stdout)["train_dataset"]["data_loader"]["sizes"] == [STEPS * BATCH, 0, 0]
    assert (run / "run.yaml").read_text().endswith("# the last word\n")
    assert {k: v for k, v in run_yaml.load_yaml(run / "run.yaml").items() if k != "train_dataset"} == {
        k: v for k, v in before.items() if k != "train_dataset"
    }
    samples = BlendedSamples(Blend.of(loader, run))
    tokens = expected_tokens(run, 20)
    np.testing.assert_array_equal(np.stack([samples[k] for k in range(20)]), tokens)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["{a}", "{b}"], 2, "expected one prefix, or a weight before each"),
        (["1", "{a}", "x", "{b}"], 2, "expected one prefix, or a weight before each"),
        (["1", "{a}", "-1", "{b}"], 2, "expected positive numbers"),
        (["{a}x"], 2, "no such file"),
        (["{wide}"], 1, "wide.bin: document 1: token 300 at position 1, expected ids below 300"),
    ],
)
def test_data_use_refuses_and_leaves_run_yaml(run: Path, words: list[str], code: int, message: str) -> None:
    writer = MegatronWriter(run, "wide", np.uint16)
    for ids in (range(100), [7, 300, 8]):
        writer.add(np.asarray(ids))
        writer.end_document()
    writer.finish(run / "wide")
    before = (run / "run.yaml").read_bytes()
    names = {"a": run / "data/a/train", "b": run / "data/b/train", "wide": run / "wide"}
    done = run_cli("data", "use", run, "--seed", "1", "--", *(word.format(**names) for word in words))
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert (run / "run.yaml").read_bytes() == before


def test_doctor_and_verify_take_megatron_files(run: Path) -> None:
    """doctor data looks at the samples of training and times the pipeline; verify compares on them."""
    done = run_cli("doctor", "data", run, "--seconds", "1", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["statistics"]["tokens"] == STEPS * BATCH * SEQ_LENGTH
    expected = np.unique(expected_tokens(run, STEPS * BATCH)[:, :-1])
    assert (answer["statistics"]["distinct"], answer["statistics"]["largest"]) == (
        len(expected),
        expected[-1],
    )
    assert answer["pipeline"][0]["batches"] > 0
    assert not (run / "data/index-cache").exists()
    from mindferry.checking.sides import first_batch
    from mindferry.training.engine import prepare

    batch = first_batch(prepare(RunDirectory.open(run), Options()), 3)
    tokens = expected_tokens(run, 3)
    np.testing.assert_array_equal(batch.input_ids, tokens[:, :-1])
    np.testing.assert_array_equal(batch.labels, tokens[:, 1:])


def test_two_workers_read_the_same_samples(run: Path, tmp_path: Path) -> None:
    """Sharded by rank: rank r reads samples r, r + 2, ...; the batch of a step stays the same set."""
    shared = Path(shutil.copytree(run, tmp_path / "shared"))
    train(RunDirectory.open(run), Options(steps=6))
    done = run_cli("train", shared, "--steps", "6", "--workers", "2")
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(losses(shared), losses(run), rtol=2e-6)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    "config", [{}, {"eod": 0, "eod_mask_loss": True}, {"eod": 0, "reset_position_ids": True}]
)
def test_the_portable_loader_gives_what_mindformers_gives(
    run: Path, parts: int, config: dict[str, Any]
) -> None:
    """All four columns, whole and in two shards; document ends inside the samples."""
    from mindformers.dataset.dataloader.blended_megatron_dataloader import BlendedMegatronDatasetDataLoader

    from mindferry.data import compile_megatron_helper
    from mindferry.training.megatron_loader import OrderedMegatronLoader

    compile_megatron_helper()
    columns = list(run_yaml.COLUMNS)
    block = run_yaml.load_yaml(run / "run.yaml")["train_dataset"]["data_loader"]
    names = [str(run / "data" / name / "train") for name in "ab"]
    paths = ["0.75", names[0], "0.25", names[1]] if parts == 2 else names[:1]
    settings = {**block["config"], "data_path": paths, "path_to_cache": str(run / "cache"), **config}

    def rows(loader: Any, **shard: Any) -> list[tuple[np.ndarray, ...]]:
        made = loader(
            datasets_type="GPTDataset", sizes=[100, 0, 0], config=settings, column_names=columns, **shard
        )
        return list(made.create_tuple_iterator(num_epochs=1, output_numpy=True))

    with data_source.helper_for({"train_dataset": {"data_loader": block}, "use_parallel": False}):
        theirs = rows(BlendedMegatronDatasetDataLoader)
    ours = rows(OrderedMegatronLoader)
    assert len(ours) == 100
    assert any((row[0][:-1] == 0).any() for row in ours)
    for expected, found in zip(theirs, ours, strict=False):
        for one, other in zip(expected, found, strict=True):
            np.testing.assert_array_equal(one, other)
            assert one.dtype == other.dtype == np.int32
    for shard in range(2):
        part = rows(OrderedMegatronLoader, num_shards=2, shard_id=shard)
        assert len(part) == 50
        for row, whole in zip(part, ours[shard::2], strict=True):
            np.testing.assert_array_equal(row[0], whole[0])
