"""The adapter against mlx-lm's own: order, first values, names, shapes, files and what mlx-lm does with them."""

import importlib
import json
import subprocess
import sys
import types

import numpy as np
import pytest
from models import FAMILY_VARIANTS, PROJECTIONS, make_model, tiny_config, variant_config

from mesp_mlx import adapter, reference
from mesp_mlx.errors import RunStopped, UserError
from mesp_mlx.model.spec import load_spec
from mesp_mlx.stream.run_file import Parked, RunFile
from mesp_mlx.stream.safetensors import Writer, read_array, read_header

PARAMETERS = {"rank": 3, "scale": 20.0, "dropout": 0.0}


def load_backend(name):
    if name == "mlx":
        pytest.importorskip("mlx.core")
    return importlib.import_module({"mlx": "mesp_mlx.ops", "numpy": "mesp_mlx.reference"}[name])


@pytest.fixture(params=["mlx", "numpy"])
def backend(request):
    return load_backend(request.param)


def numpy_adapter(spec, modules, rank=3, seed=1):
    """An adapter with nothing zero in it."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in adapter.shapes(spec, modules, rank).items()}


def write(file, tensors):
    with Writer(file, {name: (dtype, array.shape) for name, (dtype, array) in tensors.items()}) as writer:
        for name, (_, array) in tensors.items():
            writer.write(name, array)


# Which modules


def test_chooses_the_last_layers_in_mlx_lm_order():
    spec = load_spec(tiny_config("qwen2", num_hidden_layers=3))
    assert adapter.choose_modules(spec, 2, ["self_attn.q_proj", "mlp.up_proj", "self_attn.v_proj"]) == [
        "model.layers.1.mlp.up_proj",
        "model.layers.1.self_attn.v_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.2.mlp.up_proj",
        "model.layers.2.self_attn.v_proj",
        "model.layers.2.self_attn.q_proj",
    ]


def test_all_seven_projections_of_all_layers_by_default():
    spec = load_spec(tiny_config("qwen2"))
    assert set(adapter.choose_modules(spec)) == {f"model.layers.{layer}.{key}" for layer in (0, 1) for key in PROJECTIONS}


@pytest.mark.parametrize(
    ("num_layers", "keys", "said"),
    [
        (3, None, "3 layers were asked for, the model has 2"),
        (0, None, "the number of layers is 0"),
        (-2, None, "the number of layers is -2"),
        (-1, [], "no module was named"),
        (-1, ["self_attn.q_proj", "attn.query"], "no module is called 'attn.query'"),
    ],
)
def test_refuses_what_matches_nothing(num_layers, keys, said):
    with pytest.raises(UserError, match=said) as caught:
        adapter.choose_modules(load_spec(tiny_config("llama")), num_layers, keys)
    if keys is not None:
        assert all(key in str(caught.value) for key in PROJECTIONS)


# First values


def mlx_lm_adapter(folder, seed, num_layers, keys):
    """What mlx-lm's train_model starts from: the lines with which it begins."""
    mx, mlx_utils = pytest.importorskip("mlx.core"), pytest.importorskip("mlx.utils")
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    mx.random.seed(seed)
    model.freeze()
    linear_to_lora_layers(model, num_layers, PARAMETERS | {"keys": keys})
    return {name: np.array(array) for name, array in mlx_utils.tree_flatten(model.trainable_parameters())}


@pytest.mark.parametrize(
    ("family", "seed", "num_layers", "keys"),
    [
        ("llama", 0, -1, list(PROJECTIONS)),
        ("qwen2", 7, -1, list(PROJECTIONS)),
        ("qwen3", 7, 1, list(PROJECTIONS)),
        ("mistral", 2**40 + 3, -1, ["self_attn.v_proj", "mlp.down_proj", "self_attn.q_proj"]),
        *((variant, 7, -1, None) for variant in FAMILY_VARIANTS if variant != "opt"),
    ],
)
def test_starts_from_the_very_bits_of_mlx_lm(tmp_path, family, seed, num_layers, keys):
    """keys None: all linears of a layer."""
    config = variant_config(family) if family in FAMILY_VARIANTS else tiny_config(family, attention_bias=True if family == "llama" else None)
    spec = load_spec(config)
    keys = list(spec.adaptable_keys()) if keys is None else keys
    want = mlx_lm_adapter(make_model(tmp_path, config), seed, num_layers, keys)
    for name in ("mlx", "numpy"):
        backend = load_backend(name)
        got = adapter.initialise(spec, adapter.choose_modules(spec, num_layers, keys), 3, seed, backend)
        assert sorted(got) == sorted(want)
        for tensor, array in got.items():
            values = backend.arrays.to_numpy(array)
            assert values.dtype == np.float32
            np.testing.assert_array_equal(values, want[tensor], err_msg=f"{name} {tensor}")


