"""``python -m bench optimum``: every policy against the exact optimum of small instances.

The theorem of the paper (appendix) promises GMAX at least 1/8.56 of what the best offline
schedule earns, whatever arrives. Here thousands of random instances are solved exactly.
"""

import argparse
import random
import statistics
from pathlib import Path

from bench import report
from bench.exact import achieved, optimum, random_instance
from scheduler.policies import CANCEL_SUFFIX, POLICIES

THEOREM = 1 / 8.56


def main(argv: list[str]) -> int:
    """Solve, compare, print; exit code 1 where a gmax policy breaks the theorem's bound."""
    parser = argparse.ArgumentParser(prog="python -m bench optimum", description=__doc__)
    parser.add_argument("--instances", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--policies", default="", help="comma-separated; default: all but +cancel")
    parser.add_argument("--json", type=Path, default=None, metavar="PATH")
    args = parser.parse_args(argv)
    plain = [name for name in POLICIES if not name.endswith(CANCEL_SUFFIX)]
    names = args.policies.split(",") if args.policies else plain
    rng = random.Random(args.seed)
    ratios: dict[str, list[float]] = {name: [] for name in names}
    num_solved = 0
    while num_solved < args.instances:
        instance = random_instance(rng)
        best = optimum(instance)
        if best == 0:
            continue
        num_solved += 1
        for name in names:
            ratios[name].append(achieved(instance, name) / best)
    rows = [
        [name, min(values), statistics.fmean(values), sum(value >= 1 for value in values)]
        for name, values in ratios.items()
    ]
    print(report.table(["policy", "worst ratio", "mean ratio", "optimal"], rows))
    print(f"{num_solved} instances; the theorem's bound for GMAX is {THEOREM:.3f}")
    summary: dict[str, float] = {"instances": num_solved}
    for name, values in ratios.items():
        summary[f"worst_ratio_{name}"] = min(values)
        summary[f"mean_ratio_{name}"] = statistics.fmean(values)
    report.write(args.json, "optimum", summary, {"seed": args.seed, "ratios": ratios})
    ours = [
        values for name, values in ratios.items() if name.split("+")[0] in ("gmax", "gmax-paper")
    ]
    return int(any(min(values) < THEOREM for values in ours))
