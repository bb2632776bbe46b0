"""A bar chart of a ``serve`` run as SVG: SLO attainment per class and policy."""

import argparse
import json
from pathlib import Path
from typing import Any

CLASSES = {
    "latency": "latency-sensitive",
    "deadline": "deadline",
    "compound": "programs",
    "best_effort": "best-effort",
}
COLOURS = ("#9aa0a6", "#5f8dd3", "#e0a458", "#2a9d8f", "#b56576", "#6d597a")
BAR, GAP, HEIGHT, TOP = 34, 56, 200, 44


def main(argv: list[str]) -> int:
    """``python -m bench plot RUN.json OUT.svg``."""
    parser = argparse.ArgumentParser(prog="python -m bench plot", description=__doc__)
    parser.add_argument("run", type=Path, help="what `python -m bench serve --json` wrote")
    parser.add_argument("out", type=Path, help="the SVG file to write")
    args = parser.parse_args(argv)
    results: dict[str, list[dict[str, Any]]] = json.loads(args.run.read_text())["results"]
    args.out.write_text(draw(results))
    print(f"written to {args.out}")
    return 0


def draw(results: dict[str, list[dict[str, Any]]]) -> str:
    """The chart; one group of bars per class, one bar per policy."""
    policies = list(results)
    seen = {item["slo_type"] for items in results.values() for item in items}
    classes = {name: title for name, title in CLASSES.items() if name in seen}
    group = BAR * len(policies) + GAP
    width = group * len(classes) + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT + TOP + 60}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{GAP}" y="20" font-size="14">Requests whose SLO was met, %</text>',
    ]
    for class_index, (slo_type, title) in enumerate(classes.items()):
        left = GAP + class_index * group
        for index, policy in enumerate(policies):
            share = _met_percent(results[policy], slo_type)
            x, tall = left + index * BAR, HEIGHT * share / 100
            y, middle = TOP + HEIGHT - tall, x + (BAR - 6) / 2
            colour = COLOURS[index % len(COLOURS)]
            parts.append(
                f'<rect x="{x}" y="{y:.1f}" width="{BAR - 6}" height="{tall:.1f}" fill="{colour}"/>'
                f'<text x="{middle}" y="{y - 4:.1f}" text-anchor="middle">{share:.0f}</text>'
            )
        middle = left + BAR * len(policies) / 2
        parts.append(
            f'<text x="{middle}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{title}</text>'
        )
    for index, policy in enumerate(policies):
        x = GAP + index * 90
        colour = COLOURS[index % len(COLOURS)]
        parts.append(
            f'<rect x="{x}" y="{TOP + HEIGHT + 34}" width="12" height="12" fill="{colour}"/>'
            f'<text x="{x + 17}" y="{TOP + HEIGHT + 44}">{policy}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _met_percent(results: list[dict[str, Any]], slo_type: str) -> float:
    items = [item for item in results if item["slo_type"] == slo_type]
    return 100 * sum(item["met"] for item in items) / len(items) if items else 0.0
