"""How good is a trajectory as an example? Four parts between 0 and 1, and their weighted sum.

    satisfaction  .3    did the user, a judge or a verifier like the result? The row's "satisfaction", if it has one
    completion    .3    does it end in an answer (words, or a call of Finish that gives one)?
    tool success  .2    share of the tool results that are no errors; 1 without calls
    efficiency    .2    share of the calls that were needed: neither failed nor made before with the same arguments

A row is kept from KEEP on. A part that nobody knows (satisfaction) leaves the sum, and the others keep their ratio.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from minirl.data.trajectories import is_error

WEIGHTS = {"satisfaction": 0.3, "completion": 0.3, "tool_success": 0.2, "efficiency": 0.2}
KEEP = 0.8


def quality_parts(messages: Sequence[dict[str, Any]], satisfaction: float | None = None) -> dict[str, float]:
    """The parts that are known, by name. messages: a trajectory without problems (`check_trajectory`)."""
    calls: list[str] = []
    results: list[bool] = []  # of each result: did the call work?
    for message in messages:
        for call in message.get("tool_calls") or []:
            function = call.get("function", call)
            if not _is_finish(function):
                calls.append(json.dumps([function["name"], _object(function["arguments"])], sort_keys=True))
        if message["role"] == "tool":
            results.append(not is_error(_text(message["content"])))
    worked = [call for call, success in zip(calls, results, strict=False) if success]
    last = messages[-1]
    ended = last["role"] == "assistant" and (any(_is_finish(call.get("function", call))
                                                 for call in last.get("tool_calls") or [])
                                             or (not last.get("tool_calls") and bool(_text(last["content"]).strip())))
    parts = {"completion": float(ended),
             "tool_success": sum(results) / len(results) if results else 1.0,
             "efficiency": len(set(worked)) / len(results) if results else 1.0}
    return parts if satisfaction is None else {"satisfaction": float(satisfaction)} | parts


def quality_score(parts: dict[str, float]) -> float:
    """The weighted mean of the parts, 0 to 1."""
    return sum(WEIGHTS[name] * value for name, value in parts.items()) / sum(WEIGHTS[name] for name in parts)


def _is_finish(function: dict[str, Any]) -> bool:
    return function["name"] == "Finish" and _object(function["arguments"]).get("return_type") == "give_answer"


def _object(arguments: Any) -> dict[str, Any]:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content or [])
