"""The table of recipes: what a row means, that a flag overrides it, and that every row trains."""

import dataclasses
import json
import math
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from ranks import at_once, run_ranks
from safetensors.torch import load_file
from stubs import random_policy
from torch.testing import assert_close

import train_grpo
from minirl.advantages import constant_groups, group_advantages
from minirl.config import UserError, cli
from minirl.env.addition import Addition
from minirl.env.base import SingleTurn, Step
from minirl.env.rounds import choose_groups
from minirl.gae import whiten
from minirl.losses import aggregate, loss_total, prompt_tokens
from minirl.metrics import read_metrics
from minirl.objective import by_token, leave_out, make_advantages, recipe_loss, rewards_of, weigh
from minirl.parallel import forward_backward, init_mesh
from minirl.recipes import COLUMNS, RECIPES, TABLE, RecipeOptions, document, fill_in
from minirl.rollout import Rollout

REPO = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Options(RecipeOptions):
    def __post_init__(self):
        fill_in(self)


def rollout_of(rewards, group, lengths=None, finished=None, width=4, dtype=torch.float64) -> Rollout:
    """Rows with these rewards and numbers of action tokens, all log-probs -1."""
    n = len(rewards)
    lengths = torch.tensor(lengths or [width] * n)
    mask = torch.arange(width) < lengths[:, None]
    return Rollout(tokens=torch.zeros(n, width + 1, dtype=torch.int64), action_mask=mask, lengths=lengths + 1,
                   group=torch.tensor(group), sample_ids=torch.arange(n),
                   **{name: torch.where(mask, -1.0, 0.0).to(dtype) for name in
                      ("old_logprobs", "sampler_logprobs", "alone_logprobs")},
                   old_entropy=torch.where(mask, 0.5, 0.0).to(dtype), gains=torch.zeros(n, width, dtype=dtype),
                   parent=torch.arange(n), shared=torch.zeros(n, dtype=torch.int64),
                   vectors=torch.where(mask, torch.tensor(rewards, dtype=dtype)[:, None], 0.0)[..., None],
                   finished=torch.tensor(finished or [True] * n), rewards=torch.tensor(rewards, dtype=dtype),
                   turns=[[Step("", reward, True, {"format": True}, str(i))] for i, reward in enumerate(rewards)])


def advantages(recipe, rewards, group=None, **kwargs):
    options = {name: kwargs.pop(name) for name in list(kwargs) if name in COLUMNS}
    group = group or [0] * len(rewards)
    return make_advantages(rollout_of(rewards, group, **kwargs), Options(recipe, **options), 100)[:, 0].tolist()


# ---- the table ----

def test_the_default_is_what_the_readme_trains_with():
    config = train_grpo.Config()
    assert config.recipe == "default"
    assert (config.advantage_scale, config.aggregate, config.eps_low, config.eps_high, config.kl_coef, config.kl_kind,
            config.surrogate, config.baseline, config.mask_constant) == (
                "std", "token", 0.2, 0.2, 0.001, "k3", "clip", "mean", True)


def test_every_row_has_a_source_and_an_idea_and_names_columns_that_exist():
    assert set(TABLE["default"].options) == set(COLUMNS)
    for name, line in TABLE.items():
        assert line.source and line.idea and set(line.options) <= set(COLUMNS), name
        options = Options(name)  # its values pass the checks
        assert {column: getattr(options, column) for column in COLUMNS} == RECIPES[name]
        for column, value in line.options.items():
            assert type(value) is type(TABLE["default"].options[column]), (name, column)


SETTINGS = {  # of the papers, or of their code
    "grpo": dict(kl_coef=0.04, kl_kind="k3", eps_low=0.2, eps_high=0.2, aggregate="sequence"),
    "r1": dict(kl_coef=0.001, eps_low=10.0, eps_high=10.0, aggregate="sequence"),
    "dr_grpo": dict(advantage_scale="none", aggregate="constant", kl_coef=0.0),
    "dapo": dict(eps_low=0.2, eps_high=0.28, aggregate="token", kl_coef=0.0, overlong=4096 / 20480),
    "sar": dict(sar_coef=0.2),
    "ucpo": dict(ucpo_tau=0.2, std_ddof=1, eps_low=0.2, eps_high=0.2, aggregate="token", kl_coef=0.0),
    "delta": dict(delta=True, kl_coef=0.0, resample=0),
    "srpo": dict(std_ddof=0, surrogate="reinforce", aggregate="sequence", locate="ask"),
    "rrpo": dict(std_ddof=0, surrogate="reinforce", aggregate="sequence", locate="random"),
    "deepswe": dict(eps_high=0.28, kl_coef=0.0, advantage_scale="none", baseline="leave-one-out", entropy_coef=0.0,
                    aggregate="constant", mask_truncated=True),
    "gspo": dict(eps_low=3e-4, eps_high=4e-4, kl_coef=0.0, aggregate="sequence"),
    "gspo_token": dict(eps_low=3e-4, eps_high=4e-4, kl_coef=0.0, aggregate="sequence"),
    "r3l": dict(amplify=3.0, advantage_scale="none", surrogate="reinforce", aggregate="token"),
    "tis": dict(mismatch_high=2.0),
    "icepop": dict(mismatch_low=0.5, mismatch_high=5.0),
    "gigpo": dict(turn_gamma=0.95, state_weight=1.0),
    "cispo": dict(eps_low=1.0, eps_high=0.28, aggregate="token"),  # no lower bound
    "scalerl": dict(eps_low=1.0, eps_high=4.0),  # cap 5
    "tree_grpo": dict(branch_roots=2, std_ddof=1, kl_coef=0.001),
    "kl_cov": dict(cov_share=2e-4, cov_coef=1.0, surrogate="unclipped"),
    "clip_cov": dict(cov_share=2e-4, eps_low=0.2, eps_high=0.2),
    "starpo_s": dict(keep_groups=0.25, eps_low=0.2, eps_high=0.28, kl_coef=0.0, entropy_coef=0.001),
    "arpo": dict(branch_span=20, branch_weight=0.2, branch_roots=0),  # 0: half of the rows
    "gmpo": dict(eps_low=0.4, eps_high=0.4),
    "sapo": dict(tau=1.0, tau_negative=1.05),
    "luffy": dict(expert_gamma=0.1, advantage_scale="none", aggregate="constant", kl_coef=0.0, entropy_coef=0.001),
    "two_sided": dict(dual_clip=4.0),
    "top_entropy": dict(top_entropy=0.2),
}


