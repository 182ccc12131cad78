"""Tensor and sequence parallelism on real processes: the losses, gradients, steps and draws of one process.

    everything wrong by a factor N          a bias added on all ranks; a gradient summed twice
    weights that differ from rank to rank   a partial gradient that was not summed (norms under sequence parallelism)
    only key and value weights wrong        copies of a head, each with its own gradient
    only log-probs of some words wrong      the first word of a shard
"""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from stubs import Pieces

from minirl.checkpoint import load_model
from minirl.config import UserError
from minirl.generate import generate, sample
from minirl.logprobs import token_logprobs
from minirl.lora import adapters_off, add_lora, merge_lora
from minirl.model import ModelConfig, Transformer
from minirl.nf4 import quantize_base
from minirl.optim import AdamW
from minirl.parallel import Mesh, forward_backward, init_mesh
from minirl.parallel.collectives import all_gather
from minirl.parallel.context import attach
from minirl.parallel.mesh import Group
from minirl.parallel.pipeline import split_stages
from minirl.parallel.placement import even_sizes, placement, sum_partial_gradients, whole
from minirl.parallel.tensor import shard
from minirl.rollout import Rollout

dist = pytest.mark.dist

LLAMA = ModelConfig(258, 16, 30, 2, 4, 2, max_position_embeddings=64, rope_theta=100.0)
QWEN3 = replace(LLAMA, vocab_size=13, head_dim=6, qk_norm=True, tie_word_embeddings=False)
MODELS = {
    "llama": LLAMA,  # 258 words over 4 ranks, 30 components over 4, 2 key heads over 4
    "qwen3": QWEN3,
    "qwen2": replace(LLAMA, vocab_size=13, qkv_bias=True, num_key_value_heads=4, rms_norm_eps=0.0),
    "biases": replace(QWEN3, qk_norm=False, qkv_bias=True, output_bias=True, mlp_bias=True),
    "gpt2": replace(LLAMA, num_key_value_heads=4, qkv_bias=True, output_bias=True, mlp_bias=True, gated_mlp=False,
                    norm="layer", learned_positions=True, hidden_act="gelu"),
    "gemma": replace(LLAMA, num_key_value_heads=1, norm="gemma", norm_placement="both", scale_embedding=True,
                     attn_logit_softcapping=5.0, final_logit_softcapping=3.0, sliding_window=5,
                     layer_types=("sliding_attention", "full_attention")),
    "olmo2": replace(LLAMA, norm_placement="post", qk_norm_across_heads=True),
}
STEPPED = ("llama",)  # five steps; of the others one
LAYOUTS = [(2, False), (4, False), (2, True), (4, True)]


def build(config: ModelConfig, seed: int = 0) -> Transformer:
    """Every parameter random, biases and norms too."""
    model, g = Transformer(config).double(), torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        one = "norm" in name and name.endswith("weight") and config.norm != "gemma"
        torch.nn.init.normal_(p, mean=float(one), std=0.3, generator=g)
    return model


