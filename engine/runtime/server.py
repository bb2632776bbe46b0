"""The SGLang server process: SGLang's own launch with our hooks, middleware and checks.

Run by ``launch.py`` as ``python -m engine.runtime.server``; its arguments are ours and all
of SGLang's.
"""

import logging
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from core.clock import MonotonicClock
from core.programs import ProgramBook
from engine.runtime import flags
from engine.runtime.flags import UsageError
from engine.runtime.overrides import CLIP_VARIABLE, offer_cpu_attention
from engine.runtime.settings import CPU_ATTENTION, Settings, from_environment

logger = logging.getLogger(__name__)

EXIT_USAGE = 2


def build_parser() -> flags.Parser:
    """Our flags and every flag of SGLang, as ``--help`` shows them."""
    from sglang.srt.server_args import ServerArgs

    offer_cpu_attention()
    parser = flags.Parser(
        prog="launch.py",
        description="Serve a model with SLO-aware scheduling on the SGLang runtime.",
        allow_abbrev=False,
    )
    flags.add_own_flags(parser)
    ServerArgs.add_cli_args(parser)
    return parser


def main(argv: list[str]) -> int:
    """Run the server until it is told to stop; the exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        settings = flags.own_settings(args)
        settings = _prepare(args, settings)
        settings.to_environment()
        server_args = _server_args(argv, args, settings)
        flags.check_supported(server_args, settings)
    except UsageError as error:
        flags.print_error(str(error))
        return EXIT_USAGE
    except (ValueError, OSError, RuntimeError, AssertionError, ImportError) as error:
        flags.print_error(_first_line(error))
        return EXIT_USAGE
    return _serve(server_args, settings)


CPU_RUNNING_REQUESTS = 32


def _prepare(args: Any, settings: Settings) -> Settings:
    """Fill in what depends on SGLang's flags. Raises UsageError."""
    import torch

    if os.environ.get("SGLANG_RUST_SERVER", "0").lower() not in ("", "0", "false"):
        raise UsageError("SGLANG_RUST_SERVER is not supported: our API is in the Python server")
    if not settings.is_stock:
        # SGLang keeps KV free for up to 4096 tokens of each answer before it admits a prompt, and
        # stops at the first that does not fit. Our plan counts a frame ahead and takes KV back
        # where it must; the two have to agree, or what is planned never starts.
        os.environ.setdefault(CLIP_VARIABLE, str(settings.scheduler.frame_steps))
    running = args.max_running_requests
    if not torch.cuda.is_available():
        _check_cpu_flags(args)
        _leave_a_core_free()
        running = running or CPU_RUNNING_REQUESTS
    return msgspec.structs.replace(settings, max_batch=running)


def _resident_requests(args: Any, settings: Settings) -> int | None:
    """SGLang's --max-running-requests: those that run together and those that may rest."""
    if settings.max_batch is None or settings.is_stock:
        return settings.max_batch
    parked = args.max_parked_requests
    return settings.max_batch + (settings.max_batch if parked is None else parked)


def _check_cpu_flags(args: Any) -> None:
    """Refuse flags that need a GPU, and choose what works without one."""
    for name in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        value = getattr(args, name, None)
        if value is not None and value not in CPU_ATTENTION:
            flag, known = "--" + name.replace("_", "-"), " or ".join(CPU_ATTENTION)
            raise UsageError(f"{flag} {value} needs a GPU and there is none; use {known}")
    if args.device not in (None, "cpu"):
        raise UsageError(f"--device {args.device}: no such device on this machine; use cpu")
    if getattr(args, "enable_hierarchical_cache", False):
        raise UsageError("--enable-hierarchical-cache needs a GPU and there is none")
    if args.sampling_backend not in (None, "pytorch"):
        raise UsageError(f"--sampling-backend {args.sampling_backend} needs a GPU; use pytorch")
    if args.tp_size > 1:
        raise UsageError("--tp-size above 1 needs GPUs and there are none")


