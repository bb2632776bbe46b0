"""``python -m predictor``: the predictor process. ``launch.py`` starts and watches it."""

import argparse
import logging
import os
import secrets
import shutil
import signal
import sys
from pathlib import Path
from types import FrameType

import zmq

from core.channel import RouterChannel
from core.checkpoint import CheckpointStore
from core.clock import MonotonicClock, time_of_day_s
from predictor.client import PredictorProbe
from predictor.forest import warm_up
from predictor.model import LengthModel
from predictor.protocol import server_codec
from predictor.server import Loop, PredictorServer, restored_model
from predictor.state import FORMAT_VERSION

logger = logging.getLogger("predictor")

EXIT_FAILED = 1
TAKEN_LIMIT_S = 0.3


def main(argv: list[str]) -> int:
    """Serve until SIGTERM or SIGINT, or until the parent process is gone."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="[predictor] %(levelname)s %(message)s")
    stopping: list[int] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        stopping.append(number)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    store = _store(args.state_dir)
    model, source = restored_model(
        lambda: LengthModel(seed=args.seed, quantile=args.quantile), store
    )
    warm_up()
    if _is_taken(args.address):
        logger.error("another predictor answers at %s", args.address)
        return EXIT_FAILED
    try:
        channel = RouterChannel(args.address, server_codec())
    except (ValueError, zmq.ZMQError) as error:
        logger.error("cannot listen on %s: %s", args.address, error)
        return EXIT_FAILED
    server = PredictorServer(
        model,
        channel.send,
        MonotonicClock(),
        session=secrets.randbits(62),
        store=store,
        checkpoint_every_s=args.checkpoint_seconds,
        time_of_day_s=time_of_day_s,
    )
    if model.forest is None and not stopping:
        server.fit_now()
    if stopping:
        # Told to end while it was starting: nothing has been learnt, nothing is to be said.
        channel.close()
        return 0
    logger.info("ready address=%s from=%s rows=%d", args.address, source, len(model.reservoir))
    Loop(channel, server, lambda: bool(stopping) or _is_orphan(args.parent)).run()
    channel.close()
    if args.owned_folder is not None and _is_orphan(args.parent):
        # Whoever made it for us is gone and cannot take it away.
        shutil.rmtree(args.owned_folder, ignore_errors=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m predictor", description=__doc__)
    parser.add_argument("--address", required=True, help="ipc://PATH or tcp://HOST:PORT")
    parser.add_argument(
        "--state-dir",
        type=Path,
        default=None,
        help="folder of the checkpoints (default: nothing is kept)",
    )
    parser.add_argument("--checkpoint-seconds", type=float, default=60.0)
    parser.add_argument("--quantile", type=float, default=0.9, help="of the bound that is watched")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--parent", type=int, default=0, help="end when the parent process is no longer this one"
    )
    parser.add_argument(
        "--owned-folder",
        type=Path,
        default=None,
        help="a folder to remove when the parent process is gone",
    )
    return parser


def _store(folder: Path | None) -> CheckpointStore | None:
    if folder is None:
        return None
    try:
        store = CheckpointStore(folder, "predictor", version=FORMAT_VERSION)
    except OSError as error:
        logger.warning("state_unusable folder=%s error=%s: nothing is kept", folder, error)
        return None
    if not store.is_owner:
        logger.warning("state_shared folder=%s: another predictor keeps its state there", folder)
    return store


def _is_taken(address: str) -> bool:
    """Whether a predictor answers there: ZeroMQ would take its socket away without a word."""
    try:
        probe = PredictorProbe(address)
    except ValueError:
        return False
    try:
        return probe.status(TAKEN_LIMIT_S) is not None
    finally:
        probe.close()


def _is_orphan(parent: int) -> bool:
    return parent != 0 and os.getppid() != parent


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
