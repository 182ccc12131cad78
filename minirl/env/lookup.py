"""Multi-hop look-up: "kim's boss's twin?" over documents that are made anew for every problem.

Each document is one sentence, "kim's boss is lee.", in a world of a few people that no weight can know by heart. Each
answer is the key to the next question. The demonstrations are a novice's: half stop a step early, and some questions
are put to a stranger, which brings up a document of somebody else, and are asked again. The right name is paid.
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
LAZY = 0.5  # of the demonstrations stop a step early
SLIPS = 0.15  # of the questions are put to a stranger first


def make(rng: Random, hops: int) -> Example:
    """A small world of facts, and a question that takes `hops` of them one after the other."""
    people = rng.sample(PEOPLE, WORLD)
    facts = {(a, r): rng.choice([b for b in people if b != a]) for a in people for r in RELATIONS}
    start, path = people[0], [rng.choice(RELATIONS) for _ in range(hops)]
    actions, at = [], start
    asked = hops - 1 if hops > 1 and rng.random() < LAZY else hops
    for relation in path[:asked]:
        if rng.random() < SLIPS:
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
    turns = 2 * difficulty + 1
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
