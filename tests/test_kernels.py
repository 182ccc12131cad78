import math
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck
from torch.testing import assert_close

from kernels import linear_logprob

MODULE = sys.modules["kernels.linear_logprob"]  # the module; `kernels.linear_logprob` is the function


def problem(rows, vocab, size=4, dtype=torch.float64):
    g = torch.Generator().manual_seed(rows * 1000 + vocab)
    hidden = torch.randn(rows, size, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocab, size, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(vocab, (rows,), generator=g)


def plain(hidden, weight, targets, temperature=1.0, softcap=0.0):
    logits = hidden @ weight.T
    logits = softcap * (logits / softcap).tanh() if softcap else logits
    logp = F.log_softmax(logits / temperature, -1)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def from_logits(logits, targets, **options):
    """The same function on logits of our choice: a hidden state of one 1."""
    return linear_logprob(torch.ones(1, 1, dtype=logits.dtype), logits[:, None], targets, **options)


def grads(loss, *inputs):
    return torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("vocab", [1, 2, 3, 5, 127, 1000, 1025, 50257])
def test_log_probs_entropy_and_gradients_equal_the_plain_formula(vocab, softcap):
    hidden, weight, targets = problem(6, vocab)
    upstream = torch.randn(2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ours = linear_logprob(hidden, weight, targets, 0.7, entropy=True, softcap=softcap)
    theirs = plain(hidden, weight, targets, 0.7, softcap)
    assert_close(ours, theirs)
    assert_close(*(grads((out[0] * upstream[0] + out[1] * upstream[1]).sum(), hidden, weight)
                   for out in (ours, theirs)))


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("entropy", [False, True])
def test_gradcheck(entropy, softcap):
    hidden, weight, targets = problem(5, 7)
    assert gradcheck(lambda h, w: linear_logprob(h, w, targets, 0.6, entropy, softcap), (hidden, weight))


def test_capped_logits_by_hand():
    logits = torch.tensor([30.0, 0.0])  # 30 tanh(1) = 22.848 and 0, at temperature 2 a difference of 11.424
    got = from_logits(logits, torch.tensor([1]), softcap=30.0, temperature=2.0)
    assert got.item() == pytest.approx(-11.42393 - math.log1p(math.exp(-11.42393)), abs=1e-4)


def test_gradcheck_of_the_entropy_alone():
    hidden, weight, targets = problem(5, 7)
    assert gradcheck(lambda h, w: linear_logprob(h, w, targets, 0.6, entropy=True)[1], (hidden, weight))


def test_the_size_of_a_chunk_changes_nothing(monkeypatch):
    results = []
    for rows in (100, 3, 1):  # all at once; 7 = 3 + 3 + 1; row by row
        monkeypatch.setattr(MODULE, "CHUNK_ROWS", rows)
        monkeypatch.setattr(MODULE, "CHUNK_LOGITS", 0)
        hidden, weight, targets = problem(7, 11)
        out = linear_logprob(hidden, weight, targets, entropy=True)
        results.append((*out, *grads((out[0] + 0.3 * out[1]).sum(), hidden, weight)))
    for other in results[1:]:
        assert_close(other, results[0], rtol=1e-12, atol=1e-12)


def test_no_tensor_of_rows_by_vocabulary_is_kept_for_backward():
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        linear_logprob(*problem(50, 300), entropy=True)
    assert saved and max(saved) < 50 * 300, "logits are kept: at V = 150,000 they do not fit in memory"


def test_temperature_divides_the_logits():
    logits = torch.tensor([2.0, 0.0])
    got = [from_logits(logits, torch.tensor([i]), temperature=0.5).item() for i in (0, 1)]
    assert got == pytest.approx([-0.018150, -4.018150], abs=1e-6)  # untempered: -0.126928, -2.126928
    for wrong in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=r"temperature .* must be > 0"):
            from_logits(logits, torch.tensor([0]), temperature=wrong)


def test_a_token_of_probability_zero_adds_nothing_to_the_entropy():
    logits = torch.tensor([0.0, 0.0, -math.inf])
    logprob, entropy = from_logits(logits, torch.tensor([0]), entropy=True)
    assert logprob.item() == pytest.approx(-math.log(2))
    assert entropy.item() == pytest.approx(math.log(2)), "0 * -inf is NaN"
    assert from_logits(logits, torch.tensor([2])).item() == -math.inf

    weight = logits[:, None].requires_grad_()
    for target in (0, 2):
        out = linear_logprob(torch.ones(1, 1), weight, torch.tensor([target]), entropy=True)
        grad, = grads(out[0].sum() + out[1].sum(), weight)
        assert grad.isfinite().all()


def test_leading_shapes_no_rows_and_strided_inputs():
    hidden, weight, targets = problem(6, 5)
    flat = linear_logprob(hidden, weight, targets)
    assert_close(linear_logprob(hidden.view(2, 3, 4), weight, targets.view(2, 3)), flat.view(2, 3))
    strided = hidden.T.contiguous().T, weight.T.contiguous().T, targets.repeat_interleave(2)[::2]
    assert not any(x.is_contiguous() for x in strided)
    assert_close(linear_logprob(*strided), flat)
    logprobs, entropy = linear_logprob(hidden[:0], weight, targets[:0], entropy=True)
    assert logprobs.shape == entropy.shape == (0,)


def test_half_precision_inputs_are_computed_in_float32():
    values = torch.randn(50257, generator=torch.Generator().manual_seed(0)).mul(8).bfloat16()
    logprob, entropy = from_logits(values, torch.tensor([17]), entropy=True)
    logp = F.log_softmax(values.double(), 0)
    assert logprob.dtype == entropy.dtype == torch.float32
    assert logprob.item() == pytest.approx(logp[17].item(), abs=1e-5)
    assert entropy.item() == pytest.approx(-(logp.exp() * logp).sum().item(), abs=1e-5)

    hidden, weight, targets = problem(9, 33, size=16, dtype=torch.bfloat16)
    out = linear_logprob(hidden, weight, targets)
    assert_close(out, plain(hidden.float(), weight.float(), targets)[0])  # and not the bfloat16 product
    assert {g.dtype for g in grads(out.sum(), hidden, weight)} == {torch.bfloat16}


def test_inputs_survive_and_backward_may_run_twice():
    hidden, weight, targets = problem(6, 5)
    before = hidden.detach().clone(), weight.detach().clone(), targets.clone()
    logprobs, entropy = linear_logprob(hidden, weight, targets, entropy=True)
    first = torch.autograd.grad((logprobs + entropy).sum(), (hidden, weight), retain_graph=True)
    second = torch.autograd.grad((logprobs + entropy).sum(), (hidden, weight))
    assert_close(first, second, rtol=0, atol=0)
    assert_close((hidden.detach(), weight.detach(), targets), before, rtol=0, atol=0)


def test_a_frozen_input_gets_no_gradient_and_a_row_without_upstream_gradient_none():
    hidden, weight, targets = problem(6, 5)
    keep = torch.tensor([1.0, 1, 0, 0, 1, 1], dtype=torch.float64)
    full = grads((linear_logprob(hidden, weight, targets) * keep).sum(), hidden, weight)
    alone = grads((linear_logprob(hidden, weight.detach(), targets) * keep).sum(), hidden)
    assert_close(alone[0], full[0])
    assert_close(grads((linear_logprob(hidden.detach(), weight, targets) * keep).sum(), weight)[0], full[1])
    assert full[0][2:4].count_nonzero() == 0
    with torch.no_grad():
        assert not linear_logprob(hidden, weight, targets).requires_grad


# ------------------------------------------------------------------ the vocabulary in shards


def side_by_side(function, shards):
    """function(shard, reduce) for every shard, each on a thread of its own, as on so many ranks."""
    barrier, given = threading.Barrier(shards, timeout=10), [None] * shards

    def of(shard):
        def reduce(x, op):
            given[shard] = x
            barrier.wait()
            parts = torch.stack(given)
            barrier.wait()  # or a fast one would give its next before a slow one has read
            return parts.sum(0) if op == "sum" else parts.amax(0)
        return function(shard, reduce)

    with ThreadPoolExecutor(shards) as pool:
        return [*pool.map(of, range(shards))]


def sharded(hidden, weight, targets, sizes, **options):
    starts = [sum(sizes[:shard]) for shard in range(len(sizes))]
    return side_by_side(lambda shard, reduce: linear_logprob(
        hidden, weight[starts[shard] : starts[shard] + sizes[shard]], targets, start=starts[shard], reduce=reduce,
        **options), len(sizes))


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("sizes", [(5, 5), (4, 3, 3, 1), (1, 1), (3, 600)])
def test_shards_of_the_vocabulary_give_the_plain_formula(sizes, softcap):
    hidden, weight, targets = problem(6, sum(sizes))
    upstream = torch.randn(2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    theirs = plain(hidden, weight, targets, 0.7, softcap)
    total = lambda out: (out[0] * upstream[0] + out[1] * upstream[1]).sum()
    shards = sharded(hidden, weight, targets, sizes, temperature=0.7, entropy=True, softcap=softcap)
    for ours in shards:
        assert_close(ours, theirs)
    # Of the sum over the shards: each gives its part of the gradient of hidden, and that of its own words.
    assert_close(grads(sum(map(total, shards)), hidden, weight), grads(total(theirs), hidden, weight))
    alone = sharded(hidden, weight, targets, sizes)
    assert_close(alone[0], linear_logprob(hidden, weight, targets))


def test_a_shard_whose_words_all_have_probability_zero():
    logits = torch.tensor([0.0, 0.0, -math.inf, -math.inf])[:, None].requires_grad_()
    for target, expected in ((0, -math.log(2)), (3, -math.inf)):
        shards = sharded(torch.ones(1, 1), logits, torch.tensor([target]), (2, 2), entropy=True)
        for logprob, entropy in shards:
            assert logprob.item() == pytest.approx(expected) and entropy.item() == pytest.approx(math.log(2))
        grad, = grads(sum(logprob + entropy for logprob, entropy in shards).sum(), logits)
        assert grad.isfinite().all()
