"""Which tokens of a conversation are supervised: every assistant turn, with the token that ends it.

A chat template is a program that renders a whole conversation, and it may render a turn in one way while it is the last and in another once more turns
follow (Qwen3 drops the thinking of earlier turns, Mistral moves the system prompt). So the conversation is rendered once, whole; parts of it are rendered
only to find where in that text a turn stands; and the text is made into tokens once, so the ids are those of `apply_chat_template`.
"""

from collections.abc import Callable, Collection, Sequence
from os.path import commonprefix
from typing import Any

import numpy as np

Messages = list[dict[str, Any]]
Render = Callable[..., str]  # (messages, add_generation_prompt=False) -> text; raises whatever the template raises


def assistant_spans(render: Render, messages: Messages, text: str) -> list[tuple[int, int]]:
    """Where each assistant turn stands in text = render(messages), as [start, end) in characters.

    A span starts where a reply to the turns before it would be generated, and takes in what the template writes to end the turn.
    Raises LookupError, with the number of the message counted from 1, for a turn that can't be placed.
    """
    return [_span(render, messages, i, text) for i, message in enumerate(messages) if message["role"] == "assistant"]


def token_mask(ids: Sequence[int], ends: np.ndarray, text: str, spans: Sequence[tuple[int, int]], added: Collection[int]) -> np.ndarray:
    """1 for every token to be predicted, uint8 [T], from the spans of the supervised text.

    ends [T] says at which character of the text each token ends; a token belongs to the span its last character is in. White space after an added token
    that closes a span (the line break after <|im_end|>) is never generated, so it isn't supervised. Nor is the first token, which nothing predicts.
    """
    mask = np.zeros(len(ids), np.uint8)
    starts = np.concatenate(([0], ends[:-1]))
    for span in spans:
        first, last = (int(k) for k in np.searchsorted(ends, span, side="right"))
        closing = last
        while closing > first and not text[starts[closing - 1] : ends[closing - 1]].strip():
            closing -= 1
        if closing > first and ids[closing - 1] in added:
            last = closing
        mask[first:last] = 1
    mask[:1] = 0
    return mask


def _span(render: Render, messages: Messages, i: int, text: str) -> tuple[int, int]:
    """Place turn i by the text of the turns before it and up to it where the whole text starts with those, else by a mark in place of its content."""
    start = _length_if_prefix(text, lambda: render(messages[:i], add_generation_prompt=True))
    end = len(text) if i == len(messages) - 1 else _length_if_prefix(text, lambda: render(messages[: i + 1]))
    if start is None or end is None:
        before, after, closing = _around_content(render, messages, i, text)
        if start is None and text.startswith(before):
            start = len(before)
        if end is None and text.endswith(after):
            content_end = len(text) - len(after)
            end = content_end + len(commonprefix([closing, text[content_end:]]))
    if start is None or end is None:
        raise LookupError(i + 1)
    return start, max(start, end)


def _length_if_prefix(text: str, part: Callable[[], str]) -> int | None:
    try:
        rendered = part()
    except Exception:  # templates refuse parts of a conversation in ways of their own: another way to place the turn is tried
        return None
    return len(rendered) if text.startswith(rendered) else None


def _around_content(render: Render, messages: Messages, i: int, text: str) -> tuple[str, str, str]:
    """What the whole text has before and after the content of turn i, and what the template writes to close that turn."""
    mark = "contentofthisturn"
    while mark in text:
        mark += "x"
    marked = messages[:i] + [{**messages[i], "content": mark}]
    try:
        before, after = render(marked + messages[i + 1 :]).split(mark)
        closing = render(marked).rpartition(mark)[2]
    except Exception as error:
        raise LookupError(i + 1) from error
    return before, after, closing
