"""Agents measured: every number by hand, and attempts that are made by a model that is told what to say."""

import json
import math
from itertools import combinations

import pytest
import torch
from stubs import random_policy
from test_agent_data import ADD, BYTES, GOOD, result, said, tool, user

from minirl import agent_eval
from minirl.agent_eval import Play, play
from minirl.agent_metrics import (
    SIGNALS,
    Attempt,
    best_of_n,
    capabilities,
    matched,
    measure,
    pass_all_k,
    pass_at_k,
    side_by_side,
    signals,
)
from minirl.checkpoint import save_model
from minirl.config import UserError, cli
from minirl.graduate import checklist, is_ready

CALL = ("add", {"a": 2, "b": 3})


def attempt(*messages, correct=True, task="t", reference=GOOD, **more):
    return Attempt(task, [user("2+3?"), *messages], correct, [ADD, tool("sub")], reference, start=1, **more)


GOOD_ONE = attempt(*GOOD[1:])
DIRECT = attempt(said("5!"), correct=False)
WRONG_ARGUMENT = attempt(said(None, ("add", {"a": 2, "b": 4})), result("6"), said("6"), correct=False)
WRONG_TOOL = attempt(said(None, ("sub", {})), result("Error: no"), said("5"), correct=False)
RECOVERED = attempt(said(None, ("add", {"a": 2})), result("Error: add lacks b"), *GOOD[1:])
BROKEN = attempt(said("<tool_call>{broken"), result("Error: invalid JSON"), said("5"), correct=False)
NEEDLESS = attempt(*GOOD[1:], reference=[user("2+3?"), said("5")])
SILENT = attempt(*GOOD[1:3], correct=False)


@pytest.mark.parametrize(("one", "selected", "right"), [
    (GOOD_ONE, 1, 1), (DIRECT, 0, 0), (WRONG_ARGUMENT, 1, 0), (WRONG_TOOL, 0, 0), (RECOVERED, 1, 1), (NEEDLESS, 0, 0)])
def test_calls_are_matched_with_the_reference(one, selected, right):
    assert matched(one) == (selected, right)


def test_lists_in_arguments_are_values_and_no_choices():
    reference = [user("?"), said(None, ("f", {"x": [1, 2]}))]
    for x, right in (([1, 2], 1), (1, 0), ([2, 1], 0)):
        made = Attempt("t", [user("?"), said(None, ("f", {"x": x}))], True, [], reference, start=1)
        assert matched(made) == (1, right)


def test_any_accepted_value_of_bfcl_is_right():
    possible = [{"add": {"a": [2, 3], "b": [3]}}]
    assert matched(attempt(said(None, ("add", {"a": 3, "b": 3})), possible=possible)) == (1, 1)
    assert matched(attempt(said(None, ("add", {"a": 4, "b": 3})), possible=possible)) == (1, 0)


def test_the_report_by_hand():
    report = measure([GOOD_ONE, DIRECT, WRONG_ARGUMENT, WRONG_TOOL, RECOVERED, BROKEN, NEEDLESS, SILENT], k=2)
    by_hand = {
        "success": 3 / 8,
        "completion": 7 / 8,  # all but SILENT say something at the end
        "first_attempt": 2 / 8,  # RECOVERED had to try twice
        "tool_selection": 4 / 7,  # GOOD, WRONG_ARGUMENT, RECOVERED, SILENT of the seven wanted calls
        "arguments": 3 / 4,
        "format": 6 / 8,  # RECOVERED's first call lacks an argument, BROKEN's is no JSON
        "needless_calls": 2 / 8,  # one of RECOVERED, one of NEEDLESS
        "needless_rate": 1.0,  # the only task without a call is NEEDLESS'
        "recovery": 1 / 3,  # of WRONG_TOOL, RECOVERED, BROKEN
        "turns": (2 + 1 + 2 + 2 + 3 + 2 + 2 + 1) / 8,
        "calls": (1 + 0 + 1 + 1 + 2 + 0 + 1 + 1) / 8,
        "pass@1": 3 / 8, "pass@2": 1 - 10 / 28, "pass^2": 3 / 28,
        "depth/0": 1.0, "depth/1": 2 / 7, "takeover": 0.0}
    assert {name: report[name] for name in by_hand} == pytest.approx(by_hand)
    costs = measure([attempt(said("x"), written=1000, read=3000), attempt(said("x"), written=3000, read=1000,
                                                                          taken_over=True)], 0, 1.0, 10.0)
    assert costs["tokens"] == 2000 and costs["cost"] == pytest.approx(0.022) and costs["takeover"] == 0.5
    assert math.isnan(costs["format"]), "nobody called"
    with pytest.raises(UserError, match="no attempts"):
        measure([])


