"""How fast are weights converted, against copying the same bytes, and how much memory does it take?

    python -m benchmarks.convert [--gigabytes 2] [--keep DIR] [--json FILE]

Makes a random sharded Hugging Face Llama checkpoint of about that size (14 GB: a 7B model in bfloat16), copies
it once with read and write, converts it, and prints a line for each: NAME ratio X.XX, above 1 means faster
than the copy. Peak memory is of a process of its own that only converts.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

SHARD_BYTES = 512 << 20


def make(path: Path, gigabytes: float, dtype: str) -> int:
    """Write a random Llama checkpoint of about `gigabytes`; returns its bytes."""
    from mindferry.sources.family import families
    from mindferry.spec import ModelSpec
    from mindferry.weights.dtypes import DTYPES
    from mindferry.weights.rules import bind
    from mindferry.weights.transforms import Geometry
    from mindferry.weights.writer import Item, write_checkpoint

    hidden, ffn, vocab = (2048, 5504, 32000) if gigabytes < 6 else (4096, 11008, 32000)
    item_size = DTYPES[dtype].itemsize
    per_layer = (4 * hidden * hidden + 3 * hidden * ffn) * item_size
    layers = max(1, round((gigabytes * 1e9 - 2 * vocab * hidden * item_size) / per_layer))
    spec = ModelSpec(
        family="llama", vocab_size=vocab, hidden_size=hidden, num_layers=layers, num_attention_heads=hidden // 128,
        num_query_groups=hidden // 128, kv_channels=128, ffn_hidden_size=ffn, max_position_embeddings=2048,
        position_embedding="rope", normalization="RMSNorm", layernorm_epsilon=1e-5, activation="silu",
        gated_linear_unit=True, add_bias_linear=False, add_qkv_bias=False, tie_word_embeddings=False,
    )  # fmt: skip
    family = families()["llama"]
    noise = np.random.default_rng(0).standard_normal(1 << 22, dtype=np.float32).astype(DTYPES[dtype])
    shapes = bind(family.weights, family.ignored, Geometry(spec)).source_shapes()
    items = [
        Item(name if name == "lm_head.weight" else f"model.{name}", shape, DTYPES[dtype],
             lambda shape=shape: np.resize(noise, shape))
        for name, shape in shapes.items()
    ]  # fmt: skip
    write_checkpoint(items, path, max_shard_bytes=SHARD_BYTES, metadata={"format": "pt"})
    config = {
        "model_type": "llama", "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": ffn,
        "num_hidden_layers": layers, "num_attention_heads": hidden // 128, "num_key_value_heads": hidden // 128,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    return sum(item.nbytes for item in items)


def copy(source: Path, out: Path) -> float:
    """Seconds to copy the shards with plain reads and writes, flushed to the disk like a checkpoint."""
    out.mkdir()
    start = time.perf_counter()
    for file in sorted(source.glob("*.safetensors")):
        with open(file, "rb") as read, open(out / file.name, "wb") as write:
            shutil.copyfileobj(read, write, 4 << 20)
            write.flush()
            os.fsync(write.fileno())
    return time.perf_counter() - start


_CHILD = """
import json, resource, sys, time
from pathlib import Path
from mindferry.sources import open_source
from mindferry.weights import convert
dtype = None if sys.argv[3] == "none" else sys.argv[3]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
convert(open_source(Path(sys.argv[1])), Path(sys.argv[2]), dtype=dtype, max_shard_bytes=int(sys.argv[4]))
seconds = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"seconds": seconds, "peak": peak * 1024, "start": before * 1024}))
"""


def convert_once(source: Path, out: Path, dtype: str) -> dict[str, float]:
    """Seconds and peak resident bytes of a process that only converts."""
    run = subprocess.run(
        [sys.executable, "-c", _CHILD, str(source), str(out), dtype, str(SHARD_BYTES)],
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(run.stdout.splitlines()[-1])


def measure(home: Path, gigabytes: float, repeats: int) -> list[dict[str, float | str]]:
    """One row for each way to convert; copy and conversion take turns so that both meet the same disk."""
    rows: list[dict[str, float | str]] = []
    for stored, dtype in (("float32", "none"), ("bfloat16", "none"), ("bfloat16", "float32")):
        source = home / f"source-{stored}"
        size = make(source, gigabytes, stored) if not source.exists() else _size(source)
        copies, conversions, peaks = [], [], []
        for _ in range(repeats):
            copies.append(copy(source, home / "copy"))
            shutil.rmtree(home / "copy")
            once = convert_once(source, home / "out", dtype)
            conversions.append(once["seconds"])
            peaks.append(once["peak"])
            written = _size(home / "out")
            shutil.rmtree(home / "out")
        copied, converted = statistics.median(copies), statistics.median(conversions)
        rows.append(
            {
                "name": f"convert_{stored}_to_{stored if dtype == 'none' else dtype}",
                # Bytes moved (read + written) a second, relative to the copy's.
                "ratio": (size + written) / converted / (2 * size / copied),
                "seconds": converted,
                "copy_seconds": copied,
                "bytes_read": size,
                "bytes_written": written,
                "peak_rss_bytes": max(peaks),
            }
        )
        if stored == "float32":
            shutil.rmtree(source)
    return rows


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="work in this directory, for a disk of your choice")
    parser.add_argument("--json", type=Path, default=Path(__file__).with_name("convert.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.keep) as home:
        rows = measure(Path(home), arguments.gigabytes, arguments.repeats)
    for row in rows:
        print(
            f"{row['name']} ratio {row['ratio']:.2f}  "
            f"({row['seconds']:.2f} s, copy {row['copy_seconds']:.2f} s, peak {row['peak_rss_bytes'] / 1e9:.2f} GB)"
        )
    arguments.json.write_text(json.dumps({"gigabytes": arguments.gigabytes, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
