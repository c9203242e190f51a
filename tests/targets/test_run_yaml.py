"""run.yaml: closed, typed, YAML 1.2, and readable by mindformers' own (PyYAML) reader."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mindferry.errors import UsageError
from mindferry.spec import Recipe, Schedule
from mindferry.targets import run_yaml

from ..support import gpt2_spec

SPEC = gpt2_spec(
    vocab_size=300,
    hidden_size=48,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=12,
    ffn_hidden_size=100,
    max_position_embeddings=64,
    layernorm_epsilon=1e-6,
    activation="gelu_erf",
)
RECIPE = Recipe(schedule=Schedule(learning_rate=1e-5, total_steps=10), seq_length=32)


@pytest.fixture
def text() -> str:
    return run_yaml.dump(run_yaml.build(SPEC, RECIPE, steps_per_epoch=5))


def check(tmp_path: Path, text: str) -> dict:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return run_yaml.read(path)


def test_round_trip(tmp_path: Path, text: str) -> None:
    content = check(tmp_path, text)
    config = content["model"]["model_config"]
    assert config["layernorm_epsilon"] == 1e-6
    assert config["activation"] == "gelu_erf"
    assert config["tie_word_embeddings"] is False
    assert content["model"]["arch"]["type"] == "GPT2ForTraining"
    assert content["runner_config"]["epochs"] == 2


def test_precision_is_explicit(text: str) -> None:
    for line in (
        "compute_dtype: float32",
        "layernorm_compute_type: float32",
        "softmax_compute_type: float32",
        "param_init_type: float32",
    ):
        assert line in text


def test_pyyaml_reads_the_same_numbers(tmp_path: Path, text: str) -> None:
    """mindformers reads with PyYAML, where `1e-05` would be a string."""
    theirs = yaml.safe_load(text)
    assert theirs["lr_schedule"]["learning_rate"] == 1e-5
    assert theirs["optimizer"]["eps"] == 1e-8
    assert theirs["model"]["model_config"]["layernorm_epsilon"] == 1e-6


def test_yaml_1_2_numbers_by_hand(tmp_path: Path, text: str) -> None:
    content = check(tmp_path, text.replace("learning_rate: 1.0e-05", "learning_rate: 1e-5"))
    assert content["lr_schedule"]["learning_rate"] == 1e-5


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "batch_size: 8",
            "batch_sise: 8",
            r"unknown key 'runner_config.batch_sise' - did you mean 'batch_size'",
        ),
        ("seed: 42\nrun_mode", "sead: 42\nrun_mode", r"unknown key 'sead' - did you mean 'seed'"),
        ("hidden_size: 48", "hiden_size: 48", r"unknown key 'hiden_size'"),
        ("batch_size: 8", "batch_size: many", r"runner_config.batch_size: found 'many'"),
        ("batch_size: 8", "batch_size: true", r"runner_config.batch_size: found True"),
        ("batch_size: 8", "batch_size: 0", r"runner_config.batch_size: found 0"),
        ("run_mode: train", "run_mode: train\nrun_mode: eval", r"duplicate key"),
        ("run_mode: train", "run_mode: [train", r"line \d+"),
        ("output_dir: ./output", "output_dir: &x ./output\nload_ckpt_format: *x", r"aliases"),
        ("run_mode: train", "run_mode: !!python/object/apply:os.system ['true']", r"line \d+"),
    ],
)
def test_bad_files_say_what_and_where(tmp_path: Path, text: str, old: str, new: str, said: str) -> None:
    assert old in text
    with pytest.raises(UsageError, match=said):
        check(tmp_path, text.replace(old, new, 1))


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    with open(path, "wb") as handle:
        handle.truncate(run_yaml.MAX_YAML_BYTES + 1)
    with pytest.raises(UsageError, match="expected at most"):
        run_yaml.read(path)


def test_a_missing_file_names_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        run_yaml.read(tmp_path / "run.yaml")


def test_data_files_are_found_as_mindformers_finds_them(tmp_path: Path) -> None:
    """dataset_dir first, every file below it whose name ends in mindrecord and digits; else dataset_files."""
    names = ["b.mindrecord", "a.mindrecord0", "deeper/c.mindrecord", "a.mindrecord.db", "notes.txt"]
    for name in names:
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def content(**loader: object) -> dict:
        return {"train_dataset": {"data_loader": {"type": "MindDataset", **loader}}}

    found = run_yaml.data_files(content(dataset_dir="data", dataset_files=["other"]), tmp_path)
    assert found == [
        tmp_path / "data" / name for name in ("a.mindrecord0", "b.mindrecord", "deeper/c.mindrecord")
    ]
    assert run_yaml.data_files(content(dataset_files="./data/x"), tmp_path) == [tmp_path / "data" / "x"]
    for nothing in ({}, {"dataset_dir": "empty"}):
        with pytest.raises(UsageError, match="no MindRecord files"):
            run_yaml.data_files(content(**nothing), tmp_path)
