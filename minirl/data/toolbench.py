"""ToolBench (arXiv:2307.16789): search trees, the processed training file, and instructions without answers.

A tree is what a depth-first search tried. One step is Thought (perhaps), Action (a tool's name), Action Input (JSON
and, with it, the tool's answer in `observation`); a path that ends in `Finish` with "give_answer" solved the task:

    {"win": true, "tree": {"tree": {"node_type": ..., "description": ..., "children": [...]}},
     "answer_generation": {"query": "...", "function": [{"name", "description", "parameters"}, ...], ...}}

The processed file has the same steps as texts, "Thought: ...\nAction: NAME\nAction Input: {...}":

    {"id": "...", "conversations": [{"from": "system" | "user" | "assistant" | "function", "value": "..."}]}

A step becomes one assistant turn: the thought is its content, the action its tool call. The last turn is the call of
Finish, as in the data: it is the tool by which that agent speaks.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from typing import Any

from minirl.data.jsonl import unique_keys
from minirl.data.trajectories import RowError, check_trajectory

FINISH = "Finish"
MAX_NODES = 100_000  # of one tree

# ------------------------------------------------------------------ search trees


def convert_tree(row: dict[str, Any]) -> dict[str, Any]:
    """The first sound path of a tree that solved the task, as {"messages", "tools"}. `RowError`: there is none."""
    query, tools, root = _open(row)
    flaw = RowError("no answer", "no path of the tree ends in Finish with give_answer: the search gave up")
    for path in [*paths(root)]:  # the whole tree is looked at first: a cycle behind a good path is a broken tree too
        if _answers(path):
            try:
                messages = [{"role": "user", "content": query}, *_steps(path)]
                check_trajectory(messages, tools)
                return {"messages": messages, "tools": tools}
            except RowError as error:
                flaw = error  # another path may have solved it without a broken step
    raise flaw


def tree_pairs(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Preferences of a tree: where a path that solved the task leaves one that gave up, its step is the better one.

    returns [{"prompt": [messages], "chosen": [message], "rejected": [message], "tools"}, ...], each fork once
    """
    query, tools, root = _open(row)
    found = [*paths(root)]
    pairs: dict[tuple[int, int], dict[str, Any]] = {}
    for good in filter(_answers, found):
        for bad in found:
            fork = next((i for i, (a, b) in enumerate(zip(good, bad, strict=False)) if a is not b), None)
            if fork is None or _answers(bad) or (id(good[fork]), id(bad[fork])) in pairs:
                continue
            try:
                common, chosen, rejected = _steps(good[:fork]), _steps(good), _steps(bad)
            except RowError:
                continue  # a step that cannot be written down teaches nobody
            at = len([message for message in common if message["role"] == "tool"]) * 2
            if at < min(len(chosen), len(rejected)) and chosen[at] != rejected[at]:
                pairs[id(good[fork]), id(bad[fork])] = {
                    "prompt": [{"role": "user", "content": query}, *chosen[:at]],
                    "chosen": [chosen[at]], "rejected": [rejected[at]], "tools": tools}
    return [*pairs.values()]


