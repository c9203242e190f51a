"""The parameters of mindformers' GPTModel: names and shapes for a ModelSpec.

Read from mindformers 1.9.0, parallel_core/training_graph: LayerNorm has `gamma` and `beta`, RMSNorm has
`weight`; a Linear weight is [out, in]; the head has a parameter only when it is untied.
"""

from __future__ import annotations

from mindferry.spec import ModelSpec

Shape = tuple[int, ...]

# A size is a product of spec fields plus such products; kept symbolic so that an error about a shape can
# name the keys it follows from.
Dim = tuple[str, ...]
QKV_ROWS: Dim = ("num_attention_heads", "num_query_groups", "kv_channels")
PROJ_COLUMNS: Dim = ("num_attention_heads", "kv_channels")
FC1_ROWS: Dim = ("ffn_hidden_size",)


def _size(spec: ModelSpec, dim: Dim) -> int:
    if dim == QKV_ROWS:
        return (spec.num_attention_heads + 2 * spec.num_query_groups) * spec.kv_channels
    if dim == FC1_ROWS:
        return spec.ffn_hidden_size
    if dim == ("2", "ffn_hidden_size"):
        return 2 * spec.ffn_hidden_size
    size = 1
    for field in dim:
        size *= getattr(spec, field)
    return size


def _norm(spec: ModelSpec, prefix: str, dim: Dim) -> dict[str, tuple[Dim, ...]]:
    names = ("gamma", "beta") if spec.normalization == "LayerNorm" else ("weight",)
    return {f"{prefix}.{name}": (dim,) for name in names}


def _linear(prefix: str, rows: Dim, columns: Dim, bias: bool) -> dict[str, tuple[Dim, ...]]:
    table: dict[str, tuple[Dim, ...]] = {f"{prefix}.weight": (rows, columns)}
    if bias:
        table[f"{prefix}.bias"] = (rows,)
    return table


def _layer(spec: ModelSpec, number: int) -> dict[str, tuple[Dim, ...]]:
    at, hidden = f"decoder.layers.{number}", ("hidden_size",)
    fc1: Dim = ("2", "ffn_hidden_size") if spec.gated_linear_unit else FC1_ROWS
    bias = spec.add_bias_linear
    table = _norm(spec, f"{at}.input_layernorm", hidden)
    table |= _linear(f"{at}.self_attention.linear_qkv", QKV_ROWS, hidden, bias or spec.add_qkv_bias)
    if spec.qk_layernorm:
        for name in ("q_layernorm", "k_layernorm"):
            table |= _norm(spec, f"{at}.self_attention.{name}", ("kv_channels",))
    table |= _linear(f"{at}.self_attention.linear_proj", hidden, PROJ_COLUMNS, bias)
    table |= _norm(spec, f"{at}.pre_mlp_layernorm", hidden)
    table |= _linear(f"{at}.mlp.linear_fc1", fc1, hidden, bias)
    table |= _linear(f"{at}.mlp.linear_fc2", hidden, FC1_ROWS, bias)
    return table


def symbolic_shapes(spec: ModelSpec) -> dict[str, tuple[Dim, ...]]:
    """Parameter name -> the spec fields that each of its dimensions follows from."""
    vocab, hidden = ("vocab_size",), ("hidden_size",)
    table: dict[str, tuple[Dim, ...]] = {"embedding.word_embeddings.weight": (vocab, hidden)}
    if spec.position_embedding == "learned_absolute":
        table["embedding.position_embeddings.weight"] = (("max_position_embeddings",), hidden)
    for number in range(spec.num_layers):
        table |= _layer(spec, number)
    table |= _norm(spec, "decoder.final_layernorm", hidden)
    if not spec.tie_word_embeddings:
        table["output_layer.weight"] = (vocab, hidden)
    return table


def target_names(spec: ModelSpec) -> dict[str, Shape]:
    """Every parameter of the mindformers network of `spec`, in network order: name -> shape."""
    return {name: tuple(_size(spec, dim) for dim in dims) for name, dims in symbolic_shapes(spec).items()}
