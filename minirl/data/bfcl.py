"""The Berkeley Function-Calling Leaderboard: its rows as conversations, and its AST check.

A row has a question and functions, a row of possible_answer/ with the same id the calls that are right:

    {"id": "simple_python_7", "question": [[{"role": "user", "content": "..."}]], "function": [{"name": ...}]}
    {"id": "simple_python_7", "ground_truth": [{"calculate_circumference": {"radius": [4], "unit": ["inches", "in"]}}]}

Each argument has a list of accepted values, in which "" means that it may be left out. The check compares calls as
data, which is what "AST" stands for: no function is run. These are the rules of the Python categories (simple,
multiple, parallel, parallel_multiple, irrelevance and their live_ versions; gorilla.cs.berkeley.edu, blog 8):

    which function  the name is the same, every required argument is there, and none that the answer does not list
    types           as the function declares them: a whole number is a float too, but 4.0 is no integer and True is
                    neither. An answer of another type than declared names a variable: the value must be of its type
                    and equal to it to the letter
    strings         upper case, spaces and the marks , . / - _ * ^ do not count, and ' is the same as "
    lists           as a whole, in their order, one of the accepted ones; strings in them by the rule above. Items have
                    the declared type or that of the answer's first item: 2 is no float in a list. Where the argument
                    may be left out items may have any type, and the list may be empty
    tuples          as lists; but where Python's brackets are read, (1, 2) is no list
    objects         every key by its own list of accepted values, strings by the rule above; so in a list of objects
    deeper          what lies in a list in a list, or in an object's value, is as in the answer to the letter
    several calls   in any order, each answer by a call of its own, and no call over
    irrelevance     no call at all

Scores are those of bfcl_eval's checker but for two things: True is 1 nowhere here, and several calls are given to the
answers so that as many as possible fit, where the leaderboard takes the first that does.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minirl.data.trajectories import RowError

NO_CALL = "None of the functions I have can answer this."  # our words: an irrelevance row says only "no call"
TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": None} | {
    name: name for name in ("object", "number", "array", "integer", "string", "boolean", "null")}
PYTHON = {"string": str, "integer": int, "float": float, "number": float, "boolean": bool, "array": list,
          "tuple": list, "dict": dict, "object": dict, "any": str}

# ------------------------------------------------------------------ rows to conversations


def convert_bfcl(row: dict[str, Any], answers: Mapping[str, Any]) -> dict[str, Any]:
    """One row as {"messages", "tools", "id", "possible_answer"}: the question, and one turn with its answer's calls.

    answers : the ground_truth of each id, from possible_answer/. A row with "irrelevance" in its id needs none

    Of the accepted values the first is taken; an optional argument that may be left out is left out. The call passes
    the check below, which is asked.
    """
    name, questions, functions = row.get("id"), row.get("question"), row.get("function")
    if not isinstance(name, str):
        raise RowError("no id", f"id is {name!r:.60}, not a string")
    if not isinstance(functions, list) or not functions:
        raise RowError("no functions", f"{name} has no functions beside its question: none at all, or those of a "
                                       "multi-turn category, which lie elsewhere")
    if not isinstance(questions, list) or len(questions) != 1 or not isinstance(questions[0], list):
        raise RowError("not one question", f"{name}: question is not a list of one list of messages")
    tools = [{"type": "function", "function": _function(function)} for function in functions]
    if "irrelevance" in name:
        said: dict[str, Any] = {"role": "assistant", "content": NO_CALL}
    else:
        if name not in answers:
            raise RowError("no answer", f"{name} has no row in possible_answer")
        calls = [_first_call(answer, functions) for answer in _answer_list(answers[name])]
        if error := ast_error(calls, functions, answers[name]):
            raise RowError("answer fails its check", f"{name}: {error}")
        said = {"role": "assistant", "content": None,
                "tool_calls": [{"type": "function", "function": call} for call in calls]}
    possible = [] if "irrelevance" in name else answers[name]  # all that `minirl.agent_eval` accepts
    return {"messages": [*questions[0], said], "tools": tools, "id": name, "possible_answer": possible}


def _function(function: Any) -> dict[str, Any]:
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError("bad function", f"a function is {function!r:.60}, without a name")
    return function | {"parameters": _schema(function.get("parameters") or {"type": "dict", "properties": {}})}


def _schema(schema: Any, depth: int = 0) -> dict[str, Any]:
    """BFCL's names of types as those of JSON schema, everything else as it is."""
    if not isinstance(schema, dict) or depth > 50:
        raise RowError("bad function", f"a schema is {schema!r:.60}, not an object")
    schema = dict(schema)
    if "type" in schema:
        kind = schema.pop("type")
        if not isinstance(kind, str) or kind not in TYPES:
            raise RowError("type of another language", f"the type {kind!r:.60} is none of Python's categories")
        if TYPES[kind]:
            schema = {"type": TYPES[kind]} | schema
    required = schema.get("required") or []
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise RowError("bad function", f"required is {required!r:.60}, not a list of names")
    if schema.get("properties") is not None:
        if not isinstance(schema["properties"], dict):
            raise RowError("bad function", f"properties are {schema['properties']!r:.60}, not an object")
        schema["properties"] = {name: _schema(inner, depth + 1) for name, inner in schema["properties"].items()}
    if schema.get("items") is not None:
        schema["items"] = _schema(schema["items"], depth + 1)
    return schema


