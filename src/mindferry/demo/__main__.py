"""python -m mindferry.demo DIR: build a source, migrate, verify, train; say what was done and where it is."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from mindferry.cli.console import Progress, say

TRAIN_STEPS = 100


def _mindferry(*arguments: str) -> dict:
    """Run one command as a person would, and return its JSON."""
    say(f"$ mindferry {shlex.join(arguments)}")
    done = subprocess.run(
        [sys.executable, "-m", "mindferry", *arguments, "--json"],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if not done.stdout.strip():
        sys.exit(f"the command ended with {done.returncode} and said nothing")
    answer = json.loads(done.stdout)
    if done.returncode:
        for finding in answer["findings"]:
            say(f"{finding['severity']}: {finding['message']} {finding['remedy']}")
        sys.exit(done.returncode)
    return answer


def _source(directory: Path) -> list[float]:
    from mindferry.demo import source

    steps = 60
    say(f"building a small GPT-2 with transformers and training it a little: {directory}")
    with Progress("source", total=steps, unit="steps") as bar:
        return source.build(
            directory, steps=steps, on_step=lambda step, loss: bar.advance(note=f"loss {loss:.3f}")
        )


def main(root: Path) -> None:
    """Everything, in a fresh `root`."""
    from mindferry.demo import source

    began = time.monotonic()
    if root.exists():
        shutil.rmtree(root)
    gpt2, corpus, run = root / "gpt2", root / "corpus", root / "run"
    source_losses = _source(gpt2)
    documents = source.write_corpus(corpus)
    say(
        f"source: loss {source_losses[0]:.3f} -> {source_losses[-1]:.3f}; corpus: {documents} documents in {corpus}"
    )

    options = [
        "--seq-length",
        "128",
        "--batch-size",
        "4",
        "--steps",
        str(TRAIN_STEPS),
        "--learning-rate",
        "5e-4",
    ]
    migrated = _mindferry("migrate", str(gpt2), "--data", str(corpus), "--out", str(run), *options)
    say(f"migrated: {migrated['weights']['used']} tensors, {migrated['data']['tokens']:,} tokens")
    verified = _mindferry("verify", str(run), "--against", str(gpt2))
    say(
        f"verified: {verified['verdict']}; logits differ by {verified['logits_max_abs_diff']:.1e}, gradients by "
        f"{verified['grad_max_rel_diff']:.1e}, {verified['training']['steps']} training steps by "
        f"{verified['training']['max_loss_diff']:.1e}"
    )
    trained = _mindferry("train", str(run))
    lowered = trained["last_loss"] < source_losses[0]
    print(
        f"\nalignment     {'aligned' if verified['verdict'] == 'good' else 'NOT aligned'}\n"
        f"training      {TRAIN_STEPS} steps in MindSpore: loss {trained['first_loss']:.3f} -> "
        f"{trained['last_loss']:.3f} ({'below' if lowered else 'NOT below'} the source's starting loss "
        f"{source_losses[0]:.3f})\n"
        f"source        {gpt2}\n"
        f"run           {run}  (run.yaml, model/, data/, migration.json)\n"
        f"metrics       {trained['metrics']}\n"
        f"checkpoint    {trained['checkpoint']}\n"
        f"took          {time.monotonic() - began:.0f} s"
    )
    if not lowered:
        sys.exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "demo"))
