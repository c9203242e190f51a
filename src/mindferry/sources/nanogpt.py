"""Reads nanoGPT's ckpt.pt: `model`, `model_args` and, beside it, perhaps the model.py it ran with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindferry.sources.assemble import Options, assemble
from mindferry.sources.family import Common, declaration
from mindferry.sources.pickled import TorchStore
from mindferry.sources.source import Source

FILE = "ckpt.pt"
MAX_CODE_BYTES = 1 << 20


def is_nanogpt(tree: Any) -> bool:
    """True for what nanoGPT's train.py saves."""
    return isinstance(tree, Mapping) and {"model", "model_args"} <= set(tree)


def open_nanogpt(path: Path, file: Path, tree: Mapping[str, Any], options: Options) -> Source:
    """The model in `file`, whose contents are `tree`."""
    warnings = []
    activation, why = _activation(file)
    if "activation" not in options.assume:
        if activation is None:
            warnings.append(
                "activation is not in the checkpoint; gelu_erf (nn.GELU(), nanoGPT since 2023) is taken. "
                "If its model.py defines new_gelu, give activation=gelu_tanh"
            )
        else:
            options = replace(options, assume={**options.assume, "activation": activation})
            warnings.append(f"activation {activation}: {why}")
    source = assemble(
        path=path,
        format="nanogpt",
        tree=tree["model_args"] if isinstance(tree["model_args"], Mapping) else {},
        family=declaration("nanogpt"),
        shared=Common(),
        origin=f"{file}: model_args",
        inner=TorchStore([(file, tree["model"])]),
        options=options,
        warnings=warnings,
    )
    vocab = source.spec.vocab_size
    if vocab > 50257 and vocab % 64 == 0:
        source.warnings.append(
            f"vocab_size {vocab} is padded; the extra rows take part in the source's softmax, so all are kept"
        )
    return source


def _activation(file: Path) -> tuple[str | None, str]:
    """What a model.py beside the checkpoint, or in the directory above, calls. It is read, never run."""
    for code in (file.parent / "model.py", file.parent.parent / "model.py"):
        try:
            if code.stat().st_size > MAX_CODE_BYTES:
                continue
            text = code.read_text("utf-8", "replace")
        except OSError:
            continue
        text = re.sub(r"#.*", "", text)
        if re.search(r"\bnew_gelu\(|approximate\s*=\s*['\"]tanh['\"]", text):
            return "gelu_tanh", f"read in {code}"
        if re.search(r"\bGELU\(\s*\)|\bgelu\(", text):
            return "gelu_erf", f"read in {code}"
    return None, ""
