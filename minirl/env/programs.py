"""Code with hidden tests: "plus 3 times 2" is answered by a function, which is run in the sandbox.

    plus 3 times 2
    <test>def f(x): return x+3*2</test>\n           f(4) is 10, not 14      one test may be looked at,
    <test>def f(x): return (x+3)*2</test>\n         f(4) is 14, right
    def f(x): return (x+3)*2                                                the others are hidden

The demonstrations are a novice's: half never test and forget the brackets, some mistype a word and read the error.
"""

from functools import lru_cache, reduce
from random import Random

from minirl.config import UserError
from minirl.env.agent import ToolEnv
from minirl.env.base import Example, counter_random
from minirl.env.sandbox import Result, Sandbox, pass_rate
from minirl.env.tools import Tool

SIGNS = {"plus": "+", "minus": "-", "times": "*"}
MEANS = {"plus": int.__add__, "minus": int.__sub__, "times": int.__mul__}
HIDDEN = 6  # tests of an answer
CARELESS = 0.5  # of the demonstrations are not tested
SLIPS = 0.1  # of the others begin with a mistyped word


def expression(steps: list[tuple[str, int]], brackets: bool) -> str:
    """The steps as Python: with brackets where a sum is multiplied, or as a careless reader would write them."""
    text = "x"
    for i, (word, number) in enumerate(steps):
        if brackets and word == "times" and i and steps[i - 1][0] != "times":
            text = f"({text})"
        text += f"{SIGNS[word]}{number}"
    return text


def make(rng: Random, count: int, inputs: list[int]) -> Example:
    """Steps in words, the right program, a novice's way to it, and (input, value) pairs as hidden tests."""
    steps = [("times" if rng.random() < (0.7 if i % 2 else 0.2) else rng.choice(("plus", "minus")), rng.randint(2, 9))
             for i in range(count)]
    naive, right = (f"def f(x): return {expression(steps, brackets)}" for brackets in (False, True))
    actions = [naive]
    if rng.random() >= CARELESS:
        tried = [naive.replace("return", "retrun")] * (rng.random() < SLIPS) + [naive] + [right] * (naive != right)
        actions = [*(f"<test>{program}</test>\n" for program in tried), right]
    prompt = " ".join(f"{word} {number}" for word, number in steps) + "\n"
    tests = [(x, reduce(lambda value, step: MEANS[step[0]](value, step[1]), steps, x)) for x in inputs]
    return Example(prompt, right, tuple(actions), tests)


def code(difficulty: int = 2, seed: int = 0) -> ToolEnv:
    """Functions of `difficulty` steps; the reward is the share of the hidden tests that the answer passes."""
    if difficulty < 1:
        raise UserError(f"difficulty {difficulty}: code needs 1 step or more")
    sandbox = Sandbox(seconds=1.0)
    # The same inputs for all problems: what many rows write, in a group or in another step, is run once.
    inputs = counter_random(seed, "inputs", 0).sample([*range(-20, -1), *range(2, 21)], HIDDEN + 1)

    @lru_cache(maxsize=10_000)
    def run(program: str, inputs: tuple[int, ...]) -> Result:
        return sandbox.call(program, "f", [(x,) for x in inputs])

    def test(tests: list[tuple[int, int]], program: str) -> str:
        """Run a program that defines f on one input, and compare."""
        x, expected = tests[0]
        result = run(program, (x,))
        if result.errors[0]:
            raise ValueError(result.output.strip() or result.errors[0])
        right = pass_rate(result, [expected]) == 1
        return f"f({x}) is {result.values[0]}, " + ("right" if right else f"not {expected}")

    def judge(example: Example, tests: list[tuple[int, int]], answer: str) -> float:
        hidden, expected = zip(*tests[1:], strict=True)
        return pass_rate(run(answer, hidden), list(expected))

    turns = 4
    return ToolEnv(
        name="code",
        tools=(Tool(test),),
        make=lambda rng: make(rng, difficulty, inputs),
        judge=judge,
        has_answer=lambda answer: answer.startswith("def f(x)"),
        max_turns=turns,
        max_new_tokens=turns * (4 * difficulty + 34),
        max_observation=48,
        seed=seed,
    )
