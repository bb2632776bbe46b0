"""Tables for people and JSON for programs."""

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A plain text table, numbers to the right."""
    cells = [[_text(value) for value in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(headers), *cells]) for i in range(len(headers))]
    lines = ["  ".join(head.ljust(width) for head, width in zip(headers, widths, strict=True))]
    for row, values in zip(cells, rows, strict=True):
        parts = [
            text.ljust(width) if isinstance(value, str) else text.rjust(width)
            for text, value, width in zip(row, values, widths, strict=True)
        ]
        lines.append("  ".join(parts))
    return "\n".join(lines)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return (
        f"{value:.3g}"
        if isinstance(value, float) and abs(value) < 100
        else f"{value:.0f}"
        if (isinstance(value, float))
        else str(value)
    )


def write(
    path: Path | None, name: str, summary: Mapping[str, Any], detail: Mapping[str, Any]
) -> None:
    """Write a run as JSON: the flat ``summary``, how it was made, and the raw figures."""
    if path is None:
        return
    record = {"bench": name, "summary": summary, "environment": environment(), **detail}
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {path}")


def environment() -> dict[str, Any]:
    """What a reader needs to compare two runs; None for what this machine has not."""
    return {
        "commit": _commit(),
        "sglang": _sglang(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }


def _commit() -> str | None:
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return None


def _sglang() -> str | None:
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None
