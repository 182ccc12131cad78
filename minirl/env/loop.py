"""The loop between a policy and an environment: who writes what on a row's tape.

    prompt            forced      "12*34-56="
    action 1          chosen      "<calc>12*34-56</calc>"
    observation 1     forced      "352"
    action 2          chosen      "352" EOS

`collect` lets a policy act; `demonstrate` lays an expert's actions on the same tape. What SFT trains on and what RL
samples are therefore built by the same steps, and agree token for token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minirl.config import UserError
from minirl.env.base import Env, Episode, Example, Step
from minirl.generate import Begun, generate
from minirl.model import Transformer
from minirl.parallel.collectives import broadcast_object
from minirl.parallel.context import gather_rollouts
from minirl.parallel.mesh import Mesh
from minirl.parallel.zero import gathered
from minirl.rollout import Rollout, Tapes
from minirl.tokenizer import Tokenizer

if TYPE_CHECKING:
    from minirl.branching import Branching


def prompt_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """A prompt as the model sees it: BOS where the tokenizer has one, then the text."""
    return ([] if tokenizer.bos_id is None else [tokenizer.bos_id]) + tokenizer.encode(text)


def row_length(env: Env, tokenizer: Tokenizer, example: Example, solution: bool = False) -> int:
    """Tokens of a prompt and the one that must follow it, or with solution=True of the expert's row, tools included."""
    if solution and example.solution:
        return int(demonstrate(tokenizer, env, [example]).lengths[0])
    return len(prompt_tokens(tokenizer, example.prompt)) + 1


def looked_at(env: Env, split: str) -> list[Example]:
    """What says how long rows are: every row of a data set. Of an endless task the first thousand problems, and a
    hundred of those held out: they are of the same kind, and to find one takes ten tries."""
    return env.sample(env.size(split) or {"train": 1000, "eval": 100}[split], split=split)


def longest_row(env: Env, tokenizer: Tokenizer) -> int:
    """Tokens of the longest row that the task may need, an expert's or one of max_new_tokens: the context to build."""
    examples = [example for split in ("train", "eval") for example in looked_at(env, split)]
    return max(max(row_length(env, tokenizer, example, solution=True),
                   row_length(env, tokenizer, example) + env.max_new_tokens) for example in examples)


def fit_to_context(env: Env, tokenizer: Tokenizer, context: int, drop: bool = False, solutions: bool = False) -> Env:
    """Before any work: the task with problems that fit `context` tokens, which are all of them, or else (UserError).

    drop      : of a data set, leave out the problems that do not fit
    solutions : the expert's whole row must fit, not only the prompt and one token
    """
    def fits(example: Example) -> bool:
        return row_length(env, tokenizer, example, solutions) <= context

    if drop and not hasattr(env, "only"):
        raise UserError(f"task {env.name} makes its own problems: leave --drop-long-rows out")
    if drop:
        env = env.only(fits)
    remedy = "leave such problems out with --drop-long-rows, or " if hasattr(env, "only") else ""
    for split in ("train", "eval"):
        for i, example in enumerate(looked_at(env, split)):
            if not fits(example):
                raise UserError(f"{split} problem {i} ({example.prompt[:30]!r}...) needs "
                                f"{row_length(env, tokenizer, example, solutions)} tokens, but the model's context is "
                                f"{context}: {remedy}use a model with a longer context")
    return env


@dataclass(frozen=True)
class Start:
    """Where a row begins: at its prompt, or in the middle of what has been written of it."""

    example: Example
    tokens: Sequence[int]  # the prompt, and what stands behind it
    prompt: int  # tokens of the prompt
    begin: int  # where the action under way begins
    turns: Sequence[Step] = ()  # the actions that are over
    spent: int = 0  # tokens that the policy has sampled: they count towards its limit


def at_prompt(tokenizer: Tokenizer, example: Example) -> Start:
    """A row of which nothing is written yet."""
    tokens = prompt_tokens(tokenizer, example.prompt)
    return Start(example, tokens, len(tokens), len(tokens))


def within(tokenizer: Tokenizer, example: Example, rollout: Rollout, row: int, at: int) -> Start:
    """The first `at` tokens of a row of a rollout, which ends within an action, or where one begins."""
    mask = rollout.action_mask[row].tolist()
    begins = [s + 1 for s, own in enumerate(mask) if own and not (s and mask[s - 1])] + [int(rollout.lengths[row])]
    turn = max(k for k, begin in enumerate(begins) if begin <= at)
    return Start(example, rollout.tokens[row, :at].tolist(), len(prompt_tokens(tokenizer, example.prompt)),
                 begins[turn], rollout.turns[row][:turn], sum(mask[: at - 1]))


def go_back(env: Env, example: Example, turns: Sequence[Step]) -> Episode:
    """The episode as it was behind some turns: their actions are taken again, so equal ones must have equal effects."""
    episode = env.reset(example)
    for step in turns:
        episode.step(step.action)
    return episode


