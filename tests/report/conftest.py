"""Pages of runs with and without everything, and one browser for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindferry.report import collect, page
from tests.report import browser, runs

NASTY = "<img src=x onerror=alert(1)>\x1b[31m\u202e&\"'"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("report")
    runs.write_run(root / "before", slope=0.002, seconds=0.2, memory=900 << 20, seed=1)
    runs.write_run(
        root / "after", slope=0.002, seconds=0.1, memory=500 << 20, seed=1, verify=True, bench=True
    )
    runs.write_run(root / "nasty", nasty=NASTY, seed=2, verify=True)
    for name, others in (("after", ["before"]), ("nasty", [])):
        subject = collect.gather(root / name)
        text = page.render(subject, [collect.gather(root / o) for o in others], [])
        (root / f"{name}-report.html").write_text(text, encoding="utf-8")
    return root


@pytest.fixture(scope="module")
def chromium():
    if browser.executable() is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    shown = browser.Browser()
    yield shown
    shown.close()