def _answer_list(answers: Any) -> list[tuple[str, dict[str, list]]]:
    """ground_truth as (function, {argument: accepted values}), one for each call."""
    well_formed = isinstance(answers, list) and all(
        isinstance(answer, dict) and len(answer) == 1 and all(
            isinstance(given, dict) and all(isinstance(values, list) and values for values in given.values())
            for given in answer.values()) for answer in answers)
    if not well_formed:
        raise RowError("bad answer", f"ground_truth is {answers!r:.80}: a list of {{function: {{argument: [values]}}}}")
    return [next(iter(answer.items())) for answer in answers]


def _first_call(answer: tuple[str, dict[str, list]], functions: list[dict[str, Any]]) -> dict[str, Any]:
    name, given = answer
    declared = next((function for function in functions if function["name"] == name), None)
    if declared is None:
        raise RowError("unknown tool", f"the answer calls {name!r}, which is not among the functions")
    required = (declared.get("parameters") or {}).get("required") or []
    arguments = {}
    for argument, values in given.items():
        if "" in values and argument not in required:
            continue
        arguments[argument] = _plain(next((value for value in values if value != ""), ""))
    return {"name": name, "arguments": arguments}


def _plain(value: Any) -> Any:
    """An accepted value with the first choice made inside it: {"min": [3], "max": [4]} is {"min": 3, "max": 4}."""
    if isinstance(value, list):
        exact = value and type(value[0]) is float  # then the check wants floats throughout
        return [float(inner) if exact and type(inner) is int else _plain(inner) if isinstance(inner, dict) else inner
                for inner in value]
    if not _has_choices(value):
        return value
    return {key: next((inner for inner in inners if inner != ""), "") for key, inners in value.items()
            if "" not in inners}


def _has_choices(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(inner, list) and inner for inner in value.values())


# ------------------------------------------------------------------ the check


def ast_score(calls: Sequence[dict[str, Any]], functions: Sequence[dict[str, Any]], answers: Any) -> float:
    """1.0 if the calls are right, else 0.0. See `ast_error`."""
    return float(ast_error(calls, functions, answers) is None)


def ast_error(calls: Sequence[dict[str, Any]], functions: Sequence[dict[str, Any]], answers: Any) -> str | None:
    """What is wrong with the calls by the rules above; None: nothing.

    calls     : [{"name": ..., "arguments": {...}}], of `parse_tool_calls` or `parse_python_calls`
    functions : the row's, in BFCL's own words ("dict", "float")
    answers   : the ground_truth of possible_answer; [] for irrelevance
    """
    wanted = _answer_list(answers)
    if len(calls) != len(wanted):
        return f"{len(calls)} calls, {len(wanted)} wanted"
    errors = [[call_error(call, answer, functions) for answer in wanted] for call in calls]
    owner: dict[int, int] = {}  # answer -> the call that gives it

    def place(call: int, tried: set[int]) -> bool:
        """Give the call an answer of its own, and the call that had it another one (Kuhn's matching)."""
        for answer, error in enumerate(errors[call]):
            if error is None and answer not in tried:
                tried.add(answer)
                if answer not in owner or place(owner[answer], tried):
                    owner[answer] = call
                    return True
        return False

    for call in range(len(calls)):
        if not place(call, set()):
            reasons = [error for error in errors[call] if error] or ["another call gives the same answer"]
            same = [error for error, (name, _) in zip(errors[call], wanted, strict=True)
                    if error and name == calls[call].get("name")]
            return f"call {call}: {(same or reasons)[0]}"
    return None


