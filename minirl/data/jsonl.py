"""Files with one JSON object a line, and the line's number kept for whoever must mend it."""

import json
from pathlib import Path
from typing import Any

from minirl.config import UserError


def read_jsonl(path: str | Path) -> list[tuple[str, dict[str, Any]]]:
    """Every object of the file with its place, "FILE:LINE". UserError: no such file, no JSON, no row at all."""
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
        row = json.loads(line)
    except (ValueError, RecursionError):  # ValueError: bad JSON or bad UTF-8
        raise UserError(f"{place}: not JSON; mend the line or remove it") from None
    if not isinstance(row, dict):
        raise UserError(f"{place}: a {type(row).__name__}, not a JSON object; mend the line or remove it")
    return row
