"""Every supported architecture in many small random variants, beside the `transformers` library: a model that it saved
opens here with equal logits, samples the same tokens, and goes back unchanged."""

import json

import pytest
import torch
from safetensors.torch import load_file

from minirl.architectures import ARCHITECTURES, from_hf
from minirl.checkpoint import load_model, save_model
from minirl.generate import generate
from minirl.model import KVCache
from minirl.tokenizer import ByteTokenizer
from tests.test_model import assert_near

transformers = pytest.importorskip("transformers")

V, CONTEXT, LENGTH = 300, 64, 90  # rows go beyond the context that the config states
SHAPE = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "initializer_range": 0.3, "bos_token_id": 1,
         "eos_token_id": 2, "pad_token_id": 0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 2.0], "long_factor": [1.5, 2.0, 4.0, 8.0]}
FULL, SLIDING = "full_attention", "sliding_attention"


def rope(**settings):
    return {"rope_parameters": {"rope_theta": 100.0, **settings}}


CASES = {  # name: (model_type, what its config says)
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama without grouped queries": ("llama", {"num_key_value_heads": 4}),
    "llama with one key head": ("llama", {"num_key_value_heads": 1}),
    "llama with wide heads": ("llama", {"head_dim": 20}),
    "llama with another theta": ("llama", rope(rope_type="default", rope_theta=5e5)),
    "llama with gelu": ("llama", {"hidden_act": "gelu"}),
    "llama linear": ("llama", rope(rope_type="linear", factor=4.0)),
    "llama dynamic": ("llama", rope(rope_type="dynamic", factor=3.0)),
    "llama llama3": ("llama", rope(**LLAMA3)),
    "llama yarn": ("llama", rope(**YARN)),
    "llama yarn of DeepSeek": ("llama", rope(**YARN, mscale=0.7, mscale_all_dim=1.0, beta_fast=8.0, beta_slow=2.0)),
    "llama yarn not truncated": ("llama", rope(**YARN, truncate=False)),
    "llama yarn with a factor of attention": ("llama", rope(**YARN, attention_factor=1.4)),
    "llama longrope": ("llama", rope(**LONGROPE, original_max_position_embeddings=32)),
    "llama with 12 layers": ("llama", {"num_hidden_layers": 12, "hidden_size": 8, "initializer_range": 0.1}),
    "mistral": ("mistral", {"sliding_window": 8}),
    "mistral without a window": ("mistral", {"sliding_window": None, "tie_word_embeddings": True}),
    "mistral with a window as long as the row": ("mistral", {"sliding_window": LENGTH}),
    "ministral": ("ministral", {"sliding_window": 8, "head_dim": 8, "layer_types": [SLIDING, FULL, SLIDING]}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied with windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1,
                                          "tie_word_embeddings": True}),
    "qwen2 with windows by name": ("qwen2", {"use_sliding_window": True, "sliding_window": 5,
                                             "layer_types": [SLIDING, FULL, SLIDING]}),
    "qwen2 yarn": ("qwen2", rope(**YARN)),
    "qwen3": ("qwen3", {"head_dim": 12}),
    "qwen3 with biases and one key head": ("qwen3", {"head_dim": 8, "attention_bias": True, "num_key_value_heads": 1}),
    "qwen3 with windows": ("qwen3", {"head_dim": 8, "use_sliding_window": True, "sliding_window": 8,
                                     "max_window_layers": 2, "tie_word_embeddings": True}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
    "smollm3 with its own layers": ("smollm3", {"no_rope_layers": [0, 1, 0], "attention_bias": True,
                                                "tie_word_embeddings": False}),
    "smollm3 with windows": ("smollm3", {"use_sliding_window": True, "sliding_window": 8,
                                         "no_rope_layer_interval": 2}),
    "smollm3 yarn": ("smollm3", {"num_hidden_layers": 4, **rope(**YARN)}),
    "gemma": ("gemma", {"head_dim": 12}),
    "gemma with one key head": ("gemma", {"head_dim": 16, "num_key_value_heads": 1, "hidden_act": "gelu"}),
    "gemma2": ("gemma2", {"head_dim": 12, "sliding_window": 8, "query_pre_attn_scalar": 20, "initializer_range": 1.0}),
    "gemma2 without caps": ("gemma2", {"head_dim": 8, "sliding_window": 8, "attn_logit_softcapping": None,
                                       "final_logit_softcapping": None, "query_pre_attn_scalar": 8}),
    "gemma3": ("gemma3_text", {"head_dim": 12, "sliding_window": 8, "num_hidden_layers": 7,
                               "query_pre_attn_scalar": 20}),
    "gemma3 with another pattern": ("gemma3_text", {
        "head_dim": 8, "sliding_window": 8, "layer_types": [FULL, SLIDING, SLIDING], "tie_word_embeddings": False,
        "rope_parameters": {FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4},
                            SLIDING: {"rope_type": "default", "rope_theta": 50.0}}}),
    "gemma3 with a cap": ("gemma3_text", {"head_dim": 8, "sliding_window": 8, "layer_types": [SLIDING, FULL, FULL],
                                          "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3 without windows": ("gemma3_text", {"head_dim": 8, "layer_types": [FULL] * 3}),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3 with a window": ("phi3", {"sliding_window": 7, "num_key_value_heads": 4}),
    "phi3 turning in part": ("phi3", {"head_dim": 16, **rope(rope_type="default", partial_rotary_factor=0.5)}),
    "phi3 longrope": ("phi3", {**rope(**LONGROPE, partial_rotary_factor=1.0), "original_max_position_embeddings": 32,
                               "tie_word_embeddings": True}),
    "phi3 longrope with a factor": ("phi3", {**rope(**LONGROPE, partial_rotary_factor=1.0, factor=3.0),
                                             "original_max_position_embeddings": 32}),
    "phi3 longrope with a factor of attention": ("phi3", {
        **rope(**LONGROPE, partial_rotary_factor=1.0, attention_factor=1.4), "original_max_position_embeddings": 32}),
    "olmo2": ("olmo2", {}),
    "olmo2 with one key head": ("olmo2", {"num_key_value_heads": 1, "attention_bias": True,
                                          "tie_word_embeddings": True}),
    "olmo3": ("olmo3", {"num_hidden_layers": 4, "sliding_window": 8}),
    "olmo3 yarn": ("olmo3", {"layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 8, "rope_parameters": {
        FULL: {"rope_theta": 100.0, **YARN}, SLIDING: {"rope_type": "default", "rope_theta": 100.0}}}),
    "gpt2": ("gpt2", {"n_positions": LENGTH}),
    "gpt2 untied with a narrow MLP": ("gpt2", {"n_positions": LENGTH, "n_inner": 24, "tie_word_embeddings": False,
                                               "activation_function": "relu"}),
}


