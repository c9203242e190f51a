"""What bench.json says about layers and operators, as the page shows it; whatever is broken in it is left out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from mindferry.errors import printable
from mindferry.report import plots

MAX_LAYERS, MAX_OPERATORS = 40, 15
ROW, NAME_WIDTH = 22, 210


def _positive(value: Any) -> float:
    """A number above 0 that any machine could have (1e-30 to 1e30), else NaN."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return number if 1e-30 < number < 1e30 else math.nan


@dataclass(frozen=True)
class LayerRow:
    """One part of the model: seconds of a micro-batch; the roofline's values are NaN or "" where it has none.

    Attributes:
        roof_seconds: what forward and backward would take on the roof.
        intensity: FLOP/byte; achieved: FLOP/s; share: of the roof; bound: "compute" or "memory".
    """

    name: str
    forward: float
    backward: float
    roof_seconds: float = math.nan
    intensity: float = math.nan
    achieved: float = math.nan
    share: float = math.nan
    bound: str = ""


def layer_rows(bench: dict[str, Any]) -> list[LayerRow]:
    """The parts of the model in bench.json, at most MAX_LAYERS."""
    rows = []
    stored = bench.get("layers")
    for row in stored if isinstance(stored, list) else []:
        if not isinstance(row, dict):
            continue
        forward, both = _positive(row.get("forward_seconds")), _positive(row.get("both_seconds"))
        if not (math.isfinite(forward) and math.isfinite(both)):
            continue
        roof = row.get("roofline")
        roof = roof if isinstance(roof, dict) else {}
        limit = _positive(roof.get("roof_flops_per_second"))
        rows.append(
            LayerRow(
                printable(row.get("name"))[:60],
                forward,
                max(both - forward, 0.0),
                _positive(roof.get("flops")) / limit,
                _positive(roof.get("intensity")),
                _positive(roof.get("achieved_flops_per_second")),
                _positive(roof.get("share_of_roof")),
                roof["bound"] if roof.get("bound") in ("compute", "memory") else "",
            )
        )
    return rows[:MAX_LAYERS]


def bars(ident: str, rows: list[LayerRow]) -> Markup:
    """A bar a part: forward, then backward, and a mark at the time it would take on the roof."""
    longest = max(row.forward + row.backward for row in rows)
    width, height = plots.WIDTH, ROW * len(rows) + 8
    scale = (width - NAME_WIDTH - 14) / max(longest, 1e-12)
    out = [
        f'<svg class="plot" viewBox="0 0 {width} {height}" role="img" aria-labelledby="{escape(ident)}-caption">'
    ]
    for number, row in enumerate(rows):
        y = 4 + ROW * number
        out.append(
            f'<text x="{NAME_WIDTH - 8}" y="{y + 15}" text-anchor="end">{escape(row.name[:32])}</text>'
        )
        x = float(NAME_WIDTH)
        for colour, seconds in enumerate((row.forward, row.backward)):
            out.append(
                f'<rect class="f{colour}" x="{x:.1f}" y="{y + 3}" width="{seconds * scale:.1f}" height="{ROW - 6}"/>'
            )
            x += seconds * scale
        if math.isfinite(row.roof_seconds):
            at = NAME_WIDTH + min(row.roof_seconds, longest) * scale
            out.append(f'<line class="roof" x1="{at:.1f}" x2="{at:.1f}" y1="{y}" y2="{y + ROW}"/>')
    return Markup("".join(out) + "</svg>")  # noqa: S704 - every text in it went through escape


