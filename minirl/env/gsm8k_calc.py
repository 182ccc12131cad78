"""GSM8K with a calculator: the annotations of its answers are calls, and the tool writes the results.

    prompt         "Question: Ann has 12 pens. She gets 7 more. How many ...?\\nAnswer:"
    action 1       " 12+7=<calc>12+7</calc>\\n"          of "12+7=<<12+7=19>>19\\n#### 19"
    observation    "19\\n"
    action 2       "19\\n#### 19"

The reward has parts, each logged by itself in `Step.info`: 1 for the right number, and a little for an answer that can
be read and for calls that work, so that an attempt which fails can still fail less. With 1 for being right, no sum of
the small ones passes for a solution.
"""

import re
from dataclasses import dataclass

from minirl.config import UserError
from minirl.env.base import Example, Step
from minirl.env.calculator import CalculatorError, calculate
from minirl.env.gsm8k import GSM8K
from minirl.rewards import extract_answer, gsm8k_reward

ANNOTATION = re.compile(r"<<([^<>=\n]*)=([^<>=\n]*)>>")  # GSM8K's <<48/2=24>>
OPEN, CLOSE = "<calc>", "</calc>"
WEIGHTS = {"right": 1.0, "format": 0.1, "tools": 0.1}
MAX_TURNS = 12


class GSM8KCalc(GSM8K):
    """The rows of GSM8K as episodes with a calculator; options as those of `GSM8K`."""

    name = "gsm8k_calc"
    stop = (CLOSE + "\n", "\nQuestion:")

    def __init__(self, data: str, eval_data: str = "", seed: int = 0):
        super().__init__(data, eval_data, seed, keep_annotations=True)
        self.train_rows, self.eval_rows = ([row for row in map(with_calls, rows) if row] for rows in
                                           (self.train_rows, self.eval_rows))
        if not self.train_rows or not self.eval_rows:
            raise UserError(f"{data} leaves no row whose calculations the calculator can follow")

    def reset(self, example: Example) -> "Episode":
        return Episode(example)


def with_calls(row: Example) -> Example | None:
    """The row with its demonstration cut into actions; None where an annotation is no arithmetic."""
    pieces = ANNOTATION.split(row.solution[0])  # text, expression, result, text, ...
    try:
        for expression in pieces[1::3]:
            calculate(expression)
    except CalculatorError:
        return None
    actions = [f"{text}{OPEN}{expression}{CLOSE}\n" for text, expression in zip(pieces[::3], pieces[1::3])]
    return Example(row.prompt, row.answer, (*actions, pieces[-1]))


@dataclass
class Episode:
    """One row: calls are answered, and the first action without one is the last."""

    example: Example
    turns: int = 0
    failed: int = 0

    @property
    def prompt(self) -> str:
        return self.example.prompt

    def step(self, action: str) -> Step:
        """Compute the first call of an action, or judge the answer, part by part."""
        self.turns += 1
        info = {"tool_call": None}
        if OPEN in action or CLOSE in action:
            observation, worked = answer_call(action)
            self.failed += not worked
            info["tool_call"] = worked
            if self.turns < MAX_TURNS:
                return Step(observation, 0.0, False, info)
        right = gsm8k_reward(action, self.example.answer) == 1.0
        marked = "####" in action and extract_answer(action) is not None
        parts = {"right": float(right), "format": float(marked), "tools": float(self.turns > 1 and not self.failed)}
        reward = sum(WEIGHTS[name] * value for name, value in parts.items())
        return Step("", reward, True, info | {"format": marked, "rewards": parts, "cut": info["tool_call"] is not None})

def answer_call(action: str) -> tuple[str, bool]:
    """(what the tool says, whether the call worked). The call is what stands between the last brackets."""
    before, opened, rest = action.rpartition(OPEN)
    expression, closed, after = rest.partition(CLOSE)
    if not (opened and closed) or after.strip() or CLOSE in before:
        return "error: write <calc>12+7</calc>\n", False
    try:
        return calculate(expression) + "\n", True
    except CalculatorError as error:
        return f"error: {error}\n", False
