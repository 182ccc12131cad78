import json
import math
import os
import pickle
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from minirl import checkpoint
from minirl.checkpoint import (
    check_tokenizer,
    latest_checkpoint,
    load_checkpoint,
    load_model,
    read_model_config,
    restore_rng,
    rng_tensors,
    save_checkpoint,
    save_model,
)
from minirl.config import UserError
from minirl.generate import generate
from minirl.logprobs import shift_mask, token_logprobs
from minirl.model import ModelConfig, Transformer
from minirl.rope import RopeScaling
from minirl.tokenizer import ByteTokenizer, load_tokenizer

TINY = ModelConfig(vocab_size=260, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                   num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, rope_theta=500.0)
SHAPES = {
    "llama": TINY,
    "llama untied": replace(TINY, tie_word_embeddings=False),
    "llama with biases": replace(TINY, qkv_bias=True, output_bias=True, mlp_bias=True),
    "qwen2": replace(TINY, qkv_bias=True),
    "qwen3": replace(TINY, qk_norm=True, head_dim=8, tie_word_embeddings=False),
    "qwen3 with biases": replace(TINY, qk_norm=True, qkv_bias=True, output_bias=True),
    "mistral": replace(TINY, sliding_window=8),
    "ministral": replace(TINY, sliding_window=8, layer_types=("sliding_attention", "full_attention")),
    "smollm3": replace(TINY, no_rope_layers=(1, 0)),
    "gemma": replace(TINY, norm="gemma", scale_embedding=True),
    "gemma2": replace(TINY, norm="gemma", scale_embedding=True, norm_placement="both", attn_logit_softcapping=50.0,
                      final_logit_softcapping=30.0, query_pre_attn_scalar=9.0),
    "gemma3_text": replace(TINY, norm="gemma", scale_embedding=True, norm_placement="both", qk_norm=True,
                           sliding_window=8, layer_types=("full_attention", "sliding_attention"),
                           rope_local_base_freq=50.0, rope_scaling=RopeScaling("linear", 8.0, 64)),
    "olmo2": replace(TINY, norm_placement="post", qk_norm_across_heads=True),
    "phi3": replace(TINY, head_dim=8, partial_rotary_factor=0.5),
    "gpt2": replace(TINY, norm="layer", learned_positions=True, gated_mlp=False, qkv_bias=True, output_bias=True,
                    mlp_bias=True, num_key_value_heads=4, rope_theta=10000.0, hidden_act="gelu_pytorch_tanh"),
}
TOKENS = torch.arange(60).view(2, 30) * 4


class Endless(ByteTokenizer):
    vocab_size, eos_id, pad_id = 256, -1, 0


def tiny(config: ModelConfig = TINY, seed: int = 0) -> Transformer:
    """Every parameter random, biases and norms too, so that none can be forgotten unseen."""
    model, generator = Transformer(config), torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return model


def logits(model, tokens=TOKENS):
    with torch.no_grad():
        return model.logits(model(tokens))


def edit_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def folder(tmp_path):
    """A small untied model, saved."""
    save_model(tiny(replace(TINY, tie_word_embeddings=False)), tmp_path / "model")
    return tmp_path / "model"


def edit_weights(folder, **changes) -> None:
    """Replace tensors of a saved model by name; None removes one."""
    weights = load_file(folder / "model.safetensors") | {k.replace("__", "."): v for k, v in changes.items()}
    save_file({k: v for k, v in weights.items() if v is not None}, folder / "model.safetensors")


