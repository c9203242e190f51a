"""The audit of run.yaml: each item in each of its states."""

from __future__ import annotations

import json

import pytest

from mindferry.diagnosis.config_audit import AUDIT, audit
from mindferry.errors import UsageError
from mindferry.targets import run_yaml
from tests.support import run_cli


@pytest.fixture
def items(tiny, tmp_path):
    """items({dotted key: value}) -> key -> item of a changed copy of the tiny run's YAML."""

    def change(values, metrics=None):
        content = run_yaml.read(tiny / "run/run.yaml")
        for dotted, value in values.items():
            *path, last = dotted.split(".")
            node = content
            for part in path:
                node = node[part]
            node[last] = value
        (tmp_path / "run.yaml").write_text(run_yaml.dump(content))
        (tmp_path / "migration.json").write_text((tiny / "run/migration.json").read_text())
        if metrics:
            (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in metrics))
        return {item.key: item for item in audit(tmp_path)}

    return change


CASES = [
    ({"context.mode": 1, "context.enable_graph_kernel": True}, "context.enable_graph_kernel", "wrong", False),
    ({"context.enable_graph_kernel": True}, "context.enable_graph_kernel", "on", ""),
    ({"context.device_target": "Ascend"}, "context.enable_graph_kernel", "off", True),
    ({"context.mode": 1}, "context.mode", "wrong", 0),
    ({}, "model.model_config.layer_spec", "off", "fused"),
    ({"context.device_target": "Ascend"}, "model.model_config.compute_dtype", "off", "bfloat16"),
    ({"model.model_config.compute_dtype": "bfloat16"}, "model.model_config.compute_dtype", "wrong", "float32"),
    ({"model.model_config.compute_dtype": "float16"}, "runner_wrapper.scale_sense", "wrong",
     "type: DynamicLossScaleUpdateCell"),
    ({"model.model_config.compute_dtype": "float16", "model.model_config.softmax_compute_type": "float16"},
     "model.model_config.softmax_compute_type", "wrong", "float32"),
    ({"recompute_config.recompute": True, "recompute_config.select_recompute": True},
     "recompute_config.select_recompute", "wrong", False),
    ({"recompute_config.select_recompute": True}, "recompute_config.select_recompute", "wrong",
     [r"self_attention\.core_attention"]),
    ({"train_dataset.prefetch_size": 16}, "train_dataset.prefetch_size", "wrong", 2),
    ({"parallel_config.pipeline_stage": 4, "parallel_config.micro_batch_num": 2, "use_parallel": True},
     "parallel_config.micro_batch_num", "wrong", 8),
    ({"parallel_config.data_parallel": 2}, "use_parallel", "wrong", True),
    ({"parallel_config.data_parallel": 2, "use_parallel": True}, "parallel.enable_parallel_optimizer", "off", True),
    ({"parallel.enable_parallel_optimizer": True}, "parallel.enable_parallel_optimizer", "wrong", False),
    ({"runner_config.batch_size": 8}, "lr_schedule.learning_rate", "wrong", 2e-3),
    ({"runner_config.batch_size": 8, "lr_schedule.learning_rate": 2e-3}, "lr_schedule.learning_rate", "right", ""),
]  # fmt: skip


@pytest.mark.parametrize(("change", "key", "state", "wanted"), CASES)
def test_states(items, change, key, state, wanted):
    found = items(change)[key]
    assert (found.state, found.wanted) == (state, wanted)


def test_waiting_for_data_is_seen_in_the_metrics(items):
    def steps(data):
        return [{"step": i, "loss": 1.0, "data_time": data, "compute_time": 0.1} for i in range(1, 20)]

    assert items({}, steps(0.09))["train_dataset.num_parallel_workers"].state == "wrong"
    assert items({}, steps(0.001))["train_dataset.num_parallel_workers"].state == "right"


def test_command(tiny, tmp_path):
    done = run_cli("doctor", "config", tiny / "run/run.yaml", "--json")
    answer = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert {item["name"] for item in answer["checked"]} == {name for name, _ in AUDIT}
    lines = (tiny / "run/run.yaml").read_text().splitlines()
    for item in answer["checked"]:
        if item["line"]:
            assert lines[item["line"] - 1].strip().startswith(item["key"].rpartition(".")[2] + ":")
    with pytest.raises(UsageError):
        audit(tmp_path / "none.yaml")
