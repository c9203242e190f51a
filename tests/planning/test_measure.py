"""Fitting of measurements, and one real prediction (marked long)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as hs

from mindferry.errors import MindferryError, UsageError
from mindferry.planning import calibration, measure
from mindferry.planning.estimate import Estimator
from mindferry.planning.settings import Device
from mindferry.planning.strategy import strategy_for

TRUE = {
    "gemm_passes": 1.3, "element_wise_passes": 12.0, "attention_passes": 5.0, "head_passes": 9.0,
    "optimizer_passes": 1.5, "step_overhead": 0.02,
}  # fmt: skip
MEMORY = {
    "static_factor": 1.4, "activation_factor": 2.0, "attention_factor": 1.2, "logit_factor": 1.5,
    "resident_bytes": 1.2e9,
}  # fmt: skip


def bare():
    return Device(
        name="this-machine", flops={"float32": 1.6e11}, memory_bytes=24 << 30, memory_bandwidth=1.2e10,
        devices_per_host=2, gemm_efficiency_forward=1.0, gemm_efficiency_backward=1.0, layer_overhead=0.0,
        confidence="measured", source="a test",
    )  # fmt: skip


def rows_of(device):
    rows = []
    for layers, batch, seq in measure.RUNS:
        job = measure.job_for(device, layers, batch, seq)
        item = Estimator(job).estimate(strategy_for(layers, batch_size=batch))
        rows.append({"layers": layers, "batch": batch, "seq": seq, "seconds": item.step_seconds,
                     "peak": float(item.total_bytes.max())})  # fmt: skip
    return rows


def test_a_known_machine_is_predicted_from_its_runs():
    device = bare().model_copy(update={**TRUE, **MEMORY})
    fitted = measure.fit_device(bare(), rows_of(device))
    for layers, batch, seq in ((12, 4, 256), (12, 1, 1024), (6, 8, 512)):
        st = strategy_for(layers, batch_size=batch)
        one = Estimator(measure.job_for(device, layers, batch, seq)).estimate(st)
        two = Estimator(measure.job_for(fitted, layers, batch, seq)).estimate(st)
        assert two.step_seconds == pytest.approx(one.step_seconds, rel=0.10)
        assert two.total_bytes[0] == pytest.approx(one.total_bytes[0], rel=0.03)


def test_noise_in_the_runs_moves_the_prediction_no_further():
    device = bare().model_copy(update={**TRUE, **MEMORY})
    rng = np.random.default_rng(3)
    rows = [{**r, "seconds": r["seconds"] * rng.uniform(1.0, 1.04), "peak": r["peak"] * rng.uniform(0.98, 1.02)}
            for r in rows_of(device)]  # fmt: skip
    fitted = measure.fit_device(bare(), rows)
    st = strategy_for(12, batch_size=4)
    one = Estimator(measure.job_for(device, 12, 4, 256)).estimate(st)
    two = Estimator(measure.job_for(fitted, 12, 4, 256)).estimate(st)
    assert two.step_seconds == pytest.approx(one.step_seconds, rel=0.15)
    assert two.total_bytes[0] == pytest.approx(one.total_bytes[0], rel=0.10)


def test_time_of_a_held_up_step_is_its_processor_time():
    from mindferry.planning.machine_worker import undisturbed

    assert undisturbed([1.8, 2.6, 1.7], [3.2, 3.3, 3.1], 2) == 1.7  # quiet: the shortest
    assert undisturbed([6.4, 8.0, 6.3], [3.2, 3.3, 3.1], 2) == 1.6  # held up: 3.2 s over two cores
    assert undisturbed([1.0], [0.0], 2) == 1.0


@settings(max_examples=50, deadline=None)
@given(hs.lists(hs.floats(0.0, 10.0), min_size=3, max_size=3), hs.integers(0, 2**31))
def test_nonnegative_least_squares(truth, seed):
    rng = np.random.default_rng(seed)
    columns = rng.uniform(0.1, 1.0, (8, 3))
    target = columns @ np.array(truth) + 1e-9
    found = measure.nonnegative(columns, target, target)
    assert min(found) >= 0
    assert columns @ np.array(found) == pytest.approx(target, rel=0.2, abs=1e-6)


def test_memory_and_time_points_are_fitted():
    points = tuple(
        calibration.MemoryPoint(label=str(i), static=1e9, activations=a, measured=1e9 + 1.5 * a + 3e8)
        for i, a in enumerate((1e9, 2e9, 4e9))
    )
    times = (calibration.TimePoint(label="t", computing=2.0, rest=0.5, measured=3.5),)
    fit = calibration.fitted(calibration.Entry(memory=points, time=times))
    assert fit.activations == pytest.approx(1.5)
    assert fit.constant_bytes == pytest.approx(3e8)
    assert fit.time == pytest.approx(1.5)
    alone = calibration.fitted(calibration.Entry(memory=points[:1]))
    assert alone.activations == 1.0
    assert alone.constant_bytes == pytest.approx(0.5e9 + 3e8)


def test_damaged_calibration_files_and_logs(tmp_path):
    path = tmp_path / "c.json"
    for text in ("{", "[]", '{"entries": 3}', '{"unknown": 1}', '{"version": 2}', "[" * 100_000):
        path.write_text(text)
        with pytest.raises(UsageError):
            calibration.load(path)
    assert calibration.load(tmp_path / "none.json").entries == {}
    log = tmp_path / "x.log"
    log.write_text("nothing here\n")
    with pytest.raises(MindferryError, match="Used peak memory usage"):
        calibration.dryrun_peak(log)
    used, actual = "Used peak memory usage (without fragments)", "Actual peak memory usage (with fragments)"
    log.write_text(f"{used}: 23716M\n{actual}: 26244M\n")
    assert calibration.dryrun_peak(log) == 23716 << 20
    log.write_text(f"{actual}: 26244M\n")
    assert calibration.dryrun_peak(log) == 26244 << 20


def test_a_calibration_file_is_kept_and_replaced(tmp_path):
    path = tmp_path / "deep" / "c.json"
    content = calibration.CalibrationFile(device=bare())
    calibration.save(path, content)
    assert calibration.load(path) == content
    assert [p.name for p in path.parent.iterdir()] == ["c.json"]


@pytest.mark.long
def test_the_step_of_gpt2_124m_is_predicted(tmp_path):
    """Measured here and now; others on the machine spoil it."""
    device = measure.this_machine(lambda note: None)
    seen = measure.measure_step(tmp_path, 12, 4, 256, "portable")
    item = Estimator(measure.job_for(device, 12, 4, 256)).estimate(strategy_for(12, batch_size=4))
    assert item.step_seconds == pytest.approx(seen["seconds"], rel=0.15)
    assert item.total_bytes[0] == pytest.approx(seen["peak"], rel=0.10)
