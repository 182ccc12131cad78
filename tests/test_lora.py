import copy
import json
import math
import pickle
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from safetensors.torch import load, load_file, save_file
from stubs import Pieces, random_policy
from talk import chat_tokenizer
from test_checkpoint import SHAPES, TINY, TOKENS, Endless, edit_json, logits, tiny
from torch import nn

from minirl import checkpoint
from minirl.adapters import export_merged, load_adapted, load_adapter, save_adapter, tokenizer_folder
from minirl.checkpoint import load_model, restore_rng, rng_tensors, save_checkpoint, save_model
from minirl.config import UserError
from minirl.generate import generate
from minirl.logprobs import token_logprobs
from minirl.lora import (
    LoRALinear,
    TrainedCopy,
    adapters,
    adapters_off,
    add_lora,
    merge_lora,
    trainable_parameters,
    unmerge_lora,
)
from minirl.lora_config import LoRAConfig, read_targets
from minirl.merge import MergeConfig, main
from minirl.nf4 import NF4Linear, quantize_base
from minirl.optim import AdamW
from minirl.parallel import init_mesh
from minirl.parallel.data import sum_gradients
from minirl.tokenizer import ByteTokenizer, load_tokenizer

UNTIED = replace(TINY, tie_word_embeddings=False)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVERYTHING = {"rank": 3, "alpha": 5.0, "rslora": True, "dropout": 0.25, "rank_pattern": {"down_proj": 2},
              "alpha_pattern": {"^model.layers.1.*": 7}, "exclude": ["layers.0.mlp.up_proj"],
              "modules_to_save": ["model.norm", "lm_head"], "base_model": "some/base"}


def adapted(config=TINY, seed=0, **options):
    """A model with adapters that are not at their start: B and copies moved, so that all of it counts."""
    generator = torch.Generator().manual_seed(seed)
    model = add_lora(tiny(config), **{"rank": 4, "alpha": 8, "generator": generator} | options)
    return moved(model, generator)


def moved(model, generator=None):
    with torch.no_grad():
        for parameter in trainable_parameters(model).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter) * 0.1)
    return model


def bits(model):
    """A copy of every weight of the base, by the name it had before adapters."""
    return {name.replace(".base.", "."): p.detach().clone() for name, p in model.named_parameters()
            if "lora_" not in name and ".copy." not in name}


