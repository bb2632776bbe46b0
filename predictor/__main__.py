"""``python -m predictor``: the predictor process. ``launch.py`` starts and watches it."""

import argparse
import sys

from core import hosting
from core.clock import MonotonicClock, time_of_day_s
from core.hosting import EXIT_FAILED, Host
from predictor.client import PredictorProbe
from predictor.forest import warm_up
from predictor.model import LengthModel
from predictor.protocol import server_codec
from predictor.server import PredictorServer, restored_model
from predictor.state import FORMAT_VERSION


def main(argv: list[str]) -> int:
    """Serve until SIGTERM or SIGINT, or until the parent process is gone."""
    args = _parser().parse_args(argv)
    host = Host("predictor", args, FORMAT_VERSION)
    model, source = restored_model(
        lambda: LengthModel(seed=args.seed, quantile=args.quantile), host.store
    )
    warm_up()
    channel = host.listen(server_codec(), PredictorProbe)
    if channel is None:
        return EXIT_FAILED
    server = PredictorServer(
        model,
        channel.send,
        MonotonicClock(),
        session=host.session,
        store=host.store,
        checkpoint_every_s=args.checkpoint_seconds,
        time_of_day_s=time_of_day_s,
    )
    if model.forest is None and not host.is_stopping:
        server.fit_now()
    return host.run(channel, server, f"from={source} rows={len(model.reservoir)}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m predictor", description=__doc__)
    hosting.add_arguments(parser)
    parser.add_argument("--quantile", type=float, default=0.9, help="of the bound that is watched")
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
