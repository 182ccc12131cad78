"""The Triton kernels in Triton's interpreter, beside the plain torch reference. Run by test_triton.py, as

    TRITON_INTERPRET=1 python -m pytest tests/interpreted.py

in a process of its own: whether kernels are interpreted is decided when they are imported. The interpreter keeps a
bfloat16 as its raw 16 bits and multiplies these, so bfloat16 is loaded here, and multiplied as float32 (UPCAST).
"""

import math
from itertools import product

import pytest
import torch
from torch.testing import assert_close

from kernels import linear_kl, linear_logprob
from kernels import triton_linear_kl as kl_module
from kernels import triton_linear_logprob as triton_module
from kernels.linear_logprob import Head

SIZES = [*product((1, 3, 64), (1, 2, 127, 512, 1000, 32003))]  # rows, words
# Both round a float16 or bfloat16 gradient at the end, of which the smallest have no relative error.
CLOSE = {torch.float32: (2e-5, 2e-5), torch.float16: (2e-3, 2e-3), torch.bfloat16: (2e-2, 1.6e-2)}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """So that a vocabulary of 127 already has borders of tiles and runs."""
    monkeypatch.setattr(triton_module, "tiles_of", lambda *_: triton_module.Tiles(32, 64, 16, 4, 1))
    monkeypatch.setattr(kl_module, "tiles_of", lambda *_: triton_module.Tiles(16, 32, 16, 4, 1))
    monkeypatch.setattr(triton_module, "PROGRAMS", 12)
    monkeypatch.setattr(triton_module, "GRAD_LOGITS", 64 * 300)


def problem(rows, vocab, dtype=torch.float32, size=24, scale=1.0, tile=64):
    g = torch.Generator().manual_seed(rows + vocab)
    make = lambda *shape: (torch.randn(shape, generator=g) * scale).to(dtype).requires_grad_()
    targets = torch.randint(vocab, (rows,), generator=g)
    edges = torch.tensor([vocab - 1, tile, tile - 1, 0])[:rows].clamp(max=vocab - 1)  # of the vocabulary, and of a tile
    targets[: len(edges)] = edges
    return make(rows, size), make(vocab, size), make(vocab), targets


def both(hidden, weight, bias, targets, upstream=None, **options):
    """(results and gradients by Triton, the same by torch)."""
    inputs = [x for x in (hidden, weight, bias) if x is not None and x.requires_grad]
    found = []
    for impl in ("triton", "torch"):
        out = linear_logprob(hidden, weight, targets, bias=bias, lse=True, impl=impl, **options)
        ups = upstream or [torch.randn(x.shape, generator=torch.Generator().manual_seed(i)) for i, x in enumerate(out)]
        found.append((*out, *torch.autograd.grad(sum((x * u).sum() for x, u in zip(out, ups)), inputs)))
    return found


