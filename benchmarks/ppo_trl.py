"""A whole PPO step: minirl beside TRL's PPOTrainer, on the same weights, in turns within one process.

    python benchmarks/ppo_trl.py                needs transformers, datasets and TRL 0.29, a later one may have no PPO
    python benchmarks/ppo_trl.py --profile      where minirl's time goes

64 prompts of 16 tokens, one answer of 64 tokens each (nobody draws an end of text), paid by a reward model and with a
KL to the reference in the reward; a critic of its own, GAE, one pass in four minibatches, AdamW, all in float32. The
four models are of one size. TRL runs its own training loop; after each of its steps minirl takes one of its own, and
clips gradients, which TRL does not. The first two steps of both are not counted. `ppo_step.py` compares PPO with our
own GRPO.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from statistics import median
from time import perf_counter

import torch
from grpo_step import LetterTask
from sample import EndlessTokenizer, report, small_model, turns

from minirl.checkpoint import load_model, save_model
from minirl.critic import state_values
from minirl.env.loop import collect
from minirl.gae import gae, token_rewards, whiten
from minirl.logprobs import rollout_logprobs
from minirl.losses import kl_estimate, loss_total
from minirl.optim import AdamW, clip_gradients
from minirl.parallel import forward_backward, init_mesh
from minirl.ppo import PPOOptions, critic_loss, fill_in, policy_loss
from minirl.reward_model import reward_model_of, score_rows
from minirl.tokenizer import ByteTokenizer

ROWS, NEW, MINIBATCHES, WARM_UP = 64, 64, 4, 2
LR, MAX_NORM, KL_COEF, GAMMA, LAM = 1e-6, 1.0, 0.05, 1.0, 0.95


def minirl_step(folder: str, scorer: str, spent: dict[str, list[float]]) -> Callable[[], None]:
    """One step after the other of train_ppo.py's loop; `spent` gets the seconds of its parts."""
    mesh, task, tokenizer, options = init_mesh("cpu"), LetterTask(), EndlessTokenizer(), PPOOptions()
    fill_in(options)
    policy, reference, critic, reward_model = (load_model(path) for path in (folder, folder, scorer, scorer))
    actor, learner = (AdamW(model.named_parameters(), LR) for model in (policy, critic))
    first = 0

    def update(model, optimizer, minibatch, loss_fn, is_policy: bool) -> None:
        forward_backward(model, [minibatch], loss_fn, mesh, entropy=is_policy, by_token=is_policy)
        clip_gradients(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    def step() -> None:
        nonlocal first
        clock = [("", perf_counter())]

        def done(name: str) -> None:
            clock.append((name, perf_counter()))

        rollout = collect(policy, tokenizer, task, task.sample(ROWS, first), 1, first, max_new_tokens=NEW)
        assert rollout.action_mask.sum() == ROWS * NEW
        first, mask = first + ROWS, rollout.action_mask
        done("sampling")
        scores = score_rows(reward_model, rollout, ROWS)
        done("scores")
        ref_logprobs = rollout_logprobs(reference, rollout, ROWS)
        done("reference")
        values, _ = state_values(critic, rollout, ROWS, bootstrap=False)
        done("values")
        earned = token_rewards(scores, mask, kl_estimate(rollout.old_logprobs, ref_logprobs, "k1"), KL_COEF)
        advantages, returns = gae(earned, values, mask, GAMMA, LAM)
        rollout = rollout.replace(ref_logprobs=ref_logprobs, values=values, returns=returns,
                                  advantages=whiten(advantages, mask))
        done("advantages")
        for minibatch in rollout.minibatches(MINIBATCHES, 1):
            total = loss_total("token", minibatch.action_mask, mesh)
            update(critic, learner, minibatch, partial(critic_loss, config=options, total=total), is_policy=False)
            done("critic's updates")
            loss_fn = partial(policy_loss, config=options, kl_coef=KL_COEF, total=total, right_total=total)
            update(policy, actor, minibatch, loss_fn, is_policy=True)
            done("policy's updates")
        parts: dict[str, float] = defaultdict(float)
        for (_, began), (name, ended) in pairwise(clock):
            parts[name] += ended - began
        for name, taken in parts.items():
            spent[name].append(taken)

    return step


def run(folder: str, scorer: str, rounds: int, step: Callable[[], None]) -> dict[str, list[float]]:
    """TRL trains; whenever it has made a step, `step` makes one. Seconds of both, without the first two."""
    try:
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
        from trl.experimental.ppo import PPOConfig, PPOTrainer
    except ImportError as error:
        raise SystemExit(f'error: this benchmark compares with TRL ({error}): pip install "trl==0.29.*"') from None
    times, read = {}, set()

    def opened(kind, path: str) -> torch.nn.Module:
        return kind.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")

    steps = WARM_UP + rounds
    config = PPOConfig(
        output_dir=f"{folder}/trl", use_cpu=True, bf16=False, total_episodes=ROWS * steps,
        per_device_train_batch_size=ROWS, gradient_accumulation_steps=1, num_mini_batches=MINIBATCHES, num_ppo_epochs=1,
        local_rollout_forward_batch_size=ROWS, response_length=NEW, temperature=1.0, kl_coef=KL_COEF, gamma=GAMMA,
        lam=LAM, num_sample_generations=0, gradient_checkpointing=False, save_strategy="no", report_to="none",
        disable_tqdm=True, learning_rate=LR)
    prompts = [{"input_ids": list(example.prompt.encode())} for example in LetterTask().sample(ROWS * steps)]
    judge = opened(AutoModelForSequenceClassification, scorer)
    judge.model.register_forward_pre_hook(lambda _, args, kwargs: read.add(tuple(kwargs["input_ids"].shape)),
                                          with_kwargs=True)
    trainer = PPOTrainer(
        config, AutoTokenizer.from_pretrained(folder), opened(AutoModelForCausalLM, folder),
        opened(AutoModelForCausalLM, folder), judge, Dataset.from_list(prompts),
        opened(AutoModelForSequenceClassification, scorer), eval_dataset=Dataset.from_list(prompts[:ROWS]),
        callbacks=[turns(times, {"minirl": step}, WARM_UP)])
    trainer.train()
    assert read == {(ROWS, 16 + NEW)}, read  # each row has its 64 tokens
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--profile", action="store_true", help="medians of the parts of minirl's step")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all files are local
    spent: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as scorer:
        save_model(small_model(), folder, ByteTokenizer())
        save_model(reward_model_of(small_model(), torch.Generator().manual_seed(0)), scorer, ByteTokenizer())
        report(run(folder, scorer, args.rounds, minirl_step(folder, scorer, spent)), "minirl", "TRL")
        if args.profile:
            parts = {name: 1e3 * median(taken[WARM_UP:]) for name, taken in spent.items()}
            print("minirl:", ", ".join(f"{name} {milliseconds:.0f} ms" for name, milliseconds in parts.items()))


if __name__ == "__main__":
    main()
