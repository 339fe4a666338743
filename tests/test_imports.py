"""Who may import whom, what a process carries, and how long a file may get."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from backends import needs_mlx

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "mesp_mlx"
PURE = ("mesp_mlx.keys", "mesp_mlx.memory.tiles")  # what both backends may import: rules in pure Python
CHOICES = ("mesp_mlx.memory.strategy", "mesp_mlx.memory.tiles")  # what a plan says, by which model and engine go
GENERIC = "mesp_mlx/model/generic"  # how the files begin that run mlx-lm's own layers
FILES = sorted(file.relative_to(ROOT).as_posix() for file in PACKAGE.rglob("*.py"))


def name_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(file: str, top_only: bool = False) -> set[str]:
    """The modules that a file imports, anywhere in it or only when it is itself imported."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    inner = {node for function in ast.walk(tree) if isinstance(function, ast.FunctionDef) for node in ast.walk(function)} if top_only else set()
    found = set()
    for node in ast.walk(tree):
        if node in inner:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level and node.module, f"{file}:{node.lineno} imports relatively"
            found |= {f"{node.module}.{alias.name}" if (PACKAGE.parent / node.module.replace(".", "/")).is_dir() else node.module for alias in node.names}
    return found


def tops(modules: set[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules} - set(sys.stdlib_module_names)


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def files(package: str) -> list[str]:
    return [file for file in FILES if within(name_of(file), package)]


def test_the_scan_sees_imports():
    """Or nothing below could fail."""
    assert len(FILES) > 40 and len(files("mesp_mlx.reference")) == len(files("mesp_mlx.ops")) > 10
    assert {"numpy", "mesp_mlx.reference.quantized", "mesp_mlx.keys"} <= set().union(*map(imports, files("mesp_mlx.reference")))
    assert {"mlx.core", "mesp_mlx.ops"} <= imports("mesp_mlx/backend.py") and "mlx.core" not in imports("mesp_mlx/backend.py", top_only=True)


@pytest.mark.parametrize("file", files("mesp_mlx.reference"))
def test_the_reference_is_numpy_alone(file):
    found = imports(file)
    assert tops(found) <= {"numpy", "mesp_mlx"}
    assert all(within(module, "mesp_mlx.reference", *PURE) for module in found if within(module, "mesp_mlx"))


@pytest.mark.parametrize("file", files("mesp_mlx.ops"))
def test_ops_know_nothing_of_the_rest(file):
    found = imports(file)
    assert tops(found) <= {"mlx", "numpy", "mesp_mlx"}
    assert all(within(module, "mesp_mlx.ops", *PURE) for module in found if within(module, "mesp_mlx"))


@pytest.mark.parametrize("module", sorted({*PURE, *CHOICES}))
def test_what_everyone_may_import_is_pure(module):
    file = f"{module.replace('.', '/')}.py"
    assert file in FILES and not tops(imports(file))


MEASURING = ("mesp_mlx.memory.measured", "mesp_mlx.memory.workload", "mesp_mlx.ops")  # what layers take, for the plan
LAYERS = {  # each may import those it names, and what stands below
    "mesp_mlx.stream": ("mesp_mlx.stream", "mesp_mlx.model.spec", "mesp_mlx.memory.strategy", "mesp_mlx.errors", "mesp_mlx.units"),
    "mesp_mlx.optim": ("mesp_mlx.stream",),
    "mesp_mlx.adapter": ("mesp_mlx.stream", "mesp_mlx.model.spec", "mesp_mlx.errors", "mesp_mlx.units"),
    "mesp_mlx.model": (
        *("mesp_mlx.model", "mesp_mlx.stream", "mesp_mlx.data.group", "mesp_mlx.reference.quantized", "mesp_mlx.child", "mesp_mlx.errors"),
        *CHOICES,
    ),
    "mesp_mlx.engine.groups": ("mesp_mlx.model", "mesp_mlx.stream"),
    "mesp_mlx.engine.backprop": ("mesp_mlx.engine.groups", "mesp_mlx.engine.sink", "mesp_mlx.model", "mesp_mlx.stream"),
    "mesp_mlx.engine.generate": ("mesp_mlx.engine.backprop", "mesp_mlx.model", "mesp_mlx.stream", "mesp_mlx.data.group"),
    "mesp_mlx.engine.whole_graph": ("mesp_mlx.engine.sink", "mesp_mlx.model", "mesp_mlx.stream"),
    "mesp_mlx.engine.zeroth_order": ("mesp_mlx.model", "mesp_mlx.stream", "mesp_mlx.keys"),
    "mesp_mlx.engine.methods": ("mesp_mlx.engine", "mesp_mlx.model", "mesp_mlx.stream", "mesp_mlx.config", "mesp_mlx.errors"),
    "mesp_mlx.engine.sink": ("mesp_mlx.optim", "mesp_mlx.stream", "mesp_mlx.errors"),
}


@pytest.mark.parametrize("package", LAYERS)
def test_layers_import_downwards(package):
    for file in files(package):
        own = {module for module in imports(file) if within(module, "mesp_mlx")}
        more = MEASURING if file == "mesp_mlx/model/generic_measured.py" else ()
        assert all(within(module, *LAYERS[package], *more) for module in own), f"{file}: {sorted(own)}"


@pytest.mark.parametrize("file", FILES)
def test_where_heavy_packages_are_imported(file):
    """MLX by its ops, by any mlx-lm layer as a stage, and inside functions that only MLX runs enter; transformers where text becomes tokens, in a function of
    a child; mlx-lm where its architectures are."""
    anywhere, at_import = tops(imports(file)), tops(imports(file, top_only=True))
    assert not at_import & {"mlx", "mlx_lm"} or within(name_of(file), "mesp_mlx.ops") or file.startswith(GENERIC)
    assert not at_import & {"transformers", "huggingface_hub", "tokenizers"}
    assert "transformers" not in anywhere or file == "mesp_mlx/data/tokens.py"
    assert "mlx_lm" not in anywhere or file.startswith(GENERIC) or file == "mesp_mlx/model/samples.py"
    assert not anywhere & {"torch", "safetensors", "gguf"}


def run(code: str) -> list[str]:
    """The JSON that a fresh interpreter prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


LOADED = "; import json; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"


def test_the_package_itself_loads_nothing():
    code = "import sys; before = set(sys.modules); import mesp_mlx; new = sorted(set(sys.modules) - before); import json; print(json.dumps(new))"
    assert run(code) == ["mesp_mlx"]


def test_without_mlx_everything_but_its_ops_can_be_imported():
    names = [name_of(file) for file in FILES if not within(name_of(file), "mesp_mlx.ops", "mesp_mlx.__main__") and not file.startswith(GENERIC)]
    loaded = run(f"import sys; sys.modules['mlx'] = sys.modules['mlx_lm'] = None; import importlib; [importlib.import_module(n) for n in {names}]{LOADED}")
    assert "mesp_mlx" in loaded and "numpy" in loaded


def test_a_training_process_carries_no_tokeniser():
    loaded = set(run(f"import sys, mesp_mlx.finetune{LOADED}"))
    assert "mesp_mlx" in loaded and not loaded & {"transformers", "tokenizers", "mlx_lm", "mlx", "huggingface_hub", "torch", "jinja2", "typer"}


@needs_mlx
def test_nor_does_it_once_mlx_was_chosen():
    loaded = set(run(f"import sys, mesp_mlx.finetune, mesp_mlx.backend; mesp_mlx.backend.choose('mlx'){LOADED}"))
    assert "mlx" in loaded and not loaded & {"transformers", "tokenizers", "mlx_lm", "huggingface_hub", "torch", "jinja2"}


def lines(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("folder", ["mesp_mlx", "tests", "tools"])
def test_no_file_is_long(folder):
    found = {file.relative_to(ROOT).as_posix(): lines(file) for file in (ROOT / folder).rglob("*.py")}
    assert found and {file: count for file, count in found.items() if count > 400} == {}


def test_the_loop_fits_a_screen():
    assert lines(PACKAGE / "engine" / "backprop.py") < 60