def assert_alike(pair, dtype=torch.float32):
    rtol, atol = CLOSE[dtype]
    for ours, theirs in zip(*pair):
        assert_close(ours, theirs, rtol=rtol, atol=atol * max(1.0, theirs.abs().max().item()))


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("rows, vocab", SIZES)
def test_values_and_gradients(monkeypatch, rows, vocab, dtype):
    if vocab > 1000:  # the interpreter's time goes by the number of tiles
        monkeypatch.setattr(triton_module, "tiles_of", lambda *_: triton_module.Tiles(16, 2048, 32, 4, 1))
        monkeypatch.setattr(triton_module, "GRAD_LOGITS", 9000)
    hidden, weight, bias, targets = problem(rows, vocab, dtype, tile=2048 if vocab > 1000 else 64)
    before = [x.detach().clone() for x in (hidden, weight, bias, targets)]
    assert_alike(both(hidden, weight, bias, targets, temperature=2.0 if rows == 3 else 0.7, entropy=True), dtype)
    assert_close([x.detach() for x in (hidden, weight, bias, targets)], before, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", CLOSE)
def test_a_vocabulary_of_151936_with_the_tiles_of_a_gpu(monkeypatch, dtype):
    monkeypatch.undo()
    monkeypatch.setattr(triton_module, "PROGRAMS", 4)
    monkeypatch.setattr(triton_module, "tiles_of", lambda *_: triton_module.Tiles(16, 4096, 32, 8, 1))
    hidden, weight, _, targets = problem(3, 151936, dtype, size=8, tile=4096)
    assert_alike(both(hidden, weight, None, targets, entropy=True), dtype)


@pytest.mark.parametrize("temperature", [0.1, 2.0])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("entropy", [False, True])
def test_options(temperature, softcap, entropy):
    hidden, weight, bias, targets = problem(5, 130, scale=0.5)
    options = dict(temperature=temperature, softcap=softcap, entropy=entropy)
    assert_alike(both(hidden, weight, bias, targets, **options))
    assert_alike(both(hidden, weight.detach(), None, targets, **options))


def test_extreme_logits():
    """1e4, and -inf: whole tiles of it, and the target. Entropy of (1/2, 1/2, 0, ...) is log 2, and not NaN."""
    bias = torch.full((300,), -math.inf)
    bias[[0, 200]] = 1e4
    targets = torch.tensor([0, 200, 5])
    hidden, weight = torch.zeros(3, 4), torch.zeros(300, 4)
    logprobs, entropy = linear_logprob(hidden, weight, targets, entropy=True, bias=bias, impl="triton")
    assert logprobs.tolist() == pytest.approx([-math.log(2)] * 2 + [-math.inf], rel=1e-3)
    assert entropy.tolist() == pytest.approx([math.log(2)] * 3)
    hidden, weight = torch.randn(3, 4).requires_grad_(), torch.zeros(300, 4).requires_grad_()
    ups = [torch.ones(3)] * 3
    for ours, theirs in zip(*both(hidden, weight, bias, targets, ups, entropy=True)):
        assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
        assert not ours.isnan().any()
    nothing = linear_logprob(hidden, weight, targets, bias=torch.full((300,), -math.inf), impl="triton")
    assert nothing.isnan().all()  # no distribution, as the docstring says


def test_a_soft_cap_of_extreme_logits():
    """The cap of 1e4 is the cap, of -inf its negative, and no exponential on the way is too large."""
    bias = torch.tensor([1e4, -1e4, math.inf, -math.inf, 0.0, 3.0])
    hidden, weight = torch.zeros(6, 4, requires_grad=True), torch.zeros(6, 4, requires_grad=True)
    assert_alike(both(hidden, weight, bias, torch.arange(6), softcap=5.0, temperature=0.1, entropy=True))
    logprobs = linear_logprob(hidden, weight, torch.arange(6), bias=bias, softcap=5.0, impl="triton").tolist()
    assert logprobs[0] == logprobs[2] and logprobs[1] == logprobs[3] == pytest.approx(logprobs[0] - 10)


def test_masked_rows_get_no_gradient_and_upstream_gradients_count():
    hidden, weight, bias, targets = problem(6, 100)
    keep = torch.tensor([1.0, 0.0, -2.0, 0.0, 0.5, 1.0])
    ours, theirs = both(hidden, weight, bias, targets, [keep, torch.zeros(6)])
    assert ours[2][keep == 0].count_nonzero() == 0
    assert_alike((ours, theirs))
    assert all(g.count_nonzero() == 0 for g in both(hidden, weight, bias, targets, [keep * 0, keep * 0])[0][2:])
    out = linear_logprob(hidden, weight, targets, impl="triton")
    twice = [torch.autograd.grad((out * keep).sum(), weight, retain_graph=True)[0] for _ in range(2)]
    assert_close(*twice, rtol=0, atol=0)
    assert not linear_logprob(hidden.detach(), weight.detach(), targets, impl="triton").requires_grad


def test_strides_shapes_and_no_rows():
    hidden, weight, bias, targets = problem(6, 70)
    want = linear_logprob(hidden, weight, targets, bias=bias)
    strided = hidden.T.contiguous().T, weight.T.contiguous().T, targets.repeat_interleave(2)[::2]
    assert not any(x.is_contiguous() for x in strided)
    assert_close(linear_logprob(*strided, bias=bias, impl="triton"), want)
    upstream = torch.randn(12, generator=torch.Generator().manual_seed(0))[::2]
    assert_alike(both(*strided[:2], bias.repeat_interleave(2)[::2], strided[2], [upstream] * 3, entropy=True))
    inputs = *strided[:2], hidden[:, :9].T.contiguous().T, weight[:, :9].T.contiguous().T
    biases = {"bias": bias.repeat_interleave(2)[::2], "ref_bias": bias[:1].expand(70)}
    assert_alike([[linear_kl(*inputs, impl=impl, **biases)] for impl in ("triton", "torch")])
    folded = linear_logprob(hidden.view(2, 3, -1), weight, targets.view(2, 3), bias=bias, impl="triton")
    assert_close(folded, want.view(2, 3))
    none = linear_logprob(hidden[:0], weight, targets[:0], impl="triton")
    assert none.shape == (0,) and torch.autograd.grad(none.sum(), weight)[0].count_nonzero() == 0


def test_rows_beyond_2_to_the_31():
    """A float16 matrix whose third row begins behind number 2^31. Only what is written of it takes memory."""
    stride = 2**30 + 16
    try:
        room = torch.empty(2 * stride + 8, dtype=torch.float16)
    except RuntimeError:
        pytest.skip("no 4 GiB of address space")
    hidden = room.as_strided((3, 8), (stride, 1))
    _, weight, _, targets = problem(3, 20, torch.float16, size=8)
    hidden.copy_(torch.randn(3, 8, generator=torch.Generator().manual_seed(0)))
    assert_alike(both(hidden, weight, None, targets), torch.float16)  # of the hidden states, then of the weight
    assert_alike(both(weight[:3].detach(), hidden.requires_grad_(), None, targets % 3), torch.float16)


def test_a_target_of_another_shard_is_never_an_offset():
    hidden, weight, _, targets = problem(3, 100)
    want = triton_module.head_sums(hidden, weight, None, targets, Head(), False)
    for other in (-100, 100, 2**31 - 1):
        got = triton_module.head_sums(hidden, weight, None, targets * 0 + other, Head(), False)
        assert got.hit.count_nonzero() == 0
        assert_close(got[:2], want[:2], rtol=0, atol=0)


@pytest.mark.parametrize("sizes", [(70, 30), (1, 64, 35)])
def test_shards_of_the_vocabulary(sizes):
    hidden, weight, _, targets = problem(6, 100)
    parts = [(sum(sizes[:i]), weight[sum(sizes[:i]) : sum(sizes[: i + 1])]) for i in range(len(sizes))]
    whole = linear_logprob(hidden, weight, targets, 0.7, True)
    with torch.no_grad():
        sums = [triton_module.head_sums(hidden, part, None, targets, Head(0.7, start=start), True)
                for start, part in parts]
    peak = torch.stack([s.peak for s in sums]).amax(0)
    total = sum(torch.stack((s.total, s.hit, s.dot)) for s in (s.moved(peak) for s in sums))
    reduce = lambda x, op: peak if op == "max" else total  # the interpreter runs one kernel at a time: no threads here
    shards = [linear_logprob(hidden, part, targets, 0.7, True, start=start, reduce=reduce, impl="triton")
              for start, part in parts]
    for got in shards:
        assert_close(got, whole, rtol=2e-5, atol=2e-5)
    loss = lambda out: (out[0] + 0.3 * out[1]).sum()
    assert_close(torch.autograd.grad(sum(map(loss, shards)), (hidden, weight)),
                 torch.autograd.grad(loss(whole), (hidden, weight)), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kind", ["reverse", "forward", "js"])
@pytest.mark.parametrize("rows, vocab, dtype", [
    (1, 1, torch.float32), (3, 127, torch.bfloat16), (18, 150, torch.float32), (3, 512, torch.float16)])
def test_kl(rows, vocab, dtype, kind):
    own = problem(rows, vocab, dtype)[:3]
    ref = [x.detach() for x in problem(rows, vocab, dtype, size=18, scale=0.5)[:3]]
    for softcap in (0.0, 5.0):
        found = []
        for impl in ("triton", "torch"):
            out = linear_kl(*own[:2], *ref[:2], kind, 0.7, softcap, bias=own[2], ref_bias=ref[2], impl=impl)
            found.append((out, *torch.autograd.grad((out * torch.arange(1.0, rows + 1)).sum(), own)))
        assert_alike(found, dtype)


@pytest.mark.parametrize("kind", ["reverse", "forward", "js"])
def test_kl_of_extremes(kind):
    def of(p, q, impl):
        hidden, weight = torch.zeros(1, 1), torch.zeros(len(p), 1)  # the logits are the biases
        bias, ref_bias = torch.tensor(p), torch.tensor(q)
        return linear_kl(hidden, weight, hidden, weight, kind, bias=bias, ref_bias=ref_bias, impl=impl)

    for p, q in (([1e4, 0.0, -math.inf], [1e4, 1e4, -math.inf]), ([0.0, 0.0], [0.0, -math.inf]),
                 ([0.0, -math.inf], [0.0, 0.0])):
        assert_close(of(p, q, "triton"), of(p, q, "torch"), rtol=1e-3, atol=1e-6)
    same = torch.randn(500, generator=torch.Generator().manual_seed(0)).mul(8).tolist()
    assert abs(of(same, same, "triton").item()) < 1e-6


def test_log_probs_are_probabilities():
    hidden, weight, _, _ = problem(1, 500)
    words = torch.arange(500)
    got = linear_logprob(hidden.expand(500, -1), weight, words, 0.3, impl="triton")
    assert got.max() <= 1e-6 and got.exp().sum().item() == pytest.approx(1, abs=1e-4)


def test_half_precision_is_summed_in_float32(monkeypatch):
    monkeypatch.setattr(triton_module, "tiles_of", lambda *_: triton_module.Tiles(16, 2048, 16, 4, 1))
    values = torch.randn(50257, generator=torch.Generator().manual_seed(0)).mul(8).bfloat16()
    got, entropy = linear_logprob(torch.ones(1, 1).bfloat16(), values[:, None], torch.tensor([17]), entropy=True,
                                  impl="triton")
    logp = values.double().log_softmax(0)
    assert got.dtype == torch.float32 and got.item() == pytest.approx(logp[17].item(), abs=1e-4)
    assert entropy.item() == pytest.approx(-(logp.exp() * logp).sum().item(), abs=1e-4)
