"""The sampler: many rows decoded together, each a tape on which tokens are forced (prompt, tool output) or sampled.

    rollout = generate(policy, prompts, tokenizer, group_size=8, max_new_tokens=64, seed=1)

One invariant carries the whole file: **the cache has seen every token of a row but its last.** A decode step feeds
that last token and samples the next. Whatever is forced (a prompt, what a tool returned) is fed in one go up to its
last token, and the row is in step again. The head is therefore never run on a token that was forced, the G samples of
a prompt share one pass over it, finished rows leave, and waiting rows take their place.

Randomness belongs to a sample and not to a batch: token number p of sample i is drawn with one uniform number, a hash
of (seed, i, p). Batch size, order, neighbours and ranks cannot change what is drawn.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kernels import all_logprobs
from minirl.config import UserError
from minirl.model import KVCache, Transformer
from minirl.rollout import Rollout, Tapes
from minirl.tokenizer import Tokenizer

if TYPE_CHECKING:
    from minirl.branching import Branching
    from minirl.parallel.tensor import Vocabulary

# ------------------------------------------------------------------ one token


def uniform(seed: int, sample_ids: Tensor, positions: Tensor) -> Tensor:
    """One uniform number in [0, 1) for each (sample, position): 53 random bits from a counter-based generator.

    sample_ids, positions : (B,) int64
    returns               : (B,) float64

    Rounds of the splitmix64 finaliser (Steele et al. 2014) over the three counters; int64 arithmetic wraps.
    """
    return draw(stream(seed, sample_ids), positions)


def stream(seed: int, sample_ids: Tensor) -> Tensor:
    """The half of `uniform` that is the same for all tokens of a sample: (B,) int64 -> (B,) int64."""
    key = _mix(torch.full_like(sample_ids, seed) + _GOLDEN) + sample_ids
    return _mix(key + _GOLDEN)


def draw(streams: Tensor, positions: Tensor) -> Tensor:
    """The other half of `uniform`: number `positions` (B,) of each stream (B,), float64."""
    return _shift(_mix(streams + positions), 11).to(torch.float64) * 2.0**-53


_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # the odd constants of splitmix64, as signed 64-bit integers
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, n: int) -> Tensor:
    return (x >> n) & ((1 << (64 - n)) - 1)  # torch shifts in copies of the sign; a generator needs zeros


BLOCK = 32  # tokens a block in `inverse_cdf`: about the square root of a small vocabulary


def inverse_cdf(probs: Tensor, u: Tensor) -> Tensor:
    """The token whose slice of the cumulative distribution contains u. Never one of probability 0.

    probs: (B, V) >= 0, need not sum to 1 exactly; u: (B,) float64 in [0, 1); returns (B,) int64.

    Summed in float64: a float32 sum over 150,000 words moves the edges enough to flip 7 % of the draws between
    layouts. Blocks are summed first and only the block that contains u is walked, which reads V numbers once
    instead of writing V partial sums.
    """
    blocks, totals = _blocks(probs)
    return _walk(blocks, totals, u * totals.sum(-1))


def _blocks(probs: Tensor) -> tuple[Tensor, Tensor]:
    """(B, V) -> in blocks (B, blocks, BLOCK), and the sum of each, float64."""
    if extra := -probs.shape[1] % BLOCK:
        probs = torch.nn.functional.pad(probs, (0, extra))
    blocks = probs.view(len(probs), -1, BLOCK)
    return blocks, blocks.sum(-1, dtype=torch.float64)


def _walk(blocks: Tensor, totals: Tensor, target: Tensor) -> Tensor:
    """The first token whose cumulative weight exceeds target (B,)."""
    block, rest = _search(totals, target)
    inner = blocks[torch.arange(len(blocks), device=blocks.device), block].double()  # (B, BLOCK)
    return block * BLOCK + _search(inner, rest)[0]


def _search(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """First index whose cumulative weight exceeds target (B,), and how far target lies into it."""
    edges = weights.cumsum(-1)
    # A rounded target may reach the last edge, where only slots of weight 0 follow: stay strictly below it.
    target = torch.minimum(target, edges[:, -1] * (1 - 2.0**-52))[:, None]
    index = torch.searchsorted(edges, target, right=True)
    before = edges.gather(1, index) - weights.gather(1, index)
    return index[:, 0], (target - before).clamp_min_(0)[:, 0]


def sample(logits: Tensor, u: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
           vocab: Vocabulary | None = None) -> tuple[Tensor, Tensor]:
    """Draw one token a row, and its log-probability **under the distribution that was sampled**.

    logits  : (B, V); u: (B,) float64 in [0, 1)
    vocab   : `policy.vocab`, if the words are spread over ranks and these are the logits of some
    returns : tokens (B,) int64, logprobs (B,) nats, float32 or wider

    Temperature 0 is greedy: the distribution is a point, the log-probability 0. top_k and top_p (arXiv:1904.09751)
    are for evaluation and chat: training cannot express them, see `token_logprobs`.
    """
    if vocab is not None:
        if not (top_k or top_p < 1):
            return sample_sharded(logits, u, temperature, vocab)
        logits = vocab.whole(logits)
    if temperature == 0:
        return logits.argmax(-1), logits.new_zeros(len(logits), dtype=torch.float32)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logprobs = all_logprobs(logits, temperature)
    if top_k or top_p < 1:
        logprobs = all_logprobs(_restrict(logprobs, top_k, top_p))
    tokens = inverse_cdf(logprobs.exp(), u)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def sample_sharded(logits: Tensor, u: Tensor, temperature: float, vocab: Vocabulary) -> tuple[Tensor, Tensor]:
    """`sample` where each rank of a group has the logits (B, V / N) of its own words; all of them return the same.

    p(word) = p(shard) p(word | shard). The u of a row falls into the slice of one shard, and where in that slice says
    which word: the draw is the one from the whole distribution. Two exchanges of two numbers a row, never the logits.
    """
    if temperature == 0:
        best = logits.argmax(-1, keepdim=True)  # the first of equals, and so below
        peaks, words = vocab.each(torch.cat((logits.gather(1, best), vocab.start + best), 1).double()).unbind(-1)
        return words.gather(0, peaks.argmax(0)[None])[0].long(), logits.new_zeros(len(logits), dtype=torch.float32)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logits = logits / temperature
    peak = logits.amax(-1, keepdim=True)
    # On the shard's own scale: its largest is 1. (-inf - -inf is NaN: a shard of -inf, which is never chosen.)
    blocks, totals = _blocks((logits - peak).exp().nan_to_num_(1.0))
    peaks, masses = vocab.each(torch.cat((peak, totals.sum(-1, keepdim=True)), 1)).unbind(-1)  # (N, B) float64
    top = peaks.amax(0)
    masses = masses * (peaks - top).exp()  # the scale of all
    total = masses.sum(0)
    shard, rest = _search(masses.T.contiguous(), u * total)
    mine = shard == vocab.group.rank
    word = _walk(blocks, totals, (rest * (top - peak[:, 0]).exp()).where(mine, 0))
    logprob = logits.gather(1, word[:, None])[:, 0] - top - total.log()
    tokens, logprobs = vocab.reduce(torch.stack((vocab.start + word, logprob)).where(mine, 0), "sum")
    return tokens.long(), logprobs.to(logits.dtype)


def _restrict(logprobs: Tensor, top_k: int, top_p: float) -> Tensor:
    """-inf outside the top_k most likely tokens, and outside the smallest set of mass top_p. (B, V) -> (B, V)."""
    ranked, order = logprobs.sort(-1, descending=True)
    probs = ranked.exp()
    drop = probs.cumsum(-1) - probs >= top_p  # mass before the token; the first one always stays
    if top_k:
        drop[:, top_k:] = True
    return logprobs.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), -math.inf)


# ------------------------------------------------------------------ many rows

# (row, tokens of the action, no stop token) -> tokens to force, or []; or a function that will give them, later
Respond = Callable[[int, list[int]], list[int] | Callable[[], list[int]]]
PATIENCE = 8  # tokens that the other rows sample before a reply that comes later is asked for


class Begun(NamedTuple):
    """Rows that somebody has begun. The prompt of such a row is all that stands on its tape; one entry a row."""

    ids: Tensor  # (N,) int64 sample ids
    begins: Sequence[int]  # where the action under way begins: the tape's length if none of it is there
    spent: Sequence[int]  # tokens on the tape that were sampled: they count towards max_new_tokens


@torch.inference_mode()
def generate(policy: Transformer, prompts: Sequence[Sequence[int]], tokenizer: Tokenizer, *, group_size: int = 1,
             max_new_tokens: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0,
             first_id: int = 0, stop: Sequence[str] = (), respond: Respond | None = None,
             max_rows: int = 4096, begun: Begun | None = None, pause: int = 0,
             branch: Branching | None = None) -> Rollout:
    """Sample `group_size` rows for each prompt.

    prompts        : token ids, at least one each
    max_new_tokens : how many tokens a row may sample in all its turns; forced tokens do not count
    first_id       : sample id of the first row, a multiple of group_size; row number r is sample first_id + r
    stop           : strings that end an action as `tokenizer.stop_ids` do; the token that completes one is kept whole
    respond        : what follows an action (a tool's output); default: nothing, one action a row. A function in its
                     place is called PATIENCE tokens later: a slow tool runs while the others still decode. By the
                     count of tokens and not by the clock, so that the rows of a batch, and hence the last digits of
                     its logits, are the same in every run
    max_rows       : rows decoded at once; more wait their turn
    begun          : rows that go on from what stands on their tapes, instead of first_id and group_size
    pause          : set a row aside once it has sampled so many tokens here, unless it is over; 0: never
    branch         : which rows do not begin at the prompt but branch off others, and where (branching.py)
    returns        : Rollout in the order of the prompts, `group_size` rows each; `finished` is False where a row was
                     cut by max_new_tokens or the context. old_logprobs are of the sampled distribution. With `pause`
                     also `begins`: where the action under way begins, of a row that was set aside; else -1
    """
    context, device = policy.config.context, policy.device
    check_prompts(prompts, context)
    check_options(temperature, top_k, top_p, max_new_tokens=max_new_tokens, group_size=group_size, max_rows=max_rows)
    if first_id % group_size:
        raise UserError(f"first_id {first_id} is not a multiple of group_size {group_size}: groups would mix prompts")
    numbers: dict[tuple[int, ...], int] = {}  # equal prompts are fed once
    prompts = [(numbers.setdefault(tuple(prompt), len(numbers)), prompt) for prompt in prompts]
    alike, prompts = zip(*(prompt for prompt in prompts for _ in range(group_size)), strict=True)
    wide = torch.float64 if policy.dtype == torch.float64 else torch.float32
    tapes = Tapes(prompts, max(map(len, prompts)) + max_new_tokens, tokenizer.pad_id, wide, device)
    turns = Turns(tapes, Stops(stop, tokenizer, policy.config.vocab_size, device), respond, max_new_tokens, context,
                  begun, pause)
    batch, waiting = Batch(policy, tapes), list(range(len(prompts))) if branch is None else branch.roots()
    ids = first_id + torch.arange(len(prompts), device=device) if begun is None else begun.ids.to(device)
    streams = stream(seed, ids)  # (N,)
    with policy.sampling():
        while waiting or len(batch.rows):
            room = max_rows - len(batch.rows)
            if branch is not None:  # who is let in brings a family
                room = max(room // branch.family, int(not len(batch.rows)))
            if waiting and room > 0:
                batch.admit(waiting[:room], alike)
                waiting = waiting[room:]
            sample_next(policy, batch, turns, streams, temperature, top_k, top_p)
            if branch is not None:
                going = batch.alive | turns.waiting[batch.rows]
                forks, late = branch.grow(turns, batch.rows.tolist(), going.tolist())
                batch.fork(forks)
                waiting += late
            batch.settle(turns.waiting)
    tapes.finished[turns.finished] = True  # at once: an index into a tensor takes as long as the rest of a row's end
    rollout = tapes.rollout(first_id, group_size)
    return turns.note_begins(rollout) if pause else rollout


def sample_next(policy: Transformer, batch: Batch, turns: Turns, streams: Tensor, temperature: float, top_k: int,
                top_p: float) -> None:
    """The next token of every row, laid on its tape, and what follows an action that ends with it.

    streams : (N,) of all rows, see `stream`
    """
    logits = batch.decode()  # (R, V), or None where another stage of a pipeline has the head
    noise = draw(streams[batch.rows], batch.seen)  # (R,)
    drawn = None if logits is None else sample(logits, noise, temperature, top_k, top_p, policy.vocab)
    tokens, logprobs = policy.pipeline.drawn_by_last(drawn, noise) if policy.pipeline else drawn
    alive = batch.living()
    turns.tapes.append(batch.rows[alive], tokens[alive], logprobs[alive])
    batch.alive[alive] = turns.go_on(batch.rows[alive], tokens[alive])
    turns.wake(batch)


class Turns:
    """When the action of a row ends, and what follows: the reply is forced on its tape, or the row is done."""

    def __init__(self, tapes: Tapes, stops: Stops, respond: Respond | None, max_new_tokens: int, context: int,
                 begun: Begun | None = None, pause: int = 0):
        self.tapes, self.stops, self.respond, self.context = tapes, stops, respond, context
        self.max_new_tokens = max_new_tokens
        lengths = tapes.lengths
        spent = torch.zeros_like(lengths) if begun is None else lengths.new_tensor(begun.spent)
        self.starts = [[n] for n in (lengths.tolist() if begun is None else begun.begins)]  # of each action of a row
        self.limits = torch.maximum(lengths + max_new_tokens - spent, lengths + 1).clamp(max=context)  # (N,) cut there
        self.pauses = (lengths + pause).minimum(self.limits) if pause else self.limits  # (N,) the length for today
        self.paused: set[int] = set()
        self.finished: list[int] = []  # rows that ended by themselves
        self.clock, self.late = 0, deque()  # tokens sampled; (clock to reply at, row, reply, did it end, is it full)
        self.waiting = torch.zeros(len(tapes.lengths), dtype=torch.bool, device=tapes.lengths.device)  # (N,)

    def go_on(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """After each of `rows` (R,) has sampled one of `tokens` (R,): which are not done yet? (R,) bool."""
        full = self.tapes.lengths[rows] == self.pauses[rows]
        check = (full | self.stops.may_end[tokens]).nonzero()[:, 0]  # the others surely go on
        going = torch.ones_like(full)
        if len(check):
            each = zip(rows[check].tolist(), self.tapes.read(rows[check]), full[check].tolist(), strict=True)
            going[check] = torch.tensor([self._end(*row) for row in each], device=rows.device)
        return going

    def _end(self, row: int, tape: list[int], full: bool) -> bool:
        """If the action ended with the tape's last token, reply. True: the row goes on."""
        at_stop = tape[-1] in self.stops.ids
        action = tape[self.starts[row][-1] :]
        ended = at_stop or self.stops.hit(action)
        if not ended and not full:
            return True
        if not ended and len(tape) < int(self.limits[row]):  # not at its end: it goes on another day
            self.paused.add(row)
            return False
        forced = self.respond(row, action[:-1] if at_stop else action) if self.respond else []
        if callable(forced):
            self.late.append((self.clock + PATIENCE, row, forced, ended, full))
            self.waiting[row] = True
            return False
        return self._reply(row, forced, ended, full)

    def _reply(self, row: int, forced: list[int], ended: bool, full: bool) -> bool:
        """Lay the reply on the tape. True: the row goes on."""
        if not forced:
            self.finished += [row] * ended
            return False
        length = int(self.tapes.lengths[row])
        aside = full and length < int(self.limits[row])
        length += len(forced)
        if (full and not aside) or length >= self.context:
            return False
        self.tapes.extend(row, forced, chosen=False)
        self.starts[row].append(length)
        self.limits[row] = min(int(self.limits[row]) + len(forced), self.context)  # forced tokens do not count
        self.pauses[row] = min(int(self.pauses[row]) + len(forced), int(self.limits[row]))
        if aside:
            self.paused.add(row)
        return not aside

    def fork(self, parent: int, child: int, at: int) -> None:
        """The child's row is the parent's first `at` tokens, and it has what those leave it of the limit."""
        self.tapes.copy(parent, child, at)
        self.starts[child] = [start for start in self.starts[parent] if start <= at]
        left = self.max_new_tokens - int(self.tapes.chosen[child, :at].sum())
        self.limits[child] = self.pauses[child] = min(at + left, self.context)

    def note_begins(self, rollout: Rollout) -> Rollout:
        """`begins` of the rows that were set aside."""
        found = [self.starts[row][-1] if row in self.paused else -1 for row in range(len(rollout))]
        return rollout.replace(begins=torch.tensor(found, device=rollout.tokens.device))

    def wake(self, batch: Batch) -> None:
        """Give the replies that are due, or the next ones if nobody has anything else to do."""
        self.clock += 1
        while self.late and (self.late[0][0] <= self.clock or not batch.alive.any()):
            due, row, reply, ended, full = self.late.popleft()
            self.clock = max(self.clock, due)
            self.waiting[row] = False
            batch.alive[batch.rows == row] = self._reply(row, reply(), ended, full)


def check_prompts(prompts: Sequence[Sequence[int]], context: int) -> None:
    """Refuse, before any work, what cannot be sampled from."""
    if not prompts:
        raise UserError("there are no prompts: give at least one")
    for i, prompt in enumerate(prompts):
        if not 1 <= len(prompt) < context:
            raise UserError(f"prompt {i} has {len(prompt)} tokens: a context of {context} takes 1 to {context - 1}; "
                            f"shorten the prompt, or use a model with a longer context")


def check_options(temperature: float, top_k: int, top_p: float, **counts: int) -> None:
    """Refuse what is no distribution: top_p 0 would drop every token, and no room for a row waits for ever."""
    for name, count in counts.items():
        if count < 1:
            raise UserError(f"{name} is {count}: it must be at least 1")
    if not 0 <= temperature < math.inf:
        raise UserError(f"temperature is {temperature}: it must be 0 (greedy) or above, and finite")
    if top_k < 0:
        raise UserError(f"top_k is {top_k}: it must be 0 (off) or above")
    if not 0 < top_p <= 1:
        raise UserError(f"top_p is {top_p}: it must be above 0, and at most 1 (off)")


class Stops:
    """What ends an action: a stop token, or a stop string across token borders (but never one in the prompt)."""

    def __init__(self, stop: Sequence[str], tokenizer: Tokenizer, vocab_size: int, device: torch.device):
        if "" in stop:
            raise UserError("a stop string is empty: it would end every action before it begins")
        self.ids = {token for token in tokenizer.stop_ids if 0 <= token < vocab_size}
        self.marks, self.tokenizer = [text.encode() for text in stop], tokenizer
        # A stop string is completed by a token that contains its last byte: look no further at all the others.
        last = {text[-1] for text in self.marks}
        # vocab_size is the model's, which may have rows that no text is encoded to.
        self.may_end = torch.zeros(vocab_size, dtype=torch.bool, device=device)  # (V,)
        self.may_end[[*self.ids]] = True
        if last:
            self.may_end[[i for i in range(vocab_size) if last & set(tokenizer.token_bytes(i))]] = True

    def hit(self, action: Sequence[int]) -> bool:
        """Do the tokens of an action contain a stop string?"""
        text = b"".join(map(self.tokenizer.token_bytes, action)) if self.marks else b""
        return any(mark in text for mark in self.marks)


SLOTS = 32


class Batch:
    """The rows being decoded, and their cache: row number i of the cache belongs to tape number rows[i].

    Invariant, whenever `decode` is called: the cache has seen every token of a row's tape but the last.
    """

    def __init__(self, policy: Transformer, tapes: Tapes):
        self.policy, self.tapes = policy, tapes
        self.slots = 0  # tokens a row that the cache has room for
        self.device = tapes.tokens.device
        self.rows = torch.zeros(0, dtype=torch.int64, device=self.device)  # (R,)
        self.alive = torch.zeros(0, dtype=torch.bool, device=self.device)  # (R,) False: done, not yet cleared away
        self.seen = torch.zeros(0, dtype=torch.int64, device=self.device)  # (R,) tokens of the row in the cache
        self.cache = self._empty_cache(0)

    def _empty_cache(self, rows: int) -> KVCache:
        return KVCache(self.policy, rows, self.slots)

    def admit(self, rows: list[int], alike: Sequence[int]) -> None:
        """Take in new rows. One row of each prompt is prefilled; its cache is copied to the others with that prompt.

        alike : of all rows, the number of their prompt
        """
        first: dict[int, int] = {}  # prompt -> the row that is prefilled
        for row in rows:
            first.setdefault(alike[row], row)
        prefilled = torch.tensor(list(first.values()), device=self.device)
        self._reserve(int(self.tapes.lengths[prefilled].max()))
        cache = self._empty_cache(len(first))
        self._feed(cache, prefilled, torch.zeros_like(prefilled))
        if len(first) < len(rows):
            place = {prompt: i for i, prompt in enumerate(first)}
            copies = torch.tensor([place[alike[row]] for row in rows], device=self.device)
            cache = cache.select(copies, self.slots)
        self.cache = self.cache.join(cache) if len(self.rows) else cache
        new = torch.tensor(rows, device=self.device)
        self.rows = torch.cat((self.rows, new))
        self.seen = torch.cat((self.seen, self.tapes.lengths[new] - 1))
        self.alive = torch.cat((self.alive, torch.ones_like(new, dtype=torch.bool)))

    def fork(self, forks: Sequence[tuple[int, int, int]]) -> None:
        """Take in rows whose tapes are the first tokens of others' (parent, child, how many), with their caches.

        What the copy holds beyond those tokens lies behind the child's own position: nobody sees it, see `KVCache`.
        """
        if not forks:
            return
        place = {row: i for i, row in enumerate(self.rows.tolist())}
        parents, new, at = torch.tensor([[place[p], child, at] for p, child, at in forks], device=self.device).T
        self.cache = self.cache.join(self.cache.select(parents, self.slots))
        self.rows = torch.cat((self.rows, new))
        self.seen = torch.cat((self.seen, (at - 1).minimum(self.seen[parents])))
        self.alive = torch.cat((self.alive, torch.ones_like(new, dtype=torch.bool)))

    def _reserve(self, slots: int) -> None:
        """Room for that many tokens a row, in steps of SLOTS: each copies the cache, but a snug one is read faster."""
        if slots > self.slots:
            self.slots = -(-slots // SLOTS) * SLOTS
            self.cache = self.cache.resize(self.slots)

    def decode(self) -> Tensor | None:
        """Feed the last token of every row; logits of the next: (R, V). None on a stage without the head."""
        self._reserve(int(self.seen.max()) + 1)
        last = self.tapes.tokens[self.rows, self.seen]
        hidden = self.policy(last[:, None], self.seen[:, None], cache=self.cache)
        self.seen = self.seen + self.alive
        return self.policy.logits(hidden[:, -1]) if self.policy.has_head else None

    def living(self) -> Tensor | slice:
        """Which rows are not done: an index, or simply all."""
        return slice(None) if self.alive.all() else self.alive.nonzero()[:, 0]

    def settle(self, waiting: Tensor) -> None:
        """After a step: clear away rows that are done and not waiting (N,), and feed what was forced on the others."""
        kept = self.living()
        if isinstance(kept, Tensor):
            kept = (self.alive | waiting[self.rows]).nonzero()[:, 0]
        # When a quarter is done: copying the cache at every single end would cost more than it saves.
        if isinstance(kept, Tensor) and 4 * len(kept) <= 3 * len(self.rows):
            self.cache = self.cache.select(kept, self.slots)
            self.rows, self.seen, self.alive = self.rows[kept], self.seen[kept], self.alive[kept]
        behind = (self.alive & (self.seen < self.tapes.lengths[self.rows] - 1)).nonzero()[:, 0]
        if len(behind):
            self._reserve(int(self.tapes.lengths[self.rows].max()))
            part = self.cache.select(behind, self.slots)
            self._feed(part, self.rows[behind], self.seen[behind])
            self.cache.put(behind, part)
            self.seen[behind] = self.tapes.lengths[self.rows[behind]] - 1

    def _feed(self, cache: KVCache, rows: Tensor, seen: Tensor) -> None:
        """Show the cache tokens seen .. length - 2 of each row, in one pass.

        Rows differ in how many: a short one repeats its last token **at that token's own position**, which writes the
        same slot once more with the same value. No padding token ever enters the cache.
        """
        count = self.tapes.lengths[rows] - 1 - seen  # (R,)
        longest = int(count.max())
        if longest > 0:
            steps = torch.arange(longest, device=self.device)
            positions = (seen[:, None] + steps).minimum((self.tapes.lengths[rows] - 2)[:, None]).clamp_min(0)
            self.policy(self.tapes.tokens[rows[:, None], positions], positions, cache=cache)
