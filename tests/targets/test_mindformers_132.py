"""migrate --target mindformers-1.3.2: its names, its YAML, its rows, its limits."""

from __future__ import annotations

import importlib
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from mindferry.errors import MindferryError, UsageError
from mindferry.sources import open_source
from mindferry.spec import LossScale, OptimizerSpec, Precision, Recipe, Schedule
from mindferry.targets import mindformers_132 as legacy
from mindferry.weights import convert

from ..support import SEQ_LENGTH, make_run, make_source, run_cli

# Top-level sections of mindformers 1.3.2's configs/gpt2/pretrain_gpt2_small_fp16.yaml.
SECTIONS = {
    *("seed", "run_mode", "output_dir", "load_checkpoint", "auto_trans_ckpt", "resume_training", "context"),
    *("runner_config", "runner_wrapper", "use_parallel", "parallel", "parallel_config", "trainer", "do_eval"),
    *("micro_batch_interleave_num", "recompute_config", "train_dataset", "train_dataset_task", "model"),
    *("lr_schedule", "optimizer", "callbacks", "processor"),
}
# Its GPT2Config's arguments (models/gpt2/gpt2_config.py).
CONFIG_KEYS = {
    *("type", "batch_size", "eos_token_id", "pad_token_id", "bos_token_id", "unk_token_id", "seq_length"),
    *("max_position_embeddings", "vocab_size", "hidden_size", "num_layers", "num_heads", "num_labels"),
    *("expand_ratio", "embedding_dropout_prob", "hidden_dropout_rate", "attention_dropout_rate"),
    *("param_init_type", "layernorm_compute_type", "softmax_compute_type", "compute_dtype", "hidden_act"),
    *("use_past", "post_layernorm_residual", "offset", "parallel_config", "checkpoint_name_or_path"),
    *("use_flash_attention", "use_prompt_flash_attention"),
}


@pytest.fixture(scope="module")
def made(source: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("legacy") / "run"
    return make_run(source, corpus, out, target=legacy.TARGET)


@pytest.fixture(scope="module")
def plain(source: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run for today's mindformers."""
    return make_run(source, corpus, tmp_path_factory.mktemp("plain") / "run")


def rows_of(file: Path) -> list[dict[str, np.ndarray]]:
    from mindspore.mindrecord import FileReader

    reader = FileReader(str(file), num_consumer=1)
    found = [{name: np.array(value) for name, value in row.items()} for row in reader.get_next()]
    reader.close()
    return found


def test_names_and_numbers_are_those_of_its_own_converter(made: Path, source: Path) -> None:
    import mindspore as ms

    from ..weights.test_other_formats import TestMindformersGPT2

    loaded = ms.load_checkpoint(str(made / "gpt2.ckpt"))
    expected = TestMindformersGPT2.parameters(load_file(source / "model.safetensors"))
    assert loaded.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(loaded[name].asnumpy(), array, err_msg=name)


def test_it_reads_back_as_the_same_model(made: Path, plain: Path, source: Path, tmp_path: Path) -> None:
    again = open_source(made)
    assert again.format == "mindformers-1.x"
    assert again.spec == open_source(source).spec
    convert(again, tmp_path / "again")
    before, after = (
        load_file(plain / "model" / "model.safetensors"),
        load_file(tmp_path / "again/model.safetensors"),
    )
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_the_yaml_has_its_keys_and_no_others(made: Path) -> None:
    assert not (made / "run.yaml").exists()
    assert not (made / "model").exists()
    tree = yaml.safe_load((made / "gpt2.yaml").read_text())
    assert set(tree) == SECTIONS
    config = tree["model"]["model_config"]
    assert set(config) <= CONFIG_KEYS
    assert config["seq_length"] == SEQ_LENGTH
    assert (config["expand_ratio"], config["hidden_act"], config["compute_dtype"]) == (4, "gelu", "float16")
    assert tree["model"]["arch"]["type"] == "GPT2LMHeadModel"
    assert (made / tree["load_checkpoint"]).is_file()
    assert (made / tree["train_dataset"]["data_loader"]["dataset_dir"]).is_file()
    assert tree["lr_schedule"] == {
        "type": "LinearWithWarmUpLR",
        "learning_rate": 1e-3,
        "warmup_steps": 0,
        "warmup_lr_init": 0.0,
        "total_steps": 60,
    }
    # The recipe computes in float32 without a scale; float16 needs one.
    assert tree["runner_wrapper"]["scale_sense"]["type"] == "DynamicLossScaleUpdateCell"


def test_rows_are_one_token_longer_and_nothing_is_masked(made: Path, plain: Path) -> None:
    old, new = rows_of(made / "data" / "train.mindrecord"), rows_of(plain / "data" / "train.mindrecord")
    assert len(old) == len(new)
    for a, b in zip(old, new, strict=True):
        assert a["input_ids"].shape == (SEQ_LENGTH + 1,)
        np.testing.assert_array_equal(a["input_ids"][:-1], b["input_ids"])
        np.testing.assert_array_equal(a["input_ids"][1:], b["labels"])
        np.testing.assert_array_equal(a["attention_mask"][1:], b["loss_mask"])
        assert a["attention_mask"][0] == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_inner": 50}, "expand_ratio is a whole number"),
        ({"layer_norm_epsilon": 1e-6}, "layernorm_epsilon"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"activation_function": "gelu"}, "gelu_erf"),
    ],
)
def test_its_limits_are_named_and_nothing_is_written(
    tmp_path: Path, corpus: Path, changes: dict[str, Any], message: str
) -> None:
    source = make_source(tmp_path / "gpt2", **changes)
    with pytest.raises(MindferryError, match=message):
        make_run(source, corpus, tmp_path / "run", target=legacy.TARGET)
    assert [path.name for path in tmp_path.iterdir()] == ["gpt2"]