@pytest.mark.parametrize("recipe", SETTINGS)
def test_a_row_has_the_settings_of_its_paper(recipe):
    assert {name: RECIPES[recipe][name] for name in SETTINGS[recipe]} == SETTINGS[recipe]


def test_a_flag_overrides_a_row_also_with_the_value_of_the_default():
    config = cli(train_grpo.Config, ["--recipe", "dapo", "--eps-high", "0.2", "--kl-coef", "0.01"])
    assert (config.eps_high, config.kl_coef) == (0.2, 0.01)
    assert cli(train_grpo.Config, ["--recipe", "dapo"]).eps_high == 0.28
    assert train_grpo.Config(**RECIPES["gspo"]).ratio == train_grpo.Config(recipe="gspo").ratio == "sequence"
    assert dataclasses.asdict(config)["aggregate"] == "token"  # config.json has what was used, not None


def test_what_cannot_be_is_refused_in_one_line():
    for options, text in ((dict(recipe="rolo"), "did you mean rloo"), (dict(recipe="qqqq"), "there are default, grpo"),
                          (dict(recipe="kimi", ratio="token"), "use product"), (dict(eps_low=-1.0), "--eps-low"),
                          (dict(tau=0.0), "--tau"), (dict(dual_clip=1.1), "--dual-clip"),
                          (dict(entropy_coef=-0.1), "--entropy-coef"),
                          (dict(mismatch="tis"), "--old-logprobs trainer"), (dict(top_entropy=1.5), "--top-entropy")):
        with pytest.raises(UserError, match=text) as error:
            Options(**options)
        assert "\n" not in str(error.value)


def test_the_module_prints_the_table():
    out = subprocess.run([sys.executable, "-m", "minirl.recipes"], cwd=REPO, capture_output=True, text=True, check=True)
    assert out.stdout == document() and document().count("\n") == len(TABLE) + 2


# ---- advantages ----

def test_the_advantages_of_each_paper_by_hand():
    third = 2 / 3
    assert advantages("grpo", [1.0, 0, 0, 1]) == [1, -1, -1, 1]
    assert advantages("grpo", [1.0, 0, 0, 1], std_ddof=1) == pytest.approx([0.866025, -0.866025, -0.866025, 0.866025])
    assert advantages("dr_grpo", [1.0, 0, 0, 1]) == [0.5, -0.5, -0.5, 0.5]
    assert advantages("rloo", [1.0, 0, 0, 1]) == pytest.approx([third, -third, -third, third])
    assert advantages("opo", [1.0, 0], lengths=[1, 3]) == [0.75, -0.25]
    assert advantages("reinforce_pp", [1.0, 0, 2, 2], [0, 0, 1, 1]) == pytest.approx(
        [-0.301511, -1.507557, 0.904534, 0.904534], abs=1e-6)
    assert advantages("reinforce_pp_baseline", [1.0, 0, 2, 2], [0, 0, 1, 1]) == pytest.approx(
        [1.414214, -1.414214, 0, 0], abs=1e-6)
    assert advantages("deepswe", [1.0, 0, 0, 0]) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])


def test_a_constant_group_teaches_nothing_unless_it_is_compared_with_the_batch():
    for recipe in RECIPES:
        got = advantages(recipe, [0.7, 0.7, 0.7, 1.0, 0.2, 0.3], [0, 0, 0, 1, 1, 1], dtype=torch.float32)
        assert (got[:3] == [0, 0, 0]) == (recipe not in ("reinforce_pp", "w_reinforce")), recipe
    assert advantages("reinforce_pp", [1.0, 1.0]) == [0, 0]  # all alike: nothing, and not 0 / 0


