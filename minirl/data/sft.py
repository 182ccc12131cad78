"""Rows to imitate, in the formats that people have them in: a JSON object a line, read unchanged.

    {"messages": [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}], "tools": [...]}
    {"prompt": "2+2=", "completion": "4"}               both texts, or both lists of messages
    {"text": "Once upon a time ..."}

What is learnt is what the model itself would say: every assistant turn of `messages`, the `completion`, all of a
`text`; with the end of the turn or text each time, or the model would never learn to stop.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from minirl.chat import render
from minirl.config import UserError
from minirl.data.jsonl import read_jsonl
from minirl.tokenizer import Tokenizer


class Row(NamedTuple):
    """The tokens of one row (T,), and which of them are learnt."""

    tokens: list[int]
    mask: list[bool]
    documents: tuple[int, ...] = ()  # lengths of the documents that were packed into the row; (): it is one


def read_sft(path: str | Path, tokenizer: Tokenizer, template: str) -> list[Row]:
    """Every row of a JSONL file as tokens. UserError with FILE:LINE: a row in none of the formats, or without a target.

    template : name of the chat template that messages are written with, see minirl/templates.py
    """
    return [encode_row(row, place, tokenizer, template) for place, row in read_jsonl(path)]


def encode_row(row: dict[str, Any], place: str, tokenizer: Tokenizer, template: str) -> Row:
    """One row as tokens; `place` is FILE:LINE for the error text."""
    keys = {"messages", "prompt", "completion", "text"} & row.keys()
    if keys not in ({"messages"}, {"prompt", "completion"}, {"text"}):
        raise UserError(f"{place}: the row has {sorted(keys) or 'none'} of messages, prompt, completion, text: it "
                        "needs messages, or prompt and completion, or text")
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
    messages = row["messages"] if "messages" in row else row["prompt"] + row["completion"]
    try:
        tokens, mask = render(messages, tokenizer, row.get("tools"), template)
        if "prompt" in row:  # an answer earlier in the conversation was given, not asked for
            given = len(render(row["prompt"], tokenizer, row.get("tools"), template, add_generation_prompt=True)[0])
            mask = [False] * given + mask[given:]
    except UserError as error:
        raise UserError(f"{place}: {error}") from None
    return Row(tokens, mask)


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
