"""Rows to imitate, in the formats that people have them in: a JSON object a line, read unchanged.

    {"messages": [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}], "tools": [...]}
    {"prompt": "2+2=", "completion": "4"}               both texts, or both lists of messages
    {"text": "Once upon a time ..."}

Other columns, and those that hold null, are not looked at; of chat_template_kwargs, enable_thinking and date_string.

What is learnt is what the model itself would say: every assistant turn of `messages`, the `completion`, all of a
`text`; with the end of the turn or text each time, or the model would never learn to stop. All of it is read as
plain characters: a text that has been through a chat template, `<|im_start|>` and all, is better given as messages.
"""

from __future__ import annotations

import json
from bisect import bisect_left, insort
from itertools import chain, groupby
from typing import Any, NamedTuple

from minirl.chat import render
from minirl.config import UserError
from minirl.tokenizer import Tokenizer

CHAT_OPTIONS = {"enable_thinking": bool, "date_string": str}  # what a row's chat_template_kwargs may hold


class Row(NamedTuple):
    """The tokens of one row (T,), and which of them are learnt."""

    tokens: list[int]
    mask: list[bool]
    documents: tuple[int, ...] = ()  # lengths of the documents that were packed into the row; (): it is one


def is_conversation(row: dict[str, Any]) -> bool:
    """Does the row hold messages, for which a chat template is needed?"""
    return isinstance(row.get("messages"), list) or isinstance(row.get("prompt"), list)


def encode_row(row: dict[str, Any], place: str, tokenizer: Tokenizer, template: str) -> Row:
    """One row as tokens. UserError with its place, FILE:LINE: it is in none of the formats, or without a target.

    template : name of the chat template that messages are written with, see minirl/templates.py
    """
    keys = {key for key in ("messages", "prompt", "completion", "text") if row.get(key) is not None}
    if keys not in ({"messages"}, {"prompt", "completion"}, {"text"}):
        raise UserError(f"{place}: the row has {sorted(keys) or 'none'} of messages, prompt, completion, text: it "
                        "needs messages, or prompt and completion, or text; its columns are "
                        f"{', '.join(map(repr, [*row][:9])) or 'none'}")
    kinds = {type(row[key]) for key in keys}
    if keys == {"text"} and kinds == {str}:
        encoded = _text(row["text"], tokenizer)
    elif kinds == {str} and keys != {"messages"}:
        encoded = _completion(row["prompt"], row["completion"], tokenizer)
    elif kinds == {list} and keys != {"text"}:
        encoded = _conversation(row, place, tokenizer, template)
    else:
        raise UserError(f"{place}: {', '.join(f'{key} is a {type(row[key]).__name__}' for key in sorted(keys))}: "
                        "messages is a list, text is a text, prompt and completion are two texts or two lists of "
                        "messages")
    if not any(encoded.mask[1:]):
        raise UserError(f"{place}: nothing in the row is to be learnt: no assistant turn, or an empty text; remove it")
    return encoded


def _text(text: str, tokenizer: Tokenizer) -> Row:
    start = _bos(tokenizer)
    said = [*tokenizer.encode(text), tokenizer.eos_id]
    return Row(start + said, [False] * len(start) + [bool(text)] * len(said))


def _completion(prompt: str, completion: str, tokenizer: Tokenizer) -> Row:
    """The prompt ends where the sampler will take over, so the two are encoded apart."""
    given = _bos(tokenizer) + tokenizer.encode(prompt)
    said = [*tokenizer.encode(completion, continued=bool(prompt)), tokenizer.eos_id]
    return Row(given + said, [False] * len(given) + [bool(completion)] * len(said))


def _conversation(row: dict[str, Any], place: str, tokenizer: Tokenizer, template: str) -> Row:
    given, said = ([], row["messages"]) if "messages" in row else (row["prompt"], row["completion"])
    try:
        options = _chat_options(row.get("chat_template_kwargs"))
        tokens, mask = render([*given, *said], tokenizer, _tools(row.get("tools")), template, **options)
    except UserError as error:
        raise UserError(f"{place}: {error}") from None
    # An answer in the prompt was given, not asked for. Each answer is one run of the mask, whatever the template
    # makes of its words when more follows (Qwen3's deletes earlier thoughts).
    skip = sum(message["role"] == "assistant" for message in given)
    runs = [(action, len([*group])) for action, group in groupby(mask)]
    for i, (action, length) in enumerate(runs):
        runs[i] = action and skip <= 0, length
        skip -= action
    return Row(tokens, [action for action, length in runs for _ in range(length)])


def _tools(tools: Any) -> Any:
    """The column as TRL takes it: a list, or the same as a JSON string (a table wants one schema for all its rows)."""
    if not isinstance(tools, str):
        return tools
    try:
        return json.loads(tools)
    except (ValueError, RecursionError):
        raise UserError(f"tools is {tools!r:.60}: a list, or a string that holds one as JSON") from None


def _chat_options(options: Any) -> dict[str, Any]:
    if not isinstance(options or {}, dict):
        raise UserError(f"chat_template_kwargs is {options!r:.60}, not an object")
    for name, value in (options or {}).items():
        if name not in CHAT_OPTIONS:
            raise UserError(f"chat_template_kwargs has {name!r:.40}, which no template here knows: they know "
                            f"{', '.join(CHAT_OPTIONS)}")
        if not isinstance(value, CHAT_OPTIONS[name]):
            raise UserError(f"chat_template_kwargs: {name} is {value!r:.60}, not a {CHAT_OPTIONS[name].__name__}")
    return options or {}


def _bos(tokenizer: Tokenizer) -> list[int]:
    return [] if tokenizer.bos_id is None else [tokenizer.bos_id]


def pack(rows: list[Row], window: int) -> list[Row]:
    """Rows laid into as few windows of at most `window` tokens as best-fit-decreasing finds; nothing is cut or lost.

    Each row goes, longest first, into the fullest window that still has room for it. `shift_mask` sees to it that no
    row's first token is predicted from the end of another.
    """
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i].tokens))  # stable: the same windows every time
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (tokens still free, number of the window), ascending
    for i in order:
        size = len(rows[i].tokens)
        at = bisect_left(rooms, (size, 0))
        if at == len(rooms):
            bins.append([])
            rooms.append((window, len(bins) - 1))
        room, number = rooms.pop(at)
        bins[number].append(i)
        insort(rooms, (room - size, number))
    return [_join([rows[i] for i in members]) for members in bins]


def _join(rows: list[Row]) -> Row:
    return Row(list(chain.from_iterable(row.tokens for row in rows)),
               list(chain.from_iterable(row.mask for row in rows)), tuple(len(row.tokens) for row in rows))
