"""Log-probs of the tokens of a batch. The shift by one of what a model predicts lives here and nowhere else.

A model that has read tokens[:, : s + 1] predicts tokens[:, s + 1]. `tokens` is (B, T); every other per-token
tensor of minirl is (B, S) with S = T - 1, and its column s belongs to the prediction of tokens[:, s + 1].

    tokens       <q>  2   +   2   =   4  <eos>        (B, T)
    logprobs          .   .   .   .   .    .          (B, S)   of 2, +, 2, =, 4, <eos>
    action_mask       0   0   0   0   1    1          (B, S)   what the policy wrote itself
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import all_logprobs, head_loss, linear_logprob
from kernels.linear_logprob import KEEP_LOGITS, pick
from minirl.model import Transformer
from minirl.prefixes import Prefixes, find_prefixes
from minirl.rollout import Rollout
from minirl.sight import restart

if TYPE_CHECKING:
    from minirl.parallel.mesh import Group, Mesh


LossFn = Callable[["Output", Rollout], tuple[Tensor, dict[str, Tensor]]]


class Output(NamedTuple):
    """What a model says about each column. A policy gives the first two, a reward model or critic the last."""

    logprobs: Tensor | None  # (B, S) nats, of the token that follows
    entropy: Tensor | None = None  # (B, S) nats, of the distribution it was drawn from; where it was asked for
    values: Tensor | None = None  # (B, S), the score of the row up to here: before the token that follows
    vectors: Tensor | None = None  # (B, S, D), see `token_vectors`; where they were asked for


def token_logprobs(model: Transformer, tokens: Tensor, temperature: float = 1.0, documents: Tensor | None = None,
                   entropy: bool = False, cp_group: Group | None = None) -> Tensor | Output:
    """Log-prob of each token after the first, given those before it. Gradient flows to the model.

    tokens      : (B, T) int64, padded on the right; the columns of padding hold numbers without a meaning
    temperature : the one the tokens were sampled at, for policy, old policy and reference alike: with another
                  one the ratio on fresh samples is not 1, and the gradient is biased
    documents   : (B, T) int64, for packed rows: a token sees only its own document, and positions count from
                  0 in each. A document's first token is predicted from the end of the one before, which means
                  nothing: `shift_mask` leaves it out
    cp_group    : the ranks that the columns are cut over (parallel/context.py); each has its own of the result
    returns     : (B, S) nats; with entropy=True an Output(logprobs, entropy) of two of them
    """
    result = output_here(model, shift(tokens, documents, cp_group), temperature, entropy)
    if model.pipeline is not None:
        result = Output(*(None if x is None else model.pipeline.from_last(x) for x in result))
    return result if entropy else result.logprobs


def output_here(model: Transformer, reading: Reading, temperature: float, entropy: bool = False,
                first: int | None = 0, vectors: bool = False) -> Output:
    """The same, of a pipeline on the last stage only; the other stages have done their part and get zeros."""
    hidden, targets = reading.hidden(model), reading.targets
    if model.has_head:
        out = head_output(model, hidden, targets, temperature, entropy, first)
        return out._replace(vectors=(1 - out.logprobs.exp())[..., None] * hidden) if vectors else out
    if vectors:
        return Output(None, vectors=hidden.new_zeros(*targets.shape, model.config.hidden_size))
    zeros = hidden.new_zeros(targets.shape, dtype=torch.promote_types(hidden.dtype, torch.float32))
    if model.config.num_labels:
        return Output(None, None, zeros)
    return Output(zeros, zeros if entropy else None, None if model.value_head is None else zeros)


class Reading(NamedTuple):
    """What a model reads of some rows, and what it shall predict."""

    tokens: Tensor  # (B, S); with `prefixes` (1, N)
    positions: Tensor | None
    documents: Tensor | None
    targets: Tensor  # (B, S)
    prefixes: Prefixes | None = None  # what rows have in common is read once

    def rows(self, hidden: Tensor) -> Tensor:
        """What the model made of `tokens`, as rows: (B, S, D)."""
        return hidden if self.prefixes is None else self.prefixes.rows(hidden)

    def hidden(self, model: Transformer) -> Tensor:
        """(B, S, D). On all stages of a pipeline but the last it has no meaning."""
        return self.rows(model(self.tokens, self.positions, self.documents, prefixes=self.prefixes))


def shift(tokens: Tensor, documents: Tensor | None = None, cp_group: Group | None = None) -> Reading:
    """(B, T) -> what the model reads, and what it shall predict.

    Tokens and targets are (B, S). With a cp_group they are this rank's columns of them, (B, S'/N), while positions
    (1 or B, S') and documents (B, S') stay whole. Both are cut from the whole row: the target of a column at the border
    of a piece is the first token of the next, which another rank may have.
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    documents = None if documents is None else documents[:, :-1]
    if cp_group is None or cp_group.size == 1:
        return Reading(inputs, None, documents, targets)
    from minirl.parallel.context import cut, pad_columns  # torch.distributed is not needed on a laptop

    positions = restart(inputs.new_zeros(1, inputs.shape[1]) if documents is None else documents)
    documents = None if documents is None else pad_columns(documents, cp_group)
    return Reading(cut(inputs, cp_group), pad_columns(positions, cp_group), documents, cut(targets, cp_group))


