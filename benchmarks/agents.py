"""What a tool call and a reward cost: python benchmarks/agents.py

The sandbox: starting it, a program, a function with 8 inputs. The rules: 10,000 random and hostile completions through
every parser and reward, and the slowest of each kind of text.
"""

import sys
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

from minirl.env.base import Step
from minirl.env.sandbox import Sandbox

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from test_hacking import CALL, HOSTILE, MIXTURES, PARSERS, completions, sample


def milliseconds(function, *arguments, clock=perf_counter) -> float:
    began = clock()
    try:
        function(*arguments)
    except ValueError:  # a parser's refusal
        pass
    return (clock() - began) * 1e3


def main() -> None:
    sandbox = Sandbox()
    print(f"sandbox  start {milliseconds(lambda: sandbox.guards):.0f} ms  held by {' '.join(sandbox.guards)}")
    runs = [milliseconds(sandbox.run, "print(1)") for _ in range(200)]
    calls = [milliseconds(sandbox.call, "def f(x): return 2 * x", "f", [(i,) for i in range(8)]) for _ in range(200)]
    for name, times in (("program", runs), ("8 inputs", calls)):
        print(f"sandbox  {name:9} median {median(times):.1f} ms   slowest of 200 {max(times):.1f} ms")
    sandbox.close()
    step = Step("seen", 0.0, True, {"tool_call": True})
    slowest = {"usual": (0.0, "", ""), "hostile": (0.0, "", "")}
    for number, text in enumerate(completions(10_000)):
        kind = "hostile" if number < len(HOSTILE) else "usual"
        row = sample(text, steps=[step], secrets=["hunter2"], sources=[1], calls=[CALL], made=[CALL], reward=0.0)
        tests = [(f"parser {i}", parser, text) for i, parser in enumerate(PARSERS)]
        tests += [(name, rule, row) for mixture in MIXTURES for name, rule in mixture.rules.items()]
        for name, function, argument in tests:
            slowest[kind] = max(slowest[kind], (milliseconds(function, argument, clock=process_time), name, text[:20]))
    for kind, (time, name, text) in slowest.items():
        print(f"rewards  slowest of the {kind:8} completions {time:.1f} ms of processor: {name} on {text!r}...")


if __name__ == "__main__":
    main()
