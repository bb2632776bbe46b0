"""Decode attention on batches of equal lengths beside batches of the same total that spread.

What a spread of lengths costs decides whether a scheduler should group requests by length. On a
CUDA GPU FlashInfer is measured, else this CPU: our kernel and torch's. All spreads of a batch take
turns, so ratios are of the same minute. Times are of a step's attention in all layers; the CSV has
that alone, so what is fitted to it lacks the rest of the model.

On a GPU machine, with nothing but torch and flashinfer (which compiles its kernels with nvcc):
``python -m bench.kernels --device cuda --json kernels.json --csv steps.csv``
Where others use the CPU too, ``--threads 1``: threads that wait for each other measure the others.
"""

import argparse
import csv
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench import report
from bench.kernel_spreads import (
    EQUAL,
    SHAPES,
    SPREADS,
    VALUE_BYTES,
    Extra,
    Kernels,
    PaddingCost,
    Shape,
    lengths,
    padding,
    padding_cost,
)
from bench.turns import in_turn, median_ratio

CSV_COLUMNS = ("num_decodes", "context_tokens", "prefill_tokens", "duration_s", "padding_tokens")
"""As ``engine.simulator.measured`` reads them; it can't be imported where only torch is."""
WARM_UP_ROUNDS = 3
STEADY = 0.2
"""Noise above which a batch's ratios say more of the machine than of the kernel."""


class Plan(NamedTuple):
    """What is measured of a device unless one asks for something else."""

    shape: str
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    """Means, in tokens."""
    rounds: int
    most_tokens: int
    """Of a batch."""


PLANS: Mapping[tuple[str, bool], Plan] = {
    ("cpu", False): Plan("demo", (1, 2, 4, 8, 16, 32, 64), (128, 512, 2048, 8192), 15, 1 << 17),
    ("cpu", True): Plan("demo", (1, 8, 32), (128, 1024), 7, 1 << 17),
    ("cuda", False): Plan(
        "llama", (8, 16, 32, 64, 128, 256), (128, 512, 2048, 8192, 32768), 20, 1 << 20
    ),
    ("cuda", True): Plan("llama", (8, 64, 256), (128, 2048), 7, 1 << 20),
}
"""By device, and whether it shall be quick. A million tokens are more than one GPU's memory holds
of all of Llama-3.1-8B's layers."""


class Case(NamedTuple):
    """A kernel on the batches of one size and total."""

    kernel: str
    batch: int
    mean: int
    """Context of a request, in tokens."""
    padding_tokens: Mapping[str, int]
    """By spread."""
    seconds: Mapping[str, Sequence[float]]
    """By spread, one per round."""

    def step_s(self, spread: str) -> float:
        """The median of a step's attention, in seconds."""
        return statistics.median(self.seconds[spread])

    def ratio(self, spread: str) -> float:
        """Times as long as the batch of equal lengths: the median of the rounds' ratios."""
        return median_ratio(self.seconds[spread], self.seconds[EQUAL])

    def noise(self) -> float:
        """Between the quartiles of the rounds, relative to their median, of the least steady."""
        quartiles = [
            statistics.quantiles(seconds, n=4, method="inclusive")
            for seconds in self.seconds.values()
        ]
        return max((high - low) / middle for low, middle, high in quartiles)

    def extras(self) -> list[Extra]:
        """What each spread took longer than equal lengths, as the ratios have it."""
        equal_s = self.step_s(EQUAL)
        return [
            Extra(self.padding_tokens[spread], (self.ratio(spread) - 1) * equal_s, equal_s)
            for spread in self.seconds
            if spread != EQUAL
        ]


class Cost(NamedTuple):
    """What a spread costs with one kernel at one batch size."""

    kernel: str
    batch: int
    typical: float
    """The median over spreads and contexts of the ratio to equal lengths, less 1."""
    worst: float
    worst_case: str
    padding: PaddingCost
    context_s: float
    """Seconds per token of context, of the longest batch of equal lengths."""


