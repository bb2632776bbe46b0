"""Checkpoints on disk: the newest good one is used, and no file, however broken, does harm."""

from __future__ import annotations

import os
import random
import stat
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core import checkpoint
from core.checkpoint import CheckpointError, CheckpointStore, pack, unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    OpenStore = Callable[..., CheckpointStore]


def text_of(payload: bytes) -> str:
    """A decoder that does not take everything."""
    return payload.decode("ascii")


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[OpenStore]:
    """Opens the folder again and again; closes whatever is open before."""
    stores: list[CheckpointStore] = []

    def make(
        version: int = 1, name: str = "thing", *, keeps_others: bool = False
    ) -> CheckpointStore:
        if not keeps_others:
            for store in stores:
                store.close()
        stores.append(CheckpointStore(tmp_path / "state", name, version=version))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def names(tmp_path: Path, suffix: str = ".checkpoint") -> list[str]:
    return sorted(path.name for path in (tmp_path / "state").glob(f"*{suffix}"))


# One file -----------------------------------------------------------------------------------------


@given(payload=st.binary(max_size=300), version=st.integers(0, 65535))
def test_what_is_packed_is_unpacked(payload: bytes, version: int) -> None:
    assert unpack(pack(payload, version), version) == payload


@given(payload=st.binary(max_size=60), data=st.data())
def test_a_file_cut_short_anywhere_is_refused(payload: bytes, data: st.DataObject) -> None:
    whole = pack(payload, 1)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(CheckpointError):
        unpack(whole[:cut], 1)


@given(payload=st.binary(max_size=60), data=st.data())
def test_a_file_with_any_bit_changed_is_refused(payload: bytes, data: st.DataObject) -> None:
    whole = bytearray(pack(payload, 1))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CheckpointError):
        unpack(bytes(whole), 1)


def test_bytes_behind_the_end_are_refused() -> None:
    with pytest.raises(CheckpointError):
        unpack(pack(b"abc", 1) + b"\x00", 1)


@given(st.binary(max_size=200))
def test_any_other_file_is_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError):
        unpack(data, 1)


def test_another_version_is_refused_with_both_versions() -> None:
    with pytest.raises(CheckpointError, match=r"\b7\b.*\b8\b"):
        unpack(pack(b"abc", 7), 8)


def test_a_payload_beyond_the_limit_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "MAX_PAYLOAD_BYTES", 10)
    pack(b"x" * 10, 1)
    with pytest.raises(ValueError, match="10"):
        pack(b"x" * 11, 1)


# A folder of them ---------------------------------------------------------------------------------


def test_an_empty_folder_has_no_newest(open_store: OpenStore) -> None:
    assert open_store().newest(text_of) is None


def test_what_was_saved_last_is_the_newest(open_store: OpenStore) -> None:
    store = open_store()
    for number in range(12):
        store.save(b"state %d" % number)
    assert store.newest(text_of) == "state 11"
    assert open_store().newest(text_of) == "state 11"


def test_a_new_start_goes_on_counting(open_store: OpenStore) -> None:
    open_store().save(b"old")
    store = open_store()
    store.save(b"new")
    assert store.newest(text_of) == "new"


