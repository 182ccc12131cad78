"""Rows from a stronger model: a teacher plays tasks with their tools, and only what passes is kept.

A teacher is any callable that says the next assistant message:

    def teacher(messages, tools) -> {"role": "assistant", "content": ..., "tool_calls": [...]}

`ModelTeacher` is one made of a checkpoint of minirl; a client of some service is another, five lines long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from minirl.chat import ToolCallError, action_text, parse_tool_calls, render, turn_ends
from minirl.config import UserError
from minirl.data.quality import KEEP, quality_parts, quality_score
from minirl.data.trajectories import RowError, check_trajectory
from minirl.generate import generate
from minirl.model import Transformer
from minirl.tokenizer import Tokenizer

Message = dict[str, Any]
Teacher = Callable[[list[Message], list[dict[str, Any]]], Message]


def synthesise(tasks: Iterable[dict[str, Any]], teacher: Teacher, tools: Mapping[str, Callable[..., str]],
               judge: Callable[[list[Message]], float] | None = None, max_turns: int = 8,
               keep: float = KEEP) -> tuple[list[dict[str, Any]], list[RowError]]:
    """Let the teacher solve every task. Returns the rows that are kept, and a refusal for each of the others.

    tasks : {"prompt": [messages], "tools": [schemas]}, as `minirl.data.convert --prompts` writes them
    tools : what carries out a call, by its name; whatever it raises becomes an observation "Error: ..."
    judge : satisfaction with a finished conversation, 0 to 1
    """
    rows, refused = [], []
    for number, task in enumerate(tasks):
        try:
            messages = play(task, teacher, tools, max_turns)
            check_trajectory(messages, task.get("tools"))
            score = quality_score(quality_parts(messages, judge(messages) if judge else None))
            if score < keep:
                raise RowError("quality", f"quality {score:.2f} is below {keep}")
            rows.append({"messages": messages, "tools": task.get("tools") or [], "quality": round(score, 4)})
        except UserError as error:
            refused.append(RowError(getattr(error, "kind", "format"), f"task {number}: {error}"))
    return rows, refused


def play(task: dict[str, Any], teacher: Teacher, tools: Mapping[str, Callable[..., str]],
         max_turns: int = 8) -> list[Message]:
    """One conversation: the teacher's turns, and what the tools say, until it calls nothing or the turns run out."""
    messages = [*task["prompt"]]
    for _ in range(max_turns):
        said = teacher([*messages], task.get("tools") or [])
        messages.append(said)
        if not said.get("tool_calls"):
            break
        for call in said["tool_calls"]:
            messages.append({"role": "tool", "content": _carry_out(call.get("function", call), tools)})
    return messages


def _carry_out(function: dict[str, Any], tools: Mapping[str, Callable[..., str]]) -> str:
    if function["name"] not in tools:
        return f"Error: there is no tool {function['name']!r}."
    try:
        return str(tools[function["name"]](**function["arguments"]))
    except Exception as error:  # a tool's failure is something to read, for the teacher and later for the model
        return f"Error: {error}"


class ModelTeacher:
    """A checkpoint of minirl as a teacher, greedy or sampled."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer, template: str, max_new_tokens: int = 256,
                 temperature: float = 0.0, seed: int = 0):
        self.model, self.tokenizer, self.template = model, tokenizer, template
        self.options = dict(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
        self.asked = 0

    def __call__(self, messages: list[Message], tools: list[dict[str, Any]]) -> Message:
        """`RowError` where the answer holds a call that cannot be read: a teacher's mistake is nobody's lesson."""
        prompt, _ = render(messages, self.tokenizer, tools or None, self.template, add_generation_prompt=True)
        rollout = generate(self.model, [prompt], self.tokenizer, first_id=self.asked, **self.options)
        self.asked += 1
        said = rollout.tokens[0, len(prompt) : int(rollout.lengths[0])].tolist()
        while said and said[-1] in turn_ends(self.tokenizer, self.template):
            said.pop()
        text = action_text(said, self.tokenizer)
        try:
            calls = parse_tool_calls(text, self.template) if tools else []
        except ToolCallError as error:
            raise RowError("format", str(error)) from None
        if not calls:
            return {"role": "assistant", "content": text}
        return {"role": "assistant", "content": text.partition("<tool_call>")[0].strip() or None,
                "tool_calls": [{"type": "function", "function": call} for call in calls]}
