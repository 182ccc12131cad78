"""Which number a text gives as its answer, in tables by hand: what they get wrong, an honest policy loses."""

import time
from fractions import Fraction
from random import Random

import pytest
import torch

from minirl.config import UserError
from minirl.env.gsm8k import read_gsm8k
from minirl.rewards import NUMBER, extract_answer, gsm8k_reward, numbers_equal, overlong_penalty, parse_number, plain

NUMBERS = [
    ("72", 72), (" 72\n", 72), ("+7", 7), ("-7", -7), ("\u22127", -7), (".5", Fraction(1, 2)),
    ("-.5", Fraction(-1, 2)),
    ("2.50", Fraction(5, 2)), ("29.00", 29), ("12.", 12), ("1,234", 1234), ("1,234.50", Fraction(2469, 2)),
    ("109,200,000", 109200000), ("$5", 5), ("-$5", -5), ("$-5", -5), ("$ 5", None), ("50%", 50), ("50%.", 50),
    ("1/2", Fraction(1, 2)), ("-3/4", Fraction(-3, 4)), ("1e3", 1000), ("2.5E-1", Fraction(1, 4)), ("007", 7),
    ("\uff17\uff12", 72), ("1/0", None), ("1e999", None), ("1e-999", None), ("9" * 41, None),
    ("0." + "1" * 5000, None),
    ("", None), (",", None), ("$", None), ("-", None), ("nan", None), ("inf", None), ("-infinity", None),
    ("x2", None),
    ("3 apples", None), ("1 234", None), ("5-3", None), ("1,2", None), ("<calc>5</calc>", None),
    ("1_000", None),
]  # fmt: skip

ANSWERS = [
    # the marker, and what may stand around the number
    ("#### 1,234", 1234), ("#### $1,234.50", Fraction(2469, 2)), ("#### 29.00", 29), ("#### -7", -7),
    ("#### +7", 7),
    ("#### 12.", 12), ("#### 50%", 50), ("#### 1/2", Fraction(1, 2)), ("#### 3 apples", 3), ("####5", 5),
    ("#### .5", Fraction(1, 2)),
    ("#### \u22127", -7), ("#### 1e3", 1000), ("#### 15kg", 15), ("#### **72**", 72), ("9\n#### (-3)", -3),
    ("#### x = 8", 8), ("#### \u20137", -7), ("-\u20ac7", -7), ("#### \u00a35", 5), ("#### \u20ac-5.", -5),
    (r"\boxed{72 \text{ dollars}}", 72), (r"\boxed{\text{about }72}", 72), ("The answer is \u20135", -5),
    ("5\u20137", 7),
    # what is still to be worked out, or has a sign that stands apart, is no answer
    (r"\boxed{\frac{1}{2}}", None), (r"\boxed{3^{2}}", None), (r"\boxed{-\frac{3}{4}}", None),
    (r"\boxed{\frac{2}{2}}", None), (r"\boxed{2^2}", None), (r"\boxed{x^2}", None), ("#### 2*2", None),
    ("#### 7-7", None), ("#### 7+7", None), ("#### 2**2", None), ("#### - 7", None), ("#### -(7)", None),
    ("#### -$ 7", None), ("#### - $7", None), ("#### -**7**", None), (r"\boxed{7", None), ("\\boxed{\n7}", None),
    (r"7 \boxed{} 7", None), (r"\boxed{-{7}} 7", None), ("#### -US$7", None), ("#### -\u20b97", None),
    ("#### -`7`", None), (r"\boxed{5\times 5}", None), (r"\boxed{\sqrt 16}", None),
    (r"\boxed{7\pi}", None), ("#### 5 x 5", None), ("#### 5 / 5", None), ("#### 5x5", None), ("#### $5-$5", None),
    ("#### 7\u00b2", None), ("#### 1.000.000", None),
    # what only dresses a number
    ("#### \u20117", -7), ("#### \uff0d7", -7), (r"\boxed{-\,7}", -7), (r"\boxed{-\text{7}}", -7),
    (r"\boxed{-\$18}", -18), ("#### 18 cm^2", 18), (r"\boxed{18 \text{ cm}^2}", 18), (r"\boxed{1{,}234}", 1234),
    (r"\boxed{1,\!234}", 1234),
    (r"\boxed{\textbf{18}}", 18), ("#### **-7**", -7), ("#### 72 - the total is 72", 72),
    ("#### $1,080.00 per year", 1080), (r"\boxed{x = 5}", 5), ("#### 1/2", Fraction(1, 2)),
    (r"so \boxed{72}.", 72), (r"\boxed{$1,080}", 1080), (r"#### \boxed{72}", 72),
    ("####\t72\nThat took 3 steps.", 72),
    # several numbers: a list of guesses is no answer, the same answer twice is
    ("#### 41 #### 42", None), ("#### 41, 42 or 43", None), ("#### 41\n#### 42", None),
    (r"\boxed{41} #### 42", None),
    ("#### 1 234", None), ("#### 1 1/2", None), ("#### 1,00,000", None), ("#### 42, or 42.0\n#### 42", 42),
    # a marker without a number says that there is no answer
    ("7 and 8\n#### ", None), ("#### \n72", None), ("#### nan", None), ("#### 1/0", None),
    ("#### 1e999", None),
    # no marker: the last number
    ("The total is 72 clips, altogether.", 72), ("I think the answer: 5 is wrong. Answer: 10", 10),
    ("5-3", 3),
    ("5 - 3 = 2", 2), ("It fell by -3", -3), ("(4)-3", 3), ("v1.2", None), ("no idea", None), ("", None),
    ("so...72", 72),
    ("1.2.5", Fraction(6, 5)), ("it costs $2.50, ok?", Fraction(5, 2)), ("12/60 = 0.2", Fraction(1, 5)),
    ("5,", 5), ("1,2345", 2345),
    # the model goes on with a question of its own: only what stands before it counts
    ("#### 5\nQ: 2+2?\n#### 4", 5), ("#### 5\nQuestion: 2+2?\nAnswer: #### 4", 5), (" #### 5\nQuestion:", 5),
    ("Question: what is 41+1? #### 42", None), ("6 of them\n  Q: and 7?", 6), ("FAQ: 7", 7),
]  # fmt: skip