def collect(policy: Transformer, tokenizer: Tokenizer, env: Env, examples: Sequence[Example], group_size: int = 1,
            first_prompt: int = 0, mesh: Mesh | None = None, **sampling) -> Rollout:
    """The policy plays `group_size` episodes of every example.

    first_prompt : number of the first example over the whole run; sample ids count from first_prompt * group_size
    mesh, sampling : as in `play`
    returns      : a Rollout with rewards (the sum of an episode's rewards), texts and turns
    """
    starts = [start for example in examples for start in [at_prompt(tokenizer, example)] * group_size]
    ids = first_prompt * group_size + torch.arange(len(starts))
    return play(policy, tokenizer, env, starts, ids, ids // group_size, mesh, **sampling)


def play(policy: Transformer, tokenizer: Tokenizer, env: Env, starts: Sequence[Start], ids: Tensor, group: Tensor,
         mesh: Mesh | None = None, branch: Branching | None = None, **sampling) -> Rollout:
    """The policy plays one episode from every start.

    ids, group : (N,) int64, the sample id of each row, and the prompt it answers; rows of a prompt stand together
    mesh       : all ranks of a replica call this with the same starts, and all get the same rows. The ranks of cp
                 share the prompts; the environment runs on one of those that share the layers and matrices
    branch     : which rows branch off others, and where
    sampling   : passed to `generate` (max_new_tokens, temperature, seed, ...)
    returns    : a Rollout of whole rows with rewards, texts and turns, in which what stood on the tapes is no action
    """
    mesh = mesh or Mesh()
    if mesh.cp > 1:
        _, numbers, counts = group.unique_consecutive(return_inverse=True, return_counts=True)
        first, end = (len(counts) * (mesh.cp_rank + i) // mesh.cp for i in range(2))
        mine = ((numbers >= first) & (numbers < end)).nonzero()[:, 0]
        rollout = None
        with gathered(policy):
            if len(mine):
                rollout = play(policy, tokenizer, env, [starts[i] for i in mine.tolist()], ids[mine], group[mine],
                               replace(mesh, cp=1), branch and branch.of(mine), **sampling)
        return gather_rollouts(rollout, mesh.cp_group).to(mesh.device)
    judge = mesh.replica_group.rank == 0
    turns = [list(start.turns) for start in starts]
    episodes = [go_back(env, start.example, start.turns if judge else ()) for start in starts]

    threads = getattr(env, "threads", 0)

    def respond(row: int, action: list[int]) -> list[int] | Callable[[], list[int]]:
        """The environment acts, in a thread where it has some; what the row reads then, or what will give it."""
        text = tokenizer.decode(action, continued=True)
        act = partial(episodes[row].step, text)
        if threads and judge:
            act = pool.submit(act).result

        def reply() -> list[int]:
            step = broadcast_object(act()._replace(action=text) if judge else None, mesh.replica_group)
            turns[row].append(step)
            return [] if step.done else tokenizer.encode(step.observation, continued=True)

        return reply if threads else reply()

    def forked(parent: int, child: int, over: int) -> None:
        turns[child] = turns[parent][:over]
        episodes[child] = go_back(env, starts[child].example, turns[child] if judge else ())

    if branch is not None:
        branch.forked = forked
    begun = Begun(ids, [start.begin for start in starts], [start.spent for start in starts])
    with gathered(policy), ThreadPoolExecutor(max(1, threads)) as pool:
        rollout = generate(policy, [start.tokens for start in starts], tokenizer, stop=env.stop, respond=respond,
                           begun=begun, branch=branch, **sampling)
    texts = [tokenizer.decode(row[start.prompt : length], continued=True) for row, start, length
             in zip(rollout.tokens.tolist(), starts, rollout.lengths.tolist(), strict=True)]
    device = rollout.tokens.device
    rewards = torch.tensor([sum(step.reward for step in row) for row in turns], dtype=torch.float32, device=device)
    rollout = rollout.replace(rewards=rewards, texts=texts, turns=turns, sample_ids=ids.to(device),
                              group=group.to(device))
    return rollout if branch is None else branch.note_parents(rollout)


def imitate(tokenizer: Tokenizer, env: Env, examples: Sequence[Example]) -> Rollout:
    """The expert's rows as if it were a policy that is sure of all it does: judged, with rewards, texts and turns.

    `old_logprobs` are 0, for nobody knows them; `expert` is True.
    """
    rollout, texts, turns = demonstrate(tokenizer, env, examples), [], []
    for row, example in enumerate(examples):
        episode, steps = env.reset(example), []
        for action in example.solution:
            if not steps or not steps[-1].done:
                steps.append(episode.step(action)._replace(action=action))
        turns.append(steps)
        length = int(rollout.lengths[row])
        start = len(prompt_tokens(tokenizer, example.prompt))
        texts.append(tokenizer.decode(rollout.tokens[row, start:length].tolist(), continued=True))
    yes = torch.ones(len(rollout), dtype=torch.bool)
    return rollout.replace(old_logprobs=torch.zeros(rollout.action_mask.shape), finished=yes, expert=yes, texts=texts,
                           rewards=torch.tensor([sum(step.reward for step in row) for row in turns]), turns=turns)


def demonstrate(tokenizer: Tokenizer, env: Env, examples: Sequence[Example], first: int = 0) -> Rollout:
    """The expert's actions (`example.solution`), played through the same episodes and laid on the same tape.

    returns a Rollout without log-probs to learn from by SFT: action_mask covers the actions and the EOS of the last
    """
    tapes = Tapes([prompt_tokens(tokenizer, example.prompt) for example in examples], 64, tokenizer.pad_id)
    for row, example in enumerate(examples):
        if not example.solution:
            raise UserError(f"task {env.name} has no solution to imitate for {example.prompt!r}")
        episode = env.reset(example)
        for action in example.solution[:-1]:
            tapes.extend(row, tokenizer.encode(action, continued=True), chosen=True)
            tapes.extend(row, tokenizer.encode(episode.step(action).observation, continued=True), chosen=False)
        # The last action is not judged: nobody pays an expert, and running its program would take time.
        last = example.solution[-1]
        stopped = any(mark in last for mark in env.stop)  # then nobody samples an EOS behind it
        end = [] if stopped else [tokenizer.eos_id]
        tapes.extend(row, [*tokenizer.encode(last, continued=True), *end], chosen=True)
    return tapes.rollout(first, 1).replace(old_logprobs=None, finished=None)
