"""Keys for random draws that tiling, residency and resuming must not change."""

import hashlib


def key(*parts: int | str) -> tuple[int, int]:
    """A random key, two 32-bit words, that depends on the parts alone: the same on every machine and backend."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
