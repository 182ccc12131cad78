"""Data parallelism on real processes: however the rows are cut, the numbers are those of one process."""

import math
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from ranks import RankError, run_ranks
from torch import nn

from minirl.config import UserError
from minirl.env import Addition, Example
from minirl.env.base import SingleTurn
from minirl.env.loop import collect
from minirl.evaluate import evaluate
from minirl.logprobs import token_logprobs
from minirl.lora import add_lora
from minirl.losses import aggregate, clipped_surrogate, kl_estimate, loss_total, policy_stats, prompt_tokens, sft_loss
from minirl.model import ModelConfig, Transformer
from minirl.optim import AdamW, SkipCounter, clip_gradients
from minirl.parallel import Mesh, StopSignal, all_reduce_sum, barrier, forward_backward, init_mesh, pick_dtype, share_of
from minirl.parallel.data import Overlap, sum_gradients
from minirl.parallel.mesh import pick_device
from minirl.rollout import Rollout
from minirl.tokenizer import ByteTokenizer

dist = pytest.mark.dist
REPO = Path(__file__).resolve().parents[1]
MODES = ("token", "sequence", "prompt", "constant")
CUTS = ((1, 0), (2, 5), (4, 0), (8, 5))  # rows of a microbatch, columns of padding
EPS, KL_COEF, LIMIT, TEMPERATURE = 0.2, 0.1, 16, 0.7


def tiny_model() -> Transformer:
    config = ModelConfig(258, 16, 32, 2, 4, 2, max_position_embeddings=32)
    return Transformer(config).init_weights(torch.Generator().manual_seed(0)).double()


def tiny_rollout() -> Rollout:
    """8 rows of 4 prompts. Later rows are longer, so ranks differ in tokens; row 2 has no action at all."""
    g = torch.Generator().manual_seed(1)
    lengths = torch.tensor([4, 5, 4, 6, 9, 12, 14, 18])
    T = int(lengths.max())
    tokens = torch.randint(0, 256, (8, T), generator=g)
    column = torch.arange(T - 1)
    mask = (column >= 2) & (column < lengths[:, None] - 1) & (torch.rand(8, T - 1, generator=g) < 0.8)
    mask[2] = False
    old = -3 - torch.rand(8, T - 1, generator=g, dtype=torch.float64) * 4
    return Rollout(tokens, mask, lengths, torch.arange(8) // 2, torch.arange(8), old_logprobs=old,
                   advantages=torch.randn(8, 1, generator=g, dtype=torch.float64),
                   ref_logprobs=old + 0.3 * torch.randn(8, T - 1, generator=g, dtype=torch.float64))


def per_token_loss(logprobs, rows: Rollout):
    surrogate = clipped_surrogate(logprobs, rows.old_logprobs, rows.advantages, EPS, EPS)
    return surrogate + KL_COEF * kl_estimate(logprobs, rows.ref_logprobs, "k3")


def padded(rows: Rollout, extra: int) -> Rollout:
    """`extra` columns of rubbish on the right."""
    wide = {name: F.pad(value, (0, extra), value=0 if value.dtype == torch.bool else 7)
            for name, value in rows.tensors().items() if value.dim() == 2 and name != "advantages"}
    return rows.replace(**wide)


def gradients(model: Transformer) -> dict[str, torch.Tensor]:
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return grads


def every_cut() -> dict:
    """On one rank: loss, stats and gradients for every mode, microbatch size and padding."""
    mesh, model, cuts = init_mesh("cpu"), tiny_model(), {}
    mine = share_of(tiny_rollout(), mesh)
    mine = mine.replace(prompt_tokens=prompt_tokens(mine.action_mask, mine.group))
    for mode in MODES:
        total = loss_total(mode, mine.action_mask, mesh, mine.group, LIMIT)

        def loss_fn(out, mb, mode=mode, total=total):
            loss = aggregate(per_token_loss(out.logprobs, mb), mb.action_mask, mode, total, mb.prompt_tokens)
            return loss, policy_stats(out.logprobs, mb.old_logprobs, mb.ref_logprobs, out.entropy, mb.advantages,
                                      mb.action_mask, EPS, EPS)

        for size, extra in CUTS:
            microbatches = [padded(mb, extra) for mb in mine.microbatches(size)]
            stats = forward_backward(model, microbatches, loss_fn, mesh, TEMPERATURE, entropy=True)
            cuts[mode, size, extra] = stats, gradients(model)
    return cuts


