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
from bench.replay import (
    Figures,
    error,
    percent,
    real_figures,
    replay,
    rows_of,
    simulated_figures,
    summarise,
)
from bench.simulations.analysts import AnalystsOfRuns
from bench.turns import in_turn


class Served(msgspec.Struct, frozen=True):
    """What ``bench serve --json`` wrote, as far as it matters here."""

    targets: Targets
    seconds: float
    """Of arrivals, per round."""
    offers: list[list[Offer]]
    """By round."""
    results: dict[str, list[Result]]
    """By policy, rounds behind each other. The policies are in the order of the first round."""
    paces: dict[str, list[float]] = {}
    """Seconds of the reference step in each turn, by policy and round; of older runs nothing."""

    def order(self, number: int) -> list[str]:
        """Policies in the order in which they had their turns in a round, from 0."""
        return in_turn(list(self.results), number)

    def step_s(self, policy: str, number: int) -> float:
        """Of the reference step in a policy's turn of a round, from 0; 0: not known."""
        paces = self.paces.get(policy, [])
        return paces[number] if number < len(paces) else 0.0

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
    summaries, rows, rounds = [], [], []
    analysts = AnalystsOfRuns(args.analyst, args.seed)
    for number in range(len(served.offers)):
        real, simulated = _round(served, number, known, analysts, args)
        for policy in served.results:
            rows += rows_of(f"{policy} #{number + 1}", real[policy], simulated[policy])
        summaries.append(summarise(real, simulated))
        rounds.append((real, simulated))
    print(report.table(["policy", "figure", "real", "simulated", "error"], rows))
    together = [_together([one[place] for one in rounds]) for place in (0, 1)]
    print(report.table(["all rounds", "token goodput/s", "simulated", "error"], _rows(*together)))
    summary = _summary(*together) | {
        "goodput_error_fraction_worst_round": max(
            one["goodput_error_fraction_worst"] for one in summaries
        ),
        "same_ranking_every_round": min(one["same_ranking"] for one in summaries),
    }
    detail = [{"real": real, "simulated": simulated} for real, simulated in rounds]
    print(", ".join(f"{name} {value:g}" for name, value in summary.items()))
    extra = {"rounds": detail, "known": known, "options": str(vars(args))}
    report.write(args.json, "calibrate", summary, msgspec.to_builtins(extra))
    return 0


def _known(path: Path, targets: Targets) -> Known:
    raw: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    return msgspec.structs.replace(msgspec.convert(raw["known"], Known), targets=targets)


def _together(rounds: list[dict[str, Figures]]) -> dict[str, float]:
    """Token goodput of each policy over all rounds, per second."""
    names = rounds[0]
    return {
        name: sum(one[name].token_goodput_per_s for one in rounds) / len(rounds) for name in names
    }


def _rows(real: dict[str, float], simulated: dict[str, float]) -> list[list[object]]:
    return [
        [name, value, simulated[name], percent(error(simulated[name], value))]
        for name, value in real.items()
    ]


def _summary(real: dict[str, float], simulated: dict[str, float]) -> dict[str, float]:
    errors = [error(simulated[name], value) for name, value in real.items()]
    ranked = [sorted(real, key=lambda name: of[name]) for of in (real, simulated)]
    return {
        "goodput_error_fraction_worst": round(
            max(1.0 if one is None else abs(one) for one in errors), 4
        ),
        "same_ranking": float(ranked[0] == ranked[1]),
    }


def _round(
    served: Served, number: int, known: Known, analysts: AnalystsOfRuns, args: argparse.Namespace
) -> tuple[dict[str, Figures], dict[str, Figures]]:
    real, simulated = {}, {}
    offers, results = served.rounds()[number]
    # In the order of the turns: what the analysts have learnt until then depends on it.
    for policy in served.order(number):
        mine = results[policy]
        slower = 1.0 if args.no_pace else known.pace(served.step_s(policy, number))
        others = [all_ for name, all_ in results.items() if name != policy]
        load = replay(offers, mine, others, served.targets, served.seconds, known.engine)
        result = simulate(load.workload, policy, known, analysts.of_next_run(), slower)
        real[policy] = real_figures(mine, served.seconds)
        simulated[policy] = simulated_figures(result, served.seconds, known.engine)
        print(
            f"{policy}: steps {slower:.3f} times as long; lengths of {load.num_borrowed} of "
            f"{len(offers)} from other policies, of {load.num_guessed} guessed",
            flush=True,
        )
    return real, simulated