def call_error(call: dict[str, Any], answer: tuple[str, dict[str, list]],
               functions: Sequence[dict[str, Any]]) -> str | None:
    """What is wrong with one call by one answer, (function, {argument: accepted values}); None: nothing."""
    name, accepted = answer
    if call.get("name") != name:
        return f"calls {call.get('name')!r:.60}, not {name!r}"
    declared = next((function for function in functions if function.get("name") == name), None)
    if declared is None:
        return f"{name!r} is not among the functions"
    schema = declared.get("parameters") or {}
    properties = schema.get("properties") or {}
    arguments = call.get("arguments")
    if not isinstance(arguments, dict):
        return f"arguments are {arguments!r:.60}, not an object"
    for argument in schema.get("required") or []:
        if argument not in arguments:
            return f"lacks the required {argument!r}"
    for argument, value in arguments.items():
        if argument not in properties or argument not in accepted:
            return f"has the argument {argument!r:.60}, which was not asked for"
        if error := _value_error(value, accepted[argument], properties[argument]):
            return f"{argument!r} {error}"
    for argument, values in accepted.items():
        if argument not in arguments and "" not in values:
            return f"lacks {argument!r}"
    return None


def _value_error(value: Any, accepted: list, schema: Any) -> str | None:
    schema = schema if isinstance(schema, dict) else {}
    kind = PYTHON.get(schema.get("type", "any"))
    if schema.get("type") == "tuple" and isinstance(value, tuple):
        value = [*value]
    if kind is float and type(value) is int:
        value = float(value)
    sample = next((type(choice) for choice in accepted if choice != ""), None)
    if kind and type(value) not in (kind, sample):
        return f"is {value!r:.60}, not of type {schema.get('type', 'string')}"
    items = schema.get("items") if isinstance(schema.get("items"), dict) else {}
    item = PYTHON.get(items.get("type")) if type(value) is kind is list else None
    if item and not any(_items_fit(value, choice, item) for choice in accepted):
        return f"holds in {value!r:.60} what is not of type {items['type']}"
    variable = kind and sample not in (kind, None)
    if any(_equal(value, choice) if variable else _fits(value, choice) for choice in accepted):
        return None
    return f"is {value!r:.60}, none of {accepted!r:.100}"


def _items_fit(value: list, choice: Any, kind: type) -> bool:
    """Are all items of the declared type, or of that of the answer's first item? "" asks nothing of them."""
    first = next((type(inner) for inner in choice if inner != ""), kind) if isinstance(choice, list) else None
    return first is None or all(type(inner) in (kind, first) for inner in value)


def _fits(value: Any, choice: Any) -> bool:
    """Is a value the accepted one? Objects have a list of accepted values for each key."""
    if isinstance(value, list) and choice == "":
        return not value
    if isinstance(value, list) and isinstance(choice, list):
        return len(value) == len(choice) and all(
            _object_fits(a, b) if isinstance(a, dict) else _shallow(a, b) for a, b in zip(value, choice, strict=True))
    return _object_fits(value, choice) if isinstance(value, dict) else _shallow(value, choice)


def _object_fits(value: dict[str, Any], choice: Any) -> bool:
    if not _has_choices(choice):
        return _equal(value, choice)
    return (all(key in choice and any(_shallow(inner, one) for one in choice[key]) for key, inner in value.items())
            and all(key in value or "" in inners for key, inners in choice.items()))


def _standard(text: str) -> str:
    return re.sub(r"[ ,./\-_*^]", "", text).lower().replace("'", '"')


