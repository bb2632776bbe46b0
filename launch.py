"""The entry: check the command line, prepare the model, and supervise the server processes.

``python launch.py --model PATH_OR_HF_NAME`` (or ``--model demo``). Everything that can be
refused early is refused here, before the runtime is imported.
"""

import argparse
import contextlib
import hashlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from core.channel import MAX_ADDRESS_BYTES
from core.clock import MonotonicClock
from core.service import Probe, SupervisedService
from engine import demo_model
from engine.runtime import flags
from engine.runtime.flags import UsageError
from engine.runtime.settings import STOCK_POLICY
from graphs.client import GraphsProbe
from predictor.client import PredictorProbe

EXIT_FAILED = 1
EXIT_USAGE = 2
PROGRESS_EVERY_S = 10.0
KILL_GRACE_S = 20.0
"""Beyond the drain time: what the server may take to end its processes."""


def main(argv: list[str]) -> int:
    """Run until the server ends or a signal stops it; the exit code."""
    if "-h" in argv or "--help" in argv:
        from engine.runtime.server import build_parser

        build_parser().print_help()
        return 0
    args, rest = _parse(argv)
    try:
        flags.own_settings(args)
        _check_port(args.host, args.port)
        model = _model_folder(args.model)
    except UsageError as error:
        flags.print_error(str(error))
        return EXIT_USAGE
    except (OSError, demo_model.DemoModelError) as error:
        flags.print_error(str(error))
        return EXIT_FAILED
    command = ["--model-path", model, *_without_model(rest)]
    services = Services(args, model)
    command += services.server_flags
    if args.model == "demo" and "--served-model-name" not in argv:
        command += ["--served-model-name", demo_model.DEMO_NAME]
    return Supervisor(args, command, services).run()


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = flags.Parser(prog="launch.py", add_help=False, allow_abbrev=False)
    flags.add_own_flags(parser)
    parser.add_argument("--model", "--model-path", dest="model")
    parser.add_argument("--host", default=flags.DEFAULT_HOST)
    parser.add_argument("--port", type=int, default=flags.DEFAULT_PORT)
    args, _ = parser.parse_known_args(argv)
    if not args.model:
        parser.error("give --model PATH_OR_HF_NAME, or --model demo for a small model to try")
    return args, argv


def _without_model(argv: list[str]) -> list[str]:
    parser = flags.Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model", "--model-path", dest="model")
    return parser.parse_known_args(argv)[1]


def _check_port(host: str, port: int) -> None:
    if not 0 < port < 65536:
        raise UsageError(f"--port must be 1 to 65535, got {port}")
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror:
        raise UsageError(f"--host {host}: no such address") from None
    with socket.socket(address[0], address[1]) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address[4])
        except OSError as error:
            raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from None


def _model_folder(name: str) -> str:
    """The folder or name to give SGLang. Raises UsageError for a path that is not there."""
    if name == "demo":
        return str(demo_model.prepare(_say))
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UsageError(f"--model {name}: the folder has no config.json")
        return str(path)
    is_path = path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    if is_path or path.exists():
        raise UsageError(f"--model {name}: no such model folder")
    return name


def _say(message: str) -> None:
    sys.stderr.write(f"[jitserve] {message}\n")
    sys.stderr.flush()


class Services:
    """The processes beside the server: the length predictor and the one that foresees programs.

    What is wrong with them costs forecasts and a line of warning, never the server.
    """

    def __init__(self, args: argparse.Namespace, model: str) -> None:
        self.server_flags: list[str] = []
        self._args = args
        self._model = model
        self._folders: list[Path] = []
        self._running: list[SupervisedService] = []
        self._held: list[str] | None = []
        """Lines for when the server is ready; if it never is, its last words are the last."""
        if args.policy == STOCK_POLICY:
            return
        own = ["--quantile", str(args.length_quantile)]
        self._add("predictor", "length predictor", PredictorProbe, own)
        own = ["--program-timeout", str(args.program_timeout)]
        self._add("graphs", "graphs process", GraphsProbe, own)

    def tick(self) -> None:
        """Look after them; call it a few times a second."""
        for service in self._running:
            service.tick()

    def server_is_ready(self) -> None:
        """From now on what there is to say of them is said at once."""
        held, self._held = self._held or [], None
        for line in held:
            _say(line)

    def _tell(self, line: str) -> None:
        if self._held is None:
            _say(line)
        else:
            self._held.append(line)

    def stop(self) -> None:
        """End them and take their sockets away."""
        for service in self._running:
            service.stop()
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)

    def _add(
        self, name: str, title: str, make_probe: Callable[[str], Probe], own: list[str]
    ) -> None:
        """Set up one of them, if it is to be had.

        Args:
            name: of its package and of its flags.
            title: what it is called in what is said of it.
            own: arguments that only it takes.
        """
        if getattr(self._args, name) != "on":
            return
        folder: Path | None = None
        try:
            address = getattr(self._args, f"{name}_address")
            command = [sys.executable, "-m", name]
            if not address:
                # Readable by this user only: whoever can write to the socket can teach it.
                folder = _socket_folder()
                address = f"ipc://{folder / name}"
                command += ["--owned-folder", str(folder)]
            command += ["--address", address, *own, "--parent", str(os.getpid())]
            state = getattr(self._args, f"{name}_state") or str(_state_folder(name, self._model))
            if state != "none":
                command += ["--state-dir", state]
            service = SupervisedService(
                title,
                command,
                lambda: make_probe(address),
                MonotonicClock(),
                self._tell,
                # Its arrays are small; more threads would only take the engine's cores.
                {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )
        except (OSError, ValueError, RuntimeError) as error:
            _say(f"serving without the {title}: {error}")
            # Behind what the user gave: an address of his own would not go with "off".
            self.server_flags += [f"--{name}", "off", f"--{name}-address", ""]
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            return
        self._running.append(service)
        if folder is not None:
            self._folders.append(folder)
            self.server_flags += [f"--{name}-address", address]


def _socket_folder() -> Path:
    """A new folder with a path short enough for a socket. Raises OSError."""
    folder = Path(tempfile.mkdtemp(prefix="jitserve-"))
    if len(os.fsencode(folder)) + len("/predictor") <= MAX_ADDRESS_BYTES:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="jitserve-", dir="/tmp"))


