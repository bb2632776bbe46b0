"""``python -m bench profiles``: step times of models on GPUs, and how far they are from measured.

Prints step times of every model on every GPU at a few compositions, the reference machine of the
policy's studies beside Llama-3.1-8B on an A100, and the errors against what others measured:
gpt-fast's published decode rates always, Splitwise's profile and LLMServingSim's vLLM runs from
the files given.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import profile_checks, profile_load, report
from bench.profile_checks import Errors, Fields, Point
from engine.simulator import measured, profiles
from engine.simulator.measured import Measurement
from engine.simulator.profiles import HARDWARE, LLAMA_31_8B, MODELS, Hardware
from engine.simulator.steps import A100_LLAMA_8B, Step

GPUS_OF = {"llama-3.1-70b": 4}
"""Of models that do not fit on one."""

COMPOSITIONS = {
    "1 decode": Step(1, 1_000, 0, 0),
    "32 decodes": Step(32, 32_000, 0, 0),
    "128 decodes": Step(128, 128_000, 0, 0),
    "512 prompt": Step(0, 0, 0, 512, 512 * 513 // 2),
    "2048 prompt": Step(0, 0, 0, 2048, 2048 * 2049 // 2),
    "64 and 512": Step(64, 64_000, 0, 512, 512 * 513 // 2),
}
"""Decodes have 1,000 tokens of context each."""

RTX_PRO_6000 = Hardware(
    name="rtx-pro-6000",
    flops_per_s=503.8e12,
    bytes_per_s=1.792e12,
    memory_bytes=101_976_440_832,
    link_bytes_per_s=64e9,
)
"""RTX PRO 6000 Blackwell. NVIDIA RTX Blackwell PRO architecture paper: 503.8 TFLOPS bf16 dense,
1,792 GB/s; memory as the run's meta.json has it."""

RTX_4090 = Hardware(
    name="rtx-4090",
    flops_per_s=165.2e12,
    bytes_per_s=1.008e12,
    memory_bytes=24e9,
    link_bytes_per_s=32e9,
)
"""GeForce RTX 4090. NVIDIA Ada GPU architecture paper: 165.2 TFLOPS bf16 dense with fp32
accumulation, 1,008 GB/s, 24 GB."""

RUNS = {"RTXPRO6000_Llama-3.1-8B": RTX_PRO_6000, "RTX4090_Llama-3.1-8B": RTX_4090}
"""Of the vLLM runs those that overlap: a known model on one GPU. The other two are of a model
that has no profile (Qwen3-32B), and of two GPUs that split experts between data-parallel
replicas (Qwen3-30B-A3B)."""

RUN_FRACTION = 0.92
"""Of the memory that those runs used."""

ERRORS = ["measured", "constants", "points", "median", "p90", "bias"]


def main(argv: list[str]) -> int:
    """Print, compare; exit code 2 for a file that is not what it should be."""
    parser = argparse.ArgumentParser(prog="python -m bench profiles", description=__doc__)
    parser.add_argument("--splitwise", type=Path, metavar="PATH", help="Splitwise's perf_model.csv")
    parser.add_argument("--vllm", type=Path, metavar="PATH", help="requests of measured vLLM runs")
    parser.add_argument("--json", type=Path, default=None, metavar="PATH")
    args = parser.parse_args(argv)
    summary: dict[str, float] = {}
    detail: dict[str, Any] = {"step_ms": _step_times(summary)}
    _reference(summary)
    try:
        rows = _gpt_fast()
        if args.splitwise:
            rows += _splitwise(args.splitwise, detail)
        loads = _vllm(args.vllm) if args.vllm else []
    except (OSError, ValueError) as error:
        print(f"profiles: {error}", file=sys.stderr)
        return 2
    print(report.table(ERRORS, [[name, how, *errors] for name, how, errors in rows]))
    for name, how, errors in rows:
        key = f"{name}_{how}".replace(" ", "_")
        summary |= {f"median_error_{key}": errors.median, f"p90_error_{key}": errors.p90}
    _print_loads(loads, summary)
    report.write(args.json, "profiles", summary, detail)
    return 0


