"""Line plots and bars as inline SVG; colours come from the page's style sheet."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup, escape

WIDTH, HEIGHT = 760, 300
LEFT, RIGHT, TOP, BOTTOM = 66, 14, 12, 40
MAX_POINTS = 500
MAX_SERIES = 6


@dataclass(frozen=True)
class Series:
    """A line: [N] x ascending and [N] y; NaN interrupts it. `faint` draws it thin, as the raw data behind a mean."""

    label: str
    x: np.ndarray
    y: np.ndarray
    colour: int = 0
    faint: bool = False


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers inside [low, high], about `count` of them."""
    span = high - low
    if not (math.isfinite(span) and span > 0):
        return [low]
    raw = span / count
    size = 10.0 ** math.floor(math.log10(raw))
    step = size * next((m for m in (1, 2, 5) if raw <= m * size), 10)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(k * step, 12) for k in range(first, last + 1)]


def thin(x: np.ndarray, y: np.ndarray, limit: int = MAX_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """At most about `limit` points that keep every bucket's lowest and highest value and its gaps."""
    if len(x) <= limit:
        return x, y
    keep: list[int] = []
    for part in np.array_split(np.arange(len(x)), limit // 3):
        values = y[part]
        bad = np.flatnonzero(~np.isfinite(values))
        chosen = {int(part[bad[0]])} if len(bad) else set()
        if len(bad) < len(part):
            chosen |= {int(part[np.nanargmin(values)]), int(part[np.nanargmax(values)])}
        keep += sorted(chosen)
    return x[keep], y[keep]


def _range(values: list[np.ndarray], robust: bool) -> tuple[float, float]:
    joined = np.concatenate([v[np.isfinite(v)] for v in values]) if values else np.zeros(0)
    if not len(joined):
        return 0.0, 1.0
    low, high = float(joined.min()), float(joined.max())
    if robust and len(joined) > 20:
        # The compiling first step would flatten everything else.
        high = min(high, 3 * float(np.percentile(joined, 95)))
        low = min(low, high)
    margin = (high - low) * 0.05 or max(abs(high) * 0.05, 1e-12)
    return low - margin, high + margin


def _path(series: Series, place_x: object, place_y: object) -> str:
    x, y = thin(series.x.astype(float), series.y.astype(float))
    parts, pen = [], "M"
    for a, b in zip(x, y, strict=True):
        if not math.isfinite(b):
            pen = "M"
            continue
        parts.append(f"{pen}{place_x(a):.1f} {place_y(b):.1f}")  # type: ignore[operator]
        pen = "L"
    kind = " faint" if series.faint else ""
    return f'<path class="line s{series.colour % MAX_SERIES}{kind}" d="{"".join(parts)}"/>'


def text_of(value: float) -> str:
    """A number as an axis shows it."""
    if value and (abs(value) < 1e-3 or abs(value) >= 1e6):
        return f"{value:.1e}"
    return f"{value:.6g}"


def line_plot(
    ident: str,
    series: list[Series],
    *,
    x_label: Markup,
    y_label: str,
    mark: int | None = None,
    robust: bool = False,
) -> Markup:
    """An SVG with one line a series, named by the element with id `ident`-caption; `mark` draws a line at an x."""
    shown = [s for s in series if len(s.x)]
    low_x, high_x = _range([s.x.astype(float) for s in shown], False)
    low, high = _range([s.y.astype(float) for s in shown], robust)

    def place_x(value: float) -> float:
        return LEFT + (value - low_x) / (high_x - low_x) * (WIDTH - LEFT - RIGHT)

    def place_y(value: float) -> float:
        value = min(max(value, low), high)
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    out = [
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{escape(ident)}-caption">'
    ]
    for value in ticks(low, high):
        y = place_y(value)
        out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text_of(value)}</text>')
    for value in ticks(low_x, high_x, 8):
        if value == int(value):
            out.append(
                f'<text x="{place_x(value):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{int(value)}</text>'
            )
    out.append(
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>'
    )
    out.append(
        f'<text x="{(WIDTH + LEFT - RIGHT) / 2}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x_label)}</text>'
    )
    if y_label:
        out.append(
            f'<text x="14" y="{HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 14 {HEIGHT / 2})">'
            f"{escape(y_label)}</text>"
        )
    if mark is not None:
        x = place_x(mark)
        out.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
    out += [_path(s, place_x, place_y) for s in shown]
    out.append("</svg>")
    return Markup("".join(out))  # noqa: S704 - every text in it went through escape


def stacked_bar(ident: str, parts: list[tuple[Markup | str, float]]) -> Markup:
    """One horizontal bar cut into shares; negative parts are left out."""
    parts = [(name, value) for name, value in parts if value > 0]
    total = sum(value for _, value in parts) or 1.0
    out, x = (
        [f'<svg class="bar" viewBox="0 0 {WIDTH} 34" role="img" aria-labelledby="{escape(ident)}-caption">'],
        0.0,
    )
    for number, (_, value) in enumerate(parts):
        width = value / total * WIDTH
        out.append(
            f'<rect class="f{number % MAX_SERIES}" x="{x:.1f}" y="2" width="{width:.1f}" height="30"/>'
        )
        x += width
    return Markup("".join(out) + "</svg>")  # noqa: S704 - numbers only


def diff_bars(values: list[float], limit: float) -> list[float]:
    """Lengths in percent for a logarithmic bar of each value: 1e-9 is 0, `limit` is 60, capped at 100."""
    lengths = []
    for value in values:
        if not math.isfinite(value):
            lengths.append(100.0)
            continue
        span = math.log10(limit) + 9
        lengths.append(min(100.0, max(0.0, (math.log10(max(value, 1e-9)) + 9) / span * 60)))
    return lengths
