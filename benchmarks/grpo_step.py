"""A whole GRPO step: minirl beside TRL's GRPOTrainer, on the same weights, in turns within one process.

    python benchmarks/grpo_step.py              needs the optional packages trl, transformers and datasets
    python benchmarks/grpo_step.py --beta 0.04  with a KL term to a reference model on both sides

8 prompts of 16 tokens x 8 samples of 64 tokens (nobody draws an end of text), a reward that counts a letter, group
advantages, one update with gradient clipping and AdamW, all in float32. TRL runs its own training loop without
gradient checkpointing, saving or per-step logging; after each of its steps minirl takes one of its own. The first
two steps of both are not counted.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable

import torch
from sample import NEW, EndlessTokenizer, report, small_model, turns

from minirl.advantages import group_advantages
from minirl.checkpoint import load_model, save_model
from minirl.env.base import Example, SingleTurn
from minirl.env.loop import collect
from minirl.logprobs import Output, rollout_logprobs
from minirl.losses import aggregate, clipped_surrogate, kl_estimate, loss_total, policy_stats
from minirl.optim import AdamW, clip_gradients
from minirl.parallel import Mesh, forward_backward, init_mesh
from minirl.rollout import Rollout
from minirl.tokenizer import ByteTokenizer

PROMPTS, GROUP, WARM_UP = 8, 8, 2
LR, CLIP, MAX_NORM = 1e-6, 0.2, 1.0  # TRL's defaults


def reward(text: str) -> float:
    return text.count("e") / NEW


class LetterTask:
    """One prompt after another, rewarded for the letter e."""

    stop = ()

    def sample(self, count: int, start: int = 0) -> list[Example]:
        return [Example(f"prompt {i:9}", "") for i in range(start, start + count)]  # 16 bytes each

    def reset(self, example: Example) -> SingleTurn:
        return SingleTurn(example.prompt, reward)


def minirl_step(folder: str, beta: float, mesh: Mesh) -> Callable[[], None]:
    """One step after the other of train_grpo.py's loop."""
    policy, reference, task, tokenizer = load_model(folder), load_model(folder), LetterTask(), EndlessTokenizer()
    optimizer = AdamW(policy.named_parameters(), LR)
    first = 0

    def loss_fn(out: Output, mb: Rollout) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        per_token = clipped_surrogate(out.logprobs, mb.old_logprobs, mb.advantages, CLIP, CLIP)
        if beta:
            per_token = per_token + beta * kl_estimate(out.logprobs, mb.ref_logprobs, "k3")
        total = loss_total("token", mb.action_mask, mesh)
        return aggregate(per_token, mb.action_mask, "token", total), policy_stats(
            out.logprobs, mb.old_logprobs, mb.ref_logprobs, out.entropy, mb.advantages, mb.action_mask, CLIP, CLIP)

    def step() -> None:
        nonlocal first
        rollout = collect(policy, tokenizer, task, task.sample(PROMPTS, first), GROUP, first, max_new_tokens=NEW)
        assert rollout.action_mask.sum() == PROMPTS * GROUP * NEW
        first += PROMPTS
        rollout = rollout.replace(advantages=group_advantages(rollout.rewards, rollout.group, "std"))
        if beta:
            rollout = rollout.replace(ref_logprobs=rollout_logprobs(reference, rollout, PROMPTS * GROUP))
        forward_backward(policy, rollout.microbatches(PROMPTS * GROUP), loss_fn, mesh, entropy=True)
        clip_gradients(policy.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return step


def run(folder: str, beta: float, rounds: int, step: Callable[[], None]) -> dict[str, list[float]]:
    """TRL trains; whenever it has made a step, `step` makes one. Seconds of both, without the first two."""
    try:
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from trl import GRPOConfig, GRPOTrainer
    except ImportError as error:
        raise SystemExit(f"error: this benchmark compares with TRL ({error}): pip install trl") from None
    times = {}
    steps = WARM_UP + rounds
    config = GRPOConfig(
        output_dir=f"{folder}/trl", use_cpu=True, bf16=False, max_steps=steps,
        per_device_train_batch_size=PROMPTS * GROUP, steps_per_generation=1, num_generations=GROUP,
        max_completion_length=NEW, temperature=1.0, beta=beta,
        gradient_checkpointing=False, save_strategy="no", report_to="none", disable_tqdm=True, learning_rate=LR,
        max_grad_norm=MAX_NORM)
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa"),
        lambda completions, **kwargs: [reward(text) for text in completions], config,
        Dataset.from_list([{"prompt": e.prompt} for e in LetterTask().sample(PROMPTS * steps)]),
        processing_class=AutoTokenizer.from_pretrained(folder), callbacks=[turns(times, {"minirl": step}, WARM_UP)])
    trainer.eos_token_ids, trainer.generation_config.eos_token_id = [-1], None  # every row has its 64 tokens
    lengths = []
    inner = trainer._generate_and_score_completions

    def counted(*args):
        out = inner(*args)
        lengths.append(out["completion_mask"].sum().item())
        return out

    trainer._generate_and_score_completions = counted
    trainer.train()
    assert set(lengths) == {PROMPTS * GROUP * NEW}, lengths
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--beta", type=float, default=0.0, help="weight of the KL term; 0: no reference model")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all files are local
    with tempfile.TemporaryDirectory() as folder:
        save_model(small_model(), folder, ByteTokenizer())
        report(run(folder, args.beta, args.rounds, minirl_step(folder, args.beta, init_mesh("cpu"))), "minirl", "TRL")


if __name__ == "__main__":
    main()
