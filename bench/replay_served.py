"""Replays a run of ``bench serve`` in the simulator, turn by turn, without a server.

The engine is what ``bench calibrate`` has found out about it on the same machine. What a client
of ``serve`` gave up on is served on in the simulator, which knows no impatience.
"""

import argparse
from pathlib import Path
from typing import Any

import msgspec

from bench import report
from bench.calibration import Known, simulate
from bench.load import Offer, Result, Targets
from bench.replay import Figures, real_figures, replay, rows_of, simulated_figures, summarise


class Served(msgspec.Struct, frozen=True):
    """What ``bench serve --json`` wrote, as far as it matters here."""

    targets: Targets
    seconds: float
    """Of arrivals, per round."""
    offers: list[list[Offer]]
    """By round."""
    results: dict[str, list[Result]]
    """By policy, rounds behind each other."""

    def rounds(self) -> list[tuple[list[Offer], dict[str, list[Result]]]]:
        """Each round's load, and what came of it with each policy."""
        found, first = [], 0
        for offers in self.offers:
            last = first + len(offers)
            found.append((offers, {name: all_[first:last] for name, all_ in self.results.items()}))
            first = last
        return found


def run(args: argparse.Namespace) -> int:
    """``python -m bench calibrate --served PATH --known PATH``."""
    served = msgspec.json.decode(args.served.read_bytes(), type=Served)
    known = _known(args.known, served.targets)
    summaries, rows, detail = [], [], []
    for number, (offers, results) in enumerate(served.rounds(), start=1):
        real, simulated = _round(served, offers, results, known, args)
        for policy, figures in real.items():
            rows += rows_of(f"{policy} #{number}", figures, simulated[policy])
        summaries.append(summarise(real, simulated))
        detail.append({"real": real, "simulated": simulated})
    print(report.table(["policy", "figure", "real", "simulated", "error"], rows))
    summary = {
        "goodput_error_fraction_worst": max(
            one["goodput_error_fraction_worst"] for one in summaries
        ),
        "same_ranking": min(one["same_ranking"] for one in summaries),
    }
    print(", ".join(f"{name} {value:g}" for name, value in summary.items()))
    extra = {"rounds": detail, "known": known, "options": str(vars(args))}
    report.write(args.json, "calibrate", summary, msgspec.to_builtins(extra))
    return 0


def _known(path: Path, targets: Targets) -> Known:
    raw: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    return msgspec.structs.replace(msgspec.convert(raw["known"], Known), targets=targets)


def _round(
    served: Served,
    offers: list[Offer],
    results: dict[str, list[Result]],
    known: Known,
    args: argparse.Namespace,
) -> tuple[dict[str, Figures], dict[str, Figures]]:
    real, simulated = {}, {}
    for policy, mine in results.items():
        others = [all_ for name, all_ in results.items() if name != policy]
        load = replay(offers, mine, others, served.targets, served.seconds, known.engine)
        result = simulate(load.workload, policy, known, args.analyst, args.seed)
        real[policy] = real_figures(mine, served.seconds)
        simulated[policy] = simulated_figures(result, served.seconds, known.engine)
        print(
            f"{policy}: lengths of {load.num_borrowed} of {len(offers)} from other policies, "
            f"of {load.num_guessed} guessed",
            flush=True,
        )
    return real, simulated
