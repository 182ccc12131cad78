"""Pairs of answers, one preferred to the other: read from a file, or sampled in an environment.

Files hold a JSON object a line, in TRL's formats, unchanged:

    {"prompt": "2+2=", "chosen": "4", "rejected": "5"}                           three texts, or three lists of messages
    {"chosen": "2+2=4", "rejected": "2+2=5"}                                     the prompt is what both begin with
    {"chosen": [{"role": "user", ...}, {"role": "assistant", ...}], "rejected": [...]}     as messages

A column `margin`, or `score_chosen` and `score_rejected`, says how much better the chosen answer is. The tools and
chat_template_kwargs of a row mean what they mean in SFT; other columns are not looked at.

`sample_pairs` asks a policy: it answers each problem several times, the environment judges, and the best answer is
paired with the worst. So the toy tasks need no file.

Either way the pairs are one Rollout, row 2i the chosen answer of pair i and row 2i + 1 the rejected one; what the model
said is in `action_mask`, and `rewards` hold the scores, if there are any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minirl.chat import speak
from minirl.config import UserError, check_not_negative, check_positive
from minirl.data.dataset import collate, read_split
from minirl.data.sft import Row, encode_row
from minirl.env.base import Env, counter_random
from minirl.env.loop import collect
from minirl.model import Transformer
from minirl.pairs import rows_of, with_reference
from minirl.parallel.context import gather_rollouts
from minirl.parallel.mesh import Mesh
from minirl.parallel.zero import gathered
from minirl.rollout import Rollout
from minirl.tokenizer import Tokenizer


@dataclass(frozen=True)
class PairOptions:
    """Of train_dpo.py."""

    # pairs
    task: str = "addition"  # a task of train_grpo.py: pairs are sampled; jsonl: they are the rows of --data
    data: str = ""  # gsm8k: JSONL of {"question", "answer"}; jsonl: of prompt, chosen and rejected, or the last two
    eval_data: str = ""  # JSONL file of held-out rows; empty: a tenth of --data
    template: str = "auto"  # chat template of messages; auto: the model's own
    drop_long_rows: bool = False  # leave out problems or pairs that do not fit the model's context
    difficulty: int = 2  # digits of an operand
    problems: int = 8192  # problems that the first model answers
    eval_problems: int = 500  # held-out problems that it answers; and, greedily, the trained one
    samples: int = 8  # answers to each; the best and the worst are a pair
    pairs_per_problem: int | None = None  # most pairs of a problem, the best answer with so many of the worst; none: 1,
                                          # 4 for a reward model
    temperature: float = 1.0  # of these answers
    max_new_tokens: int = 0  # longest answer, all turns together; 0: the task's own
    max_rows: int = 4096  # rows decoded at once
    pairs: str = ""  # folder of pairs that another run has sampled (runs/dpo/pairs), in place of all that
    flip_labels: float = 0.0  # share of pairs whose two answers are exchanged, to see what a loss makes of it


def check_pairs(config: PairOptions) -> None:
    """UserError for an option that cannot be."""
    check_positive(config, "problems", "eval_problems", "pairs_per_problem", "temperature", "max_rows")
    check_not_negative(config, "max_new_tokens", "flip_labels")
    if config.samples < 2:
        raise UserError(f"--samples {config.samples}: a pair is made of two answers, so take at least 2")
    if config.flip_labels > 1:
        raise UserError(f"--flip-labels is {config.flip_labels}: a share lies between 0 and 1")
    if config.pairs and config.task == "jsonl":
        raise UserError(f"--pairs {config.pairs} and --task jsonl: pairs come from one of the two")


class Pair(NamedTuple):
    chosen: Row
    rejected: Row
    scores: tuple[float, float] | None = None  # of the two; None: the row tells nothing but the order


# ---- from a file ----

def read_preferences(data: str, eval_data: str, tokenizer: Tokenizer, template: str, seed: int = 0) -> Preferences:
    """The pairs of a JSONL file; without `eval_data` its last tenth is held out.

    template : name of the chat template for messages; "auto": the tokenizer's own, or plain
    """
    train, held_out, used = read_split(data, eval_data, tokenizer, template, encode_pair,
                                       lambda row: isinstance(row.get("chosen"), list), "prompt, chosen and rejected")
    return Preferences(stack(train, tokenizer.pad_id), stack(held_out, tokenizer.pad_id), tokenizer.pad_id, seed, used)


def encode_pair(row: dict[str, Any], place: str, tokenizer: Tokenizer, template: str) -> Pair:
    """One row as two rows of tokens. UserError with its place, FILE:LINE: none of the formats, or nothing to prefer."""
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if type(chosen) not in (str, list) or type(chosen) is not type(rejected):
        kinds = f"chosen is a {type(chosen).__name__} and rejected a {type(rejected).__name__}"
        raise UserError(f"{place}: {kinds}: both must be texts, or lists of messages; the row's columns are "
                        f"{', '.join(map(repr, [*row][:9]))}")
    if chosen == rejected:
        raise UserError(f"{place}: chosen and rejected are the same, so the pair prefers nothing; remove it")
    prompt = row.get("prompt")
    if prompt is None:
        count = common_prefix(chosen, rejected)
        prompt, chosen, rejected = chosen[:count], chosen[count:], rejected[count:]
    extras = {name: row[name] for name in ("tools", "chat_template_kwargs") if name in row}
    rows = []
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if not answer or (isinstance(answer, list) and not any(map(says_something, answer))):
            raise UserError(f"{place}: {name} is empty behind the prompt: there is nothing to compare; remove it")
        rows.append(encode_row({"prompt": prompt, "completion": answer} | extras, f"{place} ({name})", tokenizer,
                               template))
    if rows[0].tokens == rows[1].tokens:
        raise UserError(f"{place}: chosen and rejected are the same tokens, so the pair prefers nothing; remove it")
    return Pair(*rows, read_scores(row, place))


def says_something(message: Any) -> bool:
    """False for the empty answer of a conversation: a turn of the model without a word or a call of a tool."""
    said = ("content", "reasoning_content", "tool_calls")
    return not isinstance(message, dict) or any(message.get(key) for key in said)


def common_prefix(chosen: str | list, rejected: str | list) -> int:
    """How many characters, or messages, both begin with. A space before the first difference belongs to the answers,
    where most tokenizers expect it."""
    count = 0
    while count < min(len(chosen), len(rejected)) and chosen[count] == rejected[count]:
        count += 1
    return count - 1 if count and chosen[count - 1] == " " else count


def read_scores(row: dict[str, Any], place: str) -> tuple[float, float] | None:
    """The scores of chosen and rejected in a row of data, or a margin as (margin, 0.0); None: there are none."""
    given = {name: row[name] for name in ("margin", "score_chosen", "score_rejected") if row.get(name) is not None}
    if strange := [name for name, value in given.items() if type(value) not in (int, float) or not isfinite(value)]:
        raise UserError(f"{place}: {strange[0]} is {given[strange[0]]!r:.40}, not a finite number")
    if "margin" in given:
        return float(given["margin"]), 0.0
    return (float(given["score_chosen"]), float(given["score_rejected"])) if len(given) == 2 else None


def stack(pairs: Sequence[Pair], pad_id: int) -> Rollout:
    """Pairs as a Rollout; `rewards` only if all have scores."""
    rollout = collate([row for pair in pairs for row in (pair.chosen, pair.rejected)], pad_id)
    rewards = None
    if all(pair.scores for pair in pairs):
        rewards = torch.tensor([score for pair in pairs for score in pair.scores])
    return rollout.replace(group=rollout.sample_ids // 2, rewards=rewards)


# ---- from an environment ----

def sample_preferences(policy: Transformer, tokenizer: Tokenizer, env: Env, config: PairOptions, seed: int,
                       mesh: Mesh) -> Preferences:
    """What the policy's answers to problems of both splits give, for a run of train_dpo.py."""
    parts = [sample_pairs(policy, tokenizer, env, problems, config.samples, config.pairs_per_problem, split, mesh,
                          max_new_tokens=config.max_new_tokens or env.max_new_tokens, temperature=config.temperature,
                          max_rows=config.max_rows, seed=seed)
             for split, problems in (("train", config.problems), ("eval", config.eval_problems))]
    return Preferences(*parts, tokenizer.pad_id, seed)


