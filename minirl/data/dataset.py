"""Where the batches of SFT come from: a file of rows, or an environment's expert.

Both answer `batch(first, count)`: rows number first .. first + count - 1 of an endless stream, a pure function of the
seed and the number. A resumed run therefore needs one integer, and each rank takes its own slice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import torch

from minirl.config import UserError
from minirl.data.jsonl import read_jsonl
from minirl.data.sft import Row, encode_row, is_conversation, pack
from minirl.env.base import Env, Example, counter_random, sample_rows
from minirl.env.loop import demonstrate, fit_to_context, longest_row
from minirl.jinja_templates import template_for
from minirl.logprobs import shift_mask
from minirl.rollout import Rollout
from minirl.tokenizer import Tokenizer

Encoded = TypeVar("Encoded")
POOL = 50  # batches in which rows of similar length are put together


class Demonstrations:
    """An environment's expert: problems without end, or the rows of its file.

    rows : only the first so many problems, epoch after epoch in an order that `seed` gives; 0: whatever the task has
    """

    def __init__(self, env: Env, tokenizer: Tokenizer, rows: int = 0, seed: int = 0):
        self.env, self.tokenizer, self.rows, self.seed = env, tokenizer, rows, seed

    def longest(self) -> int:
        return longest_row(self.env, self.tokenizer)

    def fit(self, context: int, drop: bool = False) -> Demonstrations:
        """The same in rows of at most `context` tokens; UserError for a longer one, which `drop` leaves out."""
        env = fit_to_context(self.env, self.tokenizer, context, drop, solutions=True)
        return Demonstrations(env, self.tokenizer, self.rows, self.seed)

    def size(self, split: str) -> int | None:
        size = self.env.size(split)
        return min(self.rows, size or self.rows) if split == "train" and self.rows else size

    @cached_property
    def _finite(self) -> list[Example]:
        return self.env.sample(self.size("train"))

    def batch(self, first: int, count: int) -> Rollout:
        examples = sample_rows(self._finite, self.seed, count, first) if self.rows else self.env.sample(count, first)
        return demonstrate(self.tokenizer, self.env, examples, first)

    def held_out(self, first: int, count: int) -> Rollout:
        return demonstrate(self.tokenizer, self.env, self.env.sample(count, start=first, split="eval"), first)


def read_rows(data: str, eval_data: str, tokenizer: Tokenizer, template: str, seed: int, batch_size: int,
              train_rows: int = 0) -> Rows:
    """The rows of a JSONL file in the formats of data/sft.py; without `eval_data` its last tenth is held out.

    template   : name of the chat template for messages; "auto": the tokenizer's own, or plain
    train_rows : learn only the first so many of the others; 0: all
    """
    rows, held_out, used = read_split(data, eval_data, tokenizer, template, encode_row, is_conversation,
                                      "messages, of prompt and completion, or of text")
    return Rows(rows[: train_rows or None], held_out, tokenizer.pad_id, seed, batch_size, used)


def read_split(data: str, eval_data: str, tokenizer: Tokenizer, template: str, encode: Callable[..., Encoded],
               talks: Callable[[dict[str, Any]], bool], columns: str) -> tuple[list[Encoded], list[Encoded], str]:
    """(rows to learn, rows held out, template in use) of JSONL files, each row as `encode(row, place, tokenizer,
    template)` makes it. Without `eval_data` the last tenth is held out.

    talks   : does a row hold messages? Then there is a template in use, else ""
    columns : what rows are made of, for whoever gave no file
    """
    if not data:
        raise UserError(f"--task jsonl reads a file: give --data FILE, rows of {columns}")
    files = [read_jsonl(path) for path in (data, eval_data) if path]
    if template != "auto" or any(talks(row) for file in files for _, row in file):
        template = template_for(tokenizer, template)
    rows, *held_out = ([encode(row, place, tokenizer, template) for place, row in file] for file in files)
    if len(rows) < 2 and not eval_data:
        raise UserError(f"{data} has one row, and none is left to hold out: add rows, or give --eval-data FILE")
    tenth = max(1, len(rows) // 10)
    rows, held_out = (rows, held_out[0]) if eval_data else (rows[:-tenth], rows[-tenth:])
    return rows, held_out, "" if template == "auto" else template


class Rows:
    """Tokenised rows, epoch after epoch, each epoch in its own seeded order.

    train, held_out : rows to learn, and rows whose loss is only measured
    batch_size      : rows of an update; 0: any row may follow any other. Else each batch is made of rows of similar
                      length, out of a shuffled pool of POOL batches, and the batches come in random order
    template        : of the messages among them; "": there are none
    """

    env = None  # nobody to answer: there is a loss to measure, and no accuracy

    def __init__(self, train: Sequence[Row], held_out: Sequence[Row], pad_id: int, seed: int = 0, batch_size: int = 0,
                 template: str = ""):
        self.train, self.eval, self.pad_id, self.seed, self.batch_size = train, held_out, pad_id, seed, batch_size
        self.template = template
        self._order = lru_cache(2)(self._epoch)  # a batch may reach into the next epoch

    def longest(self) -> int:
        return max(len(row.tokens) for row in (*self.train, *self.eval))

    def fit(self, context: int, drop: bool = False) -> Rows:
        """The same in rows of at most `context` tokens; UserError for a longer one, which `drop` leaves out."""
        long = [row for row in (*self.train, *self.eval) if len(row.tokens) > context]
        if long and not drop:
            raise UserError(f"{len(long)} rows do not fit the model's context of {context} tokens, the longest has "
                            f"{self.longest()}: leave them out with --drop-long-rows, or use a model with a longer "
                            "context")
        train, held_out = ([row for row in rows if len(row.tokens) <= context] for rows in (self.train, self.eval))
        if not train or not held_out:
            raise UserError(f"no row {'to learn' if held_out else 'held out'} fits the model's context of {context} "
                            "tokens: use a model with a longer context")
        return Rows(train, held_out, self.pad_id, self.seed, self.batch_size, self.template)

    def packed(self, window: int) -> Rows:
        """The rows to learn in full windows: fixed for the run, and every epoch has its own order of them.

        The held-out rows stay as they are, so that the same rows are measured with packing and without.
        """
        return Rows(pack(self.train, window), self.eval, self.pad_id, self.seed, template=self.template)

    def size(self, split: str) -> int:
        return len(self.train if split == "train" else self.eval)

    def batch(self, first: int, count: int) -> Rollout:
        places = [divmod(index, len(self.train)) for index in range(first, first + count)]
        return collate([self.train[self._order(epoch)[place]] for epoch, place in places], self.pad_id, first)

    def held_out(self, first: int, count: int) -> Rollout:
        return collate(self.eval[first : first + count], self.pad_id, first)

    def prompts(self, count: int) -> list[list[int]]:
        """What comes before the first token that is learnt, in the first `count` held-out rows that begin so."""
        prompts = [row.tokens[: row.mask.index(True)] for row in self.eval]
        return [prompt for prompt in prompts if prompt][:count]

    def _epoch(self, epoch: int) -> list[int]:
        rng = counter_random(self.seed, "epoch", epoch)
        order, size = rng.sample(range(len(self.train)), len(self.train)), self.batch_size
        if not size:
            return order
        head = -epoch * len(order) % size  # rows of the batch that the last epoch began: borders are not batches'
        tail = len(order) - (len(order) - head) % size
        pools = (order[start : min(start + POOL * size, tail)] for start in range(head, tail, POOL * size))
        ranked = [i for part in pools for i in sorted(part, key=lambda i: len(self.train[i].tokens))]
        batches = [ranked[start : start + size] for start in range(0, len(ranked), size)]
        rng.shuffle(batches)  # ascending lengths would be a curriculum that nobody asked for
        return [*order[:head], *(i for batch in batches for i in batch), *order[max(head, tail):]]


def collate(rows: Sequence[Row], pad_id: int, first: int = 0) -> Rollout:
    """Rows padded on the right to the longest; row number i is sample first + i.

    `documents` (B, T) is there when some row was packed: 0, 1, 2 ... along the row.
    """
    lengths = torch.tensor([len(row.tokens) for row in rows])
    T = int(lengths.max())
    tokens = torch.full((len(rows), T), pad_id)
    mask = torch.zeros(len(rows), T, dtype=torch.bool)
    documents = torch.zeros(len(rows), T, dtype=torch.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row.tokens)] = torch.tensor(row.tokens)
        mask[i, : len(row.tokens)] = torch.tensor(row.mask)
        numbers = torch.arange(len(row.documents) or 1).repeat_interleave(
            torch.tensor(row.documents or [len(row.tokens)]))
        documents[i, : len(row.tokens)], documents[i, len(row.tokens) :] = numbers, numbers[-1]
    ids = torch.arange(first, first + len(rows))
    packed = any(len(row.documents) > 1 for row in rows)
    return Rollout(tokens=tokens, action_mask=shift_mask(mask, documents), lengths=lengths, group=ids, sample_ids=ids,
                   documents=documents if packed else None)