def _shallow(value: Any, wanted: Any) -> bool:
    if isinstance(value, str) and isinstance(wanted, str):
        return _standard(value) == _standard(wanted)
    return _equal(value, wanted)


def _equal(value: Any, wanted: Any) -> bool:
    return same_value(value, wanted, strings=str)


def same_value(value: Any, wanted: Any, strings: Callable[[str], str] = _standard) -> bool:
    """Do two arguments say the same, however deep? Numbers by value, but True is not 1; strings as `strings` has them,
    without another function by the rule above."""
    if isinstance(value, str) and isinstance(wanted, str):
        return strings(value) == strings(wanted)
    if isinstance(value, list) and isinstance(wanted, list):
        return len(value) == len(wanted) and all(same_value(a, b, strings) for a, b in zip(value, wanted, strict=True))
    if isinstance(value, dict) and isinstance(wanted, dict):
        return value.keys() == wanted.keys() and all(same_value(value[key], wanted[key], strings) for key in value)
    return isinstance(value, bool) == isinstance(wanted, bool) and value == wanted


# ------------------------------------------------------------------ calls written as Python


MAX_CALLS = 20_000  # characters: Python's parser needs memory in proportion, and nobody calls at such length


def parse_python_calls(text: str, positional: Mapping[str, Sequence[str]] | None = None,
                       variables: bool = True, tuples: bool = True) -> list[dict[str, Any]]:
    """Calls written as Python, "[math.hypot(x=4, y=5), f()]" or one alone: [{"name": ..., "arguments": {...}}].

    Read with `ast`, never run. `RowError`: anything but calls with literal arguments.

    positional : names of the first arguments of a function, where a call may give them without
    variables  : a bare name as an argument is given as its text
    tuples     : (1, 2) stays a tuple, which the check tells from a list; else it becomes one, as in JSON
    """
    if len(text) > MAX_CALLS:
        raise RowError("not a call", f"{len(text)} characters are too long for calls")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the parser, about odd literals
            body = ast.parse(text.strip(), mode="eval").body
        nodes = body.elts if isinstance(body, ast.List) else [body]
        return [_python_call(node, positional or {}, variables, tuples) for node in nodes]
    except RowError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise RowError("not a call", f"{text!r:.80} cannot be read as calls of Python") from None


def _python_call(node: ast.expr, positional: Mapping[str, Sequence[str]], *kept: bool) -> dict[str, Any]:
    name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    if not re.fullmatch(r"[A-Za-z_][\w.]*", name):
        raise RowError("not a call", f"{ast.unparse(node)!r:.80} is not the call of a function by its name")
    names = [*positional.get(name, ())[: len(node.args)], *(keyword.arg for keyword in node.keywords)]
    if len(names) < len(node.args) + len(node.keywords) or None in names:
        raise RowError("argument without a name", f"{ast.unparse(node)!r:.80} has an argument without a name")
    if len(set(names)) < len(names):
        raise RowError("not a call", f"{ast.unparse(node)!r:.80} gives an argument twice")
    values = [*node.args, *(keyword.value for keyword in node.keywords)]
    return {"name": name, "arguments": {key: _literal(value, *kept)
                                        for key, value in zip(names, values, strict=True)}}


def _literal(node: ast.expr, variables: bool, tuples: bool) -> Any:
    if variables and isinstance(node, ast.Name | ast.Attribute):
        return ast.unparse(node)
    if isinstance(node, ast.List | ast.Tuple):
        inner = [_literal(inner, variables, tuples) for inner in node.elts]
        return tuple(inner) if tuples and isinstance(node, ast.Tuple) else inner
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) and isinstance(key.value, str)
                                          for key in node.keys):
        return {key.value: _literal(inner, variables, tuples)
                for key, inner in zip(node.keys, node.values, strict=True)}
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError):
        raise RowError("argument is no literal", f"{ast.unparse(node)!r:.80} is not a literal") from None
    if not isinstance(value, str | int | float | None) or value != value or value in (1e999, -1e999):
        raise RowError("argument is no literal", f"{ast.unparse(node)!r:.80} is no value of JSON")
    return value
