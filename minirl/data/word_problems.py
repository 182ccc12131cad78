"""Word problems like those of GSM8K, in its format, as many as one likes: for a project that anyone can run.

    python -m minirl.data.word_problems train.jsonl --rows 3000
    python -m minirl.data.word_problems test.jsonl --rows 200 --seed 1

    {"question": "Ann has 12 pens, buys 3 boxes of 4. How many pens are there?",
     "answer": "3*4=<<3*4=12>>12\\n12+12=<<12+12=24>>24\\n#### 24"}
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random

from minirl.config import UserError, check_positive, run, write_text
from minirl.env.calculator import calculate
from minirl.messages import to_json

NAMES = "Ann Ben Cara Dan Eva Finn Gil Hana Ivan Judy Kim Leo Mia Noah Olga Pia Raj Sue Tom Una".split()
THINGS = "pens books eggs cups keys maps nuts hats cards coins".split()


@dataclass(frozen=True)
class Config:
    out: str  # file to write
    rows: int = 2000  # problems
    steps: int = 3  # most events of a problem
    largest: int = 60  # number in a story; what is calculated becomes larger
    plain: float = 0.0  # share of the answers that are without the calculator's <<12+7=19>>, as if done in the head
    seed: int = 0  # other seeds give other problems

    def __post_init__(self):
        check_positive(self, "rows", "steps")
        if self.largest < 9:
            raise UserError(f"--largest is {self.largest}: it must be 9 or above")
        if not 0 <= self.plain <= 1:
            raise UserError(f"--plain is {self.plain}: a share lies between 0 and 1")


def problem(rng: Random, steps: int, largest: int = 60, plain: bool = False) -> dict[str, str]:
    """One problem with `steps` events, each of which takes one calculation, or two where boxes are bought."""
    name, thing, has = rng.choice(NAMES), rng.choice(THINGS), rng.randint(3, largest)
    story, lines = [f"{name} has {has} {thing}"], []

    def work_out(expression: str) -> int:
        result = int(calculate(expression))
        lines.append(f"{expression}={result}" if plain else f"{expression}=<<{expression}={result}>>{result}")
        return result

    for _ in range(steps):
        kind = rng.choice(("get", "give", "boxes", "times") if has < 200 else ("get", "give"))
        few = rng.randint(2, 9)
        if kind == "get":
            many = rng.randint(2, largest)
            story.append(f"gets {many} more")
            has = work_out(f"{has}+{many}")
        elif kind == "give" and has > 2:
            many = rng.randint(2, min(largest, has - 1))
            story.append(f"gives away {many}")
            has = work_out(f"{has}-{many}")
        elif kind == "boxes":
            each = rng.randint(2, min(largest, 12))
            story.append(f"buys {few} boxes of {each}")
            has = work_out(f"{has}+{work_out(f'{few}*{each}')}")
        else:
            story.append(f"makes it {few} times as many")
            has = work_out(f"{has}*{few}")
    return {"question": f"{', '.join(story)}. How many {thing} are there?",
            "answer": "\n".join([*lines, f"#### {has}"])}


def main(config: Config) -> None:
    """Write so many problems as GSM8K's rows."""
    rng = Random(config.seed)
    rows = [problem(rng, rng.randint(1, config.steps), config.largest, rng.random() < config.plain)
            for _ in range(config.rows)]
    Path(config.out).parent.mkdir(parents=True, exist_ok=True)
    write_text(config.out, "".join(to_json(row) + "\n" for row in rows))
    print(f"wrote {config.rows} problems to {config.out}")


if __name__ == "__main__":
    run(main, Config, __doc__)
