"""Recipes in whole runs, through mindformers' Trainer."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mindferry.errors import MindferryError, UsageError
from mindferry.targets import run_yaml
from mindferry.targets.run_directory import RunDirectory
from mindferry.training.engine import Options, prepare, train

from ..support import make_run, make_source, run_cli

NANOGPT = """
learning_rate = 1e-3
max_iters = 30
lr_decay_iters = 30
warmup_iters = 5
min_lr = 1e-4
batch_size = 2
block_size = 32
gradient_accumulation_steps = 4
grad_clip = 0.7
dtype = 'bfloat16'
"""


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source without dropout."""
    directory = tmp_path_factory.mktemp("plain") / "gpt2"
    return make_source(directory, embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0, n_layer=1)


def test_migrate_with_a_recipe_and_train(plain: Path, corpus: Path, tmp_path: Path) -> None:
    """The command: recipe in, accumulation and warm-up as the source had them, one record a step."""
    recipe = tmp_path / "train_small.py"
    recipe.write_text(NANOGPT)
    run = tmp_path / "run"
    done = run_cli(
        *("migrate", plain, "--data", corpus, "--out", run, "--seq-length", "32"),
        *("--recipe", recipe, "--json"),
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((run / "migration.json").read_text())
    origin = {row["key"]: row["from"] for row in report["recipe"]}
    assert origin["learning_rate"] == "train_small.py (nanoGPT)"
    content = run_yaml.read(run / "run.yaml")
    assert content["runner_config"]["gradient_accumulation_steps"] == 4
    assert content["optimizer"]["betas"] == [0.9, 0.95]
    outcome = train(RunDirectory.open(run), Options(steps=6))
    assert "no bfloat16" in outcome.notes[0]
    records = metrics(run)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert [record["lr"] for record in records] == pytest.approx(
        [1e-3 / 6, 2e-3 / 6, 3e-3 / 6, 4e-3 / 6, 5e-3 / 6, 1e-3], rel=1e-6
    )
    assert records[0]["tokens_per_second"] == pytest.approx(8 * 32 / records[0]["step_time"])


def test_accumulated_steps_are_those_of_one_big_batch(plain: Path, corpus: Path, tmp_path: Path) -> None:
    """Four micro-batches of 2, and one batch of 8: the same losses, also after a resume."""
    whole = make_run(plain, corpus, tmp_path / "whole", batch_size=8)
    cut = make_run(plain, corpus, tmp_path / "cut", batch_size=2, accumulation=4)
    train(RunDirectory.open(whole), Options(steps=8))
    train(RunDirectory.open(cut), Options(steps=5))
    train(RunDirectory.open(cut), Options(steps=8, resume=True))
    pairs = [(a["loss"], b["loss"]) for a, b in zip(metrics(whole), metrics(cut), strict=True)]
    assert len(pairs) == 8
    assert max(abs(a - b) for a, b in pairs) <= 1e-5


def test_a_run_that_only_overflows_stops_and_says_so(plain: Path, corpus: Path, tmp_path: Path) -> None:
    run = make_run(plain, corpus, tmp_path / "run", amp_level="O2")
    content = run_yaml.read(run / "run.yaml")
    assert content["runner_wrapper"]["scale_sense"]["type"] == "DynamicLossScaleUpdateCell"
    overrides = {
        "runner_wrapper.scale_sense.loss_scale_value": 2.0**120,
        "runner_wrapper.scale_sense.scale_floor": 2.0**117,
    }
    with pytest.raises(MindferryError, match="every step since step 1") as caught:
        train(RunDirectory.open(run), Options(steps=30, overrides=overrides))
    assert "fell to its floor" in str(caught.value)
    records = metrics(run)
    assert [record["loss_scale"] for record in records] == [2.0**120, 2.0**119, 2.0**118, 2.0**117]
    assert records[-1]["skipped_steps"] == 4
    assert len({record["lr"] for record in records}) == 1, "skipped steps do not advance the schedule"


def test_resume_is_bit_equal_with_dropout(corpus: Path, tmp_path: Path) -> None:
    """Dropout at every place, shuffled data, an epoch boundary, accumulation: the unbroken run's losses."""
    source = make_source(tmp_path / "gpt2", embd_pdrop=0.2, resid_pdrop=0.2, attn_pdrop=0.2, n_layer=1)
    runs = {
        name: make_run(source, corpus, tmp_path / name, batch_size=48, accumulation=2)
        for name in ("whole", "broken")
    }
    train(RunDirectory.open(runs["whole"]), Options(steps=10))
    state = json.loads((runs["whole"] / "checkpoints/step-00000010/state.json").read_text())
    assert 3 < state["steps_per_epoch"] < 10, "the test must cross an epoch"
    train(RunDirectory.open(runs["broken"]), Options(steps=4))
    train(RunDirectory.open(runs["broken"]), Options(steps=10, resume=True))
    whole, broken = ([record["loss"] for record in metrics(runs[name])] for name in ("whole", "broken"))
    assert broken == whole


def test_a_changed_batch_goes_on_in_samples(plain: Path, corpus: Path, tmp_path: Path) -> None:
    """Stopped after 6 steps of 4 sequences, resumed with steps of 8: the sequences are those of an unbroken pass."""
    order: list[list[int]] = []

    def keep(step: int, values: tuple) -> None:
        order.extend(row.tolist() for row in values[0].asnumpy())

    whole = make_run(plain, corpus, tmp_path / "whole", batch_size=4)
    train(RunDirectory.open(whole), Options(steps=10, on_batch=keep))
    unbroken, order[:] = list(order), []
    broken = make_run(plain, corpus, tmp_path / "broken", batch_size=4)
    train(RunDirectory.open(broken), Options(steps=6, on_batch=keep))
    train(
        RunDirectory.open(broken),
        Options(steps=8, resume=True, on_batch=keep, overrides={"runner_config.batch_size": 8}),
    )
    assert order == unbroken
    assert [record["step"] for record in metrics(broken)] == list(range(1, 9))


@pytest.mark.parametrize("written", ["type: TrainOneStepCell", "type: TrainOneStepWithLossScaleCell"])
def test_mindspores_own_steps_are_the_same_step(
    plain: Path, corpus: Path, tmp_path: Path, written: str
) -> None:
    """The article's `nn.TrainOneStepCell(..., sens=1024)`: what will run is mindformers' step with that scale."""
    run = make_run(plain, corpus, tmp_path / "run")
    text = (run / "run.yaml").read_text().replace("type: MFTrainOneStepCell", f"{written}\n  sens: 1024")
    (run / "run.yaml").write_text(text)
    wrapper = prepare(RunDirectory.open(run), Options())["runner_wrapper"]
    assert wrapper["type"] == "MFTrainOneStepCell"
    assert wrapper["scale_sense"] == 1024
    assert "sens" not in wrapper


def test_loss_and_time_monitors_of_mindspore(
    plain: Path, corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The article's LossMonitor and TimeMonitor, by name: their lines, with the losses of metrics.jsonl."""
    run = make_run(plain, corpus, tmp_path / "run")
    content = run_yaml.read(run / "run.yaml")
    content["callbacks"] = [
        {"type": "LossMonitor", "per_print_times": 2},
        {"type": "TimeMonitor", "data_size": 4},
    ]
    (run / "run.yaml").write_text(run_yaml.dump(content))
    train(RunDirectory.open(run), Options(steps=4))
    printed = capfd.readouterr().out
    lines = re.findall(r"epoch: (\d+) step: (\d+), loss is ([\d.]+)", printed)
    assert [(int(epoch), int(step)) for epoch, step, _ in lines] == [(1, 2), (1, 4)]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [float(value) for _, _, value in lines] == pytest.approx(
        [records[1]["loss"], records[3]["loss"]], rel=1e-6
    )
    assert re.search(r"Train epoch time: [\d.]+ ms, per step time: [\d.]+ ms", printed)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"param_init_type": "float16", "compute_dtype": "float16"}, "params float16"),
        ({"param_init_type": "bfloat16"}, "params bfloat16"),
        (
            {"compute_dtype": "bfloat16", "softmax_compute_type": "float16"},
            "level O3 means float16 everywhere",
        ),
        (
            {"compute_dtype": "bfloat16", "layernorm_compute_type": "float16"},
            "level O3 means float16 everywhere",
        ),
        ({"compute_dtype": "float8"}, "compute: .*float8"),
    ],
)
def test_types_that_cannot_train_together_in_a_run_yaml(
    plain: Path, corpus: Path, tmp_path: Path, config: dict, message: str
) -> None:
    run = RunDirectory.open(make_run(plain, corpus, tmp_path / "run"))
    overrides = {f"model.model_config.{key}": value for key, value in config.items()}
    with pytest.raises(UsageError, match=message):
        prepare(run, Options(overrides=overrides))


def test_data_sinking_is_for_devices_that_have_it(plain: Path, corpus: Path, tmp_path: Path) -> None:
    """Written for Ascend, one step at a time so that every loss is reported; a CPU refuses it or leaves it out."""
    run = RunDirectory.open(make_run(plain, corpus, tmp_path / "run", device="Ascend"))
    text = run.yaml.read_text()
    assert "sink_mode: true  #" in text
    assert "sink_size: 1  # steps handed to the device at once" in text
    assert prepare(run, Options())["runner_config"]["sink_mode"] is True
    assert prepare(run, Options(device="cpu"))["runner_config"]["sink_mode"] is False
    with pytest.raises(UsageError, match="a CPU has no device queue to sink data into"):
        prepare(run, Options(overrides={"context.device_target": "CPU"}))
    here = RunDirectory.open(make_run(plain, corpus, tmp_path / "here"))
    assert "sink_mode: false  # data sinking needs a device queue" in here.yaml.read_text()
