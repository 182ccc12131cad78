"""The transformer against a plain loop written from the papers, numbers by hand, and the invariances that packing,
padding and caching rest on."""

import math
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from minirl.config import UserError
from minirl.generate import generate
from minirl.logprobs import token_logprobs
from minirl.model import GemmaNorm, KVCache, ModelConfig, RMSNorm, Transformer
from minirl.rope import RopeScaling
from minirl.tokenizer import ByteTokenizer

V = 17
LLAMA = ModelConfig(vocab_size=V, hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, max_position_embeddings=128, rope_theta=100.0)
SHAPES = {
    "llama": LLAMA,
    "every head its own keys": replace(LLAMA, num_key_value_heads=4),
    "one head of keys": replace(LLAMA, num_key_value_heads=1),
    "untied": replace(LLAMA, tie_word_embeddings=False),
    "qwen2": replace(LLAMA, qkv_bias=True),
    "qwen3": replace(LLAMA, qk_norm=True, head_dim=6),
    "every option": replace(LLAMA, qkv_bias=True, output_bias=True, mlp_bias=True, qk_norm=True, head_dim=10,
                            tie_word_embeddings=False),
    "mistral": replace(LLAMA, sliding_window=3),
    "smollm3": replace(LLAMA, no_rope_layers=(1, 0)),
    "gemma2": replace(LLAMA, norm="gemma", norm_placement="both", hidden_act="gelu_pytorch_tanh", scale_embedding=True,
                      sliding_window=3, layer_types=("sliding_attention", "full_attention"),
                      attn_logit_softcapping=3.0, final_logit_softcapping=2.0, query_pre_attn_scalar=7.0),
    "gemma3": replace(LLAMA, norm="gemma", norm_placement="both", hidden_act="gelu_pytorch_tanh", scale_embedding=True,
                      sliding_window=3, layer_types=("sliding_attention", "full_attention"), qk_norm=True,
                      rope_theta=50.0, rope_local_base_freq=7.0, rope_scaling=RopeScaling("linear", 2.0)),
    "olmo2": replace(LLAMA, norm_placement="post", qk_norm_across_heads=True),
    "phi3": replace(LLAMA, head_dim=12, partial_rotary_factor=0.5, sliding_window=4),
    "gpt2": replace(LLAMA, norm="layer", learned_positions=True, gated_mlp=False, hidden_act="gelu", qkv_bias=True,
                    output_bias=True, mlp_bias=True),
}


def tiny(config=LLAMA, seed=0):
    """float64, every parameter random and large: with weights near 0 attention is flat and mistakes do not show."""
    model, generator = Transformer(config).double(), torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.5, generator=generator)
    return model.requires_grad_(False)


def some_tokens(rows, length, seed=1):
    return torch.randint(V, (rows, length), generator=torch.Generator().manual_seed(seed))


def empty_cache(model, rows, slots):
    return KVCache(model, rows, slots)


def assert_near(found, wanted, hint="", tolerance=1e-12):
    assert_close(found, wanted, rtol=0, atol=tolerance, msg=lambda text: f"{hint}\n{text}")


# ---- values ----

