"""What the policy wrote, for a person to look at: one HTML page without network or dependency, or text in a terminal.

    python -m minirl.view runs/grpo                         a page of the first and the last rollout that was saved
    python -m minirl.view runs/grpo --steps 1,20,300        of these
    python -m minirl.view runs/grpo --text                  in the terminal
    python -m minirl.view runs/a runs/b                     several runs, perhaps of several tasks

Rollouts are saved by `--save-rollouts`. Tokens are coloured by who wrote them, by advantage, log-prob or KL; samples
are filtered by task, step and outcome. What a model wrote is data to this page: it is never read as HTML, and what
cannot be seen (control characters, marks that turn the direction of text) is written as a sign that can.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import struct
import sys
import unicodedata
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from minirl.adapters import tokenizer_folder
from minirl.advantages import group_advantages
from minirl.checkpoint import latest_checkpoint
from minirl.config import UserError, read_json, write_text
from minirl.metrics import read_metrics
from minirl.rollout import Rollout
from minirl.tokenizer import StreamDecoder, Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Sample:
    """One row of a rollout. The per-token lists have one number a token, that of the prediction which gave it."""

    run: str
    task: str
    step: int
    number: int  # sample id
    group: int
    reward: float | None
    finished: bool | None  # False: cut at the limit
    pieces: list[str]  # visible text of each token
    chosen: list[bool]
    logprobs: np.ndarray | None  # (n,) nats; 0 where nothing was chosen
    ref_logprobs: np.ndarray | None  # None also for a row that the reference did not read
    advantages: np.ndarray | None
    steps: list[list[Any]] = field(default_factory=list)  # [observation, reward, info, action] of a turn, if known

    @property
    def outcome(self) -> str:
        if self.finished is False:
            return "cut"
        if self.reward is None or self.reward != self.reward:
            return "no reward"
        return "solved" if self.reward >= 1 else "failed" if self.reward <= 0 else "partly"

    @property
    def parts(self) -> dict[str, float]:
        """Rewards by part: what the steps' info holds under "rewards", summed over the turns."""
        found: dict[str, float] = {}
        for _, _, info, *_ in self.steps:
            parts = info.get("rewards") if isinstance(info, dict) else None
            for name, value in (parts.items() if isinstance(parts, dict) else ()):
                if isinstance(value, int | float) and abs(value) < float("inf"):
                    found[name] = found.get(name, 0.0) + value
        return found


# ------------------------------------------------------------------ from a run's files


def saved_steps(run: Path) -> list[int]:
    """The steps whose rollouts a run has saved."""
    return sorted(int(folder.name[5:]) for folder in (run / "rollouts").glob("step_*") if folder.name[5:].isdigit())


def load_samples(run: Path, step: int, limit: int = 1000, tokenizer: Tokenizer | None = None) -> list[Sample]:
    """The first `limit` samples of one saved step. UserError: no such step, or no model folder that tells the words."""
    folder = run / "rollouts" / f"step_{step}"
    scored = folder / "scored"  # the same rows with advantages and the reference's log-probs
    rollout = Rollout.load(scored if scored.is_dir() else folder)
    config = read_json(run / "config.json") if (run / "config.json").is_file() else {}
    if tokenizer is None:
        model = latest_checkpoint(run)
        if model is None:
            raise UserError(f"{run} has no checkpoint whose tokenizer could read the rollout: give --tokenizer FOLDER")
        tokenizer = load_tokenizer(tokenizer_folder(model))
    if rollout.advantages is None and rollout.rewards is not None and "advantage_scale" in config:
        scale = config["advantage_scale"] if config["advantage_scale"] in ("std", "none") else "std"
        rollout = rollout.replace(advantages=group_advantages(rollout.rewards, rollout.group, scale))
    told = _told(folder)
    samples = []
    for row in range(min(limit, len(rollout))):
        n = int(rollout.lengths[row])
        number = int(rollout.sample_ids[row])
        logprobs, ref_logprobs, advantages = (_per_token(getattr(rollout, name), row, n) for name in (
            "old_logprobs", "ref_logprobs", "advantages"))
        if ref_logprobs is not None and not ref_logprobs.any():
            ref_logprobs = None  # a row that was not trained on, which the reference did not read
        samples.append(Sample(
            str(run), visible(str(config.get("task", "?"))), step, number, int(rollout.group[row]),
            None if rollout.rewards is None else float(rollout.rewards[row]),
            None if rollout.finished is None else bool(rollout.finished[row]),
            pieces(rollout.tokens[row, :n].tolist(), tokenizer), [False, *rollout.action_mask[row, : n - 1].tolist()],
            logprobs, ref_logprobs, advantages, told.get(number, [])))
    return samples