def _state_folder(service: str, model: str) -> Path:
    """Where what is learnt of a model is kept: models must not mix."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", Path(model).name)[:64] or "model"
    digest = hashlib.sha256(model.encode("utf-8", "surrogateescape")).hexdigest()[:8]
    return cache / "jitserve" / service / f"{name}-{digest}"


class Supervisor:
    """Starts the server in a process group of its own and leaves none of it behind."""

    def __init__(self, args: argparse.Namespace, command: list[str], services: Services) -> None:
        self._args = args
        self._command = command
        self._services = services
        self._clock = MonotonicClock()
        self._server: subprocess.Popen[bytes] | None = None
        self._stop_by_s: float | None = None

    def run(self) -> int:
        """Start, announce readiness, wait; the exit code."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        environment = dict(os.environ)
        environment.setdefault("PYTHONWARNINGS", "ignore::UserWarning")
        environment.setdefault("TOKENIZERS_PARALLELISM", "false")
        command = [sys.executable, "-m", "engine.runtime.server", *self._command]
        started_s = self._clock.now_s()
        _say(f"starting the SGLang runtime with --policy {self._args.policy} (about a minute)")
        # A session of its own: Ctrl-C reaches only us, and we stop the server in order.
        self._server = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            return self._watch(self._server, started_s)
        finally:
            _kill_group(self._server.pid)
            self._services.stop()

    def _watch(self, server: subprocess.Popen[bytes], started_s: float) -> int:
        is_ready = False
        said_s = started_s
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = server.wait(timeout=0.5)
                return self._ended(code, is_ready=is_ready)
            now_s = self._clock.now_s()
            self._services.tick()
            if self._stop_by_s is not None:
                if now_s > self._stop_by_s:
                    _say("the server did not end in time and is killed")
                    return EXIT_FAILED
            elif not is_ready and self._is_ready():
                is_ready = True
                self._services.server_is_ready()
                self._announce(now_s - started_s)
            elif not is_ready and now_s - said_s >= PROGRESS_EVERY_S:
                said_s = now_s
                _say(f"still starting, {now_s - started_s:.0f} s")

    def _ended(self, code: int, *, is_ready: bool) -> int:
        if self._stop_by_s is not None:
            _say("stopped")
            return 0
        if code == EXIT_USAGE:
            return EXIT_USAGE
        when = "" if is_ready else " before it was ready"
        flags.print_error(f"the server ended{when} (exit code {code}); the reason is above")
        return code if 0 < code < 128 else EXIT_FAILED

    def _url(self, path: str) -> str:
        host = self._args.host
        host = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self._args.port}{path}"

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(self._url("/ready"), timeout=2) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _announce(self, seconds: float) -> None:
        url = self._url("")
        _say(f"ready on {url} after {seconds:.0f} s (policy {self._args.policy}). Try:")
        body = (
            '{"model": "default", "messages": [{"role": "user", "content": '
            '"What is the capital of France?"}], "temperature": 0, "max_tokens": 40, '
            '"deadline": 10}'
        )
        sys.stderr.write(
            f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'\n"
        )
        sys.stderr.flush()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._server is None or self._stop_by_s is not None:
            # Asked twice: do not wait any longer.
            self._stop_by_s = 0.0
            return
        drain_s = self._args.drain_seconds
        _say(f"stopping: running requests get up to {drain_s:.0f} s, new ones a 503")
        self._stop_by_s = self._clock.now_s() + drain_s + KILL_GRACE_S
        with contextlib.suppress(ProcessLookupError):
            self._server.send_signal(signal.SIGTERM)


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