@pytest.mark.parametrize("mode", MODES)
def test_rows_that_a_filter_took_away_need_no_pass(mode):
    """`acting` leaves them out: loss, stats and gradients are those of all rows, to the last digits."""
    mesh, model, rows = Mesh(), tiny_model(), tiny_rollout()
    rows = rows.replace(action_mask=rows.action_mask & (torch.arange(len(rows)) % 3 != 1)[:, None])
    rows = rows.replace(prompt_tokens=prompt_tokens(rows.action_mask, rows.group))
    total, found = loss_total(mode, rows.action_mask, mesh, rows.group, LIMIT), []

    def loss_fn(out, mb):
        loss = aggregate(per_token_loss(out.logprobs, mb), mb.action_mask, mode, total, mb.prompt_tokens)
        return loss, policy_stats(out.logprobs, mb.old_logprobs, mb.ref_logprobs, out.entropy, mb.advantages,
                                  mb.action_mask, EPS, EPS)

    for part in (rows, rows.acting()):
        stats = forward_backward(model, part.microbatches(4), loss_fn, mesh, TEMPERATURE, entropy=True)
        assert stats["rows"] == len(rows.acting()), "the others dilute no mean over rows"
        found.append(stats | gradients(model))
    assert len(rows.acting()) < len(rows)
    torch.testing.assert_close(found[1], found[0], atol=1e-12, rtol=1e-9)


def by_hand(mode: str) -> tuple[dict, dict]:
    """The same, row by row, without padding, masks, microbatches or `aggregate`."""
    model, rollout = tiny_model(), tiny_rollout()
    counts = rollout.action_mask.sum(1).tolist()
    stats = {"tokens": sum(counts), "rows": sum(n > 0 for n in counts), "loss": 0.0, "max_ratio_deviation": 0.0,
             "approx_kl": 0.0}
    for i, length in enumerate(rollout.lengths.tolist()):
        row = rollout.rows(torch.tensor([i]))
        logprobs = token_logprobs(model, rollout.tokens[i : i + 1, :length], TEMPERATURE)
        prompt = i // 2 * 2
        weight = {"token": 1 / sum(counts), "sequence": 1 / max(1, counts[i]) / 8,
                  "prompt": 1 / max(1, counts[prompt] + counts[prompt + 1]) / 4, "constant": 1 / (8 * LIMIT)}[mode]
        loss = weight * per_token_loss(logprobs, row)[row.action_mask].sum()
        loss.backward()
        moved = (logprobs - row.old_logprobs)[row.action_mask].detach()
        stats["loss"] += loss.item()
        stats["approx_kl"] += (moved.exp() - 1 - moved).sum().item()
        stats["max_ratio_deviation"] = max([stats["max_ratio_deviation"], *(moved.exp() - 1).abs().tolist()])
    return stats, gradients(model)


@pytest.fixture(scope="module")
def cuts() -> dict[int, list[dict]]:
    return {ranks: run_ranks(every_cut, ranks) for ranks in (1, 2, 4)}


@dist
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", (1, 2, 4))
def test_losses_and_gradients_are_those_of_one_row_at_a_time(cuts, ranks, mode):
    stats, grads = by_hand(mode)
    for rank, results in enumerate(cuts[ranks]):
        for size, extra in CUTS:
            where = f"rank {rank} of {ranks}, microbatches of {size}, {extra} columns of padding"
            got_stats, got_grads = results[mode, size, extra]
            for name, value in stats.items():
                assert math.isclose(got_stats[name], value, rel_tol=1e-9, abs_tol=1e-12), f"{name} on {where}"
            for name, grad in grads.items():
                torch.testing.assert_close(got_grads[name], grad, rtol=1e-9, atol=1e-12,
                                           msg=lambda text, at=f"{name} on {where}": f"{at}: {text}")


@dist
def test_all_ranks_end_with_the_same_bits(cuts):
    for results in cuts.values():
        for cut, (stats, grads) in results[0].items():
            for other_stats, other_grads in (other[cut] for other in results[1:]):
                assert other_stats == stats
                assert all(torch.equal(other_grads[name], grads[name]) for name in grads)


def test_the_rows_of_the_ranks_are_unequal_enough_to_tell_a_mean_of_means():
    tokens = [int(share_of(tiny_rollout(), Mesh(dp=2, dp_rank=rank)).action_mask.sum()) for rank in (0, 1)]
    assert tokens[1] > 3 * tokens[0] > 0


