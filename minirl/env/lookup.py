"""Multi-hop look-up: "kim's boss's twin?" over documents that are made anew for every problem.

Each document is one sentence, "kim's boss is lee.", in a world of a few people that no weight can know by heart. Each
answer is the key to the next question. The demonstrations are a novice's: who has found the boss or the twin mostly
stops there, and some put a question to a stranger, which brings up a document of somebody else, and ask again. The
right name is paid.
"""

from random import Random

from minirl.config import UserError
from minirl.env.agent import ToolEnv
from minirl.env.base import Example
from minirl.env.retrieval import BM25, find
from minirl.env.tools import Tool

PEOPLE = tuple("ann ben cat dan eva fay gus hal ida jim kim lee mia ned oli pam ray sue tom una vic wim zoe".split())
RELATIONS = ("boss", "twin", "aunt", "mate")
WORLD = 8  # people in the documents of one problem
LAZY = {"boss": 0.8, "twin": 0.8, "aunt": 0.2, "mate": 0.2}  # of those who have found one stop a step early
SLIPS = 0.2  # of the demonstrations ask a stranger once


def make(rng: Random, hops: int) -> Example:
    """A small world of facts, and a question that takes `hops` of them one after the other."""
    people = rng.sample(PEOPLE, WORLD)
    facts = {(a, r): rng.choice([b for b in people if b != a]) for a in people for r in RELATIONS}
    start, path = people[0], [rng.choice(RELATIONS) for _ in range(hops)]
    actions, at = [], start
    asked = hops - 1 if hops > 1 and rng.random() < LAZY[path[-2]] else hops
    slip = rng.randrange(asked) if rng.random() < SLIPS else None
    for i, relation in enumerate(path[:asked]):
        if i == slip:
            actions.append(f"<find>{rng.choice(sorted(set(PEOPLE) - set(people)))}'s {relation}</find>\n")
        actions.append(f"<find>{at}'s {relation}</find>\n")
        at = facts[at, relation]
    said = at
    for relation in path[asked:]:
        at = facts[at, relation]
    documents = [f"{a}'s {r} is {b}." for (a, r), b in facts.items()]
    return Example(start + "".join(f"'s {r}" for r in path) + "?", at, (*actions, said), BM25(documents))


def lookup(difficulty: int = 2, seed: int = 0) -> ToolEnv:
    """Questions of `difficulty` hops; reward 1 for the name at the end of the chain."""
    if difficulty < 1:
        raise UserError(f"difficulty {difficulty}: lookup needs 1 hop or more")
    turns = difficulty + 2
    return ToolEnv(
        name="lookup",
        tools=(Tool(find),),
        make=lambda rng: make(rng, difficulty),
        judge=lambda example, state, answer: float(answer == example.answer),
        has_answer=lambda answer: answer in PEOPLE,
        max_turns=turns,
        max_new_tokens=turns * 24,
        max_observation=24,
        seed=seed,
    )