ABSOLUTE = ("kimi", "cosine", "gdpo", "ucpo", "gtpo", "r3l", "conspo", "garl", "nsr",
            "w_reinforce")  # to these it matters that 1 is right


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name not in ABSOLUTE])
def test_an_offset_of_all_rewards_changes_no_advantage_and_of_a_group_only_where_there_are_none(recipe):
    rewards, group, lengths = [1.0, 0, 0.5, 0, 0, 1], [0, 0, 0, 1, 1, 1], [1, 2, 3, 4, 3, 2]
    want = advantages(recipe, rewards, group, lengths=lengths)
    assert advantages(recipe, [r + 10 for r in rewards], group, lengths=lengths) == pytest.approx(want)
    if recipe not in ("reinforce_pp", "scalerl"):  # scalerl's std is that of the batch
        moved = [r + 10 * g for r, g in zip(rewards, group)]
        assert advantages(recipe, moved, group, lengths=lengths) == pytest.approx(want)


def test_gdpo_can_tell_which_reward_was_earned():
    """Two rewards, [1, 0, 0, 0] and [0, 0, 1, 1]: on their sum, the first answer and the last two are alike."""
    rewards = torch.tensor([1.0, 0, 0, 0]).double(), torch.tensor([0.0, 0, 1, 1]).double()
    group, ones = torch.zeros(4).long(), torch.ones(4, 1, dtype=torch.bool)
    apart = sum(group_advantages(reward, group, ddof=1) for reward in rewards)
    assert whiten(apart, ones)[:, 0].tolist() == pytest.approx([0.796225, -1.715627, 0.459701, 0.459701], abs=1e-6)
    together = group_advantages(sum(rewards), group)[:, 0]
    assert together.tolist() == pytest.approx([0.577350, -1.732051, 0.577350, 0.577350], abs=1e-6)


def test_gdpo_makes_an_advantage_of_each_reward():
    rollout = rollout_of([1.0, 0, 1, 0], [0] * 4, lengths=[1, 2, 3, 4])
    options = Options("gdpo")
    (w1, task), (w2, length) = rewards_of(rollout, options, 100)
    apart = [group_advantages(r, rollout.group, ddof=1) for r in (task, length)]
    want = whiten(w1 * apart[0] + w2 * apart[1], torch.ones(4, 1, dtype=torch.bool))
    assert_close(make_advantages(rollout, options, 100), want)


def test_what_is_added_to_the_reward_and_that_the_tasks_own_stays():
    rollout = rollout_of([1.0, 0, 1, 0], [0, 0, 1, 1], lengths=[2, 4, 3, 4])
    overlong = rewards_of(rollout, Options("dapo"), 5)
    assert [w for w, _ in overlong] == [1, 1] and overlong[1][1].tolist() == [0, 0, 0, 0]  # 5 tokens are the last fifth
    assert rewards_of(rollout, Options("dapo", overlong=0.5), 4)[1][1].tolist() == [0, -1, -0.5, -1]
    assert len(rewards_of(rollout, Options("dapo"), 4)) == 1  # a fifth of 4 tokens is none
    assert [w for w, _ in rewards_of(rollout, Options("kimi"), 4)] == [1, 0.5]
    assert rewards_of(rollout, Options("cosine"), 4)[2][1].tolist() == pytest.approx([0, -0.5, 0, -0.5])
    assert rewards_of(rollout, Options("sar"), 4)[1] [1].tolist() == [0] * 4  # as likely without the prompt
    assert rollout.rewards.tolist() == [1, 0, 1, 0]


def test_trl_divides_by_the_std_of_the_batch_likewise(shared):
    golden = load_file(shared / "golden" / "advantages.safetensors")
    weights = json.loads((shared / "golden" / "advantages.json").read_text())["cases"][1]["weights"]
    rewards = golden["rewards"] @ torch.tensor(weights, dtype=torch.float64)
    got = group_advantages(rewards, torch.arange(4).repeat_interleave(4), "batch", ddof=1, eps=1e-4)
    assert_close(got[:, 0], golden["adv.rewards.sum_then_normalize.batch"])


def test_trl_normalizes_each_reward_by_itself_likewise(shared):
    golden = load_file(shared / "golden" / "advantages.safetensors")
    weights = json.loads((shared / "golden" / "advantages.json").read_text())["cases"][3]["weights"]
    group = torch.arange(4).repeat_interleave(4)
    apart = sum(weight * group_advantages(golden["rewards"][:, i], group, ddof=1, eps=1e-4)
                for i, weight in enumerate(weights))
    theirs = golden["adv.rewards.normalize_then_sum.group"][:, None]
    std = apart.std()  # which TRL takes of the sample, and adds 1e-4 to; ours is the population's
    assert_close(whiten(apart, torch.ones_like(apart).bool(), ddof=1, eps=0.0) * std / (std + 1e-4), theirs,
                 rtol=0, atol=1e-6)


# ---- filters ----

