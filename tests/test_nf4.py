import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from test_checkpoint import TINY, logits, tiny
from torch import nn

from minirl import adapters
from minirl.checkpoint import load_model, save_model
from minirl.config import UserError
from minirl.logprobs import token_logprobs
from minirl.lora import LoRALinear, add_lora
from minirl.nf4 import BLOCK, NF4Linear, dequantize, nf4_levels, quantize, quantize_base

# arXiv:2305.14314, appendix E
PUBLISHED = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
             -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
             0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]


def round_trip(weight):
    return dequantize(quantize(weight), nf4_levels(), weight.shape)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---- the levels ----

def test_the_derived_levels_are_the_published_ones():
    levels = nf4_levels()
    assert (levels - torch.tensor(PUBLISHED)).abs().max() < 3e-7
    assert levels[0] == -1 and levels[7] == 0 and levels[15] == 1, "exact, or zeros and largest weights would move"


def test_the_levels_are_a_step_of_equal_probability_apart_on_each_side_of_zero():
    probabilities = torch.special.ndtr(nf4_levels().double() * torch.special.ndtri(torch.tensor(1 - 31 / 960)))
    steps = probabilities.diff()
    torch.testing.assert_close(steps[:7], torch.full((7,), (0.5 - 31 / 960) / 7).double(), rtol=0, atol=1e-6)
    torch.testing.assert_close(steps[7:], torch.full((8,), (0.5 - 31 / 960) / 8).double(), rtol=0, atol=1e-6)


# ---- what is kept ----

def test_a_block_of_levels_comes_back_to_the_bit():
    weight = (nf4_levels() * 3).repeat(4).view(8, 8)  # one block: its scale is the mean, with no rest to be rounded
    assert torch.equal(round_trip(weight), weight)
    assert quantize(weight).packed[:8].tolist() == [0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF]


def test_each_weight_goes_to_the_nearest_level():
    quantized, weight = quantize(normal(64, 64)), normal(64, 64)
    scale = quantized.scales[0] + quantized.codes * quantized.scales[1]  # (64,) blocks, a row each
    nearest = (weight[..., None] - nf4_levels() * scale[:, None, None]).abs().argmin(-1)
    torch.testing.assert_close(round_trip(weight), nf4_levels()[nearest] * scale[:, None], rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(1, 1), (1, 63), (5, 13), (7, 9), (64, 65), (3, 64), (260, 64), (1, 64 * 256 + 1)])
def test_sizes_that_do_not_fill_a_block_lose_no_more_than_others(shape):
    weight = normal(*shape)
    found = round_trip(weight)
    assert found.shape == weight.shape
    scales = F.pad(weight.flatten(), (0, -weight.numel() % BLOCK)).view(-1, BLOCK).abs().amax(1)
    gap = nf4_levels().diff().max() / 2  # half of the widest step, of the block's scale, and what the scale is off
    allowed = gap * scales + (scales - scales.mean()).abs().max() / 254 * 1.01
    worst = F.pad((found - weight).flatten(), (0, -weight.numel() % BLOCK)).view(-1, BLOCK).abs().amax(1)
    assert (worst <= allowed).all()


def test_zeros_stay_zero_and_a_block_near_zero_keeps_its_signs():
    for seed in range(8):
        weight = normal(8, 64, seed=seed)
        weight[3] = 0
        weight[1] *= 10
        weight[5] *= 1e-6  # its scale, far below the mean and not the farthest from it, may be rounded to below 0
        weight[0, :5] = 0
        found = round_trip(weight)
        assert (found[3] == 0).all() and (found[0, :5] == 0).all()
        assert (found[5] * weight[5] >= 0).all()
    assert (round_trip(torch.zeros(8, 64)) == 0).all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_is_refused(value):
    weight = normal(4, 16)
    weight[1, 1] = value
    with pytest.raises(UserError, match="infinite or NaN"):
        quantize(weight)


def test_it_takes_4_127_bits_a_weight():
    layer = NF4Linear(nn.Linear(1024, 2048, bias=False))
    held = sum(tensor.untyped_storage().nbytes() for tensor in [*layer.buffers(), *layer.parameters()])
    once = 4 * (1 + 16)  # bytes: the mean, the levels
    assert 8 * (held - once) / (1024 * 2048) == 4 + 8 / 64 + 32 / (64 * 256)
    assert round(8 * held / (1024 * 2048), 3) == 4.127


def expected_error():
    """Root mean square error of NF4 on normal weights, relative to their size, by numerical integration.

    A block's scale m is the largest of 64 magnitudes, with density 64 (2 Phi(m) - 1)^63 2 phi(m). The 63 other weights
    are normal within (-m, m), and each errs by its distance to the nearest m * level; the largest itself does not.
    """
    m = torch.linspace(0.8, 6, 600, dtype=torch.float64)
    inside = 2 * torch.special.ndtr(m) - 1
    density = 64 * inside**63 * 2 * (-m**2 / 2).exp() / math.sqrt(2 * math.pi)
    unit = torch.linspace(-1, 1, 20001, dtype=torch.float64)
    square = (unit[:, None] - nf4_levels().double()).square().amin(1)  # (20001,)
    bell = (-(m[:, None] * unit) ** 2 / 2).exp() / math.sqrt(2 * math.pi) * m[:, None] / inside[:, None]
    given_m = m**2 * torch.trapezoid(bell * square, unit)
    assert abs(torch.trapezoid(density, m) - 1) < 1e-6
    return math.sqrt(63 / 64 * torch.trapezoid(density * given_m, m))


