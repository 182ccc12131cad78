"""How the rows of a group come about: experts, retries, groups that grow, are given up, or are written in parts."""

import time
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from ranks import run_ranks
from stubs import Chain, random_policy
from test_branching import TOKENIZER, VOCAB, Lines, Talk
from torch.testing import assert_close

from minirl.advantages import constant_groups
from minirl.belief import belief_gains, beliefs, entropy_segments
from minirl.config import UserError
from minirl.env.groups import alike, begin, edit_distance, go_on, sample_groups
from minirl.env.loop import collect, imitate, play, within
from minirl.env.rounds import Collector
from minirl.evaluate import rollout_metrics
from minirl.logprobs import rollout_logprobs
from minirl.objective import look_again, make_advantages, recipe_loss
from minirl.parallel import Mesh, close_mesh, init_mesh
from minirl.parallel.layout import parallelize
from minirl.recipes import RecipeOptions, fill_in
from minirl.retry import first_number, locate, thoughts

POLICY = random_policy(VOCAB)
HOW = dict(seed=1, max_new_tokens=16)


@dataclass(frozen=True)
class Options(RecipeOptions):
    run_dir: str = ""
    seed: int = 1
    steps: int = 10
    prompts_per_step: int = 4
    group_size: int = 4
    temperature: float = 1.0
    max_rows: int = 100
    microbatch_size: int = 32
    staleness: int = 0
    sampler_noise: float = 0.0
    save_rollouts: bool = False
    rewards: str = "task"

    def __post_init__(self):
        fill_in(self)


def groups(size=4, prompts=3, policy=POLICY, env=None, first=0, **columns):
    env = env or Talk()
    return sample_groups(policy, TOKENIZER, env, env.sample(prompts, start=first), size, first, Mesh(),
                         Options(group_size=size, **columns), **HOW)


def assert_same(ours, theirs, rows=slice(None)):
    for name in ("action_mask", "lengths", "group", "sample_ids", "rewards", "finished"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)[rows]), name
    assert_close(ours.old_logprobs, theirs.old_logprobs[rows], rtol=0, atol=1e-12)
    for row, length in enumerate(ours.lengths.tolist()):  # padding may be any token
        assert torch.equal(ours.tokens[row, :length], theirs.tokens[rows][row, :length])
    assert ours.turns == theirs.turns[rows]


def test_a_group_is_as_ever_where_no_column_says_otherwise():
    env = Talk()
    assert_same(groups(), collect(POLICY, TOKENIZER, env, env.sample(3), 4, **HOW))


# ---- an expert's row (LUFFY) ----

def test_the_last_row_of_a_group_is_the_experts_and_judged_like_the_others():
    rollout = groups(expert=True)
    assert rollout.expert.tolist() == [False, False, False, True] * 3 and rollout.sample_ids.tolist() == [*range(12)]
    assert rollout.group.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert rollout.texts[3] == "a\ndcb\ndcc" and [s.action for s in rollout.turns[3]] == ["a\n", "b\n", "c"]
    assert float(rollout.rewards[3]) == float(sum(map(ord, "a\nb\nc")) % 3 == 0)
    own = collect(POLICY, TOKENIZER, Talk(), Talk().sample(3), 4, **HOW)
    assert rollout.texts[:3] == own.texts[:3]
    metrics = rollout_metrics(rollout, Mesh())  # of the policy's own rows, but for what the expert adds to a group
    assert metrics["reward_mean"] == pytest.approx(float(rollout.rewards[~rollout.expert].mean()))
    constant = constant_groups(rollout.rewards, rollout.group).double()
    assert metrics["zero_variance_groups"] == pytest.approx(float(constant.mean()))
    looked = look_again(POLICY, rollout, Options(expert=True), 0, 32, 1.0)
    assert_close(looked.old_logprobs, rollout_logprobs(POLICY, rollout, 32) * rollout.action_mask)


def test_luffy_compares_all_rows_and_learns_most_from_what_was_unlikely():
    rollout = imitate(TOKENIZER, Talk(), Talk().sample(4)).replace(
        expert=torch.tensor([True, False, False, False]), rewards=torch.tensor([1.0, 0, 1, 0]).double(),
        group=torch.zeros(4, dtype=torch.int64))
    options = Options("luffy")
    rollout = rollout.replace(advantages=make_advantages(rollout, options, 16))
    assert rollout.advantages[:, 0].tolist() == [0.5, -0.5, 0.5, -0.5]
    logprobs = torch.full(rollout.action_mask.shape, 0.1).double().log().requires_grad_()
    rollout = rollout.replace(old_logprobs=logprobs.detach())
    loss, clipped = recipe_loss(logprobs, rollout, options)
    loss.sum().backward()
    own = rollout.action_mask
    assert_close(loss[0][own[0]], torch.full_like(loss[0][own[0]], -0.5 * 0.5))  # f(.1) = .5
    assert_close(logprobs.grad[0][own[0]], torch.full_like(loss[0][own[0]], -0.5 * 0.25).detach())  # p f'(p) = .25
    assert_close(logprobs.grad[1][own[1]], torch.full_like(loss[1][own[1]], 0.5).detach())  # the ratio, unclipped
    assert not clipped[0].any()


