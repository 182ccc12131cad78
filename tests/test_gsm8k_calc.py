"""GSM8K with a calculator, and word problems in its format."""

import json
import re
from random import Random

import pytest

from minirl.config import UserError
from minirl.data import word_problems
from minirl.data.gsm8k_agent import convert_gsm8k
from minirl.env import make_env
from minirl.env.gsm8k_calc import GSM8KCalc
from minirl.env.loop import demonstrate
from minirl.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()


def write(path, *answers):
    path.write_text("".join(json.dumps({"question": f"{path.stem} q{i}", "answer": answer}) + "\n"
                            for i, answer in enumerate(answers)))
    return str(path)


@pytest.fixture
def env(tmp_path):
    data = write(tmp_path / "train.jsonl", "12+7=<<12+7=19>>19\n2*19=<<2*19=38>>38\n#### 38")
    return GSM8KCalc(data, write(tmp_path / "eval.jsonl", "No sum.\n#### 3"))


def test_the_demonstration_is_calls_and_what_follows_and_results_are_not_learnt(env):
    (example,) = env.sample(1)
    assert example.solution == (" 12+7=<calc>12+7</calc>\n", "19\n2*19=<calc>2*19</calc>\n", "38\n#### 38")
    rollout = demonstrate(BYTES, env, [example])
    tokens, mask = rollout.tokens[0].tolist(), [False, *rollout.action_mask[0].tolist()]
    assert BYTES.decode(tokens) == ("Question: train q0\nAnswer: 12+7=<calc>12+7</calc>\n19\n19\n"
                                    "2*19=<calc>2*19</calc>\n38\n38\n#### 38")
    given = BYTES.decode([token for token, learnt in zip(tokens, mask, strict=True) if not learnt])
    assert given == "Question: train q0\nAnswer:19\n38\n", "the prompt and what the calculator wrote"


@pytest.mark.parametrize(("actions", "observations", "parts"), [
    (["<calc>12+7</calc>\n", "#### 38"], ["19\n"], (1.0, 1.0, 1.0)),
    (["#### 38"], [], (1.0, 1.0, 0.0)), (["it is 38"], [], (1.0, 0.0, 0.0)), (["#### 39"], [], (0.0, 1.0, 0.0)),
    (["<calc>x</calc>\n", "#### 38"], ["error: not arithmetic\n"], (1.0, 1.0, 0.0)),
    (["<calc>1</calc><calc>2</calc>\n", ""], ["error: write <calc>12+7</calc>\n"], (0.0, 0.0, 0.0)),
    (["<calc>1+", ""], ["error: write <calc>12+7</calc>\n"], (0.0, 0.0, 0.0)),
    (["#### 38 </calc>\n", "#### 41 #### 38"], ["error: write <calc>12+7</calc>\n"], (0.0, 0.0, 0.0)),
    (["####"], [], (0.0, 0.0, 0.0))])
def test_rewards_by_part(env, actions, observations, parts):
    episode = env.reset(env.sample(1)[0])
    for action, observation in zip(actions, observations):
        step = episode.step(action)
        assert (step.observation, step.reward, step.done) == (observation, 0.0, False)
    step = episode.step(actions[-1])
    assert step.done and step.observation == "" and tuple(step.info["rewards"].values()) == parts
    assert step.reward == pytest.approx(parts[0] + 0.1 * parts[1] + 0.1 * parts[2])
    assert (step.reward >= 1) == (parts[0] == 1), "no sum of the small ones passes for a solution"


def test_calls_come_to_an_end(env):
    episode = env.reset(env.sample(1)[0])
    steps = [episode.step("<calc>1+1</calc>\n") for _ in range(12)]
    assert [step.done for step in steps] == [False] * 11 + [True] and steps[-1].reward == pytest.approx(0.1)
    assert steps[-1].info["cut"] and not env.reset(env.sample(1)[0]).step("#### 38").info["cut"]


def test_rows_that_the_calculator_cannot_follow_are_left_out(tmp_path):
    data = write(tmp_path / "rows.jsonl", "<<1+1=2>>2\n#### 2", "<<x=2>>2\n#### 2", "<<2+2=4>>4\n#### 4")
    env = make_env("gsm8k_calc", data, write(tmp_path / "eval.jsonl", "e\n#### 1"))
    assert env.size("train") == 2
    with pytest.raises(UserError, match="no row whose calculations"):
        make_env("gsm8k_calc", write(tmp_path / "x.jsonl", "<<x=2>>2\n#### 2"), data)


def test_word_problems_are_right_and_in_the_format(tmp_path, capsys):
    word_problems.main(word_problems.Config(str(tmp_path / "a.jsonl"), rows=300, steps=3))
    word_problems.main(word_problems.Config(str(tmp_path / "b.jsonl"), rows=300, steps=3, seed=1))
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert rows != [json.loads(line) for line in (tmp_path / "b.jsonl").read_text().splitlines()]
    steps = [convert_gsm8k(row)["steps"] for row in rows]  # which does every calculation anew
    assert len(rows) == 300 and set(steps) <= {1, 2, 3, 4, 5, 6} and min(steps) == 1
    env = GSM8KCalc(str(tmp_path / "a.jsonl"))
    assert env.size("train") + env.size("eval") >= 290
    for example in env.sample(50):
        episode = env.reset(example)
        assert [episode.step(action) for action in example.solution][-1].reward == pytest.approx(1.2)
    assert word_problems.problem(Random(3), 2) == word_problems.problem(Random(3), 2)
    with pytest.raises(UserError, match="above 0"):
        word_problems.Config(str(tmp_path / "a.jsonl"), rows=0)
    for seed in range(200):
        numbers = re.findall(r"\d+", word_problems.problem(Random(seed), 3, largest=9)["question"])
        assert all(2 <= int(number) <= 9 for number in numbers)
    some, plain = ([word_problems.problem(Random(seed), 2, plain=share) for seed in range(50)]
                   for share in (False, True))
    assert [row | {"answer": re.sub("<<.*?>>", "", row["answer"])} for row in some] == plain
    with pytest.raises(UserError, match="a share lies"):
        word_problems.Config("a.jsonl", plain=2)
    with pytest.raises(UserError, match="9 or above"):
        word_problems.Config("a.jsonl", largest=8)
