"""Countdown: make a target of numbers, each used once. "2 5 9 16:" is solved by 2+5+9.

The tool tells what an expression comes to, so that a wrong idea costs a turn and not the answer. The demonstrations
are a novice's, who tries at random; half of them end in a right expression, the others when patience does.
"""

import re
from random import Random

from minirl.config import UserError
from minirl.env.agent import ToolEnv
from minirl.env.base import Example
from minirl.env.calculator import calculate
from minirl.env.tools import Tool

TRIES = 5  # calls before the answer
KNOWN = 0.5  # of the demonstrations end in a right expression


def value(expression: str, numbers: list[str]) -> str:
    """What an expression comes to; ValueError if it does not use each of the numbers once."""
    if sorted(re.findall(r"[0-9]+", expression)) != sorted(numbers):
        raise ValueError("use each number once")
    return calculate(expression)


def attempt(numbers: list[str], expression: str) -> str:
    """Tell what an expression of the numbers comes to."""
    return value(expression, numbers)


def make(rng: Random, count: int) -> Example:
    numbers = [str(rng.randint(1, 9)) for _ in range(count)]
    target = -1
    while not 0 <= target <= 99:
        right = guess(rng, numbers)
        target = int(calculate(right))
    tries = [guess(rng, numbers) for _ in range(rng.randint(1, TRIES - 1))]
    if rng.random() < KNOWN:
        tries[-1] = right
    values = [calculate(expression) for expression in tries]
    if str(target) in values:
        del tries[values.index(str(target)) + 1 :]
    actions = [f"<try>{expression}</try>\n" for expression in tries]
    return Example(" ".join(numbers) + f" {target:02}:", str(target), (*actions, tries[-1]), numbers)


def guess(rng: Random, numbers: list[str]) -> str:
    first, *rest = rng.sample(numbers, len(numbers))
    return first + "".join(rng.choice("+-*") + number for number in rest)


def judge(example: Example, numbers: list[str], answer: str) -> float:
    try:
        return float(value(answer, numbers) == example.answer)
    except ValueError:
        return 0.0


def countdown(difficulty: int = 2, seed: int = 0) -> ToolEnv:
    """`difficulty` + 1 numbers from 1 to 9; reward 1 for an expression that uses each once and hits the target."""
    if not 1 <= difficulty <= 5:
        raise UserError(f"difficulty {difficulty}: countdown has 2 to 6 numbers, 1 more than the difficulty")
    return ToolEnv(
        name="countdown",
        tools=(Tool(attempt, "try"),),
        make=lambda rng: make(rng, difficulty + 1),
        judge=judge,
        has_answer=lambda answer: bool(re.fullmatch(r"[0-9+\-*/() ]+", answer)),
        max_turns=TRIES + 1,
        max_new_tokens=(TRIES + 1) * (2 * difficulty + 16),
        max_observation=24,
        seed=seed,
    )
