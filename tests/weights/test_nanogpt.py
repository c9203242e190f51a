"""nanoGPT checkpoints against an independent network that uses torch's own Linear and layer_norm."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from mindferry.errors import MindferryError, UsageError
from mindferry.sources import open_source
from mindferry.weights import convert

from .reference import forward

torch = pytest.importorskip("torch")
ARGS = {
    "n_layer": 2,
    "n_head": 3,
    "n_embd": 12,
    "block_size": 11,
    "bias": True,
    "vocab_size": 64,
    "dropout": 0.1,
}
IDS = np.array([3, 1, 63, 0, 7, 7, 20, 5, 9, 11, 2])


def checkpoint(path: Path, prefix: str = "", **changes) -> dict:
    """Write a random ckpt.pt as train.py does; returns the plain state dict."""
    args = {**ARGS, **changes}
    n, v, t = args["n_embd"], args["vocab_size"], args["block_size"]
    generator = torch.Generator().manual_seed(0)
    shapes = {"transformer.wte.weight": (v, n), "transformer.wpe.weight": (t, n), "transformer.ln_f.weight": (n,),
              "transformer.ln_f.bias": (n,)}  # fmt: skip
    for layer in range(args["n_layer"]):
        at = f"transformer.h.{layer}"
        for norm in ("ln_1", "ln_2"):
            shapes |= {f"{at}.{norm}.weight": (n,), f"{at}.{norm}.bias": (n,)}
        for name, rows, columns in (
            ("attn.c_attn", 3 * n, n), ("attn.c_proj", n, n), ("mlp.c_fc", 4 * n, n), ("mlp.c_proj", n, 4 * n),
        ):  # fmt: skip
            shapes |= {f"{at}.{name}.weight": (rows, columns), f"{at}.{name}.bias": (rows,)}
    state = {
        name: torch.randn(shape, generator=generator) * 0.3
        for name, shape in shapes.items()
        if args["bias"] or not name.endswith("bias")
    }
    state["lm_head.weight"] = state["transformer.wte.weight"]
    path.parent.mkdir(parents=True, exist_ok=True)
    tree = {
        "model": {prefix + name: value for name, value in state.items()},
        "optimizer": {"state": {}, "param_groups": [{"lr": 6e-4}]},
        "model_args": args,
        "iter_num": 10,
        "best_val_loss": torch.tensor(3.0),
        "config": {"dataset": "x"},
    }
    torch.save(tree, path)
    return state


class TorchNanoGPT:
    """The network of nanoGPT's paper-and-pencil description, from torch's own functions, in float64."""

    def __init__(self, state: dict, args: dict, approximate: str = "none") -> None:
        tied = "lm_head.weight"
        self.state = {n: v.detach().double().requires_grad_() for n, v in state.items() if n != tied}
        self.args, self.approximate = args, approximate

    def logits(self, ids: np.ndarray):
        functional, state, heads = torch.nn.functional, self.state, self.args["n_head"]

        def part(x, name):
            return functional.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

        def norm(x, name):
            return functional.layer_norm(
                x, x.shape[-1:], state[f"{name}.weight"], state.get(f"{name}.bias"), 1e-5
            )

        x = state["transformer.wte.weight"][ids] + state["transformer.wpe.weight"][: len(ids)]
        for layer in range(self.args["n_layer"]):
            at = f"transformer.h.{layer}"
            q, k, v = part(norm(x, f"{at}.ln_1"), f"{at}.attn.c_attn").split(self.args["n_embd"], dim=-1)
            q, k, v = (y.view(len(ids), heads, -1).transpose(0, 1)[None] for y in (q, k, v))
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)
            x = x + part(y.reshape(len(ids), -1), f"{at}.attn.c_proj")
            inner = functional.gelu(
                part(norm(x, f"{at}.ln_2"), f"{at}.mlp.c_fc"), approximate=self.approximate
            )
            x = x + part(inner, f"{at}.mlp.c_proj")
        return norm(x, "transformer.ln_f") @ state["transformer.wte.weight"].T

    def run(self, ids: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """(logits of all but the last token, gradients of the mean loss)."""
        logits = self.logits(ids[:-1])
        torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:])).backward()
        return logits.detach().numpy(), {n: v.grad.numpy() for n, v in self.state.items()}


def logits(state: dict, args: dict, approximate: str = "none") -> np.ndarray:
    return TorchNanoGPT(state, args, approximate).logits(IDS).detach().numpy()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module._orig_mod."])
def test_logits(tmp_path: Path, bias: bool, prefix: str) -> None:
    state = checkpoint(tmp_path / "ckpt.pt", prefix, bias=bias)
    source = open_source(tmp_path / "ckpt.pt")
    assert (source.format, source.family) == ("nanogpt", "gpt2")
    report = convert(source, tmp_path / "out")
    params = load_file(tmp_path / "out/model.safetensors")
    np.testing.assert_allclose(forward(source.spec, params, IDS), logits(state, ARGS), rtol=0, atol=1e-10)
    created = [row["target"] for row in report.created]
    assert len(created) == (0 if bias else 2 * ARGS["n_layer"] + 1)
    assert all(name.endswith("layernorm.beta") for name in created)
    assert [row["source"] for row in report.ignored] == [prefix + "lm_head.weight"]


def test_values(tmp_path: Path) -> None:
    checkpoint(tmp_path / "ckpt.pt", vocab_size=50304, n_embd=3, n_head=1)
    source = open_source(tmp_path)
    spec = source.spec
    assert (spec.vocab_size, spec.max_position_embeddings, spec.ffn_hidden_size) == (50304, 11, 12)
    assert (spec.embedding_dropout, spec.hidden_dropout, spec.attention_dropout) == (0.1, 0.1, 0.1)
    assert "vocab_size 50304 is padded" in " ".join(source.warnings)


class TestActivation:
    """Case 10: the checkpoint does not say which GELU it was trained with."""

    def test_stated_choice(self, tmp_path: Path) -> None:
        checkpoint(tmp_path / "out/ckpt.pt")
        source = open_source(tmp_path / "out")
        assert source.spec.activation == "gelu_erf"
        assert "give activation=gelu_tanh" in source.warnings[0]

    @pytest.mark.parametrize(
        ("code", "found"),
        [
            ("self.gelu    = nn.GELU()\n", "gelu_erf"),
            ("def new_gelu(x):\n    return x\nx = new_gelu(x)  # not nn.GELU()\n", "gelu_tanh"),
            ("self.gelu = nn.GELU(approximate='tanh')\n", "gelu_tanh"),
        ],
    )
    @pytest.mark.parametrize("where", ["model.py", "out/model.py"])
    def test_read_in_model_py(self, tmp_path: Path, code: str, found: str, where: str) -> None:
        checkpoint(tmp_path / "out/ckpt.pt")
        (tmp_path / where).write_text(code)
        source = open_source(tmp_path / "out")
        assert source.spec.activation == found
        assert "model.py" in source.warnings[0]

    def test_assumed(self, tmp_path: Path) -> None:
        state = checkpoint(tmp_path / "ckpt.pt")
        source = open_source(tmp_path, assume={"activation": "gelu_tanh"})
        assert source.warnings == []
        convert(source, tmp_path / "out")
        params = load_file(tmp_path / "out/model.safetensors")
        expected = logits(state, ARGS, approximate="tanh")
        np.testing.assert_allclose(forward(source.spec, params, IDS), expected, rtol=0, atol=1e-10)
        assert np.abs(expected - logits(state, ARGS)).max() > 1e-5

    def test_what_is_stated_is_not_overruled(self, tmp_path: Path) -> None:
        checkpoint(tmp_path / "ckpt.pt")
        with pytest.raises(UsageError, match=r"n_layer = 2 contradicts the assumed num_layers = 3"):
            open_source(tmp_path, assume={"num_layers": 3})
        with pytest.raises(UsageError, match="did you mean 'activation'"):
            open_source(tmp_path, assume={"activatoin": "relu"})


def test_norm_biases_must_be_there_when_bias_is_true(tmp_path: Path) -> None:
    checkpoint(tmp_path / "ckpt.pt", bias=False)
    tree = torch.load(tmp_path / "ckpt.pt")
    tree["model_args"]["bias"] = True
    torch.save(tree, tmp_path / "ckpt.pt")
    with pytest.raises(MindferryError, match=r"h.0.ln_1.bias"):
        open_source(tmp_path)


def test_incomplete_arguments(tmp_path: Path) -> None:
    torch.save({"model": {}, "model_args": {"n_layer": 1}}, tmp_path / "ckpt.pt")
    with pytest.raises(MindferryError, match=r"model_args: key 'vocab_size' is missing.*'n_embd' is missing"):
        open_source(tmp_path)


def test_another_checkpoint_says_what_it_holds(tmp_path: Path) -> None:
    torch.save({"weights": {}, "epoch": 1}, tmp_path / "x.pt")
    with pytest.raises(UsageError, match="not a known checkpoint; it holds epoch, weights"):
        open_source(tmp_path / "x.pt")
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(UsageError, match="not a model"):
        open_source(tmp_path / "x.txt")
