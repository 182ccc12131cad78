"""Credit over turns: the numbers of the papers, tables worked by hand, and what the expected update is."""

import math
from functools import partial

import pytest
import torch
from ranks import at_once, run_ranks
from torch import tensor
from torch.testing import assert_close

import train_grpo
from minirl import agent_prm, exact
from minirl.advantages import group_advantages
from minirl.config import UserError
from minirl.env import make_env
from minirl.env.base import Step
from minirl.gae import gae
from minirl.metrics import read_metrics
from minirl.tree import Fork, back_up, critical_forks, row_mean_through, surgical_loss, tree_paths
from minirl.turns import (
    bilevel_gae,
    ended_by_itself,
    number_sets,
    spread,
    state_action_samples,
    states,
    turn_advantages,
    turn_ends,
    turn_numbers,
    turn_returns,
    turn_rewards,
    without_void_turns,
)

DOUBLE = torch.float64


def played(*actions, seen=(), paid=(), info=None):
    """One row: its actions, what was seen after each but the last, what each was paid."""
    seen, paid = list(seen) or [f"after {a}" for a in actions[:-1]], list(paid) or [0.0] * len(actions)
    return [Step(observation, reward, k == len(actions) - 1, info or {"tool_call": True}, action)
            for k, (action, observation, reward) in enumerate(zip(actions, [*seen, ""], paid, strict=True))]


def mask_of(turns, tokens=1):
    """Actions of so many tokens each, with an observation of one token between, behind a prompt of one."""
    width = max(len(row) for row in turns) * (tokens + 1)
    mask = torch.zeros(len(turns), width, dtype=torch.bool)
    for row, steps in enumerate(turns):
        for k in range(len(steps)):
            mask[row, k * (tokens + 1) : k * (tokens + 1) + tokens] = True
    return mask


def credit(name, turns, rewards, group=None, tokens=1, **options):
    """The advantage of each turn, as lists."""
    rewards, mask = tensor(rewards, dtype=DOUBLE), mask_of(turns, tokens)
    options = {"scale": "none"} | options
    found = turn_advantages(name, rewards, tensor(group or [0] * len(turns)), turns, mask, **options)
    assert found.dtype == DOUBLE and (name == "trajectory" or (found[~mask] == 0).all())
    numbers = turn_numbers(mask)
    rows = []
    for row, steps in enumerate(turns):
        columns = [found.expand(mask.shape)[row][numbers[row] == k] for k in range(len(steps))]
        assert all((column == column[0]).all() for column in columns), "all tokens of an action share its credit"
        rows.append([column[0].item() for column in columns])
    return rows


def near(value):
    return pytest.approx(value, abs=1e-6)


# ---- rows as turns ----

def test_turns_are_runs_of_action_tokens():
    mask = tensor([[0, 1, 1, 0, 0, 1, 0, 1], [1, 1, 0, 0, 0, 0, 0, 0]]).bool()
    assert turn_numbers(mask).tolist() == [[-1, 0, 0, -1, -1, 1, -1, 2], [0, 0, -1, -1, -1, -1, -1, -1]]
    assert turn_ends(mask).int().tolist() == [[0, 0, 1, 0, 0, 1, 0, 1], [0, 1, 0, 0, 0, 0, 0, 0]]
    assert spread(tensor([[1.0, 2, 3], [4, 0, 0]]), turn_numbers(mask)).tolist() == [
        [0, 1, 1, 0, 0, 2, 0, 3], [4, 4, 0, 0, 0, 0, 0, 0]]


def test_what_a_recipe_pays_beyond_the_task_is_paid_at_the_end():
    turns = [played("a", "b", "c", paid=[0.5, 0, 1]), played("a")]
    assert turn_rewards(turns, tensor([1.5, 0.25])).tolist() == [[0.5, 0, 1], [0.25, 0, 0]]
    assert turn_rewards(turns, tensor([1.0, 0.0])).tolist() == [[0.5, 0, 0.5], [0, 0, 0]]
    assert turn_returns(tensor([[1.0, 0, 2], [4, 0, 0]]), 0.5).tolist() == [[1.5, 1, 2], [4, 0, 0]]


