"""The two data sets that are called AgentInstruct: plain turns, in which calls are words.

THUDM/AgentInstruct (arXiv:2310.12823): what an agent does in a shell, a data base, a web shop ... and each answer says
with `loss` whether it is to be learnt:

    {"id": "os_0", "conversations": [{"from": "human" | "gpt", "loss": true | false | null, "value": "..."}]}

microsoft/orca-agentinstruct-1M-v1: messages inside a string:

    {"messages": "[{\"role\": \"user\", \"content\": \"...\"}, ...]"}

Each environment of the first one explains its own way of acting in its first turn ("Act: bash", "Action: Operation"):
these rows declare no tools and stay as they are written.
"""

from __future__ import annotations

import json
from typing import Any

from minirl.data.jsonl import unique_keys
from minirl.data.trajectories import RowError

ROLES = {"human": "user", "gpt": "assistant", "system": "system"}


def convert_agentinstruct(row: dict[str, Any]) -> list[dict[str, Any]]:
    """One row of either format as rows to learn from, most often one.

    Where every answer is learnt: {"messages"}. Where some are not: {"prompt", "completion"}, for the answers in a
    prompt are read and not learnt; a later answer that is not learnt begins a second row, whose prompt has all before.
    """
    if "conversations" in row:
        messages, learnt = _read_turns(row["conversations"])
    elif "messages" in row:
        messages = _read_messages(row["messages"])
        learnt = [message["role"] == "assistant" for message in messages]
    else:
        raise RowError("no conversation", f"the row has {', '.join(map(repr, [*row][:5]))}: neither conversations nor "
                                         "messages")
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not any(learnt):
        raise RowError("nothing to learn", f"none of the {len(answers)} answers is to be learnt")
    more = {"id": row["id"]} if isinstance(row.get("id"), str) else {}
    if all(learnt[i] for i in answers):
        return [{"messages": messages} | more]
    rows: list[dict[str, Any]] = []
    start = None  # where the run of learnt answers begins that we are in
    for i, after in zip(answers, [*answers[1:], None], strict=True):
        if learnt[i] and start is None:
            start = i
        if start is not None and (after is None or not learnt[after]):
            rows.append({"prompt": messages[:start], "completion": messages[start : i + 1]} | more)
            start = None
    return rows


def _read_turns(turns: Any) -> tuple[list[dict[str, Any]], list[bool]]:
    """Messages, and which of them are to be learnt."""
    if not isinstance(turns, list) or not turns:
        raise RowError("no conversation", f"conversations is {turns!r:.60}, not a list of turns")
    messages, learnt = [], []
    for i, turn in enumerate(turns):
        role, text, loss = (map(turn.get, ("from", "value", "loss")) if isinstance(turn, dict) else (None,) * 3)
        if not isinstance(role, str) or role not in ROLES:
            raise RowError("unknown role", f"turn {i} is from {role!r:.40}: {', '.join(ROLES)}")
        if not isinstance(text, str):
            raise RowError("no text", f"turn {i} ({role}) has the value {text!r:.60}, not a text")
        if loss is not None and not isinstance(loss, bool):
            raise RowError("bad loss", f"turn {i} has the loss {loss!r:.40}: true, false or null")
        messages.append({"role": ROLES[role], "content": text})
        learnt.append(loss if role == "gpt" else False)
    if all(loss is None for loss, message in zip(learnt, messages, strict=True) if message["role"] == "assistant"):
        return messages, [message["role"] == "assistant" for message in messages]  # nobody says: all are learnt
    return messages, [loss is True for loss in learnt]


def _read_messages(messages: Any) -> list[dict[str, Any]]:
    if isinstance(messages, str):
        try:
            messages = json.loads(messages, object_pairs_hook=unique_keys)
        except (ValueError, RecursionError):
            raise RowError("broken JSON", f"messages is {messages!r:.80}, which is no JSON") from None
    if not isinstance(messages, list) or not messages:
        raise RowError("no conversation", f"messages is {messages!r:.60}, not a list")
    for i, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("system", "user", "assistant"):
            raise RowError("unknown role", f"message {i} has the role {role!r:.40}: system, user, assistant")
        if not isinstance(message.get("content"), str):
            raise RowError("no text", f"message {i} ({role}): content is {message.get('content')!r:.60}, not a text")
    return [{"role": message["role"], "content": message["content"]} for message in messages]
