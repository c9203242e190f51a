"""Measures this machine for the planner: matrix products, memory, all-reduce, and real training steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mindferry.errors import MindferryError
from mindferry.launching.msrun import free_port
from mindferry.planning import settings
from mindferry.planning.calibration import THIS_MACHINE
from mindferry.planning.estimate import Calibration, Estimator, Job
from mindferry.planning.machine_worker import undisturbed
from mindferry.planning.settings import Device
from mindferry.planning.strategy import strategy_for

# (layers, sequences, tokens) of the training runs that tell the costs apart: depth, head, attention, the rest.
RUNS = ((1, 2, 128), (3, 2, 128), (1, 2, 384), (3, 2, 384), (2, 4, 256), (1, 1, 768))
STEPS = 3 + len(RUNS)
_SIZES = (1 << 14, 1 << 20, 1 << 22, 1 << 24)
_WARM_UP = 1


def _worker(kind: str, args: dict[str, Any], folder: Path, launcher: tuple[str, ...] = ()) -> dict[str, Any]:
    """Run machine_worker.py in a process of its own and return what it wrote.

    Raises:
        MindferryError: it failed or took longer than 15 minutes; its output is in the message's evidence.
    """
    out = folder / f"{kind}.json"
    out.unlink(missing_ok=True)
    script = str(Path(__file__).with_name("machine_worker.py"))
    start = (*launcher, script) if launcher else (sys.executable, script)
    environment = dict(os.environ)
    # msrun starts whatever `python` is first on PATH.
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}"
    environment.setdefault("GLOG_v", "3")
    try:
        done = subprocess.run(
            [*start, kind, json.dumps(args), str(out)], cwd=folder, env=environment, capture_output=True, text=True,
            timeout=900, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as err:
        raise MindferryError(f"measuring {kind}: {err}", remedy="see whether MindSpore works: mindferry doctor env",
                             id="plan.measure") from None  # fmt: skip
    if not out.is_file():
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no output"]
        why = "killed, most likely for want of memory" if done.returncode == -9 else last[0][:300]
        raise MindferryError(
            f"measuring {kind} failed: {why}", remedy="see whether MindSpore works: mindferry doctor env",
            evidence=(done.stdout + done.stderr)[-4000:], id="plan.measure",
        )  # fmt: skip
    values: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return values


def _links(folder: Path) -> tuple[float | None, float, str]:
    """Bandwidth (bytes/s), latency (s) of an all-reduce between two processes and, where it fails, why."""
    launcher = ("msrun", "--worker_num=2", "--local_worker_num=2", f"--master_port={free_port()}",
                f"--log_dir={folder / 'msrun'}", "--join=True")  # fmt: skip
    try:
        times = _worker("collective", {"sizes": list(_SIZES)}, folder, launcher)["seconds"]
    except MindferryError as err:
        return None, 5e-6, f"; all-reduce not measured: {err.message}"
    sizes = np.array([float(k) for k in times])
    seconds = np.array([times[k] for k in times])
    # all-reduce of two: 2 (g-1) latency + 2 (g-1)/g size/bandwidth = 2 latency + size/bandwidth
    big = int(sizes.argmax())
    return float(sizes[big] / seconds[big]), float(max(seconds[sizes.argmin()] / 2, 1e-6)), ""


def others_load(seconds: float = 1.0) -> float:
    """Share of the machine's cores that other programs use just now."""
    import psutil

    return float(psutil.cpu_percent(seconds)) / 100


def this_machine(
    tick: Callable[[str], None],
    layer_spec: str = "portable",
    seen: Callable[[dict[str, Any]], None] = lambda row: None,
) -> Device:
    """A Device for this machine's CPU, one process using all cores, in float32.

    The training runs go through mindformers' own Trainer with `layer_spec`. From their step times follow how often
    saved activations, attention scores, logits and optimizer states travel through memory; from their peaks, what
    share of each the memory formulas really cost.

    Args:
        tick: called after each measurement with its name.
        seen: called with each training run's figures.

    Raises:
        MindferryError: a measurement failed.
    """
    import psutil

    with tempfile.TemporaryDirectory(prefix="mindferry-measure-") as name:
        folder = Path(name)
        rate = _worker("gemm", {}, folder)["flops"]
        tick("matrix products")
        memory_rate = _worker("bandwidth", {}, folder)["bytes_per_second"]
        tick("memory")
        links, latency, trouble = _links(folder)
        tick("all-reduce")
        bare = Device(
            name=THIS_MACHINE, flops={"float32": rate}, memory_bytes=psutil.virtual_memory().total,
            memory_bandwidth=memory_rate, devices_per_host=os.cpu_count() or 1, intra_host_bandwidth=links,
            intra_host_latency=latency, gemm_efficiency_forward=1.0, gemm_efficiency_backward=1.0,
            usable_memory=0.9, layer_overhead=0.0, confidence="measured", fused_attention=False,
            source=f"mindferry plan --calibrate with layer_spec {layer_spec}{trouble}",
        )  # fmt: skip
        rows: list[dict[str, Any]] = []
        for layers, batch, seq in RUNS:
            rows.append(measure_step(folder / f"run{len(rows)}", layers, batch, seq, layer_spec))
            seen(rows[-1])
            tick(f"{layers} layers, {batch} x {seq} tokens")
    return fit_device(bare, rows)


