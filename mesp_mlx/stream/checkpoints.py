"""Checkpoints hold each segment's input between forward and backward."""

from typing import Any


class Checkpoints:
    """A stack of segment inputs, in memory: put on the way up, popped on the way down."""

    def __init__(self) -> None:
        self._stack: list[Any] = []

    def put(self, states: Any) -> None:
        self._stack.append(states)

    def pop(self) -> Any:
        return self._stack.pop()