def paths(root: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Every path from the root to a leaf, the root left out, in the order of the search.

    `RowError` where a node is reached twice (a tree has no cycles) or is no node. Without recursion: depth is data.
    """
    stack, path, seen = [(root, 0)], [], set()
    while stack:
        node, depth = stack.pop()
        children = node.get("children") if isinstance(node, dict) else None
        if not isinstance(children, list) or any(not isinstance(child, dict) for child in children):
            raise RowError("bad tree", f"a node at depth {depth} is no object with a list of children")
        if id(node) in seen:
            raise RowError("cyclic tree", f"a node at depth {depth} is reached twice: that is no tree")
        seen.add(id(node))
        if len(seen) > MAX_NODES:
            raise RowError("bad tree", f"the tree has more than {MAX_NODES} nodes")
        path[depth:] = [node]
        if not children:
            yield path[1:]
        stack += [(child, depth + 1) for child in reversed(children)]


def _open(row: dict[str, Any]) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """(query, tools, root node)."""
    generation, tree = row.get("answer_generation"), row.get("tree")
    root = tree.get("tree") if isinstance(tree, dict) else None
    if not isinstance(generation, dict) or not isinstance(root, dict):
        raise RowError("bad tree", "the row has no answer_generation, or no tree in its tree")
    query, functions = generation.get("query"), generation.get("function")
    if not isinstance(query, str) or not query.strip():
        raise RowError("no query", f"query is {query!r:.60}, not a text")
    return query.strip(), _tools(functions), root


def _answers(path: list[dict[str, Any]]) -> bool:
    if not path or len(path) < 2 or path[-2].get("description") != FINISH:
        return False
    try:
        return _gives_answer(json.loads(path[-1]["description"]))
    except (KeyError, TypeError, ValueError, RecursionError):
        return False


def _gives_answer(arguments: Any) -> bool:
    return isinstance(arguments, dict) and arguments.get("return_type") == "give_answer"


def _steps(path: list[dict[str, Any]]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    thought, action = None, None
    for node in path:
        kind, text = node.get("node_type"), node.get("description")
        if not isinstance(text, str) or kind not in ("Thought", "Action", "Action Input"):
            raise RowError("bad tree", f"a node is {kind!r:.40} with {text!r:.60}: Thought, Action or Action Input, "
                                      "with a text")
        if kind == "Thought" and action is None:
            thought = text.strip() if thought is None else f"{thought}\n{text.strip()}"
        elif kind == "Action" and action is None:
            action = text.strip()
        elif kind == "Action Input" and action is not None:
            messages.append(_call(thought, action, text))
            observation = node.get("observation")
            if action != FINISH:
                if not isinstance(observation, str):
                    raise RowError("bad tree", f"the call of {action!r:.60} has no observation")
                messages.append({"role": "tool", "content": observation})
            thought = action = None
        else:
            raise RowError("bad tree", f"a {kind} follows where none can stand")
    if thought is not None or action is not None:
        raise RowError("bad tree", "the path ends in the middle of a step")
    return messages


# ------------------------------------------------------------------ the processed file


STEP = re.compile(
    r"\s*(?:Thought:(?P<thought>.*?))?\nAction:[ \t]*(?P<action>[^\n]*)\nAction Input:(?P<input>.*)", re.S)
APIS = re.compile(r"\s*Specifically, you have access to the following APIs:\s*")
FORMAT = re.compile(r" *Your output should follow this format:\s*Thought:\s*Action:?\s*Action Input:\s*")
ROLES = {"system": "system", "user": "user", "assistant": "assistant", "function": "tool"}


def convert_processed(row: dict[str, Any]) -> dict[str, Any]:
    """One row of toolllama_G123_dfs_train.json and its like, as {"messages", "tools", "id"}.

    The list of functions leaves the system message and becomes `tools`, and so does the sentence that asks for
    "Thought: Action: Action Input:": a chat template writes calls in its own way.
    """
    turns = row.get("conversations")
    if not isinstance(turns, list) or not turns:
        raise RowError("no conversation", f"conversations is {turns!r:.60}, not a list of turns")
    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] = []
    for i, turn in enumerate(turns):
        role, text = (turn.get("from"), turn.get("value")) if isinstance(turn, dict) else (None, None)
        if not isinstance(role, str) or role not in ROLES:
            raise RowError("unknown role", f"turn {i} is from {role!r:.40}: {', '.join(ROLES)}")
        if not isinstance(text, str):
            raise RowError("no text", f"turn {i} ({role}) has the value {text!r:.60}, not a text")
        if role == "system" and (listed := APIS.search(text)):
            if tools:
                raise RowError("bad functions", f"turn {i} lists functions a second time")
            tools = _tools(_read_list(text[listed.end():]))
            text = FORMAT.sub("\n", text[: listed.start()]).strip()
        if role == "assistant":
            messages.append(_read_step(text, i))
        else:
            messages.append({"role": ROLES[role], "content": text.strip() if role != "function" else text})
    if not tools:
        raise RowError("no functions", "no system turn says which functions there are")
    calls = messages[-1].get("tool_calls")
    if calls and calls[0]["function"]["name"] == FINISH and not _gives_answer(calls[0]["function"]["arguments"]):
        raise RowError("no answer", "the conversation ends in Finish without give_answer: the agent gave up")
    name = row.get("id")
    return {"messages": messages, "tools": tools} | ({"id": name} if isinstance(name, str) else {})


def _read_step(text: str, turn: int) -> dict[str, Any]:
    step = STEP.fullmatch("\n" + text)
    if step is None:
        raise RowError("not a step", f"turn {turn} is {text!r:.80}: not Thought, Action, Action Input")
    thought = (step["thought"] or "").strip()
    return _call(thought or None, step["action"].strip(), step["input"])


def _read_list(text: str) -> Any:
    """The functions in a system message: a list as Python prints it, or JSON."""
    for read in (ast.literal_eval, json.loads):
        try:
            return read(text.strip())
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            pass
    raise RowError("bad functions", f"the functions {text!r:.80} can be read neither as Python nor as JSON")


def _call(thought: str | None, action: str, arguments: str) -> dict[str, Any]:
    try:
        value = json.loads(arguments, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RowError("arguments are no JSON", f"the call of {action!r:.60} has {arguments!r:.80}, no object of JSON")
    return {"role": "assistant", "content": thought,
            "tool_calls": [{"type": "function", "function": {"name": action, "arguments": value}}]}


def _tools(functions: Any) -> list[dict[str, Any]]:
    if not isinstance(functions, list) or not functions or not all(
            isinstance(function, dict) and isinstance(function.get("name"), str) for function in functions):
        raise RowError("bad functions", f"the functions are {functions!r:.80}, not a list of objects with names")
    return [{"type": "function", "function": function} for function in functions]


# ------------------------------------------------------------------ instructions without answers


def convert_query(row: dict[str, Any]) -> dict[str, Any]:
    """An instruction (G1_query.json) as {"prompt", "tools", "id"}: a task for a teacher, with nothing to learn yet.

    The tools get the names under which the trees call them, API_for_TOOL.
    """
    query, listed = row.get("query"), row.get("api_list")
    if not isinstance(query, str) or not query.strip() or not isinstance(listed, list) or not listed:
        raise RowError("no query", "the row has no query, or no api_list")
    return {"prompt": [{"role": "user", "content": query.strip()}], "tools": [_api(api) for api in listed],
            "id": str(row.get("query_id", ""))}


def _api(api: Any) -> dict[str, Any]:
    if not isinstance(api, dict) or not all(isinstance(api.get(key), str) for key in ("api_name", "tool_name")):
        raise RowError("bad functions", f"an api is {api!r:.80}, without api_name and tool_name")
    properties, required = {}, []
    for key in ("required_parameters", "optional_parameters"):
        listed = api.get(key) or []
        if not isinstance(listed, list):
            raise RowError("bad functions", f"{key} of {api['api_name']!r:.60} is {listed!r:.60}, not a list")
        for parameter in listed:
            if not isinstance(parameter, dict) or not isinstance(parameter.get("name"), str):
                raise RowError("bad functions", f"a parameter of {api['api_name']!r:.60} has no name")
            name = _identifier(parameter["name"])
            kind = {"NUMBER": "integer", "BOOLEAN": "boolean"}.get(str(parameter.get("type")), "string")
            properties[name] = {"type": kind, "description": str(parameter.get("description") or "")[:256]}
            required += [name] if key == "required_parameters" else []
    name = f"{_identifier(api['api_name'])}_for_{_words(api['tool_name'])}"[-64:]
    return {"type": "function", "function": {
        "name": name, "description": str(api.get("api_description") or "").strip()[:512],
        "parameters": {"type": "object", "properties": properties, "required": required}}}


def _words(text: str) -> str:
    text = re.sub(r"_+", "_", re.sub(r"\W", "_", text, flags=re.A)).strip("_").lower()
    return "get_" + text if text[:1].isdigit() else text


def _identifier(text: str) -> str:
    text = _words(text)
    return "is_" + text if text in ("from", "class", "return", "false", "true", "id", "and") else text
