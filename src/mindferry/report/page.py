"""Renders the page: jinja2 with autoescape, inline CSS and SVG, one small inline script, no network."""

from __future__ import annotations

import base64
import hashlib
import math
import platform
from collections.abc import Callable
from functools import cache
from importlib import metadata, resources
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from mindferry import __version__
from mindferry.checking import alignment, convergence, memory, speed
from mindferry.errors import printable
from mindferry.report import collect, layers, plots
from mindferry.report.collect import Dimensions, Subject
from mindferry.report.hints import hints

MAX_ROWS = 400
LANGUAGES = ("en", "zh")
GOOD, BAD, NEUTRAL = "good", "bad", "neutral"


@cache
def words() -> dict[str, list[str]]:
    """Key -> [English, Chinese]."""
    from ruamel.yaml import YAML

    text = resources.files("mindferry.report").joinpath("words.yaml").read_text(encoding="utf-8")
    table: dict[str, list[str]] = YAML(typ="safe").load(text)
    return table


def say(key: str, **values: Any) -> Markup:
    """The text `key` in both languages; the style sheet shows one. Values are escaped."""
    shown = {name: escape(printable(value)) for name, value in values.items()}
    parts = []
    for language, text in zip(LANGUAGES, words()[key], strict=True):
        # Code in `backquotes`, as in the documentation.
        pieces = str(escape(text)).format(**shown).split("`")
        body = "".join(f"<code>{p}</code>" if i % 2 else p for i, p in enumerate(pieces))
        parts.append(f'<span lang="{language}">{body}</span>')
    return Markup("".join(parts))  # noqa: S704 - all parts were escaped


def svg_text(key: str) -> Markup:
    """`say` for a text inside SVG."""
    spans = [
        f'<tspan lang="{lang}">{escape(text)}</tspan>'
        for lang, text in zip(LANGUAGES, words()[key], strict=True)
    ]
    return Markup("".join(spans))  # noqa: S704 - escaped


