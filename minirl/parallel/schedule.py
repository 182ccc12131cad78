"""Pipeline schedules as data: who does what in which order. No process, no tensor; `pipeline.py` runs them.

A model cut into stages is a production line. Stage p gets hidden states from p - 1, and p's gradients come back from
p + 1. A microbatch is one piece on the line; with M of them the line fills, works, and empties again, and while it
fills and empties stages stand idle: the bubble.

    gpipe         all forwards, then all backwards. Every stage keeps the activations of all M microbatches.
    1f1b          (arXiv:1806.03377) a stage begins its first backward as soon as it can and then alternates. The
                  bubble is the same, (P - 1) / (M + P - 1); stage p keeps at most P - p microbatches.
    interleaved   (arXiv:2104.04473 section 2.2) every stage holds v thin slices of the model instead of a thick one.
                  The line fills v times faster, bubble (P - 1) / (v M + P - 1); the price is v times the sends. It
                  goes in rounds of P microbatches; if the last is not full, the bubble is a little larger.

    >>> print(gantt("1f1b", stages=4, microbatches=6))
    stage 0  abcd......AAeBBfCC.DD.EE.FF
    stage 1  .abc....AAdBBeCCfDD.EE.FF..
    stage 2  ..ab..AAcBBdCCeDDfEE.FF....
    stage 3  ...aAAbBBcCCdDDeEEfFF......

a is the forward of microbatch 0 and A its backward, which takes two units of time as on real hardware (`backward=2`).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from minirl.config import UserError

Kind = Literal["gpipe", "1f1b", "interleaved"]
KINDS = ("gpipe", "1f1b", "interleaved")


class Op(NamedTuple):
    """One piece of work of a stage: forward or backward of a microbatch through one of the stage's slices."""

    forward: bool
    microbatch: int
    chunk: int = 0  # which slice: number `chunk` of this stage is slice chunk * stages + stage of the model


def schedule(kind: Kind, stage: int, stages: int, microbatches: int, chunks: int = 1) -> list[Op]:
    """The operations of one stage, in order.

    UserError: an unknown kind; several chunks without "interleaved".
    """
    if kind not in KINDS:
        raise UserError(f"pipeline schedule {kind!r} is unknown: use one of {', '.join(KINDS)}")
    if kind != "interleaved" and chunks != 1:
        raise UserError(f"schedule {kind} has one slice a stage, not {chunks}: use interleaved")
    if kind == "interleaved":
        # Round by round: a round of `stages` microbatches through slice 0, then through slice 1, ...
        order = [(first + i, chunk) for first in range(0, microbatches, stages) for chunk in range(chunks)
                 for i in range(stages)]
        forwards = [Op(True, m, chunk) for m, chunk in order]
        backwards = [Op(False, m, chunks - 1 - chunk) for m, chunk in order]  # the last slice comes back first
        warm_up = 2 * (stages - 1 - stage) + (chunks - 1) * stages if chunks > 1 else stages - 1 - stage
    else:
        forwards = [Op(True, m) for m in range(microbatches)]
        backwards = [Op(False, m) for m in range(microbatches)]
        warm_up = microbatches if kind == "gpipe" else stages - 1 - stage
    # Fill the line, then one forward and one backward in turn, then empty it.
    warm_up = min(warm_up, len(forwards))
    in_turn = [op for pair in zip(forwards[warm_up:], backwards, strict=False) for op in pair]
    ops = forwards[:warm_up] + in_turn + backwards[len(forwards) - warm_up:]
    return [op for op in ops if op.microbatch < microbatches]  # leaving out what nobody waits for keeps the order valid


class Timeline(NamedTuple):
    """What a simulation found. Times in the units of the costs."""

    spans: list[list[tuple[float, float, Op]]]  # of each stage: start, end, operation
    makespan: float  # from the first start to the last end
    bubble: float  # share of all the stages' time in which they stood idle
    peak: list[int]  # of each stage: the most forwards whose backward had not been done yet


