"""Names as numbers: what crosses a socket or is kept says nothing but whether two are the same."""

import hashlib


def name_hash(*names: str) -> int:
    """A stable hash below 2**63 of some names; 0 where the last is empty."""
    if not names or not names[-1]:
        return 0
    digest = hashlib.blake2b(digest_size=8)
    for name in names:
        data = name.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(4, "little") + data)
    return int.from_bytes(digest.digest(), "little") >> 1


def hash_of_program(tenant: str, program_id: str) -> int:
    """The number under which a program is known to all processes."""
    return name_hash("program", tenant, program_id)
