"""Files with one JSON object a line, and the line's number kept for whoever must mend it."""

import json
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


def _parse(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"), object_pairs_hook=_unique)
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


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        raise ValueError(f"the key {twice!r:.40} stands there twice")
    return found