# ---- one rank unlike the others ----

def constant_losses(counts: list[int], values: list[float]) -> tuple[dict, int]:
    """Rank r has one row of counts[r] action tokens, each with the loss values[r]; none if counts[r] is 0."""
    mesh, model = init_mesh("cpu"), tiny_model()
    count = counts[mesh.dp_rank]
    mask = torch.ones(min(count, 1), max(count, 1), dtype=torch.bool)
    tokens = torch.zeros(len(mask), max(count, 1) + 1, dtype=torch.int64)
    rows = Rollout(tokens, mask, torch.full((len(mask),), count + 1), *[torch.arange(len(mask))] * 2)
    total = loss_total("token", mask, mesh)

    def loss_fn(out, mb):
        per_token = out.logprobs * 0 + values[mesh.dp_rank]
        return aggregate(per_token, mb.action_mask, "token", total), {"tokens": mb.action_mask.sum()}

    stats = forward_backward(model, rows.microbatches(2), loss_fn, mesh)
    return stats, sum(p.grad is not None for p in model.parameters()) - len(list(model.parameters()))


@dist
def test_two_tokens_of_loss_1_and_eight_of_a_quarter_have_the_mean_two_fifths():
    for stats, _ in run_ranks(constant_losses, 2, [2, 8], [1.0, 0.25]):
        assert stats == {"loss": 0.4, "tokens": 10}, "0.625 is the mean of the ranks' means"


@dist
def test_a_rank_without_rows_takes_part_and_reports_what_the_others_have():
    for stats, without_gradient in run_ranks(constant_losses, 4, [0, 2, 0, 8], [9.0, 1.0, 9.0, 0.25]):
        assert stats == {"loss": 0.4, "tokens": 10} and not without_gradient


def masked_rank() -> tuple[dict, dict]:
    mesh, model = init_mesh("cpu"), tiny_model()
    rollout = tiny_rollout()
    rollout.action_mask[4:] = False  # all of the second rank
    mine = share_of(rollout, mesh)
    total = loss_total("token", mine.action_mask, mesh)
    stats = forward_backward(model, mine.microbatches(2), lambda out, mb: (
        aggregate(sft_loss(out.logprobs), mb.action_mask, "token", total), {}), mesh)
    return stats, gradients(model)


@dist
def test_a_rank_whose_masks_are_all_false_changes_nothing():
    (_, alone), *_ = run_ranks(masked_rank, 1)
    for stats, grads in run_ranks(masked_rank, 2):
        assert math.isfinite(stats["loss"]) and stats["loss"] > 0
        for name in alone:
            torch.testing.assert_close(grads[name], alone[name], rtol=1e-9, atol=1e-12)


def reduced_stats() -> dict:
    mesh = init_mesh("cpu")
    mine, seen = share_of(tiny_rollout(), mesh), iter(([3, 9], [5, 4])[mesh.dp_rank])

    def loss_fn(out, mb):
        value = torch.tensor(float(next(seen)))
        return out.logprobs.sum() * 0, {"count": value, "max_count": value}

    return forward_backward(tiny_model(), mine.microbatches(2), loss_fn, mesh)


@dist
def test_stats_are_summed_and_those_named_max_are_maxima():
    assert run_ranks(reduced_stats, 2) == [{"count": 21.0, "max_count": 9.0, "loss": 0.0}] * 2


# ---- several updates ----

class WithSpare(Transformer):
    """A model with a matrix that only the first rank's loss touches."""

    def __init__(self):
        super().__init__(ModelConfig(258, 16, 32, 1, 4, 2, max_position_embeddings=32))
        self.init_weights(torch.Generator().manual_seed(0))
        self.spare = nn.Parameter(torch.ones(3, 2))


