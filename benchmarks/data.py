"""Speed of the data road: `python -m benchmarks.data [--megabytes N] [--repeats N] [--json FILE]`.

- data.tokenize.vs_tokenizers: text files to .bin/.idx on the disk, against `encode_batch_fast` of the tokenizers
  library on the same texts, already in memory, with its own threads on all cores, results thrown away.
- data.pipeline.vs_torch_dataloader: batches of the dataset that `mindferry train` builds (MindDataset and mindformers'
  CausalLanguageModelDataset, shuffled), against torch's DataLoader with 2 workers over the same tokens in a .bin.
- data.pipeline.vs_numpy_memmap: the same against slicing a memory-mapped .bin in this process, which nothing that
  hands batches between threads can reach.
- data.demo.data_time_share: the share of a training step that waits for data in the run of `make demo` (median of
  data_time over median of step_time in its metrics.jsonl, behind the first three steps). The goal is below 0.05.

The sides take turns; medians. A ratio above 1 means that mindferry is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

VOCAB = 8192
SEQ_LENGTH = 1024
BATCH = 8


def write_corpus(directory: Path, megabytes: float) -> list[str]:
    """Source files of Python's own library: real text, the same everywhere with the same Python."""
    directory.mkdir()
    library = Path(os.__file__).parent
    texts: list[str] = []
    size = 0
    for path in sorted(library.rglob("*.py")):
        if "site-packages" in path.parts:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if not text.strip():
            continue
        texts.append(text)
        (directory / f"{len(texts):05d}.txt").write_text(text, encoding="utf-8")
        size += len(text.encode())
        if size >= megabytes * 1e6:
            break
    return texts


def train_tokenizer(texts: list[str], path: Path) -> None:
    """A byte-level BPE of VOCAB tokens, trained on a part of the corpus."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        texts[::8], vocab_size=VOCAB, special_tokens=["<|endoftext|>"], show_progress=False
    )
    tokenizer.save(str(path))


def interleaved(sides: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Rates of each side, taken in turns; the first round warms up and does not count."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(repeats + 1):
        for name, measure in sides.items():
            rate = measure()
            if number:
                rates[name].append(rate)
            print(f"  {name:18} {rate:12,.1f}{'' if number else '  (warm-up)'}", file=sys.stderr, flush=True)
    return rates


def tokenize_sides(root: Path, texts: list[str]) -> dict[str, Callable[[], float]]:
    """Megabytes of text a second."""
    from tokenizers import Tokenizer

    from mindferry.data import DataOptions, build_dataset, load_tokenizer

    files = {"tokenizer.json": root / "tokenizer.json"}
    size = sum(len(text.encode()) for text in texts) / 1e6

    def ours() -> float:
        with tempfile.TemporaryDirectory(dir=root) as out:
            begin = time.perf_counter()
            build_dataset(
                [root / "corpus"],
                load_tokenizer(files),
                Path(out),
                seq_length=SEQ_LENGTH,
                vocab_size=VOCAB,
                eos_token_id=0,
                options=DataOptions(output="megatron"),
            )
            return size / (time.perf_counter() - begin)

    def library() -> float:
        tokenizer = Tokenizer.from_file(str(files["tokenizer.json"]))
        begin = time.perf_counter()
        for start in range(0, len(texts), 64):
            tokenizer.encode_batch_fast(texts[start : start + 64], add_special_tokens=False)
        return size / (time.perf_counter() - begin)

    return {"mindferry": ours, "tokenizers": library}


def _rate(batches: Iterator[Any], rows: Callable[[Any], int]) -> float:
    """Samples a second from the second batch on: start-up is not the pipeline's speed."""
    next(batches)
    begin, count = time.perf_counter(), 0
    for batch in batches:
        count += rows(batch)
    return count / (time.perf_counter() - begin)


def mindferry_pipeline(path: Path) -> Callable[[], float]:
    """The train_dataset of a migrated run, as mindformers builds it."""
    from mindformers.dataset import CausalLanguageModelDataset
    from mindformers.tools.register import MindFormerConfig

    from mindferry.data.mindrecord import COLUMNS

    config = MindFormerConfig(
        data_loader={"type": "MindDataset", "dataset_files": [str(path)], "shuffle": True},
        input_columns=list(COLUMNS),
        construct_args_key=list(COLUMNS),
        batch_size=BATCH,
        drop_remainder=True,
        num_parallel_workers=min(2, os.cpu_count() or 1),
        python_multiprocessing=False,
        repeat=1,
        seed=0,
        prefetch_size=2,
        numa_enable=False,
    )
    dataset = CausalLanguageModelDataset(dataset_config=config)
    return lambda: _rate(
        dataset.create_tuple_iterator(num_epochs=1, output_numpy=True), lambda batch: len(batch[0])
    )


