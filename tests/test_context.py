"""Context parallelism: blocks and their merge beside dense attention, whole updates on real processes beside one."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch.testing import assert_close

from minirl.checkpoint import load_model
from minirl.config import UserError
from minirl.env import Addition
from minirl.env.loop import collect
from minirl.evaluate import evaluate, rollout_metrics
from minirl.logprobs import rollout_logprobs, shift, token_logprobs
from minirl.losses import aggregate, clipped_surrogate, kl_estimate, loss_total, policy_stats, prompt_tokens, row_sum
from minirl.model import ModelConfig, Transformer, fused_attention
from minirl.optim import AdamW, clip_gradients
from minirl.parallel import Mesh, context, forward_backward, init_mesh
from minirl.parallel.context import (
    attach,
    block_attention,
    block_gradients,
    cut,
    cut_columns,
    deal,
    join,
    merge,
    pad_columns,
    ring_attention,
    sight,
    ulysses_attention,
    undeal,
)
from minirl.parallel.mesh import Group
from minirl.rollout import Rollout
from minirl.rope import RopeScaling
from minirl.tokenizer import ByteTokenizer

dist = pytest.mark.dist
STORIES = Path(__file__).resolve().parents[2] / "shared" / "models" / "stories260k"
MODES = ("token", "sequence", "prompt", "constant")
TEMPERATURE, LIMIT = 0.7, 16


def group_of(rank: int, ranks: int) -> Group:
    """A place among ranks that are not there: enough for whatever does not communicate."""
    return Group("cp", tuple(range(ranks)), rank)


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


# ------------------------------------------------------------------ which columns


def test_each_rank_has_an_early_and_a_late_piece():
    columns = torch.arange(16)[None]
    assert [cut(columns, group_of(r, 4))[0].tolist() for r in range(4)] == [
        [0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("width", [0, 1, 2, 7, 8, 25])
def test_pieces_make_the_row_again(ranks, width):
    x = random(2, width, 3)
    padded = pad_columns(x, group_of(0, ranks))
    assert padded.shape[1] % (2 * ranks) == 0 and 0 < padded.shape[1] < width + 2 * ranks + (not width)
    dealt = torch.cat([cut(x, group_of(r, ranks)) for r in range(ranks)], 1)
    assert torch.equal(undeal(dealt, group_of(0, ranks), 1), padded)
    assert torch.equal(deal(padded, group_of(0, ranks), 1), dealt)
    assert torch.equal(padded[:, :width], x) and not padded[:, width:].any()


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("T", [2, 3, 9, 22])
def test_every_target_is_the_token_after_its_input_also_across_borders(ranks, T):
    tokens = 1 + torch.arange(2 * T).view(2, T)  # 0 is padding
    found = set()
    for r in range(ranks):
        inputs, positions, documents, targets, _ = shift(tokens, None, group_of(r, ranks))
        real = inputs > 0
        assert torch.equal(targets[real], inputs[real] + 1), "a target is lost at the border of a piece"
        assert torch.equal(cut(positions, group_of(r, ranks)).expand_as(inputs)[real], (inputs - 1)[real] % T)
        assert documents is None and targets[~real].count_nonzero() == 0
        found |= {*inputs[real].tolist()}
    assert found == {*(1 + torch.arange(2 * T).view(2, T)[:, :-1]).flatten().tolist()}


def test_columns_are_cut_and_what_belongs_to_rows_stays():
    rollout = tiny_rollout()
    before = {name: value.clone() for name, value in rollout.tensors().items()}
    parts = [cut_columns(rollout, Mesh(cp=2, cp_rank=r, cp_group=group_of(r, 2))) for r in range(2)]
    for name, value in before.items():
        assert torch.equal(getattr(rollout, name), value)
        for r, part in enumerate(parts):
            per_token = value.dim() == 2 and value.shape[1] == rollout.action_mask.shape[1]
            assert torch.equal(getattr(part, name), cut(value, group_of(r, 2)) if per_token else value), name
    assert torch.equal(sum(part.action_mask.sum(1) for part in parts), parts[0].row_tokens)
    assert cut_columns(rollout, Mesh()) is rollout

    narrow = rollout.rows(torch.tensor([0]))  # two tokens: (1, 1) is one a token as well as one a row
    assert narrow.action_mask.shape == (1, 1)
    part = cut_columns(narrow, Mesh(cp=2, cp_rank=1, cp_group=group_of(1, 2)))
    assert part.action_mask.shape == (1, 2) and not part.action_mask.any()


# ------------------------------------------------------------------ blocks


def brute_force(rank: int, source: int, ranks: int) -> tuple[set, set]:
    """Pairs of pieces (query, key) that are seen whole, and by the causal mask."""
    mine, theirs = (rank, 2 * ranks - 1 - rank), (source, 2 * ranks - 1 - source)
    pairs = [*product(mine, theirs)]
    return {(q, k) for q, k in pairs if k < q}, {(q, k) for q, k in pairs if k == q}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_in_each_step_every_rank_sees_what_it_should_and_works_alike(ranks):
    for rank, step in product(range(ranks), range(ranks)):
        source = (rank - step) % ranks
        see = sight(rank, source)
        mine, theirs = (rank, 2 * ranks - 1 - rank), (source, 2 * ranks - 1 - source)
        whole, diagonal = brute_force(rank, source, ranks)
        computed = {*product(mine[see.query :], theirs[: see.keys])}
        if see.causal:
            assert diagonal == {(q, q) for q in mine} and whole == {(mine[1], mine[0])} and len(computed) == 4
        else:
            assert computed == whole and not diagonal
        assert len(whole) + len(diagonal) / 2 == 2, "blocks of a step"


def dense_by_autograd(q, k, v, grad, scale):
    """out, dq, dk, dv of whole rows."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = fused_attention(*leaves, None, scale)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def ring_by_hand(q, k, v, grad, scale, ranks):
    """out, dq, dk, dv of whole rows from the blocks of all ranks, in one process."""
    half = q.shape[2] // ranks // 2
    groups = [group_of(r, ranks) for r in range(ranks)]
    parts = [[cut(x.transpose(1, 2), g).transpose(1, 2) for g in groups] for x in (q, k, v, grad)]
    outs, gradients = [], [[torch.zeros_like(x) for x in each] for each in parts[:3]]
    for r, (mine, g) in enumerate(zip(parts[0], parts[3])):
        out, lse = torch.zeros_like(mine), mine.new_full(mine.shape[:3], -torch.inf)
        blocks = []
        for source in range(ranks):
            see = sight(r, source)
            rows, keys = slice(see.query * half, None), slice(see.keys * half)
            blocks.append((source, see.causal, rows, keys))
            block = block_attention(mine[:, :, rows], parts[1][source][:, :, keys], parts[2][source][:, :, keys], scale,
                                    see.causal)
            out[:, :, rows], lse[:, :, rows] = merge(out[:, :, rows], lse[:, :, rows], *block)
        outs.append(out)
        delta = (out * g).sum(-1)
        for source, causal, rows, keys in blocks:
            dq, dk, dv = block_gradients(
                mine[:, :, rows], parts[1][source][:, :, keys], parts[2][source][:, :, keys], g[:, :, rows],
                lse[:, :, rows], delta[:, :, rows], scale, causal)
            gradients[0][r][:, :, rows] += dq
            gradients[1][source][:, :, keys] += dk
            gradients[2][source][:, :, keys] += dv
    return [undeal(torch.cat(each, 2), groups[0], 2) for each in (outs, *gradients)]