# ---- groups that grow ----

def test_groups_without_a_difference_get_more_rows_and_there_is_an_end():
    rollout = groups(size=2, prompts=8, grow=2)
    sizes = rollout.group.unique(return_counts=True)[1].tolist()
    assert sizes.count(2) > 1 and max(sizes) > 2 and {*sizes} <= {2, 4, 6}
    constant = constant_groups(rollout.rewards, rollout.group).tolist()
    assert all(size == 6 for size, none in zip(sizes, constant) if none)
    assert len(rollout.sample_ids.unique()) == len(rollout)
    first = [int((rollout.group == p).nonzero()[0]) for p in range(8)]
    assert [int(rollout.sample_ids[row]) for row in first] == [6 * p for p in range(8)]
    assert {len(row) for row in rollout.turns} <= {1, 2, 3}


# ---- groups that are given up ----

def test_edit_distance_is_levenshteins():
    def distance(a, b):
        codes = [torch.tensor([[*map(ord, x), *[0] * (9 - len(x))]]) for x in (a, b)]
        return edit_distance(*codes, torch.tensor([len(a)]), torch.tensor([len(b)])).item()

    assert [distance(*pair) for pair in (("kitten", "sitting"), ("", "abc"), ("abc", "abc"), ("flaw", "lawn"),
                                         ("ab", "ba"))] == [3, 3, 0, 2, 2]


def test_groups_that_begin_alike_are_given_up_and_the_others_are_as_ever():
    env = Talk()
    monotone = groups(policy=Chain(VOCAB, {0: 1, 1: 2, 2: 3, 3: 0}), selective=5, selective_distance=0.1)
    assert (monotone.action_mask.sum(1) == 5).all() and not monotone.finished.any() and not monotone.rewards.any()
    assert constant_groups(monotone.rewards, monotone.group).all()
    assert_same(groups(selective=5), collect(POLICY, TOKENIZER, env, env.sample(3), 4, **HOW))
    half = collect(POLICY, TOKENIZER, env, env.sample(3), 4, pause=5, **HOW)
    assert alike(half, 0.1).tolist() == [False] * 12 and alike(half, 1.1).all()


# ---- rows that are set aside ----

@pytest.mark.parametrize("pause", [1, 2, 5])
def test_a_row_written_in_parts_is_the_row_written_at_once(pause):
    env = Talk()
    examples = env.sample(3)
    starts, ids, group = begin(TOKENIZER, examples, torch.arange(3), 4, range(4))

    def write(starts, ids, group, **more):
        return play(POLICY, TOKENIZER, env, starts, ids, group, **HOW | more)

    rollout = write(starts, ids, group, pause=pause)
    assert (rollout.begins >= 0).any() and (rollout.action_mask.sum(1) <= pause).all()
    rounds = 0
    while (rollout.begins >= 0).any():
        rollout, rounds = go_on(write, TOKENIZER, rollout, [start.example for start in starts], pause=pause), rounds + 1
    assert 1 <= rounds <= 16 // pause + 1
    whole = write(starts, ids, group)
    assert_same(rollout, whole)
    assert rollout.texts == whole.texts


def partly(folder, steps, dp=1, start=0, partial=3, policy=POLICY, **options):
    mesh = init_mesh("cpu", dp=dp)
    collector = Collector(Options(run_dir=str(folder), partial=partial, **options), Talk(), TOKENIZER, mesh, 16, start)
    found = [collector.next(policy, step) for step in range(start + 1, steps + 1)]
    close_mesh()
    return found


