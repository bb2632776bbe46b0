"""Channels between processes: whatever comes in, nobody waits and nobody dies."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from typing import TYPE_CHECKING

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from core.channel import (
    MAX_ADDRESS_BYTES,
    MAX_FRAME_BYTES,
    QUEUE_FRAMES,
    Codec,
    DealerChannel,
    RouterChannel,
    WireError,
    check_address,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WAIT_S = 20.0
"""How long a test waits for a frame that must come; it takes milliseconds."""


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    number: int
    text: str = ""


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    number: int


class Bye(msgspec.Struct, frozen=True, tag="bye"):
    pass


Asks = Ping | Bye
Answers = Pong | Bye


def client_codec(version: int = 3) -> Codec[Asks, Answers]:
    return Codec(magic=b"TST", version=version, takes=Answers)


def service_codec(version: int = 3) -> Codec[Answers, Asks]:
    return Codec(magic=b"TST", version=version, takes=Asks)


def kind_of(frame: bytes) -> str:
    """Why a frame is refused."""
    with pytest.raises(WireError) as caught:
        service_codec().decode(frame)
    return caught.value.kind


# Frames -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("message", [Ping(1), Ping(-(2**63), "é\n\x00"), Bye()])
def test_what_is_encoded_is_decoded(message: Asks) -> None:
    assert service_codec().decode(client_codec().encode(message)) == message


def test_a_frame_of_another_protocol_is_garbage() -> None:
    frame = client_codec().encode(Ping(1))
    assert kind_of(b"XXX" + frame[3:]) == "garbage"
    assert kind_of(b"") == "garbage"


@pytest.mark.parametrize("version", [1, 2, 4, 255])
def test_an_older_or_newer_version_is_told_from_garbage(version: int) -> None:
    assert kind_of(client_codec(version).encode(Ping(1))) == "version"


def test_a_message_that_is_too_long_is_refused_before_it_is_read() -> None:
    frame = client_codec().encode(Ping(1))
    assert kind_of(frame + b"\x00" * MAX_FRAME_BYTES) == "size"


def test_a_message_as_long_as_may_be_is_read() -> None:
    def message(length: int) -> Ping:
        return Ping(1, "x" * length)

    room = MAX_FRAME_BYTES - (len(client_codec().encode(message(70_000))) - 70_000)
    frame = client_codec().encode(message(room))
    assert len(frame) == MAX_FRAME_BYTES == 2 << 20
    assert service_codec().decode(frame) == message(room)
    assert kind_of(client_codec().encode(message(room + 1))) == "size"


def test_a_message_for_the_other_side_is_refused() -> None:
    assert kind_of(service_codec().encode(Pong(1))) == "garbage"


def test_bytes_behind_a_message_are_refused() -> None:
    assert kind_of(client_codec().encode(Ping(1)) + b"\x01") == "garbage"


def test_a_message_cut_short_anywhere_is_refused() -> None:
    frame = client_codec().encode(Ping(123456, "some text"))
    for length in range(len(frame)):
        with pytest.raises(WireError):
            service_codec().decode(frame[:length])


@given(st.binary(max_size=200))
def test_any_body_is_a_message_or_a_wire_error(body: bytes) -> None:
    codec = service_codec()
    frame = codec.encode(Bye())[:4] + body
    try:
        message = codec.decode(frame)
    except WireError:
        assert kind_of(frame) == "garbage"
    else:
        assert isinstance(message, Ping | Bye)


def test_a_body_nested_beyond_all_measure_is_refused() -> None:
    header = service_codec().encode(Bye())[:4]
    assert kind_of(header + b"\x91" * 100_000) == "garbage"
    # Inside a field that is not known.
    assert kind_of(header + b"\x81\xa1x" + b"\x91" * 100_000) == "garbage"


@pytest.mark.parametrize(
    ("magic", "version"), [(b"AB", 1), (b"ABCD", 1), (b"ABC", 0), (b"ABC", 256)]
)
def test_a_codec_takes_three_bytes_and_a_version_of_one(magic: bytes, version: int) -> None:
    with pytest.raises(ValueError, match="magic"):
        Codec(magic=magic, version=version, takes=Asks)


# Addresses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        "ipc:///run/jitserve/predictor",
        "ipc://relative",
        "ipc:///" + "x" * (MAX_ADDRESS_BYTES - 1),
        "tcp://127.0.0.1:5555",
        "tcp://some.host:1",
        "tcp://10.0.0.1:65535",
        "tcp://some_host-1:5555",
        "tcp://[::1]:5555",
        "tcp://[fe80::1%eth0]:5555",
    ],
)
def test_good_addresses_are_taken_as_they_are(address: str) -> None:
    assert check_address(address) == address


@pytest.mark.parametrize(
    "address",
    [
        "",
        "ipc://",
        "ipc:/run/x",
        "/run/x",
        "inproc://x",
        "udp://127.0.0.1:1",
        "ipc:///" + "x" * MAX_ADDRESS_BYTES,
        "ipc:///" + "é" * (MAX_ADDRESS_BYTES // 2 + 1),
        "tcp://127.0.0.1",
        "tcp://:5555",
        "tcp://host:",
        "tcp://host:0",
        "tcp://host:65536",
        "tcp://host:-1",
        "tcp://host:5x",
        "tcp://host:٣",
        "tcp://*:5555",
        "tcp:// :5555",
        "tcp://ho st:5555",
        "tcp://host :5555",
        "tcp://host\n:5555",
        "tcp://höst:5555",
        "tcp://a;b:5555",
        "tcp://a@b:5555",
        "tcp://a/b:5555",
        "tcp://::1:5555",
        "tcp://[::1]",
        "tcp://[]:5555",
        "tcp://[*]:5555",
        "TCP://host:1",
    ],
)
def test_a_bad_address_is_refused_with_what_is_taken(address: str) -> None:
    with pytest.raises(ValueError, match=r"ipc://PATH .* tcp://HOST:PORT") as caught:
        check_address(address)
    assert repr(address) in str(caught.value)


@given(st.text(max_size=30) | st.text(max_size=30).map("tcp://{}".format))
def test_any_text_is_an_address_or_a_value_error(address: str) -> None:
    with contextlib.suppress(ValueError):
        assert check_address(address) == address


def test_the_longest_address_can_be_listened_on(folder: str) -> None:
    path = folder + "/"
    path += "x" * (MAX_ADDRESS_BYTES - len(path))
    with_it = RouterChannel(f"ipc://{path}", service_codec())
    with_it.close()


def test_a_bad_address_opens_no_channel() -> None:
    with pytest.raises(ValueError, match="takes"):
        DealerChannel("nowhere", client_codec())
    with pytest.raises(ValueError, match="takes"):
        RouterChannel("nowhere", service_codec())


def test_a_folder_that_is_not_there_is_an_error_of_who_listens() -> None:
    with pytest.raises(zmq.ZMQError):
        RouterChannel("ipc:///no/such/folder/x", service_codec())


# Two ends -----------------------------------------------------------------------------------------


@pytest.fixture
def folder() -> Iterator[str]:
    # Not tmp_path: that is too long for the path of a socket.
    path = tempfile.mkdtemp(prefix="ch", dir="/tmp")
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def address(folder: str) -> str:
    return f"ipc://{folder}/s"


@pytest.fixture
def dealers(address: str) -> Iterator[Callable[[], DealerChannel[Asks, Answers]]]:
    made: list[DealerChannel[Asks, Answers]] = []

    def make() -> DealerChannel[Asks, Answers]:
        made.append(DealerChannel(address, client_codec()))
        return made[-1]

    yield make
    for dealer in made:
        dealer.close()


@pytest.fixture
def router(address: str) -> Iterator[RouterChannel[Answers, Asks]]:
    channel = RouterChannel(address, service_codec())
    yield channel
    channel.close()


@pytest.fixture
def raw(address: str) -> Iterator[zmq.Socket[bytes]]:
    """A peer that sends whatever it likes."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(address)
    yield socket
    socket.close(0)
    context.term()


