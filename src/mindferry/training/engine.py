"""Drives mindformers' own Trainer with a run.yaml."""

from __future__ import annotations

import copy
import json
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindferry.errors import MindferryError, UsageError
from mindferry.recipes.stated import check_precision
from mindferry.spec import LossScale, Precision, spec_from
from mindferry.targets import run_yaml
from mindferry.targets.run_directory import RunDirectory, write_text
from mindferry.training import compat, data_parallel, data_source
from mindferry.training.interruption import Interruption, StopFile
from mindferry.training.loss_scale import ScaleWatch
from mindferry.training.outcome import Outcome
from mindferry.training.weights_check import check_weights, load_weights

MODES = {"graph": 0, "pynative": 1}
DEVICES = {"cpu": "CPU", "ascend": "Ascend"}


@dataclass
class Options:
    """What the command line may change of a run.yaml.

    Attributes:
        steps: stop after this step of the schedule; None: at its end.
        on_step: called with each metrics record.
        on_batch: called with (step, batch of device tensors) before each step.
        interruption: asked after each step whether to save and stop; entered by whoever owns the process.
        workers: processes of data parallelism; each of them trains with its own `rank`.
    """

    steps: int | None = None
    mode: str | None = None
    device: str | None = None
    resume: bool = False
    restart: bool = False
    overrides: dict[str, Any] | None = None
    on_step: Callable[[dict[str, Any]], None] = lambda record: None
    on_batch: Callable[[int, tuple[Any, ...]], None] | None = None
    interruption: Interruption | StopFile = field(default_factory=Interruption)
    workers: int = 1
    rank: int = 0


def _override(content: dict[str, Any], overrides: dict[str, Any]) -> None:
    """Set dotted keys of `content` ("model.model_config.hidden_dropout": 0.0)."""
    for dotted, value in overrides.items():
        *path, last = dotted.split(".")
        node = content
        for part in path:
            node = node[part]
        node[last] = value


def prepare(run: RunDirectory, options: Options) -> dict[str, Any]:
    """The run.yaml of `run` with the options applied and paths made absolute; plain data.

    Raises:
        UsageError: the file or a combination of settings cannot work.
    """
    content = run_yaml.read(run.yaml)
    if options.mode:
        content["context"]["mode"] = MODES[options.mode]
    if options.device:
        content["context"]["device_target"] = DEVICES[options.device]
        if DEVICES[options.device] == "CPU":
            content["runner_config"]["sink_mode"] = False  # a CPU has no device queue to sink data into
    _override(content, options.overrides or {})
    _one_step(content)
    _check_types(content, str(run.yaml))
    if options.workers > 1:
        data_parallel.share_out(content, options.workers)
    cpu = content["context"]["device_target"] == "CPU"
    if cpu and content["model"]["model_config"].get("layer_spec") == "reference":
        raise UsageError(
            f"{run.yaml}: model.model_config.layer_spec: 'reference' needs an Ascend device",
            remedy="set it to portable, or train with --device ascend",
            cause="mindformers' own modules use FlashAttentionScore and other operators without a CPU kernel",
            id="layer-spec.device",
        )
    if cpu and content["runner_config"]["sink_mode"]:
        raise UsageError(
            f"{run.yaml}: runner_config.sink_mode: true needs an Ascend device",
            remedy="set it to false: a CPU has no device queue to sink data into",
            id="sink.device",
        )
    data_source.make_absolute(content, run.root)
    if content["load_checkpoint"]:
        content["load_checkpoint"] = _inside(run, content["load_checkpoint"])
    content["output_dir"] = _inside(run, content["output_dir"])
    return content