def test_no_filter_takes_a_penalty_for_length_for_a_difference():
    """All wrong, all right, one of two right; what is left after the penalty differs in each of the groups."""
    rollout = rollout_of([0.0, 0, 1, 1, 1, 0], [0, 0, 1, 1, 2, 2], lengths=[2, 4] * 3)
    options = Options("dapo", overlong=0.5, mask_constant=True)
    shaped = sum(weight * reward for weight, reward in rewards_of(rollout, options, 4))
    assert shaped.tolist() == [0, -1, 1, 0, 1, -1]
    assert constant_groups(rollout.rewards, rollout.group).tolist() == [True, True, False]
    rollout = rollout.replace(advantages=make_advantages(rollout, options, 4))
    chosen, complete = choose_groups(rollout.rewards, rollout.group, 2)
    assert 2 in chosen and not complete
    assert leave_out(rollout, options).action_mask.any(1).tolist() == [False] * 4 + [True] * 2


def test_deepswe_compares_with_cut_answers_and_does_not_train_on_them():
    rollout = rollout_of([1.0, 0, 0, 0], [0] * 4, finished=[True, True, False, True])
    options = Options("deepswe")
    rollout = rollout.replace(advantages=make_advantages(rollout, options, 100))
    kept = leave_out(rollout, options)
    assert (kept.advantages[:, 0] * kept.action_mask.any(1)).tolist() == pytest.approx([1, -1 / 3, 0, -1 / 3])
    assert rollout.action_mask.all()  # the rollout itself keeps its mask: metrics count all


def test_constant_groups_can_be_left_out_whole():
    rollout = rollout_of([1.0, 1, 0, 1], [3, 3, 1, 1])
    assert leave_out(rollout, Options(mask_constant=True)).action_mask.any(1).tolist() == [False, False, True, True]
    assert leave_out(rollout, Options("grpo")).action_mask.all(), "papers keep them"


@pytest.mark.parametrize("finer", [
    dict(credit="turn"), dict(branch="every", tree_credit="siblings"), dict(process="belief"),
    dict(combine="separate")], ids=str)
def test_groups_of_equal_sums_stay_where_a_reward_is_divided(finer):
    assert Options().mask_constant and Options(credit="trajectory").mask_constant
    assert not Options(**finer).mask_constant and Options(mask_constant=True, **finer).mask_constant


def test_the_groups_that_differ_the_most_can_be_kept_alone():
    rewards = [1.0, 0, 0.5, 0.5, 0.8, 0.2, 0.6, 0.4]  # std .5, 0, .3, .1
    kept = leave_out(rollout_of(rewards, [0, 0, 1, 1, 2, 2, 3, 3]), Options("starpo_s"))
    assert kept.action_mask.any(1).tolist() == [True] * 2 + [False] * 6
    half = leave_out(rollout_of(rewards, [5, 5, 1, 1, 9, 9, 3, 3]), Options(keep_groups=0.5))
    assert half.action_mask.any(1).tolist() == [True] * 2 + [False] * 2 + [True] * 2 + [False] * 2


def test_what_a_row_took_over_is_trained_on_in_the_other_alone():
    rollout = rollout_of([1.0, 0], [0, 0]).replace(shared=torch.tensor([0, 3]))
    kept = leave_out(rollout, Options(mask_shared=True)).action_mask
    assert kept.tolist() == [[True] * 4, [False, False, True, True]]


# ---- the loss of a row ----

def test_the_kl_term_can_be_weighed_by_the_ratio():
    rollout = rollout_of([1.0, 0], [0, 0], width=1).replace(advantages=torch.zeros(2, 1).double())
    rollout = rollout.replace(ref_logprobs=torch.full((2, 1), -0.5).double())
    now = torch.full((2, 1), -0.8).double()
    k3 = 2.718281828459045**0.3 - 0.3 - 1
    for ratio, want in ((False, k3), (True, k3 * 2.718281828459045**0.2)):
        loss, _ = recipe_loss(now, rollout, Options(kl_coef=0.1, kl_ratio=ratio))
        assert loss[0, 0].item() == pytest.approx(0.1 * want)


@pytest.mark.parametrize(("ratio", "value", "gradient"), [(True, 0.082283, 0.17793), (False, 0.103299, 0.27619)])
def test_off_policy_the_kl_term_needs_the_ratio(ratio, value, gradient):
    """Samples of [.5, .5], the policy is [.7, .3], the reference uniform: only with the ratio k3 is the KL on average,
    and has its gradient."""
    logits = torch.tensor([0.7, 0.3]).double().log().requires_grad_()
    rollout = rollout_of([1.0, 0], [0, 0], width=1).replace(
        advantages=torch.zeros(2, 1).double(), old_logprobs=torch.full((2, 1), math.log(0.5)).double(),
        ref_logprobs=torch.full((2, 1), math.log(0.5)).double())
    loss, _ = recipe_loss(logits.log_softmax(0)[:, None], rollout, Options(kl_coef=1.0, kl_ratio=ratio))
    assert loss.mean().item() == pytest.approx(value, abs=1e-6)  # both words are drawn alike
    assert torch.autograd.grad(loss.mean(), logits)[0].tolist() == pytest.approx([gradient, -gradient], abs=1e-5)


