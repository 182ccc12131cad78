"""Rows that branch off other rows while they are sampled: trees, of which the common part is computed once.

    prompt  a ──┬── b ──┬── c       row 0     G = 4 rows, 2 of which begin at the prompt
                │       └── d       row 2     rows 2 and 3 branch off them: with the tokens, the log-probs and the
                └── ...                       part of the KV cache that stand in front of the fork
            e ──── f ─┬─ g          row 1
                      └─ h          row 3

    rule       a row branches                                                               source
    "every"    at the beginning of each action, or behind every `span` tokens               TreeRPO, arXiv:2506.05183
    "random"   at the beginning of actions that are drawn once it is over                   Tree-GRPO, 2509.21240
    "entropy"  where a tool's answer has made the policy unsure                             ARPO, arXiv:2507.19849

Who may branch off whom is fixed beforehand, and whether and where it does depends on that row alone: batches, ranks and
the order in which rows end cannot change a tree. A row whose chance never comes begins at the prompt, once the row that
it waits for is over, so that a prompt always has G rows. Each leaf is an ordinary row, a sample of the policy like any
other; what it shares with another stands in both, `parent` and `shared` say how much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from minirl.advantages import group_advantages
from minirl.config import UserError
from minirl.generate import uniform

if TYPE_CHECKING:
    from minirl.generate import Turns
    from minirl.rollout import Rollout

Rule = Literal["none", "every", "random", "entropy"]
TreeCredit = Literal["none", "siblings", "inter-intra"]


class Branching:
    """The rows of some prompts, G each, `roots` of which begin at the prompt.

    ids    : (N,) int64 sample ids, the rows of a prompt behind one another
    span   : of "every": tokens between two forks, 0: an action; of "entropy": tokens that are looked at
    weight : of "entropy": how much a nat counts, ARPO's w, entropies being divided by log V

    "every" is a full tree of `roots` branches a fork: G must be a power of `roots`. In the others each root has its
    share of the G - roots rows, and branches in two (ARPO's beam). **Ours**: ARPO deals them out first come, first
    served, and lets branches branch again; Tree-GRPO can go on expanding a tree that it has expanded (its L is 1 here).
    """

    def __init__(self, rule: Rule, ids: Tensor, group_size: int, roots: int, span: int = 0, weight: float = 0.2,
                 vocab_size: int = 2, seed: int = 0):
        check_branching(rule, group_size, roots)
        self.rule, self.ids, self.group_size, self.first = rule, ids, group_size, roots
        self.span, self.weight, self.seed = span, weight, seed
        self.nats = torch.tensor(float(vocab_size)).log().item()
        self.options = (group_size, roots, span, weight, vocab_size, seed)
        self.queue: list[list[list[int]]] = [[] for _ in ids]  # who waits to branch off a row, fork by fork
        self.owner = list(range(len(ids)))
        self.judged = [0] * len(ids)  # forks of the row that have been decided
        self.parents: dict[int, tuple[int, int]] = {}  # child -> parent, shared tokens
        self.forked: Callable[[int, int, int], None] = lambda parent, child, over: None
        for start in range(0, len(ids), group_size):
            for child in range(roots, group_size):
                own, waits = self._place(child)
                self.queue[start + own] += [[] for _ in range(waits + 1 - len(self.queue[start + own]))]
                self.queue[start + own][waits].append(start + child)
                self.owner[start + child] = start + own

    def _place(self, child: int) -> tuple[int, int]:
        """(the row that number `child` of a group waits for, at which of that one's forks)."""
        if self.rule != "every":
            return child % self.first, child // self.first - 1
        level, size = 0, self.first  # rows size .. size * roots - 1 come with fork `level` of all that were there
        while child >= size * self.first:
            level, size = level + 1, size * self.first
        own = (child - size) % size
        came, count = 0, self.first
        while own >= count:
            came, count = came + 1, count * self.first
        return own, level - came

    @property
    def family(self) -> int:
        """Rows that may come of one that begins at the prompt."""
        return -(-self.group_size // self.first)

    def roots(self) -> list[int]:
        """The rows that begin at the prompt from the first."""
        return [row for row in range(len(self.ids)) if row % self.group_size < self.first]

    def of(self, rows: Tensor) -> Branching:
        """The same for some prompts, all rows of them."""
        return Branching(self.rule, self.ids[rows], *self.options)

    def grow(self, turns: Turns, rows: Sequence[int], alive: Sequence[bool]) -> tuple[list[tuple[int, int, int]],
                                                                                      list[int]]:
        """After a step: forks (parent, child, shared tokens), and rows that begin at the prompt since nobody forked."""
        forks, late = [], []
        for row, going in zip(rows, alive, strict=True):
            while self.queue[row] and (at := self.next_fork(turns, row, going)) is not None:
                for child in self.queue[row].pop(0):
                    turns.fork(row, child, at)
                    self.forked(row, child, len(turns.starts[child]) - 1)
                    self.parents[child] = (row, at)
                    self.judged[child] = self.judged[row]
                    forks.append((row, child, at))
            if not going:
                late += [child for children in self.queue[row] for child in children]
                self.queue[row] = []
        return forks, late

    def next_fork(self, turns: Turns, row: int, going: bool) -> int | None:
        """Where the next rows branch off, tokens of the tape; None: nowhere yet. It looks at what is behind a place:
        by then the cache has seen all that stands in front of it."""
        tapes, starts, length = turns.tapes, turns.starts[row], int(turns.tapes.lengths[row])
        if self.rule == "random":
            if going:
                return None
            u = uniform(self.seed + 4, self.ids[row][None], torch.tensor([len(self.queue[row])]))
            begun = [start for start in starts if start < length]
            return begun[int(float(u) * len(begun))]
        if self.rule == "every":
            if self.span:
                own = tapes.chosen[row, :length].nonzero()[:, 0]
                number = (self.judged[row] + 1) * self.span
                at = int(own[number]) if len(own) > number else None
            else:
                number = self.judged[row] + 1
                at = starts[number] if len(starts) > number and starts[number] < length else None
            self.judged[row] += at is not None
            return at
        while self.judged[row] + 1 < len(starts):  # "entropy": each answer of a tool is judged once
            at = starts[self.judged[row] + 1]
            end = starts[self.judged[row] + 2] if self.judged[row] + 2 < len(starts) else length
            if at >= length or (going and end == length and length - at < self.span):
                return None
            self.judged[row] += 1
            change = self.surprise(tapes, row, at) - self.surprise(tapes, row, starts[0])
            u = uniform(self.seed + 4, self.ids[row][None], torch.tensor([self.judged[row]]))
            if entropy_branch(change, float(u), self.weight):
                return at
        return None

    def surprise(self, tapes: Any, row: int, at: int) -> float:
        """Mean - log p / log V of the action's first `span` tokens from `at` on. Its expectation is their entropy, and
        it needs no logits, which no rank has whole. (ARPO takes the entropy of the likeliest words.)"""
        end = min(at + self.span, int(tapes.lengths[row]))
        own = tapes.chosen[row, at:end].cumprod(0).bool()  # not those of a later action
        return -float(tapes.logprobs[row, at:end][own].double().mean()) / self.nats

    def note_parents(self, rollout: Rollout) -> Rollout:
        """`parent` and `shared` of every row."""
        shared = [self.parents.get(row, (row, 0)) for row in range(len(rollout))]
        parent, shared = torch.tensor(shared, device=rollout.tokens.device).T
        return rollout.replace(parent=rollout.sample_ids[parent], shared=shared)


def check_branching(rule: str, group_size: int, roots: int) -> None:
    """UserError for groups that are no trees."""
    if rule not in Rule.__args__:
        raise UserError(f"--branch {rule} does not exist: use one of {', '.join(Rule.__args__)}")
    if not 1 <= roots < group_size:
        raise UserError(f"--branch-roots {roots}: of the {group_size} rows of a group some begin at the prompt, 1 or "
                        "more, and some branch off these")
    power = roots
    while rule == "every" and 1 < power < group_size:
        power *= roots
    if rule == "every" and power != group_size:
        raise UserError(f"--branch every: a full tree of {roots} branches a fork has {roots}, {roots**2}, {roots**3} "
                        f".. rows and not {group_size}: give a --group-size that is a power of --branch-roots, above 1")


def entropy_branch(change: float, u: float, weight: float = 0.2) -> bool:
    """ARPO: does a row branch? change: of the entropy since its first tokens, / log V; u: uniform in [0, 1).

    Where clip(u - weight change, 0, 1) <= 1/2: with probability clip(1/2 + weight change, 0, 1).
    """
    return min(max(u - weight * change, 0.0), 1.0) <= 0.5


# ---- credit ----

@torch.no_grad()
def tree_advantages(credit: TreeCredit, rollout: Rollout, rewards: Tensor, **how: Any) -> Tensor:
    """How much better each row, or each piece of it between two forks, is than its kin.

    rewards : (B,)            how : baseline, scale, ddof, mesh of `group_advantages`
    "inter-intra"  (B, 1): compared with all rows of the prompt, plus compared with those of the same tree. Tree-GRPO,
                   arXiv:2509.21240. A tree of one row adds 0 (verl's form would add the reward itself)
    "siblings"     (B, S): a leaf is worth its reward, a piece the mean of the pieces that follow it, and it is compared
                   with those that begin where it does. TreeRPO, arXiv:2506.05183
    """
    if rollout.parent is None:
        raise UserError(f"--tree-credit {credit} needs rows that branch: give --branch")
    if credit == "siblings":
        return sibling_advantages(rewards, rollout, **how)
    index = {sample: row for row, sample in enumerate(rollout.sample_ids.tolist())}
    parent = [index[sample] for sample in rollout.parent.tolist()]
    root = list(range(len(parent)))
    while any(parent[r] != r for r in root):
        root = [parent[r] for r in root]
    tree = torch.tensor(root, device=rewards.device)
    return group_advantages(rewards, rollout.group, **how) + _where_several(rewards, tree, **how)[:, None]


def _where_several(values: Tensor, sets: Tensor, **how: Any) -> Tensor:
    """(N,): `group_advantages` of the sets with two members or more, 0 for the others."""
    _, index, count = sets.unique(return_inverse=True, return_counts=True)
    several = count[index] > 1
    found = torch.zeros_like(values)
    if several.any():
        found[several] = group_advantages(values[several], index[several], **how)[:, 0]
    return found


def sibling_advantages(rewards: Tensor, rollout: Rollout, **how: Any) -> Tensor:
    """(B, S), see `tree_advantages`. The pieces of a tree, found from `parent` and `shared`."""
    ids, shared = rollout.sample_ids.tolist(), rollout.shared.tolist()
    index = {sample: row for row, sample in enumerate(ids)}
    parent = [index[sample] for sample in rollout.parent.tolist()]

    def owner(row: int, at: int) -> int:  # the row in which the token before a fork at `at` was sampled
        while parent[row] != row and at <= shared[row]:
            row = parent[row]
        return row

    off: dict[int, dict[int, list[int]]] = {row: {} for row in range(len(ids))}  # row -> fork -> rows that left there
    for row, place in enumerate(parent):
        if place != row:
            off[owner(place, shared[row])].setdefault(shared[row], []).append(row)
    worth, sets = [], []  # of each piece: its value, and what it is compared with
    pieces: list[dict[int, int]] = [{} for _ in ids]  # of each row: where a piece begins -> its number

    def walk(row: int, start: int, where: int) -> float:
        """The worth of what `row` wrote from token `start` on, with all that branched off it; set number `where`."""
        number = pieces[row][start] = len(worth)
        worth.append(0.0)
        sets.append(where)
        end = min((fork for fork in off[row] if fork > start), default=None)
        if end is None:
            worth[number] = float(rewards[row])
        else:
            here = len(ids) + number  # a set of its own
            values = [walk(row, end, here), *(walk(child, end, here) for child in off[row][end])]
            worth[number] = sum(values) / len(values)
        return worth[number]

    _, prompt = rollout.group.unique(return_inverse=True)
    for row, where in enumerate(prompt.tolist()):
        if parent[row] == row:
            walk(row, 0, where)
    values = _where_several(rewards.new_tensor(worth), torch.tensor(sets, device=rewards.device), **how)

    found = rewards.new_zeros(rollout.action_mask.shape)

    def fill(row: int, into: int, end: int) -> None:
        """The pieces of `row` up to token `end` -> row `into`, and those before, which other rows own."""
        if parent[row] != row:
            fill(owner(parent[row], shared[row]), into, shared[row])
        for start, number in sorted(pieces[row].items()):
            if start < end:
                found[into, max(start - 1, 0) : end - 1] = values[number]

    for row, length in enumerate(rollout.lengths.tolist()):
        fill(row, row, length)
    return torch.where(rollout.action_mask, found, 0.0)
