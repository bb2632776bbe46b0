"""The command line of the benchmarks."""

import argparse
import sys
from collections.abc import Callable, Mapping

from bench import (
    calibrate,
    collect,
    decode,
    graphs,
    kernels,
    optimum,
    overhead,
    plot,
    predictor,
    prior,
    profiles,
    programs,
    scheduler,
    serve,
    sim,
    storm,
    workloads,
)

BENCHES: Mapping[str, Callable[[list[str]], int]] = {
    "calibrate": calibrate.main,
    "collect": collect.main,
    "decode": decode.main,
    "graphs": graphs.main,
    "kernels": kernels.main,
    "optimum": optimum.main,
    "overhead": overhead.main,
    "plot": plot.main,
    "predictor": predictor.main,
    "prior": prior.main,
    "profiles": profiles.main,
    "programs": programs.main,
    "scheduler": scheduler.main,
    "serve": serve.main,
    "sim": sim.main,
    "storm": storm.main,
    "workloads": workloads.main,
}


def main(argv: list[str]) -> int:
    """Run one benchmark; its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Benchmarks on the real server. `python -m bench NAME --help` has the flags.",
        epilog="overhead: throughput against stock SGLang at saturation. "
        "scheduler: time to plan a frame. "
        "optimum: goodput against the exact optimum of small instances. "
        "serve: SLO attainment and goodput of several policies at an overload. "
        "calibrate: the same load on the real server and in the simulator. "
        "decode: step times of the attention backends that this machine has, side by side. "
        "kernels: what a spread of lengths costs in decode attention, on a GPU or this CPU. "
        "plot: a chart of a serve run. "
        "predictor: the length predictor's latency, coverage and rivals. "
        "graphs: time of a match, size of a pattern, and errors of the stages' shares. "
        "programs: deadlines met by real programs, with what is foreseen of them and without. "
        "collect: answer lengths of prompts on a running server, to learn from. "
        "prior: make what the length predictor starts from. "
        "sim: the paper's evaluation in the simulator, every policy, every figure. "
        "storm: preemptions over long contexts, with KV swapped and computed again. "
        "workloads: the applications' lengths beside the paper's, and the arrivals.",
    )
    parser.add_argument("name", choices=sorted(BENCHES))
    args = parser.parse_args(argv[:1])
    return BENCHES[args.name](argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