def five_updates(poison: str = "") -> dict:
    """Five updates; before the third, rank 1 may get a number that is not finite. States after each, in bytes."""
    mesh, model = init_mesh("cpu"), WithSpare()
    mine = share_of(tiny_rollout(), mesh)
    optimizer, guard = AdamW(model.named_parameters(), 1e-2, weight_decay=0.1), SkipCounter()
    states, norms = [], []
    for step in range(1, 6):
        total = loss_total("token", mine.action_mask, mesh)

        def loss_fn(out, mb, total=total, step=step):
            loss = aggregate(sft_loss(out.logprobs), mb.action_mask, "token", total)
            if mesh.dp_rank == 0:
                loss = loss + model.spare.square().sum()
            if step == 3 and mesh.dp_rank == 1 and poison == "loss":
                loss = loss + math.nan  # the gradient stays finite
            if step == 3 and mesh.dp_rank == 1 and poison == "gradient":
                loss = loss + (out.logprobs.sum() * 0).clamp(min=0).sqrt()  # 0, with the slope of sqrt at 0
            return loss, {}

        stats = forward_backward(model, mine.microbatches(2), loss_fn, mesh)
        norms.append(float(clip_gradients(model.parameters(), 1.0, mesh)))
        guard.step(optimizer, norms[-1], 1e-2, stats["loss"])
        optimizer.zero_grad()
        tensors = {**model.state_dict(), **optimizer.state_tensors()}
        states.append({name: tensor.numpy().tobytes() for name, tensor in tensors.items()})
    return {"states": states, "norms": norms, "skipped": guard.skipped, "in_a_row": guard.in_a_row,
            "spare": model.spare.detach()}


@dist
def test_weights_and_optimizer_are_equal_to_the_bit_after_each_of_5_updates_with_a_parameter_unused_on_one_rank():
    first, second = run_ranks(five_updates, 2)
    assert first["states"] == second["states"]
    assert first["spare"].max() < 0.97, "the spare matrix was trained"
    assert len({state["layers.0.mlp.up_proj.weight"] for state in first["states"]}) == 5


@dist
@pytest.mark.parametrize("poison", ("loss", "gradient"))
def test_a_nan_on_one_rank_skips_the_update_on_all_and_training_goes_on(poison):
    first, second = run_ranks(five_updates, 2, poison)
    for result in (first, second):
        states = result["states"]
        assert states[2] == states[1], "weights, averages and the optimizer's count stay as they were"
        assert states[3] != states[2] and states[4] != states[3]
        assert (result["skipped"], result["in_a_row"]) == (1, 0)
        assert [math.isfinite(norm) for norm in result["norms"]] == [True, True, poison == "loss", True, True]
    assert first["states"] == second["states"]


# ---- the sum in buckets, during backward ----

class Watched(Overlap):
    """Writes down when which bucket leaves."""

    def __enter__(self):
        self.events = []
        return super().__enter__()

    def backward(self, tensor, last, grad=None):
        super().backward(tensor, last, grad)
        self.events.append("backward")

    def send(self, bucket):
        self.events.append(self.buckets.index(bucket))
        super().send(bucket)


def summed_in_buckets(bucket_bytes: int, tied: bool) -> dict:
    """Gradients of 4, 2, 1 microbatches on three ranks; the last parameter has a gradient on the first rank alone."""
    mesh, model = init_mesh("cpu"), tiny_model()
    model.norm.spare = nn.Parameter(torch.ones(3, 2).double())
    if tied:  # as if the embedding were another stage's head
        model.pipeline = "a pipeline"
    sync = Watched(model, mesh, bucket_bytes)
    model.pipeline = None
    microbatches = [*tiny_rollout().microbatches(2)][: (4, 2, 1)[mesh.dp_rank]]

    def loss_of(microbatch):
        loss = token_logprobs(model, microbatch.tokens)[microbatch.action_mask].sum()
        return loss + model.norm.spare.square().sum() if mesh.dp_rank == 0 else loss

    for microbatch in microbatches:
        loss_of(microbatch).backward()
    alone = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    for microbatch in microbatches:
        loss_of(microbatch).backward()
    sum_gradients(model, mesh)
    in_one_piece = gradients(model)

    with sync:
        for number, microbatch in enumerate(microbatches, 1):
            sync.backward(loss_of(microbatch), last=number == len(microbatches))
        if tied and mesh.dp_rank == 0:
            assert torch.equal(model.embed_tokens.weight.grad, alone["embed_tokens.weight"]), "it was summed too early"
    hooks = sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())
    differences = [float((grad - in_one_piece[name]).abs().max()) for name, grad in gradients(model).items()]
    return {"buckets": len(sync.buckets), "events": sync.events, "hooks": hooks, "difference": max(differences)}


