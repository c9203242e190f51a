"""Pickled checkpoints: read by the weights-only unpickler, refused by name, never run."""

from __future__ import annotations

import argparse
import decimal
import json
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

from mindferry.errors import MindferryError
from mindferry.sources import open_source
from mindferry.sources.pickled import TorchStore, load_pickled
from mindferry.weights import convert

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


class Foo:
    def __init__(self) -> None:
        self.x = 1


class Touch:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (self.path,))


class Evaluate:
    def __reduce__(self):
        return (eval, ("1 + 1",))


class BadCodec:
    def __reduce__(self):
        import _codecs

        return (_codecs.encode, ("x" * 100, "zlib"))


def test_case_7_namespace_is_read(tmp_path: Path) -> None:
    torch.save(
        {"model": {"w": torch.ones(2, 2)}, "args": argparse.Namespace(num_layers=2)}, tmp_path / "x.pt"
    )
    tree = load_pickled(tmp_path / "x.pt")
    assert tree["args"].num_layers == 2
    assert tree["model"]["w"].tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize("legacy", [False, True])
def test_case_7_another_class_is_refused_by_name(tmp_path: Path, legacy: bool) -> None:
    torch.save({"a": Foo()}, tmp_path / "x.pt", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(MindferryError, match=r"x.pt: the pickle holds .*test_pickled.Foo"):
        load_pickled(tmp_path / "x.pt")


@pytest.mark.parametrize("make", [lambda p: Touch(str(p)), lambda p: Evaluate(), lambda p: BadCodec()])
def test_case_7_nothing_is_run(tmp_path: Path, make) -> None:
    mark = tmp_path / "made"
    torch.save({"a": make(mark)}, tmp_path / "x.pt")
    with pytest.raises(MindferryError, match=r"x\.pt"):
        load_pickled(tmp_path / "x.pt")
    assert not mark.exists()


def test_states_of_random_generators_are_read(tmp_path: Path) -> None:
    """Megatron keeps them beside the weights; they hold numpy arrays."""
    import random

    state = {"random": random.getstate(), "np": np.random.get_state(), "cpu": torch.get_rng_state()}
    torch.save({"rng_state": [state], "model": {"w": torch.zeros(1)}}, tmp_path / "x.pt")
    tree = load_pickled(tmp_path / "x.pt")
    np.testing.assert_array_equal(tree["rng_state"][0]["np"][1], state["np"][1])


def test_compressed_archives_are_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(4)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as old, zipfile.ZipFile(tmp_path / "b.pt", "w") as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry), zipfile.ZIP_DEFLATED)
    with pytest.raises(MindferryError, match="compressed"):
        load_pickled(tmp_path / "b.pt")


@pytest.mark.parametrize("keep", [0, 1, 100, 600, -1])
def test_cut_files(tmp_path: Path, keep: int) -> None:
    torch.save({"w": torch.zeros(400)}, tmp_path / "a.pt")
    raw = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "b.pt").write_bytes(raw[:keep])
    with pytest.raises(MindferryError, match=r"b\.pt"):
        load_pickled(tmp_path / "b.pt")


