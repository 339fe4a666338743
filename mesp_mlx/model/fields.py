"""A config.json, and its values as the model's family reads them: under its names, with its defaults, checked."""

import json
import reprlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesp_mlx.errors import Unserved, UserError
from mesp_mlx.model.families import Family

Kind = type | tuple[type, ...]
NUMBER = (int, float)
MOST = 10_000  # layers, experts, features of a head: far beyond any model, and a damaged config would be worked on for minutes


@dataclass(frozen=True)
class Fields:
    """A config, whose family it is, and what to call it in errors."""

    config: Mapping[str, Any]
    family: Family
    source: str

    def raw(self, key: str) -> Any:
        """What the config has under the family's name of a key, or nests under rope_parameters as newer ones do, or the family's default."""
        nested = self.config.get("rope_parameters")
        places = (self.config.get(self.name(key)), nested.get(key) if isinstance(nested, Mapping) else None, self.family.defaults.get(key))
        return next((found for found in places if found is not None), None)

    def name(self, key: str) -> str:
        return self.family.aliases.get(key, key)

    def value(self, key: str, default: Any = None, kind: Kind = int) -> Any:
        """A positive number, or true or false; the default where neither config nor family says anything.

        Raises:
            UserError: there is none, or it is something else.
        """
        found = self.raw(key)
        return self.checked(key, default if found is None else found, kind)

    def count(self, key: str) -> int:
        """How many the model has of what is worked on one by one."""
        if (found := self.value(key)) > MOST:
            raise self.error(f"{self.name(key)!r} is {found}, expected at most {MOST}. Download the model again.")
        return found

    def heeded(self, key: str, default: Any, kind: Kind = NUMBER) -> Any:
        """The value of a key that only some families look at; the default to the others, and where it is null."""
        return default if key not in self.family.heeds or self.raw(key) is None else self.value(key, default, kind)

    def cap(self, key: str) -> float | None:
        """A soft-cap, which null takes away; that of a family without one is None."""
        return None if self.config.get(self.name(key), ...) is None else self.heeded(key, None)

    def checked(self, key: str, found: Any, kind: Kind) -> Any:
        """What was found under a key, if it is of that kind."""
        if found is None:
            raise self.error(f"it lacks {self.name(key)!r}. Download the model again.")
        if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool) or (kind is not bool and not 0 < found <= sys.float_info.max):
            expected = "true or false" if kind is bool else "a positive whole number" if kind is int else "a positive number"
            raise self.error(f"{self.name(key)!r} is {reprlib.repr(found)}, expected {expected}.")
        return found

    def require(self) -> None:
        """Raise Unserved where an optional key has a value that the family's row does not describe."""
        for key, expected in self.family.requires.items():
            if (found := self.config.get(key, expected)) != expected:
                raise Unserved(f"reading {self.source}: {key!r} is {reprlib.repr(found)}, served: {expected!r}.")

    def error(self, message: str) -> UserError:
        return UserError(f"reading {self.source}: {message}")


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a model folder.

    Raises:
        UserError: there is none, it can't be read, or it is not a JSON object.
    """
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"reading the model in {folder}: it has no config.json. Give a folder in MLX's or Hugging Face's layout.") from None
    except OSError as error:
        raise UserError(f"reading {file}: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"reading {file}: it is not JSON ({error}). Download the model again.") from None
    if not isinstance(config, dict):
        raise UserError(f"reading {file}: expected a JSON object, found {type(config).__name__}.")
    return config
