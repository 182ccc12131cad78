"""Tools, calls, limits: what the policy writes is carried out or answered by an error, and nothing else is."""

import copy
import math
import sys
import threading
import time
from pathlib import Path
from random import Random

import pytest

from minirl.config import UserError
from minirl.env import make_env
from minirl.env.agent import ToolEnv
from minirl.env.base import Example, Step, trajectory
from minirl.env.countdown import value
from minirl.env.database import DATABASE, delete, get, give, put, take
from minirl.env.retrieval import BM25, find
from minirl.env.tools import Tool, parse_calls


def add(state: list, a: int, b: int = 1) -> str:
    """Add two numbers."""
    state.append(a + b)
    return str(a + b)


def echo(state: list, text: str) -> str:
    return text


def broken(state: list) -> str:
    raise KeyError("oh")


TOOLS = (Tool(add), Tool(echo, "say"), Tool(broken))


def env(**options):
    defaults = dict(name="t", tools=TOOLS, make=lambda rng: Example(f"p{rng.random()}", "3", (), []), max_new_tokens=50,
                    judge=lambda example, state, answer: float(state == [3] and answer == example.answer))
    return ToolEnv(**defaults | options)


def start(**options):
    return env(**options).reset(Example("p", "3", (), []))


# ---- tools ----

def test_a_function_is_a_tool_with_a_schema():
    assert Tool(add).schema() == {"type": "function", "function": {
        "name": "add", "description": "Add two numbers.", "parameters": {
            "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a"]}}}


def test_annotations_may_be_strings_and_the_states_unknown():
    def put(shop: "Unknown", item: "str", count: "int", share: "float" = 1.0) -> "str":  # noqa: F821
        return item * count

    assert Tool(put).parameters == {"item": str, "count": int, "share": float}
    assert Tool(put)(None, {"item": "a", "count": 4}) == Tool(put)(None, "a 4") == "aaaa"


@pytest.mark.parametrize("arguments, result", [
    ("2 3", "5"), ("2", "3"), (" 2  -3 ", "-1"), ({"a": 2, "b": 3}, "5"), ({"a": 2}, "3"), ({"a": "2"}, "3"),
    ("", "add needs a"), ({}, "add needs a"), ("2 3 4", "b must be integer"), ("x", "a must be integer"),
    ({"a": 2.5}, "a must be integer"), ({"a": True}, "a must be integer"), ({"a": None}, "a must be integer"),
    ({"a": 1, "c": 2}, "add has no c"), ({"a": "1_0"}, "a must be integer"), ({"a": "\uff11"}, "a must be integer"),
    ("9" * 5000, "a must be integer"), ({"a": 10**18}, "a is too large"), ({"a": -(10**4000)}, "a is too large"),
    ({"a": 10**18 - 2, "b": 1}, str(10**18 - 1)),
])
def test_arguments_are_words_or_an_object_and_have_their_types(arguments, result):
    try:
        assert Tool(add)([], arguments) == result
    except ValueError as error:
        assert str(error) == result


def test_an_endless_number_is_no_argument():
    def half(state, x: float) -> str:
        return str(x / 2)

    assert Tool(half)([], {"x": 1e17}) == "5e+16"
    for number in (1e999, -1e999, 10**400):
        with pytest.raises(ValueError, match="x is too large"):
            Tool(half)([], {"x": number})


def test_a_single_text_is_passed_as_it_is_and_a_tool_without_parameters_takes_none():
    assert Tool(echo)([], " a  <b>\n c ") == " a  <b>\n c "
    with pytest.raises(ValueError, match="broken takes nothing"):
        Tool(broken)([], "x")


# ---- calls ----

NAMES = ("add", "say", "broken")