def test_a_state_belongs_to_its_prompt():
    turns = [played("a", "b", seen=["x"]), played("a", "b", seen=["x"]), played("c", "d", "e", seen=["x", ""])]
    assert states(turns) == [["", "x"], ["", "x"], ["", "x", ""]]
    assert number_sets(states(turns), tensor([5, 5, 7])).tolist() == [[0, 1, -1], [0, 1, -1], [2, 3, 2]]


# ---- the numbers of the papers ----

def test_gigpo():
    turns = [played("a", "b", seen=["s1"], paid=[0, 1]), played("c", "d", seen=["s2"])]
    assert credit("gigpo", turns, [1.0, 0.0]) == [near([0.975, 0.5]), near([-0.975, -0.5])]
    # omega 0 is GRPO; with the std each of the two comparisons has its own
    assert credit("gigpo", turns, [1.0, 0.0], weight=0.0) == [near([0.5, 0.5]), near([-0.5, -0.5])]
    assert credit("gigpo", turns, [1.0, 0.0], scale="std") == [near([2, 1]), near([-2, -1])]


def test_gigpo_meets_a_state_also_twice_in_one_row():
    # row 0 stays where it is once: its two returns in s are .9025 and .95, that of row 1 is 0; mean .6175
    turns = [played("a", "b", "c", seen=["s", "s"], paid=[0, 0, 1]), played("a", "d", seen=["s"])]
    first = 0.9025 / 2
    assert credit("gigpo", turns, [1.0, 0.0]) == [
        near([0.5 + first, 0.5 + 0.95 - 0.65, 0.5 + 1 - 0.65]), near([-0.5 - first, -0.5 - 0.65])]


def test_grow():
    turns = [played("a", "b", "c"), played("a", "b")]
    assert credit("grow", turns, [1.0, 0.0], gamma=0.9) == [near([0.268, 0.358, 0.458]), near([-0.542, -0.542])]
    assert credit("grow", turns, [1.0, 0.0], gamma=0.9, scale="std") == [
        near([0.600083, 0.801603, 1.025515]), near([-1.213600, -1.213600])]
    assert state_action_samples("p", turns[0], 1.0, 0.9) == [
        ("p", "a", near(0.81)), ("after a", "b", near(0.9)), ("after b", "c", near(1.0))]
    assert state_action_samples("p", turns[1], 0.0, 0.9) == [("p", "a", 0), ("after a", "b", 0)]
    # a long success pulls the mean up beside a short failure, until its own first turn is below it
    (first, *_, last), _ = credit("grow", [played(*"a" * 40), played("b")], [1.0, 0.0], gamma=0.9)
    assert first < 0 < last


def test_tstar():
    paths, rewards = [["a", "c"], ["a", "d"], ["a", "c"], ["b"]], [1.0, 0, 1, 0]
    q = back_up(paths, rewards)
    assert q == {(): 0.5, "a": near(2 / 3), "b": 0, "c": 1, "d": 0}  # not .5 and .25, the mean over children
    forks = critical_forks(paths, q, 0.5)
    assert forks == [Fork((), 0, 0, 3, near(2 / 3)), Fork("a", 1, 0, 1, 1.0)]
    assert critical_forks(paths, q, 0.7) == forks[1:] and critical_forks(paths, q, 1.1) == []
    turns = [played(*"ac"), played(*"ad"), played(*"ac"), played("b")]
    assert credit("tree", turns, rewards, scale="std") == [
        near([1 / 3, 1]), near([1 / 3, -1]), near([1 / 3, 1]), near([-1])]
    one = torch.ones(1, 1)
    loss = surgical_loss((one, one * 0), (one * 0, one * 0), (one.bool(), one.bool()), beta=0.1)
    assert loss.item() == near(0.644397)


def test_agent_prm():
    rows = [[("s0", "a0"), ("s1", "a1"), ("s2", "a2")], [("s0", "a0"), ("s3", "a3")]]
    q = agent_prm.mc_q_targets(rows, [1.0, 0.0], discount="from-start")  # gamma 0.95
    assert q["s0", "a0"] == near(0.5) and q["s2", "a2"] == near(0.95125)
    q = agent_prm.mc_q_targets(rows, [1.0, 0.0])
    assert q["s0", "a0"] == near(0.488125) and q["s2", "a2"] == 1 and q["s3", "a3"] == 0