def test_a_bonus_for_entropy_by_hand():
    """[.7, .3] has 0.610864 nats, and the gradient of a KL to the uniform distribution: down where p is large."""
    logits = torch.tensor([0.7, 0.3]).double().log().requires_grad_()
    logprobs = logits.log_softmax(0)
    rollout = rollout_of([1.0, 0], [0, 0], width=1).replace(advantages=torch.zeros(2, 1).double(),
                                                            old_logprobs=logprobs.detach()[:, None])
    entropy = -(logprobs.exp() * logprobs).sum()
    for recipe in ("luffy", "starpo_s"):
        loss, _ = recipe_loss(logprobs[:, None], rollout, Options(recipe), entropy=entropy.expand(2, 1))
        assert loss[:, 0].tolist() == pytest.approx([-0.001 * 0.610864] * 2)
        grad, = torch.autograd.grad(loss.mean(), logits, retain_graph=True)
        assert grad.tolist() == pytest.approx([0.00017793, -0.00017793], abs=1e-8)
    assert not recipe_loss(logprobs[:, None], rollout, Options("dapo"), entropy=entropy.expand(2, 1))[0].any()


@pytest.mark.parametrize("keep", [2**22, 0], ids=["at once", "a column at a time"])
@pytest.mark.parametrize("mode", ["token", "sequence", "constant"])
def test_a_bonus_for_entropy_has_the_gradient_of_the_plain_formula(mode, keep, monkeypatch):
    monkeypatch.setattr(sys.modules["minirl.logprobs"], "KEEP_LOGITS", keep)
    monkeypatch.setattr(sys.modules["kernels.head_loss"], "HEAD_LOGITS", 1)
    policy, g = random_policy(11), torch.Generator().manual_seed(0)
    rollout = rollout_of([1.0, 0, 0, 1], [0, 0, 1, 1], lengths=[4, 2, 3, 1])
    mask = rollout.action_mask
    rollout = rollout.replace(tokens=torch.randint(11, (4, 5), generator=g),
                              advantages=torch.randn(4, 1, generator=g, dtype=torch.float64))
    options, pieces = Options("starpo_s", entropy_coef=0.3, aggregate=mode), []

    def loss_fn(out, mb):
        pieces.append(out.logprobs.shape[1])
        loss, _ = recipe_loss(out.logprobs, mb, options, entropy=out.entropy)
        total = loss_total(mode, mask, constant_length=4)
        return aggregate(loss, mb.action_mask, mode, total, row_tokens=mb.row_tokens), {}

    forward_backward(policy, [rollout], loss_fn, init_mesh("cpu"), entropy=True, by_token=by_token(options))
    assert pieces == ([4] if keep else [1] * 4)
    got = [p.grad.clone() for p in policy.parameters()]

    logprobs = policy.logits(policy(rollout.tokens[:, :-1])).log_softmax(-1)  # (B, S, V)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    ratio = (logprobs.gather(-1, rollout.tokens[:, 1:, None])[..., 0] - rollout.old_logprobs).exp()
    objective = torch.minimum(ratio * rollout.advantages, ratio.clamp(0.8, 1.28) * rollout.advantages) + 0.3 * entropy
    share = {"token": mask / mask.sum(), "sequence": mask / mask.sum(1, keepdim=True) / 4, "constant": mask / 16}[mode]
    assert_close(got, list(torch.autograd.grad(-(share * objective).sum(), list(policy.parameters()))))


def test_weights_multiply_the_policy_loss_and_not_the_kl_term():
    rollout = rollout_of([1.0, 0], [0, 0], width=2).replace(advantages=torch.tensor([[1.0], [-1.0]]).double())
    rollout = rollout.replace(sampler_logprobs=rollout.old_logprobs - torch.tensor([[1.0, 0], [0, -1]]).double())
    options = Options("tis", kl_coef=1.0)
    weighed = weigh(rollout, options, 0)
    assert weighed.weights.flatten().tolist() == pytest.approx([2, 1, 1, 0.367879], abs=1e-6)
    loss, _ = recipe_loss(rollout.old_logprobs, weighed, options)
    assert loss.flatten().tolist() == pytest.approx([-2, -1, 1, 0.367879], abs=1e-6)
    with_kl, _ = recipe_loss(rollout.old_logprobs, weighed.replace(ref_logprobs=rollout.old_logprobs + 0.5), options)
    assert_close(with_kl - loss, torch.full((2, 2), 0.148721).double(), atol=1e-6, rtol=0)


