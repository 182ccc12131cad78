"""More out of a good trajectory: tools in another order, other tools beside them, and mistakes that are mended.

A model that always finds the right tool first, or alone, learns the place and not the description; one that has never
seen an error does not know what to do after it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random
from typing import Any

from minirl.data.trajectories import RowError


def shuffle_tools(row: dict[str, Any], rng: Random, others: Sequence[dict[str, Any]] = (),
                  most: int = 8) -> dict[str, Any]:
    """The row with its tools in random order, among up to `most` of them drawn from `others` and from its own.

    A tool that the row calls always stays, with its own description; one of the same name is not added.
    """
    tools = [*(row.get("tools") or [])]
    called = {call["function"]["name"] for message in messages_of(row) for call in message.get("tool_calls") or []}
    kept = [tool for tool in tools if tool["function"]["name"] in called]
    names = {tool["function"]["name"] for tool in tools}
    rest = [tool for tool in tools if tool["function"]["name"] not in called]
    foreign: list[dict[str, Any]] = []
    for tool in rng.sample(others, len(others)):
        if len(foreign) + len(tools) >= most:
            break
        if tool["function"]["name"] not in names:
            foreign.append(tool)
            names.add(tool["function"]["name"])
    kept += rng.sample(rest, len(rest))[: max(0, most - len(kept))] + foreign
    return row | {"tools": rng.sample(kept, len(kept))}


def recovery_row(row: dict[str, Any], rng: Random) -> dict[str, Any]:
    """The row with a mistake before one of its calls, the error that it earns, and then the call as it was.

    returns {"prompt": up to the error, "completion": the right call and the rest, "tools"}: the mistake is read and
    not learnt. `RowError`: the row calls nothing, or its call cannot be spoilt.
    """
    messages = messages_of(row)
    start = len(row.get("prompt") or [])
    places = [i for i, message in enumerate(messages) if i >= start and len(message.get("tool_calls") or []) == 1]
    if not places:
        raise RowError("no single call", "no turn of the row has exactly one call, before which to err")
    at = rng.choice(places)
    good = messages[at]["tool_calls"][0]["function"]
    tools = {tool["function"]["name"]: tool["function"] for tool in row.get("tools") or []}
    name, arguments, error = _spoil(good["name"], good["arguments"], tools, rng)
    bad = {"role": "assistant", "content": messages[at].get("content"),
           "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}]}
    right = messages[at] | {"content": None}
    return {key: value for key, value in row.items() if key not in ("messages", "prompt", "completion")} | {
        "prompt": [*messages[:at], bad, {"role": "tool", "content": error}],
        "completion": [right, *messages[at + 1:]]}


def _spoil(name: str, arguments: dict[str, Any], tools: dict[str, Any], rng: Random) -> tuple[str, dict, str]:
    """A mistake of one of three kinds, and what a tool loop would answer."""
    required = [key for key in (tools.get(name, {}).get("parameters") or {}).get("required") or [] if key in arguments]
    kinds = ["unknown tool", "unknown argument"] + ["missing argument"] * bool(required)
    kind = rng.choice(kinds)
    if kind == "unknown tool":
        wrong = next(f"{name}_{i}" for i in range(2, len(tools) + 3) if f"{name}_{i}" not in tools)
        return wrong, arguments, f"Error: there is no tool {wrong!r}. Tools: {', '.join(tools)}."
    if kind == "missing argument":
        key = rng.choice(required)
        return name, {k: v for k, v in arguments.items() if k != key}, f"Error in {name}: arguments lacks {key!r}."
    key = "input" if "input" not in arguments else "input_2"
    return name, arguments | {key: ""}, f"Error in {name}: arguments has {key!r}, which the schema does not know."


def number_names(row: dict[str, Any]) -> dict[str, Any]:
    """The row with its tools called tool_1, tool_2 ..., and their arguments arg_1, arg_2 ..., as they are declared.

    What a tool does is then told by its descriptions alone, and a call copies no name that was never seen: a model of a
    few hundred thousand weights can learn that, and to copy new names it cannot. Names inside of objects, those that
    texts happen to mention, and ToolBench's Finish, which every row has, stay.
    """
    tools, names, keys = [], {}, {}
    for number, tool in enumerate(row.get("tools") or [], 1):
        function = tool["function"]
        if function["name"] == "Finish":
            tools.append(tool)
            continue
        parameters = function.get("parameters") or {}
        known = {key: f"arg_{i}" for i, key in enumerate(parameters.get("properties") or {}, 1)}
        names[function["name"]], keys[function["name"]] = f"tool_{number}", known
        if known:
            parameters = parameters | {"properties": {known[key]: inner for key, inner in
                                                      parameters["properties"].items()}}
        if parameters.get("required"):
            parameters = parameters | {"required": [known.get(key, key) for key in parameters["required"]]}
        changed = {"name": names[function["name"]]} | ({"parameters": parameters} if parameters else {})
        tools.append(tool | {"function": function | changed})

    def called(name: str, arguments: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        return names.get(name, name), {keys.get(name, {}).get(key, key): value for key, value in arguments.items()}

    def renamed(message: dict[str, Any]) -> dict[str, Any]:
        """The message, its calls under their new names."""
        if not message.get("tool_calls"):
            return message
        calls = []
        for call in message["tool_calls"]:
            name, arguments = called(call["function"]["name"], call["function"]["arguments"])
            calls.append(call | {"function": call["function"] | {"name": name, "arguments": arguments}})
        return message | {"tool_calls": calls}

    rows = {key: [renamed(message) for message in row[key]] for key in ("messages", "prompt", "completion")
            if isinstance(row.get(key), list)}
    if row.get("possible_answer"):
        rows["possible_answer"] = [dict([called(*each) for each in answer.items()])
                                   for answer in row["possible_answer"]]
    return row | rows | {"tools": tools}


def messages_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    """All messages of a row, whether it has "messages" or "prompt" and "completion"."""
    return row["messages"] if "messages" in row else [*row["prompt"], *row.get("completion", [])]


def new_values(row: dict[str, Any], rng: Random, words: Sequence[str]) -> dict[str, Any]:
    """The row with other numbers and words where its calls repeat what the user said, in question and calls alike.

    What a call has to repeat is then to be read: it cannot be known from the row's other words. Numbers keep their
    digits' count and texts their words' count and capitals; a text that the tools mention too stays, for it may be
    one of a few choices. `possible_answer`, which held for the old values, goes.

    words : what new texts are made of, in lower case
    """
    messages = messages_of(row)
    heard = " ".join(str(message["content"]) for message in messages if message["role"] == "user")
    told = str(row.get("tools"))
    calls = [call["function"] for message in messages for call in message.get("tool_calls") or []]
    new: dict[str, str] = {}
    for value in _leaves([call["arguments"] for call in calls]):
        text = str(value)
        if isinstance(value, bool) or not _said(text).search(heard) or (isinstance(value, str) and text in told):
            continue
        new[text] = _number_like(text, rng) if isinstance(value, (int, float)) else re.sub(
            "[A-Za-z]+", lambda found: _word_like(found[0], rng.choice(words)), text)
    if not new:
        return {key: value for key, value in row.items() if key != "possible_answer"}
    places = _said(*sorted(new, key=len, reverse=True))

    def exchanged(value: Any) -> Any:
        """The value with every text and number in it exchanged, where it has a new one."""
        if isinstance(value, dict):
            return {key: exchanged(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [exchanged(inner) for inner in value]
        if isinstance(value, bool) or str(value) not in new:
            return value
        return type(value)(new[str(value)])

    changed = []
    for message in messages:
        if message["role"] == "user":
            message = message | {"content": places.sub(lambda found: new[found[0]], message["content"])}
        if message.get("tool_calls"):
            message = message | {"tool_calls": [
                call | {"function": call["function"] | {"arguments": exchanged(call["function"]["arguments"])}}
                for call in message["tool_calls"]]}
        changed.append(message)
    start = len(row.get("prompt") or [])
    split = {"messages": changed} if "messages" in row else {"prompt": changed[:start], "completion": changed[start:]}
    return {key: value for key, value in row.items() if key != "possible_answer"} | split


def _leaves(value: Any) -> list[Any]:
    """The texts, numbers and booleans in nested lists and objects."""
    if isinstance(value, dict):
        value = [*value.values()]
    return [leaf for inner in value for leaf in _leaves(inner)] if isinstance(value, list) else [value]


def _said(*texts: str) -> re.Pattern[str]:
    """One of the texts, and not as a part of a longer word or number; 300 is said in "300K"."""
    return re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, texts))})(?!\.?\d|(?<!\d)\w)")


def _number_like(text: str, rng: Random) -> str:
    """Another number with as many digits, the same sign and the same decimal point."""
    first = iter([True])
    return re.sub(r"\d", lambda _: str(rng.randint(1 if next(first, False) and len(text) > 1 else 0, 9)), text)


def _word_like(old: str, word: str) -> str:
    return word.upper() if old.isupper() and len(old) > 1 else word.capitalize() if old[0].isupper() else word