def naive(model, tokens, positions=None, documents=None, interleaved=False):
    """Hidden states (T, D) of one row, one token, head and earlier token at a time."""
    config, weights = model.config, dict(model.named_parameters())
    heads, size, turning = config.num_attention_heads, config.head_dim, config.rotary_size
    caps = config.attn_logit_softcapping, config.final_logit_softcapping
    shared_by = heads // config.num_key_value_heads
    positions = range(len(tokens)) if positions is None else positions
    documents = [0] * len(tokens) if documents is None else documents

    def norm(x, name):
        if name + ".weight" not in weights:
            return x
        weight = weights[name + ".weight"] + (config.norm == "gemma")
        if config.norm == "layer":
            x = x - x.mean()
        y = x / (x.square().mean() + config.rms_norm_eps).sqrt() * weight
        return y + weights[name + ".bias"] if config.norm == "layer" else y

    def linear(x, name):
        y = weights[name + ".weight"] @ x
        return y + weights[name + ".bias"] if name + ".bias" in weights else y

    def turn(x, position, number):
        if config.learned_positions or (config.no_rope_layers and not config.no_rope_layers[number]):
            return x
        local = config.windows[number] and config.rope_local_base_freq
        y = x.clone()
        for i in range(turning // 2):
            speed = 1 / (local or config.rope_theta) ** torch.tensor(2 * i / turning)  # float32
            if config.rope_scaling and not local:
                speed = speed / config.rope_scaling.factor
            angle = torch.tensor(float(position)) * speed
            cos, sin = angle.cos().double(), angle.sin().double()
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + turning // 2)
            y[a], y[b] = x[a] * cos - x[b] * sin, x[b] * cos + x[a] * sin
        return y

    def heads_of(x, layer, letter, position):
        x = linear(x, f"{layer}.self_attn.{letter}_proj")
        if letter == "v":
            return x.split(size)
        name = f"{layer}.self_attn.{letter}_norm"
        parts = norm(x, name).split(size) if config.qk_norm_across_heads else [norm(y, name) for y in x.split(size)]
        return [turn(part, position, int(layer.split(".")[1])) for part in parts]

    def act(x):
        if config.hidden_act == "silu":
            return x / (1 + (-x).exp())
        if config.hidden_act == "gelu":
            return x * (1 + torch.erf(x / math.sqrt(2))) / 2
        return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2

    stream = [weights["embed_tokens.weight"][token] for token in tokens]
    if config.scale_embedding:
        stream = [x * math.sqrt(config.hidden_size) for x in stream]
    if config.learned_positions:
        stream = [x + weights["embed_positions.weight"][p] for x, p in zip(stream, positions)]
    for number, layer in enumerate(f"layers.{i}" for i in range(config.num_hidden_layers)):
        window = config.windows[number] or len(tokens) + max(positions)
        normed = [norm(x, f"{layer}.input_layernorm") for x in stream]
        q, k, v = ([heads_of(x, layer, letter, p) for x, p in zip(normed, positions)] for letter in "qkv")
        for t in range(len(tokens)):
            seen = [s for s in range(t + 1) if documents[s] == documents[t] and positions[t] - positions[s] < window]
            out = []
            for head in range(heads):
                group = head // shared_by
                scores = torch.stack([q[t][head] @ k[s][group] for s in seen])
                scores = scores / math.sqrt(config.query_pre_attn_scalar or size)
                scores = caps[0] * torch.tanh(scores / caps[0]) if caps[0] else scores
                weight = scores.exp() / scores.exp().sum()
                out.append(sum(w * v[s][group] for w, s in zip(weight, seen)))
            y = linear(torch.cat(out), f"{layer}.self_attn.o_proj")
            x = stream[t] + norm(y, f"{layer}.attention_output_norm")
            y = norm(x, f"{layer}.post_attention_layernorm")
            up = linear(y, f"{layer}.mlp.up_proj")
            y = act(linear(y, f"{layer}.mlp.gate_proj")) * up if config.gated_mlp else act(up)
            stream[t] = x + norm(linear(y, f"{layer}.mlp.down_proj"), f"{layer}.mlp_output_norm")
    return torch.stack([norm(x, "norm") for x in stream])


@pytest.mark.parametrize("shape", SHAPES)
def test_hidden_states_equal_those_of_a_plain_loop(shape):
    model, tokens = tiny(SHAPES[shape]), some_tokens(2, 6)
    want = torch.stack([naive(model, row.tolist()) for row in tokens])
    assert_near(model(tokens), want, "attention, MLP, norm or rotation differs from the formula", 1e-9)
    head = model.lm_head.weight if "untied" in shape or "every option" in shape else model.embed_tokens.weight
    assert model.head_weight is head
    cap = model.config.final_logit_softcapping
    wanted = cap * (want @ head.T / cap).tanh() if cap else want @ head.T
    assert_near(model.logits(want), wanted, "logits are not hidden states times the head")


def test_far_positions_and_gaps_equal_those_of_a_plain_loop():
    model, tokens, positions = tiny(), some_tokens(1, 5), [0, 1, 50, 51, 100]
    assert_near(model(tokens, torch.tensor([positions]))[0], naive(model, tokens[0].tolist(), positions),
          "rotation by another angle than the position given", 1e-9)
    wrong = naive(model, tokens[0].tolist(), positions, interleaved=True)
    assert (model(tokens, torch.tensor([positions]))[0] - wrong).abs().max() > 0.1, "this test cannot tell the orders"


@pytest.mark.parametrize("position", [0, 1, 50])
@pytest.mark.parametrize(("pair", "speed"), [(0, 1.0), (1, 0.25)])
def test_rotary_positions_by_hand(position, pair, speed):
    # Two tokens, 2 e_i and 2 e_(i+2), whose queries, keys and values are themselves. Turned by p * speed, the second
    # one's product with the first is -4 sin(p * speed), with itself 4; the scale is 1 / sqrt(4).
    config = ModelConfig(vocab_size=2, hidden_size=4, intermediate_size=2, num_hidden_layers=1, num_attention_heads=1,
                         rms_norm_eps=0.0, rope_theta=16.0)
    model = Transformer(config).double().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "self_attn" in name:
            parameter.copy_(torch.eye(4))
        elif "mlp" in name:
            parameter.zero_()
    model.embed_tokens.weight.copy_(2 * torch.eye(4)[[pair, pair + 2]])
    weight = 1 / (1 + math.exp(2 + 2 * math.sin(position * speed)))  # of the first token
    for start in (0, 7):
        x = model(torch.tensor([[0, 1]]), torch.tensor([[start, start + position]]))[0, 1]
        hint = ("component i must turn with i + E/2, counter-clockwise: position 0 alone is right in any order"
                if start == 0 else "attention depends on more than the distance of two tokens")
        assert float(x[pair] / x[pair + 2]) == pytest.approx(weight / (2 - weight), abs=2e-5), hint


def test_rms_norm_by_hand():
    norm = RMSNorm(2, eps=0.5).double()
    norm.weight.data = torch.tensor([2.0, -1.0]).double()
    x = torch.tensor([[3.0, 4.0]]).double()
    assert_near(norm(x), x / math.sqrt(13) * norm.weight, "mean square 12.5 plus eps 0.5 is 13, under the root")


def test_the_norm_of_gemma_by_hand():
    norm = GemmaNorm(2, eps=0.5).double()
    x = torch.tensor([[3.0, 4.0]]).double()
    assert_near(norm(x), x / math.sqrt(13), "a weight of 0 stands for 1")
    norm.weight.data = torch.tensor([1.0, -1.5]).double()
    assert_near(norm(x), x / math.sqrt(13) * torch.tensor([2.0, -0.5]))
    half, x = GemmaNorm(64, eps=0.0).bfloat16(), torch.randn(64, generator=torch.Generator().manual_seed(0)).bfloat16()
    half.weight.data = torch.full((64,), 0.00586).bfloat16()  # 1.00586 is no bfloat16: the nearest is 1.00781
    wanted = x.double() / x.double().square().mean().sqrt() * (1 + half.weight.double())
    assert torch.equal(half(x), wanted.bfloat16()), "rounded before the product"


def test_rms_norm_of_halves_is_taken_in_float32():
    x = torch.tensor([[300.0, 400.0]], dtype=torch.float16)  # 400 squared is infinite in float16
    assert_close(RMSNorm(2, 1e-5).half()(x), (x.float() / 353.5534).half())


def test_grouped_queries_equal_full_attention_with_repeated_heads():
    model, tokens = tiny(), some_tokens(2, 9)
    full = tiny(SHAPES["every head its own keys"])
    weights = dict(model.state_dict())
    for name in weights:
        if "k_proj" in name or "v_proj" in name:  # head h reads group h // 2: 0 0 1 1, not 0 1 0 1
            weights[name] = weights[name].view(2, 4, 16).repeat_interleave(2, 0).reshape(16, 16)
    full.load_state_dict(weights)
    assert_near(model(tokens), full(tokens), "query heads read another head's keys")
    positions = torch.arange(9).expand(2, 9)
    assert_near(model(tokens, positions, cache=empty_cache(model, 2, 9)),
          full(tokens, positions, cache=empty_cache(full, 2, 9)), "query heads read another head's keys in the cache")


def test_each_parameter_is_used_and_each_option_adds_its_own():
    def names(**options):
        return {name.split("layers.0.")[-1] for name, _ in Transformer(replace(LLAMA, **options)).named_parameters()
                if "layers.1" not in name}

    plain = names()
    assert names(qkv_bias=True) - plain == {f"self_attn.{x}_proj.bias" for x in "qkv"}
    assert names(output_bias=True) - plain == {"self_attn.o_proj.bias"}
    assert names(mlp_bias=True) - plain == {f"mlp.{x}_proj.bias" for x in ("gate", "up", "down")}
    assert names(qk_norm=True) - plain == {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
    assert names(tie_word_embeddings=False) - plain == {"lm_head.weight"}

    model, tokens = tiny(SHAPES["every option"]), some_tokens(1, 5)
    before = model.logits(model(tokens))
    for name, parameter in model.named_parameters():
        kept = parameter.clone()
        parameter.add_(torch.linspace(0.5, 1, parameter.numel()).view_as(parameter))
        changed = (model.logits(model(tokens)) - before).abs().max() > 1e-6
        parameter.copy_(kept)
        # The same number added to all keys moves no softmax; a bias that differs by component does, through rotation.
        assert changed, f"{name} has no effect"


def test_gradients_equal_finite_differences():
    config = ModelConfig(vocab_size=4, hidden_size=4, intermediate_size=3, num_hidden_layers=1, num_attention_heads=2,
                         num_key_value_heads=1, qkv_bias=True, qk_norm=True)
    model = tiny(config, seed=3)
    names, values = zip(*model.named_parameters())
    values = [value.clone().requires_grad_() for value in values]
    tokens, documents = torch.tensor([[0, 1, 2, 3], [3, 3, 1, 0]]), torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0]])

    def hidden(*values):
        return torch.func.functional_call(model, dict(zip(names, values)), (tokens, None, documents))

    assert torch.autograd.gradcheck(hidden, values)


