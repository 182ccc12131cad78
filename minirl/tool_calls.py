"""Tool calls in what an assistant said, read strictly.

    parse_tool_calls('<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>', "qwen3")
    [{"name": "add", "arguments": {"a": 2}}]

Nothing is repaired or guessed: what a parser mends, a reward pays for. A broken call raises an error whose text is an
observation, for the model to read and do better. One pass over the text, whatever stands in it.
"""

import json
from typing import Any

from minirl.config import UserError
from minirl.templates import find_template


class ToolCallError(ValueError):
    """A tool call that cannot be carried out. Its text is an observation: it tells the model what to write."""


def parse_tool_calls(text: str, template: str) -> list[dict[str, Any]]:
    """The tool calls in what an assistant said, in their order: [{"name": ..., "arguments": {...}}, ...].

    text     : a decoded action, without the end-of-turn token; [] where it calls nothing
    template : "tags": any number of <tool_call>{"name", "arguments"}</tool_call>, text between them is content;
               Llama 3.1: the whole answer is one {"name", "parameters"}
    errors   : ToolCallError where any call is broken: none is made then, and str(error) is what to tell the model

    Arguments may be a string that holds the object; a missing one never becomes {}. Thoughts are no calls: what
    begins with <think> is skipped up to </think>.
    """
    syntax = find_template(template).calls
    if syntax == "none":
        raise UserError(f"template {template!r} has no tool calls: use qwen2_5, qwen3, llama3_1 or plain")
    if syntax == "json":
        return _bare_call(text.strip())
    if text.lstrip().startswith("<think>"):
        thought, closed, text = text.partition("</think>")
        if not closed and "<tool_call>" in thought:
            raise ToolCallError("Error: <think> is not closed. Write </think> before the first <tool_call>.")
    return _tagged_calls(text)


def _tagged_calls(text: str) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    at = 0
    while True:
        start, stray = text.find("<tool_call>", at), text.find("</tool_call>", at)
        if stray >= 0 and not 0 <= start < stray:
            raise ToolCallError(f"Error: there is a </tool_call> without <tool_call> after {len(calls)} tool calls.")
        if start < 0:
            return calls
        where = f"tool call {len(calls) + 1}"
        value, at = _read_json(text, start + len("<tool_call>"), where)
        if not text.startswith("</tool_call>", at):
            found = "the text ends" if at == len(text) else f"{text[at:at + 20]!r} follows"
            raise ToolCallError(f"Error in {where}: {found} where </tool_call> must close it.")
        at += len("</tool_call>")
        calls.append(_call(value, "arguments", where))


def _bare_call(text: str) -> list[dict[str, Any]]:
    if not text.startswith("{"):
        return []
    value, at = _read_json(text, 0, "the tool call")
    if isinstance(value, dict) and not {"name", "parameters"} & value.keys():
        return []  # an answer in JSON
    if at < len(text):
        raise ToolCallError(f"Error in the tool call: {text[at:at + 20]!r} follows it. Write one call alone.")
    return [_call(value, "parameters", "the tool call")]


def _read_json(text: str, at: int, where: str) -> tuple[Any, int]:
    """The JSON value at text[at:], and where what follows it begins, past spaces."""
    at = _skip_spaces(text, at)
    try:
        value, end = _JSON.raw_decode(text, at)
    except json.JSONDecodeError as error:
        raise ToolCallError(f"Error in {where}: invalid JSON, {error.msg} at character {error.pos - at + 1} "
                            f"({text[error.pos:error.pos + 20]!r}).") from None
    except RecursionError:
        raise ToolCallError(f"Error in {where}: invalid JSON, nested too deeply.") from None
    except ValueError as error:
        raise ToolCallError(f"Error in {where}: invalid JSON, {error}.") from None
    return value, _skip_spaces(text, end)


def _skip_spaces(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _call(value: Any, key: str, where: str) -> dict[str, Any]:
    form = f'Write {{"name": <function-name>, "{key}": <args-json-object>}}.'
    if not isinstance(value, dict):
        raise ToolCallError(f"Error in {where}: it is not an object. {form}")
    for needed in ("name", key):
        if needed not in value:
            raise ToolCallError(f'Error in {where}: "{needed}" is missing. {form}')
    if unknown := value.keys() - {"name", key}:
        raise ToolCallError(f'Error in {where}: "{min(unknown)}" is not a part of a call. {form}')
    name, arguments = value["name"], value[key]
    if not isinstance(name, str) or not name:
        raise ToolCallError(f'Error in {where}: "name" is not the name of a function. {form}')
    if isinstance(arguments, str):
        try:
            arguments = _JSON.decode(arguments)
        except (ValueError, RecursionError):
            pass  # refused below, with the others that are no object
    if not isinstance(arguments, dict):
        raise ToolCallError(f'Error in {where}: "{key}" is not an object. {form}')
    return {"name": name, "arguments": arguments}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} is given twice")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


_JSON = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)
