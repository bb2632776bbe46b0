"""What a service has learnt is saved when there is news, and at the end, whatever the disk does."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from inline_jobs import Desk

from core import keeper as keeper_module
from core.checkpoint import CheckpointStore
from core.clock import ManualClock
from core.keeper import FIRST_CHECKPOINT_S, SAVE_LIMIT_S, Keeper

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

EVERY_S = 60.0


class Service:
    """Learns numbers; what it has learnt is how many."""

    def __init__(self, store: CheckpointStore | None) -> None:
        self.clock = ManualClock(1000.0)
        self.store = store
        self.counters: Counter[str] = Counter()
        self.news = self.num_encoded = 0
        self.keeper = Keeper(
            store, self.encode, lambda: self.news, self.clock, EVERY_S, self.counters
        )

    def encode(self) -> bytes:
        self.num_encoded += 1
        return b"learnt %d" % self.news

    def pass_time(self, seconds: float) -> None:
        """Tend four times a second."""
        for _ in range(round(seconds * 4)):
            self.clock.advance(0.25)
            self.keeper.tend()

    def on_disk(self) -> bytes | None:
        assert self.store is not None
        return self.store.newest(bytes)


def full_disk(_payload: bytes) -> None:
    raise OSError(28, "No space left on device")


@pytest.fixture(autouse=True)
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    made = Desk()
    monkeypatch.setattr(keeper_module, "Job", made)
    return made


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    store = CheckpointStore(tmp_path, "service", version=1)
    yield Service(store)
    store.close()


def test_news_is_saved_when_it_is_time(service: Service) -> None:
    service.news = 5
    service.pass_time(EVERY_S + 1)
    assert service.on_disk() == b"learnt 5"
    assert service.counters["checkpoints"] >= 1


def test_the_first_news_is_saved_soon_and_not_at_once(service: Service) -> None:
    service.news = 5
    service.keeper.tend()
    assert service.on_disk() is None
    service.pass_time(FIRST_CHECKPOINT_S + 1)
    assert service.on_disk() == b"learnt 5"


def test_without_news_nothing_is_saved_or_encoded(service: Service) -> None:
    service.pass_time(5 * EVERY_S)
    service.keeper.close()
    assert service.on_disk() is None
    assert service.num_encoded == service.counters["checkpoints"] == 0


def test_what_was_saved_is_not_saved_again(service: Service) -> None:
    service.news = 5
    service.pass_time(5 * EVERY_S)
    service.keeper.close()
    assert service.counters["checkpoints"] == 1


def test_news_is_saved_no_more_often_than_it_should_be(service: Service) -> None:
    for _ in range(100):
        service.news += 1
        service.pass_time(6)
    # In ten minutes.
    assert 9 <= service.counters["checkpoints"] <= 12


def test_news_that_is_a_smaller_number_is_news(service: Service) -> None:
    service.news = 5
    service.pass_time(EVERY_S + 1)
    service.news = 3
    service.pass_time(EVERY_S + 1)
    assert service.on_disk() == b"learnt 3"


def test_at_the_end_the_last_news_is_saved(service: Service) -> None:
    service.news = 5
    service.keeper.close()
    assert service.on_disk() == b"learnt 5"


def test_what_is_learnt_while_it_is_saved_is_saved_at_the_end(service: Service, desk: Desk) -> None:
    desk.holds = True
    service.news = 5
    service.pass_time(EVERY_S + 1)
    assert len(desk.held) == 1
    service.news = 6
    desk.work()
    service.keeper.close()
    assert service.on_disk() == b"learnt 6"


def test_it_is_encoded_before_the_loop_goes_on(service: Service, desk: Desk) -> None:
    # What is written is the state of one moment, not one that changes meanwhile.
    desk.holds = True
    service.news = 5
    service.pass_time(EVERY_S + 1)
    service.news = 99
    desk.work()
    assert service.on_disk() == b"learnt 5"


def test_while_one_save_runs_no_other_is_begun(service: Service, desk: Desk) -> None:
    desk.holds = True
    for _ in range(20):
        service.news += 1
        service.pass_time(EVERY_S + 1)
    assert len(desk.held) == 1


def test_at_the_end_a_save_that_hangs_is_not_waited_for_longer_than_the_limit(
    service: Service, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    class Hanging:
        def is_done(self) -> bool:
            return False

        def wait(self, limit_s: float) -> bool:
            waited.append(limit_s)
            return False

        def result(self) -> None:
            raise AssertionError("is not done")

    monkeypatch.setattr(keeper_module, "Job", lambda _work: Hanging())
    service.news = 5
    service.pass_time(EVERY_S + 1)
    service.news = 6
    service.keeper.close()
    assert waited
    assert sum(waited) <= 2 * SAVE_LIMIT_S
    assert desk.held == []


def test_a_full_disk_is_told_once_and_what_it_did_not_take_is_saved_when_there_is_room(
    service: Service, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(service.store, "save", full_disk)
        for _ in range(5):
            service.news += 1
            service.pass_time(EVERY_S + 1)
    assert 4 <= service.counters["failed_checkpoints"] <= 6
    assert service.counters["checkpoints"] == 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "space" in caplog.text
    # Without any further news.
    service.pass_time(EVERY_S + 1)
    assert service.on_disk() == b"learnt 5"
    assert service.counters["checkpoints"] == 1


def test_a_disk_that_is_full_at_the_end_is_no_error(
    service: Service, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.news = 5
    monkeypatch.setattr(service.store, "save", full_disk)
    service.keeper.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "space" in caplog.text


def test_after_room_again_the_next_full_disk_is_told_again(
    service: Service, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        with monkeypatch.context() as broken:
            broken.setattr(service.store, "save", full_disk)
            service.news += 1
            service.pass_time(EVERY_S + 1)
        service.pass_time(EVERY_S + 1)
    assert len([r for r in caplog.records if r.levelname == "WARNING"]) == 2


def test_a_state_that_is_too_long_for_a_checkpoint_ends_no_service(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_long(_payload: bytes) -> None:
        raise ValueError("a checkpoint takes at most 5 bytes")

    monkeypatch.setattr(service.store, "save", too_long)
    service.news = 5
    service.pass_time(EVERY_S + 1)
    service.keeper.close()
    assert service.counters["failed_checkpoints"] >= 1
    assert service.counters["checkpoints"] == 0


def test_where_another_process_keeps_the_state_nothing_is_written(
    service: Service, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    second = Service(CheckpointStore(tmp_path, "service", version=1))
    assert second.store is not None
    try:
        second.news = 5
        second.pass_time(5 * EVERY_S)
        second.keeper.close()
        assert second.on_disk() is None
        assert second.counters["checkpoints"] == 0
        assert len(caplog.records) <= 1
    finally:
        second.store.close()
    assert service.counters["checkpoints"] == 0


def test_what_was_learnt_while_another_process_kept_the_state_is_saved_once_that_has_ended(
    service: Service, tmp_path: Path
) -> None:
    second = Service(CheckpointStore(tmp_path, "service", version=1))
    assert second.store is not None
    try:
        second.news = 5
        second.pass_time(5 * EVERY_S)
        assert service.store is not None
        service.store.close()
        second.keeper.close()
        assert second.on_disk() == b"learnt 5"
    finally:
        second.store.close()


def test_without_a_store_nothing_is_kept(desk: Desk) -> None:
    service = Service(None)
    service.news = 5
    service.pass_time(5 * EVERY_S)
    service.keeper.close()
    assert service.num_encoded == 0
    assert desk.held == []


@pytest.mark.parametrize("jump_s", [-1e6, 1e6])
def test_after_the_clock_has_jumped_news_is_saved_soon(service: Service, jump_s: float) -> None:
    service.news = 1
    service.pass_time(EVERY_S + 1)
    service.clock.advance(jump_s)
    service.news = 2
    service.pass_time(2 * EVERY_S)
    assert service.on_disk() == b"learnt 2"
    assert service.counters["checkpoints"] <= 3