def test_kl_cov_holds_the_token_that_costs_the_most_entropy_and_clip_cov_leaves_it_out():
    rollout = rollout_of([1.0, 1, 0, 0], [0] * 4, width=1).replace(
        advantages=torch.tensor([[1.0], [1], [-1], [-1]]).double(),
        old_logprobs=torch.tensor([[-0.1], [-2], [-0.2], [-2.5]]).double())
    options = Options("kl_cov")
    held = weigh(rollout, options, 0)
    assert held.anchors[:, 0].tolist() == [0, 0, 0, 1]
    loss, _ = recipe_loss(rollout.old_logprobs + 0.05, held, options)
    assert loss[3, 0].item() == pytest.approx(1.101271, abs=1e-6)
    assert loss[0, 0].item() == pytest.approx(-1.051271, abs=1e-6)
    for rounding in (1e-15, -1e-15):  # a token that has not moved is not pulled to either side
        now = (rollout.old_logprobs + rounding).requires_grad_()
        recipe_loss(now, held.replace(advantages=torch.zeros(4, 1).double()), options)[0].sum().backward()
        assert not now.grad.any()
    out = weigh(rollout, Options("clip_cov", cov_share=0.5), 0)
    assert out.weights[:, 0].tolist() == [0, 1, 1, 0] and out.anchors is None


def test_praise_can_be_left_out_and_what_is_all_wrong_is_still_blamed():
    assert advantages("nsr", [1.0, 0, 0, 0]) == [0, -0.5, -0.5, -0.5]
    assert advantages("nsr", [0.0, 0]) == [-0.5, -0.5] and advantages("nsr", [1.0, 1]) == [0, 0]
    assert advantages("w_reinforce", [1.0, 0]) == pytest.approx([0.05, -0.5])


def test_garl_divides_by_a_power_of_the_success_rate():
    assert advantages("garl", [1.0, 0, 0, 0]) == pytest.approx([0.75 * 4**0.75, *[-0.25 * 4**0.75] * 3])
    assert advantages("garl", [0.0, 0]) == [0, 0]


def test_a_token_just_outside_of_the_bound_is_rescued_by_chance():
    n = 4000
    rollout = rollout_of([1.0] * n, [0] * n, width=1).replace(advantages=torch.ones(n, 1).double())
    options = Options("nsr_rescue")
    minibatch = weigh(rollout, options, 0)
    for over, kept in ((-0.01, 1.0), (0.025, 0.75), (0.075, 0.25), (0.11, 0.0)):
        ratio = torch.full((n, 1), math.log(1.2 + over) - 1).double().requires_grad_()
        loss, clipped = recipe_loss(ratio, minibatch, options)
        loss.sum().backward()
        assert (ratio.grad != 0).double().mean().item() == pytest.approx(kept, abs=0.03)
        assert torch.equal(clipped, ratio.grad == 0)
    again = weigh(rollout.rows(torch.tensor([7, 3])), options, 0).slack
    assert torch.equal(again, minibatch.slack[[7, 3]]), "the chance belongs to the token"


def test_top_entropy_trains_the_share_of_tokens_where_the_policy_was_least_sure():
    rollout = rollout_of([1.0, 0], [0, 0], width=5)
    rollout = rollout.replace(old_entropy=torch.arange(10.0).view(2, 5), advantages=torch.ones(2, 1).double())
    assert weigh(rollout, Options("top_entropy"), 0).weights.tolist() == [[0] * 5, [0, 0, 0, 1, 1]]
    assert weigh(rollout, Options(), 0) is rollout


def test_a_bad_answer_that_the_policy_has_left_does_not_train():
    rollout = rollout_of([1.0, 0, 0], [0] * 3, width=2).replace(
        advantages=torch.tensor([[1.0], [-1], [-1]]).double())
    gaps = torch.tensor([[0.7, 0.7], [0.9, 0.5], [0.3, 0.3]]).double()
    loss, _ = recipe_loss(rollout.old_logprobs - gaps, rollout, Options("deepseek_v32", off_policy_gap=0.5))
    assert (loss != 0).all(1).tolist() == [True, False, True]


# ---- every row trains ----

TINY = dict(device="cpu", dtype="float64", difficulty=1, eval_problems=8, steps=1, prompts_per_step=8, group_size=4,
            minibatches=2, eval_every=0)


@pytest.fixture(scope="module")
def start(sft_run) -> Path:
    return sft_run / "step_60"


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_row_trains(recipe, start, tmp_path):
    size = 16 if recipe == "co_rewarding" else 4  # else no answer to one wording is the majority of the other
    train_grpo.main(train_grpo.Config(**TINY | dict(
        run_dir=str(tmp_path / "run"), init=str(start), recipe=recipe, group_size=size)))
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert rows[-1]["step"] == 1 and rows[-1]["skipped_steps"] == 0 and rows[-1]["grad_norm"] > 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_answers_of_one_token_and_rows_that_are_all_left_out_have_finite_updates(recipe):
    rollout = rollout_of([1.0, 0, 0, 1], [0, 0, 1, 1], lengths=[1] * 4, finished=[False] * 4)
    for options, left in ((Options(recipe), True), (Options(recipe, mask_truncated=True), False)):
        part = leave_out(rollout.replace(advantages=make_advantages(rollout, options, 4)), options)
        assert part.action_mask.any() == (left and not options.mask_truncated)
        part = weigh(part, options, 0)
        logprobs = rollout.old_logprobs.clone().requires_grad_()
        loss = aggregate(recipe_loss(logprobs, part, options)[0], part.action_mask, options.aggregate, 4,
                         prompt_tokens(part.action_mask, part.group))
        loss.backward()
        assert loss.isfinite() and logprobs.grad.isfinite().all()
        assert part.action_mask.any() or (loss == 0 and not logprobs.grad.any())