def refused(folder) -> str:
    with pytest.raises(UserError) as error:
        load_model(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


# ---- parity with the reference ----

REFERENCES = ["llama", "llama_tied", "llama_rope_llama3", "mistral", "qwen2", "qwen3", "gemma3_text"]


@pytest.mark.parametrize("name", ["stories260k", *REFERENCES])
def test_logits_equal_those_of_the_reference(shared, name):
    expected = load_file(shared / "models" / name / "expected.safetensors")
    model, wanted = load_model(shared / "models" / name), expected["logits"]
    scale = wanted.abs().max()
    found = logits(model, expected["input_ids"])
    assert (found - wanted).abs().max() < 1e-5 * scale, "if only position 0 is right, q and k have another row order"
    if name != "stories260k":
        found, real = logits(model, expected["right_ids"]), expected["right_mask"].bool()
        assert (found - expected["right_logits"])[real].abs().max() < 1e-5 * scale, "padding on the right is seen"
    # For bfloat16 2e-2. Rounding the weights alone is 2.1e-2 of the scale in the worst logit of "llama"; with the
    # activations one in a thousand is outside in the Llamas, as in transformers, and none elsewhere.
    found = logits(load_model(shared / "models" / name, torch.bfloat16), expected["input_ids"])
    outside = (found - wanted).abs() > 2e-2 * scale + 2e-2 * wanted.abs()
    assert outside.float().mean() <= (1e-3 if "llama" in name or name == "mistral" else 0)
    assert (found - wanted).norm() < 2.2e-2 * wanted.norm()


@pytest.mark.parametrize("name", REFERENCES)
def test_greedy_tokens_and_the_loss_equal_those_of_the_reference(shared, name):
    expected = load_file(shared / "models" / name / "expected.safetensors")
    model, wanted = load_model(shared / "models" / name), expected["greedy_ids"]
    prompts = wanted[:, :8].tolist()
    rollout = generate(model, prompts, Endless(), max_new_tokens=20, temperature=0.0)
    assert torch.equal(rollout.tokens, wanted)
    loss = -token_logprobs(model, expected["right_ids"])[shift_mask(expected["right_mask"].bool())].mean()
    assert float(loss) == pytest.approx(float(expected["sft_loss"]), rel=1e-5)


@pytest.mark.parametrize("name", REFERENCES)
def test_a_reference_goes_back_as_it_came(shared, tmp_path, name):
    model = load_model(shared / "models" / name)
    save_model(model, tmp_path)
    before, after = (load_file(folder / "model.safetensors") for folder in (shared / "models" / name, tmp_path))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert load_model(tmp_path).config == model.config
    new, old = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path, shared / "models" / name))
    same = new.keys() & old.keys() - {"max_window_layers"}  # without effect where no layer has a window
    assert {key: new[key] for key in same} == {key: old[key] for key in same}
    assert (old.keys() - new.keys()) <= {"dtype", "transformers_version", "use_cache", "initializer_range",
                                         "attention_dropout", "pretraining_tp", "_sliding_window_pattern",
                                         "attn_logit_softcapping"}, "what computes nothing here"
    said = (shared / "models" / name / "generation_config.json").read_text()
    assert json.loads((tmp_path / "generation_config.json").read_text()) == json.loads(said)


@pytest.mark.parametrize("start", ["bos", "once"])
def test_a_pretrained_model_goes_on_as_the_reference_does(shared, start):
    folder = shared / "models/stories260k"
    expected = load_file(folder / "expected.safetensors")[f"greedy_from_{start}"]
    prompt = {"bos": 1, "once": 5}[start]
    choice = logits(load_model(folder), expected[None])[0].argmax(-1)
    assert torch.equal(choice[prompt - 1:-1], expected[prompt:])


@pytest.mark.parametrize("shape", SHAPES)
def test_transformers_opens_a_saved_model_with_equal_logits(tmp_path, shape):
    transformers = pytest.importorskip("transformers")
    model = tiny(SHAPES[shape])
    save_model(model, tmp_path, ByteTokenizer())
    other, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    with torch.no_grad():
        torch.testing.assert_close(other(TOKENS).logits, logits(model), rtol=1e-4, atol=1e-4)
    assert (other.config.eos_token_id, other.generation_config.eos_token_id) == (256, 256)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("né")["input_ids"] == ByteTokenizer().encode("né")


# ---- a model folder ----

