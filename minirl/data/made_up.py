"""Made-up tool-use rows, without end: what a small model learns to copy and to call from, before it sees real ones.

    rng = Random(0)
    rows = [made_up_row(rng, words) for _ in range(10_000)]       words: any list of lower-case ones

A tool has a number for a name, as those of `number_names`, and a description of drawn words; the question says some of
these words and values for the arguments, and the answer is the call that repeats the values. Nothing in a row follows
from another one, so there is nothing to learn by heart: a tool is found by its words, a value by its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from minirl.data.bfcl import NO_CALL

VERBS = "calculate get find compute convert check book list predict retrieve".split()
UNITS = "units years meters dollars miles hours".split()
KINDS = {"integer": 9, "string": 9, "number": 2, "integers": 1, "strings": 1, "boolean": 1}  # how often


def made_up_row(rng: Random, words: Sequence[str], most_tools: int = 3, most_arguments: int = 3,
                fitting: float = 0.75) -> dict[str, Any]:
    """{"messages", "tools"}: a question and its answer, one call, or where there may be two tools also several.

    fitting : share of the questions for which a tool is there; the others are about none of the row's tools
    """
    tools = [_tool(rng, words, rng.randint(1, most_arguments)) for _ in range(rng.randint(1, most_tools))]
    number, fits = rng.randrange(len(tools)), rng.random() < fitting
    wanted = tools[number] if fits else _tool(rng, words, rng.randint(1, most_arguments))
    count = rng.choice((2, 2, 3)) if rng.random() < 0.2 and most_tools > 1 else 1
    said = [_arguments(rng, words, wanted["arguments"]) for _ in range(count)]
    name = f"tool_{number + 1}"
    calls = [{"type": "function", "function": {"name": name, "arguments": values}} for values, _ in said]
    question = _question(rng, wanted, rng.choice((", and ", " and ", " and for ")).join(text for _, text in said))
    answer = {"content": None, "tool_calls": calls} if fits else {"content": NO_CALL}
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", **answer}],
            "tools": [_declared(rng, words, tool, i) for i, tool in enumerate(tools, 1)]}


def copying_row(rng: Random, words: Sequence[str]) -> dict[str, str]:
    """{"prompt", "completion"}: words, numbers and letters, and the same once more."""
    text = ""
    for _ in range(rng.randint(3, 9)):
        number = rng.randrange(10 ** rng.randint(1, 5))
        text += rng.choice((_word(rng, words), _word(rng, words).capitalize(), str(number)))
        text += rng.choice(("  ", " ", " ", ", ", "_", "."))
    return {"prompt": text + "\n", "completion": text}


def _word(rng: Random, words: Sequence[str]) -> str:
    """One of the words, and now and then one that nobody knows."""
    if rng.random() < 0.85:
        return rng.choice(words)
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 6)))


def _tool(rng: Random, words: Sequence[str], arguments: int) -> dict[str, Any]:
    """What a tool is about: {"verb", "topic": words, "arguments": [(its words, kind, may it be left out)]}."""
    kinds = rng.choices([*KINDS], [*KINDS.values()], k=arguments)
    return {"verb": rng.choice(VERBS) if rng.random() < 0.7 else _word(rng, words),
            "topic": [_word(rng, words) for _ in range(rng.choice((2, 2, 3)))],
            "arguments": [(" ".join(_word(rng, words) for _ in range(rng.choice((1, 1, 2)))), kind,
                           i > 0 and rng.random() < 0.3) for i, kind in enumerate(kinds)]}


def _declared(rng: Random, words: Sequence[str], tool: dict[str, Any], number: int) -> dict[str, Any]:
    """The tool as a model is told of it."""
    first, *rest = tool["topic"]
    about, verb = " ".join(rest), tool["verb"].capitalize()
    said = rng.choice((f"{verb} the {first} of a {about}.", f"{verb} {first} {about}.", f"{verb} the {first} {about}",
                       f"{verb} the {first} of a {about} based on its {tool['arguments'][0][0]}.",
                       f"{verb} the {first} and {_word(rng, words)} of {about} for a given {_word(rng, words)}."))
    properties = {}
    for i, (name, kind, optional) in enumerate(tool["arguments"], 1):
        meant = rng.choice((f"The {name} of the {rest[-1]}", f"The {name}", f"{name.capitalize()} of the {first}",
                            f"The {name} for which to {tool['verb']} the {_word(rng, words)}"))
        default = f". Default is {rng.choice((rng.randint(0, 20), repr(_word(rng, words))))}." if optional else "."
        declared = {"type": "array", "items": {"type": kind[:-1]}} if kind.endswith("s") else {"type": kind}
        properties[f"arg_{i}"] = declared | {"description": meant + default}
    required = [f"arg_{i}" for i, (_, _, optional) in enumerate(tool["arguments"], 1) if not optional]
    return {"type": "function", "function": {"name": f"tool_{number}", "description": said, "parameters": {
        "type": "object", "properties": properties, "required": required}}}


def _value(rng: Random, words: Sequence[str], kind: str) -> tuple[Any, str]:
    """(a value, how a user says it)."""
    if kind == "string":
        if rng.random() < 0.1:
            date = f"20{rng.randint(10, 29)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
            return date, date
        text = " ".join(_word(rng, words) for _ in range(rng.choice((1, 1, 2, 2, 3))))
        text = text.title() if rng.random() < 0.7 else text
        return text, rng.choice((text, text, text, f"'{text}'"))
    if kind.endswith("s"):
        values = [_value(rng, words, kind[:-1])[0] for _ in range(rng.randint(2, 4))]
        return values, rng.choice(("[{}]", "{}")).format(", ".join(map(str, values)))
    if kind == "number":
        value = round(rng.uniform(0, rng.choice((1, 100))), rng.randint(1, 2))
    else:
        value = rng.choice((rng.randint(0, 9), rng.randint(10, 99), rng.randint(100, 999), 100 * rng.randint(10, 99),
                            rng.randint(1900, 2030), -rng.randint(1, 50)))
    return value, rng.choice(("{}", "{}", "{}", "{} " + rng.choice(UNITS), "${}")).format(value)


def _arguments(rng: Random, words: Sequence[str], arguments: list) -> tuple[dict[str, Any], str]:
    """(arguments of a call, how a user says them)."""
    used = [(i, *argument) for i, argument in enumerate(arguments, 1) if not argument[2] or rng.random() < 0.3]
    values, said = {}, []
    for i, name, kind, _ in used:
        if kind == "boolean":
            values[f"arg_{i}"] = rng.random() < 0.6
            said.append(f"{'with' if values[f'arg_{i}'] else 'without'} {name}")
            continue
        values[f"arg_{i}"], text = _value(rng, words, kind)
        bare = ["{1}", "{1}", "of {1}", "for {1}", "in {1}", "from {1}"]
        said.append(rng.choice(["{0} {1}", "{0} of {1}", "a {0} of {1}", "{1} {0}", "{0} is {1}", "the {0} {1}"]
                               + bare * (1 if len(used) > 1 else 2)).format(name, text))
    if rng.random() < 0.25:
        rng.shuffle(said)
    return values, rng.choice((", ", " and ")).join(filter(None, (", ".join(said[:-1]), said[-1])))


def _question(rng: Random, tool: dict[str, Any], values: str) -> str:
    first, *rest = tool["topic"]
    about = rng.choice(("{} {}", "{} of a {}", "{} of the {}", "{} of {}")).format(first, " ".join(rest))
    if rng.random() < 0.3:
        about = rng.choice(tool["topic"])
    verb, end = tool["verb"], rng.choice(("?", ".", "", "?"))
    asked = rng.choice((f"What is the {about}", f"{verb.capitalize()} the {about}", f"{verb.capitalize()} {about}",
                        f"Find the {about}", f"I want to {verb} the {about}", f"Can you {verb} a {about}",
                        f"How much is the {about}", f"What's the {about}"))
    if rng.random() < 0.1:
        return f"{rng.choice(('With', 'Given', 'For'))} {values}: {asked}{end}"
    return asked + rng.choice((" with ", " with ", " given ", " for ", " ", " where ", " if ")) + values + end
