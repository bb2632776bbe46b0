"""The command line: ours, quick to read, in front of all of SGLang's own flags."""

import argparse
import difflib
import sys
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
import yaml

from core.channel import check_address
from core.terms import SloDefaults
from engine.runtime import custom
from engine.runtime.settings import STOCK_POLICY, Settings, SloConfig
from scheduler.config import SchedulerConfig
from scheduler.policies import CHOICES, POLICIES

SERVICE_CHOICES = ("on", "external", "off")
DEFAULT_PORT = 30000
DEFAULT_SWAP_GIB = Settings(policy="", scheduler=SchedulerConfig()).kv_swap_bytes / 2**30
MOST_SWAP_GIB = 1 << 20
DEFAULT_HOST = "127.0.0.1"


class UsageError(ValueError):
    """The command line asks for something that cannot be; one sentence for the user."""


class Parser(argparse.ArgumentParser):
    """Reports an error in one line; SGLang has hundreds of flags and argparse lists them all."""

    def error(self, message: str) -> NoReturn:
        known = [option for action in self._actions for option in action.option_strings]
        if message.startswith("unrecognized arguments:"):
            flag = next((word for word in message.split() if word.startswith("--")), "")
            close = difflib.get_close_matches(flag.split("=")[0], known, n=1)
            hint = f"; did you mean {close[0]}?" if close else "; --help lists all"
            message += hint
        self.exit(2, f"launch.py: error: {message}\n")


def add_own_flags(parser: argparse.ArgumentParser) -> None:
    """Our flags, with units and defaults in the help."""
    config = SchedulerConfig()
    group = parser.add_argument_group("JITServe")
    group.add_argument(
        "--policy",
        choices=[*POLICIES, STOCK_POLICY],
        default=config.policy,
        metavar="NAME",
        help=f"who decides what runs: {CHOICES} (work whose deadline has passed stops); "
        "sglang: SGLang's own scheduler (default: %(default)s)",
    )
    group.add_argument(
        "--goodput",
        default=config.goodput,
        metavar="OBJECTIVE",
        help="what is maximised: token, request, weights of input and output tokens as 1:2, or "
        "an object of your own by its dotted path, package.module:name (default: %(default)s)",
    )
    group.add_argument(
        "--fairness",
        type=float,
        default=config.fairness,
        metavar="FRACTION",
        help="weight of fairness between tenants against goodput, 0 to 1 (default: %(default)s)",
    )
    group.add_argument(
        "--fairness-function",
        default=config.fairness_function,
        metavar="PATH",
        help="what is fair, by the dotted path of a function of each request's tenant's service "
        "so far (default: who was served least comes first)",
    )
    group.add_argument(
        "--frame-steps",
        type=int,
        default=config.frame_steps,
        metavar="STEPS",
        help="decode steps in a frame, at most (default: %(default)s)",
    )
    group.add_argument(
        "--frame-seconds",
        type=float,
        default=config.frame_s,
        metavar="SECONDS",
        help="length of a frame in seconds, at most (default: %(default)s)",
    )
    group.add_argument(
        "--max-parked-requests",
        type=int,
        default=None,
        metavar="REQUESTS",
        help="requests that may rest with their KV resident beside the --max-running-requests "
        "that run together (default: as many again)",
    )
    group.add_argument(
        "--kv-swap-gib",
        type=float,
        default=DEFAULT_SWAP_GIB,
        metavar="GIB",
        help="host memory for the KV of preempted requests, which is copied back where that is "
        "faster than a prefill; 0: it is always computed again. Without tensor parallelism; "
        "--enable-hierarchical-cache is SGLang's own way (default: %(default)s)",
    )
    group.add_argument(
        "--max-decode-pause",
        type=float,
        default=config.max_decode_pause_s,
        metavar="SECONDS",
        help="seconds for which prefill may keep running requests from decoding, about "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--length-quantile",
        type=float,
        default=config.length_quantile,
        metavar="FRACTION",
        help="quantile of an answer's length used as its upper bound (default: %(default)s)",
    )
    group.add_argument(
        "--predictor",
        choices=SERVICE_CHOICES,
        default="on",
        metavar="MODE",
        help="the length predictor: on (started and watched here), external (somebody else runs "
        "it at --predictor-address), off: lengths of each class only (default: %(default)s)",
    )
    group.add_argument(
        "--predictor-address",
        default="",
        metavar="ADDRESS",
        help="where the predictor listens: ipc://PATH or tcp://HOST:PORT; whoever reaches it can "
        "teach it (default: a socket that only this server's user can reach)",
    )
    group.add_argument(
        "--predictor-state",
        default="",
        metavar="FOLDER",
        help="where what the predictor has learnt is kept, or none "
        "(default: a folder per model under ~/.cache/jitserve/predictor)",
    )
    group.add_argument(
        "--graphs",
        choices=SERVICE_CHOICES,
        default="on",
        metavar="MODE",
        help="the process that foresees programs: on (started and watched here), external "
        "(somebody else runs it at --graphs-address), off: programs go by what has been seen of "
        "them (default: %(default)s)",
    )
    group.add_argument(
        "--graphs-address",
        default="",
        metavar="ADDRESS",
        help="where the graphs process listens: ipc://PATH or tcp://HOST:PORT; whoever reaches it "
        "can teach it (default: a socket that only this server's user can reach)",
    )
    group.add_argument(
        "--graphs-state",
        default="",
        metavar="FOLDER",
        help="where the shapes of finished programs are kept, or none "
        "(default: a folder per model under ~/.cache/jitserve/graphs)",
    )
    group.add_argument(
        "--program-timeout",
        type=float,
        default=config.program_timeout_s,
        metavar="SECONDS",
        help="a program without a call for so long is over (default: %(default)s)",
    )
    group.add_argument(
        "--slo-config",
        type=Path,
        default=None,
        metavar="FILE",
        help="YAML file of default SLOs: sections default, models, tenants, routes; "
        "times in seconds (default: built-in defaults, see docs/metrics.md)",
    )
    group.add_argument(
        "--drain-seconds",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="after SIGTERM or Ctrl-C: how long running requests may finish (default: %(default)s)",
    )
    group.add_argument(
        "--test-known-lengths",
        action="store_true",
        help="for tests: believe custom_params.known_output_tokens of a request (default: no)",
    )
    group.add_argument(
        "--test-force-moves-every",
        type=int,
        default=0,
        metavar="STEPS",
        help="for tests: park and preempt running requests every so many steps; 0: never "
        "(default: %(default)s)",
    )


