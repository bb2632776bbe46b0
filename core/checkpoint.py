"""Checkpoints on disk: written atomically, checked when read, the newest good one wins.

A file is a magic, the writer's format version, the payload's length and its BLAKE2 digest,
then the payload. One that is cut short, changed or of another version is set aside under
another name, and the next older one is tried.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAGIC = b"JITSERVE"
_HEADER = struct.Struct("<8sHQ16s")
MAX_PAYLOAD_BYTES = 256 << 20
SUFFIX = ".checkpoint"
BAD_SUFFIX = ".bad"
NUM_KEPT = 3
"""Good files and set-aside files that are kept, each."""


class CheckpointError(ValueError):
    """A file that is no good checkpoint; one sentence."""


def pack(payload: bytes, version: int) -> bytes:
    """The bytes of a checkpoint file. Raises ValueError for a payload that is too long."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ValueError(f"a checkpoint takes at most {MAX_PAYLOAD_BYTES} bytes")
    return _HEADER.pack(MAGIC, version, len(payload), _digest(payload, version)) + payload


def unpack(data: bytes, version: int) -> bytes:
    """The payload of a checkpoint file. Raises CheckpointError."""
    if len(data) < _HEADER.size:
        raise CheckpointError("shorter than its header")
    magic, written_version, length, digest = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise CheckpointError("not a checkpoint of this project")
    if written_version != version:
        raise CheckpointError(f"format version {written_version}, this program writes {version}")
    payload = data[_HEADER.size :]
    if len(payload) != length:
        raise CheckpointError(f"{len(payload)} bytes where {length} were written")
    if _digest(payload, version) != digest:
        raise CheckpointError("its checksum does not fit")
    return payload


def _digest(payload: bytes, version: int) -> bytes:
    return hashlib.blake2b(payload, digest_size=16, salt=version.to_bytes(2, "little")).digest()


class CheckpointStore:
    """The checkpoints of one service in one folder, owned by one process at a time.

    Args:
        folder: made if it is not there; readable by its owner only.
        name: of the service; a file is ``NAME-SERIAL.checkpoint``.
        version: of the payload's format; files of another version are set aside.

    Raises:
        OSError: the folder cannot be made or written to.
    """

    def __init__(self, folder: Path, name: str, *, version: int) -> None:
        self._folder = folder
        self._name = name
        self._version = version
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = (folder / f"{name}.lock").open("ab")
        self.is_owner = False
        """Whether this process may write; another one may learn there."""
        self._claim()

    def save(self, payload: bytes) -> Path | None:
        """Write the newest checkpoint; None where another process owns the folder.

        Raises:
            OSError: it could not be written; the older ones are as they were.
        """
        # Who owned the folder may have gone.
        if not self.is_owner and not self._claim():
            return None
        files = self._files()
        serial = self._serial(files[0]) + 1 if files else 1
        path = self._folder / f"{self._name}-{serial:08d}{SUFFIX}"
        part = path.with_suffix(".part")
        try:
            with part.open("wb") as file:
                file.write(pack(payload, self._version))
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink()
            raise
        self._sync_folder()
        for old in self._files()[NUM_KEPT:]:
            old.unlink(missing_ok=True)
        return path

    def newest(self, decode: Callable[[bytes], T]) -> T | None:
        """What ``decode`` makes of the newest good payload, or None where there is none.

        ``decode`` may raise ValueError: then that file counts as bad too.
        """
        for path in self._files():
            try:
                return decode(unpack(path.read_bytes(), self._version))
            except (ValueError, OSError) as error:
                self._set_aside(path, error)
        return None

    def close(self) -> None:
        self._lock.close()

    def _claim(self) -> bool:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        self.is_owner = True
        return True

    def _files(self) -> list[Path]:
        """Newest first."""
        found = self._folder.glob(f"{self._name}-*{SUFFIX}")
        return sorted((path for path in found if self._serial(path) >= 0), reverse=True)

    def _serial(self, path: Path) -> int:
        digits = path.name[len(self._name) + 1 : -len(SUFFIX)]
        return int(digits) if len(digits) == 8 and digits.isascii() and digits.isdigit() else -1

    def _set_aside(self, path: Path, error: Exception) -> None:
        if not self.is_owner:
            logger.warning("checkpoint %s is no good (%s): not used", path, error)
            return
        aside = path.with_suffix(BAD_SUFFIX)
        logger.warning("checkpoint %s is no good (%s): kept as %s", path, error, aside.name)
        with contextlib.suppress(OSError):
            path.replace(aside)
            bad = sorted(self._folder.glob(f"{self._name}-*{BAD_SUFFIX}"), reverse=True)
            for old in bad[NUM_KEPT:]:
                old.unlink(missing_ok=True)

    def _sync_folder(self) -> None:
        # Without it the new name may be gone after a power cut.
        descriptor = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