def test_the_last_few_are_kept(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    for number in range(20):
        store.save(b"%d" % number)
    assert len(names(tmp_path)) == checkpoint.NUM_KEPT


def test_folder_and_files_are_their_owners_alone(open_store: OpenStore, tmp_path: Path) -> None:
    open_store().save(b"x")
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700


def test_a_save_tells_where_it_is(open_store: OpenStore) -> None:
    path = open_store().save(b"abc")
    assert path is not None
    assert unpack(path.read_bytes(), 1) == b"abc"


@pytest.mark.parametrize("step", range(8))
def test_the_newest_good_one_is_used_where_newer_ones_are_cut_short(
    open_store: OpenStore, tmp_path: Path, caplog: pytest.LogCaptureFixture, step: int
) -> None:
    store = open_store()
    store.save(b"good")
    path = store.save(b"x" * 100)
    assert path is not None
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * step // 8])
    assert open_store().newest(text_of) == "good"
    assert len(caplog.records) == 1
    assert caplog.records[0].levelname == "WARNING"
    assert str(path) in caplog.text
    assert names(tmp_path, ".bad") == [path.with_suffix(".bad").name]


def test_a_bad_file_is_warned_of_once(
    open_store: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    path = open_store().save(b"x")
    assert path is not None
    path.write_bytes(b"nonsense")
    assert open_store().newest(text_of) is None
    assert open_store().newest(text_of) is None
    assert len(caplog.records) == 1


def test_a_payload_that_its_reader_refuses_is_set_aside_too(
    open_store: OpenStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store()
    store.save(b"good")
    store.save("nicht für uns".encode())
    assert store.newest(text_of) == "good"
    assert len(caplog.records) == len(names(tmp_path, ".bad")) == 1


def test_another_version_is_set_aside(
    open_store: OpenStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_store(version=1).save(b"old")
    store = open_store(version=2)
    assert store.newest(text_of) is None
    assert len(caplog.records) == len(names(tmp_path, ".bad")) == 1
    store.save(b"new")
    assert store.newest(text_of) == "new"


def test_bad_files_do_not_pile_up(open_store: OpenStore, tmp_path: Path) -> None:
    for _ in range(10):
        store = open_store()
        for _ in range(3):
            path = store.save(b"x")
            assert path is not None
            path.write_bytes(b"nonsense")
        assert store.newest(text_of) is None
    assert len(names(tmp_path, ".bad")) <= checkpoint.NUM_KEPT


def test_when_all_are_bad_there_is_no_newest_and_saving_goes_on(open_store: OpenStore) -> None:
    store = open_store()
    for _ in range(3):
        path = store.save(b"x")
        assert path is not None
        path.write_bytes(b"")
    store = open_store()
    assert store.newest(text_of) is None
    store.save(b"fresh")
    assert open_store().newest(text_of) == "fresh"


def test_a_folder_where_a_file_should_be_is_no_crash(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    path = store.save(b"good")
    assert path is not None
    path.with_name("thing-00000099.checkpoint").mkdir()
    assert store.newest(text_of) == "good"


def test_a_link_to_nowhere_is_no_crash(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    store.save(b"good")
    (tmp_path / "state" / "thing-00000099.checkpoint").symlink_to(tmp_path / "nowhere")
    assert store.newest(text_of) == "good"


@pytest.mark.parametrize(
    "name",
    [
        "thing-1.checkpoint",
        "thing-0000000x.checkpoint",
        "thing-.checkpoint",
        "thing-٣٣٣٣٣٣٣٣.checkpoint",
    ],
)
def test_files_of_other_names_are_left_alone(
    open_store: OpenStore, tmp_path: Path, name: str
) -> None:
    store = open_store()
    (tmp_path / "state" / name).write_bytes(b"mine")
    store.save(b"good")
    assert store.newest(text_of) == "good"
    assert (tmp_path / "state" / name).read_bytes() == b"mine"


def test_services_share_a_folder_without_reading_each_other(open_store: OpenStore) -> None:
    first = open_store(name="thing")
    second = open_store(name="thing-two", keeps_others=True)
    first.save(b"first")
    second.save(b"second")
    assert (first.newest(text_of), second.newest(text_of)) == ("first", "second")
    assert first.is_owner
    assert second.is_owner


def test_who_comes_second_reads_and_writes_nothing(
    open_store: OpenStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = open_store()
    first.save(b"good")
    bad = first.save(b"x")
    assert bad is not None
    bad.write_bytes(b"nonsense")
    before = names(tmp_path, "")
    second = open_store(keeps_others=True)
    assert first.is_owner
    assert not second.is_owner
    assert second.newest(text_of) == "good"
    assert second.save(b"mine") is None
    assert names(tmp_path, "") == before
    assert len(caplog.records) == 1


def test_a_folder_is_free_again_once_its_owner_has_closed_it(open_store: OpenStore) -> None:
    open_store()
    assert open_store().is_owner


def test_who_came_second_owns_the_folder_once_the_first_has_closed_it(
    open_store: OpenStore, tmp_path: Path
) -> None:
    first = open_store()
    first.save(b"of the first")
    second = open_store(keeps_others=True)
    assert second.save(b"too early") is None
    first.close()
    path = second.save(b"of the second")
    assert path is not None
    assert second.is_owner
    assert second.newest(text_of) == "of the second"
    assert len(names(tmp_path)) == 2
    # And nobody else owns it now.
    third = open_store(keeps_others=True)
    assert not third.is_owner
    assert third.save(b"too late") is None


def test_only_one_of_those_that_wait_becomes_the_owner(open_store: OpenStore) -> None:
    first, *waiting = [open_store(keeps_others=True) for _ in range(4)]
    first.close()
    saved = [store.save(b"%d" % number) for number, store in enumerate(waiting)]
    assert [path is not None for path in saved] == [True, False, False]
    assert [store.is_owner for store in waiting] == [True, False, False]


def test_a_save_that_fails_leaves_the_older_ones_and_no_litter(
    open_store: OpenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    store.save(b"good")
    before = names(tmp_path, "")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="space"):
            store.save(b"lost")
    assert names(tmp_path, "") == before
    assert store.newest(text_of) == "good"
    store.save(b"later")
    assert store.newest(text_of) == "later"


def test_what_a_killed_save_left_behind_is_not_read(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    store.save(b"good")
    (tmp_path / "state" / "thing-00000002.part").write_bytes(pack(b"half", 1)[:20])
    assert store.newest(text_of) == "good"
    store.save(b"next")
    assert store.newest(text_of) == "next"


def test_a_folder_that_cannot_be_made_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="file"):
        CheckpointStore(tmp_path / "file" / "state", "thing", version=1)


def test_random_damage_never_crashes_and_never_gives_a_wrong_state(
    open_store: OpenStore,
) -> None:
    rng = random.Random(1)
    for _ in range(100):
        store = open_store()
        store.save(b"good")
        path = store.save(b"newer")
        assert path is not None
        data = bytearray(path.read_bytes())
        for _ in range(rng.randint(1, 5)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(bytes(data))
        assert store.newest(text_of) in ("good", "newer")