# ---- what a token may see ----

@pytest.mark.parametrize("shape", ["llama", "every option"])
def test_a_later_token_changes_no_earlier_hidden_state(shape):
    model, tokens = tiny(SHAPES[shape]), some_tokens(2, 8)
    before = model(tokens)
    for t in range(1, 8):
        changed = tokens.clone()
        changed[:, t] = (changed[:, t] + 1) % V
        after = model(changed)
        assert torch.equal(after[:, :t], before[:, :t]), f"tokens before {t} see it: the mask is off by one"
        assert (after[:, t:] - before[:, t:]).abs().amax((0, 2)).min() > 1e-6, f"a token after {t} does not see it"


def test_padding_on_the_right_changes_nothing():
    model, tokens = tiny(), some_tokens(3, 6)
    for pad in (0, 5):
        padded = torch.nn.functional.pad(tokens, (0, 7), value=pad)
        assert_near(model(padded)[:, :6], model(tokens), "the padded tail is seen")


def test_rows_do_not_see_each_other():
    model, tokens = tiny(), some_tokens(3, 6)
    assert_near(model(tokens)[2:], model(tokens[2:]), "a row depends on its neighbours")
    assert_near(model(tokens[[2, 0, 1]]), model(tokens)[[2, 0, 1]], "a row depends on its place in the batch")


