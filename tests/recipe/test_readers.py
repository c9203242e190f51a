"""Recipes of other frameworks: real files of theirs read back, and files that must be refused."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindferry.errors import MindferryError, UsageError
from mindferry.recipes.reading import read_recipe
from mindferry.recipes.schedule import table
from mindferry.recipes.stated import Overrides, resolve

TRAINER = {
    "output_dir": "out",
    "learning_rate": 3e-4,
    "weight_decay": 0.01,
    "adam_beta2": 0.95,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "max_steps": 200,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "fp16": False,
    "seed": 7,
    "report_to": "none",
    "use_cpu": True,
}

NANOGPT = '''"""A configuration as nanoGPT's config/ has them."""
import time
out_dir = 'out-shakespeare'
wandb_run_name = 'ft-' + str(time.time())
learning_rate = 1e-3
max_iters = 5000
lr_decay_iters = max_iters # usually equal
min_lr = learning_rate / 10
beta2 = 0.99
warmup_iters = 100
batch_size = 8
block_size = 256
gradient_accumulation_steps = 5 * 8
dtype = 'float16'
'''

MEGATRON = """#!/bin/bash
# Runs a small model
GPUS=8
LR=1.5e-4
BATCH="--micro-batch-size 4 --global-batch-size 16"
TRAINING_ARGS=(
    --train-iters 500 --lr-decay-iters 320
    --lr $LR --min-lr 1.0e-5 --lr-decay-style cosine
    --lr-warmup-fraction .01
    --weight-decay 1e-2 --clip-grad 1.0
    --adam-beta2=0.95 --fp16 --initial-loss-scale 65536
    --tensor-model-parallel-size ${TP}
)
torchrun --nproc_per_node $GPUS pretrain_gpt.py \\
    "${TRAINING_ARGS[@]}" $BATCH --seq-length 1024 2>&1 | tee log.txt
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def no_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    """TrainingArguments ask accelerate for the device; everything else of them is real."""
    import torch
    from transformers import TrainingArguments

    monkeypatch.setattr(TrainingArguments, "_setup_devices", torch.device("cpu"))


@pytest.mark.usefixtures("no_accelerate")
def test_training_arguments_in_every_form(tmp_path: Path) -> None:
    """to_dict as JSON, a YAML, and the pickle that Trainer saves give one recipe; the rates are the Trainer's."""
    import torch
    from transformers import TrainingArguments, get_scheduler

    args = TrainingArguments(**{**TRAINER, "output_dir": str(tmp_path)})
    torch.save(args, tmp_path / "training_args.bin")
    (tmp_path / "args.json").write_text(json.dumps(args.to_dict()))
    import ruamel.yaml

    with open(tmp_path / "args.yaml", "w") as stream:
        ruamel.yaml.YAML().dump(TRAINER, stream)
    made = [
        resolve(read_recipe(tmp_path / name), 1000, 32, Overrides()).recipe
        for name in ("training_args.bin", "args.json", "args.yaml")
    ]
    assert made[0] == made[1] == made[2]
    recipe = made[0]
    assert recipe.optimizer.betas == (0.9, 0.95)
    assert recipe.optimizer.weight_decay == 0.01
    assert (recipe.batch_size, recipe.gradient_accumulation_steps, recipe.seed) == (4, 2, 7)
    assert recipe.per_token_loss
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=args.learning_rate)
    warmup = args.get_warmup_steps(200)
    scheduler = get_scheduler(args.lr_scheduler_type, optimizer, warmup, 200)
    expected = []
    for _ in range(200):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    np.testing.assert_allclose(table(recipe.schedule), expected, rtol=1e-9, atol=0)


@pytest.mark.usefixtures("no_accelerate")
def test_defaults_are_those_of_the_installed_transformers(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    from mindferry.recipes.huggingface import DEFAULTS

    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    for key, value in DEFAULTS.items():
        found = getattr(args, key)
        assert getattr(found, "value", found) in (value, value or None), key


def test_nanogpt(tmp_path: Path) -> None:
    stated = read_recipe(write(tmp_path / "train_shakespeare.py", NANOGPT))
    resolved = resolve(stated, 10_000, 256, Overrides())
    recipe = resolved.recipe
    assert recipe.optimizer.betas == (0.9, 0.99)
    assert recipe.optimizer.weight_decay == 0.1
    assert (recipe.batch_size, recipe.gradient_accumulation_steps, recipe.seed) == (8, 40, 1337)
    assert recipe.schedule.total_steps == 5001, "the loop runs updates 0 to max_iters"
    rates = table(recipe.schedule)
    assert rates[0] == pytest.approx(1e-3 / 101, rel=1e-12)
    assert rates[100] == 1e-3
    assert rates[5000] == pytest.approx(1e-4, rel=1e-12)
    assert recipe.loss_scale.dynamic
    assert recipe.loss_scale.value == 65536
    assert recipe.precision.compute == "float16"
    assert not recipe.per_token_loss
    assert "wandb_run_name" in stated.ignored
    old = resolve(stated, 10_000, 256, Overrides(warmup_rule="t/w")).recipe
    assert table(old.schedule)[:2].tolist() == [0.0, 1e-5]


def test_a_python_recipe_is_never_run(tmp_path: Path) -> None:
    target = tmp_path / "touched"
    config = f"import os\nos.system('touch {target}')\nx = __import__('os').system('touch {target}')\nmax_iters = 3\n"
    assert read_recipe(write(tmp_path / "c.py", config)).steps == 4
    assert not target.exists()
    with pytest.raises(UsageError, match="line 1: learning_rate is computed"):
        read_recipe(write(tmp_path / "d.py", "learning_rate = float('1e-3')\n"))
    with pytest.raises(UsageError, match="not a nanoGPT configuration"):
        read_recipe(write(tmp_path / "e.py", "learning_rate ==\n"))


def test_megatron_launch_script(tmp_path: Path) -> None:
    stated = read_recipe(write(tmp_path / "train.sh", MEGATRON))
    recipe = resolve(stated, 1000, 1024, Overrides()).recipe
    assert recipe.schedule.learning_rate == 1.5e-4
    assert recipe.schedule.warmup_steps == 3
    assert recipe.schedule.total_steps == 500
    assert table(recipe.schedule)[-1] == 1e-5, "min_lr after lr_decay_iters"
    assert (recipe.batch_size, recipe.gradient_accumulation_steps) == (4, 4)
    assert recipe.optimizer.betas == (0.9, 0.95)
    assert recipe.optimizer.weight_decay == 0.01
    assert recipe.loss_scale.model_dump() == {
        "dynamic": True,
        "value": 65536.0,
        "factor": 2.0,
        "window": 1000,
        "floor": 1.0,
    }
    assert any("rounded to 3" in warning for warning in stated.warnings)
    assert "tensor-model-parallel-size" in stated.ignored


def test_megatron_checkpoint_arguments(tmp_path: Path) -> None:
    import torch

    args = argparse.Namespace(
        lr=1e-4, train_samples=6400, micro_batch_size=2, global_batch_size=64, bf16=True, seq_length=64, tp=1
    )
    torch.save({"args": args, "iteration": 3}, tmp_path / "model_optim_rng.pt")
    recipe = resolve(read_recipe(tmp_path / "model_optim_rng.pt"), 1000, 64, Overrides()).recipe
    assert recipe.schedule.total_steps == 100
    assert recipe.gradient_accumulation_steps == 32
    assert recipe.precision.compute == "bfloat16"


class Evil:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_a_pickle_with_code_is_refused_and_not_run(tmp_path: Path) -> None:
    import torch

    target = tmp_path / "touched"
    torch.save(Evil(str(target)), tmp_path / "training_args.bin")
    with pytest.raises(MindferryError, match="system, which is no training argument"):
        read_recipe(tmp_path / "training_args.bin")
    (tmp_path / "old.bin").write_bytes(pickle.dumps(Evil(str(target))))
    with pytest.raises(MindferryError, match="no training argument"):
        read_recipe(tmp_path / "old.bin")
    torch.save({"weights": torch.ones(2)}, tmp_path / "weights.bin")
    with pytest.raises(MindferryError, match="no training argument"):
        read_recipe(tmp_path / "weights.bin")
    assert not target.exists()


@given(st.binary(max_size=200))
@settings(max_examples=60, deadline=None)
def test_damaged_pickles_say_so(tmp_path_factory: pytest.TempPathFactory, junk: bytes) -> None:
    path = tmp_path_factory.mktemp("junk") / "training_args.bin"
    path.write_bytes(b"\x80\x04" + junk)
    with pytest.raises(MindferryError):
        read_recipe(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x04" + junk)
    with pytest.raises(MindferryError):
        read_recipe(path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", '{"learning_rat": 1}', "learning_rat: no setting .*did you mean 'learning_rate'"),
        ("a.json", '{"optim": "adafactor"}', "optim = 'adafactor': AdamW is what"),
        ("a.json", '{"lr_scheduler_type": "reduce_lr_on_plateau"}', "lr_scheduler_type"),
        ("a.json", '{"fp16": true, "bf16": true}', "together with bf16"),
        ("a.json", '{"learning_rate": "fast"}', "learning_rate: found 'fast', expected a number"),
        ("a.json", '{"learning_rate": NaN}', "expected a finite number"),
        ("a.json", '{"lr_scheduler_kwargs": {"cycles": 2}}', "cycles cannot be carried over"),
        ("a.json", "[1]", "found list, expected a table"),
        ("a.json", "{", "not JSON"),
        ("a.toml", "", "found '.toml', expected one of"),
        ("a.sh", "python x.py --lr 1e-4", "no --micro-batch-size"),
        ("a.sh", "python x.py", "no --lr in it"),
        ("a.sh", "x --lr $(cat lr) --micro-batch-size 1", "--lr .*computed"),
        ("a.sh", "x --lr 1 --lr 2", "--lr is given twice"),
        ("a.sh", "x --lr 1 --micro-batch-size 2 --optimizer sgd", "optimizer = 'sgd'"),
        (
            "a.sh",
            "x --lr 1 --micro-batch-size 2 --global-batch-size 3",
            "not a multiple of micro_batch_size 2",
        ),
        ("a.sh", "x --lr 1 --micro-batch-size 2 --rampup-batch-size 2 2 100", "rampup_batch_size"),
        ("a.sh", "x --lr '1", "cannot be read as a shell script"),
        (
            "a.sh",
            "x --lr 1 --micro-batch-size 2 --adam-beta-2 .9",
            "--adam-beta-2: .*did you mean --adam-beta2",
        ),
        ("a.sh", "x --lr 1 --micro-batch-size 2 --lr-warmup-iter 9", "did you mean --lr-warmup-iters"),
        ("a.py", "max_iters = 9\nlearning_rat = 1e-3", "learning_rat: .*did you mean 'learning_rate'"),
        ("a.py", "max_iters = 9\nwarmup_iter = 3", "did you mean 'warmup_iters'"),
        (
            "a.yaml",
            "learning_rate: 1\nwarmup_step: 3",
            "warmup_step: no setting .*did you mean 'warmup_steps'",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_recipe(write(tmp_path / name, text))


def test_names_of_ones_own_are_no_misspelling(tmp_path: Path) -> None:
    """A configuration may compute with names of its own; they are listed, not refused."""
    text = "max_iters = 9\nn_head = 6\neval_iters = 20\nbase_lr = 1e-3\nlearning_rate = base_lr\nmy_min_lr = 1e-4\n"
    stated = read_recipe(write(tmp_path / "c.py", text))
    assert stated.schedule["learning_rate"] == 1e-3
    assert {"base_lr", "my_min_lr", "eval_iters"} <= set(stated.ignored)
    flags = "--eval-iters 5 --num-layers 2 --decoder-seq-length 9 --decoupled-lr 1 --no-rope-fusion --fp8-format e4m3"
    script = f"x --lr 1e-4 --train-iters 9 --micro-batch-size 2 --global-batch-size 2 {flags}"
    assert len(read_recipe(write(tmp_path / "c.sh", script)).ignored) == 6


def arguments(tmp_path: Path, **values: object) -> Path:
    return write(tmp_path / "args.json", json.dumps({**TRAINER, **values}))


def test_another_global_batch_needs_a_choice(tmp_path: Path) -> None:
    """Micro-batches may be cut anew freely; another number of sequences a step may not pass in silence."""
    stated = read_recipe(arguments(tmp_path))
    same = resolve(stated, 1000, 32, Overrides(batch_size=2)).recipe
    assert (same.batch_size, same.gradient_accumulation_steps) == (2, 4)
    assert same.schedule.learning_rate == 3e-4
    with pytest.raises(UsageError, match="makes 32 sequences a step, the source had 8"):
        resolve(stated, 1000, 32, Overrides(batch_size=4, gradient_accumulation_steps=8))
    for rule, rate in (("none", 3e-4), ("linear", 12e-4), ("sqrt", 6e-4)):
        asked = Overrides(batch_size=4, gradient_accumulation_steps=8, lr_scaling=rule)
        assert resolve(stated, 1000, 32, asked).recipe.schedule.learning_rate == pytest.approx(rate)
    with pytest.raises(UsageError, match="do not divide into micro-batches of 3"):
        resolve(stated, 1000, 32, Overrides(batch_size=3))


def test_a_constant_rate_has_no_warm_up(tmp_path: Path) -> None:
    stated = read_recipe(arguments(tmp_path, lr_scheduler_type="constant", warmup_steps=50))
    assert set(table(resolve(stated, 1000, 32, Overrides()).recipe.schedule)) == {3e-4}


def test_combinations_that_cannot_work(tmp_path: Path) -> None:
    from mindferry.recipes.stated import check_precision
    from mindferry.spec import LossScale, Precision

    stated = read_recipe(arguments(tmp_path, warmup_steps=50, warmup_ratio=0.0))
    with pytest.raises(UsageError, match="warm-up of 50 steps, the run has 20"):
        resolve(stated, 1000, 32, Overrides(steps=20))
    with pytest.raises(UsageError, match="needs 8 sequences, the data have 5"):
        resolve(stated, 5, 32, Overrides())
    with pytest.raises(UsageError, match="params float16"):
        check_precision(Precision(compute="float16", params="float16"), LossScale(), "x")
    with pytest.raises(UsageError, match="level O3"):
        check_precision(Precision(compute="bfloat16", softmax="float16"), LossScale(), "x")
    with pytest.raises(UsageError, match="only float16 needs one"):
        check_precision(Precision(), LossScale(dynamic=True), "x")


@given(st.text(max_size=120), st.sampled_from(["a.py", "a.sh", "a.json", "a.yaml"]))
@settings(max_examples=150, deadline=None)
def test_any_text_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str, name: str) -> None:
    path = tmp_path_factory.mktemp("text") / name
    path.write_text(text, encoding="utf-8", errors="ignore")
    with contextlib.suppress(MindferryError):
        assert read_recipe(path).batch_size > 0