def main(argv: list[str]) -> int:
    """``python -m bench kernels``."""
    args = _parser().parse_args(argv)
    device = _device(args.device)
    if device is None:
        return 1
    plan = PLANS[device, args.quick]
    shape = SHAPES[args.shape or plan.shape]
    kernels = _kernels(device, shape, args)
    heads = f"{shape.heads} query and {shape.kv_heads} key-value heads of {shape.head_size}"
    print(f"{kernels.description}\n{args.dtype}, {heads}, {shape.layers} layers", flush=True)
    cases: list[Case] = []
    for batch, mean in _sizes(args, plan, shape, kernels.memory_bytes):
        found = _measure(kernels, batch, mean, args.rounds or plan.rounds, args.seed)
        cases.extend(found)
        for case in found:
            print(f"{case.kernel}: {batch} x {mean}: {1e3 * case.step_s(EQUAL):.3g} ms", flush=True)
    if not cases:
        print("nothing to measure: every batch is too large")
        return 1
    costs = _costs(cases)
    _print(cases, costs)
    if args.csv:
        _write_csv(args.csv, [case for case in cases if case.kernel == kernels.csv_kernel])
    detail = {
        "device": kernels.description,
        "cases": [{**case._asdict(), "noise": case.noise()} for case in cases],
        "costs": [{**cost._asdict(), "padding": cost.padding._asdict()} for cost in costs],
        "options": str(vars(args)),
    }
    report.write(args.json, "kernels", _summary(costs), detail)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench kernels", description=__doc__)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="(default: cuda llama, cpu demo)")
    parser.add_argument("--dtype", choices=sorted(VALUE_BYTES), default="bfloat16")
    parser.add_argument("--batches", type=_whole_numbers, help="requests, comma-separated")
    parser.add_argument("--contexts", type=_whole_numbers, help="mean tokens, comma-separated")
    parser.add_argument("--rounds", type=_rounds, help="that count, of each batch")
    parser.add_argument("--most-tokens", type=int, help="of a batch; larger ones are left out")
    parser.add_argument(
        "--graph",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run the GPU's kernels from a CUDA graph, as SGLang does (default: %(default)s)",
    )
    parser.add_argument("--threads", type=int, help="of the CPU (default: as many as torch takes)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="few batches, 7 rounds")
    parser.add_argument("--json", type=Path, default=None, help="write the figures here")
    parser.add_argument("--csv", type=Path, default=None, help="write the steps here")
    return parser


def _whole_numbers(text: str) -> tuple[int, ...]:
    values = tuple(int(part) for part in text.split(","))
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more: {text}")
    return values


def _rounds(text: str) -> int:
    if int(text) < 2:
        raise argparse.ArgumentTypeError("quartiles take 2 rounds or more")
    return int(text)


def _device(wanted: str) -> str | None:
    """``cuda`` or ``cpu``; None where the GPU that is asked for is not there. Says why."""
    if wanted == "cpu":
        return "cpu"
    from bench import kernel_gpu

    reason = kernel_gpu.missing()
    if reason is None:
        return "cuda"
    if wanted == "cuda":
        print(f"no FlashInfer: {reason}", file=sys.stderr)
        return None
    print(f"no FlashInfer: {reason}; this CPU's kernels are measured instead")
    return "cpu"


def _kernels(device: str, shape: Shape, args: argparse.Namespace) -> Kernels:
    # Imported here: torch takes seconds, and `python -m bench NAME` imports every benchmark.
    if device == "cuda":
        from bench.kernel_gpu import GpuKernels

        return GpuKernels(shape, args.dtype, args.seed, graph=args.graph)
    from bench.kernel_cpu import CpuKernels

    return CpuKernels(shape, args.dtype, args.seed, args.threads)


def _sizes(
    args: argparse.Namespace, plan: Plan, shape: Shape, memory_bytes: int
) -> list[tuple[int, int]]:
    """Batch and mean context of what fits; names what does not."""
    in_memory = memory_bytes // shape.bytes_per_token(VALUE_BYTES[args.dtype])
    most_tokens = min(in_memory, args.most_tokens or plan.most_tokens)
    every = [
        (batch, mean)
        for batch in args.batches or plan.batches
        for mean in args.contexts or plan.contexts
    ]
    large = [f"{batch} x {mean}" for batch, mean in every if batch * mean > most_tokens]
    if large:
        print(f"left out, more than {most_tokens} tokens: {', '.join(large)}")
    return [(batch, mean) for batch, mean in every if batch * mean <= most_tokens]


def _measure(kernels: Kernels, batch: int, mean: int, rounds: int, seed: int) -> list[Case]:
    """Every kernel on every spread, in an order that turns from round to round."""
    # A single request can't spread.
    spreads = list(SPREADS) if batch > 1 else [EQUAL]
    contexts = {spread: lengths(spread, batch, mean, seed) for spread in spreads}
    timed = kernels.prepare(contexts)
    seconds: dict[str, dict[str, list[float]]] = {
        kernel: {spread: [] for spread in spreads} for kernel in timed
    }
    for index in range(-WARM_UP_ROUNDS, rounds):
        for kernel, by_spread in timed.items():
            for spread in in_turn(spreads, index):
                took_s = by_spread[spread]()
                if index >= 0:
                    seconds[kernel][spread].append(took_s)
    pads = {spread: padding(contexts[spread]) for spread in spreads}
    return [Case(kernel, batch, mean, pads, seconds[kernel]) for kernel in timed]


def _costs(cases: Sequence[Case]) -> list[Cost]:
    """By kernel and batch, of the batches that can spread."""
    groups: dict[tuple[str, int], list[Case]] = {}
    for case in cases:
        if case.batch > 1:
            groups.setdefault((case.kernel, case.batch), []).append(case)
    return [_cost(kernel, batch, found) for (kernel, batch), found in sorted(groups.items())]


def _cost(kernel: str, batch: int, cases: Sequence[Case]) -> Cost:
    ratios = {
        f"{spread} at {case.mean}": case.ratio(spread)
        for case in cases
        for spread in case.seconds
        if spread != EQUAL
    }
    worst = max(ratios, key=lambda name: ratios[name])
    longest = max(cases, key=lambda case: case.mean)
    return Cost(
        kernel,
        batch,
        statistics.median(ratios.values()) - 1,
        ratios[worst] - 1,
        worst,
        padding_cost([extra for case in cases for extra in case.extras()]),
        longest.step_s(EQUAL) / (batch * longest.mean),
    )


def _print(cases: Sequence[Case], costs: Sequence[Cost]) -> None:
    others = [spread for spread in SPREADS if spread != EQUAL]
    rows: list[list[Any]] = [
        [
            case.kernel,
            case.batch,
            case.mean,
            1e3 * case.step_s(EQUAL),
            case.noise(),
            *(case.ratio(spread) if spread in case.seconds else None for spread in others),
        ]
        for case in sorted(cases, key=lambda case: case.kernel)
    ]
    print("\nA step's attention where lengths are equal, and times as long where they spread:")
    headers = [
        "kernel",
        "batch",
        "context",
        "equal ms",
        "noise",
        *(f"x {spread}" for spread in others),
    ]
    print(report.table(headers, rows))
    unsteady = sum(case.noise() > STEADY for case in cases)
    if unsteady:
        print(
            f"{unsteady} of {len(cases)} batches were unsteady (noise above {STEADY}): "
            "repeat it on a machine that does nothing else"
        )
    print("\nWhat a spread costs, and the seconds per padding token nearest to it:")
    for cost in costs:
        per_token_s, error_s = cost.padding
        print(
            f"{cost.kernel}, batch {cost.batch}: a spread costs {100 * cost.typical:.1f} % at this "
            f"batch (at worst {100 * cost.worst:.1f} %, {cost.worst_case}); "
            f"{per_token_s:+.2g} s per padding token, +- {error_s:.1g}, "
            f"{per_token_s / cost.context_s:+.3f} of a context token's: {cost.padding.verdict()}"
        )


def _write_csv(path: Path, cases: Sequence[Case]) -> None:
    """A row per batch, its duration the median: one stall must not count as a step."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(CSV_COLUMNS)
        for case in cases:
            for spread, pad in case.padding_tokens.items():
                total = case.batch * case.mean
                writer.writerow([case.batch, total, 0, case.step_s(spread), pad])
    print(f"written to {path}")


def _summary(costs: Sequence[Cost]) -> dict[str, float]:
    found: dict[str, float] = {}
    for cost in costs:
        found[f"{cost.kernel} {cost.batch} spread"] = round(cost.typical, 4)
        found[f"{cost.kernel} {cost.batch} padding_s"] = cost.padding.per_token_s
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