@pytest.mark.parametrize("scores", [2**24, 40])  # all queries at once, or one or a few
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_blocks_together_are_dense_attention_forward_and_backward(monkeypatch, ranks, scores):
    monkeypatch.setattr(context, "SCORES", scores)
    for kv_heads in (1, 2, 4):
        q, grad = random(2, 4, 24, 6, seed=1), random(2, 4, 24, 6, seed=2)
        k, v = random(2, kv_heads, 24, 6, seed=3), random(2, kv_heads, 24, 6, seed=4)
        before = [x.clone() for x in (q, k, v, grad)]
        assert_close(ring_by_hand(q, k, v, grad, 0.3, ranks), dense_by_autograd(q, k, v, grad, 0.3),
                     rtol=1e-12, atol=1e-13)
        assert all(map(torch.equal, before, (q, k, v, grad))), "an input was changed"


def test_a_merge_worked_by_hand():
    # exp(lse) is 1 and 3: weights 1/4 and 3/4.
    out, lse = merge(torch.tensor([[8.0]]), torch.tensor([0.0]), torch.tensor([[4.0]]), torch.tensor([3.0]).log())
    assert_close(out, torch.tensor([[5.0]]))
    assert_close(lse, torch.tensor([4.0]).log())


def test_merging_is_the_softmax_of_the_union_in_any_order_and_no_keys_have_no_weight():
    scores, values = random(3, 9, scale=5), random(9, 4)
    parts = [(scores[:, keys].softmax(-1) @ values[keys], scores[:, keys].logsumexp(-1))
             for keys in (slice(0, 2), slice(2, 3), slice(3, 9))]
    want = scores.softmax(-1) @ values, scores.logsumexp(-1)
    assert_close(merge(*merge(*parts[0], *parts[1]), *parts[2]), want)
    assert_close(merge(*parts[2], *merge(*parts[1], *parts[0])), want)
    nothing = torch.zeros(3, 4, dtype=torch.float64), torch.full((3,), -torch.inf, dtype=torch.float64)
    assert_close(merge(*nothing, *parts[0]), parts[0], rtol=0, atol=0)
    out, lse = merge(*nothing, *nothing)
    assert out.count_nonzero() == 0 and lse.isneginf().all()


