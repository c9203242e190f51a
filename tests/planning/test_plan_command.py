"""`mindferry plan` as people call it: files, JSON, exit codes, bad input."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as hs
from typer.testing import CliRunner

from mindferry.cli import plan as command
from mindferry.planning import runfile
from mindferry.planning.settings import load_yaml

app = typer.Typer(pretty_exceptions_enable=False)
command.register(app)


@app.callback()
def _root() -> None:
    pass


@pytest.fixture(autouse=True)
def _own_configuration(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def call(*args):
    result = CliRunner().invoke(app, ["plan", *map(str, args)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def answer(*args):
    result = call(*args, "--json")
    return json.loads(result.stdout), result.exit_code


STRATEGY_KEYS = {
    "data_parallel", "model_parallel", "pipeline_stage", "micro_batch_num", "optimizer_shard_level", "recompute",
    "layers_per_stage", "memory_per_stage_bytes", "bubble_fraction", "step_seconds", "tokens_per_second", "mfu",
}  # fmt: skip


def test_json_contract():
    out, code = answer("--model", "gpt3-13b", "--devices", 64)
    assert code == 0
    assert out["command"] == "plan"
    assert out["verdict"] == "good"
    assert len(out["strategies"]) == 5
    steps = [item["step_seconds"] for item in out["strategies"]]
    assert steps == sorted(steps)
    for item in out["strategies"]:
        assert item.keys() >= STRATEGY_KEYS
        assert len(item["memory_per_stage_bytes"]) == item["pipeline_stage"] == len(item["layers_per_stage"])
        parts = item["memory_parts_per_stage_bytes"]
        for stage, total in enumerate(item["memory_per_stage_bytes"]):
            assert sum(part[stage] for part in parts.values()) == pytest.approx(total, abs=len(parts))
    for item in out["rejected"]:
        assert item.keys() >= {"strategy", "rule", "reason", "nearest"}


def test_the_articles_example():
    out, code = answer("--model", "gpt2-medium", "--devices", 8, "--model-parallel", 2, "--pipeline-stage", 2)
    assert code == 0
    best = out["strategies"][0]
    assert best["data_parallel"] == 2
    assert sum(best["layers_per_stage"]) == 24
    assert out["micro_batch_num_suggested"] == [4, 8]
    text = call("--model", "gpt2-medium", "--devices", 8, "--model-parallel", 2, "--pipeline-stage", 2).stdout
    assert "data_parallel 2 = 8 devices / (2 model_parallel x 2 pipeline_stage)" in text
    assert "24 layers / 2 stages = 12 a stage" in text
    assert "4 to 8 (2 to 4 x the stages)" in text


def test_written_yaml_passes_check_and_mindformers_own_reading(tmp_path):
    target = tmp_path / "run.yaml"
    args = ["--model", "gpt2-medium", "--devices", 8, "--model-parallel", 2, "--pipeline-stage", 2]
    first, code = answer(*args, "--write", target)
    assert code == 0
    again, code = answer("--check", target, "--devices", 8, "--global-batch", first["global_batch_size"])
    assert code == 0, again["findings"]
    best, checked = first["strategies"][0], again["strategies"][0]
    for key in ("data_parallel", "model_parallel", "pipeline_stage", "micro_batch_num", "layers_per_stage",
                "optimizer_shard_level", "vocab_size", "pp_interleave_num"):  # fmt: skip
        assert best[key] == checked[key]
    assert checked["step_seconds"] == pytest.approx(best["step_seconds"])
    assert checked["memory_per_stage_bytes"] == best["memory_per_stage_bytes"]

    from mindformers.core.parallel_config import build_parallel_config
    from mindformers.tools.register import MindFormerConfig
    from mindformers.tools.register.template import ConfigTemplate

    config = MindFormerConfig(str(target))
    ConfigTemplate.apply_template(config)  # raises KeyError for a key that mindformers does not know
    config = MindFormerConfig(**config)
    build_parallel_config(config)
    assert config.parallel_config.data_parallel == 2
    assert config.parallel_config.micro_batch_num == best["micro_batch_num"]
    assert config.recompute_config.recompute is False


def test_mindformers_converts_a_written_model_config(tmp_path):
    from mindformers.parallel_core.transformer_config_utils import convert_to_transformer_config

    from mindferry.planning import estimate, search, write
    from mindferry.planning import settings as data

    # a family mindferry has no class for: mindformers' own names throughout
    model = data.preset("llama2-13b").model_copy(update={"family": "other", "num_layers": 43})
    job = estimate.Job(model, 4096, 512, data.device("ascend-910b-64g"), data.convention("mindspore"))
    cut = search.Fixed(pipeline_stage=4, pp_interleave_num=2, model_parallel=2)
    best = search.search(job, 32, fixed=cut).best[0]
    write.write_yaml(tmp_path / "run.yaml", best.strategy, job, seconds=best.step_seconds)
    content = load_yaml(tmp_path / "run.yaml")
    config = {k: v for k, v in content["model"]["model_config"].items() if k != "model_type"}
    config["parallel_config"] = {**content["parallel_config"], "recompute": content["recompute_config"]}
    made = convert_to_transformer_config(config)
    assert (made.num_layers, made.hidden_size, made.num_query_groups) == (43, 5120, 40)
    assert made.virtual_pipeline_model_parallel_size == 2
    assert made.pipeline_model_parallel_size == 4
    assert made.offset == best.strategy.offset(43)
    assert made.sequence_parallel
    assert made.micro_batch_num == best.strategy.micro_batch_num
    assert made.normalization == "RMSNorm"


def test_a_yaml_of_ones_own_is_changed_in_place(tmp_path):
    base = tmp_path / "base.yaml"
    base.write_text(
        "use_legacy: False\nuse_parallel: True  # all cards\n"
        "runner_config: {batch_size: 1}\n"
        "parallel:\n  parallel_mode: 1\n  full_batch: True\n  parallel_optimizer_config: "
        "{gradient_accumulation_shard: True}\n  pipeline_config: {pipeline_interleave: True}\n"
        "parallel_config:\n  data_parallel: &dp 1   # ways\n  pipeline_stage: 1\n"
        "train_dataset: {input_columns: [input_ids, labels, attention_mask]}\n"
        "model:\n  model_config:\n    num_hidden_layers: 24\n    hidden_size: 1024\n    n_head: 16\n    vocab_size: "
        "50304\n    seq_length: 1024\n    pp_interleave_num: 4\nmy_own_section: {kept: [1, 2]}\n"
    )
    target = tmp_path / "new.yaml"
    out, code = answer("--model", base, "--devices", 8, "--pipeline-stage", 4, "--write", target)
    assert code == 0
    text = target.read_text()
    assert "# all cards" in text
    assert "# ways" in text
    new = load_yaml(target)
    assert new["my_own_section"] == {"kept": [1, 2]}
    assert new["parallel"]["dataset_strategy"][2] == [out["strategies"][0]["data_parallel"], 1, 1, 1]
    config = new["model"]["model_config"]
    assert config["num_hidden_layers"] == 24
    assert "num_layers" not in config
    assert "gradient_accumulation_shard" not in new["parallel"].get("parallel_optimizer_config", {})
    again, code = answer("--check", target, "--devices", 8)
    assert code == 0, again["findings"]
    assert base.read_text().startswith("use_legacy: False\nuse_parallel")


def test_stages_are_written_one_by_one_and_all_pass(tmp_path):
    target = tmp_path / "run.yaml"
    cut = ["--model-parallel", 2, "--pipeline-stage", 2]
    out, code = answer("--model", "gpt3-6.7b", "--devices", 16, *cut, "--staged", "--write", target)
    assert code == 0
    assert [item["name"] for item in out["stages"]] == ["data parallel", "model parallel", "pipeline"]
    assert [(i["strategy"]["model_parallel"], i["strategy"]["pipeline_stage"]) for i in out["stages"]] == [
        (1, 1), (2, 1), (2, 2)]  # fmt: skip
    for item in out["stages"]:
        assert len(item["verify"]) >= 3
        checked, code = answer("--check", item["written"], "--devices", 16)
        assert code == 0, checked["findings"]


def test_the_2x_layout_says_that_it_was_not_run(tmp_path):
    target = tmp_path / "two.yaml"
    out, code = answer(
        "--model", "gpt3-13b", "--devices", 16, "--pipeline-stage", 4, "--write", target, "--layout", "2.x"
    )
    assert code == 0
    assert target.read_text().startswith("# NOT RUN")
    content, best = load_yaml(target), out["strategies"][0]
    assert content["parallelism"]["pipeline_parallel"] == 4
    assert content["parallelism"]["tensor_parallel"] == best["model_parallel"]
    assert content["training"]["global_batch_size"] == best["global_batch_size"]
    refused = call("--check", target, "--devices", 16)
    assert refused.exit_code == 2
    assert "2.x" in refused.stderr


def test_the_2x_keys_exist_in_the_installed_pynative_configuration(tmp_path):
    from mindformers.pynative.config import config as pynative

    target = tmp_path / "two.yaml"
    call("--model", "gpt3-13b", "--devices", 16, "--write", target, "--layout", "2.x")
    content = load_yaml(target)
    text = Path(pynative.__file__).read_text()
    unknown = [k for part in ("training", "parallelism", "recompute") for k in content[part] if k not in text]
    # 1.9.0 carries an early form of the 2.x classes; these names came later
    assert set(unknown) <= {
        "data_parallel_shard",
        "npu_nums_per_device",
        "data_parallel_shard_strategy",
        "pipeline_parallel_interleave_num",
    }


def test_pictures_and_explanation(tmp_path):
    out, code = answer(
        "--model", "gpt3-13b", "--devices", 64, "--pipeline-stage", 4, "--svg", tmp_path, "--explain"
    )
    assert code == 0
    for name in ("memory.svg", "schedule.svg"):
        assert (tmp_path / name).read_text().startswith("<svg")
    text = "\n".join(out["explanation"])
    for name in ("memory.parameters", "memory.activations", "pipeline.bubble", "mfu", "flops.layer_linear"):
        assert f"{name} = " in text


def test_explained_formulas_give_the_numbers_of_the_plan():
    import re

    out, _ = answer("--model", "gpt2", "--devices", 4, "--data-parallel", 4, "--explain")
    best = out["strategies"][0]
    line = next(x for x in out["explanation"] if x.startswith("optimizer_states"))
    filled = line.split(" = ")[2]
    assert re.fullmatch(r"[\d.*+/() -]+", filled)
    value = eval(filled)
    assert value == pytest.approx(best["memory_parts_per_stage_bytes"]["optimizer_states"][0], rel=1e-3)


SHIPPED = (
    Path(sys.prefix) / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages/configs"
)


@pytest.mark.parametrize(
    "name", ["qwen3/pretrain_qwen3_32b_4k.yaml", "telechat3/pretrain_telechat3_36b.yaml"]
)
def test_shipped_configurations_pass(name):
    out, code = answer("--check", SHIPPED / name, "--devices", 16)
    assert code == 0, out["findings"]


def test_a_shipped_configuration_that_cannot_start():
    # 45 layers on 8 stages with offset 0: LayerSetting refuses (seen with its own code in test_rules)
    path = SHIPPED / "telechat3_moe/pretrain_telechat3_105b_a4b_4k.yaml"
    out, code = answer("--check", path, "--devices", 256)
    assert code == 1
    assert [item["rule"] for item in out["rejected"]] == ["pipeline.offset"]


GOOD = {
    "use_legacy": False, "use_parallel": True, "runner_config": {"batch_size": 1},
    "parallel": {"parallel_mode": 1, "full_batch": True},
    "parallel_config": {"data_parallel": 2, "model_parallel": 2, "pipeline_stage": 2, "micro_batch_num": 4,
                        "use_seq_parallel": True},
    "model": {"model_config": {"num_layers": 24, "hidden_size": 1024, "num_heads": 16, "vocab_size": 50304,
                               "seq_length": 1024}},
}  # fmt: skip


def write(path, **sections):
    content = json.loads(json.dumps(GOOD))
    for name, values in sections.items():
        if isinstance(values, dict) and name in content:
            content[name].update(values)
        else:
            content[name] = values
    path.write_text(yaml.safe_dump(content))
    return path


def test_check_says_what_when_and_the_way_out(tmp_path):
    path = write(tmp_path / "a.yaml", parallel_config={"data_parallel": 4, "micro_batch_num": 1})
    out, code = answer("--check", path, "--devices", 8)
    assert code == 1
    rules = {item["rule"]: item for item in out["rejected"]}
    assert set(rules) == {"devices.product", "pipeline.micro_batches"}
    assert "data_parallel 2" in rules["devices.product"]["remedy"]
    assert "graph is compiled" in rules["pipeline.micro_batches"]["when"]
    assert rules["devices.product"]["nearest"] == out["nearest"]["label"]
    near = out["nearest"]
    assert (near["data_parallel"], near["model_parallel"], near["pipeline_stage"]) == (2, 2, 2) or near[
        "data_parallel"
    ] == 4


def test_check_memory(tmp_path):
    path = write(tmp_path / "a.yaml", model={"model_config": {"num_layers": 96, "hidden_size": 12288, "num_heads": 96,
                                                              "vocab_size": 50304, "seq_length": 2048}})  # fmt: skip
    out, code = answer("--check", path, "--devices", 8)
    assert code == 1
    assert [item["rule"] for item in out["rejected"]] == ["memory"]
    assert "Out of Memory" in out["rejected"][0]["reason"]


def test_unknown_keys_are_named_with_the_nearest(tmp_path):
    path = write(tmp_path / "a.yaml", parallel_config={"pipeline_stages": 2}, parallel={"full_bach": True})
    out, code = answer("--check", path, "--devices", 8)
    assert code == 1
    unknown = next(item for item in out["rejected"] if item["rule"] == "keys.unknown")
    assert unknown["reason"] == "The config 'parallel_config' gets an unexpected key: pipeline_stages"
    assert "'pipeline_stage'" in unknown["remedy"]
    assert any(
        item["id"] == "plan.keys.typing" and "full_batch" in item["remedy"] for item in out["findings"]
    )


def test_the_old_gpt2_yamls_are_understood(tmp_path):
    # the keys of mindformers 1.3.2's run_gpt2_52b.yaml
    old = tmp_path / "gpt2_52b.yaml"
    old.write_text(
        "use_parallel: True\nmicro_batch_interleave_num: 1\nrunner_config: {epochs: 1, batch_size: 1, sink_mode: "
        "True}\nparallel: {parallel_mode: 1, full_batch: True, enable_parallel_optimizer: True}\n"
        "parallel_config: {data_parallel: 8, model_parallel: 1, pipeline_stage: 16, micro_batch_num: 64,\n"
        "  vocab_emb_dp: True, gradient_aggregation_group: 4}\n"
        "recompute_config: {recompute: True, mp_comm_recompute: True, recompute_slice_activation: True}\n"
        "model:\n  arch: {type: GPT2LMHeadModel}\n  model_config: {type: GPT2Config, seq_length: 1024, vocab_size: "
        "50257,\n    hidden_size: 8192, num_layers: 64, num_heads: 64, expand_ratio: 4, param_init_type: float16,\n"
        "    compute_dtype: float16, hidden_dropout_rate: 0.1, attention_dropout_rate: 0.1}\n"
    )
    out, code = answer("--check", old, "--devices", 128, "--device", "ascend-910-32g", "--explain")
    assert code == 0, out["findings"]
    best = out["strategies"][0]
    assert best["global_batch_size"] == 512
    assert best["layers_per_stage"] == [4] * 16
    assert best["recompute"] == "full"
    assert any(item["id"] == "plan.vocab.emb_dp" for item in out["findings"])
    assert any("50257" in item["message"] for item in out["findings"])
    text = (
        old.read_text()
        .replace("model_parallel: 1", "model_parallel: 2")
        .replace("data_parallel: 8", "data_parallel: 4")
    )
    old.write_text(text)
    out, code = answer("--check", old, "--devices", 128, "--device", "ascend-910-32g")
    assert code == 1
    assert "The vocab size of the embedding 50257" in out["rejected"][0]["reason"]


def test_depth_is_counted_as_mindformers_does(tmp_path):
    from mindformers.tools.check_rules import check_yaml_depth_before_loading

    for depth in (3, 9, 10, 11, 14):
        text = yaml.safe_dump(GOOD) + "x: " + "{a: " * (depth - 1) + "1" + "}" * (depth - 1) + "\n"
        path = tmp_path / "deep.yaml"
        path.write_text(text)
        said = [v.message for v in runfile.read(path).unread]
        if depth <= 10:
            check_yaml_depth_before_loading(text)
            assert said == []
            continue
        with pytest.raises(ValueError, match="nesting depth") as err:
            check_yaml_depth_before_loading(text)
        assert said == [str(err.value)]


def test_unknown_key_message_is_mindformers(tmp_path):
    from mindformers.tools.register.template import ParallelConfig

    with pytest.raises(KeyError) as err:
        ParallelConfig.apply({"pipeline_stages": 2})
    assert "The config 'parallel_config' gets an unexpected key: pipeline_stages" in str(err.value)


def test_known_keys_are_mindformers():
    from mindformers.tools.register import template

    for name, known in runfile.CLOSED_SECTIONS.items():
        assert set(template.CONFIG_NAME_TO_CLASS[name].keys()) == known


def test_a_measured_machine_is_a_device(tmp_path):
    from mindferry.planning import calibration, measure
    from mindferry.planning.estimate import Estimator
    from mindferry.planning.settings import Device
    from mindferry.planning.strategy import strategy_for

    machine = Device(
        name="this-machine", flops={"float32": 1.8e11}, memory_bytes=24 << 30, memory_bandwidth=1.4e10,
        devices_per_host=2,
        gemm_efficiency_forward=1.0, gemm_efficiency_backward=1.0, layer_overhead=0.0, gemm_passes=1.3,
        attention_passes=20.0, step_overhead=0.7, static_factor=3.0, activation_factor=10.0, resident_bytes=1.3e9,
        fused_attention=False, confidence="measured", source="a test",
    )  # fmt: skip
    keep = tmp_path / "cal.json"
    calibration.save(keep, calibration.CalibrationFile(device=machine))
    sizes = ["--devices", 1, "--global-batch", 2, "--batch-size", 2, "--seq-length", 256]
    out, code = answer("--model", "gpt2", *sizes, "--device", "this-machine", "--calibration-file", keep)
    assert code == 0, out["findings"]
    best = out["strategies"][0]
    expected = Estimator(measure.job_for(machine, 12, 2, 256)).estimate(strategy_for(12, batch_size=2))
    assert best["step_seconds"] == pytest.approx(expected.step_seconds, rel=0.02)
    assert out["memory_convention"] == "mindspore-fp32"
    assert best["memory_per_stage_bytes"][0] > 1.3e9


def test_dryrun_logs_and_step_times_calibrate(tmp_path):
    path = write(tmp_path / "a.yaml")
    before, _ = answer("--check", path, "--devices", 8)
    peaks = [int(x * 1.3 / 2**20) + 500 for x in before["strategies"][0]["memory_per_stage_bytes"]]
    logs = []
    for stage, peak in enumerate(peaks):
        logs.append(tmp_path / f"dry{stage}.log")
        logs[-1].write_text(
            "[WARNING] Device MOC memory size: 65536M\nUsed peak memory usage (without fragments): "
            f"{peak}M\nActual peak memory usage (with fragments): {peak + 900}M\n"
        )
    step = before["strategies"][0]["step_seconds"] * 1.5
    keep = tmp_path / "cal.json"
    args = ["--check", path, "--devices", 8, "--calibration-file", keep]
    after, code = answer(*args, "--dryrun-log", logs[0], "--dryrun-log", logs[1], "--measured-step", step)
    assert code == 0
    got = after["strategies"][0]
    assert got["step_seconds"] == pytest.approx(step, rel=0.03)
    for total, peak in zip(got["memory_per_stage_bytes"], peaks, strict=True):
        assert total == pytest.approx(peak * 2**20, rel=0.03)
    later, _ = answer(
        "--model", "gpt2-medium", "--devices", 8, "--calibration-file", keep, "--compute-dtype", "float16"
    )
    assert "a.yaml" in later["calibration"]["source"]
    other, _ = answer(
        "--model", "gpt2-medium", "--devices", 8, "--device", "a100-80g", "--calibration-file", keep
    )
    assert other["calibration"]["source"] == "not calibrated"


BAD = [
    (["--model", "gpt2", "--devices", "0"], 2, "expected 1 to"),
    (["--model", "gpt2", "--devices", "-8"], 2, "expected 1 to"),
    (["--model", "gpt2", "--devices", "99999999"], 2, "expected 1 to"),
    (["--model", "gpt-2", "--devices", "8"], 2, "did you mean 'gpt2'"),
    (["--model", "gpt2"], 2, "--devices is missing"),
    (["--devices", "8"], 2, "--model is missing"),
    (["--model", "gpt2", "--devices", "8", "--device", "ascend-910"], 2, "ascend-910"),
    (["--model", "gpt2", "--devices", "8", "--memory-convention", "papr"], 2, "paper"),
    (["--model", "gpt2", "--devices", "8", "--layout", "3.x"], 2, "1.x"),
    (["--model", "gpt2", "--devices", "8", "--seq-length", "2048"], 2, "1024 learned positions"),
    (["--model", "nowhere.yaml", "--devices", "8"], 2, "no such file"),
    (["--check", "nowhere.yaml"], 2, "no such file"),
    (["--model", "gpt2", "--devices", "8", "--hosts", "3"], 2, "--hosts"),
    (["--model", "gpt2", "--devices", "8", "--global-batch", "0"], 2, "--global-batch"),
    (["--model", "gpt2", "--devices", "8", "--measured-step", "1.0"], 2, "--check"),
    (["--model", "gpt2", "--devices", "8", "--write", "/nowhere/run.yaml"], 2, "--write"),
    (["--model", "gpt2", "--devices", "8", "--device", "this-machine"], 2, "--calibrate"),
    (["--model", "gpt3-175b", "--devices", "8"], 1, "GiB more than"),
]


@pytest.mark.parametrize(("args", "code", "said"), BAD)
def test_bad_input(args, code, said):
    result = call(*args)
    assert result.exit_code == code
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    out, again = answer(*args)
    assert again == code
    assert out["findings"][-1]["message"]


def test_device_file_with_missing_and_unknown_fields(tmp_path):
    path = tmp_path / "card.yaml"
    path.write_text("flops: {bfloat16: 1.0e+14}\nmemory_byts: 1000\n")
    result = call("--model", "gpt2", "--devices", 8, "--hardware", path)
    assert result.exit_code == 2
    assert "memory_bytes" in result.stderr
    assert "memory_bandwidth" in result.stderr
    assert "did you mean 'memory_bytes'" in result.stderr
    path.write_text("flops: {bfloat16: 1.0e+14}\nmemory_bytes: 34359738368\nmemory_bandwidth: 1.0e+12\n")
    out, code = answer("--model", "gpt2", "--devices", 8, "--hardware", path)
    assert code == 0
    assert out["device"]["name"] == "card"


def test_hostile_yaml(tmp_path):
    path = tmp_path / "x.yaml"
    for text in ("{", "- 1\n- 2\n", "!!python/object/apply:os.system ['true']", "a: &a [1]\n" + "b: [*a, *a]\n" * 900,
                 "parallel: 3\n", "\x00", "a: " + "[" * 5000):  # fmt: skip
        path.write_text(text)
        result = call("--check", path, "--devices", 8)
        assert result.exit_code == 2, text[:40]
    path.write_bytes(b"\xff\xfe\x00")
    assert call("--check", path).exit_code == 2


def test_any_yaml_gets_an_answer(tmp_path):
    values = hs.one_of(hs.none(), hs.booleans(), hs.integers(-3, 99), hs.floats(allow_nan=False), hs.text(max_size=4),
                       hs.lists(hs.integers(-2, 9), max_size=4))  # fmt: skip
    keys = hs.sampled_from([
        ("parallel_config", "data_parallel"), ("parallel_config", "model_parallel"),
        ("parallel_config", "micro_batch_num"),
        ("parallel_config", "pipeline_stage"), ("parallel", "dataset_strategy"), ("parallel", "parallel_mode"),
        ("parallel", "full_batch"), ("recompute_config", "recompute"), ("recompute_config", "select_recompute"),
        ("runner_config", "batch_size"), ("model_config", "offset"), ("model_config", "num_layers"),
        ("model_config", "pp_interleave_num"), ("model_config", "vocab_size"), ("parallel", "pipeline_config"),
        ("parallel", "parallel_optimizer_config"), ("parallel_config", "ulysses_degree_in_cp"),
    ])  # fmt: skip

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(hs.dictionaries(keys, values, max_size=4))
    def run(changes):
        content = json.loads(json.dumps(GOOD))
        for (section, key), value in changes.items():
            where = (
                content["model"]["model_config"]
                if section == "model_config"
                else content.setdefault(section, {})
            )
            where[key] = value
        path = tmp_path / "any.yaml"
        path.write_text(yaml.safe_dump(content))
        out, code = answer("--check", path, "--devices", 8)
        assert code in (0, 1, 2)
        assert all(item["id"] != "internal" for item in out["findings"]), out["findings"]

    run()


def test_help_has_an_example_and_start_up_loads_no_framework():
    assert "mindferry plan --model" in call("--help").stdout
    code = (
        "import sys\n"
        "import mindferry.cli.plan\n"
        "from mindferry.planning import session, report, search, write, advice, draw, calibration, runfile\n"
        "heavy = {'mindspore', 'mindformers', 'torch', 'transformers'} & set(sys.modules)\n"
        "print(sorted(heavy))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_a_model_directory_is_planned_without_loading_its_weights(tmp_path):
    import numpy as np
    from safetensors.numpy import save_file

    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 6, "n_head": 4,
              "n_positions": 128, "vocab_size": 501, "activation_function": "gelu_new"}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = {"wte.weight": (501, 64), "wpe.weight": (128, 64), "ln_f.weight": (64,), "ln_f.bias": (64,)}
    for i in range(6):
        for name, shape in (("ln_1.weight", (64,)), ("ln_1.bias", (64,)), ("ln_2.weight", (64,)), ("ln_2.bias", (64,)),
                            ("attn.c_attn.weight", (64, 192)), ("attn.c_attn.bias", (192,)),
                            ("attn.c_proj.weight", (64, 64)), ("attn.c_proj.bias", (64,)),
                            ("mlp.c_fc.weight", (64, 256)), ("mlp.c_fc.bias", (256,)),
                            ("mlp.c_proj.weight", (256, 64)), ("mlp.c_proj.bias", (64,))):  # fmt: skip
            shapes[f"h.{i}.{name}"] = shape
    tensors = {f"transformer.{name}": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    out, code = answer("--model", tmp_path, "--devices", 4, "--model-parallel", 2)
    assert code == 0, out
    assert out["model"]["num_layers"] == 6
    assert out["parameters"] == sum(int(np.prod(shape)) for shape in shapes.values())
    assert out["strategies"][0]["vocab_size"] == 512
    assert call("--model", tmp_path / "none", "--devices", 4).exit_code == 2


def test_a_run_yaml_of_migrate_passes(tmp_path):
    from mindferry.planning.settings import preset
    from mindferry.spec import Recipe, Schedule
    from mindferry.targets import run_yaml

    recipe = Recipe(schedule=Schedule(learning_rate=1e-4, total_steps=10), seq_length=512, batch_size=4)
    path = tmp_path / "run.yaml"
    path.write_text(run_yaml.dump(run_yaml.build(preset("gpt2"), recipe, steps_per_epoch=10)))
    out, code = answer("--check", path, "--devices", 1, "--device", "a100-80g")
    assert code == 0, out["findings"]
    assert out["strategies"][0]["global_batch_size"] == 4
    target = tmp_path / "cluster.yaml"
    out, code = answer("--model", path, "--devices", 16, "--pipeline-stage", 2, "--compute-dtype", "bfloat16",
                       "--write", target)  # fmt: skip
    assert code == 0, out["findings"]
    assert answer("--check", target, "--devices", 16, "--compute-dtype", "bfloat16")[1] == 0
