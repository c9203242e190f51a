"""LitGPT and mindformers 1.x GPT-2, written here from their published layouts, against the proven HF road."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mindferry.errors import MindferryError, UsageError
from mindferry.sources import open_source
from mindferry.sources.family import declaration
from mindferry.spec import ModelSpec
from mindferry.weights import convert, target_names
from mindferry.weights.rules import bind
from mindferry.weights.tensor_store import same_bits
from mindferry.weights.transforms import Geometry

from .test_megatron import GPT2, LLAMA, hf_model
from .test_transforms import spec_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def assert_same_as_hf(tmp_path: Path, source, allowed: tuple[str, ...] = ()) -> None:
    convert(source, tmp_path / "a")
    reference = open_source(tmp_path / "hf")
    convert(reference, tmp_path / "b")
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert a.keys() == b.keys()
    for name in a:
        assert same_bits(a[name], b[name]), name
    ours, theirs = (
        s.spec.model_dump(exclude={"bos_token_id", "eos_token_id", *allowed}) for s in (source, reference)
    )
    assert ours == theirs


@pytest.mark.parametrize(
    ("name", "norm"),
    [(name, norm) for name in ("litgpt", "litgpt_old", "litgpt_gated", "litgpt_gated_old", "megatron")
     for norm in ("LayerNorm", "RMSNorm")] + [("mindformers_gpt2", "LayerNorm"), ("nanogpt", "LayerNorm")],
)  # fmt: skip
def test_every_declaration_fills_its_network_once(name: str, norm: str) -> None:
    family = declaration(name)
    fields = {**spec_of().model_dump(), "normalization": norm, **family.fixed}
    for gated in (True, False):
        if gated == ("gated" not in name) and name.startswith("litgpt"):
            continue
        for qk in (True, False):
            spec = ModelSpec(**{**fields, "gated_linear_unit": gated and name.startswith(("lit", "meg")),
                                "qk_layernorm": qk and name.startswith(("lit", "meg"))})  # fmt: skip
            steps = bind(family.weights, family.ignored, Geometry(spec)).steps
            assert [step.target for step in steps] == list(target_names(spec))


class TestLitGPT:
    @staticmethod
    def write(path: Path, hf: dict, *, old: bool = False, **config) -> Path:
        """The Llama of `hf` as LitGPT keeps it."""
        hf = {name.removeprefix("model."): torch.tensor(value) for name, value in hf.items()}
        state = {"transformer.wte.weight": hf["embed_tokens.weight"], "transformer.ln_f.weight": hf["norm.weight"],
                 "lm_head.weight": hf["lm_head.weight"]}  # fmt: skip
        for layer in range(4):
            theirs, ours = f"layers.{layer}.", f"transformer.h.{layer}."
            q, k, v = (hf[f"{theirs}self_attn.{name}_proj.weight"] for name in "qkv")
            if old:
                rows = []
                for group in range(4):
                    rows += [q[i] for i in range(group * 12, (group + 1) * 12)]
                    rows += [k[i] for i in range(group * 6, (group + 1) * 6)]
                    rows += [v[i] for i in range(group * 6, (group + 1) * 6)]
                state[f"{ours}attn.attn.weight"] = torch.stack(rows)
            else:
                state[f"{ours}attn.qkv.weight"] = torch.cat([q, k, v])
            state[f"{ours}attn.proj.weight"] = hf[f"{theirs}self_attn.o_proj.weight"]
            state[f"{ours}norm_1.weight"] = hf[f"{theirs}input_layernorm.weight"]
            state[f"{ours}norm_2.weight"] = hf[f"{theirs}post_attention_layernorm.weight"]
            state[f"{ours}mlp.fc_1.weight"] = hf[f"{theirs}mlp.gate_proj.weight"]
            state[f"{ours}mlp.fc_2.weight"] = hf[f"{theirs}mlp.up_proj.weight"]
            state[f"{ours}mlp.proj.weight"] = hf[f"{theirs}mlp.down_proj.weight"]
        path.mkdir()
        torch.save({"model": state}, path / "lit_model.pth")
        values = {
            "name": "tiny", "hf_config": {"org": "x", "name": "tiny"}, "block_size": 64, "n_layer": 4, "n_embd": 24,
            "vocab_size": 66, "padding_multiple": 64, "padded_vocab_size": 67, "norm_class_name": "RMSNorm",
            "norm_eps": "1e-05", "parallel_residual": "false", "n_head": 8, "n_query_groups": 4, "head_size": 6,
            "rotary_percentage": 1.0, "rope_base": 500000, "bias": "false", "mlp_class_name": "LLaMAMLP",
            "intermediate_size": 36, "scale_embeddings": "false", "sliding_window_size": "null",
            "gelu_approximate": "none", "rope_condense_ratio": 1, "rope_adjustments": "null", **config,
        }  # fmt: skip
        (path / "model_config.yaml").write_text("".join(f"{key}: {value}\n" for key, value in values.items()))
        return path

    @pytest.mark.parametrize("old", [False, True])
    def test_llama(self, tmp_path: Path, old: bool) -> None:
        hf = hf_model(tmp_path / "hf", "llama")
        source = open_source(self.write(tmp_path / "lit", hf, old=old))
        assert (source.format, source.family) == ("litgpt", "llama")
        assert_same_as_hf(tmp_path, source)

    def test_gpt_neox(self, tmp_path: Path) -> None:
        config = transformers.GPTNeoXConfig(vocab_size=64, hidden_size=24, num_hidden_layers=2, num_attention_heads=3,
                                            intermediate_size=48, rotary_pct=0.5)  # fmt: skip
        transformers.GPTNeoXForCausalLM(config).save_pretrained(tmp_path / "hf")
        hf = {n.removeprefix("gpt_neox."): torch.tensor(v)
              for n, v in load_file(tmp_path / "hf/model.safetensors").items()}  # fmt: skip
        pairs = {"norm_1": "input_layernorm", "norm_2": "post_attention_layernorm", "attn.proj": "attention.dense",
                 "mlp.fc": "mlp.dense_h_to_4h", "mlp.proj": "mlp.dense_4h_to_h"}  # fmt: skip
        state = {"transformer.wte.weight": hf["embed_in.weight"], "lm_head.weight": hf["embed_out.weight"]}
        for kind in ("weight", "bias"):
            state[f"transformer.ln_f.{kind}"] = hf[f"final_layer_norm.{kind}"]
            for layer in range(2):
                for ours, theirs in pairs.items():
                    state[f"transformer.h.{layer}.{ours}.{kind}"] = hf[f"layers.{layer}.{theirs}.{kind}"]
                fused = hf[f"layers.{layer}.attention.query_key_value.{kind}"]
                order = [head * 24 + part * 8 + i for part in range(3) for head in range(3) for i in range(8)]
                state[f"transformer.h.{layer}.attn.qkv.{kind}"] = fused[order]
        (tmp_path / "lit").mkdir()
        torch.save(state, tmp_path / "lit/lit_model.pth")
        (tmp_path / "lit/model_config.yaml").write_text(
            "name: pythia\nblock_size: 2048\nn_layer: 2\nn_embd: 24\nn_head: 3\nvocab_size: 60\npadding_multiple: 64\n"
            "intermediate_size: 48\nrotary_percentage: 0.5\nmlp_class_name: GptNeoxMLP\nbias: true\n"
        )
        source = open_source(tmp_path / "lit")
        assert source.family == "gpt_neox"
        assert_same_as_hf(tmp_path, source)

    def test_the_layouts_are_not_the_same(self, tmp_path: Path) -> None:
        """Negative control: flat rows under the old name."""
        hf = hf_model(tmp_path / "hf", "llama")
        path = self.write(tmp_path / "lit", hf)
        tree = torch.load(path / "lit_model.pth")
        tree["model"] = {
            name.replace("attn.qkv", "attn.attn"): value for name, value in tree["model"].items()
        }
        torch.save(tree, path / "lit_model.pth")
        with pytest.raises(AssertionError, match="linear_qkv"):
            assert_same_as_hf(tmp_path, open_source(path))

    @pytest.mark.parametrize(
        ("adjustments", "expected"),
        [
            (
                "{factor: 4.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_seq_len: 32}",
                "llama3",
            ),
            ("{factor: 4.0}", "linear"),
        ],
    )
    def test_rotary_scaling(self, tmp_path: Path, adjustments: str, expected: str) -> None:
        hf = hf_model(tmp_path / "hf", "llama")
        source = open_source(self.write(tmp_path / "lit", hf, rope_adjustments=adjustments))
        assert source.spec.rope_scaling.type == expected
        assert source.spec.rope_scaling.factor == 4.0

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"scale_embeddings": "true"}, "scale embeddings"),
            ({"post_attention_norm": "true"}, "behind attention"),
            ({"lm_head_bias": "true"}, "head has no bias"),
            ({"name": "Gemma-2b"}, "add one"),
            ({"mlp_class_name": "LLaMAMoE"}, "LLaMAMoE"),
            ({"rope_adjustments": "{factor: 2.0, beta_fast: 32, beta_slow: 1}"}, "rope_adjustments"),
            ({"sliding_window_size": 8, "sliding_window_indices": "[1, 0, 1, 0]"}, "some layers only"),
            ({"n_embd": "x"}, "n_embd"),
            ({"n_layer": "&a [*a]"}, "cannot be read"),
            ({"n_layer": "!!python/object:os.system x"}, "cannot be read"),
        ],
    )
    def test_what_cannot_be_kept_is_refused(self, tmp_path: Path, config: dict, message: str) -> None:
        hf = hf_model(tmp_path / "hf", "llama")
        with pytest.raises(MindferryError, match=message):
            open_source(self.write(tmp_path / "lit", hf, **config))

    def test_no_configuration(self, tmp_path: Path) -> None:
        torch.save({}, tmp_path / "lit_model.pth")
        with pytest.raises(UsageError, match=r"no model_config.yaml"):
            open_source(tmp_path)


class TestMindformersGPT2:
    YAML = """
