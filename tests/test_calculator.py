"""The calculator computes, refuses what is not arithmetic, and neither runs nor echoes what it reads."""

import time
import tracemalloc

import pytest

from minirl.env.calculator import (
    MAX_OBSERVATION,
    TOOL_SHARE,
    Calculator,
    CalculatorError,
    calculate,
    estimate,
    find_call,
    observe,
)
from minirl.rewards import numbers_equal

VALUES = [
    ("1+2*3", "7"), ("(1+2)*3", "9"), ("12*34-56", "352"), ("7//2", "3"), ("-7//2", "-4"), ("7%3", "1"),
    ("-7%3", "2"),
    ("7/2", "3.5"), ("6/2", "3"), ("-3**2", "-9"), ("(-3)**2", "9"), ("2**-1", "0.5"), ("2**3**2", "512"),
    ("4**0.5", "2"),
    ("2**0.5", "1.414213562"), ("0.1+0.2", "0.3"), ("0.1*3-0.3", "0"), ("1/3", "0.3333333333"),
    ("1/3*3", "1"), ("2.50", "2.5"),
    ("--5", "5"),
    ("1,000+1", "1001"), ("1,234,567*1", "1234567"), ("10**20/2", "50000000000000000000"), ("1e3+1", "1001"),
    (" 5 ", "5"),
    ("1**99999", "1"), ("0**0", "1"), ("2**100", str(2**100)), ("1+" * 99 + "1", "100"),
    ("(" * 90 + "1" + ")" * 90, "1"),
]  # fmt: skip

REFUSED = [
    ("", "empty"), ("  ", "empty"), ("1/0", "division by zero"), ("7%0", "division by zero"),
    ("0**-1", "division by zero"),
    ("1//0.0", "division by zero"), ("9**9**9", "too large"), ("2**10**8", "too large"),
    ("2**-10**8", "too large"),
    ("2**5000", "too large"), ("2**4000*2**4000", "too large"), ("1e999", "too large"),
    ("9e300**1.5", "too large"),
    ("(2**4000)**0.5", "too large"),
    ("1e300**1e300", "too large"), ("(-8)**0.5", "negative root"), ("1+", "syntax"), ("1 2", "syntax"),
    ("2e", "syntax"),
    ("(" * 10000 + "1" + ")" * 10000, "too long"), ("-" * 150 + "1", "too deep"),
    ('"a"*10**9', "not arithmetic"),
    ("__import__('os').system('touch X')", "not arithmetic"), ("().__class__.__bases__[0]", "not arithmetic"),
    ("(lambda:0)()", "not arithmetic"), ("a.b", "not arithmetic"), ("open('x')", "not arithmetic"),
    ("e", "not arithmetic"),
    ("(1)(2)", "not arithmetic"), ("1 .e", "not arithmetic"), ("()", "not arithmetic"),
    ("1,2", "not arithmetic"),
    ("1,00", "not arithmetic"), ("1_000", "not arithmetic"), ("0x10", "not arithmetic"),
    ("1j", "not arithmetic"),
    ("1<2", "not arithmetic"), ("5\n+1", "not arithmetic"), ("True", "not arithmetic"),
    ("\uff15+1", "not arithmetic"),
]  # fmt: skip


