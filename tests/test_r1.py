"""DeepSeek-R1 in small: the task with thoughts, its rewards, rejection sampling, and early exit."""

import contextlib
import io
import json
import shlex
from pathlib import Path

import pytest
import torch
from stubs import Reader

import train_grpo
import train_sft
from minirl import early_exit, rejection
from minirl.config import UserError, cli
from minirl.data.dataset import read_rows
from minirl.early_exit import confidence, think
from minirl.env import make_env
from minirl.env.base import Step
from minirl.env.loop import demonstrate
from minirl.env.thought import Thought, answer_of, well_formed, work_out
from minirl.mixture import paid_by
from minirl.rejection import kept_rows
from minirl.rollout import Rollout
from minirl.tokenizer import ByteTokenizer

REPO = Path(__file__).resolve().parents[1]
BYTES = ByteTokenizer()


# ---- the task ----

def test_a_thought_goes_step_by_step_and_may_look_again():
    assert work_out([7, 8, 5, 9]) == "7+8=15 15+5=20 20+9=29"
    assert work_out([7, 8], looks=2) == "7+8=15 wait 7+8=15 wait 7+8=15"
    for example in Thought(3).sample(300):
        (action,) = example.solution
        right = Thought(3).reset(example).step(action).reward
        assert right == well_formed(action) == action.startswith("<think>"), "a guess of the novice is never right"
        assert len(action) + 1 <= Thought(3).max_new_tokens and example.prompt.count("+") == 4


@pytest.mark.parametrize(("action", "answer"), [
    ("<answer>29</answer>", "29"), ("<think>1</think><answer> 29 </answer>", " 29 "), ("29", None), ("", None),
    ("<answer>29", None), ("29</answer>", None), ("</answer>29<answer>", None),
    ("<answer>28</answer><answer>29</answer>", None), ("<answer>28<answer>29</answer>", None)])
def test_an_answer_stands_between_its_tags_once(action, answer):
    assert answer_of(action) == answer


def test_only_the_number_is_judged_and_only_the_form_is_the_format():
    env = Thought()
    example = next(e for e in env.sample(50) if e.answer == "20")
    for action, right, formed in (("<answer>20</answer>", 1.0, False),
                                  ("<think>x</think><answer>20</answer>", 1.0, True),
                                  ("<think>x</think><answer>21</answer>", 0.0, True), ("20", 0.0, False),
                                  ("<think></think><answer>20</answer>", 1.0, False)):
        step = env.reset(example).step(action)
        assert (step.reward, step.info["format"]) == (right, formed), action
        paid = paid_by(env, "r1").reset(example).step(action).reward
        assert paid == pytest.approx(0.8 * right + 0.2 * formed), "R1-Zero pays accuracy and format, and nothing else"


# ---- rejection sampling ----

