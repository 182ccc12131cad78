"""Code with hidden tests: "add 3 mul 2" is answered by the rest of a function, which is run in the sandbox.

    add 3 mul 2                                 the program begins with  def f(x): return
    <test>x+3*2</test>\n       8 not   10       one test may be looked at,
    <test>(x+3)*2</test>\n    10 right
    (x+3)*2                                     the others are hidden

The demonstrations are a novice's, who never sees at once that brackets are needed. Additions look easy and are mostly
not tested; some programs have a mistyped name, and the error is read.
"""

from functools import lru_cache, reduce
from random import Random
from threading import Lock

from minirl.config import UserError
from minirl.env.agent import ToolEnv
from minirl.env.base import Example, counter_random
from minirl.env.sandbox import Result, Sandbox, pass_rate
from minirl.env.tools import Tool

SIGNS = {"add": "+", "sub": "-", "mul": "*"}
MEANS = {"add": int.__add__, "sub": int.__sub__, "mul": int.__mul__}
HEAD = "def f(x): return "
HIDDEN = 6  # tests of an answer
WORKERS = 2  # programs run at a time
CARELESS = {"add": 0.8, "sub": 0.2, "mul": 0.2}  # of the demonstrations are not tested, by the first step
SLIPS = 0.1  # of the others begin with a mistyped name


def expression(steps: list[tuple[str, int]], brackets: bool) -> str:
    """The steps as Python: with brackets where a sum is multiplied, or as a careless reader would write them."""
    text = "x"
    for i, (word, number) in enumerate(steps):
        if brackets and word == "mul" and i and steps[i - 1][0] != "mul":
            text = f"({text})"
        text += f"{SIGNS[word]}{number}"
    return text


def make(rng: Random, count: int, inputs: list[int]) -> Example:
    """Steps in words, the right program, a novice's way to it, and (input, value) pairs as hidden tests."""
    steps = [("mul" if rng.random() < (0.9 if i % 2 else 0.1) else rng.choice(("add", "add", "add", "sub")),
              rng.randint(2, 9)) for i in range(count)]
    naive, right = (expression(steps, brackets) for brackets in (False, True))
    actions = [naive]
    if rng.random() >= CARELESS[steps[0][0]]:
        tried = [naive.replace("x", "y")] * (rng.random() < SLIPS) + [naive] + [right] * (naive != right)
        actions = [*(f"<test>{program}</test>\n" for program in tried), right]
    prompt = " ".join(f"{word} {number}" for word, number in steps) + "\n"
    tests = [(x, reduce(lambda value, step: MEANS[step[0]](value, step[1]), steps, x)) for x in inputs]
    return Example(prompt, right, tuple(actions), tests)


def code(difficulty: int = 2, seed: int = 0) -> ToolEnv:
    """Functions of `difficulty` steps; the reward is the share of the hidden tests that the answer passes."""
    if difficulty < 1:
        raise UserError(f"difficulty {difficulty}: code needs 1 step or more")
    sandbox = Sandbox(seconds=1.0, workers=WORKERS)
    # The same inputs for all problems: what many rows write, in a group or in another step, is run once.
    inputs = counter_random(seed, "inputs", 0).sample([*range(-20, -1), *range(2, 21)], HIDDEN + 1)

    @lru_cache(maxsize=10_000)
    def known(program: str, inputs: tuple[int, ...]) -> Result:
        return sandbox.call(HEAD + program, "f", [(x,) for x in inputs])

    @lru_cache(maxsize=10_000)
    def turn(program: str) -> Lock:
        return Lock()

    def run(program: str, inputs: tuple[int, ...]) -> Result:
        with turn(program):  # many rows ask at once: one of them runs it, the others then know
            return known(program, inputs)

    def test(tests: list[tuple[int, int]], program: str) -> str:
        """Run the function on one input, and compare. Lines of one length are easier to look past."""
        x, expected = tests[0]
        result = run(program, (x,))
        if result.errors[0]:
            raise ValueError(result.output.strip() or result.errors[0])
        right = pass_rate(result, [expected]) == 1
        return f"{result.values[0]!s:>4} " + ("right   " if right else f"not {expected:>4}")

    def judge(example: Example, tests: list[tuple[int, int]], answer: str) -> float:
        hidden, expected = zip(*tests[1:], strict=True)
        return pass_rate(run(answer, hidden), list(expected))

    turns = 4
    return ToolEnv(
        name="code",
        tools=(Tool(test),),
        make=lambda rng: make(rng, difficulty, inputs),
        judge=judge,
        has_answer=lambda answer: "x" in answer,
        max_turns=turns,
        max_new_tokens=turns * (4 * difficulty + 18),
        max_observation=24,
        max_seconds=100.0,  # a row waits for its turn too; the sandbox has a limit of its own
        threads=64,
        seed=seed,
    )