def test_ragen():
    ends, mask = tensor([[0, 0, 1, 0, 1]]).bool(), torch.ones(1, 5, dtype=torch.bool)
    values = tensor([[0.1, 0.2, 0.3, 0.4, 0.5]], dtype=DOUBLE)
    found = bilevel_gae(tensor([[0, 0, 1.0, 0, 1]], dtype=DOUBLE), values, ends, mask, 1.0, 1.0)
    assert found[0][0].tolist() == near([1.85, 1.75, 1.65, 0.6, 0.5])
    assert found[1][0].tolist() == near([1.95, 1.95, 1.95, 1, 1])
    ends, rewards = torch.zeros(1, 10, dtype=torch.bool), torch.zeros(1, 10)
    ends[0, 4] = ends[0, 9] = True
    rewards[0, 4] = rewards[0, 9] = 1.0
    returns = bilevel_gae(rewards, torch.rand(1, 10), ends, torch.ones_like(ends), 1.0, 1.0)[1]
    assert returns[0].tolist() == near([1.95] * 5 + [1.0] * 5)


def test_simpletir():
    rows = []
    for calls in ([1, 1, 1], [1, 0, 1]):
        rows.append([Step("x", 0.0, False, {"tool_call": True if call else None}) for call in calls])
    assert without_void_turns(rows, 2).tolist() == [True, False]
    answer = [Step("x", 0.0, False, {"tool_call": False}), Step("", 0.0, True, {"tool_call": None, "format": True})]
    assert without_void_turns([answer, [answer[1]._replace(info={"format": False})]], 2).tolist() == [True, False]
    with pytest.raises(UserError, match="--mask-void looks at the turns"):
        without_void_turns([], 2)


def test_deepswe():
    advantages = group_advantages(tensor([1.0, 0, 0, 0]), tensor([0] * 4), "none", baseline="leave-one-out")[:, 0]
    turns = [[Step("", 0.0, True, {"cut": cut})] for cut in (False, False, True, False)]
    keep = ended_by_itself(turns, tensor([True] * 4))
    assert (advantages * keep).tolist() == near([1, -1 / 3, 0, -1 / 3])
    assert ended_by_itself(turns, tensor([True, False, True, True])).tolist() == [True, False, False, True]
    assert ended_by_itself([], tensor([True, False])).tolist() == [True, False]


# ---- by hand, and what must hold ----

def test_turn_returns_are_compared_with_the_same_turn_and_leave_out_the_past():
    turns = [played("a", "b", paid=[1, 0]), played("a", "b", paid=[0, 1]), played("c", paid=[0.5])]
    # returns 1, 0 | 1, 1 | .5; of turn 0 the mean is 5/6, of turn 1 it is 1/2
    assert credit("turn", turns, [1.0, 1.0, 0.5], gamma=1.0) == [
        near([1 / 6, -0.5]), near([1 / 6, 0.5]), near([-1 / 3])]
    # a turn that nobody else came to is compared as its row
    assert credit("turn", [played("a", "b"), played("c")], [1.0, 0.0], gamma=1.0) == [near([0.5, 0.5]), near([-0.5])]


def test_rows_of_different_pasts_are_merged_by_state_and_not_in_the_tree():
    turns = [played("n", "e", "n", seen=["1", "2"]), played("e", "n", "n", seen=["3", "2"]),
             played("n", "e", "s", seen=["1", "2"])]
    rewards = [1.0, 0.0, 0.0]
    tree = credit("tree", turns, rewards)
    assert tree == [near([1 / 6, 1 / 6, 2 / 3]), near([-1 / 3] * 3), near([1 / 6, 1 / 6, -1 / 3])]
    merged = credit("merged", turns, rewards)
    assert merged == [near([1 / 6, 1 / 6, 1 / 6]), near([-1 / 3, -1 / 3, 1 / 6]), near([1 / 6, 1 / 6, -1 / 3])]
    failed = [played("x", info={"tool_call": False}), played("y", info={"tool_call": False})]
    assert len({path[0] for path in tree_paths(failed, "state")}) == 1  # both changed nothing
    assert len({path[0] for path in tree_paths(failed, "past")}) == 2


