"""``python -m graphs``: the graphs process. ``launch.py`` starts and watches it."""

import argparse
import sys

from core import hosting
from core.clock import MonotonicClock
from core.hosting import EXIT_FAILED, Host
from core.programs import DEFAULT_TIMEOUT_S
from graphs.client import GraphsProbe
from graphs.protocol import server_codec
from graphs.server import GraphsServer, restored_store
from graphs.state import FORMAT_VERSION, MAX_PATTERNS
from graphs.store import CAPACITY, PatternStore
from graphs.tracker import Tracker

SWITCH_INTERVAL_S = 0.0005


def main(argv: list[str]) -> int:
    """Serve until SIGTERM or SIGINT, or until the parent process is gone."""
    args = _parser().parse_args(argv)
    # Clustering runs in a thread beside the loop: an answer must not wait long for its turn.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    host = Host("graphs", args, FORMAT_VERSION)
    clock = MonotonicClock()
    store, source = restored_store(lambda: PatternStore(args.patterns, clock.now_s()), host.store)
    channel = host.listen(server_codec(), GraphsProbe)
    if channel is None:
        return EXIT_FAILED
    server = GraphsServer(
        Tracker(store, timeout_s=args.program_timeout),
        channel.send,
        clock,
        session=host.session,
        store=host.store,
        checkpoint_every_s=args.checkpoint_seconds,
    )
    return host.run(channel, server, f"from={source} patterns={len(store)}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m graphs", description=__doc__)
    hosting.add_arguments(parser)
    parser.add_argument(
        "--patterns",
        type=int,
        default=CAPACITY,
        choices=range(2, MAX_PATTERNS // 2 + 1),
        metavar="PATTERNS",
        help=f"most patterns kept, 2 to {MAX_PATTERNS // 2} (default: %(default)s)",
    )
    parser.add_argument(
        "--program-timeout",
        type=float,
        default=DEFAULT_TIMEOUT_S,
        help="seconds without a call after which a program is over",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