def test_long_rows_go_on_in_the_next_step_and_none_is_lost(tmp_path):
    found = partly(tmp_path, 5)
    assert [len(rollout) for rollout in found] == [16] * 5
    numbers = [number for rollout in found for number in rollout.group.unique().tolist()]
    assert len({*numbers}) == 20 and min(numbers) == 0 and max(numbers) < 22
    assert any(rollout.shared.any() for rollout in found[1:]) and not found[0].shared.any()
    for rollout in found:  # the policy has not changed here: rows are what they would have been
        for p in rollout.group.unique().tolist():
            rows = (rollout.group == p).nonzero()[:, 0]
            ours = rollout.rows(rows)
            assert_same(ours, collect(POLICY, TOKENIZER, Talk(), Talk().sample(1, start=p), 4, p, **HOW))
            assert ours.texts[0] == TOKENIZER.decode(ours.tokens[0, 2 : ours.lengths[0]].tolist(), continued=True)


def test_a_resumed_run_finds_what_was_set_aside(tmp_path):
    unbroken = partly(tmp_path / "a", 4)
    partly(tmp_path / "b", 2)
    for ours, theirs in zip(partly(tmp_path / "b", 4, start=2), unbroken[2:], strict=True):
        assert_same(ours, theirs)
        assert ours.texts == theirs.texts and torch.equal(ours.shared, theirs.shared)


@pytest.mark.dist
def test_ranks_set_aside_what_one_process_does(tmp_path):
    alone = partly(tmp_path / "one", 3)
    for step, parts in enumerate(zip(*run_ranks(partly, 2, tmp_path / "two", 3, 2))):
        assert [len(part) for part in parts] == [8, 8]
        assert torch.equal(torch.cat([part.sample_ids for part in parts]), alone[step].sample_ids)
        assert torch.equal(torch.cat([part.rewards for part in parts]), alone[step].rewards)
        assert [text for part in parts for text in part.texts] == alone[step].texts


# ---- tools in threads ----

class Slow(Talk):
    """Talk whose lines take a while, in 3 rows at a time."""

    threads = 3

    def reset(self, example):
        episode = super().reset(example)
        return SimpleNamespace(prompt=example.prompt, step=lambda action: time.sleep(0.001) or episode.step(action))


WAYS = [{}, *(dict(branch=rule, branch_roots=2, branch_span=span) for rule, span in
              (("every", 0), ("every", 3), ("random", 0), ("entropy", 4))),
        *(dict(retry="srpo", locate=how) for how in ("random", "belief", "ask")), dict(retry="r3l", guide_tokens=8),
        dict(expert=True), dict(grow=2), dict(selective=3)]


@pytest.mark.parametrize("columns", WAYS, ids=lambda columns: " ".join(map(str, columns.values())) or "plain")
def test_a_tool_that_takes_a_while_changes_no_group(columns):
    rollout = groups(8, env=Slow(), **columns)
    assert_same(rollout, groups(8, **columns))
    if "branch" in columns:
        assert (rollout.shared > 0).any(), "no row branches"


FEW = [dict(branch="entropy", branch_roots=2, branch_span=4), dict(retry="r3l", locate="random"), dict(expert=True)]


def slow_groups():
    """What both ranks of a tensor-parallel replica get."""
    mesh = init_mesh("cpu", tp=2)
    policy = parallelize(random_policy(VOCAB), mesh)
    found = [sample_groups(policy, TOKENIZER, Slow(), Talk().sample(1), 6, 0, mesh, Options(group_size=6, **columns),
                           **HOW) for columns in FEW]
    close_mesh()
    return found


@pytest.mark.dist
def test_ranks_that_share_a_model_wait_for_its_tools_together():
    for ours in run_ranks(slow_groups, 2):
        for rollout, columns in zip(ours, FEW, strict=True):
            assert_same(rollout, groups(6, prompts=1, **columns))


# ---- retries (SRPO, R3L) ----

def test_a_thought_is_an_action_or_a_line_of_it():
    env = Talk()
    rollout = imitate(TOKENIZER, env, env.sample(1))  # a d | a \n | d c | b \n | d c | c EOS
    assert thoughts(rollout, 0, TOKENIZER) == [2, 6, 10]
    start = within(TOKENIZER, env.sample(1)[0], rollout, 0, 10)
    assert (start.begin, start.spent, len(start.turns), len(start.tokens), start.prompt) == (10, 4, 2, 10, 2)
    inside = within(TOKENIZER, env.sample(1)[0], rollout, 0, 7)
    assert (inside.begin, inside.spent, len(inside.turns)) == (6, 3, 1)
    assert [first_number(text) for text in (" 3.", "none", "step 12, or 4")] == [3, 0, 12]