@pytest.mark.parametrize("shape", ["every option", "mistral", "smollm3", "gemma2", "gemma3", "olmo2", "phi3", "gpt2"])
def test_packed_documents_equal_separate_ones_with_their_gradients(shape):
    tokens, lengths = some_tokens(2, 9), [3, 4, 2]
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [7, 7, 7, 4, 4, 4, 4, 9, 9]])  # ids of any kind
    probe = torch.randn(2, 9, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    model = tiny(SHAPES[shape]).requires_grad_()
    alone = torch.cat([model(part) for part in tokens.split(lengths, 1)], 1)
    packed = model(tokens, documents=documents)
    assert_near(packed, alone, "documents see each other, or positions go on instead of restarting")
    names, parameters = zip(*((name, p) for name, p in model.named_parameters() if name != "lm_head.weight"))
    wanted = torch.autograd.grad((alone * probe).sum(), parameters)
    found = torch.autograd.grad((packed * probe).sum(), parameters)
    for name, a, b in zip(names, found, wanted):
        assert_near(a, b, f"gradient of {name}", 1e-10)

    want = naive(model, tokens[0].tolist(), [0, 1, 2, 0, 1, 2, 3, 0, 1], documents[0].tolist())
    assert_near(packed[0], want, "positions of 3, 4 and 2 tokens are 0 1 2, 0 1 2 3, 0 1", 1e-9)


def test_isolation_needs_the_mask_and_not_positions_alone():
    model, tokens = tiny(), some_tokens(1, 7)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    packed = model(tokens, documents=documents)
    restarted = model(tokens, torch.tensor([[0, 1, 2, 0, 1, 2, 3]]))
    assert (restarted - packed)[:, 3:].abs().max() > 0.01, "the test cannot see a missing mask"
    for t in range(3):
        changed = tokens.clone()
        changed[0, t] = (changed[0, t] + 1) % V
        assert torch.equal(model(changed, documents=documents)[:, 3:], packed[:, 3:]), "document b sees document a"
    changed = tokens.clone()
    changed[0, 3:] = (changed[0, 3:] + 1) % V
    assert torch.equal(model(changed, documents=documents)[:, :3], packed[:, :3]), "document a sees document b"


@pytest.mark.parametrize("window", [1, 3, 8, 20])
def test_a_window_is_a_token_and_those_before_it_as_many_as_it_says(window):
    model, tokens = tiny(replace(LLAMA, num_hidden_layers=1, sliding_window=window)), some_tokens(1, 10)
    before = model(tokens)
    for t in range(10):
        changed = tokens.clone()
        changed[0, t] = (changed[0, t] + 1) % V
        difference = (model(changed) - before)[0].abs().amax(-1) > 1e-9
        assert difference.nonzero()[:, 0].tolist() == list(range(t, min(t + window, 10))), "the window is off by one"


def test_a_window_counts_positions_and_not_tokens():
    model, tokens = tiny(SHAPES["mistral"]), some_tokens(1, 5)
    for positions in ([0, 5, 6], [0, 1, 2, 9, 10], [0, 2, 4, 6, 8]):
        row = tokens[:, : len(positions)]
        found = model(row, torch.tensor([positions]))[0]
        assert_near(found, naive(model, row[0].tolist(), positions), "a gap shortens what a window reaches", 1e-9)
    cache = empty_cache(model, 1, 20)
    parts = [model(tokens[:, i : i + 1], torch.tensor([[p]]), cache=cache) for i, p in enumerate([0, 2, 4, 6, 8])]
    assert (torch.cat(parts, 1)[0, :2] - found[:2]).abs().max() > 1e-3, "an empty slot between two counts as a token"


def test_a_row_within_the_window_needs_no_mask_and_a_step_reads_the_window_alone():
    model, tokens = tiny(replace(LLAMA, sliding_window=4)), some_tokens(2, 9)
    assert model.frames(tokens[:, :4], None, None, None)[0].mask is None
    assert model.frames(tokens[:, :5], None, None, None)[0].mask is not None
    cache = empty_cache(model, 2, 9)
    frame = model.frames(tokens[:, :1], torch.full((2, 1), 7), None, cache)[1]
    assert (frame.mask, frame.start, frame.used) == (None, 4, 8), "slots 4, 5, 6, 7 are in sight"
    frame = model.frames(tokens[:, :1], torch.tensor([[7], [5]]), None, cache)[1]
    assert (frame.start, frame.used) == (2, 8)
    seen = [[slot for slot in range(2, 8) if frame.mask[row, 0, 0, slot - 2] == 0] for row in (0, 1)]
    assert seen == [[4, 5, 6, 7], [2, 3, 4, 5]]


def test_layers_of_one_kind_share_one_frame():
    model = tiny(SHAPES["gemma3"])
    frames = Transformer(replace(model.config, num_hidden_layers=4, layer_types=model.config.layer_types * 2)).frames(
        some_tokens(1, 5), None, None, None)
    assert frames[0] is frames[2] and frames[1] is frames[3] and frames[0] is not frames[1]
    assert len({*map(id, tiny().frames(some_tokens(1, 5), None, None, None))}) == 1


def test_a_single_document_is_a_plain_row():
    model, tokens = tiny(), some_tokens(2, 7)
    assert_near(model(tokens, documents=torch.full((2, 7), 5)), model(tokens))


# ---- the cache ----

@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chunks", [[9], [1] * 9, [2, 3, 4], [8, 1]])
def test_feeding_a_cache_chunk_by_chunk_equals_one_pass(shape, chunks):
    model, tokens = tiny(SHAPES[shape]), some_tokens(2, 9)
    cache, positions = empty_cache(model, 2, 12), torch.arange(9).expand(2, 9)
    parts = [model(t, p, cache=cache) for t, p in zip(tokens.split(chunks, 1), positions.split(chunks, 1))]
    assert_near(torch.cat(parts, 1), model(tokens), "slot, mask or position of a cached token is off")


@pytest.mark.parametrize("lengths", [[1, 3, 9], [9, 1, 3]])
def test_ragged_prompts_in_a_cache_go_on_as_if_each_were_alone(lengths):
    model, tokens, lengths = tiny(), some_tokens(3, 14), torch.tensor(lengths)
    cache = empty_cache(model, 3, 14)
    prompts = tokens[:, :9].clone()
    prompts[torch.arange(9) >= lengths[:, None]] = 16  # right padding: seen by nobody, overwritten later
    hidden = model(prompts, torch.arange(9).expand(3, 9), cache=cache)
    for row, n in enumerate(lengths):
        assert_near(hidden[row, :n], model(tokens[row : row + 1, :n])[0], "prefill of a padded row")
    for step in range(5):
        at = lengths + step
        new = model(tokens.gather(1, at[:, None]), at[:, None], cache=cache)
        for row in range(3):
            want = model(tokens[row : row + 1, : at[row] + 1])[0, -1]
            assert_near(new[row, 0], want, f"row {row} sees padding, or its position counts the longest row")


def fed(model, tokens, slots=10):
    cache = empty_cache(model, len(tokens), slots)
    model(tokens, torch.arange(tokens.shape[1]).expand(tokens.shape), cache=cache)
    return cache


def step(model, cache, tokens, position):
    return model(tokens, torch.full_like(tokens, position), cache=cache)[:, 0]


def test_selected_rows_of_a_cache_go_on_as_copies():
    model, tokens, new = tiny(), some_tokens(3, 5), some_tokens(4, 1, seed=9)
    rows = torch.tensor([2, 0, 2, 1])
    cache = fed(model, tokens)
    for slots in (6, 10, 20):
        part = cache.select(rows, slots)
        want = model(torch.cat((tokens[rows], new), 1))[:, -1]
        assert_near(step(model, part, new, 5), want, f"rows or slots mixed up with {slots} slots")
    want = model(torch.cat((tokens, new[:3]), 1))[:, -1]
    step(model, part, new, 2)  # writes into the copy
    assert_near(step(model, cache, new[:3], 5), want, "select shares memory with the cache it copies from")


def test_joined_caches_hold_the_rows_of_both_in_order():
    model, new = tiny(), some_tokens(3, 1, seed=9)
    first, second = some_tokens(2, 5, seed=3), some_tokens(1, 5, seed=4)
    for slots in (7, 10, 13):
        joined = fed(model, first).join(fed(model, second, slots))
        want = model(torch.cat((torch.cat((first, second)), new), 1))[:, -1]
        assert_near(step(model, joined, new, 5), want, f"rows of caches with 10 and {slots} slots")
    nobody = empty_cache(model, 0, 10)
    assert_near(step(model, nobody.join(fed(model, first)), new[:2], 5), model(torch.cat((first, new[:2]), 1))[:, -1])


def test_rows_put_into_a_cache_replace_only_those():
    model, tokens, new = tiny(), some_tokens(4, 5), some_tokens(4, 1, seed=9)
    cache, others = fed(model, tokens), some_tokens(2, 5, seed=5)
    cache.put(torch.tensor([3, 1]), fed(model, others))
    tokens = torch.stack((tokens[0], others[1], tokens[2], others[0]))
    assert_near(step(model, cache, new, 5), model(torch.cat((tokens, new), 1))[:, -1], "put writes other rows")


def test_the_remains_of_an_earlier_tenant_are_invisible():
    model, tokens = tiny(), some_tokens(2, 10)
    cache = fed(model, some_tokens(2, 10, seed=8))  # every slot is full of another row
    for t in range(4):
        wanted = model(tokens[:, : t + 1])[:, -1]
        assert_near(step(model, cache, tokens[:, t : t + 1], t), wanted, "a stale slot is visible")


@pytest.mark.parametrize(("config", "limit"), [
    (SHAPES["gpt2"], 128), (replace(LLAMA, rope_scaling=RopeScaling("dynamic", 2.0)), 128),
    (replace(LLAMA, rope_scaling=RopeScaling("longrope", original_max_position_embeddings=9, short_factor=(1.0, 2.0),
                                             long_factor=(2.0, 3.0))), 9)])
def test_a_cache_that_would_hold_keys_of_other_lengths_is_refused(config, limit):
    model = tiny(config)
    assert model.config.context == limit
    cache = empty_cache(model, 1, limit + 1)
    model(some_tokens(1, 1), torch.tensor([[limit - 1]]), cache=cache)
    with pytest.raises(UserError, match=f"a row of {limit + 1} tokens is too long"):
        model(some_tokens(1, 1), torch.tensor([[limit]]), cache=cache)


@pytest.mark.parametrize("shape", SHAPES)
def test_samples_have_the_log_probs_that_training_computes(shape):
    model = tiny(replace(SHAPES[shape], vocab_size=300))
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11]]
    rollout = generate(model, prompts, ByteTokenizer(), group_size=2, max_new_tokens=12, temperature=0.8)
    with torch.no_grad():
        found = token_logprobs(model, rollout.tokens, temperature=0.8)
    assert_near(rollout.old_logprobs[rollout.action_mask], found[rollout.action_mask], "the ratio is not 1", 1e-11)


