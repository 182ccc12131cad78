r"""Verifiable rewards: which number a text gives as its answer, and whether it is the right one.

Numbers are compared as exact fractions. What counts:

    72   +7   -7   .5   29.00   1,234   1e3   1/2        their value; a comma only in front of three digits
    $5   -$5   $-5   50%   12.   5kg   **72**            the number alone: 50% is 50
    U+2212 (minus sign), full-width digits               read as - and 0-9
    5-3                                                  5 and 3: a minus behind a digit is no sign
    1 234   1 1/2   1,00,000                             several numbers, not one
    x2   nan   inf   1e999   1/0   over 40 characters    no number

Which number is the answer, in a text cut where it invents a new question (a line "Question:" or "Q:"):

    "#### 72" or "\boxed{72}"    all numbers on the rest of that line (in those braces) must have one value:
                                 "#### 41 #### 42", "#### 41, 42 or 43" and "\boxed{41} #### 42" list guesses
                                 and have no answer, "#### 42 ... #### 42.0" has one; "####" alone has none
    neither                      the last number of the text: "5 is wrong. Answer: 10" is 10

Every pattern reads its text once, however odd: no quantifier is nested in another over the same characters.
"""

import re
from decimal import Decimal
from fractions import Fraction

import torch
from torch import Tensor

from minirl.config import UserError

NUMBER = re.compile(
    r"(?:(?<![\w)])[-+]\$?|\$[-+]?)?"  # a sign, unless it stands behind an operand: -5, -$5, $-5, but 7-5
    r"(?:(?<!\w)(?<![0-9]\.)(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"  # 1,234.50, 1234, 2.5
    r"|(?<![\w.])\.[0-9]+)"  # .5, but not the end of "1.2.5" or "...5"
    r"(?:[eE][-+]?[0-9]+)?(?:/[0-9]+)?"  # 1e3, 1/2
)
MARKED = re.compile(r"####[^\n]*|\\boxed\{[^{}\n]*\}")
NEW_QUESTION = re.compile(r"^[ \t]*(?:Question|Q):", re.MULTILINE)
PLAIN = str.maketrans("\u2212" + "".join(map(chr, range(0xFF10, 0xFF1A))), "-0123456789")
MAX_NUMBER = 40  # characters, and decimal places before or behind the point: a longer one is nobody's answer


def parse_number(text: str) -> Fraction | None:
    """The value of a text that is one number, spaces, "%" and a full stop apart; None if it is not one."""
    text = text.translate(PLAIN)
    found = NUMBER.search(text)
    if found is None or len(found[0]) > MAX_NUMBER:
        return None
    if text[: found.start()].strip() or text[found.end() :].strip() not in ("", ".", "%", "%."):
        return None
    number, _, divisor = found[0].replace("$", "").replace(",", "").partition("/")
    value = Decimal(number)
    divisor = int(divisor or 1)
    if divisor == 0 or abs(value.adjusted()) > MAX_NUMBER:  # the Fraction of 1e999 would have 999 digits
        return None
    return Fraction(value) / divisor


def extract_answer(text: str) -> str | None:
    """The number that `text` gives as its answer, as it is written there; None if it has none (see above)."""
    text = NEW_QUESTION.split(text.translate(PLAIN), maxsplit=1)[0]
    if marked := MARKED.findall(text):
        numbers = [number for part in marked for number in NUMBER.findall(part)]
    else:
        numbers = NUMBER.findall(text)[-1:]
    values = {parse_number(number) for number in set(numbers)}
    return numbers[-1] if len(values) == 1 and None not in values else None


def numbers_equal(a: str | None, b: str | None) -> bool:
    """True if both are numbers and have exactly the same value: "29.00" and "29", not "0.33" and "1/3"."""
    x, y = (None if text is None else parse_number(text) for text in (a, b))
    return x is not None and x == y


def gsm8k_reward(completion: str, gold: str) -> float:
    """1.0 if the completion's answer has the value of the gold's, else 0.0; `gold` is "... #### 72" or "72".

    Give the completion alone: an answer in an echoed prompt is not the policy's.
    """
    answer = extract_answer(gold)
    if answer is None:
        raise UserError(f'gold answer "{gold[-60:]}" holds no number: end it with "#### NUMBER"')
    return float(numbers_equal(extract_answer(completion), answer))


def overlong_penalty(lengths: Tensor, limit: int, cache: int) -> Tensor:
    """Soft punishment of long answers: 0 up to limit - cache tokens, then a line down to -1 at `limit`.

    lengths : (B,) tokens          returns : (B,) unitless, to be added to the rewards
    DAPO, arXiv:2503.14476 eq. 13.
    """
    if not 0 < cache <= limit:
        raise UserError(f"overlong cache {cache} is not in 1 .. {limit}, the length limit")
    return ((limit - cache - lengths) / cache).clamp(-1.0, 0.0)


def missing_eos_penalty(rewards: Tensor, finished: Tensor, penalty: float) -> Tensor:
    """rewards (B,) less `penalty` where an answer was cut before it ended by itself, `finished` (B,) bool False.

    Which tokens end an answer is the sampler's business (`tokenizer.stop_ids`, an environment's stop strings): a second
    look for one particular id would find it in the prompt, or miss another that ended the answer.
    """
    return torch.where(finished, rewards, rewards - penalty)
