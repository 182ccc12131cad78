"""Rewards without labels, and tasks that are posed in another way: in two wordings, or the easy ones first."""

import math

import pytest
import torch
from ranks import run_ranks
from stubs import random_policy
from torch.testing import assert_close

import train_grpo
from minirl.config import UserError
from minirl.env import make_env
from minirl.env.base import Step
from minirl.env.loop import collect
from minirl.env.posing import Curriculum, TwoWordings, pose
from minirl.label_free import final_answer, majority, pseudo_rewards
from minirl.logprobs import rollout_certainty, token_logprobs
from minirl.metrics import read_metrics
from minirl.objective import look_again, make_advantages, rewards_of
from minirl.parallel import init_mesh
from minirl.parallel.layout import parallelize
from minirl.recipes import RecipeOptions, fill_in
from minirl.rollout import Rollout
from minirl.tokenizer import ByteTokenizer


def said(texts, group) -> Rollout:
    """One turn a row."""
    n = len(texts)
    return Rollout(tokens=torch.zeros(n, 3).long(), action_mask=torch.ones(n, 2).bool(), lengths=torch.full((n,), 3),
                   group=torch.tensor(group), sample_ids=torch.arange(n), rewards=torch.zeros(n),
                   old_logprobs=torch.full((n, 2), -1.0), turns=[[Step("", 0.0, True, {}, text)] for text in texts])


# ---- votes ----

def test_co_rewarding_takes_the_majority_of_the_other_wording():
    """The paper's case: AAB to the problem, BBA to its other wording."""
    rollout = said(["A", "A", "B", "B", "B", "A"], [6, 6, 6, 7, 7, 7])
    assert pseudo_rewards("co-rewarding", rollout).tolist() == [0, 0, 1, 0, 0, 1]
    assert pseudo_rewards("majority", rollout).tolist() == [1, 1, 0, 1, 1, 0]
    assert rollout.rewards.tolist() == [0] * 6


def test_who_says_nothing_has_no_vote_and_is_not_paid():
    assert majority(["", None]) == "" and majority([None, None]) is None and majority(["B", "A"]) == "B"
    rollout = said(["", " ", "A", "", "", ""], [0, 0, 0, 1, 1, 1])
    assert pseudo_rewards("majority", rollout).tolist() == [0, 0, 1, 0, 0, 0]
    assert pseudo_rewards("co-rewarding", rollout).tolist() == [0] * 6
    with pytest.raises(UserError, match="twice a multiple"):
        pseudo_rewards("co-rewarding", said(["A", "B"], [0, 0]))


@pytest.mark.parametrize(("text", "answer"), [
    ("12", "12"), (" 12\n", "12"), ("<think>3+9=12</think><answer> 12</answer>", "12"), ("so it is #### 12", "12"),
    ("<answer>1</answer><answer>2</answer>", "2"), ("no idea", "no idea"), ("", None), ("<answer></answer>", None)])
def test_what_a_row_says_in_the_end(text, answer):
    assert final_answer([Step("", 0.0, True, {}, text)]) == answer


# ---- certainty ----

def test_certainty_is_the_divergence_of_a_uniform_choice_from_the_policy():
    policy = random_policy(11)
    tokens = torch.tensor([[3, 1, 4, 1, 5], [2, 7, 1, 8, 0]])
    rollout = Rollout(tokens, torch.ones(2, 4).bool(), torch.tensor([5, 4]), torch.arange(2), torch.arange(2))
    for temperature in (1.0, 0.5):
        every = torch.stack([token_logprobs(policy, torch.cat((tokens[:, : s + 1], torch.full((2, 1), word)), 1),
                                            temperature)[:, s].detach() for s in range(4) for word in range(11)])
        logprobs = every.view(4, 11, 2).permute(2, 0, 1)  # (B, S, V)
        uniform = torch.full_like(logprobs, 1 / 11)
        want = (uniform * (uniform.log() - logprobs)).sum(-1)
        assert_close(rollout_certainty(policy, rollout, 1, temperature)[0], want[0])
        assert_close(rollout_certainty(policy, rollout, 2, temperature)[1, :3], want[1, :3])


def test_an_unsure_policy_has_certainty_0_and_every_row_its_mean(monkeypatch):
    rollout = said(["a", "b"], [0, 0]).replace(action_mask=torch.tensor([[True, True], [False, True]]))
    certainty = torch.tensor([[1.0, 2.0], [9.0, 4.0]])
    assert pseudo_rewards("self-certainty", rollout, certainty).tolist() == [1.5, 4.0]
    policy = random_policy(11)
    with torch.no_grad():
        policy.head_weight.zero_()
    assert rollout_certainty(policy, rollout, 2).abs().max() < 1e-12
    import minirl.logprobs
    whole = rollout_certainty(random_policy(11), rollout, 2)
    monkeypatch.setattr(minirl.logprobs, "KEEP_LOGITS", 1)  # a column at a time
    assert_close(rollout_certainty(random_policy(11), rollout, 2), whole)


