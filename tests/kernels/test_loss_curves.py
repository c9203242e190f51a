"""200 steps on real text: fused in bfloat16, portable in float32 and PyTorch in bfloat16 learn alike."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from mindferry import kernels
from mindferry.checking import parity
from mindferry.checking.sides import Batch
from mindferry.targets.run_directory import RunDirectory
from mindferry.training import engine

from ..support import make_run

STEPS, WINDOW, TOLERANCE = 200, 10, 5e-3

pytestmark = pytest.mark.skipif(
    not kernels.has_bf16(), reason="this CPU has no bfloat16 products, or no kernels"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer GPT-2 with fresh weights, Python's help, 1024 tokens a step.

    At twice the rate and half the batch, training amplifies any rounding: PyTorch parts from itself by 0.7 % when its
    first weights are off by a relative 1e-3, so nothing could be told from the curves.
    """
    from mindferry.demo import source

    folder = tmp_path_factory.mktemp("curves")
    settings = {"n_layer": 2, "n_embd": 128, "n_head": 4, "n_positions": 64, "vocab_size": 512}
    dropout = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
    source.build(folder / "gpt2", steps=0, **settings, **dropout)
    source.write_corpus(folder / "text")
    choices = {"seq_length": 64, "batch_size": 16, "steps": STEPS, "learning_rate": 1e-3}
    return make_run(folder / "gpt2", folder / "text", folder / "run", **choices)


def mindferry_losses(
    run: Path, layer_spec: str, dtype: str
) -> tuple[list[float], list[Batch], dict[str, Any]]:
    """Losses, batches and the run.yaml that mindformers got."""
    batches: list[Batch] = []
    model = "model.model_config"
    options = engine.Options(
        steps=STEPS,
        restart=True,
        overrides={f"{model}.layer_spec": layer_spec, f"{model}.compute_dtype": dtype},
        on_batch=lambda step, values: batches.append(Batch(*(np.array(v.asnumpy()) for v in values))),
    )
    directory = RunDirectory.open(run)
    outcome = engine.train(directory, options)
    effective = yaml.safe_load((run / "logs/effective.yaml").read_text(encoding="utf-8"))
    wrapper = "KernelTrainOneStepCell" if layer_spec == "fused" else "PortableTrainOneStepCell"
    assert effective["runner_wrapper"]["type"] == wrapper, "no side trains as another one"
    return (
        [outcome.losses[step] for step in sorted(outcome.losses)],
        batches,
        engine.prepare(directory, options),
    )


def torch_losses(run: Path, content: dict[str, Any], batches: list[Batch], scale: float = 1.0) -> list[float]:
    """transformers' GPT-2 with SDPA under bfloat16 autocast; parameters, loss and AdamW in float32."""
    import torch
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(run.parent / "gpt2", attn_implementation="sdpa").eval()

    class Autocast(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, **inputs: Any) -> SimpleNamespace:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return SimpleNamespace(logits=self.model(**inputs).logits.float())

    schedule = content["lr_schedule"]
    content = {**content, "lr_schedule": {**schedule, "learning_rate": schedule["learning_rate"] * scale}}
    return parity.train_torch(Autocast(), content, batches)


def gaps(ours: list[float], theirs: list[float]) -> np.ndarray:
    """Relative differences of the means over every WINDOW steps in a row."""
    a, b = (np.convolve(losses, np.full(WINDOW, 1 / WINDOW), mode="valid") for losses in (ours, theirs))
    return np.abs(a - b) / b


@pytest.mark.long  # three trainings and a control: a minute on two idle cores
def test_the_curves_of_200_steps_lie_within_half_a_percent(run: Path) -> None:
    portable, batches, content = mindferry_losses(run, "portable", "float32")
    fused, seen, _ = mindferry_losses(run, "fused", "bfloat16")
    for one, other in zip(batches, seen, strict=True):
        np.testing.assert_array_equal(one.input_ids, other.input_ids)
    torch = torch_losses(run, content, batches)
    control = torch_losses(run, content, batches, scale=1.1)

    assert len(fused) == len(portable) == len(torch) == STEPS
    pairs = {
        "fused bf16, portable fp32": gaps(fused, portable),
        "fused bf16, PyTorch bf16": gaps(fused, torch),
        "PyTorch bf16, portable fp32": gaps(torch, portable),
        "control: PyTorch bf16 at 1.1 times the rate, at the rate": gaps(control, torch),
    }
    print(f"\nloss {portable[0]:.4f} at step 1, {np.mean(portable[-WINDOW:]):.4f} in the last {WINDOW}")
    for name, found in pairs.items():
        print(f"{name}: largest gap {found.max():.3%}, mean {found.mean():.3%}")
    # Curves of a model that learns nothing would agree, too.
    assert np.mean(portable[-WINDOW:]) < 0.7 * portable[0]
    *three, shifted = pairs.values()
    assert max(found.max() for found in three) <= TOLERANCE
    assert shifted.max() > TOLERANCE, "the measure sees a rate that is a tenth too high"
