"""Megatron-LM's optimizer state, written here rank by rank from its layout, against PyTorch.

Moments are cut into shards by the same explicit loops as weights (tests/weights/test_megatron.py), numbered as
Megatron numbers them, and must come out as a Hugging Face model of the same numbers does.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mindferry.errors import MindferryError, UsageError
from mindferry.recipes.optimizer_state import read_state
from mindferry.sources import open_source
from mindferry.sources.megatron import padded_vocab
from mindferry.spec import LossScale, OptimizerSpec
from mindferry.targets.run_directory import RunDirectory
from mindferry.training.engine import Options, train
from mindferry.weights import convert

from ..support import make_run, make_source
from ..weights.test_megatron import hf_model, write_megatron

torch = pytest.importorskip("torch")

KINDS = ("exp_avg", "exp_avg_sq", "master")


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Names and tensors of a nested table, in order."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def chunks_of(tree: dict) -> list[dict[str, Any]]:
    models = [tree[k] for k in ("model", "model0", "model1", "model2") if k in tree]
    return [flat(model) for model in models]


def optimizer_of(
    shards: dict[str, list[dict[str, Any]]],
    *,
    step: int,
    plain_first: bool,
    masters: bool,
    apex: bool,
) -> dict[str, Any]:
    """What Megatron saves as "optimizer" for one rank: two groups, states numbered through them."""
    members = [(i, name) for i, chunk in enumerate(shards["exp_avg"]) for name in chunk]

    def is_plain(member: tuple[int, str]) -> bool:
        return member[1].endswith(".bias") or shards["exp_avg"][member[0]][member[1]].dim() == 1

    kinds = [[m for m in members if not is_plain(m)], [m for m in members if is_plain(m)]]
    mults = [1.0, 0.0]
    if plain_first:
        kinds.reverse()
        mults.reverse()
    states: dict[int, Any] = {}
    groups = []
    for own, mult in zip(kinds, mults, strict=True):
        numbers = list(range(len(states), len(states) + len(own)))
        for number, (chunk, name) in zip(numbers, own, strict=True):
            states[number] = {kind: shards[kind][chunk][name] for kind in ("exp_avg", "exp_avg_sq")}
            if not apex:
                states[number]["step"] = torch.tensor(float(step))
        group = {
            "params": numbers,
            "wd_mult": mult,
            "weight_decay": 0.1 * mult,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
        }
        groups.append(group | ({"step": step} if apex else {}))
    inner = {"state": states, "param_groups": groups}
    if not masters:
        return inner
    lists = [[shards["master"][chunk][name] for chunk, name in own] for own in kinds]
    return {"optimizer": inner, "fp32_from_fp16_params": lists}


def write_training(
    root: Path,
    tables: dict[str, dict[str, np.ndarray]],
    family: str,
    *,
    step: int = 7,
    masters: bool = False,
    apex: bool = False,
    change: Callable[[dict], None] | None = None,
    **layout: Any,
) -> Path:
    """A checkpoint with the weights of tables["master"] (rounded where there are masters) and their optimizer."""
    for kind in KINDS:
        write_megatron(root / kind, tables[kind], family, **layout)
    directory = root / "master" / "iter_0000500"
    for file in sorted(directory.glob("*/model_optim_rng.pt")):
        shards = {
            kind: chunks_of(
                torch.load(root / kind / "iter_0000500" / file.parent.name / file.name, weights_only=False)
            )
            for kind in KINDS
        }
        tree = torch.load(file, weights_only=False)
        later = file.parent.name.endswith(("_001", "_002", "_003"))
        tree["optimizer"] = optimizer_of(shards, step=step, plain_first=later, masters=masters, apex=apex)
        if masters:
            for name in [n for n in tree if n.startswith("model")]:
                tree[name] = halved(tree[name])
            tree["optimizer"]["grad_scaler"] = {"scale": torch.tensor(512.0), "growth_tracker": 3}
        if change is not None:
            change(tree)
        torch.save(tree, file)
    return directory


def halved(tree: dict) -> dict:
    return {k: halved(v) if isinstance(v, dict) else v.to(torch.bfloat16) for k, v in tree.items()}


def three_models(tmp_path: Path, family: str) -> dict[str, dict[str, np.ndarray]]:
    """Weights and two moments, all different, as Hugging Face directories below `tmp_path`."""
    weights = hf_model(tmp_path / "hf-master", family)
    tables = {"master": weights}
    for number, kind in enumerate(("exp_avg", "exp_avg_sq"), start=1):
        rng = np.random.default_rng(number)
        tables[kind] = {n: rng.standard_normal(v.shape).astype(np.float32) for n, v in weights.items()}
        directory = tmp_path / f"hf-{kind}"
        directory.mkdir()
        (directory / "config.json").write_bytes((tmp_path / "hf-master" / "config.json").read_bytes())
        save_file(tables[kind], directory / "model.safetensors", metadata={"format": "pt"})
    return tables


def converted(directory: Path, out: Path) -> dict[str, np.ndarray]:
    convert(open_source(directory), out)
    return load_file(out / "model.safetensors")


LAYOUTS = [
    ("gpt2", {"style": "mcore"}, 61),
    ("gpt2", {"style": "te", "tp": 2, "pp": 2}, 61),
    ("gpt2", {"style": "legacy", "tp": 2, "pp": 2, "vp": 2}, 61),
    ("gpt2", {"style": "oldest", "version": 0, "tp": 2}, 61),
    ("llama", {"style": "mcore", "tp": 4, "pp": 2}, 67),
]


@pytest.mark.parametrize(("masters", "apex"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("family", "layout", "vocab"), LAYOUTS)
def test_moments_go_where_the_weights_go(
    tmp_path: Path, family: str, layout: dict[str, Any], vocab: int, masters: bool, apex: bool
) -> None:
    tables = three_models(tmp_path, family)
    rows = padded_vocab(vocab, 8, layout.get("tp", 1))
    directory = write_training(tmp_path, tables, family, masters=masters, apex=apex, rows=rows, **layout)
    source = open_source(directory)
    found = read_state(directory, source, OptimizerSpec(weight_decay=0.1))
    assert found.step == 7
    kinds = {"exp_avg": found.exp_avg, "exp_avg_sq": found.exp_avg_sq}
    if masters:
        kinds["master"] = found.masters
        assert (found.scale, found.growth) == (512.0, 3)
        kept = found.parameters(LossScale(dynamic=True, value=65536.0))
        assert (kept["scale_sense"], kept["current_iterator_step"]) == (512.0, 4)
    else:
        assert found.masters == {}
    for kind, values in kinds.items():
        wanted = converted(tmp_path / f"hf-{kind}", tmp_path / f"out-{kind}")
        assert values.keys() >= wanted.keys()
        for name, value in wanted.items():
            np.testing.assert_array_equal(values[name], value, err_msg=f"{kind} {name}")
    assert any("iteration 500 with 7 updates" in text for text in found.warnings)


def test_one_ranks_file_stands_for_all(tmp_path: Path) -> None:
    directory = write_training(tmp_path, three_models(tmp_path, "gpt2"), "gpt2", tp=2, rows=64)
    source = open_source(directory)
    recipe = OptimizerSpec(weight_decay=0.1)
    whole = read_state(directory, source, recipe)
    one = read_state(directory / "mp_rank_01" / "model_optim_rng.pt", source, recipe)
    assert whole.exp_avg.keys() == one.exp_avg.keys()
    for name, value in whole.exp_avg.items():
        np.testing.assert_array_equal(value, one.exp_avg[name])


def without_states(tree: dict) -> None:
    tree["optimizer"]["state"] = {}


def without_optimizer(tree: dict) -> None:
    del tree["optimizer"]


def swapped_masters(tree: dict) -> None:
    """Two of the same shape: nothing but the values shows it."""
    lists = tree["optimizer"]["fp32_from_fp16_params"][1]
    one, two = [i for i, value in enumerate(lists) if value.shape == lists[-1].shape][:2]
    lists[one], lists[two] = lists[two], lists[one]


def lost_master(tree: dict) -> None:
    del tree["optimizer"]["fp32_from_fp16_params"][0][0]


def lost_state(tree: dict) -> None:
    del tree["optimizer"]["state"][3]


def other_shape(tree: dict) -> None:
    tree["optimizer"]["state"][1]["exp_avg_sq"] = torch.ones(3, 3)


def other_step(tree: dict) -> None:
    tree["optimizer"]["state"][1]["step"] = torch.tensor(8.0)


def one_group(tree: dict) -> None:
    tree["optimizer"]["param_groups"].pop()


@pytest.mark.parametrize(
    ("change", "masters", "error", "says"),
    [
        (without_states, False, UsageError, "the distributed optimizer keeps them elsewhere"),
        (without_optimizer, False, UsageError, "no optimizer state in it"),
        (swapped_masters, True, MindferryError, "does not round to the weight"),
        (lost_master, True, MindferryError, r"masters for \d+ parameters"),
        (lost_state, False, MindferryError, "parameter 3 .* has no Adam state"),
        (other_shape, False, MindferryError, r"exp_avg_sq of .*: found shape \[3, 3\]"),
        (other_step, False, MindferryError, "different numbers of steps"),
        (one_group, False, MindferryError, "no group holds"),
    ],
)
def test_refused(tmp_path: Path, change: Any, masters: bool, error: type[Exception], says: str) -> None:
    tables = three_models(tmp_path, "gpt2")
    directory = write_training(tmp_path, tables, "gpt2", masters=masters, rows=64, change=change)
    with pytest.raises(error, match=says):
        read_state(directory, open_source(directory), OptimizerSpec(weight_decay=0.1))


def test_only_for_megatron_weights(tmp_path: Path) -> None:
    directory = write_training(tmp_path, three_models(tmp_path, "gpt2"), "gpt2", rows=64)
    with pytest.raises(UsageError, match="the weights are huggingface"):
        read_state(directory, open_source(tmp_path / "hf-master"), OptimizerSpec())


SCHEDULE = {"lr": 2e-3, "min_lr": 0.0, "lr_decay_style": "cosine", "lr_warmup_iters": 4, "train_iters": 30}


def torch_step(model: Any, optimizer: Any, step: int, ids: np.ndarray, labels: np.ndarray) -> float:
    from mindferry.recipes.schedule import rate
    from mindferry.spec import Schedule

    schedule = Schedule(kind="cosine", learning_rate=2e-3, warmup_steps=4, total_steps=30)
    for group in optimizer.param_groups:
        group["lr"] = rate(schedule, step)
    logits = model(input_ids=torch.from_numpy(ids.astype(np.int64))).logits
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.from_numpy(labels.astype(np.int64)).flatten()
    )
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def tables_of(model: Any, optimizer: Any) -> dict[str, dict[str, np.ndarray]]:
    """Weights and moments of the whole model in PyTorch, by its names."""
    named = dict(model.named_parameters())
    states = {name: optimizer.state[parameter] for name, parameter in named.items()}
    return {
        "master": {name: p.detach().numpy().copy() for name, p in named.items()},
        "exp_avg": {name: state["exp_avg"].numpy().copy() for name, state in states.items()},
        "exp_avg_sq": {name: state["exp_avg_sq"].numpy().copy() for name, state in states.items()},
    }


def test_training_goes_on_without_a_jump(corpus: Path, tmp_path: Path) -> None:
    """Six steps in PyTorch, cut into 2 ranks x 2 stages, migrated, and the next losses are PyTorch's own: those of
    the float32 masters, not of the bfloat16 weights that the checkpoint holds beside them."""
    from transformers import GPT2LMHeadModel

    dropout = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"n_layer": 4, "n_embd": 24, "n_head": 4, "n_positions": 19}
    hf = make_source(tmp_path / "hf", **sizes, **dropout)
    model = GPT2LMHeadModel.from_pretrained(hf)
    named = list(model.named_parameters())
    groups = [
        {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0)
    rng = np.random.default_rng(0)
    for step in range(6):
        ids = rng.integers(0, model.config.vocab_size, (4, 17))
        torch_step(model, optimizer, step, ids[:, :-1], ids[:, 1:])
    arguments = {
        **SCHEDULE, "vocab_size": model.config.vocab_size, "micro_batch_size": 4, "global_batch_size": 4,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "weight_decay": 0.1,
    }  # fmt: skip
    rows = padded_vocab(model.config.vocab_size, 8, 2)
    directory = write_training(
        tmp_path, tables_of(model, optimizer), "gpt2", step=6, masters=True, apex=True,
        tp=2, pp=2, rows=rows, args=arguments,
    )  # fmt: skip
    run = make_run(
        directory, corpus, tmp_path / "run", seq_length=16, batch_size=None, steps=None, learning_rate=None,
        recipe=directory / "mp_rank_00_000" / "model_optim_rng.pt", optimizer_state=directory, tokenizer=hf,
    )  # fmt: skip
    batches: list[list[np.ndarray]] = []

    def keep(step: int, values: tuple) -> None:
        batches.append([value.asnumpy().copy() for value in values])

    outcome = train(RunDirectory.open(run), Options(steps=12, resume=True, on_batch=keep))
    assert outcome.first_step == 6
    expected = [torch_step(model, optimizer, 6 + i, batch[0], batch[1]) for i, batch in enumerate(batches)]
    assert len(expected) == 6
    np.testing.assert_allclose(list(outcome.losses.values()), expected, atol=1e-5, rtol=0)
    report = json.loads((run / "migration.json").read_text())
    assert any("float32 masters" in text for text in report["warnings"])