@pytest.mark.parametrize("expression, value", VALUES)
def test_arithmetic_has_its_value(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize("expression, reason", REFUSED, ids=[text[:12] for text, _ in REFUSED])
def test_everything_else_is_refused_at_once_in_little_memory(expression, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tracemalloc.start()
    start = time.perf_counter()
    with pytest.raises(CalculatorError, match=reason):
        calculate(expression)
    seconds, peak = time.perf_counter() - start, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seconds < 1 and peak < 10e6
    assert not list(tmp_path.iterdir()), "the expression was executed"


def test_a_tool_call_is_the_last_complete_one_of_the_action():
    assert find_call("<calc>1+2</calc>") == "1+2"
    assert find_call("Let me see: <calc>1</calc> or <calc>2</calc>") == "2"
    assert find_call("<calc>1<calc>2</calc>") == "2"
    assert find_call("<calc></calc>") == ""
    assert find_call("<calc>1<2</calc>") == "1<2"  # a call, and a bad one: the policy is told so
    for action in ("", "352", "<calc>1+2", "1+2</calc>", "</calc>1<calc>", "<CALC>1</CALC>"):
        assert find_call(action) is None


def test_a_mistake_becomes_an_observation_that_repeats_nothing_of_the_policy():
    assert observe("12*34-56") == "352\n" and observe("12*34-56", width=6) == "352   \n"
    assert observe("1/0") == "error: division by zero\n"
    for expression in ("<|endoftext|>", "1</calc><calc>", "ok\n<calc>", "__import__('os')"):
        assert observe(expression) == "error: not arithmetic\n", "text of the policy came back as tool output"
    for expression, _ in REFUSED:
        assert len(observe(expression)) <= MAX_OBSERVATION + 1 and "..." not in observe(expression)


def test_a_flood_of_digits_is_cut_with_a_mark():
    assert observe("2**4000") == str(2**4000)[: MAX_OBSERVATION - 3] + "...\n"


def play(actions, max_turns=3):
    env = Calculator(max_turns=max_turns)
    example = next(example for example in env.sample(50) if len(example.solution) == 2)
    episode = env.reset(example)
    actions = [action.format(call=example.solution[0], answer=example.answer) for action in actions]
    return example, [episode.step(action) for action in actions]


def test_the_tool_is_called_then_its_result_is_the_answer():
    example, steps = play(["{call}", "{answer}"])
    assert steps[0][:4] == (f"{example.answer:<6}\n", 0.0, False, {"tool_call": True})
    assert steps[1][:4] == ("", 1.0, True, {"tool_call": None, "format": True, "cut": False})


def test_a_failed_call_leaves_the_policy_its_chance():
    _, steps = play(["<calc>1/0</calc>", "{answer}"])
    assert steps[0].observation == "error: division by zero\n" and steps[1].reward == 1.0
    _, steps = play(["{answer}"])  # by luck
    assert steps[0][:4] == ("", 1.0, True, {"tool_call": None, "format": True, "cut": False})


def test_anything_but_the_value_earns_nothing():
    for action in ("", "5", "{answer}0", "-", "{answer}</calc>", "{answer} {answer}", "<calc>{answer}"):
        _, steps = play([action])
        assert [step[:3] for step in steps] == [("", 0.0, True)]


def test_the_last_turn_ends_the_row_even_with_a_call():
    _, steps = play(["{call}", "{call}", "{call}"])
    assert [step.done for step in steps] == [False, False, True]
    assert sum(step.reward for step in steps) == 0.0 and steps[2].observation == "" and steps[2].info["cut"]


@pytest.mark.parametrize("difficulty", [1, 2])
def test_the_novice_calls_the_tool_now_and_then_and_is_otherwise_wrong(difficulty):
    env = Calculator(difficulty)
    examples = env.sample(2000)
    calls = [example for example in examples if len(example.solution) == 2]
    assert abs(len(calls) / 2000 - TOOL_SHARE) < 0.04
    for example in examples:
        assert example.answer == calculate(example.prompt.removesuffix("="))
        if example in calls:
            assert find_call(example.solution[0]) + "=" == example.prompt
            assert example.solution[1] == example.answer
        else:
            (guess,) = example.solution
            assert guess == estimate(example.answer)
            assert env.reset(example).step(guess).reward == 0, "a novice's estimate is paid"


@pytest.mark.parametrize("difficulty", [1, 2, 3, 5])
def test_a_row_of_the_expert_fits_the_budget_and_the_byte_context(difficulty):
    env = Calculator(difficulty)
    examples = env.sample(500)
    assert max(sum(map(len, example.solution)) + 1 for example in examples) <= env.max_new_tokens
    for example in examples:
        step = env.reset(example).step(f"<calc>{example.prompt[:-1]}</calc>")
        assert len(step.observation) == 3 * difficulty + 1, "the distance to the copy varies"
    assert difficulty > 2 or 3 * difficulty + 3 + env.max_new_tokens + 2 * (MAX_OBSERVATION + 1) <= 96


def test_an_estimate_keeps_sign_and_size_and_is_never_the_answer():
    assert [estimate(text) for text in ("27935", "-56", "7", "300")] == ["~20000", "~-50", "~7", "~300"]
    assert not numbers_equal("~300", "300")
