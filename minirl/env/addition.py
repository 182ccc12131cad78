"""Integer addition, "07+58=" to "65" in one turn: the smallest environment, and a pattern for others."""

import re
from functools import cached_property
from itertools import product
from random import Random

from minirl.config import UserError
from minirl.env.base import Example, SingleTurn, check_split, counter_random, held_out, sample_problems


class Addition:
    """Sums of two integers written with `difficulty` digits, a tenth held out; reward 1 for the exact answer."""

    name = "addition"
    stop = ()  # an answer ends with EOS

    def __init__(self, difficulty: int = 2, seed: int = 0):
        if not 1 <= difficulty <= 1000:  # Python writes integers of 4300 digits at most
            raise UserError(f"difficulty {difficulty}: addition needs operands of 1 digit or more, 1000 at most")
        self.difficulty, self.seed = difficulty, seed
        self.max_new_tokens = difficulty + 2  # a sum of difficulty + 1 digits, and EOS

    def make(self, rng: Random) -> Example:
        return self.problem(rng.randrange(10**self.difficulty), rng.randrange(10**self.difficulty))

    def problem(self, a: int, b: int) -> Example:
        # Zeros in front, so that a digit's place in the text is its place in the number: much easier to learn.
        return Example(f"{a:0{self.difficulty}}+{b:0{self.difficulty}}=", str(a + b), (str(a + b),))

    def sample(self, count: int, start: int = 0, split: str = "train") -> list[Example]:
        if size := self.size(split):
            return [self.eval_examples[index % size] for index in range(start, start + count)]
        return sample_problems(self.make, self.seed, count, start, split, key=unordered)

    def size(self, split: str) -> int | None:
        check_split(split)
        return len(self.eval_examples) if split == "eval" and self.difficulty <= 2 else None

    @cached_property
    def eval_examples(self) -> list[Example]:
        """Each held-out pair once. From 3 digits on (a million pairs) they are drawn: repeats are rare."""
        examples = [self.problem(a, b) for a, b in product(range(10**self.difficulty), repeat=2)]
        examples = [example for example in examples if held_out(unordered(example))]
        return counter_random(self.seed, "eval", 0).sample(examples, len(examples))

    def reset(self, example: Example) -> SingleTurn:
        return SingleTurn(example.prompt, lambda action: float(action.removesuffix("\n") == example.answer),
                          has_answer=lambda action: re.fullmatch(r"[0-9]+\n?", action) is not None)

    def rephrase(self, example: Example) -> Example:
        """The same sum the other way round, for who compares answers to two wordings of one problem."""
        a, b = example.prompt.removesuffix("=").split("+")
        return self.problem(int(b), int(a))


def unordered(example: Example) -> str:
    """37+58 and 58+37 are held out together, or training would show most held-out sums the other way."""
    return "+".join(sorted(example.prompt.removesuffix("=").split("+")))
