"""Going on with the optimizer state of PyTorch: the next losses are those that PyTorch would have had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindferry.errors import MindferryError, UsageError
from mindferry.targets.run_directory import RunDirectory
from mindferry.training.engine import Options, train

from ..support import make_run, make_source

TRAINER = {
    "learning_rate": 2e-3,
    "weight_decay": 0.1,
    "max_steps": 30,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 4,
    "per_device_train_batch_size": 4,
}


def adamw(model: Any) -> Any:
    """As transformers' Trainer groups it."""
    import torch

    named = list(model.named_parameters())
    groups = [
        {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0)


def torch_step(model: Any, optimizer: Any, step: int, ids: np.ndarray, labels: np.ndarray) -> float:
    import torch

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


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A source after six steps in PyTorch, with its optimizer.pt and its arguments beside it."""
    import torch
    from transformers import GPT2LMHeadModel

    directory = tmp_path_factory.mktemp("trained")
    source = make_source(directory / "gpt2", embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0, n_layer=1)
    model = GPT2LMHeadModel.from_pretrained(source)
    optimizer = adamw(model)
    rng = np.random.default_rng(0)
    for step in range(6):
        ids = rng.integers(0, model.config.vocab_size, (4, 33))
        torch_step(model, optimizer, step, ids[:, :-1], ids[:, 1:])
    model.save_pretrained(source)
    torch.save(optimizer.state_dict(), source / "optimizer.pt")
    (directory / "args.json").write_text(json.dumps(TRAINER))
    return source, model, optimizer


def test_training_goes_on_without_a_jump(trained: tuple, corpus: Path, tmp_path: Path) -> None:
    source, model, optimizer = trained
    choices = {"steps": None, "learning_rate": None, "recipe": source.parent / "args.json"}
    run = make_run(source, corpus, tmp_path / "run", optimizer_state=source / "optimizer.pt", **choices)
    batches: list[list[np.ndarray]] = []

    def keep(step: int, values: tuple) -> None:
        batches.append([value.asnumpy().copy() for value in values])

    outcome = train(RunDirectory.open(run), Options(steps=14, resume=True, on_batch=keep))
    assert outcome.first_step == 6
    expected = [torch_step(model, optimizer, 6 + i, batch[0], batch[1]) for i, batch in enumerate(batches)]
    np.testing.assert_allclose(list(outcome.losses.values()), expected, atol=1e-5, rtol=0)
    # Without it there is nothing to resume.
    fresh = make_run(source, corpus, tmp_path / "fresh", **choices)
    assert not (fresh / "checkpoints").exists()


def test_a_state_of_other_weights_is_refused(trained: tuple, corpus: Path, tmp_path: Path) -> None:
    import torch

    source, _, optimizer = trained
    state = optimizer.state_dict()
    made = {"seq_length": 32, "steps": 30}

    def attempt(content: Any, error: type[Exception], message: str) -> None:
        torch.save(content, tmp_path / "o.pt")
        with pytest.raises(error, match=message):
            make_run(source, corpus, tmp_path / "run", optimizer_state=tmp_path / "o.pt", **made)
        assert not (tmp_path / "run").exists()

    missing = {
        "state": {k: v for k, v in state["state"].items() if k != 3},
        "param_groups": state["param_groups"],
    }
    attempt(missing, MindferryError, r"parameter 3 \(h\.0\.attn\.c_proj\.weight\) has no AdamW state")
    groups = [{**state["param_groups"][0], "params": [0, 1]}]
    attempt({**state, "param_groups": groups}, MindferryError, r"groups of \[2\] parameters")
    swapped = {**state["state"], 0: state["state"][1], 1: state["state"][0]}
    attempt({**state, "state": swapped}, MindferryError, r"exp_avg of wte\.weight: found shape")
    attempt({"weights": torch.ones(2)}, UsageError, "no state of a torch optimizer")
    with pytest.raises(UsageError, match="6 updates made, the schedule has 5"):
        make_run(source, corpus, tmp_path / "run", optimizer_state=source / "optimizer.pt", steps=5)


def test_nanogpts_moments_go_where_the_weights_go(tmp_path: Path) -> None:
    """Moments that equal the weights must come out as the converted weights, tensor by tensor."""
    import torch
    from safetensors.numpy import load_file

    from mindferry.recipes.optimizer_state import read_state
    from mindferry.sources import open_source
    from mindferry.spec import OptimizerSpec
    from mindferry.weights import convert

    from ..weights.test_nanogpt import checkpoint

    file = tmp_path / "ckpt.pt"
    state = {n: v for n, v in checkpoint(file).items() if n != "lm_head.weight"}
    parameters = [*(p for p in state.values() if p.dim() >= 2), *(p for p in state.values() if p.dim() < 2)]
    decayed = sum(p.dim() >= 2 for p in parameters)
    tree = torch.load(file, weights_only=True)
    tree["optimizer"] = {
        "state": {
            number: {"step": torch.tensor(10.0), "exp_avg": p, "exp_avg_sq": p.square()}
            for number, p in enumerate(parameters)
        },
        "param_groups": [
            {"params": list(range(decayed)), "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
            {"params": list(range(decayed, len(parameters))), "weight_decay": 0.0},
        ],
    }
    torch.save(tree, file)
    source = open_source(file)
    convert(source, tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    found = read_state(file, source, OptimizerSpec(betas=(0.9, 0.95), weight_decay=0.2))
    assert found.step == 10
    assert found.warnings == ["the optimizer state was made with weight_decay 0.1, the recipe has 0.2"]
    assert found.exp_avg.keys() == weights.keys()
    one = {**tree["optimizer"]["param_groups"][0], "params": list(range(len(parameters)))}
    ordered = {
        number: {"step": torch.tensor(10.0), "exp_avg": p, "exp_avg_sq": p.square()}
        for number, p in enumerate(state.values())
    }
    file_of_one = tmp_path / "one.pt"
    torch.save({"state": ordered, "param_groups": [one]}, file_of_one)
    single = read_state(file_of_one, source, OptimizerSpec(betas=(0.9, 0.95), weight_decay=0.1))
    assert "AdamWDecayAll" in single.warnings[0]
    for name, value in weights.items():
        np.testing.assert_array_equal(single.exp_avg[name], value)
    for name, value in weights.items():
        np.testing.assert_array_equal(found.exp_avg[name], value)
        np.testing.assert_allclose(found.exp_avg_sq[name], value**2, rtol=1e-6)
