"""A model of mlx-lm walked by its own forward: recorders stand where its layers stood, and every call of a layer is a station of the walk.

A walk runs the model's own `__call__`, so masks, positions, per-layer arguments and whatever is done between layers are the model's. What a station
answers is up to the visitor of that walk: it may compute the call, answer from what was stored, or leave (raise `Left`). MLX is lazy: code before
the station that matters costs nothing but Python's time, because nobody asks for its arrays.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mesp_mlx.model.generic_tree import arguments, contents, observed

Visitor = Callable[[int, "Station"], Any]
TABLES = (nn.Embedding, nn.QuantizedEmbedding)
LINEARS = (nn.Linear, nn.QuantizedLinear)  # one of them may be the head
Slots = dict[str, tuple[Any, Any]]  # a parameter's name on disk, and the dict or list that holds it, with its key there


class Left(BaseException):
    """Carries what was found out of the model's forward, past whatever errors that catches."""

    def __init__(self, found: Any):
        super().__init__()
        self.found = found


class Station:
    """One call of a recorded module, with the arguments that the model gave it."""

    def __init__(self, walk: "Walk", recorder: "Recorder", method: str, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self._walk, self.recorder, self.method, self.args, self.kwargs = walk, recorder, method, args, kwargs

    def compute(self) -> tuple[Any, dict[Any, Any]]:
        """What the real module returns, and what it changes in its arguments. In a walk through parts of layers, the arguments themselves are kept as if
        they were changed: what the model adds up between these calls would else be made, each time, of everything before."""
        walk, given = self._walk, arguments(self.args, self.kwargs)
        kept = {
            key: {...: value[...]} for key, value in given.items() if walk.nested and isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating)
        }
        watched = watch(given) if walk.watching else {}
        args, kwargs = [given[place] for place in range(len(self.args))], {name: given[name] for name in self.kwargs}
        output, changes = observed(lambda *args, **kwargs: walk.compute(self.recorder, self.method, args, kwargs), args, kwargs)
        in_place = walk.in_place.setdefault((self.recorder.path, self.method), set())
        in_place |= {spot for spot, array in watched.items() if array.changed}
        for key, item in in_place:
            value = given.get(key) if item is ... else (contents(given.get(key)) or {}).get(item)
            if isinstance(value, mx.array):
                changes.setdefault(key, {})[item] = value[...]
        return output, kept | changes


def _noting(name: str) -> Any:
    def change(self: "Watched", *args: Any) -> Any:
        self.changed = True
        return getattr(mx.array, name)(self, *args)

    return change


class Watched(mx.array):
    """An array that tells whether its numbers were changed in place, for all who hold it: nothing else of it shows that."""

    changed = False
    __setitem__ = _noting("__setitem__")
    __iadd__ = _noting("__iadd__")
    __isub__ = _noting("__isub__")
    __imul__ = _noting("__imul__")
    __itruediv__ = _noting("__itruediv__")
    __ifloordiv__ = _noting("__ifloordiv__")
    __imod__ = _noting("__imod__")
    __ipow__ = _noting("__ipow__")
    __imatmul__ = _noting("__imatmul__")
    __iand__ = _noting("__iand__")
    __ior__ = _noting("__ior__")
    __ixor__ = _noting("__ixor__")


def watch(given: dict[Any, Any]) -> dict[tuple[Any, Any], Watched]:
    """Let the arrays among arguments, and in what is among them, be watched: by argument and item, which is `...` where the argument is the array."""
    watched: dict[tuple[Any, Any], Watched] = {}
    for key, node in list(given.items()):
        if isinstance(node, mx.array):
            given[key] = watched[key, ...] = Watched(node)
        for item, value in (contents(node) or {}).items():
            if isinstance(value, mx.array):
                (node if isinstance(node, list | dict) else vars(node))[item] = watched[key, item] = Watched(value)
    return watched


