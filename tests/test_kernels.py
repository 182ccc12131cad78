import math
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck
from torch.testing import assert_close

from kernels import all_logprobs, head_loss, kl, linear_kl, linear_logprob, logprob
from minirl.losses import aggregate, clipped_surrogate, loss_total, policy_stats
from minirl.model import ModelConfig, Transformer
from minirl.parallel import forward_backward, init_mesh
from minirl.rollout import Rollout

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
    monkeypatch.setattr(MODULE, "KEEP_LOGITS", 0)
    for rows, words in ((100, 100), (3, 4), (1, 1)):  # all at once; 7 = 3 + 3 + 1, 11 = 4 + 4 + 3; number by number
        monkeypatch.setattr(MODULE, "CHUNK_ROWS", rows)
        monkeypatch.setattr(MODULE, "CHUNK_WORDS", words)
        hidden, weight, targets = problem(7, 11)
        out = linear_logprob(hidden, weight, targets, entropy=True)
        results.append((*out, *grads((out[0] + 0.3 * out[1]).sum(), hidden, weight)))
    for other in results[1:]:
        assert_close(other, results[0], rtol=1e-12, atol=1e-12)


def test_no_tensor_of_rows_by_vocabulary_is_kept_for_backward(monkeypatch):
    monkeypatch.setattr(MODULE, "KEEP_LOGITS", 10_000)
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


def test_two_losses_of_the_same_inputs():
    hidden, weight, targets = problem(6, 5)
    once, other = (linear_logprob(hidden, weight, y) for y in (targets, targets.roll(1)))
    want = plain(hidden, weight, targets)[0].sum() + 2 * plain(hidden, weight, targets.roll(1))[0].sum()
    assert_close(grads(once.sum() + 2 * other.sum(), hidden, weight), grads(want, hidden, weight))
    with torch.inference_mode():
        assert_close(linear_logprob(hidden, weight, targets), once.detach())


def test_a_row_without_any_word_is_no_distribution():
    assert logprob(torch.full((1, 5), -math.inf), torch.tensor([0])).isnan().all()


def some_kl(hidden, weight, targets, bias=None):
    return linear_kl(hidden, weight, hidden[..., :2], weight[:, :2], bias=bias)


def some_head_loss(hidden, weight, targets, bias=None):
    return head_loss(hidden, weight, targets, lambda columns, logprobs, _: logprobs.sum(), bias=bias)


@pytest.mark.parametrize("function", [linear_logprob, some_head_loss])
def test_targets_that_do_not_fit(function):
    """A label of -100 has no log-prob, and none of (2, 3) targets belongs to one of (3, 2) hidden states."""
    hidden, weight, targets = problem(6, 5)
    hidden, targets = hidden.view(2, 3, 4), targets.view(2, 3)
    for wrong, words in ((torch.full((2, 3), -100), "target -100 is none of the words 0..4"),
                         (targets * 0 + 5, "target 5 is"), (targets.T, r"targets \(3, 2\) do not fit hidden"),
                         (targets[:1, :1], r"targets \(1, 1\) do")):
        with pytest.raises(ValueError, match=words):
            function(hidden, weight, wrong)
    with pytest.raises(ValueError, match="target -1 is none"):
        logprob(hidden @ weight.T, targets * 0 - 1)


@pytest.mark.parametrize("function", [linear_logprob, some_kl, some_head_loss])
def test_heads_that_do_not_fit(function):
    """What torch would broadcast, and a kernel read beyond its end."""
    hidden, weight, targets = problem(6, 5)
    hidden, targets = hidden.view(2, 3, 4), targets.view(2, 3)
    with pytest.raises(ValueError, match=r"weight \(5, 3\) does not fit hidden"):
        function(hidden, weight[:, :3], targets)
    with pytest.raises(ValueError, match=r"bias \(1,\) does not fit weight"):
        function(hidden, weight, targets, bias=torch.zeros(1))


