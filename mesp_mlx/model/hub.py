"""Models on the Hugging Face Hub: only the files needed, after the space for them is checked.

huggingface_hub is imported where it is used: a run on a local model does without it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from mesp_mlx.errors import UserError
from mesp_mlx.model.architecture import open_spec
from mesp_mlx.model.convert import COPIED_FILES, Part, converted, nearest_folder, require_space, weight_bytes
from mesp_mlx.model.spec import Spec, read_config
from mesp_mlx.stream.safetensors import Entry

FILES = ["config.json", "model*.safetensors", "model.safetensors.index.json", *COPIED_FILES]
TIMEOUT_SECONDS = 15
Result = TypeVar("Result")


@dataclass(frozen=True)
class Listing:
    """What the Hub says about a model: the commit that its main branch is at, and all its files' sizes in bytes."""

    commit: str
    sizes: Mapping[str, int]

    def needed(self) -> dict[str, int]:
        """The files that are downloaded: those named in FILES, and not their namesakes in onnx/, original/ and the like."""

        def is_named(name: str) -> bool:
            return any(fnmatchcase(name, pattern) and name.count("/") == pattern.count("/") for pattern in FILES)

        return {name: size for name, size in self.sizes.items() if is_named(name)}


def look_up(model: str) -> Listing | None:
    """The listing of a model, or None where the Hub can't be reached.

    Raises:
        UserError: there is no such model, or not for this user.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        info = HfApi().model_info(model, files_metadata=True, timeout=TIMEOUT_SECONDS)
    except (RepositoryNotFoundError, ValueError) as error:
        raise _refusal(model, error) from None
    except Exception:  # offline, a time-out, an error of the server: the HTTP library's errors differ between versions of huggingface_hub
        return None
    return Listing(info.sha, {file.rfilename: file.size or 0 for file in info.siblings or ()}) if info.sha else None


def download(
    model: str,
    listing: Listing | None,
    cache_folder: Path,
    quantize: bool,
    note: Callable[[str], None],
    backend: str = "mlx",
    trust_remote_code: bool = False,
) -> Path:
    """The folder of the Hub's own cache, named after the commit, with the model's files; what is there already is not fetched again.

    The config is fetched first, so that a model that can't be served costs nothing, then the space for the rest (and, in
    cache_folder, for the 4-bit copy if one will be made) is checked. With no listing, only what is there already is used.
    The config is asked of main, which makes the cache remember where main is, for use without a network; the rest of the listed commit.

    Raises:
        UserError: not found, gated, not served, too little space, interrupted, or changed meanwhile.
    """
    from huggingface_hub import constants, hf_hub_download, snapshot_download, try_to_load_from_cache

    if listing is None:
        return Path(_ask(model, lambda: snapshot_download(model, allow_patterns=FILES, ignore_patterns=["*/*"], local_files_only=True)))
    if "config.json" not in listing.sizes:
        ggufs = [name for name in listing.sizes if name.endswith(".gguf")]
        advice = f"Download one of its GGUF files, such as {ggufs[0]}, and give the file's path." if ggufs else "Is it a language model?"
        raise UserError(f"--model {model}: on the Hub it has no config.json. {advice}")
    needed = listing.needed()
    if not any(name.endswith(".safetensors") for name in needed):
        raise UserError(f"--model {model}: on the Hub it has no model*.safetensors file. Take a model, or a conversion of this one, that has.")
    folder = Path(_ask(model, lambda: hf_hub_download(model, "config.json"))).parent
    if folder.name != listing.commit:
        raise UserError(f"--model {model}: it was changed on the Hub just now. Run the command again.")
    config = read_config(folder)
    if trust_remote_code and (code := config.get("model_file")):
        _ask(model, lambda: hf_hub_download(model, code, revision=listing.commit))
    spec = open_spec(config, str(folder / "config.json") if trust_remote_code else f"config.json of {model}", backend, trust_remote_code)
    unquantized = quantize and not config.get("quantization")
    missing_bytes = sum(size for name, size in needed.items() if not isinstance(try_to_load_from_cache(model, name, revision=listing.commit), str))
    if unquantized:
        _note_twin(model, note)
    hub_cache = Path(constants.HF_HUB_CACHE)
    _require_space(model, hub_cache, missing_bytes, cache_folder, converted_bytes(spec) if unquantized else 0)
    if missing_bytes:
        note(f"Downloading {model} ({missing_bytes / 1e6:,.0f} MB).")
    return Path(_ask(model, lambda: snapshot_download(model, revision=listing.commit, allow_patterns=list(needed))))


def without_weights(model: str, tokenizer: bool) -> Path:
    """The folder of the Hub's own cache with a model's config.json, the code that it names, and, if wanted, its tokenizer: nothing else is fetched.

    Raises:
        UserError: not found, gated, or out of reach.
    """
    from huggingface_hub import hf_hub_download, snapshot_download

    found = look_up(model)  # first: without a network it gives up at once, where a download is tried again for half a minute
    if not tokenizer:
        folder = Path(_ask(model, lambda: hf_hub_download(model, "config.json", local_files_only=found is None))).parent
        if code := read_config(folder).get("model_file"):
            _ask(model, lambda: hf_hub_download(model, code, revision=folder.name, local_files_only=found is None))
        return folder
    names = [name for name in found.needed() if ".safetensors" not in name] if found else None
    known: dict[str, Any] = {"revision": found.commit, "allow_patterns": names} if found else {"local_files_only": True}
    return Path(_ask(model, lambda: snapshot_download(model, **known)))


def converted_parts(spec: Spec) -> list[Part]:
    """What an unquantised model's tensors become."""
    return [converted(spec, name, Entry(name, Path(), spec.dtype, shape, 0, 0)) for name, shape in spec.tensors().items()]