def _one_step(content: dict[str, Any]) -> None:
    """Take MindSpore's own training steps for mindformers', and `sens` for a static loss scale."""
    wrapper = content["runner_wrapper"]
    if wrapper["type"] == "TrainOneStepCell" and isinstance(wrapper.get("scale_sense"), dict):
        raise UsageError(
            "run.yaml: runner_wrapper: TrainOneStepCell knows a static scale only (sens)",
            remedy="name TrainOneStepWithLossScaleCell or MFTrainOneStepCell for a dynamic one",
            id="wrapper.scale",
        )
    if wrapper["type"] in compat.SAME_STEP:
        wrapper["type"] = "MFTrainOneStepCell"
    sens = wrapper.pop("sens", None)
    if sens is not None:
        wrapper["scale_sense"] = sens


def _check_types(content: dict[str, Any], origin: str) -> None:
    """Refuse data types that cannot train together (mindferry.recipes.stated.check_precision)."""
    config = content["model"]["model_config"]
    given = {field: config[key] for field, key in _PRECISION_KEYS.items() if config.get(key) is not None}
    check_precision(spec_from(Precision, given, f"{origin}: model.model_config"), LossScale(), origin)


_PRECISION_KEYS = {
    "compute": "compute_dtype",
    "params": "param_init_type",
    "layernorm": "layernorm_compute_type",
    "softmax": "softmax_compute_type",
}


def _inside(run: RunDirectory, path: str) -> str:
    """`path` of a run.yaml as an absolute path; relative ones start at the run directory."""
    return str((run.root / path).resolve() if not os.path.isabs(path) else Path(path))


def _engine_config(content: dict[str, Any], run: RunDirectory, rank: int = 0) -> Any:
    """mindformers' configuration object, with what a CPU needs instead.

    It goes through a file, as mindformers fills in its defaults only there; logs/effective.yaml stays as the
    record of what really ran.
    """
    from mindformers.tools.register import MindFormerConfig

    content = copy.deepcopy(content)
    precision_notes(content)
    if content["context"]["device_target"] == "CPU":
        wrapper = content["runner_wrapper"]["type"]
        if wrapper not in compat.PORTABLE_WRAPPERS:
            raise UsageError(
                f"run.yaml: runner_wrapper.type: found {wrapper!r}, expected one of "
                f"{sorted(compat.PORTABLE_WRAPPERS)} on a CPU",
                id="wrapper.unknown",
            )
        content["runner_wrapper"]["type"] = compat.PORTABLE_WRAPPERS[wrapper]
        compat.kernel_step(content)
        content["context"].pop("max_device_memory", None)
        # Anything but a mapping keeps mindformers from binding MindSpore's threads (see compat).
        content["context"].setdefault("affinity_cpu_list", [])
    elif content["runner_wrapper"]["type"] == "MFTrainOneStepCell" and _needs_own_steps(content):
        content["runner_wrapper"]["type"] = "AccumulatingTrainOneStepCell"
    data_parallel.engine_settings(content)
    data_source.portable(content)
    content["callbacks"] = [c for c in content["callbacks"] if c["type"] != "CheckpointMonitor"]
    _tabled_schedule(content)
    _own_steps(content)
    content["train_dataset"]["batch_size"] = content["runner_config"]["batch_size"]
    content["train_dataset_task"]["dataset_config"] = copy.deepcopy(content["train_dataset"])
    effective = run.logs / ("effective.yaml" if not rank else f"effective.rank_{rank}.yaml")
    write_text(effective, run_yaml.dump(content))
    return MindFormerConfig(str(effective))


def precision_notes(content: dict[str, Any]) -> list[str]:
    """What a CPU does instead of the precision that run.yaml names; changes `content` accordingly."""
    config = content["model"]["model_config"]
    if content["context"]["device_target"] != "CPU" or config.get("layer_spec") != "portable":
        return []
    changed = [key for key in _TYPE_KEYS if config.get(key) == "bfloat16"]
    for key in changed:
        config[key] = "float32"
    if not changed:
        return []
    return [
        f"{', '.join(changed)}: MindSpore's CPU operators have no bfloat16; portable layers compute in float32 here"
    ]


_TYPE_KEYS = ("compute_dtype", "layernorm_compute_type", "softmax_compute_type")


