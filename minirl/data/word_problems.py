"""Word problems like those of GSM8K, in its format, as many as one likes: for a project that anyone can run.

    python -m minirl.data.word_problems train.jsonl --rows 3000
    python -m minirl.data.word_problems test.jsonl --rows 200 --seed 1

    {"question": "Ann has 12 pens. Ann buys 3 boxes of 4. How many pens does Ann have?",
     "answer": "3*4=<<3*4=12>>12\\n12+12=<<12+12=24>>24\\n#### 24"}
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

from minirl.config import UserError, write_text
from minirl.env.calculator import calculate
from minirl.messages import to_json

NAMES = "Ann Ben Cara Dan Eva Finn Gil Hana Ivan Judy Kim Leo Mia Noah Olga Pia Raj Sue Tom Una".split()
THINGS = "pens books eggs cups keys maps nuts hats cards coins".split()


def problem(rng: Random, steps: int) -> dict[str, str]:
    """One problem with `steps` events, each of which takes one calculation, or two where boxes are bought."""
    name, thing, has = rng.choice(NAMES), rng.choice(THINGS), rng.randint(10, 60)
    story, lines = [f"{name} has {has} {thing}."], []

    def work_out(expression: str) -> int:
        result = int(calculate(expression))
        lines.append(f"{expression}=<<{expression}={result}>>{result}")
        return result

    for _ in range(steps):
        kind = rng.choice(("get", "give", "boxes", "times") if has < 200 else ("get", "give"))
        few = rng.randint(2, 9)
        if kind == "get":
            many = rng.randint(2, 60)
            story.append(f"{name} gets {many} more.")
            has = work_out(f"{has}+{many}")
        elif kind == "give" and has > 2:
            many = rng.randint(2, has - 1)
            story.append(f"{name} gives away {many}.")
            has = work_out(f"{has}-{many}")
        elif kind == "boxes":
            each = rng.randint(2, 12)
            story.append(f"{name} buys {few} boxes of {each}.")
            has = work_out(f"{has}+{work_out(f'{few}*{each}')}")
        else:
            story.append(f"Now {name} has {few} times as many.")
            has = work_out(f"{has}*{few}")
    question = " ".join([*story, f"How many {thing} does {name} have?"])
    return {"question": question, "answer": "\n".join([*lines, f"#### {has}"])}


def main(argv: Sequence[str] | None = None) -> None:
    """The command line: write so many problems as GSM8K's rows."""
    parser = argparse.ArgumentParser(prog="python -m minirl.data.word_problems", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("out", type=Path, metavar="OUT.jsonl")
    parser.add_argument("--rows", type=int, default=2000, help="problems")
    parser.add_argument("--steps", type=int, default=3, help="most events of a problem")
    parser.add_argument("--seed", type=int, default=0, help="other seeds give other problems")
    options = parser.parse_args(argv)
    if options.rows < 1 or options.steps < 1:
        raise UserError("--rows and --steps must be above 0")
    rng = Random(options.seed)
    rows = [problem(rng, rng.randint(1, options.steps)) for _ in range(options.rows)]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_text(options.out, "".join(to_json(row) + "\n" for row in rows))
    print(f"wrote {options.rows} problems to {options.out}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
