"""Sources that are no Hugging Face directory are written as one for PyTorch: straight from their tensors, once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mindferry.checking import sides
from mindferry.sources import open_source
from mindferry.weights import conversion

from ..weights.test_megatron import hf_model, write_megatron
from ..weights.test_nanogpt import checkpoint

torch = pytest.importorskip("torch")


@pytest.fixture
def no_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("converted to mindformers' files on the way")

    monkeypatch.setattr(conversion, "write_checkpoint", refuse)


@pytest.mark.usefixtures("no_conversion")
def test_megatron_shards_become_the_model_they_were_cut_from(tmp_path: Path) -> None:
    hf = hf_model(tmp_path / "hf", "gpt2")
    write_megatron(tmp_path / "meg", hf, "gpt2", tp=2, pp=2, rows=64)
    runnable = sides.huggingface_form(open_source(tmp_path / "meg"), tmp_path / "form")
    model = sides.load_torch_model(runnable)
    for name, value in model.state_dict().items():
        if name != "lm_head.weight":
            np.testing.assert_array_equal(value.numpy(), hf[name], err_msg=name)
    assert runnable.frozen == ()


@pytest.mark.usefixtures("no_conversion")
def test_what_the_source_lacks_is_frozen(tmp_path: Path) -> None:
    """nanoGPT without biases: transformers' class has them, as zeros that must stay zeros."""
    state = checkpoint(tmp_path / "ckpt.pt", bias=False)
    source = open_source(tmp_path / "ckpt.pt", assume={"activation": "gelu_erf"})
    runnable = sides.huggingface_form(source, tmp_path)
    model = sides.load_torch_model(runnable)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name in state if name != "lm_head.weight"}
    assert not any(p.any() for n, p in model.named_parameters() if n not in trained)


def test_verify_opens_the_source_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mindferry.targets.run_directory import RunDirectory

    checkpoint(tmp_path / "ckpt.pt")
    count = []
    real = sides.huggingface_form
    monkeypatch.setattr(sides, "huggingface_form", lambda *a: (count.append(1), real(*a))[1])
    run = RunDirectory(tmp_path)
    with sides.opened(run, tmp_path / "ckpt.pt") as pair:
        with sides.opened(run, tmp_path / "ckpt.pt", pair) as again:
            assert again is pair
        assert (pair.runnable.source.path / "model.safetensors").is_file()
    assert len(count) == 1
    assert not pair.runnable.source.path.exists(), "nothing is left behind"
