"""Tools: Python functions that a policy calls, as text or as JSON.

    def put(shop: dict, item: str, count: int) -> str:
        "Set the stock of an item."

    Tool(put)        <put>axe 4</put>        {"name": "put", "arguments": {"item": "axe", "count": 4}}

The first parameter is the state of the row, which belongs to the environment; the policy gives the others. What a tool
returns is the observation. It refuses by ValueError, whose text the policy reads.
"""

import ctypes
import inspect
import math
import re
from collections.abc import Callable
from concurrent import futures
from functools import partial
from threading import Thread
from typing import Any

from minirl.tool_calls import parse_tool_calls

TYPES = {str: "string", int: "integer", float: "number"}
WHOLE, DECIMAL = re.compile(r"[-+]?[0-9]{1,18}"), re.compile(r"[-+]?[0-9]{1,18}(?:\.[0-9]{1,18})?")
LARGE = 10**18  # the first number that is no word


class Tool:
    """A function (state, a: str, b: int, ...) -> str under a name; its docstring is the description.

    name    : empty: the function's own
    seconds : that a call may take, of a tool that may hang; it then runs in a thread, see `in_time`. inf: it does not
    """

    def __init__(self, function: Callable[..., str], name: str = "", seconds: float = math.inf):
        self.function, self.name, self.seconds = function, name or function.__name__, seconds
        self.doc = inspect.getdoc(function) or ""
        parameters = list(inspect.signature(function).parameters.values())[1:]
        kinds = {key: kind for kind in TYPES for key in (kind, kind.__name__)}  # by name: annotations may be strings
        self.parameters = {p.name: kinds.get(p.annotation, str) for p in parameters}
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
        are missing, unknown or of another type, and whatever the function refuses. TimeoutError: over its `seconds`.
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
        arguments = {name: _read(name, value, self.parameters[name]) for name, value in arguments.items()}
        call = partial(self.function, state, **arguments)
        return str(call() if self.seconds == math.inf else in_time(self.seconds, call))


def in_time(seconds: float, call: Callable[[], Any]) -> Any:
    """What call() returns or raises, in a thread of its own; TimeoutError if that takes longer.

    **The thread may live on**: Python cannot kill one. It gets an exception at its next line, but there is none while
    it waits in C, for a socket. It does not hold up the end of the process. C code that never lets go of the
    interpreter, as 9**9**9 or a hard regular expression, stops every thread, this one too: that is for the sandbox.
    """
    result: futures.Future = futures.Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    try:
        error = result.exception(seconds)
    except futures.TimeoutError:
        # An endless loop would take turns at the interpreter: each operation of the trainer then waits 5 ms for it.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
        thread.join(0.1)
        raise TimeoutError(f"timed out after {seconds:g} s") from None
    if error:
        raise error
    return result.result()


def _read(name: str, value: Any, kind: type) -> Any:
    """A value of JSON, or a word, as the type that the parameter has. int("１_0") would be 10: digits are 0 to 9."""
    if kind is str and isinstance(value, str):
        return value
    if isinstance(value, str) and (WHOLE if kind is int else DECIMAL).fullmatch(value.strip()):
        return kind(value)
    if isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool):
        if not abs(value) < LARGE:  # JSON has integers of thousands of digits, and 1e999
            raise ValueError(f"{name} is too large")
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
