"""Makes a small Hugging Face GPT-2 directory: real tokenizer, real weights, trained a little on real text.

The text is the help that Python ships for its own language (pydoc_data.topics, about 0.7 MB of English).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

END_OF_TEXT = "<|endoftext|>"


def corpus_texts() -> list[str]:
    """The topics of Python's own help, one document each."""
    from pydoc_data.topics import topics

    return [text for _, text in sorted(topics.items()) if text.strip()]


def write_corpus(directory: Path) -> int:
    """Write the corpus as text files; returns how many."""
    directory.mkdir(parents=True, exist_ok=True)
    texts = corpus_texts()
    for number, text in enumerate(texts):
        (directory / f"topic-{number:03d}.txt").write_text(text, encoding="utf-8")
    return len(texts)


def train_tokenizer(directory: Path, vocab_size: int) -> Any:
    """A byte-level BPE in GPT-2's format: vocab.json, merges.txt and tokenizer.json."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        corpus_texts(),
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        show_progress=False,
    )
    tokenizer.save_model(str(directory))
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "model_max_length": 1024, "eos_token": END_OF_TEXT}),
        encoding="utf-8",
    )
    return tokenizer


def build(
    directory: Path,
    *,
    n_layer: int = 4,
    n_embd: int = 256,
    n_head: int = 8,
    n_positions: int = 256,
    vocab_size: int = 4096,
    steps: int = 60,
    batch_size: int = 4,
    seq_length: int = 128,
    seed: int = 0,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
    **config: Any,
) -> list[float]:
    """Create `directory` with transformers and train it for `steps` steps; returns the losses.

    `config` goes to transformers.GPT2Config (activation_function, tie_word_embeddings, n_inner, ...).
    """
    import numpy as np
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(directory, vocab_size)
    end = tokenizer.token_to_id(END_OF_TEXT)
    tokens = np.concatenate([[*tokenizer.encode(text).ids, end] for text in corpus_texts()])
    torch.manual_seed(seed)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=tokenizer.get_vocab_size(),
            n_positions=n_positions,
            n_embd=n_embd,
            n_layer=n_layer,
            n_head=n_head,
            bos_token_id=end,
            eos_token_id=end,
            **config,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    choose = np.random.default_rng(seed)
    losses = []
    model.train()
    for step in range(steps):
        starts = choose.integers(0, len(tokens) - seq_length - 1, batch_size)
        batch = torch.tensor(np.stack([tokens[s : s + seq_length] for s in starts]))
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        on_step(step, losses[-1])
    model.save_pretrained(str(directory), safe_serialization=True)
    return losses
