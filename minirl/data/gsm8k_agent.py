"""GSM8K's own calculator calls as tool calls: "48/2 = <<48/2=24>>24 clips" is a call, its result, and what follows.

    {"messages": [{"role": "user", "content": "Natalia sold ..."},
                  {"role": "assistant", "content": "Natalia sold 48/2 = ", "tool_calls": [calculator("48/2")]},
                  {"role": "tool", "content": "24"},
                  {"role": "assistant", "content": "24 clips in May.\n#### 24"}], "tools": [CALCULATOR], "steps": 1}

Every calculation is done anew by `minirl.env.calculate`; a row whose annotation is wrong, or no arithmetic, is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from minirl.data.trajectories import RowError
from minirl.env.calculator import CalculatorError, calculate
from minirl.env.gsm8k_calc import ANNOTATION
from minirl.rewards import extract_answer, parse_number

CALCULATOR = {"type": "function", "function": {
    "name": "calculator", "description": "The value of an arithmetic expression.",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}}}


def convert_gsm8k(row: dict[str, Any]) -> dict[str, Any]:
    """One row {"question", "answer"} as {"messages", "tools", "steps"}; steps: how many calculations it takes."""
    question, answer = row.get("question"), row.get("answer")
    if not isinstance(question, str) or not question.strip() or not isinstance(answer, str):
        raise RowError("no question", "the row has no text under question, or none under answer")
    if not re.search(r"\n#### \S+\s*$", answer) or extract_answer(answer) is None:
        raise RowError("no answer", f'the answer ends {answer[-30:]!r}, not in "#### NUMBER"')
    pieces = ANNOTATION.split(answer)  # text, expression, result, text, expression, result, ..., text
    if "<<" in "".join(pieces[::3]):
        raise RowError("broken annotation", f"{answer[answer.index('<<'):][:60]!r} is no <<expression=result>>")
    messages: list[dict[str, Any]] = [{"role": "user", "content": question.strip()}]
    for text, expression, result in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=False):
        call = {"name": "calculator", "arguments": {"expression": expression}}
        messages.append({"role": "assistant", "content": text, "tool_calls": [{"type": "function", "function": call}]})
        messages.append({"role": "tool", "content": _check(expression, result)})
    messages.append({"role": "assistant", "content": pieces[-1]})
    return {"messages": messages, "tools": [CALCULATOR], "steps": len(pieces) // 3}


def _check(expression: str, result: str) -> str:
    """What the calculator says. `RowError`: it differs from `result` by a unit of its last digit, or more."""
    try:
        value = calculate(expression)
    except CalculatorError as error:
        raise RowError("not arithmetic", f"<<{expression:.60}={result:.60}>>: {error}") from None
    exact, given = parse_number(value), parse_number(result)
    digits = len(result.strip().partition(".")[2])
    unit = Fraction(1, 10**digits) if digits else 0  # 1/3=0.33 is right, 10/3=3 is not
    if exact is None or given is None or (exact != given and abs(exact - given) >= unit):
        raise RowError("wrong calculation", f"<<{expression:.60}={result:.60}>>: the calculator gives "
                                             f"{value:.60}")
    return value


def as_text(row: dict[str, Any]) -> dict[str, Any]:
    """A converted row as {"text"}: question and answer as they stand in the file, without the annotations."""
    question, *rest = row["messages"]
    answer = "".join(message["content"] for message in rest if message["role"] == "assistant")
    return {"text": f"Question: {question['content']}\nAnswer: {answer}", "steps": row["steps"]}


def curriculum(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows by the number of their calculation steps, fewest first; their order stays within a number."""
    return sorted(rows, key=lambda row: row["steps"])
