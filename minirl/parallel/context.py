"""Context parallelism: every rank holds some columns of every row, and only attention notices.

All else in a transformer works on one token at a time. Attention needs the keys and values of the whole row, and there
are two ways to bring them together with a query. N ranks; a row of S columns; q is (B, H, S/N, E) on each rank, k and v
(B, K, S/N, E).

    ring      keys and values travel around the ring; queries stay.                            arXiv:2310.01889
    ulysses   columns are exchanged for heads before attention, and back after it: every rank  arXiv:2309.14509
              has whole rows of H/N heads. Windows and packed documents work as in one process.

    bytes that one rank sends for a layer, / (B E S/N)      forward               backward
    ring                                                    2 (N-1) K e           2 (N-1) K e + 2 N K w
    ulysses, 1/N of it to itself                            (2 H + 2 K') e        (2 H + 2 K') e

e is the size of a number, w that of float32 or wider, in which the ring adds up gradients. K' is K, or the least common
multiple of K and N where N does not divide K. So the ring's traffic does not fall as ranks are added (all keys and
values come by every rank), and that of Ulysses falls as 1/N; but the ring sends to its neighbour only, takes any number
of heads, and K is often far below H. Nothing is sent while something is computed here, which faster codes do.

Which columns? If rank 0 had the first S/N, it would be done at once, while the last rank's queries see everything. A
row is cut into 2N pieces instead, and rank r holds pieces r and 2N-1-r, one cheap and one dear (`cut`):

    N = 4       piece   0  1  2  3  4  5  6  7
                rank    0  1  2  3  3  2  1  0

In the step in which the keys of rank j pass by rank r, the causal mask leaves two of the four pairs of pieces, no more
and no less, whatever r and j (`sight`): all work alike and nobody waits. In N steps that is 2 N (S/2N)^2 = S^2 / 2N
pairs of columns. Their scores are made a few queries at a time, so that memory grows with S and not with its square.

**Merging.** Softmax over a union of key sets, from what each gave alone. A set gives out = sum_k exp(s_k - lse) v_k and
lse = log sum_k exp(s_k). Then with lse' = log(exp(lse1) + exp(lse2))

    out' = sum_k exp(s_k - lse') v_k = exp(lse1 - lse') out1 + exp(lse2 - lse') out2

Both factors are at most 1: nothing overflows, however large a score is.

**Backward.** With the lse of the whole row, p_k = exp(s_k - lse) is the final probability, block by block. With g the
gradient of out, and delta = g . out, which is sum_k p_k (g . v_k),

    dv_k += p_k g        ds_k = p_k (g . v_k - delta)        dq += scale ds_k k_k        dk_k += scale ds_k q

so q, k, v, out and lse are all that has to be kept. k and v travel around once more and bring their dk and dv along, to
which every rank adds its part; one more step takes these home.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from minirl.config import UserError
from minirl.model import Block, Frame, KVCache, Transformer, fused_attention
from minirl.parallel.collectives import all_gather, exchange, gather_objects, own_slice, ring_exchange
from minirl.parallel.mesh import Group, Mesh
from minirl.prefixes import Prefixes
from minirl.rollout import Rollout

KINDS = ("ring", "ulysses")
SCORES = 2**24  # scores alive at once, in the ring: 64 MB of float32


# ---- which columns ----

def pad_columns(x: Tensor, group: Group) -> Tensor:
    """(B, S, ...) -> (B, S', ...) with zeros (False) on the right: S' is the next multiple of 2N, and never 0.

    These columns come last, so no real token sees them; and masks are False there.
    """
    pieces = 2 * group.size
    length = max(1, -(-x.shape[1] // pieces)) * pieces
    return F.pad(x, (0, 0) * (x.dim() - 2) + (0, length - x.shape[1]))


def cut(x: Tensor, group: Group) -> Tensor:
    """This rank's columns of x, padded: (B, S, ...) -> (B, S'/N, ...), piece r and then piece 2N-1-r."""
    return own_slice(deal(pad_columns(x, group), group, 1), group, 1)


def join(x: Tensor, group: Group, width: int) -> Tensor:
    """The whole rows again, on every rank: (B, S'/N, ...) -> (B, width, ...). No gradient flows through it."""
    return undeal(all_gather(x, group, 1), group, 1)[:, :width]


def deal(x: Tensor, group: Group, dim: int) -> Tensor:
    """Row order -> the order of the ranks: pieces 0 1 2 3 become 0 3 1 2."""
    pieces = x.chunk(2 * group.size, dim)
    return torch.cat([piece for r in range(group.size) for piece in (pieces[r], pieces[-1 - r])], dim)


def undeal(x: Tensor, group: Group, dim: int) -> Tensor:
    """The order of the ranks -> row order."""
    pieces = x.chunk(2 * group.size, dim)
    return torch.cat(pieces[::2] + pieces[::-2], dim)


def cut_columns(rollout: Rollout, mesh: Mesh) -> Rollout:
    """This rank's columns of every (B, S) tensor of a Rollout; what belongs to a whole row stays.

    So do `tokens` and `documents` (B, T): a token is eight bytes, and `token_logprobs` takes inputs and targets from
    the whole row, so that the target behind a border is simply there. `row_tokens` remembers how many action tokens a
    row has in all.
    """
    group, S = mesh.cp_group, rollout.action_mask.shape[1]
    if group.size == 1:
        return rollout
    columns = {name: cut(x, group) for name, x in rollout.tensors().items() if x.dim() == 2 and x.shape[1] == S}
    return rollout.replace(**columns, row_tokens=rollout.action_mask.sum(1))


# ---- blocks: some queries, some keys, no communication ----

class Sight(NamedTuple):
    """What the queries of one rank see of the keys of one rank, each of which has two pieces."""

    query: int  # from this piece on: 0 both, 1 the later one
    keys: int  # so many pieces: 1 the earlier one, 2 both
    causal: bool


def sight(rank: int, source: int) -> Sight:
    """Of the four pairs of pieces. Rank r has pieces r and 2N-1-r, all of the latter later than all of the former.

    own keys    earlier on earlier and later on later by the causal mask, half of each; later on earlier: 2 in all
    source < r  both pieces see the earlier piece, neither sees the later one
    source > r  the later piece sees both, the earlier one neither
    """
    if rank == source:
        return Sight(0, 2, True)
    return Sight(0, 1, False) if source < rank else Sight(1, 2, False)


def block_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention to some keys only, and the logsumexp of their scores.

    q      : (B, H, T, E)    k, v : (B, K, S, E); each key head serves H/K query heads, and is not copied for them
    causal : the queries are those of the keys (T = S), and see none that comes later
    returns: out (B, H, T, E), lse (B, H, T), float32 or wider
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = k.to(wide), v.to(wide)
    out, lse = q.new_empty(q.shape, dtype=wide), q.new_empty(q.shape[:3], dtype=wide)
    for rows, seen in _chunks(q, k, causal):
        scores = _scores(q[:, :, rows], k[:, :, :seen], scale, rows, causal)  # (B, K, H/K * t, seen)
        norm = scores.logsumexp(-1)
        probs = scores.sub_(norm[..., None]).exp_()
        out[:, :, rows] = (probs @ v[:, :, :seen]).view_as(out[:, :, rows])
        lse[:, :, rows] = norm.view_as(lse[:, :, rows])
    return out, lse


def merge(out: Tensor, lse: Tensor, out2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to the union of two sets of keys, from out (..., E) and lse (...) of each.

    lse -inf is a set of no key, and has no weight.
    """
    both = torch.logaddexp(lse, lse2)
    finite = both.clamp(min=torch.finfo(both.dtype).min)  # -inf less -inf would be NaN
    return out * (lse - finite).exp()[..., None] + out2 * (lse2 - finite).exp()[..., None], both


def block_gradients(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, lse: Tensor, delta: Tensor, scale: float,
                    causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """A block's share of dq, dk and dv, float32 or wider.

    grad (B, H, T, E) of the merged result, its lse (B, H, T), and delta (B, H, T) = (grad * out).sum(-1)
    """
    wide, heads = lse.dtype, k.shape[1]
    k, v = k.to(wide), v.to(wide)
    dq, dk, dv = torch.empty_like(q, dtype=wide), torch.zeros_like(k), torch.zeros_like(v)
    for rows, seen in _chunks(q, k, causal):
        g, norm, d = (_by_key_head(x[:, :, rows].to(wide), heads) for x in (grad, lse, delta))
        probs = _scores(q[:, :, rows], k[:, :, :seen], scale, rows, causal).sub_(norm[..., None]).exp_()
        dv[:, :, :seen] += probs.mT @ g
        dscores = (g @ v[:, :, :seen].mT).sub_(d[..., None]).mul_(probs).mul_(scale)
        dq[:, :, rows] = (dscores @ k[:, :, :seen]).view_as(dq[:, :, rows])
        dk[:, :, :seen] += dscores.mT @ _by_key_head(q[:, :, rows].to(wide), heads)
    return dq, dk, dv


def _chunks(q: Tensor, k: Tensor, causal: bool) -> Iterator[tuple[slice, int]]:
    """Slices of queries, with the number of keys that any of them sees."""
    B, H, T, _ = q.shape
    size = max(1, SCORES // max(1, B * H * k.shape[2]))
    for start in range(0, T, size):
        end = min(start + size, T)
        yield slice(start, end), end if causal else k.shape[2]


def _by_key_head(x: Tensor, heads: int) -> Tensor:
    """(B, H, T, ...) -> (B, K, H/K * T, ...): the query heads of a key head, one behind the other."""
    return x.unflatten(1, (heads, -1)).flatten(2, 3)


def _scores(q: Tensor, k: Tensor, scale: float, rows: slice, causal: bool) -> Tensor:
    """(B, H, t, E) and (B, K, seen, E) -> (B, K, H/K * t, seen), in the type of k."""
    scores = (_by_key_head(q.to(k.dtype), k.shape[1]) * scale) @ k.mT
    if causal:
        columns = torch.arange(k.shape[2], device=k.device)
        later = columns > columns[rows, None]  # (t, seen)
        scores.unflatten(2, (-1, len(later))).masked_fill_(later, -math.inf)
    return scores


# ---- the ring ----

class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, scale: float, group: Group) -> Tensor:
        """q (B, H, T, E); k, v travel once around the ring, and each block that is in sight is merged in."""
        wide = torch.promote_types(q.dtype, torch.float32)
        out, lse = q.new_zeros(q.shape, dtype=wide), q.new_full(q.shape[:3], -math.inf, dtype=wide)
        half, kv = q.shape[2] // 2, torch.stack((k, v))  # one message
        for step in range(group.size):
            if step:
                (kv,) = ring_exchange([kv], group)
            see = sight(group.rank, (group.rank - step) % group.size)
            rows, keys = slice(see.query * half, None), slice(see.keys * half)
            block = block_attention(q[:, :, rows], *kv[:, :, :, keys], scale, see.causal)
            out[:, :, rows], lse[:, :, rows] = merge(out[:, :, rows], lse[:, :, rows], *block)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.group = scale, group
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        """Around the ring once more: the gradients of k and v travel with them and arrive where they belong."""
        (q, k, v, out, lse), group = ctx.saved_tensors, ctx.group
        half, kv, delta = q.shape[2] // 2, torch.stack((k, v)), (grad.to(lse.dtype) * out).sum(-1)
        dq, dkv = torch.zeros_like(q, dtype=lse.dtype), torch.zeros_like(kv, dtype=lse.dtype)
        for step in range(group.size):
            if step:
                kv, dkv = ring_exchange([kv, dkv], group)
            see = sight(group.rank, (group.rank - step) % group.size)
            rows, keys = slice(see.query * half, None), slice(see.keys * half)
            dq_part, dk_part, dv_part = block_gradients(q[:, :, rows], *kv[:, :, :, keys], grad[:, :, rows],
                                                        lse[:, :, rows], delta[:, :, rows], ctx.scale, see.causal)
            dq[:, :, rows] += dq_part
            dkv[:, :, :, keys] += torch.stack((dk_part, dv_part))
        (dkv,) = ring_exchange([dkv], group)  # home: it has been with everyone
        return dq.to(q.dtype), *dkv.to(k.dtype), None, None


def ring_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, group: Group) -> Tensor:
    """Causal attention of rows that are cut over the group. q: (B, H, C, E); k, v: (B, K, C, E); (B, H, C, E) back.

    C = S'/N columns as `cut` deals them. Forward N-1 sends of k and v together; backward N-1 of k and v, and N of dk
    and dv, which are float32 or wider.
    """
    return _RingAttention.apply(q, k, v, scale, group)


# ---- Ulysses ----

def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, group: Group) -> Tensor:
    """The same, with columns exchanged for heads and back: four all-to-alls, and four in backward.

    mask : additive (B or 1, 1, S', S') of whole rows, as `Frame` has it; None: plain causal

    H must divide over the N ranks. Where K does not, key heads are sent in copies, as many as make it divide.
    """
    copies = math.lcm(k.shape[1], group.size) // k.shape[1]
    if copies > 1:
        k, v = k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)
    q, k, v = (undeal(exchange(x, group, split=1, join=2), group, 2) for x in (q, k, v))  # (B, heads / N, S', E)
    out = fused_attention(q, k, v, mask, scale)
    return exchange(deal(out, group, 2), group, split=2, join=1)


# ---- a model ----

@dataclass(frozen=True)
class Columns:
    """In the place of a Frame's mask: queries and keys are columns of longer rows. `mask` is that of the whole rows."""

    mask: Tensor | None


def attach(model: Transformer, mesh: Mesh, kind: str = "ring") -> Transformer:
    """Let a model work on its own columns of each row: model(tokens, positions, documents) -> (B, S'/N, D)

    tokens               : (B, S'/N), own columns
    positions, documents : (1 or B, S') and (B, S') or None, of the **whole** rows, padded: so windows, documents, and
                           scalings of RoPE that look at the length mean what they mean in one process

    as `logprobs.shift` makes them. Without positions, or with positions as wide as the tokens, rows are whole and the
    model is what it was: sampling with a cache, and a look at a single row. Changes the model in place.
    UserError: what the chosen kind cannot do.
    """
    group = mesh.cp_group
    if kind not in KINDS:
        raise UserError(f"context parallelism {kind!r} is unknown: use one of {', '.join(KINDS)}")
    if group.size == 1:
        return model
    if kind == "ring" and any(model.config.windows):
        raise UserError(f"sliding_window {max(model.config.windows)} does not work with ring attention: use ulysses")
    if model.config.attn_logit_softcapping:
        raise UserError(f"attn_logit_softcapping {model.config.attn_logit_softcapping} does not work with --cp "
                        f"{group.size}: use --cp 1")
    for block in model.layers:
        if isinstance(block, Block):
            heads = block.self_attn.heads
            if kind == "ulysses" and heads % group.size:
                raise UserError(f"{heads} attention heads do not divide over --cp {group.size}: use ring, or a "
                                f"divisor of {heads}")
            block.self_attn.attend = partial(_attend, group=group, kind=kind)
    model.frames = partial(_frames, model.frames, group, kind)
    return model


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | Columns | None, scale: float, group: Group,
            kind: str) -> Tensor:
    if not isinstance(mask, Columns):
        return fused_attention(q, k, v, mask, scale)
    if kind == "ring":
        return ring_attention(q, k, v, scale, group)
    return ulysses_attention(q, k, v, mask.mask, scale, group)


def _frames(frames: Callable[..., list[Frame]], group: Group, kind: str, tokens: Tensor, positions: Tensor | None,
            documents: Tensor | None, cache: KVCache | None, prefixes: Prefixes | None = None) -> list[Frame]:
    """`Transformer.frames`, but of own columns where the positions are those of whole rows."""
    if positions is None or positions.shape[1] == tokens.shape[1]:
        return frames(tokens, positions, documents, cache, prefixes)
    if kind == "ring" and documents is not None:
        raise UserError("packed documents do not work with ring attention: use ulysses, or one document a row")
    whole = frames(positions.expand(len(tokens), -1), positions, documents, None)
    kinds = {id(frame): frame for frame in whole}  # layers of one kind share a frame
    own = lambda x: None if x is None else cut(x, group)
    mine = {key: replace(frame, cos=own(frame.cos), sin=own(frame.sin), positions=own(frame.positions),
                         mask=Columns(frame.mask)) for key, frame in kinds.items()}
    return [mine[id(frame)] for frame in whole]


# ---- sampling ----

def gather_rollouts(rollout: Rollout | None, group: Group) -> Rollout:
    """The rows of all ranks on every rank, in the order of the ranks, with texts and turns; None: a rank without rows.

    While sampling there is nothing to cut: a rank decodes whole rows, of other prompts than its partners.
    """
    parts = gather_objects(None if rollout is None else rollout.to("cpu"), group)
    return Rollout.join([part for part in parts if part is not None])