@pytest.mark.parametrize("shape", SHAPES)
def test_a_saved_model_loads_bit_equal(tmp_path, shape):
    model = tiny(SHAPES[shape])
    before = torch.get_rng_state()
    save_model(model, tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.config == model.config
    assert torch.equal(logits(loaded), logits(model))
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    assert torch.equal(torch.get_rng_state(), before), "loading draws no random numbers"


def test_the_dtype_is_kept_or_converted_as_asked(tmp_path):
    model = tiny().to(torch.bfloat16)
    save_model(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert {p.dtype for p in load_model(tmp_path, dtype=None).parameters()} == {torch.bfloat16}
    assert {p.dtype for p in load_model(tmp_path).parameters()} == {torch.float32}
    assert torch.equal(load_model(tmp_path, torch.float64).norm.weight, model.norm.weight.double())


def test_a_loaded_model_does_not_depend_on_its_file(folder):
    model = load_model(folder)
    before = logits(model)
    with open(folder / "model.safetensors", "r+b") as file:
        file.seek(-4000, os.SEEK_END)
        file.write(bytes(4000))
    assert torch.equal(logits(model), before)


def test_a_shape_without_a_hugging_face_name_is_refused(tmp_path):
    for options in ({"output_bias": True}, {"qkv_bias": True, "mlp_bias": True}, {"qk_norm": True, "qkv_bias": True},
                    {"qk_norm": True, "mlp_bias": True}, {"norm": "gemma"}, {"gated_mlp": False},
                    {"norm_placement": "post"}, {"learned_positions": True}, {"scale_embedding": True},
                    {"attn_logit_softcapping": 5.0},
                    {"model_type": "qwen2", "no_rope_layers": (1, 0), "qk_norm": True}):
        name = [*options][-1]
        with pytest.raises(UserError, match=f"no Hugging Face architecture combines .*{name}") as error:
            save_model(tiny(replace(TINY, **options)), tmp_path / "model")
        assert "\n" not in str(error.value)
    assert not (tmp_path / "model").exists()


def test_a_model_with_parameters_that_its_config_does_not_know_is_refused(tmp_path):
    model = tiny()
    model.layers[0].mlp.up_proj.lora_A = nn.Linear(16, 2, bias=False)
    with pytest.raises(UserError, match=r"and beyond it layers\.0\.mlp\.up_proj\.lora_A"):
        save_model(model, tmp_path / "model")
    model = tiny(replace(TINY, model_type="gpt2"))  # the name of an architecture that computes something else
    save_model(model, tmp_path / "model")
    assert json.loads((tmp_path / "model/config.json").read_text())["model_type"] == "llama"


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_is_saved_under_the_name_of_its_architecture(tmp_path, shape):
    save_model(tiny(SHAPES[shape]), tmp_path)
    assert load_model(tmp_path).config.model_type == shape.split()[0]


def test_special_tokens_and_sampling_defaults_come_back(folder, tmp_path):
    edit_json(folder / "config.json", eos_token_id=[7, 256], bos_token_id=3)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 256], "temperature": 0.6}))
    model = load_model(folder)
    save_model(model, tmp_path / "plain")
    assert json.loads((tmp_path / "plain/generation_config.json").read_text()) == {
        "bos_token_id": 3, "eos_token_id": [7, 256], "temperature": 0.6}
    save_model(model, tmp_path / "bytes", ByteTokenizer())
    said = json.loads((tmp_path / "bytes/config.json").read_text())
    assert said["eos_token_id"] == [7, 256], "one of several ends of a text is the tokenizer's: all stay"
    tokenizer = ByteTokenizer()
    tokenizer.add_stops([257, 256, 257])
    save_model(model, tmp_path / "more", tokenizer)
    assert json.loads((tmp_path / "more/generation_config.json").read_text())["eos_token_id"] == [7, 256, 257]
    save_model(tiny(), tmp_path / "new", tokenizer)
    assert json.loads((tmp_path / "new/generation_config.json").read_text())["eos_token_id"] == [256, 257]
    edit_json(folder / "generation_config.json", eos_token_id=[7, 8])
    save_model(load_model(folder), tmp_path / "other", ByteTokenizer())
    assert json.loads((tmp_path / "other/generation_config.json").read_text())["eos_token_id"] == 256


def test_saved_weights_have_the_permissions_of_the_other_files(tmp_path):
    save_model(tiny(), tmp_path, shard_bytes=20_000)
    assert len({*tmp_path.glob("*.safetensors")}) > 1
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1


def test_a_file_of_two_types_opens_in_that_of_its_embedding(folder):
    weights = load_file(folder / "model.safetensors")
    mixed = {name: x if "norm" in name else x.bfloat16() for name, x in weights.items()}
    save_file(mixed, folder / "model.safetensors")
    model = load_model(folder, dtype=None)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert logits(model).isfinite().all()


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path):
    with pytest.raises(UserError, match="258 tokens"):
        save_model(tiny(replace(TINY, vocab_size=100)), tmp_path, ByteTokenizer())