def send_surely(dealer: DealerChannel[Asks, Answers], message: Asks) -> None:
    """Send once the connection stands."""
    while not dealer.send(message):
        dealer.wait(0.01)


def taken(router: RouterChannel[Answers, Asks], count: int) -> list[tuple[bytes, Asks]]:
    """The next ``count`` messages."""
    found: list[tuple[bytes, Asks]] = []
    while len(found) < count and router.wait(WAIT_S):
        found += router.receive(count - len(found))
    return found


def read_all(router: RouterChannel[Answers, Asks], *, until: str, count: int) -> list[Asks]:
    """What comes in until a counter has risen so far."""
    found: list[Asks] = []
    while router.counters[until] < count and router.wait(WAIT_S):
        found += [message for _, message in router.receive(100)]
    return found


def test_a_message_goes_there_and_its_answer_comes_back(
    router: RouterChannel[Answers, Asks], dealers: Callable[[], DealerChannel[Asks, Answers]]
) -> None:
    dealer = dealers()
    send_surely(dealer, Ping(7, "x"))
    ((peer, message),) = taken(router, 1)
    assert message == Ping(7, "x")
    assert router.send(peer, Pong(8))
    assert dealer.wait(WAIT_S)
    assert dealer.receive(10) == [Pong(8)]
    assert dealer.counters["received"] == router.counters["received"] == 1
    assert router.counters["sent"] == 1