seed: 0
model:
  model_config:
    type: GPT2Config
    seq_length: 19
    vocab_size: 61
    hidden_size: 24
    num_layers: 4
    num_heads: 4
    expand_ratio: 4
    hidden_act: gelu
    embedding_dropout_prob: 0.1
    hidden_dropout_rate: 0.1
    attention_dropout_rate: 0.1
    layernorm_compute_type: float32
    compute_dtype: float16
    eos_token_id: 0
    bos_token_id: 0
  arch:
    type: GPT2LMHeadModel
"""

    @staticmethod
    def parameters(hf: dict) -> dict[str, np.ndarray]:
        """What convert_weight.py of mindformers 1.3.2 makes of a GPT-2: read there, written anew here."""
        hf = {name.removeprefix("transformer."): value for name, value in hf.items()}
        out = {
            "backbone.embedding.word_embedding.embedding_table": hf["wte.weight"],
            "backbone.embedding.position_embedding.embedding_table": hf["wpe.weight"],
            "backbone.layernorm.gamma": hf["ln_f.weight"],
            "backbone.layernorm.beta": hf["ln_f.bias"],
        }
        width = hf["ln_f.weight"].size
        for layer in range(sum(name.endswith("ln_1.weight") for name in hf)):
            at, to = f"h.{layer}.", f"backbone.blocks.{layer}."
            for norm, name in (("ln_1", "layernorm1"), ("ln_2", "layernorm2")):
                out[f"{to}{name}.gamma"], out[f"{to}{name}.beta"] = (
                    hf[f"{at}{norm}.weight"],
                    hf[f"{at}{norm}.bias"],
                )
            for i in range(3):
                columns = slice(width * i, width * (i + 1))
                out[f"{to}attention.dense{i + 1}.weight"] = hf[f"{at}attn.c_attn.weight"][:, columns].T.copy()
                out[f"{to}attention.dense{i + 1}.bias"] = hf[f"{at}attn.c_attn.bias"][columns].copy()
            for theirs, ours in (("attn.c_proj", "attention.projection"), ("mlp.c_fc", "output.mapping"),
                                 ("mlp.c_proj", "output.projection")):  # fmt: skip
                for kind in ("weight", "bias"):
                    out[f"{to}{ours}.{kind}"] = hf[f"{at}{theirs}.{kind}"]
        return out

    def write(self, tmp_path: Path, text: str | None = None) -> Path:
        hf = hf_model(tmp_path / "hf", "gpt2")
        (tmp_path / "mf").mkdir()
        (tmp_path / "mf/run_gpt2.yaml").write_text(text or self.YAML)
        states = {
            "adam_m.backbone.layernorm.gamma": np.zeros(24, np.float32),
            "global_step": np.zeros(1, np.int32),
        }
        save_file({**self.parameters(hf), **states}, tmp_path / "mf/gpt2.safetensors")
        return tmp_path / "mf"

    def test_safetensors(self, tmp_path: Path) -> None:
        source = open_source(self.write(tmp_path))
        assert (source.format, source.family) == ("mindformers-1.x", "gpt2")
        assert "float16" in source.warnings[0]
        assert all(item.note for item in source.decisions if not item.target_key)
        assert_same_as_hf(tmp_path, source)

    def test_ckpt(self, tmp_path: Path) -> None:
        mindspore = pytest.importorskip("mindspore")
        path = self.write(tmp_path)
        tensors = load_file(path / "gpt2.safetensors")
        (path / "gpt2.safetensors").unlink()
        mindspore.save_checkpoint(
            [{"name": name, "data": mindspore.Tensor(value)} for name, value in tensors.items()],
            str(path / "gpt2.ckpt"),
        )
        assert_same_as_hf(tmp_path, open_source(path))
        (path / "gpt2.ckpt").chmod(0o644)
        (path / "gpt2.ckpt").write_bytes(b"\x0agarbage")
        with pytest.raises(MindferryError, match=r"gpt2.ckpt"):
            open_source(path)

    def test_configuration(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, self.YAML.replace("expand_ratio: 4", "expand_ratio: 2"))
        with pytest.raises(
            MindferryError, match=r"output.mapping.weight found \[24, 96\], expected \[24, 48\]"
        ):
            open_source(path)
        (path / "run_gpt2.yaml").write_text("model: {model_config: {type: LlamaConfig}} # GPT2\n")
        with pytest.raises(UsageError, match="GPT2Config"):
            open_source(path)


def test_shapes_of_the_helpers_agree() -> None:
    assert GPT2["n_layer"] == LLAMA["num_hidden_layers"] == 4