_FLAG_OF_SETTING = {
    "frame_steps": "--frame-steps",
    "frame_s": "--frame-seconds",
    "max_decode_pause_s": "--max-decode-pause",
    "length_quantile": "--length-quantile",
    "program_timeout_s": "--program-timeout",
    "fairness": "--fairness",
    "goodput": "--goodput",
    "fairness_function": "--fairness-function",
}


def own_settings(args: argparse.Namespace) -> Settings:
    """The settings that our flags describe. Raises UsageError naming the flag."""
    is_stock = args.policy == STOCK_POLICY
    if args.max_parked_requests is not None and args.max_parked_requests < 0:
        raise UsageError("--max-parked-requests must be 0 or more")
    if not 0 <= args.kv_swap_gib <= MOST_SWAP_GIB:
        raise UsageError(f"--kv-swap-gib must be a number from 0 to {MOST_SWAP_GIB}")
    if args.test_force_moves_every < 0:
        raise UsageError("--test-force-moves-every must be 0 or more")
    if not 0 <= args.drain_seconds < float("inf"):
        raise UsageError("--drain-seconds must be a number of seconds, 0 or more")
    try:
        scheduler = SchedulerConfig(
            policy=SchedulerConfig().policy if is_stock else args.policy,
            frame_steps=args.frame_steps,
            frame_s=args.frame_seconds,
            length_quantile=args.length_quantile,
            max_decode_pause_s=args.max_decode_pause,
            program_timeout_s=args.program_timeout,
            goodput=args.goodput,
            fairness=args.fairness,
            fairness_function=args.fairness_function,
        )
        custom.load(scheduler)
    except custom.CustomError as error:
        raise UsageError(f"{_FLAG_OF_SETTING[error.setting]} {error}") from error
    except ValueError as error:
        name, _, complaint = str(error).partition(" ")
        raise UsageError(f"{_FLAG_OF_SETTING.get(name, name)} {complaint}") from error
    return Settings(
        policy=args.policy,
        scheduler=scheduler,
        slo=read_slo_config(args.slo_config),
        predictor_address=_address(args, "predictor"),
        graphs_address=_address(args, "graphs"),
        trusts_known_lengths=args.test_known_lengths,
        kv_swap_bytes=int(args.kv_swap_gib * 2**30),
        force_moves_every=args.test_force_moves_every,
    )


