"""Agents measured as their users would: from what they said and did, and what a reference did at the same task.

Everything here is a function of `Attempt`s, whoever made them; `python -m minirl.agent_eval` makes them with a model.

    success           share of the attempts that solved the task
    completion        share that ended in an answer, right or wrong
    first_attempt     share that solved it without one failed or repeated call
    tool_selection    of the reference's calls, the share whose tool was called
    arguments         of those, the share whose arguments are right too
    format            of the turns that call or try to, the share that can be read and fits the tools' schemas
    needless_calls    calls beyond the reference's, mean over the attempts
    needless_rate     of the attempts at tasks that need no call, the share that calls
    recovery          of the attempts in which a tool failed, the share that then solved the task
    turns, calls      of the assistant, mean
    tokens, cost      chosen by the model, mean; price of tokens read and written, mean
    takeover          share of the attempts that a person had to take over
    pass@k, pass^k    one of k attempts at a task, and all of k, by the unbiased estimates
    depth/D           success on the tasks whose reference makes D calls
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import comb
from typing import Any

from minirl.config import UserError
from minirl.data.bfcl import call_error, same_value
from minirl.data.failures import classify
from minirl.data.quality import quality_parts
from minirl.data.trajectories import find_problems, is_error
from minirl.graduate import Check

NAN = math.nan


@dataclass(frozen=True)
class Attempt:
    """One conversation about one task, from its first message on."""

    task: str  # attempts at the same task have the same name
    messages: list[dict[str, Any]]
    correct: bool
    tools: list[dict[str, Any]] = field(default_factory=list)
    reference: list[dict[str, Any]] = field(default_factory=list)  # a conversation that solved it, from its start too
    possible: list[dict[str, Any]] | None = None  # BFCL's possible_answer: accepted values of the reference's calls
    start: int = 0  # messages of the prompt: calls in them are nobody's
    written: int = 0  # tokens that the model chose
    read: int = 0  # tokens that it was given, each turn's once
    taken_over: bool = False  # a person had to step in
    constraints: tuple[bool, ...] = ()  # which of the task's conditions hold, where somebody checked

    @property
    def calls(self) -> list[dict[str, Any]]:
        return calls_of(self.messages[self.start :])

    @property
    def wanted(self) -> list[dict[str, Any]]:
        return calls_of(self.reference[self.start :])


def calls_of(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """[{"name", "arguments": {...}}] of every call, in order."""
    found = []
    for message in messages:
        for call in message.get("tool_calls") or []:
            call = call.get("function", call)
            arguments = call["arguments"]
            found.append({"name": call["name"],
                          "arguments": json.loads(arguments) if isinstance(arguments, str) else arguments})
    return found


def matched(attempt: Attempt) -> tuple[int, int]:
    """(wanted calls whose tool was called, those whose arguments are right too); each call counts for one."""
    if attempt.possible is None:
        wanted = [(call["name"], lambda made, call=call: same_value(made["arguments"], call["arguments"]))
                  for call in attempt.wanted]
    else:
        functions = [tool["function"] for tool in attempt.tools]
        answers = [next(iter(answer.items())) for answer in attempt.possible]
        wanted = [(answer[0], lambda made, answer=answer: call_error(made, answer, functions) is None)
                  for answer in answers]
    left = attempt.calls
    right, missed = 0, []
    for name, fits in wanted:
        found = next((call for call in left if call["name"] == name and fits(call)), None)
        if found is None:
            missed.append(name)
        else:
            left.remove(found)
            right += 1
    selected = right
    for name in missed:
        found = next((call for call in left if call["name"] == name), None)
        if found is not None:
            left.remove(found)
            selected += 1
    return selected, right


def measure(attempts: Sequence[Attempt], k: int = 0, price_read: float = 0.0, price_written: float = 0.0
            ) -> dict[str, float]:
    """The report: every measure above, NaN where no attempt can tell, and "capability/NAME".

    k      : of pass@k and pass^k; 0: as many attempts as the task with the fewest has
    prices : of a million tokens
    """
    if not attempts:
        raise UserError("there are no attempts to measure")
    rows = [_one(attempt) for attempt in attempts]
    tasks: dict[str, list[bool]] = {}
    for attempt in attempts:
        tasks.setdefault(attempt.task, []).append(attempt.correct)
    k = k or min(map(len, tasks.values()))
    report = {
        "success": mean(row["correct"] for row in rows),
        "completion": mean(row["completed"] for row in rows),
        "first_attempt": mean(row["correct"] and row["clean"] for row in rows),
        "tool_selection": ratio(rows, "selected", "wanted"),
        "arguments": ratio(rows, "right", "selected"),
        "format": ratio(rows, "well_formed", "calling_turns"),
        "needless_calls": mean(row["needless"] for row in rows),
        "needless_rate": mean(row["calls"] > 0 for row in rows if row["wanted"] == 0),
        "recovery": mean(row["correct"] for row in rows if row["failed_calls"]),
        "turns": mean(row["turns"] for row in rows),
        "calls": mean(row["calls"] for row in rows),
        "tokens": mean(attempt.written for attempt in attempts),
        "cost": mean((attempt.read * price_read + attempt.written * price_written) / 1e6 for attempt in attempts),
        "takeover": mean(attempt.taken_over for attempt in attempts),
        "pass@1": mean(pass_at_k(len(solved), sum(solved), 1) for solved in tasks.values()),
        f"pass@{k}": mean(pass_at_k(len(solved), sum(solved), k) for solved in tasks.values()),
        f"pass^{k}": mean(pass_all_k(len(solved), sum(solved), k) for solved in tasks.values()),
    }
    for depth in sorted({row["wanted"] for row in rows}):
        report[f"depth/{depth}"] = mean(row["correct"] for row in rows if row["wanted"] == depth)
    return report | {f"capability/{name}": value for name, (value, _) in capabilities(attempts).items()}


def _one(attempt: Attempt) -> dict[str, Any]:
    """What is counted in one attempt."""
    said = [message for message in attempt.messages[attempt.start :] if message["role"] == "assistant"]
    calling = [message for message in said if message.get("tool_calls") or "<tool_call>" in str(message.get("content"))]
    well_formed = [message for message in calling if message.get("tool_calls") and not any(
        problem.kind in ("format", "unknown tool", "arguments")
        for problem in find_problems([{"role": "user", "content": ""}, message], attempt.tools))]
    results = [message for message in attempt.messages[attempt.start :] if message["role"] == "tool"]
    failed = sum(is_error(str(message["content"])) for message in results)
    calls, wanted = attempt.calls, len(attempt.wanted if attempt.possible is None else attempt.possible)
    selected, right = matched(attempt)
    repeated = any(call == before for i, call in enumerate(calls) for before in calls[:i])
    return {"correct": attempt.correct, "completed": bool(said) and quality_parts(attempt.messages)["completion"] == 1,
            "clean": not failed and not repeated and len(well_formed) == len(calling),
            "calls": len(calls), "wanted": wanted, "selected": selected, "right": right,
            "needless": max(0, len(calls) - wanted), "calling_turns": len(calling), "well_formed": len(well_formed),
            "failed_calls": failed, "turns": len(said)}


def mean(values: Any) -> float:
    values = [float(value) for value in values]
    return sum(values) / len(values) if values else NAN


def ratio(rows: Sequence[Mapping[str, Any]], above: str, below: str) -> float:
    total = sum(row[below] for row in rows)
    return sum(row[above] for row in rows) / total if total else NAN


# ------------------------------------------------------------------ several attempts at a task


def pass_at_k(attempts: int, solved: int, k: int) -> float:
    """Chance that one of k attempts, drawn from these, is right: 1 - C(n - c, k) / C(n, k). arXiv:2107.03374 eq. 1."""
    _check_k(attempts, k)
    return 1 - comb(attempts - solved, k) / comb(attempts, k)


def pass_all_k(attempts: int, solved: int, k: int) -> float:
    """pass^k: chance that all of k attempts, drawn from these, are right: C(c, k) / C(n, k). arXiv:2406.12045 sec. 3.

    A user who comes k times and is helped each time; pass@k is about one who tries k times and takes the best.
    """
    _check_k(attempts, k)
    return comb(solved, k) / comb(attempts, k)


def best_of_n(scores: Sequence[float], correct: Sequence[bool], n: int) -> float:
    """Chance that the best scored of n attempts is right, over all ways to draw n of these attempts at one task.

    scores : of a reward model, a verifier or a vote; of equal scores each is taken equally often
    """
    _check_k(len(scores), n)
    total, above = 0.0, 0  # `above`: attempts with a higher score than those of the level
    for level in sorted(set(scores), reverse=True):
        tied = [right for score, right in zip(scores, correct, strict=True) if score == level]
        below = len(scores) - above
        # The best is of this level where the n are drawn from here and below, and not from below alone.
        chance = (comb(below, n) - comb(below - len(tied), n)) / comb(len(scores), n)
        total += chance * sum(tied) / len(tied)
        above += len(tied)
    return total


def _check_k(attempts: int, k: int) -> None:
    if not 1 <= k <= attempts:
        raise UserError(f"k is {k}: with {attempts} attempts at a task it lies between 1 and {attempts}")


# ------------------------------------------------------------------ what an agent is good at


def capabilities(attempts: Sequence[Attempt]) -> dict[str, tuple[float, int]]:
    """Six capabilities, each as (share, number of attempts that could show it); NaN where there is none.

    reasoning       the right result, of those whose calls were all right and who then had to say something
    planning        the tools in the reference's order, of the tasks with two calls or more
    tool use        all calls right and none over, of the tasks with calls
    memory          all calls right, of the tasks in which a call needs what an earlier result said
    self-correction the right result, of those in which a tool failed
    constraints     all conditions met at once: those that somebody checked, or three arguments and more in one call
    """
    found: dict[str, list[bool]] = {name: [] for name in (
        "reasoning", "planning", "tool use", "memory", "self-correction", "constraints")}
    for attempt in attempts:
        row, wanted, calls = _one(attempt), attempt.wanted, attempt.calls
        all_right = row["right"] == row["wanted"] and not row["needless"]
        speaks = bool(attempt.reference) and not attempt.reference[-1].get("tool_calls")
        if row["right"] == row["wanted"] and speaks:
            found["reasoning"].append(attempt.correct)
        if len(wanted) >= 2:
            found["planning"].append([call["name"] for call in calls] == [call["name"] for call in wanted])
        if row["wanted"]:
            found["tool use"].append(all_right)
        if _needs_memory(attempt.reference[attempt.start :]):
            found["memory"].append(row["right"] == row["wanted"])
        if row["failed_calls"]:
            found["self-correction"].append(attempt.correct)
        if attempt.constraints or any(len(call["arguments"]) >= 3 for call in wanted):
            found["constraints"].append(all(attempt.constraints) if attempt.constraints else all_right)
    return {name: (mean(values), len(values)) for name, values in found.items()}


def _needs_memory(messages: Sequence[dict[str, Any]]) -> bool:
    """Does an argument hold a word or number that an earlier tool result has, and no user said?"""
    heard, told = "", " ".join(str(message["content"]) for message in messages if message["role"] == "user")
    for message in messages:
        for call in calls_of([message]):
            for value in call["arguments"].values():
                if len(str(value)) > 1 and str(value) in heard and str(value) not in told:
                    return True
        if message["role"] == "tool":
            heard += f" {message['content']}"
    return False


# ------------------------------------------------------------------ from SFT to RL

FORM = ("format", "unknown tool", "arguments", "unfinished")  # failures that more demonstrations mend

SIGNALS = [
    Check("calls are well formed", "format", operator.ge, 0.95, "calling turns that can be read and fit the schemas",
          "RL would spend its samples on syntax: more SFT rows with calls, in the syntax that is read"),
    Check("SFT has stopped helping", "plateau", operator.le, 0.02, "range of success over the last three checkpoints",
          "still moving: go on with SFT, it is cheaper"),
    Check("it can, but not always", "headroom", operator.ge, 0.1, "pass@k - pass@1: what RL can make likelier",
          "no headroom: where success is low, more and easier demonstrations; where it is high, harder tasks"),
    Check("failures are of judgement", "judgement", operator.ge, 0.5,
          "failures in what to do, not in form (format, unknown tool, arguments, unfinished)",
          "mistakes of form: demonstrations mend them better than rewards do"),
]


def signals(attempts: Sequence[Attempt], successes: Sequence[float], k: int = 0) -> dict[str, float | str]:
    """What the four SIGNALS compare, for `graduate.checklist(measured, SIGNALS)`. All pass: let RL take over from SFT.

    attempts  : of the newest checkpoint, several at each task
    successes : "success" of the checkpoints of the SFT run, oldest first; fewer than three say nothing of a plateau
    """
    report = measure(attempts, k)
    k = k or max(int(name[5:]) for name in report if name.startswith("pass@"))
    kinds = [classify(attempt.messages, attempt.tools, attempt.correct, attempt.reference or None)
             for attempt in attempts if not attempt.correct]
    return {"format": report["format"] if report["format"] == report["format"] else "no call was tried",
            "plateau": max(successes[-3:]) - min(successes[-3:]) if len(successes) >= 3 else "fewer than 3 checkpoints",
            "headroom": report[f"pass@{k}"] - report["pass@1"] if k > 1 else "one attempt at a task",
            "judgement": mean(kind not in FORM for kind in kinds) if kinds else "no failures"}


def side_by_side(reports: Mapping[str, Mapping[str, float]]) -> str:
    """Several checkpoints' reports as one table, a column each; "-" where a measure does not exist."""
    names = [*dict.fromkeys(name for report in reports.values() for name in report)]
    width = max([10, *map(len, reports)])
    lines = [" " * 28 + "".join(f"{head:>{width + 2}}" for head in reports)]
    for name in names:
        values = [report.get(name, NAN) for report in reports.values()]
        lines.append(f"{name:28}" + "".join(
            f"{'-' if value != value else f'{value:.4g}':>{width + 2}}" for value in values))
    return "\n".join(lines)