def _step_times(summary: dict[str, float]) -> dict[str, list[float]]:
    """Print and return every profile's milliseconds at ``COMPOSITIONS``."""
    rows = []
    found: dict[str, list[float]] = {}
    for model in MODELS.values():
        for hardware in HARDWARE.values():
            gpus = GPUS_OF.get(model.name, 1)
            steps = profiles.profile(model, hardware, gpus)
            found[steps.name] = [steps.seconds(step) * 1e3 for step in COMPOSITIONS.values()]
            tokens = profiles.kv_tokens(model, hardware, gpus)
            line = profiles.linear(steps, with_pairs=True)
            grid = [Measurement(step, steps.seconds(step)) for step in profiles.GRID]
            off = measured.fit_error(line, grid)
            rows.append([steps.name, *found[steps.name], tokens, off.median, off.p90])
            summary[f"kv_tokens_{model.name}_{hardware.name}"] = tokens
            summary[f"linear_median_error_{model.name}_{hardware.name}"] = off.median
    print("milliseconds of a step; tokens of KV; relative error of the linear model")
    headers = ["profile", *COMPOSITIONS, "KV tokens", "linear", "p90"]
    print(report.table(headers, rows), "\n")
    return found


def _reference(summary: dict[str, float]) -> None:
    """The studies' reference machine beside the profile of what it stands for."""
    steps = profiles.named("llama-3.1-8b", "a100")
    line = profiles.linear(steps)
    rows = [
        [name, getattr(A100_LLAMA_8B, name) * 1e6, getattr(line, name) * 1e6, roofline * 1e6]
        for name, roofline in (
            ("constant_s", steps.constant_s + steps.weights_s + steps.head_weights_s),
            ("decode_s", steps.request_s),
            ("context_s", steps.context_s),
            ("padding_s", 0.0),
            ("prefill_s", steps.token_s),
        )
    ]
    print("Llama-3.1-8B on an A100, microseconds")
    print(report.table(["coefficient", "reference", "linear", "roofline"], rows))
    ratios = {
        name: steps.seconds(step) / A100_LLAMA_8B.seconds(step)
        for name, step in COMPOSITIONS.items()
    }
    print("profile / reference:", *(f"{name} {ratio:.2f}," for name, ratio in ratios.items()), "\n")
    for name, ratio in ratios.items():
        summary[f"reference_ratio_{name.replace(' ', '_')}"] = ratio


Row = tuple[str, str, Errors]


def _gpt_fast() -> list[Row]:
    points = profile_checks.gpt_fast()
    # One request, and no server around it.
    fixed = {"request_s": 0.0}
    fitted = [point for point in points if point.model.name == "llama-2-7b"]
    fields = profile_checks.fit(fitted, {"layer_s": 50e-6, "all_reduce_s": 10e-6}, fixed)
    print(_shown("gpt-fast llama-2-7b", fields))
    rows = []
    for name in ("llama-2-7b", "llama-2-70b", "mixtral-8x7b"):
        own = [point for point in points if point.model.name == name]
        is_fitted = name == "llama-2-7b"
        rows.append(_row(f"gpt-fast {name} decode", "shipped", own, fixed))
        rows.append(_row(f"gpt-fast {name} decode", _how(is_fitted=is_fitted), own, fields))
    return rows