def test_each_peer_gets_its_own_answers(
    router: RouterChannel[Answers, Asks], dealers: Callable[[], DealerChannel[Asks, Answers]]
) -> None:
    first, second = dealers(), dealers()
    send_surely(first, Ping(1))
    send_surely(second, Ping(2))
    for peer, message in taken(router, 2):
        assert isinstance(message, Ping)
        assert router.send(peer, Pong(message.number))
    assert first.wait(WAIT_S)
    assert second.wait(WAIT_S)
    assert (first.receive(9), second.receive(9)) == ([Pong(1)], [Pong(2)])


def test_messages_come_in_the_order_in_which_they_were_sent(
    router: RouterChannel[Answers, Asks], dealers: Callable[[], DealerChannel[Asks, Answers]]
) -> None:
    dealer = dealers()
    for number in range(50):
        send_surely(dealer, Ping(number))
    assert [message for _, message in taken(router, 50)] == [Ping(n) for n in range(50)]


def test_no_more_is_taken_than_was_asked_for(
    router: RouterChannel[Answers, Asks], dealers: Callable[[], DealerChannel[Asks, Answers]]
) -> None:
    dealer = dealers()
    for number in range(5):
        send_surely(dealer, Ping(number))
    assert router.wait(WAIT_S)
    assert len(router.receive(2)) <= 2
    assert router.receive(0) == []


def test_with_nobody_there_a_message_is_lost_at_once_and_counted(
    dealers: Callable[[], DealerChannel[Asks, Answers]],
) -> None:
    dealer = dealers()
    assert [dealer.send(Ping(n)) for n in range(3)] == [False] * 3
    assert dealer.receive(10) == []
    assert dealer.counters == {"unsent": 3}


def test_what_was_sent_to_nobody_does_not_come_later(
    address: str, dealers: Callable[[], DealerChannel[Asks, Answers]]
) -> None:
    dealer = dealers()
    dealer.send(Ping(1))
    router: RouterChannel[Answers, Asks] = RouterChannel(address, service_codec())
    try:
        send_surely(dealer, Ping(2))
        assert [message for _, message in taken(router, 1)] == [Ping(2)]
    finally:
        router.close()


def test_a_service_that_starts_later_or_anew_is_found_without_help(
    address: str, dealers: Callable[[], DealerChannel[Asks, Answers]]
) -> None:
    dealer = dealers()
    for number in range(2):
        router: RouterChannel[Answers, Asks] = RouterChannel(address, service_codec())
        try:
            # Some go into the connection that has just broken: they are lost, and no harm is done.
            while not router.wait(0.01):
                dealer.send(Ping(number))
            assert router.receive(1)[0][1] == Ping(number)
        finally:
            router.close()


def test_a_service_that_does_not_read_costs_messages_and_no_time(
    router: RouterChannel[Answers, Asks], dealers: Callable[[], DealerChannel[Asks, Answers]]
) -> None:
    dealer = dealers()
    send_surely(dealer, Ping(0))
    big = Ping(1, "x" * 10_000)
    results = [dealer.send(big) for _ in range(4 * QUEUE_FRAMES)]
    assert False in results
    assert dealer.counters["unsent"] >= results.count(False)
    # It is read again, and there is room again.
    while not dealer.send(Ping(2)):
        router.wait(0.01)
        router.receive(100)


def test_a_peer_that_does_not_read_loses_answers_and_holds_nobody_up(
    router: RouterChannel[Answers, Asks], dealers: Callable[[], DealerChannel[Asks, Answers]]
) -> None:
    deaf, other = dealers(), dealers()
    send_surely(deaf, Ping(1))
    ((deaf_peer, _),) = taken(router, 1)
    results = [router.send(deaf_peer, Pong(n)) for n in range(50 * QUEUE_FRAMES)]
    assert False in results
    assert router.counters["unsent"] == results.count(False)
    send_surely(other, Ping(2))
    ((peer, _),) = taken(router, 1)
    assert router.send(peer, Pong(2))
    assert other.wait(WAIT_S)
    assert other.receive(1) == [Pong(2)]


def test_an_answer_to_a_peer_that_has_gone_is_lost_and_counted(
    router: RouterChannel[Answers, Asks],
) -> None:
    assert not router.send(b"nobody", Pong(1))
    assert router.counters["unsent"] == 1


