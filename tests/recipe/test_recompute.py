"""recompute_config: what is written, refused and said, and that it changes no number."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mindferry.diagnosis.config_audit import audit
from mindferry.errors import UsageError
from mindferry.recipes.reading import read_recipe
from mindferry.recipes.recompute import of_megatron, parse
from mindferry.spec import Recompute
from mindferry.targets import recompute, run_yaml
from mindferry.targets.run_directory import RunDirectory
from mindferry.training.engine import Options, train

from ..support import make_run, make_source

CORE = r"self_attention\.core_attention"


@pytest.mark.parametrize(
    ("text", "whole", "select"),
    [
        ("off", False, False),
        ("layers", True, False),
        ("layers=2", [2], False),
        ("core_attention", False, [CORE]),
        ("attention", False, ["self_attention"]),
        ("mlp", False, ["mlp"]),
        ("attention,mlp=1", False, {"self_attention": True, "mlp": [1]}),
        ("layers=1, mlp", [1], ["mlp"]),
    ],
)
def test_written(text: str, whole: Any, select: Any) -> None:
    block = recompute.block(parse(text))
    assert block == {
        "recompute": whole,
        "select_recompute": select,
        "parallel_optimizer_comm_recompute": False,
        "mp_comm_recompute": True,
        "recompute_slice_activation": False,
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("attention,layers", "recomputed already"),
        ("attention,core_attention", "a part of attention"),
        ("atention", "attention"),
        ("mlp=0", "'0'"),
        ("mlp=-1", "'-1'"),
        ("mlp=two", "'two'"),
        ("mlp,mlp", "twice"),
        ("", "expected off"),
    ],
)
def test_refused_on_the_command_line(text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert says in f"{caught.value} {caught.value.remedy}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    room = tmp_path_factory.mktemp("recompute")
    (room / "c.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    return make_run(make_source(room / "src"), room / "c.txt", room / "run", steps=3)


def changed(run: Path, out: Path, section: dict[str, Any], **dotted: Any) -> Path:
    """A copy of the run with other recompute settings."""
    shutil.copytree(run, out)
    content = run_yaml.read(out / "run.yaml")
    content["recompute_config"].update(section)
    for key, value in dotted.items():
        part, _, name = key.partition("__")
        (content["model"]["model_config"] if part == "model" else content[part])[name] = value
    (out / "run.yaml").write_text(run_yaml.dump(content))
    return out


REFUSED = [
    ({"recompute": [3]}, "found 3 layers of stage 0, which has 2"),
    ({"recompute": [1, 1]}, "expected at most 1, one a pipeline stage"),
    ({"recompute": [0, 1, 5, 7]}, "does not list layers"),
    ({"recompute": [-1]}, "found -1"),
    ({"recompute": [1.5]}, "found 1.5"),
    ({"recompute": ["first"]}, "found 'first'"),
    ({"recompute": [[3]]}, "found 3 layers of a part of stage 0, which has 2"),
    ({"recompute": [[1, 1]]}, "found the row [1, 1], expected 1"),
    ({"recompute": [[1], [1]]}, "found 2 rows, expected 1"),
    ({"recompute": "yes"}, "recompute"),
    ({"recompute": 2}, "recompute"),
    ({"select_recompute": {"mlp": [9]}}, "select_recompute.mlp: found 9"),
    ({"select_recompute": {"mlp": 1}}, "select_recompute.mlp: found 1"),
    ({"select_recompute": {"mlp": "all"}}, "'all'"),
    ({"select_recompute": ["mlp", 1]}, "patterns and numbers in one list"),
    ({"select_recompute": ["mlp("]}, "not a regular expression"),
    ({"select_comm_recompute": [3]}, "select_comm_recompute: found 3"),
    ({"select_recompute_exclude": [3]}, "select_recompute_exclude: found 3"),
    ({"mp_comm_recompute": "no"}, "mp_comm_recompute"),
    ({"parallel_optimizer_comm_recompute": 1}, "parallel_optimizer_comm_recompute"),
    ({"recompute_slice_activation": True}, "recompute_slice_activation"),
    ({"select_recomputes": True}, "select_recompute"),
]


@pytest.mark.parametrize(("section", "says"), REFUSED)
def test_refused_in_run_yaml(run: Path, tmp_path: Path, section: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        run_yaml.read(changed(run, tmp_path / "run", section) / "run.yaml")
    assert says in str(caught.value)
    assert "recompute" in str(caught.value)


def test_layers_of_stages_follow_the_offset(run: Path, tmp_path: Path) -> None:
    """7 layers on 2 stages with offset [0, 1]: 3 and 4."""
    settings = {"model__num_layers": 7, "model__offset": [0, 1], "parallel_config__pipeline_stage": 2}
    settings["parallel_config__micro_batch_num"] = 2
    good = changed(run, tmp_path / "good", {"recompute": [3, 4]}, **settings)
    assert run_yaml.read(good / "run.yaml")["recompute_config"]["recompute"] == [3, 4]
    bad = changed(run, tmp_path / "bad", {"recompute": [4, 3]}, **settings)
    with pytest.raises(UsageError, match="found 4 layers of stage 0, which has 3"):
        run_yaml.read(bad / "run.yaml")


def test_layer_setting_agrees_about_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """mindformers' own LayerSetting clips what is refused here and keeps what is accepted."""
    from mindformers.parallel_core.training_graph.transformer import utils
    from mindformers.parallel_core.transformer_config import TransformerConfig

    monkeypatch.setattr(utils, "is_legacy_model", lambda: False)

    def layers(value: Any) -> list[list[int]]:
        config = TransformerConfig(num_layers=5, num_attention_heads=2, hidden_size=8, recompute=value)
        return utils.LayerSetting(5, 0, config).layer_recompute

    content = {
        "recompute_config": {},
        "model": {"model_config": {"num_layers": 5}},
        "parallel_config": {"pipeline_stage": 1},
    }
    for value, good in ([3], True), ([5], True), ([6], False), ([True], True), ([[4]], True), ([[6]], False):
        content["recompute_config"] = {"recompute": value}
        assert (recompute.problems(content) == []) is good, value
        found = layers([list(row) if isinstance(row, list) else row for row in value])
        stated = value[0][0] if isinstance(value[0], list) else 5 if value[0] is True else value[0]
        assert (found == [[stated]]) is good, "what is refused is what mindformers would clip in silence"


