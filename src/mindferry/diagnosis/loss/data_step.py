"""Step 1, the data: batches from the real pipeline against the network and against the whole training set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindferry.diagnosis.loss.step import Step
from mindferry.findings import Finding

BATCHES = 8
SAMPLE_ROWS = 2048  # of the training set, spread over it
SHIFT_GOOD = 0.98
CONSTANT = 0.9
PAD_SHARE = 0.5
DUPLICATES = 0.25
ORDER_FACTOR = 1.2


@dataclass
class Rows:
    """Columns by name, each [rows, length]."""

    columns: dict[str, np.ndarray]

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    @property
    def ids(self) -> np.ndarray:
        return self.columns["input_ids"]


def _dataset(content: Mapping[str, Any], **order: Any) -> Any:
    """The run's MindDataset with `shuffle` or `sampler`; seeded as the run is."""
    import mindspore.dataset as ds

    from mindferry.targets.run_yaml import data_files

    block = content["train_dataset"]
    ds.config.set_seed(block.get("seed", 0))
    files = [str(path) for path in data_files(content)]
    return ds.MindDataset(files, columns_list=block["input_columns"], **order)


def _collect(data: Any, names: list[str], limit: int) -> Rows:
    kept: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for number, values in enumerate(data.create_tuple_iterator(num_epochs=1, output_numpy=True), start=1):
        for name, value in zip(names, values, strict=True):
            kept[name].append(np.array(value).reshape(-1))
        if number >= limit:
            break
    return Rows({name: np.stack(values) for name, values in kept.items() if values})


