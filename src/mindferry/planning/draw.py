"""SVG pictures: the pipeline's schedule, and memory bars a stage. Plain text, no plotting library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from mindferry.planning.estimate import MEMORY_PARTS, Estimate

_COLOURS = {
    "parameters": "#4c72b0", "gradients": "#dd8452", "optimizer_states": "#55a868",
    "accumulated_gradients": "#c44e52", "gathered_weights": "#8172b3", "activations": "#937860",
    "attention_mask": "#da8bc3", "logits": "#8c8c8c",
}  # fmt: skip
_FORWARD, _BACKWARD = ("#a6c8ff", "#6f9fe8"), ("#ffd6a5", "#f2a65a")
MAX_BLOCKS = 8000


@dataclass(frozen=True)
class Block:
    """One piece of work: `kind` "F" or "B" of micro-batch `micro` in chunk `chunk`, from `start` for
    `length`."""

    stage: int
    kind: str
    micro: int
    chunk: int
    start: float
    length: float


def _order(stage: int, p: int, v: int, m: int) -> list[tuple[str, int, int]]:
    """(kind, micro-batch, chunk) in the order in which a stage works: 1F1B, interleaved when v > 1."""
    total = m * v
    if v == 1:
        warm = min(p - stage - 1, total)
    else:
        warm = min(2 * (p - stage - 1) + (v - 1) * p, total)

    def item(kind: str, k: int) -> tuple[str, int, int]:
        if v == 1:
            return kind, k, 0
        group, inside = divmod(k, p * v)
        chunk = inside // p
        return kind, group * p + inside % p, chunk if kind == "F" else v - 1 - chunk

    out = [item("F", k) for k in range(warm)]
    for k in range(total - warm):
        out += [item("F", warm + k), item("B", k)]
    return out + [item("B", k) for k in range(total - warm, total)]


def schedule(
    stages: int,
    micro_batches: int,
    virtual: int = 1,
    forward: Sequence[float] = (),
    backward: Sequence[float] = (),
) -> list[Block]:
    """When each stage works on what, from the dependences of 1F1B; times of one micro-batch and stage.

    Args:
        forward, backward: seconds a stage for one micro-batch (all chunks together); 1 and 2 unless given.

    Interleaving needs micro_batches to be a multiple of the stages.
    """
    p, v, m = stages, virtual, micro_batches
    f = list(forward) or [1.0] * p
    b = list(backward) or [2.0] * p
    queues = [_order(i, p, v, m) for i in range(p)]
    clock = [0.0] * p
    done: dict[tuple[str, int, int, int], float] = {}
    blocks: list[Block] = []
    position = [0] * p
    while any(position[i] < len(queues[i]) for i in range(p)):
        moved = False
        for i in range(p):
            while position[i] < len(queues[i]):
                kind, micro, chunk = queues[i][position[i]]
                need = _needs(kind, micro, chunk, i, p, v)
                if need is not None and need not in done:
                    break
                start = max(clock[i], done[need] if need is not None else 0.0)
                length = (f if kind == "F" else b)[i] / v
                blocks.append(Block(i, kind, micro, chunk, start, length))
                clock[i] = done[(kind, micro, chunk, i)] = start + length
                position[i] += 1
                moved = True
        if not moved:
            raise ValueError(f"{p} stages, {v} virtual, {m} micro-batches: the order waits for itself")
    return blocks


def _needs(kind: str, micro: int, chunk: int, stage: int, p: int, v: int) -> tuple[str, int, int, int] | None:
    if kind == "F":
        if stage > 0:
            return "F", micro, chunk, stage - 1
        return ("F", micro, chunk - 1, p - 1) if chunk else None
    if stage < p - 1:
        return "B", micro, chunk, stage + 1
    return ("B", micro, chunk + 1, 0) if chunk < v - 1 else ("F", micro, chunk, stage)


def schedule_svg(
    stages: int,
    micro_batches: int,
    virtual: int = 1,
    forward: Sequence[float] = (),
    backward: Sequence[float] = (),
) -> str:
    """The schedule as an SVG: a row a stage, forward blue, backward orange, white is idle.

    Of many micro-batches only as many are drawn as show ramp, steady state and end.
    """
    shown = micro_batches
    # one round of all stages is the least that shows a steady state; more only as long as it stays readable
    while shown > stages and stages * shown * virtual * 2 > MAX_BLOCKS:
        shown = max(stages, shown // 2 // stages * stages)
    blocks = schedule(stages, shown, virtual, forward, backward)
    end = max(block.start + block.length for block in blocks)
    width, left, row = 960.0, 70.0, 26
    scale = (width - left - 10) / end
    height = stages * row + 60
    busy = sum(block.length for block in blocks) / (end * stages)
    title = f"{stages} stages, {micro_batches} micro-batches" + (
        f", {virtual} virtual stages" if virtual > 1 else ""
    )
    if shown < micro_batches:
        title += f" ({shown} drawn)"
    parts = [
        _open(width, height),
        _text(left, 18, f"{title}: idle {100 * (1 - busy):.1f} % of what is drawn"),
    ]
    for i in range(stages):
        parts.append(_text(4, 30 + i * row + 16, f"stage {i}"))
    for block in blocks:
        colours = _FORWARD if block.kind == "F" else _BACKWARD
        x, y, w = left + block.start * scale, 30 + block.stage * row, block.length * scale
        parts.append(
            f'<rect x="{x:.2f}" y="{y}" width="{max(w - 0.4, 0.2):.2f}" height="{row - 4}" '
            f'fill="{colours[block.chunk % 2]}"><title>{block.kind}{block.micro} chunk '
            f"{block.chunk}</title></rect>"
        )
        if w > 14:
            parts.append(_text(x + 3, y + 15, str(block.micro), 10))
    parts.append(
        _text(left, height - 10, "forward blue, backward orange; darker: every other virtual stage", 11)
    )
    return "".join([*parts, "</svg>\n"])


def memory_svg(estimate: Estimate) -> str:
    """Stacked memory bars, one a stage, against what the device offers."""
    total, usable = estimate.total_bytes, estimate.usable_bytes
    stages, row, left, width = len(total), 24, 70.0, 960.0
    top = max(float(total.max()), float(usable)) * 1.02
    scale = (width - left - 20) / top
    height = 44 + stages * row + 60
    parts = [_open(width, height), _text(left, 18, escape(f"memory a rank: {estimate.strategy.label()}"))]
    for i in range(stages):
        x, y = left, 30 + i * row
        parts.append(_text(4, y + 15, f"stage {i}"))
        for name in MEMORY_PARTS:
            size = float(estimate.memory[name][i])
            if size <= 0:
                continue
            parts.append(
                f'<rect x="{x:.2f}" y="{y}" width="{size * scale:.2f}" height="{row - 4}" '
                f'fill="{_COLOURS[name]}"><title>{name} {size / 2**30:.2f} GiB</title></rect>'
            )
            x += size * scale
        parts.append(_text(x + 4, y + 15, f"{float(total[i]) / 2**30:.1f}", 10))
    line = left + usable * scale
    bottom = 30 + stages * row
    parts.append(
        f'<line x1="{line:.1f}" y1="26" x2="{line:.1f}" y2="{bottom}" stroke="#c00" stroke-dasharray="4 3"/>'
    )
    parts.append(_text(max(left, line - 120), bottom + 14, f"usable {usable / 2**30:.1f} GiB", 11))
    x = left
    for name in MEMORY_PARTS:
        parts.append(f'<rect x="{x:.0f}" y="{bottom + 24}" width="10" height="10" fill="{_COLOURS[name]}"/>')
        parts.append(_text(x + 13, bottom + 33, name.replace("_", " "), 10))
        x += 26 + 6.0 * len(name)
    return "".join([*parts, "</svg>\n"])


def _open(width: float, height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" font-family="sans-serif"><rect width="100%" height="100%" fill="#fff"/>'
    )


def _text(x: float, y: float, text: str, size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="#222">{text}</text>'


def pictures(estimate: Estimate) -> dict[str, str]:
    """The SVGs of a strategy by name: memory, and schedule where there is a pipeline."""
    st = estimate.strategy
    found = {"memory": memory_svg(estimate)}
    if st.pipeline_stage > 1 and (st.pp_interleave_num == 1 or st.micro_batch_num % st.pipeline_stage == 0):
        found["schedule"] = schedule_svg(st.pipeline_stage, st.micro_batch_num, st.pp_interleave_num)
    return found
