import numpy as np
import oracles
import pytest

from mesp_mlx import reference


@pytest.fixture(params=["numpy", "mlx"])
def keep_mask(request):
    return reference.dropout.keep_mask if request.param == "numpy" else lambda *args: np.array(oracles.mlx()[1].dropout.keep_mask(*args))


def test_both_backends_draw_the_same_mask():
    _, ops = oracles.mlx()
    for tokens, width, rate in ((1, 1, 0.5), (63, 5, 0.1), (64, 8, 0.05), (65, 7, 0.9), (200, 33, 0.3)):
        args = (3, 17, 2, "model.layers.0.self_attn.q_proj", tokens, width, rate)
        np.testing.assert_array_equal(reference.dropout.keep_mask(*args), ops.dropout.keep_mask(*args))


def test_fewer_tokens_have_the_same_mask(keep_mask):
    whole = keep_mask(0, 1, 2, "q_proj", 200, 16, 0.3)
    assert whole.shape == (200, 16) and whole.dtype == bool
    for tokens in (1, 63, 64, 65, 129):
        np.testing.assert_array_equal(keep_mask(0, 1, 2, "q_proj", tokens, 16, 0.3), whole[:tokens])


def test_seed_update_row_module_and_block_each_change_the_mask(keep_mask):
    base = keep_mask(0, 0, 0, "q_proj", 128, 16, 0.5)
    others = [(1, 0, 0, "q_proj"), (0, 1, 0, "q_proj"), (0, 0, 1, "q_proj"), (0, 0, 0, "k_proj")]
    assert all((keep_mask(*other, 128, 16, 0.5) != base).any() for other in others)
    assert (base[:64] != base[64:]).any()


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5])
def test_the_rate_is_what_is_dropped(keep_mask, rate):
    share = 1 - keep_mask(0, 0, 0, "q_proj", 1024, 64, rate).mean()
    assert abs(share - rate) <= 4 * (rate * (1 - rate) / 65536) ** 0.5  # four standard deviations
