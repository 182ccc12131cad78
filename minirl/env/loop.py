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
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from minirl.config import UserError
from minirl.env.base import Env, Example, Step
from minirl.generate import generate
from minirl.model import Transformer
from minirl.parallel.collectives import broadcast_object
from minirl.parallel.context import gather_rollouts
from minirl.parallel.mesh import Mesh
from minirl.parallel.zero import gathered
from minirl.rollout import Rollout, Tapes
from minirl.tokenizer import Tokenizer

if TYPE_CHECKING:
    from minirl.parallel.mesh import Mesh


def prompt_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """A prompt as the model sees it: BOS where the tokenizer has one, then the text."""
    return ([] if tokenizer.bos_id is None else [tokenizer.bos_id]) + tokenizer.encode(text)


def row_length(env: Env, tokenizer: Tokenizer, example: Example, solution: bool = False) -> int:
    """Tokens of a prompt and the one that must follow it, or with solution=True of the expert's row, tools included."""
    if solution and example.solution:
        return int(demonstrate(tokenizer, env, [example]).lengths[0])
    return len(prompt_tokens(tokenizer, example.prompt)) + 1


def longest_row(env: Env, tokenizer: Tokenizer) -> int:
    """Tokens of the longest row that the task may need, an expert's or one of max_new_tokens: the context to build.

    Looks at every row of a data set, at the first thousand problems of an endless task.
    """
    examples = [example for split in ("train", "eval") for example in env.sample(env.size(split) or 1000, split=split)]
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
        for i, example in enumerate(env.sample(env.size(split) or 1000, split=split)):
            if not fits(example):
                raise UserError(f"{split} problem {i} ({example.prompt[:30]!r}...) needs "
                                f"{row_length(env, tokenizer, example, solutions)} tokens, but the model's context is "
                                f"{context}: {remedy}use a model with a longer context")
    return env


def collect(policy: Transformer, tokenizer: Tokenizer, env: Env, examples: Sequence[Example], group_size: int = 1,
            first_prompt: int = 0, mesh: Mesh | None = None, **sampling) -> Rollout:
    """The policy plays `group_size` episodes of every example.

    first_prompt : number of the first example over the whole run; sample ids count from first_prompt * group_size
    mesh         : all ranks of a replica call this with the same examples, and all get the same rows. The ranks of cp
                   share the examples; the environment runs on one of those that share the layers and matrices
    sampling     : passed to `generate` (max_new_tokens, temperature, seed, ...)
    returns      : a Rollout with rewards (the sum of an episode's rewards), texts and turns
    """
    mesh = mesh or Mesh()
    if mesh.cp > 1:
        start, end = (len(examples) * (mesh.cp_rank + i) // mesh.cp for i in range(2))
        rollout = None
        with gathered(policy):
            if end > start:
                rollout = collect(policy, tokenizer, env, examples[start:end], group_size, first_prompt + start,
                                  replace(mesh, cp=1), **sampling)
        return gather_rollouts(rollout, mesh.cp_group).to(mesh.device)
    prompts = [prompt_tokens(tokenizer, example.prompt) for example in examples]
    episodes = [env.reset(example) for example in examples for _ in range(group_size)]
    turns: list[list[Step]] = [[] for _ in episodes]

    threads, acts_here = getattr(env, "threads", 0), mesh.replica_group.rank == 0

    def respond(row: int, action: list[int]) -> list[int] | Callable[[], list[int]]:
        text = tokenizer.decode(action, continued=True)
        act = partial(episodes[row].step, text)
        if threads and acts_here:
            act = pool.submit(act).result

        def reply() -> list[int]:
            step = broadcast_object(act()._replace(action=text) if acts_here else None, mesh.replica_group)
            turns[row].append(step)
            return [] if step.done else tokenizer.encode(step.observation, continued=True)

        return reply if threads else reply()

    with gathered(policy), ThreadPoolExecutor(max(1, threads)) as pool:
        rollout = generate(policy, prompts, tokenizer, group_size=group_size, first_id=first_prompt * group_size,
                           stop=env.stop, respond=respond, **sampling)
    starts = [len(prompt) for prompt in prompts for _ in range(group_size)]
    texts = [tokenizer.decode(row[start:length], continued=True) for row, start, length
             in zip(rollout.tokens.tolist(), starts, rollout.lengths.tolist(), strict=True)]
    rewards = torch.tensor([sum(step.reward for step in row) for row in turns], dtype=torch.float32,
                           device=rollout.tokens.device)
    return rollout.replace(rewards=rewards, texts=texts, turns=turns)


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
