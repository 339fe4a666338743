"""Keys for random draws that tiling, residency and resuming must not change."""


def key(*parts: int | str) -> tuple[int, int]:
    """A random key, two 32-bit words, that depends on the parts alone: the same on every machine and backend."""
    import hashlib  # which loads several megabytes of OpenSSL: only runs with dropout pay for it

    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