def _needs_own_steps(content: dict[str, Any]) -> bool:
    """Accumulation that mindformers would reset: it does it in semi-automatic and automatic parallelism only."""
    if content["parallel"]["parallel_mode"] in data_parallel.AUTOMATIC:
        return False
    return content["use_parallel"] or content["runner_config"]["gradient_accumulation_steps"] > 1


def _tabled_schedule(content: dict[str, Any]) -> None:
    """Have the learning rate computed in float64 wherever its formula is known."""
    block = content["lr_schedule"]
    schedule = run_yaml.schedule_from(block) if block["total_steps"] > 0 else None
    if schedule is not None:
        content["lr_schedule"] = run_yaml.tabled_block(schedule)


def _own_steps(content: dict[str, Any]) -> None:
    """Hand accumulation, per-token loss and the loss-scale floor to our wrapper.

    mindformers resets gradient_accumulation_steps to 1 outside semi-automatic parallelism, with a warning; here
    the loader yields all sequences of an optimizer step and the wrapper cuts them into micro-batches.
    """
    runner, wrapper = content["runner_config"], content["runner_wrapper"]
    if isinstance(wrapper.get("scale_sense"), dict):
        if wrapper["scale_sense"]["type"] == "DynamicLossScaleUpdateCell":
            wrapper["scale_sense"]["type"] = "FlooredLossScale"
        else:
            wrapper["scale_sense"].pop("scale_floor", None)
    if wrapper["type"] not in compat.ACCUMULATING_WRAPPERS:
        return
    wrapper["micro_batches"] = runner["gradient_accumulation_steps"]
    wrapper["per_token_loss"] = wrapper.pop("calculate_per_token_loss", False)
    runner["batch_size"] *= runner["gradient_accumulation_steps"]
    runner["gradient_accumulation_steps"] = 1


def set_up(content: dict[str, Any], run: RunDirectory, rank: int = 0) -> Any:
    """Import mindformers, set MindSpore's context and register our classes; returns MindFormerConfig."""
    compat.quiet(run.logs)
    import mindspore as ms
    from mindformers.core.context.build_context import build_context

    config = _engine_config(content, run, rank)
    # mindformers keeps one context a process; what may change between two set-ups is set below.
    build_context(config)
    data_source.engine_settings(config)
    ms.set_context(mode=content["context"]["mode"])
    if content["context"]["device_target"] == "CPU":
        compat.synchronous_pynative()
    compat.graph_kernel(bool(content["context"].get("enable_graph_kernel")))
    import mindferry.training.models  # noqa: F401

    compat.register_wrappers()
    return config


@contextmanager
def _working_in(directory: Path) -> Iterator[None]:
    """MindSpore leaves kernel files (akg_kernel_meta, *.log) in the working directory; let that be ours."""
    before = os.getcwd()
    directory.mkdir(parents=True, exist_ok=True)
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)


