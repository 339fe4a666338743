"""From what --model names to a folder that the program and mlx-lm both read."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mesp_mlx.errors import UserError
from mesp_mlx.model import demo
from mesp_mlx.model.convert import entry_of_cache

FORMAT = 1  # raised when converted folders would come out differently, so that old ones are not used


@dataclass(frozen=True)
class ModelFolder:
    """A model folder in MLX's layout; `converted` says that it was made in the cache from something else."""

    folder: Path
    name: str
    converted: bool


def resolve(model: str, cache_folder: Path, quantize: str = "4", note: Callable[[str], None] = print) -> ModelFolder:
    if model == "demo":
        folder = cache_folder / "models" / f"{demo.NAME}-{demo.GGUF_SHA256[:12]}-{FORMAT}"
        with entry_of_cache(folder) as partial:
            if partial:
                note(f"Downloading {demo.NAME} (93 MB), once.")
                demo.build(partial)
        return ModelFolder(folder, demo.NAME, True)
    raise UserError("not yet")
