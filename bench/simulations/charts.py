"""Grids as SVG: lines over an axis, or bars in groups, with 95 % confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from bench.simulations.statistics import Interval
from scheduler.policies import CANCEL_SUFFIX

WIDTH, HEIGHT = 460, 260
LEFT, TOP, BOTTOM, LEGEND = 76, 40, 52, 190
NAMES_WIDTH = 64
"""Characters that fit side by side under the axis; longer names are written aslant."""
COLOURS: Mapping[str, str] = {
    "gmax": "#d55e00",
    "gmax-oracle": "#e69f00",
    "gmax-paper": "#009e73",
    "fcfs": "#0072b2",
    "sarathi": "#56b4e9",
    "sjf": "#cc79a7",
    "ltr": "#7b3294",
    "plas": "#8c6d31",
    "edf": "#4d4d4d",
    "vtc": "#a6a600",
}
"""A policy has its colour in every chart; those that are not here get one of the spare ones."""
SPARE = ("#1b9e77", "#7570b3", "#e7298a", "#66a61e", "#a6761d", "#999999")


class Chart(NamedTuple):
    """A drawing, and what its file is called."""

    name: str
    svg: str


class Axis(NamedTuple):
    """Where the points of all series are: numbers, or names at equal distances."""

    label: str
    values: Sequence[float]
    names: Sequence[str] = ()

    def place(self, index: int) -> float:
        """Of a value between 0 and 1."""
        if self.names:
            return (index + 0.5) / len(self.names)
        low, high = min(self.values), max(self.values)
        return (self.values[index] - low) / (high - low) if high > low else 0.5

    def ticks(self) -> list[tuple[float, str]]:
        """Places and texts."""
        if self.names:
            return [(self.place(index), name) for index, name in enumerate(self.names)]
        if len(self.values) <= 10:
            return [(self.place(index), f"{value:g}") for index, value in enumerate(self.values)]
        every = math.ceil(len(self.values) / 6)
        return [
            (self.place(index), f"{self.values[index]:g}")
            for index in range(0, len(self.values), every)
        ]


Series = Mapping[str, Sequence[Interval]]


def lines(title: str, x: Axis, y_label: str, series: Series) -> str:
    """A line for each series, through its value at each place of the axis."""
    top = _nice_top(series)
    parts = [_frame(title, x, y_label, top, len(series))]
    # The first, which is gmax, on top of the others where they are alike.
    for number, (name, values) in sorted(enumerate(series.items()), key=lambda one: -one[0]):
        colour, dash = _style(name, number)
        points = [(_x(x.place(i)), _y(value.mean, top)) for i, value in enumerate(values)]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        width = 2.4 if name == "gmax" else 1.4
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" '
            f'stroke-width="{width}"{dash}/>'
        )
        parts += [
            _whisker(px, value, top, colour) for (px, _), value in zip(points, values, strict=True)
        ]
        parts.append(_legend(number, name, colour, dash))
    return "\n".join([*parts, "</svg>"]) + "\n"


def bars(title: str, x: Axis, y_label: str, series: Series) -> str:
    """A group of bars at each place of the axis, one for each series."""
    top = _nice_top(series)
    parts = [_frame(title, x, y_label, top, len(series))]
    group = WIDTH / max(len(x.names), 1)
    bar = group * 0.8 / max(len(series), 1)
    for number, (name, values) in enumerate(series.items()):
        colour, _ = _style(name, number)
        opacity = ' fill-opacity="0.5"' if CANCEL_SUFFIX in name else ""
        for index, value in enumerate(values):
            left = _x(x.place(index)) - 0.4 * group + number * bar
            y = _y(value.mean, top)
            parts.append(
                f'<rect x="{left:.1f}" y="{y:.1f}" width="{max(bar - 1, 0.5):.1f}" '
                f'height="{TOP + HEIGHT - y:.1f}" fill="{colour}"{opacity}/>'
            )
            parts.append(_whisker(left + bar / 2, value, top, "#333333"))
        parts.append(_legend(number, name, colour, opacity.replace("fill", "stroke")))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _frame(title: str, x: Axis, y_label: str, top: float, num_series: int) -> str:
    is_flat = max((len(name) for name in x.names), default=0) * len(x.names) <= NAMES_WIDTH
    below = BOTTOM if is_flat else BOTTOM + 6 * max(len(name) for name in x.names)
    height = TOP + max(HEIGHT + below, 18 * num_series + 20)
    middle = TOP + HEIGHT / 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + LEGEND}" '
        f'height="{height}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="14">{escape(title)}</text>',
        f'<text x="16" y="{middle}" text-anchor="middle" '
        f'transform="rotate(-90 16 {middle})">{escape(y_label)}</text>',
        f'<text x="{LEFT + WIDTH / 2}" y="{TOP + HEIGHT + below - 10}" '
        f'text-anchor="middle">{escape(x.label)}</text>',
    ]
    for step in range(6):
        value = top * step / 5
        y = _y(value, top)
        parts.append(
            f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(value)}</text>'
        )
    parts += [_tick(_x(place), text, is_flat=is_flat) for place, text in x.ticks()]
    return "\n".join(parts)


def _tick(x: float, text: str, *, is_flat: bool) -> str:
    y = TOP + HEIGHT + 18
    where = (
        'text-anchor="middle"'
        if is_flat
        else f'text-anchor="end" transform="rotate(-35 {x:.1f} {y})"'
    )
    return f'<text x="{x:.1f}" y="{y}" {where}>{escape(text)}</text>'


def _style(name: str, number: int) -> tuple[str, str]:
    """Colour and dash."""
    plain = name.removesuffix(CANCEL_SUFFIX)
    colour = COLOURS.get(plain) or SPARE[number % len(SPARE)]
    return colour, ' stroke-dasharray="5 3"' if name.endswith(CANCEL_SUFFIX) else ""


def _legend(number: int, name: str, colour: str, dash: str) -> str:
    x, y = LEFT + WIDTH + 16, TOP + 8 + 18 * number
    return (
        f'<line x1="{x}" x2="{x + 22}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="4"{dash}/>'
        f'<text x="{x + 28}" y="{y + 4}">{escape(name)}</text>'
    )


def _whisker(x: float, value: Interval, top: float, colour: str) -> str:
    if not value.half:
        return ""
    low, high = max(value.mean - value.half, 0.0), min(value.mean + value.half, top)
    return (
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_y(low, top):.1f}" y2="{_y(high, top):.1f}" '
        f'stroke="{colour}"/>'
    )


def _x(place: float) -> float:
    return LEFT + WIDTH * place


def _y(value: float, top: float) -> float:
    return TOP + HEIGHT * (1 - min(max(value, 0.0), top) / top)


def _nice_top(series: Series) -> float:
    highest = max((one.mean for values in series.values() for one in values), default=1.0)
    if not (math.isfinite(highest) and highest > 0):
        return 1.0
    scale = 10.0 ** math.floor(math.log10(highest))
    return next(step * scale for step in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if step * scale >= highest)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