@dist
@pytest.mark.parametrize(("bucket_bytes", "tied"), [(2000, False), (2000, True), (10**9, False)])
def test_buckets_leave_in_one_order_on_all_ranks_and_bring_the_sum_in_one_piece(bucket_bytes, tied):
    for rank, result in enumerate(run_ranks(summed_in_buckets, 3, bucket_bytes, tied)):
        order = [event for event in result["events"] if event != "backward"]
        assert order == [*range(result["buckets"])] and result["buckets"] > (5 if bucket_bytes == 2000 else 0)
        assert result["difference"] < 1e-12 and not result["hooks"]
        backwards = (4, 2, 1)[rank]
        assert result["events"][: backwards - 1] == ["backward"] * (backwards - 1), "an earlier microbatch was sent"
        # The spare matrix is in the first bucket. Ranks that do not reach it must not send the others before.
        during = result["events"][backwards - 1 :].index("backward")
        assert during == (result["buckets"] - tied if rank == 0 else 0)


def bfloat16_sums(count: int) -> tuple[float, float, float]:
    """How far the sum of `count` microbatches a rank is off: by adding in bfloat16, by what is added, and in all."""
    mesh = init_mesh("cpu")
    config = ModelConfig(258, 64, 128, 2, 4, 2, max_position_embeddings=32)
    model = Transformer(config).init_weights(torch.Generator().manual_seed(0)).bfloat16()
    exact = Transformer(config).double()
    exact.load_state_dict(model.state_dict())
    n = count * mesh.dp
    tokens, ids = torch.randint(258, (n, 20), generator=torch.Generator().manual_seed(3)), torch.arange(n)
    rows = Rollout(tokens, torch.ones(n, 19, dtype=torch.bool), torch.full((n,), 20), ids, ids)

    def sums(model: Transformer, microbatches: list[Rollout], mesh: Mesh) -> torch.Tensor:
        forward_backward(model, microbatches, lambda out, mb: (-out.logprobs.sum() / n / 19, {}), mesh)
        return torch.cat([grad.double().flatten() for grad in gradients(model).values()])

    mine = [*rows.rows(torch.tensor([*mesh.share(n)])).microbatches(1)]
    parts = torch.stack([sums(model, [microbatch], Mesh()) for microbatch in mine]).sum(0)
    wide, right = all_reduce_sum(parts, mesh), sums(exact, [*rows.microbatches(n)], Mesh())
    found = sums(model, mine, mesh)
    off = (found - wide) / wide.norm(), (wide - right) / right.norm(), (found - right) / right.norm()
    return tuple(float(error.norm()) for error in off)


@dist
def test_what_sums_in_bfloat16_lose_is_little_beside_what_backward_loses():
    for adding, added, both in run_ranks(bfloat16_sums, 4, 4):
        assert 1e-3 < adding < 5e-3 and 1e-2 < added < 2e-2
        assert both < 1.1 * added


def staged_norm() -> tuple[float, list[float]]:
    """Stages with gradients of length 3 and 4, and a matrix of length 12 that both have."""
    mesh = init_mesh("cpu", pp=2)
    own, shared = nn.Parameter(torch.zeros(1).double()), nn.Parameter(torch.zeros(2, 2))
    own.grad, shared.grad, shared.tied = torch.tensor([3.0 + mesh.pp_rank]).double(), torch.full((2, 2), 6.0), True
    return float(clip_gradients([own, shared], 6.5, mesh)), [float(own.grad), float(shared.grad[0, 0])]


@dist
def test_stages_clip_by_one_norm_in_which_a_tied_matrix_counts_once():
    for stage, (norm, gradients_after) in enumerate(run_ranks(staged_norm, 2)):
        assert norm == pytest.approx(13, rel=1e-15)
        assert gradients_after == pytest.approx([1.5 + stage / 2, 3], rel=1e-15)


def dropped() -> tuple[torch.Tensor, bytes, bytes]:
    """What two updates of an adapter with dropout see of the same rows, random state and weights after them."""
    mesh, generator = init_mesh("cpu"), torch.Generator().manual_seed(0)
    model, seen = add_lora(tiny_model(), rank=2, dropout=0.5, generator=generator), []
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data.normal_(generator=generator)
    torch.manual_seed(0)  # as the trainers do, on every rank

    def loss_fn(out, mb):
        seen.append(out.logprobs.detach()[mb.action_mask])
        return out.logprobs[mb.action_mask].sum(), {}

    optimizer = AdamW(model.named_parameters(), 1e-3)
    for _ in range(2):
        forward_backward(model, tiny_rollout().microbatches(8), loss_fn, mesh)
        optimizer.step()
        optimizer.zero_grad()
    weights = torch.cat([p.detach().flatten() for p in optimizer.parameters.values()])
    return torch.stack(seen), torch.get_rng_state().numpy().tobytes(), weights.numpy().tobytes()