def roofline(
    ident: str, rows: list[LayerRow], peak: float, bandwidth: float, x_label: Markup, y_label: str
) -> Markup:
    """FLOP/s over FLOP a byte, both logarithmic: the roof of the machine and a point a part."""
    points = [row for row in rows if math.isfinite(row.intensity) and math.isfinite(row.achieved)]
    ridge = peak / bandwidth
    low_x = math.floor(math.log10(min([ridge / 10, *(row.intensity for row in points)])))
    high_x = math.ceil(math.log10(max([ridge * 10, *(row.intensity for row in points)])))
    low_y = math.floor(math.log10(min([peak / 100, *(row.achieved for row in points)])))
    high_y = math.ceil(math.log10(max([peak * 1.5, *(row.achieved for row in points)])))

    def place(x: float, y: float) -> tuple[float, float]:
        left, right, top, bottom = plots.LEFT, plots.RIGHT, plots.TOP, plots.BOTTOM
        across = (math.log10(x) - low_x) / (high_x - low_x)
        up = (math.log10(y) - low_y) / (high_y - low_y)
        return left + across * (plots.WIDTH - left - right), plots.HEIGHT - bottom - up * (
            plots.HEIGHT - top - bottom
        )

    width, height = plots.WIDTH, plots.HEIGHT
    out = [
        f'<svg class="plot" viewBox="0 0 {width} {height}" role="img" aria-labelledby="{escape(ident)}-caption">'
    ]
    for power in range(low_y, high_y + 1):
        x, y = place(10.0**low_x, 10.0**power)
        out.append(f'<line class="grid" x1="{x:.1f}" x2="{width - plots.RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        shown = plots.text_of(10.0 ** (power - 9))
        out.append(f'<text x="{x - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{shown}</text>')
    for power in range(low_x, high_x + 1):
        x, _ = place(10.0**power, 10.0**low_y)
        out.append(
            f'<text x="{x:.1f}" y="{height - plots.BOTTOM + 18}" text-anchor="middle">'
            f"{plots.text_of(10.0**power)}</text>"
        )
    start = max(10.0**low_x, 10.0**low_y / bandwidth)
    roof = [place(start, start * bandwidth), place(ridge, peak), place(10.0**high_x, peak)]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in roof)
    out.append(f'<path class="line s1" d="M{path}"/>')
    for row in points:
        x, y = place(row.intensity, row.achieved)
        out.append(
            f'<circle class="f0" cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{escape(row.name)}</title></circle>'
        )
    middle = (width + plots.LEFT - plots.RIGHT) / 2
    out.append(f'<text x="{middle}" y="{height - 4}" text-anchor="middle">{escape(x_label)}</text>')
    out.append(
        f'<text x="14" y="{height / 2}" text-anchor="middle" transform="rotate(-90 14 {height / 2})">'
        f"{escape(y_label)}</text></svg>"
    )
    return Markup("".join(out))  # noqa: S704 - every text in it went through escape


def view(bench: dict[str, Any], x_label: Markup) -> dict[str, Any] | None:
    """Everything the page shows of layers and operators; None where bench.json has neither."""
    rows = layer_rows(bench)
    stored = bench.get("operators")
    found = stored if isinstance(stored, dict) else {}
    tables = {
        name: [
            (
                printable(row.get("name"))[:60],
                row.get("count"),
                row.get("seconds"),
                _positive(row.get("share")),
            )
            for row in (found[name] if isinstance(found.get(name), list) else [])
            if isinstance(row, dict)
        ][:MAX_OPERATORS]
        for name in ("by_type", "by_place")
    }
    if not rows and not tables["by_type"]:
        return None
    peak = _positive(bench.get("gemm_flops_per_second"))
    bandwidth = _positive(bench.get("memory_bytes_per_second"))
    drawn = math.isfinite(peak) and math.isfinite(bandwidth) and any(math.isfinite(r.intensity) for r in rows)
    return {
        "rows": rows,
        "bars": bars("layer-times", rows) if rows else "",
        "roofline": roofline("roofline", rows, peak, bandwidth, x_label, "GFLOP/s") if drawn else "",
        "peak": peak,
        "bandwidth": bandwidth,
        "between": found.get("between_seconds"),
        **tables,
    }
