"""Each verdict with each difference of settings, and what the page makes of it."""

from __future__ import annotations

import numpy as np
import pytest
import yaml

from mindferry.report import collect, page
from mindferry.report.hints import hints
from tests.report.runs import write_run


def pair(tmp_path, settings_before=None, settings_after=None, wait=0.001, **after):
    """Two runs with settings of their own, compared."""
    subjects = []
    for name, changes, more in (("before", settings_before, {}), ("after", settings_after, after)):
        root = write_run(tmp_path / name, **{"seed": 1, **more})
        content = yaml.safe_load((root / "run.yaml").read_text())
        for dotted, value in (changes or {}).items():
            *path, last = dotted.split(".")
            node = content
            for part in path:
                node = node[part]
            node[last] = value
        (root / "run.yaml").write_text(yaml.safe_dump(content))
        subjects.append(collect.gather(root))
    subjects[1].curve.columns["data_time"] = np.full(len(subjects[1].curve), wait)
    return collect.dimensions(*subjects)


BASE = "model.model_config."
ON, OFF = {"recompute_config.recompute": True}, {"recompute_config.recompute": False}
CASES = [
    ({}, {}, {}, []),
    ({}, {}, {"seconds": 0.3, "wait": 0.25}, ["hint_data"]),
    ({}, {}, {"seconds": 0.3}, ["hint_slower"]),
    (OFF, ON, {}, ["hint_no_effect"]),
    (OFF, ON, {"memory": 300 << 20}, []),
    ({}, {BASE + "compute_dtype": "bfloat16"}, {"memory": 600 << 20}, ["hint_no_effect"]),
    (ON, OFF, {"memory": 900 << 20}, ["hint_recompute_off"]),
    ({}, {}, {"memory": 900 << 20}, []),
    ({}, {BASE + "layernorm_compute_type": "float16"}, {"slope": 0.001}, ["hint_precision"]),
    ({}, {}, {"slope": 0.001}, ["hint_parted"]),
]


@pytest.mark.parametrize(("before", "after", "changes", "expected"), CASES)
def test_hints(tmp_path, before, after, changes, expected):
    found = pair(tmp_path, before, after, **changes)
    assert hints(found) == expected
    text = page.render(found.after, [found.before], [])
    for key in expected:
        assert page.say(key) in text


def test_a_doubled_rate(tmp_path):
    found = pair(tmp_path, slope=0.001)
    found.convergence.lr_max_rel_diff = 1.0
    assert hints(found) == ["hint_rate"]
