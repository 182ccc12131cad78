"""Every task speaks one protocol; sampling depends on the index alone; nothing held out is trained on."""

import json
import subprocess
import sys

import pytest

from minirl.config import UserError
from minirl.env import TASKS, Addition, Calculator, Example, make_env
from minirl.env.base import sample_rows
from minirl.env.gsm8k import GSM8K


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def row(number):
    answer = f"It is <<{number}+0={number}>>{number}.\n#### {number:,}"
    return {"question": f"What is {number}+0?", "answer": answer}


def prompts(examples):
    return {example.prompt for example in examples}


@pytest.fixture
def make(tmp_path):
    """make(name, **options) -> Env; gsm8k gets a file of 40 rows."""
    data = write_rows(tmp_path / "rows.jsonl", [row(1000 + number) for number in range(40)])
    return lambda name, **options: make_env(name, data=data if name.startswith("gsm8k") else "", **options)


@pytest.mark.parametrize("name", TASKS)
def test_the_expert_is_paid_when_its_solution_is_right_and_every_episode_ends(make, name):
    env = make(name)
    assert env.name == name and isinstance(env.stop, tuple) and env.max_new_tokens > 0
    paid = 0
    for example in env.sample(100) + env.sample(20, split="eval"):
        episode, rewards = env.reset(example), []
        assert episode.prompt == example.prompt and example.solution
        for turn, action in enumerate(example.solution):
            step = episode.step(action)
            assert step.done == (turn == len(example.solution) - 1), "demonstration and episode disagree"
            assert bool(step.observation) != step.done, "text after the last action, or none after another"
            rewards.append(step.reward)
        if name in ("addition", "gsm8k"):
            assert sum(rewards) == 1.0
        elif name == "calculator":
            assert sum(rewards) == float(len(example.solution) == 2), "the novice's estimates are not paid"
        paid += sum(rewards) >= 1
    assert 10 < paid <= 120


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("split", ["train", "eval"])
def test_a_problem_depends_on_seed_split_and_index_alone(make, name, split):
    whole = make(name).sample(100, split=split)
    env = make(name)
    assert env.sample(30, start=70, split=split) + env.sample(70, split=split) == whole[70:] + whole[:70]
    assert [env.sample(1, i, split)[0] for i in range(100)] == whole, "slices of ranks do not concatenate"
    if not name.startswith("gsm8k") or split == "train":
        assert make(name, seed=1).sample(100, split=split) != whole


def test_problems_are_the_same_in_another_process():
    code = "from minirl.env import *; print([make_env(n).sample(5) for n in ('addition', 'calculator')])"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    here = str([make_env(name).sample(5) for name in ("addition", "calculator")])
    assert other.stdout.strip() == here, "Python's hash(), which differs from process to process"


