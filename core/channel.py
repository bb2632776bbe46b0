"""Message channels between processes: ZeroMQ sockets that never block whoever decides.

A frame on the wire is a magic, a schema version and a msgpack body of one tagged union. What
is too long, garbled or of another version is counted and dropped; nothing is ever unpickled.
The serving side holds a ``DealerChannel``: every call returns at once, and what does not fit
into the queue is lost (and counted). A service holds a ``RouterChannel``.
"""

import re
import uuid
from collections import Counter
from typing import Any, Generic, TypeVar

import msgspec
import zmq

Out = TypeVar("Out")
In = TypeVar("In")

MAX_FRAME_BYTES = 2 << 20
"""Longer frames are dropped with a count."""
_CUT_OFF_BYTES = 4 * MAX_FRAME_BYTES
"""Who sends longer ones than this is disconnected by ZeroMQ before they are in memory."""
QUEUE_FRAMES = 256
"""Frames that may wait in each direction; more are dropped."""
HEADER_BYTES = 4
MAX_ADDRESS_BYTES = 107
"""Longest path of a Unix socket on Linux."""


class WireError(ValueError):
    """A frame that is not a message; ``kind`` is ``garbage``, ``version`` or ``size``."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Codec(Generic[Out, In]):
    """Both directions of one protocol: what this side sends and what it takes."""

    def __init__(self, *, magic: bytes, version: int, takes: Any) -> None:
        if len(magic) != HEADER_BYTES - 1 or not 0 < version < 256:
            raise ValueError("a magic is three bytes and a version 1 to 255")
        self._header = magic + bytes([version])
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(takes)

    def encode(self, message: Out) -> bytes:
        return self._header + self._encoder.encode(message)

    def decode(self, frame: bytes) -> In:
        """The message in a frame. Raises WireError."""
        if len(frame) > MAX_FRAME_BYTES:
            raise WireError("size", f"a frame of {len(frame)} bytes")
        if frame[: HEADER_BYTES - 1] != self._header[:-1]:
            raise WireError("garbage", "not a frame of this protocol")
        if frame[:HEADER_BYTES] != self._header:
            raise WireError("version", f"schema version {frame[3:HEADER_BYTES].hex() or 'none'}")
        try:
            return self._decoder.decode(frame[HEADER_BYTES:])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise WireError("garbage", str(error)) from error


_HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.%a-z]+\]")


def check_address(address: str) -> str:
    """``address`` if ZeroMQ can use it between processes.

    Raises:
        ValueError: what an address looks like.
    """
    scheme, _, rest = address.partition("://")
    if scheme == "ipc" and 0 < len(rest.encode()) <= MAX_ADDRESS_BYTES:
        return address
    host, _, port = rest.rpartition(":")
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536
    if scheme == "tcp" and _HOST.fullmatch(host) and is_port:
        return address
    raise ValueError(
        f"takes ipc://PATH (at most {MAX_ADDRESS_BYTES} bytes) or tcp://HOST:PORT, got {address!r}"
    )


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.SNDHWM, QUEUE_FRAMES)
    socket.setsockopt(zmq.RCVHWM, QUEUE_FRAMES)
    socket.setsockopt(zmq.MAXMSGSIZE, _CUT_OFF_BYTES)
    return socket


class DealerChannel(Generic[Out, In]):
    """The side that must never wait."""

    def __init__(self, address: str, codec: Codec[Out, In]) -> None:
        self._codec = codec
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = _socket(self._context, zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, uuid.uuid4().hex.encode())
        # A frame for a service that is not there is lost at once: kept, it would be stale.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        try:
            self._socket.connect(check_address(address))
        except zmq.ZMQError as error:
            self.close()
            raise ValueError(f"cannot connect to {address}: {error}") from error
        self.counters: Counter[str] = Counter()

    def send(self, message: Out) -> bool:
        """Queue a message; False where there is nobody or no room, and it is lost."""
        try:
            self._socket.send(self._codec.encode(message), zmq.NOBLOCK)
        except (zmq.ZMQError, UnicodeEncodeError):
            self.counters["unsent"] += 1
            return False
        self.counters["sent"] += 1
        return True

    def receive(self, limit: int) -> list[In]:
        """At most ``limit`` messages that are here already."""
        messages: list[In] = []
        for _ in range(limit):
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                messages.append(self._codec.decode(frame))
            except WireError as error:
                self.counters[error.kind] += 1
                continue
            self.counters["received"] += 1
        return messages

    def wait(self, timeout_s: float) -> bool:
        """Whether a frame is here within ``timeout_s``; for tests and tools, never in a frame."""
        return bool(self._socket.poll(int(timeout_s * 1000)))

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()


class RouterChannel(Generic[Out, In]):
    """The side of a service: many peers, one loop."""

    def __init__(self, address: str, codec: Codec[Out, In]) -> None:
        self._codec = codec
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = _socket(self._context, zmq.ROUTER)
        # Otherwise what cannot be delivered vanishes without a word.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A peer that reconnects is the same peer.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            self._socket.bind(check_address(address))
        except zmq.ZMQError:
            self._socket.close(0)
            self._context.term()
            raise
        self.counters: Counter[str] = Counter()

    def wait(self, timeout_s: float) -> bool:
        """Whether there is something to receive within ``timeout_s``."""
        return bool(self._socket.poll(int(timeout_s * 1000)))

    def receive(self, limit: int) -> list[tuple[bytes, In]]:
        """At most ``limit`` messages that are here already, each with its sender's identity."""
        messages: list[tuple[bytes, In]] = []
        for _ in range(limit):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(frames) != 2:
                self.counters["garbage"] += 1
                continue
            try:
                messages.append((frames[0], self._codec.decode(frames[1])))
            except WireError as error:
                self.counters[error.kind] += 1
                continue
            self.counters["received"] += 1
        return messages

    def send(self, peer: bytes, message: Out) -> bool:
        """Answer a peer; False where its queue is full or it has gone, and it is lost."""
        try:
            self._socket.send_multipart([peer, self._codec.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError:
            self.counters["unsent"] += 1
            return False
        self.counters["sent"] += 1
        return True

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()
