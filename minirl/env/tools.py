"""Tools: Python functions that a policy calls, as text or as JSON.

    def put(shop: dict, item: str, count: int) -> str:
        "Set the stock of an item."

    Tool(put)        <put>axe 4</put>        {"name": "put", "arguments": {"item": "axe", "count": 4}}

The first parameter is the state of the row, which belongs to the environment; the policy gives the others. What a tool
returns is the observation. It refuses by ValueError, whose text the policy reads.
"""

import inspect
import re
from collections.abc import Callable
from typing import Any

from minirl.tool_calls import parse_tool_calls

TYPES = {str: "string", int: "integer", float: "number"}
WHOLE, DECIMAL = re.compile(r"[-+]?[0-9]{1,18}"), re.compile(r"[-+]?[0-9]{1,18}(?:\.[0-9]{1,18})?")


class Tool:
    """A function (state, a: str, b: int, ...) -> str under a name; its docstring is the description.

    name : empty: the function's own
    """

    def __init__(self, function: Callable[..., str], name: str = ""):
        self.function, self.name = function, name or function.__name__
        self.doc = inspect.getdoc(function) or ""
        parameters = list(inspect.signature(function).parameters.values())[1:]
        self.parameters = {p.name: p.annotation if p.annotation in TYPES else str for p in parameters}
        self.required = [p.name for p in parameters if p.default is p.empty]

    def schema(self) -> dict[str, Any]:
        """The tool in OpenAI's format, for a chat template."""
        properties = {name: {"type": TYPES[kind]} for name, kind in self.parameters.items()}
        parameters = {"type": "object", "properties": properties, "required": self.required}
        function = {"name": self.name, "description": self.doc, "parameters": parameters}
        return {"type": "function", "function": function}

    def __call__(self, state: Any, arguments: str | dict[str, Any]) -> str:
        """Call it with the text between its tags, words in the order of the parameters, or with an object.

        A single parameter gets the text as it is, the last of several all that is left. ValueError: arguments that
        are missing, unknown or of another type, and whatever the function refuses.
        """
        if isinstance(arguments, str):
            count = len(self.parameters)
            words = [arguments] if count == 1 else arguments.strip().split(maxsplit=max(0, count - 1))
            if len(words) > count:
                raise ValueError(f"{self.name} takes nothing")
            arguments = dict(zip(self.parameters, words, strict=False))
        if missing := [name for name in self.required if name not in arguments]:
            raise ValueError(f"{self.name} needs {' '.join(missing)}")
        if unknown := arguments.keys() - self.parameters.keys():
            raise ValueError(f"{self.name} has no {min(unknown)}")
        return str(self.function(state, **{name: _read(name, value, self.parameters[name])
                                           for name, value in arguments.items()}))


def _read(name: str, value: Any, kind: type) -> Any:
    """A value of JSON, or a word, as the type that the parameter has. int("１_0") would be 10: digits are 0 to 9."""
    if kind is str and isinstance(value, str):
        return value
    if isinstance(value, str) and (WHOLE if kind is int else DECIMAL).fullmatch(value.strip()):
        return kind(value)
    if isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool):
        return value
    raise ValueError(f"{name} must be {TYPES[kind]}")


def parse_calls(action: str, names: tuple[str, ...], syntax: str = "tags") -> tuple[list[tuple[str, Any]], str]:
    """The calls in an action, [(name, arguments)] in their order, and the text outside of them.

    syntax : "tags": <name>text</name>, what is between other brackets is text;
             "json": <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    errors : ValueError where any call is broken; none is made then. Nothing is repaired or guessed
    """
    if syntax == "json":
        calls = parse_tool_calls(action, "qwen3")
        return [(call["name"], call["arguments"]) for call in calls], "" if calls else action
    tag = re.compile(f"<(/?)({'|'.join(map(re.escape, names))})>")
    calls: list[tuple[str, Any]] = []
    outside, at, open_ = [], 0, None
    for found in tag.finditer(action):
        closes, name = found[1] == "/", found[2]
        if open_ is None and closes:
            raise ValueError(f"</{name}> without <{name}>")
        if open_ is not None and not (closes and name == open_):
            raise ValueError(f"<{open_}> is not closed")
        (outside if open_ is None else []).append(action[at : found.start()])
        if closes:
            calls.append((name, action[at : found.start()]))
        open_, at = None if closes else name, found.end()
    if open_ is not None:
        raise ValueError(f"<{open_}> is not closed")
    return calls, "".join([*outside, action[at:]])