def test_a_reference_that_does_not_fit():
    hidden, weight, _ = problem(6, 5)
    for ref_hidden, ref_weight in ((hidden, weight[:1]), (hidden[:1], weight), (hidden.view(2, 3, 4), weight)):
        with pytest.raises(ValueError, match="the reference has logits"):
            linear_kl(hidden, weight, ref_hidden, ref_weight)
    with pytest.raises(ValueError, match=r"logits \(1, 5\), and the policy \(6, 5\)"):
        kl(hidden @ weight.T, torch.zeros(1, 5))


def test_nobody_else_takes_a_log_softmax():
    """A head that makes its own logits holds them all: code and recipes go through kernels/. (Attention has a
    logsumexp of its scores, the demo one of 19 answers.)"""
    root = Path(__file__).parent.parent
    files = [*root.glob("*.py"), *root.glob("minirl/**/*.py")]
    assert len(files) > 40
    other_words = re.compile(r"log_softmax|\bcross_entropy\b|LogSoftmax|nll_loss|CrossEntropy|softmax\([^()]*\)\.log\(")
    found = [str(path.relative_to(root)) for path in files if other_words.search(path.read_text())]
    assert not found
    normalised = {str(path.relative_to(root)) for path in files if "logsumexp" in path.read_text()}
    assert normalised <= {"minirl/demo.py", "minirl/parallel/context.py", "minirl/costs.py"}


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
        for logp, entropy in shards:
            assert logp.item() == pytest.approx(expected) and entropy.item() == pytest.approx(math.log(2))
        grad, = grads(sum(logp + entropy for logp, entropy in shards).sum(), logits)
        assert grad.isfinite().all()


# ------------------------------------------------------------------ bias, normaliser, given logits


def test_bias_and_log_normaliser_by_hand():
    bias = torch.tensor([math.log(3.0), 0.0])  # logits 0 and 0: probabilities 3 / 4 and 1 / 4, normaliser log 4
    logprobs, entropy, lse = linear_logprob(torch.zeros(2, 1), torch.ones(2, 1), torch.tensor([0, 1]), entropy=True,
                                            bias=bias, lse=True)
    assert logprobs.exp().tolist() == pytest.approx([0.75, 0.25])
    assert entropy.tolist() == pytest.approx([0.562335] * 2, abs=1e-6) and lse.exp().tolist() == pytest.approx([4, 4])


@pytest.mark.parametrize("keep", [0, 2**22])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_gradcheck_in_tiles_with_bias_and_all_results(monkeypatch, softcap, keep):
    monkeypatch.setattr(MODULE, "KEEP_LOGITS", keep)
    if not keep:
        monkeypatch.setattr(MODULE, "CHUNK_ROWS", 2)
        monkeypatch.setattr(MODULE, "CHUNK_WORDS", 3)
    hidden, weight, targets = problem(5, 7)
    bias = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    function = lambda h, w, b: linear_logprob(h, w, targets, 0.6, True, softcap, bias=b, lse=True)
    assert gradcheck(function, (hidden, weight, bias))
    logits = (hidden @ weight.T + bias).detach().requires_grad_()
    assert gradcheck(lambda z: logprob(z, targets, 0.6, True, softcap, lse=True), logits)
    assert_close(logprob(logits, targets, 0.6, True, softcap, lse=True), function(hidden, weight, bias))
    for i in range(3):  # each alone: an upstream gradient that is absent is 0, and not NaN
        assert gradcheck(lambda h, i=i: function(h, weight.detach(), bias.detach())[i], hidden)


def test_log_probs_are_probabilities_in_every_form():
    """Of a softmax: none above 0, and all words together 1. A wrong scale or layout shows here first."""
    hidden, weight, _ = problem(3, 5000, dtype=torch.float32)
    words = torch.arange(5000).expand(3, -1)
    for got in (linear_logprob(hidden[:, None].expand(-1, 5000, -1), weight, words, 0.3),
                logprob((hidden @ weight.T)[:, None].expand(-1, 5000, -1), words, 0.3),
                all_logprobs(hidden @ weight.T, 0.3)):
        assert got.max() <= 1e-6
        assert_close(got.exp().sum(1), torch.ones(3), rtol=0, atol=1e-4)


# ------------------------------------------------------------------ KL of whole distributions


