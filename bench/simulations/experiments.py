"""The experiments of the paper's evaluation, and ours, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from bench.simulations import cases, drawings, latency_tables, savings, tables, words
from bench.simulations.drawings import Draw
from bench.simulations.grid import ORACLE, OURS, Case, Grid
from bench.simulations.options import Options
from bench.simulations.tables import Table
from bench.simulations.words import Say
from scheduler.policies import ABLATIONS, CANCEL_SUFFIX

BASELINES = ("fcfs", "sarathi", "sjf", "ltr", "plas", "edf", "vtc", "gmax-paper")
RIVALS = (*BASELINES, *(name + CANCEL_SUFFIX for name in BASELINES))
"""``priority`` is ``fcfs`` with chunked prefill where nobody has a priority: it is left out."""
PAPERS = (OURS, "fcfs", "sarathi", "ltr", "plas", "gmax-paper")
"""What the paper compares, and its policy as it has it."""
STRONG = (*PAPERS, "sarathi+cancel", "ltr+cancel", "edf+cancel", "gmax-paper+cancel")
QUICK = (OURS, "sarathi", "ltr", "edf+cancel", "gmax-paper")
SENSITIVE = (OURS, "gmax-paper", "ltr+cancel", "sarathi+cancel")


class Experiment(msgspec.Struct, frozen=True, kw_only=True):
    """One question.

    Attributes:
        title: what is shown.
        paper: what the paper says of it, and where.
        cases: of the options.
        policies, quick_policies: labels.
        views: its tables.
        draw: its charts.
        say: our numbers in a line.
        has_bounds: whether the upper bounds at the operating point are asked for, too.
    """

    title: str
    paper: str
    cases: Callable[[Options], Sequence[Case]]
    policies: tuple[str, ...] = STRONG
    quick_policies: tuple[str, ...] = QUICK
    views: tuple[Callable[[Grid], Table], ...] = (tables.goodput,)
    draw: Draw = drawings.by_name
    say: Say = words.best
    has_bounds: bool = False


EXPERIMENTS: Mapping[str, Experiment] = {
    "table": Experiment(
        title="Goodput of every policy on the paper's mix, by load",
        paper="gmax over LTR 1.3x to 1.7x in tokens and 2.3x to 4.5x in requests, over Autellix "
        "(plas) 5.3x to 6.1x in tokens (section End-to-End Performance)",
        cases=cases.by_load,
        policies=(OURS, *RIVALS, ORACLE),
        quick_policies=(*QUICK, "fcfs", "plas", "ltr+cancel", ORACLE),
        views=(tables.goodput, tables.engine),
        draw=drawings.by_case("load over capacity"),
        say=words.against("fcfs", "sarathi", "ltr", "plas"),
        has_bounds=True,
    ),
    "over-time": Experiment(
        title="Goodput over one window, by when programs arrived",
        paper="gmax stays high over the hour while vLLM and Sarathi decline; over LTR 1.3x to 1.7x "
        "in tokens and 2.3x to 4.5x in requests, over Autellix 5.3x to 6.1x in tokens (figures of "
        "goodput over time)",
        cases=cases.one_point,
        policies=PAPERS,
        quick_policies=PAPERS,
        views=(tables.over_time, tables.goodput),
        draw=drawings.over_time,
        say=words.against("fcfs", "sarathi", "ltr", "plas"),
    ),
    "load": Experiment(
        title="Goodput by load",
        paper="gmax is highest at every load while all baselines drop (figure of goodput across "
        "request loads, no numbers in the text)",
        cases=cases.by_load,
        draw=drawings.by_case("load over capacity"),
    ),
    "oracle": Experiment(
        title="gmax against gmax that knows every length and program",
        paper="within 3 % to 9 % of the oracle (section End-to-End Performance)",
        cases=cases.by_load,
        policies=(OURS, ORACLE),
        quick_policies=(OURS, ORACLE),
        views=(tables.oracle,),
        draw=drawings.by_case("load over capacity"),
        say=words.oracle,
    ),
    "throughput": Experiment(
        title="Output tokens generated, whether of use or not",
        paper="96 % to 98 % of Sarathi's (section End-to-End Performance)",
        cases=cases.by_load,
        policies=(OURS, "sarathi", "fcfs", "gmax-paper"),
        quick_policies=(OURS, "sarathi"),
        views=(tables.throughput, tables.engine),
        draw=drawings.throughput,
        say=words.throughput,
    ),
    "breakdown": Experiment(
        title="Conventional latencies by class",
        paper="lowest TTFT for streams at no excessive TBT, favourable median E2EL for the others, "
        "P95 below SJF's and Autellix's; LTR competitive on E2EL with a deadline (figure of "
        "metrics by class, log scale, no numbers in the text)",
        cases=cases.one_point,
        policies=(*PAPERS, "sjf", "edf"),
        views=(latency_tables.latencies, latency_tables.accepted, tables.engine, tables.goodput),
        draw=drawings.breakdown,
    ),
    "ablation": Experiment(
        title="gmax without its parts",
        paper="both the Request Analyzer and GMAX contribute noticeably (figure of components, no "
        "numbers in the text)",
        cases=cases.one_point,
        policies=(ORACLE, OURS, *ABLATIONS, "sarathi"),
        quick_policies=(ORACLE, OURS, *ABLATIONS, "sarathi"),
        say=words.ratios,
    ),
    "slo-scale": Experiment(
        title="Goodput with tighter and looser objectives",
        paper="2.3x to 2.8x over existing advances in requests and tokens (section Impact of SLO "
        "Constraints)",
        cases=cases.by_slo_scale,
        draw=drawings.by_case("scale of all targets"),
    ),
    "mix": Experiment(
        title="Goodput by the classes' shares, latency:deadline:compound in programs",
        paper="1.8x with 33 % latency- and 66 % deadline-sensitive requests, 1.72x over Sarathi "
        "with latency-sensitive requests only (section Impact of Workload Composition)",
        cases=cases.by_mix,
    ),
    "burst": Experiment(
        title="Goodput by arrival process",
        paper="the default is Microsoft's trace; Poisson is named as an ablation, without numbers",
        cases=cases.by_arrivals,
    ),
    "forecast": Experiment(
        title="Goodput by what is known of lengths and programs, from all to nothing",
        paper="within 3 % to 9 % of the oracle with the paper's forecasts; without the Request "
        "Analyzer noticeably less",
        cases=cases.by_analyst,
        views=(tables.beside("known"), tables.goodput),
        policies=(OURS, "gmax-paper", "ltr", "ltr+cancel"),
        quick_policies=(OURS, "gmax-paper", "ltr+cancel"),
    ),
    "frame": Experiment(
        title="Goodput by the length of a frame",
        paper="50 steps, without an experiment in the evaluation",
        cases=cases.by_frame,
        views=(tables.beside("50 steps"),),
        policies=(OURS,),
        quick_policies=(OURS,),
        draw=drawings.by_case("decode steps of a frame"),
        say=words.extremes,
    ),
    "cutoff": Experiment(
        title="Goodput by the cutoff p, adapted online and fixed",
        paper="p is adapted to what maximises goodput; 0.95 by default, without an experiment in "
        "the evaluation",
        cases=cases.by_cutoff,
        views=(tables.beside("adapted"), tables.goodput),
        policies=(OURS, "gmax-paper"),
        quick_policies=(OURS, "gmax-paper"),
        say=words.extremes,
    ),
    "delta": Experiment(
        title="Goodput by both deltas: worth of waiting, and the margin to displace",
        paper="10 % to displace (appendix), without an experiment in the evaluation",
        cases=cases.by_delta,
        views=(tables.beside("as shipped"),),
        policies=(OURS,),
        quick_policies=(OURS,),
        say=words.extremes,
    ),
    "batch": Experiment(
        title="Goodput by how many requests run together",
        paper="not varied",
        cases=cases.by_batch,
        draw=drawings.by_case("requests that may run together"),
    ),
    "models": Experiment(
        title="Goodput by model and GPU",
        paper="Llama-3.1-8B, Qwen2.5-14B, Qwen3-30B-A3B and Llama-3.1-70B on A100s: gmax over LTR "
        "1.3x to 1.7x in tokens, over Autellix 5.3x to 6.1x",
        cases=cases.by_model,
        say=words.against("ltr", "plas"),
    ),
    "replicas": Experiment(
        title="Goodput of several engines, by who gets a call",
        paper="1.34x to 2.42x over the baseline with data parallelism (section Extending to "
        "Multiple Models)",
        cases=cases.by_replicas,
        policies=(OURS, "sarathi", "ltr", "plas", "ltr+cancel"),
        quick_policies=(OURS, "sarathi", "ltr+cancel"),
    ),
    "edf": Experiment(
        title="gmax against earliest deadline first",
        paper="better goodput, as EDF does not account for heterogeneous objectives (figure "
        "without numbers in the text)",
        cases=cases.by_load,
        policies=(OURS, "edf", "edf+cancel"),
        quick_policies=(OURS, "edf", "edf+cancel"),
        draw=drawings.by_case("load over capacity"),
        say=words.against("edf", "edf+cancel"),
    ),
    "savings": Experiment(
        title="Resources that gmax needs for the goodput of a baseline",
        paper="28.5 % to 83.2 % saved at the same goodput (section Evaluation)",
        cases=cases.for_savings,
        views=(savings.table, tables.goodput),
        draw=drawings.saved,
        say=words.saved,
    ),
    "refusals": Experiment(
        title="Senders who want to be refused rather than wait",
        paper="requests past their waiting time are dropped (section Design), without an "
        "experiment in the evaluation",
        cases=cases.by_patience,
        policies=SENSITIVE,
        quick_policies=(OURS, "sarathi+cancel"),
        views=(latency_tables.accepted, tables.goodput),
    ),
}
"""By the name that ``python -m bench sim`` takes."""
