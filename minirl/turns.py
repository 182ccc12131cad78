"""Credit over turns: of a row of several actions that was paid at its end, which one was it?

    prompt   action 0   observation   action 1   observation   action 2   reward
    state 0  turn 0     state 1       turn 1     state 2       turn 2     R

B rows of at most K turns; row b has the turns 0 .. K_b - 1. An action's state is what the policy saw last: the prompt,
or the observation before it. All tokens of an action share its credit.

    credit      value of a turn                               is compared with
    trajectory  R, what the whole row was paid                the rows of its prompt
    turn        G_t = r_t + gamma r_t+1 + gamma^2 r_t+2 ...   the same turn of those rows
    grow        G_t                                           all turns of those rows
    gigpo       R; plus `weight` times what G_t gives         the rows of its prompt; the turns of those in its state
    tree        mean R of the rows that acted alike so far    the rows of its prompt
    merged      mean R of the rows that, at this turn, were   the rows of its prompt
                in the same state and acted alike

"trajectory" cannot tell a good move from a bad one within a row: that averages out over many rows only. "turn" leaves
out what was paid before. "gigpo" asks what else was done in this place, so it needs places that come again, in the
group or in the row. "tree" and "merged" keep what is compared, but take it as a mean over k rows, with 1/k of the
variance (tree.py tells when that helps). "trajectory", "turn" and "tree" hold for any policy and task; the others take
the state for all that matters, although the policy remembers more, and grow and gigpo take no account of the time left.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from minirl.advantages import group_advantages
from minirl.config import UserError
from minirl.gae import gae
from minirl.tree import row_mean_through, tree_paths

if TYPE_CHECKING:
    from minirl.env.base import Step

Credit = Literal["trajectory", "turn", "grow", "gigpo", "tree", "merged"]


# ---- rows as turns ----

def turn_numbers(mask: Tensor) -> Tensor:
    """(B, S) bool -> (B, S) int64: the turn of each action token, 0 .. K_b - 1; -1 for what others wrote.

    A turn is a run of chosen tokens: what follows an action that is not the last is an observation of a token or more.
    """
    begins = mask & ~F.pad(mask[:, :-1], (1, 0))
    return torch.where(mask, begins.cumsum(1) - 1, -1)


def turn_rewards(turns: Sequence[Sequence[Step]], rewards: Tensor) -> Tensor:
    """What each turn was paid: (B, K), 0 behind the last.

    rewards : (B,) of the whole rows. What a row got beyond the sum of its steps (a term that a recipe adds to the
              task's reward) is paid with its last turn, so that the turns of a row add up to it
    """
    width = max(map(len, turns), default=0)
    paid = rewards.new_tensor([[step.reward for step in row] + [0.0] * (width - len(row)) for row in turns])
    last = torch.tensor([[max(0, len(row) - 1)] for row in turns], device=rewards.device)
    return paid.scatter_add(1, last, (rewards - paid.sum(1))[:, None])


def turn_returns(paid: Tensor, gamma: float) -> Tensor:
    """(B, K) -> (B, K): G_t = r_t + gamma G_t+1. Turns that are not there are paid 0, and stand behind the others."""
    returns = paid.clone()
    for k in range(paid.shape[1] - 2, -1, -1):
        returns[:, k] = paid[:, k] + gamma * returns[:, k + 1]
    return returns


def process_rewards(turns: Sequence[Sequence[Step]], numbers: Tensor, like: Tensor) -> Tensor:
    """What the task's own checks say of each turn: (B, K), within -1 .. 1, 0 behind the last. No part of the reward.

    info["process"] of a step where the environment has an opinion (a process reward model's p(good) - p(bad), a
    distance that shrank); else 1 for a call that could be carried out, -1 for one that could not, 0 for neither.
    """
    _check_rows(turns, len(numbers), "--process min-form")
    _check_runs(turns, numbers)
    width = max(map(len, turns), default=0)
    calls = {True: 1.0, False: -1.0, None: 0.0}
    said = [[float(step.info.get("process", calls[step.info.get("tool_call")])) for step in row] for row in turns]
    return like.new_tensor([row + [0.0] * (width - len(row)) for row in said])


def states(turns: Sequence[Sequence[Step]]) -> list[list[str]]:
    """What the policy saw before each action: the last observation; "" for the prompt, which a group shares."""
    return [["", *(step.observation for step in row[:-1])] for row in turns]


def number_sets(keys: Sequence[Sequence[Hashable]], group: Tensor) -> Tensor:
    """(B, K) int64: the same number for turns of one prompt with the same key; -1 where there is no turn."""
    width, numbers = max(map(len, keys), default=0), {}
    rows = [[numbers.setdefault((prompt, key), len(numbers)) for key in row] + [-1] * (width - len(row))
            for prompt, row in zip(group.tolist(), keys, strict=True)]
    return torch.tensor(rows, dtype=torch.int64, device=group.device).view(len(keys), width)


# ---- advantages ----

@torch.no_grad()
def compare(values: Tensor, sets: Tensor, alone: Tensor, lengths: Tensor | None = None, **how: Any) -> Tensor:
    """(B, K): each turn's value relative to the other turns of its set.

    values, sets, lengths : (B, K) numbers, sets from `number_sets`, and action tokens
    alone                 : (B, K), or (B, 1), what a turn gets that has its set for itself
    how                   : baseline, scale, ddof, mesh of `group_advantages`, which makes the comparison
    """
    at = (sets >= 0).nonzero(as_tuple=True)
    _, index, count = sets[at].unique(return_inverse=True, return_counts=True)
    company = count[index] > 1
    at = tuple(place[company] for place in at)
    found = group_advantages(values[at], index[company], lengths=None if lengths is None else lengths[at], **how)
    return alone.expand_as(values).index_put(at, found[:, 0])


@torch.no_grad()
def turn_advantages(credit: Credit, rewards: Tensor, group: Tensor, turns: Sequence[Sequence[Step]], mask: Tensor,
                    gamma: float = 0.95, weight: float = 1.0, **how: Any) -> Tensor:
    """How much better than expected each action was, by one of the credits of the table above.

    rewards : (B,)            group : (B,) int64, the prompt each row answers
    turns   : of each row its `Step`s (`rollout.turns`); mask (B, S) bool, its action tokens
    gamma   : what a reward loses with each turn that it is away, in G_t
    weight  : of GiGPO's second term, its omega
    how     : baseline, scale, ddof, mesh of `group_advantages`, for rows and turns alike
    returns : (B, 1) for "trajectory", else (B, S), 0 outside the mask; unitless, no gradient

    turn    reward to go, with a baseline for each turn number, which no action of the turn can move (REINFORCE). A turn
            that no other row came to is compared as its row is, for a 0 would be a bias
    grow    GROW, arXiv:2605.20246: R is paid with the last turn of a row of H turns, and turn t = 1 .. H of it is worth
            gamma^(H - t) R. Long rows have more turns, and weigh more in the mean. The first turn of a success is
            worth the least of it: beside a failure about as long it still gains, in a long row beside a short one it
            is blamed. **Not established**: gamma, whether there is a division by std, a KL term, the exact exponent.
            The paper's samples are a state and an action without the rest of the row, see `state_action_samples`;
            here they keep their history
    gigpo   GiGPO, arXiv:2505.10978: A = A_E + omega A_S, gamma 0.95 and omega 1. A turn whose state nobody else saw has
            A_S = 0. Mean only, or mean and std: both are in the paper
    tree    T-STAR's node advantage, arXiv:2604.07165: (Q(node) - mean R) / std R, see tree.py for what is not
            established of it. Q is a mean and the comparison linear in R, so it is the mean of the rows' advantages
    """
    if credit not in Credit.__args__:
        raise UserError(f"credit {credit!r} does not exist: use one of {', '.join(Credit.__args__)}")
    rows = group_advantages(rewards, group, lengths=mask.sum(1), **how)  # (B, 1)
    if credit == "trajectory":
        return rows
    numbers = turn_numbers(mask)  # (B, S)
    _check_rows(turns, len(mask), f"--credit {credit}")
    _check_runs(turns, numbers)
    paid = turn_rewards(turns, rewards)
    if credit in ("tree", "merged"):
        nodes = number_sets(tree_paths(turns, merge="past" if credit == "tree" else "state"), group)
        return spread(row_mean_through(nodes, rows[:, 0]), numbers)
    returns = turn_returns(paid, gamma)
    tokens = torch.zeros_like(paid, dtype=torch.int64).scatter_add(1, numbers.clamp(min=0), mask.long())
    keys = {"turn": lambda: [range(len(row)) for row in turns],
            "grow": lambda: [[None] * len(row) for row in turns],
            "gigpo": lambda: states(turns)}[credit]()
    alone = rows if credit == "turn" else torch.zeros_like(rows)
    advantages = compare(returns, number_sets(keys, group), alone, tokens, **how)
    if credit == "gigpo":
        advantages = rows + weight * advantages
    return spread(advantages, numbers)


def spread(values: Tensor, numbers: Tensor) -> Tensor:
    """A value for each turn to all its tokens: (B, K), and (B, S) of `turn_numbers` -> (B, S), 0 outside of turns."""
    return torch.where(numbers >= 0, values.gather(1, numbers.clamp(min=0)), 0.0)


def state_action_samples(prompt: str, turns: Sequence[Step], reward: float, gamma: float
                         ) -> list[tuple[str, str, float]]:
    """A row as independent samples (state, action, gamma^(H - t) R): GROW's way to train beyond a context's length.

    turns : the H `Step`s of one row
    The policy must then be sampled in this way as well, each action from its state alone.
    """
    seen = [prompt, *(step.observation for step in turns[:-1])]
    return [(state, step.action, reward * gamma ** (len(turns) - t))
            for t, (state, step) in enumerate(zip(seen, turns, strict=True), start=1)]


# ---- with a critic ----

@torch.no_grad()
def bilevel_gae(token_rewards: Tensor, values: Tensor, ends: Tensor, mask: Tensor, gamma: float, lam: float,
                turn_gamma: float = 0.95, bootstrap: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """GAE over turns, then within each turn with the turn's return as its reward: RAGEN, arXiv:2504.20073.

    token_rewards, values, mask : (B, S), as for `gae`
    ends      : (B, S) bool, the last action token of each turn (`turn_ends`). Explicit: who takes a reward other than
                0 for the end of a turn, as the paper's code does, loses the turns that were paid nothing
    gamma, lam: within a turn; lam is also that between turns
    turn_gamma: from the end of a turn to the end of the next
    bootstrap : (B,) value of the state after the last turn of a row that was cut; None: all ended
    returns   : advantages, returns (B, S), no gradient, 0 outside the mask, not whitened

    Rewards inside a turn, as the cost of a KL, are part of what the turn was paid. So rows that ended after one turn,
    and all with turn_gamma = gamma = lam = 1, get what `gae` gives.
    """
    ends = ends & mask
    turn = ends.cumsum(1) - ends.long()  # (B, S) the end itself belongs to its turn
    count = int(turn.max()) + 1
    apart = mask[:, None] & (turn[:, None] == torch.arange(count, device=mask.device)[:, None])  # (B, K, S)
    paid = torch.where(apart, token_rewards[:, None], 0.0).sum(2).gather(1, turn)  # (B, S) of each column's turn
    _, turn_return = gae(paid, values, ends, turn_gamma, lam, bootstrap)
    rewards = torch.where(ends, turn_return - (paid - token_rewards), token_rewards)
    each = (x.repeat_interleave(count, 0) for x in (rewards, values))
    found = gae(*each, apart.flatten(0, 1), gamma, lam)  # every turn is a row of its own: nothing flows over its end
    advantages, returns = (x.unflatten(0, (len(mask), count)).sum(1) for x in found)
    return advantages, returns


def turn_ends(mask: Tensor) -> Tensor:
    """(B, S) bool -> (B, S) bool: the last token of each run of action tokens."""
    return mask & ~F.pad(mask[:, 1:], (0, 1))


# ---- rows that are not trained on ----

def without_void_turns(turns: Sequence[Sequence[Step]], rows: int) -> Tensor:
    """(B,) bool: every action of the row either called a tool, rightly or not, or gave an answer that can be read.

    SimpleTIR, arXiv:2509.02479: a row with a void turn, one with neither a code block nor an answer, is not trained on,
    whatever it was paid; here it is what `Step.info` says under "tool_call" and "format". In the baseline it counts.
    """
    _check_rows(turns, rows, "--mask-void")
    return torch.tensor([all(step.info.get("tool_call") is not None or bool(step.info.get("format")) for step in row)
                         for row in turns])


def ended_by_itself(turns: Sequence[Sequence[Step]], finished: Tensor) -> Tensor:
    """(B,) bool: not cut, neither at a limit of tokens or the context (`finished` False) nor at one of turns.

    DeepSWE's compact filtering (blog of Agentica and Together AI, 2 July 2025): what was cut counts in the baseline and
    is not trained on. An environment that ends a row at its limit of turns says so by `info["cut"]` on the last step.
    Where nobody knows the turns, [], `finished` alone counts.
    """
    cut = [bool(row) and bool(row[-1].info.get("cut")) for row in turns] or [False] * len(finished)
    return finished & ~torch.tensor(cut, device=finished.device)


def _check_rows(turns: Sequence[Sequence[Step]], rows: int, option: str) -> None:
    if len(turns) != rows:
        raise UserError(f"{option} looks at the turns of each row, but there are {len(turns)} lists of turns for "
                        f"{rows} rows: was the .jsonl beside the saved rollout lost?")


def _check_runs(turns: Sequence[Sequence[Step]], numbers: Tensor) -> None:
    for row, (steps, runs) in enumerate(zip(turns, (numbers.amax(1) + 1).tolist(), strict=True)):
        if len(steps) != runs:
            raise UserError(f"row {row} has {len(steps)} turns, but its action mask has {runs} runs of action tokens: "
                            "pass the mask of the rollout, before any filter")
