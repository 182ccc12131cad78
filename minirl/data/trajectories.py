"""Is a conversation with tool calls one that could have happened? Every reader asks before a row is kept.

    find_problems(messages, tools)     [Problem("unknown tool", 2, "message 2 calls 'serch', which is not declared")]

A model learns whatever it is shown: one row in a thousand that calls a tool nobody declared is enough for a model that
invents tools. The kinds of problems are those of `minirl/data/failures.py`, where a rollout is judged in the same way.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from minirl.config import UserError
from minirl.messages import check_messages, check_tools


class RowError(UserError):
    """A row that cannot be kept. `kind` is the reason in two words, by which refusals are counted."""

    def __init__(self, kind: str, text: str):
        super().__init__(text)
        self.kind = kind


class Problem(NamedTuple):
    kind: str  # "format", "unknown tool", "arguments", "ids", "unfinished"
    message: int | None  # number of the message, from 0
    text: str


def check_trajectory(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None) -> None:
    """Raise `RowError` with the first of `find_problems`."""
    if problems := find_problems(messages, tools):
        raise RowError(problems[0].kind, problems[0].text)


def find_problems(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None) -> list[Problem]:
    """What is wrong in a trajectory, in its order; [] if nothing is.

    format       : a role, content or call that is not of OpenAI's form, arguments that are no JSON, a result without
                   a call, a call in the middle without its result
    unknown tool : a call of a tool that is not among `tools`
    arguments    : arguments that do not fit the tool's JSON schema
    ids          : a call's id stands there twice, or a result's tool_call_id is none of the calls before it
    unfinished   : the last message is not the assistant's
    """
    try:
        checked, tools = check_messages(messages), check_tools(tools)
    except UserError as error:
        return [Problem("format", None, str(error))]
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    problems: list[Problem] = []
    if len(schemas) < len(tools):
        problems.append(Problem("format", None, f"two of the {len(tools)} tools have the same name"))
    unanswered, open_ids, seen_ids = 0, [], set()
    for i, (message, raw) in enumerate(zip(checked, messages, strict=True)):
        if message.role == "tool":
            unanswered -= 1
            answers = raw.get("tool_call_id")
            if answers is not None and open_ids and answers not in open_ids:
                problems.append(Problem("ids", i, f"message {i} answers the call {answers!r:.60}, which no call before "
                                                  "it has, or which is answered already"))
            elif answers in open_ids:
                open_ids.remove(answers)
            continue
        if unanswered > 0:
            problems.append(Problem("format", i, f"message {i} comes before {unanswered} tool calls are answered"))
        unanswered, open_ids = len(message.calls), []
        for k, (name, arguments) in enumerate(message.calls):
            where = f"message {i}, tool call {k}"
            call_id = raw["tool_calls"][k].get("id")
            if call_id is not None:
                if not isinstance(call_id, str) or call_id in seen_ids:
                    problems.append(Problem("ids", i, f"{where} has the id {call_id!r:.60}, which must be a string of "
                                                      "its own"))
                else:
                    seen_ids.add(call_id)
                    open_ids.append(call_id)
            if name not in schemas:
                problems.append(Problem("unknown tool", i, f"{where} calls {name!r:.60}, which is not declared; tools: "
                                                           f"{', '.join(schemas)[:200] or 'none'}"))
            elif errors := schema_errors(json.loads(arguments), schemas[name]):
                problems.append(Problem("arguments", i, f"{where} ({name}): {errors[0]}"))
    if checked[-1].role != "assistant":
        problems.append(Problem("unfinished", len(checked) - 1, f"the last message is {checked[-1].role}'s, not the "
                                                                "assistant's"))
    return problems


TYPES = {"string": str, "object": dict, "array": list, "boolean": bool, "null": type(None)}


def schema_errors(value: Any, schema: Any, where: str = "arguments", depth: int = 0) -> list[str]:
    """Where a value departs from a JSON schema: type, enum, required, properties, items; [] if nowhere.

    An argument that the schema does not name is an error unless additionalProperties allows it: a model that invents
    arguments should hear of it. Other words of the standard (formats, ranges, references) are not looked at.
    """
    if not isinstance(schema, dict) or depth > 50:
        return []
    kinds = schema.get("type")
    kinds = [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)]
    if kinds and not any(_is(value, kind) for kind in kinds):
        return [f"{where} is {value!r:.60}, not of type {' or '.join(kinds)}"]
    if isinstance(schema.get("enum"), list) and value not in schema["enum"]:
        return [f"{where} is {value!r:.60}, which is none of {schema['enum']!r:.100}"]
    errors: list[str] = []
    properties = schema.get("properties")
    if isinstance(value, dict) and isinstance(properties, dict):
        required = schema.get("required")
        missing = [name for name in (required if isinstance(required, list) else [])
                   if isinstance(name, str) and name not in value]
        errors += [f"{where} lacks {name!r:.60}" for name in missing]
        for name, inner in value.items():
            if name in properties:
                errors += schema_errors(inner, properties[name], f"{where}.{name}", depth + 1)
            elif not schema.get("additionalProperties"):
                errors.append(f"{where} has {name!r:.60}, which the schema does not know")
    if isinstance(value, list):
        for i, inner in enumerate(value):
            errors += schema_errors(inner, schema.get("items"), f"{where}[{i}]", depth + 1)
    return errors


def _is(value: Any, kind: str) -> bool:
    if kind in ("number", "integer"):  # true is no number, although Python says so; 2.0 is an integer of JSON
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        return isinstance(value, int | float) and not isinstance(value, bool) and (whole or kind == "number")
    return isinstance(value, TYPES[kind]) if kind in TYPES else True


def is_error(observation: str) -> bool:
    """Does a tool's result say that the call failed? By its first word, or by a JSON object's "error" or status."""
    text = observation.lstrip()
    if text[:5].lower() == "error" or text.startswith("Traceback"):
        return True
    if not text.startswith("{"):
        return False
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    status = value.get("status")
    return bool(value.get("error")) or (isinstance(status, int) and status >= 400)
