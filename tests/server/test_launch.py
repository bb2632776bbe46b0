"""`python launch.py`: what it refuses, how it says so, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx
import pytest
from calls import EXACT, GENERATE, Stream, poll
from serving import REPOSITORY, STOP_LIMIT_S, family, free_port, group_members, still_alive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from serving import RunServer, Server

REFUSAL_LIMIT_S = 150.0


@dataclass(frozen=True)
class Mistake:
    """Flags that can't work, and what the complaint must say (a pattern)."""

    name: str
    flags: tuple[str, ...]
    complaint: str
    cpu_only: bool = False

    def __str__(self) -> str:
        """The name, as pytest shows it."""
        return self.name


MISTAKES = (
    Mistake("an unknown flag", ("--no-such-flag", "1"), r"--no-such-flag"),
    Mistake("an unknown policy", ("--policy", "psychic"), r"psychic"),
    Mistake("no steps in a frame", ("--frame-steps", "0"), r"--frame-steps"),
    Mistake("a missing model", ("--model", "/no/such/model"), r"/no/such/model"),
    Mistake(
        "a missing file of defaults", ("--slo-config", "/no/such/file.yaml"), r"/no/such/file\.yaml"
    ),
    Mistake(
        "a backend that needs a GPU",
        ("--attention-backend", "flashinfer"),
        r"flashinfer|attention-backend",
        cpu_only=True,
    ),
    Mistake(
        "a cache that needs a GPU",
        ("--enable-hierarchical-cache",),
        r"(?i)hierarchical",
        cpu_only=True,
    ),
    Mistake("pipeline parallelism", ("--pp-size", "2"), r"(?i)pp-size|pipeline"),
    Mistake("speculation", ("--speculative-algorithm", "EAGLE"), r"(?i)speculative"),
)


def has_gpu() -> bool:
    """Whether the engine would find one."""
    import torch  # slow to import, and only these tests need it

    return torch.cuda.is_available()


def start(*flags: str) -> subprocess.Popen[str]:
    """`launch.py` in a process group of its own."""
    model = () if "--model" in flags else ("--model", "demo")
    port = () if "--port" in flags else ("--port", str(free_port()))
    # Nothing of these short lives is to be found in the user's cache.
    nothing_kept = ("--predictor-state", "none", "--graphs-state", "none")
    return subprocess.Popen(
        [sys.executable, "launch.py", *model, *port, *nothing_kept, *flags],
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def kill_all_of(process: subprocess.Popen[str]) -> None:
    """Leave nothing behind, whatever the test found."""
    for member in group_members(process.pid):
        member.kill()
    process.wait(10)


def launch(*flags: str) -> subprocess.CompletedProcess[str]:
    """Run `launch.py` until it gives up."""
    process = start(*flags)
    try:
        stdout, stderr = process.communicate(timeout=REFUSAL_LIMIT_S)
    except subprocess.TimeoutExpired:
        pytest.fail(f"`launch.py {' '.join(flags)}` does not give up")
    finally:
        kill_all_of(process)
    return subprocess.CompletedProcess(flags, process.returncode, stdout, stderr)


def assert_one_clear_line(run: subprocess.CompletedProcess[str], complaint: str) -> None:
    """It failed, and the last words on stderr are the one line that says what is wrong."""
    everything = f"stdout:\n{run.stdout}\nstderr:\n{run.stderr}"
    assert run.returncode > 0, f"exit code {run.returncode}\n{everything}"
    assert "Traceback" not in run.stdout + run.stderr, everything
    # `launch.py` may say that it still waits while the server that has complained goes away.
    waits = "[jitserve] still starting"
    lines = [x for x in run.stderr.splitlines() if x.strip() and not x.startswith(waits)]
    complaints = [line for line in lines if re.search(complaint, line)]
    assert complaints == lines[-1:], everything
    assert complaints, everything


@pytest.fixture(scope="module")
def runs() -> Iterator[Callable[[Mistake], subprocess.CompletedProcess[str]]]:
    """All mistakes are made side by side, two at a time: each waits for slow imports."""
    with ThreadPoolExecutor(2) as pool:
        futures: dict[Mistake, Future[subprocess.CompletedProcess[str]]] = {}

        def run_of(mistake: Mistake) -> subprocess.CompletedProcess[str]:
            for each in MISTAKES if not futures else ():
                if not (each.cpu_only and has_gpu()):
                    futures[each] = pool.submit(launch, *each.flags)
            return futures[mistake].result()

        yield run_of
        pool.shutdown(cancel_futures=True)


@pytest.mark.timeout(300, func_only=True)
@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_a_mistake_ends_in_one_clear_line(
    mistake: Mistake, runs: Callable[[Mistake], subprocess.CompletedProcess[str]]
) -> None:
    if mistake.cpu_only and has_gpu():
        pytest.skip("there is a GPU to use it with")
    assert_one_clear_line(runs(mistake), mistake.complaint)


def test_a_taken_port_ends_in_one_clear_line() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        assert_one_clear_line(launch("--port", port), rf"\b{port}\b")


def test_help_explains_our_flags() -> None:
    run = launch("--help")
    assert run.returncode == 0
    for flag in (
        "--policy",
        "--frame-steps",
        "--slo-config",
        "--max-running-requests",
        "--model",
        "--port",
    ):
        assert flag in run.stdout


# How it ends (the shared server ends by Ctrl-C, see conftest.py) ----------------------------------


def test_ctrl_c_during_the_start_leaves_no_process() -> None:
    process = start()
    try:
        # It has started others: the moment with the most to clean up.
        members = poll(
            lambda: family(process.pid),
            lambda found: len(found) > 1 or process.poll() is not None,
        )
        assert process.poll() is None, process.communicate()
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=STOP_LIMIT_S)
        poll(
            lambda: still_alive([*members, *group_members(process.pid)]),
            lambda left: not left,
            limit_s=5.0,
        )
    finally:
        kill_all_of(process)


def status_of_a_new_request(server: Server) -> int | str:
    """What a newcomer gets."""
    body = GENERATE.body(max_tokens=1, sampling=EXACT)
    try:
        answer = httpx.post(f"{server.base_url}/generate", json=body, timeout=60.0, trust_env=False)
    except httpx.TransportError as error:
        return type(error).__name__
    return answer.status_code


@pytest.mark.slow_server
@pytest.mark.timeout(400, func_only=True)
def test_sigterm_finishes_what_streams_refuses_what_is_new_and_leaves_no_process(
    run_server: RunServer,
) -> None:
    num_tokens = 100
    # On the way out, run_server insists that no process is left.
    with (
        run_server(stop_signal=signal.SIGTERM) as server,
        Stream(server.base_url, max_tokens=num_tokens) as stream,
    ):
        stream.wait_for_tokens(1)
        server.process.send_signal(signal.SIGTERM)
        status = poll(
            lambda: status_of_a_new_request(server),
            lambda now: now != 200 or stream.has_ended,
        )
        assert status == 503
        stream.wait()
        assert stream.num_tokens == num_tokens
        assert stream.finish_type == "length"
        assert stream.is_done
        server.process.wait(STOP_LIMIT_S)