def test_plain_pickle_and_garbage(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(pickle.dumps({"a": 1}))
    (tmp_path / "b.pt").write_bytes(b"\x80\x02garbage" * 50)
    for name in "ab":
        with pytest.raises(MindferryError, match=f"{name}.pt"):
            load_pickled(tmp_path / f"{name}.pt")


def test_store_gives_every_type_bit_for_bit(tmp_path: Path) -> None:
    tensors = {
        "bf16": torch.tensor([1.0, -3.140625, float("inf")], dtype=torch.bfloat16),
        "f16": torch.tensor([0.1], dtype=torch.float16),
        "t": torch.arange(6, dtype=torch.float32).reshape(2, 3).t(),
        "scalar": torch.tensor(7.0),
        "i": torch.tensor([1, 2]),
    }
    torch.save(tensors, tmp_path / "x.pt")
    store = TorchStore([(tmp_path / "x.pt", load_pickled(tmp_path / "x.pt"))])
    assert store.read("bf16").view(np.uint16).tolist() == [0x3F80, 0xC049, 0x7F80]
    assert store.read("t").tolist() == [[0, 3], [1, 4], [2, 5]]
    assert store.read("scalar").shape == ()
    assert store.dtype("f16") == np.float16
    assert not store.read("i").flags.writeable


@pytest.mark.parametrize("value", [3, "x", [1], None])
def test_what_is_not_a_tensor_is_named(tmp_path: Path, value: object) -> None:
    with pytest.raises(MindferryError, match="'w' is a"):
        TorchStore([(tmp_path, {"w": value})])


class TestHuggingFaceBin:
    @staticmethod
    def model(path: Path, **save):
        torch.manual_seed(0)
        config = transformers.GPT2Config(vocab_size=31, n_positions=9, n_embd=12, n_layer=2, n_head=3,
                                         bos_token_id=0, eos_token_id=0)  # fmt: skip
        model = transformers.GPT2LMHeadModel(config)
        model.save_pretrained(path, **save)
        return model

    @staticmethod
    def weights(path: Path, out: Path) -> dict:
        from safetensors.numpy import load_file

        convert(open_source(path), out)
        return load_file(out / "model.safetensors")

    @pytest.mark.parametrize("save", [{}, {"max_shard_size": "4KB"}], ids=["one", "sharded"])
    def test_same_result_as_safetensors(self, tmp_path: Path, save: dict) -> None:
        self.model(tmp_path / "a")
        self.model(tmp_path / "b", safe_serialization=False, **save)
        assert not list((tmp_path / "b").glob("*.safetensors"))
        a, b = (self.weights(tmp_path / n, tmp_path / f"{n}-out") for n in "ab")
        assert a.keys() == b.keys()
        assert all(np.array_equal(a[name], b[name]) for name in a)

    def test_missing_shard(self, tmp_path: Path) -> None:
        self.model(tmp_path, safe_serialization=False, max_shard_size="4KB")
        sorted(tmp_path.glob("pytorch_model-*.bin"))[1].unlink()
        with pytest.raises(MindferryError, match="shards are missing"):
            open_source(tmp_path)

    def test_ghost_and_unlisted_tensors(self, tmp_path: Path) -> None:
        self.model(tmp_path, safe_serialization=False, max_shard_size="4KB")
        index = tmp_path / "pytorch_model.bin.index.json"
        tree = json.loads(index.read_text())
        tree["weight_map"].pop("transformer.ln_f.bias")
        index.write_text(json.dumps(tree))
        assert "not listed: transformer.ln_f.bias" in " ".join(open_source(tmp_path).warnings)
        tree["weight_map"]["ghost"] = tree["weight_map"]["transformer.ln_f.weight"]
        index.write_text(json.dumps(tree))
        with pytest.raises(MindferryError, match="in no shard: ghost"):
            open_source(tmp_path)

    def test_two_formats_in_one_directory(self, tmp_path: Path) -> None:
        model = self.model(tmp_path)
        model.save_pretrained(tmp_path, safe_serialization=False)
        self.model(tmp_path)
        source = open_source(tmp_path)
        assert "model.safetensors was taken" in " ".join(source.warnings)

    def test_code_in_a_bin_is_refused(self, tmp_path: Path) -> None:
        self.model(tmp_path, safe_serialization=False)
        torch.save({"transformer.wte.weight": Touch(str(tmp_path / "made"))}, tmp_path / "pytorch_model.bin")
        with pytest.raises(MindferryError, match=r"pytorch_model.bin: the pickle holds \w+.mkdir"):
            open_source(tmp_path)
        assert not (tmp_path / "made").exists()


def test_other_plain_looking_classes_are_refused_too(tmp_path: Path) -> None:
    torch.save({"a": decimal.Decimal("1")}, tmp_path / "x.pt")
    with pytest.raises(MindferryError, match=r"decimal\.Decimal"):
        load_pickled(tmp_path / "x.pt")
