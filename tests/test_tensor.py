"""Tensor and sequence parallelism on real processes: the losses, gradients, steps and draws of one process.

    everything wrong by a factor N          a bias added on all ranks; a gradient summed twice
    weights that differ from rank to rank   a partial gradient that was not summed (norms under sequence parallelism)
    only key and value weights wrong        copies of a head, each with its own gradient
    only log-probs of some words wrong      the first word of a shard
"""

import math
from dataclasses import replace

import pytest
import torch
from ranks import run_ranks
from stubs import Pieces

from minirl.checkpoint import load_model
from minirl.config import UserError
from minirl.generate import generate, sample
from minirl.logprobs import token_logprobs
from minirl.model import ModelConfig, Transformer
from minirl.optim import AdamW
from minirl.parallel import Mesh, forward_backward, init_mesh
from minirl.parallel.collectives import all_gather
from minirl.parallel.mesh import Group
from minirl.parallel.placement import even_sizes, placement, sum_partial_gradients, whole
from minirl.parallel.tensor import shard
from minirl.rollout import Rollout

dist = pytest.mark.dist

LLAMA = ModelConfig(258, 16, 30, 2, 4, 2, max_position_embeddings=64, rope_theta=100.0)
QWEN3 = replace(LLAMA, vocab_size=13, head_dim=6, qk_norm=True, tie_word_embeddings=False)
MODELS = {
    "llama": LLAMA,  # 258 words over 4 ranks, 30 components over 4, 2 key heads over 4
    "qwen3": QWEN3,
    "qwen2": replace(LLAMA, vocab_size=13, qkv_bias=True, num_key_value_heads=4),
    "biases": replace(QWEN3, qk_norm=False, qkv_bias=True, output_bias=True, mlp_bias=True),
    "gpt2": replace(LLAMA, num_key_value_heads=4, qkv_bias=True, output_bias=True, mlp_bias=True, gated_mlp=False,
                    norm="layer", learned_positions=True, hidden_act="gelu"),
    "gemma": replace(LLAMA, num_key_value_heads=1, norm="gemma", norm_placement="both", scale_embedding=True,
                     attn_logit_softcapping=5.0, final_logit_softcapping=3.0, sliding_window=5,
                     layer_types=("sliding_attention", "full_attention")),
    "olmo2": replace(LLAMA, norm_placement="post", qk_norm_across_heads=True),
}
STEPPED = ("llama", "qwen3")  # five steps; of the others one
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


def gathered(model: Transformer, group: Group, of=lambda p: p.detach()) -> dict[str, torch.Tensor]:
    return {name: whole(of(p), placement(p), group).clone() for name, p in model.named_parameters() if p.requires_grad}


class Reference(dict):
    """Results of one process, made once for all layouts: (model, step) -> loss, gradients, parameters after the step."""

    def __missing__(self, name: str) -> list[tuple]:
        self[name] = train(build(MODELS[name]), Mesh(), 5 if name in STEPPED else 1)
        return self[name]


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


def parity(names: list[str], layouts: list[tuple[int, bool]]) -> None:
    """Training of each model in each layout, beside one process."""
    reference, meshes = Reference(), {tp: init_mesh("cpu", dp=4 // tp, tp=tp) for tp in (2, 4)}
    for name in names:
        for tp, sequence in layouts:
            mesh, where = meshes[tp], f"{name}, tp {tp}, sequence {sequence}"
            torch.manual_seed(mesh.tp_rank)  # nothing may hang on a stream of random numbers (T04)
            model = shard(build(MODELS[name]), mesh, sequence)
            model.gradient_checkpointing = tp == 4 and name in ("qwen3", "biases")
            for step, (ours, theirs) in enumerate(zip(train(model, mesh, len(reference[name])), reference[name])):
                for mine, other in zip(ours, theirs, strict=True):
                    assert mine.keys() == other.keys()
                    for key in mine:
                        torch.testing.assert_close(mine[key], other[key], rtol=1e-9, atol=1e-9,
                                                   msg=lambda m: f"{where}, step {step}, {key}: {m}")  # noqa: B023
            for key, p in model.named_parameters():  # what all have must be equal to the bit, or they would drift apart
                if placement(p).dim is None:
                    assert (all_gather(p.detach()[None], mesh.tp_group) == p).all(), f"{where}, {key}"


@dist
def test_losses_gradients_and_steps_are_those_of_one_process():
    run_ranks(parity, 4, list(MODELS), LAYOUTS, timeout=120)