def test_what_is_right_and_ended_is_kept_the_shortest_first_and_no_text_twice():
    env = make_env("addition", difficulty=1)
    examples = env.sample(3)
    texts = [["a", "bb", "bb", "ccc"], ["d", "e", "f", "g"], ["h", "ii", "j", "k"]]
    rewards = [0.0, 1, 1, 1, 0, 0, 0, 0, 1, 1, 0.5, 1]
    finished = [True] * 11 + [False]
    lengths = [len(text) for row in texts for text in row]
    rollout = Rollout(torch.zeros(12, 4).long(), torch.ones(12, 3).bool(), torch.tensor(lengths),
                      torch.arange(12) // 4, torch.arange(12), rewards=torch.tensor(rewards),
                      finished=torch.tensor(finished), turns=[[Step("", 0, True, {}, t)] for row in texts for t in row])
    for most, kept in ((1, ["bb", "h"]), (2, ["bb", "ccc", "h", "ii"])):
        rows = kept_rows(rollout, examples, BYTES, most)
        assert [row["completion"] for row in rows] == kept
        assert {row["prompt"] for row in rows} == {examples[0].prompt, examples[2].prompt}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run on one-digit addition that is right now and then."""
    folder = tmp_path_factory.mktemp("r1") / "run"
    train_grpo.main(train_grpo.Config(
        run_dir=str(folder), device="cpu", difficulty=1, steps=1, prompts_per_step=4, group_size=4, minibatches=1,
        eval_problems=8, eval_every=0, cold_start_steps=60, rewards="r1"))
    return folder


def test_the_rows_are_the_tapes_that_the_policy_wrote_and_train_sft_reads_them(run, tmp_path):
    out = tmp_path / "rows.jsonl"
    with contextlib.redirect_stdout(io.StringIO()) as text:
        rejection.main(cli(rejection.Config, [str(run), str(out), "--problems", "60", "--samples", "8", "--device",
                                              "cpu"]))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert f"{len(rows)} rows in {out}" in text.getvalue() and 10 < len(rows) <= 60
    for row in rows:
        a, b = row["prompt"][:-1].split("+")
        assert int(row["completion"]) == int(a) + int(b)
    from minirl.env.base import Example
    batch = read_rows(str(out), str(out), BYTES, "auto", 0, 0).held_out(0, len(rows))
    tape = demonstrate(BYTES, make_env("addition", difficulty=1),
                       [Example(row["prompt"], "", (row["completion"],)) for row in rows])
    assert torch.equal(batch.tokens, tape.tokens) and torch.equal(batch.action_mask, tape.action_mask)
    train_sft.main(train_sft.Config(run_dir=str(tmp_path / "sft"), device="cpu", task="jsonl", data=str(out), steps=1,
                                    batch_size=4, eval_rows=0, hidden_size=16, layers=1))


def test_what_cannot_become_rows_is_refused_in_one_line(run, tmp_path, monkeypatch):
    out = str(tmp_path / "rows.jsonl")
    with pytest.raises(UserError, match="does not say what its task is"):
        rejection.main(rejection.Config(str(tmp_path), out))
    played = rejection.collect

    def twice(*args, **options):
        rollout = played(*args, **options)
        return rollout.replace(turns=[2 * turns for turns in rollout.turns])

    def wrong(*args, **options):
        return played(*args, **options).replace(rewards=torch.zeros(16))

    for collect, text in ((twice, "takes several turns"), (wrong, "none of the 16 answers")):
        monkeypatch.setattr(rejection, "collect", collect)
        with pytest.raises(UserError, match=text):
            rejection.main(rejection.Config(str(run), out, problems=4, device="cpu"))
    assert not Path(out).exists()


# ---- early exit ----

def test_the_two_means_of_the_paper():
    probs = torch.tensor([[1, 0.6, *[1] * 7, 0.1], [0.5] * 10]).double()
    mask = torch.arange(10)[None] < torch.tensor([[9], [10]])
    assert confidence(probs.log(), mask).tolist() == pytest.approx([0.955556, 0.5], abs=1e-6)
    assert confidence(probs.log(), mask, "geometric").tolist() == pytest.approx([0.944822, 0.5], abs=1e-6)
    least = early_exit.Config("a run").threshold
    leaves = [bool(confidence(probs.log(), mask, mean)[0] > least) for mean in ("arithmetic", "geometric")]
    assert least == 0.95 and leaves == [True, False], "one goes, the other thinks on"


PROMPT, WHOLE = "1+2=", "<think>1+2=3 wait 1+2=3 wait no</think><answer>3</answer>"
SHORT, ASK = "<think>1+2=3</think><answer>3</answer>", "</think><answer>"


@pytest.fixture
def thinking(monkeypatch):
    """thinking(p, **options): one row of a policy that says WHOLE, and 3 when it is asked, each token with p."""
    texts = [SHORT, "<think>1+2=3 wait 1+2=3" + ASK + "3</answer>", WHOLE]  # where two begin alike, the last one counts
    rows = [[*BYTES.encode(PROMPT + text), BYTES.eos_id] for text in texts]

    def run(p, **options):
        monkeypatch.setattr(early_exit, "rollout_logprobs",
                            lambda policy, trials, size: torch.full(trials.action_mask.shape, p).log())
        return think(Reader(BYTES.vocab_size, rows), BYTES, [BYTES.encode(PROMPT)], max_new_tokens=80, **options)

    return run


def test_a_sure_trial_ends_the_thought_and_a_doubtful_one_is_as_if_it_had_not_been(thinking):
    sure = thinking(0.99)
    assert (sure.texts, sure.tokens, sure.trials, sure.exited) == ([SHORT], [len(SHORT)], [0], [True])
    doubt = thinking(0.6)
    assert doubt.texts == [WHOLE] and doubt.exited == [False] and doubt.trials == [2 * len(ASK + "3</answer>")]
    never = thinking(0.99, threshold=2.0)
    assert never.texts == [WHOLE] and never.tokens == [len(WHOLE) + 1] and never.trials == [0]
    other = thinking(0.6, wait="never said")
    assert other.texts == [WHOLE] and other.trials == [0]


def test_a_trial_that_does_not_end_is_no_answer(thinking):
    found = thinking(0.99, trial_tokens=3)
    assert found.texts == [WHOLE] and found.exited == [False] and found.trials == [2 * (len(ASK) + 3)]
    with pytest.raises(UserError, match="a word to stop at"):
        thinking(0.99, wait="")


def test_early_exit_from_the_command_line(tmp_path, capsys):
    best = train_sft.main(train_sft.Config(run_dir=str(tmp_path), device="cpu", task="thought", difficulty=1, steps=2,
                                           batch_size=4, eval_rows=0, eval_problems=4, hidden_size=16, layers=1))
    capsys.readouterr()
    early_exit.main(cli(early_exit.Config, [str(best), "--problems", "5", "--device", "cpu"]))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["threshold", "never", "0.95"]


# ---- the page ----

def test_the_commands_of_the_page_are_commands():
    scripts = {"train_grpo.py": train_grpo.Config, "train_sft.py": train_sft.Config}
    seen = 0
    text = (REPO / "docs" / "r1.md").read_text().replace("\\\n", " ")
    for line in text.splitlines():
        words = shlex.split(line, comments=True) if line.startswith(("torchrun train_", "python -m minirl.")) else []
        if words[:1] == ["torchrun"]:
            cli(scripts[words[1]], words[2:])
        elif words and words[2] == "minirl.rejection":
            cli(rejection.Config, words[3:])
        elif words and words[2] == "minirl.early_exit":
            cli(early_exit.Config, words[3:])
        seen += bool(words)
    assert seen >= 10