@pytest.mark.parametrize("name", ["trajectory", "turn", "grow", "gigpo", "tree", "merged"])
def test_what_no_credit_may_depend_on(name):
    g = torch.Generator().manual_seed(1)
    turns = [played(*("ab"[int(i)] for i in torch.randint(2, (int(n),), generator=g)))
             for n in torch.randint(1, 5, (12,), generator=g)]
    rewards = torch.randint(2, (12,), generator=g).tolist()
    group = [0] * 5 + [1] * 4 + [2] * 3
    for scale in ("none", "std", "batch"):
        want = credit(name, turns, rewards, group, scale=scale)
        order = torch.randperm(12, generator=g).tolist()
        again = credit(name, [turns[i] for i in order], [rewards[i] for i in order], [group[i] for i in order],
                       scale=scale)
        assert again == [near(want[i]) for i in order]
        assert credit(name, turns, rewards, group, tokens=3, scale=scale) == [near(row) for row in want]
        if scale != "batch":  # a prompt is judged by itself
            assert credit(name, turns[:5], rewards[:5], scale=scale) == [near(row) for row in want[:5]]
        if name in ("trajectory", "turn", "tree", "merged"):  # all equal: nothing to learn. (A discount does see turns)
            equal = credit(name, turns, [0.7] * 12, group, scale=scale, gamma=1.0)
            assert equal == [near([0.0] * len(row)) for row in turns]


@pytest.mark.parametrize("name", ["turn", "grow", "tree", "merged"])
def test_with_one_turn_a_row_every_credit_is_that_of_the_row(name):
    turns, rewards = [played(a) for a in "abca"], [1.0, 0.0, 0.0, 1.0]
    for how in (dict(scale="std"), dict(baseline="leave-one-out"), dict(scale="batch"), dict(baseline="length")):
        assert credit(name, turns, rewards, **how) == [near(row) for row in credit("trajectory", turns, rewards, **how)]


def test_a_tree_changes_no_first_update_and_the_return_of_a_turn_no_expectation():
    """In every group of a world that can be listed: the mean of a node's rows adds up to the same gradient."""
    world = exact.make_world()
    rloo = exact.compare(exact.Recipe("rloo"), world, 3)
    assert exact.compare(exact.Recipe("rloo", credit="tree"), world, 3) == near(rloo)
    turn = exact.compare(exact.Recipe("rloo", credit="turn", turn_gamma=1.0), world, 3)
    assert turn.bias < 1e-10 and turn.scale == near(1)
    gigpo = exact.compare(exact.Recipe("rloo", credit="gigpo", turn_gamma=1.0), world, 4)
    assert gigpo.noise < exact.compare(exact.Recipe("rloo"), world, 4).noise and 0.99 < gigpo.cosine < 1 - 1e-4


def test_the_mean_of_a_node_has_one_over_k_of_the_variance():
    g = torch.Generator().manual_seed(0)
    rewards = torch.bernoulli(torch.full((20000, 8), 0.3), generator=g).double()
    nodes = tensor([0, 0, 0, 0, 1, 1, 2, 3])[:, None]
    found = torch.stack([row_mean_through(nodes, row)[:, 0] for row in rewards[:4000]])
    assert found.var(0).tolist() == pytest.approx([0.21 / 4] * 4 + [0.21 / 2] * 2 + [0.21] * 2, rel=0.1)


def test_the_loss_of_a_fork_has_a_gradient_in_that_step_alone():
    g = torch.Generator().manual_seed(0)
    good, bad, good_ref, bad_ref = (torch.randn(2, 5, generator=g, dtype=DOUBLE, requires_grad=True) for _ in range(4))
    step = turn_numbers(tensor([[1, 1, 0, 1, 1], [1, 0, 1, 0, 1]]).bool()) == 1
    loss = surgical_loss((good, bad), (good_ref, bad_ref), (step, step), 0.1)
    loss.sum().backward()
    assert (good.grad[~step] == 0).all() and (good.grad[step] < 0).all() and (bad.grad[step] > 0).all()
    assert good_ref.grad is None and bad_ref.grad is None
    torch.autograd.gradcheck(lambda a, b: surgical_loss((a, b), (good_ref, bad_ref), (step, step), 0.1), (good, bad))