def test_scores_of_ten_thousand_do_not_overflow():
    q, k = (40 + random(1, 2, 16, 8, seed=s, scale=0.02) for s in (1, 2))  # 12,800, give or take 3
    v, grad = (random(1, 2, 16, 8, seed=s) for s in (3, 4))
    assert (q @ k.mT).amin() > 1e4
    exact = dense_by_autograd(q, k, v, grad, 1.0)
    # A float32 of this size has 1e-3 as its last digit, so that probabilities are right to 1e-3, and q and k are 40.
    for got, want, error in zip(ring_by_hand(*(x.float() for x in (q, k, v, grad)), 1.0, 2), exact,
                                (2e-3, 2e-3 * 80, 2e-3 * 80, 4e-3)):
        assert_close(got.double(), want, rtol=0, atol=error)

    out, lse = block_attention(*(30 * x.bfloat16() for x in (v, v, v)), 1.0, True)
    assert out.dtype == lse.dtype == torch.float32 and out.isfinite().all() and lse.amax() > 1e4


# ------------------------------------------------------------------ sums over rows that lie on several ranks


@pytest.mark.parametrize("mode", MODES)
def test_the_shares_of_the_ranks_add_up_to_the_loss_of_whole_rows(mode):
    rollout = tiny_rollout()
    rollout = rollout.replace(prompt_tokens=prompt_tokens(rollout.action_mask, rollout.group))
    total = loss_total(mode, rollout.action_mask, None, rollout.group, LIMIT)

    def loss(rows):
        return aggregate(rows.old_logprobs, rows.action_mask, mode, total, rows.prompt_tokens, rows.row_tokens)

    parts = [cut_columns(rollout, Mesh(cp=3, cp_rank=r, cp_group=group_of(r, 3))) for r in range(3)]
    assert_close(sum(map(loss, parts)), loss(rollout), rtol=1e-12, atol=0)