@pytest.mark.parametrize("text, value", NUMBERS)
def test_a_text_that_is_one_number_has_its_value(text, value):
    assert parse_number(text) == value


@pytest.mark.parametrize("text, value", ANSWERS)
def test_the_answer_of_a_text_is_what_the_table_says(text, value):
    answer = extract_answer(text)
    assert answer is None if value is None else parse_number(answer) == value


def test_the_last_number_of_a_text_is_found_from_its_end():
    rng = Random(0)
    pieces = ["1", "23", ".", ",", "-", "$", "e3", "/", " ", "\t", "\n", "x", ")", "\u3000", "\u2212", "4.5", "%"]
    for _ in range(5000):
        text = "".join(rng.choices(pieces, k=rng.randint(0, 12)))
        numbers = NUMBER.findall(plain(text))
        last = numbers[-1] if numbers and parse_number(numbers[-1]) is not None else None
        assert extract_answer(text) == last, text


def test_equality_is_exact_and_a_text_without_a_number_equals_nothing():
    assert numbers_equal("$1,000.00", "1000") and numbers_equal("0.50", "1/2")
    assert not numbers_equal("0.33", "1/3") and not numbers_equal("-7", "7")
    assert not numbers_equal("nan", "nan") and not numbers_equal(None, None) and not numbers_equal("", "")


def test_gsm8k_pays_the_right_answer_once_and_refuses_a_gold_without_a_number():
    gold = "48/2 = <<48/2=24>>24\n48+24 = <<48+24=72>>72\n#### 72"
    for completion in (gold, " 72", "#### 72.0", "She sold 72 clips."):
        assert gsm8k_reward(completion, gold) == gsm8k_reward(completion, "72") == 1.0
    for completion in ("", "#### 71", "#### 71 #### 72", "72 or 73", "#### -72"):
        assert gsm8k_reward(completion, gold) == 0.0
    with pytest.raises(UserError, match=r"many.*####"):
        gsm8k_reward("72", "many")


@pytest.mark.parametrize(
    "text",
    ["1" * 50000 + "x", "<think>" * 3000, "(" * 10000, " " * 100000, "1," * 30000, "1,234" * 10000,
     "#" * 100000, "#### 1" * 10000, "\\boxed{" * 10000, "\n" * 100000, "\n \t" * 30000, "-" * 100000,
     "$-" * 50000, "1e" * 50000, "1/" * 50000, "." * 100000, "0." * 50000, "Q" * 100000, "\n  Q" * 20000],
    ids=lambda text: repr(text[:8]),
)  # fmt: skip
def test_no_text_makes_the_parsers_slow(text):
    start = time.perf_counter()
    gsm8k_reward(text, "5")
    gsm8k_reward("#### " + text, "5")
    parse_number(text)
    assert time.perf_counter() - start < 1, "a pattern backtracks: a quantifier inside a quantifier"


def test_every_gold_of_the_real_files_parses_and_is_paid(shared):
    for path, count in (("train.jsonl", 1000), ("test.jsonl", 200)):
        rows = read_gsm8k(str(shared / "data/gsm8k" / path))
        assert len(rows) == count
        for row in rows:
            assert parse_number(row.answer) is not None and gsm8k_reward(row.solution[0], row.answer) == 1.0


def test_the_overlong_penalty_has_no_jump_at_its_edges():
    lengths = torch.tensor([0, 15, 16, 17, 18, 19, 20, 21, 24, 100])
    expected = torch.tensor([0, 0, 0, -0.25, -0.5, -0.75, -1, -1, -1, -1])  # limit 20, cache 4
    assert torch.equal(overlong_penalty(lengths, 20, 4), expected)
    assert overlong_penalty(torch.tensor([16384, 18432, 20480]), 20480, 4096).tolist() == [0, -0.5, -1]  # the paper's
    for cache in (0, 21):  # 0 would divide by zero
        with pytest.raises(UserError, match=f"{cache}.*20"):
            overlong_penalty(lengths, 20, cache)