def _address(args: argparse.Namespace, service: str) -> str:
    """Where a service beside the server listens; empty where there is none."""
    mode, address = getattr(args, service), getattr(args, f"{service}_address")
    if mode == "external" and not address:
        raise UsageError(f"--{service} external needs --{service}-address")
    if mode == "off" and address:
        raise UsageError(f"--{service}-address makes no sense with --{service} off")
    if address:
        try:
            check_address(address)
        except ValueError as error:
            raise UsageError(f"--{service}-address {error}") from error
    return str(address)


def read_slo_config(path: Path | None) -> SloConfig:
    """Read the file of ``--slo-config``. Raises UsageError saying what is wrong in it."""
    if path is None:
        return SloConfig()
    try:
        data: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--slo-config {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(f"--slo-config {path}: not valid YAML: {_problem(error)}") from error
    data = {} if data is None else data
    # Entry by entry first: msgspec does not say in which entry of a table the mistake is.
    tables = data if isinstance(data, dict) else {}
    for table in ("models", "tenants", "routes"):
        entries = tables.get(table)
        for key, entry in entries.items() if isinstance(entries, dict) else ():
            _convert(entry, SloDefaults, path, f"{table}.{key}")
    return _convert(data, SloConfig, path, "")


def _problem(error: Exception) -> str:
    """What is wrong with a YAML file, and in which line where that is known."""
    mark = getattr(error, "problem_mark", None)
    line = "" if mark is None else f"line {mark.line + 1}: "
    return line + str(getattr(error, "problem", None) or error).splitlines()[0]


T = TypeVar("T")


def _convert(data: Any, kind: type[T], path: Path, place: str) -> T:
    """``data`` as ``kind``. Raises UsageError naming the file and the place in it."""
    try:
        return msgspec.convert(data, kind)
    except ValueError as error:
        complaint, _, inner = str(error).partition(" - at `$")
        where = f"{place}{inner.rstrip('`')}".strip(".")
        prefix = f"{where}: " if where else ""
        raise UsageError(f"--slo-config {path}: {prefix}{complaint}") from error


def check_supported(server_args: Any, settings: Settings) -> None:
    """Refuse what our scheduler cannot serve yet. Raises UsageError with a sentence.

    Args:
        server_args: SGLang's parsed ``ServerArgs``.
    """
    if server_args.tokenizer_worker_num != 1:
        raise UsageError(
            "--tokenizer-worker-num above 1 is not supported: SLOs of programs "
            "are kept in one HTTP process"
        )
    if settings.is_stock:
        return
    refused = [sentence for is_asked, sentence in _unsupported(server_args) if is_asked]
    if refused:
        raise UsageError(
            f"{refused[0]} is not supported with --policy {settings.policy} yet; "
            "use --policy sglang for SGLang's own scheduler"
        )


def _unsupported(args: Any) -> list[tuple[bool, str]]:
    return [
        (args.speculative_algorithm is not None, "speculative decoding (--speculative-algorithm)"),
        (args.pp_size > 1, "pipeline parallelism (--pp-size above 1)"),
        (args.disaggregation_mode != "null", "PD disaggregation (--disaggregation-mode)"),
        (args.enable_dp_attention, "DP attention (--enable-dp-attention)"),
        (getattr(args, "enable_pdmux", False), "PD multiplexing (--enable-pdmux)"),
        (
            getattr(args, "dllm_algorithm", None) is not None,
            "diffusion decoding (--dllm-algorithm)",
        ),
        (getattr(args, "enable_hisparse", False), "HiSparse (--enable-hisparse)"),
        (
            args.enable_priority_scheduling,
            "SGLang's priority scheduling (--enable-priority-scheduling)",
        ),
        (args.schedule_policy != "fcfs", "an order of SGLang's own (--schedule-policy)"),
        (bool(args.enable_lora or args.lora_paths), "LoRA (--enable-lora, --lora-paths)"),
        (getattr(args, "nnodes", 1) > 1, "more than one node (--nnodes above 1)"),
    ]


def print_error(message: str) -> None:
    """One clear line for the user."""
    sys.stderr.write(f"launch.py: error: {message}\n")
