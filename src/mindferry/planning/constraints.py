"""The rules a run's YAML must keep, with what mindformers or MindSpore would say and when.

Each rule looks at a `Layout` (what a YAML says, however wrong) and yields violations. The messages are those
of mindformers 1.9.0 and MindSpore 2.9.0 where they have one, so that people find them again; rules that only
this planner has say what would go wrong instead.
"""

from __future__ import annotations

from mindferry.planning import rules_model, rules_run
from mindferry.planning.layout import BEFORE, BUILD, COMPILE, SILENT, Layout, Rule, Violation

RULES: tuple[Rule, ...] = (*rules_model.RULES, *rules_run.RULES)
_ORDER = {BEFORE: 0, BUILD: 1, COMPILE: 2, SILENT: 3}


def check(layout: Layout) -> list[Violation]:
    """Every violation, problems first, in the order in which a run would meet them.

    Degrees that are no positive integers end the check: nothing divides by them.
    """
    first = list(RULES[0].violations(layout))
    found = first or [item for rule in RULES for item in rule.violations(layout)]
    return sorted(found, key=lambda v: (v.severity != "problem", _ORDER[v.when]))


def problems(layout: Layout) -> list[Violation]:
    """The violations that stop or spoil a run."""
    return [item for item in check(layout) if item.severity == "problem"]
