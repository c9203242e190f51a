"""A fresh run made ready for a cluster: its weights cut, and a run.yaml that loads them there."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindferry.errors import UsageError
from mindferry.partition.layout import Grid
from mindferry.partition.network import Network
from mindferry.partition.opening import Asked
from mindferry.partition.reshard import ReshardReport, Wanted, reshard, target_spread
from mindferry.partition.writing import Progress
from mindferry.planning.strategy import Strategy, divisors
from mindferry.spec import ModelSpec
from mindferry.targets import run_yaml
from mindferry.targets.run_directory import write_text
from mindferry.weights.transforms import TargetLayout

WEIGHTS = "model-cut"
YAML = "run.cluster.yaml"


@dataclass(frozen=True)
class ClusterCut:
    """The strategy that `migrate --cut` asks for."""

    grid: Grid
    offset: Any = None
    pad_vocab: bool = False

    def wanted(self) -> Wanted:
        return Wanted(self.grid, self.offset, None, self.pad_vocab)


def check_cut(spec: ModelSpec, cut: ClusterCut) -> None:
    """Refuse a strategy the model does not divide into, before anything is written.

    Raises:
        UsageError: with the keys, or for a strategy of one rank.
    """
    if cut.grid.ranks == 1:
        raise UsageError(
            "--cut: one rank needs no cut, RUN/model is whole",
            remedy="leave --cut out",
            id="partition.strategy",
        )
    target_spread(Network(spec, TargetLayout(), Grid(), 0, 1, ""), cut.wanted(), None)


def strategy_for_step(
    cut: ClusterCut, layers: list[int], content: dict[str, Any], vocab_rows: int
) -> Strategy:
    """The strategy whose step trains on as many sequences as run.yaml's.

    With a pipeline, the fewest micro-batches that fill it twice (or once, where the step has no more sequences);
    without one, run.yaml's accumulation.

    Raises:
        UsageError: a step has too few sequences, or a number that dp does not divide.
    """
    runner, grid = content["runner_config"], cut.grid
    sequences = runner["batch_size"] * runner["gradient_accumulation_steps"]
    if sequences % grid.data_parallel:
        raise UsageError(
            f"--cut {grid}: a step has {sequences} sequences, which dp={grid.data_parallel} does not divide",
            remedy="choose --batch-size and --accumulation whose product it divides",
            id="partition.batch",
        )
    each = sequences // grid.data_parallel
    stages = grid.pipeline_stage
    if stages > 1:
        enough = [n for least in (2 * stages, stages) for n in divisors(each) if n >= least]
        if not enough:
            raise UsageError(
                f"--cut {grid}: a step has {each} sequences a replica, fewer than the {stages} micro-batches that "
                f"{stages} stages need",
                remedy=f"choose a --batch-size of at least {stages * grid.data_parallel}",
                id="partition.batch",
            )
        count = enough[0]
    else:
        accumulation = runner["gradient_accumulation_steps"]
        count = accumulation if each % accumulation == 0 else 1
    return Strategy(
        data_parallel=grid.data_parallel,
        model_parallel=grid.model_parallel,
        pipeline_stage=stages,
        micro_batch_num=count,
        batch_size=each // count,
        layers=(tuple(layers),),
        recompute=(0,) * stages,
        vocab_size=vocab_rows,
    )


def cluster_yaml(content: dict[str, Any], st: Strategy, spec: ModelSpec) -> dict[str, Any]:
    """run.yaml's content with what the cluster needs instead: strategy, batches, the cut weights, Ascend.

    Everything else is the run's own, the recomputation too.
    """
    from mindferry.planning import settings
    from mindferry.planning.estimate import Job
    from mindferry.planning.write import sections

    result = copy.deepcopy(content)
    config = result["model"]["model_config"]
    job = Job(
        model=spec,
        seq_length=config["seq_length"],
        global_batch=st.global_batch,
        device=next(iter(settings.devices().values())),
        convention=settings.convention("mindspore"),
    )
    wanted = sections(st, job, tuple(result["train_dataset"]["input_columns"]))
    wanted.pop("recompute_config")
    config.update(wanted.pop("model")["model_config"], layer_spec="reference")
    for section, values in wanted.items():
        if isinstance(values, dict):
            result[section].update(values)
        else:
            result[section] = values
    result["load_checkpoint"] = f"./{WEIGHTS}"
    result["auto_trans_ckpt"] = False
    result["context"]["device_target"] = "Ascend"
    return result


def write_cut(
    run: Path, content: dict[str, Any], cut: ClusterCut, progress: Progress | None = None
) -> ReshardReport:
    """Write RUN/model-cut and RUN/run.cluster.yaml beside the whole weights of the complete run `run`.

    A checkpoint that continues the source's optimizer is what is cut then, moments included.
    """
    report = reshard(run, run / WEIGHTS, Asked(), cut.wanted(), progress)
    from mindferry.partition.network import read_network

    spec = read_network(run).spec
    st = strategy_for_step(cut, report.layers, content, report.vocab_rows)
    made = cluster_yaml(content, st, spec)
    made["resume_training"] = report.step is not None
    write_text(run / YAML, run_yaml.dump(made))
    return report