# ------------------------------------------------------------------ models


def small(**options) -> ModelConfig:
    shape = dict(vocab_size=258, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=64)
    return ModelConfig(**shape | options)


LLAMA = small()
QWEN3 = small(qk_norm=True, head_dim=6, qkv_bias=True, tie_word_embeddings=False)
ODD = {  # whatever looks at positions, or at the length of a row
    "dynamic rope": small(rope_scaling=RopeScaling("dynamic", 2.0), max_position_embeddings=9),
    "learned positions": small(learned_positions=True, norm="layer", gated_mlp=False),
    "layers without rope": small(no_rope_layers=(1, 0)),
}
WINDOWS = small(sliding_window=5, layer_types=("sliding_attention", "full_attention"))


def build(config: ModelConfig) -> Transformer:
    return Transformer(config).init_weights(torch.Generator().manual_seed(0)).double()


def tiny_rollout(vocab: int = 256) -> Rollout:
    """8 rows of 4 prompts, of 2 to 26 tokens: rows shorter than a piece, ranks without an action, a row without any."""
    g = torch.Generator().manual_seed(1)
    lengths = torch.tensor([2, 3, 4, 6, 9, 12, 19, 26])
    T = int(lengths.max())
    column = torch.arange(T - 1)
    mask = (column < lengths[:, None] - 1) & (torch.rand(8, T - 1, generator=g) < 0.7)
    mask[0, 0], mask[2], mask[5, :7] = True, False, False
    old = -3 - torch.rand(8, T - 1, generator=g, dtype=torch.float64) * 4
    return Rollout(torch.randint(1, vocab, (8, T), generator=g), mask, lengths, torch.arange(8) // 2, torch.arange(8),
                   old_logprobs=old, advantages=torch.randn(8, 1, generator=g, dtype=torch.float64),
                   ref_logprobs=old + 0.3 * torch.randn(8, T - 1, generator=g, dtype=torch.float64))


def mine_of(rollout: Rollout, mesh: Mesh) -> Rollout:
    """This replica's rows: prompts are dealt out, so that replicas differ in length."""
    return rollout.rows((rollout.group % mesh.dp == mesh.dp_rank).nonzero()[:, 0])


def update(model: Transformer, rollout: Rollout, mesh: Mesh, mode: str, size: int = 3,
           whole_rows: bool = False) -> dict[str, float]:
    """Stats of one forward_backward as train_grpo.py makes it; the gradients stay on the model."""
    rows = mine_of(rollout, mesh)
    rows = rows.replace(prompt_tokens=prompt_tokens(rows.action_mask, rows.group))
    total = loss_total(mode, rows.action_mask, mesh, rows.group, LIMIT)

    def loss_fn(out, mb):
        logprobs = out.logprobs
        if whole_rows:  # one log-ratio for all tokens of a row, as in GSPO
            counts = mb.action_mask.sum(1) if mb.row_tokens is None else mb.row_tokens
            mean = row_sum(logprobs - mb.old_logprobs, mb.action_mask, mesh.cp_group) / counts.clamp(min=1)
            logprobs = mb.old_logprobs + mean[:, None]
        per_token = clipped_surrogate(logprobs, mb.old_logprobs, mb.advantages, 0.2, 0.2) - 0.01 * out.entropy
        per_token = per_token + 0.1 * kl_estimate(out.logprobs, mb.ref_logprobs, "k3")
        loss = aggregate(per_token, mb.action_mask, mode, total, mb.prompt_tokens, mb.row_tokens)
        return loss, policy_stats(out.logprobs, mb.old_logprobs, mb.ref_logprobs, out.entropy, mb.advantages,
                                  mb.action_mask, 0.2, 0.2, row_tokens=mb.row_tokens)

    return forward_backward(model, rows.microbatches(size), loss_fn, mesh, TEMPERATURE, entropy=True)


