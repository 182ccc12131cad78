"""An agent with tools: several tools, several calls a turn, limits, and every mistake an observation.

    prompt             kim's boss's twin?
    action             <find>kim's boss</find>\n            a turn ends behind a call with a new line, or at EOS
    observation        kim's boss is lee.\n                 one line, or more, for each call, in their order
    action             <find>lee's twin</find>\n
    observation        lee's twin is ann.\n
    action             ann                                  no call: the answer, and the end

A new environment is a `ToolEnv`: what a problem is, which tools there are, and what is paid; docs/agents.md has one in
30 lines. The judge sees the state that the tools have left behind and the answer, never what the policy claims to have
seen: a tool result that it writes itself is worth nothing.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from time import perf_counter
from typing import Any, Literal

from minirl.env.base import Example, Step, check_split, sample_problems
from minirl.env.tools import Tool, parse_calls


@dataclass
class ToolEnv:
    """A task with tools, declared.

    make   : one problem from a generator; `Example.state` is what its episodes start from (each gets a copy)
    judge  : (example, state after the last action, answer) -> reward, 1 for full success
    syntax : how calls are written, see `parse_calls`
    """

    name: str
    tools: tuple[Tool, ...]
    make: Callable[[Random], Example]
    judge: Callable[[Example, Any, str], float]
    max_new_tokens: int  # that a row may sample, all turns together
    max_turns: int = 4  # the action of the last one is the end, call or not
    max_calls: int = 4  # in one turn; more are refused, all of them
    max_observation: int = 200  # characters of one result; the rest is cut
    max_seconds: float = 10.0  # that the tools of one episode may take together; no call is made after that
    threads: int = 0  # rows whose tools run at a time while the others decode, for tools that take milliseconds
    has_answer: Callable[[str], bool] = bool  # for evaluation: can an answer be read from the last action?
    key: Callable[[Example], str] = lambda example: example.prompt  # problems with the same key are held out together
    syntax: Literal["tags", "json"] = "tags"
    seed: int = 0
    stop: tuple[str, ...] = field(init=False)

    def __post_init__(self):
        names = [tool.name for tool in self.tools] if self.syntax == "tags" else ["tool_call"]
        self.stop = tuple(f"</{name}>\n" for name in names)

    def sample(self, count: int, start: int = 0, split: str = "train") -> list[Example]:
        return sample_problems(self.make, self.seed, count, start, split, self.key)

    def size(self, split: str) -> None:
        check_split(split)
        return None

    def reset(self, example: Example) -> "ToolEpisode":
        return ToolEpisode(self, example, copy.deepcopy(example.state))


@dataclass
class ToolEpisode:
    """One row: calls are carried out, one after the other, and the first action without one is the answer."""

    env: ToolEnv
    example: Example
    state: Any
    turns: int = 0
    seconds: float = 0.0  # that tools have taken so far

    @property
    def prompt(self) -> str:
        return self.example.prompt

    def step(self, action: str) -> Step:
        """Carry out the calls of an action; the last one, or one without calls, is judged."""
        self.turns += 1
        results, answer = self.act(action)
        info = {"tool_call": all(carried_out for _, carried_out in results) if results else None}
        if results and self.turns < self.env.max_turns:
            return Step("".join(text + "\n" for text, _ in results), 0.0, False, info)
        info |= {"format": self.env.has_answer(answer), "cut": bool(results)}  # a call, but no turn left for its result
        return Step("", self.env.judge(self.example, self.state, answer), True, info)

    def act(self, action: str) -> tuple[list[tuple[str, bool]], str]:
        """Carry out the calls of an action: [(result, whether it is one and no error)], and the text beside them."""
        tools = {tool.name: tool for tool in self.env.tools}
        try:
            calls, answer = parse_calls(action, tuple(tools), self.env.syntax)
            if len(calls) > self.env.max_calls:
                raise ValueError(f"over {self.env.max_calls} calls")
        except ValueError as error:
            return [(self.cut(f"error: {error}"), False)], ""
        return [self.call(tools.get(name), name, arguments) for name, arguments in calls], answer.strip()

    def call(self, tool: Tool | None, name: str, arguments: Any) -> tuple[str, bool]:
        """Run one call: the text that the model reads, and whether it could be carried out."""
        began, carried_out = perf_counter(), False
        try:
            if tool is None:
                raise ValueError(f"no tool {name}; there are {' '.join(tool.name for tool in self.env.tools)}")
            if self.seconds > self.env.max_seconds:
                raise ValueError("out of time")
            text, carried_out = tool(self.state, arguments), True
        except ValueError as error:
            text = f"error: {error}"
        except TimeoutError as error:  # its thread may go on, but on a state that nobody judges
            text, self.state = f"error: {error}", self.detached()
        except (Exception, SystemExit) as error:  # a tool that breaks is the policy's problem too, not the run's end
            text = f"error: {type(error).__name__}: {error}"
        self.seconds += perf_counter() - began
        return self.cut(text), carried_out

    def detached(self) -> Any:
        """A copy of the state; of the first one, if a thread keeps changing this one meanwhile."""
        try:
            return copy.deepcopy(self.state)
        except RuntimeError:
            return copy.deepcopy(self.example.state)

    def cut(self, text: str) -> str:
        limit = self.env.max_observation
        return text if len(text) <= limit else text[: limit - 3] + "..."