def test_bilevel_gae_of_one_turn_and_without_discount_is_gae():
    g = torch.Generator().manual_seed(2)
    rewards, values = (torch.randn(6, 12, generator=g, dtype=DOUBLE) for _ in range(2))
    mask = torch.rand(6, 12, generator=g) < 0.6
    mask[:, 0] = True
    many, last = turn_ends(mask), turn_ends(mask)
    last[...] = False
    for row in range(6):
        last[row, mask[row].nonzero()[-1, 0]] = True
    for lam in (0.3, 1.0):
        assert_close(bilevel_gae(rewards, values, last, mask, 0.9, lam), gae(rewards, values, mask, 0.9, lam))
    cut = torch.randn(6, generator=g, dtype=DOUBLE)
    undiscounted = bilevel_gae(rewards, values, many, mask, 1.0, 1.0, 1.0, cut)
    assert_close(undiscounted, gae(rewards, values, mask, 1.0, 1.0, cut))
    # what stands in a masked column, or behind the end, is nothing
    dirty = [torch.where(mask, x, 9.9) for x in (rewards, values)]
    assert_close(bilevel_gae(*dirty, many, mask, 0.9, 0.8), bilevel_gae(rewards, values, many, mask, 0.9, 0.8))
    # a turn that was paid nothing is a turn: its tokens see the return of the next, discounted once
    zero = bilevel_gae(tensor([[0.0, 0, 0, 1]]), torch.zeros(1, 4), tensor([[0, 1, 0, 1]]).bool(),
                       torch.ones(1, 4, dtype=torch.bool), 1.0, 1.0, 0.5)[1]
    assert zero.tolist() == [[0.5, 0.5, 1, 1]]


def test_a_process_reward_model_learns_the_targets_and_judges_pairs():
    turns = [played("a", "b", seen=["x"]), played("a", "c", seen=["x"]), played("d")]
    rows = [agent_prm.decisions("p", row) for row in turns]
    assert rows[0] == [("p", "a"), ("pax", "b")] and rows[2] == [("p", "d")]
    q = agent_prm.mc_q_targets(rows, [1.0, 0.0, 0.0], 1.0)
    assert q == {("p", "a"): 0.5, ("pax", "b"): 1, ("pax", "c"): 0, ("p", "d"): 0}
    candidates = {"p": ["a", "d", "a"], "pax": ["b", "c"], "q": ["e"]}
    judge = lambda state, action: q.get((state, action), 0.5)
    assert agent_prm.dpo_pairs(candidates, judge) == [("p", "a", "d"), ("pax", "b", "c")]
    assert agent_prm.dpo_pairs(candidates, judge, gap=0.5) == [("pax", "b", "c")]
    logits = torch.zeros(4, dtype=DOUBLE, requires_grad=True)
    targets = tensor(list(q.values()), dtype=DOUBLE)
    loss = agent_prm.prm_loss(logits, targets)
    assert loss.tolist() == near([math.log(2)] * 4)
    torch.autograd.gradcheck(lambda x: agent_prm.prm_loss(x, targets), (logits,))
    assert torch.autograd.grad(loss.sum(), logits)[0].tolist() == near([0, -0.5, 0.5, 0.5])  # sigmoid - target
    with pytest.raises(UserError, match="an outcome is 2"):
        agent_prm.mc_q_targets(rows, [2.0, 0, 0])


def test_inputs_stay_and_what_cannot_be_is_refused():
    turns, rewards, group = [played("a", "b"), played("a", "c")], tensor([1.0, 0.0]), tensor([0, 0])
    mask = mask_of(turns)
    kept = rewards.clone(), group.clone(), mask.clone(), [list(row) for row in turns]
    for name in ("turn", "grow", "gigpo", "tree", "merged"):
        turn_advantages(name, rewards, group, turns, mask)
        with pytest.raises(UserError, match=f"--credit {name} looks at the turns"):
            turn_advantages(name, rewards, group, [], mask)
        with pytest.raises(UserError, match="row 1 has 2 turns, but its action mask has 0"):
            turn_advantages(name, rewards, group, turns, mask & tensor([[True], [False]]))
    assert (rewards.equal(kept[0]), group.equal(kept[1]), mask.equal(kept[2]), turns == kept[3]) == (True,) * 4
    with pytest.raises(UserError, match="credit 'gipgo' does not exist"):
        turn_advantages("gipgo", rewards, group, turns, mask)
    with pytest.raises(UserError, match=r"--turn-gamma 1\.5"):
        train_grpo.Config(turn_gamma=1.5)


# ---- the task, and the trainer ----

