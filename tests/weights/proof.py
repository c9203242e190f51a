"""Measures what docs/sources.md states: python -m tests.weights.proof rewrites its table.

Each row is a random small model of awkward sizes. Logits: the converted weights in the float64 reference of
this directory, against the framework the model came from. Gradients: for each parameter, the derivative of the
loss along a random direction by central differences of the same reference, against the framework's own
gradients carried over by the weight rules. Way back: every learned tensor, compared bit by bit.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from mindferry.sources import open_source
from mindferry.sources.source import Source
from mindferry.weights import convert, target_names
from mindferry.weights.exporting import export
from mindferry.weights.rules import make_plan
from mindferry.weights.tensor_store import MemoryStore, same_bits

from .reference import forward

DOCUMENT = Path(__file__).parents[2] / "docs/sources.md"
BEGIN, END = "<!-- table: python -m tests.weights.proof -->", "<!-- end of table -->"
IDS = np.random.default_rng(5).integers(2, 60, 18)


@dataclass(frozen=True)
class Row:
    """One measured row; `logits` and `gradients` are largest differences, relative to the largest value."""

    model: str
    format: str
    keys: int
    tensors: int
    logits: float
    gradients: float
    back: str

    def cells(self) -> list[str]:
        return [self.model, self.format, f"{self.keys} keys", f"{self.tensors} tensors",
                below(self.logits), below(self.gradients), self.back]  # fmt: skip


def below(value: float) -> str:
    """The first of these bounds that `value` keeps."""
    return next(
        (f"< {bound:.0e}".replace("e-0", "e-") for bound in (1e-9, 1e-5, 1e-4) if value < bound), "no"
    )


def loss(spec: Any, params: dict[str, np.ndarray]) -> float:
    """Mean cross entropy of the next token."""
    logits = forward(spec, params, IDS[:-1])
    shifted = logits - logits.max(-1, keepdims=True)
    return float(np.mean(np.log(np.exp(shifted).sum(-1)) - shifted[np.arange(len(IDS) - 1), IDS[1:]]))


def gradient_difference(
    source: Source, params: dict[str, np.ndarray], gradients: dict[str, np.ndarray]
) -> float:
    """The largest relative difference between the reference's slope and the framework's, over all parameters.

    Args:
        gradients: of the source's tensors, under their names in `source.tensors`.
    """
    params = {name: value.astype(np.float64) for name, value in params.items()}
    random = np.random.default_rng(0)
    plan = make_plan(source.rules, source.tensors, source.key_of)
    worst, step = 0.0, 1e-5
    for item in plan.used:
        (theirs,) = item.chain.forward([gradients[name] for name in item.sources])
        direction = random.standard_normal(theirs.shape)
        direction /= np.linalg.norm(direction)
        # Along the gradient too, so that the slope is never small by chance.
        direction += theirs / max(np.linalg.norm(theirs), 1e-300)
        slopes = [
            loss(source.spec, {**params, item.target: params[item.target] + s * step * direction})
            for s in (1, -1)
        ]
        ours, expected = (slopes[0] - slopes[1]) / (2 * step), float((theirs * direction).sum())
        worst = max(worst, abs(ours - expected) / max(abs(expected), 1e-3))
    return worst


def framework(model: Any, canonical: Callable[[str], str]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """(logits, gradients by canonical name) of a torch model in float64."""
    import torch

    model = model.double().eval()
    logits = model(torch.tensor(IDS[None, :-1])).logits[0]
    torch.nn.functional.cross_entropy(logits, torch.tensor(IDS[1:])).backward()
    gradients = {canonical(n): p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}
    return logits.detach().numpy(), gradients


def measure(
    path: Path, model: str, format: str, logits: np.ndarray, gradients: dict[str, np.ndarray], **options
) -> Row:
    """Open, convert and export the model at PATH/src and compare."""
    from .test_export import migrated

    source = open_source(path / "src", **options)
    report = convert(source, path / "out")
    params = load_file(path / "out/model.safetensors")
    if {name: value.shape for name, value in params.items()} != target_names(source.spec):
        raise AssertionError("not the parameters of the network")
    difference = float(
        np.abs(forward(source.spec, params, IDS[:-1]) - logits).max() / max(1, np.abs(logits).max())
    )
    to = {"nanoGPT": "nanogpt", "Megatron-LM": "megatron", "mindformers 1.x": "mindformers-1.3.2"}.get(
        format, "hf"
    )
    export(migrated(path, **options), to, path / "back")
    again = open_source(path / "back", **options)
    if to == "hf" and format != "Hugging Face":  # no export to that format: compare what both become
        convert(again, path / "again")
        other = load_file(path / "again/model.safetensors")
        if not all(same_bits(params[name], other[name]) for name in params):
            raise AssertionError("the export to Hugging Face differs")
        back = "to Hugging Face, bit for bit"
    else:
        back = way_back(source, again)
    return Row(
        model, format, sum(bool(item.source_key) for item in source.decisions),
        len(report.used) + len(report.ignored), difference, gradient_difference(source, params, gradients),
        back,
    )  # fmt: skip


def way_back(source: Source, again: Source) -> str:
    """ "bit for bit", or what differs between a model and its untouched export."""
    wanted = source.rules.source_shapes()
    lost = [name for name in wanted if not same_bits(source.tensors.read(name), again.tensors.read(name))]
    if not lost:
        return "bit for bit"
    vocab, name = source.spec.vocab_size, lost[0].split(".")[-2]
    for part, but in ((slice(2, None), f"rows 0 and 1 of {name}"), (slice(vocab), "the padding, now zeros")):
        if all(same_bits(source.tensors.read(n)[part], again.tensors.read(n)[part]) for n in lost):
            return f"bit for bit, but {but}"
    raise AssertionError(f"{lost} differ")


def hugging_face(case: str, title: str) -> Row:
    """A family as transformers writes it."""
    from mindferry.sources.family import families
    from mindferry.sources.names import canonical

    from .test_families import build

    prefixes = families()[case.split("-")[0]].prefixes
    with tempfile.TemporaryDirectory() as home:
        path = Path(home)
        built = build(path / "src", case)
        logits, gradients = framework(built, lambda name: canonical(name, prefixes))
        return measure(path, title, "Hugging Face", logits, gradients)


def gpt2_road(
    title: str, write: Callable[[Path, dict], Path], format: str, family: str = "gpt2", **options
) -> Row:
    """Another format of a model that transformers can run: `write` makes it from the Hugging Face tensors."""
    import transformers

    from .test_megatron import hf_model

    with tempfile.TemporaryDirectory() as home:
        path = Path(home)
        hf = hf_model(path / "hf", family)
        (path / "src").parent.mkdir(exist_ok=True)
        write(path / "src", hf)
        model = transformers.AutoModelForCausalLM.from_pretrained(path / "hf", attn_implementation="eager")
        names: dict[str, np.ndarray] = {}
        logits, own = framework(model, lambda name: name)
        reference = open_source(path / "hf")
        # Its gradients, brought to the names of the other format through the parameters both share.
        store = MemoryStore.of_arrays({reference_name(name): value for name, value in own.items()})
        source = open_source(path / "src", **options)
        shared = {
            s.target: s.chain.forward([store.read(n) for n in s.sources])[0] for s in reference.rules.steps
        }
        for step in source.rules.steps:
            names |= dict(zip(step.sources, step.chain.backward([shared[step.target]]), strict=True))
        return measure(path, title, format, logits, names, **options)


def reference_name(name: str) -> str:
    """`name` without the prefix of its Hugging Face class."""
    return name.removeprefix("transformer.").removeprefix("model.")


def nanogpt() -> Row:
    from .test_nanogpt import ARGS, TorchNanoGPT, checkpoint

    with tempfile.TemporaryDirectory() as home:
        path = Path(home)
        state = checkpoint(path / "src/ckpt.pt", "_orig_mod.", block_size=32)
        logits, gradients = TorchNanoGPT(state, {**ARGS, "block_size": 32}).run(IDS)
        gradients = {name.removeprefix("transformer."): value for name, value in gradients.items()}
        return measure(path, "nanoGPT", "nanoGPT", logits, gradients, assume={"activation": "gelu_erf"})


def rows() -> list[Row]:
    """Everything the table states, measured now."""
    from . import mcore_files
    from . import test_megatron as megatron
    from .test_other_formats import TestLitGPT, TestMindformersGPT2

    titles = {"gpt2": "GPT-2", "llama-biases": "Llama with biases", "llama-llama3": "Llama 3 (scaled rotary)",
              "llama-yarn": "Llama (YaRN)", "llama": "Llama 2", "mistral": "Mistral", "qwen2": "Qwen2",
              "qwen3": "Qwen3", "gpt_neox": "GPT-NeoX, Pythia", "opt": "OPT"}  # fmt: skip
    result = [hugging_face(case, title) for case, title in titles.items()]
    result.append(nanogpt())

    def mindformers(path: Path, hf: dict) -> None:
        from safetensors.numpy import save_file

        path.mkdir()
        (path / "gpt2.yaml").write_text(TestMindformersGPT2.YAML)
        tensors = {
            name: np.ascontiguousarray(value) for name, value in TestMindformersGPT2.parameters(hf).items()
        }
        save_file(tensors, path / "gpt2.safetensors")

    result.append(gpt2_road("GPT-2", mindformers, "mindformers 1.x"))
    result.append(gpt2_road(
        "GPT-2, 2 ranks x 2 stages",
        lambda path, hf: megatron.write_megatron(path, hf, "gpt2", tp=2, pp=2, rows=64), "Megatron-LM",
    ))  # fmt: skip
    result.append(gpt2_road(
        "Llama, 2 ranks x 2 stages",
        lambda path, hf: megatron.write_megatron(path, hf, "llama", tp=2, pp=2, rows=80), "Megatron-LM", "llama",
    ))  # fmt: skip
    result.append(gpt2_road("Llama", TestLitGPT.write, "LitGPT", "llama"))
    for release, packing in (("1.6", "[q, k, v], [gate, up]"), ("1.7", "by group, alternating")):
        write = functools.partial(mcore_files.write, release=release)
        result.append(gpt2_road(f"Llama, {packing}", write, f"mindformers {release} GPTModel", "llama"))
    return result


HEADER = ["model", "format", "configuration", "weights", "logits", "gradients", "way back"]


def table(measured: list[Row]) -> str:
    """The rows as Markdown."""
    lines = [HEADER, ["---"] * len(HEADER), *(row.cells() for row in measured)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def stated(text: str) -> str:
    """The table that the document `text` states."""
    return text.split(BEGIN)[1].split(END)[0].strip()


def main() -> None:
    text = DOCUMENT.read_text("utf-8")
    new = table(rows())
    DOCUMENT.write_text(text.replace(stated(text), new) if stated(text) else
                        text.replace(BEGIN, f"{BEGIN}\n{new}"), encoding="utf-8")  # fmt: skip
    print(new)


if __name__ == "__main__":
    main()