def test_odd_bits_per_weight_start_alike(tmp_path):
    config = tiny_config("llama", intermediate_size=128)
    want = mlx_lm_adapter(make_model(tmp_path, config, bits=3), 5, -1, list(PROJECTIONS))
    spec = load_spec(config)
    got = adapter.initialise(spec, adapter.choose_modules(spec), 3, 5, reference)
    for tensor, array in got.items():
        np.testing.assert_array_equal(array, want[tensor])


def test_starts_alike_where_mlx_is_not_installed():
    """Numbers that MLX 0.32.4 drew, so that a machine without it checks the twin too."""
    spec = load_spec(tiny_config("qwen2"))
    got = adapter.initialise(spec, adapter.choose_modules(spec), 3, 7, reference)
    first, last = got["model.layers.0.mlp.up_proj.lora_a"], got["model.layers.1.self_attn.q_proj.lora_a"]
    np.testing.assert_array_equal(first[0], np.array([-0.012609817087650299, 0.014339864253997803, 0.038146212697029114], np.float32))
    np.testing.assert_array_equal(last[-1], np.array([0.0647960901260376, 0.058474019169807434, 0.06890888512134552], np.float32))
    assert all(not array.any() for name, array in got.items() if name.endswith(".lora_b"))


def test_touches_no_global_random_state():
    mx = pytest.importorskip("mlx.core")
    spec = load_spec(tiny_config("llama"))
    before = [np.array(key) for key in mx.random.state]
    adapter.initialise(spec, adapter.choose_modules(spec), 3, 0, load_backend("mlx"))
    np.testing.assert_array_equal(before, [np.array(key) for key in mx.random.state])


# Files


def test_saved_adapter_comes_back(tmp_path, backend):
    spec = load_spec(tiny_config("qwen3"))
    modules = adapter.choose_modules(spec, 1)
    arrays = numpy_adapter(spec, modules)
    file = adapter.save(tmp_path / "run", {name: backend.arrays.asarray(array) for name, array in arrays.items()}, backend)
    assert [path.name for path in file.parent.iterdir()] == ["adapters.safetensors"]
    for path in (file, file.parent):
        got = adapter.load(path, spec, modules, 3, backend)
        assert list(got) == list(arrays)
        for name, array in got.items():
            np.testing.assert_array_equal(backend.arrays.to_numpy(array), arrays[name])


def test_in_the_run_s_file_it_is_the_same(tmp_path, backend):
    """Drawn into it, saved out of it, read into it again; a tensor at a time."""
    spec = load_spec(tiny_config("qwen3"))
    modules = adapter.choose_modules(spec)
    (tmp_path / "run").mkdir()
    file = RunFile(tmp_path / "run", 0, backend)
    want = adapter.initialise(spec, modules, 3, 7, backend)
    drawn = adapter.initialise(spec, modules, 3, 7, backend, file)
    assert all(isinstance(tensor, Parked) for tensor in drawn.values()) and list(drawn) == list(want)
    saved = adapter.save(tmp_path / "file", drawn, backend)
    assert saved.read_bytes() == adapter.save(tmp_path / "memory", want, backend).read_bytes()
    loaded = adapter.load(saved, spec, modules, 3, backend, file)
    for name, tensor in loaded.items():
        assert isinstance(tensor, Parked)
        np.testing.assert_array_equal(backend.arrays.to_numpy(tensor.get()), backend.arrays.to_numpy(want[name]))
    file.close()