def test_walk():
    env = make_env("walk")
    example = env.sample(1)[0]
    (x, y), (gx, gy) = example.state
    assert example.prompt == f"{x}{y} to {gx}{gy} in 8\n" and abs(x - gx) + abs(y - gy) == 6
    way = ["we"[gx > x]] * abs(x - gx) + ["sn"[gy > y]] * abs(y - gy)
    back = {"w": "e", "e": "w", "n": "s", "s": "n"}[way[0]]
    first = {"w": (-1, 0), "e": (1, 0), "n": (0, 1), "s": (0, -1)}[way[0]]

    def walk(*actions):
        episode = env.reset(example)
        return [episode.step(action + "\n") for action in actions]

    steps = walk(*way)
    assert [step.done for step in steps] == [False] * 5 + [True] and steps[-1].reward == 1
    assert steps[0].observation == f"{x + first[0]}{y + first[1]}\n" and not steps[-1].info["cut"]
    assert walk(way[0], back, *way)[-1].reward == 1  # one wrong step can be made good
    lost = walk(way[0], back, way[0], back, *way[:4])  # two cannot
    assert lost[-1].done and lost[-1].reward == 0 and lost[-1].info["cut"]
    odd = walk("x", "", "nn", "go north")
    assert all(step.observation == f"{x}{y}\n" and step.info["tool_call"] is None for step in odd)
    corner = env.reset(example)
    corner.at = (0, 9)
    assert corner.step("w\n").observation == corner.step("n\n").observation == "09\n"
    with pytest.raises(UserError, match="difficulty 7"):
        make_env("walk", difficulty=7)


TINY = dict(task="walk", device="cpu", dtype="float64", difficulty=1, eval_problems=8, steps=2, prompts_per_step=16,
            group_size=4, minibatches=2, eval_every=0, kl_coef=0.0, max_new_tokens=12, schedule="constant",
            warmup_steps=0)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A model that arrives now and then."""
    import train_sft
    folder = tmp_path_factory.mktemp("turns") / "sft"
    return str(train_sft.main(train_sft.Config(
        run_dir=str(folder), task="walk", device="cpu", dtype="float64", difficulty=1, eval_problems=8, hidden_size=32,
        layers=2, steps=60, batch_size=16, lr=1e-2, eval_rows=0, eval_every=0)))


def train(run_dir, options):
    train_grpo.main(train_grpo.Config(run_dir=str(run_dir), **TINY | options))
    return numbers(run_dir)


def numbers(run_dir):
    rows = read_metrics(run_dir / "metrics.jsonl")
    return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows]


@pytest.mark.parametrize("options", [dict(recipe="gigpo"), dict(mask_void=True, credit="merged", lora_rank=2)],
                         ids=str)
def test_a_resumed_run_is_the_unbroken_one(options, start, tmp_path):
    options = options | dict(init=start)
    whole = train(tmp_path / "whole", options)
    train(tmp_path / "parts", options | dict(steps=1))
    assert train(tmp_path / "parts", options | dict(resume=True))[-1] == whole[-1]
    assert whole[-1]["grad_norm"] > 0 and whole[-1]["reward_std"] > 0 and whole[-1]["ratio_max_deviation"] < 1e-12


def train_all(runs):
    for run_dir, options in runs:
        train(run_dir, options)


@pytest.mark.dist
def test_ranks_do_not_change_a_credit(start, tmp_path):
    options = dict(init=start, recipe="gigpo", advantage_scale="batch", steps=1, prompts_per_step=8, eval_problems=2)
    layouts = [dict(dp=2), dict(cp=2), dict(tp=2)]
    jobs = [partial(run_ranks, train_all, 2, [(tmp_path / str(layout), options | layout)]) for layout in layouts]
    *_, alone = at_once(*jobs, partial(train, tmp_path / "one", options))
    assert alone[-1]["grad_norm"] > 0
    for layout in layouts:
        for ours, theirs in zip(numbers(tmp_path / str(layout)), alone, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-8, abs=1e-11), layout


def test_a_saved_rollout_knows_its_turns(start, tmp_path):
    options = dict(init=start, steps=1, recipe="gigpo", mask_void=True)
    run = train(tmp_path / "run", options | dict(save_rollouts=True))
    folder = tmp_path / "run/rollouts/step_1"
    replay = options | dict(replay=str(folder))
    again = train(tmp_path / "again", replay)
    assert again[-1]["loss"] == pytest.approx(run[-1]["loss"]) and again[-1]["grad_norm"] > 0
    next(folder.glob("*.jsonl")).unlink()
    with pytest.raises(UserError, match="--credit gigpo looks at the turns"):
        train(tmp_path / "lost", replay)
