"""Messages and tool schemas in OpenAI's format, checked before anything is made of them.

    [{"role": "user", "content": "2+3?"},
     {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]},
     {"role": "tool", "content": "5"},
     {"role": "assistant", "content": "It is 5.", "reasoning_content": "They gave me two numbers."}]

Every data set has a broken row somewhere: an error names the message and the value.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minirl.config import UserError


@dataclass(frozen=True)
class Message:
    """One message, checked: content as one string, calls as (name, arguments in JSON)."""

    role: str
    text: str
    reasoning: str | None = None  # None: perhaps in the text, between <think> and </think>
    calls: tuple[tuple[str, str], ...] = ()


def check_messages(messages: Sequence[dict[str, Any]], after_call: bool = False) -> list[Message]:
    """OpenAI-style messages as `Message`s. UserError names the number of the message that is wrong, from 0.

    content is a string or a list of {"type": "text", "text": ...}, which are joined. An assistant with tool_calls
    may leave it out. A call is {"function": {"name", "arguments"}} or {"name", "arguments"}; arguments are an
    object, or a string that holds one, which is then written as it is. after_call: they go on after a tool call.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise UserError(f"messages is {messages!r:.60}: give a list of at least one message")
    checked: list[Message] = []
    owed = len(messages) if after_call else 0  # how many more tool results may follow
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise UserError(f"message {i} is {message!r:.60}: it must be a dict with role and content")
        role = message.get("role")
        if role not in ("system", "user", "assistant", "tool"):
            raise UserError(f"message {i} has the role {role!r:.60}: roles are system, user, assistant, tool")
        if role != "assistant" and message.get("tool_calls"):
            raise UserError(f"message {i} ({role}) has tool_calls: only the assistant calls tools")
        if role == "assistant" and checked and checked[-1].role == "assistant":
            raise UserError(f"message {i} is the second assistant message in a row: join the two into one turn")
        if role == "tool" and not owed:
            raise UserError(f"message {i} is a tool result without a call: it answers one of the tool_calls of the "
                            "assistant message before it, and each call once")
        calls = tuple(_check_call(call, f"message {i}, tool call {k}")
                      for k, call in enumerate(_check_list(message.get("tool_calls"), f"message {i}: tool_calls")))
        reasoning = message.get("reasoning_content")
        if reasoning is not None and not isinstance(reasoning, str):
            raise UserError(f"message {i}: reasoning_content is {reasoning!r:.60}, not a string")
        text = _check_content(message.get("content"), i, optional=bool(calls))
        owed = owed - 1 if role == "tool" else len(calls)
        if role == "assistant" and not calls and ("<tool_call>" in text or text.lstrip().startswith("{")):
            owed = len(messages)  # a call that the model wrote itself, perhaps a broken one: an error may answer it
        checked.append(Message(role, text, reasoning if role == "assistant" else None, calls))
    return checked


def check_tools(tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Tool schemas in OpenAI's format, as they are. UserError names the number of the one that is wrong."""
    tools = _check_list(tools, "tools")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UserError(f"tool {i} is {tool!r:.60}: its form is "
                            '{"type": "function", "function": {"name", "description", "parameters"}}')
        to_json(tool, f"tool {i}")
    return tools


def to_json(value: Any, what: str = "a value", indent: int | None = None) -> str:
    """JSON as the templates of transformers write it: characters as they are, a space behind comma and colon."""
    try:
        text = json.dumps(value, ensure_ascii=False, indent=indent, allow_nan=False)
        text.encode()  # half of a surrogate pair is no character: no file could hold it
        return text
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{what} is no JSON: {error}") from None


def _check_list(value: Any, what: str) -> list:
    if value is not None and not isinstance(value, list | tuple):
        raise UserError(f"{what} is {value!r:.60}, not a list")
    return list(value or [])


def _check_content(content: Any, i: int, optional: bool) -> str:
    if content is None and optional:
        return ""
    if content is None:
        raise UserError(f'message {i} has no content: give a string, "" for none')
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list | tuple) else [None]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            shown = part if isinstance(content, list | tuple) else content
            raise UserError(f'message {i} has the content {shown!r:.60}: give a string or [{{"type": "text", "text": '
                            '...}]; minirl reads text only')
    return "".join(part["text"] for part in parts)


def _check_call(call: Any, where: str) -> tuple[str, str]:
    call = call.get("function", call) if isinstance(call, dict) else call
    if not isinstance(call, dict) or "name" not in call or "arguments" not in call:
        raise UserError(f'{where} is {call!r:.60}: its form is {{"function": {{"name": ..., "arguments": ...}}}}')
    name, arguments = call["name"], call["arguments"]
    if not isinstance(name, str) or not name or to_json(name) != f'"{name}"':
        raise UserError(f"{where} has the name {name!r:.60}: a name is a string without quotes and line breaks")
    text = arguments if isinstance(arguments, str) else to_json(arguments, f"{where}: arguments")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UserError(f"{where} has the arguments {arguments!r:.60}: they must be an object, or a string of one")
    return name, text
