"""Megatron-LM checkpoints, written here row by row from their published layouts, against the proven HF road.

A random Hugging Face model is cut into Megatron shards by explicit loops over heads, ranks and stages; what
mindferry makes of the shards must equal, bit for bit, what it makes of the Hugging Face files.
"""

from __future__ import annotations

import argparse
import enum
import io
import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from mindferry.errors import MindferryError, UsageError
from mindferry.sources import open_source
from mindferry.sources.megatron import padded_vocab
from mindferry.weights import convert
from mindferry.weights.tensor_store import same_bits

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

GPT2 = {
    "vocab_size": 61,
    "n_positions": 19,
    "n_embd": 24,
    "n_layer": 4,
    "n_head": 4,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LLAMA = {
    "vocab_size": 67, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 6, "max_position_embeddings": 64, "rope_theta": 5e5, "rms_norm_eps": 1e-5,
}  # fmt: skip


def hf_model(path: Path, family: str, **changes) -> dict[str, np.ndarray]:
    torch.manual_seed(2)
    if family == "gpt2":
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**GPT2, **changes}))
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**LLAMA, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(path)
    return load_file(path / "model.safetensors")


def parts_of(hf: dict[str, np.ndarray], family: str) -> tuple[list[dict], dict[str, np.ndarray]]:
    """(a table for each layer with q, k, v apart, everything outside layers); Linear matrices are [out, in]."""
    if family == "gpt2":
        hf = {name.removeprefix("transformer."): value for name, value in hf.items()}
        outside = {"word": hf["wte.weight"], "position": hf["wpe.weight"], "norm.weight": hf["ln_f.weight"],
                   "norm.bias": hf["ln_f.bias"]}  # fmt: skip
    else:
        hf = {name.removeprefix("model."): value for name, value in hf.items()}
        outside = {
            "word": hf["embed_tokens.weight"],
            "norm.weight": hf["norm.weight"],
            "head": hf["lm_head.weight"],
        }
    layers = []
    for number in range(4):
        layer: dict[str, np.ndarray] = {}
        if family == "gpt2":
            at = f"h.{number}."
            for kind in ("weight", "bias"):
                fused = hf[f"{at}attn.c_attn.{kind}"]
                fused = fused.T if kind == "weight" else fused
                for i, name in enumerate("qkv"):
                    layer[f"{name}.{kind}"] = fused[24 * i : 24 * (i + 1)]
                layer[f"norm1.{kind}"] = hf[f"{at}ln_1.{kind}"]
                layer[f"norm2.{kind}"] = hf[f"{at}ln_2.{kind}"]
            for name, ours in (("attn.c_proj", "proj"), ("mlp.c_fc", "fc1"), ("mlp.c_proj", "fc2")):
                layer[f"{ours}.weight"] = hf[f"{at}{name}.weight"].T
                layer[f"{ours}.bias"] = hf[f"{at}{name}.bias"]
        else:
            at = f"layers.{number}."
            for name in "qkv":
                layer[f"{name}.weight"] = hf[f"{at}self_attn.{name}_proj.weight"]
            layer["proj.weight"] = hf[f"{at}self_attn.o_proj.weight"]
            layer["gate.weight"] = hf[f"{at}mlp.gate_proj.weight"]
            layer["up.weight"] = hf[f"{at}mlp.up_proj.weight"]
            layer["fc2.weight"] = hf[f"{at}mlp.down_proj.weight"]
            layer["norm1.weight"] = hf[f"{at}input_layernorm.weight"]
            layer["norm2.weight"] = hf[f"{at}post_attention_layernorm.weight"]
        layers.append(layer)
    return layers, outside