def value_text(value: Any) -> str:
    """A value of a JSON file as the page shows it, without control characters, at most 300 long."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "—"}[value]
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 100_000 else str(value)
    text = printable(value)
    return text if len(text) <= 300 else text[:297] + "..."


def size_text(value: Any) -> str:
    """Bytes as MiB or GiB."""
    number = _number(value)
    if not math.isfinite(number):
        return "—"
    return f"{number / (1 << 30):.2f} GiB" if number >= 1 << 30 else f"{number / (1 << 20):.1f} MiB"


def seconds_text(value: Any) -> str:
    """Seconds, as ms below one."""
    number = _number(value)
    if not math.isfinite(number):
        return "—"
    return f"{number:.3f} s" if number >= 1 else f"{number * 1e3:.2f} ms"


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def percent_text(value: Any) -> str:
    """A share of 1 in percent."""
    number = _number(value)
    return f"{number:.1%}" if math.isfinite(number) else "—"


def number_text(value: Any) -> str:
    """A difference in scientific notation."""
    number = _number(value)
    return f"{number:.2e}" if math.isfinite(number) else ("—" if math.isnan(number) else "∞")


def rows_of(value: Any) -> list[dict[str, Any]]:
    """The dictionaries in a list from a JSON file; anything else is left out."""
    return [row for row in value if isinstance(row, dict)][:MAX_ROWS] if isinstance(value, list) else []


def convergence_words(found: convergence.Convergence) -> Markup:
    """The verdict in both languages."""
    return say(
        f"conv_{found.verdict}",
        at=found.parted_at,
        points=len(found.steps),
        factor=f"{found.oscillation:.1f}" if found.oscillation is not None else "—",
    )


def speed_words(found: speed.Speed) -> Markup:
    """The verdict in both languages."""
    if found.verdict == "same":
        return say("same_speed", noise=f"±{found.noise:.0%}")
    return say(found.verdict, ratio=f"{found.ratio:.2f}")


def decision_words(value: Any) -> Markup | str:
    """A decision of tune.jsonl; what is none of them stays as it is."""
    key = f"decision_{str(value).replace(' ', '_')}"
    return say(key) if key in words() else value_text(value)


def memory_words(verdict: str) -> Markup:
    return say({"same": "same_memory"}.get(verdict, verdict))


def verdict_words(verdict: Any, ratio: Any) -> Markup | str:
    """A verdict of bench.json in both languages; what is none of them stays as it is."""
    key = {"same": "same_memory"}.get(str(verdict), str(verdict))
    if key not in _TONES and key not in ("same_memory", "undecided"):
        return value_text(verdict)
    return say(key, ratio=f"{_number(ratio):.2f}")


_TONES = {
    "faster": GOOD,
    "less": GOOD,
    "same": GOOD,
    "slower": BAD,
    "more": BAD,
    "oscillating": BAD,
    "diverged": BAD,
}


def tone(verdict: str) -> str:
    """The colour class of a verdict; the words say the same."""
    return _TONES.get(verdict, NEUTRAL)


def _figures(subjects: list[Subject]) -> list[dict[str, Any]]:
    """One figure a logged quantity."""
    figures = []
    for name, unit in (
        ("loss", ""),
        ("lr", ""),
        ("grad_norm", ""),
        ("step_time", "s"),
        ("tokens_per_second", ""),
        ("peak_memory_bytes", "GiB"),
    ):
        shown = [(i, s) for i, s in enumerate(subjects[: plots.MAX_SERIES]) if s.curve.has(name)]
        if not shown:
            continue
        series = []
        for index, subject in shown:
            x, y = subject.curve.steps, subject.curve[name] / ((1 << 30) if unit == "GiB" else 1)
            if name in ("loss", "grad_norm", "step_time", "tokens_per_second") and len(x) > 30:
                series.append(plots.Series(subject.label, x, y, index, faint=True))
                y = np.where(np.isfinite(y), convergence.smooth(y, max(5, len(y) // 20)), math.nan)
            series.append(plots.Series(subject.label, x, y, index))
        figures.append(
            {
                "id": f"plot-{name}",
                "name": name,
                "words": {"tokens_per_second": "tokens", "peak_memory_bytes": "peak"}.get(name, name),
                "svg": plots.line_plot(
                    f"plot-{name}", series, x_label=svg_text("step"), y_label=unit, robust=name == "step_time"
                ),
                "legend": [(i % plots.MAX_SERIES, s.label) for i, s in shown],
                "smoothed": any(s.faint for s in series),
                "table": _sampled(shown, name),
            }
        )
    return figures


def _sampled(shown: list[tuple[int, Subject]], name: str) -> dict[str, Any]:
    """A dozen rows for who cannot see the picture."""
    steps = np.unique(np.concatenate([s.curve.steps for _, s in shown]))
    chosen = steps[np.unique(np.linspace(0, len(steps) - 1, min(12, len(steps))).astype(int))]
    table = []
    for step in chosen:
        cells = []
        for _, subject in shown:
            at = np.searchsorted(subject.curve.steps, step)
            there = at < len(subject.curve.steps) and subject.curve.steps[at] == step
            cells.append(value_text(float(subject.curve[name][at])) if there else "—")
        table.append((int(step), cells))
    return {"head": [s.label for _, s in shown], "rows": table}


def _alignment(subject: Subject) -> dict[str, Any]:
    content = subject.verify
    layers, gradients = rows_of(content.get("layers")), rows_of(content.get("gradients"))
    limit = alignment.LAYER_TOLERANCE
    lengths = plots.diff_bars([_number(row.get("max_rel_diff")) for row in layers], limit)
    worst = sorted(gradients, key=lambda row: -_number(row.get("max_rel_diff")))[:10]
    training = content.get("training")
    stated = content.get("precision")
    half: dict[str, Any] = stated if isinstance(stated, dict) else {}
    return {
        "good": content.get("aligned") is True and content.get("verdict", "good") == "good",
        "first": content.get("first_divergence") or "training",
        "layers": list(zip(layers, lengths, strict=True)),
        "gradients": worst,
        "training": training if isinstance(training, dict) else None,
        "limit": limit,
        "precision": rows_of(half.get("rows")),
        "precision_dtype": half.get("dtype"),
        "precision_first": half.get("first_departure"),
    }


def _tiles(subject: Subject, pairs: list[Dimensions]) -> list[dict[str, Any]]:
    tiles = []
    if subject.verify:
        found = _alignment(subject)
        text = say("aligned") if found["good"] else say("not_aligned", where=found["first"])
        tiles.append({"title": "alignment", "text": text, "tone": GOOD if found["good"] else BAD})
    else:
        tiles.append({"title": "alignment", "text": say("unknown"), "tone": NEUTRAL})
    if pairs:
        pair = pairs[0]
        tiles += [
            {"title": "step_time", "text": speed_words(pair.speed), "tone": tone(pair.speed.verdict)},
            {"title": "memory", "text": memory_words(pair.memory), "tone": tone(pair.memory)},
            {
                "title": "convergence",
                "text": convergence_words(pair.convergence),
                "tone": tone(pair.convergence.verdict),
            },
        ]
        return tiles
    times = collect.warm_step_times(subject.curve)
    finite = times[np.isfinite(times)]
    loss = subject.curve["loss"]
    loss = loss[np.isfinite(loss)]
    texts: list[tuple[str, Markup | str]] = [
        ("step_time", seconds_text(np.median(finite)) if len(finite) else say("unknown")),
        ("memory", size_text(collect.peak_memory(subject.curve))),
        ("loss", f"{loss[0]:.3f} → {loss[-1]:.3f}" if len(loss) else say("unknown")),
    ]
    tiles += [{"title": title, "text": text, "tone": NEUTRAL} for title, text in texts]
    return tiles


def environment() -> list[tuple[str, str]]:
    """Versions and machine."""
    rows = [
        ("mindferry", __version__),
        ("Python", platform.python_version()),
        ("system", platform.platform()),
    ]
    for name in ("mindspore", "mindformers", "torch", "transformers", "numpy"):
        try:
            rows.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    import os

    rows.append(("CPU", f"{_cpu_name()}, {os.cpu_count()} cores"))
    return rows


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as handle:
            for line in handle:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def _memory(subject: Subject) -> dict[str, Any] | None:
    parts = subject.bench.get("memory_parts")
    if not isinstance(parts, dict):
        return None
    rows = [
        (printable(name), _number(value)) for name, value in parts.items() if math.isfinite(_number(value))
    ]
    return {
        "rows": [(i % plots.MAX_SERIES, n, v) for i, (n, v) in enumerate(rows)],
        "svg": plots.stacked_bar("memory-parts", list(rows)),
        "total": sum(v for _, v in rows) or 1.0,
    }


def _script_hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _template() -> Any:
    import jinja2

    env = jinja2.Environment(
        loader=jinja2.PackageLoader("mindferry.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Callable[..., Any]] = {
        "v": value_text,
        "size": size_text,
        "sec": seconds_text,
        "sci": number_text,
        "pct": percent_text,
        "rows": rows_of,
        "plain": printable,
    }
    env.filters.update(filters)
    env.globals.update(
        t=say, tone=tone, rule_speed=speed.RULE, rule_memory=memory.RULE, rule_conv=convergence.RULE
    )
    env.globals.update(decision=decision_words, verdict_words=verdict_words, hints=hints)
    env.globals.update(conv_words=convergence_words, speed_words=speed_words, memory_words=memory_words)
    return env.get_template("report.html.j2")


def render(run: Subject, others: list[Subject], forced: list[str], language: str = "en") -> str:
    """The page about `run`, compared with each of `others`; `forced` says what differs in spite of --force."""
    pairs = [collect.dimensions(other, run) for other in others]
    files = resources.files("mindferry.report").joinpath("templates")
    script = files.joinpath("report.js").read_text(encoding="utf-8").strip()
    pictures = {
        name: "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
        for name, svg in run.plan.items()
    }
    page: str = _template().render(
        run=run,
        others=others,
        subjects=[run, *others],
        forced=forced,
        language=language,
        pairs=pairs,
        tiles=_tiles(run, pairs),
        figures=_figures([run, *others]),
        alignment=_alignment(run) if run.verify else None,
        memory=_memory(run),
        layers=layers.view(run.bench, svg_text("flop_per_byte")),
        environment=environment(),
        plan_pictures=pictures,
        words=words(),
        style=Markup(files.joinpath("report.css").read_text(encoding="utf-8")),  # noqa: S704 - our own file
        script=Markup(script),  # noqa: S704 - our own file
        script_hash=_script_hash(script),
    )
    return page
