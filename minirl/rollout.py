"""The Rollout: everything that one batch of sampled (or demonstrated) rows carries from the environment to the loss.

One indexing convention, everywhere: `tokens` is (B, T); every other per-token tensor is (B, S) with S = T - 1, where
column s belongs to the prediction of tokens[:, s + 1]. Rows are padded on the right.

    prompt "1+2="  action "3" EOS      tokens       1  +  2  =  3  EOS
                                       action_mask     0  0  0  1  1

While rows are being written they are `Tapes`: what was forced, and what was chosen.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from minirl.config import UserError, usual_mode, write_text

if TYPE_CHECKING:
    from minirl.env.base import Step


@dataclass(frozen=True)
class Rollout:
    """B rows. Tensors that a stage has not computed yet are None; `replace` adds them and changes nothing in place."""

    tokens: Tensor  # (B, T) int64: prompt, every turn, padding on the right
    action_mask: Tensor  # (B, S) bool: the target token was chosen by the policy
    lengths: Tensor  # (B,) int64: real tokens of the row
    group: Tensor  # (B,) int64: number of the prompt that the row answers, over the whole run
    sample_ids: Tensor  # (B,) int64: number of the row, over the whole run; with the seed it fixes all its randomness
    old_logprobs: Tensor | None = None  # (B, S) nats, at sampling time; 0 where the policy chose nothing
    finished: Tensor | None = None  # (B,) bool: ended by itself, not cut at the limit
    rewards: Tensor | None = None  # (B,) from the environment, never overwritten
    advantages: Tensor | None = None  # (B, 1) or (B, S)
    ref_logprobs: Tensor | None = None  # (B, S) nats
    values: Tensor | None = None  # (B, S) from the critic, at sampling time
    returns: Tensor | None = None  # (B, S) what the critic should have said
    sampler_logprobs: Tensor | None = None  # (B, S) nats, as drawn, where old_logprobs are the trainer's own
    old_entropy: Tensor | None = None  # (B, S) nats, under the policy before its first update on these rows
    alone_logprobs: Tensor | None = None  # (B, S) nats, of the answer without its prompt
    weights: Tensor | None = None  # (B, S) factor of each token's policy loss
    slack: Tensor | None = None  # (B, S) by how much further than eps each token's ratio may go
    pseudo_rewards: Tensor | None = None  # (B,) what stands in for rewards where nobody knows what is right
    anchors: Tensor | None = None  # (B, S) price of each token's |logprobs - old_logprobs|, in nats
    expert: Tensor | None = None  # (B,) bool: an expert wrote the row, and not the policy
    parent: Tensor | None = None  # (B,) int64: sample id of the row that this one branched off; its own id: of none
    shared: Tensor | None = None  # (B,) int64: tokens that it took over from there; 0: none
    begins: Tensor | None = None  # (B,) int64, of a row set aside: where its last action begins; -1: it is over
    gains: Tensor | None = None  # (B, S) what the segment of each token added to the belief in the right answer
    vectors: Tensor | None = None  # (B, S, D) stand-ins for the gradient of each token
    prompt_tokens: Tensor | None = None  # (B,) int64: action tokens of all rows of this row's prompt
    documents: Tensor | None = None  # (B, T) int64, of packed rows: which document each token belongs to
    row_tokens: Tensor | None = None  # (B,) int64: action tokens of the whole row, where there are only some columns
    texts: list[str] = field(default_factory=list)  # what followed the prompt, tool output included
    turns: list[list[Step]] = field(default_factory=list)  # the environment's replies

    def __len__(self) -> int:
        return len(self.tokens)

    def replace(self, **changes) -> Rollout:
        return dataclasses.replace(self, **changes)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are there, by name."""
        named = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    def rows(self, index: Tensor) -> Rollout:
        """The rows `index` (R,), in that order, cut to the longest of them: padding costs time, never a result."""
        T = int(self.lengths[index].max()) if len(index) else 1
        picked = {name: value[index] for name, value in self.tensors().items()}
        for name, value in picked.items():
            if value.dim() > 1 and value.shape[1] > 1:
                picked[name] = value[:, : T if name in ("tokens", "documents") else T - 1]
        order = index.tolist()
        return Rollout(**picked, texts=[self.texts[i] for i in order if self.texts],
                       turns=[self.turns[i] for i in order if self.turns])

    def acting(self) -> Rollout:
        """The rows with an action to train on: the others add nothing to a sum over actions, and their passes nothing
        but time. If there is none, one row, so that there is something to add up."""
        kept = self.acting_rows()
        return self if len(kept) == len(self) else self.rows(kept)

    def acting_rows(self) -> Tensor:
        """The numbers (R,) of these rows."""
        kept = self.action_mask.any(1).nonzero()[:, 0]
        return kept if len(kept) else torch.arange(min(1, len(self)), device=kept.device)

    def columns(self, columns: slice) -> Rollout:
        """Some columns of every (B, S) tensor. What belongs to whole rows stays, and so do tokens and documents."""
        S = self.action_mask.shape[1]
        return self.replace(**{name: value[:, columns] for name, value in self.tensors().items()
                               if value.dim() == 2 and value.shape[1] == S})

    def to(self, device: torch.device | str) -> Rollout:
        return self.replace(**{name: value.to(device) for name, value in self.tensors().items()})

    def split(self, size: int) -> Sequence[Tensor]:
        """Row numbers in pieces of at most `size`, rows of similar length together."""
        return torch.argsort(self.lengths, stable=True).split(size) if len(self) else ()

    def microbatches(self, size: int) -> Iterator[Rollout]:
        """The pieces of `split` as Rollouts. Their gradients add up to the whole's, whatever the size."""
        return (self.rows(index) for index in self.split(size))

    def minibatches(self, count: int, epochs: int = 1) -> Iterator[Rollout]:
        """Deal the rows into `count` minibatches, one optimizer update each, `epochs` times over.

        Dealt round-robin by sample id: each gets its share of every prompt, and the same rows however many ranks
        the samples are spread over.
        """
        for _ in range(epochs):
            for i in range(count):
                yield self.rows((self.sample_ids % count == i).nonzero()[:, 0]) if count > 1 else self

    def save(self, file: str | Path) -> None:
        """The tensors as safetensors, and beside them the turns, for `minirl.view` and for credit over turns.

        FILE.jsonl: one object a row, {"sample": id, "steps": [[observation, reward, info, action], ...]}.
        """
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        save_file({name: value.contiguous() for name, value in self.tensors().items()}, str(file))
        usual_mode(file)
        if self.turns:
            rows = [{"sample": sample, "steps": [[s.observation, s.reward, s.info, s.action] for s in steps]}
                    for sample, steps in zip(self.sample_ids.tolist(), self.turns, strict=True)]
            write_text(Path(file).with_suffix(".jsonl"), "".join(json.dumps(row, default=str) + "\n" for row in rows))

    @staticmethod
    def load(path: str | Path) -> Rollout:
        """A file that `save` wrote, or a folder with the file of each rank, in the order of the sample ids."""
        files = sorted(Path(path).glob("rank_*.safetensors")) if Path(path).is_dir() else [Path(path)]
        if not files or not files[0].is_file():
            raise UserError(f"no rollout at {path}: write one with --save-rollouts")
        try:
            parts = [load_file(str(file)) for file in files]
        except SafetensorError as error:
            raise UserError(f"{path} is no saved rollout ({error}): write one with --save-rollouts") from None
        names = [f.name for f in dataclasses.fields(Rollout)]
        if not set(names[:5]) <= parts[0].keys() <= set(names):
            raise UserError(f"{path} holds no rollout but {sorted(parts[0])[:3]}: write one with --save-rollouts")
        rollout = Rollout.join([Rollout(**part) for part in parts])
        told = [file.with_suffix(".jsonl") for file in files]
        if all(file.is_file() for file in told):
            rollout = rollout.replace(turns=_read_turns(told, rollout))
        return rollout.rows(rollout.sample_ids.argsort())

    @staticmethod
    def load_sampled(path: str | Path, vocab_size: int) -> Rollout:
        """The same, to train on: what was sampled and earned, and nothing that a step has made of it since.

        UserError: other rows, such as pairs; tokens beyond the vocabulary
        """
        rollout = Rollout.load(path)
        absent = [name for name in ("old_logprobs", "finished", "rewards") if getattr(rollout, name) is None]
        if absent or not len(rollout):
            raise UserError(f"{path} holds no answers that a policy sampled, for {', '.join(absent) or 'rows'} are not "
                            "there: write a rollout with --save-rollouts")
        rollout.check_vocabulary(vocab_size, path)
        return Rollout(rollout.tokens, rollout.action_mask, rollout.lengths, rollout.group, rollout.sample_ids,
                       rollout.old_logprobs, rollout.finished, rollout.rewards, turns=rollout.turns)

    def check_vocabulary(self, vocab_size: int, source: str | Path) -> None:
        """UserError for tokens, read from `source`, that a model of this vocabulary does not know."""
        if len(self) and (token := int(self.tokens.max())) >= vocab_size:
            raise UserError(f"{source} has the token {token}, but the model's vocabulary only {vocab_size}: it was "
                            "written with another tokenizer")

    @staticmethod
    def join(parts: Sequence[Rollout]) -> Rollout:
        """The rows of several Rollouts in one, one behind the other, padded to the longest."""
        T = max(part.tokens.shape[1] for part in parts)
        joined = {}
        for name in parts[0].tensors():
            values = [getattr(part, name) for part in parts]
            if name in ("tokens", "documents"):
                values = [F.pad(value, (0, T - value.shape[1])) for value in values]
            elif values[0].dim() == 2 and any(value.shape[1] > 1 for value in values):  # not (B, 1): one number a row
                values = [F.pad(value, (0, T - 1 - value.shape[1])) for value in values]
            joined[name] = torch.cat(values)
        return Rollout(**joined, texts=[text for part in parts for text in part.texts],
                       turns=[turn for part in parts for turn in part.turns])