@dist
def test_dropout_masks_differ_by_replica_and_update_and_return_with_the_seed():
    (one, state, weights), (other, state2, weights2) = run_ranks(dropped, 2)
    assert (one != other).any(1).all() and (one[0] != one[1]).any(), "one stream of random numbers for all"
    assert state == state2, "the next update draws alike, also after a resume from one rank's checkpoint"
    assert weights == weights2, "replicas stay equal to the bit"
    again = run_ranks(dropped, 2)
    assert torch.equal(again[0][0], one) and torch.equal(again[1][0], other)


def norm_of_known_gradient() -> tuple[float, float]:
    """A gradient of length 0.8, half of it from each rank."""
    mesh, model = init_mesh("cpu"), tiny_model()
    model.norm.weight.data.fill_(1.0)
    rows = share_of(tiny_rollout(), mesh)

    def loss_fn(out, mb):
        return out.logprobs.sum() * 0 + 0.8 * model.norm.weight[0] * len(mb) / 8, {}

    forward_backward(model, rows.microbatches(2), loss_fn, mesh)
    return float(clip_gradients(model.parameters(), 1.0, mesh)), float(model.norm.weight.grad[0])


@dist
def test_the_gradient_norm_does_not_grow_with_the_number_of_ranks():
    for ranks in (1, 2, 4):
        for norm, after in run_ranks(norm_of_known_gradient, ranks):
            assert norm == pytest.approx(0.8, abs=1e-12) and after == pytest.approx(0.8, abs=1e-12), ranks


def ten_bad_updates() -> str:
    mesh, guard, model = init_mesh("cpu"), SkipCounter(), tiny_model()
    optimizer, mine = AdamW(model.named_parameters(), 1e-2), share_of(tiny_rollout(), mesh)
    bad = math.nan if mesh.dp_rank == 1 else 1.0
    for step in range(1, 20):
        stats = forward_backward(model, mine.microbatches(8), lambda out, mb: (out.logprobs.sum() * bad, {}), mesh)
        try:
            guard.step(optimizer, clip_gradients(model.parameters(), 1.0), 1e-2, stats["loss"])
        except UserError as error:
            return f"{step}: {error}"
    return "never"


@dist
def test_ten_skips_in_a_row_end_the_run_on_every_rank():
    for text in run_ranks(ten_bad_updates, 2):
        assert text.startswith("10: skipped 10 updates in a row")


# ---- sampling and evaluation ----

def sampled(same_prompt: bool, max_rows: int = 4096) -> tuple[list[list[int]], Rollout]:
    mesh, model, tokenizer, env = init_mesh("cpu"), tiny_model(), ByteTokenizer(), Addition(1)
    mine = mesh.share(8)
    examples = [env.sample(1)[0] if same_prompt else example for example in env.sample(len(mine), start=mine.start)]
    rollout = collect(model, tokenizer, env, examples, 3, mine.start, seed=5, max_new_tokens=16, max_rows=max_rows)
    rows = [row[:length] for row, length in zip(rollout.tokens.tolist(), rollout.lengths.tolist())]
    return rows, rollout.replace(turns=[])


@dist
def test_ranks_and_batches_draw_the_tokens_that_one_process_draws():
    alone = run_ranks(sampled, 1, False)[0]
    for ranks, max_rows in ((1, 5), (2, 4096), (4, 4096)):
        parts = run_ranks(sampled, ranks, False, max_rows)
        assert [row for rows, _ in parts for row in rows] == alone[0], f"{ranks} ranks, {max_rows} rows at once"
        ids = torch.cat([rollout.sample_ids for _, rollout in parts])
        assert ids.tolist() == list(range(24)), "a sample has one number, whichever rank draws it"
        assert torch.equal(torch.cat([rollout.group for _, rollout in parts]), alone[1].group)


@dist
def test_samples_of_one_prompt_differ_within_and_between_ranks_and_return_with_the_seed():
    first, again = run_ranks(sampled, 2, True), run_ranks(sampled, 2, True)
    rows = [tuple(row) for rows, _ in first for row in rows]
    assert len(set(rows)) == len(rows) == 24, "two samples share their random numbers"
    assert [rows for rows, _ in first] == [rows for rows, _ in again]


