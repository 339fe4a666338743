"""Keys depend on what they are made of, and on nothing else."""

import itertools
import subprocess
import sys

from mesp_mlx.keys import key


def test_keys_written_down():
    """Because a run that is resumed, or moved to another machine, must draw the same masks."""
    assert key(0, 0, 0, "model.layers.0.self_attn.q_proj", 0) == (3833455815, 1997432411)
    assert key(7, 3, 12, "model.layers.11.mlp.down_proj", 5) == (2893205373, 1445921402)


def test_they_are_the_same_in_another_process():
    """Python's own hash of a string is not."""
    code = "from mesp_mlx.keys import key; print(key(1, 2, 3, 'module', 4))"
    found = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() for _ in range(2)]
    assert found == [str(key(1, 2, 3, "module", 4))] * 2


def test_every_part_counts():
    parts = list(itertools.product((0, 1, 11), (0, 1, 12), (0, 1), ("a", "b", "1"), (0, 1)))
    keys = {key(*part) for part in parts}
    assert len(keys) == len(parts)
    assert len({word for pair in keys for word in pair}) == 2 * len(parts)
    assert all(0 <= word < 1 << 32 for pair in keys for word in pair)
    assert key(1, 23) != key(12, 3) and key("1") != key(1)