def measure_step(
    root: Path, layers: int, batch: int, seq: int, layer_spec: str, steps: int = 4
) -> dict[str, Any]:
    """Step seconds (undisturbed, after the first step) and peak bytes of a GPT-2 with `layers` layers."""
    root.mkdir(parents=True, exist_ok=True)
    args = {"root": str(root / "run"), "num_layers": layers, "batch_size": batch, "seq_length": seq,
            "layer_spec": layer_spec, "steps": steps}  # fmt: skip
    result = _worker("step", args, root)
    wall, processor = result["seconds"][_WARM_UP:], result["processor_seconds"][_WARM_UP:]
    return {
        "layers": layers,
        "batch": batch,
        "seq": seq,
        "seconds": undisturbed(wall, processor, os.cpu_count() or 1),
        "wall": min(wall),
        "processor": float(np.median(processor)),
        "peak": float(result["peak_bytes"]),
    }


def job_for(device: Device, layers: int, batch: int, seq: int) -> Job:
    """The measured run as a planning job."""
    model = settings.preset("gpt2").model_copy(
        update={
            "num_layers": layers,
            "embedding_dropout": 0.0,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        }
    )
    return Job(model, seq, batch, device, settings.convention("mindspore", "float32", "float32"),
               compute_dtype="float32", flash_attention=False, calibration=Calibration())  # fmt: skip


# Fitted from the runs. Element-wise traffic and the optimizer's keep their usual counts: at one width they cannot be
# told from matrix products and from the constant.
_TIME = ("gemm_passes", "attention_passes", "head_passes", "step_overhead")
_MEMORY = ("static_factor", "activation_factor", "attention_factor", "logit_factor", "resident_bytes")
_USUAL = {"element_wise_passes": 8.0, "optimizer_passes": 1.0}


def fit_device(bare: Device, rows: list[dict[str, Any]]) -> Device:
    """`bare` with the coefficients that explain the measured steps and peaks best, none of them negative."""
    device = bare.model_copy(update=_USUAL)
    for names, key in ((_TIME, "seconds"), (_MEMORY, "peak")):
        base = _predicted(device.model_copy(update=dict.fromkeys(names, 0.0)), rows, key)
        columns = []
        for name in names:
            # Both are linear in each coefficient: its column is what it adds with that one alone at 1.
            only = device.model_copy(update={**dict.fromkeys(names, 0.0), name: 1.0})
            columns.append(_predicted(only, rows, key) - base)
        measured = np.array([row[key] for row in rows])
        found = nonnegative(np.array(columns).T, np.maximum(measured - base, 0.0), measured)
        device = device.model_copy(update=dict(zip(names, found, strict=True)))
    return device


def _predicted(device: Device, rows: list[dict[str, Any]], key: str) -> np.ndarray:
    """Predicted `seconds` or `peak` of each measured run."""
    out = []
    for row in rows:
        item = Estimator(job_for(device, row["layers"], row["batch"], row["seq"])).estimate(
            strategy_for(row["layers"], batch_size=row["batch"])
        )
        out.append(item.step_seconds if key == "seconds" else float(item.total_bytes.max()))
    return np.array(out)


def nonnegative(columns: np.ndarray, target: np.ndarray, scale: np.ndarray) -> list[float]:
    """Least squares of columns @ x = target with x of at least 0, rows weighted by 1/scale; zero columns get 0.

    Columns are dropped one at a time, the most negative first; with so few of them that finds the optimum or is near.
    """
    scaled, goal = columns / scale[:, None], target / scale
    active = [j for j in range(columns.shape[1]) if columns[:, j].max() > 0]
    solution = np.zeros(columns.shape[1])
    while active:
        part = scaled[:, active]
        weight = part.max(axis=0)
        found = np.linalg.lstsq(part / weight, goal, rcond=None)[0] / weight
        if (found >= 0).all():
            solution[active] = found
            break
        active.pop(int((found * weight).argmin()))
    return [float(x) for x in solution]