def pair(rows, vocab, dtype=torch.float64):
    """(hidden, weight, bias) of the policy, and of a reference with another hidden size."""
    g = torch.Generator().manual_seed(vocab)
    make = lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)
    own = [x.requires_grad_() for x in (make(rows, 4), make(vocab, 4), make(vocab))]
    return own, [make(rows, 3), make(vocab, 3), make(vocab)]


def kl_of(own, ref, kind, **options):
    return linear_kl(*own[:2], *ref[:2], kind, bias=own[2], ref_bias=ref[2], **options)


def plain_kl(logits, ref_logits, kind):
    p, q = logits.softmax(-1), ref_logits.softmax(-1)
    one = lambda a, b: (a * (a / b).log()).sum(-1)
    return {"reverse": one(p, q), "forward": one(q, p), "js": (one(p, (p + q) / 2) + one(q, (p + q) / 2)) / 2}[kind]


def test_kl_by_hand():
    logits, ref = torch.tensor([[0.7, 0.3]]).log(), torch.zeros(1, 2)
    assert kl(logits, ref).item() == pytest.approx(0.082283, abs=1e-6)
    assert kl(logits, ref, "forward").item() == pytest.approx(0.087177, abs=1e-6)  # -log(2 sqrt(.21))
    assert kl(logits, ref, "js").item() == pytest.approx(0.021006, abs=1e-6)  # m = (.6, .4): (.021601 + .020411) / 2
    d = logits[0] - math.log(0.5)  # of either token, as k1 would have it
    assert d.tolist() == pytest.approx([0.33647, -0.51083], abs=1e-5)
    assert (logits[0].exp() @ d).item() == pytest.approx(kl(logits, ref).item())  # its mean is the KL, not its value
    with pytest.raises(ValueError, match="kind 'backward' does not exist"):
        kl(logits, ref, "backward")


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("kind", ["reverse", "forward", "js"])
def test_kl_and_its_gradient_to_the_policy(monkeypatch, kind, tiles):
    if tiles:
        monkeypatch.setattr(MODULE, "CHUNK_ROWS", 2)
        monkeypatch.setattr(MODULE, "CHUNK_WORDS", 3)
    own, ref = pair(5, 7)
    logits, ref_logits = own[0] @ own[1].T + own[2], ref[0] @ ref[1].T + ref[2]
    before = [x.detach().clone() for x in own + ref]
    assert_close(kl_of(own, ref, kind), plain_kl(logits, ref_logits, kind))
    assert_close(kl(logits / 0.6, ref_logits / 0.6, kind), kl_of(own, ref, kind, temperature=0.6))
    for softcap in (0.0, 1.5):
        assert gradcheck(lambda *x, c=softcap: kl_of(x, ref, kind, temperature=0.6, softcap=c), own)
        given = logits.detach().requires_grad_(), ref_logits.detach()
        assert gradcheck(lambda z, c=softcap, y=given[1]: kl(z, y, kind, 0.6, c), given[0])
    assert not kl_of([x.detach() for x in own], [x.clone().requires_grad_() for x in ref], kind).requires_grad
    assert_close([x.detach() for x in own + ref], before, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["reverse", "forward", "js"])
def test_kl_over_shards(kind):
    own, ref = pair(6, 10)
    part = lambda x, i: [x[0], x[1][4 * i : 4 * i + 4], x[2][4 * i : 4 * i + 4]]
    shards = side_by_side(lambda i, reduce: kl_of(part(own, i), part(ref, i), kind, reduce=reduce), 3)
    whole = kl_of(own, ref, kind)
    for got in shards:
        assert_close(got, whole)
    assert_close(grads(sum(shards).sum(), *own), grads(whole.sum(), *own))