def batch(config: ModelConfig, rows: int = 3, T: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, packed documents. 3 x 11 tokens go into the model, which 2 and 4 do not divide."""
    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(config.vocab_size, (rows, T), generator=g)
    tokens[0, -1] = config.vocab_size - 1
    return tokens, torch.arange(T).ge(torch.tensor([[5], [7], [12]])[:rows]).long()


def loss_of(model: Transformer, documents: bool = True) -> torch.Tensor:
    tokens, packed = batch(model.config)
    out = token_logprobs(model, tokens, 0.7, packed if documents else None, entropy=True)
    g = torch.Generator().manual_seed(2)
    weights = torch.randn(2, *out.logprobs.shape, generator=g, dtype=torch.float64)
    return (weights[0] * out.logprobs + weights[1] * out.entropy).sum()


def close(ours: torch.Tensor, theirs: torch.Tensor, what: str, limit: float = 1e-9) -> None:
    torch.testing.assert_close(ours, theirs, rtol=limit, atol=limit, msg=lambda text: f"{what}: {text}")


def gathered(model: Transformer, group: Group, of=lambda p: p.detach()) -> dict[str, torch.Tensor]:
    return {name: whole(of(p), placement(p), group).clone() for name, p in model.named_parameters() if p.requires_grad}


def train(model: Transformer, mesh: Mesh, steps: int) -> list[tuple]:
    """(loss, whole gradients, whole parameters after the step) of each step."""
    optimizer, results = AdamW(model.named_parameters(), 0.01, eps=1e-4, weight_decay=0.1), []
    for step in range(steps):
        loss = loss_of(model, documents=step != 1)
        loss.backward()
        sum_partial_gradients(model, mesh.tp_group)
        grads = gathered(model, mesh.tp_group, lambda p: p.grad)
        optimizer.step()
        optimizer.zero_grad()
        results.append(({"loss": loss.detach()}, grads, gathered(model, mesh.tp_group)))
    return results


def parity(mesh: Mesh, sequence: bool, name: str, reference: list[tuple]) -> None:
    """Training of a model beside one process."""
    where = f"{name}, tp {mesh.tp}, sequence {sequence}"
    torch.manual_seed(mesh.tp_rank)  # nothing may hang on a stream of random numbers (T04)
    model = shard(build(MODELS[name]), mesh, sequence)
    model.gradient_checkpointing = mesh.tp == 4 and name in ("qwen3", "biases")
    steps = len(reference) if mesh.tp == 4 else 1  # of two ranks five are in test_layouts.py
    for step, (ours, theirs) in enumerate(zip(train(model, mesh, steps), reference)):
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.keys() == other.keys()
            for key in mine:
                close(mine[key], other[key], f"{where}, step {step}, {key}")
    for key, p in model.named_parameters():  # what all have must be equal to the bit, or they would drift apart
        if placement(p).dim is None:
            assert (all_gather(p.detach()[None], mesh.tp_group) == p).all(), f"{where}, {key}"


# ------------------------------------------------------------------ what travels


def traffic(config: ModelConfig, count: int, size: int, sequence: bool, again: bool) -> tuple[dict, dict]:
    """The formula of tensor.py for a forward and backward of token_logprobs with entropy: calls, bytes of float64.

    count : B T tokens; again : with gradient checkpointing
    """
    L, D, N = config.num_hidden_layers, config.hidden_size, size
    layer = (-(-count // N) * N if sequence else count) * D
    last = again and config.norm_placement != "pre"  # the norm needs the last sum of the block again
    calls = {"all_reduce": [count, 3 * count, count * D]}  # log-probs: maximum, sums; gradient of hidden
    if config.qk_norm_across_heads:
        calls["all_reduce"] += [count] * (4 + 2 * again) * L
    if sequence:
        calls["all_gather"] = [layer] * ((4 + 2 * again) * L + 2)
        calls["reduce_scatter"] = [layer] * ((4 + again + last) * L + 1)
    else:
        calls["all_reduce"] += [layer] * ((4 + again + last) * L + 1)
    return ({(op, "tp"): len(sizes) for op, sizes in calls.items()},
            {(op, "tp"): 8 * sum(sizes) for op, sizes in calls.items()})


def ledgers(mesh: Mesh, name: str) -> None:
    """What travels is what the formula says, to the byte; and the one all-reduce of an update."""
    for sequence, again in itertools.product((False, True), (False, True)):
        model, shapes = shard(build(MODELS[name]), mesh, sequence), set()
        model.gradient_checkpointing = again
        model.layers[1].register_forward_pre_hook(lambda _, args, shapes=shapes: shapes.add(args[0].shape))
        mesh.ledger.clear()
        loss_of(model).backward()
        assert shapes == {(1, 17, 16) if sequence else (3, 11, 16)}
        assert (mesh.ledger.calls, mesh.ledger.bytes) == traffic(MODELS[name], 33, 2, sequence, again), (name, sequence)
        mesh.ledger.clear()
        sum_partial_gradients(model, mesh.tp_group)
        norms = 2 * 2 * 16 if sequence else 0  # two norms a block, of 16 numbers
        assert mesh.ledger.bytes == ({("all_reduce", "tp"): 8 * norms} if norms else {})


# ------------------------------------------------------------------ sampling


DRAWN = [  # tp, sequence, model, options
    (2, False, "qwen3", {"temperature": 0.8}), (2, False, "qwen3", {"temperature": 0.0}),
    (4, False, "gemma", {"temperature": 0.8}), (4, False, "qwen3", {"top_k": 5, "top_p": 0.9}),
    (2, True, "gpt2", {"temperature": 0.8}), (4, True, "qwen3", {"temperature": 0.8})]


def draws(mesh: Mesh, sequence: bool, name: str, options: dict) -> None:
    """generate on a sharded policy writes the rows of one process, and scores them as it sampled them."""
    tokenizer = Pieces(*"abcdefghijk")
    prompts = [tokenizer.encode(text) for text in ("a", "bcdab", "hg")]
    config = replace(MODELS[name], vocab_size=tokenizer.vocab_size)
    alone, model = build(config), shard(build(config), mesh, sequence)
    theirs, ours = (generate(m, prompts, tokenizer, group_size=3, max_new_tokens=8, seed=3, max_rows=7, **options)
                    for m in (alone, model))
    assert torch.equal(ours.tokens, theirs.tokens) and torch.equal(ours.finished, theirs.finished)
    close(ours.old_logprobs, theirs.old_logprobs, name, 1e-12)
    if options.get("temperature"):
        ratio = (token_logprobs(model, ours.tokens, 0.8) - ours.old_logprobs)[ours.action_mask].exp()
        assert float((ratio - 1).abs().max()) < 1e-12


def words(mesh: Mesh) -> None:
    """The draw itself: many rows, many words, edges."""
    vocab = shard(build(replace(LLAMA, vocab_size=1001)), mesh).vocab
    mine = slice(vocab.start, vocab.start + vocab.sizes[mesh.tp_rank])
    g = torch.Generator().manual_seed(5)
    logits = 3 * torch.randn(512, 1001, generator=g, dtype=torch.float64)
    logits[:100, :600] = -math.inf  # two of four ranks have nothing to offer
    logits[100:200, 300:] = -math.inf
    logits[200:300] = logits[200:300].round()  # many equal ones: greedy takes the first
    u = torch.rand(512, generator=g, dtype=torch.float64)
    u[::7], u[1::7] = 0.0, 1 - 2.0**-53
    for temperature in (1.0, 0.6, 0.0):
        theirs, ours = sample(logits, u, temperature), sample(logits[:, mine], u, temperature, vocab=vocab)
        assert torch.equal(ours[0], theirs[0]), temperature
        close(ours[1], theirs[1], f"temperature {temperature}", 1e-12)
    theirs, ours = sample(logits.float(), u), sample(logits[:, mine].float(), u, vocab=vocab)
    assert ours[1].dtype == torch.float32 and (ours[0] != theirs[0]).float().mean() < 0.01
    # T01: 10 words over 4 ranks, all alike. Rows that fill up a shard would make it ln 12.
    ten = shard(build(replace(LLAMA, vocab_size=10)), mesh)
    with torch.no_grad():
        ten.embed_tokens.weight.zero_()
    tokens, _ = batch(ten.config)
    out = token_logprobs(ten, tokens, entropy=True)
    close(out.logprobs, torch.full_like(out.logprobs, -math.log(10)), "10 words")
    close(out.entropy, torch.full_like(out.entropy, math.log(10)), "10 words")
    u = torch.arange(100, dtype=torch.float64) / 100
    drawn, _ = sample(torch.zeros(100, ten.vocab.sizes[mesh.tp_rank], dtype=torch.float64), u, vocab=ten.vocab)
    assert drawn.tolist() == [i // 10 for i in range(100)]
    assert whole(ten.embed_tokens.weight, placement(ten.embed_tokens.weight), mesh.tp_group).shape == (10, 16)


# ------------------------------------------------------------------ with others


def with_others(mesh: Mesh) -> None:
    """tp 2 with replicas, stages or columns of rows: an update through forward_backward, and samples."""
    def loss_fn(out, mb):
        loss = (out.logprobs * mb.action_mask).sum() / 20
        return loss, {"tokens": mb.action_mask.sum()}

    tokens, _ = batch(LLAMA)
    tokens = torch.cat((tokens, tokens.flip(1)[:1]))
    mask = torch.rand(4, 11, generator=torch.Generator().manual_seed(6)) < 0.5
    rollout = Rollout(tokens, mask, torch.full((4,), 12), torch.arange(4), torch.arange(4))
    alone = build(LLAMA)
    model = attach(shard(split_stages(build(LLAMA), mesh, sequence=True), mesh, sequence=True), mesh)
    theirs = forward_backward(alone, rollout.microbatches(4), loss_fn, Mesh(), 0.7)
    rows = rollout.rows(torch.tensor([*mesh.share(4)]))
    ours = forward_backward(model, rows.microbatches(1), loss_fn, mesh, 0.7)
    assert ours == pytest.approx(theirs, rel=1e-9)
    others = dict(alone.named_parameters())
    for name, mine in model.named_parameters():
        close(whole(mine.grad, placement(mine), mesh.tp_group), others[name].grad, name)
    tokenizer = Pieces(*map(chr, range(256)))
    theirs, ours = (generate(m, [[1], [2, 3]], tokenizer, group_size=2, max_new_tokens=4) for m in (alone, model))
    assert torch.equal(ours.tokens, theirs.tokens)
    close(ours.old_logprobs, theirs.old_logprobs, "sampled", 1e-12)


def adapted(mesh: Mesh, sequence: bool) -> None:
    """LoRA on every linear layer of a block, norms, embedding and head trained as copies."""
    config = MODELS["biases"]
    models = []
    for where in (None, mesh):
        model, g = build(config), torch.Generator().manual_seed(7)
        add_lora(model, 2, 8, "all-linear", generator=g,
                 modules_to_save=["embed_tokens", "post_attention_layernorm", "lm_head"])
        for p in model.parameters():
            if p.requires_grad:
                torch.nn.init.normal_(p, std=0.3, generator=g)
        models.append(shard(model, where, sequence) if where else model)
    alone, model = models
    theirs, ours = train(alone, Mesh(), 2), train(model, mesh, 2)
    for mine, other in zip(sum(ours, ()), sum(theirs, ()), strict=True):
        assert mine.keys() == other.keys()
        for key in mine:
            close(mine[key], other[key], key)
    with adapters_off(alone), adapters_off(model):
        close(loss_of(model), loss_of(alone), "the base")


def real(mesh: Mesh, folder) -> None:
    """A trained model: five layers, 8 heads, 4 key heads, 512 words."""
    alone, model = load_model(folder, torch.float64), shard(load_model(folder, torch.float64), mesh, sequence=True)
    tokens = torch.randint(512, (2, 30), generator=torch.Generator().manual_seed(8))
    theirs, ours = (token_logprobs(m, tokens, 0.9) for m in (alone, model))
    close(ours, theirs, "log-probs")
    theirs.mean().backward()
    ours.mean().backward()
    sum_partial_gradients(model, mesh.tp_group)
    for (name, mine), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        close(whole(mine.grad, placement(mine), mesh.tp_group), other.grad, name)


def everything(file, folder) -> None:
    """All checks in one start of four ranks, as one group of four and as two of two: of those each does its part."""
    meshes, references = {tp: init_mesh("cpu", dp=4 // tp, tp=tp) for tp in (2, 4)}, torch.load(file)
    pair = meshes[2].dp_rank
    for tp, sequence in LAYOUTS:
        for number, (name, reference) in enumerate(references.items()):
            if tp == 4 or (number + sequence) % 2 == pair:
                parity(meshes[tp], sequence, name, reference)
    ledgers(meshes[2], ("llama", "olmo2")[pair])
    for mesh in (meshes[2], init_mesh("cpu", dp=1, cp=2, tp=2), init_mesh("cpu", dp=1, pp=2, tp=2)):
        with_others(mesh)
    words(meshes[4])
    for number, (tp, sequence, name, options) in enumerate(DRAWN):
        if tp == 4 or number % 2 == pair:
            draws(meshes[tp], sequence, name, options)
    for tp, sequence in LAYOUTS:
        if tp == 4 or sequence == pair:
            adapted(meshes[tp], sequence)
    if folder.is_dir():
        real(meshes[4], folder)


@dist
def test_losses_gradients_steps_and_draws_are_those_of_one_process(tmp_path):
    folder = Path(__file__).resolve().parents[2] / "shared" / "models" / "stories260k"
    alone = {name: train(build(MODELS[name]), Mesh(), 5 if name in STEPPED else 1) for name in MODELS}
    torch.save(alone, tmp_path / "alone")  # once, and not on each rank
    run_ranks(everything, 4, tmp_path / "alone", folder, timeout=180)


# ------------------------------------------------------------------ what is refused


def of_size(n: int) -> Mesh:
    """A mesh that nobody talks on."""
    return Mesh(tp=n, tp_group=Group("tp", tuple(range(n))))


@pytest.mark.parametrize(("config", "size", "message"), [
    (LLAMA, 3, r"tp 3: 4 heads with 2 key/value heads do not divide over 3 ranks: use one of \[1, 2, 4\]"),
    (LLAMA, 8, r"tp 8: 4 heads with 2 key/value heads do not divide over 8 ranks: use one of \[1, 2, 4\]"),
    (replace(LLAMA, num_attention_heads=12, num_key_value_heads=6, head_dim=4), 4,
     r"12 heads with 6 key/value heads do not divide over 4 ranks: use one of \[1, 2, 3, 6, 12\]"),
    (replace(LLAMA, vocab_size=3), 4, "vocab_size 3 leaves some ranks with nothing: use at most tp 3"),
    (replace(LLAMA, intermediate_size=3), 4, "intermediate_size 3 leaves some ranks"),
    (replace(LLAMA, norm="layer", qk_norm_across_heads=True), 2, "a norm of kind 'layer' across heads is not"),
])
def test_what_cannot_be_cut_is_refused_before_anything_is_changed(config, size, message):
    model = build(config)
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(UserError, match=message):
        shard(model, of_size(size))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters()) and model.vocab is None


def test_quantised_weights_and_dropout_are_refused():
    with pytest.raises(UserError, match=r"layers.0.self_attn.q_proj \(NF4Linear\) holds quantised or merged weights"):
        shard(quantize_base(build(LLAMA)), of_size(2))
    with pytest.raises(UserError, match=r"layers.0.self_attn.q_proj has dropout 0.1"):
        shard(add_lora(build(LLAMA), dropout=0.1), of_size(2))
    merged = merge_lora(add_lora(build(LLAMA)))
    with pytest.raises(UserError, match=r"\(LoRALinear\) holds quantised or merged weights, .* unmerge the adapter"):
        shard(merged, of_size(2))


def test_one_rank_has_the_model_as_it_is():
    model = build(LLAMA)
    assert shard(model, Mesh(), sequence=True) is model and model.vocab is None
    assert not any(p.__dict__ for p in model.parameters())


@pytest.mark.parametrize(("length", "parts", "sizes"), [
    (10, 4, (3, 3, 2, 2)), (258, 4, (65, 65, 64, 64)), (13, 4, (4, 3, 3, 3)), (8, 2, (4, 4)), (4, 4, (1, 1, 1, 1))])
def test_even_sizes_by_hand(length, parts, sizes):
    assert even_sizes(length, parts) == sizes
