"""Safetensors files and indexes that lie: each lie is refused, quickly, with the file named."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

from mindferry.errors import MindferryError
from mindferry.weights.tensor_store import SafetensorsStore

GOOD = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "F16", "shape": [2], "data_offsets": [24, 28]},
}


def raw_file(path: Path, header: object, data: bytes = bytes(28), length: int | None = None) -> Path:
    text = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def changed(**entry) -> dict:
    return {**GOOD, "a": {**GOOD["a"], **entry}}


def test_a_good_file_is_read(tmp_path: Path) -> None:
    store = SafetensorsStore([raw_file(tmp_path / "x", GOOD, bytes(range(28)))])
    assert store.names() == ["a", "b"]
    assert store.shape("a") == (2, 3)
    assert store.read("b").tobytes() == bytes(range(24, 28))
    store.release("a")
    assert store.read("a").tobytes() == bytes(range(24))
    assert not store.read("a").flags.writeable


ATTACKS = {
    "header length 2^63": (GOOD, bytes(28), 2**63, "header of 9223372036854775808 bytes"),
    "header of 100 GB": (GOOD, bytes(28), 100 * 10**9, "header of 100000000000 bytes"),
    "header longer than the file": (GOOD, bytes(28), 10_000, "header of 10000 bytes"),
    "not JSON": ("{{{", b"", None, "not valid JSON"),
    "not an object": ([1], b"", None, "not a JSON object"),
    "deeply nested": ("[" * 100_000, b"", None, "not valid JSON"),
    "duplicate name": (
        '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
        '"a":{"dtype":"I32","shape":[1],"data_offsets":[0,4]}}',
        bytes(4), None, "'a' occurs twice",
    ),
    "duplicate metadata": ('{"__metadata__":{},"__metadata__":{}}', b"", None, "occurs twice"),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, b"", None, "__metadata__"),
    "escape sequence in a name": (
        {"\x1b[2Ja": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}, bytes(4), None,
        "control characters",
    ),
    "right-to-left override in a name": (
        {"a\u202eb": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}, bytes(4), None,
        "control characters",
    ),
    "name of 10 000 letters": (
        {"a" * 10_000: {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}, bytes(4), None, "too long",
    ),
    "unknown dtype": (changed(dtype="F33"), bytes(28), None, "dtype 'F33'"),
    "negative size": (changed(shape=[-2, -3]), bytes(28), None, "shape"),
    "size true": (changed(shape=[True, 6]), bytes(28), None, "shape"),
    "size 1.0": (changed(shape=[1.0, 6]), bytes(28), None, "shape"),
    "product overflows 64 bits": (changed(shape=[2**32, 2**32, 6]), bytes(28), None, "needs"),
    "empty but enormous": (changed(shape=[0, 2**63], data_offsets=[0, 0]), bytes(28), None, "needs"),
    "rank 100": (changed(shape=[1] * 100), bytes(28), None, "shape"),
    "offsets backwards": (changed(data_offsets=[24, 0]), bytes(28), None, "data_offsets"),
    "offsets too short": (changed(data_offsets=[0, 23]), bytes(28), None, "needs 24 bytes"),
    "overlap": (changed(data_offsets=[4, 28]), bytes(28), None, "gap"),
    "tail": (GOOD, bytes(29), None, "belong to no tensor"),
    "cut off": (GOOD, bytes(27), None, "cut off"),
    "surplus key": (changed(colour="red"), bytes(28), None, "exactly the keys"),
    "entry is a list": ({"a": []}, b"", None, "exactly the keys"),
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_are_refused(tmp_path: Path, attack: str) -> None:
    header, data, length, message = ATTACKS[attack]
    path = raw_file(tmp_path / "model.safetensors", header, data, length)
    with pytest.raises(MindferryError, match=r"model.safetensors") as caught:
        SafetensorsStore([path])
    assert message in str(caught.value)


@given(st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_bytes_never_crash_the_reader(tmp_path: Path, data) -> None:
    """Whatever is flipped or cut: a clear error, or a file whose every tensor can be read."""
    good = save({"x": np.arange(6, dtype=np.float32).reshape(2, 3), "y": np.ones(3, np.float16)})
    raw = bytearray(good)
    for _ in range(data.draw(st.integers(0, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "fuzzed"
    path.write_bytes(bytes(raw[: data.draw(st.integers(0, len(raw)))]))
    try:
        store = SafetensorsStore([path])
    except MindferryError:
        return
    for name in store.names():
        assert store.read(name).shape == store.shape(name)


def test_case_5_bfloat16_is_read_and_kept(tmp_path: Path) -> None:
    words = np.array([0x3F80, 0xC049, 0x7F80, 0x0001], np.uint16)
    save_file({"w": words.view(ml_dtypes.bfloat16)}, tmp_path / "m.safetensors")
    found = SafetensorsStore([tmp_path / "m.safetensors"]).read("w")
    wide = found.astype(np.float32)
    np.testing.assert_array_equal(wide[:3], [1.0, -3.140625, np.inf])
    assert wide[3] == np.float32(9.1835e-41)
    np.testing.assert_array_equal(wide.astype(ml_dtypes.bfloat16).view(np.uint16), words)


class TestIndex:
    @staticmethod
    def make(path: Path, weight_map: dict, files: dict) -> Path:
        path.mkdir(exist_ok=True)
        for name, tensors in files.items():
            save_file({k: np.asarray(v, np.float32) for k, v in tensors.items()}, path / name)
        index = path / "model.safetensors.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return index

    def test_missing_shard_names_file_and_tensors(self, tmp_path: Path) -> None:
        index = self.make(
            tmp_path, {"a": "s1.safetensors", "b": "s2.safetensors"}, {"s1.safetensors": {"a": [1]}}
        )
        with pytest.raises(MindferryError, match=r"1 of 2 shards are missing: s2.safetensors.*tensors: b"):
            SafetensorsStore.open_index(index)

    def test_unlisted_tensor_is_a_warning(self, tmp_path: Path) -> None:
        index = self.make(tmp_path, {"a": "s1.safetensors"}, {"s1.safetensors": {"a": [1], "c": [2]}})
        store = SafetensorsStore.open_index(index)
        assert store.names() == ["a", "c"]
        assert "not listed: c" in store.warnings[0]

    @pytest.mark.parametrize("size", [3, 0, 10**30, 8.5, -8])
    def test_another_total_size_is_a_warning(self, tmp_path: Path, size: float) -> None:
        index = self.make(tmp_path, {"a": "s1.safetensors"}, {"s1.safetensors": {"a": [1, 2]}})
        tree = json.loads(index.read_text())
        for stated, warned in ((8, False), (size, True), (None, False), ("8", False)):
            index.write_text(json.dumps({**tree, "metadata": {"total_size": stated}}))
            warnings = SafetensorsStore.open_index(index).warnings
            assert any("the shards hold 8 bytes" in text for text in warnings) is (warned and int(size) != 8)

    def test_file_beside_the_index_is_a_warning(self, tmp_path: Path) -> None:
        index = self.make(
            tmp_path,
            {"a": "model-00001-of-00001.safetensors"},
            {"model-00001-of-00001.safetensors": {"a": [1]}, "model-00002-of-00002.safetensors": {"b": [1]}},
        )
        assert "model-00002-of-00002.safetensors" in SafetensorsStore.open_index(index).warnings[0]

    def test_ghost_tensor(self, tmp_path: Path) -> None:
        index = self.make(
            tmp_path, {"a": "s1.safetensors", "g": "s1.safetensors"}, {"s1.safetensors": {"a": [1]}}
        )
        with pytest.raises(MindferryError, match="listed but in no shard: g"):
            SafetensorsStore.open_index(index)

    @pytest.mark.parametrize("same", [True, False])
    def test_tensor_in_two_shards(self, tmp_path: Path, same: bool) -> None:
        index = self.make(
            tmp_path,
            {"a": "s1.safetensors", "b": "s2.safetensors"},
            {"s1.safetensors": {"a": [1]}, "s2.safetensors": {"b": [1], "a": [1 if same else 2]}},
        )
        if same:
            assert "stored twice" in SafetensorsStore.open_index(index).warnings[0]
        else:
            with pytest.raises(MindferryError, match=r"also in s1.safetensors, with other contents"):
                SafetensorsStore.open_index(index)

    @pytest.mark.parametrize(
        "name",
        ["../x.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", "x\u0000.safetensors", "a" * 5000],
    )
    def test_shard_names_are_never_paths(self, tmp_path: Path, name: str) -> None:
        save_file({"a": np.ones(1, np.float32)}, tmp_path / "x.safetensors")
        index = self.make(tmp_path / "model", {"a": name}, {})
        with pytest.raises(MindferryError):
            SafetensorsStore.open_index(index)

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}',
                                      '{"weight_map": {"a": "x", "a": "y"}}'])  # fmt: skip
    def test_index_that_is_none(self, tmp_path: Path, text: str) -> None:
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(text)
        with pytest.raises(MindferryError, match=r"index.json"):
            SafetensorsStore.open_index(index)


class TestLinks:
    def test_link_out_of_the_directory(self, tmp_path: Path) -> None:
        save_file({"a": np.ones(1, np.float32)}, tmp_path / "outside.safetensors")
        index = TestIndex.make(tmp_path / "model", {"a": "s1.safetensors"}, {})
        (tmp_path / "model/s1.safetensors").symlink_to(tmp_path / "outside.safetensors")
        with pytest.raises(MindferryError, match="leads out of the directory"):
            SafetensorsStore.open_index(index)

    def test_link_into_the_blobs_of_a_hugging_face_cache(self, tmp_path: Path) -> None:
        blobs = tmp_path / "models--x--y/blobs"
        snapshot = tmp_path / "models--x--y/snapshots/0123abcd"
        blobs.mkdir(parents=True)
        snapshot.mkdir(parents=True)
        save_file({"a": np.ones(1, np.float32)}, blobs / "abc")
        index = TestIndex.make(snapshot, {"a": "s1.safetensors"}, {})
        (snapshot / "s1.safetensors").symlink_to("../../blobs/abc")
        assert SafetensorsStore.open_index(index).read("a").tolist() == [1.0]

    def test_directory_in_place_of_a_shard(self, tmp_path: Path) -> None:
        index = TestIndex.make(tmp_path / "model", {"a": "s1.safetensors"}, {})
        (tmp_path / "model/s1.safetensors").mkdir()
        with pytest.raises(MindferryError, match="not a regular file"):
            SafetensorsStore.open_index(index)