def read_rows(content: Mapping[str, Any]) -> tuple[Rows, Rows]:
    """(the rows of the first BATCHES batches as training sees them, rows spread over the training set).

    Raises:
        RuntimeError and what else MindSpore's reader raises.
    """
    import mindspore.dataset as ds

    block = content["train_dataset"]
    names = list(block.get("construct_args_key") or block["input_columns"])
    size = content["runner_config"]["batch_size"]
    batches = _collect(_dataset(content, shuffle=block["data_loader"]["shuffle"]), names, size * BATCHES)
    count = _dataset(content, shuffle=False).get_dataset_size()
    spread = list(range(0, count, max(1, count // SAMPLE_ROWS)))
    return batches, _collect(_dataset(content, sampler=ds.SubsetSampler(spread)), names, len(spread))


def examine_data(content: Mapping[str, Any], tokenizer: Path | None = None) -> Step:
    """Look at the data of a prepared run.yaml."""
    from mindferry.diagnosis.startup import diagnose

    step = Step("data")
    loader = content["train_dataset"]["data_loader"]["type"]
    if loader != "MindDataset":
        step.verdict, step.summary = "unknown", f"the data loader {loader} is not read here"
        step.add(Finding("loss.data.loader", "info", step.summary, remedy="mindferry doctor data RUN"))
        return step
    try:
        batches, sample = read_rows(content)
    except Exception as err:
        text = f"{type(err).__name__}: {err}"
        known = diagnose(text.splitlines())[0]
        step.add(
            Finding("loss.data.unreadable", "problem", known.message, known.cause, known.remedy, text[:400])
        )
        step.summary = "the pipeline cannot be read"
        return step
    if not batches.columns or "input_ids" not in batches:
        step.add(
            Finding(
                "loss.data.empty",
                "problem",
                "the pipeline gives no rows of input_ids",
                remedy="migrate again",
            )
        )
        return step
    judge_rows(step, batches, sample, content)
    step.evidence["text"] = _decode(tokenizer, batches)
    return step


def judge_rows(step: Step, batches: Rows, sample: Rows, content: Mapping[str, Any]) -> None:
    """All judgements on rows (no MindSpore in here)."""
    config = content["model"]["model_config"]
    size = content["runner_config"]["batch_size"]
    eos = config.get("eos_token_id")
    ids = batches.ids
    step.evidence.update(rows=len(ids), length=int(ids.shape[1]), distinct_ids=len(np.unique(ids)))
    _range(step, batches, sample, config["vocab_size"])
    _length(step, ids, config.get("seq_length"))
    _repetition(step, ids, size)
    _common_token(step, batches, sample, eos)
    if step.verdict == "good":
        _shift(step, batches)
        _mask(step, batches)
    if step.verdict == "good":
        _order(step, batches, sample, size, bool(content["train_dataset"]["data_loader"]["shuffle"]))
    shift = step.evidence.get("label_shift_match", {})
    step.summary = (
        f"{len(ids)} rows of {ids.shape[1]} tokens, {step.evidence['distinct_ids']} distinct ids, "
        f"labels shifted by one in {shift.get('1', 0.0):.1%}"
    )


def _range(step: Step, batches: Rows, sample: Rows, vocab: int) -> None:
    for name in ("input_ids", "labels"):
        if name not in batches:
            continue
        both = np.concatenate([batches[name].reshape(-1), sample[name].reshape(-1)])
        if name == "labels" and "loss_mask" in batches:
            weights = np.concatenate([batches["loss_mask"].reshape(-1), sample["loss_mask"].reshape(-1)])
            both = both[weights != 0]
        if not both.size:
            continue
        low, high = int(both.min()), int(both.max())
        step.evidence[f"{name}_range"] = [low, high]
        if low < 0 or high >= vocab:
            share = float(np.mean((both < 0) | (both >= vocab)))
            step.add(
                Finding(
                    "loss.data.ids-out-of-range",
                    "problem",
                    f"{name}: found ids from {low} to {high}, expected 0 to {vocab - 1} (vocab_size {vocab})",
                    cause="the data was made with another tokenizer, or its padding id lies outside; on a CPU such a "
                    "lookup reads zeros without a word",
                    remedy="tokenize again with the model's tokenizer, or correct vocab_size",
                    evidence=f"{share:.2%} of the tokens",
                )
            )


def _length(step: Step, ids: np.ndarray, seq_length: int | None) -> None:
    if seq_length and ids.shape[1] != seq_length:
        step.add(
            Finding(
                "loss.data.length",
                "problem",
                f"records of {ids.shape[1]} tokens, model_config.seq_length is {seq_length}",
                remedy="migrate again with this --seq-length",
            )
        )


def _repetition(step: Step, ids: np.ndarray, size: int) -> None:
    """The same row, or the same batch, over and over."""
    _, counts = np.unique(ids, axis=0, return_counts=True)
    repeated = 1.0 - len(counts) / len(ids)
    step.evidence["repeated_rows"] = repeated
    same_token = float(np.mean((ids == ids[:, :1]).mean(axis=1) >= CONSTANT))
    step.evidence["constant_rows"] = same_token
    if same_token > 0.5:
        step.add(
            Finding(
                "loss.data.constant",
                "problem",
                f"{same_token:.0%} of the rows hold one token all through",
                cause="padding, or a failed tokenization, was taken for text",
                remedy="look at the corpus and tokenize again",
            )
        )
    elif repeated > DUPLICATES and len(ids) >= 2 * size:
        step.add(
            Finding(
                "loss.data.duplicates",
                "problem",
                f"{repeated:.0%} of the rows in {len(ids) // size} batches are repetitions",
                cause="the same batch or document comes again and again: the model learns it by heart",
                remedy="remove duplicates from the corpus; check repeat and the sampler",
            )
        )


def _common_token(step: Step, batches: Rows, sample: Rows, eos: int | None) -> None:
    """The share of the most frequent token among those that count."""
    ids = batches.ids
    counted = ids[batches["loss_mask"] != 0] if "loss_mask" in batches and batches["loss_mask"].any() else ids
    values, counts = np.unique(counted, return_counts=True)
    top, share = int(values[np.argmax(counts)]), float(counts.max() / counted.size)
    step.evidence["most_common"] = {"id": top, "share": share, "is_eos": top == eos}
    if share > PAD_SHARE and step.evidence.get("constant_rows", 0.0) <= 0.5:
        name = "the end-of-text token" if top == eos else "probably padding or <unk>"
        step.add(
            Finding(
                "loss.data.padding",
                "problem",
                f"token {top} ({name}) is {share:.0%} of what counts in the loss",
                cause="the model learns to predict it and little else",
                remedy="give padding loss_mask 0, pack documents, or use the tokenizer that fits the text",
            )
        )


def _shift(step: Step, batches: Rows) -> None:
    """labels[t] must be the token after input_ids[t]."""
    if "labels" not in batches:
        return
    ids, labels = batches.ids, batches["labels"]
    mask = batches["loss_mask"] != 0 if "loss_mask" in batches else np.ones_like(ids, bool)
    match = {}
    for shift in (-1, 0, 1, 2):
        if shift >= ids.shape[1]:
            continue
        own = slice(None, ids.shape[1] - shift) if shift > 0 else slice(-shift, None)
        other = slice(shift, None) if shift > 0 else slice(None, ids.shape[1] + shift)
        where = mask[:, own]
        equal = (labels[:, own] == ids[:, other])[where]
        if equal.size:
            match[str(shift)] = float(equal.mean())
    step.evidence["label_shift_match"] = match
    if not match or match.get("1", 1.0) >= SHIFT_GOOD:
        return
    best = max(match, key=lambda key: match[key])
    said = {
        "0": "labels are the inputs themselves: the model learns to copy, and the loss goes to 0",
        "2": "labels are two tokens ahead: they were shifted twice",
        "-1": "labels are the token before: they were shifted the wrong way",
    }
    step.add(
        Finding(
            "loss.data.label-shift",
            "problem",
            f"labels equal the next token in {match.get('1', 0.0):.1%} of the places, expected all of them",
            cause=said.get(best, "") if match[best] >= 0.9 else "labels do not belong to these inputs",
            remedy="labels[t] must be input_ids[t + 1]; mindformers does not shift them for mcore models",
            evidence=f"share of matches by shift: {match}",
        )
    )


def _mask(step: Step, batches: Rows) -> None:
    if "loss_mask" not in batches:
        return
    share = float(np.mean(batches["loss_mask"] != 0))
    step.evidence["loss_mask_share"] = share
    if share < 0.01:
        step.add(
            Finding(
                "loss.data.mask",
                "problem",
                f"loss_mask lets {share:.2%} of the tokens count",
                cause="the loss is a mean over almost nothing",
                remedy="1 means the token counts; check whether the mask is inverted",
            )
        )


def _histogram(rows: np.ndarray, bins: int) -> np.ndarray:
    counts = np.bincount(rows.reshape(-1) % bins, minlength=bins).astype(np.float64)
    return counts / counts.sum()


def _order(step: Step, batches: Rows, sample: Rows, size: int, shuffled: bool) -> None:
    """Do batches look like the training set, or like one corner of it after another?

    The distance is the total variation between token histograms, of one batch (the median over the batches) and of
    all rows read; what each comes to by chance is drawn from random rows of the sample.
    """
    bins = 1024
    whole = _histogram(sample.ids, bins)
    groups = [batches.ids[at : at + size] for at in range(0, len(batches.ids) - size + 1, size)]
    if not groups or len(sample.ids) < 4 * size:
        return

    def distance(rows: np.ndarray) -> float:
        return float(0.5 * np.abs(_histogram(rows, bins) - whole).sum())

    rng = np.random.default_rng(0)

    def by_chance(rows: int) -> np.ndarray:
        return np.array([distance(sample.ids[rng.choice(len(sample.ids), rows, False)]) for _ in range(400)])

    one = by_chance(size)
    pooled_rows = min(size * len(groups), len(sample.ids) // 2)
    measures = {
        "of a batch": (
            float(np.median([distance(group) for group in groups])),
            np.median(rng.choice(one, (2000, len(groups))), axis=1),
        ),
        f"of the first {pooled_rows} rows": (distance(batches.ids[:pooled_rows]), by_chance(pooled_rows)),
    }
    step.evidence["distance_from_training_set"] = {
        name: {"found": found, "by_chance": float(np.median(chance))}
        for name, (found, chance) in measures.items()
    }
    far = [
        (name, found / float(np.median(chance)))
        for name, (found, chance) in measures.items()
        if found > max(float(np.quantile(chance, 0.999)), float(np.median(chance)) * ORDER_FACTOR)
    ]
    if far:
        name, times = max(far, key=lambda item: item[1])
        step.add(
            Finding(
                "loss.data.order",
                "problem",
                f"the tokens {name} are {times:.1f} times as far from the training set as those of random rows",
                cause="the data comes sorted"
                + ("" if shuffled else ", and train_dataset.data_loader.shuffle is false")
                + ": the model sees one kind of text after another",
                remedy="shuffle: true"
                if not shuffled
                else "shuffle the corpus itself before it is cut into records",
            )
        )
    elif not shuffled:
        step.add(
            Finding("loss.data.unshuffled", "info", "shuffle is off; the batches look mixed all the same")
        )


def _decode(tokenizer: Path | None, batches: Rows) -> str:
    """The first tokens of the first row as text, where the run has its tokenizer."""
    if tokenizer is None or not tokenizer.is_file():
        return ""
    try:
        from tokenizers import Tokenizer

        return str(Tokenizer.from_file(str(tokenizer)).decode([int(i) for i in batches.ids[0][:48]]))[:400]
    except Exception:
        return ""  # evidence only: a damaged tokenizer is not this step's business