def fuse(q, k, v, *, version: float, head_dim: int, rank: int, ranks: int) -> np.ndarray:
    """The rows of rank `rank` of a fused projection, one row after the other."""
    heads, groups = len(q) // head_dim, len(k) // head_dim
    per = heads // groups
    own_groups = range(rank * groups // ranks, (rank + 1) * groups // ranks)
    rows = []
    if version >= 2.0:
        for group in own_groups:
            for head in range(group * per, (group + 1) * per):
                rows += [q[head * head_dim + i] for i in range(head_dim)]
            rows += [k[group * head_dim + i] for i in range(head_dim)]
            rows += [v[group * head_dim + i] for i in range(head_dim)]
    elif version == 1.0:
        for head in own_groups:
            for i in range(head_dim):
                rows += [part[head * head_dim + i] for part in (q, k, v)]
    else:
        for part in (q, k, v):
            for head in own_groups:
                rows += [part[head * head_dim + i] for i in range(head_dim)]
    return np.array(rows)


def cut(array: np.ndarray, axis: int, rank: int, ranks: int) -> np.ndarray:
    size = array.shape[axis] // ranks
    return np.take(array, range(rank * size, (rank + 1) * size), axis=axis)


NAMES = {
    "mcore": {"norm1": "input_layernorm", "qkv": "self_attention.linear_qkv", "proj": "self_attention.linear_proj",
              "norm2": "pre_mlp_layernorm", "fc1": "mlp.linear_fc1", "fc2": "mlp.linear_fc2"},
    "te": {"norm1": "self_attention.linear_qkv.layer_norm_", "qkv": "self_attention.linear_qkv",
           "proj": "self_attention.linear_proj", "norm2": "mlp.linear_fc1.layer_norm_", "fc1": "mlp.linear_fc1",
           "fc2": "mlp.linear_fc2"},
    "legacy": {"norm1": "input_norm", "qkv": "self_attention.query_key_value", "proj": "self_attention.dense",
               "norm2": "post_attention_norm", "fc1": "mlp.dense_h_to_4h", "fc2": "mlp.dense_4h_to_h"},
    "oldest": {"norm1": "input_layernorm", "qkv": "attention.query_key_value", "proj": "attention.dense",
               "norm2": "post_attention_layernorm", "fc1": "mlp.dense_h_to_4h", "fc2": "mlp.dense_4h_to_h"},
}  # fmt: skip


def layer_tensors(
    layer: dict, style: str, number: int, head_dim: int, version: float, rank: int, ranks: int
) -> dict:
    result = {}
    for kind in ("weight", "bias"):
        if f"q.{kind}" not in layer:
            continue
        result[f"qkv.{kind}"] = fuse(
            layer[f"q.{kind}"], layer[f"k.{kind}"], layer[f"v.{kind}"],
            version=version, head_dim=head_dim, rank=rank, ranks=ranks,
        )  # fmt: skip
    if "gate.weight" in layer:
        halves = [cut(layer[f"{name}.weight"], 0, rank, ranks) for name in ("gate", "up")]
        result["fc1.weight"] = np.concatenate(halves)
    for name, value in layer.items():
        module = name.split(".")[0]
        if module in ("proj", "fc2") and name.endswith("weight"):
            result[name] = cut(value, 1, rank, ranks)
        elif module == "fc1":
            result[name] = cut(value, 0, rank, ranks)
        elif module in ("norm1", "norm2", "proj", "fc2"):
            result[name] = value
    named = {}
    for name, value in result.items():
        module, kind = name.split(".")
        target = NAMES[style][module]
        named[f"layers.{number}.{target}{'' if target.endswith('_') else '.'}{kind}"] = torch.tensor(value)
    return named


def nest(flat: dict, style: str) -> dict:
    """Legacy checkpoints nest; Megatron-core's are flat."""
    if style in ("mcore", "te"):
        names = {"word": "embedding.word_embeddings.weight", "position": "embedding.position_embeddings.weight",
                 "head": "output_layer.weight"}  # fmt: skip
        return {
            names.get(name, f"decoder.{name.replace('final.', 'final_layernorm.')}"): value
            for name, value in flat.items()
        }
    transformer = "encoder" if style == "legacy" else "transformer"
    final = "final_norm." if style == "legacy" else "final_layernorm."
    tree: dict = {"language_model": {transformer: {}}}
    model = tree["language_model"]
    for name, value in flat.items():
        if name in ("word", "position"):
            model.setdefault("embedding", {})[f"{name}_embeddings"] = {"weight": value}
        elif name == "head":
            model["output_layer"] = {"weight": value}
        elif name == "head_copy":
            tree["word_embeddings_for_head"] = {"weight": value}
        else:
            model[transformer][name.replace("final.", final)] = value
    return tree


def write_megatron(
    root: Path,
    hf: dict,
    family: str,
    *,
    style="mcore",
    version=3.0,
    tp=1,
    pp=1,
    vp=1,
    rows=None,
    args=None,
    **changes,
) -> Path:
    """Write ROOT/iter_0000500/mp_rank_*/model_optim_rng.pt; returns the iteration directory."""
    layers, outside = parts_of(hf, family)
    head_dim = 6
    for name in ("word", "head"):
        if name in outside and rows is not None:
            padding = np.full((rows - len(outside[name]), outside[name].shape[1]), 9.0, np.float32)
            outside[name] = np.concatenate([outside[name], padding])
    arguments = arguments_of(family, tp, pp, **(args or {}))
    per_chunk = 4 // (pp * vp)
    iteration = root / "iter_0000500"
    for rank in range(tp):
        for stage in range(pp):
            chunks = []
            for chunk in range(vp):
                flat: dict = {}
                first = (chunk * pp + stage) * per_chunk
                for local in range(per_chunk):
                    flat |= layer_tensors(layers[first + local], style, local, head_dim, version, rank, tp)
                if stage == 0 and chunk == 0:
                    flat["word"] = torch.tensor(cut(outside["word"], 0, rank, tp))
                    if "position" in outside:
                        flat["position"] = torch.tensor(outside["position"])
                if stage == pp - 1 and chunk == vp - 1:
                    flat |= {
                        f"final.{k.split('.')[1]}": torch.tensor(v) for k, v in outside.items() if "norm" in k
                    }
                    if "head" in outside:
                        flat["head"] = torch.tensor(cut(outside["head"], 0, rank, tp))
                    elif pp > 1:
                        copy = torch.tensor(cut(outside["word"], 0, rank, tp))
                        flat["head" if style in ("mcore", "te") else "head_copy"] = copy
                chunks.append(nest(flat, style))
            tree = {"iteration": 500, "checkpoint_version": version, "args": arguments, "optimizer": None,
                    "rng_state": [{"np_rng_state": np.random.default_rng(0).bytes(4)}]}  # fmt: skip
            tree |= {"model": chunks[0]} if vp == 1 else {f"model{i}": c for i, c in enumerate(chunks)}
            tree |= changes
            if version == 0:
                del tree["checkpoint_version"]
            folder = iteration / (f"mp_rank_{rank:02d}" if pp == 1 else f"mp_rank_{rank:02d}_{stage:03d}")
            folder.mkdir(parents=True)
            torch.save({k: v for k, v in tree.items() if v is not None}, folder / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("500")
    return iteration


def arguments_of(family: str, tp: int, pp: int, **changes) -> argparse.Namespace:
    common = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "num_layers": 4, "lr": 1e-4,
              "hidden_size": 24, "make_vocab_size_divisible_by": 8, "params_dtype": torch.float32,
              "num_experts": None, "apply_layernorm_1p": False, "seq_length": 16}  # fmt: skip
    if family == "gpt2":
        common |= {"num_attention_heads": 4, "ffn_hidden_size": 96, "max_position_embeddings": 19, "vocab_size": 61,
                   "position_embedding_type": "learned_absolute", "normalization": "LayerNorm",
                   "layernorm_epsilon": 1e-5, "swiglu": False, "add_bias_linear": True, "bias_gelu_fusion": True,
                   "untie_embeddings_and_output_weights": False, "hidden_dropout": 0.1, "attention_dropout": 0.1,
                   "init_method_std": 0.02}  # fmt: skip
    else:
        common |= {"num_attention_heads": 8, "num_query_groups": 4, "group_query_attention": True, "kv_channels": 6,
                   "ffn_hidden_size": 36, "max_position_embeddings": 64, "vocab_size": 67,
                   "position_embedding_type": "rope", "rotary_base": 500000, "rotary_percent": 1.0,
                   "normalization": "RMSNorm", "norm_epsilon": 1e-5, "swiglu": True, "add_bias_linear": False,
                   "untie_embeddings_and_output_weights": True, "hidden_dropout": 0.0, "attention_dropout": 0.0,
                   "init_method_std": 0.02}  # fmt: skip
    return argparse.Namespace(**{**common, **changes})


def assert_same_as_hf(tmp_path: Path, megatron: Path, **options) -> object:
    source = open_source(megatron, **options)
    convert(source, tmp_path / "a")
    reference = open_source(tmp_path / "hf")
    convert(reference, tmp_path / "b")
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert a.keys() == b.keys()
    for name in a:
        assert same_bits(a[name], b[name]), name
    ignored = {"bos_token_id", "eos_token_id"}
    ours, theirs = (s.spec.model_dump(exclude=ignored) for s in (source, reference))
    assert ours == theirs | {"add_qkv_bias": ours["add_qkv_bias"]}
    return source


@pytest.mark.parametrize(
    ("tp", "pp", "vp"), [(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (2, 4, 1), (1, 2, 2)]
)
@pytest.mark.parametrize("style", ["mcore", "te", "legacy"])
def test_gpt2(tmp_path: Path, style: str, tp: int, pp: int, vp: int) -> None:
    hf = hf_model(tmp_path / "hf", "gpt2")
    write_megatron(
        tmp_path / "meg", hf, "gpt2", style=style, tp=tp, pp=pp, vp=vp, rows=padded_vocab(61, 8, tp)
    )
    source = assert_same_as_hf(tmp_path, tmp_path / "meg")
    assert (source.format, source.family) == ("megatron", "gpt2")
    assert any("padded to" in text for text in source.warnings)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("style", ["mcore", "legacy"])
def test_case_34_llama_with_groups_and_gates(tmp_path: Path, style: str, tp: int, pp: int) -> None:
    hf = hf_model(tmp_path / "hf", "llama")
    write_megatron(tmp_path / "meg", hf, "llama", style=style, tp=tp, pp=pp, rows=padded_vocab(67, 8, tp))
    source = assert_same_as_hf(tmp_path, tmp_path / "meg")
    assert source.family == "llama"


@pytest.mark.parametrize("version", [0, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("tp", [1, 2])
def test_case_47_layouts_of_all_versions(tmp_path: Path, version: float, tp: int) -> None:
    hf = hf_model(tmp_path / "hf", "gpt2")
    write_megatron(
        tmp_path / "meg", hf, "gpt2", style="oldest", version=version, tp=tp, rows=padded_vocab(61, 8, tp)
    )
    assert_same_as_hf(tmp_path, tmp_path / "meg")


@pytest.mark.parametrize("claimed", [1.0, 3.0])
def test_the_wrong_version_shows(tmp_path: Path, claimed: float) -> None:
    """Negative control: rows packed as version 0, read as another."""
    hf = hf_model(tmp_path / "hf", "gpt2")
    write_megatron(
        tmp_path / "meg", hf, "gpt2", style="oldest", version=0, rows=64, checkpoint_version=claimed
    )
    file = tmp_path / "meg/iter_0000500/mp_rank_00/model_optim_rng.pt"
    tree = torch.load(file, weights_only=False)
    torch.save({**tree, "checkpoint_version": claimed}, file)
    with pytest.raises(AssertionError, match="linear_qkv"):
        assert_same_as_hf(tmp_path, tmp_path / "meg")


def test_case_33_oldest_names_without_version_and_arguments(tmp_path: Path) -> None:
    hf = hf_model(tmp_path / "hf", "gpt2", vocab_size=50257, n_embd=24)
    write_megatron(
        tmp_path / "meg", hf, "gpt2", style="oldest", version=0, rows=50304, args={"vocab_size": None}
    )
    file = tmp_path / "meg/iter_0000500/mp_rank_00/model_optim_rng.pt"
    tree = torch.load(file, weights_only=False)
    del tree["args"]
    torch.save(tree, file)
    with pytest.raises(MindferryError, match=r"num_attention_heads.*assume num_attention_heads"):
        open_source(tmp_path / "meg")
    source = assert_same_as_hf(tmp_path, tmp_path / "meg", assume={"num_attention_heads": 4})
    text = " ".join(source.warnings)
    assert "no arguments" in text
    assert "padded to 50304 rows; the last 47 are cut" in text


class TestVocabulary:
    """Case 9."""

    @pytest.mark.parametrize(
        ("size", "ranks", "padded"),
        [(50257, 1, 50304), (50257, 2, 50432), (50257, 4, 50688), (50257, 8, 51200), (151643, 2, 151808),
         (32000, 8, 32768)],
    )  # fmt: skip
    def test_padding_depends_on_the_ranks(self, size: int, ranks: int, padded: int) -> None:
        assert padded_vocab(size, 128, ranks) == padded

    def test_more_than_there_are_rows(self, tmp_path: Path) -> None:
        hf = hf_model(tmp_path / "hf", "gpt2")
        write_megatron(tmp_path / "meg", hf, "gpt2", rows=64, args={"vocab_size": 65})
        with pytest.raises(MindferryError, match=r"vocab_size 65, but the embedding has 64 rows"):
            open_source(tmp_path / "meg")

    def test_unknown_size_keeps_all_rows_and_says_so(self, tmp_path: Path) -> None:
        hf = hf_model(tmp_path / "hf", "gpt2")
        write_megatron(tmp_path / "meg", hf, "gpt2", rows=64, args={"vocab_size": None})
        source = open_source(tmp_path / "meg")
        assert source.spec.vocab_size == 64
        assert "all 64 rows are kept" in " ".join(source.warnings)
        assert open_source(tmp_path / "meg", assume={"vocab_size": 61}).spec.vocab_size == 61


class TestPositions:
    """Case 32."""

    def test_missing_table_names_the_argument(self, tmp_path: Path) -> None:
        hf = hf_model(tmp_path / "hf", "llama")
        args = {"position_embedding_type": "learned_absolute"}
        write_megatron(tmp_path / "meg", hf, "llama", rows=72, args=args)
        with pytest.raises(
            MindferryError, match=r"no embedding.position_embeddings.weight.*learned_absolute"
        ) as caught:
            open_source(tmp_path / "meg")
        assert "use_rotary_position_embeddings" in caught.value.cause

    def test_older_argument(self, tmp_path: Path) -> None:
        hf = hf_model(tmp_path / "hf", "llama")
        args = {"position_embedding_type": "learned_absolute", "use_rotary_position_embeddings": True}
        write_megatron(tmp_path / "meg", hf, "llama", rows=72, args=args)
        assert_same_as_hf(tmp_path, tmp_path / "meg")

    def test_scaling(self, tmp_path: Path) -> None:
        hf = hf_model(tmp_path / "hf", "llama")
        args = {"use_rope_scaling": True, "rope_scaling_factor": 4.0}
        write_megatron(tmp_path / "meg", hf, "llama", rows=72, args=args)
        scaling = open_source(tmp_path / "meg").spec.rope_scaling
        assert (scaling.type, scaling.factor, scaling.original_max_position_embeddings) == (
            "llama3",
            4.0,
            8192,
        )


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({}, "gelu_tanh"),
        ({"bias_gelu_fusion": False}, "gelu_erf"),
        ({"bias_gelu_fusion": False, "openai_gelu": True}, "gelu_tanh"),
        ({"onnx_safe": True, "bias_gelu_fusion": False}, "gelu_erf"),
    ],
)
def test_case_35_the_gelu_that_was_really_run(tmp_path: Path, args: dict, expected: str) -> None:
    hf = hf_model(tmp_path / "hf", "gpt2")
    write_megatron(tmp_path / "meg", hf, "gpt2", rows=64, args=args)
    assert open_source(tmp_path / "meg").spec.activation == expected


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"num_experts": 4}, "experts"),
        ({"apply_layernorm_1p": True}, "off by one"),
        ({"rotary_interleaved": True}, "neighbouring"),
        ({"squared_relu": True}, "squared"),
        ({"apply_residual_connection_post_layernorm": True}, "input of the norm"),
        ({"num_layers": 5}, "missing"),
    ],
)
def test_what_cannot_be_kept_is_refused(tmp_path: Path, args: dict, message: str) -> None:
    hf = hf_model(tmp_path / "hf", "gpt2")
    write_megatron(tmp_path / "meg", hf, "gpt2", rows=64, args=args)
    with pytest.raises(MindferryError, match=message):
        open_source(tmp_path / "meg")


