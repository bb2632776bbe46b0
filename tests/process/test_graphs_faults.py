"""A graphs process that is killed, ended, refused or finds its state broken."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest
from graphs_child import THREE, GraphsChild, Scheduler, command, status_of
from program_shapes import Part
from service_child import PAUSE_S, wait_until

from core.checkpoint import unpack
from core.clock import ManualClock
from core.service import SupervisedService
from graphs.client import GraphsProbe
from graphs.state import FORMAT_VERSION, decode_into
from graphs.store import PatternStore

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


def on_disk(child: GraphsChild) -> int:
    """Programs that the newest checkpoint has learnt from; 0 where there is none."""
    # It may be taken away for a newer one while it is read.
    try:
        data = (child.state / child.checkpoints()[-1]).read_bytes()
    except (FileNotFoundError, IndexError):
        return 0
    store = PatternStore()
    decode_into(unpack(data, FORMAT_VERSION), store)
    return store.num_added


def unlike(number: int) -> list[Part]:
    """Programs no two of which are alike."""
    return [Part(), Part(model=1000 + number), Part()]


# Killed -------------------------------------------------------------------------------------------


def test_killed_and_started_again_it_knows_what_it_knew_and_what_is_open(
    make_graphs: Callable[..., GraphsChild], schedule: Callable[[str], Scheduler]
) -> None:
    child = make_graphs(*OFTEN)
    child.start_and_wait()
    scheduler = schedule(child.address)
    scheduler.teach(range(1000, 1030))
    for number in range(10):
        scheduler.teach([2000 + number], unlike(number))
    wait_until(lambda: on_disk(child) == 40)
    patterns, session = child.counter("patterns"), child.status().session
    stages = {program: scheduler.stages(program) for program in range(1, 21)}
    for first, *_ in stages.values():
        scheduler.tell(first)
    scheduler.until(lambda: all(program in scheduler.outlooks for program in stages))
    child.end(signal.SIGKILL)
    # Meanwhile the client goes on: some programs end, some begin.
    for program in range(1, 11):
        scheduler.client.closed(program, is_cancelled=True)
    scheduler.open(*range(101, 121))
    for _ in range(200):
        scheduler.poll()
    scheduler.outlooks.clear()

    child.start()
    still_open = [*range(11, 21), *range(101, 121)]
    scheduler.until(lambda: all(program in scheduler.outlooks for program in still_open))
    status = child.status()
    assert status.session != session
    assert status.counters["finished"] == 40
    assert status.counters["patterns"] == patterns
    assert status.counters["running"] == len(still_open)
    assert "from=checkpoint" in child.log
    assert child.warnings() == []
    assert all(scheduler.last(program).is_known for program in still_open)
    # What was open is learnt in its turn.
    for program in range(11, 21):
        _, second, third = stages[program]
        scheduler.tell([*second, *third])
    scheduler.send()
    wait_until(lambda: child.counter("finished") == 50)


@pytest.mark.timeout(20)
def test_what_went_on_while_it_was_not_there_is_known_to_the_next_one(
    make_graphs: Callable[..., GraphsChild], schedule: Callable[[str], Scheduler]
) -> None:
    child = make_graphs(*OFTEN)
    child.start_and_wait()
    scheduler = schedule(child.address)
    scheduler.teach(range(1000, 1030))
    wait_until(lambda: on_disk(child) == 30)
    stages = {program: scheduler.stages(program) for program in range(1, 6)}
    for first, *_ in stages.values():
        scheduler.tell(first)
    scheduler.until(lambda: all(program in scheduler.outlooks for program in stages))
    child.end(signal.SIGKILL)
    for _, second, _ in stages.values():
        scheduler.tell(second)
    for _ in range(200):
        scheduler.poll()
    scheduler.outlooks.clear()
    child.start()
    # What was not sent yet may come before what is told again: until then nothing is known.
    scheduler.until(
        lambda: all(
            program in scheduler.outlooks and scheduler.last(program).is_known for program in stages
        )
    )
    assert all(scheduler.last(program).num_calls == 3 for program in stages)
    for *_, third in stages.values():
        scheduler.tell(third)
    scheduler.send()
    wait_until(lambda: child.counter("finished") == 35)


def test_while_it_is_killed_again_and_again_polls_return_and_it_is_there_in_the_end(
    make_graphs: Callable[..., GraphsChild], schedule: Callable[[str], Scheduler]
) -> None:
    child = make_graphs(*OFTEN)
    child.start_and_wait()
    scheduler = schedule(child.address)
    scheduler.known(1)
    for _ in range(3):
        child.end(signal.SIGKILL)
        for _ in range(100):
            scheduler.poll()
        child.start_and_wait()
        scheduler.outlooks.clear()
        scheduler.until(lambda: 1 in scheduler.outlooks)
    assert child.counter("running") == 1


# Ended --------------------------------------------------------------------------------------------


def test_asked_to_end_it_saves_what_it_has_learnt_and_exits_with_zero(
    make_graphs: Callable[..., GraphsChild], schedule: Callable[[str], Scheduler]
) -> None:
    child = make_graphs(*RARELY)
    child.start_and_wait()
    scheduler = schedule(child.address)
    for number in range(10):
        scheduler.teach([1 + number], unlike(number))
    wait_until(lambda: child.counter("learnt") == 10)
    assert child.end(signal.SIGTERM) == 0
    assert on_disk(child) == 10
    child.start_and_wait()
    assert child.counter("patterns") == 10
    scheduler.outlooks.clear()
    scheduler.known(500)
    assert scheduler.last(500).is_known
    assert child.end(signal.SIGINT) == 0
    assert "Traceback" not in child.log


def test_it_ends_when_the_process_that_it_belongs_to_is_gone(
    make_graphs: Callable[..., GraphsChild],
) -> None:
    child = make_graphs()
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
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
        if not is_gone(pid):
            os.kill(pid, signal.SIGKILL)


def test_where_another_one_answers_it_is_one_clear_line_and_a_failure(
    make_graphs: Callable[..., GraphsChild], schedule: Callable[[str], Scheduler]
) -> None:
    first = make_graphs()
    first.start_and_wait()
    scheduler = schedule(first.address)
    scheduler.known(1)
    session = first.status().session
    result = subprocess.run(
        command(first.address), capture_output=True, text=True, check=False, timeout=30
    )
    assert result.returncode == 1
    assert first.address in result.stderr
    assert sum(" ERROR " in line for line in result.stderr.splitlines()) == 1
    assert "Traceback" not in result.stderr
    # And the first one serves as if nothing had been.
    assert first.status().session == session
    scheduler.known(2)
    assert len(scheduler.outlooks[1]) == 1


def test_the_socket_that_a_killed_one_left_behind_is_taken_over(
    make_graphs: Callable[..., GraphsChild],
) -> None:
    child = make_graphs()
    child.start_and_wait()
    child.end(signal.SIGKILL)
    assert (child.folder / "s").exists()
    child.start_and_wait()
    assert child.warnings() == []


@pytest.mark.parametrize("address", ["nonsense", "ipc:///no/such/folder/anywhere/s"])
def test_an_address_that_cannot_be_used_is_one_clear_line_and_a_failure(address: str) -> None:
    result = subprocess.run(command(address), capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert address in result.stderr
    assert "Traceback" not in result.stderr


# Quiet --------------------------------------------------------------------------------------------


def test_programs_that_go_quiet_are_closed_and_learnt(
    make_graphs: Callable[..., GraphsChild], schedule: Callable[[str], Scheduler]
) -> None:
    child = make_graphs("--program-timeout", "0.5")
    child.start_and_wait()
    scheduler = schedule(child.address)
    for program in range(1, 11):
        first, *_ = scheduler.stages(program)
        scheduler.tell(first)
    scheduler.send()
    scheduler.until(lambda: child.counter("learnt") == 10)
    assert child.counter("running") == 0
    assert child.counter("quiet") == 10


# State --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def known() -> Iterator[GraphsChild]:
    """The folder of a process that has learnt something and has ended; two checkpoints."""
    child = GraphsChild(*OFTEN)
    child.start_and_wait()
    scheduler = Scheduler(child.address)
    for number in range(30):
        scheduler.teach([1 + number], unlike(number))
    wait_until(lambda: on_disk(child) >= 30)
    scheduler.teach(range(100, 110), THREE)
    wait_until(lambda: child.counter("learnt") == 40)
    scheduler.close()
    assert child.end() == 0
    assert len(child.checkpoints()) >= 2
    yield child
    child.close()


@pytest.mark.parametrize("damage", ["cut", "old-version", "flipped"])
def test_with_a_broken_checkpoint_it_warns_once_and_starts_from_the_one_before(
    make_graphs: Callable[..., GraphsChild], known: GraphsChild, damage: str
) -> None:
    child = make_graphs()
    shutil.copytree(known.state, child.state)
    newest = child.state / child.checkpoints()[-1]
    data = bytearray(newest.read_bytes())
    match damage:
        case "cut":
            data = data[: len(data) // 2]
        case "old-version":
            data[8] += 1
        case _:
            data[-20] ^= 4
    newest.write_bytes(bytes(data))
    child.start_and_wait()
    assert 30 <= child.counter("finished") < 40
    assert len(child.warnings()) == 1
    assert newest.name in child.warnings()[0]
    assert newest.with_suffix(".bad").read_bytes() == bytes(data)
    assert not newest.exists()


def test_with_only_broken_checkpoints_it_starts_all_the_same(
    make_graphs: Callable[..., GraphsChild],
    known: GraphsChild,
    schedule: Callable[[str], Scheduler],
) -> None:
    child = make_graphs()
    shutil.copytree(known.state, child.state)
    for name in child.checkpoints():
        (child.state / name).write_bytes(b"nonsense")
    child.start_and_wait()
    assert child.counter("patterns") == 0
    scheduler = schedule(child.address)
    scheduler.known(1)
    assert not scheduler.last(1).is_known


def test_a_second_one_reads_the_state_of_the_first_and_writes_nothing(
    make_graphs: Callable[..., GraphsChild],
    known: GraphsChild,
    schedule: Callable[[str], Scheduler],
) -> None:
    owner, second = make_graphs(*OFTEN), make_graphs(*OFTEN)
    shutil.copytree(known.state, owner.state)
    second.options = owner.options
    owner.start_and_wait()
    second.start_and_wait()
    before = {path.name: path.read_bytes() for path in owner.state.iterdir()}
    assert second.counter("finished") == 40
    assert any(str(owner.state) in line for line in second.warnings())
    scheduler = schedule(second.address)
    scheduler.teach(range(1, 21))
    wait_until(lambda: second.counter("finished") == 60)
    assert second.end(signal.SIGTERM) == 0
    assert {path.name: path.read_bytes() for path in owner.state.iterdir()} == before
    assert owner.counter("finished") == 40


def test_above_its_capacity_it_is_clustered_while_it_answers(
    make_graphs: Callable[..., GraphsChild], schedule: Callable[[str], Scheduler]
) -> None:
    child = make_graphs("--patterns", "40", *OFTEN)
    child.start_and_wait()
    scheduler = schedule(child.address)
    for number in range(60):
        scheduler.teach([1 + number], unlike(number))
        scheduler.known(1000 + number)
    wait_until(lambda: child.counter("clusterings") >= 1 and child.counter("patterns") <= 40)
    assert child.counter("learnt") == 60
    assert child.end() == 0
    child.start_and_wait()
    assert 20 <= child.counter("patterns") <= 40
    assert child.counter("finished") == 60


# Watched ------------------------------------------------------------------------------------------


def test_under_the_launcher_s_watcher_it_is_started_again_and_what_is_open_is_known(
    make_graphs: Callable[..., GraphsChild], schedule: Callable[[str], Scheduler]
) -> None:
    child, clock, said = make_graphs(*OFTEN), ManualClock(1000.0), list[str]()
    service = SupervisedService(
        "graphs",
        command(child.address, *child.options),
        lambda: GraphsProbe(child.address),
        clock,
        said.append,
    )
    scheduler = schedule(child.address)

    def tick_until_ready(num_starts: int) -> None:
        while service.num_starts < num_starts or "ready" not in "".join(said[-1:]):
            clock.advance(0.02)
            service.tick()
            scheduler.poll()
            scheduler.client.wait(PAUSE_S)

    try:
        tick_until_ready(1)
        scheduler.known(1)
        pid = service.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        scheduler.outlooks.clear()
        tick_until_ready(2)
        scheduler.until(lambda: 1 in scheduler.outlooks)
    finally:
        service.stop()
