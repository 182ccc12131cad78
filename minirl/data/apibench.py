"""Gorilla's APIBench: a wish in words, and the call that loads a model which grants it.

    {"code": "###Instruction: What is an API that ...\n###Output: {...}", "api_call": "torch.hub.load(...)", ...}

`api_call` is Python and becomes the tool call; what of `code` is not the instruction is not looked at, for its quotes
are broken in most rows. The data set declares no functions: each one that is called gets a schema from all of its calls
in the file, so that a row's tools do not tell its own answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from minirl.config import UserError
from minirl.data.bfcl import parse_python_calls
from minirl.data.trajectories import RowError

BEGIN = re.compile(r"""^[\s{]*(?:\#+\s*|['"])Instruction['"]?\s*:[ \t]*""")
END = re.compile(r"""[,\s]*(?:\n\#+\s*|['"])Output['"]?\s*:""")
INPUT = re.compile(r"\n#+\s*Input\s*:[ \t]*")
POSITIONAL = {"torch.hub.load": ("repo_or_dir", "model"), "pipeline": ("task", "model"), "hub.KerasLayer": ("handle",),
              "hub.load": ("handle",)}
KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def convert_apibench(rows: Sequence[tuple[str, dict[str, Any] | UserError]]
                     ) -> Iterator[tuple[str, dict[str, Any] | UserError]]:
    """The rows of one file as {"messages", "tools"}, each with its place; or the error that stands in its stead."""
    read = [(place, _try(row)) for place, row in rows]
    schemas = _schemas([call for _, found in read if not isinstance(found, UserError) for call in [found[1]]])
    for place, found in read:
        if isinstance(found, UserError):
            yield place, found
            continue
        instruction, call = found
        yield place, {"messages": [{"role": "user", "content": instruction},
                                   {"role": "assistant", "content": None,
                                    "tool_calls": [{"type": "function", "function": call}]}],
                      "tools": [schemas[call["name"]]]}


def _try(row: dict[str, Any] | UserError) -> tuple[str, dict[str, Any]] | UserError:
    if isinstance(row, UserError):
        return row
    try:
        for key in ("code", "api_call"):
            if not isinstance(row.get(key), str) or not row[key].strip():
                raise RowError(f"no {key}", f"{key} is {row.get(key)!r:.60}, not a text")
        names = POSITIONAL | {name: ("pretrained_model_name_or_path",)
                              for name in re.findall(r"^\s*([\w.]+\.from_pretrained)\(", row["api_call"])}
        calls = parse_python_calls(row["api_call"], names, variables=False, tuples=False)
        if len(calls) != 1:
            raise RowError("not a call", f"api_call has {len(calls)} calls")
        return read_instruction(row["code"]), calls[0]
    except RowError as error:
        return error


def read_instruction(code: str) -> str:
    """The wish in a row's `code`, with its input if it has one. `RowError` where its two ends cannot be found."""
    begin = BEGIN.search(code)
    end = END.search(code, begin.end()) if begin else None
    text = code[begin.end() : end.start()].strip() if end else ""
    if text[:1] in ("'", '"') and len(text) > 1 and text[-1] == text[0]:
        text = text[1:-1]
    if not text.strip():
        raise RowError("no instruction", f"code begins {code[:60]!r}: no text between Instruction: and Output:")
    return INPUT.sub("\n\nInput: ", text)


def _schemas(calls: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """A tool for each function: every argument that some call has, required if all calls have it."""
    schemas = {}
    for name in sorted({call["name"] for call in calls}):
        given = [call["arguments"] for call in calls if call["name"] == name]
        properties = {}
        for argument in sorted({key for arguments in given for key in arguments}):
            kinds = {KINDS.get(type(arguments[argument])) for arguments in given if argument in arguments}
            properties[argument] = {"type": kinds.pop()} if len(kinds) == 1 and None not in kinds else {}
        required = [key for key in properties if all(key in arguments for arguments in given)]
        schemas[name] = {"type": "function", "function": {
            "name": name, "description": "Load a model that does what is asked for.",
            "parameters": {"type": "object", "properties": properties, "required": required}}}
    return schemas