def compare(model: Transformer, attached: Transformer, rollout: Rollout, mesh: Mesh, what: str, mode: str = "token",
            **options) -> None:
    """Stats and every gradient of an update in one process, and on the mesh."""
    want, got = update(model, rollout, Mesh(), mode, **options), update(attached, rollout, mesh, mode, **options)
    assert got.keys() == want.keys() and got["tokens"] == rollout.action_mask.sum(), what
    assert got["rows"] == rollout.action_mask.any(1).sum(), what
    for name in want:
        assert got[name] == pytest.approx(want[name], rel=1e-9, abs=1e-12), f"{what}: {name}"
    for (name, p), other in zip(model.named_parameters(), attached.parameters()):
        assert p.grad.abs().amax() > 0, f"{what}: the test says nothing about {name}"
        assert_close(other.grad, p.grad, rtol=1e-9, atol=1e-11, msg=lambda text, at=name: f"{what}: {at}: {text}")
        p.grad = other.grad = None


def updates_of(mesh: Mesh, kind: str) -> None:
    """Losses, gradients and five steps, in one process and on the mesh."""
    rollout = tiny_rollout()
    model, attached = build(LLAMA), attach(build(LLAMA), mesh, kind)
    for mode in MODES:
        compare(model, attached, rollout, mesh, mode, mode)
    ref = rollout_logprobs(attached, mine_of(rollout, mesh), 3, TEMPERATURE, mesh)
    assert_close(ref, rollout_logprobs(model, mine_of(rollout, mesh), 3, TEMPERATURE), rtol=1e-9, atol=1e-12)

    model, attached = build(QWEN3), attach(build(QWEN3), mesh, kind)
    optimizers = [AdamW(m.named_parameters(), 1e-2, weight_decay=0.1) for m in (model, attached)]
    for step in range(5):
        for m, optimizer, ranks in zip((model, attached), optimizers, (Mesh(), mesh)):
            update(m, rollout, ranks, MODES[step % 4], size=8)
            clip_gradients(m.parameters(), 1.0)
            optimizer.step(1e-2)
            optimizer.zero_grad()
        for (name, p), other in zip(model.named_parameters(), attached.parameters()):
            where = f"{name} after {step + 1} steps"
            assert_close(other, p, rtol=1e-9, atol=1e-9, msg=lambda text, at=where: f"{at}: {text}")
    assert not torch.equal(model.norm.weight, build(QWEN3).norm.weight)


def variants_of(mesh: Mesh, kind: str) -> None:
    """Other losses and other models, one update each."""
    rollout = tiny_rollout()
    per_token = rollout.replace(advantages=random(*rollout.action_mask.shape, seed=7))
    model, attached = build(QWEN3), attach(build(QWEN3), mesh, kind)
    compare(model, attached, per_token, mesh, "an advantage a token", "sequence", size=8)
    compare(model, attached, rollout, mesh, "ratios of whole rows", "sequence", size=8, whole_rows=True)
    model.gradient_checkpointing = attached.gradient_checkpointing = True
    compare(model, attached, rollout, mesh, "gradient checkpointing", "prompt", size=8)
    for m, ranks in ((model, Mesh()), (attached, mesh)):  # one value a row, as in DPO: each rank's share is 1/cp
        forward_backward(m, [rollout], lambda out, mb, ranks=ranks: (F.softplus(
            -row_sum(out.logprobs, mb.action_mask, ranks.cp_group) / 9).sum() / ranks.cp, {}), ranks)
    for p, other in zip(model.parameters(), attached.parameters()):
        assert_close(other.grad, p.grad, rtol=1e-9, atol=1e-11)
    for name, config in (ODD | ({"windows": WINDOWS} if kind == "ulysses" else {})).items():
        compare(build(config), attach(build(config), mesh, kind), rollout, mesh, name, size=8)
    if STORIES.is_dir():
        model, attached = load_model(STORIES, torch.float64), attach(load_model(STORIES, torch.float64), mesh, kind)
        compare(model, attached, tiny_rollout(512), mesh, "stories260k", "sequence", size=8)


