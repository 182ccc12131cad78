"""GSM8K (arXiv:2110.14168): word problems from the public JSONL, one {"question", "answer"} a line."""

import copy
import re
from collections.abc import Callable
from typing import Any

from minirl.config import UserError
from minirl.data.jsonl import read_jsonl
from minirl.env.base import Example, SingleTurn, check_split, sample_rows
from minirl.rewards import extract_answer, gsm8k_reward


class GSM8K:
    """Reward 1 for a completion whose final answer has the gold's value, by the rules of minirl/rewards.py.

    data             : JSONL file to train on; its last tenth is held out for "eval" without `eval_data`
    eval_data        : JSONL file for "eval"; a question that is also in `data` is taken out of training
    keep_annotations : leave <<48/2=24>> in the solutions
    """

    name = "gsm8k"
    stop = ("\nQuestion:",)  # a base model invents the next problem, whose answer is not the one asked for
    max_new_tokens = 256

    def __init__(self, data: str, eval_data: str = "", seed: int = 0, keep_annotations: bool = False):
        if not data:
            raise UserError('gsm8k reads a file: give --data FILE, JSONL rows of {"question", "answer"}')
        self.seed = seed
        rows = read_gsm8k(data, keep_annotations)
        tenth = max(1, len(rows) // 10)
        self.eval_rows = read_gsm8k(eval_data, keep_annotations) if eval_data else rows[-tenth:]
        held = {row.prompt for row in self.eval_rows}
        self.train_rows = [row for row in rows if row.prompt not in held]
        if not self.train_rows:
            raise UserError(f"{data} leaves no row to train on: all {len(rows)} are held out; add rows")

    def sample(self, count: int, start: int = 0, split: str = "train") -> list[Example]:
        check_split(split)
        if split == "eval":
            return [self.eval_rows[index % len(self.eval_rows)] for index in range(start, start + count)]
        return sample_rows(self.train_rows, self.seed, count, start)

    def size(self, split: str) -> int:
        check_split(split)
        return len(self.eval_rows if split == "eval" else self.train_rows)

    def only(self, fits: Callable[[Example], bool]) -> "GSM8K":
        """The same task without the problems that do not fit."""
        env = copy.copy(self)
        env.train_rows = [row for row in self.train_rows if fits(row)]
        env.eval_rows = [row for row in self.eval_rows if fits(row)]
        if not env.train_rows or not env.eval_rows:
            raise UserError(f"all of the {len(self.train_rows)} + {len(self.eval_rows)} problems are too long: "
                            "use a model with a longer context")
        return env

    def reset(self, example: Example) -> SingleTurn:
        return SingleTurn(example.prompt, lambda action: gsm8k_reward(action, example.answer),
                          has_answer=lambda action: extract_answer(action) is not None)


def read_gsm8k(path: str, keep_annotations: bool = False) -> list[Example]:
    """Every row of a GSM8K file as an Example; a row that cannot be used is a UserError with FILE:LINE."""
    return [parse_row(row, place, keep_annotations) for place, row in read_jsonl(path)]


def parse_row(row: dict[str, Any], place: str, keep_annotations: bool) -> Example:
    """One row of the file; `place` is FILE:LINE for the error text."""
    for key in ("question", "answer"):
        if not (isinstance(row.get(key), str) and row[key].strip()):
            raise UserError(f'{place}: no text under "{key}"; rows are {{"question": "...", "answer": "..."}}')
    gold = extract_answer(row["answer"])
    if gold is None or "####" not in row["answer"]:
        raise UserError(f'{place}: the answer ends "{row["answer"][-30:]}", not in "#### NUMBER"')
    solution = row["answer"] if keep_annotations else re.sub(r"<<[^<>\n]*>>", "", row["answer"])
    return Example(f"Question: {row['question']}\nAnswer:", gold, (" " + solution,))