def _trim_metrics(path: Path, step: int) -> None:
    """Keep the lines up to `step`; later ones belong to steps that will run again."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue  # the torn last line of a killed run
    write_text(path, "".join(f"{line}\n" for line in kept))


def starting_point(run: RunDirectory, options: Options) -> Any:
    """The checkpoint to resume from, or None to start at step 0.

    Raises:
        UsageError: nothing to resume, or an earlier training would be overwritten.
    """
    import shutil

    from mindferry.training import checkpoints

    checkpoints.clean_partial(run.checkpoints)
    found, skipped = checkpoints.newest(run.checkpoints)
    if options.resume:
        if found is None:
            detail = f" ({'; '.join(skipped)})" if skipped else ""
            raise UsageError(
                f"{run.checkpoints}: no complete checkpoint to resume from{detail}",
                remedy="train without --resume",
                id="resume.none",
            )
        return found
    if found is not None and not options.restart:
        raise UsageError(
            f"{run.root}: already trained to step {found.step}",
            remedy="go on with --resume, or start over with --restart",
            id="train.exists",
        )
    shutil.rmtree(run.checkpoints, ignore_errors=True)
    run.metrics.unlink(missing_ok=True)
    return None


def _last(run: RunDirectory, content: dict[str, Any], options: Options) -> int:
    """The step to stop at: --steps or the end of the schedule, whichever comes first."""
    total = content["lr_schedule"]["total_steps"]
    if total <= 0 and not options.steps:
        raise UsageError(
            f"{run.yaml}: lr_schedule.total_steps: found {total}, expected a positive number of steps",
            remedy="set it, or give --steps",
            id="train.no-steps",
        )
    return min(options.steps, total) if options.steps and total > 0 else options.steps or total


def last_step(run: RunDirectory, options: Options) -> int:
    """The step that `train` would stop at (for a progress bar)."""
    return _last(run, prepare(run, options), options)


def train_logged(run: RunDirectory, options: Options, log: Path) -> Outcome:
    """`train`, with failures inside MindSpore or mindformers turned into one line and their trace in `log`.

    Raises:
        MindferryError: also for whatever the engine raised.
    """
    try:
        return train(run, options)
    except MindferryError:
        raise
    except Exception as err:
        traceback.print_exc()
        first_line = next((line for line in str(err).splitlines() if line.strip()), type(err).__name__)
        raise MindferryError(
            f"training failed: {type(err).__name__}: {first_line.strip()}",
            remedy=f"the whole trace is in {log}",
            id="train.failed",
        ) from err


def train(run: RunDirectory, options: Options) -> Outcome:
    """Train `run` with mindformers' Trainer; returns training.outcome.Outcome.

    Raises:
        UsageError, MindferryError: see prepare, check_weights and the checkpoints.
    """
    content = prepare(run, options)
    checkpoint = starting_point(run, options)
    start, last = steps_to_do(run, content, options, checkpoint)
    return fit(run, options, content, checkpoint, start, last)


def steps_to_do(
    run: RunDirectory, content: dict[str, Any], options: Options, checkpoint: Any
) -> tuple[int, int]:
    """The step to start after and the step to stop at; later lines of an earlier session are dropped.

    Raises:
        UsageError: nothing is left to do.
    """
    start = checkpoint.step if checkpoint else 0
    last = _last(run, content, options)
    if start >= last:
        raise UsageError(
            f"{run.root}: already at step {start} of {last}",
            remedy="nothing to do; raise --steps or lr_schedule.total_steps to train longer",
            id="train.finished",
        )
    for lines in (run.metrics, *run.logs.glob("metrics.rank_*.jsonl")):
        _trim_metrics(lines, start)
    return start, last


def fit(
    run: RunDirectory, options: Options, content: dict[str, Any], checkpoint: Any, start: int, last: int
) -> Any:
    """Train from step `start` to `last`: what `train` does once the run directory is in order."""
    if checkpoint:
        content["load_checkpoint"] = str(checkpoint.model)
    if options.workers > 1:
        data_parallel.even_shards(content, data_source.rows(content), options.workers)
    config = set_up(content, run, options.rank)
    folder = run.logs / "engine"
    with _working_in(folder / f"rank_{options.rank}" if options.workers > 1 else folder):
        return _fit(run, options, content, config, checkpoint, start, last)


def _fit(
    run: RunDirectory,
    options: Options,
    content: dict[str, Any],
    config: Any,
    checkpoint: Any,
    start: int,
    last: int,
) -> Any:
    from mindformers import Trainer

    from mindferry.training import callbacks

    outcome = Outcome(first_step=start, last_step=start)
    outcome.notes = precision_notes(copy.deepcopy(content))
    rows = data_source.rows(content)
    runner = content["runner_config"]
    batch = runner["batch_size"] * runner["gradient_accumulation_steps"] * options.workers
    steps_per_epoch = rows // batch
    if steps_per_epoch == 0:
        raise UsageError(
            f"{run.yaml}: runner_config: batch_size x gradient_accumulation_steps: found {batch}, expected at "
            f"most the {rows} sequences in data/",
            id="data.too-small",
        )
    data_source.check_megatron(content, batch, checkpoint)
    skip = _data_position(checkpoint, batch, steps_per_epoch)
    config.runner_config.epochs = -(-(skip + last - start) // steps_per_epoch)
    if skip:
        config.data_skip_steps = skip
    holder: dict[str, Any] = {}

    def model() -> Any:
        return holder["trainer"].trainer.network

    monitor = next((c for c in content["callbacks"] if c["type"] == "CheckpointMonitor"), None)
    state = {"seed": content["seed"], "global_batch_size": batch, "steps_per_epoch": steps_per_epoch}
    state |= data_source.identity(content)
    weights = checkpoint.model if checkpoint else Path(content["load_checkpoint"])
    parts: list[Any] = [callbacks.BeforeTraining(lambda: check_weights(weights, model()))]
    if options.workers > 1:
        parts.append(callbacks.BeforeTraining(lambda: load_weights(weights, model())))
    if checkpoint:
        parts.append(callbacks.RestoreOptimizer(checkpoint, model))
    parts.append(
        callbacks.DropoutByStep(
            model,
            start,
            content["seed"],
            runner["gradient_accumulation_steps"],
            kernels=content["model"]["model_config"].get("layer_spec") == "fused",
        )
    )
    watch = _watch(content, checkpoint)
    parts.append(
        callbacks.StepMetrics(
            run.metrics if options.rank == 0 else run.logs / f"metrics.rank_{options.rank}.jsonl",
            outcome,
            start,
            last,
            options.on_step,
            options.interruption,
            options.on_batch,
            watch,
            options.workers,
        )
    )
    if monitor is not None:
        parts.append(
            callbacks.CommittedCheckpoints(
                run.root / monitor["directory"],
                outcome,
                every=monitor["save_checkpoint_steps"],
                keep=monitor.get("keep_checkpoint_max", 2),
                model=model,
                state=state,
                watch=watch,
                rank=options.rank,
            )
        )
    trainer = Trainer(args=config, callbacks=parts)
    holder["trainer"] = trainer
    with data_source.helper_for(content, Path.cwd()):
        trainer.train()
    outcome.optimizer_bytes = callbacks.optimizer_bytes(trainer.trainer.optimizer)
    return outcome


def _data_position(checkpoint: Any, batch: int, steps_per_epoch: int) -> int:
    """Steps of the data pipeline to pass over: what was read is counted in samples, as the batch may have changed.

    Raises:
        UsageError: with the new batch no step begins where the old ones ended.
    """
    if checkpoint is None:
        return 0
    samples, before = checkpoint.state["samples"], checkpoint.state["global_batch_size"]
    if batch == before:
        return int(checkpoint.step)
    same_epochs = batch * steps_per_epoch == before * checkpoint.state["steps_per_epoch"]
    if samples % batch or not (same_epochs or samples <= batch * steps_per_epoch):
        raise UsageError(
            f"{checkpoint.path.name}: {samples} sequences were trained on in steps of {before}; in steps of {batch} "
            "no step begins there",
            remedy=f"set batch_size x gradient_accumulation_steps back to {before}, or to a number that divides "
            f"{samples} and gives the same epochs",
            id="resume.batch",
        )
    return int(samples // batch)


def _watch(content: dict[str, Any], checkpoint: Any) -> ScaleWatch:
    """Overflow counting, going on from the checkpoint's count."""
    sense = content["runner_wrapper"]["scale_sense"]
    skipped = checkpoint.state.get("skipped_steps", 0) if checkpoint else 0
    if not isinstance(sense, dict) or sense["type"] == "FixedLossScaleUpdateCell":
        return ScaleWatch(skipped=skipped)
    return ScaleWatch(dynamic=True, floor=float(sense["scale_floor"]), skipped=skipped)
