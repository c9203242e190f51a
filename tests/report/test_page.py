"""The page in a real browser, and what it says when a run is broken."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from mindferry.errors import UsageError
from mindferry.report import collect, page
from tests.report import runs


def test_small_and_self_contained(folder):
    text = (folder / "after-report.html").read_text(encoding="utf-8")
    assert len(text.encode()) < 1_000_000
    targets = re.findall(r"""(?:src|href)\s*=\s*["']?([^"'\s>]*)""", text)
    assert [target for target in targets if not target.startswith(("#", "data:"))] == []
    assert "@import" not in text
    assert "url(" not in text
    assert "layer_spec" in text
    assert "float16 against float32" in text
    assert "回退" in text
    assert "run.yaml: broken" not in text


def test_pictures_of_the_strategy(tmp_path, chromium):
    """Drawn from run.yaml: a row of memory a stage, and the schedule of the pipeline."""
    root = runs.write_run(tmp_path / "cluster", seed=3)
    content = yaml.safe_load((root / "run.yaml").read_text(encoding="utf-8"))
    content["use_parallel"] = True
    content["model"]["model_config"]["compute_dtype"] = "bfloat16"
    content["parallel"].update(parallel_mode=1, full_batch=True)
    content["parallel_config"].update(data_parallel=2, model_parallel=2, pipeline_stage=2, micro_batch_num=4)
    (root / "run.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    subject = collect.gather(root)
    assert subject.notes == []
    assert subject.plan["memory"].count("stage ") >= 2
    (tmp_path / "report.html").write_text(page.render(subject, [], []), encoding="utf-8")
    chromium.open(tmp_path / "report.html")
    assert chromium.complaints() == []
    sizes = chromium.eval(
        "[...document.querySelectorAll('figure img')].map(i => [i.alt, i.naturalWidth > 300])"
    )
    assert [tuple(size) for size in sizes] == [
        ("Memory of each stage", True),
        ("Pipeline schedule: forward blue, backward orange, idle white", True),
    ]
    content["parallel_config"]["pipeline_stage"] = 64
    (root / "run.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    broken = collect.gather(root)
    assert broken.plan == {}
    assert page.render(broken, [], [])


def test_every_text_is_in_both_languages():
    for key, texts in page.words().items():
        assert len(texts) == 2, key
        names = [sorted(re.findall(r"{(\w+)}", text)) for text in texts]
        assert names[0] == names[1], key
        assert texts[0].isascii() or key == "language", key


def test_opens_without_a_complaint_and_switches(folder, chromium, tmp_path):
    chromium.open(folder / "after-report.html")
    assert chromium.complaints() == []
    visible = "[...document.querySelectorAll('h2')].map(h => h.innerText).join('|')"
    english = chromium.eval(visible)
    assert "Migration decisions" in english
    assert "迁移" not in english
    chromium.eval("document.querySelector('[data-language=zh]').click()")
    chinese = chromium.eval(visible)
    assert "迁移决策" in chinese
    assert "Migration" not in chinese
    assert chromium.eval("document.documentElement.lang") == "zh"
    assert (
        chromium.eval("document.querySelector('[data-language=zh]').getAttribute('aria-pressed')") == "true"
    )
    background = "getComputedStyle(document.body).backgroundColor"
    chromium.eval("document.querySelector('[data-theme=light]').click()")
    light = chromium.eval(background)
    chromium.eval("document.querySelector('[data-theme=dark]').click()")
    assert chromium.eval(background) != light
    chromium.screenshot(tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 20_000
    assert chromium.complaints() == []


def test_nasty_names_stay_text(folder, chromium):
    text = (folder / "nasty-report.html").read_text(encoding="utf-8")
    assert "<img src=x" not in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    chromium.open(folder / "nasty-report.html")
    assert chromium.complaints() == []
    assert chromium.eval("document.images.length") == 0
    assert "onerror=alert(1)" in chromium.eval("document.body.textContent")


def test_verdicts_in_three_dimensions(folder):
    pair = collect.dimensions(collect.gather(folder / "before"), collect.gather(folder / "after"))
    assert (pair.speed.verdict, pair.memory, pair.convergence.verdict) == ("faster", "less", "same")
    assert pair.speed.ratio == pytest.approx(2.0, rel=0.1)
    assert pair.memory_after == 500 << 20


def test_broken_runs_get_a_page_that_says_so(tmp_path):
    run = runs.write_run(tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    del lines[40:50]
    lines[20] = lines[20].replace('"loss": ', '"loss": "nan", "was": ')
    (run / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 300, "lo')
    (run / "migration.json").write_text("{broken")
    (run / "verify.json").write_text('{"layers": 3, "gradients": [1, {"name": null}], "training": []}')
    (run / "bench.json").write_text('{"rows": {"a": 1}, "ratios": "x", "memory_parts": {"a": "y"}}')
    (run / "tune.jsonl").write_text('{"change": 3}\n[]\n{"torn')
    text = page.render(collect.gather(run), [], [])
    for said in ("1 broken lines left out", "10 steps between 1 and 300 are missing", "1 of 290 steps have no finite",
                 "migration.json: broken", "tune.jsonl: 1 broken"):  # fmt: skip
        assert said in text


def test_empty_and_untrained_runs(tmp_path):
    run = runs.write_run(tmp_path / "run")
    (run / "metrics.jsonl").write_text("")
    assert "no training step in it" in page.render(collect.gather(run), [], [])
    (run / "metrics.jsonl").unlink()
    (run / "migration.json").unlink()
    subject = collect.gather(run)
    assert ("metrics.jsonl", "absent_metrics") in subject.missing
    assert "not trained yet" in page.render(subject, [collect.gather(run)], [])


def test_other_models_are_refused_unless_forced(tmp_path):
    one, two = (runs.write_run(tmp_path / name) for name in ("one", "two"))
    content = json.loads((two / "migration.json").read_text())
    content["model"]["hidden_size"] = 999
    (two / "migration.json").write_text(json.dumps(content))
    subjects = collect.gather(one), collect.gather(two)
    with pytest.raises(UsageError, match=r"hidden_size.*999"):
        collect.check_comparable(subjects[0], [subjects[1]], False)
    forced = collect.check_comparable(subjects[0], [subjects[1]], True)
    assert "hidden_size" in page.render(subjects[0], [subjects[1]], forced)