def test_the_trainer_pays_for_entropy(start, tmp_path):
    found = {}
    for coef in (0.0, 0.5):
        train_grpo.main(train_grpo.Config(**TINY | dict(
            run_dir=str(tmp_path / str(coef)), init=str(start), minibatches=1, recipe="starpo_s", entropy_coef=coef)))
        found[coef] = read_metrics(tmp_path / str(coef) / "metrics.jsonl")[-1]
    plain, paid = found.values()
    assert plain["entropy"] == paid["entropy"] > 0.1
    assert paid["loss"] == pytest.approx(plain["loss"] - 0.5 * plain["entropy"])


def raises(action):
    raise ZeroDivisionError("the judge broke")


@pytest.mark.parametrize(("judge", "recipe", "error", "text"), [
    (raises, "default", ZeroDivisionError, "judge broke"),
    (lambda action: float("nan"), "default", UserError, "the reward of row 0 .* is nan"),
    (lambda action: float("nan"), "gtpo", UserError, "the reward of row 0 .* is nan"),
    (lambda action: float("inf"), "dapo", UserError, "the reward of row 0 .* is inf")])
def test_a_reward_that_is_none_ends_the_run_before_any_update(judge, recipe, error, text, start, tmp_path, monkeypatch):
    env = Addition(1)
    monkeypatch.setattr(train_grpo, "pose", lambda config: env)
    monkeypatch.setattr(train_grpo, "evaluate", lambda *args: {})
    monkeypatch.setattr(train_grpo, "show_sample", lambda *args: None)
    env.reset = lambda example: SingleTurn(example.prompt, judge)
    with pytest.raises(error, match=text):
        train_grpo.main(train_grpo.Config(**TINY | dict(run_dir=str(tmp_path / "run"), init=str(start), recipe=recipe)))
    assert not (tmp_path / "run/step_1").exists() and len(read_metrics(tmp_path / "run/metrics.jsonl")) == 1


@pytest.mark.parametrize(("recipe", "extra"), [
    ("dapo", {}), ("deepswe", dict(max_new_tokens=1)), ("adaptive", {}), ("selective", {}), ("srpo", {})])
def test_a_task_that_is_never_solved_changes_nothing_and_the_trainer_says_so(recipe, extra, start, tmp_path, capsys,
                                                                            monkeypatch):
    env = Addition(1)
    monkeypatch.setattr(train_grpo, "pose", lambda config: env)
    env.reset = lambda example: SingleTurn(example.prompt, lambda action: 0.0)
    train_grpo.main(train_grpo.Config(**TINY | dict(run_dir=str(tmp_path / "run"), init=str(start), recipe=recipe,
                                                    overlong=0.0) | extra))
    row = read_metrics(tmp_path / "run/metrics.jsonl")[-1]
    assert row["grad_norm"] == 0 and row["skipped_steps"] == 0 and row["zero_variance_groups"] == 1
    assert "hint: reward_std 0: every sample scored the same" in capsys.readouterr().out
    before, after = (load_file(tmp_path / f"run/step_{n}/model.safetensors") for n in (0, 1))
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


STALE = dict(staleness=2, sampler_noise=0.1)
AGAIN = dict(resample=4, overlong=0.2)
# Recipes by what depends on ranks, several such things in one run. Over replicas: how many rows each draws (resample,
# grow, retry, partial, an expert's), statistics of the batch (whiten, delta), the highest of all its tokens (cov,
# top_entropy) or groups (keep_groups). Over columns: sums over rows (sequence, product, off_policy_gap) and what is
# known of whole rows (gtpo, branch). In a pipeline, cut by words or in slices: log-probs, entropy, beliefs (vps, sar)
# and hidden states (delta) of a second look, an adapter, samples that another policy drew.
SPREAD = [
    (dict(dp=2), [("icepop", STALE | AGAIN), ("gdpo", {}), ("luffy", dict(top_entropy=0.2)), ("adaptive", {}),
                  ("starpo_s", dict(cov="clip", cov_share=0.1)), ("srpo", {}), ("delta", {}),
                  ("reinforce_pp", {}), ("dapo", {}), ("deepseek_v32", {}), ("default", dict(partial=1))]),
    (dict(cp=2), [("gspo", dict(eps_low=0.01, eps_high=0.01)), ("kimi", dict(off_policy_gap=0.5)), ("delta", {}),
                  ("gtpo", {}), ("tree_rpo", dict(branch_span=1))]),
    (dict(pp=2), [("tis", STALE | dict(top_entropy=0.2)), ("vps", dict(sar_coef=0.2)), ("delta", {}),
                  ("kl_cov", dict(cov_share=0.1, epochs=2, lora_rank=2, kl_coef=0.01))]),
    (dict(tp=2), [("gspo", dict(eps_low=0.01, eps_high=0.01, epochs=2) | AGAIN), ("vps", dict(sar_coef=0.2)),
                  ("delta", dict(lora_rank=2)), ("tree_rpo", dict(branch_span=1)), ("deepseek_v32", {}),
                  ("kl_cov", dict(cov_share=0.1))]),
    (dict(zero=3), [("gspo", dict(eps_low=0.01, eps_high=0.01, epochs=2) | AGAIN), ("luffy", dict(top_entropy=0.2)),
                    ("default", dict(partial=1))]),
]