def sample_pairs(policy: Transformer, tokenizer: Tokenizer, env: Env, problems: int, samples: int, most: int,
                 split: str, mesh: Mesh, **sampling: Any) -> Rollout:
    """`samples` answers to each of the split's first `problems`, made into at most `most` pairs each.

    sampling : passed to `generate` (max_new_tokens, temperature, seed, max_rows)
    returns  : the same pairs on every rank, on the CPU. UserError: there is none, for all answers score alike
    """
    mine, rollout = mesh.portion(min(problems, env.size(split) or problems)), None
    with gathered(policy):
        if mine:
            examples = env.sample(len(mine), start=mine.start, split=split)
            rollout = collect(policy, tokenizer, env, examples, samples, mine.start, **sampling)
            rollout = best_and_worst(rollout, most)
    pairs = gather_rollouts(rollout, mesh.data_group)
    if not len(pairs):
        raise UserError(f"{problems} problems of {env.name}, answered {samples} times each, gave no pair: the answers "
                        "to each were all right or all wrong; sample more, or start from a better or a worse model")
    ids = torch.arange(len(pairs))
    return pairs.replace(group=ids // 2, sample_ids=ids)


def best_and_worst(rollout: Rollout, most: int = 1) -> Rollout:
    """Of each prompt the answer with the highest reward, paired with the one with the lowest; of equals the first.

    most : pair it with so many of the lowest, each another text; none that has the highest reward as well. So a prompt
           whose rewards are all equal gives nothing. An answer that was cut at the limit has no EOS, here as elsewhere
    """
    rewards, picked = rollout.rewards.tolist(), []
    texts = [tuple(row[:length]) for row, length in zip(rollout.tokens.tolist(), rollout.lengths.tolist())]
    prompts: dict[int, list[int]] = {}
    for row, prompt in enumerate(rollout.group.tolist()):
        prompts.setdefault(prompt, []).append(row)
    for rows in prompts.values():
        best = max(rows, key=lambda row: rewards[row])
        worse = {texts[row]: row for row in sorted(rows, key=lambda row: (-rewards[row], -row))  # the first one stays
                 if rewards[row] < rewards[best]}
        for row in sorted(worse.values(), key=lambda row: (rewards[row], row))[:most]:
            picked += [best, row]
    kept = Rollout(rollout.tokens, rollout.action_mask, rollout.lengths, rollout.group, rollout.sample_ids,
                   rewards=rollout.rewards)
    return kept.rows(torch.tensor(picked, dtype=torch.int64, device=rollout.tokens.device))


# ---- to the trainer ----

class Preferences:
    """Pairs to learn and pairs held out, epoch after epoch, each epoch in its own seeded order.

    train, held_out : Rollouts of pairs
    template        : of the messages among them; "": there are none
    """

    def __init__(self, train: Rollout, held_out: Rollout, pad_id: int, seed: int = 0, template: str = ""):
        self.train, self.held_out, self.pad_id, self.seed, self.template = train, held_out, pad_id, seed, template
        self._order = lru_cache(2)(self._epoch)  # a batch may reach into the next epoch

    @staticmethod
    def load(folder: str | Path, tokenizer: Tokenizer, seed: int = 0) -> Preferences:
        """What `save` wrote. UserError: something else, or with another tokenizer."""
        parts = []
        for file in (Path(folder) / f"{name}.safetensors" for name in ("train", "eval")):
            if not file.is_file():
                raise UserError(f"{folder} holds no pairs, for {file.name} is not there: give the folder pairs of a "
                                "run of train_dpo.py")
            parts.append(Rollout.load(file))
            if len(parts[-1]) % 2 or not torch.equal(parts[-1].group[0::2], parts[-1].group[1::2]):
                raise UserError(f"{file} holds rows that are no pairs: give the folder pairs of a run of train_dpo.py")
            parts[-1].check_vocabulary(tokenizer.vocab_size, file)
        return Preferences(*parts, tokenizer.pad_id, seed)

    def save(self, folder: str | Path) -> None:
        for name, pairs in (("train", self.train), ("eval", self.held_out)):
            pairs.save(Path(folder) / f"{name}.safetensors")

    def size(self) -> int:
        """Pairs to learn."""
        return len(self.train) // 2

    def fit(self, context: int, drop: bool = False) -> Preferences:
        """The same in rows of at most `context` tokens; UserError for a longer one. `drop` leaves out its pair."""
        kept = []
        for pairs in (self.train, self.held_out):
            fits = (pairs.lengths <= context).view(-1, 2).all(1)
            if not fits.all() and not drop:
                raise UserError(f"{int((~fits).sum())} of {len(fits)} pairs do not fit the model's context of "
                                f"{context} tokens: the longest has {int(pairs.lengths.max())}: leave them out with "
                                "--drop-long-rows, or use a model with a longer context")
            kept.append(pairs.rows(rows_of(fits.nonzero()[:, 0])))
        if not all(map(len, kept)):
            raise UserError(f"no pair {'held out' if len(kept[0]) else 'to learn'} fits the context of {context} "
                            "tokens: use a model with a longer context")
        return Preferences(*kept, self.pad_id, self.seed, self.template)

    def flipped(self, share: float) -> Preferences:
        """The same with the two answers exchanged in a share of the pairs to learn: an experiment with wrong labels."""
        flips = torch.tensor([counter_random(self.seed, "flip", i).random() < share for i in range(self.size())])
        order = rows_of(torch.arange(self.size())).view(-1, 2)
        order = torch.where(flips[:, None], order.flip(1), order).flatten()
        return Preferences(self.train.rows(order), self.held_out, self.pad_id, self.seed, self.template)

    def replace(self, **changes: Rollout) -> Preferences:
        return Preferences(changes.get("train", self.train), changes.get("held_out", self.held_out), self.pad_id,
                           self.seed, self.template)

    def numbers(self, first: int, count: int) -> Tensor:
        """(count,) int64: which pairs stand at places first .. first + count - 1 of the endless stream."""
        places = (divmod(index, self.size()) for index in range(first, first + count))
        return torch.tensor([self._order(epoch)[place] for epoch, place in places], dtype=torch.int64)

    def batch(self, numbers: Tensor) -> Rollout:
        """Both rows of each of these pairs to learn."""
        return self.train.rows(rows_of(numbers))

    def _epoch(self, epoch: int) -> list[int]:
        return counter_random(self.seed, "epoch", epoch).sample(range(self.size()), self.size())


def ready_pairs(config: Any, start_folder: Path | None, tokenizer: Tokenizer) -> Preferences | None:
    """Pairs that are there before the policy answers anything: of a file, of another run, of the run that goes on."""
    if config.task == "jsonl":
        data = read_preferences(config.data, config.eval_data, tokenizer, config.template, config.seed)
        speak(tokenizer, data.template)
    elif start_folder or config.pairs:
        folder = Path(config.run_dir) / "pairs" if start_folder else config.pairs
        data = Preferences.load(folder, tokenizer, config.seed)
    else:
        return None
    if config.margins and data.train.rewards is None:
        raise UserError(f"--margins needs a score of each answer, and {config.data} has none: add a column margin, or "
                        "score_chosen and score_rejected")
    return data


# ---- what a frozen reference says about them ----

def ask_reference(frozen: Callable[[], AbstractContextManager[Transformer]] | None, data: Preferences, config: Any,
                  context: int, mesh: Mesh) -> tuple[Preferences, Rollout | None]:
    """(the pairs held out with ref_logprobs, and with --precompute-ref those to learn; KTO's `mismatched` rows).

    frozen : opens the reference, as a context; None: a uniform one, which can say all at once
    """
    with (frozen or nullcontext)() as reference:  # here, so that no name holds on to its memory
        ask = partial(with_reference, reference, microbatch_size=2 * config.microbatch_size, mesh=mesh)
        data = data.replace(held_out=ask(data.held_out))
        others = ask(mismatched(data.train, data.pad_id, context)) if config.loss == "kto" else None
        if config.precompute_ref or reference is None:
            data = data.replace(train=ask(data.train))
    return data, others


def mismatched(pairs: Rollout, pad_id: int, context: int) -> Rollout:
    """Row i: the prompt of pair i with the chosen answer of pair i + 1, (N,) rows, of at most `context` tokens.

    What answers to other questions cost the policy more than the reference is KTO's estimate of their KL, z0.
    """
    tokens, lengths = pairs.tokens[::2].tolist(), pairs.lengths[::2].tolist()
    starts = (pairs.action_mask[::2].int().argmax(1) + 1).tolist()
    masks = pairs.action_mask[::2].tolist()
    rows = []
    for i, start in enumerate(starts):
        j = (i + 1) % len(starts)
        prompt, answer = tokens[i][:start], tokens[j][starts[j] : lengths[j]]
        said = masks[j][starts[j] - 1 : lengths[j] - 1]
        rows.append(Row((prompt + answer)[:context], ([False] * start + said)[:context]))
    return collate(rows, pad_id)
