"""Starting again from within a row: find where it went wrong, keep what stands before, write the rest anew.

    fresh      prompt  thought 1  thought 2  thought 3    R 0
    locate                        ^ the first wrong one
    retries    prompt  thought 1  ......................  R 1      only what is new is trained on
               prompt  thought 1  ......................  R 0

    retry    groups of a prompt's G rows                                              source
    "srpo"   G / 2 fresh rows; G / 2 retries of one that failed, compared with each   SRPO, arXiv:2605.25507
             other alone
    "r3l"    one: G / 2 fresh rows, and a retry of each, behind words of reflection   R3L, arXiv:2601.03715

    locate    the first wrong thought is
    "ask"     what the policy itself says, asked for a number (the papers')
    "belief"  the one after which it believes least in the right answer, compared with before; also for policies that
              cannot talk about thoughts (ours; for tasks whose answer is what the policy writes, see belief.py)
    "random"  any (SRPO's RRPO)

A thought is an action, or a line of it. A number out of range, or none, means the first: the retry begins at the
prompt. SRPO's paper looks for a failure among up to 12 more rows; here they are the other G / 2 of G fresh ones, all of
which are the group if none of them failed. R3L: "reflect, then retry": whether it trains with the reflection in sight
is not established; here it stays on the tape, and is not trained on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch

from minirl.belief import beliefs
from minirl.config import UserError
from minirl.env.loop import Start, play, within
from minirl.generate import generate, uniform
from minirl.parallel.zero import gathered
from minirl.rollout import Rollout

if TYPE_CHECKING:
    from minirl.env.base import Env, Example
    from minirl.model import Transformer
    from minirl.parallel.mesh import Mesh
    from minirl.tokenizer import Tokenizer

Retry = Literal["none", "srpo", "r3l"]
Locate = Literal["ask", "belief", "random"]

ASK = "\nThe answer is wrong. Which is the first wrong step? Number:"
REFLECT = "\nWhat went wrong, and how to do better: "
RETRY = "\nAgain, minding that:\n"


def thoughts(rollout: Rollout, row: int, tokenizer: Tokenizer) -> list[int]:
    """Where each thought begins, in tokens of the row: with an action, and behind each line that it goes on after."""
    tokens, mask = rollout.tokens[row].tolist(), rollout.action_mask[row].tolist()
    own = [s + 1 for s, acted in enumerate(mask) if acted]
    return [t for t in own if t == 1 or not mask[t - 2] or b"\n" in tokenizer.token_bytes(tokens[t - 1])]


def locate(how: Locate, policy: Transformer, tokenizer: Tokenizer, rollout: Rollout, rows: Sequence[int],
           answers: Sequence[str], seed: int, microbatch_size: int, temperature: float = 1.0,
           mesh: Mesh | None = None) -> list[int]:
    """Where to go on from in each of `rows`, in tokens: in front of the first wrong thought.

    answers : of these rows
    """
    places = [thoughts(rollout, row, tokenizer) or [int(rollout.lengths[row])] for row in rows]
    if not rows:
        return []
    if how == "random":
        ids = rollout.sample_ids[list(rows)].cpu()
        draws = uniform(seed + 5, ids, torch.zeros_like(ids)).tolist()
        return [own[int(u * len(own))] for own, u in zip(places, draws, strict=True)]
    if how == "belief":
        part = rollout.rows(torch.tensor(rows, device=rollout.tokens.device))
        found = beliefs(policy, tokenizer, part, answers, places, microbatch_size, temperature, mesh)
        chosen = []
        for own, p, verdict in zip(places, found, part.rewards.tolist(), strict=True):
            gains = [after - before for before, after in zip(p, [*p[1:], verdict], strict=True)]
            chosen.append(own[gains.index(min(gains))])
        return chosen
    numbers = ask(policy, tokenizer, [listed(rollout, row, own, tokenizer) + ASK for row, own in
                                      zip(rows, places, strict=True)], 4, seed + 5)
    return [own[number - 1 if 1 <= number <= len(own) else 0] for own, number in
            zip(places, map(first_number, numbers), strict=True)]


def listed(rollout: Rollout, row: int, places: Sequence[int], tokenizer: Tokenizer) -> str:
    """The row as text, its thoughts numbered."""
    tokens, length = rollout.tokens[row].tolist(), int(rollout.lengths[row])
    pieces = [tokens[a:b] for a, b in zip(places, [*places[1:], length], strict=True)]
    steps = (f"\n{k}. {tokenizer.decode(piece, continued=True).strip()}" for k, piece in enumerate(pieces, 1))
    return tokenizer.decode(tokens[: places[0]]) + "".join(steps)


def first_number(text: str) -> int:
    """The first whole number in a text; 0 if there is none."""
    found = re.search(r"[0-9]{1,4}", text)
    return int(found[0]) if found else 0


def ask(policy: Transformer, tokenizer: Tokenizer, questions: Sequence[str], tokens: int, seed: int) -> list[str]:
    """What the policy writes behind each text, "" where the context has no room for it."""
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    prompts = [bos + tokenizer.encode(question) for question in questions]
    fits = [i for i, prompt in enumerate(prompts) if len(prompt) + tokens <= policy.config.context]
    said = [""] * len(questions)
    if fits:
        with gathered(policy):
            rollout = generate(policy, [prompts[i] for i in fits], tokenizer, max_new_tokens=tokens, seed=seed)
        for i, row, own in zip(fits, rollout.tokens.tolist(), rollout.action_mask.tolist(), strict=True):
            said[i] = tokenizer.decode([t for t, acted in zip(row[1:], own, strict=True) if acted], continued=True)
    return said


def with_retries(policy: Transformer, tokenizer: Tokenizer, env: Env, examples: Sequence[Example], fresh: Rollout,
                 kind: Retry, where: Locate, guide_tokens: int, microbatch_size: int, mesh: Mesh | None,
                 **sampling) -> Rollout:
    """G rows a prompt of G fresh ones ("srpo"), or of G / 2 ("r3l"), by the table above.

    fresh        : the rows of `examples`, in their order, group = number of the prompt over the run
    guide_tokens : that the policy may write about its mistake before a retry, 0: none ("r3l")
    """
    temperature, seed = sampling.get("temperature", 1.0), sampling.get("seed", 0)
    size = len(fresh) // len(examples)
    half = size // 2 if kind == "srpo" else size
    prompts = range(len(examples))
    if kind == "srpo":
        wrong = fresh.rewards < 1
        failed = [next((p * size + k for k in range(half, size) if wrong[p * size + k]), None) for p in prompts]
        sources = [(p, row) for p, row in zip(prompts, failed, strict=True) if row is not None]
        sources = [source for source in sources for _ in range(size - half)]
    else:
        sources = [(row // size, row) for row in range(len(fresh))]
    rows = list(dict.fromkeys(row for _, row in sources))
    of_row = {row: p for p, row in sources}
    found = locate(where, policy, tokenizer, fresh, rows, [examples[of_row[row]].answer for row in rows], seed,
                   microbatch_size, temperature, mesh)
    starts = {row: within(tokenizer, examples[of_row[row]], fresh, row, at)
              for row, at in zip(rows, found, strict=True)}
    if guide_tokens and kind == "r3l":
        starts = reflect(policy, tokenizer, fresh, starts, guide_tokens, seed)

    G = size if kind == "srpo" else 2 * size  # rows of a prompt that are trained on
    first = fresh.group.view(-1, size)[:, 0].tolist()  # numbers of the prompts
    taken: dict[int, int] = {}
    ids, group = [], []
    for p, _ in sources:
        taken[p] = taken.get(p, -1) + 1
        ids.append(first[p] * G + half + taken[p])
        group.append(2 * first[p] + 1 if kind == "srpo" else first[p])
    kept = [p * size + k for p in prompts for k in range(half if kind == "r3l" or p in taken else size)]
    base = fresh.rows(torch.tensor(kept, device=fresh.tokens.device))
    number = torch.tensor([first[row // size] * G + row % size for row in kept], device=base.tokens.device)
    base = base.replace(sample_ids=number, group=2 * base.group if kind == "srpo" else base.group)
    if not sources:
        return base
    again = play(policy, tokenizer, env, [starts[row] for _, row in sources], torch.tensor(ids), torch.tensor(group),
                 mesh, **sampling | {"seed": seed + 7})  # other numbers than those of the fresh rows
    both = Rollout.join([base, again])
    return both.rows(both.sample_ids.argsort())


def reflect(policy: Transformer, tokenizer: Tokenizer, fresh: Rollout, starts: dict[int, Start], tokens: int,
            seed: int) -> dict[int, Start]:
    """The starts with what the policy says about the row, forced in front of the action that is done again."""
    whole = {row: tokenizer.decode(fresh.tokens[row, : int(fresh.lengths[row])].tolist()) for row in starts}
    said = ask(policy, tokenizer, [text + REFLECT for text in whole.values()], tokens, seed + 6)
    guided = {}
    for (row, start), words in zip(starts.items(), said, strict=True):
        # In front of a whole action, for what an environment gets of it may not begin with words about it.
        tape = [*start.tokens[: start.begin], *tokenizer.encode(REFLECT + words + RETRY, continued=True)]
        fits = words and len(tape) + policy.config.context // 4 < policy.config.context
        guided[row] = replace(start, tokens=tape, begin=len(tape)) if fits else start
    return guided


def check_retry(retry: str, group_size: int) -> None:
    """UserError for groups that cannot be halved."""
    if retry != "none" and (group_size % 2 or group_size < 4):
        raise UserError(f"--group-size {group_size}: with --retry {retry} half of a group starts again, and each half "
                        "is compared within itself: give an even number from 4 on")
