"""Files with one JSON object a line, and the line's number kept for whoever must mend it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minirl.config import UserError


def read_jsonl(path: str | Path) -> list[tuple[str, dict[str, Any]]]:
    """Every object of the file with its place, "FILE:LINE". UserError: no such file, no JSON, no row at all.

    Stricter than `json.loads` where it would lose something unseen: a key that stands twice, half a character.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")  # not splitlines: JSON may hold other line separators as they are
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; give a JSONL file, one object a line") from None
    rows = [(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise UserError(f"{path} is empty: it needs one JSON object a line")
    return [(place, _parse(line, place)) for place, line in rows]


def each_row(path: str | Path) -> Iterator[tuple[str, dict[str, Any] | UserError]]:
    """Every row of a data set's file with its place, "FILE:NUMBER" from 1, or the error that stands there instead.

    A file is JSONL, one JSON list of objects, or one object. A broken row takes no other with it: in JSONL it is a
    line; in a list it ends the file, for nobody can tell where the next one begins.
    """
    try:
        data = Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    if not data.strip():
        raise UserError(f"{path} is empty: it needs JSON objects, one a line or in a list")
    if data.lstrip()[:1] == b"[":
        parts = _elements(data.decode("utf-8", "surrogateescape"))
        rows = [(f"{path}:{number}", part.encode("utf-8", "surrogateescape")) for number, part in enumerate(parts, 1)]
    else:
        rows = [(f"{path}:{number}", line) for number, line in enumerate(data.split(b"\n"), 1) if line.strip()]
        if rows[0][1].strip() in (b"{", b"{}") or (len(rows) > 1 and not isinstance(_try(data, ""), UserError)):
            rows = [(f"{path}:1", data)]  # one object, over several lines
    for place, row in rows:
        yield place, _try(row, place)


def _try(line: bytes, place: str) -> dict[str, Any] | UserError:
    try:
        return _parse(line, place)
    except UserError as error:
        return error


def _elements(text: str) -> Iterator[str]:
    """The elements of a JSON list, as they are written. The last one may be what nobody can read."""
    at = text.index("[") + 1
    while (at := _skip(text, at)) < len(text) and text[at] != "]":
        try:
            end = json.JSONDecoder().raw_decode(text, at)[1]
        except (ValueError, RecursionError):
            yield text[at:]
            return
        yield text[at:end]
        end = _skip(text, end)
        if text[end : end + 1] not in (",", "]"):
            yield text[end:] or "the list is not closed"
            return
        at = end + (text[end] == ",")
    if at >= len(text):
        yield "the list is not closed"


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _parse(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"), object_pairs_hook=unique_keys)
        if b"\\u" in line:  # the only way to write half of a surrogate pair, which no file could hold
            json.dumps(row, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise UserError(f"{place}: not JSON ({error.msg} at column {error.colno}): each line must hold one whole "
                        "object; mend the line or remove it") from None
    except (ValueError, RecursionError) as error:  # bad UTF-8 is a ValueError too, and so is an endless number
        raise UserError(f"{place}: not JSON ({str(error)[:100]}); mend the line or remove it") from None
    if not isinstance(row, dict):
        raise UserError(f"{place}: a {type(row).__name__}, not a JSON object; mend the line or remove it")
    return row


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        raise ValueError(f"the key {twice!r:.40} stands there twice")
    return found
