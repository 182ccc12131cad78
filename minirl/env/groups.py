"""How the rows of a prompt come about, where they are not just G answers that begin at the prompt.

    branch      rows branch off other rows: branching.py                           TreeRPO, Tree-GRPO, ARPO
    retry       rows start again from within one that failed: retry.py             SRPO, R3L
    expert      one row of a group is an expert's                                  LUFFY, arXiv:2504.14945
    grow        groups without a difference get G more rows, and again             adaptive group size
    selective   groups whose first tokens are alike are given up                   Selective Rollout, arXiv:2605.05802

Each function below draws the rows of some prompts, in the order of their sample ids, alike in every layout. A step has
as many groups as ever, so that it goes with everything else; that groups may differ in size, no advantage minds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minirl.advantages import constant_groups
from minirl.branching import Branching
from minirl.env.base import Env, Example
from minirl.env.loop import Start, at_prompt, collect, imitate, play
from minirl.model import Transformer
from minirl.parallel.collectives import broadcast_object
from minirl.parallel.mesh import Mesh
from minirl.retry import with_retries
from minirl.rollout import Rollout
from minirl.tokenizer import Tokenizer


def sample_groups(policy: Transformer, tokenizer: Tokenizer, env: Env, examples: Sequence[Example], size: int,
                  first: int, mesh: Mesh, columns: Any, **sampling) -> Rollout:
    """The rows of some prompts, as the columns under "sampling" of a recipe say: one of them, at most.

    size : rows of a group, G       first : number of the first example over the whole run
    """
    fresh = partial(collect, policy, tokenizer, env, examples, first_prompt=first, mesh=mesh, **sampling)
    write = partial(play, policy, tokenizer, env, mesh=mesh, **sampling)
    prompts = torch.arange(first, first + len(examples))
    if columns.retry != "none":
        rows = size if columns.retry == "srpo" else size // 2
        return with_retries(policy, tokenizer, env, examples, fresh(rows), columns.retry, columns.locate,
                            columns.guide_tokens, columns.microbatch_size, mesh, **sampling)
    if columns.branch != "none":
        starts, ids, group = begin(tokenizer, examples, prompts, size, range(size))
        tree = Branching(columns.branch, ids, size, columns.branch_roots or size // 2, columns.branch_span,
                         columns.branch_weight, policy.config.vocab_size, sampling.get("seed", 0))
        return write(starts, ids, group, branch=tree)
    if columns.expert:
        return with_expert(write, tokenizer, env, examples, prompts, size, mesh)
    if columns.grow:
        return grown(write, tokenizer, examples, prompts, size, columns.grow)
    if columns.selective:
        starts, ids, group = begin(tokenizer, examples, prompts, size, range(size))
        early = write(starts, ids, group, pause=columns.selective)
        hopeless = alike(early, columns.selective_distance)
        early = early.replace(begins=torch.where(hopeless, -1, early.begins))
        return go_on(write, tokenizer, early, [start.example for start in starts]).replace(begins=None)
    return fresh(size)


def begin(tokenizer: Tokenizer, examples: Sequence[Example], prompts: Tensor, size: int,
          numbers: range) -> tuple[list[Start], Tensor, Tensor]:
    """Rows `numbers` of each prompt, which has `size` sample ids to itself: where they start, their ids and groups."""
    starts = [at_prompt(tokenizer, example) for example in examples for _ in numbers]
    return starts, (size * prompts[:, None] + torch.tensor(numbers)).flatten(), prompts.repeat_interleave(len(numbers))


def with_expert(write: partial, tokenizer: Tokenizer, env: Env, examples: Sequence[Example], prompts: Tensor, size: int,
                mesh: Mesh) -> Rollout:
    """G - 1 rows of the policy, and last in each group what the expert does, judged as theirs are."""
    own = write(*begin(tokenizer, examples, prompts, size, range(size - 1)))
    shown = broadcast_object(imitate(tokenizer, env, examples) if mesh.replica_group.rank == 0 else None,
                             mesh.replica_group)
    shown = shown.replace(sample_ids=size * prompts + size - 1, group=prompts).to(own.tokens.device)
    shown = shown.replace(old_logprobs=shown.old_logprobs.to(own.old_logprobs.dtype))
    return in_order(own.replace(expert=torch.zeros_like(own.finished)), shown)


def grown(write: partial, tokenizer: Tokenizer, examples: Sequence[Example], prompts: Tensor, size: int,
          rounds: int) -> Rollout:
    """G rows of each prompt, and as long as all of them earn the same G more, at most `rounds` times.

    A group of p right answers teaches nothing with probability p^G + (1 - p)^G: the rare and the frequent need more.
    """
    rollout = write(*begin(tokenizer, examples, prompts, size * (rounds + 1), range(size)))
    for number in range(1, rounds + 1):
        again = constant_groups(rollout.rewards, rollout.group).nonzero()[:, 0].tolist()
        if not again:
            break
        more = begin(tokenizer, [examples[p] for p in again], prompts[again], size * (rounds + 1),
                     range(size * number, size * (number + 1)))
        rollout = in_order(rollout, write(*more))
    return rollout


def in_order(*parts: Rollout) -> Rollout:
    both = Rollout.join(parts)
    return both.rows(both.sample_ids.argsort())


# ---- rows that were set aside ----

def go_on(write: partial, tokenizer: Tokenizer, early: Rollout, examples: Sequence[Example], **more) -> Rollout:
    """The rows with those that were set aside (`begins` 0 or above) gone on with.

    examples : of each row          more : such as another `pause`
    """
    rows = (early.begins >= 0).nonzero()[:, 0]
    if not len(rows):
        return early
    starts, tokens, prompts = [], early.tokens.tolist(), {}
    for row in rows.tolist():
        example = examples[row]
        prompt = prompts.setdefault(example.prompt, at_prompt(tokenizer, example).prompt)
        starts.append(Start(example, tokens[row][: int(early.lengths[row])], prompt, int(early.begins[row]),
                            early.turns[row], int(early.action_mask[row].sum())))
    part = early.rows(rows)
    later = write(starts, part.sample_ids.cpu(), part.group.cpu(), **{"pause": 0} | more)
    width = later.action_mask.shape[1] - part.action_mask.shape[1]
    before = F.pad(part.action_mask, (0, width))
    old = torch.where(before, F.pad(part.old_logprobs, (0, width)), later.old_logprobs)
    later = later.replace(action_mask=before | later.action_mask, old_logprobs=old, shared=part.shared)
    if not early.texts:
        later = later.replace(texts=[])
    if later.begins is None:
        later = later.replace(begins=torch.full_like(later.lengths, -1))
    return in_order(early.rows((early.begins < 0).nonzero()[:, 0]), later) if len(rows) < len(early) else later


def alike(rollout: Rollout, least: float) -> Tensor:
    """(B,) bool: in groups whose answers so far differ, on average over their pairs, by less than `least`.

    The distance of two answers is that of Levenshtein, over the longer one's tokens. Groups in which every row is over
    count as different: there is nothing left to save.
    """
    found = torch.zeros_like(rollout.finished)
    for prompt in rollout.group.unique():
        rows = (rollout.group == prompt).nonzero()[:, 0]
        if (rollout.begins[rows] < 0).all() or len(rows) < 2:
            continue
        texts = [rollout.tokens[row, 1:][rollout.action_mask[row]] for row in rows]
        lengths = torch.tensor([len(text) for text in texts])
        padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=-1).cpu()
        i, j = torch.triu_indices(len(rows), len(rows), 1)
        distance = edit_distance(padded[i], padded[j], lengths[i], lengths[j])
        found[rows] = bool((distance / torch.maximum(lengths[i], lengths[j]).clamp(min=1)).mean() < least)
    return found


def edit_distance(a: Tensor, b: Tensor, a_length: Tensor, b_length: Tensor) -> Tensor:
    """(N,) Levenshtein's distance of N pairs of texts: (N, L) and (N, M) tokens, of which the first (N,) count."""
    N, L, M = len(a), a.shape[1], b.shape[1]
    table = torch.zeros(N, L + 1, M + 1, dtype=torch.int64)
    table[:, :, 0], table[:, 0] = torch.arange(L + 1), torch.arange(M + 1)
    for i in range(1, L + 1):
        for j in range(1, M + 1):
            swap = table[:, i - 1, j - 1] + (a[:, i - 1] != b[:, j - 1])
            table[:, i, j] = torch.minimum(swap, 1 + torch.minimum(table[:, i - 1, j], table[:, i, j - 1]))
    return table[torch.arange(N), a_length, b_length]
