"""A predictor that is killed, stopped, ended, orphaned or finds its state broken."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import psutil
import pytest
from predictor_child import PAUSE_S, Child, Serving, command, status_of, wait_until

from core import service as service_module
from core.checkpoint import unpack
from core.clock import ManualClock
from core.service import SILENCE_LIMIT_S, SupervisedService
from predictor.client import PredictorProbe
from predictor.state import FORMAT_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.timeout(120)

OFTEN = ("--checkpoint-seconds", "0.2")
RARELY = ("--checkpoint-seconds", "3600")


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def learnt_on_disk(child: Child) -> int:
    """Answers that the newest checkpoint has learnt from; 0 where there is none."""
    # It may be taken away for a newer one while it is read.
    with contextlib.suppress(FileNotFoundError, IndexError):
        data = (child.state / child.checkpoints()[-1]).read_bytes()
        state = msgspec.msgpack.decode(unpack(data, FORMAT_VERSION))
        dtype, _, packed = state["model"]["reservoir.num_added"]
        return int(np.frombuffer(packed, dtype=dtype)[0])
    return 0


def saved(child: Child, learnt: int) -> bool:
    """Whether so much has been learnt and is on the disk."""
    return learnt_on_disk(child) >= learnt


# Killed -------------------------------------------------------------------------------------------


def test_killed_and_started_again_it_knows_what_it_knew_and_open_requests_are_forecast_again(
    make_child: Callable[..., Child], serve: Callable[[str], Serving]
) -> None:
    child = make_child(*OFTEN)
    child.start_and_wait()
    serving = serve(child.address)
    serving.teach(f"t{n}" for n in range(100))
    wait_until(lambda: child.counter("learnt") == 100)
    serving.teach(["last"])
    wait_until(lambda: child.counter("learnt") == 101 and saved(child, 101))
    names = [f"open{n}" for n in range(50)]
    serving.forecast(names)
    session = child.status().session

    child.end(signal.SIGKILL)
    # Meanwhile the client goes on: asks, ends, polls.
    serving.ask(f"new{n}" for n in range(50))
    for _ in range(200):
        serving.poll()
    assert not any(f"new{n}" in serving.points for n in range(50))

    child.start()
    serving.until(lambda: all(len(serving.points[name]) >= 2 for name in names))
    serving.until(lambda: all(f"new{n}" in serving.points for n in range(50)))
    status = child.status()
    assert status.session != session
    assert status.counters["learnt"] == 101
    assert "from=checkpoint" in child.log
    assert child.warnings() == []
    # And it goes on learning from what had been asked before it was killed.
    for name in names:
        serving.client.ended(name, 70, is_cut=False)
    serving.poll()
    wait_until(lambda: child.counter("learnt") == 151)


# Ended --------------------------------------------------------------------------------------------


def test_asked_to_end_it_saves_what_it_has_learnt_and_exits_with_zero(
    make_child: Callable[..., Child], serve: Callable[[str], Serving]
) -> None:
    child = make_child(*RARELY)
    child.start_and_wait()
    serving = serve(child.address)
    serving.teach(f"t{n}" for n in range(10))
    # Its first checkpoint may come early; what is taught afterwards is saved at the end only.
    wait_until(lambda: saved(child, 10))
    serving.teach(f"u{n}" for n in range(25))
    wait_until(lambda: child.counter("learnt") == 35)
    assert child.end(signal.SIGTERM) == 0
    child.start_and_wait()
    assert child.counter("learnt") == 35
    assert "Traceback" not in child.log


def test_asked_to_end_while_it_still_starts_it_ends(make_child: Callable[..., Child]) -> None:
    child = make_child()
    child.start()
    # It has begun to run our code, which takes the signal, but it is not ready.
    wait_until(lambda: child.state.exists() or not child.is_running())
    assert child.end(signal.SIGTERM) == 0
    assert child.checkpoints() == []


def test_it_ends_when_the_process_that_it_belongs_to_is_gone_and_takes_its_folder_away(
    make_child: Callable[..., Child],
) -> None:
    child = make_child()
    owned = child.folder / "owned"
    owned.mkdir()
    (owned / "something").write_bytes(b"")
    child.address = f"ipc://{owned}/s"
    child.options += ["--owned-folder", str(owned)]
    code = (
        "import os, subprocess, sys, time\n"
        "p = subprocess.Popen([*sys.argv[1:], '--parent', str(os.getpid())])\n"
        "print(p.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, *command(child.address, *child.options)],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    try:
        status_of(child.address)
        assert not is_gone(pid)
        parent.kill()
        parent.wait()
        wait_until(lambda: is_gone(pid))
        assert not owned.exists()
        assert child.state.exists()
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
        if not is_gone(pid):
            os.kill(pid, signal.SIGKILL)


def test_it_leaves_the_folder_to_the_process_that_it_belongs_to_while_that_lives(
    make_child: Callable[..., Child],
) -> None:
    child = make_child()
    owned = child.folder / "owned"
    owned.mkdir()
    child.start_and_wait("--owned-folder", str(owned), "--parent", str(os.getpid()))
    assert child.end(signal.SIGTERM) == 0
    assert owned.exists()


def test_where_another_one_answers_it_is_one_clear_line_and_a_failure(
    make_child: Callable[..., Child], serve: Callable[[str], Serving]
) -> None:
    first = make_child()
    first.start_and_wait()
    serving = serve(first.address)
    serving.forecast(["before"])
    session = first.status().session
    for _ in range(2):
        result = subprocess.run(
            command(first.address), capture_output=True, text=True, check=False, timeout=30
        )
        assert result.returncode == 1
        assert first.address in result.stderr
        assert sum(" ERROR " in line for line in result.stderr.splitlines()) == 1
        assert "Traceback" not in result.stderr
    # And the first one serves as if nothing had been.
    assert first.status().session == session
    serving.forecast(["after"])
    assert len(serving.points["before"]) == 1


def test_the_socket_that_a_killed_one_left_behind_is_taken_over(
    make_child: Callable[..., Child],
) -> None:
    child = make_child()
    child.start_and_wait()
    child.end(signal.SIGKILL)
    assert (child.folder / "s").exists()
    child.start_and_wait()
    assert child.warnings() == []


@pytest.mark.parametrize(
    "address", ["nonsense", "tcp://127.0.0.1:0", "ipc:///no/such/folder/anywhere/s"]
)
def test_an_address_that_cannot_be_used_is_one_clear_line_and_a_failure(address: str) -> None:
    result = subprocess.run(command(address), capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert address in result.stderr
    assert "Traceback" not in result.stderr


def test_over_tcp_it_answers_too_and_control_c_ends_it_in_order(
    make_child: Callable[..., Child], serve: Callable[[str], Serving]
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    child = make_child()
    child.address = f"tcp://127.0.0.1:{port}"
    child.start_and_wait()
    serving = serve(child.address)
    serving.teach(f"t{n}" for n in range(100))
    wait_until(lambda: child.counter("learnt") == 100)
    assert child.end(signal.SIGINT) == 0
    assert len(child.checkpoints()) >= 1


# State --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def known() -> Iterator[Child]:
    """The folder of a predictor that has learnt something and has ended; two checkpoints."""
    child = Child(*OFTEN)
    child.start_and_wait()
    serving = Serving(child.address)
    serving.teach(f"t{n}" for n in range(50))
    wait_until(lambda: saved(child, 50))
    serving.teach(f"u{n}" for n in range(20))
    wait_until(lambda: child.counter("learnt") == 70)
    serving.close()
    assert child.end() == 0
    assert len(child.checkpoints()) >= 2
    yield child
    child.close()


@pytest.mark.parametrize("damage", ["cut", "old-version"])
def test_with_a_broken_checkpoint_it_warns_once_and_starts_from_the_one_before(
    make_child: Callable[..., Child], known: Child, damage: str
) -> None:
    child = make_child()
    shutil.copytree(known.state, child.state)
    newest = child.state / child.checkpoints()[-1]
    data = bytearray(newest.read_bytes())
    match damage:
        case "cut":
            data = data[: len(data) // 2]
        case _:
            data[8] += 1
    newest.write_bytes(bytes(data))
    child.start_and_wait()
    assert 50 <= child.counter("learnt") < 70
    assert len(child.warnings()) == 1
    assert newest.name in child.warnings()[0]
    assert newest.with_suffix(".bad").read_bytes() == bytes(data)
    assert not newest.exists()


def test_with_only_broken_checkpoints_it_starts_all_the_same(
    make_child: Callable[..., Child], known: Child, serve: Callable[[str], Serving]
) -> None:
    child = make_child()
    shutil.copytree(known.state, child.state)
    for name in child.checkpoints():
        (child.state / name).write_bytes(b"nonsense")
    child.start_and_wait()
    assert child.counter("learnt") == 0
    serving = serve(child.address)
    serving.forecast(["r"])


def test_a_second_one_reads_the_state_of_the_first_and_writes_nothing(
    make_child: Callable[..., Child], known: Child, serve: Callable[[str], Serving]
) -> None:
    owner, second = make_child(*OFTEN), make_child(*OFTEN)
    shutil.copytree(known.state, owner.state)
    second.options = owner.options
    owner.start_and_wait()
    second.start_and_wait()
    before = {path.name: path.read_bytes() for path in owner.state.iterdir()}
    assert second.counter("learnt") == 70
    assert any(str(owner.state) in line for line in second.warnings())
    serving = serve(second.address)
    serving.teach(f"t{n}" for n in range(30))
    wait_until(lambda: second.counter("learnt") == 100)
    assert second.end(signal.SIGTERM) == 0
    assert {path.name: path.read_bytes() for path in owner.state.iterdir()} == before
    assert owner.counter("learnt") == 70


def test_once_the_first_has_ended_the_second_keeps_the_state(
    make_child: Callable[..., Child], serve: Callable[[str], Serving]
) -> None:
    owner, second = make_child(*RARELY), make_child(*OFTEN)
    second.state = owner.state
    second.options = ["--state-dir", str(owner.state), *OFTEN]
    owner.start_and_wait()
    second.start_and_wait()
    assert owner.end(signal.SIGTERM) == 0
    serving = serve(second.address)
    serving.teach(f"t{n}" for n in range(20))
    wait_until(lambda: saved(second, 20))
    assert second.end(signal.SIGTERM) == 0
    owner.start_and_wait()
    assert owner.counter("learnt") == 20


def test_without_a_folder_to_write_to_it_serves_all_the_same(
    make_child: Callable[..., Child], serve: Callable[[str], Serving]
) -> None:
    child = make_child(*OFTEN)
    child.state.write_bytes(b"a file, not a folder")
    child.start_and_wait()
    serving = serve(child.address)
    serving.teach(f"t{n}" for n in range(5))
    wait_until(lambda: child.counter("learnt") == 5)
    assert child.end(signal.SIGTERM) == 0
    assert child.state.read_bytes() == b"a file, not a folder"


def test_no_text_of_a_prompt_or_name_of_a_tenant_is_on_the_disk_or_in_the_log(
    make_child: Callable[..., Child], serve: Callable[[str], Serving]
) -> None:
    child = make_child(*OFTEN)
    child.start_and_wait()
    serving = serve(child.address)
    serving.forecast(["secretrequest"], tenant="secrettenant", node="secretnode")
    serving.client.ended("secretrequest", 9, is_cut=False)
    serving.poll()
    wait_until(lambda: saved(child, 1))
    assert child.end() == 0
    written = [path.read_bytes() for path in child.folder.rglob("*") if path.is_file()]
    assert len(written) >= 2
    for data in written:
        assert b"secretnode" not in data
        assert b"secrettenant" not in data
        assert b"poem" not in data


# Watched ------------------------------------------------------------------------------------------


class Watched:
    """A real predictor under the launcher's watcher, with a clock that the test moves."""

    def __init__(self) -> None:
        self.child = Child(*OFTEN)
        self.clock = ManualClock(1000.0)
        self.said: list[str] = []
        self.service = SupervisedService(
            "predictor",
            command(self.child.address, *self.child.options),
            lambda: PredictorProbe(self.child.address),
            self.clock,
            self.said.append,
        )

    def tick_until(self, condition: Callable[[], bool], *, step_s: float = 0.0) -> None:
        while not condition():
            self.clock.advance(step_s)
            self.service.tick()
            time.sleep(PAUSE_S)

    def is_ready(self) -> bool:
        return "ready" in self.said[-1] if self.said else False

    def start_again(self, pid: int) -> None:
        """Until another process than ``pid`` answers."""
        self.tick_until(lambda: self.service.pid not in (None, pid), step_s=0.05)
        status_of(self.child.address)
        self.tick_until(self.is_ready)


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    made = Watched()
    made.tick_until(made.is_ready)
    yield made
    made.service.stop()
    made.child.close()