def read_rows(rows: Rollout, cp_group: Group | None = None) -> Reading:
    """`shift` of some rows. What they have in common before their first action is read once, where that pays."""
    if rows.documents is None and (cp_group is None or cp_group.size == 1):
        prefixes = find_prefixes(rows.tokens[:, :-1], rows.action_mask, rows.lengths)
        if prefixes is not None:
            return Reading(prefixes.tokens, prefixes.positions, None, rows.tokens[:, 1:], prefixes)
    return shift(rows.tokens, rows.documents, cp_group)


def head_output(model: Transformer, hidden: Tensor, targets: Tensor, temperature: float = 1.0,
                entropy: bool = False, first: int | None = 0) -> Output:
    """What the head makes of hidden states (B, S, D): log-probs of targets (B, S) and their entropy, or scores.

    first : number of the first column whose log-prob anybody wants, `first_action`; before it they are 0. None: values
            alone are wanted
    """
    if model.config.num_labels:
        return Output(None, None, model.scores(hidden))
    values = None if model.value_head is None else model.value_head(hidden)
    if first is None:
        return Output(None, None, values)
    hidden, shard = enter_head(model, hidden[:, first:])
    result = linear_logprob(hidden, model.head_weight, targets[:, first:], temperature, entropy,
                            softcap=model.config.final_logit_softcapping, impl=model.head_impl, **shard)
    logprobs, ent = (F.pad(x, (first, 0)) for x in result) if entropy else (F.pad(result, (first, 0)), None)
    return Output(logprobs, ent, values)


def first_action(mask: Tensor) -> int:
    """(B, S) bool -> the first column with an action in any row; 0 without one. What the prompts themselves would have
    said is asked by nobody, and costs as much as any answer where the vocabulary is large.

    Ask before the forward pass: a GPU would have to be waited for behind it.
    """
    return int(mask.any(0).int().argmax())


def enter_head(model: Transformer, hidden: Tensor) -> tuple[Tensor, dict]:
    """Hidden states as the head takes them, and where its words begin if some are on other ranks."""
    if (vocab := model.vocab) is None:
        return hidden, {}
    return vocab.enter(hidden), {"start": vocab.start, "reduce": vocab.reduce}  # each has a part of hidden's gradient