def test_what_is_sampled_ends_where_the_cache_does():
    scaling = RopeScaling("longrope", 0.0, 9, short_factor=(1.0, 2.0), long_factor=(2.0, 3.0))
    model = tiny(replace(LLAMA, vocab_size=300, rope_scaling=scaling))
    rollout = generate(model, [[1, 2, 3]], ByteTokenizer(), max_new_tokens=20)
    assert rollout.action_mask.sum() == 6 and not rollout.finished[0]


def test_a_row_beyond_the_learned_positions_is_refused():
    model = tiny(SHAPES["gpt2"])
    model(some_tokens(1, 128))
    with pytest.raises(UserError, match="a row of 129 tokens is too long: this model has 128 positions"):
        model(some_tokens(1, 129))


# ---- memory ----

@pytest.mark.parametrize("shape", ["llama", "gemma3"])
def test_recomputed_blocks_give_the_same_gradients(shape):
    model, tokens = tiny(SHAPES[shape]).requires_grad_(), some_tokens(2, 9)
    parameters = list(model.parameters())

    def gradients():
        runs = []
        hooks = [block.register_forward_pre_hook(lambda *_: runs.append(1)) for block in model.layers]
        hidden = model(tokens, documents=torch.tensor([[0] * 4 + [1] * 5] * 2))
        found = torch.autograd.grad(model.logits(hidden).log_softmax(-1)[..., 0].sum(), parameters)
        for hook in hooks:
            hook.remove()
        return found, len(runs)

    plain, once = gradients()
    model.gradient_checkpointing = True
    again, twice = gradients()
    assert (once, twice) == (2, 4), "backward must run each block once more"
    assert all(torch.equal(a, b) for a, b in zip(plain, again))