def test_checkpoint_has_the_name_asked_for(tmp_path):
    spec = load_spec(tiny_config("llama"))
    file = adapter.save(tmp_path, numpy_adapter(spec, adapter.choose_modules(spec)), reference, "0000100_adapters.safetensors")
    assert file == tmp_path / "0000100_adapters.safetensors" and file.is_file()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_never_reach_a_file(tmp_path, backend, value):
    spec = load_spec(tiny_config("llama"))
    arrays = numpy_adapter(spec, adapter.choose_modules(spec))
    adapter.save(tmp_path, arrays, reference)
    before = (tmp_path / "adapters.safetensors").read_bytes()
    arrays["model.layers.1.mlp.gate_proj.lora_b"][1, 2] = value
    with pytest.raises(RunStopped, match=r"model\.layers\.1\.mlp\.gate_proj\.lora_b"):
        adapter.save(tmp_path, {name: backend.arrays.asarray(array) for name, array in arrays.items()}, backend)
    assert [path.name for path in tmp_path.iterdir()] == ["adapters.safetensors"]
    assert (tmp_path / "adapters.safetensors").read_bytes() == before


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "taken").write_text("a file where the folder should be")
    with pytest.raises(UserError, match="saving the adapter"):
        adapter.save(tmp_path / "taken", {}, reference)
    with pytest.raises(UserError, match=r"adapter_config\.json"):
        adapter.write_config(tmp_path / "taken", model="m", num_layers=1, rank=1, scale=1, dropout=0, keys=[])


@pytest.mark.parametrize("tensors", [2, 40])
def test_a_full_disk_leaves_nothing_behind(tmp_path, tensors):
    pytest.importorskip("resource")
    code = (
        "import resource, pathlib, numpy as np; from mesp_mlx import adapter, errors, reference\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))\n"
        f"arrays = {{f'{{i}}.lora_a': np.ones(({8000 // tensors}, 2), np.float32) for i in range({tensors})}}\n"
        f"try: adapter.save(pathlib.Path({str(tmp_path)!r}), arrays, reference)\n"
        "except errors.UserError as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Free some space" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_every_mismatch_is_listed_before_it_is_refused(tmp_path):
    spec = load_spec(tiny_config("llama"))
    modules = adapter.choose_modules(spec, 1, ["self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj"])
    tensors: dict[str, tuple[str, np.ndarray]] = {name: ("F32", array) for name, array in numpy_adapter(spec, modules).items()}
    prefix = "model.layers.1."
    del tensors[prefix + "mlp.up_proj.lora_b"]
    tensors[prefix + "self_attn.q_proj.lora_a"] = ("F32", np.zeros((63, 3), np.float32))
    tensors[prefix + "self_attn.q_proj.lora_b"] = ("I32", np.zeros((3, 64), np.int32))
    tensors[prefix + "self_attn.v_proj.lora_a"] = ("F32", np.full((64, 3), np.nan, np.float32))
    tensors["model.layers.0.mlp.up_proj.lora_a"] = ("F32", np.zeros((64, 3), np.float32))
    write(tmp_path / "adapters.safetensors", tensors)
    with pytest.raises(UserError) as caught:
        adapter.load(tmp_path, spec, modules, 3, reference)
    assert str(caught.value).split("\n")[1:] == [
        f"  {prefix}mlp.up_proj.lora_b: missing, expected [3, 96]",
        "  model.layers.0.mlp.up_proj.lora_a: unexpected",
        f"  {prefix}self_attn.v_proj.lora_a: holds numbers that are not finite",
        f"  {prefix}self_attn.q_proj.lora_a: shape [63, 3], expected [64, 3]",
        f"  {prefix}self_attn.q_proj.lora_b: type I32, expected F32",
    ]


def test_another_rank_is_named(tmp_path):
    spec = load_spec(tiny_config("llama"))
    modules = adapter.choose_modules(spec)
    adapter.save(tmp_path, numpy_adapter(spec, modules, rank=5), reference)
    with pytest.raises(UserError, match="with rank 3 on 14 modules. The file's rank is 5."):
        adapter.load(tmp_path, spec, modules, 3, reference)


def test_half_precision_adapters_are_taken_exactly(tmp_path):
    spec = load_spec(tiny_config("llama"))
    modules = adapter.choose_modules(spec, 1, ["self_attn.q_proj"])
    arrays = {name: array.astype(np.float16) for name, array in numpy_adapter(spec, modules).items()}
    write(tmp_path / "adapters.safetensors", {name: ("F16", array) for name, array in arrays.items()})
    for name, array in adapter.load(tmp_path, spec, modules, 3, reference).items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, arrays[name].astype(np.float32))


@pytest.mark.parametrize("damage", ["missing", "empty folder", "truncated", "garbage"])
def test_a_missing_or_broken_file_is_a_clear_error(tmp_path, damage):
    spec = load_spec(tiny_config("llama"))
    modules = adapter.choose_modules(spec)
    file = adapter.save(tmp_path / "run", numpy_adapter(spec, modules), reference)
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-5])
    elif damage == "garbage":
        file.write_bytes(b"\xff" * 4096)
    else:
        file.unlink()
    with pytest.raises(UserError, match=r"adapters\.safetensors"):
        adapter.load(file.parent if damage == "empty folder" else file, spec, modules, 3, reference)


