"""Pipeline parallelism on real processes: however a model is cut into stages, the numbers are those of one process."""

import functools
import itertools
import os
import time
import weakref
from collections import Counter
from pathlib import Path

import pytest
import torch
from ranks import RankError, at_once, run_ranks
from stubs import Pieces
from torch import nn

from minirl.checkpoint import load_model
from minirl.config import UserError
from minirl.generate import generate
from minirl.logprobs import rollout_logprobs, token_logprobs
from minirl.losses import aggregate, clipped_surrogate, loss_total, policy_stats
from minirl.model import ModelConfig, Transformer
from minirl.optim import AdamW
from minirl.parallel import Mesh, barrier, forward_backward, init_mesh
from minirl.parallel.collectives import gather_objects
from minirl.parallel.mesh import Group
from minirl.parallel.pipeline import run_schedule, split_stages, stage_layers
from minirl.parallel.schedule import simulate
from minirl.rollout import Rollout

dist = pytest.mark.dist
STORIES = Path(__file__).resolve().parents[2] / "shared" / "models" / "stories260k"
LETTERS = Pieces(*"abcdefghij")  # 0..9, EOS 10, padding 11
SHAPES = {
    "llama": dict(num_hidden_layers=5),  # tied
    "qwen3": dict(num_hidden_layers=4, head_dim=6, qk_norm=True, tie_word_embeddings=False),
    "gpt2": dict(num_hidden_layers=4, norm="layer", gated_mlp=False, learned_positions=True, mlp_bias=True),
    "gemma": dict(num_hidden_layers=4, norm="gemma", norm_placement="both", scale_embedding=True, sliding_window=4,
                  layer_types=("sliding_attention", "full_attention") * 2, final_logit_softcapping=5.0),
}


def build(name: str) -> Transformer:
    if name == "stories260k":
        return load_model(STORIES, torch.float64)
    config = ModelConfig(12, 16, 20, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
                         **SHAPES[name])
    return Transformer(config).init_weights(torch.Generator().manual_seed(0)).double()


def rows_of_8() -> Rollout:
    """8 rows of 4 prompts; later rows are longer, so replicas differ in tokens, and microbatches in width."""
    g = torch.Generator().manual_seed(1)
    lengths = torch.tensor([4, 5, 4, 6, 9, 12, 14, 18])
    T = int(lengths.max())
    column = torch.arange(T - 1)
    mask = (column >= 2) & (column < lengths[:, None] - 1)
    old = -2 - torch.rand(8, T - 1, generator=g, dtype=torch.float64)
    return Rollout(torch.randint(0, 10, (8, T), generator=g), mask, lengths, torch.arange(8) // 2, torch.arange(8),
                   old_logprobs=old, advantages=torch.randn(8, 1, generator=g, dtype=torch.float64))


STEPS = {2: 2, 4: 5}  # by the number of stages; five of two stages are in test_layouts.py