def _told(folder: Path) -> dict[int, list[list[Any]]]:
    """sample id -> steps, of the JSONL files beside the tensors; {} where an older run has none."""
    found = {}
    for path in sorted(folder.glob("rank_*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            found[row["sample"]] = row["steps"]
    return found


def _per_token(values: Any, row: int, n: int) -> np.ndarray | None:
    """Row `row` of a (B, S) or (B, 1) tensor as (n,), with 0 for the first token, which nothing predicts."""
    if values is None:
        return None
    line = values[row].double().numpy()
    line = np.full(n - 1, line[0]) if len(line) == 1 else line[: n - 1]
    return np.concatenate(([0.0], line))


def pieces(tokens: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """The visible text of every token. A character spread over several stands at the last of them."""
    names = {token: name for name, token in tokenizer.special.items()}
    decoder = StreamDecoder(tokenizer)
    found = [visible(decoder.push(token)) if token not in names else visible(decoder.finish()) + f"⟨{names[token]}⟩"
             for token in tokens]
    if found and (rest := decoder.finish()):
        found[-1] += visible(rest)
    return found


def visible(text: str) -> str:
    """The text with every character that cannot be seen written as a sign; line breaks and tabs stay."""
    if text.isprintable():
        return text
    return "".join(character if character in "\n\t" or character.isprintable() else _sign(character)
                   for character in text)


def _sign(character: str) -> str:
    code = ord(character)
    if code < 32 or code == 127:
        return chr(0x2421 if code == 127 else 0x2400 + code)  # ␛, ␀, ␡
    if unicodedata.category(character) == "Zs":
        return character  # spaces of other widths
    return f"⟨U+{code:04X}⟩"


def summary(samples: Sequence[Sample], run: Path, step: int) -> dict[str, Any]:
    """What a step's samples say together, and the numbers that metrics.jsonl has of it."""
    rewards = [sample.reward for sample in samples if _finite(sample.reward) is not None]
    path = run / "metrics.jsonl"
    logged = next((row for row in read_metrics(path) if row["step"] == step), {}) if path.is_file() else {}
    count = max(len(samples), 1)
    shown = {"samples": len(samples),
             "response_length": sum(sum(sample.chosen) for sample in samples) / count,
             "turns": sum(_turns(sample) for sample in samples) / count,
             "truncated": sum(sample.finished is False for sample in samples) / count}
    if rewards:
        shown |= {"reward_mean": sum(rewards) / len(rewards), "solved": sum(r >= 1 for r in rewards) / len(rewards)}
    return {"run": str(run), "step": step, "shown": shown, "logged": {
        name: value for name, value in logged.items() if isinstance(value, int | float) and _finite(value) is not None}}


def _turns(sample: Sample) -> int:
    return sum(chosen for chosen, _ in groupby(sample.chosen))


# ------------------------------------------------------------------ as a page


def page(samples: Sequence[Sample], summaries: Sequence[dict[str, Any]]) -> str:
    """The page, whole: style, script and data. 1,000 samples of 310 tokens take about 1.4 MB."""
    template = (Path(__file__).parent / "view.html").read_text(encoding="utf-8")
    script = re.search(r"<script>(.*?)</script>", template, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Only this very script may run, and nothing may be fetched: a second lock behind textContent.
    return template.replace("SCRIPT-HASH", digest).replace("DATA-BLOCK", pack(samples, summaries))


def pack(samples: Sequence[Sample], summaries: Sequence[dict[str, Any]]) -> str:
    """zlib and base64 of: the length of a JSON text, that text (padded to 4 bytes), and its per-token arrays.

    arrays : of all samples' tokens in a row. Number of the piece (uint32); in thousandths (int16) the log-prob, the
             log-prob minus the reference's, the advantage; chosen (uint8). "has" says which of them are there
    """
    numbers: dict[str, int] = {}
    index = [numbers.setdefault(piece, len(numbers)) for sample in samples for piece in sample.pieces]
    has = {name: any(getattr(sample, name) is not None for sample in samples)
           for name in ("logprobs", "ref_logprobs", "advantages")}
    arrays = [np.array(index, dtype="<u4"),
              _thousandths([sample.logprobs for sample in samples], samples),
              _thousandths([None if sample.ref_logprobs is None or sample.logprobs is None else
                            sample.logprobs - sample.ref_logprobs for sample in samples], samples),
              _thousandths([sample.advantages for sample in samples], samples),
              np.array([chosen for sample in samples for chosen in sample.chosen], dtype="u1")]
    described = [{"run": sample.run, "task": sample.task, "step": sample.step, "id": sample.number,
                  "group": sample.group, "reward": _finite(sample.reward), "outcome": sample.outcome,
                  "parts": sample.parts, "n": len(sample.pieces), "turns": _turns(sample),
                  "compared": sample.ref_logprobs is not None,
                  "steps": [[reward, visible(json.dumps(info, ensure_ascii=False))]
                            for _, reward, info, *_ in sample.steps]} for sample in samples]
    text = json.dumps({"pieces": [*numbers], "samples": described, "summaries": [*summaries], "has": has}).encode()
    text += b" " * (-len(text) % 4)
    data = struct.pack("<I", len(text)) + text + b"".join(array.tobytes() for array in arrays)
    return base64.b64encode(zlib.compress(data, 6)).decode()


def _finite(number: float | None) -> float | None:
    return number if number is not None and abs(number) < float("inf") else None  # NaN is no JSON


def _thousandths(values: Sequence[np.ndarray | None], samples: Sequence[Sample]) -> np.ndarray:
    lines = [np.zeros(len(sample.pieces)) if line is None else line for line, sample in zip(values, samples)]
    joined = np.concatenate([*lines, np.zeros(0)])
    return np.rint(np.nan_to_num(joined * 1000, nan=0.0).clip(-32767, 32767)).astype("<i2")


# ------------------------------------------------------------------ as text


def as_text(sample: Sample, colour: bool = False) -> str:
    """One sample for the terminal: a heading, and its turns, each with who wrote it."""
    reward = "none" if sample.reward is None else f"{sample.reward:g}"
    heading = f"{sample.task}, step {sample.step}, sample {sample.number}: {sample.outcome}, reward {reward}"
    if sample.parts:
        heading += " (" + ", ".join(f"{name} {value:g}" for name, value in sample.parts.items()) + ")"
    lines = [heading]
    turn = at = 0
    for chosen, tokens in groupby(sample.chosen):
        end = at + len([*tokens])
        turn += chosen
        name = f"action {turn}" if chosen else f"observation {turn}" if turn else "prompt"
        text = "".join(sample.pieces[at:end])
        if chosen and sample.logprobs is not None:
            name += f" ({end - at} tokens, log-prob {sample.logprobs[at:end].sum():.2f})"
        lines += [f"  {name}", *(f"    {line}" for line in _coloured(text, chosen and colour).split("\n"))]
        at = end
    return "\n".join(lines)


def _coloured(text: str, colour: bool) -> str:
    return "\n".join(f"\x1b[32m{line}\x1b[0m" for line in text.split("\n")) if colour else text


def summary_text(summaries: Sequence[dict[str, Any]]) -> str:
    """A table with a column for each step: what its samples say, and what the run has logged."""
    columns = [entry["shown"] | {f"{name} (logged)": value for name, value in entry["logged"].items()}
               for entry in summaries]
    names = [*dict.fromkeys(name for column in columns for name in column)]
    heads = [f"{Path(entry['run']).name} step {entry['step']}" for entry in summaries]
    width = max([16, *map(len, heads)])
    rows = [" " * 32 + "".join(f"{head:>{width + 2}}" for head in heads)]
    for name in names:
        cells = [f"{column[name]:.4g}" if name in column else "-" for column in columns]
        rows.append(f"{name:32}" + "".join(f"{cell:>{width + 2}}" for cell in cells))
    return "\n".join(rows)


# ------------------------------------------------------------------ the command line


def main(argv: Sequence[str] | None = None) -> None:
    """The command line: one page, or the same as text."""
    parser = argparse.ArgumentParser(prog="python -m minirl.view", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run with --save-rollouts")
    parser.add_argument("--steps", default="", help="which steps, separated by commas (default: first and last)")
    parser.add_argument("--samples", type=int, default=1000, help="samples in all, shared among the steps")
    parser.add_argument("--tokenizer", type=Path, help="model folder, where the run has no checkpoint")
    parser.add_argument("--out", type=Path, help="HTML file to write (default: rollouts.html in the first run)")
    parser.add_argument("--text", action="store_true", help="print to the terminal instead")
    options = parser.parse_args(argv)
    samples, summaries = gather(options)
    if options.text:
        print(summary_text(summaries))
        for sample in samples:
            print("\n" + as_text(sample, sys.stdout.isatty()))
        return
    out = options.out or options.runs[0] / "rollouts.html"
    text = page(samples, summaries)
    write_text(out, text)
    print(f"wrote {out}: {len(samples)} samples, {len(text) / 1e6:.2f} MB")


def gather(options: argparse.Namespace) -> tuple[list[Sample], list[dict[str, Any]]]:
    """The samples of the runs that the options choose, and the metrics of their steps."""
    chosen = list(_choose(options.runs, options.steps))
    tokenizer = load_tokenizer(tokenizer_folder(options.tokenizer)) if options.tokenizer else None
    if options.samples < 1:
        raise UserError(f"--samples is {options.samples}: it must be above 0")
    each = max(1, options.samples // len(chosen))
    samples, summaries = [], []
    for run, step in chosen:
        found = load_samples(run, step, each, tokenizer)
        samples += found
        summaries.append(summary(found, run, step))
    return samples, summaries


def _choose(runs: Sequence[Path], wanted: str) -> Iterator[tuple[Path, int]]:
    for run in runs:
        there = saved_steps(run)
        if not there:
            raise UserError(f"{run} has no saved rollouts: train with --save-rollouts")
        try:
            steps = [int(word) for word in wanted.split(",")] if wanted else sorted({there[0], there[-1]})
        except ValueError:
            raise UserError(f"--steps is {wanted!r:.60}: give numbers, separated by commas") from None
        for step in steps:
            if step not in there:
                raise UserError(f"{run} has no rollout of step {step}: it has {', '.join(map(str, there))[:200]}")
            yield run, step


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # `| head` has seen enough
        sys.stderr.close()