@pytest.mark.parametrize("difficulty", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("env_class", [Addition, Calculator])
def test_no_held_out_problem_is_ever_trained_on(env_class, difficulty):
    env, other_seed = env_class(difficulty), env_class(difficulty, seed=7)
    train = prompts(env.sample(1000) + other_seed.sample(300))
    held = prompts(env.sample(200, split="eval") + other_seed.sample(100, split="eval"))
    if env_class is Addition:  # neither way round
        held |= {"+".join(reversed(prompt[:-1].split("+"))) + "=" for prompt in held}
    assert len(train) > 80 and held and not train & held


@pytest.mark.parametrize("difficulty, size", [(1, 8), (2, 992)])  # of 100 and of 10,000
def test_held_out_sums_are_about_a_tenth_of_all_and_distinct(difficulty, size):
    env = Addition(difficulty)
    assert env.size("eval") == size and env.size("train") is None
    examples = env.sample(size, split="eval")
    assert len(prompts(examples)) == size, "an evaluation counts a problem twice"
    assert env.sample(size, size, "eval") == examples
    assert prompts(Addition(difficulty, seed=1).sample(size, split="eval")) == prompts(examples)
    if difficulty == 1:  # all the others come up in training
        assert len(prompts(env.sample(2000))) == 100 - size


def test_large_sums_are_drawn_for_evaluation_and_hardly_repeat():
    for difficulty in (3, 4):
        env = Addition(difficulty)
        assert env.size("eval") is None
        assert len(prompts(env.sample(300, split="eval"))) > 290


def test_addition_pays_the_exact_sum_only():
    episode = Addition().reset(Example("37+58=", "95"))
    for action in ("95", "95\n", "95\n\n", " 95", "095", "95.", "9", "95=95", ""):
        assert episode.step(action)[:3] == ("", float(action in ("95", "95\n")), True)
    assert all(len(example.answer) + 1 <= Addition(3).max_new_tokens for example in Addition(3).sample(500))


def test_an_epoch_is_every_row_once_in_an_order_of_its_own():
    rows = [Example(str(number), "") for number in range(50)]
    epochs = [sample_rows(rows, 0, 50, 50 * epoch) for epoch in range(3)]
    assert all(sorted(epoch, key=rows.index) == rows for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0], "the epoch number is not used"
    assert rows not in epochs
    assert sample_rows(rows, 0, 100, 25) == (epochs[0] + epochs[1] + epochs[2])[25:125]


def test_gsm8k_rows_become_prompts_solutions_and_golds(make):
    env = make("gsm8k")
    assert env.size("train") == 36 and env.size("eval") == 4
    first, *_ = env.sample(1, split="eval")
    assert first == Example("Question: What is 1036+0?\nAnswer:", "1,036", (" It is 1036.\n#### 1,036",))
    assert not prompts(env.sample(72)) & prompts(env.sample(4, split="eval"))
    episode = env.reset(first)
    assert episode.step(" so 1036\nQuestion:").reward == 1.0  # the stop string is part of the action
    assert episode.step(" #### 1036\nQ: 2+2?\n#### 4").reward == 1.0
    assert episode.step(" #### 1035").reward == 0.0


def test_gsm8k_takes_evaluation_rows_out_of_training_and_can_keep_annotations(tmp_path):
    data = write_rows(tmp_path / "train.jsonl", [row(number) for number in range(10)])
    eval_data = write_rows(tmp_path / "eval.jsonl", [row(3), row(77)])
    env = GSM8K(data, eval_data, keep_annotations=True)
    assert env.size("train") == 9 and env.size("eval") == 2
    assert env.sample(1, split="eval")[0].solution == (" It is <<3+0=3>>3.\n#### 3",)
    assert not prompts(env.sample(18)) & prompts(env.sample(2, split="eval"))
    with pytest.raises(UserError, match=r"train.jsonl.*10"):
        GSM8K(data, data)


GOOD = json.dumps(row(1))


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("", "is empty"), ("\n \n", "is empty"), (GOOD + "\n{oops\n", ":2: not JSON"),
        (GOOD + '\n\n["a"]', ":3: a list, not a JSON object"),
        ('{"question": "q"}', ':1: no text under "answer"'),
        ('{"question": 5, "answer": "#### 5"}', ':1: no text under "question"'),
        ('{"question": "", "answer": "#### 5"}', ':1: no text under "question"'),
        ('{"question": "q", "answer": "it is 5"}', ":1: .*it is 5.*####"),
        ('{"question": "q", "answer": "#### five"}', ":1: .*#### five"), ("[" * 100000, ":1: not JSON"),
        (GOOD, "leaves no row"),
    ],
)  # fmt: skip
def test_a_bad_gsm8k_file_is_one_line_with_file_and_line_number(tmp_path, text, complaint):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=f"bad.jsonl.*{complaint}|bad.jsonl{complaint}") as caught:
        GSM8K(str(path))
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "latin.jsonl").write_bytes('{"question": "é"}'.encode("latin-1"))
    with pytest.raises(UserError, match=r"latin.jsonl:1: not JSON"):
        GSM8K(str(tmp_path / "latin.jsonl"))
    with pytest.raises(UserError, match=r"missing.jsonl: No such file"):
        GSM8K(str(tmp_path / "missing.jsonl"))
    with pytest.raises(UserError, match="directory"):
        GSM8K(str(tmp_path))


@pytest.mark.parametrize(
    "name, options, complaint",
    [
        ("gsm9k", {}, 'gsm9k.*"gsm8k".*addition, calculator, code, countdown, gsm8k'),
        ("gsm8k", {}, "give --data"),
        ("addition", {"data": "rows.jsonl"}, "rows.jsonl.*gsm8k"),
        ("calculator", {"eval_data": "rows.jsonl"}, "rows.jsonl.*gsm8k"),
        ("addition", {"difficulty": 0}, "difficulty 0"),
        ("calculator", {"difficulty": -1}, "difficulty -1"),
    ],
)
def test_a_wrong_task_or_option_is_refused_with_the_remedy(name, options, complaint):
    with pytest.raises(UserError, match=complaint):
        make_env(name, **options)


@pytest.mark.parametrize("name", TASKS)
def test_a_split_that_does_not_exist_is_refused_instead_of_served_training_rows(make, name):
    for call in (lambda: make(name).sample(1, split="test"), lambda: make(name).size("validation")):
        with pytest.raises(UserError, match="unknown"):
            call()


def test_real_gsm8k_rows_are_read_held_out_and_paid(shared):
    env = make_env("gsm8k", data=str(shared / "data/gsm8k/train.jsonl"))
    assert env.size("train") == 900 and env.size("eval") == 100
    for example in env.sample(900) + env.sample(100, split="eval"):
        assert env.reset(example).step(example.solution[0]).reward == 1.0
        assert "<<" not in example.solution[0]
    env = make_env("gsm8k", str(shared / "data/gsm8k/train.jsonl"), str(shared / "data/gsm8k/test.jsonl"))
    assert env.size("train") == 1000 and env.size("eval") == 200