class TestShards:
    @pytest.fixture
    def iteration(self, tmp_path: Path) -> Path:
        hf = hf_model(tmp_path / "hf", "gpt2")
        return write_megatron(tmp_path / "meg", hf, "gpt2", tp=2, pp=2, rows=64)

    @staticmethod
    def edit(iteration: Path, rank: str, change) -> None:
        file = iteration / rank / "model_optim_rng.pt"
        tree = torch.load(file, weights_only=False)
        change(tree)
        torch.save(tree, file)

    @pytest.mark.parametrize("rank", ["mp_rank_01_000", "mp_rank_00_001"])
    def test_missing_rank_or_stage(self, iteration: Path, rank: str) -> None:
        import shutil

        shutil.rmtree(iteration / rank)
        with pytest.raises(MindferryError, match=f"1 of 4 shards are missing.*{rank}"):
            open_source(iteration)

    def test_missing_last_stage_is_known_from_the_arguments(self, iteration: Path) -> None:
        import shutil

        for rank in ("mp_rank_00_001", "mp_rank_01_001"):
            shutil.rmtree(iteration / rank)
        with pytest.raises(MindferryError, match="2 of 4 shards are missing"):
            open_source(iteration)

    def test_shards_of_different_iterations(self, iteration: Path) -> None:
        self.edit(iteration, "mp_rank_01_001", lambda tree: tree.update(iteration=400))
        with pytest.raises(MindferryError, match=r"different iterations.*mp_rank_01_001: 400"):
            open_source(iteration)

    def test_replicated_tensors_that_differ(self, iteration: Path, tmp_path: Path) -> None:
        def change(tree):
            tree["model"]["decoder.layers.0.input_layernorm.weight"][0] += 1

        self.edit(iteration, "mp_rank_01_000", change)
        with pytest.raises(MindferryError, match=r"input_layernorm.weight should be the same on every rank"):
            convert(open_source(iteration), tmp_path / "out")
        assert list((tmp_path / "out").iterdir()) == []

    def test_copy_of_the_embedding_that_differs(self, iteration: Path) -> None:
        def change(tree):
            tree["model"]["output_layer.weight"][0] += 1

        self.edit(iteration, "mp_rank_00_001", change)
        with pytest.raises(MindferryError, match=r"output_layer.weight differs from embedding"):
            open_source(iteration)

    def test_other_tensors_on_one_rank(self, iteration: Path) -> None:
        self.edit(
            iteration,
            "mp_rank_01_000",
            lambda tree: tree["model"].pop("decoder.layers.1.mlp.linear_fc2.bias"),
        )
        with pytest.raises(MindferryError, match=r"other tensors than rank 0.*linear_fc2.bias"):
            open_source(iteration)

    def test_another_shape_on_one_rank(self, iteration: Path) -> None:
        def change(tree):
            tree["model"]["decoder.layers.1.mlp.linear_fc2.bias"] = torch.zeros(3)

        self.edit(iteration, "mp_rank_01_000", change)
        with pytest.raises(MindferryError, match=r"linear_fc2.bias is \[3\], rank 0 has \[24\]"):
            open_source(iteration)

    def test_code_in_a_shard_is_refused(self, iteration: Path, tmp_path: Path) -> None:
        import os

        class Touch:
            def __reduce__(self):
                return (os.mkdir, (str(tmp_path / "made"),))

        self.edit(iteration, "mp_rank_00_000", lambda tree: tree.update(extra=Touch()))
        with pytest.raises(MindferryError, match="mkdir"):
            open_source(iteration)
        assert not (tmp_path / "made").exists()

    def test_where_it_may_be_opened(self, iteration: Path) -> None:
        specs = [
            open_source(path).spec for path in (iteration.parent, iteration, iteration / "mp_rank_00_000")
        ]
        assert specs[0] == specs[1] == specs[2]
        (iteration.parent / "latest_checkpointed_iteration.txt").unlink()
        assert open_source(iteration.parent).spec == specs[0]

    @pytest.mark.parametrize("text", ["600", "../../etc", "", "9" * 40])
    def test_tracker_that_lies(self, iteration: Path, text: str) -> None:
        (iteration.parent / "latest_checkpointed_iteration.txt").write_text(text)
        with pytest.raises(MindferryError, match=r"latest_checkpointed_iteration.txt"):
            open_source(iteration.parent)

    def test_distributed_format_is_named(self, iteration: Path) -> None:
        (iteration / ".metadata").write_text("")
        with pytest.raises(UsageError, match="torch_dist"):
            open_source(iteration.parent)

    def test_unknown_version(self, iteration: Path) -> None:
        for rank in iteration.iterdir():
            self.edit(iteration, rank.name, lambda tree: tree.update(checkpoint_version=4.0))
        with pytest.raises(MindferryError, match=r"checkpoint_version 4.0"):
            open_source(iteration)


