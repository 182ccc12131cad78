"""What the policy believes: how likely is the right answer, after a part of what it has written?

    prompt  segment 1  segment 2  segment 3         C_0 .. C_3: p(answer | prompt, segments so far)
    C_0     C_1        C_2        C_3               segment m has added C_m - C_m-1

GRPO-VPS, arXiv:2604.20659, gives each segment credit for what it adds; a fall of the belief also tells where a row went
wrong (retry.py). The answer is `Example.answer`, so these are for tasks in which the policy has to write just that.
Behind the last segment the verdict stands for the belief: the gains of a row add up to R - C_0.
**Not established** (the paper's appendix was not at hand): whether p is taken a token; here it is of the whole answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minirl.credit import vps_advantages
from minirl.logprobs import rollout_logprobs
from minirl.losses import row_sum
from minirl.rollout import Rollout

if TYPE_CHECKING:
    from minirl.model import Transformer
    from minirl.parallel.mesh import Mesh
    from minirl.tokenizer import Tokenizer


def beliefs(policy: Transformer, tokenizer: Tokenizer, rollout: Rollout, answers: Sequence[str],
            places: Sequence[Sequence[int]], microbatch_size: int, temperature: float = 1.0,
            mesh: Mesh | None = None) -> list[list[float]]:
    """p(answer, EOS | the row's first n tokens) for each n in places[row].

    Where the answer does not fit into the context any more, the belief is that of the place before.
    """
    rows, tokens = [], rollout.tokens.tolist()
    for row, (answer, own) in enumerate(zip(answers, places, strict=True)):
        said = [*tokenizer.encode(answer, continued=True), tokenizer.eos_id]
        rows += [(row, k, tokens[row][:place], said) for k, place in enumerate(own)
                 if place + len(said) <= policy.config.context]
    found = [[0.0] * len(own) for own in places]
    if rows:
        lengths = torch.tensor([len(seen) + len(said) for _, _, seen, said in rows])
        tape = torch.full((len(rows), int(lengths.max())), tokenizer.pad_id)
        mask = torch.zeros(len(rows), int(lengths.max()) - 1, dtype=torch.bool)
        for i, (_, _, seen, said) in enumerate(rows):
            tape[i, : lengths[i]] = torch.tensor([*seen, *said])
            mask[i, len(seen) - 1 : lengths[i] - 1] = True
        ids = torch.arange(len(rows))
        asked = Rollout(tokens=tape, action_mask=mask, lengths=lengths, group=ids, sample_ids=ids)
        asked = asked.to(rollout.tokens.device)
        logprobs = rollout_logprobs(policy, asked, microbatch_size, temperature, mesh)
        sums = row_sum(logprobs, asked.action_mask).exp().tolist()
        for (row, k, _, _), p in zip(rows, sums, strict=True):
            found[row][k] = p
        for row, own in enumerate(places):
            for k in range(1, len(own)):
                if own[k] + len(tokenizer.encode(answers[row], continued=True)) + 1 > policy.config.context:
                    found[row][k] = found[row][k - 1]
    return found


def entropy_segments(entropy: Tensor, mask: Tensor, share: float = 0.2, per: int = 4) -> Tensor:
    """(B, S) int64: the number of each token's segment. A new one begins with each action, and behind every `per`-th of
    the row's most uncertain tokens.

    entropy : (B, S) nats         share : of a row's tokens count as uncertain, at least one
    VPS: segments with about as many tokens of high entropy each; we read its best n = 4 as that number.
    """
    counts = (share * mask.sum(1)).ceil().clamp(min=1).long()  # (B,)
    ranked = torch.where(mask, entropy, -torch.inf).sort(1, descending=True).values
    least = ranked.gather(1, (counts - 1).clamp(max=mask.shape[1] - 1)[:, None])
    unsure = mask & (entropy >= least)
    before = unsure.cumsum(1) - unsure.long()  # uncertain tokens in front of this one
    ends = unsure & ((before + 1) % per == 0)
    begins = mask.clone()  # an action
    begins[:, 1:] &= ~mask[:, :-1] | ends[:, :-1]
    return (begins.cumsum(1) - 1).clamp(min=0)


def belief_gains(policy: Transformer, tokenizer: Tokenizer, rollout: Rollout, answers: Sequence[str],
                 microbatch_size: int, temperature: float = 1.0, mesh: Mesh | None = None) -> Tensor:
    """(B, S): what the segment of each token has added to the belief in the right answer; 0 where nobody acted."""
    mask = rollout.action_mask
    entropy = rollout_logprobs(policy, rollout, microbatch_size, temperature, mesh, entropy=True).entropy
    segment = entropy_segments(entropy, mask)
    places = []
    for own, numbers in zip(mask.tolist(), segment.tolist(), strict=True):
        at = [s for s, acted in enumerate(own) if acted]
        places.append([s + 1 for i, s in enumerate(at) if not i or numbers[s] != numbers[at[i - 1]]] or [1])
    found = beliefs(policy, tokenizer, rollout, answers, places, microbatch_size, temperature, mesh)
    width = max(map(len, found)) + 1
    verdicts = rollout.rewards.tolist()
    belief = torch.tensor([own + [verdict] * (width - len(own)) for own, verdict in zip(found, verdicts, strict=True)],
                          dtype=entropy.dtype, device=mask.device)
    gains = vps_advantages(torch.zeros_like(entropy), belief, segment, 1.0)
    return torch.where(mask, gains, 0.0)
