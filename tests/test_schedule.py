"""Pipeline schedules: every operation once, no circle, the bubble of the formula, the activations of the picture."""

import doctest

import pytest

import minirl.parallel.schedule
from minirl.config import UserError
from minirl.parallel.schedule import Op, gantt, needs, schedule, simulate, turns

SHAPES = [(stages, microbatches) for stages in range(1, 7) for microbatches in (1, 2, 3, 4, 6, 8, 12)]
ALL = ([("gpipe", p, m, 1) for p, m in SHAPES] + [("1f1b", p, m, 1) for p, m in SHAPES] +
       [("interleaved", p, m, v) for p in range(1, 6) for m in (1, 2, 3, 4, 6, 8, 10, 15) for v in (1, 2, 3)])


def test_the_picture_in_the_docstring():
    assert doctest.testmod(minirl.parallel.schedule).failed == 0


def test_1f1b_of_the_first_and_the_last_of_three_stages_by_hand():
    f, b = (lambda m: Op(True, m)), (lambda m: Op(False, m))
    assert schedule("1f1b", 0, 3, 4) == [f(0), f(1), f(2), b(0), f(3), b(1), b(2), b(3)]
    assert schedule("1f1b", 2, 3, 4) == [f(0), b(0), f(1), b(1), f(2), b(2), f(3), b(3)]
    assert schedule("gpipe", 1, 3, 2) == [f(0), f(1), b(0), b(1)]
    assert schedule("1f1b", 0, 4, 2) == [f(0), f(1), b(0), b(1)], "fewer microbatches than stages"


@pytest.mark.parametrize(("kind", "stages", "microbatches", "chunks"), ALL)
def test_every_operation_comes_once_and_none_waits_in_a_circle(kind, stages, microbatches, chunks):
    for stage in range(stages):
        ops = schedule(kind, stage, stages, microbatches, chunks)
        assert sorted(ops) == sorted(Op(f, m, c) for f in (True, False) for m in range(microbatches)
                                     for c in range(chunks))
    timeline = simulate(kind, stages, microbatches, chunks)
    if kind == "interleaved" and microbatches % stages:
        return  # a short round has gaps
    assert timeline.bubble == pytest.approx((stages - 1) / (chunks * microbatches + stages - 1), abs=1e-12)


@pytest.mark.parametrize(("forward", "backward"), [(1, 1), (1, 2), (3, 1)])
def test_the_bubble_does_not_depend_on_what_a_backward_costs(forward, backward):
    for kind, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2)):
        bubble = simulate(kind, 4, 8, chunks, forward, backward).bubble
        assert bubble == pytest.approx(3 / (8 * chunks + 3), abs=1e-12)


def test_live_activations_are_those_of_the_textbook():
    assert simulate("1f1b", 4, 8).peak == [4, 3, 2, 1]
    assert simulate("1f1b", 4, 2).peak == [2, 2, 2, 1]
    assert simulate("gpipe", 4, 8).peak == [8, 8, 8, 8]
    assert simulate("interleaved", 4, 8, 2).peak == [11, 9, 7, 5]  # arXiv:2104.04473: P + (P - 1) / v times the slices


@pytest.mark.parametrize(("kind", "stages", "microbatches", "chunks"), ALL)
def test_what_is_sent_in_a_turn_is_received_in_that_turn_and_needed_later(kind, stages, microbatches, chunks):
    lines = [turns(kind, stage, stages, microbatches, chunks) for stage in range(stages)]
    assert len({len(line) for line in lines}) == 1
    for stage, line in enumerate(lines):
        assert [turn.op for turn in line if turn.op] == schedule(kind, stage, stages, microbatches, chunks)
        arrived = set()
        for number, turn in enumerate(line):
            if turn.op and (source := needs(turn.op, stage, stages, chunks)) and source[1] != stage:
                assert turn.op in arrived
            for op, source in turn.arrivals:
                assert lines[source][number].to == stage and (lines[source][number].op, source) == needs(
                    op, stage, stages, chunks)
                arrived.add(op)
            assert len({source for _, source in turn.arrivals}) == len(turn.arrivals), "one message a pair and turn"
    sent = sum(turn.to is not None for line in lines for turn in line)
    assert sent == sum(len(turn.arrivals) for line in lines for turn in line)
    assert sent == 2 * microbatches * (stages * chunks - 1) * (stages > 1)


def test_turns_of_two_stages_by_hand():
    f, b = (lambda m: Op(True, m)), (lambda m: Op(False, m))
    assert turns("1f1b", 0, 2, 2) == [(f(0), 1, []), (f(1), 1, []), (None, None, [(b(0), 1)]), (b(0), None, []),
                                      (None, None, [(b(1), 1)]), (b(1), None, [])]
    assert turns("1f1b", 1, 2, 2) == [(None, None, [(f(0), 0)]), (f(0), None, [(f(1), 0)]), (b(0), 0, []),
                                      (f(1), None, []), (b(1), 0, []), (None, None, [])]
    assert turns("gpipe", 0, 3, 0) == []


def test_slices_wrap_around_the_stages():
    assert needs(Op(True, 5, 0), 0, 4, 2) is None
    assert needs(Op(True, 5, 1), 0, 4, 2) == (Op(True, 5, 0), 3)
    assert needs(Op(False, 5, 1), 3, 4, 2) == (Op(True, 5, 1), 3)
    assert needs(Op(False, 5, 0), 3, 4, 2) == (Op(False, 5, 1), 0)


def test_a_picture_of_two_stages():
    assert gantt("gpipe", 2, 2, backward=1).splitlines() == ["stage 0  ab..AB", "stage 1  .abAB."]
    assert gantt("1f1b", 2, 3, backward=1).splitlines() == ["stage 0  ab.AcB.C", "stage 1  .aAbBcC."]
    assert gantt("interleaved", 2, 2, 2, backward=1).splitlines() == ["stage 0  abab.A.BAB", "stage 1  .abaAbBAB."]


@pytest.mark.parametrize(("arguments", "message"), [
    (("zigzag", 0, 2, 2), "'zigzag' is unknown: use one of gpipe, 1f1b, interleaved"),
    (("1f1b", 0, 2, 2, 2), "has one slice a stage, not 2"),
])
def test_what_cannot_be_scheduled_is_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        schedule(*arguments)