def test_recomputed_blocks_keep_their_input_alone():
    model, tokens = tiny().requires_grad_(), some_tokens(2, 20)

    def kept():
        saved = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.setdefault(x.data_ptr(), x), lambda x: x):
            model(tokens)
        return sum(x.numel() for x in saved.values()) - sum(p.numel() for p in model.parameters())

    full = kept()
    model.gradient_checkpointing = True
    assert kept() < 0.25 * full


def test_recomputation_is_off_with_a_cache_and_without_gradients():
    model, tokens = tiny(), some_tokens(2, 5)
    wanted = model(tokens)
    model.gradient_checkpointing = True
    assert_near(model(tokens, torch.arange(5).expand(2, 5), cache=empty_cache(model, 2, 5)), wanted)
    with torch.inference_mode():
        assert torch.equal(model(tokens), wanted)


# ---- numbers ----

def test_initial_weights_depend_on_the_generator_alone():
    def made(seed):
        return Transformer(SHAPES["every option"]).init_weights(torch.Generator().manual_seed(seed)).state_dict()

    first, second = made(0), made(0)  # the constructor has drawn other numbers for each of them
    assert all(torch.equal(first[name], second[name]) for name in first), "a weight comes from the global generator"
    assert not torch.equal(first["embed_tokens.weight"], made(1)["embed_tokens.weight"])
    assert not torch.equal(first["layers.0.mlp.up_proj.weight"], first["layers.1.mlp.up_proj.weight"])