@pytest.mark.parametrize("action, calls, outside", [
    ("3", [], "3"), ("", [], ""), ("<add>1 2</add>\n", [("add", "1 2")], "\n"),
    ("hm <add>1</add><say>x</say>\n", [("add", "1"), ("say", "x")], "hm \n"),
    ("<say><b>bold</b> a<3</say>", [("say", "<b>bold</b> a<3")], ""), ("<sub>1</sub>", [], "<sub>1</sub>"),
    ("<add>1 2", "<add> is not closed", ""), ("1</add>", "</add> without <add>", ""),
    ("<add><say>x</say></add>", "<add> is not closed", ""), ("<add>1</say>", "<add> is not closed", ""),
    ("<add>1</add></add>", "</add> without <add>", ""), ("<add><add>1</add>", "<add> is not closed", ""),
])
def test_calls_are_read_strictly(action, calls, outside):
    if isinstance(calls, str):
        with pytest.raises(ValueError, match=calls):
            parse_calls(action, NAMES)
    else:
        assert parse_calls(action, NAMES) == (calls, outside)


def test_calls_in_json_keep_quotes_braces_and_nesting_and_are_never_invented():
    action = 'so <tool_call>{"name": "say", "arguments": {"text": "what\'s {up}"}}</tool_call>\n'
    assert parse_calls(action, NAMES, "json") == ([("say", {"text": "what's {up}"})], "")
    assert parse_calls("3", NAMES, "json") == ([], "3")
    episode = start(syntax="json")
    assert episode.step(action).observation == "what's {up}\n"
    assert episode.step('<tool_call>{"name": "say"}</tool_call>').observation.startswith("error: Error in tool call 1")
    assert "no tool f; there are add say broken" in episode.step(
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>').observation
    assert env(syntax="json").stop == ("</tool_call>\n",)


# ---- episodes ----

def test_several_calls_are_carried_out_in_order_and_the_answer_ends_the_row():
    episode = start()
    step = episode.step("<add>1 1</add><say>hi</say>\n")
    assert step == Step("2\nhi\n", 0.0, False, {"tool_call": True})
    assert episode.state == [2]
    episode = start()
    episode.step("<add>1 2</add>\n")
    assert episode.step(" 3\n") == Step("", 1.0, True, {"tool_call": None, "format": True, "cut": False})


@pytest.mark.parametrize("action, observation", [
    ("<add>x</add>\n", "error: a must be integer\n"), ("<broken></broken>\n", "error: KeyError: 'oh'\n"),
    ("<add>1\n", "error: <add> is not closed\n"), ("<say>" + "x" * 500 + "</say>\n", "x" * 197 + "...\n"),
    ("<say>a</say>" * 5 + "\n", "error: over 4 calls\n"),
    ("<add>1 2</add><add>x</add>\n", "3\nerror: a must be integer\n"),
])
def test_errors_are_observations(action, observation):
    step = start().step(action)
    assert step.observation == observation and not step.done
    assert step.info["tool_call"] == ("error" not in observation)


def test_a_turn_with_a_broken_call_makes_none_of_its_calls():
    episode = start()
    episode.step("<add>1 2</add><add>1 2\n")
    assert episode.state == []


def test_the_last_turn_is_the_end_and_its_calls_still_count():
    episode = start(max_turns=2, judge=lambda example, state, answer: float(state == [2, 2]))
    assert not episode.step("<add>1</add>\n").done
    step = episode.step("<add>1</add>\n")
    assert step.done and step.reward == 1.0 and step.observation == ""


def test_no_tool_is_called_when_the_time_is_up():
    episode = start(max_seconds=0.0)
    episode.seconds = 0.1
    assert episode.step("<add>1</add>\n").observation == "error: out of time\n"
    assert episode.state == []


def spin(state: list) -> str:
    while True:
        state[0] += 1


def sleep(state: list) -> str:
    time.sleep(0.4)
    state[0] += 1
    return "at last"


def stubborn(state: dict) -> str:
    for count in range(300_000):
        try:
            state[count] = 0
            time.sleep(0)
        except BaseException:
            pass


def leave(state: list) -> str:
    sys.exit("bye")


@pytest.mark.parametrize("function, state", [(spin, [0]), (sleep, [0]), (stubborn, {})])
def test_a_tool_that_hangs_is_left_alone_and_the_row_goes_on(function, state):
    task = env(tools=(Tool(function, "wait", seconds=0.1), Tool(echo, "say")))
    episode, threads, began = task.reset(Example("p", "3", (), state)), threading.enumerate(), time.perf_counter()
    step = episode.step("<wait></wait><say>hi</say>\n")
    assert time.perf_counter() - began < 2, "it was waited for"
    assert step.observation == "error: timed out after 0.1 s\nhi\n" and step.info["tool_call"] is False
    assert all(thread.daemon for thread in threading.enumerate() if thread not in threads), "it holds up the end"
    before = copy.copy(episode.state)
    time.sleep(0.4)
    assert episode.state == before, "the thread still changes what is judged"
    if function is not stubborn:
        assert not {*threading.enumerate()} - {*threads}, "a loop takes time from the trainer"


def test_a_tool_with_a_limit_does_what_it_would_without():
    for seconds in (math.inf, 5.0):
        task = env(tools=(Tool(add, seconds=seconds), Tool(broken, seconds=seconds), Tool(leave, seconds=seconds)))
        episode = task.reset(Example("p", "3", (), []))
        step = episode.step("<add>1 2</add><add>x</add><broken></broken><leave></leave>\n")
        assert step.observation == "3\nerror: a must be integer\nerror: KeyError: 'oh'\nerror: SystemExit: bye\n"
        assert episode.state == [3]


def test_a_tool_result_that_the_policy_writes_itself_changes_nothing():
    episode = start()
    step = episode.step("<say>x</say> x\n3\n<add>1 2</add> 3\nthe answer is 3")  # no stop mark: it went on by itself
    assert step.observation == "x\n3\n" and not step.done, "only the tools' own results follow"
    assert start().step("add 1 2 is\n3\n").reward == 0.0, "a claim without a call"


def test_every_row_starts_from_a_state_of_its_own():
    task, example = env(), Example("p", "3", (), [])
    first, second = task.reset(example), task.reset(example)
    first.step("<add>1 2</add>\n")
    assert (first.state, second.state, example.state) == ([3], [], [])


def test_a_trajectory_is_what_was_seen_done_and_paid():
    episode = start()
    actions = ["<add>1 2</add>\n", "3"]
    steps = [episode.step(action)._replace(action=action) for action in actions]
    turns = trajectory("p", steps)
    assert [turn[:5] for turn in turns] == [("p", actions[0], "3\n", 0.0, False), ("3\n", "3", "", 1.0, True)]


# ---- retrieval ----

def test_bm25_by_hand():
    index = BM25(["a b", "a a c", "d"])  # lengths 2, 3, 1, mean 2; N = 3
    idf_a, idf_c = math.log(1 + 1.5 / 2.5), math.log(1 + 2.5 / 1.5)
    norms = [1.2, 1.2 * (0.25 + 0.75 * 1.5)]
    expected = {0: idf_a * 2.2 / (1 + norms[0]), 1: idf_a * 2 * 2.2 / (2 + norms[1]) + idf_c * 2.2 / (1 + norms[1])}
    found = dict(index.search("A, c?", 5))
    assert found == pytest.approx(expected)
    assert found == pytest.approx({0: 0.470004, 1: 1.380853}, abs=1e-6)
    assert [number for number, _ in index.search("a c", 5)] == [1, 0], "the best first, and no document without a word"
    assert index.search("x") == [] and index.search("") == []
    assert BM25(["x y", "x y"]).search("x", 2)[0][0] == 0, "ties in the order of the documents"
    assert BM25([]).search("x") == [] and BM25(["", ""]).search("x") == []


def test_documents_are_read_from_a_folder(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.md").write_text("the moon")
    (tmp_path / "a.txt").write_bytes(b"the sun \xff")
    (tmp_path / "c.png").write_text("the moon moon")
    index = BM25.read(tmp_path)
    assert index.documents == ["the sun \ufffd", "the moon"]
    assert find(index, "moon") == "the moon"
    with pytest.raises(ValueError, match="nothing found"):
        find(index, "mars")
    with pytest.raises(UserError, match="no document"):
        BM25.read(tmp_path / "none")


# ---- database ----

def test_the_database_does_what_it_says_and_has_limits():
    rows = {"a": "1"}
    assert (get(rows, "a"), put(rows, "b", "2"), delete(rows, "a"), rows) == ("1", "ok", "ok", {"b": "2"})
    for call in (lambda: get(rows, "a"), lambda: delete(rows, "a"), lambda: put(rows, "k", "x" * 1001),
                 lambda: put({str(i): "" for i in range(1000)}, "k", "")):
        with pytest.raises(ValueError):
            call()
    assert [tool.name for tool in DATABASE] == ["get", "put", "take", "give", "delete"]
    rows = {"a": "3"}
    assert take(rows, "a", 3) == give(rows, "a", 2) == "ok" and rows == {"a": "2"}
    for stock, count in (("3", 0), ("3", -1), ("x", 1), ("9" * 19, 1), ("", 1)):
        with pytest.raises(ValueError):
            give({"a": stock}, "a", count)
    for stock, count in (("3", 4), ("3", 0), ("3", -1), ("x", 1), ("\u0663x", 1)):
        with pytest.raises(ValueError, match=f"only {stock}"):
            take({"a": stock}, "a", count)


# ---- tasks ----

def test_lookup_needs_its_documents():
    task = make_env("lookup")
    example = task.sample(1)[0]
    person, first, second = example.prompt.rstrip("?").replace("'s", "").split()
    episode = task.reset(example)
    at = person
    for relation in (first, second):
        seen = episode.step(f"<find>{at}'s {relation}</find>\n").observation
        assert seen.startswith(f"{at}'s {relation} is ")
        at = seen.split()[-1].rstrip(".")
    assert at == example.answer and episode.step(at).reward == 1.0
    answers = {e.answer for e in task.sample(2000) if e.prompt == example.prompt}
    assert len(answers) > 1, "an answer that the weights could know by heart"


def test_the_shop_is_judged_by_its_stock_and_not_by_words():
    task = make_env("shop")
    example = Example("sell 3 axe 2 saw\n", "axe 4 pan 1 saw 0", (), {"axe": "7", "saw": "2", "pan": "1"})
    def play(*actions):
        episode, step = task.reset(example), None
        for action in actions:
            assert step is None or not step.done
            step = episode.step(action)
        return step.reward
    right = "<take>axe 3</take><take>saw 2</take>\n"
    assert play("<get>axe</get><get>saw</get>\n", right, "ok") == 1.0
    assert play("ok") == play("I have sold 3 axe and 2 saw. axe 4 pan 1 saw 0") == 0.0, "nothing was done"
    assert play(right, "no") == play("<take>axe 3</take>\n", "ok") == 0.0
    assert play(right, "<take>pan 1</take>\n", "ok") == 0.0, "something else was changed"
    assert play("<take>axx 3</take>\n", right, "ok") == 1.0, "an error that was made good"
    assert play("<take>axe -3</take>\n", "<take>axe 6</take><take>saw 2</take>\n", "ok") == 0.0, "no negative sales"
    more = Example("sell 3 axe 2 saw\n", "axe 7 pan 1 saw 1", (), {"axe": "7", "saw": "1", "pan": "1"})
    episode = task.reset(more)
    assert episode.step(right).observation == "ok\nerror: only 1\n"
    assert episode.step("<give>axe 3</give>\n").observation == "ok\n" and episode.step("no").reward == 1.0
    for wrong in ((right, "no"), (right, "<give>axe 4</give>\n", "no"), (right, "<give>axe 3</give>\n", "ok")):
        episode = task.reset(more)
        assert [episode.step(action) for action in wrong][-1].reward == 0.0, "half of an order was sold"
    short = Example("sell 3 axe\n", "axe 2", (), {"axe": "2"})
    assert task.reset(short).step("no").reward == 1.0 and task.reset(short).step("ok").reward == 0.0


def test_the_expert_of_every_task_makes_errors_and_recovers():
    for name, sign in (("lookup", None), ("shop", "error"), ("countdown", None), ("code", "error")):
        task, recovered, failed = make_env(name), 0, 0
        for example in task.sample(400):
            episode, seen, step = task.reset(example), [], None
            for action in example.solution:
                step = episode.step(action)
                seen.append(step.observation)
            slipped = any(sign in text for text in seen) if sign else len(seen) > 3
            recovered += slipped and step.reward == 1.0
            failed += step.reward < 1.0
        assert recovered > 8, name
        assert 80 < failed < 300, f"{name}: there is nothing left to learn, or nothing to begin with"


@pytest.mark.parametrize("expression, result", [
    ("2+5+9", "16"), ("9-5*2", "-1"), ("(9-5)*2", "8"), ("2+5", None), ("2+5+9+9", None), ("25+9", None),
    ("16", None), ("2+5+9*1", None), ("2+5+9+0", None), ("2.5+9", None), ("2+5/0+9", None), ("2+5+9+()", None),
    ("2+5+_9", None), ("9**2+5", None), ("9//2+5", None), ("9-.2+5", None), ("9-2e5", None), ("9%5+2", None),
    ("5/2*9", "22.5"), ("9*(5-2)", "27"), ("", None), ("2+5+9" + "+" * 5000, None),
])
def test_countdown_takes_each_number_once(expression, result):
    try:
        got = value(expression, ["2", "5", "9"])
    except ValueError:
        got = None
    assert got == result


@pytest.mark.parametrize("name", ["lookup", "shop", "countdown", "code"])
@pytest.mark.parametrize("difficulty", [1, 2, 3])
def test_every_difficulty_has_problems_that_its_own_budget_can_hold(name, difficulty):
    task = make_env(name, difficulty=difficulty)
    for example in task.sample(100):
        assert sum(map(len, example.solution)) + 1 <= task.max_new_tokens
        assert len(example.solution) <= task.max_turns
    with pytest.raises(UserError, match="difficulty 0"):
        make_env(name, difficulty=0)


def test_random_actions_end_every_episode_without_an_exception():
    rng = Random(0)
    pieces = ["<find>", "</find>", "<get>", "</get>", "<take>", "</take>", "<try>", "</try>", "\n", "axe 3",
              "ann's boss", "1+2*3", "9**9**9", "(" * 300, "\x00", "é😀", "<tool_call>", "{", "\\", " ",
              "<test>", "</test>", "def f(x): return x"]
    for name, count in (("lookup", 150), ("shop", 150), ("countdown", 150), ("code", 10)):
        task = make_env(name)
        for example in task.sample(count):
            episode, step, turns = task.reset(example), None, 0
            while step is None or not step.done:
                step, turns = episode.step("".join(rng.choices(pieces, k=rng.randint(0, 8)))), turns + 1
                assert len(step.observation) <= 4 * (task.max_observation + 1)
            assert turns <= task.max_turns and 0.0 <= step.reward <= 1.0


def test_the_environment_that_the_docs_show_works_and_is_short():
    page = (Path(__file__).parents[1] / "docs/agents.md").read_text(encoding="utf-8")
    source = page.split("```python\n")[1].split("```")[0]
    assert len([line for line in source.splitlines() if line.strip()]) <= 30
    space: dict = {}
    exec(source, space)
    task = space["safe"]()
    for example in task.sample(50):
        episode, steps = task.reset(example), []
        for action in example.solution:
            steps.append(episode.step(action))
        assert steps[-1].done and steps[-1].reward == 1.0
    assert task.reset(example).step("<feel>7</feel>\n").observation == "error: no such wheel\n"