@pytest.mark.parametrize("kind", ["reverse", "forward", "js"])
def test_kl_of_extremes(kind):
    values = torch.randn(1, 50257, generator=torch.Generator().manual_seed(0)).mul(8).bfloat16().requires_grad_()
    same = kl(values, values, kind)
    assert abs(same.item()) < 1e-6 and grads(same.sum(), values)[0].abs().max() < 1e-6
    logits = torch.tensor([[1e4, 0.0, -math.inf]]).requires_grad_()  # what both exclude adds nothing
    got = kl(logits, torch.tensor([[1e4, 1e4, -math.inf]]), kind)
    expected = {"reverse": math.log(2), "forward": 5000 - math.log(2), "js": 0.215762}[kind]
    assert got.item() == pytest.approx(expected, rel=1e-3)  # float32 numbers near 1e4 are 0.001 apart
    assert grads(got.sum(), logits)[0].isfinite().all()
    assert kl(torch.zeros(0, 5), torch.zeros(0, 5), kind).shape == (0,)
    half = kl(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, -math.inf]]), kind).item()  # q cannot give the second
    assert half == pytest.approx({"reverse": math.inf, "forward": math.log(2), "js": 0.215762}[kind], abs=1e-6)


# ------------------------------------------------------------------ head and loss in one pass


def some_loss(logprobs, entropy, columns):
    """Of its own column alone, not linear, and with an entropy bonus."""
    weights = torch.tensor([[0.5, -1.0, 2.0, 0.0, 1.0], [1.0, 1.0, -0.3, 2.0, 0.1]], dtype=logprobs.dtype)[:, columns]
    bonus = 0 if entropy is None else 0.3 * entropy.square().sum()
    return (weights * (logprobs + 1).exp()).sum() + bonus


def slopes(function, *inputs, eps=1e-6):
    """What gradcheck compares with, for a function whose backward runs once: central differences, of each input."""
    def moved(i, j, by):
        values = [x.detach().clone() for x in inputs]
        values[i].view(-1)[j] += by
        return function(*values)
    return [torch.stack([(moved(i, j, eps) - moved(i, j, -eps)) / (2 * eps) for j in range(x.numel())]).view_as(x)
            for i, x in enumerate(inputs)]


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("columns", [1, 2, 5])
def test_head_loss_equals_log_probs_then_loss(monkeypatch, columns, entropy, softcap):
    monkeypatch.setattr(sys.modules["kernels.head_loss"], "HEAD_LOGITS", columns * 2 * 7)
    hidden, weight, targets = problem(10, 7)
    hidden, targets = hidden.detach().view(2, 5, 4).requires_grad_(), targets.view(2, 5)
    bias = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    seen = []

    def piece_loss(piece, logprobs, ent):
        seen.append(piece.stop - piece.start)
        return some_loss(logprobs, ent, piece)

    ours = lambda h, w, b: head_loss(h, w, targets, piece_loss, 0.7, entropy, softcap, bias=b)

    def theirs(h, w, b):
        out = linear_logprob(h, w, targets, 0.7, entropy, softcap, bias=b)
        return some_loss(*(out if entropy else (out, None)), slice(0, 5))

    assert_close(ours(hidden, weight, bias), theirs(hidden, weight, bias))
    assert seen == {1: [1] * 5, 2: [2, 2, 1], 5: [5]}[columns]
    assert_close(*(grads(3 * f(hidden, weight, bias), hidden, weight, bias) for f in (ours, theirs)))
    assert_close(grads(ours(hidden, weight, bias), hidden, weight, bias), slopes(ours, hidden, weight, bias), rtol=1e-6,
                 atol=1e-6)
    frozen = ours(hidden, weight.detach(), bias.detach())
    assert_close(grads(frozen, hidden), grads(theirs(hidden, weight, bias), hidden))
    again = ours(hidden, weight, bias)
    grads(again, hidden, weight, bias)
    with pytest.raises(RuntimeError, match="its backward runs once"):
        again.backward()


def test_head_loss_over_shards_and_a_loss_without_gradient():
    hidden, weight, targets = problem(10, 9)
    hidden, targets = hidden.detach().view(2, 5, 4).requires_grad_(), targets.view(2, 5)
    piece_loss = lambda columns, logprobs, ent: some_loss(logprobs, ent, columns)
    shards = side_by_side(lambda i, reduce: head_loss(hidden, weight[3 * i : 3 * i + 3], targets, piece_loss, 0.7, True,
                                                      start=3 * i, reduce=reduce), 3)
    whole = head_loss(hidden, weight, targets, piece_loss, 0.7, True)
    for got in shards:
        assert_close(got, whole)
    assert_close(grads(sum(shards), hidden, weight), grads(whole, hidden, weight))
    nothing = head_loss(hidden, weight, targets, lambda columns, logprobs, ent: logprobs.detach().sum())
    assert all(g.count_nonzero() == 0 for g in grads(nothing, hidden, weight))