def test_the_watcher_starts_it_and_hears_when_it_is_ready(watched: Watched) -> None:
    assert watched.service.num_starts == 1
    assert len(watched.said) == 1


def test_killed_it_is_started_again_and_forecasts_resume_by_themselves(
    watched: Watched, serve: Callable[[str], Serving]
) -> None:
    serving = serve(watched.child.address)
    serving.forecast(["r"])
    pid, starts = watched.service.pid, watched.service.num_starts
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    watched.start_again(pid)
    assert watched.service.num_starts == starts + 1
    assert any("exit code -9" in line for line in watched.said)
    serving.until(lambda: len(serving.points["r"]) >= 2)


def test_stopped_it_is_killed_and_started_again_while_polls_return(
    watched: Watched, serve: Callable[[str], Serving]
) -> None:
    serving = serve(watched.child.address)
    serving.forecast(["r"])
    watched.tick_until(lambda: True)
    pid, starts = watched.service.pid, watched.service.num_starts
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    # What it said before it was stopped is heard first; then it is silent.
    for _ in range(20):
        watched.service.tick()
        time.sleep(PAUSE_S)
    for number in range(2000):
        serving.ask([f"s{number}"])
        serving.poll()
    watched.clock.advance(SILENCE_LIMIT_S - 1)
    watched.service.tick()
    assert watched.service.pid == pid
    watched.clock.advance(2)
    watched.service.tick()
    assert watched.service.pid is None
    assert "silent" in watched.said[-1]
    assert is_gone(pid)
    watched.start_again(pid)
    assert watched.service.num_starts == starts + 1
    serving.until(lambda: len(serving.points["r"]) >= 2)
    serving.until(lambda: all(f"s{number}" in serving.points for number in range(2000)))