def check_retries(rollout, fresh, groups_of_prompt):
    """Each retry begins as some failed fresh row does, is a sample of the policy, and trains on what is new alone."""
    logprobs = rollout_logprobs(POLICY, rollout, 64)
    assert_close(rollout.old_logprobs[rollout.action_mask], logprobs[rollout.action_mask], rtol=0, atol=1e-10)
    found = 0
    for row in range(len(rollout)):
        begins = int(rollout.action_mask[row].int().argmax()) + 1
        if begins > 2:
            found += 1
            prefix = rollout.tokens[row, :begins].tolist()
            prompt = int(rollout.group[row]) // groups_of_prompt
            assert any(fresh.tokens[r, :begins].tolist() == prefix for r in range(len(fresh))
                       if int(fresh.group[r]) == prompt)
        said = Lines("", 3)
        steps = [said.step(step.action) for step in rollout.turns[row]]
        assert [s.reward for s in steps] == [s.reward for s in rollout.turns[row]]
    return found


@pytest.mark.parametrize("how", ["random", "belief", "ask"])
def test_srpo_has_a_group_of_fresh_rows_and_one_of_retries_of_a_failed_one(how):
    rollout, env = groups(size=8, prompts=4, retry="srpo", locate=how), Talk()
    fresh = collect(POLICY, TOKENIZER, env, env.sample(4), 8, **HOW)
    assert rollout.sample_ids.tolist() == [*range(32)]
    assert rollout.group.tolist() == [g for g in range(8) for _ in range(4)]
    found = check_retries(rollout, fresh, 2)
    assert found > 0 or how == "ask", "a retry from the middle of a row"
    for p in range(4):
        assert rollout.texts[8 * p : 8 * p + 4] == fresh.texts[8 * p : 8 * p + 4]
        retries = rollout.rows(torch.arange(8 * p + 4, 8 * p + 8))
        assert len({tuple(row) for row in retries.tokens.tolist()}) > 1, "drawn anew, each by itself"
    advantages = make_advantages(rollout, Options("srpo", group_size=8), 16)
    assert_close(advantages.view(-1, 4).sum(1), torch.zeros(8))


def test_where_no_row_failed_all_are_fresh():
    class Kind(Talk):
        def reset(self, example):
            return Paid(example.prompt, 3)

    class Paid(Lines):
        def step(self, action):
            return super().step(action)._replace(reward=float(self.left == 0))

    rollout = groups(size=4, prompts=2, retry="srpo", env=Kind(turns=1), locate="random")
    fresh = collect(POLICY, TOKENIZER, Kind(turns=1), Talk().sample(2), 4, **HOW)
    lost = fresh.rewards.view(2, 4)[:, 2:] < 1
    assert not lost.all(1).all(), "the test needs a prompt whose rows all end"
    for p in range(2):
        assert rollout.group[4 * p : 4 * p + 4].unique().tolist() == ([2 * p, 2 * p + 1] if lost[p].any() else [2 * p])


def test_r3l_retries_every_row_in_the_same_group():
    rollout, env = groups(size=8, prompts=4, retry="r3l", locate="random"), Talk()
    fresh = collect(POLICY, TOKENIZER, env, env.sample(4), 4, **HOW)
    assert rollout.group.tolist() == [g for g in range(4) for _ in range(8)]
    assert check_retries(rollout, fresh, 1) > 0
    assert rollout.texts[:4] == fresh.texts[:4] and rollout.texts[8:12] == fresh.texts[4:8]


def test_belief_says_where_a_row_went_wrong():
    env = Talk()
    examples = env.sample(6)
    rollout = collect(POLICY, TOKENIZER, env, examples, 1, **HOW)
    rows = [row for row in range(6) if rollout.rewards[row] < 1 and len(rollout.turns[row]) > 1]
    places = locate("belief", POLICY, TOKENIZER, rollout, rows, ["b"] * len(rows), 0, 8)
    for row, at in zip(rows, places, strict=True):
        own = thoughts(rollout, row, TOKENIZER)
        p = [direct(rollout.tokens[row, :n].tolist(), "b") for n in own] + [0.0]
        falls = [a - b for a, b in pairwise(p)]
        assert at == own[falls.index(max(falls))]


def test_odd_groups_cannot_be_halved():
    with pytest.raises(UserError, match="even number"):
        Options(retry="srpo", group_size=5)


# ---- belief (VPS) ----

def direct(tokens, answer):
    """p(answer, EOS | tokens), token by token."""
    p = 1.0
    for token in [*TOKENIZER.encode(answer), TOKENIZER.eos_id]:
        p *= float(POLICY.logits(POLICY(torch.tensor([tokens])))[0, -1].softmax(-1)[token])
        tokens = [*tokens, token]
    return p