def study(mesh: Mesh, steps: int, name: str, kind: str, chunks: int, size: int, option: str) -> dict:
    """Updates (or one), log-probs and samples: all that is to be the same on one rank and on several."""
    model, rollout = split_stages(build(name), mesh, chunks, kind), rows_of_8()
    if option == "packed":
        rollout = rollout.replace(documents=(torch.arange(rollout.tokens.shape[1]) >= 3).long().expand(8, -1))
    if option == "frozen":  # nothing to train on the first stage
        for parameter_name, p in model.named_parameters():
            p.requires_grad_(parameter_name.startswith(("layers.4.", "norm")))
    model.gradient_checkpointing = option == "checkpointing"
    mine = [*range(8)][mesh.dp_rank * 8 // mesh.dp : (mesh.dp_rank + 1) * 8 // mesh.dp]
    if option == "no rows":
        mine = [] if mesh.dp_rank else [*range(8)]
    rollout = rollout.rows(torch.tensor(mine, dtype=torch.int64))
    result = {"losses": [], "tied": {}}
    optimizer = AdamW(model.named_parameters(), 1e-2, weight_decay=0.1) if option != "frozen" else None
    for step in range(steps if option in ("", "no rows") and name in ("llama", "qwen3", "stories260k") else 1):
        total = loss_total("token", rollout.action_mask, mesh)

        def loss_fn(out, mb, total=total):
            per_token = clipped_surrogate(out.logprobs, mb.old_logprobs, mb.advantages, 0.2, 0.2)
            return aggregate(per_token - 0.1 * out.entropy, mb.action_mask, "token", total), policy_stats(
                out.logprobs, mb.old_logprobs, None, out.entropy, mb.advantages, mb.action_mask, 0.2, 0.2)

        mesh.ledger.clear()
        stats = forward_backward(model, rollout.microbatches(size), loss_fn, mesh, 0.7, entropy=True)
        result["losses"].append(stats["loss"])
        if step == 0:
            result |= {"stats": stats, "sent": mesh.ledger.bytes.get(("send", "pp"), 0), "grads": {
                name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}}
        if optimizer:
            optimizer.step()
            optimizer.zero_grad()
    result["weights"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    if len(rollout):
        result["logprobs"] = rollout_logprobs(model, rollout, size, 0.7)
        with torch.no_grad():
            result["entropy"] = token_logprobs(model, rollout.tokens, 0.7, entropy=True).entropy
    for temperature in (1.0, 0.0) if name == "qwen3" else (1.0,):
        sampled = generate(model, [[3], [1, 2, 7], [5, 0, 0, 9], [2, 2]], LETTERS, group_size=2, max_new_tokens=7,
                           temperature=temperature, seed=4, max_rows=5,
                           respond=lambda row, action: [1, row] if len(action) < 4 else [])
        result[f"tokens {temperature}"] = [row[:n] for row, n in zip(sampled.tokens.tolist(), sampled.lengths.tolist(),
                                                                     strict=True)]
        result[f"old_logprobs {temperature}"] = sampled.old_logprobs
    return result


STUDIES = {  # (dp, pp) -> (model, schedule, chunks, microbatch size, option)
    (1, 2): [("llama", "gpipe", 1, 3, ""), ("llama", "1f1b", 1, 3, "checkpointing"), ("llama", "interleaved", 2, 3, ""),
             ("llama", "1f1b", 1, 3, "packed"), ("llama", "1f1b", 1, 3, "frozen"), ("qwen3", "1f1b", 1, 2, ""),
             ("qwen3", "interleaved", 2, 8, ""), ("gpt2", "1f1b", 1, 3, ""), ("gemma", "interleaved", 2, 3, ""),
             ("stories260k", "1f1b", 1, 3, ""), ("stories260k", "interleaved", 2, 3, "")],
    (1, 4): [("llama", "1f1b", 1, 1, ""), ("llama", "1f1b", 1, 4, ""), ("qwen3", "gpipe", 1, 8, ""),
             ("gemma", "interleaved", 1, 3, "")],
    (2, 2): [("llama", "1f1b", 1, 1, ""), ("qwen3", "interleaved", 2, 1, ""), ("llama", "1f1b", 1, 3, "no rows")],
}


def studies(*layouts: tuple[int, int]) -> dict:
    results = {}
    for dp, pp in layouts:
        mesh = init_mesh("cpu", dp=dp, pp=pp)
        for case in STUDIES[dp, pp]:
            if case[0] != "stories260k" or STORIES.is_dir():
                results[(dp, pp, *case)] = study(mesh, STEPS[pp], *case)
    return results


@pytest.fixture(scope="module")
def staged() -> dict:
    """(dp, pp, *case) -> the result of every rank."""
    ranks = at_once(functools.partial(run_ranks, studies, 2, (1, 2), timeout=300),
                    functools.partial(run_ranks, studies, 4, (1, 4), (2, 2), timeout=300))
    return {case: [result[case] for result in each] for each in ranks for case in each[0]}


@functools.cache
def alone(steps: int, name: str, size: int, option: str) -> dict:
    """On one process, which has no schedule: once for all of them."""
    return study(Mesh(), steps, name, "1f1b", 1, size, option)


def close(found, wanted, hint):
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11, msg=lambda text: f"{hint}: {text}")


@dist
@pytest.mark.parametrize("case", [(*layout, *case) for layout, cases in STUDIES.items() for case in cases], ids=str)
def test_losses_gradients_weights_and_samples_are_those_of_one_process(staged, case):
    if case not in staged:
        pytest.skip("no stories260k here")
    dp, pp, name, _, _, size, option = case
    one = alone(STEPS[pp], name, size, option)
    assert len({tuple(row) for row in one["tokens 1.0"]}) == 8, "the samples differ"
    for rank, found in enumerate(staged[case]):
        close(torch.tensor(found["losses"]), torch.tensor(one["losses"]), f"losses on rank {rank}")
        assert found["stats"].keys() == one["stats"].keys()
        for key, value in one["stats"].items():
            assert found["stats"][key] == pytest.approx(value, rel=1e-9, abs=1e-11), f"{key} on rank {rank}"
        for kind in ("grads", "weights"):
            for key, value in found[kind].items():
                close(value, one[kind][key], f"{kind} of {key} on rank {rank}")
        for key in one:
            if key.startswith("tokens"):
                assert found[key] == one[key], f"{key} on rank {rank}"
            if key.startswith("old_logprobs"):
                close(found[key], one[key], f"{key} on rank {rank}")
        if dp == 1:
            for key in ("logprobs", "entropy"):
                close(found[key], one[key], f"{key} on rank {rank}")
    for kind in ("grads", "weights"):
        assert {*one[kind]} == {key for found in staged[case][:pp] for key in found[kind]}, "each is somewhere"
    held = Counter(key for found in staged[case][:pp] for key in found["weights"])
    assert {key for key, count in held.items() if count > 1} == (
        {"embed_tokens.weight"} if build(name).config.tie_word_embeddings else set()), "and only a tied matrix twice"
    assert len(set(found["stats"]["loss"] for found in staged[case])) == 1, "to the bit on all ranks"


@dist
def test_the_ledger_has_every_byte_of_the_formula(staged):
    for (dp, pp, name, _, chunks, size, option), results in staged.items():
        config = build(name).config
        wanted = 2 * 8 * config.vocab_size * config.hidden_size * config.tie_word_embeddings * dp  # both ends, float64
        if option == "frozen":
            wanted = 0
        for replica in range(dp):
            mine = [*range(8)] if dp == 1 or option == "no rows" else [*range(4 * replica, 4 * replica + 4)]
            if option == "no rows" and replica:
                continue
            for mb in rows_of_8().rows(torch.tensor(mine)).microbatches(size):
                B, T = mb.tokens.shape
                wanted += 2 * (pp * chunks - 1) * B * (T - 1) * config.hidden_size * 8
        assert sum(result["sent"] for result in results) == wanted, (dp, pp, name, chunks, size, option)


# ---- memory and time ----

def watch_graphs(model: Transformer) -> list[int]:
    """A list of one number: the most passes through this stage's layers whose activations autograd kept at once."""
    passes, kept, peak, run = itertools.count(), Counter(), [0], model.run

    class Box:
        def __init__(self, tensor):
            self.tensor = tensor

    def counting(*args):
        number = next(passes)

        def pack(tensor):
            box = Box(tensor)
            kept[number] += 1
            weakref.finalize(box, kept.subtract, [number])
            peak[0] = max(peak[0], sum(count > 0 for count in kept.values()))
            return box

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
            return run(*args)

    model.run = counting
    return peak


def build_deep() -> Transformer:
    return Transformer(ModelConfig(12, 8, 8, 8, 1)).init_weights(torch.Generator().manual_seed(0)).double()


class Clock:
    """A stage's time: on the wall, or counted. Counted, the stamps of what arrives set it, as with Lamport's clocks."""

    def __init__(self, seconds: float = 0.0):
        self.seconds, self.now = seconds, 0.0  # seconds on the wall of one unit of time

    def work(self, x: torch.Tensor, units: float) -> torch.Tensor:
        """Begin when x is there and this stage is free; the result carries the time at which the work is done."""
        time.sleep(units * self.seconds)
        self.now = max(self.now, float(x.flatten()[0])) + units
        return torch.full_like(x, self.now)


class Worker(nn.Module):
    """A layer that takes `units` of time forward and twice as long backward, and no processor: many fit on one core."""

    def __init__(self, clock: Clock, units: float):
        super().__init__()
        self.clock, self.units, self.weight = clock, units, nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x, *_):
        return Work.apply(x * self.weight, self.clock, self.units)


class Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, clock, units):
        ctx.clock, ctx.units = clock, units
        return clock.work(x, units)

    @staticmethod
    def backward(ctx, grad):
        return ctx.clock.work(grad, 2 * ctx.units), None, None


def workers(mesh: Mesh, kind: str, chunks: int, clock: Clock) -> Transformer:
    """8 layers that take 4 units in all, so 1 a stage."""
    model = build_deep()
    model.embed_tokens.weight.data.zero_()  # the stamp of what comes in
    for i in range(8):
        model.layers[i] = Worker(clock, 0.5)
    return split_stages(model, mesh, chunks, kind)


def update(model: Transformer, microbatches: int, mesh: Mesh) -> None:
    """With a gradient of 0, the stamp of what comes back."""
    rows = [rows_of_8().rows(torch.tensor([i % 8])) for i in range(microbatches)]
    run_schedule(model, rows, lambda out, mb: (out.logprobs.sum() * 0, {}), mesh)


def measured(cases) -> list[tuple]:
    """For each case: graphs alive at most, the same as the pipeline has counted, and when this stage was done."""
    mesh, found = init_mesh("cpu", dp=1, pp=4), []
    for kind, chunks, microbatches in cases:
        model = split_stages(build_deep(), mesh, chunks, kind)
        alive = watch_graphs(model)
        update(model, microbatches, mesh)
        clock = Clock()
        update(workers(mesh, kind, chunks, clock), microbatches, mesh)
        found.append((alive[0], model.pipeline.peak, clock.now))
    return found


