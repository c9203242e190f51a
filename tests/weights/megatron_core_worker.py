"""One rank of a real Megatron-core GPTModel on a CPU: loads its shard strictly and computes logits.

    python megatron_core_worker.py ITERATION_DIRECTORY RANK PORT IDS.npy OUT.npy

Rank r of tensor parallelism t is r % t, its pipeline stage r // t, as Megatron numbers them. The arguments in the
checkpoint say what to build. The last stage's first rank writes the logits [batch, sequence, padded vocabulary].
With OUT a directory, one rank takes a step of Megatron-core's own optimizer on the next-token loss instead and
saves its checkpoint there.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

# Megatron-core asks CUDA for a buffer's device and random state (dropout is off here), and moves a tied head to it.
torch.Tensor.cuda = lambda self, *args, **kwargs: self
torch.cuda.current_device = lambda: "cpu"


def build(args: Any, stage: int) -> Any:
    """GPTModel of this rank, as Megatron-LM's gpt_builder makes it from the same arguments."""
    from megatron.core import tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import dot_product_attention
    from megatron.core.transformer.transformer_config import TransformerConfig

    def quiet() -> Any:
        return SimpleNamespace(fork=lambda *a, **k: contextlib.nullcontext())

    tensor_parallel.get_cuda_rng_tracker = quiet
    dot_product_attention.tensor_parallel.get_cuda_rng_tracker = quiet
    activation = {}
    if args.swiglu:
        activation = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    elif args.openai_gelu:
        from megatron.core.fusions.fused_bias_gelu import bias_gelu

        activation = {"activation_func": lambda x: bias_gelu(torch.zeros(()), x)}
    else:
        activation = {"bias_activation_fusion": args.bias_gelu_fusion}
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        kv_channels=args.kv_channels,
        normalization=args.normalization,
        layernorm_epsilon=args.norm_epsilon,
        qk_layernorm=args.qk_layernorm,
        add_bias_linear=args.add_bias_linear,
        add_qkv_bias=args.add_qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        **activation,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, normalization=args.normalization),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=stage == 0,
        post_process=stage == args.pipeline_model_parallel_size - 1,
        parallel_output=False,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=getattr(args, "use_rope_scaling", False),
        rope_scaling_factor=getattr(args, "rope_scaling_factor", 8.0),
        seq_len_interpolation_factor=getattr(args, "rotary_seq_len_interpolation_factor", None),
    )


def save_after_a_step(model: Any, tree: dict[str, Any], inputs: tuple[Any, ...], out: Path) -> None:
    """One update of get_megatron_optimizer's AdamW without clipping; the layout of what is saved is Megatron's."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    real = torch.tensor
    torch.tensor = lambda *args, device=None, **named: real(
        *args, **named
    )  # FP32Optimizer's scale is on CUDA
    model.ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=False)
    settings = OptimizerConfig(optimizer="adam", lr=1e-3, weight_decay=0.1, clip_grad=0.0)
    optimizer = get_megatron_optimizer(settings, [model])
    torch.tensor = real
    true = tree["args"].vocab_size
    logits = model(*inputs)[:, :-1, :true]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs[0][:, 1:].flatten()).backward()
    optimizer.chained_optimizers[0].optimizer.step()
    state = {
        "model": model.state_dict_for_save_checkpoint(),
        "optimizer": optimizer.state_dict(),
        "iteration": 1,
        "checkpoint_version": 3.0,
        "args": tree["args"],
    }
    (out / "iter_0000001" / "mp_rank_00").mkdir(parents=True)
    torch.save(state, out / "iter_0000001" / "mp_rank_00" / "model_optim_rng.pt")


def run(directory: Path, rank: int, port: int, ids_file: str, out: str) -> None:
    shards = sorted(directory.glob("mp_rank_*"))
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=len(shards))
    first = torch.load(shards[0] / "model_optim_rng.pt", weights_only=False)["args"]
    tensor, stages = first.tensor_model_parallel_size, first.pipeline_model_parallel_size
    stage = rank // tensor
    folder = f"mp_rank_{rank % tensor:02d}" + (f"_{stage:03d}" if stages > 1 else "")
    tree = torch.load(directory / folder / "model_optim_rng.pt", weights_only=False)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor, stages)
    model = build(tree["args"], stage).eval()
    model.load_state_dict(tree["model"], strict=True)
    ids = torch.from_numpy(np.load(ids_file))
    length = ids.shape[1]
    positions = torch.arange(length)[None].expand_as(ids)
    mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
    if stage:
        hidden = torch.empty(length, ids.shape[0], first.hidden_size)
        dist.recv(hidden, rank - tensor)
        model.set_input_tensor(hidden)
    if Path(out).is_dir():
        save_after_a_step(model, tree, (ids, positions, mask), Path(out))
        return
    with torch.no_grad():
        result = model(ids, positions, mask)
    if stage < stages - 1:
        dist.send(result.contiguous(), rank + tensor)
    elif rank % tensor == 0:
        np.save(out, result.numpy())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