def converted_bytes(spec: Spec) -> int:
    """What model.safetensors takes once the model is quantised."""
    return weight_bytes(converted_parts(spec))


def _require_space(model: str, hub_cache: Path, download_bytes: int, cache_folder: Path, copy_bytes: int) -> None:
    same_disk = nearest_folder(hub_cache).stat().st_dev == nearest_folder(cache_folder).stat().st_dev
    require_space(hub_cache, download_bytes + (copy_bytes if same_disk else 0), f"downloading {model}")
    require_space(cache_folder, copy_bytes, f"quantising {model}")


def _note_twin(model: str, note: Callable[[str], None]) -> None:
    """Say so if mlx-community has the model quantised already: it is a smaller download."""
    from huggingface_hub import HfApi

    twin = f"mlx-community/{model.split('/')[1]}-4bit"
    try:
        HfApi().model_info(twin, timeout=TIMEOUT_SECONDS)
    except Exception:  # a hint only
        return
    note(f"{model} is not quantised. {twin} is, and is a smaller download: --model {twin}.")


def _ask(model: str, call: Callable[[], Result]) -> Result:
    """Call the Hub; whatever goes wrong becomes one clear message."""
    try:
        return call()
    except Exception as error:  # the HTTP library's errors differ between versions of huggingface_hub and share no other base
        raise _refusal(model, error) from error


def _refusal(model: str, error: Exception) -> UserError:
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, RepositoryNotFoundError

    doing = f"--model {model}: "
    if isinstance(error, GatedRepoError):
        return UserError(doing + "it is gated. Accept its terms on its page on the Hub, then log in with `hf auth login` or set HF_TOKEN.")
    if isinstance(error, RepositoryNotFoundError):
        return UserError(doing + "there is no such folder here and no such model on the Hub. If it is private, log in with `hf auth login` or set HF_TOKEN.")
    if isinstance(error, HFValidationError):
        return UserError(doing + "there is no such folder here, and it is no valid Hub id (org/name).")
    if isinstance(error, (LocalEntryNotFoundError, OfflineModeIsEnabled)):
        advice = "Unset HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else "Connect to the network"
        return UserError(doing + f"the Hub can't be reached, and its cache does not hold what is needed of the model. {advice}, or give a folder.")
    said = str(error).strip().splitlines()
    return UserError(
        doing + f"downloading it from the Hub failed ({said[0] if said else type(error).__name__}). Run the command again: files that were complete are kept."
    )
