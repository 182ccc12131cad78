"""Countdown: put signs between numbers, so that they make a target. "2 5 9 16:" is solved by 2+5+9.

    <try>2*5-9</try>\\n        1 no
    <try>2*5*9</try>\\n        90 no
    <try>2+5+9</try>\\n        16 yes
    2+5+9

There are more ways than tries. The demonstrations are a novice's, who goes through the signs in turn, from
anywhere, and most of the time gives up halfway and answers what is wrong. That it pays to go on, and where to begin for
a large target, nobody says.
"""

import re
from itertools import product
from random import Random

from minirl.config import UserError
from minirl.env.agent import ToolEnv
from minirl.env.base import Example
from minirl.env.calculator import calculate
from minirl.env.tools import Tool

TRIES = 8  # calls before the answer
PATIENCE = 4  # tries after which a novice may give up
GIVES_UP = 0.6  # of those who have not found it by then


def value(expression: str, numbers: list[str]) -> str:
    """What an expression comes to; ValueError if it does not use the numbers, each once, with + - * / between them."""
    # Points and exponents would make new numbers of their digits, and 5+8**-81 is not 5, but rounded to it.
    if not re.fullmatch(r"[0-9+\-*/() ]*", expression) or re.search(r"\*\*|//", expression):
        raise ValueError("use + - * / ( ) alone")
    if sorted(re.findall(r"[0-9]+", expression)) != sorted(numbers):
        raise ValueError("use each number once")
    return calculate(expression)


def attempt(problem: tuple[list[str], str], expression: str) -> str:
    """Tell what an expression of the numbers comes to, and whether that is the target."""
    numbers, target = problem
    result = value(expression, numbers)
    return f"{result:>3} {'yes' if result == target else 'no'}"


def make(rng: Random, count: int) -> Example:
    """Numbers and a target that some choice of signs between them reaches."""
    numbers = [str(rng.randint(1, 9)) for _ in range(count)]
    ways = [numbers[0] + "".join(sign + number for sign, number in zip(signs, numbers[1:], strict=True))
            for signs in product("+-*", repeat=count - 1)]
    values = [calculate(way) for way in ways]
    target = rng.choice([v for v in values if 0 <= int(v) <= 99])  # the sum of all is such a one
    start = rng.randrange(len(ways))
    limit = PATIENCE if rng.random() < GIVES_UP else TRIES
    tries = [(start + i) % len(ways) for i in range(min(limit, len(ways)))]
    found = next((i for i, way in enumerate(tries) if values[way] == target), len(tries) - 1)
    said = [ways[way] for way in tries[: found + 1]]
    actions = (*(f"<try>{way}</try>\n" for way in said), said[-1])
    return Example(" ".join(numbers) + f" {int(target):02}:", target, actions, (numbers, target))


def judge(example: Example, problem: tuple[list[str], str], answer: str) -> float:
    try:
        return float(value(answer, problem[0]) == example.answer)
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
        max_new_tokens=(TRIES + 1) * (2 * difficulty + 14),
        max_observation=24,
        seed=seed,
    )