def test_a_peer_that_has_closed_is_noticed(
    router: RouterChannel[Answers, Asks], address: str
) -> None:
    dealer: DealerChannel[Asks, Answers] = DealerChannel(address, client_codec())
    send_surely(dealer, Ping(1))
    ((peer, _),) = taken(router, 1)
    assert router.send(peer, Pong(1))
    dealer.close()
    # Its end is noticed in a moment; until then answers still go into its queue.
    while router.send(peer, Pong(2)):
        router.wait(0.01)
    assert router.counters["unsent"] == 1


def test_a_message_that_cannot_be_written_is_lost_and_counted(
    router: RouterChannel[Answers, Asks], dealers: Callable[[], DealerChannel[Asks, Answers]]
) -> None:
    dealer = dealers()
    send_surely(dealer, Ping(1))
    unsent = dealer.counters["unsent"]
    assert not dealer.send(Ping(2, "\ud800"))
    assert dealer.counters["unsent"] == unsent + 1
    assert dealer.send(Ping(3))
    assert [message for _, message in taken(router, 2)] == [Ping(1), Ping(3)]


def test_garbage_and_other_versions_are_counted_and_the_rest_is_heard(
    router: RouterChannel[Answers, Asks], raw: zmq.Socket[bytes]
) -> None:
    good = client_codec().encode(Ping(5))
    for frame in (b"", b"\x00" * 100, b"TST\x03\xff", good[:-1], good + b"x", b"GET / HTTP/1.1"):
        raw.send(frame)
    raw.send(client_codec(2).encode(Ping(1)))
    raw.send(good)
    assert read_all(router, until="received", count=1) == [Ping(5)]
    assert router.counters == {"garbage": 6, "version": 1, "received": 1}


@pytest.mark.parametrize("count", [2, 3, 50])
def test_a_message_of_several_frames_is_garbage(
    router: RouterChannel[Answers, Asks], raw: zmq.Socket[bytes], count: int
) -> None:
    good = client_codec().encode(Ping(5))
    raw.send_multipart([good] * count)
    raw.send_multipart([b"", good])
    raw.send(good)
    assert read_all(router, until="received", count=1) == [Ping(5)]
    assert router.counters["garbage"] == 2


def test_a_huge_frame_is_dropped_and_its_sender_can_go_on(
    router: RouterChannel[Answers, Asks], raw: zmq.Socket[bytes]
) -> None:
    good = client_codec().encode(Ping(5))
    raw.send(good)
    assert read_all(router, until="received", count=1) == [Ping(5)]
    raw.send(b"TST\x03" + b"\x00" * (MAX_FRAME_BYTES + 1))
    raw.send(good)
    assert read_all(router, until="received", count=2) == [Ping(5)]
    assert router.counters["size"] == 1


def test_who_sends_something_far_longer_is_cut_off_before_it_is_here_and_may_come_back(
    router: RouterChannel[Answers, Asks], raw: zmq.Socket[bytes]
) -> None:
    good = client_codec().encode(Ping(5))
    raw.send(good)
    assert read_all(router, until="received", count=1) == [Ping(5)]
    monitor = raw.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    try:
        raw.send(b"TST\x03" + b"\x00" * (5 * MAX_FRAME_BYTES))
        assert monitor.poll(int(WAIT_S * 1000))
    finally:
        raw.disable_monitor()
        monitor.close(0)
    # What was sent into the broken connection may be lost.
    while not router.wait(0.01):
        raw.send(good)
    assert read_all(router, until="received", count=2) != []
    assert (router.counters["size"], router.counters["garbage"]) == (0, 0)


def test_what_a_service_says_wrongly_is_counted_by_its_client(
    address: str, dealers: Callable[[], DealerChannel[Asks, Answers]]
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(address)
    try:
        dealer = dealers()
        send_surely(dealer, Ping(1))
        peer = socket.recv_multipart()[0]
        for frame in (b"nonsense", service_codec(9).encode(Pong(1)), service_codec().encode(Bye())):
            socket.send_multipart([peer, frame])
        found: list[Answers] = []
        while not found and dealer.wait(WAIT_S):
            found += dealer.receive(10)
        assert found == [Bye()]
        assert (dealer.counters["garbage"], dealer.counters["version"]) == (1, 1)
    finally:
        socket.close(0)
        context.term()


def test_closing_with_messages_unread_and_unsent_does_not_wait(
    router: RouterChannel[Answers, Asks], address: str
) -> None:
    dealer: DealerChannel[Asks, Answers] = DealerChannel(address, client_codec())
    send_surely(dealer, Ping(1))
    for _ in range(100):
        dealer.send(Ping(2, "x" * 1000))
    dealer.close()
