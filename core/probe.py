"""What a launcher or a tool listens to a service through: whether it answers at all."""

from typing import Generic, TypeVar

from core.channel import Codec, DealerChannel

Out = TypeVar("Out")
In = TypeVar("In")
Status = TypeVar("Status")

MESSAGES_PER_LOOK = 64
ASK_EVERY_S = 0.05


class ChannelProbe(Generic[Out, In, Status]):
    """Says hello, asks for the status.

    Args:
        hello: a message that a service answers.
        ask_status: a message that it answers with a ``status``.
    """

    def __init__(
        self, address: str, codec: Codec[Out, In], hello: Out, ask_status: Out, status: type[Status]
    ) -> None:
        self._channel: DealerChannel[Out, In] = DealerChannel(address, codec)
        self._hello = hello
        self._ask_status = ask_status
        self._status = status

    def heard(self) -> bool:
        """Ask again, and whether an answer has come since the last call."""
        has_answer = bool(self._channel.receive(MESSAGES_PER_LOOK))
        self._channel.send(self._hello)
        return has_answer

    def status(self, timeout_s: float) -> Status | None:
        """Ask for the status and wait for it; for tests and tools, never in a frame."""
        # Again and again: before the connection stands, what is sent is lost.
        for _ in range(max(round(timeout_s / ASK_EVERY_S), 1)):
            self._channel.send(self._ask_status)
            if self._channel.wait(ASK_EVERY_S):
                for message in self._channel.receive(MESSAGES_PER_LOOK):
                    if isinstance(message, self._status):
                        return message
        return None

    def close(self) -> None:
        self._channel.close()