def _read_turns(files: Sequence[Path], rollout: Rollout) -> list[list[Step]]:
    """The turns of the rows, in their order, from the JSONL files that `save` wrote."""
    from minirl.env.base import Step  # which is about rollouts itself

    rows = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    steps = {row["sample"]: row["steps"] for row in rows}
    ended = [True] * len(rollout) if rollout.finished is None else rollout.finished.tolist()
    return [[Step(observation, reward, end and k == len(steps[sample]) - 1, info, *action)
             for k, (observation, reward, info, *action) in enumerate(steps[sample])]
            for sample, end in zip(rollout.sample_ids.tolist(), ended, strict=True)]


class Tapes:
    """Rows while they are being written: their tokens so far, and which of them the policy chose.

    All rows lie in one (N, width) buffer that grows when a row outgrows it. This is the only place where per-token
    things are kept beside their own token; `rollout` shifts them once to the (B, S) convention.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], width: int, pad_id: int, dtype: torch.dtype = torch.float32,
                 device: torch.device | str = "cpu"):
        self.pad_id = pad_id
        self.lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)  # (N,)
        longest = max(map(len, prompts))
        width = max(width, longest)
        padded = [[*prompt, *[pad_id] * (longest - len(prompt))] for prompt in prompts]
        self.tokens = F.pad(torch.tensor(padded, device=device), (0, width - longest), value=pad_id)  # (N, width)
        self.chosen = torch.zeros(len(prompts), width, dtype=torch.bool, device=device)
        self.logprobs = torch.zeros(len(prompts), width, dtype=dtype, device=device)
        self.finished = torch.zeros(len(prompts), dtype=torch.bool, device=device)

    def extend(self, row: int, tokens: Sequence[int], chosen: bool) -> None:
        """Append several tokens to one row: forced (prompt, tool output), or chosen by an expert."""
        start, end = int(self.lengths[row]), int(self.lengths[row]) + len(tokens)
        self._reserve(end)
        self.tokens[row, start:end] = torch.tensor(tokens, device=self.tokens.device)
        self.chosen[row, start:end] = chosen
        self.lengths[row] = end

    def append(self, rows: Tensor, tokens: Tensor, logprobs: Tensor) -> None:
        """Append one sampled token to each of `rows` (R,), with the log-probability it had."""
        at = self.lengths[rows]  # (R,)
        self._reserve(int(at.max()) + 1)
        self.tokens[rows, at] = tokens
        self.logprobs[rows, at] = logprobs.to(self.logprobs.dtype)
        self.chosen[rows, at] = True
        self.lengths[rows] = at + 1

    def copy(self, source: int, row: int, length: int) -> None:
        """Make `row` the first `length` tokens of another row."""
        for x in (self.tokens, self.chosen, self.logprobs):
            x[row, :length], x[row, length:] = x[source, :length].clone(), self.pad_id if x is self.tokens else 0
        self.lengths[row] = length

    def read(self, rows: Tensor) -> list[list[int]]:
        """The tokens so far of each of `rows` (R,)."""
        padded, lengths = self.tokens[rows].tolist(), self.lengths[rows].tolist()
        return [tape[:length] for tape, length in zip(padded, lengths, strict=True)]

    def _reserve(self, width: int) -> None:
        extra = width - self.tokens.shape[1]
        if extra > 0:
            extra = max(extra, self.tokens.shape[1] // 2)  # grow by half: few copies, little waste
            self.tokens = F.pad(self.tokens, (0, extra), value=self.pad_id)
            self.chosen, self.logprobs = F.pad(self.chosen, (0, extra)), F.pad(self.logprobs, (0, extra))

    @torch.inference_mode(False)  # what is copied here may take part in autograd, wherever the tapes were written
    def rollout(self, first_id: int, group_size: int) -> Rollout:
        """The rows as a Rollout. Row r is sample first_id + r and answers prompt (first_id + r) // group_size."""
        T = int(self.lengths.max())
        ids = torch.arange(first_id, first_id + len(self.lengths), device=self.lengths.device)
        return Rollout(
            tokens=self.tokens[:, :T].clone(),
            action_mask=self.chosen[:, 1:T].clone(),
            lengths=self.lengths.clone(),
            group=ids // group_size,
            sample_ids=ids,
            old_logprobs=self.logprobs[:, 1:T].clone(),
            finished=self.finished.clone(),
        )