def bubbles(cases) -> list[list[float]]:
    """The share of their time in which stages stood idle; again until it is as wanted, for others work here too."""
    mesh = init_mesh("cpu", dp=1, pp=4)
    found = [[] for _ in cases]
    for (kind, chunks, microbatches, seconds, wanted), bubble in zip(cases, found, strict=True):
        model = workers(mesh, kind, chunks, Clock(seconds))
        while len(bubble) < 10 and wanted not in bubble:
            barrier(mesh)
            began = time.monotonic()
            update(model, microbatches, mesh)
            times = gather_objects((began, time.monotonic()), mesh.pp_group)
            makespan = max(end for _, end in times) - min(began for began, _ in times)
            bubble.append(1 - 3 * seconds * microbatches / makespan)
    return found


@dist
def test_activations_are_freed_and_stages_work_and_wait_as_in_the_simulation():
    cases = [("gpipe", 1, 6), ("1f1b", 1, 6), ("1f1b", 1, 2), ("interleaved", 2, 8), ("interleaved", 2, 6)]
    results = run_ranks(measured, 4, cases, timeout=300)
    for (kind, chunks, microbatches), *stages in zip(cases, *results, strict=True):
        timeline = simulate(kind, 4, microbatches, chunks)
        alive, counted, ends = zip(*stages, strict=True)
        assert [*alive] == [*counted] == timeline.peak, f"activations of {kind}, {microbatches} microbatches"
        assert [*ends] == [span[-1][1] for span in timeline.spans], f"time of {kind}, {microbatches} microbatches"


@dist
@pytest.mark.skipif(os.getloadavg()[0] > 4 * (os.cpu_count() or 1), reason="too busy a machine to measure times on")
def test_real_stages_stand_idle_for_as_long_as_the_formula_says():
    cases = [("1f1b", 1, 8, 0.06), ("interleaved", 2, 4, 0.12)]
    cases = [(*case, pytest.approx(3 / (case[1] * case[2] + 3), rel=0.15)) for case in cases]
    for found in run_ranks(bubbles, 4, cases, timeout=300):
        for case, bubble in zip(cases, found, strict=True):
            assert bubble[-1] == case[-1], (case[0], bubble)


