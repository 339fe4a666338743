"""The demo model and its recipe: exact gradients on real weights, both backends alike, and training that shows."""

import json

import numpy as np
import pytest
from engines import autodiff_of_mlx_lm, one_pass, random_adapter, random_group, worst_error
from runs import BACKENDS, Done, needs_mlx, read_log

from mesp_mlx import backend as backends
from mesp_mlx import config
from mesp_mlx.model.spec import PROJECTIONS

pytestmark = pytest.mark.demo
VOCABULARY = 49152


@pytest.fixture(scope="module")
def truth(demo_model):
    """An adapter on all seven projections of every layer, its B a tenth of its A, a row, and the loss and gradients of mlx-lm's model by MLX's autodiff."""
    adapter = {name: value if name.endswith("lora_a") else 0.1 * value for name, value in random_adapter(demo_model.folder).items()}
    group = random_group(VOCABULARY, [24], supervised=1.0)
    return adapter, group, *autodiff_of_mlx_lm(demo_model.folder, adapter, [group], float64=True)


@needs_mlx
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_equal_those_of_mlx_lm(demo_model, truth, backend):
    adapter, group, loss, gradients = truth
    assert {name.split(".", 3)[3].rsplit(".", 1)[0] for name in adapter} == set(PROJECTIONS) and len(adapter) == 30 * 7 * 2
    found_loss, found, _ = one_pass(demo_model.folder, backends.choose(backend), adapter, [group])
    assert found_loss == pytest.approx(loss, rel=1e-5)
    assert worst_error(found, gradients) <= 1e-4
