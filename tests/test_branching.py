"""Trees of rows: who branches off whom, the papers' numbers, and that a branch is an ordinary sample."""

import pytest
import torch
from stubs import Pieces, random_policy
from torch.testing import assert_close

from minirl.advantages import group_advantages
from minirl.branching import Branching, check_branching, entropy_branch, tree_advantages
from minirl.config import UserError
from minirl.env.base import Example, Step
from minirl.env.groups import begin
from minirl.env.loop import go_back, play
from minirl.logprobs import rollout_logprobs
from minirl.rollout import Rollout


class Letters(Pieces):
    """Reads a to d, and no other letter."""

    def encode(self, text, continued=False, special=False):
        return super().encode("".join(letter for letter in text if letter in "abcd\n"))


TOKENIZER = Letters("a", "b", "c", "d", "\n")
VOCAB = TOKENIZER.vocab_size


class Talk:
    """A few lines, each answered by one; paid by their letters."""

    name, stop, max_new_tokens = "talk", ("\n",), 16

    def __init__(self, turns=3):
        self.turns = turns

    def sample(self, count, start=0, split="train"):
        return [Example("abcd"[i % 4] + "dcba"[i // 4 % 4], "b", ("a\n", "b\n", "c"))
                for i in range(start, start + count)]

    def size(self, split):
        return None

    def reset(self, example):
        return Lines(example.prompt, self.turns)


class Lines:
    def __init__(self, prompt, turns):
        self.prompt, self.left, self.said = prompt, turns, ""

    def step(self, action):
        self.left -= 1
        self.said += action
        paid = float(sum(map(ord, self.said)) % 3 == 0)
        return Step("", paid, True, {}) if not self.left else Step("dc", 0.0, False, {"tool_call": "a" in action})


def tree(rule, size=8, roots=2, span=0, weight=0.2, prompts=3, env=None, **sampling):
    env, policy = env or Talk(), random_policy(VOCAB)
    examples = env.sample(prompts)
    starts, ids, group = begin(TOKENIZER, examples, torch.arange(prompts), size, range(size))
    branch = Branching(rule, ids, size, roots, span, weight, VOCAB)
    options = dict(seed=1, max_new_tokens=env.max_new_tokens) | sampling
    return policy, examples, play(policy, TOKENIZER, env, starts, ids, group, branch=branch, **options)


RULES = [("every", dict()), ("every", dict(span=3)), ("random", dict()), ("entropy", dict(span=4, weight=2.0))]


def test_a_full_tree_doubles_at_every_fork():
    branch = Branching("every", torch.arange(16), 8, 2)
    assert branch.roots() == [0, 1, 8, 9] and branch.family == 4
    assert branch.queue[:8] == [[[2], [4]], [[3], [5]], [[6]], [[7]], [], [], [], []]
    assert branch.queue[8] == [[10], [12]]
    assert Branching("every", torch.arange(9), 9, 3).queue[:3] == [[[3, 6]], [[4, 7]], [[5, 8]]]


def test_otherwise_each_root_has_its_share():
    assert Branching("entropy", torch.arange(7), 7, 2).queue[:2] == [[[2], [4], [6]], [[3], [5]]]


def test_arpo_branches_more_often_where_entropy_rose():
    assert entropy_branch(0.5, 0.55) and not entropy_branch(0.5, 0.65)  # weight 0.2
    us = torch.linspace(0, 1, 10001).tolist()
    assert sum(entropy_branch(0.5, u, 0.2) for u in us) / len(us) == pytest.approx(0.6, abs=1e-3)
    assert all(entropy_branch(9.0, u) for u in us[:-1]) and not any(entropy_branch(-9.0, u) for u in us[1:])


@pytest.mark.parametrize(("rule", "options"), RULES)
def test_a_branch_is_an_ordinary_sample_of_the_policy(rule, options):
    policy, examples, rollout = tree(rule, **options)
    assert (rollout.shared > 0).sum() > 3, "the test needs rows that branch"
    whole = rollout_logprobs(policy, rollout, 64)  # a forward that shares nothing
    mask = rollout.action_mask
    assert_close(rollout.old_logprobs[mask], whole[mask], rtol=0, atol=1e-10)
    assert (rollout.old_logprobs[~mask] == 0).all()
    for row in range(len(rollout)):
        parent, shared = int(rollout.parent[row]), int(rollout.shared[row])
        assert torch.equal(rollout.tokens[row, :shared], rollout.tokens[parent, :shared])
        assert torch.equal(mask[row, : max(shared - 1, 0)], mask[parent, : max(shared - 1, 0)])
        assert rollout.group[parent] == rollout.group[row] and mask[row].sum() <= 16
        steps = rollout.turns[row]  # the environment has seen what is on the tape, in this row alone
        again = go_back(Talk(), examples[int(rollout.group[row])], steps)
        assert again.said == "".join(step.action for step in steps)
        assert rollout.rewards[row] == sum(step.reward for step in steps)
        chosen = [t for t, own in zip(rollout.tokens[row, 1:].tolist(), mask[row].tolist()) if own]
        assert TOKENIZER.decode(chosen, continued=True).startswith(again.said)


@pytest.mark.parametrize(("rule", "options"), RULES)
def test_rows_decoded_at_once_and_other_prompts_change_no_tree(rule, options):
    _, _, whole = tree(rule, **options)
    for other in (tree(rule, max_rows=5, **options)[2], tree(rule, max_rows=1, **options)[2]):
        for name in ("tokens", "action_mask", "parent", "shared", "rewards"):
            assert torch.equal(getattr(other, name), getattr(whole, name)), name
    _, _, fewer = tree(rule, prompts=2, **options)
    assert torch.equal(fewer.shared, whole.shared[:16]) and torch.equal(fewer.lengths, whole.lengths[:16])


def test_what_is_shared_is_computed_once(monkeypatch):
    fed = []
    forward = type(random_policy(VOCAB)).forward

    def count(self, tokens, *args, **kwargs):
        fed.append(tokens.numel())
        return forward(self, tokens, *args, **kwargs)

    monkeypatch.setattr(type(random_policy(VOCAB)), "forward", count)
    _, _, rollout = tree("random", prompts=1)
    new = int((rollout.lengths - rollout.shared).sum())
    assert int(rollout.shared.sum()) > 20
    assert sum(fed) < new + 40  # finished rows are cleared away a little late, and that is all; unshared it is
    assert sum(fed) < int(rollout.lengths.sum()) - 10


def test_a_row_whose_chance_never_comes_begins_at_the_prompt():
    _, _, rollout = tree("every", env=Talk(turns=1))
    assert (rollout.shared == 0).all() and rollout.sample_ids.tolist() == list(range(24))
    assert len({tuple(row) for row in rollout.tokens[:8].tolist()}) >= 4
    assert all(len(turns) == 1 for turns in rollout.turns)


def rows(rewards, parent, shared, length=6):
    n = len(rewards)
    mask = torch.ones(n, length - 1, dtype=torch.bool)
    mask[:, 0] = False  # the prompt has two tokens
    ids = 10 + torch.arange(n)
    return Rollout(tokens=torch.zeros(n, length, dtype=torch.int64), action_mask=mask,
                   lengths=torch.full((n,), length), group=torch.zeros(n, dtype=torch.int64), sample_ids=ids,
                   rewards=torch.tensor(rewards).double(), parent=10 + torch.tensor(parent),
                   shared=torch.tensor(shared))


def test_tree_rpo_compares_pieces_that_begin_in_one_place():
    rollout = rows([1.0, 1, 0, 1], [0, 1, 0, 1], [0, 0, 4, 4])  # two trees, leaves 1 0 | 1 1
    got = tree_advantages("siblings", rollout, rollout.rewards)
    # token 4 is the first behind the fork: columns 1 2 | 3 4. Parents .5 and 1: -1 and 1
    assert got.tolist() == [[0, -1, -1, 1, 1], [0, 1, 1, 0, 0], [0, -1, -1, -1, -1], [0, 1, 1, 0, 0]]


def test_a_branch_may_branch_again_and_leave_where_another_left():
    # row 0 forks at 3 (row 1) and at 5 (row 2); row 3 leaves row 1 at 3, where row 1 left row 0
    rollout = rows([1.0, 0, 0, 1], [0, 0, 0, 1], [0, 3, 5, 3])
    got = tree_advantages("siblings", rollout, rollout.rewards, scale="none")
    # at 3: row 0 goes on, worth .5; row 1, 0; row 3, 1. Mean .5. At 5: 1 and 0. The root has nobody to be compared with
    assert got.tolist() == [[0, 0, 0, 0, 0.5], [0, 0, -0.5, -0.5, -0.5], [0, 0, 0, 0, -0.5], [0, 0, 0.5, 0.5, 0.5]]


def test_tree_grpo_compares_with_all_and_with_its_own_tree():
    rollout = rows([1.0, 0, 1, 1], [0, 0, 2, 2], [0, 3, 0, 3])
    inter, intra = (group_advantages(rollout.rewards, torch.tensor(of), ddof=1, eps=1e-6)[:, 0] for of in
                    ([0] * 4, [0, 0, 1, 1]))
    assert inter.tolist() == pytest.approx([0.499999, -1.499997, 0.499999, 0.499999], abs=5e-7)
    assert intra.tolist() == pytest.approx([0.707106, -0.707106, 0, 0], abs=5e-7)
    got = tree_advantages("inter-intra", rollout, rollout.rewards, ddof=1, eps=1e-6)[:, 0]
    assert got.tolist() == pytest.approx([1.207105, -2.207103, 0.499999, 0.499999], abs=5e-7)
    assert_close(got, inter + intra)
    alone = rows([1.0, 0], [0, 1], [0, 0])
    assert tree_advantages("inter-intra", alone, alone.rewards)[:, 0].tolist() == [1, -1]


def test_what_is_no_tree_is_refused():
    for options, text in ((("every", 12, 2), "power"), (("every", 8, 1), "power"), (("entropy", 4, 4), "1 or more"),
                          (("never", 4, 2), "use one of")):
        with pytest.raises(UserError, match=text):
            check_branching(*options)
    with pytest.raises(UserError, match="--branch"):
        tree_advantages("siblings", rows([1.0, 0], [0, 1], [0, 0]).replace(parent=None), torch.ones(2))