# mlx-lm reads what we write


@pytest.mark.parametrize(("num_layers", "keys"), [(-1, None), (1, ["self_attn.v_proj", "mlp.down_proj"])])
def test_mlx_lm_loads_and_fuses_our_folder(tmp_path, num_layers, keys):
    mx, mlx_utils = pytest.importorskip("mlx.core"), pytest.importorskip("mlx.utils")
    from mlx_lm.tuner.utils import load_adapters
    from mlx_lm.utils import load_model

    config = tiny_config("qwen2")
    spec = load_spec(config)
    modules = adapter.choose_modules(spec, num_layers, keys)
    arrays = {name: 0.1 * array for name, array in numpy_adapter(spec, modules).items()}
    adapter.save(tmp_path / "adapter", arrays, reference)
    layers = spec.num_layers if num_layers == -1 else num_layers
    adapter.write_config(tmp_path / "adapter", model="m", num_layers=layers, rank=3, scale=2.0, dropout=0.0, keys=keys or PROJECTIONS)

    model, _ = load_model(make_model(tmp_path / "model", config))
    ids = mx.array([[3, 1, 4, 1, 5, 9]])
    before = model(ids)
    model.freeze()
    load_adapters(model, str(tmp_path / "adapter")).eval()
    loaded = dict(mlx_utils.tree_flatten(model.trainable_parameters()))
    assert sorted(loaded) == sorted(arrays)
    for name, array in loaded.items():
        np.testing.assert_array_equal(np.array(array), arrays[name])

    adapted = model(ids)
    assert mx.abs(adapted - before).max().item() > 0.1
    model.update_modules(mlx_utils.tree_unflatten([(name, module.fuse(dequantize=True)) for name, module in model.named_modules() if hasattr(module, "fuse")]))
    assert not any(hasattr(module, "lora_a") for module in model.modules())
    np.testing.assert_allclose(np.array(model(ids)), np.array(adapted), rtol=0, atol=2e-5)


def test_our_files_are_shaped_like_those_of_mlx_lm_s_trainer(tmp_path):
    pytest.importorskip("mlx.core")
    from mlx_lm import lora
    from mlx_lm.utils import load_model

    config = tiny_config("llama")
    spec = load_spec(config)
    model, _ = load_model(make_model(tmp_path / "model", config))
    own = {"model": "m", "num_layers": 1, "batch_size": 1, "iters": 2, "seed": 11, "val_batches": 0, "save_every": 1, "adapter_path": str(tmp_path / "theirs")}
    parameters = PARAMETERS | {"keys": list(PROJECTIONS)}
    arguments = types.SimpleNamespace(**(lora.CONFIG_DEFAULTS | own | {"lora_parameters": parameters}))
    lora.train_model(arguments, model, _Rows([([5, 6, 7, 8, 9], 0), ([9, 8, 7, 6, 5, 4], 0)]), [])

    modules = adapter.choose_modules(spec, 1)
    ours = adapter.save(tmp_path / "ours", adapter.initialise(spec, modules, 3, 11, reference), reference)
    adapter.write_config(tmp_path / "ours", model="m", num_layers=1, keys=PROJECTIONS, **PARAMETERS)

    theirs = read_header(tmp_path / "theirs" / "adapters.safetensors")[0]
    assert {name: (entry.dtype, entry.shape) for name, entry in read_header(ours)[0].items()} == {
        name: (entry.dtype, entry.shape) for name, entry in theirs.items()
    }
    assert np.abs(read_array(theirs["model.layers.1.self_attn.q_proj.lora_b"])).max() > 0  # it did train
    their_config = json.loads((tmp_path / "theirs" / "adapter_config.json").read_text())
    our_config = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    assert our_config == {key: their_config[key] for key in our_config}
    assert sorted(our_config) == ["fine_tune_type", "lora_parameters", "model", "num_layers"]
    assert sorted(adapter.load(tmp_path / "theirs", spec, modules, 3, reference)) == sorted(theirs)


class _Rows(list):
    """A data set as mlx-lm's trainer takes it: rows are (ids, prompt length) already."""

    def process(self, row):
        return row