def test_belief_is_the_probability_of_the_right_answer():
    env = Talk()
    rollout = collect(POLICY, TOKENIZER, env, env.sample(2), 1, **HOW)
    places = [[2, 4], [2, 3, int(rollout.lengths[1])]]
    with torch.no_grad():
        found = beliefs(POLICY, TOKENIZER, rollout, ["b", "ac"], places, 3)
        for row, answer in enumerate(("b", "ac")):
            want = [direct(rollout.tokens[row, :n].tolist(), answer) for n in places[row]]
            assert found[row] == pytest.approx(want, rel=1e-9)
        small = random_policy(VOCAB, context=6)
        kept = beliefs(small, TOKENIZER, rollout, ["b", "b"], [[2, 4, 5], [2]], 8)[0]
    assert kept[2] == kept[1] > 0  # where it does not fit, the belief before


def test_segments_begin_with_actions_and_behind_uncertain_tokens():
    entropy = torch.tensor([[9.0, 1, 5, 1, 4, 1, 9, 3, 1, 1]])
    mask = torch.tensor([[False, True, True, True, True, True, False, True, True, True]])
    # the 8 tokens' most uncertain half is 5 4 3 and, of equals, all the 1s
    assert entropy_segments(entropy, mask, 3 / 8, 1).tolist() == [[0, 0, 0, 1, 1, 2, 2, 3, 4, 4]]
    assert entropy_segments(entropy, mask, 3 / 8, 2).tolist() == [[0, 0, 0, 0, 0, 1, 1, 2, 2, 2]]


def test_the_gains_of_a_row_add_up_from_its_first_belief_to_the_verdict():
    env = Talk()
    rollout = collect(POLICY, TOKENIZER, env, env.sample(4), 1, **HOW)
    gains = belief_gains(POLICY, TOKENIZER, rollout, ["b"] * 4, 8)
    entropy = rollout_logprobs(POLICY, rollout, 8, entropy=True).entropy
    segment = entropy_segments(entropy, rollout.action_mask)
    for row in range(4):
        own = rollout.action_mask[row]
        each = {int(s): float(g) for s, g in zip(segment[row][own], gains[row][own])}
        first = direct(rollout.tokens[row, :2].tolist(), "b")
        assert sum(each.values()) == pytest.approx(float(rollout.rewards[row]) - first, abs=1e-9)
        assert len(each) >= len(rollout.turns[row]) and (gains[row][~own] == 0).all()
    base = make_advantages(rollout.replace(group=torch.zeros(4).long()), Options(), 16)
    both = make_advantages(rollout.replace(group=torch.zeros(4).long(), gains=gains), Options("vps"), 16)
    assert_close(both, (base + 0.5 * gains).to(both.dtype))


# ---- checks of steps (PURE) ----

def test_pure_blames_the_worst_step():
    env = Talk()
    rollout = collect(POLICY, TOKENIZER, env, env.sample(1), 8, **HOW)
    kind = [[step._replace(info={"tool_call": row % 2 == 0 or k > 0}) for k, step in enumerate(turns)]
            for row, turns in enumerate(rollout.turns)]  # odd rows begin with a call that is none
    rollout = rollout.replace(turns=kind)
    got = make_advantages(rollout, Options("pure"), 16)
    outcome = make_advantages(rollout, Options("rloo"), 16)
    assert got.shape == rollout.action_mask.shape
    steps = make_advantages(rollout, Options("pure", process_weight=0.0), 16)
    assert_close(steps, outcome.expand_as(steps))
    first = rollout.action_mask.int().argmax(1)
    part = (got - outcome).gather(1, first[:, None])[:, 0]  # the return of the first action
    assert part[1::2].max() < -0.5 < 0.5 < part[::2].min()


# ---- what does not go together ----

@pytest.mark.parametrize(("columns", "text"), [
    (dict(expert=True, grow=1), "both say"), (dict(branch="every", retry="srpo"), "both say"),
    (dict(retry="srpo", resample=1), "--resample"), (dict(partial=4, resample=1), "--resample"),
    (dict(tree_credit="siblings"), "give --branch"), (dict(branch="entropy"), "--branch-span"),
    (dict(branch="every", tree_credit="siblings", credit="turn"), "--credit turn"), (dict(grow=-1), "--grow"),
    (dict(branch="every", branch_roots=3), "power"), (dict(expert=True, group_size=2), "at least 3")])
def test_what_does_not_go_together_is_refused_in_one_line(columns, text):
    with pytest.raises(UserError, match=text) as error:
        Options(**columns)
    assert "\n" not in str(error.value)