def test_recipes_it_cannot_follow() -> None:
    schedule = Schedule(kind="cosine", learning_rate=1e-3, warmup_steps=2, total_steps=10)
    good = Recipe(
        schedule=schedule,
        seq_length=8,
        precision=Precision(compute="float16"),
        loss_scale=LossScale(dynamic=True),
    )
    assert legacy.check_recipe(good) == []
    odd = good.model_copy(update={"schedule": schedule.model_copy(update={"warmup_rule": "(t+1)/(w+1)"})})
    with pytest.raises(UsageError, match="no schedule 'cosine'"):
        legacy.check_recipe(odd)
    every = good.model_copy(update={"optimizer": OptimizerSpec(weight_decay=0.1, decay="all")})
    with pytest.raises(UsageError, match="never decays 1-D tensors"):
        legacy.check_recipe(every)


def test_options_that_do_not_go_together(source: Path, corpus: Path, tmp_path: Path) -> None:
    common = (
        "migrate",
        source,
        "--data",
        corpus,
        "--out",
        tmp_path / "run",
        "--seq-length",
        "32",
        "--target",
    )
    done = run_cli(*common, legacy.TARGET, "--cut", "dp=2")
    assert done.returncode == 2
    assert "--cut is not made for --target" in done.stderr
    done = run_cli(*common, "mindformers-1.3.1")
    assert done.returncode == 2
    assert "mindformers-1.3.2" in done.stderr


WHEEL = os.environ.get("MINDFORMERS_132", "")


@pytest.mark.skipif(not WHEEL, reason="set MINDFORMERS_132 to the unpacked wheel of mindformers 1.3.2")
def test_its_own_network_computes_the_sources_numbers(made: Path, source: Path) -> None:
    """The GPT2LMHeadModel of the 1.3.2 wheel, on a CPU under today's MindSpore: logits and loss, in its float16."""
    import mindspore as ms
    import torch
    from transformers import GPT2LMHeadModel

    with pytest.MonkeyPatch.context() as patch:
        module, config_class = _network_of_the_wheel(patch)
        config = yaml.safe_load((made / "gpt2.yaml").read_text())["model"]["model_config"]
        config.pop("type")
        network = module.GPT2LMHeadModel(config_class(**config))
        missed = ms.load_param_into_net(
            network, ms.load_checkpoint(str(made / "gpt2.ckpt")), strict_load=True
        )
        assert missed == ([], [])
        ms.set_context(mode=ms.PYNATIVE_MODE)
        row = rows_of(made / "data" / "train.mindrecord")[0]
        ids = row["input_ids"][None].astype(np.int32)
        network.set_train(False)
        logits = network(ms.Tensor(ids[:, :-1]), ms.Tensor(row["attention_mask"][None, :-1]))[0].asnumpy()
        reference = GPT2LMHeadModel.from_pretrained(str(source)).eval()
        with torch.no_grad():
            expected = reference(torch.tensor(ids[:, :-1]).long()).logits.numpy()
        assert np.abs(logits - expected).max() < 5e-3 * np.abs(expected).max()
        network.set_train(True)
        for _, cell in network.cells_and_names():
            if type(cell).__name__ == "Dropout":
                cell.set_train(False)
        loss = float(network(ms.Tensor(ids), ms.Tensor(row["attention_mask"][None])).asnumpy().item())
        wanted = torch.nn.functional.cross_entropy(torch.tensor(expected[0]), torch.tensor(ids[0, 1:]).long())
        assert abs(loss - wanted.item()) < 2e-3


def _network_of_the_wheel(patch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Its GPT-2 without the packages' __init__ files, which import all models and need an older MindSpore."""
    for name in [name for name in sys.modules if name.split(".")[0] == "mindformers"]:
        patch.delitem(sys.modules, name)
    for name in ("", ".models", ".models.gpt2", ".core", ".modules"):
        package = types.ModuleType(f"mindformers{name}")
        package.__path__ = [str(Path(WHEEL, "mindformers", *name.split(".")[1:]))]
        patch.setitem(sys.modules, package.__name__, package)
    sys.modules["mindformers"].__version__ = "1.3.2"  # type: ignore[attr-defined]
    config = importlib.import_module("mindformers.models.gpt2.gpt2_config")
    return importlib.import_module("mindformers.models.gpt2.gpt2"), config.GPT2Config
