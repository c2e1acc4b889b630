"""Small charts as inline SVG: no script, no fonts, no colours of their own but the page's, light or dark.

Colours are classes (``series``, ``null``, ``floor``, ``axis``, ``cell``) that the page's style defines; the heat map
encodes its values by opacity over the page, so it follows the page's theme.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ceilings.readable import SUPERSCRIPT, number, percent, signed

__all__ = [
    "concentration_chart",
    "distribution_chart",
    "heat_map",
    "layer_chart",
    "magnitude_chart",
]

# Text has 11.5 pixels where a picture is as wide as this, which is about what a phone has.
_WIDTH: Final = 340
_HEIGHT: Final = 250
_LEFT: Final = 50
_RIGHT: Final = 24
_TOP: Final = 14
_BOTTOM: Final = 44
_LABEL: Final = 14  # letters of the name of a column


def heat_map(cells: Mapping[tuple[str, str], float], unit: str, label: str, logarithmic: bool = False) -> str:
    """Map of one number by row and column.

    Parameters
    ----------
    cells
        Value by row and column, in the order in which rows and columns shall appear.
    unit
        What the numbers are, for the scale under the map.
    label
        Description for who cannot see it.
    logarithmic
        Whether equal steps of shade are equal factors.

    Returns
    -------
    str
        SVG. Every cell carries its value as a title; a cell without a value is empty.
    """
    rows, columns = list(dict.fromkeys(r for r, _ in cells)), list(dict.fromkeys(c for _, c in cells))
    shown = {k: v for k, v in cells.items() if not logarithmic or v > 0}
    low, high = (min(shown.values()), max(shown.values())) if shown else (0.0, 1.0)
    scale = math.log if logarithmic else float
    span = (scale(high) - scale(low)) or 1.0
    tall, left = (13 if len(rows) > 8 else 22), 12 + 7 * max(map(len, rows))
    names = [column if len(column) <= _LABEL else f"{column[: _LABEL - 1]}…" for column in columns]
    wide = min(52, max(20, (280 - left) // len(columns)))
    head = 12 + round(5.3 * max(map(len, names)))
    # The last label leans out to the right.
    width, height = left + wide * len(columns) + max(8, head - 12 - wide // 2), head + tall * len(rows) + 48
    parts = []
    for x, name in enumerate(names):
        at = f"{left + wide * (x + 0.5):.1f} {head - 6}"
        parts.append(f'<text class="tick" transform="translate({at}) rotate(-45)">{html.escape(name)}</text>')
    for y, row in enumerate(rows):
        # Of many rows only every fifth is named.
        if len(rows) <= 12 or y % 5 == 0 or y == len(rows) - 1:
            at = f'x="{left - 6}" y="{head + tall * (y + 0.5) + 4:.1f}"'
            parts.append(f'<text class="tick end" {at}>{html.escape(row)}</text>')
        for x, column in enumerate(columns):
            value = cells.get((row, column))
            box = f'x="{left + wide * x + 1}" y="{head + tall * y + 1}" width="{wide - 2}" height="{tall - 2}" rx="2"'
            if value is None:
                continue
            known = (row, column) in shown
            shade = 0.06 + 0.94 * (scale(value) - scale(low)) / span if known else 0.0
            title = f"<title>{html.escape(f'{row} · {column}: {number(value)}')}</title>"
            parts.append(f'<rect class="frame" {box}/>')
            parts.append(f'<rect class="cell" fill-opacity="{shade:.3f}" {box}>{title}</rect>')
    base = head + tall * len(rows) + 14
    bar = wide * len(columns)
    steps = 24
    for k in range(steps):
        at = f'x="{left + bar * k / steps:.2f}" y="{base}" width="{bar / steps:.2f}" height="8"'
        parts.append(f'<rect class="cell bar" fill-opacity="{0.06 + 0.94 * k / (steps - 1):.3f}" {at}/>')
    ends = f'<text class="tick" x="{left}" y="{base + 22}">{number(low, 2)}</text>'
    ends += f'<text class="tick end" x="{left + bar}" y="{base + 22}">{number(high, 2)}</text>'
    if bar > 240:
        ends += (
            f'<text class="tick middle" x="{left + bar / 2:.0f}" y="{base + 22}">{html.escape(unit)}</text>'
        )
    return _svg(width, height, label, "".join(parts) + ends)


def distribution_chart(histogram: Sequence[float], null: Sequence[float] | None, label: str) -> str:
    """Distribution of tightness over parameters, beside that of permuted rewards.

    Parameters
    ----------
    histogram
        Share of the parameters in equal bins of [-1, 1].
    null
        The same for permuted rewards; None where tightness is exact, and never negative.
    label
        Description for who cannot see it.

    Returns
    -------
    str
        SVG, cut where next to nothing is left, with a line at zero.
    """
    middle = len(histogram) // 2
    both = [max(pair) for pair in zip(histogram, null or histogram, strict=True)]
    used = max((abs(k - middle + 0.5) for k, share in enumerate(both) if share > 1e-3), default=0) + 0.5
    right = min(1.0, max(math.ceil(10 * used / middle) / 10, 0.2))
    left = -right if null is not None else 0.0
    top = 1.12 * max(both)
    x, y = _axis(left, right, _LEFT, _WIDTH - _RIGHT), _axis(0, top, _HEIGHT - _BOTTOM, _TOP)
    bins = range(middle + round(left * middle), middle + round(right * middle))

    def steps(shares: Sequence[float]) -> str:
        points = [f"{x(left):.1f},{y(0):.1f}"]
        for k in bins:
            points += [f"{x(edge / middle - 1):.1f},{y(shares[k]):.1f}" for edge in (k, k + 1)]
        return " ".join([*points, f"{x(right):.1f},{y(0):.1f}"])

    each = _round_step((right - left) / 4)
    ticks = {
        k * each: signed(k * each) for k in range(math.ceil(left / each - 1e-9), int(right / each + 1e-9) + 1)
    }
    parts = [_frame(), _x_ticks(ticks, x, "tightness" if null is None else "cross-fitted tightness")]
    step = _round_step(top / 4)
    parts.append(_y_ticks({k * step: percent(k * step) for k in range(int(top / step) + 1)}, y))
    parts.append(f'<polygon class="series fill" points="{steps(histogram)}"/>')
    if null is not None:
        parts.append(f'<polyline class="null line" points="{steps(null)}"/>')
        at = f'x1="{x(0):.1f}" x2="{x(0):.1f}" y1="{_TOP}" y2="{y(0):.1f}"'
        parts.append(f'<line class="axis" {at}/>')
    return _svg(_WIDTH, _HEIGHT, label, "".join(parts))


def layer_chart(
    layers: Sequence[tuple[int, float, float | None, float | None]], reach: float, label: str
) -> str:
    """Tightness by layer, with its error, beside what permuted rewards give.

    Parameters
    ----------
    layers
        Number of the layer, mean tightness, standard error, mean of the permuted rewards.
    reach
        Standard errors that a bar extends to either side.
    label
        Description for who cannot see it.

    Returns
    -------
    str
        SVG, with a line at zero: what crosses it cannot be told from nothing.
    """
    ends = [mean + sign * reach * (error or 0.0) for _, mean, error, _ in layers for sign in (-1, 1)]
    ends += [null for *_, null in layers if null is not None]
    low, high = min(0.0, *ends), max(1e-9, *ends)
    low, high = low - 0.06 * (high - low) * (low < 0), high + 0.06 * (high - low)
    numbers = [layer for layer, *_ in layers]
    x = _axis(min(numbers) - 0.7, max(numbers) + 0.7, _LEFT, _WIDTH - _RIGHT)
    y = _axis(low, high, _HEIGHT - _BOTTOM, _TOP)
    step = _round_step((high - low) / 4)
    ticks = {
        k * step: signed(k * step, 2)
        for k in range(math.ceil(low / step - 1e-9), int(high / step + 1e-9) + 1)
    }
    every = max(1, math.ceil(len(layers) / 10))
    parts = [_y_ticks(ticks, y), _x_ticks({n: str(n) for n in numbers[::every]}, x, "layer")]
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(0):.1f}" y2="{y(0):.1f}"/>')
    for layer, mean, error, null in layers:
        at = f"{x(layer):.1f}"
        title = f"layer {layer}: {signed(mean)}"
        if error is not None:
            title += f" ± {number(error, 2)}"
            span = f'y1="{y(mean - reach * error):.1f}" y2="{y(mean + reach * error):.1f}"'
            parts.append(f'<line class="bar series line" x1="{at}" x2="{at}" {span}/>')
        if null is not None:
            parts.append(f'<circle class="hollow" cx="{at}" cy="{y(null):.1f}" r="3.2"/>')
        parts.append(
            f'<circle class="series dot" cx="{at}" cy="{y(mean):.1f}" r="4"><title>{title}</title></circle>'
        )
    return _svg(_WIDTH, _HEIGHT, label, "".join(parts))


def concentration_chart(shares: Mapping[float, float], label: str) -> str:
    """Share of a sum over the parameters in the top share of them.

    Parameters
    ----------
    shares
        Share of the sum by share of the parameters, both in (0, 1].
    label
        Description for who cannot see it.

    Returns
    -------
    str
        SVG, with the curve of equal shares for comparison.
    """
    low = math.log10(min(shares))
    x, y = _axis(low, 0, _LEFT, _WIDTH - _RIGHT), _axis(0, 1, _HEIGHT - _BOTTOM, _TOP)
    every = 1 if low > -5 else 2  # of many decades every other is named
    ticks = {float(k): percent(10.0**k) for k in range(round(low), 1) if k % every == 0}
    parts = [_frame(), _x_ticks(ticks, x, "share of the parameters, largest first")]
    parts.append(_y_ticks({k / 4: percent(k / 4) for k in range(5)}, y))
    even = [low * (1 - k / 60) for k in range(61)]
    parts.append(
        f'<polyline class="null line" points="{" ".join(f"{x(v):.1f},{y(10**v):.1f}" for v in even)}"/>'
    )
    points = [(x(math.log10(share)), y(value)) for share, value in sorted(shares.items())]
    parts.append(
        f'<polyline class="series line" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in points)}"/>'
    )
    for (a, b), (share, value) in zip(points, sorted(shares.items()), strict=True):
        title = f"<title>top {percent(share)} of the parameters: {percent(value, 3)}</title>"
        parts.append(f'<circle class="series dot" cx="{a:.1f}" cy="{b:.1f}" r="4">{title}</circle>')
    return _svg(_WIDTH, _HEIGHT, label, "".join(parts))


def magnitude_chart(rows: Sequence[tuple[int, float, float]], label: str) -> str:
    """Share of the weights that changed, and share of the weights there are, by their magnitude.

    Parameters
    ----------
    rows
        For each power of two: its exponent, the share of these weights that changed, and their share of all weights.
    label
        Description for who cannot see it.

    Returns
    -------
    str
        SVG; both curves go from 0 to 1.
    """
    low, high = rows[0][0], rows[-1][0] + 1
    x, y = _axis(low, high, _LEFT, _WIDTH - _RIGHT), _axis(0, 1, _HEIGHT - _BOTTOM, _TOP)
    step = max(1, -(-(high - low) // 6))
    ticks = {float(k): f"2{str(k).translate(SUPERSCRIPT)}" for k in range(low, high + 1, step)}
    parts = [_frame(), _x_ticks(ticks, x, "magnitude of the weight before")]
    parts.append(_y_ticks({k / 4: percent(k / 4) for k in range(5)}, y))
    for kind, column in (("null", 2), ("series", 1)):
        points = [(edge, row[column]) for row in rows for edge in (row[0], row[0] + 1)]
        drawn = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)
        parts.append(f'<polyline class="{kind} line" points="{drawn}"/>')
    for exponent, changed, there in rows:
        at = f'x="{x(exponent):.1f}" y="{_TOP}" width="{x(exponent + 1) - x(exponent):.1f}" height="{y(0) - _TOP:.1f}"'
        said = f"2{str(exponent).translate(SUPERSCRIPT)}: {percent(changed, 3)} changed, {percent(there, 3)} of all"
        parts.append(f'<rect {at} fill="transparent"><title>{said}</title></rect>')
    return _svg(_WIDTH, _HEIGHT, label, "".join(parts))


def _axis(low: float, high: float, first: float, last: float) -> Callable[[float], float]:
    """Map from data to pixels."""
    slope = (last - first) / ((high - low) or 1.0)
    return lambda value: first + (value - low) * slope


def _frame() -> str:
    """Base line of a chart."""
    y = _HEIGHT - _BOTTOM
    return f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>'


def _x_ticks(ticks: Mapping[float, str], x: Callable[[float], float], title: str) -> str:
    """Labels under the base line."""
    y = _HEIGHT - _BOTTOM
    parts = [f'<text class="tick middle" x="{x(v):.1f}" y="{y + 16}">{t}</text>' for v, t in ticks.items()]
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    return (
        "".join(parts)
        + f'<text class="tick middle" x="{middle:.0f}" y="{y + 36}">{html.escape(title)}</text>'
    )


def _y_ticks(ticks: Mapping[float, str], y: Callable[[float], float]) -> str:
    """Labels at the left, with faint lines across."""
    parts = []
    for value, text in ticks.items():
        at = y(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick end" x="{_LEFT - 6}" y="{at + 4:.1f}">{text}</text>')
    return "".join(parts)


def _round_step(step: float) -> float:
    """Nearest round number below, 1, 2 or 5 times a power of ten."""
    power = 10 ** math.floor(math.log10(step)) if step > 0 else 1.0
    return max((k * power for k in (1, 2, 5) if k * power <= step), default=power)


def _svg(width: float, height: float, label: str, body: str) -> str:
    """Wrap a drawing."""
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" style="max-width:{1.25 * width:.0f}px" role="img" '
        f'aria-label="{html.escape(label)}">{body}</svg>'
    )
