"""Trees of arrays as a model's own code passes them around: lists, tuples and dicts, and what a call changes in the objects that it was given."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx


@dataclass(frozen=True)
class Place:
    """Where an array stands in a tree, and what is known of it."""

    index: int
    shape: tuple[int, ...]
    dtype: mx.Dtype


@dataclass(frozen=True)
class Given:
    """Stands for an argument that a call returns."""

    argument: Any


@dataclass(frozen=True)
class Shell:
    """An object that holds arrays: a copy of it, and its attributes as a tree."""

    kind: Any
    attributes: dict[str, Any]


def flatten(tree: Any) -> tuple[list[mx.array], Any]:
    """The arrays of a tree in order, and the tree with a `Place` for each of them. Anything that holds no array stays as it is."""
    leaves: list[mx.array] = []
    return leaves, _pattern(tree, leaves)


def _pattern(node: Any, leaves: list[mx.array]) -> Any:
    # Not a closure that calls itself: it would hold the arrays until Python looks for cycles.
    if isinstance(node, mx.array):
        leaves.append(node)
        return Place(len(leaves) - 1, node.shape, node.dtype)
    if not isinstance(node, list | tuple | dict | Given) and any(isinstance(value, mx.array) for value in (contents(node) or {}).values()):
        empty = copy.copy(node)  # a pattern must hold no array
        vars(empty).update(dict.fromkeys(vars(node)))
        return Shell(empty, _pattern(dict(vars(node)), leaves))
    return mapped(node, lambda part: _pattern(part, leaves))


def rebuild(pattern: Any, leaf: Callable[[Place], mx.array], given: dict[Any, Any] | None = None) -> Any:
    """The tree of a pattern, with an array for each place, and arguments where they were returned."""
    if isinstance(pattern, Place):
        return leaf(pattern)
    if isinstance(pattern, Given) and given is not None:
        return given[pattern.argument]
    if isinstance(pattern, Shell):
        made = copy.copy(pattern.kind)
        vars(made).update(rebuild(pattern.attributes, leaf, given))
        return made
    return mapped(pattern, lambda node: rebuild(node, leaf, given))


def mapped(node: Any, function: Callable[[Any], Any]) -> Any:
    """A list, tuple or dict with the function applied to what it holds; anything else itself."""
    if type(node) is dict:
        return {key: function(value) for key, value in node.items()}
    if isinstance(node, tuple):
        parts = [function(value) for value in node]
        return type(node)(*parts) if hasattr(node, "_fields") else tuple(parts)
    return [function(value) for value in node] if type(node) is list else node


def arrays_in(tree: Any, seen: set[int] | None = None) -> Iterator[mx.array]:
    """All arrays that a call can see in its arguments: also those held by plain objects, such as a cache, and by what these hold. `seen`: those looked at."""
    seen = set() if seen is None else seen
    if isinstance(tree, mx.array):
        yield tree
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from arrays_in(value, seen)
    elif (held := contents(tree)) is not None and id(tree) not in seen:
        seen.add(id(tree))
        yield from arrays_in(list(held.values()), seen)


def contents(node: Any) -> dict[Any, Any] | None:
    """What an object holds that a call might change: the items of a list or dict, the attributes of a plain object; None for all others."""
    if isinstance(node, list):
        return dict(enumerate(node))
    if type(node) is dict:
        return dict(node)
    # A module, which is a dict too, holds weights: they are no message from one call to another.
    plain = not isinstance(node, dict | mx.array | type) and not callable(node) and hasattr(node, "__dict__")
    return dict(vars(node)) if plain else None


def arguments(args: Sequence[Any], kwargs: dict[str, Any]) -> dict[Any, Any]:
    """Arguments by place or name."""
    return dict(enumerate(args)) | kwargs


def put(node: Any, changes: dict[Any, Any]) -> None:
    """Repeat changes that a call made to an object. An array's whole content is changed under the key `...`."""
    for key, value in changes.items():
        if isinstance(node, mx.array):
            node[...] = value
        elif isinstance(node, list):
            node[key:] = [value] if key >= len(node) else [value, *node[key + 1 :]]
        elif isinstance(node, dict):
            node[key] = value
        else:
            setattr(node, key, value)


def observed(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, dict[Any, dict[Any, Any]]]:
    """What a call returns, with `Given` for objects that it was given, and what it changed in them: {argument: {item or attribute: new value}}."""
    before = {key: held for key, node in arguments(args, kwargs).items() if (held := contents(node)) is not None}
    output = function(*args, **kwargs)
    changes: dict[Any, dict[Any, Any]] = {}
    for key, node in arguments(args, kwargs).items():
        if key in before:
            old, new = before[key], contents(node) or {}
            if changed := {name: value for name, value in new.items() if name not in old or old[name] is not value}:
                changes[key] = changed
    objects = {id(node): Given(key) for key, node in arguments(args, kwargs).items() if key in before}

    def named(node: Any) -> Any:
        return objects[id(node)] if id(node) in objects else mapped(node, named)

    return named(output), changes
