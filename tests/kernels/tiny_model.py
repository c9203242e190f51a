"""Build portable and fused GPTModels with the same weights in one process, and compare what they compute.

Run as a program: MODE (0 graph, 1 PyNative) and a JSON object of GPT2Config keys; prints one JSON line.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

BATCH, SEQ, VOCAB = 3, 13, 101
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_layers": 2,
    "num_heads": 3,
    "ffn_hidden_size": 96,
    "seq_length": SEQ,
    "max_position_embeddings": 20,
    "embedding_dropout": 0.0,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "compute_dtype": "float32",
}


def compare(mode: int, extra: dict) -> dict:
    from mindferry.training import compat

    compat.quiet(Path(tempfile.mkdtemp()))
    import mindspore as ms
    from mindformers.core.context.build_context import build_context
    from mindspore import Tensor, nn

    context = {"mode": mode, "device_target": "CPU", "affinity_cpu_list": []}
    build_context({"context": context, "use_legacy": False, "use_parallel": False, "run_mode": "train"})
    ms.set_context(mode=mode)
    from mindferry.training.models import GPT2Config, GPT2ForTraining

    rng = np.random.default_rng(0)
    ids, labels = (Tensor(rng.integers(0, VOCAB, (BATCH, SEQ)).astype(np.int32)) for _ in range(2))
    mask = np.ones((BATCH, SEQ), np.float32)
    mask[1, 3] = 0
    places = Tensor(np.tile(np.arange(SEQ, dtype=np.int32), (BATCH, 1)))

    class Loss(nn.Cell):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def construct(self, ids, labels, mask, places):
            out = self.net(input_ids=ids, labels=labels, loss_mask=mask, position_ids=places)
            return out[0].sum() * 3.0

    results, names, classes = [], [], []
    values: dict = {}
    for spec in ("portable", "fused"):
        own = {**BASE, **extra, "layer_spec": spec}
        if spec == "portable":
            own["compute_dtype"] = "float32"
        net = GPT2ForTraining(GPT2Config(**own))
        classes.append(type(net.model).__name__)
        for p in net.get_parameters():
            if p.name not in values:
                start = 1.0 if p.name.endswith("gamma") else 0.0
                values[p.name] = (start + rng.normal(0, 0.1, p.shape)).astype(np.float32)
            p.set_data(Tensor(values[p.name]))
        names.append([(p.name, p.shape) for p in net.get_parameters()])
        step = Loss(net)
        step.set_train(True)
        weights = ms.ParameterTuple(net.trainable_params())
        loss, grads = ms.value_and_grad(step, None, weights=weights)(ids, labels, Tensor(mask), places)
        net.set_train(False)
        logits = net(input_ids=ids, position_ids=places).asnumpy()
        results.append((float(loss.asnumpy()), [g.asnumpy() for g in grads], logits))
    error = ""
    bad = ids.asnumpy().copy()
    bad[1, 2] = VOCAB + 5
    try:
        if classes[1] == "FusedGPTModel":
            net(input_ids=Tensor(bad), position_ids=places).asnumpy()
    except RuntimeError as err:
        error = str(err)
    (loss_a, grads_a, logits_a), (loss_b, grads_b, logits_b) = results
    return {
        "classes": classes,
        "same_tree": names[0] == names[1],
        "loss": abs(loss_a - loss_b) / abs(loss_a),
        "logits": float(np.abs(logits_a - logits_b).max() / np.abs(logits_a).max()),
        "grads": max(
            float(np.linalg.norm(a - b) / (np.linalg.norm(a) + 1e-9))
            for a, b in zip(grads_a, grads_b, strict=True)
        ),
        "error": error,
    }


if __name__ == "__main__":
    print("\n" + json.dumps(compare(int(sys.argv[1]), json.loads(sys.argv[2]))))