class Recorder:
    """Stands in the model for a module. Calls go to the walk; all else is the module's, its class included, by which some models tell their layers."""

    def __init__(self, walk: "Walk", real: nn.Module, path: str, layer: bool):
        self._walk, self.real, self.path, self.layer = walk, real, path, layer

    @property
    def __class__(self) -> Any:
        return type(self.real)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._walk.called(self, "__call__", args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "as_linear":
            return lambda *args: self._walk.called(self, name, args, {})
        found = getattr(self.real, name)
        if name == "weight" and type(self.real) is nn.Embedding:
            return Table(found, lambda x: self.as_linear(x))
        if self.layer and self._walk.nested:
            if isinstance(found, nn.Module):
                return Recorder(self._walk, found, f"{self.path}.{name}", layer=True)
            if getattr(found, "__self__", None) is self.real:
                return lambda *args, **kwargs: self._walk.called(self, name, args, kwargs)
        return found

    def __getitem__(self, key: Any) -> Any:
        return self.real[key]

    def __contains__(self, key: Any) -> bool:
        return key in self.real


class Table(mx.array):
    """An embedding's weight as it is seen beside its layers: a product with its transpose, which some models write out, is the embedding as a linear."""

    def __init__(self, weight: mx.array, as_linear: Callable[[mx.array], mx.array]):
        super().__init__(weight)
        self._weight, self._as_linear = weight, as_linear

    @property
    def T(self) -> "Turned":
        return Turned(self._weight, self._as_linear)


class Turned(mx.array):
    """The transpose of a `Table`."""

    def __init__(self, weight: mx.array, as_linear: Callable[[mx.array], mx.array]):
        super().__init__(weight.T)
        self._as_linear = as_linear

    def __rmatmul__(self, x: mx.array) -> mx.array:
        return self._as_linear(x)


class Walk:
    """A model with recorders in place of its decoder layers, of the modules beside them that have parameters, and of every embedding table and linear in these.

    Stations are, in order: the calls of outside modules before the first layer; every call of a layer; the head, once `head` names it. Other calls of
    outside modules are computed on the spot.

    Args:
        model: mlx-lm's.
        layers: its decoder layers' paths, by identity.
        names: what modules with parameters are called on disk, by identity.

    Attributes:
        head: (recorder, method) of the linear at the end.
        late: what outside modules were called since the first layer, as (recorder, method, input's shape, output's shape), in the last walk.
        nested: whether parts of layers are stations, for a model that never calls a layer as a whole.
        watching: whether calls are watched for what they change in place.
        in_place: what was seen then: (argument, item), by path and method.
        rows: how a table is looked up while its rows are on disk: (path, ids) -> rows; None: in the module's own weight.
    """

    def __init__(self, model: nn.Module, layers: dict[int, str], names: dict[int, str]):
        self.model = model
        self.head: tuple[Recorder, str] | None = None
        self.rows: Callable[..., mx.array] | None = None
        self.tables: set[str] = set()
        self.nested = self.watching = False
        self.in_place: dict[tuple[str, str], set[tuple[Any, Any]]] = {}
        self.late: list[tuple[Recorder, str, Any, Any]] = []
        self._visit: Visitor | None = None
        self._next, self._begun, self._inside = 0, False, False
        containers = {path.rpartition(".")[0] for path in layers.values()}
        above = {path[:i] for path in containers for i in range(len(path) + 1) if i == 0 or i == len(path) or path[i] == "."}
        self._containers = [module for path, module in model.named_modules() if path in above]
        for container, key, path, value in list(children(model)):
            if id(value) in layers:
                container[key] = Recorder(self, value, path, layer=True)
            elif isinstance(value, nn.Module) and path not in above and not any(path.startswith(f"{layer}.") for layer in layers.values()):
                outermost = path.rpartition(".")[0] in above or not _within_module(model, path, above)
                if isinstance(value, (*TABLES, *LINEARS)) or (outermost and parameters(value)):
                    container[key] = Recorder(self, value, names.get(id(value), path), layer=False)
                    self.tables |= {container[key].path} if isinstance(value, TABLES) else set()

    def real(self, path: str) -> nn.Module:
        """The module of a path, recorders looked through."""
        node: Any = self.model
        for key in path.split("."):
            node = node[int(key)] if isinstance(node, list) else getattr(node, "real", node)[key]
        return getattr(node, "real", node)

    def run(self, ids: mx.array, visit: Visitor) -> Any:
        """The model's output for ids [B, T], or what the visitor left with."""
        self._visit, self._next, self._begun, self._inside = visit, 0, False, False
        self.late.clear()
        try:
            with steady(self._containers):
                return self.model(ids)
        except Left as left:
            return left.found
        finally:
            self._visit = None

    def called(self, recorder: Recorder, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A recorder was called."""
        if self._visit is None or self._inside:
            return self.compute(recorder, method, args, kwargs)
        if recorder.layer or not self._begun or (recorder, method) == self.head:
            self._begun |= recorder.layer
            index, self._next = self._next, self._next + 1
            return self._visit(index, Station(self, recorder, method, args, kwargs))
        output = self._answer(recorder, method, args, kwargs)  # not inside: the head may stand in this module
        self.late.append((recorder, method, getattr(args[0], "shape", None) if args else None, getattr(output, "shape", None)))
        return output

    def compute(self, recorder: Recorder, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The real module's own answer; what is called inside it is no station."""
        inside, self._inside = self._inside, True
        try:
            with steady(recorder.real.modules()):
                return self._answer(recorder, method, args, kwargs)
        finally:
            self._inside = inside

    def _answer(self, recorder: Recorder, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.rows is not None and method == "__call__" and isinstance(recorder.real, TABLES):
            return self.rows(recorder.path, *args)
        return getattr(recorder.real, method)(*args, **kwargs)


def _within_module(model: nn.Module, path: str, above: set[str]) -> bool:
    """Whether a module stands inside another one that is recorded already, not only inside lists of its container."""
    parent = path.rpartition(".")[0]
    while parent not in above:
        node: Any = model
        for key in parent.split("."):
            node = node[int(key)] if isinstance(node, list) else node[key]
        if isinstance(node, nn.Module | Recorder):
            return True
        parent = parent.rpartition(".")[0]
    return False


def children(node: Any, path: str = "") -> Iterator[tuple[Any, Any, str, Any]]:
    """Everything that stands in a tree of modules, as (the dict or list that holds it, its key there, its path, itself), parents first."""
    for key, value in list(enumerate(node) if isinstance(node, list) else node.items()):
        where = f"{path}.{key}" if path else str(key)
        yield node, key, where, value
        if isinstance(value, dict | list):
            yield from children(value, where)


def parameters(model: nn.Module) -> Slots:
    """Where each parameter stands, by the name that mlx-lm gives it."""
    names = ((container, key, path) for container, key, path, value in children(model) if isinstance(value, mx.array))
    return {path: (container, key) for container, key, path in names if not any(part.startswith("_") for part in path.split("."))}


@contextmanager
def placed(slots: Slots, arrays: dict[str, Any]) -> Iterator[None]:
    """Parameters stand in their modules while the block runs; then what stood there before stands there again."""
    before = [(*slots[name], slots[name][0][slots[name][1]]) for name in arrays]
    try:
        for name, array in arrays.items():
            container, key = slots[name]
            container[key] = array
        yield
    finally:
        for container, key, value in before:
            container[key] = value


@contextmanager
def steady(modules: Iterable[nn.Module]) -> Iterator[None]:
    """What modules hold is the same after the block: some keep what they made of their weights, and with it a graph."""
    real = [module.real if type(module) is Recorder else module for module in modules]
    before = [(module, dict(module), dict(vars(module))) for module in real]
    try:
        yield
    finally:
        for module, items, attributes in before:
            dict.clear(module)
            dict.update(module, items)
            vars(module).clear()
            vars(module).update(attributes)


def module_of(name: str) -> str:
    """The module that a parameter belongs to: what the store reads as one."""
    return name.rpartition(".")[0]


def modules_of(names: Iterable[str]) -> tuple[str, ...]:
    """The modules of parameters, each once."""
    return tuple(dict.fromkeys(map(module_of, names)))