@dataclass
class TenItems:
    """Item 9 of 10 is answered wrongly, whatever the policy says; remembers which items were played."""

    played: list[int] = field(default_factory=list)
    name, stop, max_new_tokens = "ten items", (), 3

    def size(self, split: str) -> int:
        return 10

    def sample(self, count: int, start: int = 0, split: str = "train") -> list[Example]:
        return [Example("?", str(index)) for index in range(start, start + count)]

    def reset(self, example: Example) -> SingleTurn:
        self.played.append(int(example.answer))
        return SingleTurn("?", lambda action: float(example.answer != "9"))


def evaluated(problems: int) -> tuple[dict, list[int]]:
    env = TenItems()
    return evaluate(tiny_model(), ByteTokenizer(), env, problems, init_mesh("cpu")), env.played


@dist
@pytest.mark.parametrize("ranks", (1, 4))
def test_ten_items_of_which_nine_are_right_are_exactly_nine_tenths(ranks):
    results = run_ranks(evaluated, ranks, 500)
    assert {metrics["eval/accuracy"] for metrics, _ in results} == {0.9}
    assert [item for _, played in results for item in played] == list(range(10)), "none is missing or counted twice"


@dist
def test_an_evaluation_of_fewer_problems_than_ranks_leaves_some_without_work():
    results = run_ranks(evaluated, 4, 2)
    assert {metrics["eval/accuracy"] for metrics, _ in results} == {1.0}
    assert sorted(item for _, played in results for item in played) == [0, 1]


# ---- the processes themselves ----

def stopped_at(signal_number: int) -> int:
    """A loop of 20 steps; rank 1 is signalled in the third. The step at which this rank leaves."""
    mesh, stop = init_mesh("cpu"), StopSignal()
    for step in range(1, 21):
        if step == 3 and mesh.dp_rank == 1:
            os.kill(os.getpid(), signal_number)
        if stop.requested(mesh):
            stop.close()
            return step
    return 0


@dist
@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGINT))
def test_a_signal_to_one_rank_stops_all_at_the_same_step(number):
    assert run_ranks(stopped_at, 3, number) == [3, 3, 3]


def test_a_stop_inside_another_reaches_both_and_close_gives_the_signals_back(monkeypatch):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    outer = StopSignal()
    inner = StopSignal()
    os.kill(os.getpid(), signal.SIGTERM)
    assert inner.received and outer.received
    inner.close()
    os.kill(os.getpid(), signal.SIGTERM)  # at once: torchrun passing on what the terminal has sent already
    monkeypatch.setattr("minirl.parallel.stop.GRACE", -1.0)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)  # the second signal interrupts at once
    outer.close()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert outer.requested(Mesh())


def fails_on_one() -> None:
    mesh = init_mesh("cpu")
    if mesh.dp_rank == 1:
        raise KeyError("broken row")
    barrier(mesh)


def dies_on_one() -> None:
    mesh = init_mesh("cpu")
    if mesh.dp_rank == 1:
        os._exit(7)
    barrier(mesh)


def sleeps() -> None:
    time.sleep(100)


@dist
def test_run_ranks_raises_what_a_rank_raised_and_leaves_no_process_behind():
    with pytest.raises(RankError, match=r"rank 1 of 2: Traceback(.|\n)*KeyError: 'broken row'"):
        run_ranks(fails_on_one, 2)
    with pytest.raises(RankError, match="rank 1 of 2: died with exit code 7"):
        run_ranks(dies_on_one, 2)
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] of 2"):
        run_ranks(sleeps, 2, timeout=1)
    assert not multiprocessing.active_children()


# ---- shares and choices ----

def test_shares_are_contiguous_equal_and_complete_or_refused():
    assert [[*Mesh(dp=4, dp_rank=rank).share(8)] for rank in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with pytest.raises(UserError, match=r"^10 prompts do not divide over 4 replicas: use a multiple of 4$"):
        Mesh(dp=4).share(10, "prompts")


def test_an_unknown_dtype_or_device_is_refused_with_the_choices():
    with pytest.raises(UserError, match="--dtype float16 is unknown: use auto, float32, float64, bfloat16"):
        pick_dtype("float16", torch.device("cpu"))
    with pytest.raises(UserError, match=r"--device gpu cannot be used here.*try cpu"):
        pick_device("gpu")


def test_auto_is_float32_on_the_cpu_where_bfloat16_is_slow():
    assert pick_dtype("auto", torch.device("cpu")) == torch.float32