def _splitwise(path: Path, detail: dict[str, Any]) -> list[Row]:
    """Two constants for prefills, three for decodes, all fitted to the A100 alone."""
    prefills, decodes = profile_checks.splitwise(path)
    on = {name: [p for p in prefills if p.hardware.name == name] for name in ("a100", "h100")}
    decodes_on = {name: [p for p in decodes if p.hardware.name == name] for name in on}
    start = {"bandwidth_share": 0.7, "launch_s": 5e-4, "request_s": 3e-4}
    engine = profile_checks.fit(decodes_on["a100"], start, {})
    start = {"flops_share": 0.6, "link_share": 0.4}
    fields = profile_checks.fit(on["a100"], start, engine)
    print(_shown("Splitwise a100", fields))
    # The H100s' hosts launch faster; that, and only that, from steps of one request on 4 and 8.
    ones = [p for p in decodes_on["h100"] if p.step.num_decodes == 1 and p.tensor_parallel > 2]
    fixed = {name: value for name, value in fields.items() if name != "launch_s"}
    relaunched = profile_checks.fit(ones, {"launch_s": 4e-4}, fixed)
    print(_shown("Splitwise h100", {"launch_s": relaunched["launch_s"]}))
    rest = [p for p in decodes_on["h100"] if p not in ones]
    detail["splitwise"] = [
        [p.hardware.name, p.tensor_parallel, *p.step, p.measured_s] for p in prefills + decodes
    ]
    return [
        *(_row(f"Splitwise {name} prefill", "shipped", on[name], {}) for name in on),
        _row("Splitwise a100 prefill", "fitted", on["a100"], fields),
        _row("Splitwise h100 prefill", "held out", on["h100"], fields),
        *(_row(f"Splitwise {name} decode", "shipped", decodes_on[name], {}) for name in on),
        _row("Splitwise a100 decode", "fitted", decodes_on["a100"], fields),
        _row("Splitwise h100 decode", "held out", decodes_on["h100"], fields),
        _row("Splitwise h100 decode", "own launch_s", rest, relaunched),
    ]


def _row(name: str, how: str, points: Sequence[Point], fields: Fields) -> Row:
    return name, how, profile_checks.errors(points, fields)


def _how(*, is_fitted: bool) -> str:
    return "fitted" if is_fitted else "held out"


def _shown(name: str, fields: Fields) -> str:
    return f"{name}: " + ", ".join(f"{key} {value:.3g}" for key, value in fields.items())


def _vllm(path: Path) -> list[list[Any]]:
    """Errors of replayed loads; ``request_s`` is fitted to the first, the second is held out."""
    loads = {run: profile_load.read(path, run) for run in RUNS}
    first = next(iter(RUNS))

    def off(fields: Fields) -> float:
        ours = _replayed(loads[first], RUNS[first], fields)
        pairs = zip(ours, loads[first], strict=True)
        return abs(statistics.median(a.e2e_s / b.e2e_s for a, b in pairs) - 1)

    fields = profile_checks.search(off, {"request_s": 10e-6})
    print(_shown(f"vLLM {first}", fields))
    rows = []
    for run, load in loads.items():
        for how, values in (("shipped", {}), (_how(is_fitted=run == first), fields)):
            ours = _replayed(load, RUNS[run], values)
            for name in ("tpot_s", "ttft_s", "e2e_s"):
                theirs = [getattr(asked, name) for asked in load]
                pairs = zip((getattr(asked, name) for asked in ours), theirs, strict=True)
                ratios = [a / b - 1 for a, b in pairs]
                worst = statistics.quantiles(map(abs, ratios), n=10)[-1]
                middle = statistics.median(map(abs, ratios))
                bias = statistics.median(ratios)
                rows.append([f"{run} {name}", how, len(load), middle, worst, bias])
    return rows


def _replayed(
    load: Sequence[profile_load.Asked], hardware: Hardware, fields: Fields
) -> list[profile_load.Asked]:
    changed, overheads = profile_checks.changed(hardware, fields)
    steps = profiles.profile(LLAMA_31_8B, changed, 1, overheads)
    room = profiles.kv_tokens(LLAMA_31_8B, changed, 1, RUN_FRACTION)
    return profile_load.replay(load, steps, room)


def _print_loads(rows: list[list[Any]], summary: dict[str, float]) -> None:
    if not rows:
        return
    print("\nreplayed loads, per request")
    print(report.table(ERRORS, rows))
    for name, how, _, middle, worst, _ in rows:
        key = f"{name}_{how}".replace(" ", "_")
        summary |= {f"median_error_{key}": middle, f"p90_error_{key}": worst}