def attention_of(mesh: Mesh, kind: str) -> None:
    """The autograd function beside dense attention: values, dq, dk, dv, and the ledger to the byte."""
    group, N, (B, H, E) = mesh.cp_group, mesh.cp, (2, 12, 6)
    for K, C, dtype in ((3, 8, torch.float64), (6, 2, torch.float64), (4, 4, torch.float32), (12, 4, torch.bfloat16)):
        shapes = ((B, N * C, H, E), (B, N * C, K, E), (B, N * C, K, E), (B, N * C, H, E))
        q, k, v, grad = (random(*shape, seed=s).to(dtype) for s, shape in enumerate(shapes))
        want = dense_by_autograd(*(x.transpose(1, 2).double() for x in (q, k, v, grad)), 0.4)
        want = [cut(x.transpose(1, 2), group).transpose(1, 2) for x in want]

        mine = [cut(x, group).transpose(1, 2).requires_grad_() for x in (q, k, v)]
        mesh.ledger.clear()
        got = ring_attention(*mine, 0.4, group) if kind == "ring" else ulysses_attention(*mine, None, 0.4, group)
        size, columns = dtype.itemsize, B * E * C
        if kind == "ring":
            sent = (N - 1) * 2 * K * columns * size
            assert (mesh.ledger.calls, mesh.ledger.bytes) == ({("send", "cp"): N - 1}, {("send", "cp"): sent})
        else:
            sent = (2 * H + 2 * torch.lcm(torch.tensor(K), torch.tensor(N)).item()) * columns * size
            assert (mesh.ledger.calls, mesh.ledger.bytes) == ({("all_to_all", "cp"): 4}, {("all_to_all", "cp"): sent})
        mesh.ledger.clear()
        grads = torch.autograd.grad(got, mine, cut(grad, group).transpose(1, 2))
        if kind == "ring":
            sent += N * 2 * K * columns * max(size, 4)
            assert mesh.ledger.calls == {("send", "cp"): 2 * N - 1}
            assert mesh.ledger.bytes == {("send", "cp"): sent}
        else:
            assert (mesh.ledger.calls, mesh.ledger.bytes) == ({("all_to_all", "cp"): 4}, {("all_to_all", "cp"): sent})
        close = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
        for name, a, b in zip(("out", "dq", "dk", "dv"), (got, *grads), want):
            assert a.dtype == dtype
            assert_close(a.double(), b, rtol=close, atol=close, msg=lambda text, at=f"{name}, K {K}": f"{at}: {text}")


def documents_of(mesh: Mesh) -> None:
    """Packed rows under Ulysses, and under the ring a refusal."""
    tokens = tiny_rollout().tokens[:3]
    documents = (torch.arange(26) >= torch.tensor([[3], [11], [25]])).long() + (torch.arange(26) >= 20)
    for config in (LLAMA, WINDOWS):
        model, attached = build(config), attach(build(config), mesh, "ulysses")
        want = token_logprobs(model, tokens, TEMPERATURE, documents)
        got = token_logprobs(attached, tokens, TEMPERATURE, documents, cp_group=mesh.cp_group)
        assert_close(join(got.detach(), mesh.cp_group, 25), want.detach(), rtol=1e-9, atol=1e-12)
        weights = random(3, 25)
        (want * weights).sum().backward()
        (got * cut(weights, mesh.cp_group)).sum().backward()
        for p, other in zip(model.parameters(), attached.parameters()):
            torch.distributed.all_reduce(other.grad)
            assert_close(other.grad, p.grad, rtol=1e-9, atol=1e-11)
    with pytest.raises(UserError, match="packed documents do not work with ring attention"):
        token_logprobs(attach(build(LLAMA), mesh), tokens, 1.0, documents, cp_group=mesh.cp_group)