def test_initial_weights_have_the_spread_that_is_promised():
    config = ModelConfig(vocab_size=500, hidden_size=64, intermediate_size=128, num_hidden_layers=8,
                         num_attention_heads=4, qkv_bias=True)
    model = Transformer(config).requires_grad_(False)
    assert model.init_weights(torch.Generator().manual_seed(0)) is model
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all(), name
        elif name.endswith("bias"):
            assert (parameter == 0).all(), name
        else:  # 1 / sqrt(inputs), a quarter of it, 1 / sqrt(2 * 8), into the residual stream, half in the embedding
            scale = {"o_proj": 4, "down_proj": 4, "embed_tokens": 2}.get(name.split(".")[-2], 1)
            want = parameter.shape[1] ** -0.5 / scale
            assert float(parameter.std()) == pytest.approx(want, rel=0.05), name


def test_initial_norms_of_gemma_and_layer_norms_are_neutral():
    for shape in ("gemma2", "gemma3", "gpt2", "olmo2"):
        model = Transformer(SHAPES[shape]).requires_grad_(False).init_weights(torch.Generator().manual_seed(0))
        x = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
        for name, module in model.named_modules():
            if name.endswith("norm") and "q_norm" not in name and "k_norm" not in name:
                wanted = x - x.mean(-1, keepdim=True) if shape == "gpt2" else x
                wanted = wanted / wanted.square().mean(-1, keepdim=True).sqrt()
                assert_close(module(x) if not isinstance(module, torch.nn.Identity) else wanted, wanted, atol=1e-4,
                             rtol=0)


