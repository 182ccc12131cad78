"""A calculator for the policy, and the task in which it learns to use one.

`calculate` reads arithmetic with `ast` and works in exact fractions; model output is never executed. Time and
memory are bounded by what is accepted (a short text, small numbers), so no clock is needed.

The task takes two turns. After "12*34-56=" the policy writes "<calc>12*34-56</calc>", "352   \\n" is forced
onto its tape, and it answers "352". Nobody tells it to: the demonstrations are those of a novice who calls
the tool now and then (TOOL_SHARE) and otherwise estimates ("~300"), and only the right number is paid.
"""

import ast
import operator
import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from random import Random

from minirl.config import UserError
from minirl.env.base import Example, Step, check_split, sample_problems
from minirl.rewards import MAX_NUMBER, numbers_equal, parse_number

MAX_TEXT = 200  # characters of an expression
MAX_DEPTH = 100  # levels of the parse tree; 1+1+...+1 has one a term
MAX_BITS = 4096  # of a numerator or denominator, a number of 1,233 digits: one operation takes microseconds
MAX_OBSERVATION = 24  # characters that the task shows of a result, so that a row stays short

TOOL_SHARE = 0.25  # of the demonstrations call the tool: about where success stands after the cold start
OPEN, CLOSE = "<calc>", "</calc>"


class CalculatorError(ValueError):
    """A refused or impossible expression; the text is short, since the policy reads it."""


def calculate(expression: str) -> str:
    """The value of `+ - * / // % **`, unary minus, parentheses and decimal numbers, as text.

    Exact inside (0.1+0.2 is 0.3, 1/3*3 is 1); a result that is not whole is shown with 10 significant digits.
    A comma before three digits is a thousands separator (1,000+1 is 1001). Otherwise as in Python: 7//2 is 3,
    -3**2 is -9. Anything else raises CalculatorError.
    """
    if len(expression) > MAX_TEXT:
        raise CalculatorError("too long")
    text = re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", expression.strip())
    # Names, strings and underscores stop here, before Python's parser sees them.
    if not re.fullmatch(r"[0-9eE+\-*/%(). ]+", text):
        raise CalculatorError("not arithmetic" if text else "empty")
    try:
        value = evaluate(ast.parse(text, mode="eval").body)
        return str(value) if value.denominator == 1 else f"{float(value):.10g}"
    except SyntaxError:
        raise CalculatorError("bad syntax") from None
    except ZeroDivisionError:
        raise CalculatorError("division by zero") from None
    except OverflowError:
        raise CalculatorError("number too large") from None


def evaluate(node: ast.expr, depth: int = 1) -> Fraction:
    """The value of a parsed expression; a kind of node that is not listed here is refused."""
    if depth > MAX_DEPTH:
        raise CalculatorError("nested too deeply")
    match node:
        case ast.Constant(value=int() | float() as number):
            value = Fraction(Decimal(str(number)))  # by its digits: 0.1 is 1/10; 1e999 is an OverflowError
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = -evaluate(operand, depth + 1)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            value = Fraction(OPERATORS[type(op)](evaluate(left, depth + 1), evaluate(right, depth + 1)))
        case _:
            raise CalculatorError("not arithmetic")
    if bits(value) > MAX_BITS:
        raise OverflowError
    return value


def bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def power(base: Fraction, exponent: Fraction) -> Fraction | float:
    """base ** exponent, refused before it is computed if it would be huge: 9**9**9 has 369 million digits."""
    if exponent.denominator == 1:
        if abs(exponent) * (bits(base) - 1) > MAX_BITS:  # at most the result's bits; 0 for base 0, 1, -1
            raise OverflowError
        return base**exponent
    if base < 0:
        raise CalculatorError("negative root")
    return float(base) ** float(exponent)


OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: power,
}


def find_call(action: str) -> str | None:
    """The expression of the last complete <calc>...</calc> in an action, None if there is none."""
    before, close, _ = action.rpartition(CLOSE)
    _, open_, expression = before.rpartition(OPEN)
    return expression if close and open_ else None


def observe(expression: str, width: int = 0) -> str:
    """One line for the policy: the result, or what was wrong. It repeats no text of the policy's own.

    The line is filled with spaces to `width`, so that what is copied stands at one distance from its copy:
    a model of 0.2 M parameters learns that in 300 steps of SFT, and needs over 800 without the spaces.
    """
    try:
        text = calculate(expression)
    except CalculatorError as error:
        text = f"error: {error}"
    if len(text) > MAX_OBSERVATION:
        text = text[: MAX_OBSERVATION - 3] + "..."
    return text.ljust(width) + "\n"


def computable(expression: str) -> bool:
    try:
        return bool(calculate(expression))
    except CalculatorError:
        return False


@dataclass
class CalculatorEpisode:
    """An action with a call gets its result; one without, or the last one allowed, is taken as the answer."""

    prompt: str
    answer: str
    width: int  # characters of a result
    max_turns: int
    turns: int = 0

    def step(self, action: str) -> Step:
        """Compute a call, or judge an answer."""
        self.turns += 1
        call = find_call(action)
        info = {"tool_call": computable(call or "") if OPEN in action or CLOSE in action else None}
        if call is not None and self.turns < self.max_turns:
            return Step(observe(call, self.width), 0.0, False, info)
        info |= {"format": parse_number(action) is not None, "cut": call is not None}  # no turn is left for its result
        return Step("", float(numbers_equal(action, self.answer)), True, info)


class Calculator:
    """Three numbers of `difficulty` digits, two operators, one or both "*"; reward 1 for the value."""

    name = "calculator"
    stop = (CLOSE,)

    def __init__(self, difficulty: int = 2, seed: int = 0, max_turns: int = 3):
        if not 1 <= difficulty <= MAX_NUMBER // 3:  # or the product of all three would be no answer
            raise UserError(f"difficulty {difficulty}: calculator needs operands of 1 digit or more, "
                            f"{MAX_NUMBER // 3} at most")
        self.difficulty, self.seed, self.max_turns = difficulty, seed, max_turns
        call = len(OPEN) + 3 * difficulty + 2 + len(CLOSE)
        self.max_new_tokens = call + 3 * difficulty + 2 + 8  # a call, a signed answer and EOS, some to waste

    def make(self, rng: Random) -> Example:
        """A problem and a novice's way with it: mostly an estimate, now and then a call whose result is copied."""
        a, b, c = (rng.randrange(10 ** (self.difficulty - 1), 10**self.difficulty) for _ in range(3))
        first, second = rng.sample(["*", rng.choice("+-*")], 2)
        expression = f"{a}{first}{b}{second}{c}"
        answer = calculate(expression)
        if rng.random() < TOOL_SHARE:
            return Example(expression + "=", answer, (OPEN + expression + CLOSE, answer))
        return Example(expression + "=", answer, (estimate(answer),))

    def sample(self, count: int, start: int = 0, split: str = "train") -> list[Example]:
        return sample_problems(self.make, self.seed, count, start, split)

    def size(self, split: str) -> None:
        check_split(split)
        return None

    def reset(self, example: Example) -> CalculatorEpisode:
        width = 3 * self.difficulty  # of the largest product; a negative value is no longer, sign included
        return CalculatorEpisode(example.prompt, example.answer, width, self.max_turns)


def estimate(answer: str) -> str:
    """The answer to one digit, marked as what it is: "27935" becomes "~20000", which no reward takes for a number."""
    sign, digits = ("-", answer[1:]) if answer.startswith("-") else ("", answer)
    return f"~{sign}{digits[0]}{'0' * (len(digits) - 1)}"