def torch_pipeline(path: Path) -> Callable[[], float]:
    """DataLoader with 2 workers over windows of the .bin, as a torch trainer would have it."""
    import torch

    class Windows(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __init__(self) -> None:
            self.tokens = np.memmap(path, dtype=np.uint16, mode="r")

        def __len__(self) -> int:
            return (len(self.tokens) - 1) // SEQ_LENGTH

        def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
            window = self.tokens[i * SEQ_LENGTH : (i + 1) * SEQ_LENGTH + 1].astype(np.int64)
            both = torch.from_numpy(window)
            return both[:-1], both[1:]

    loader = torch.utils.data.DataLoader(
        Windows(), batch_size=BATCH, shuffle=True, num_workers=2, drop_last=True, persistent_workers=True
    )
    return lambda: _rate(iter(loader), lambda batch: len(batch[0]))


def numpy_pipeline(path: Path) -> Callable[[], float]:
    """The shortest way: slices of a memory map, in a random order, stacked."""
    tokens = np.memmap(path, dtype=np.uint16, mode="r")
    rows = (len(tokens) - 1) // SEQ_LENGTH

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        order = np.random.default_rng(0).permutation(rows)
        for start in range(0, rows - BATCH + 1, BATCH):
            windows = [
                tokens[i * SEQ_LENGTH : (i + 1) * SEQ_LENGTH + 1] for i in order[start : start + BATCH]
            ]
            both = np.stack(windows).astype(np.int32)
            yield both[:, :-1], both[:, 1:]

    return lambda: _rate(batches(), lambda batch: len(batch[0]))


def pipeline_sides(root: Path, tokens: int) -> dict[str, Callable[[], float]]:
    """Samples of SEQ_LENGTH tokens a second."""
    from mindferry.data import build_dataset
    from mindferry.training import compat

    compat.quiet(root / "logs")
    raw = root / "tokens.bin"
    np.random.default_rng(0).integers(1, VOCAB, tokens).astype(np.uint16).tofile(raw)
    build_dataset([raw], {}, root / "rows", seq_length=SEQ_LENGTH, vocab_size=VOCAB, eos_token_id=0)
    sides = {"numpy memmap": numpy_pipeline(raw)}
    try:
        sides["torch DataLoader"] = torch_pipeline(raw)
    except ImportError:
        print("  torch is not installed: vs_torch_dataloader left out", file=sys.stderr)
    # Last: torch's workers are forked, and must not be when mindspore's threads run already.
    if "torch DataLoader" in sides:
        sides["torch DataLoader"]()
    sides["mindferry"] = mindferry_pipeline(root / "rows" / "train.mindrecord")
    return sides


def demo_share(root: Path, steps: int) -> float:
    """Share of a step that waits for data, in the demo's run trained for `steps` steps."""
    from mindferry.data.pipeline import step_times
    from mindferry.demo import source

    source.build(root / "gpt2", steps=1, on_step=lambda step, loss: None)
    source.write_corpus(root / "demo-corpus")
    run = root / "run"
    migrate = ["migrate", str(root / "gpt2"), "--data", str(root / "demo-corpus"), "--out", str(run)]
    migrate += ["--seq-length", "128", "--batch-size", "4", "--steps", str(steps)]
    for words in (migrate, ["train", str(run)]):
        done = subprocess.run(
            [sys.executable, "-m", "mindferry", *words], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(done.stderr)
    times = step_times(run / "metrics.jsonl")
    assert times is not None
    print(
        f"  data_time {times.data_time * 1e3:.3f} ms, step_time {times.step_time * 1e3:.1f} ms, "
        f"median of {times.steps} steps",
        file=sys.stderr,
    )
    return times.waits


def main() -> int:
    """Measure, print the ratio lines, write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=float, default=8.0, help="text to tokenize (8)")
    parser.add_argument("--tokens", type=int, default=16_000_000, help="tokens in the pipeline's file")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each side (5)")
    parser.add_argument("--demo-steps", type=int, default=40, help="steps of the demo's run (40)")
    parser.add_argument("--json", type=Path, default=Path(__file__).with_name("data.json"))
    args = parser.parse_args()
    ratios: dict[str, float] = {}
    rates: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        texts = write_corpus(root / "corpus", args.megabytes)
        train_tokenizer(texts, root / "tokenizer.json")
        print("tokenize, MB/s", file=sys.stderr)
        measured = rates["tokenize"] = interleaved(tokenize_sides(root, texts), args.repeats)
        ratios["data.tokenize.vs_tokenizers"] = _ratio(measured, "tokenizers")
        print("pipeline, samples/s", file=sys.stderr)
        measured = rates["pipeline"] = interleaved(pipeline_sides(root, args.tokens), args.repeats)
        if "torch DataLoader" in measured:
            ratios["data.pipeline.vs_torch_dataloader"] = _ratio(measured, "torch DataLoader")
        ratios["data.pipeline.vs_numpy_memmap"] = _ratio(measured, "numpy memmap")
        print("the demo's run", file=sys.stderr)
        share = demo_share(root, args.demo_steps)
    for name, ratio in ratios.items():
        print(f"{name} ratio {ratio:.2f}")
    print(f"data.demo.data_time_share {share:.4f}")
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()[0]}
    content = {
        "machine": machine,
        "settings": {"seq_length": SEQ_LENGTH, "batch_size": BATCH, "megabytes": args.megabytes},
        "ratios": ratios,
        "demo_data_time_share": share,
        "rates": rates,
    }
    args.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0


def _ratio(rates: dict[str, list[float]], other: str) -> float:
    return statistics.median(rates["mindferry"]) / statistics.median(rates[other])


if __name__ == "__main__":
    raise SystemExit(main())
