"""Public tool-use data as rows that `train_sft.py --task jsonl --data OUT.jsonl` learns from.

    python -m minirl.data.convert bfcl BFCL_v4_simple_python.json OUT.jsonl       answers: possible_answer/ beside it
    python -m minirl.data.convert toolbench answer/*.json OUT.jsonl               trees, or the processed file
    python -m minirl.data.convert apibench torchhub_train.json OUT.jsonl
    python -m minirl.data.convert agentinstruct FILE OUT.jsonl                    THUDM's format, or Microsoft's
    python -m minirl.data.convert gsm8k train.jsonl OUT.jsonl                     calculator calls of <<48/2=24>>

Each row is converted exactly, or refused with its file, its number and the reason; refusals are counted, and listed in
OUT.jsonl.refused.txt. No row takes another with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

from minirl.config import UserError, check_not_negative, run, write_text
from minirl.data.agentinstruct import convert_agentinstruct
from minirl.data.apibench import convert_apibench
from minirl.data.augment import messages_of, number_names, recovery_row, shuffle_tools
from minirl.data.bfcl import convert_bfcl
from minirl.data.gsm8k_agent import as_text, convert_gsm8k, curriculum
from minirl.data.jsonl import each_row
from minirl.data.quality import quality_parts, quality_score
from minirl.data.scrub import scrub
from minirl.data.toolbench import convert_processed, convert_query, convert_tree, tree_pairs
from minirl.data.trajectories import RowError, check_trajectory
from minirl.messages import check_messages, check_tools, to_json

Read = Iterator[tuple[str, list[dict[str, Any]] | UserError]]  # place -> the rows that it became, or why it did not


@dataclass(frozen=True)
class Config:
    format: Literal["apibench", "bfcl", "toolbench", "agentinstruct", "gsm8k"]  # of the files
    files: tuple[str, ...]  # what to read
    out: str  # what to write, JSONL
    answers: str = ""  # bfcl: file of possible answers; empty: of the same name in possible_answer/ beside it
    prompts: bool = False  # also write tasks without an answer, for a teacher
    scrub: bool = False  # take out e-mail addresses, phone numbers and keys
    min_quality: float = 0.0  # refuse rows below this score (0.8 is usual)
    shuffle_tools: bool = False  # tools in random order, with tools of other rows up to 8
    number_names: bool = False  # tools are tool_1, tool_2 ..., and their arguments arg_1 ...: nothing new to copy
    recovery: float = 0.0  # add for this share of the rows one with a mistake that is mended
    max_steps: int | None = None  # gsm8k: at most so many calculations
    curriculum: bool = False  # gsm8k: fewest calculations first
    text: bool = False  # gsm8k: question and answer as one text without calls, which a base model reads
    pairs: bool = False  # toolbench: preference pairs of search trees instead
    seed: int = 0  # of what is random

    def __post_init__(self):
        check_not_negative(self, "min_quality", "recovery")
        if self.format != "gsm8k" and (self.curriculum or self.text or self.max_steps is not None):
            raise UserError("--curriculum, --text and --max-steps are for gsm8k")


def read_file(name: str, path: str | Path, answers: str | Path | None = None, prompts: bool = False) -> Read:
    """Every row of a file in the format `name`, converted and checked, or refused.

    answers : of BFCL; None: the file of the same name in possible_answer/ beside it
    prompts : give tasks without an answer (ToolBench's instructions) as {"prompt", "tools"} instead of refusing them
    """
    raw = each_row(path)
    if name == "apibench":
        converted = ((place, row if isinstance(row, UserError) else [row]) for place, row in
                     convert_apibench([*raw]))
    else:
        known = bfcl_answers(path, answers) if name == "bfcl" else {}
        converted = ((place, _attempt(name, row, known)) for place, row in raw)
    for place, rows in converted:
        try:
            if isinstance(rows, UserError):
                raise rows
            for row in rows:
                _check(row, prompts)
            yield place, [row | {"source": place} for row in rows]
        except UserError as error:
            text = str(error).removeprefix(f"{place}: ")
            yield place, RowError(getattr(error, "kind", "broken JSON"), f"{place}: {text}")


def _attempt(name: str, row: dict[str, Any] | UserError, answers: dict[str, Any]) -> list[dict[str, Any]] | UserError:
    if isinstance(row, UserError):
        return row
    try:
        match name:
            case "bfcl":
                return [convert_bfcl(row, answers)]
            case "agentinstruct":
                return convert_agentinstruct(row)
            case "gsm8k":
                return [convert_gsm8k(row)]
        if "conversations" in row:
            return [convert_processed(row)]
        return [convert_query(row) if "api_list" in row else convert_tree(row)]
    except UserError as error:
        return error


def _check(row: dict[str, Any], prompts: bool) -> None:
    if "messages" not in row and "completion" not in row:
        if not prompts:
            raise RowError("no answer", "a task without an answer: nothing to learn; --prompts writes it for a teacher")
        check_messages(row["prompt"]), check_tools(row["tools"])
        return
    messages = messages_of(row)
    check_trajectory(messages, row.get("tools"))
    if messages[0]["role"] == "assistant":
        raise RowError("format", "the assistant has the first word: there is no task before it")
    to_json(row)  # what JSON cannot hold (NaN) is found here, and not when all is to be written


def bfcl_answers(path: str | Path, answers: str | Path | None = None) -> dict[str, Any]:
    """id -> ground_truth. An absent file is an empty answer book: its rows are refused one by one."""
    path = Path(answers) if answers else Path(path).parent / "possible_answer" / Path(path).name
    if not path.is_file():
        if answers:
            raise UserError(f"cannot read {path}: no such file")
        return {}
    rows = [row for _, row in each_row(path) if isinstance(row, dict)]
    return {row["id"]: row.get("ground_truth") for row in rows if isinstance(row.get("id"), str)}


def main(config: Config) -> None:
    """Read, convert or refuse, change what was asked for, write, and print the counts."""
    rows, refused, total = convert(config)
    if not rows:
        raise UserError(f"none of the {total} rows of {' '.join(config.files)[:200]} is left: "
                        f"{refused[0] if refused else 'it has none'}")
    Path(config.out).parent.mkdir(parents=True, exist_ok=True)
    write_text(config.out, "".join(to_json(row) + "\n" for row in rows))
    listing = Path(f"{config.out}.refused.txt")
    if refused:
        write_text(listing, "".join(f"{' '.join(str(error).split())} [{error.kind}]\n" for error in refused))
    else:
        listing.unlink(missing_ok=True)
    print(f"{config.format}: {total} rows, {total - len(refused)} converted, {len(refused)} refused; "
          f"{len(rows)} written to {config.out}")
    for kind, count in Counter(error.kind for error in refused).most_common():
        first = next(str(error) for error in refused if error.kind == kind)
        print(f"  {count:6} {kind:24} {' '.join(first.split())[:160]}")


def convert(config: Config) -> tuple[list[dict[str, Any]], list[RowError], int]:
    """(rows to write, refusals, number of rows read) by the config."""
    rows: list[dict[str, Any]] = []
    refused: list[RowError] = []
    total = 0
    for path in config.files:
        for place, found in pairs_of(path) if config.pairs else read_file(config.format, path, config.answers,
                                                                           config.prompts):
            total += 1
            try:
                if isinstance(found, UserError):
                    raise found
                rows += [_finish(row, config) for row in found]
            except RowError as error:
                refused.append(error if str(error).startswith(place) else RowError(error.kind, f"{place}: {error}"))
    rng = Random(config.seed)
    if config.shuffle_tools:
        others = [*{tool["function"]["name"]: tool for row in rows for tool in row.get("tools") or []}.values()]
        rows = [shuffle_tools(row, rng, others) for row in rows]
    if config.number_names:
        rows = [number_names(row) for row in rows]
    rows += [*_recoveries(rows, config.recovery, rng)]
    return curriculum(rows) if config.curriculum else rows, refused, total


def _finish(row: dict[str, Any], config: Config) -> dict[str, Any]:
    if config.max_steps is not None and row.get("steps", 0) > config.max_steps:
        raise RowError("too many steps", f"{row['steps']} calculations are more than --max-steps {config.max_steps}")
    if config.min_quality and ("messages" in row or "completion" in row):
        score = quality_score(quality_parts(messages_of(row), row.get("satisfaction")))
        if score < config.min_quality:
            raise RowError("quality", f"quality {score:.2f} is below {config.min_quality}")
    row = as_text(row) if config.text else row
    return scrub(row)[0] if config.scrub else row


def _recoveries(rows: Sequence[dict[str, Any]], share: float, rng: Random) -> Iterator[dict[str, Any]]:
    for row in rows:
        if rng.random() < share and ("messages" in row or "completion" in row):
            try:
                yield recovery_row(row, rng)
            except RowError:
                pass  # a row without calls has nothing to recover from


def pairs_of(path: str | Path) -> Read:
    """Preference pairs of the search trees in a file."""
    for place, row in each_row(path):
        try:
            if isinstance(row, UserError):
                raise row
            pairs = tree_pairs(row)
            if not pairs:
                raise RowError("no pair", "no path that solved the task leaves one that gave up")
            yield place, [pair | {"source": place} for pair in pairs]
        except UserError as error:
            text = str(error).removeprefix(f"{place}: ")
            yield place, RowError(getattr(error, "kind", "broken JSON"), f"{place}: {text}")


if __name__ == "__main__":
    run(main, Config, __doc__)
