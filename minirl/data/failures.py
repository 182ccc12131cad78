"""How agents fail, what each failure is good for, and preference pairs made of failures.

A failed trajectory is not waste: it says where the data is thin. `classify` names the first thing that went wrong,
FAILURES says which signal that becomes, and `preference_pairs` puts a failure beside a success at the same task, in
TRL's format of three lists of messages, which `train_dpo.py` reads:

    {"prompt": [...], "chosen": [{"role": "assistant", ...}], "rejected": [{"role": "assistant", ...}], "tools": [...]}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from minirl.config import UserError
from minirl.data.trajectories import find_problems, is_error
from minirl.tool_calls import ToolCallError, parse_tool_calls

FAILURES = {  # kind: (what happened, what it becomes)
    "format": ("a call that cannot be read, or a broken turn", "pair: that turn is rejected; format reward in RL"),
    "unknown tool": ("a tool that nobody declared is called", "pair; more rows with shuffled and foreign tools"),
    "arguments": ("arguments do not fit the tool's schema", "pair at the call; argument reward in RL"),
    "ids": ("a result answers no call", "mend the data: the model did not do this"),
    "wrong tool": ("another tool than the reference's is called", "pair at the call; SFT rows with similar tools"),
    "needless call": ("a call where the reference makes none", "pair: the answer is chosen, the call rejected"),
    "missing call": ("no call where the reference makes one", "pair: the call is chosen, the answer rejected"),
    "loop": ("the same call with the same arguments again", "efficiency penalty in RL; recovery rows"),
    "no recovery": ("the last result was an error, and the agent ended", "recovery rows for SFT"),
    "unfinished": ("the turns ran out before an answer", "turn penalty in RL; shorter demonstrations"),
    "wrong answer": ("everything is in order except the result", "outcome reward in RL: SFT has nothing to copy here"),
}


def classify(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None,
             correct: bool | None = None, reference: Sequence[dict[str, Any]] | None = None) -> str | None:
    """The failure of a trajectory, a name in FAILURES; None: none can be seen.

    correct   : what a verifier says of the result; True is believed, whatever happened on the way
    reference : a trajectory that solved the task, to whose calls those of this one are compared
    """
    if correct:
        return None
    for message in messages:
        text = message.get("content")
        if message.get("role") == "assistant" and isinstance(text, str) and "<tool_call>" in text:
            try:
                parse_tool_calls(text, "plain")
            except ToolCallError:
                return "format"
    problems = find_problems(messages, tools)
    serious = [problem.kind for problem in problems if problem.kind != "unfinished"]
    if serious:
        return serious[0]
    calls = _calls(messages)
    if reference is not None:
        wanted = _calls(reference)
        if calls and not wanted:
            return "needless call"
        if wanted and not calls:
            return "missing call"
        if any(name not in {other for other, _ in wanted} for name, _ in calls):
            return "wrong tool"
    if any(call == before for i, call in enumerate(calls) for before in calls[:i]):
        return "loop"
    results = [message for message in messages if message["role"] == "tool"]
    if results and is_error(str(results[-1]["content"])):
        return "no recovery"
    if problems or messages[-1].get("tool_calls"):
        return "unfinished"
    return "wrong answer" if correct is False else None


def preference_pairs(attempts: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every failure beside a success at the same task, where the two part: there one step is better than the other.

    attempts : {"messages", "tools", "correct": bool, perhaps "task"}, several of a task, which is the same where
               "task" is, or without it the messages before the first answer
    returns  : {"prompt", "chosen", "rejected", "tools", "failure"}; chosen and rejected are one assistant turn each.
               A failure whose first other message is not the assistant's (a tool answered differently) makes none
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for i, attempt in enumerate(attempts):
        if not isinstance(attempt.get("correct"), bool):
            raise UserError(f"attempt {i} has correct = {attempt.get('correct')!r:.40}: true or false, a "
                            "verifier's word")
        messages = attempt["messages"]
        start = next((k for k, message in enumerate(messages) if message.get("role") == "assistant"), len(messages))
        key = attempt.get("task") or messages[:start]
        groups.setdefault(json.dumps([key, attempt.get("tools")], sort_keys=True), []).append(attempt)
    pairs = []
    for group in groups.values():
        seen = set()
        for bad in (attempt for attempt in group if not attempt["correct"]):
            for good in (attempt for attempt in group if attempt["correct"]):
                pair = _pair(good, bad)
                key = json.dumps(pair, sort_keys=True)
                if pair and key not in seen:
                    seen.add(key)
                    pairs.append(pair)
                    break  # one pair a failure: a task solved often is not counted often
    return pairs


def _pair(good: dict[str, Any], bad: dict[str, Any]) -> dict[str, Any] | None:
    one, other = good["messages"], bad["messages"]
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    if at is None or one[at].get("role") != "assistant" or other[at].get("role") != "assistant":
        return None
    pair = {"prompt": [*one[:at]], "chosen": [one[at]], "rejected": [other[at]],
            "failure": classify(other, bad.get("tools"), False, one)}
    return pair | ({"tools": good["tools"]} if good.get("tools") else {})


def _calls(messages: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """(name, arguments in one spelling) of every call."""
    found = []
    for message in messages:
        for call in message.get("tool_calls") or []:
            function = call.get("function", call)
            arguments = function["arguments"]
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            found.append((function["name"], json.dumps(arguments, sort_keys=True)))
    return found
