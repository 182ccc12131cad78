"""Layers without nn.Module's bookkeeping: the same numbers to the last bit; hooks and adapters are not passed over."""

import pytest
import torch
from test_model import LLAMA, SHAPES, empty_cache, some_tokens, tiny
from torch import nn

from minirl.bare import bare
from minirl.generate import generate
from minirl.lora import add_lora
from minirl.tokenizer import ByteTokenizer


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_bare_layers_compute_the_same_to_the_last_bit(shape, dtype):
    model, tokens = tiny(SHAPES[shape]).to(dtype), some_tokens(2, 6)
    wanted, cache = model(tokens, cache=empty_cache(model, 2, 8)), empty_cache(model, 2, 8)
    with model.sampling():
        assert len(model.bare_layers) == 2 and not any(isinstance(layer, nn.Module) for layer in model.bare_layers)
        steps = [model(tokens[:, :4], torch.arange(4)[None], cache=cache)]
        steps += [model(tokens[:, t, None], torch.tensor([[t]]), cache=cache) for t in (4, 5)]
        whole = model(tokens, cache=empty_cache(model, 2, 8))
    assert torch.equal(whole, wanted)
    if dtype == torch.float64:
        torch.testing.assert_close(torch.cat(steps, 1), wanted, rtol=0, atol=1e-12)


def test_bare_layers_hold_the_weights_themselves():
    """A copy would go on with the weights from before an update that is made in place."""
    model, tokens = tiny(), some_tokens(1, 5)
    with model.sampling():
        before = model(tokens, cache=empty_cache(model, 1, 8))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        after = model(tokens, cache=empty_cache(model, 1, 8))
    assert not torch.equal(before, after)
    assert torch.equal(after, model(tokens, cache=empty_cache(model, 1, 8)))


@pytest.mark.parametrize("place", ["layers.1", "layers.0.self_attn", "layers.1.mlp", "layers.0.mlp.up_proj",
                                   "layers.1.self_attn.q_proj", "layers.0.input_layernorm", "layers.1.q_norm"])
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_is_run_wherever_it_hangs(place, kind):
    """Shards exchange in hooks: one that is passed over leaves each rank with a part of a sum."""
    model, calls = tiny(), []
    getattr(model.get_submodule(place.replace("1.q_norm", "1.self_attn.q_norm")), kind)(lambda *_: calls.append(1))
    with model.sampling():
        model(some_tokens(1, 5), cache=empty_cache(model, 1, 8))
    assert calls == [1]


def test_an_adapter_is_heard():
    model, tokens = tiny(), some_tokens(1, 5)
    plain = model(tokens)
    add_lora(model, rank=2, alpha=4.0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.constant_(parameter, 0.1)
    wanted = model(tokens, cache=empty_cache(model, 1, 8))
    with model.sampling():
        found = model(tokens, cache=empty_cache(model, 1, 8))
    assert torch.equal(found, wanted) and not torch.allclose(found, plain)


def test_a_class_of_somebody_else_is_called_as_it_is():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    layer, x = Doubled(3, 2), torch.randn(4, 3)
    assert torch.equal(bare(layer, ())(x), layer(x))
    assert torch.equal(bare(nn.Sequential(layer, nn.Identity()), ())(x), layer(x))


def test_only_passes_with_a_cache_are_bare_and_only_while_it_lasts():
    model, seen = tiny(), []
    model.bare_layers = [lambda x, *_: seen.append(1) or x] * 2
    model(some_tokens(1, 5))
    assert not seen
    model.bare_layers = None
    with pytest.raises(ZeroDivisionError), model.sampling():
        raise ZeroDivisionError
    assert model.bare_layers is None


def test_the_sampler_uses_them_and_leaves_none_behind():
    model, seen = tiny(LLAMA), []
    run = model.run

    def watched(x, frames, cache, layers):
        seen.append(model.bare_layers is not None)
        return run(x, frames, cache, layers)

    model.run = watched
    generate(model, [[1, 2, 3]], ByteTokenizer(), max_new_tokens=2)
    assert seen and all(seen) and model.bare_layers is None