def test_head_loss_of_no_rows_no_columns_and_without_gradient():
    hidden, weight, targets = problem(6, 5)
    hidden, targets = hidden.detach().view(2, 3, 4).requires_grad_(), targets.view(2, 3)
    piece_loss = lambda columns, logprobs, ent: 2 * logprobs.sum() + ent.sum()
    for none in (slice(0), slice(None)), (slice(None), slice(0)):
        loss = head_loss(hidden[none], weight, targets[none], piece_loss, entropy=True)
        assert loss == 0 and grads(loss, weight)[0].count_nonzero() == 0
    want = head_loss(hidden, weight, targets, piece_loss, entropy=True)
    for quiet in (torch.no_grad, torch.inference_mode):
        with quiet():
            assert_close(head_loss(hidden, weight, targets, piece_loss, entropy=True), want.detach())
    only = head_loss(hidden.detach(), weight, targets, piece_loss, entropy=True)
    assert_close(grads(only, weight)[0], grads(want, weight)[0])


def test_head_loss_keeps_what_a_scaled_loss_shall_lift_over_the_smallest_float16():
    hidden, weight, targets = problem(6, 5)
    inputs = [x.detach().to(torch.float16).requires_grad_() for x in (hidden.view(2, 3, 4), weight)]
    loss = head_loss(*inputs, targets.view(2, 3), lambda columns, logprobs, _: 1e-9 * logprobs.sum())
    want = grads(65536 * 1e-9 * linear_logprob(*inputs, targets.view(2, 3)).sum(), *inputs)
    assert_close(grads(65536 * loss, *inputs), want, rtol=2e-3, atol=1e-7)
    assert want[0].count_nonzero() == 24


def test_an_update_is_the_same_with_the_head_in_one_pass(monkeypatch):
    """What forward_backward returns and leaves in the gradients: pieces of columns, with a sum a row and a maximum."""
    monkeypatch.setattr(sys.modules["kernels.head_loss"], "HEAD_LOGITS", 3 * 4 * 30)  # three columns of four rows
    model = Transformer(ModelConfig(30, 8, 16, 1, 2, 2, max_position_embeddings=16)).double()
    model.init_weights(torch.Generator().manual_seed(0))
    g = torch.Generator().manual_seed(1)
    ids, lengths = torch.arange(4), torch.tensor([8, 5, 7, 3])
    mask = (torch.arange(7) < lengths[:, None] - 1) & (torch.arange(7) > 0)
    rows = Rollout(torch.randint(30, (4, 8), generator=g), mask, lengths, ids, ids,
                   old_logprobs=-3 + torch.randn(4, 7, generator=g, dtype=torch.float64).mul(0.1),
                   advantages=torch.randn(4, 1, generator=g, dtype=torch.float64))
    found = []
    for keep in (2**22, 0):
        monkeypatch.setattr(sys.modules["minirl.logprobs"], "KEEP_LOGITS", keep)
        for mode in ("token", "sequence"):
            total = loss_total(mode, mask)
            calls = []

            def loss_fn(out, mb, mode=mode, total=total, calls=calls):
                calls.append(mb.action_mask.shape[1])
                per_token = clipped_surrogate(out.logprobs, mb.old_logprobs, mb.advantages, 0.2, 0.2)
                return (aggregate(per_token, mb.action_mask, mode, total, row_tokens=mb.row_tokens),
                        policy_stats(out.logprobs, mb.old_logprobs, None, out.entropy, mb.advantages, mb.action_mask,
                                     0.2, 0.2, row_tokens=mb.row_tokens))

            model.zero_grad()
            stats = forward_backward(model, [rows], loss_fn, init_mesh("cpu"), 0.7, entropy=True, by_token=True)
            found.append((stats, [p.grad.clone() for p in model.parameters()]))
            assert calls == ([7] if keep else [3, 3])  # pieces begin at the first action: column 1
    assert_close(found[2:], found[:2])