def certainty_on(axis):
    mesh = init_mesh("cpu", **{axis: 2} if axis else {})
    policy = random_policy(12)
    if axis:
        parallelize(policy, mesh)
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 0, 0]])
    rollout = Rollout(tokens, torch.ones(2, 5).bool(), torch.tensor([6, 4]), torch.arange(2), torch.arange(2))
    return rollout_certainty(policy, rollout, 1, mesh=mesh)[:, :3]


@pytest.mark.dist
@pytest.mark.parametrize("axis", ["tp", "pp", "cp"])
def test_ranks_agree_about_certainty(axis):
    want = certainty_on("")
    for got in run_ranks(certainty_on, 2, axis):
        assert_close(got, want, atol=1e-9, rtol=0)


# ---- in a recipe ----

class Options(RecipeOptions):
    def __init__(self, **options):
        super().__init__(**options)
        fill_in(self)


def test_the_stand_in_is_paid_and_the_verdict_stays():
    rollout = said(["A", "A", "B", "B"], [0] * 4).replace(rewards=torch.tensor([0.0, 0, 1, 0]))
    options = Options(recipe="majority")
    seen = look_again(None, rollout, options, 0, 4, 1.0)
    assert rewards_of(seen, options, 2)[0][1].tolist() == [1, 1, 0, 0] and seen.rewards.tolist() == [0, 0, 1, 0]
    assert make_advantages(seen, options, 2)[:, 0].tolist() == [1, 1, -1, -1]


def test_what_needs_the_verdict_is_refused_without_labels():
    for options, text in ((dict(recipe="majority", resample=1), "--resample"),
                          (dict(recipe="intuitor", ucpo_tau=0.2), "--ucpo-tau"),
                          (dict(recipe="majority", credit="turn"), "--credit")):
        with pytest.raises(UserError, match=text):
            Options(**options)
    with pytest.raises(UserError, match="two wordings, and task walk has one"):
        pose(train_grpo.Config(task="walk", recipe="co_rewarding"))
    with pytest.raises(UserError, match="--curriculum"):
        pose(train_grpo.Config(task="gsm8k", data="x.jsonl", curriculum=5))


# ---- how a task is posed ----

@pytest.mark.parametrize("task", ["addition", "thought"])
def test_both_wordings_have_one_answer_and_belong_together(task):
    plain, env = make_env(task), TwoWordings(make_env(task))
    whole = env.sample(40)
    for i in range(20):
        first, second = whole[2 * i : 2 * i + 2]
        assert first == plain.sample(1, i)[0] and first.answer == second.answer
        assert sorted(first.prompt) == sorted(second.prompt)
    assert sum(whole[2 * i].prompt != whole[2 * i + 1].prompt for i in range(20)) > 15
    assert env.sample(7, 5) + env.sample(28, 12) == whole[5:40], "slices of ranks do not concatenate"
    assert env.sample(9, 3, "eval") == plain.sample(9, 3, "eval") and env.size("eval") == plain.size("eval")
    held = {example.prompt for example in plain.sample(300, split="eval")}
    assert not held & {example.prompt for example in env.sample(600)}, "a wording is held out"


def test_a_curriculum_goes_from_easy_to_hard_and_is_judged_by_its_own_task():
    env = pose(train_grpo.Config(task="thought", difficulty=3, curriculum=10, recipe="co_rewarding"))
    lengths = [example.prompt.count("+") for example in env.sample(100)]
    assert lengths == [2] * 20 + [3] * 20 + [4] * 60, "each problem comes in two wordings"
    assert {example.prompt.count("+") for example in env.sample(20, split="eval")} == {4}
    env = pose(train_grpo.Config(task="calculator", difficulty=2, curriculum=3))
    assert isinstance(env, Curriculum) and env.max_new_tokens == make_env("calculator").max_new_tokens
    easy, hard = env.sample(1)[0], env.sample(1, 50)[0]
    call = "<calc>" + easy.prompt[:-1] + "</calc>"
    assert len(env.reset(easy).step(call).observation) == 4 and len(env.reset(hard).step(call).observation) == 7
    assert env.sample(4, 1) == env.sample(5)[1:]
    assert hard.solution == make_env("calculator").sample(1, 50)[0].solution


def test_a_policy_plays_both_wordings():
    tokenizer = ByteTokenizer()
    env = pose(train_grpo.Config(task="addition", difficulty=1, curriculum=4, recipe="co_rewarding"))
    rollout = collect(random_policy(tokenizer.vocab_size), tokenizer, env, env.sample(4), 2, max_new_tokens=2)
    assert pseudo_rewards("co-rewarding", rollout).shape == (8,) and math.isfinite(rollout.rewards.sum())


@pytest.mark.parametrize("recipe", ["co_rewarding", "intuitor"])
def test_a_run_without_labels_reports_the_verdict(recipe, tmp_path):
    train_grpo.main(train_grpo.Config(
        run_dir=str(tmp_path), device="cpu", dtype="float64", difficulty=1, recipe=recipe, curriculum=8, steps=2,
        eval_problems=8, prompts_per_step=4, group_size=4, minibatches=1, eval_every=0, cold_start_steps=5))
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert rows[-1]["step"] == 2 and rows[-1]["reward_mean"] <= 1 and rows[-1]["skipped_steps"] == 0
