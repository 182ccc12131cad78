"""A whole SFT step: minirl beside a plain transformers loop and TRL's SFTTrainer, on the same weights, in turns.

    python benchmarks/sft_step.py               needs the optional packages transformers, trl and datasets
    python benchmarks/sft_step.py --lora        LoRA of rank 16 on all linear layers; needs peft as well

16 rows of 128 tokens, each a target, in float32: forward, backward, clipping, AdamW. The plain loop is what a careful
person writes around a transformers model (`model(input_ids, labels=...)`, torch's clipping and AdamW). TRL runs its own
training loop without gradient checkpointing, saving or per-step logging; after each of its steps the others take one.
With --lora all sides train adapters of the same shape. The first two steps are not counted. The losses of the first
step must agree.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable

import torch
from sample import report, small_model, turns

from minirl.checkpoint import load_model, save_model
from minirl.logprobs import Output
from minirl.lora import add_lora
from minirl.losses import aggregate, loss_total, sft_loss
from minirl.optim import AdamW, clip_gradients
from minirl.parallel import forward_backward, init_mesh
from minirl.rollout import Rollout
from minirl.tokenizer import ByteTokenizer

ROWS, LENGTH, WARM_UP = 16, 128, 2
LR, MAX_NORM, RANK, ALPHA = 1e-5, 1.0, 16, 32

Step = Callable[[], float]  # makes one update; returns the loss before it


def batch(number: int) -> torch.Tensor:
    """(ROWS, LENGTH) bytes, new ones for each step."""
    return torch.randint(256, (ROWS, LENGTH), generator=torch.Generator().manual_seed(number))


def minirl_step(folder: str, lora: bool) -> Step:
    """One step after the other of train_sft.py's loop."""
    mesh, policy, number = init_mesh("cpu"), load_model(folder), -1
    if lora:
        add_lora(policy, RANK, ALPHA)
    optimizer = AdamW(policy.named_parameters(), LR)

    def step() -> float:
        nonlocal number
        number += 1
        ids = torch.arange(ROWS)
        mask, lengths = torch.ones(ROWS, LENGTH - 1, dtype=torch.bool), torch.full((ROWS,), LENGTH)
        rows = Rollout(batch(number), mask, lengths, group=ids, sample_ids=ids)
        total = loss_total("token", rows.action_mask, mesh)

        def loss_fn(out: Output, mb: Rollout):
            loss = aggregate(sft_loss(out.logprobs), mb.action_mask, "token", total)
            return loss, {"tokens": mb.action_mask.sum()}

        stats = forward_backward(policy, rows.microbatches(ROWS), loss_fn, mesh)
        clip_gradients(policy.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return stats["loss"]

    return step


def their_model(folder: str, lora: bool) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear"))
    return model.train()


def plain_step(folder: str, lora: bool) -> Step:
    """The loop that one writes by hand around a transformers (or PEFT) model."""
    model, number = their_model(folder, lora), -1
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, LR, betas=(0.9, 0.95), weight_decay=0.0, foreach=True)

    def step() -> float:
        nonlocal number
        number += 1
        tokens = batch(number)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def run(folder: str, lora: bool, rounds: int) -> dict[str, list[float]]:
    """TRL trains; whenever it has made a step, the others make one. Seconds of each, without the first two."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    steps = {"minirl": minirl_step(folder, lora), "PEFT" if lora else "transformers": plain_step(folder, lora)}
    times, said = {name: [] for name in (*steps, "TRL")}, {name: [] for name in steps}
    noted = {name: lambda name=name, step=step: said[name].append(step()) for name, step in steps.items()}

    count = WARM_UP + rounds
    config = SFTConfig(
        output_dir=f"{folder}/trl", use_cpu=True, bf16=False, max_steps=count, per_device_train_batch_size=ROWS,
        max_length=LENGTH, packing=False, gradient_checkpointing=False, save_strategy="no",
        logging_first_step=True, logging_steps=10_000,
        report_to="none", disable_tqdm=True, learning_rate=LR, max_grad_norm=MAX_NORM, adam_beta2=0.95,
        dataloader_drop_last=True)
    rows = [{"input_ids": row.tolist()} for number in range(count) for row in batch(number)]
    trainer = SFTTrainer(
        their_model(folder, lora), config, train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder), callbacks=[turns(times, noted, WARM_UP)])
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(trainer.train_dataset)
    trainer.train()
    losses = {name: values[0] for name, values in said.items()} | {"TRL": trainer.state.log_history[0]["loss"]}
    assert max(losses.values()) - min(losses.values()) < 1e-3, losses
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--lora", action="store_true", help="adapters on all linear layers of both sides")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all files are local
    with tempfile.TemporaryDirectory() as folder:
        save_model(small_model(), folder, ByteTokenizer())
        try:
            times = run(folder, args.lora, args.rounds)
        except ImportError as error:
            raise SystemExit(f"error: this benchmark compares with TRL ({error}): pip install trl peft") from None
        for theirs in list(times)[1:]:
            report({name: times[name] for name in ("minirl", theirs)}, "minirl", theirs)


if __name__ == "__main__":
    main()