EXPLAINED = [
    ({}, {}, [], "right"),
    ({"recompute": True}, {}, ["does not lower the peak on a CPU"], "wrong"),
    ({"recompute": True}, {"model__layer_spec": "fused"}, ["less memory"], "off"),
    ({"select_recompute": [CORE]}, {"context__device_target": "Ascend"}, [], "on"),
    ({"select_recompute": True}, {}, ["nothing is recomputed", "does not lower"], "wrong"),
    ({"select_recompute": [1]}, {}, ["nothing is recomputed", "does not lower"], "wrong"),
    ({"select_recompute": ["self_attention.core_attention"]}, {}, ["matches nothing", "does not lower"], "wrong"),
    ({"recompute": True, "select_recompute": ["mlp"]}, {}, ["has no effect", "does not lower"], "wrong"),
    ({"recompute": [1], "select_recompute": ["mlp"]}, {"model__layer_spec": "fused"}, ["less memory"], "off"),
]  # fmt: skip


@pytest.mark.parametrize(("section", "dotted", "says", "state"), EXPLAINED)
def test_explained(
    run: Path, tmp_path: Path, section: dict[str, Any], dotted: dict[str, Any], says: list[str], state: str
) -> None:
    made = changed(run, tmp_path / "run", section, **dotted)
    said = recompute.notes(run_yaml.read(made / "run.yaml"))
    assert len(said) == len(says)
    for text, wanted in zip(said, says, strict=True):
        assert wanted in text
    states = {item.state for item in audit(made) if item.name == "recompute"}
    assert states == {state}


def test_of_the_sources(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"gradient_checkpointing": True}))
    assert read_recipe(tmp_path / "a.json").recompute == Recompute(layers=True)
    base = "python pretrain_gpt.py --lr 1e-4 --train-iters 9 --micro-batch-size 1 --global-batch-size 1 "
    scripts = {
        "": Recompute(),
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 4": Recompute(layers=True),
        "--recompute-granularity full --recompute-method block --recompute-num-layers 4": Recompute(layers=4),
        "--recompute-granularity selective": Recompute(core_attention=True),
        "--recompute-activations": Recompute(core_attention=True),
        "--recompute-granularity selective --recompute-modules core_attn mlp --fp16": Recompute(
            core_attention=True, mlp=True
        ),
    }  # fmt: skip
    for flags, wanted in scripts.items():
        (tmp_path / "a.sh").write_text(base + flags)
        assert read_recipe(tmp_path / "a.sh").recompute == wanted, flags
    _, said = of_megatron({"distribute_saved_activations": True}, "args")
    assert "recompute_slice_activation" in said[0]
    made, said = of_megatron(
        {"recompute_granularity": "selective", "recompute_modules": ["moe_act", "mlp"]}, "x"
    )
    assert made == Recompute(mlp=True)
    assert "moe_act" in said[0]
    for bad in (
        {"recompute_granularity": "some"},
        {"recompute_granularity": "full", "recompute_method": "odd"},
    ):
        with pytest.raises(UsageError, match=r"found '(some|odd)'"):
            of_megatron(bad, "args")


def test_migrate_writes_and_explains(run: Path, tmp_path: Path) -> None:
    from mindferry.migration import Choices, migrate

    choices = Choices(seq_length=32, batch_size=4, steps=3, recompute=parse("attention"))
    made = migrate(run.parent / "src", [run.parent / "c.txt"], tmp_path / "run", choices)
    content = run_yaml.read(tmp_path / "run" / "run.yaml")
    assert content["recompute_config"]["select_recompute"] == ["self_attention"]
    assert [text for text in made.warnings if "does not lower the peak on a CPU" in text]
    with pytest.raises(UsageError, match="found 3 layers of stage 0, which has 2"):
        migrate(
            run.parent / "src",
            [run.parent / "c.txt"],
            tmp_path / "other",
            Choices(seq_length=32, batch_size=4, steps=3, recompute=parse("mlp=3")),
        )
    assert not (tmp_path / "other").exists()


def losses(run: Path) -> list[float]:
    train(RunDirectory(run), Options())
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("layer_spec", ["portable", "fused"])
def test_the_same_losses(run: Path, tmp_path: Path, caplog: Any, layer_spec: str) -> None:
    """Recomputed whole, in part, or not: bit for bit the same."""
    first = losses(changed(run, tmp_path / "off", {}, model__layer_spec=layer_spec))
    assert len(first) == 3
    for number, text in enumerate(("layers", "layers=1,mlp", "attention,mlp=1")):
        section = recompute.block(parse(text))
        made = changed(run, tmp_path / str(number), section, model__layer_spec=layer_spec)
        caplog.clear()
        assert losses(made) == first, text
        wanted = (
            "Set full recompute at layer 0" if "layers" in text else "recompute on at layer 1: self_attention"
        )
        assert wanted in caplog.text