def test_k_attempts_against_all_ways_to_draw_them():
    outcomes = [True, False, True, False, False, True]
    scores = [0.9, 0.8, 0.8, 0.1, 0.8, 0.2]
    for k in range(1, 7):
        draws = [*combinations(range(6), k)]
        assert pass_at_k(6, 3, k) == pytest.approx(sum(any(outcomes[i] for i in draw) for draw in draws) / len(draws))
        assert pass_all_k(6, 3, k) == pytest.approx(sum(all(outcomes[i] for i in draw) for draw in draws) / len(draws))
        expected = 0.0
        for draw in draws:
            best = max(scores[i] for i in draw)
            tied = [outcomes[i] for i in draw if scores[i] == best]
            expected += sum(tied) / len(tied) / len(draws)
        assert best_of_n(scores, outcomes, k) == pytest.approx(expected)
    for k in (0, 7):
        with pytest.raises(UserError, match="between 1 and 6"):
            pass_at_k(6, 3, k)


def test_six_capabilities_by_hand():
    chain = [user("2+3, then +3?"), said(None, CALL), result("55"), said(None, ("add", {"a": 55, "b": 3})),
             result("58"), said("58")]
    whole = Attempt("c", chain, True, [ADD], chain, start=1)
    half = Attempt("c", [*chain[:3], said("55")], False, [ADD], chain, start=1)
    triple = [user("?"), said(None, ("f", {"a": 1, "b": 2, "c": 3}))]
    many = Attempt("m", triple, True, [], triple, start=1)
    found = capabilities([whole, half, RECOVERED, BROKEN, many])
    assert found == {
        "reasoning": (1.0, 2),  # whole, RECOVERED; `many` ends in a call, the others' calls are not all right
        "planning": (0.5, 2), "tool use": (2 / 5, 5),  # whole, many; RECOVERED called once too often
        "memory": (0.5, 2), "self-correction": (0.5, 2), "constraints": (1.0, 1)}
    assert capabilities([attempt(said("x"), constraints=(True, False))])["constraints"] == (0.0, 1)


def test_four_signals():
    ready = [GOOD_ONE] * 2 + [WRONG_ARGUMENT] * 2
    measured = signals(ready, [0.49, 0.5, 0.5])
    assert measured == pytest.approx({"format": 1.0, "plateau": 0.01, "headroom": 0.5, "judgement": 1.0})  # 1 - 0.5
    assert is_ready(checklist(measured, SIGNALS))
    broken = signals([GOOD_ONE, BROKEN, BROKEN], [0.1, 0.3])
    assert broken["judgement"] == 0.0 and broken["plateau"] == "fewer than 3 checkpoints"
    assert not is_ready(checklist(broken, SIGNALS))
    table = side_by_side({"base": {"success": 0.25}, "sft": {"success": 0.5, "recovery": math.nan}})
    assert table.splitlines()[1].split() == ["success", "0.25", "0.5"]
    assert table.splitlines()[2].split() == ["recovery", "-", "-"]


# ------------------------------------------------------------------ attempts


ROW = {"messages": GOOD, "tools": [ADD, tool("sub")]}


def act(game, text):
    return BYTES.decode(game.step(BYTES.encode(text)))