def train_several(start, jobs, layout):
    for run_dir, (recipe, extra) in jobs.items():
        train_grpo.main(train_grpo.Config(**TINY | dict(
            run_dir=run_dir, init=start, recipe=recipe, steps=2, microbatch_size=6) | extra | layout))


def numbers(run) -> list[dict]:
    return [{name: value for name, value in row.items() if not name.startswith("time/")}
            for row in read_metrics(Path(run) / "metrics.jsonl")]


@pytest.fixture(scope="module")
def spread(start, tmp_path_factory) -> Path:
    """AXIS/RECIPE of every layout, and alone/RECIPE OPTIONS: one process trains once for all of them."""
    root = tmp_path_factory.mktemp("spread")
    singly = {f"alone/{recipe} {extra}": (recipe, extra) for _, jobs in SPREAD for recipe, extra in jobs}
    at_once(*(partial(run_ranks, train_several, 2, str(start), {f"{root}/{next(iter(layout))}/{job[0]}": job
                                                                for job in jobs}, layout, timeout=240)
              for layout, jobs in SPREAD),
            partial(train_several, str(start), {f"{root}/{name}": job for name, job in singly.items()}, {}))
    return root


@pytest.mark.dist
@pytest.mark.parametrize(("layout", "jobs"), SPREAD, ids=[next(iter(layout)) for layout, _ in SPREAD])
def test_two_ranks_train_as_one_process(layout, jobs, spread):
    for recipe, extra in jobs:
        runs = spread / next(iter(layout)) / recipe, spread / f"alone/{recipe} {extra}"
        for ours, theirs in zip(*map(numbers, runs), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-8, abs=1e-11), recipe


@pytest.mark.parametrize(("recipe", "extra"), [
    ("tis", STALE), ("dapo", {}), ("kl_cov", dict(partial=1, epochs=2, cov_share=0.1)), ("srpo", dict(lora_rank=2))])
def test_a_resumed_run_is_the_unbroken_one(recipe, extra, start, tmp_path):
    def train(folder, **options):
        train_grpo.main(train_grpo.Config(**TINY | dict(
            run_dir=str(tmp_path / folder), init=str(start), recipe=recipe, schedule="constant", steps=4)
            | extra | options))

    train("unbroken")
    train("broken", steps=1)
    train("broken", resume=True)
    assert numbers(tmp_path / "broken")[2:] == numbers(tmp_path / "unbroken")[2:]  # step 1 was the last, and evaluated
    drift = [row["ratio_max_deviation"] for row in numbers(tmp_path / "unbroken")[1:]]
    # The ratio of tis is of the trainer's own log-probs; the weights carry the rest.
    assert max(drift) < 1e-9 or recipe != "tis"


def test_stale_samples_are_those_of_an_older_policy(start, tmp_path):
    train_grpo.main(train_grpo.Config(**TINY | dict(
        run_dir=str(tmp_path / "run"), init=str(start), schedule="constant", steps=4, staleness=2, lr=1e-2)))
    drift = [row["ratio_max_deviation"] for row in numbers(tmp_path / "run")[1:]]
    assert drift[0] < 1e-9 < drift[1] and drift[3] > 1e-3


def test_the_loss_of_some_columns_is_that_of_the_whole_where_by_token_says_so():
    """The head may then go through them piece by piece. Where the row counts, a piece would say something else."""
    g = torch.Generator().manual_seed(0)
    rollout = rollout_of([1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1], [4, 3, 2, 4])
    rollout = rollout.replace(advantages=torch.randn(4, 1, generator=g, dtype=torch.float64),
                              weights=torch.rand(4, 4, generator=g, dtype=torch.float64),
                              ref_logprobs=rollout.old_logprobs - 0.1, row_tokens=rollout.action_mask.sum(1))
    logprobs = rollout.old_logprobs + 0.5 * torch.randn(4, 4, generator=g, dtype=torch.float64)
    entropy = torch.rand(4, 4, generator=g, dtype=torch.float64)
    seen = set()
    for name in RECIPES:
        config = Options(name)
        whole = recipe_loss(logprobs, rollout, config, entropy=entropy)[0]
        pieces = [recipe_loss(logprobs[:, c], rollout.columns(c), config, entropy=entropy[:, c])[0]
                  for c in (slice(0, 1), slice(1, 4))]
        mask = rollout.action_mask
        equal = torch.allclose(torch.cat(pieces, 1)[mask], whole[mask])
        assert equal >= by_token(config), name
        seen.add((equal, by_token(config)))
    assert seen >= {(True, True), (False, False)}


def test_the_docs_show_the_table_as_it_is():
    page = (REPO / "docs/grpo_family.md").read_text()
    assert document() in page, "python -m minirl.recipes prints it"
