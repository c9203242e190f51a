"""The four steps on seeded faults and healthy runs; and each step by itself on made-up numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindferry.diagnosis.loss import Band, examine, metrics
from mindferry.diagnosis.loss.data_step import Rows, judge_rows
from mindferry.diagnosis.loss.gradient_step import examine_gradients, judge_layers
from mindferry.diagnosis.loss.metrics import Metrics, from_records
from mindferry.diagnosis.loss.precision_step import worse
from mindferry.diagnosis.loss.schedule_step import Source, examine_schedule, rates, source_of
from mindferry.diagnosis.loss.step import Step
from mindferry.diagnosis.tiny import Tiny, make_run, rows, tokens, weights
from mindferry.errors import UsageError

from .faults import FAULTS, make

# 56 = 14 faults x 4 seeds, and a fifth seed of the data's: 60 runs.
SEEDED = [(name, seed) for name in FAULTS for seed in range(4)]
SEEDED += [(name, 4) for name, (step, _) in FAULTS.items() if step == "data"]


def named(tmp_path: Path, name: str, seed: int) -> str | None:
    step, fault = FAULTS[name]
    # Step 1 needs no record of a training.
    return examine(make(tmp_path / f"{name}-{seed}", seed, fault, train=step != "data")).culprit


# -- the proof ------------------------------------------------------------------------------------------------
@pytest.mark.long
@pytest.mark.timeout(7200)
def test_seeded_faults_are_named_and_healthy_runs_pass(tmp_path: Path) -> None:
    wrong = []
    for name, seed in SEEDED:
        found = named(tmp_path, name, seed)
        if found != FAULTS[name][0]:
            wrong.append(f"{name} seed {seed}: expected {FAULTS[name][0]}, found {found}")
    sick = []
    for seed in range(20):
        exam = examine(make(tmp_path / f"healthy-{seed}", seed))
        if [step.verdict for step in exam.steps] != ["good"] * 4 or any(
            f.severity == "problem" for f in exam.findings
        ):
            sick.append(f"healthy seed {seed}: {[vars(item) for item in exam.findings]}")
    print(
        f"{len(SEEDED) - len(wrong)} of {len(SEEDED)} faults named, {20 - len(sick)} of 20 healthy runs pass"
    )
    assert len(SEEDED) == 60
    assert len(wrong) <= 3, wrong
    assert sick == []


@pytest.mark.parametrize("name", ["shifted_labels", "sorted_data", "constant_batch", "ids_out_of_range"])
def test_data_faults(name: str, tmp_path: Path) -> None:
    assert named(tmp_path, name, 7) == "data"


def test_one_fault_and_one_healthy_run_through_the_real_trainer(tmp_path: Path) -> None:
    """The fast subset of the proof: a dead layer (passes three steps first) and the same run without it."""
    exam = examine(make(tmp_path / "dead", 8, FAULTS["dead_layer"][1]))
    assert [step.verdict for step in exam.steps] == ["good", "good", "good", "culprit"]
    assert "linear_fc" in exam.findings[-1].message
    healthy = examine(make(tmp_path / "healthy", 8))
    assert [step.verdict for step in healthy.steps] == ["good"] * 4


def test_the_run_is_only_read(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", changes={"train_dataset.data_loader.shuffle": False})
    before = {path: path.stat().st_mtime_ns for path in sorted(root.rglob("*"))}
    ids = rows(tokens(Tiny()))
    ids["labels"] = ids["input_ids"]
    assert examine(root).steps
    assert {path: path.stat().st_mtime_ns for path in sorted(root.rglob("*"))} == before


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no run\.yaml"):
        examine(tmp_path)


def test_a_run_that_does_not_train_is_a_problem_and_no_step_is_blamed(tmp_path: Path) -> None:
    params = weights(Tiny())
    del params["decoder.layers.1.mlp.linear_fc1.weight"]
    exam = examine(make_run(tmp_path / "run", params=params))
    assert exam.culprit is None
    assert [step.verdict for step in exam.steps] == ["good", "good", "unknown", "unknown"]
    (problem,) = [item for item in exam.findings if item.severity == "problem"]
    assert problem.id == "loss.does-not-train"
    assert "linear_fc1" in problem.message


# -- step 1, without MindSpore --------------------------------------------------------------------------------
def content(batch: int = 8, vocab: int = 64, shuffle: bool = True) -> dict:
    return {
        "runner_config": {"batch_size": batch},
        "model": {"model_config": {"vocab_size": vocab, "seq_length": 16, "eos_token_id": 0}},
        "train_dataset": {"data_loader": {"shuffle": shuffle}},
    }


def judged(columns: dict[str, np.ndarray], **settings) -> dict[str, str]:
    step = Step("data")
    rng = np.random.default_rng(0)
    order = rng.permutation(len(columns["input_ids"]))[:64]
    judge_rows(step, Rows({k: v[order] for k, v in columns.items()}), Rows(columns), content(**settings))
    return {item.id.removeprefix("loss.data."): item.severity for item in step.findings}


def test_good_rows() -> None:
    assert judged(rows(tokens(Tiny()))) == {}
    assert judged(rows(tokens(Tiny())), shuffle=False) == {"unshuffled": "info"}


def test_order_of_the_data() -> None:
    """Sorted rows are found at any batch size; shuffled rows never are."""
    for batch in (2, 4, 8, 16):
        for seed in range(5):
            ids = tokens(Tiny(seed=seed))
            topic = np.arange(len(ids)) * 4 // len(ids)
            ids = (ids % 16 + topic[:, None] * 16).astype(np.int32)
            for order, expected in (
                (np.arange(256), ["loss.data.order"]),
                (np.random.default_rng(seed).permutation(256), []),
            ):
                step = Step("data")
                first = rows(ids[order[: 8 * batch]])
                judge_rows(step, Rows(first), Rows(rows(ids)), content(batch=batch))
                assert [item.id for item in step.findings] == expected, (batch, seed)


@pytest.mark.parametrize("shift", [-1, 0, 2])
def test_label_shift(shift: int) -> None:
    ids = tokens(Tiny(seq_length=20))
    columns = rows(ids[:, 2:19])
    columns["labels"] = ids[:, 2 + shift : 18 + shift]
    assert judged(columns) == {"label-shift": "problem"}


def test_ignored_labels_are_no_fault() -> None:
    columns = rows(tokens(Tiny()))
    columns["labels"] = columns["labels"].copy()
    columns["loss_mask"] = columns["loss_mask"].copy()
    columns["labels"][:, :5], columns["loss_mask"][:, :5] = -100, 0
    assert judged(columns) == {}


def test_mask_padding_constant_and_length() -> None:
    good = rows(tokens(Tiny()))
    empty = {**good, "loss_mask": np.zeros_like(good["loss_mask"])}
    assert judged(empty) == {"mask": "problem"}
    padded = tokens(Tiny())
    padded[:, 6:] = 0
    assert judged(rows(padded)) == {"padding": "problem"}
    masked = rows(padded)
    masked["loss_mask"] = (masked["labels"] != 0).astype(np.int32)
    assert judged(masked) == {}
    assert judged(rows(np.full((256, 17), 5, np.int32)))["constant"] == "problem"
    assert judged(rows(tokens(Tiny(seq_length=15)))) == {"length": "problem"}
    assert judged(good, vocab=50) == {"ids-out-of-range": "problem"}


# -- metrics --------------------------------------------------------------------------------------------------
def record(step: int, **changes) -> dict:
    base = {
        "step": step,
        "loss": 4.0 / step**0.1,
        "lr": 1e-3,
        "grad_norm": 1.0,
        "loss_scale": 1.0,
        "overflow": False,
    }
    return {**base, **changes}


def test_metrics_are_read_with_patience(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [
        json.dumps(record(1)),
        json.dumps(record(2, loss="nan", grad_norm="inf")),
        '{"step": 3, "lo',
        "[1]",
        "",
    ]
    lines += [
        json.dumps(record(2, loss=3.0)),
        json.dumps({"step": "x"}),
        json.dumps({"step": True}),
        "\0\xff",
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    found = metrics.read(path)
    assert found.steps.tolist() == [1, 2]
    assert found.loss.tolist() == [4.0, 3.0]
    assert found.bad_lines == 5
    assert len(metrics.read(tmp_path / "none")) == 0


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(), max_size=2),
)
KEYS = st.sampled_from(["step", "loss", "lr", "grad_norm", "loss_scale", "overflow", "other"])


@settings(max_examples=200, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.dictionaries(KEYS, VALUES), max_size=30))
def test_any_record_is_survived(tmp_path: Path, lines: list[dict]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    found = metrics.read(path)
    assert len(found) + found.bad_lines <= len(lines)
    assert (np.diff(found.steps) > 0).all()
    examine_gradients({}, found)
    band = Band()
    for line in lines:
        band.feed(line)


@pytest.mark.parametrize(
    "line", ['{"step": 1, "loss": 1' + "0" * 400 + "}", "[" * 90_000, '{"step": ' + "9" * 5000 + "}"]
)
def test_hostile_records(line: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(line + "\n" + json.dumps(record(2)))
    assert 2 in metrics.read(tmp_path / "metrics.jsonl").steps


def test_case_27_the_rank_that_had_the_nan_is_named(tmp_path: Path) -> None:
    """A mean of NaN says nothing about whose it was; each process records its own loss, too."""
    (tmp_path / "logs").mkdir()
    for rank, name in (
        (0, "metrics.jsonl"),
        (1, "logs/metrics.rank_1.jsonl"),
        (2, "logs/metrics.rank_2.jsonl"),
    ):
        lines = [
            {"step": 1, "loss": 4.0, "rank_loss": 4.0 + rank},
            {"step": 2, "loss": "nan", "rank_loss": "nan" if rank == 1 else 4.0},
            {"step": 3, "loss": "nan", "rank_loss": "nan"},
        ]
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines) + "{torn")
    found = metrics.read(tmp_path / "metrics.jsonl")
    assert found.bad_ranks == (1,)
    step = examine_gradients({}, found)
    assert "it is rank 1 whose own loss is no number first" in step.findings[0].message


def test_case_27_first_nan_lies_between_two_records() -> None:
    found = from_records([record(2990, loss=3.8853), record(3000, loss=4.2490), record(3010, loss="nan")])
    broken = metrics.first_break(found)
    assert broken is not None
    assert "(3000, 3010]" in str(broken)
    assert "4.2490" in str(broken)
    assert broken.last_finite == 3000
    step = examine_gradients({}, from_records([record(n) for n in range(1, 9)] + [record(9, loss="nan")]))
    assert [item.id for item in step.findings] == ["loss.gradients.not-finite"]
    assert "(8, 9]" in step.findings[0].message


def test_case_25_overflow() -> None:
    falling = [record(n, overflow=True, loss_scale=65536 / 2 ** (n - 1)) for n in range(1, 18)]
    step = examine_gradients({}, from_records(falling))
    (item,) = step.findings
    assert item.id == "loss.gradients.overflow"
    assert "17 steps in a row overflow from step 1" in item.message
    assert "floor" in item.cause
    early = [record(n, overflow=n <= 2, loss_scale=16384.0) for n in range(1, 1001)]
    assert [(i.id, i.severity) for i in examine_gradients({}, from_records(early)).findings] == [
        ("loss.gradients.single-overflow", "info")
    ]
    once = examine_gradients({}, from_records([record(n, overflow=n == 37) for n in range(1, 100)]))
    assert once.verdict == "good"
    assert "37" in once.findings[0].message


# -- steps 2 to 4 on made-up numbers --------------------------------------------------------------------------
def curve(values) -> Metrics:
    return from_records([record(n, loss=float(v)) for n, v in enumerate(values, start=1)])


FALLING = np.linspace(4.0, 3.0, 24)


def test_precision_comparison() -> None:
    good = curve(FALLING)
    assert worse(curve(FALLING * (1 + 1e-4)), good) == ""
    assert "above float32" in worse(curve(np.full(24, 4.0)), good)
    assert "no number" in worse(curve(np.where(np.arange(24) > 9, np.nan, FALLING)), good)
    assert "very first" in worse(curve(FALLING + np.linspace(-0.5, 0, 24)), good)
    assert worse(curve(np.full(24, np.nan)), curve(np.full(24, np.nan))) == ""
    overflowing = from_records([record(n, overflow=True) for n in range(1, 25)])
    assert "overflow" in worse(overflowing, good)


@pytest.mark.parametrize(
    "block",
    [
        {"type": "CosineWithWarmUpLR", "lr_end": 1e-5, "warmup_steps": 4},
        {"type": "LinearWithWarmUpLR", "warmup_steps": 3},
        {"type": "ConstantWarmUpLR", "warmup_steps": 5, "warmup_lr_init": 1e-4},
        {"type": "PolynomialWithWarmUpLR", "lr_end": 1e-4, "power": 1.0, "warmup_steps": 2},
    ],
)
def test_rates_are_mindformers_own(block: dict) -> None:
    import mindspore as ms
    from mindformers.core import lr

    block = {"learning_rate": 3e-3, "total_steps": 20, **block}
    settings = {key: value for key, value in block.items() if key != "type"}
    schedule = getattr(lr, block["type"])(**settings)
    theirs = [float(schedule(ms.Tensor(n, ms.int32)).asnumpy()) for n in range(20)]
    ours = rates(block, 20)
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-9)


def schedule_findings(block: dict, recipe: dict, lrs=None) -> set[str]:
    full = {
        "type": "CosineWithWarmUpLR",
        "learning_rate": 1e-3,
        "warmup_steps": 4,
        "total_steps": 40,
        **block,
    }
    values = lrs if lrs is not None else rates(full, 40)
    found = from_records([record(n, lr=v) for n, v in enumerate(values, start=1)])
    report = {"recipe": [{"key": key, "value": value} for key, value in recipe.items()]}
    run = {"lr_schedule": full, "runner_config": {"batch_size": 16}}
    return {
        item.id.removeprefix("loss.learning-rate.")
        for item in examine_schedule(run, report, found, None).findings
    }


SAME = {
    "learning_rate": 1e-3,
    "warmup_steps": 4,
    "total_steps": 40,
    "lr_schedule": "cosine",
    "batch_size": 16,
}


def test_schedule_against_the_source() -> None:
    assert schedule_findings({}, SAME) == set()
    assert schedule_findings({}, {}) == set()
    assert schedule_findings({"learning_rate": 1e-2}, SAME) == {"peak"}
    assert schedule_findings({"warmup_steps": 0}, SAME) == {"warmup"}
    assert schedule_findings({"total_steps": 12}, SAME) >= {"length"}
    assert schedule_findings({"decay_steps": 12}, SAME) == {"flat"}
    assert schedule_findings({"type": "ConstantWarmUpLR"}, SAME) == {"shape"}
    assert schedule_findings({}, SAME, lrs=[1e-3] * 40) == {"recorded"}


def test_overflow_steps_make_the_schedule_wait() -> None:
    full = {"type": "LinearWithWarmUpLR", "learning_rate": 1e-3, "warmup_steps": 4, "total_steps": 20}
    wanted = rates(full, 20)
    assert wanted is not None
    lines = [record(n, lr=wanted[max(0, n - 4)], overflow=n <= 3) for n in range(1, 21)]
    run = {"lr_schedule": full, "runner_config": {"batch_size": 16}}
    assert examine_schedule(run, {}, from_records(lines), None).verdict == "good"
    stuck = from_records([record(n, lr=0.0, overflow=True) for n in range(1, 21)])
    assert examine_schedule(run, {}, stuck, None).verdict == "good"


def test_rate_scaled_with_the_batch_is_no_fault() -> None:
    assert schedule_findings({"learning_rate": 2e-3}, {**SAME, "batch_size": 8}) == set()
    assert schedule_findings({"learning_rate": 8e-3}, {**SAME, "batch_size": 8}) == {"peak"}


def test_recipe_of_a_migration_is_understood() -> None:
    text = {
        "recipe": [
            {"key": "lr_schedule", "value": "linear to 0, no warm-up"},
            {"key": "learning_rate", "value": 5e-5},
        ]
    }
    assert source_of(text) == Source(learning_rate=5e-5, warmup_steps=0, kind="linear")
    schedule = {
        "learning_rate": 6e-4,
        "warmup_steps": 2000,
        "total_steps": 600_000,
        "min_learning_rate": 6e-5,
    }
    rows = [("lr_schedule", schedule), ("batch_size", 12), ("gradient_accumulation_steps", 40)]
    stated = {"recipe": [{"key": key, "value": value} for key, value in rows]}
    assert source_of(stated) == Source(6e-4, 2000, 600_000, 480, "cosine")
    assert source_of({"recipe": [{"key": "lr_schedule", "value": {"nonsense": 1}}]}) == Source()
    assert source_of({"recipe": "?"}) == Source()
    assert source_of({"recipe": [{"key": 3}, None]}) == Source()


def layers(**changes: float) -> dict[str, float]:
    norms = {"embedding.word_embeddings.weight": 1.0, "decoder.final_layernorm.gamma": 0.3}
    for number in range(3):
        for name in ("self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2"):
            norms[f"decoder.layers.{number}.{name}.weight"] = 0.2
    return {**norms, **changes}


@pytest.mark.parametrize(
    ("norms", "expected"),
    [
        (layers(), []),
        (layers(**{"decoder.layers.1.mlp.linear_fc1.weight": 0.0}), ["dead-layer"]),
        ({k: v * (1e-6 if "layers" in k else 1) for k, v in layers().items()}, ["vanishing"]),
        (dict.fromkeys(layers(), 0.0), ["vanishing"]),
        ({k: v * 1e5 for k, v in layers().items()}, ["exploding"]),
        (layers(**{"decoder.layers.0.mlp.linear_fc1.weight": math.inf}), ["exploding"]),
        ({"head": 1.0}, []),
    ],
)
def test_layers(norms: dict[str, float], expected: list[str]) -> None:
    step = Step("gradients")
    judge_layers(step, norms)
    assert [item.id.removeprefix("loss.gradients.") for item in step.findings] == expected


def test_weights_that_are_no_numbers() -> None:
    bad = {"a": np.ones(3), "b": np.array([1.0, np.nan])}
    step = examine_gradients({}, curve(FALLING), lambda: bad)
    assert [item.id for item in step.findings] == ["loss.gradients.weights-not-finite"]
    assert "first b" in step.findings[0].message


# -- on the fly -----------------------------------------------------------------------------------------------
def noisy(count: int, seed: int = 0) -> list[dict]:
    rng = np.random.default_rng(seed)
    loss = 10 * np.arange(1, count + 1) ** -0.15 * np.exp(rng.normal(0, 0.02, count))
    norm = np.exp(rng.normal(0, 0.25, count))
    return [record(n + 1, loss=float(loss[n]), grad_norm=float(norm[n])) for n in range(count)]


@pytest.mark.parametrize("seed", range(8))
def test_band_is_silent_on_healthy_noise(seed: int) -> None:
    band = Band()
    assert [item for line in noisy(1000, seed) for item in band.feed(line)] == []


def test_band_speaks_up_once() -> None:
    band, lines = Band(), noisy(300)
    for at in range(200, 210):
        lines[at]["loss"] *= 4
    said = [item for line in lines for item in band.feed(line)]
    assert [item.id for item in said] == ["loss.band.loss"]
    assert said[0].message.startswith("step 201:")


def test_band_on_explosion_nan_and_overflow() -> None:
    band = Band()
    for line in noisy(50):
        band.feed(line)
    assert [i.id for i in band.feed(record(51, loss=6.0, grad_norm=5000.0))] == ["loss.band.grad-norm"]
    assert [i.id for i in band.feed(record(52, loss="nan"))] == ["loss.not-finite"]
    assert band.feed(record(53, loss=math.nan)) == []
    said = [i.id for n in range(54, 80) for i in band.feed(record(n, loss=6.0, overflow=True))]
    assert said[0] == "loss.overflowing"
    assert len(said) == 2  # not at every step
    assert band.feed({}) == []