def simulate(kind: Kind, stages: int, microbatches: int, chunks: int = 1, forward: float = 1.0,
             backward: float = 2.0) -> Timeline:
    """Run the schedules against a clock: an operation begins when its stage is free and what it needs has arrived.

    forward, backward : cost of one microbatch in one stage, all its chunks together; sending costs nothing
    RuntimeError      : the schedules wait for each other in a circle
    """
    queues = [schedule(kind, stage, stages, microbatches, chunks) for stage in range(stages)]
    done: dict[tuple[Op, int], float] = {}  # (operation, stage) -> when it ended
    spans: list[list[tuple[float, float, Op]]] = [[] for _ in range(stages)]
    places, free = [0] * stages, [0.0] * stages
    while any(place < len(queue) for place, queue in zip(places, queues, strict=True)):
        moved = False
        for stage, queue in enumerate(queues):
            while places[stage] < len(queue):
                op = queue[places[stage]]
                source = needs(op, stage, stages, chunks)
                if source is not None and source not in done:
                    break
                start = max(free[stage], done.get(source, 0.0))
                end = start + (forward if op.forward else backward) / chunks
                spans[stage].append((start, end, op))
                done[op, stage], free[stage] = end, end
                places[stage] += 1
                moved = True
        if not moved:
            raise RuntimeError(f"{kind} with {stages} stages and {microbatches} microbatches waits for itself")
    makespan = max(free)
    busy = stages * microbatches * (forward + backward)
    peak = []
    for span in spans:
        live = [0]
        for *_, op in span:
            live.append(live[-1] + (1 if op.forward else -1))
        peak.append(max(live))
    return Timeline(spans, makespan, 1 - busy / (stages * makespan) if busy else 0.0, peak)


def needs(op: Op, stage: int, stages: int, chunks: int = 1) -> tuple[Op, int] | None:
    """The operation whose result another one waits for, and its stage; None: the first slice's forward needs none.

    Slices stand in the order stage 0 .. P - 1 of chunk 0, then of chunk 1, ...; a backward comes from the slice behind,
    and in the last slice from its own forward.
    """
    slice_ = op.chunk * stages + stage
    if op.forward:
        return None if slice_ == 0 else (Op(True, op.microbatch, (slice_ - 1) // stages), (slice_ - 1) % stages)
    if slice_ == chunks * stages - 1:
        return Op(True, op.microbatch, op.chunk), stage
    return Op(False, op.microbatch, (slice_ + 1) // stages), (slice_ + 1) % stages


class Turn(NamedTuple):
    """What a stage does between two exchanges: an operation or none, then messages out and in."""

    op: Op | None
    to: int | None  # the stage that waits for the result; None: nobody else does
    arrivals: list[tuple[Op, int]]  # operations of this stage whose input is made in this turn, and the stage that does


def turns(kind: Kind, stage: int, stages: int, microbatches: int, chunks: int = 1) -> list[Turn]:
    """The operations of one stage on a clock that all stages share, and who sends what to whom in which turn.

    On this clock an operation takes one turn, and a message belongs to the turn that made it, on both ends. That
    fixes an order of messages in which no two stages wait for each other, whatever an operation costs on real
    hardware: NCCL works off a rank's messages one after the other, and one order on each end would hang.
    """
    spans = simulate(kind, stages, microbatches, chunks, chunks, chunks).spans
    began = {(op, at): round(start) for at, span in enumerate(spans) for start, _, op in span}
    ops: dict[int, Op] = {}
    to: dict[int, int] = {}
    arrivals: dict[int, list[tuple[Op, int]]] = {}
    for (op, at), turn in began.items():
        if at == stage:
            ops[turn] = op
        source = needs(op, at, stages, chunks)
        if source is None or source[1] == at:
            continue
        if source[1] == stage:
            to[began[source]] = at
        if at == stage:
            arrivals.setdefault(began[source], []).append((op, source[1]))
    return [Turn(ops.get(i), to.get(i), arrivals.get(i, [])) for i in range(max(began.values(), default=-1) + 1)]


def gantt(kind: Kind, stages: int, microbatches: int, chunks: int = 1, backward: int = 2) -> str:
    """The schedule as a picture, a line a stage and a character a unit of time: a is a forward, A its backward."""
    timeline = simulate(kind, stages, microbatches, chunks, chunks, backward * chunks)
    lines = []
    for stage, span in enumerate(timeline.spans):
        line = ["."] * round(timeline.makespan)
        for start, end, op in span:
            letter = chr(ord("a") + op.microbatch % 26)
            for t in range(round(start), round(end)):
                line[t] = letter if op.forward else letter.upper()
        lines.append(f"stage {stage}  {''.join(line)}")
    return "\n".join(lines)
