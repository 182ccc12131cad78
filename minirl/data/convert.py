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

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from minirl.config import UserError, write_text
from minirl.data.agentinstruct import convert_agentinstruct
from minirl.data.apibench import convert_apibench
from minirl.data.augment import messages_of, recovery_row, shuffle_tools
from minirl.data.bfcl import convert_bfcl
from minirl.data.gsm8k_agent import convert_gsm8k, curriculum
from minirl.data.jsonl import each_row
from minirl.data.quality import quality_parts, quality_score
from minirl.data.scrub import scrub
from minirl.data.toolbench import convert_processed, convert_query, convert_tree, tree_pairs
from minirl.data.trajectories import RowError, check_trajectory
from minirl.messages import check_messages, check_tools, to_json

FORMATS = ("apibench", "bfcl", "toolbench", "agentinstruct", "gsm8k")
Read = Iterator[tuple[str, list[dict[str, Any]] | UserError]]  # place -> the rows that it became, or why it did not


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


def main(argv: Sequence[str] | None = None) -> None:
    """The command line: read, convert or refuse, change what was asked for, write, and print the counts."""
    parser = argparse.ArgumentParser(prog="python -m minirl.data.convert", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("format", choices=FORMATS)
    parser.add_argument("files", nargs="+", metavar="FILE", help="what to read")
    parser.add_argument("out", metavar="OUT.jsonl", help="what to write")
    parser.add_argument("--answers", help="bfcl: file of possible answers")
    parser.add_argument("--prompts", action="store_true", help="also write tasks without an answer, for a teacher")
    parser.add_argument("--scrub", action="store_true", help="take out e-mail addresses, phone numbers and keys")
    parser.add_argument("--min-quality", type=float, default=0.0, help="refuse rows below this score (0.8 is usual)")
    parser.add_argument("--shuffle-tools", action="store_true",
                        help="tools in random order, with tools of other rows up to 8")
    parser.add_argument("--recovery", type=float, default=0.0, metavar="SHARE",
                        help="add for this share of the rows one with a mistake that is mended")
    parser.add_argument("--max-steps", type=int, help="gsm8k: at most so many calculations")
    parser.add_argument("--curriculum", action="store_true", help="gsm8k: fewest calculations first")
    parser.add_argument("--pairs", action="store_true", help="toolbench: preference pairs of search trees instead")
    parser.add_argument("--seed", type=int, default=0, help="of what is random")
    options = parser.parse_args(argv)
    rows, refused, total = convert(options)
    if not rows:
        raise UserError(f"none of the {total} rows of {' '.join(options.files)[:200]} is left: "
                        f"{refused[0] if refused else 'it has none'}")
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    write_text(options.out, "".join(to_json(row) + "\n" for row in rows))
    listing = Path(f"{options.out}.refused.txt")
    if refused:
        write_text(listing, "".join(f"{' '.join(str(error).split())} [{error.kind}]\n" for error in refused))
    else:
        listing.unlink(missing_ok=True)
    print(f"{options.format}: {total} rows, {total - len(refused)} converted, {len(refused)} refused; "
          f"{len(rows)} written to {options.out}")
    for kind, count in Counter(error.kind for error in refused).most_common():
        first = next(str(error) for error in refused if error.kind == kind)
        print(f"  {count:6} {kind:24} {' '.join(first.split())[:160]}")


def convert(options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[RowError], int]:
    """(rows to write, refusals, number of rows read) by the options of the command line."""
    rows: list[dict[str, Any]] = []
    refused: list[RowError] = []
    total = 0
    for path in options.files:
        for place, found in pairs_of(path) if options.pairs else read_file(options.format, path, options.answers,
                                                                           options.prompts):
            total += 1
            try:
                if isinstance(found, UserError):
                    raise found
                rows += [_finish(row, options) for row in found]
            except RowError as error:
                refused.append(error if str(error).startswith(place) else RowError(error.kind, f"{place}: {error}"))
    rng = Random(options.seed)
    if options.shuffle_tools:
        others = [*{tool["function"]["name"]: tool for row in rows for tool in row.get("tools") or []}.values()]
        rows = [shuffle_tools(row, rng, others) for row in rows]
    rows += [*_recoveries(rows, options.recovery, rng)]
    return curriculum(rows) if options.curriculum else rows, refused, total


def _finish(row: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    if options.max_steps is not None and row.get("steps", 0) > options.max_steps:
        raise RowError("too many steps", f"{row['steps']} calculations are more than --max-steps {options.max_steps}")
    if options.min_quality and ("messages" in row or "completion" in row):
        score = quality_score(quality_parts(messages_of(row), row.get("satisfaction")))
        if score < options.min_quality:
            raise RowError("quality", f"quality {score:.2f} is below {options.min_quality}")
    return scrub(row)[0] if options.scrub else row


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
    try:
        main()
    except UserError as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