def same_bits(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def explicit(model):
    """The same model without adapters, each weight replaced by W + scale * B A in float64."""
    plain = tiny(model.config).double()
    with torch.no_grad():
        for name, adapter in adapters(model).items():
            linear = plain.get_submodule(name)
            if isinstance(adapter, TrainedCopy):
                linear.load_state_dict(adapter.copy.double().state_dict())
            else:
                product = adapter.lora_B.double() @ adapter.lora_A.double()
                linear.weight.add_(product, alpha=adapter.scale)
    return plain


def refused(function, *args, **options):
    with pytest.raises(UserError) as error:
        function(*args, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


# ---- the layer ----

@pytest.mark.parametrize(("rslora", "expected"), [(False, 64.0), (True, 4 * 8 * 16 / math.sqrt(8))])
def test_the_scale_is_alpha_over_rank_or_over_its_root(rslora, expected):
    base = nn.Linear(4, 4, bias=False)
    layer = LoRALinear(base, rank=8, alpha=16, rslora=rslora)
    for parameter, value in ((base.weight, 0), (layer.lora_A, 1), (layer.lora_B, 1)):
        nn.init.constant_(parameter, value)
    torch.testing.assert_close(layer(torch.ones(4)), torch.full((4,), expected))


@pytest.mark.parametrize("shape", [(6,), (5, 6), (2, 3, 6), (0, 6), (2, 0, 6)])
def test_the_layer_is_the_formula_for_any_number_of_axes(shape):
    torch.manual_seed(0)
    layer = LoRALinear(nn.Linear(6, 7), rank=3, alpha=2).double()
    nn.init.normal_(layer.lora_B)
    x = torch.randn(shape, dtype=torch.float64)
    expected = x @ layer.base.weight.T + layer.base.bias + 2 / 3 * (x @ layer.lora_A.T) @ layer.lora_B.T
    torch.testing.assert_close(layer(x), expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(F.linear(x, layer.weight, layer.bias), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("nf4", [False, True])
def test_gradients_are_those_of_finite_differences(bias, dropout, nf4):
    torch.manual_seed(0)
    base = nn.Linear(6, 5, bias=bias).double().requires_grad_(False)
    layer = LoRALinear(NF4Linear(base) if nf4 else base, rank=2, alpha=3, dropout=dropout)
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    b = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)

    def function(x, a, b):
        torch.manual_seed(1)  # the same units drop out each time
        return torch.func.functional_call(layer, {"lora_A": a, "lora_B": b}, x)

    assert torch.autograd.gradcheck(function, (x, layer.lora_A, b))


def test_an_input_without_gradient_still_trains_the_adapter():
    layer = LoRALinear(nn.Linear(6, 5).requires_grad_(False), rank=2, alpha=3)
    layer(torch.ones(3, 6)).sum().backward()
    assert layer.lora_B.grad.abs().sum() > 0, "the first block reads a frozen embedding"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_before_training_the_model_is_its_base_to_the_bit(shape, dtype):
    model = tiny(SHAPES[shape]).to(dtype)
    before, weights = logits(model), bits(model)
    add_lora(model, rank=4, alpha=8, modules_to_save=["norm"])
    assert torch.equal(logits(model), before)
    assert same_bits(bits(model), weights)


def test_at_the_start_only_b_learns_and_the_base_never_does():
    model = add_lora(tiny(), rank=4, alpha=8)
    token_logprobs(model, TOKENS).mean().backward()
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B"):
            assert parameter.grad.abs().sum() > 0, name
        elif name.endswith("lora_A"):
            assert parameter.grad.abs().sum() == 0, f"{name}: B is 0"
        else:
            assert parameter.grad is None and not parameter.requires_grad, name
    optimizer = AdamW(model.named_parameters(), lr=1e-3)
    assert optimizer.parameters.keys() == trainable_parameters(model).keys() and len(optimizer.parameters) == 28


def test_the_first_a_is_the_same_in_every_dtype_and_repeats_with_its_seed():
    one, two = (add_lora(tiny().to(dtype), generator=torch.Generator().manual_seed(3))
                for dtype in (torch.float32, torch.bfloat16))
    for name, parameter in trainable_parameters(one).items():
        assert torch.equal(parameter.bfloat16(), trainable_parameters(two)[name])
    a = one.layers[0].mlp.down_proj.lora_A
    assert a.abs().max() <= 24**-0.5 and 0.8 < a.std() / (24**-0.5 / 3**0.5) < 1.2  # uniform, kaiming with a = sqrt(5)


def test_dropout_acts_in_training_only(shared):
    model = adapted(dropout=0.5)
    model.eval()
    assert torch.equal(logits(model), logits(model))
    torch.testing.assert_close(logits(model).double(), logits(explicit(model)), rtol=0, atol=1e-4)
    model.train()
    assert not torch.equal(logits(model), logits(model))
    assert not any(module.training for module in add_lora(tiny().eval(), dropout=0.5).modules())


def test_dropout_keeps_the_mean():
    layer = LoRALinear(nn.Linear(8, 8, bias=False), rank=4, alpha=4, dropout=0.5)
    for parameter, value in ((layer.base.weight, 0), (layer.lora_A, 1), (layer.lora_B, 1)):
        nn.init.constant_(parameter, value)
    assert 31 < layer(torch.ones(4000, 8)).mean() < 33  # 8 inputs x rank 4


# ---- adapters off: the reference ----

def test_with_adapters_off_the_model_is_its_base_to_the_bit():
    base = logits(tiny(UNTIED))
    model = adapted(UNTIED, targets=[*ATTENTION, "lm_head"], modules_to_save=["embed_tokens", "norm"])
    changed = logits(model)
    assert not torch.allclose(changed, base)
    with adapters_off(model):
        assert torch.equal(logits(model), base)
        with pytest.raises(RuntimeError), adapters_off(model):
            raise RuntimeError
        assert torch.equal(logits(model), base), "the inner one must not switch on what the outer one switched off"
    assert torch.equal(logits(model), changed)
    with pytest.raises(RuntimeError), adapters_off(model):
        raise RuntimeError
    assert torch.equal(logits(model), changed)


def test_a_model_without_adapters_is_no_reference_of_itself():
    for function in (lambda model: adapters_off(model).__enter__(), merge_lora, unmerge_lora):
        assert "has no adapters" in refused(function, tiny())
    assert "has no adapters" in refused(save_adapter, tiny(), "nowhere")


@pytest.mark.parametrize("config", [TINY, UNTIED])
def test_after_training_all_of_it_the_reference_is_the_initial_model(config):
    model = tiny(config)
    before = logits(model)
    add_lora(model, rank=2, modules_to_save=["embed_tokens", "norm"], dropout=0.1)
    assert {"embed_tokens.copy.weight", "norm.copy.weight"} <= trainable_parameters(model).keys()
    optimizer = AdamW(model.named_parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(10):
        (-token_logprobs(model, TOKENS).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with adapters_off(model):
        assert torch.equal(logits(model), before)
    assert (logits(model) - before).abs().max() > 0.1


# ---- merging ----

@pytest.mark.parametrize("shape", SHAPES)
def test_merged_is_unmerged_is_the_sum_of_the_matrices(shape):
    model = adapted(SHAPES[shape], rslora=True, dropout=0.5, modules_to_save=["norm"]).eval()
    apart = logits(model)
    merge_lora(model)
    assert (logits(model) - apart).abs().max() < 1e-5
    unmerge_lora(model)
    assert torch.equal(logits(model), apart)
    assert (logits(explicit(model)) - apart).abs().max() < 2e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_hundred_rounds_of_merging_leave_every_bit(dtype):
    model = adapted().to(dtype)
    everything = {name: p.detach().clone() for name, p in model.named_parameters()}
    merged = [p.clone() for p in (merge_lora(model).layers[0].mlp.up_proj.merged,)]
    for _ in range(100):
        unmerge_lora(merge_lora(model))
    assert same_bits(dict(model.named_parameters()), everything)
    assert torch.equal(merge_lora(model).layers[0].mlp.up_proj.merged, merged[0])


def test_in_bfloat16_a_merged_weight_is_the_float32_sum_rounded_once():
    model = adapted().bfloat16()
    layer = merge_lora(model).layers[0].self_attn.q_proj
    exact = layer.base.weight.float() + layer.scale * layer.lora_B.float() @ layer.lora_A.float()
    assert torch.equal(layer.merged, exact.bfloat16())
    subtracted = layer.merged - (layer.scale * layer.lora_B.float() @ layer.lora_A.float()).bfloat16()
    assert not torch.equal(subtracted, layer.base.weight), "why unmerging does not subtract"
    with torch.no_grad():  # a change of less than 1/512 of each weight
        layer.lora_B.copy_(torch.zeros_like(layer.lora_B))
        layer.lora_B[:, 0] = 1
        layer.lora_A.copy_(torch.zeros_like(layer.lora_A))
        layer.lora_A[0] = layer.base.weight.abs().amin() / 520 / layer.scale
    merge_lora(unmerge_lora(model))
    assert torch.equal(layer.merged, layer.base.weight), "a small update is lost, as the docstring says"
    ones = torch.ones(1, 16).bfloat16()
    assert torch.equal(layer(ones), layer.base(ones))


def test_merging_twice_is_merging_once_and_the_adapters_can_be_off_meanwhile():
    model = adapted(modules_to_save=["norm"])
    base = logits(tiny())
    once = logits(merge_lora(model))
    assert torch.equal(logits(merge_lora(model)), once)
    with adapters_off(model):
        assert torch.equal(logits(model), base)
    with adapters_off(model):
        merge_lora(unmerge_lora(model))  # what is merged does not depend on what is switched on
    assert torch.equal(logits(model), once)


def test_a_merged_model_fails_to_train_instead_of_training_nothing():
    model = merge_lora(adapted(modules_to_save=["norm"]))
    with pytest.raises(RuntimeError, match="does not require grad"):
        token_logprobs(model, TOKENS).sum().backward()
    token_logprobs(unmerge_lora(model), TOKENS).sum().backward()
    assert all(p.grad is not None for p in trainable_parameters(model).values())


@pytest.mark.parametrize("options", [{}, {"targets": ["q_proj", "lm_head"]},
                                     {"modules_to_save": ["embed_tokens", "norm"]}])
@pytest.mark.parametrize("nf4", [False, True])
def test_an_exported_model_is_a_plain_folder_with_equal_logits(tmp_path, options, nf4):
    model = tiny(UNTIED if "targets" in options else TINY)
    model = moved(add_lora(quantize_base(model) if nf4 else model, rank=4, **options), torch.Generator().manual_seed(0))
    before = logits(model)
    export_merged(model, tmp_path)
    assert torch.equal(logits(model), before)
    plain = load_model(tmp_path)
    assert type(plain.layers[0].mlp.up_proj) is nn.Linear
    assert (logits(plain) - before).abs().max() < 2e-5
    if plain.config.tie_word_embeddings:
        assert plain.head_weight is plain.embed_tokens.weight


def test_a_block_that_is_trained_whole_samples_and_is_exported_as_it_was_trained(tmp_path):
    model = adapted(UNTIED, modules_to_save=["layers.0", "layers.1.self_attn"], targets=["up_proj"])
    export_merged(model, tmp_path)
    plain = load_model(tmp_path)
    assert (logits(plain) - logits(model)).abs().max() < 2e-5
    for switched, other in ((nullcontext(), plain), (adapters_off(model), tiny(UNTIED))):
        with switched:
            found = [generate(policy, [[1, 2, 3]], Endless(), max_new_tokens=9, temperature=0.0).tokens
                     for policy in (model, other)]
        assert torch.equal(*found)


@pytest.mark.parametrize("name", ["q_proj", "layers.0.mlp", "layers.1"])
def test_what_is_quantised_cannot_be_trained_whole(name):
    """A copy of a layer with a bias would train the bias alone, and look like a success."""
    with pytest.raises(UserError, match="is quantised to 4 bits and cannot be trained"):
        add_lora(quantize_base(tiny(SHAPES["qwen2"])), targets=["o_proj"], modules_to_save=[name])


# ---- head and embedding ----

@pytest.mark.parametrize(("base", "asked", "dtype"), [
    (torch.float32, "auto", torch.float32), (torch.bfloat16, "auto", torch.bfloat16),
    (torch.bfloat16, "float32", torch.float32), (torch.float32, "float16", torch.float16)])
@pytest.mark.parametrize("qlora", [False, True])
def test_the_command_merges_in_float32_and_rounds_once(tmp_path, capsys, base, asked, dtype, qlora):
    model = tiny(UNTIED).to(base)
    model.generation_config = {"eos_token_id": [256, 3], "temperature": 0.7}
    save_model(model, tmp_path / "base", ByteTokenizer())
    before = {path.name: path.read_bytes() for path in (tmp_path / "base").iterdir()}
    model = tiny(UNTIED).to(base).float()
    moved(add_lora(quantize_base(model) if qlora else model, targets=["q_proj", "lm_head"],
                   modules_to_save=["model.norm"], base_model=str(tmp_path / "base")))
    save_adapter(model, tmp_path / "adapter")  # as PEFT does, without a tokenizer
    main(MergeConfig(str(tmp_path / "adapter"), str(tmp_path / "merged"), asked, qlora))
    merged = load_model(tmp_path / "merged", None)
    for name, parameter in merged.named_parameters():
        module, _, leaf = name.rpartition(".")
        assert torch.equal(parameter, getattr(model.get_submodule(module), leaf).to(dtype)), name
    assert merged.generation_config["eos_token_id"] == [256, 3] and merged.generation_config["temperature"] == 0.7
    assert load_tokenizer(tmp_path / "merged").encode("a") == [97]
    assert str(tmp_path / "merged") in capsys.readouterr().out
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "base").iterdir()}


def test_the_command_overwrites_nothing_and_says_what_it_needs(tmp_path):
    save_model(tiny(), tmp_path / "base", ByteTokenizer())
    save_adapter(adapted(base_model=str(tmp_path / "base")), tmp_path / "run/step_2")
    for out in ("base", "run/step_2", "base/config.json"):
        said = refused(main, MergeConfig(str(tmp_path / "run/step_2"), str(tmp_path / out)))
        assert "is there already: name a new folder" in said
    said = refused(main, MergeConfig(str(tmp_path / "run"), str(tmp_path / "out")))
    assert "holds no adapter_config.json: give step_N of a LoRA run" in said
    assert not (tmp_path / "out").exists()


def test_an_adapter_of_the_head_takes_part_though_the_head_is_never_called():
    model = adapted(UNTIED, targets=["lm_head"])
    assert [*adapters(model)] == ["lm_head"]
    assert (logits(explicit(model)) - logits(model)).abs().max() < 2e-5
    token_logprobs(model, TOKENS).sum().backward()
    found = [p.grad.clone() for p in trainable_parameters(model).values()]
    plain = explicit(model)  # d/dA = scale B^T dW, d/dB = scale dW A^T
    token_logprobs(plain, TOKENS).sum().backward()
    grad, head = plain.lm_head.weight.grad.float(), model.lm_head
    torch.testing.assert_close(found, [head.scale * head.lora_B.T @ grad, head.scale * grad @ head.lora_A.T],
                               rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("options", "said"), [
    ({"targets": ["q_proj", "lm_head"]}, "the head is tied to the embedding"),
    ({"targets": r".*(q_proj|head)"}, "the head is tied to the embedding"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save=['embed_tokens']"),
    ({"targets": ["embed_tokens"]}, "targets match model.embed_tokens, which is no linear layer: train it whole"),
    ({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": False}, "(ensure_weight_tying is off)"),
])
def test_what_would_part_head_and_embedding_is_refused(options, said):
    model = tiny()
    weights = bits(model)
    assert said in refused(add_lora, model, **options)
    assert same_bits(bits(model), weights) and not adapters(model), "a refusal changes nothing"


def test_a_tied_embedding_that_is_trained_stays_the_head(tmp_path):
    model = adapted(modules_to_save=["embed_tokens"], rank=2)
    assert model.head_weight is model.embed_tokens.copy.weight
    save_adapter(model, tmp_path)
    again = load_adapter(tiny(), tmp_path)
    assert torch.equal(logits(again), logits(model)) and again.head_weight is again.embed_tokens.copy.weight
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    tensors["base_model.model.lm_head.weight"] += 1
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    assert "unexpected: lm_head.weight (260, 16)" in refused(load_adapter, tiny(), tmp_path)


def test_new_tokens_are_in_the_adapter_and_do_not_fit_the_smaller_base(tmp_path):
    larger = replace(TINY, vocab_size=264)
    save_adapter(adapted(larger, modules_to_save=["embed_tokens"]), tmp_path)
    assert torch.equal(load_adapter(tiny(larger), tmp_path).embed_tokens.weight,
                       adapted(larger, modules_to_save=["embed_tokens"]).embed_tokens.weight)
    said = refused(load_adapter, tiny(), tmp_path)
    assert "model.embed_tokens.weight (264, 16) instead of (260, 16)" in said


# ---- what is adapted ----

Q, K, V, O = (f"self_attn.{name}" for name in ATTENTION)
GATE, UP, DOWN = "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"


@pytest.mark.parametrize(("options", "expected"), [  # expected: module -> blocks
    ({}, {name: "012" for name in (Q, K, V, O, GATE, UP, DOWN)}),
    ({"targets": ["q_proj", "mlp.up_proj"]}, {Q: "012", UP: "012"}),
    ({"targets": ["layers.1.self_attn.q_proj", "model.layers.0.self_attn.k_proj"]}, {Q: "1", K: "0"}),
    ({"targets": r"model\.layers\.[01]\.self_attn\.(q|v)_proj"}, {Q: "01", V: "01"}),
    ({"targets": ["q_proj"], "layers_to_transform": [1]}, {Q: "1"}),
    ({"targets": ["q_proj"], "layers_to_transform": 0}, {Q: "0"}),
    ({"targets": ["q_proj"], "layers_to_transform": 2, "layers_pattern": "layers"}, {Q: "2"}),
    ({"targets": ["q_proj"], "layers_to_transform": 2, "layers_pattern": ["blocks", "model.layers"]}, {Q: "2"}),
    ({"targets": ["model.layers.0.self_attn.q_proj", "k_proj"], "layers_to_transform": [1]}, {Q: "0", K: "1"}),
    ({"layers_to_transform": [0, 2]}, {name: "02" for name in (Q, K, V, O, GATE, UP, DOWN)}),
    ({"exclude": ["layers.0.self_attn.q_proj", "mlp.down_proj"]}, {Q: "12", **{n: "012" for n in (K, V, O, GATE, UP)}}),
    ({"targets": ["q_proj"], "exclude": r".*\.0\..*"}, {Q: "12"}),
    ({"targets": ["q_proj", "v_proj"], "modules_to_save": ["layers.0.self_attn.q_proj"]}, {Q: "12", V: "012"}),
])
def test_targets_are_chosen_as_peft_does(options, expected):
    model = add_lora(tiny(replace(UNTIED, num_hidden_layers=3)), rank=2, **options)
    found = {name for name, adapter in adapters(model).items() if isinstance(adapter, LoRALinear)}
    assert found == {f"layers.{n}.{name}" for name, blocks in expected.items() for n in blocks}


def test_patterns_give_a_layer_its_own_rank_and_alpha_and_the_first_match_counts():
    model = add_lora(tiny(UNTIED), 4, 8, ["q_proj", "v_proj", "o_proj"],
                     rank_pattern={"layers.0.self_attn.q_proj": 2, "^model.layers.1.self_attn.q_proj": 3,
                                   "(q|v)_proj": 5},
                     alpha_pattern={"v_proj": 15, "v_.*": 1})
    found = {name: (len(each.lora_A), each.scale) for name, each in adapters(model).items()}
    assert found == {"layers.0.self_attn.q_proj": (2, 4.0), "layers.1.self_attn.q_proj": (3, 8 / 3),
                     "layers.0.self_attn.v_proj": (5, 3.0), "layers.1.self_attn.v_proj": (5, 3.0),
                     "layers.0.self_attn.o_proj": (4, 2.0), "layers.1.self_attn.o_proj": (4, 2.0)}


def test_modules_to_save_match_the_end_of_a_name_without_regard_to_dots():
    model = add_lora(tiny(UNTIED), targets=["q_proj"], modules_to_save=["norm"])
    assert {name for name, each in adapters(model).items() if isinstance(each, TrainedCopy)} == {
        "norm", *(f"layers.{n}.{norm}" for n in (0, 1) for norm in ("input_layernorm", "post_attention_layernorm"))}
    assert "input_layernorm" not in " ".join(adapters(add_lora(tiny(), modules_to_save=["model.norm"])))


@pytest.mark.parametrize(("options", "said"), [
    ({"rank": 0}, "rank 0"), ({"rank": 2.0}, "rank 2.0"), ({"alpha": 0}, "alpha 0"), ({"alpha": math.nan}, "alpha nan"),
    ({"dropout": 1.0}, "dropout 1.0"), ({"rank_pattern": {"q_proj": 0}}, "rank 0"),
    ({"targets": ["q_porj", "v_proj"]}, "targets: nothing matches q_porj; there are"),
    ({"targets": ["q_porj"]}, "no linear layer to adapt; there are down_proj, gate_proj"),
    ({"targets": []}, "no linear layer to adapt"),
    ({"targets": ["proj"]}, "no linear layer to adapt"),  # the end of a name begins at a dot
    ({"targets": ".*q_pro"}, "no linear layer to adapt"),  # a regular expression has to match it all
    ({"targets": r".*\.mlp"}, "targets match model.layers.0.mlp, which is no linear layer"),
    ({"targets": "(q_proj"}, "'(q_proj' is no regular expression"),
    ({"targets": ["q_proj"], "exclude": ["self_attn.q_proj"]}, "no linear layer to adapt"),
    ({"modules_to_save": ["value_head"]}, "modules_to_save: nothing matches value_head"),
    ({"rank_pattern": {"proj": 2}}, "rank_pattern: nothing matches proj"),
    ({"alpha_pattern": {"layers.7.*": 2}}, "alpha_pattern: nothing matches layers.7.*"),
    ({"targets": ".*q_proj", "layers_to_transform": [0]}, "layers_to_transform needs a list of targets"),
    ({"targets": [1]}, "targets (1,): not a list of str"),
])
def test_options_that_make_no_sense_are_refused_with_their_value(options, said):
    model = tiny()
    assert said in refused(add_lora, model, **options)
    assert not adapters(model) and all(p.requires_grad for p in model.parameters())


def test_adapters_are_not_stacked_and_not_saved_as_a_plain_model(tmp_path):
    model = add_lora(tiny())
    assert "has adapters already" in refused(add_lora, model)
    refused(save_model, model, tmp_path)
    refused(save_model, quantize_base(tiny()), tmp_path)
    assert not [*tmp_path.iterdir()]


# ---- on disk ----

@pytest.mark.parametrize("name", ["qv_r8", "all_linear_kw"])
def test_adapters_of_the_reference_give_its_logits(shared, name):
    expected = load_file(shared / "golden/lora" / name / "expected.safetensors")
    model = load_model(shared / "models/llama")
    load_adapter(model, shared / "golden/lora" / name)
    tokens = expected["input_ids"]
    assert (logits(model, tokens) - expected["logits"]).abs().max() < 1e-5
    with adapters_off(model):
        assert (logits(model, tokens) - expected["base_logits"]).abs().max() < 1e-5
    assert (logits(merge_lora(model), tokens) - expected["merged_logits"]).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_saved_adapter_loads_bit_equal(tmp_path, dtype):
    model = moved(add_lora(tiny(UNTIED).to(dtype), **EVERYTHING)).eval()
    save_adapter(model, tmp_path)
    again = load_adapter(tiny(UNTIED).to(dtype).eval(), tmp_path)
    assert torch.equal(logits(again), logits(model))
    assert replace(again.lora_config, ensure_weight_tying=True) == model.lora_config  # here nothing is tied
    assert again.lora_config.base_model == "some/base"
    assert trainable_parameters(again).keys() == trainable_parameters(model).keys()
    save_adapter(merge_lora(again), tmp_path / "again")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


@pytest.mark.parametrize("shape", SHAPES)
def test_adapters_of_every_architecture_go_to_disk_and_back(tmp_path, shape):
    model = adapted(SHAPES[shape], modules_to_save=["norm"])
    save_adapter(model, tmp_path)
    assert torch.equal(logits(load_adapter(tiny(SHAPES[shape]), tmp_path)), logits(model))


def test_the_file_holds_the_adapter_and_the_named_modules_and_nothing_else(tmp_path):
    save_adapter(add_lora(tiny(UNTIED), targets=["q_proj"], modules_to_save=["model.norm"]), tmp_path)
    names = {f"base_model.model.model.layers.{n}.self_attn.q_proj.lora_{m}.weight" for n in (0, 1) for m in "AB"}
    assert load_file(tmp_path / "adapter_model.safetensors").keys() == names | {"base_model.model.model.norm.weight"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


def test_an_adapter_is_a_small_part_of_its_model(shared, tmp_path):
    folder = shared / "models/stories260k"
    model = add_lora(load_model(folder), rank=4, targets=["q_proj", "v_proj"])
    save_adapter(model, tmp_path)
    size = (tmp_path / "adapter_model.safetensors").stat().st_size
    assert size < 0.05 * (folder / "model.safetensors").stat().st_size
    assert sum(p.numel() for p in trainable_parameters(model).values()) == 5 * 4 * (64 + 64 + 64 + 32)


def test_another_alpha_in_the_config_changes_the_output(tmp_path):
    model = adapted()
    save_adapter(model, tmp_path)
    edit_json(tmp_path / "adapter_config.json", lora_alpha=80)
    assert (logits(load_adapter(tiny(), tmp_path)) - logits(model)).abs().max() > 0.1


@pytest.mark.parametrize(("changes", "said"), [
    ({"use_dora": True}, "use_dora True"),
    ({"peft_type": "IA3"}, "peft_type 'IA3'"),
    ({"bias": "all"}, "bias 'all'"),
    ({"bias": "lora_only"}, "bias 'lora_only'"),
    ({"lora_bias": True}, "lora_bias True"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4'"),
    ({"init_lora_weights": "eva", "eva_config": {"rho": 2}}, "eva_config {'rho': 2}, init_lora_weights 'eva'"),
    ({"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}}, "loftq_config {'loftq_bits': 4}"),
    ({"alora_invocation_tokens": [5, 6]}, "alora_invocation_tokens [5, 6]"),
    ({"trainable_token_indices": [3]}, "trainable_token_indices [3]"),
    ({"target_parameters": ["x"]}, "target_parameters ['x']"),
    ({"layer_replication": [[0, 2]]}, "layer_replication [[0, 2]]"),
    ({"use_qalora": True}, "use_qalora True"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out True"),
    ({"a_feature_of_tomorrow": {"on": 1}}, "a_feature_of_tomorrow {'on': 1}"),
    ({"r": None, "target_modules": None}, "gives no r, target_modules"),
    ({"r": "8"}, "rank '8'"),
    ({"rank_pattern": [4]}, "rank_pattern [4]: not a table"),
    ({"target_modules": "(q"}, "'(q' is no regular expression"),
    ({"target_modules": 1.5}, "targets (1.5,): not a list of str"),
    ({"layers_to_transform": 1.5}, "layers_to_transform (1.5,): not a list of int"),
    ({"modules_to_save": True}, "modules_to_save (True,): not a list of str"),
    ({"use_rslora": "false"}, "rslora 'false': not true or false"),
    ({"base_model_name_or_path": ["a"]}, "base_model ['a']: not the name of a folder"),
])
def test_an_adapter_that_would_be_computed_wrongly_is_refused_by_name(tmp_path, changes, said):
    save_adapter(adapted(), tmp_path)
    edit_json(tmp_path / "adapter_config.json", **changes)
    model = tiny()
    assert said in (text := refused(load_adapter, model, tmp_path)) and "adapter_config.json" in text
    assert not adapters(model)


def test_options_that_change_nothing_are_accepted(tmp_path):
    model = adapted()
    save_adapter(model, tmp_path)
    edit_json(tmp_path / "adapter_config.json", init_lora_weights="gaussian", task_type="SEQ_CLS", peft_version="9",
              megatron_core="megatron.core", qalora_group_size=16, use_dora=False, eva_config=None, loftq_config={},
              inference_mode=False, revision="main", auto_mapping={"base_model_class": "X"})
    assert torch.equal(logits(load_adapter(tiny(), tmp_path)), logits(model))


def test_an_adapter_of_another_model_is_refused_with_the_names_that_do_not_fit(tmp_path):
    save_adapter(adapted(base_model="models/small"), tmp_path)
    model = tiny(replace(TINY, num_hidden_layers=1, intermediate_size=32))
    said = refused(load_adapter, model, tmp_path)
    assert said.startswith(f"the adapter in {tmp_path}, made for models/small, does not fit this model: unexpected: ")
    assert "model.layers.1.mlp.down_proj.lora_A.weight (4, 24)" in said
    assert "model.layers.0.mlp.down_proj.lora_A.weight (4, 24) instead of (4, 32)" in said
    assert not adapters(model) and all(p.requires_grad for p in model.parameters())
    said = refused(load_adapter, tiny(replace(TINY, num_hidden_layers=3)), tmp_path)
    assert "missing: model.layers.2.mlp.down_proj.lora_A.weight (4, 24)" in said


def test_files_that_are_absent_broken_or_pickled_are_named(tmp_path):
    assert "adapter_config.json does not exist" in refused(load_adapter, tiny(), tmp_path)
    save_adapter(adapted(), tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-5])
    assert "adapter_model.safetensors is truncated" in refused(load_adapter, tiny(), tmp_path)
    save_file({name: tensor.to(torch.int8) for name, tensor in load(content).items()}, file)
    said = refused(load_adapter, tiny(), tmp_path)
    assert "weights that are no floats" in said and "layers.0.mlp.down_proj.lora_A.weight (I8)" in said
    first = min(load(content))
    save_file(load(content) | {first: load(content)[first] * math.nan}, file)
    assert f"adapter_model.safetensors is of a model that broke: {first} holds NaN" in refused(load_adapter, tiny(),
                                                                                            tmp_path)
    twice = {name.removeprefix("base_model.model."): tensor.clone() for name, tensor in load(content).items()}
    save_file(load(content) | twice, file)
    assert ".weight twice, once as base_model.model." in refused(load_adapter, tiny(), tmp_path)
    file.unlink()
    assert "adapter_model.safetensors does not exist" in refused(load_adapter, tiny(), tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(pickle.dumps({}))
    assert "adapter_model.bin is pickled" in refused(load_adapter, tiny(), tmp_path)


def test_a_full_disk_costs_the_new_adapter_and_not_the_old_one(tmp_path, monkeypatch):
    save_adapter(adapted(seed=1), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError):
        save_adapter(adapted(seed=2), tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


def test_wrappers_leave_no_trace_in_the_names(tmp_path):
    class Wrapper(nn.Module):  # DistributedDataParallel
        def __init__(self, module):
            super().__init__()
            self.module = module

    model = adapted(UNTIED, modules_to_save=["model.norm"])
    save_adapter(model, tmp_path / "plain")
    compiled = copy.deepcopy(model)
    compiled.layers[0] = torch.compile(compiled.layers[0])
    for n, wrapped in enumerate((Wrapper(model), Wrapper(torch.compile(model)), compiled)):
        save_adapter(wrapped, tmp_path / str(n))
        files = [folder / "adapter_model.safetensors" for folder in (tmp_path / "plain", tmp_path / str(n))]
        assert files[0].read_bytes() == files[1].read_bytes()
        with adapters_off(wrapped):
            assert not any(module.enabled for module in wrapped.modules() if hasattr(module, "enabled"))


# ---- PEFT itself ----

PEFT_CASES = {
    "plain": ("llama", {}),
    "q and v": ("llama", {"targets": ["q_proj", "v_proj"]}),
    "regex": ("llama", {"targets": r".*\.[02]\..*(q|down)_proj", "exclude": ["layers.0.self_attn.q_proj"]}),
    "layers": ("llama", {"targets": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"}),
    "layers by their whole name": ("llama", {"targets": ["q_proj"], "layers_to_transform": [1],
                                             "layers_pattern": "model.layers"}),
    "patterns": ("qwen3", {"rslora": True, "rank_pattern": {"layers.0.self_attn.q_proj": 2, "down_proj": 3},
                           "alpha_pattern": {"^model.layers.1.*": 5}}),
    "biases": ("qwen2", {"targets": ATTENTION}),
    "head": ("llama", {"targets": ["q_proj", "lm_head"]}),
    "copies": ("llama", {"modules_to_save": ["norm", "lm_head", "embed_tokens"]}),
    "tied": ("llama_tied", {"modules_to_save": ["embed_tokens"]}),
    "norms of other names": ("gemma3_text", {"modules_to_save": ["norm"]}),
}


@pytest.mark.parametrize("case", PEFT_CASES)
def test_peft_opens_a_saved_adapter_with_equal_logits(shared, tmp_path, case):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    name, options = PEFT_CASES[case]
    model = moved(add_lora(load_model(shared / "models" / name), rank=4, alpha=8, **options))
    save_adapter(model, tmp_path)
    hf = transformers.AutoModelForCausalLM.from_pretrained(shared / "models" / name)
    other = peft.PeftModel.from_pretrained(hf, tmp_path)
    with torch.no_grad():
        assert (other(TOKENS).logits - logits(model)).abs().max() < 1e-5


@pytest.mark.parametrize("case", PEFT_CASES)
def test_an_adapter_that_peft_saved_has_equal_logits_here(shared, tmp_path, case):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    name, options = PEFT_CASES[case]
    names = {"targets": "target_modules", "exclude": "exclude_modules", "rslora": "use_rslora"}
    options = {names.get(option, option): value for option, value in options.items()}
    hf = transformers.AutoModelForCausalLM.from_pretrained(shared / "models" / name)
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM",
                                "ensure_weight_tying": case == "tied"} | options)
    other = moved(peft.get_peft_model(hf, config))
    other.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = other(TOKENS).logits
    assert (logits(load_adapter(load_model(shared / "models" / name), tmp_path)) - expected).abs().max() < 1e-5


# ---- in a run ----

@pytest.mark.parametrize("nf4", [False, True])
def test_blocks_that_are_computed_again_in_backward_give_the_same_gradients(nf4):
    found = []
    for again in (False, True):
        model = quantize_base(tiny()) if nf4 else tiny()
        generator = torch.Generator().manual_seed(0)
        moved(add_lora(model, rank=2, dropout=0.5, generator=generator), generator)
        model.gradient_checkpointing = again
        torch.manual_seed(1)
        token_logprobs(model, TOKENS).sum().backward()
        found.append([parameter.grad for parameter in trainable_parameters(model).values()])
    assert all(torch.equal(one, two) for one, two in zip(*found)), "the same units must drop out both times"


def ranks_step():
    mesh = init_mesh("cpu")
    model = add_lora(tiny().double(), rank=2, generator=torch.Generator().manual_seed(0))
    moved(model, torch.Generator().manual_seed(1))
    share = mesh.share(len(TOKENS), "rows")
    token_logprobs(model, TOKENS[share.start : share.stop]).sum().backward()
    sum_gradients(model, mesh)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.dist
def test_two_ranks_train_the_adapters_as_one_does():
    alone, *pair = *run_ranks(ranks_step, 1), *run_ranks(ranks_step, 2)
    for found in pair:
        for name, grad in alone.items():
            assert ("lora_" in name) == (grad is not None) == (found[name] is not None), name
            if grad is not None:
                torch.testing.assert_close(found[name], grad, rtol=1e-9, atol=1e-9)


def questions(shared, start):
    """32 rows of 32 tokens, (32, 32)."""
    tokenizer = load_tokenizer(shared / "models/stories260k")
    lines = (shared / "data/gsm8k/train.jsonl").read_text().splitlines()[start : start + 50]
    rows = [tokenizer.encode(json.loads(line)["question"])[:32] for line in lines]
    return torch.tensor([row for row in rows if len(row) == 32][:32])


@pytest.mark.parametrize("nf4", [False, True])
def test_a_few_sentences_lower_the_loss_on_others_of_their_kind(shared, nf4):
    model = load_model(shared / "models/stories260k")
    model = quantize_base(model) if nf4 else model
    held_out = questions(shared, 900)
    base, before = bits(model), logits(model, held_out)
    add_lora(model, rank=8, alpha=16, dropout=0.05, generator=torch.Generator().manual_seed(0))
    optimizer = AdamW(trainable_parameters(model).items(), lr=2e-3)
    torch.manual_seed(0)

    def loss():
        with torch.no_grad():
            return -token_logprobs(model.eval(), held_out).mean()

    first = loss()
    for step in range(10):
        (-token_logprobs(model.train(), questions(shared, 50 * step)).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    last = loss()
    assert last < first - 0.5, (first, last)
    assert same_bits(bits(model), base)
    apart = logits(model, held_out)
    assert (logits(merge_lora(model), held_out) - apart).abs().max() < 5e-5
    with adapters_off(model):
        assert torch.equal(logits(model, held_out), before)


def test_sampling_with_adapters_scores_as_training_does_and_leaves_the_mode(shared):
    policy = random_policy(20)
    add_lora(policy, rank=2, alpha=4, dropout=0.5)
    moved(policy, torch.Generator().manual_seed(0))
    tokenizer = Pieces(*map(chr, range(97, 115)))
    options = {"group_size": 4, "max_new_tokens": 8, "seed": 1}
    rollout = generate(policy, [[1, 2], [3]], tokenizer, **options)
    assert policy.training and all(adapter.training for adapter in adapters(policy).values())
    with torch.no_grad():
        logprobs = token_logprobs(policy.eval(), rollout.tokens)
    ratio = (logprobs - rollout.old_logprobs)[rollout.action_mask].exp()
    assert (ratio - 1).abs().max() < 1e-12
    merged = generate(merge_lora(policy), [[1, 2], [3]], tokenizer, **options)
    assert torch.equal(merged.tokens, rollout.tokens)
    torch.testing.assert_close(merged.old_logprobs, rollout.old_logprobs, rtol=0, atol=1e-12)
    with adapters_off(policy):
        base = generate(policy, [[1, 2], [3]], tokenizer, **options)
    assert torch.equal(base.tokens, generate(random_policy(20), [[1, 2], [3]], tokenizer, **options).tokens)


@pytest.mark.parametrize("nf4", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_is_the_unbroken_one_to_the_bit(tmp_path, nf4, dtype):
    save_model(tiny(), tmp_path / "base")

    def steps(model, optimizer, count):
        for _ in range(count):
            (-token_logprobs(model, TOKENS).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()

    torch.manual_seed(0)
    model = load_model(tmp_path / "base", dtype)
    add_lora(quantize_base(model) if nf4 else model, rank=4, dropout=0.1, modules_to_save=["embed_tokens"],
             base_model=str(tmp_path / "base"))
    optimizer = AdamW(trainable_parameters(model).items(), lr=1e-2)
    steps(model, optimizer, 2)
    save_adapter(model, tmp_path / "step_2")
    saved = {name: tensor.clone() for name, tensor in (optimizer.state_tensors() | rng_tensors()).items()}
    steps(model, optimizer, 2)

    again = load_adapted(tmp_path / "step_2", dtype, quantize=nf4)
    optimizer = AdamW(trainable_parameters(again).items(), lr=1e-2)
    optimizer.load_state_tensors(restore_rng(saved))
    steps(again, optimizer, 2)
    assert same_bits(dict(again.named_parameters()), dict(model.named_parameters()))


def test_a_base_that_is_not_there_is_named(tmp_path):
    save_adapter(adapted(base_model="somewhere/else"), tmp_path)
    assert "names 'somewhere/else' as its base model, which is no folder here" in refused(load_adapted, tmp_path)
    save_adapter(adapted(), tmp_path)
    assert "names '' as its base model" in refused(load_adapted, tmp_path)


def test_the_tokenizer_is_the_adapters_own_with_all_ends_of_a_text_or_else_the_bases(tmp_path):
    model = tiny()
    model.generation_config = {"eos_token_id": [256, 257]}
    save_model(model, tmp_path / "base", ByteTokenizer())
    (tmp_path / "base/tokenizer.json").write_text(json.dumps(json.loads(
        (tmp_path / "base/tokenizer.json").read_text()) | {"version": "changed"}))
    tokenizer = chat_tokenizer(tmp_path)
    larger = tiny(replace(TINY, vocab_size=420))
    larger.generation_config = {"eos_token_id": [300, 302, 304]}
    save_model(larger, tmp_path / "chat", tokenizer)
    assert load_tokenizer(tmp_path / "chat").stop_ids == (300, 302, 304)
    save_adapter(add_lora(larger, base_model="chat"), tmp_path / "adapter", tokenizer)
    assert load_tokenizer(tmp_path / "adapter").stop_ids == (300, 302, 304), "a resumed run would stop elsewhere"
    save_adapter(adapted(base_model=str(tmp_path / "base")), tmp_path / "peft")
    assert tokenizer_folder(tmp_path / "peft") == tmp_path / "base"
    assert tokenizer_folder(tmp_path / "adapter") == tmp_path / "adapter"
    assert tokenizer_folder(tmp_path / "base") == tmp_path / "base"
    assert "model folder nowhere does not exist" in refused(tokenizer_folder, "nowhere")
    step = save_checkpoint(tmp_path / "run", 4, larger, tokenizer, {}, {}, write=save_adapter)
    said = refused(tokenizer_folder, tmp_path / "run")
    assert f"run is the folder of a run: give one of its checkpoints, the newest is {step}" in said


@pytest.mark.parametrize(("text", "targets"), [
    ("q_proj,v_proj", ["q_proj", "v_proj"]), ("q_proj , mlp.up_proj", ["q_proj", "mlp.up_proj"]),
    ("q_proj", ["q_proj"]), ("all-linear", "all-linear"), (r".*\.(q|v)_proj", r".*\.(q|v)_proj"), ("", "")])
def test_targets_of_a_command_line_are_names_or_a_regular_expression(text, targets):
    assert read_targets(text) == targets


def test_options_are_left_as_they_were():
    options = {"targets": ["q_proj"], "rank_pattern": {"q_proj": 2}, "modules_to_save": ["model.norm"]}
    before = copy.deepcopy(options)
    add_lora(tiny(), **options)
    assert options == before and LoRAConfig(**options) == LoRAConfig(**before)