def test_bfloat16_stays_near_float32_even_at_far_positions():
    model = Transformer(replace(LLAMA, rope_theta=10000.0)).init_weights(torch.Generator().manual_seed(0))
    tokens = some_tokens(2, 40)
    with torch.no_grad():
        for start in (0, 10_000):
            positions = (start + torch.arange(40)).expand(2, 40)
            wide = model.float()(tokens, positions)
            narrow = model.bfloat16()(tokens, positions)
            assert narrow.dtype == torch.bfloat16 and narrow.isfinite().all()
            assert (narrow.float() - wide).abs().mean() < 0.05, "angles in bfloat16 are off by whole turns"
            model.float()


def test_float32_is_within_rounding_of_float64():
    model, tokens = tiny(SHAPES["every option"]), some_tokens(2, 12)
    wide = model(tokens)
    assert (model.float()(tokens) - wide).abs().max() < 1e-4


def test_a_forward_changes_none_of_its_inputs():
    model, tokens = tiny(), some_tokens(2, 6)
    positions, documents = torch.arange(6).expand(2, 6).clone(), torch.tensor([[0, 0, 1, 1, 1, 2]] * 2)
    inputs = [tokens, positions, documents]
    before = [x.clone() for x in inputs]
    model(tokens)
    model(tokens, positions)
    model(tokens, documents=documents)
    model(tokens, positions, cache=empty_cache(model, 2, 8))
    hidden = model(tokens)
    kept = hidden.clone()
    model.logits(hidden)
    assert all(torch.equal(x, y) for x, y in zip([*inputs, hidden], [*before, kept]))


@pytest.mark.parametrize(("options", "said"), [
    ({"head_dim": 5}, "head_dim 5 is odd"),
    ({"hidden_size": 12}, "head_dim 3 is odd"),
    ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
    ({"num_key_value_heads": 8}, "num_attention_heads 4 is not a multiple of num_key_value_heads 8"),
    ({"vocab_size": 0}, "vocab_size 0 must be at least 1"),
    ({"vocab_size": 10**30}, "vocab_size 1000000000000000000000000000000 must be .* at most 1048576"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000 must be at least 1, and at most 4096"),
    ({"max_position_embeddings": 2**32}, "max_position_embeddings 4294967296 must be .* at most 2147483648"),
    ({"head_dim": 2, "rope_scaling": RopeScaling("dynamic", 2.0)}, "gives no finite rotation of 2 components"),
    ({"rope_theta": 1.0, "rope_scaling": RopeScaling("yarn", 2.0)}, "rope_theta 1.0 gives no finite rotation"),
    ({"rope_scaling": RopeScaling("longrope", 2.0, 1, short_factor=(1.0, 2.0), long_factor=(1.0, 2.0))},
     "gives no finite rotation"),
    ({"rope_scaling": RopeScaling("llama3", 8.0, 10**400)}, "gives no finite rotation"),
    ({"num_hidden_layers": -1}, "num_hidden_layers -1 must be at least 1"),
    ({"rope_theta": math.nan}, "rope_theta nan must be at least 0, and finite"),
    ({"sliding_window": -3}, "sliding_window -3 must be at least 0"),
    ({"hidden_act": "tanh"}, "hidden_act 'tanh' is not supported: supported are .*'silu'"),
    ({"norm": "batch"}, "norm 'batch' is not supported"),
    ({"layer_types": ("full_attention",)}, "layer_types must hold .* for each of 2 layers, not"),
    ({"layer_types": ("full_attention", "linear_attention")}, "layer_types must hold"),
    ({"layer_types": ("full_attention", "sliding_attention")}, "but sliding_window is 0"),
    ({"no_rope_layers": (1, 0, 1)}, "no_rope_layers must hold 0 or 1 for each of 2 layers"),
    ({"partial_rotary_factor": 0.75}, "partial_rotary_factor 0.75 turns 3 of 4 components"),
    ({"partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5 turns 6 of 4 components"),
    ({"rope_scaling": RopeScaling("longrope", short_factor=(1.0,), long_factor=(1.0, 2.0))},
     "short_factor has 1 numbers for 2 rotary pairs"),
])
def test_a_shape_that_cannot_be_built_is_refused_with_its_numbers(options, said):
    with pytest.raises(ValueError, match=said) as error:
        replace(LLAMA, **{"head_dim": 0, **options})
    assert "\n" not in str(error.value)


def test_heads_default_to_full_attention_of_the_hidden_size():
    config = ModelConfig(vocab_size=V, hidden_size=16, intermediate_size=20, num_hidden_layers=1, num_attention_heads=4)
    assert (config.num_key_value_heads, config.head_dim) == (4, 4)