def test_enums_of_megatron_need_no_megatron(tmp_path: Path) -> None:
    """Case 7: arguments hold enums whose classes are not installed here; fp8 states hold bytes."""
    hf = hf_model(tmp_path / "hf", "gpt2")
    module = types.ModuleType("megatron.core.enums")
    model_type = enum.Enum("ModelType", {"encoder_or_decoder": 1}, module="megatron.core.enums")
    module.ModelType = model_type  # type: ignore[attr-defined]
    names = ("megatron", "megatron.core", "megatron.core.enums")
    added = {name: module if name == names[-1] else types.ModuleType(name) for name in names}
    sys.modules.update(added)
    try:
        iteration = write_megatron(
            tmp_path / "meg", hf, "gpt2", rows=64, args={"model_type": model_type.encoder_or_decoder}
        )
        TestShards.edit(
            iteration,
            "mp_rank_00",
            lambda tree: tree["model"].update(
                {"decoder.layers.0.mlp.linear_fc1._extra_state": io.BytesIO(b"x")}
            ),
        )
    finally:
        for name in names:
            del sys.modules[name]
    assert_same_as_hf(tmp_path, tmp_path / "meg")


def test_decisions_cover_the_arguments(tmp_path: Path) -> None:
    hf = hf_model(tmp_path / "hf", "gpt2")
    write_megatron(tmp_path / "meg", hf, "gpt2", rows=64)
    source = open_source(tmp_path / "meg")
    by_key = {item.source_key: item for item in source.decisions}
    assert by_key["hidden_size"].target_value == 24
    assert "more" in by_key["args"].source_value
    json.dumps([vars(item) for item in source.decisions])
