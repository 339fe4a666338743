"""Sizes as people read them. Integers are bytes everywhere else."""


def megabytes(n_bytes: int) -> str:
    """A size in MB = 10^6 bytes: `62.5 MB`."""
    return f"{n_bytes / 1e6:,.1f} MB"
