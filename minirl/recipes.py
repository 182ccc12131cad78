"""The GRPO family as a table: a row is an algorithm, a column is an option with a name. `train_grpo.py --recipe ROW`.

Forty algorithms differ in five places: what is added to the reward, how an advantage is made of rewards, which ratio is
clipped and how, how tokens are summed, and what is filtered or weighed. `RecipeOptions` has a column for each of these
choices, `TABLE` a row for each paper, and objective.py reads a row: there is no other place where they differ.

    python -m minirl.recipes                    the table
    torchrun train_grpo.py --recipe dapo        a row of it
    torchrun train_grpo.py --recipe dapo --eps-high 0.4     the same, but for one column

A row says only what differs from the row `default`. A variant of your own is a row; docs/grpo_family.md adds one.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

from minirl.advantages import Baseline, Scale
from minirl.branching import Rule, TreeCredit, check_branching
from minirl.config import UserError, check_not_negative, check_positive
from minirl.label_free import Labels
from minirl.losses import Mode
from minirl.policy_loss import Ratio, Surrogate, check_pair
from minirl.retry import Locate, Retry, check_retry
from minirl.token_weights import Mismatch
from minirl.turns import Credit


@dataclass(frozen=True)
class RecipeOptions:
    # recipe: a column that is not given is that of the row; `python -m minirl.recipes` prints the rows
    recipe: str = "default"  # which row
    # who says what is right
    labels: Labels | None = None  # the task, or one of the stand-ins of minirl/label_free.py
    # sampling: how the rows of a group come about; minirl/env/groups.py and rounds.py
    expert: bool | None = None  # one row of a group is written by the task's expert (LUFFY)
    retry: Retry | None = None  # half of a group starts again from within a row: minirl/retry.py has the table
    locate: Locate | None = None  # who says where: the policy asked, its belief in the answer, or chance
    guide_tokens: int | None = None  # of r3l: tokens that the policy may write about a row before the retry
    branch: Rule | None = None  # rows branch off other rows: minirl/branching.py has the table
    branch_roots: int | None = None  # rows of a group that begin at the prompt; 0: half of them
    branch_span: int | None = None  # tokens: of every, between forks (0: an action); of entropy, that are looked at
    branch_weight: float | None = None  # of entropy: how much it counts that the policy became unsure
    grow: int | None = None  # rounds in which groups of equal rewards get group_size rows more
    selective: int | None = None  # give groups up whose first so many tokens are alike; 0: none
    selective_distance: float | None = None  # that is, their edit distance is on average below this share
    partial: int | None = None  # write so many tokens a round; groups that are not done go on next step; 0: all at once
    resample: int | None = None  # rounds of sampling after the first, until all groups have unequal rewards
    # additions to the reward
    overlong: float | None = None  # share of the longest answer in which a penalty grows to -1; 0: none
    length_reward: Literal["none", "kimi", "cosine"] | None = None  # against the group's lengths, or the limit
    length_coef: float | None = None  # its weight
    repetition_coef: float | None = None  # price of an answer that repeats all its n-grams of three tokens
    sar_coef: float | None = None  # weight of the self-aligned reward: how much likelier the prompt makes the answer
    # advantages
    baseline: Baseline | None = None  # what a reward is compared with
    advantage_scale: Scale | None = None  # divide by the std of the group, the batch, nothing
    std_ddof: Literal[0, 1] | None = None  # 1: that std divides by one less than the number of samples
    credit: Credit | None = None  # which action of a row is it due to? minirl/turns.py has the table
    turn_gamma: float | None = None  # what a reward loses with each turn that it is away, in turn, grow and gigpo
    state_weight: float | None = None  # of gigpo's comparison of what was done in one state
    tree_credit: TreeCredit | None = None  # with branch: compared with its kin; minirl/branching.py
    process: Literal["none", "min-form", "belief"] | None = None  # credit for a step: the task's check of it, as far as
        # it is the worst one (PURE), or what it adds to the belief in the right answer (GRPO-VPS)
    process_weight: float | None = None  # its weight beside the outcome
    combine: Literal["sum", "separate"] | None = None  # add up rewards first, or the advantages of each (GDPO)
    entropy_credit: Literal["none", "gtpo", "grpo-s"] | None = None  # more for tokens, or answers, of high entropy
    ucpo_tau: float | None = None  # share of a group's positive advantage dealt out by rarity; 0: none
    listwise: Literal["none", "pairs", "simplex", "contrast"] | None = None  # compare row by row: minirl/credit.py
    listwise_tau: float | None = None  # reward, or nats a token, by which "simplex" and "contrast" tell rows apart
    success_power: float | None = None  # weigh a group by (mean reward)^-this: 0 RL, 1 the likelihood of success
    positive: float | None = None  # factor of advantages above 0
    amplify: float | None = None  # factor of advantages above 0 whose reward is not full; 0: leave all as they are
    whiten: bool | None = None  # at last give the advantages of the batch mean 0 and std 1
    # ratio
    ratio: Ratio | None = None  # of a token, or of its whole answer: minirl/policy_loss.py has the table
    surrogate: Surrogate | None = None  # what is done with the ratio: the table beside it
    eps_low: float | None = None  # a ratio below 1 - eps_low has no gradient when the advantage is negative
    eps_high: float | None = None  # a ratio above 1 + eps_high has no gradient when the advantage is positive
    rescue: float | None = None  # each token's bounds lie further out by a random share of this; 0: all where eps says
    dual_clip: float | None = None  # nor has a ratio above this one when the advantage is negative; 0: no such bound
    tau: float | None = None  # of "soft": how fast the gradient fades; of "square": the price of a nat
    tau_negative: float | None = None  # of "soft", where the advantage is negative
    off_policy_gap: float | None = None  # drop a bad answer once the policy is so many nats a token below; 0: never
    # weights of tokens
    old_logprobs: Literal["sampler", "trainer"] | None = None  # as written down while sampling, or computed anew
    mismatch: Mismatch | None = None  # what the difference of these two does: minirl/token_weights.py has the table
    mismatch_low: float | None = None  # its lower bound
    mismatch_high: float | None = None  # its upper bound
    delta: bool | None = None  # more for tokens whose gradient is like that of their own side, right or wrong (DelTA)
    expert_gamma: float | None = None  # of an expert's tokens: their loss is - A p / (p + this)
    top_entropy: float | None = None  # share of the batch's tokens that learn, those of the highest entropy
    cov: Literal["none", "kl", "clip"] | None = None  # hold, or leave out, tokens that cost the most entropy
    cov_share: float | None = None  # which share of the tokens
    cov_coef: float | None = None  # price of a nat that a held token moves
    # KL and entropy
    kl_coef: float | None = None  # weight of KL(policy || reference); 0: no reference model
    kl_kind: Literal["k1", "k2", "k3"] | None = None  # its estimator
    kl_ratio: bool | None = None  # weigh it by the ratio of the token, as old samples need it
    entropy_coef: float | None = None  # weight of the policy's entropy, a bonus
    # sum
    aggregate: Mode | None = None  # how the tokens' losses are weighed
    constant_length: int | None = None  # of "constant": divide by rows x this many tokens; 0: the longest answer
    # filters
    mask_truncated: bool | None = None  # rows cut at a limit count in the baseline and are not trained on
    mask_void: bool | None = None  # nor are rows with an action that neither calls a tool nor gives an answer
    mask_constant: bool | None = None  # nor are groups of equal rewards, by the KL term or in the number of tokens
    keep_groups: float | None = None  # nor are any but this share of the groups, those whose rewards differ the most
    mask_shared: bool | None = None  # nor are tokens that a row took over from another, or from an earlier step


class Row(NamedTuple):
    source: str  # paper and equation
    idea: str  # what it changes, and why
    options: dict[str, Any]  # where it differs from the row `default`


def row(source: str, idea: str, **options) -> Row:
    return Row(source, idea, options)


TABLE = {
    "default": row(
        "2402.03300, with 2503.14476's sum", "GRPO with every token of the batch weighed alike and a light leash; "
        "groups of equal rewards, which compare nothing, cost no pass",
        labels="task", expert=False, retry="none", locate="ask", guide_tokens=0, branch="none", branch_roots=0,
        branch_span=0, branch_weight=0.2, grow=0, selective=0, selective_distance=0.1, partial=0, resample=0,
        overlong=0.0, length_reward="none", length_coef=0.5, repetition_coef=0.0, sar_coef=0.0,
        baseline="mean", advantage_scale="std", std_ddof=0, credit="trajectory", turn_gamma=0.95, state_weight=1.0,
        tree_credit="none", process="none", process_weight=1.0, combine="sum", entropy_credit="none", ucpo_tau=0.0,
        listwise="none", listwise_tau=1.0, success_power=0.0, positive=1.0, amplify=0.0, whiten=False,
        ratio="token", surrogate="clip", eps_low=0.2, eps_high=0.2, rescue=0.0, dual_clip=0.0, tau=1.0,
        tau_negative=1.0, off_policy_gap=0.0,
        old_logprobs="sampler", mismatch="none", mismatch_low=0.0, mismatch_high=2.0, delta=False, expert_gamma=0.1,
        top_entropy=1.0,
        cov="none", cov_share=0.0002, cov_coef=1.0,
        kl_coef=0.001, kl_kind="k3", kl_ratio=False, entropy_coef=0.0, aggregate="token", constant_length=0,
        mask_truncated=False, mask_void=False, mask_constant=True, keep_groups=1.0, mask_shared=False),

    # ---- how tokens are summed, what the advantage is divided by
    "grpo": row(
        "2402.03300 eq. 3-4", "the group's mean is the critic; its std makes easy and hard prompts weigh alike",
        aggregate="sequence", kl_coef=0.04),
    "r1": row(
        "2501.12948", "GRPO with the clip practically off: eps 10",
        aggregate="sequence", kl_coef=0.001, eps_low=10.0, eps_high=10.0),
    "dr_grpo": row(
        "2503.20783 sec. 3.2", "no division by std (it favours prompts that are nearly solved or hopeless) and none by "
        "the answer's length (it forgives long wrong answers)",
        advantage_scale="none", aggregate="constant", kl_coef=0.0),
    "dapo": row(
        "2503.14476 eq. 8-13", "room above the clip for rare tokens, every token alike, no KL, groups without variance "
        "sampled again (at most 4 times is ours), a soft end. It sums as its code does; eq. 8 is --aggregate prompt",
        eps_high=0.28, kl_coef=0.0, resample=4, overlong=0.2),
    "luspo": row(
        "2602.05261", "GSPO without its division by length: the sum over a row's tokens, then the mean over rows",
        ratio="sequence", eps_low=3e-4, eps_high=4e-4, kl_coef=0.0, aggregate="constant", constant_length=1),

    # ---- the baseline
    "rloo": row(
        "2402.14740", "REINFORCE, each answer compared with the mean of the others: unbiased. The KL of the paper's "
        "reward is --kl-kind k2 as a loss",
        baseline="leave-one-out", advantage_scale="none", surrogate="reinforce", kl_coef=0.0,
        aggregate="constant", constant_length=1),
    "opo": row(
        "2505.23585", "the baseline that makes the gradient's variance least, if all tokens' gradients have one size",
        baseline="length", advantage_scale="none", surrogate="reinforce", kl_coef=0.0,
        aggregate="constant", constant_length=1),
    "reinforce_pp": row(
        "2501.03262", "no groups: rewards are compared with the whole batch",
        baseline="none", advantage_scale="none", whiten=True, kl_coef=0.0),
    "reinforce_pp_baseline": row(
        "2501.03262", "the group's mean, but one std for the batch: no group gains weight by being nearly constant",
        baseline="mean", advantage_scale="none", whiten=True, kl_coef=0.0),

    # ---- which ratio is clipped, and how
    "gspo": row(
        "2507.18071 eq. 5-7", "rewards belong to answers, so the ratio does as well: the geometric mean of its tokens'",
        ratio="sequence", eps_low=3e-4, eps_high=4e-4, kl_coef=0.0, aggregate="sequence"),
    "gspo_token": row(
        "2507.18071 eq. 13-14", "GSPO's value, with a gradient a token: for advantages that differ within an answer",
        ratio="gspo-token", eps_low=3e-4, eps_high=4e-4, kl_coef=0.0, aggregate="sequence"),
    "gmpo": row(
        "2507.20673", "the geometric mean of ratios that are clipped one by one: an outlier cannot carry the row",
        ratio="sequence", surrogate="geometric", eps_low=0.4, eps_high=0.4, kl_coef=0.0, aggregate="sequence"),
    "cispo": row(
        "2506.13585 eq. 4", "the clip caps a token's weight and leaves its gradient: rare tokens go on learning",
        surrogate="weight", eps_low=1.0, eps_high=0.28, kl_coef=0.0),
    "sapo": row(
        "2511.20347", "the gradient fades out, faster where the advantage is negative, instead of ending at a bound",
        surrogate="soft", tau=1.0, tau_negative=1.05, kl_coef=0.0, aggregate="sequence"),
    "two_sided": row(
        "INTELLECT-2; 1912.09729", "a bound for tokens of bad answers, too: at ratio 4 the loss stops growing",
        dual_clip=4.0),
    "nsr_rescue": row(
        "2605.22703", "near-boundary stochastic rescue: a token just outside of the bound goes on learning, by chance, "
        "the less likely the further it is (that the chance falls in a line, and its reach, are ours)",
        rescue=0.1),
    "kimi": row(
        "2501.12599 eq. 3", "rewards are regressed on log-ratios of whole answers: mirror descent. tau is ours",
        advantage_scale="none", ratio="product", surrogate="square", tau=0.5, kl_coef=0.0, aggregate="sequence",
        length_reward="kimi"),

    # ---- the reward
    "sar": row(
        "2509.05489", "answers that the question makes likely gain: short and to the point, not text that fits any",
        sar_coef=0.2),
    "cosine": row(
        "2502.03373 eq. 1", "right answers should be short, wrong ones go on thinking; no repetition (recalled)",
        length_reward="cosine", repetition_coef=0.5),
    "gdpo": row(
        "2601.05242", "each reward is made an advantage by itself, so that it shows which one was earned",
        combine="separate", length_reward="kimi", std_ddof=1, whiten=True, kl_coef=0.0),

    # ---- the advantage
    "ucpo": row(
        "2605.00365", "the same gain for a group's right answers, more of it for the rare ones: keeps them apart",
        ucpo_tau=0.2, std_ddof=1, kl_coef=0.0),
    "gtpo": row(
        "2508.04349", "tokens of high entropy gain in right answers, lose less in wrong ones; sure tokens of right "
        "answers end below 0",
        entropy_credit="gtpo", kl_coef=0.0),
    "grpo_s": row(
        "2508.04349", "answers of high entropy have a higher reward (the form is recalled)",
        entropy_credit="grpo-s", kl_coef=0.0),
    "pure": row(
        "2504.15275", "the outcome, and for steps no sum of their rewards but about the worst one, for which many good "
        "ones do not make up. No reward model: a task's own checks of its steps",
        baseline="leave-one-out", advantage_scale="none", process="min-form", kl_coef=0.0),
    "vps": row(
        "2604.20659", "a segment is paid for what it adds to the belief in the right answer (the sum and its weight "
        "are ours)",
        process="belief", process_weight=0.5, kl_coef=0.0),

    # ---- how the rows come about
    "luffy": row(
        "2504.14945", "one row of a group is an expert's: by its unlikeliest tokens most is learnt. No clip, and a "
        "bonus for entropy (summed as the rest, which is ours)",
        expert=True, advantage_scale="none", surrogate="unclipped", kl_coef=0.0, entropy_coef=0.001,
        aggregate="constant"),
    "srpo": row(
        "2605.25507", "retries from in front of the first wrong thought of a row, compared with each other alone",
        retry="srpo", mask_shared=True, surrogate="reinforce", kl_coef=0.0, aggregate="sequence"),
    "rrpo": row(
        "2605.25507", "the same from anywhere: what SRPO is compared with",
        retry="srpo", locate="random", mask_shared=True, surrogate="reinforce", kl_coef=0.0, aggregate="sequence"),
    "r3l": row(
        "2601.03715", "half of a group are retries from a pivot, of which only what is new is trained on; better than "
        "the mean, but not perfect, counts three times; no std, no ratio. Its factor 1/2 (tau 1) is left to the rate",
        retry="r3l", guide_tokens=32, mask_shared=True, advantage_scale="none", amplify=3.0, surrogate="reinforce",
        kl_coef=0.0),
    "tree_rpo": row(
        "2506.05183", "a full tree of answers: a piece is worth the mean of what follows it, compared with the pieces "
        "that begin where it does, and counts once",
        branch="every", branch_roots=2, tree_credit="siblings", mask_shared=True, kl_coef=0.0),
    "tree_grpo": row(
        "2509.21240", "trees of agents' turns: compared with all rows, and with those of the same tree",
        branch="random", branch_roots=2, tree_credit="inter-intra", std_ddof=1),
    "arpo": row(
        "2507.19849", "a row branches where a tool's answer has made the policy unsure; then as GRPO",
        branch="entropy", branch_span=20, kl_coef=0.0),
    "adaptive": row(
        "adaptive group sizes, of many", "where all of a group earn the same, it gets more rows, twice at most (ours)",
        grow=2, kl_coef=0.0),
    "selective": row(
        "2605.05802", "groups whose answers begin alike are given up, for they would earn alike (the number of tokens "
        "and the distance are ours)",
        selective=8, resample=1, kl_coef=0.0),

    "pair_grpo": row(
        "2605.06375", "only who is better counts, not by how much: the soft form, its mean over pairs is ours",
        listwise="pairs", aggregate="sequence", kl_coef=0.04),
    "lpo": row(
        "2605.06139", "rewards name a target among the group's answers, which the policy is drawn to: the first step "
        "of that projection (tau is ours)",
        listwise="simplex", aggregate="sequence", kl_coef=0.0),
    "conspo": row(
        "2605.12969", "each right answer against the wrong ones of its group, by their likelihoods: what is told apart "
        "already counts less (InfoNCE without the paper's margin; tau is ours)",
        listwise="contrast", listwise_tau=0.5, ratio="sequence", surrogate="unclipped", kl_coef=0.0,
        aggregate="sequence"),
    "garl": row(
        "2604.25907", "between RL and the likelihood of success: hard problems weigh more (q 0.75; this is for "
        "rewards of 0 and 1, `tsallis.garl_loss` is the one for a first success that never comes)",
        advantage_scale="none", success_power=0.75, kl_coef=0.0),
    "nsr": row(
        "2506.01347", "negative sample reinforcement: wrong answers are made unlikely, and right ones left alone, so "
        "that their variety stays",
        baseline="half", advantage_scale="none", positive=0.0, surrogate="reinforce", kl_coef=0.0),
    "w_reinforce": row(
        "2506.01347", "the same with a tenth of the praise for right answers",
        baseline="half", advantage_scale="none", positive=0.1, surrogate="reinforce", kl_coef=0.0),

    # ---- without labels
    "intuitor": row(
        "2505.19590; 2502.18581", "nobody says what is right: being sure is paid",
        labels="self-certainty", kl_coef=0.005),
    "majority": row(
        "2504.16084", "what most answers of a group say is taken for right (TTRL)",
        labels="majority"),
    "co_rewarding": row(
        "2508.00410", "what most answers say to the same problem in other words is taken for right (I, with the "
        "majority; not II, with a slow copy of the policy)",
        labels="co-rewarding"),

    # ---- the weight of a token
    "top_entropy": row(
        "2506.01939", "one token in five learns, where the policy was least sure: forks, not the words between them",
        top_entropy=0.2, eps_high=0.28, kl_coef=0.0),
    "kl_cov": row(
        "2505.22617", "tokens that cost the most entropy may not move; no clip",
        surrogate="unclipped", cov="kl", kl_coef=0.0),
    "clip_cov": row(
        "2505.22617", "some of the tokens that cost the most entropy do not learn",
        cov="clip", kl_coef=0.0),
    "delta": row(
        "2605.21467", "tokens count by how well their gradient tells right answers from wrong ones, 0.8 to 1.2 times "
        "(the temperature is ours)",
        delta=True, eps_high=0.28, kl_coef=0.0),
    "tis": row(
        "truncated importance sampling; verl, TRL", "samples that another engine drew weigh by how likely they are "
        "here, at most twice",
        old_logprobs="trainer", mismatch="tis", mismatch_high=2.0),
    "icepop": row(
        "2510.18855", "and those that the two disagree about do not count",
        old_logprobs="trainer", mismatch="icepop", mismatch_low=0.5, mismatch_high=5.0),
    "deepseek_v32": row(
        "2512.02556", "bad answers that the policy has left long ago are dropped, the KL is weighed by the ratio. The "
        "gap is ours",
        off_policy_gap=0.5, kl_ratio=True, aggregate="sequence"),

    # ---- credit over turns
    "turn": row(
        "reward to go; 1707.06347 without its critic", "an action is not paid for what came before it: each turn's "
        "return is compared with that of the same turn in the other rows",
        credit="turn", turn_gamma=1.0),
    "grow": row(
        "2605.20246", "every turn is a sample, worth the discounted outcome, compared with all turns of the prompt "
        "(gamma and the std are ours; it trains without the history, here there is one)",
        credit="grow"),
    "gigpo": row(
        "2505.10978", "besides the row as a whole: what else did the group do in this very state, and what came of it?",
        credit="gigpo", advantage_scale="none"),
    "tstar": row(
        "2604.07165", "a mean over all rows that acted alike so far has less noise than the row (its tree; the second "
        "loss, on forks, is `tree.surgical_loss`, in no trainer)",
        credit="tree"),
    "simpletir": row(
        "2509.02479", "a row with an action that neither calls a tool nor answers is not trained on, whatever it got",
        mask_void=True),

    "starpo_s": row(
        "2504.20073", "the quarter of the groups whose rewards differ the most is trained on, with a bonus for entropy "
        "(its critic over turns is not here)",
        keep_groups=0.25, eps_high=0.28, kl_coef=0.0, entropy_coef=0.001),

    # ---- whole systems
    "deepswe": row(
        "Agentica + Together AI, blog of 2 July 2025", "Dr. GRPO's mean, RLOO's baseline, DAPO's clip, no KL; what ran "
        "out of tokens counts in the baseline and is not trained on (no training code was published)",
        baseline="leave-one-out", advantage_scale="none", eps_high=0.28, kl_coef=0.0, aggregate="constant",
        mask_truncated=True),
    "scalerl": row(
        "2510.13786", "CISPO with cap 5, prompts weighed alike, one std for the batch, constant groups left out (after "
        "the description; its code was not read)",
        advantage_scale="batch", surrogate="weight", eps_low=1.0, eps_high=4.0, kl_coef=0.0, aggregate="prompt",
        mask_constant=True),
}
COLUMNS = tuple(field.name for field in fields(RecipeOptions) if field.name != "recipe")
# What a row does not mention it has from "default", but for this: papers count all groups, and their KL term holds all.
UNSAID = TABLE["default"].options | dict(mask_constant=False)
RECIPES: dict[str, dict[str, Any]] = {name: UNSAID | row.options for name, row in TABLE.items()}


def fill_in(config: RecipeOptions) -> None:
    """Called while a config is made: what was not given takes the value of the row, then all is checked."""
    if config.recipe not in RECIPES:
        near = difflib.get_close_matches(config.recipe, RECIPES, n=1)
        raise UserError(f"--recipe {config.recipe}: there is no such row; " + (
            f"did you mean {near[0]}?" if near else f"there are {', '.join(RECIPES)}"))
    by_parts = (config.credit or "trajectory", config.tree_credit or "none", config.process or "none",
                config.combine or "sum") != ("trajectory", "none", "none", "sum")
    if config.mask_constant is None and config.recipe == "default" and by_parts:
        object.__setattr__(config, "mask_constant", False)  # rewards of equal sums may differ turn by turn
    for name, value in RECIPES[config.recipe].items():
        if getattr(config, name) is None:
            object.__setattr__(config, name, value)
    check_pair(config.ratio, config.surrogate)
    if config.labels != "task" and (config.resample or config.credit != "trajectory"):
        raise UserError(f"--labels {config.labels} knows nothing of the task's verdict, which --resample and --credit "
                        "ask for: leave them out")
    if config.labels == "self-certainty" and (config.ucpo_tau or config.amplify or config.length_reward != "none"
                                              or config.entropy_credit == "gtpo" or config.listwise == "contrast"):
        raise UserError("--labels self-certainty says how sure an answer is, and not whether it is right: leave out "
                        "--ucpo-tau, --amplify, --length-reward, --entropy-credit gtpo, --listwise contrast")
    if config.listwise != "none" and (config.credit != "trajectory" or config.combine == "separate"):
        raise UserError(f"--listwise {config.listwise} compares rows by one reward: leave out --credit, --combine")
    check_not_negative(config, "eps_low", "eps_high", "dual_clip", "kl_coef", "entropy_coef", "constant_length",
                       "overlong", "repetition_coef", "ucpo_tau", "amplify", "off_policy_gap", "mismatch_low",
                       "cov_coef", "resample", "turn_gamma", "state_weight", "success_power", "positive", "rescue",
                       "guide_tokens", "branch_roots", "branch_span", "branch_weight", "grow", "selective", "partial",
                       "process_weight")
    check_positive(config, "expert_gamma", "selective_distance", "listwise_tau", "tau", "tau_negative",
                   "mismatch_high", "top_entropy", "cov_share", "keep_groups")
    for name in ("overlong", "ucpo_tau", "top_entropy", "cov_share", "turn_gamma", "keep_groups"):
        if getattr(config, name) > 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(config, name)}: a share lies between 0 and 1")
    if config.mismatch != "none" and config.old_logprobs == "sampler":
        raise UserError(f"--mismatch {config.mismatch} corrects for what sampler and trainer disagree about, which the "
                        "ratio of --old-logprobs sampler does already: use --old-logprobs trainer")
    if config.entropy_credit == "gtpo" and config.credit != "trajectory":
        raise UserError(f"--credit {config.credit} has no effect with --entropy-credit gtpo, which looks at tokens and "
                        "not at turns: leave one of them out")
    check_sampling(config)
    if 0 < config.dual_clip <= 1 + config.eps_high:
        raise UserError(f"--dual-clip {config.dual_clip}: a bound on large ratios lies above 1 + eps_high; 0: none")


def check_sampling(config: RecipeOptions) -> None:
    """UserError for ways of sampling that do not go together, or not with the size of a group."""
    size = getattr(config, "group_size", None)  # of a trainer; the table alone has none
    ways = [f"--{name}" for name in ("expert", "retry", "branch", "grow", "selective", "partial")
            if getattr(config, name) not in (False, 0, "none")]
    if len(ways) > 1:
        raise UserError(f"{ways[0]} and {ways[1]} both say how the rows of a group come about: leave one of them out")
    for way in ({"--retry", "--partial"} & {*ways} if config.resample else ()):
        raise UserError(f"{way} does not go with --resample {config.resample}: leave one of them out")
    if config.tree_credit != "none" and config.branch == "none":
        raise UserError(f"--tree-credit {config.tree_credit} looks at rows that branch: give --branch")
    if config.tree_credit != "none" and config.credit != "trajectory":
        raise UserError(f"--credit {config.credit} has no effect with --tree-credit {config.tree_credit}: leave one of "
                        "them out")
    if config.branch == "entropy" and not config.branch_span:
        raise UserError("--branch entropy looks at the first tokens behind a tool's answer: give --branch-span")
    if size is not None:
        check_retry(config.retry, size)
        if config.branch != "none":
            check_branching(config.branch, size, config.branch_roots or size // 2)
        if config.expert and size < 3:
            raise UserError(f"--group-size {size}: with --expert one row is the expert's, so give at least 3")


def document() -> str:
    """The table as Markdown: what `python -m minirl.recipes` prints, and docs/grpo_family.md shows."""
    lines = ["| recipe | from | idea | differs from `default` in |", "|---|---|---|---|"]
    for name, line in TABLE.items():
        options = "all columns" if name == "default" else "; ".join(
            f"`{option}` {value}" for option, value in line.options.items())
        lines.append(f"| `{name}` | {line.source} | {line.idea} | {options} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(document(), end="")
