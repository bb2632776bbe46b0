"""The mark that tells our drops from SGLang's own aborts on their way to the client."""

DROP_PREFIX = "jitserve-dropped:"
REASON_CANCELLED = "program_cancelled"
"""Why calls of a program that its client has cancelled end, or do not begin."""


def drop_message(reason: str) -> str:
    """The abort message of a drop."""
    return DROP_PREFIX + reason


def reason_of_drop(message: str) -> str | None:
    """The reason in an abort message, or None where it is not one of our drops."""
    return message.removeprefix(DROP_PREFIX) if message.startswith(DROP_PREFIX) else None