def _server_args(argv: list[str], args: Any, settings: Settings) -> Any:
    """SGLang's ServerArgs from the arguments that are not ours."""
    from sglang.srt.server_args import prepare_server_args

    own = flags.Parser(add_help=False, allow_abbrev=False)
    flags.add_own_flags(own)
    _, rest = own.parse_known_args(argv)
    import torch

    if not torch.cuda.is_available():
        rest += _cpu_defaults(args)
    resident = _resident_requests(args, settings)
    if resident is not None:
        rest += ["--max-running-requests", str(resident)]
    return prepare_server_args(rest)


def _cpu_defaults(args: Any) -> list[str]:
    """Flags that a CPU wants and the user did not give."""
    extra = ["--device", "cpu", "--sampling-backend", "pytorch"]
    if args.attention_backend is None:
        extra += ["--attention-backend", CPU_ATTENTION[0]]
    # Idle scheduler loops spin; on a CPU they would take the cores that the model needs.
    extra += ["--sleep-on-idle"]
    if args.dtype == "auto" and not _has_fast_bfloat16():
        extra += ["--dtype", "float32"]
    if args.max_total_tokens is None:
        extra += ["--max-total-tokens", "65536"]
    if args.chunked_prefill_size is None:
        extra += ["--chunked-prefill-size", "1024"]
    return extra


def _has_fast_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 in hardware; without, float32 is several times faster."""
    try:
        flags_line = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return "avx512_bf16" in flags_line or "amx_bf16" in flags_line


def _leave_a_core_free() -> None:
    """Let the model's threads not fight with the HTTP and detokenizer processes for cores.

    A parallel region waits for its slowest thread, and one that lost its core to another
    process is slower by a scheduler's time slice: tens of times the region itself.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 2) - 1)))


def run_scheduler_process(*args: Any, **kwargs: Any) -> Any:
    """SGLang's scheduler process, after making sure that our scheduler is in it.

    SGLang only logs a plugin that failed to load and would go on with its own scheduler.
    """
    from sglang.srt.managers import scheduler as sglang_scheduler
    from sglang.srt.plugins import load_plugins

    load_plugins()
    settings = from_environment()
    if settings is not None and not settings.is_stock:
        from engine.runtime.frame_scheduler import FrameScheduler

        if sglang_scheduler.Scheduler is not FrameScheduler:
            raise RuntimeError("SGLang did not take our scheduler; is jitserve installed here?")
    return sglang_scheduler.run_scheduler_process(*args, **kwargs)


def _serve(server_args: Any, settings: Settings) -> int:
    from sglang.srt.entrypoints import http_server
    from sglang.srt.utils import kill_itself_when_parent_died
    from starlette.middleware import Middleware

    from engine.runtime import http_layer, routes

    kill_itself_when_parent_died()
    app = http_server.app
    programs = ProgramBook(timeout_s=settings.scheduler.program_timeout_s)
    clock = MonotonicClock()
    # At the end of the list is innermost: behind authentication and decompression.
    app.user_middleware.append(
        Middleware(
            http_layer.SloMiddleware,
            slo=settings.slo,
            clock=clock,
            programs=programs,
            model=server_args.served_model_name or server_args.model_path,
            is_draining=_is_draining,
            reads_cues=bool(settings.predictor_address),
        )
    )
    routes.add_routes(app, programs)
    http_server.launch_server(server_args, run_scheduler_process_func=run_scheduler_process)
    return 0


def _is_draining() -> bool:
    from sglang.srt.entrypoints import http_server

    state = http_server.get_global_state()
    return state is not None and bool(state.tokenizer_manager.gracefully_exit)


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


if __name__ == "__main__":
    # SGLang's processes import this module by name; it must not be called __main__ there.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from engine.runtime.server import main as run

    try:
        code = run(sys.argv[1:])
    except SystemExit as end:
        if end.code != EXIT_USAGE:
            raise
        code = EXIT_USAGE
    sys.stdout.flush()
    sys.stderr.flush()
    if code == EXIT_USAGE:
        # At once: unloading torch takes a second in which others would say more, and what is
        # wrong has to be the last line.
        os._exit(code)
    sys.exit(code)