def test_while_it_is_busy_starting_it_is_not_taken_for_silent(watched: Watched) -> None:
    pid, starts = watched.service.pid, watched.service.num_starts
    assert pid is not None
    watched.service.tick()
    # Whatever it still says to the watcher before it dies lies in the watcher's socket.
    status_of(watched.child.address)
    status_of(watched.child.address)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: is_gone(pid))
    watched.tick_until(lambda: watched.service.pid not in (None, pid), step_s=0.05)
    watched.service.tick()
    watched.clock.advance(3 * SILENCE_LIMIT_S)
    watched.service.tick()
    assert watched.service.num_starts == starts + 1
    assert watched.service.pid is not None
    status_of(watched.child.address)


def test_a_shorter_limit_of_silence_counts(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    status_of(watched.child.address)
    watched.tick_until(watched.is_ready)
    pid = watched.service.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    for _ in range(20):
        watched.service.tick()
        time.sleep(PAUSE_S)
    monkeypatch.setattr(service_module, "SILENCE_LIMIT_S", 1.0)
    watched.clock.advance(1.5)
    watched.service.tick()
    assert is_gone(pid)
    watched.start_again(pid)


def test_stopping_the_watcher_ends_it_in_order(watched: Watched) -> None:
    status_of(watched.child.address)
    pid = watched.service.pid
    assert pid is not None
    watched.service.stop()
    assert is_gone(pid)