def test_the_error_on_normal_weights_is_the_one_that_follows_from_the_levels():
    weight = normal(2048, 1024) * 0.02
    found = (round_trip(weight) - weight).square().mean().sqrt() / weight.square().mean().sqrt()
    # Rounded scales add a little: 0.14 % of the largest weight against 9.2 % of a typical one, in quadrature.
    assert abs(found / expected_error() - 1) < 2e-3, (found, expected_error())


def test_eight_even_bits_serve_the_scales_better_than_fp8():
    weight = normal(2048, 1024)
    scales = weight.view(-1, BLOCK).abs().amax(1)
    quantized = quantize(weight)
    found = quantized.scales[0] + (quantized.codes.view(-1, 256) * quantized.scales[1:, None]).flatten()
    rest = (scales - scales.mean()).view(-1, 256)
    step = rest.abs().amax(1, keepdim=True) / 448  # the largest number of FP8 e4m3
    fp8 = ((rest / step).to(torch.float8_e4m3fn).float() * step).flatten() + scales.mean()
    assert (found - scales).std() < 0.4 * (fp8 - scales).std()


# ---- the layer ----

@pytest.mark.parametrize("bias", [False, True])
def test_the_layer_multiplies_by_the_dequantised_weight_forward_and_backward(bias):
    layer = NF4Linear(nn.Linear(13, 7, bias=bias).double())
    x = normal(2, 3, 13).double().requires_grad_()
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(layer, x)
    if bias:
        layer(x).sum().backward()
        assert torch.equal(layer.bias.grad, torch.full((7,), 6.0).double())


def saved_for_backward(layer, x):
    """Bytes that forward keeps for backward, parameters apart."""
    held = {}

    def pack(tensor):
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x).sum()
    for parameter in layer.parameters():
        held.pop(parameter.data_ptr(), None)
    held.pop(x.data_ptr(), None)
    return sum(held.values())


def test_the_whole_weight_is_not_kept_for_backward():
    x = torch.randn(2, 128, requires_grad=True)
    layer = NF4Linear(nn.Linear(128, 256, bias=False))
    assert saved_for_backward(layer, x) == 0
    model = quantize_base(nn.Sequential(nn.Linear(128, 256, bias=False)))
    assert saved_for_backward(LoRALinear(model[0], 4, 8), x) == 2 * 4 * 4  # x A^T


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_change_of_dtype_changes_what_is_computed_in_and_not_what_is_stored(dtype):
    layer = NF4Linear(nn.Linear(64, 64))
    weight, scales = layer.weight, layer.scales.clone()
    layer.to(dtype)
    assert torch.equal(layer.weight, weight.to(dtype)) and torch.equal(layer.scales, scales)
    assert layer(torch.ones(2, 64, dtype=dtype)).dtype == dtype


def test_the_base_is_quantised_but_not_head_embedding_and_norms():
    model = tiny(replace(TINY, tie_word_embeddings=False, qkv_bias=True))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    quantize_base(model)
    found = [name for name, module in model.named_modules() if isinstance(module, NF4Linear)]
    assert len(found) == 14 and "lm_head" not in found
    after = dict(model.named_parameters())
    assert after.keys() == {name for name in before if name.removesuffix(".weight") not in found}
    assert all(torch.equal(after[name], before[name]) for name in after)
    again = quantize_base(tiny(replace(TINY, tie_word_embeddings=False, qkv_bias=True)))
    assert all(torch.equal(one, two) for one, two in zip(model.buffers(), again.buffers()))


def test_a_base_goes_to_its_device_layer_by_layer_and_never_whole(tmp_path, monkeypatch):
    save_model(tiny(), tmp_path)
    calls = []
    monkeypatch.setattr(adapters, "load_model", lambda *args: calls.append(args) or load_model(*args))
    monkeypatch.setattr(adapters, "quantize_base", lambda *args: calls.append(args[1:]) or quantize_base(*args))
    model = adapters.open_policy(tmp_path, torch.float32, "cpu:0", quantize=True)
    assert calls == [(tmp_path, torch.float32), ("cpu:0",)], "opened on the CPU, and quantised over there"
    assert torch.equal(logits(model), logits(quantize_base(tiny())))


def test_the_order_is_quantise_then_adapt():
    with pytest.raises(UserError, match="call quantize_base before add_lora"):
        quantize_base(add_lora(tiny()))


def test_before_training_an_adapted_model_is_the_quantised_base_to_the_bit():
    model = quantize_base(tiny())
    before = logits(model)
    assert torch.equal(logits(add_lora(model, rank=4)), before)


def test_a_pretrained_model_still_tells_its_story(shared):
    folder = shared / "models/stories260k"
    story = load_file(folder / "expected.safetensors")["greedy_from_bos"][None]  # what the whole model says, greedily
    with torch.no_grad():
        whole, small = (token_logprobs(model, story).mean()
                        for model in (load_model(folder), quantize_base(load_model(folder))))
    assert whole - small < 0.1, (whole, small)