# ---- what goes wrong ----

def breaks(where: str) -> None:
    mesh = init_mesh("cpu", dp=1, pp=2)
    model, seen = split_stages(build("llama"), mesh), itertools.count(1)

    def loss_fn(out, mb):
        if where == "loss" and next(seen) == 3:
            raise ArithmeticError("microbatch 2 is broken")
        return out.logprobs.sum(), {}

    if where == "layer" and mesh.pp_rank == 0:
        model.layers[1].mlp.register_forward_hook(lambda _, args, out: out / (1 // (3 - next(seen))))
    if where == "gradient":
        token_logprobs(model, rows_of_8().tokens)
    size = 2 + mesh.pp_rank * (where == "microbatches")
    forward_backward(model, rows_of_8().microbatches(size), loss_fn, mesh)


@dist
@pytest.mark.parametrize(("where", "message"), [
    ("loss", r"rank 1 of 2: Traceback(.|\n)*ArithmeticError: microbatch 2 is broken"),
    ("layer", r"rank 0 of 2: Traceback(.|\n)*ZeroDivisionError"),
    ("microbatches", r"given the same microbatches, but stage 0 has tokens of \[\(2, 4\).*stage 1 of \[\(3, 5\)"),
    ("gradient", "has no gradient: use forward_backward"),
])
def test_an_error_on_one_stage_ends_the_job_with_its_traceback(where, message):
    began = time.monotonic()
    with pytest.raises(RankError, match=message):
        run_ranks(breaks, 2, where, timeout=60)
    assert time.monotonic() - began < 60


def stage(rank: int, of: int) -> Mesh:
    return Mesh(pp=of, pp_rank=rank, pp_group=Group("pp", tuple(range(of)), rank))


@pytest.mark.parametrize(("pp", "chunks", "kind", "message"), [
    (6, 1, "1f1b", "5 layers do not fill 6 stages: use --pp 5 or less"),
    (2, 3, "interleaved", "5 layers do not fill 2 stages of 3 chunks: use --pp 1 or less, or fewer chunks"),
    (2, 2, "1f1b", "schedule 1f1b has one slice a stage, not 2: use interleaved"),
    (2, 1, "2f2b", "'2f2b' is unknown: use one of gpipe, 1f1b, interleaved"),
    (1, 2, "interleaved", "2 chunks a stage need a pipeline: use --pp 2 or more, or 1 chunk"),
])
def test_a_layout_that_cannot_be_is_refused_and_the_model_stays_whole(pp, chunks, kind, message):
    model = build("llama")
    with pytest.raises(UserError, match=message):
        split_stages(model, stage(0, pp), chunks, kind)
    assert model.pipeline is None and len(model.state_dict()) == len(build("llama").state_dict())


# ---- where to cut ----

def cuts(layers: int, slices: int, head: float, chunks: int = 1) -> list[int]:
    """Sizes of the slices, where a layer is 100 x 100 and the head as large as `head` layers."""
    config = ModelConfig(int(head * 100), 10, 10, layers, 1, gated_mlp=True)
    layer = 10 * (2 * 2 * 10 + 3 * 10)
    config = ModelConfig(round(head * layer / 10), 10, 10, layers, 1)
    ranges = stage_layers(config, slices // chunks, chunks)
    assert [i for each in ranges for i in each] == [*range(layers)]
    return [len(each) for each in ranges]


def test_slices_are_as_even_as_layers_and_head_allow():
    assert cuts(8, 1, 1) == [8]
    assert cuts(8, 4, 0.1) == [2, 2, 2, 2]
    assert cuts(5, 2, 1) == [3, 2], "the head is a layer"
    assert cuts(28, 2, 10) == [19, 9], "and where there are many words as good as ten"
    assert cuts(28, 4, 10) == [9, 9, 9, 1]
    assert cuts(9, 4, 0.1) == [2, 2, 3, 2], "early stages keep more activations: the odd layer comes late"
    assert cuts(4, 4, 5) == [1, 1, 1, 1]
    assert cuts(10, 4, 0.7, chunks=2) == [2, 3, 3, 2]