class Wrapped(nn.Module):
    """As DistributedDataParallel does it, without a process group."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def test_wrappers_leave_no_trace_in_the_names(tmp_path):
    model = tiny()
    reference = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.layers[1] = torch.compile(model.layers[1])
    for number, wrapped in enumerate([Wrapped(model), torch.compile(model), Wrapped(torch.compile(model))]):
        save_model(wrapped, tmp_path / str(number))
        names = load_file(tmp_path / f"{number}/model.safetensors").keys()
        assert names == {f"model.{name}" for name in reference}
        loaded = load_model(tmp_path / str(number)).state_dict()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in reference.items())


def test_shared_and_transposed_tensors_are_saved_and_reload_equal(tmp_path):
    model = tiny(replace(TINY, tie_word_embeddings=False))
    model.lm_head.weight = model.embed_tokens.weight  # shared, though the config does not say so
    square = model.layers[0].self_attn.o_proj
    square.weight = nn.Parameter(square.weight.detach().T)
    flat = torch.randn(2, 16)  # two parameters that are slices of one buffer
    model.norm.weight, model.layers[0].input_layernorm.weight = nn.Parameter(flat[0]), nn.Parameter(flat[1])
    save_model(model, tmp_path)
    assert torch.equal(logits(load_model(tmp_path)), logits(model))


def test_a_tied_head_is_tied_again(tmp_path):
    save_model(tiny(), tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    model = load_model(tmp_path)
    assert model.head_weight is model.embed_tokens.weight


def test_a_tied_head_in_the_file_is_accepted_and_a_different_one_warned_of(tmp_path):
    model = tiny()
    save_model(model, tmp_path)
    edit_weights(tmp_path, lm_head__weight=model.embed_tokens.weight.detach().clone())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_model(tmp_path)
    edit_weights(tmp_path, lm_head__weight=torch.zeros(260, 16))
    with pytest.warns(UserWarning, match=r"lm_head\.weight"):
        assert torch.equal(logits(load_model(tmp_path)), logits(model))


def test_an_untied_head_that_is_missing_is_named(folder):
    edit_weights(folder, lm_head__weight=None)
    assert "missing: lm_head.weight (260, 16)" in refused(folder)


def test_every_tensor_that_does_not_fit_is_named_with_its_shape(folder):
    edit_weights(folder, model__norm__weight=torch.ones(7), model__extra=torch.ones(2, 3),
                 model__layers__0__mlp__up_proj__weight=None,
                 model__layers__1__self_attn__rotary_emb__inv_freq=torch.ones(2))
    message = refused(folder)
    assert "missing: model.layers.0.mlp.up_proj.weight (24, 16)" in message
    assert "unexpected: model.extra (2, 3)" in message
    assert "of another shape: model.norm.weight (7,) instead of (16,)" in message
    assert "inv_freq" not in message, "a constant that older files hold"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_no_number_is_refused_by_name(folder, value):
    edit_weights(folder, model__norm__weight=torch.tensor([1.0] * 15 + [value]))
    message = refused(folder)
    assert "model.safetensors is of a model that broke: model.norm.weight holds NaN or infinity" in message
    assert str(folder) in message


def test_a_long_list_of_misfits_is_cut(folder):
    edit_json(folder / "config.json", num_hidden_layers=9, layer_types=None)
    assert "and 53 more" in refused(folder)


def test_rope_settings_are_read_in_both_layouts(folder):
    new = json.loads((folder / "config.json").read_text())
    assert new["rope_theta"] == new["rope_parameters"]["rope_theta"] == 500.0
    old = {name: value for name, value in new.items() if name != "rope_parameters"}
    (folder / "config.json").write_text(json.dumps(old | {"rope_scaling": None}))
    assert read_model_config(folder).rope_theta == 500.0
    del new["rope_theta"]
    (folder / "config.json").write_text(json.dumps(new))
    assert read_model_config(folder).rope_theta == 500.0


@pytest.mark.parametrize(("changes", "said"), [
    ({"model_type": "mamba"}, "'mamba' is not supported: supported are ['llama', 'mistral', "),
    ({"model_type": "qwen3_moe"}, "model type 'qwen3_moe'"),
    ({"model_type": None}, "model type None"),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "weights quantised by 'gptq' are not supported"),
    ({"rope_parameters": {"rope_type": "mrope", "factor": 4.0}}, "rope type 'mrope' is not supported: "),
    ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "rope type 'linear' needs a factor"),
    ({"rope_parameters": {"rope_type": "linear", "factor": "4"}}, "factor is '4': it must be of type float"),
    ({"rope_parameters": [1]}, "rope_parameters is [1]: it must be of type dict"),
    ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope_type is ['yarn']: it must be of type str"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "attention_factor": math.nan}},
     "rope attention_factor nan must be at least 0, and finite"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": -1}},
     "rope original_max_position_embeddings -1 must be at least 0"),
    ({"model_type": "gemma2", "num_hidden_layers": 10**9}, "num_hidden_layers 1000000000 must be at least 1, and at"),
    ({"rope_theta": -1.0, "rope_parameters": None}, "rope_theta -1.0 must be at least 0"),
    ({"model_type": "qwen2", "sliding_window": "8", "use_sliding_window": True}, "sliding_window is '8'"),
    ({"model_type": "ministral", "layer_types": ["chunked_attention"] * 2}, "layer_types must hold 'full_attention'"),
    ({"model_type": "ministral", "layer_types": "full_attention"}, "layer_types is 'full_attention': it must be"),
    ({"model_type": "gemma3_text", "sliding_window_pattern": 0}, "sliding_window_pattern 0 must be above 0"),
    ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention True"),
    ({"model_type": "gemma3_text", "rope_parameters": {
        "full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
     "rope type 'linear' in layers of sliding_attention is not supported"),
    ({"model_type": "smollm3", "no_rope_layers": [1, 2]}, "no_rope_layers must hold 0 or 1 for each of 2 layers"),
    ({"hidden_act": "relu2"}, "hidden_act 'relu2' is not supported: supported are"),
    ({"hidden_size": None}, "hidden_size is missing"),
    ({"intermediate_size": None}, "intermediate_size is missing"),
    ({"model_type": ["llama"]}, "model type ['llama'] is not supported"),
    ({"vocab_size": "many"}, "vocab_size is 'many': it must be of type int"),
    ({"vocab_size": True}, "vocab_size is True"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1: it must be of type bool"),
    ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'"),
    ({"num_attention_heads": 0}, "num_attention_heads 0 must be at least 1"),
    ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
    ({"num_key_value_heads": -2}, "num_key_value_heads -2"),
])
def test_a_config_that_cannot_be_computed_is_refused_by_name(folder, changes, said):
    edit_json(folder / "config.json", **changes)
    message = refused(folder)
    assert said in message and "config.json" in message


def test_a_field_counts_where_its_architecture_reads_it(folder):
    model = load_model(folder)
    edit_json(folder / "config.json", model_type="mistral", sliding_window=64)  # reaches all of 30 tokens
    assert torch.equal(logits(load_model(folder)), logits(model))
    edit_json(folder / "config.json", sliding_window=8)
    assert not torch.allclose(logits(load_model(folder)), logits(model))
    edit_json(folder / "config.json", layer_types=["full_attention"] * 2)  # transformers takes that for a Ministral
    assert load_model(folder).config.model_type == "ministral"
    assert torch.equal(logits(load_model(folder)), logits(model))
    edit_json(folder / "config.json", model_type="llama", attn_logit_softcapping=1.0)  # no fields of llama's
    assert torch.equal(logits(load_model(folder)), logits(model))


@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_a_model_saved_without_its_head_opens_if_the_head_is_tied(tmp_path, shape):
    model = tiny(SHAPES[shape])
    save_model(model, tmp_path)
    path = tmp_path / "model.safetensors"
    bare = {name.split(".", 1)[1]: tensor for name, tensor in load_file(path).items()}
    constants = {"gpt2": {"h.0.attn.bias": torch.ones(1, 1, 4, 4)},
                 "llama": {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}}
    save_file(bare | constants[shape], path)  # so GPT-2 is published, and so AutoModel writes
    assert torch.equal(logits(load_model(tmp_path)), logits(model))
    save_file(bare | constants["gpt2" if shape == "llama" else "llama"], path)
    assert "unexpected: " in refused(tmp_path), "what is a constant of one architecture is unknown in another"
    edit_json(tmp_path / "config.json", tie_word_embeddings=False)
    assert "missing: lm_head.weight (260, 16)" in refused(tmp_path)
    name = next(iter(bare))
    save_file(bare | {f"{'transformer' if shape == 'gpt2' else 'model'}.{name}": bare[name].clone()}, path)
    assert "twice" in refused(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.uint8])
def test_quantised_weights_are_refused_by_name(folder, dtype):
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    edit_weights(folder, **{name.replace(".", "__"): weights[name].to(dtype)})
    message = refused(folder)
    assert "no floats of 16 bits or more" in message and name in message and "model.safetensors" in message


def test_files_that_are_absent_or_broken_are_named(folder):
    assert "nowhere does not exist" in refused(folder / "nowhere")
    path = folder / "model.safetensors"
    for size in (0, 5, 100, path.stat().st_size - 1):
        path.write_bytes(path.read_bytes()[:size])
        assert f"{path} is truncated" in refused(folder)
    path.unlink()
    assert "holds no weights" in refused(folder)
    (folder / "config.json").write_text("{")
    assert "config.json is not valid JSON" in refused(folder)
    (folder / "config.json").unlink()
    assert "config.json does not exist" in refused(folder)


class Trap:
    def __reduce__(self):
        return os.mkdir, ("trapped",)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_opening_a_folder_never_runs_code(folder, name, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Trap()))
    refused(folder)
    assert not (folder / "trapped").exists()


# ---- sharded ----

@pytest.fixture
def sharded(folder):
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    shards = {"one.safetensors": names[:9], "two.safetensors": names[9:]}
    for shard, part in shards.items():
        save_file({name: weights[name] for name in part}, folder / shard)
    index = {name: shard for shard, part in shards.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    shutil.move(folder / "model.safetensors", folder.parent / "whole.safetensors")
    return folder


def test_a_large_model_is_saved_in_shards_and_an_earlier_save_leaves_nothing(tmp_path):
    model = tiny()
    largest = max(parameter.nbytes for parameter in model.parameters())
    for bytes_a_shard in (largest, 10**9, 1, largest):
        save_model(model, tmp_path, shard_bytes=bytes_a_shard)
        files = sorted(tmp_path.glob("*.safetensors"))
        sizes = [sum(tensor.nbytes for tensor in load_file(file).values()) for file in files]
        assert len(files) == 1 or max(sizes) <= largest
        assert len(files) == {largest: len(files), 10**9: 1, 1: len(list(model.parameters()))}[bytes_a_shard]
        assert torch.equal(logits(load_model(tmp_path)), logits(model))
        if len(files) > 1:
            assert [file.name for file in files] == [f"model-{i + 1:05}-of-{len(files):05}.safetensors"
                                                     for i in range(len(files))]
            index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
            assert index["metadata"]["total_size"] == sum(sizes)
            assert {*index["weight_map"].values()} == {file.name for file in files}
        else:
            assert not (tmp_path / "model.safetensors.index.json").exists()


PEAK = """
import sys
import torch
from minirl.checkpoint import load_model
torch.set_num_threads(1)
def megabytes(name):
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith(name))
torch.ones(9).bfloat16().float()
before = megabytes("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
model = load_model(sys.argv[1])
print((megabytes("VmHWM") - before) / (sum(p.nbytes for p in model.parameters()) / 2**20))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux' /proc")
@pytest.mark.parametrize("shard_bytes", [10**9, 10**7])
def test_loading_needs_the_memory_of_one_copy(tmp_path, shard_bytes):
    config = ModelConfig(2000, 512, 2048, 6, 8, tie_word_embeddings=False, model_type="phi3")  # 108 MB, 72 of it fused
    save_model(Transformer(config).init_weights(torch.Generator()), tmp_path, shard_bytes=shard_bytes)
    done = subprocess.run([sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True, text=True,
                          cwd=Path(__file__).parents[1], timeout=120)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.35, "the file, or a second copy, stays in memory"


def test_a_sharded_model_loads(sharded):
    loaded = load_model(sharded)
    shutil.move(sharded.parent / "whole.safetensors", sharded / "model.safetensors")
    assert torch.equal(logits(loaded), logits(load_model(sharded)))


def test_shards_and_index_that_disagree_are_named(sharded):
    path = sharded / "two.safetensors"
    whole = load_file(path)
    name = min(whole)
    save_file({key: value for key, value in whole.items() if key != name}, path)
    message = refused(sharded)
    assert str(path) in message and f"without {name}" in message
    save_file(whole | {"model.more": torch.ones(1)}, path)
    message = refused(sharded)
    assert str(path) in message and "beyond it model.more" in message
    path.write_bytes(path.read_bytes()[:-8])
    assert f"{path} is truncated" in refused(sharded)
    path.unlink()
    assert f"{path} does not exist" in refused(sharded)


@pytest.mark.parametrize("names", [None, [], {"model.norm.weight": 1}])
def test_an_index_without_names_is_refused(sharded, names):
    edit_json(sharded / "model.safetensors.index.json", weight_map=names)
    assert "index.json has no weight_map" in refused(sharded)


@pytest.mark.parametrize("shard", ["../whole.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "model.bin"])
def test_a_shard_outside_the_folder_is_refused(sharded, shard):
    index = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    edit_json(sharded / "model.safetensors.index.json", weight_map=index | {"model.norm.weight": shard})
    assert f"shard {shard!r} is not the name of a safetensors file" in refused(sharded)


# ---- the training state ----

def save(run, step, keep=2, seed=0):
    model, state = tiny(seed=seed), {"step": step, "note": "é"}
    tensors = {"exp_avg.norm.weight": torch.full((3,), float(step)), **rng_tensors()}
    return save_checkpoint(run, step, model, ByteTokenizer(), tensors, state, keep)


def steps(run):
    return sorted(path.name for path in run.iterdir())


def test_a_checkpoint_gives_back_what_it_was_given(tmp_path):
    folder = save(tmp_path, 7)
    assert folder == tmp_path / "step_7" == latest_checkpoint(tmp_path)
    tensors, state = load_checkpoint(folder)
    assert state == {"step": 7, "note": "é"}
    assert tensors["exp_avg.norm.weight"].tolist() == [7.0] * 3
    assert torch.equal(logits(load_model(folder)), logits(tiny()))
    assert load_tokenizer(folder).encode("a") == [97]
    assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"], "vLLM reads all"
    assert not list(tmp_path.rglob("*.tmp"))


def test_random_numbers_go_on_where_they_were(tmp_path):
    torch.manual_seed(5)
    folder = save(tmp_path, 1)
    expected = torch.rand(4)
    torch.manual_seed(6)
    restore_rng(load_checkpoint(folder)[0])
    assert torch.equal(torch.rand(4), expected)


def test_the_newest_are_kept_and_always_the_first(tmp_path):
    for step in (0, 8, 9, 10, 11):
        save(tmp_path, step)
    assert steps(tmp_path) == ["step_0", "step_10", "step_11"]
    assert latest_checkpoint(tmp_path).name == "step_11", "by number: as text, step_9 would be the last"
    save(tmp_path, 12, keep=1)
    assert steps(tmp_path) == ["step_0", "step_12"]
    save(tmp_path, 5, keep=1)
    assert steps(tmp_path) == ["step_0", "step_12", "step_5"], "the saved one, and what lies beyond, stay"
    with pytest.raises(UserError, match="keep 0"):
        save(tmp_path, 13, keep=0)


def test_a_run_without_checkpoints_has_no_latest(tmp_path):
    assert latest_checkpoint(tmp_path / "nowhere") is None
    (tmp_path / "step_x").mkdir()
    assert latest_checkpoint(tmp_path) is None


def test_a_broken_checkpoint_is_passed_over_with_a_warning_and_leftovers_go(tmp_path):
    save(tmp_path, 7)
    for broken in (8, 9):
        shutil.copytree(tmp_path / "step_7", tmp_path / f"step_{broken}")
    os.truncate(tmp_path / "step_8/model.safetensors", 1000)
    (tmp_path / "step_9/training/state.json").unlink()
    shutil.copytree(tmp_path / "step_7", tmp_path / "step_10.tmp")
    with pytest.warns(UserWarning) as caught:
        assert latest_checkpoint(tmp_path) == tmp_path / "step_7"
    said = [str(warning.message) for warning in caught]
    assert "step_9" in said[0] and "state.json does not exist" in said[0]
    assert "step_8" in said[1] and "model.safetensors has 1000 bytes instead of" in said[1]
    with pytest.raises(UserError, match="is no complete checkpoint"):
        load_checkpoint(tmp_path / "step_8")
    for odd in ("{}", '{"files": ["a"]}', "[]", "null"):
        (tmp_path / "step_9/training/state.json").write_text(odd)
        with pytest.warns(UserWarning, match="lists no files|not a JSON object"):
            assert latest_checkpoint(tmp_path) == tmp_path / "step_7"
    (tmp_path / "step_12").touch()
    with pytest.warns(UserWarning, match="step_12"):
        assert latest_checkpoint(tmp_path) == tmp_path / "step_7"
    (tmp_path / "step_12").unlink()
    save(tmp_path, 11)
    assert "step_10.tmp" not in steps(tmp_path)


def failing(monkeypatch, owner, name, call):
    """Let the given call of owner.name fail as on a full disk."""
    original, calls = getattr(owner, name), []

    def full(*args, **kwargs):
        calls.append(args)
        if len(calls) == call:
            raise OSError(28, "No space left on device")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, full)


@pytest.mark.parametrize(("owner", "name", "call"), [
    (checkpoint, "save_file", 1), (checkpoint, "save_file", 2), (checkpoint, "write_text", 1),
    (checkpoint, "write_text", 3), (os, "fsync", 1), (os, "fsync", 9), (os, "replace", 1)])
def test_a_full_disk_costs_the_new_checkpoint_and_not_the_last_one(tmp_path, monkeypatch, owner, name, call):
    save(tmp_path, 1)
    for step in (2, 1):  # a new one, and the same once more
        with monkeypatch.context() as patch:
            failing(patch, owner, name, call)
            with pytest.raises(OSError, match="No space left"):
                save(tmp_path, step, seed=1)
        assert steps(tmp_path) == ["step_1"], "no half checkpoint under the final name, nor its leftovers"
        assert torch.equal(logits(load_model(latest_checkpoint(tmp_path))), logits(tiny()))


def test_a_step_can_be_saved_again(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 1, seed=1)
    assert steps(tmp_path) == ["step_1"]
    assert torch.equal(logits(load_model(tmp_path / "step_1")), logits(tiny(seed=1)))


@pytest.mark.parametrize("call", [1, 2])
def test_between_the_two_renames_of_a_repeated_save_the_old_one_counts(tmp_path, monkeypatch, call):
    save(tmp_path, 1)
    with monkeypatch.context() as patch:
        failing(patch, Path, "rename", call)
        with pytest.raises(OSError, match="No space left"):
            save(tmp_path, 1, seed=1)
    folder = latest_checkpoint(tmp_path)
    assert folder.name == ["step_1", "step_1.old"][call - 1]
    assert load_checkpoint(folder)[1]["step"] == 1
    save(tmp_path, 1, seed=2)
    assert steps(tmp_path) == ["step_1"]
    assert torch.equal(logits(load_model(latest_checkpoint(tmp_path))), logits(tiny(seed=2)))


KILLED = """
import os, random, signal, sys, time
import torch
from minirl.checkpoint import latest_checkpoint, load_checkpoint, load_model, save_checkpoint
from minirl.model import ModelConfig, Transformer
from minirl.tokenizer import ByteTokenizer
torch.set_num_threads(1)
run = sys.argv[1]
model = Transformer(ModelConfig(258, 32, 64, 2, 2))
def save(step):
    with torch.no_grad():
        model.norm.weight.fill_(float(step))
    save_checkpoint(run, step, model, ByteTokenizer(), {"step": torch.tensor(step)}, {"step": step}, keep=1)
save(1)
start = time.perf_counter()
save(1)
duration = time.perf_counter() - start
chance, reached = random.Random(0), 1
for kills in range(100):
    if kills >= 12 and reached > 1:  # on a busy machine it takes more than 12 until a save comes through
        break
    child = os.fork()
    if child == 0:
        for step in range(reached, 10**6):
            save(step)
            save(step)
    time.sleep(chance.uniform(0.0, 3.0 + kills) * duration)  # a new step is the third save of a child
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    folder = latest_checkpoint(run)
    tensors, state = load_checkpoint(folder)
    weight = load_model(folder).norm.weight
    assert state["step"] >= reached and tensors["step"] == state["step"] == weight[0] == weight[-1], folder
    reached = state["step"]
save(reached + 1)
print(reached, sorted(os.listdir(run)) == [f"step_{reached + 1}"])
"""


def test_a_kill_at_any_moment_leaves_a_checkpoint_that_loads(tmp_path):
    done = subprocess.run([sys.executable, "-W", "error", "-c", KILLED, str(tmp_path)], capture_output=True,
                          text=True, cwd=Path(__file__).parents[1], timeout=120)
    assert done.returncode == 0, done.stderr
    reached, clean = done.stdout.split()
    assert int(reached) > 1 and clean == "True", "no save came through, or leftovers stayed"


def test_every_file_is_marked_as_torch_tensors_for_transformers(tmp_path):
    save_model(tiny(), tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize(("special", "fits"), [(True, True), (False, False)])
def test_a_tokenizer_may_have_more_tokens_than_its_model_if_no_text_and_no_end_is_among_them(tmp_path, special, fits):
    """Gemma 3's text models have no row for <image_soft_token>."""
    ByteTokenizer().save(tmp_path)
    file = json.loads((tmp_path / "tokenizer.json").read_text())
    file["added_tokens"].append(file["added_tokens"][0] | {"id": 260, "content": "<image>", "special": special})
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == 261
    if fits:
        save_model(tiny(), tmp_path / "model", tokenizer)
        assert load_tokenizer(tmp_path / "model").encode("a") == [97]
    else:
        with pytest.raises(UserError, match="the tokenizer has 261 tokens, but the model's vocab_size is 260"):
            save_model(tiny(), tmp_path / "model", tokenizer)
    with pytest.raises(UserError, match="the tokenizer has 258 tokens"):
        check_tokenizer(ByteTokenizer(), 257)