def made(kind, says):
    """A random model of transformers. Norms and biases too, so that none can be forgotten unseen."""
    shape = dict(SHAPE)
    if kind == "gpt2":
        names = {**ARCHITECTURES["gpt2"].options, "initializer_range": "initializer_range", "vocab_size": "vocab_size"}
        shape = {names.get(name, name): value for name, value in SHAPE.items() if name != "num_key_value_heads"}
        del shape["n_inner"]
    config = transformers.AutoConfig.for_model(kind, **shape | says)
    transformers.set_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() < 2:
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """case -> the folder that transformers wrote, and its logits of TOKENS in a fresh process."""
    cache = {}

    def folder(case):
        if case not in cache:
            path = tmp_path_factory.mktemp("hf")
            model = made(*CASES[case])
            model.save_pretrained(path)
            cache[case] = path, model(TOKENS).logits
        return cache[case]

    return folder


TOKENS = torch.randint(3, V, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def logits(model, tokens=TOKENS, **kwargs):
    with torch.no_grad():
        return model.logits(model(tokens, **kwargs))


def assert_equal_logits(found, wanted, tolerance=1e-5):
    assert (found - wanted).abs().max() <= tolerance * max(1.0, float(wanted.abs().max()))


def weights(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_the_cases_cover_every_architecture():
    assert {kind for kind, _ in CASES.values()} == {*ARCHITECTURES}


@pytest.mark.parametrize("case", CASES)
def test_a_model_opens_with_equal_logits_and_goes_back_unchanged(folders, tmp_path, case):
    folder, wanted = folders(case)
    model = load_model(folder)
    assert model.config.model_type == CASES[case][0]
    assert_equal_logits(logits(model), wanted)

    save_model(model, tmp_path, shard_bytes=20_000)
    assert load_model(tmp_path).config == model.config
    before, after = weights(folder), weights(tmp_path)
    if model.config.tie_word_embeddings:
        before.pop("lm_head.weight", None)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    other, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert type(other).__name__ == json.loads((folder / "config.json").read_text())["architectures"][0]
    with torch.no_grad():
        assert torch.equal(other(TOKENS).logits, wanted), "transformers reads another config than it wrote"
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(other.config, name) == getattr(other.generation_config, name) == SHAPE[name]


@pytest.mark.parametrize("case", CASES)
def test_greedy_samples_from_the_cache_are_the_likeliest_tokens_of_transformers(folders, case):
    model = load_model(folders(case)[0])
    prompts = [TOKENS[0, :5].tolist(), TOKENS[1, :20].tolist(), TOKENS[1, :12].tolist()]
    rollout = generate(model, prompts, Endless(), max_new_tokens=10, temperature=0.0)
    other = made(*CASES[case])
    for row, prompt in zip(rollout.tokens, prompts):
        row = row[None, : len(prompt) + 10]
        assert row[0, : len(prompt)].tolist() == prompt
        choice = other(row).logits[0, len(prompt) - 1 : -1].argmax(-1)
        assert torch.equal(row[0, len(prompt) :], choice), "the cache, its mask or a window is off"


class Endless(ByteTokenizer):
    vocab_size, eos_id, pad_id = V, -1, 0


@pytest.mark.parametrize("case", CASES)
def test_cached_and_uncached_agree_in_float64(folders, case):
    model = load_model(folders(case)[0], torch.float64)
    length = min(40, model.config.context)
    tokens = TOKENS[:, :length]
    wanted = model(tokens)
    cache = KVCache(model, 2, length)
    parts = [model(tokens[:, at], torch.arange(length)[at].expand(2, -1), cache=cache)
             for at in (slice(0, 11), slice(11, 25), *(slice(i, i + 1) for i in range(25, length)))]
    assert_near(torch.cat(parts, 1), wanted, tolerance=1e-10)
    positions = torch.tensor([[3], [20]])  # rows of different lengths
    new = model(TOKENS.gather(1, positions), positions, cache=cache)
    assert_near(new[:, 0], torch.stack((wanted[0, 3], wanted[1, 20])), tolerance=1e-10)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_what_a_config_leaves_out_means_the_same_as_in_transformers(kind):
    sizes = {"vocab_size": 99, "hidden_size": 96, "num_hidden_layers": 9, "num_attention_heads": 6,
             "num_key_value_heads": 3, "intermediate_size": 31}
    if kind in ("llama", "ministral"):
        sizes["head_dim"] = 16
    names = ARCHITECTURES[kind].options
    sizes = {names.get(name, name): value for name, value in sizes.items()
             if kind != "gpt2" or name != "num_key_value_heads"}
    complete = transformers.AutoConfig.for_model(kind, **sizes).to_dict()
    assert from_hf({"model_type": kind, **sizes}) == from_hf(complete)


@pytest.mark.parametrize("case", CASES)
def test_configs_of_older_versions_mean_the_same(folders, case):
    new = json.loads((folders(case)[0] / "config.json").read_text())
    old = {name: value for name, value in new.items() if name not in ("rope_parameters", "dtype")}
    rope = new.get("rope_parameters", {})
    if FULL in rope:
        old["rope_local_base_freq"] = rope[SLIDING]["rope_theta"]
        rope = rope[FULL]
    old |= {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    scaling = {name: value for name, value in rope.items() if name not in old}
    if scaling.get("rope_type", "default") != "default":
        old["rope_scaling"] = scaling
        if scaling["rope_type"] in ("linear", "dynamic"):
            scaling["type"] = scaling.pop("rope_type")
    assert from_hf(old) == from_hf(new)


@pytest.mark.parametrize("case", ["llama", "qwen3", "gemma3", "gemma2", "olmo2", "phi3", "gpt2", "smollm3"])
def test_bfloat16_is_as_near_to_float32_as_that_of_transformers(tmp_path, case):
    other = made(*CASES[case]).bfloat16()
    other.save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype=None)
    assert model.norm.weight.dtype == torch.bfloat16
    wanted = logits(load_model(tmp_path))
    ours, theirs = (float((x - wanted).abs().mean()) for x in (logits(model), other(TOKENS).logits.float()))
    assert ours < 1.3 * theirs, (ours, theirs)
