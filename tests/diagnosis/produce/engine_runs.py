"""Failures of mindformers' Trainer, configuration, data and checkpoints, on a tiny run."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np

from mindferry.diagnosis.tiny import SPEC, Tiny, make_run, rows, tokens, weights, write_mindrecord


def train(root: Path, **options) -> None:
    from mindferry.targets.run_directory import RunDirectory
    from mindferry.training import engine

    engine.train(RunDirectory.open(root), engine.Options(**options))


def new_run(**kwargs) -> Path:
    return make_run(Path(tempfile.mkdtemp(prefix="tiny-")) / "run", **kwargs)


def healthy() -> None:
    train(new_run(), steps=3)


def long_record() -> None:
    """129-token records into a 128-token network."""
    spec = SPEC.model_copy(update={"max_position_embeddings": 128})
    tiny = Tiny(spec=spec, seq_length=128, sequences=32)
    longer = rows(tokens(Tiny(spec=spec, seq_length=129, sequences=32)))
    train(new_run(tiny=tiny, columns=longer), steps=2)


def wrong_column() -> None:
    columns = rows(tokens(Tiny()))
    columns["tokens"] = columns.pop("input_ids")
    train(new_run(columns=columns), steps=2)


def vocabulary_too_small() -> None:
    """Ids up to 63 into a vocabulary of 50 (PyNative: the graph's Gather on a CPU reads zeros instead)."""
    columns = rows(tokens(Tiny()))
    spec = SPEC.model_copy(update={"vocab_size": 50})
    train(new_run(tiny=Tiny(spec=spec), columns=columns), steps=2, mode="pynative")


def batch_too_large() -> None:
    train(new_run(sequences=8), steps=2, overrides={"runner_config.batch_size": 16})


def mindformers_config(root: Path, change) -> Path:
    """mindformers' own yaml of a run that trained, with `change` applied to its text."""
    path = root / "logs/effective.yaml"
    path.write_text(change(path.read_text()))
    return path


def own_trainer(change) -> None:
    """Start mindformers' Trainer by itself on a YAML with a fault in it."""
    from mindferry.targets import run_yaml
    from mindferry.targets.run_directory import RunDirectory
    from mindferry.training import compat, engine

    root = new_run()
    run = RunDirectory.open(root)
    content = engine.prepare(run, engine.Options())
    compat.quiet(run.logs)
    content["callbacks"] = []
    content["runner_wrapper"]["type"] = "PortableTrainOneStepCell"
    content["train_dataset"]["batch_size"] = 8
    content["train_dataset_task"]["dataset_config"] = content["train_dataset"]
    change(content)
    path = root / "mindformers.yaml"
    path.write_text(run_yaml.dump(content))
    from mindformers import MindFormerConfig, Trainer
    from mindformers.core.context.build_context import build_context

    config = MindFormerConfig(str(path))
    build_context(config)
    if content["model"]["arch"]["type"] == "GPT2ForTraining":
        import mindferry.training.models  # noqa: F401
    compat.register_wrappers()
    Trainer(args=config).train()


def unknown_section_key() -> None:
    def change(content):
        content["runner_config"]["batchsize"] = 8

    own_trainer(change)


def unregistered_class() -> None:
    def change(content):
        content["model"]["arch"]["type"] = "GPT3ForTraining"

    own_trainer(change)


def missing_checkpoint() -> None:
    def change(content):
        content["load_checkpoint"] = content["load_checkpoint"].replace("/model", "/weights")

    own_trainer(change)


def wrong_checkpoint_format() -> None:
    def change(content):
        content["load_ckpt_format"] = "ckpt"

    own_trainer(change)


def missing_dataset() -> None:
    def change(content):
        loader = content["train_dataset"]["data_loader"]
        loader["dataset_files"] = ["/data/absent/train.mindrecord"]

    own_trainer(change)


def dataset_dir_empty() -> None:
    def change(content):
        loader = content["train_dataset"]["data_loader"]
        loader["dataset_dir"] = tempfile.mkdtemp()
        del loader["dataset_files"]

    own_trainer(change)


def use_parallel_alone() -> None:
    def change(content):
        content["use_parallel"] = True
        content["parallel"]["parallel_mode"] = 1
        content["parallel_config"].update(data_parallel=2, model_parallel=2)

    own_trainer(change)


def learning_rate_text() -> None:
    def change(content):
        content["lr_schedule"]["learning_rate"] = "5e-5"

    own_trainer(change)


def warmup_float() -> None:
    def change(content):
        content["lr_schedule"]["warmup_steps"] = 0.1

    own_trainer(change)


def unknown_callback() -> None:
    def change(content):
        content["callbacks"] = [{"type": "LossWatcher"}]

    own_trainer(change)


def unknown_optimizer_argument() -> None:
    def change(content):
        content["optimizer"]["beta1"] = 0.9

    own_trainer(change)


def ascend_yaml() -> None:
    def change(content):
        content["context"]["device_target"] = "Ascend"

    own_trainer(change)


def wrong_shape() -> None:
    """A checkpoint of another hidden size, through MindSpore's own loader."""
    import mindspore as ms
    from mindspore import nn

    root = Path(tempfile.mkdtemp())
    ms.save_checkpoint(nn.Dense(4, 8), str(root / "a.ckpt"))
    ms.load_param_into_net(nn.Dense(4, 6), ms.load_checkpoint(str(root / "a.ckpt")))


def checkpoint_not_one() -> None:
    import mindspore as ms

    path = Path(tempfile.mkdtemp()) / "a.ckpt"
    path.write_bytes(os.urandom(4096))
    ms.load_checkpoint(str(path))


def safetensors_cut() -> None:
    import mindspore as ms

    path = Path(tempfile.mkdtemp()) / "model.safetensors"
    root = new_run()
    path.write_bytes((root / "model/model.safetensors").read_bytes()[:5000])
    ms.load_checkpoint(str(path), format="safetensors")


def missing_index_file() -> None:
    """A MindRecord without its .db companion."""
    import mindspore.dataset as ds

    path = Path(tempfile.mkdtemp()) / "a.mindrecord"
    write_mindrecord(path, rows(tokens(Tiny(sequences=8))))
    Path(str(path) + ".db").unlink()
    ds.MindDataset(str(path)).get_dataset_size()


def map_function_raises() -> None:
    import mindspore.dataset as ds

    def cut(row):
        raise ValueError("expected 16 tokens, got 15")

    data = ds.NumpySlicesDataset({"x": np.arange(8)}, shuffle=False)
    data = data.map(cut, input_columns=["x"])
    for _ in data.create_tuple_iterator(output_numpy=True):
        pass


def batch_of_unequal_rows() -> None:
    import mindspore.dataset as ds

    def records():
        for length in (16, 15, 16, 16):
            yield (np.zeros(length, np.int32),)

    data = ds.GeneratorDataset(records, ["input_ids"]).batch(2)
    for _ in data.create_tuple_iterator(output_numpy=True):
        pass


def few_descriptors() -> None:
    """Run with a limit of open files (see __main__)."""
    import mindspore.dataset as ds

    files = [open("/dev/null") for _ in range(10_000)]  # noqa: SIM115
    ds.NumpySlicesDataset(list(range(len(files))))


def unwritable_output() -> None:
    """A user who may not write there."""
    import mindspore as ms
    from mindspore import nn

    os.setuid(65534)
    ms.save_checkpoint(nn.Dense(2, 2), "/usr/share/a.ckpt")


def disk_full() -> None:
    with open("/dev/full", "wb") as handle:
        handle.write(weights(Tiny())["decoder.layers.0.mlp.linear_fc1.weight"].tobytes())


def cxx_helpers() -> None:
    """mindformers' Megatron index helpers without a compiler on PATH (see __main__)."""
    from mindformers.dataset.blended_datasets.utils import compile_helpers

    compile_helpers()


def megatron_not_index() -> None:
    from mindformers.dataset.blended_datasets.indexed_dataset import IndexedDataset

    root = Path(tempfile.mkdtemp())
    (root / "corpus.idx").write_bytes(b"not an index" * 20)
    (root / "corpus.bin").write_bytes(b"\0" * 64)
    IndexedDataset(str(root / "corpus"))