def loss_here(model: Transformer, hidden: Tensor, targets: Tensor, microbatch: Rollout, first: int, loss_fn: LossFn,
              temperature: float, entropy: bool, by_token: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Head and loss of hidden states (B, S, D): what loss_fn(Output, microbatch) says, (loss, stats).

    first    : of `head_output`
    by_token : the loss is a sum over tokens. A large head then goes through some columns at a time, and the logits are
               not computed twice (kernels/head_loss.py): loss_fn is called for each piece, as it is for the columns of
               each rank in context parallelism
    """
    if not (by_token and is_large(model, hidden[:, first:])):
        return loss_fn(head_output(model, hidden, targets, temperature, entropy, first), microbatch)
    if microbatch.row_tokens is None:
        microbatch = microbatch.replace(row_tokens=microbatch.action_mask.sum(1))
    stats: dict[str, Tensor] = {}

    def piece_loss(columns: slice, logprobs: Tensor, ent: Tensor | None) -> Tensor:
        """The part of the loss that is made in some of the columns, counted from `first`."""
        columns = slice(first + columns.start, first + columns.stop)
        loss, found = loss_fn(Output(logprobs, ent), microbatch.columns(columns))
        for name, value in found.items():
            value, old = value.detach(), stats.get(name)
            if old is None:
                stats[name] = value
            elif not name.startswith("row"):  # of whole rows: all pieces have it alike
                stats[name] = torch.maximum(old, value) if name.startswith("max_") else old + value
        return loss

    hidden, shard = enter_head(model, hidden[:, first:])
    loss = head_loss(hidden, model.head_weight, targets[:, first:], piece_loss, temperature, entropy,
                     softcap=model.config.final_logit_softcapping, **shard)
    return loss, stats


def is_large(model: Transformer, hidden: Tensor) -> bool:
    """Whether the logits of hidden (B, S, D) would be computed twice: too many to keep, and not by Triton, where that
    costs less than another pass over memory."""
    if model.config.num_labels or model.value_head is not None or pick(model.head_impl, hidden) == "triton":
        return False
    return hidden[..., 0].numel() * len(model.head_weight) > KEEP_LOGITS


@torch.no_grad()
def rollout_logprobs(model: Transformer, rollout: Rollout, microbatch_size: int, temperature: float = 1.0,
                     mesh: Mesh | None = None, entropy: bool = False) -> Tensor | Output:
    """Log-probs of a whole rollout under a model that is not trained (the reference): (B, S) nats, no gradient.

    In pieces of at most `microbatch_size` rows; rows without an action are not read. Their columns are 0, as are those
    before the first action of a piece and beyond its longest row: always masked.
    With a mesh whose cp is above 1 each rank computes its columns, and all get all.
    entropy=True : an Output(logprobs, entropy)
    """
    names = ["logprobs", "entropy"] if entropy else ["logprobs"]
    result = Output(*_of_rollout(model, rollout, microbatch_size, temperature, mesh, names))
    return result if entropy else result.logprobs


@torch.no_grad()
def rollout_certainty(model: Transformer, rollout: Rollout, microbatch_size: int, temperature: float = 1.0,
                      mesh: Mesh | None = None) -> Tensor:
    """(B, S) nats, no gradient: KL(uniform || model) at each column, which is 0 where all words are equally likely.

    Self-certainty, arXiv:2502.18581: -(mean over words of log p) - log V. Unlike the entropy it looks at the words that
    are ruled out. The logits of a few columns at a time are held.
    """
    def measure(model: Transformer, reading: Reading, temperature: float, entropy: bool, first: int) -> Output:
        """The certainty, in the place of the log-probs."""
        hidden, targets = reading.hidden(model), reading.targets
        if not model.has_head:
            return Output(hidden.new_zeros(targets.shape, dtype=torch.promote_types(hidden.dtype, torch.float32)))
        pieces = []
        for part in hidden[:, first:].split(max(1, KEEP_LOGITS // (len(hidden) * model.config.vocab_size)), 1):
            logits = model.logits(part)
            if model.vocab is not None:
                logits = model.vocab.whole(logits.flatten(0, 1)).view(*part.shape[:2], -1)
            logprobs = all_logprobs(logits, temperature)
            pieces.append(-logprobs.mean(-1) - math.log(logprobs.shape[-1]))
        return Output(F.pad(torch.cat(pieces, 1), (first, 0)))

    return _of_rollout(model, rollout, microbatch_size, temperature, mesh, ["logprobs"], measure)[0]


@torch.no_grad()
def rollout_values(model: Transformer, rollout: Rollout, microbatch_size: int, mesh: Mesh | None = None) -> Tensor:
    """The scores of a reward model or critic, likewise: (B, S); column s has read tokens[:, : s + 1]."""
    return _of_rollout(model, rollout, microbatch_size, 1.0, mesh, ["values"])[0]


@torch.no_grad()
def token_vectors(model: Transformer, rollout: Rollout, microbatch_size: int, temperature: float = 1.0,
                  mesh: Mesh | None = None) -> Tensor:
    """(B, S, D): (1 - p(token)) times the state it was predicted from, a stand-in for its gradient (DelTA): that of
    log p with respect to the token's own row of the output matrix. D numbers a token: mind the memory."""
    return _of_rollout(model, rollout, microbatch_size, temperature, mesh, ["vectors"],
                       partial(output_here, vectors=True))[0]


def _of_rollout(model: Transformer, rollout: Rollout, microbatch_size: int, temperature: float, mesh: Mesh | None,
                names: list[str], look: Callable[..., Output] = output_here) -> list[Tensor]:
    from minirl.parallel.context import join  # torch.distributed is not needed on a laptop
    from minirl.parallel.zero import gathered

    cp_group = None if mesh is None or mesh.cp == 1 else mesh.cp_group
    read = ("tokens", "action_mask", "lengths", "group", "sample_ids", "documents")
    rollout, results = Rollout(**{name: getattr(rollout, name) for name in read}), {}
    asked = torch.arange(len(rollout), device=rollout.tokens.device) if names == ["values"] else rollout.acting_rows()
    with gathered(model):
        for index in (asked[piece] for piece in rollout.rows(asked).split(microbatch_size)):
            part = rollout.rows(index)
            first = None if names == ["values"] else first_action(part.action_mask)
            begin = first if cp_group is None or first is None else 0  # each rank of cp has columns from here and there
            out = look(model, read_rows(part, cp_group), temperature, "entropy" in names, begin)
            for name in names:
                piece = getattr(out, name)
                if cp_group is not None:
                    piece = join(piece, cp_group, part.action_mask.shape[1])
                    piece[:, : first or 0] = 0  # the same numbers in every layout
                whole = results.setdefault(name, piece.new_zeros(*rollout.action_mask.shape, *piece.shape[2:]))
                whole[index, : piece.shape[1]] = piece
    return [x if model.pipeline is None else model.pipeline.from_last(x) for x in results.values()]


def shift_mask(token_mask: Tensor, documents: Tensor | None = None) -> Tensor:
    """(B, T) bool, True on the tokens to train on -> (B, S) bool, True on the predictions of those tokens.

    The first token of a row has no prediction. Nor has that of a document in a packed row, documents (B, T):
    documents of 3 and 4 tokens have 2 + 3 targets; a sixth would teach the model to begin a random document.
    """
    mask = token_mask[:, 1:]
    return mask if documents is None else mask & (documents[:, 1:] == documents[:, :-1])