def sampling_of(mesh: Mesh, kind: str) -> None:
    """Ranks answer different prompts, all have all rows, and whole rows are as if nothing were attached."""
    model, attached, tokenizer, env = build(LLAMA), attach(build(LLAMA), mesh, kind), ByteTokenizer(), Addition(1)
    for prompts in (5, 1):  # uneven; and a rank without any
        examples = env.sample(prompts, start=3)
        options = dict(seed=5, max_new_tokens=12)
        want = collect(model, tokenizer, env, examples, 3, 4, **options)
        got = collect(attached, tokenizer, env, examples, 3, 4, mesh, **options)
        for name, value in want.tensors().items():
            assert_close(getattr(got, name), value, rtol=1e-9, atol=1e-12, msg=lambda text, at=name: f"{at}: {text}")
        assert (got.texts, got.turns) == (want.texts, want.turns)
    assert rollout_metrics(got, replace(mesh, dp_group=Group("dp"))) == pytest.approx(rollout_metrics(want, Mesh()))
    assert evaluate(attached, tokenizer, env, 7, mesh) == evaluate(model, tokenizer, env, 7, Mesh())
    assert torch.equal(token_logprobs(attached, want.tokens), token_logprobs(model, want.tokens))


def everything(sizes: dict[str, int], kind: str) -> bool:
    mesh = init_mesh("cpu", **sizes)
    updates_of(mesh, kind)
    if mesh.cp == 2:
        sampling_of(mesh, kind)
    if mesh.size == 2:
        variants_of(mesh, kind)
        attention_of(mesh, kind)
        documents_of(mesh)
    return True


@dist
@pytest.mark.parametrize(("sizes", "kind"), [({"cp": 2}, "ring"), ({"cp": 2}, "ulysses"), ({"cp": 4}, "ring"),
                                             ({"dp": 2, "cp": 2}, "ring")])
def test_losses_gradients_updates_and_samples_are_those_of_one_process(sizes, kind):
    assert all(run_ranks(everything, sizes.get("dp", 1) * sizes["cp"], sizes, kind, timeout=180))


def attention_on_three() -> bool:
    mesh = init_mesh("cpu", cp=3)
    assert mesh.cp_group.size == 3
    for kind in ("ring", "ulysses"):
        attention_of(mesh, kind)
    return True


@dist
def test_attention_on_an_odd_number_of_ranks():
    assert all(run_ranks(attention_on_three, 3))


# ------------------------------------------------------------------ what is refused


def test_what_a_kind_cannot_do_is_refused_by_name():
    two, three = (Mesh(cp=n, cp_group=group_of(0, n)) for n in (2, 3))
    for config, mesh, kind, message in (
            (LLAMA, two, "spiral", "context parallelism 'spiral' is unknown: use one of ring, ulysses"),
            (WINDOWS, two, "ring", "sliding_window 5 does not work with ring attention: use ulysses"),
            (small(attn_logit_softcapping=50.0), two, "ulysses", r"attn_logit_softcapping 50.0 .* --cp 2: use --cp 1"),
            (LLAMA, three, "ulysses", "4 attention heads do not divide over --cp 3: use ring, or a divisor of 4")):
        with pytest.raises(UserError, match=message) as error:
            attach(build(config), mesh, kind)
        assert "\n" not in str(error.value)


def test_a_mesh_without_context_parallelism_changes_nothing():
    model = build(WINDOWS)
    attach(model, Mesh(), "ring")
    assert "frames" not in vars(model) and model.layers[0].self_attn.attend is fused_attention


def test_a_model_that_was_not_attached_does_not_take_columns():
    with pytest.raises(RuntimeError, match="size"):
        token_logprobs(build(LLAMA), F.pad(tiny_rollout().tokens, (0, 1)), cp_group=group_of(0, 2))