def written(name, arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_an_attempt_hears_recorded_results_and_errors():
    game = Play(ROW, BYTES, "plain", 6)
    assert "Error in tool call 1: invalid JSON" in act(game, "<tool_call>{broken")
    act(game, written("mul", {}))
    assert game.messages[-1]["content"].startswith("Error: tool call 0 calls 'mul', which is not declared; tools: add")
    act(game, written("add", {"a": 2}))
    assert game.messages[-1]["content"] == "Error: tool call 0 (add): arguments lacks 'b'"
    act(game, written("add", {"a": 9, "b": 9}))
    assert game.messages[-1]["content"] == "Error: add has no result for these arguments."
    assert "5" in act(game, written("add", {"a": 2, "b": 3})) and game.messages[-1] == result("5")
    assert act(game, "It is 5.") == ""
    made = game.attempt("t", 10, 20)
    assert made.correct and made.start == 1 and len(made.calls) == 4
    assert measure([made])["recovery"] == 1.0 and measure([made])["format"] == 2 / 5
    assert not Play(ROW, BYTES, "plain", 6).attempt("t", 0, 0).correct, "nothing said"


def test_attempts_end_where_the_reference_does():
    bfcl = {"messages": [user("2+3?"), said(None, CALL)], "tools": [ADD],
            "possible_answer": [{"add": {"a": [2, 3], "b": [3]}}]}
    for arguments, correct in (({"a": 3, "b": 3}, True), ({"a": 4, "b": 3}, False)):
        game = Play(bfcl, BYTES, "plain", 6)
        assert act(game, written("add", arguments)) == "" and game.attempt("t", 0, 0).correct is correct
    finish = {"messages": [*GOOD[:3], said(None, ("Finish", {"x": "words"}))],
              "tools": [ADD, tool("Finish", {"x": {}})]}
    game = Play(finish, BYTES, "plain", 6)
    act(game, written("add", {"a": 2, "b": 3}))
    assert act(game, written("Finish", {"x": "other words"})) == "" and game.attempt("t", 0, 0).correct
    nothing = {"messages": [user("?"), said("None.")], "tools": [ADD], "possible_answer": []}
    for text, correct in (("No.", True), (written("add", {"a": 2, "b": 3}), False)):
        game = Play(nothing, BYTES, "plain", 1)
        act(game, text)
        assert game.attempt("t", 0, 0).correct is correct
    gsm = {"messages": [user("?"), said("so\n#### 72")], "tools": []}
    for text, correct in (("#### 72.0", True), ("#### 71", False)):
        game = Play(gsm, BYTES, "plain", 1)
        act(game, text)
        assert game.attempt("t", 0, 0).correct is correct


def test_a_calculator_calculates_what_nobody_recorded():
    calculator = tool("calculator", {"expression": {"type": "string"}}, ["expression"])
    row = {"messages": [user("?"), said(None, ("calculator", {"expression": "1+1"})), result("2"), said("#### 2")],
           "tools": [calculator]}
    game = Play(row, BYTES, "plain", 6)
    act(game, written("calculator", {"expression": "48/2"}))
    assert game.messages[-1] == result("24")
    act(game, written("calculator", {"expression": "x"}))
    assert game.messages[-1] == result("Error: not arithmetic")


def test_a_model_plays_and_the_command_reports(tmp_path, capsys):
    policy = random_policy(BYTES.vocab_size, context=1200, dtype=torch.float32)
    attempts = play(policy, BYTES, "plain", [ROW, ROW], samples=2, temperature=1.0, max_new_tokens=8)
    assert [each.task for each in attempts] == ["0", "0", "1", "1"] and all(1 <= each.written <= 8 for each in attempts)
    assert all(each.messages[0] == GOOD[0] and each.messages[1]["role"] == "assistant" for each in attempts)
    save_model(policy, tmp_path / "model", BYTES)
    data, pairs = tmp_path / "rows.jsonl", tmp_path / "pairs.jsonl"
    data.write_text(json.dumps(ROW) + "\n")
    agent_eval.main(cli(agent_eval.Config, [str(tmp_path / "model"), "--data", str(data), "--samples", "2",
                                            "--max-new-tokens", "8", "--device", "cpu", "--pairs", str(pairs)]))
    printed = capsys.readouterr().out
    assert "pass^2" in printed and "from SFT to RL" in printed and "wrote 0 pairs" in printed
    data.write_text('{"text": "x"}\n')
    with pytest.raises(UserError, match=r"rows\.jsonl:1: no messages"):
        agent_eval.main(agent_eval.Config((str(tmp_path / "model"),), str(data), device="cpu"))
    with pytest.raises(UserError, match="--data is missing"):
        agent_eval.Config(("model",))
