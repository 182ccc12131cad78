"""A whole DPO step: minirl beside a plain transformers loop and TRL's DPOTrainer, on the same pairs, in turns.

    python benchmarks/dpo_step.py                     needs the optional packages transformers, trl and datasets
    python benchmarks/dpo_step.py --precompute-ref    the reference was asked about all pairs before
    python benchmarks/dpo_step.py --profile           where minirl's time goes

8 pairs, 16 rows of 128 tokens of which 96 are the answer's, in float32: the reference's log-probs, one forward pass of
both sides, backward, clipping, AdamW. The plain loop is what a careful person writes around a transformers model. TRL
runs its own training loop without gradient checkpointing, saving or per-step logging; after each of its steps the
others take one. The first two steps are not counted. The log-probs of the first step must agree, and the losses of all
that follow.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable
from random import Random
from statistics import median
from string import ascii_lowercase
from time import perf_counter

import torch
import torch.nn.functional as F
from sample import report, small_model, turns

from minirl.checkpoint import load_model, save_model
from minirl.data.preferences import encode_pair, stack
from minirl.logprobs import Output, rollout_logprobs
from minirl.losses import loss_total
from minirl.optim import AdamW, clip_gradients
from minirl.pairs import answers, microbatches
from minirl.parallel import forward_backward, init_mesh
from minirl.preference_losses import PREFERENCES, preference_loss, preference_stats
from minirl.rollout import Rollout
from minirl.tokenizer import ByteTokenizer

PAIRS, PROMPT, ANSWER, WARM_UP = 8, 32, 95, 2  # an answer's end is its 96th token
LR, MAX_NORM, BETA = 1e-4, 1.0, 0.1

Step = Callable[[], tuple[float, float]]  # one update; the loss before it, and the mean log-prob of chosen answers


def pairs(number: int) -> list[dict[str, str]]:
    """New ones for each step."""
    letters = Random(number)
    lengths = {"prompt": PROMPT, "chosen": ANSWER, "rejected": ANSWER}
    return [{name: "".join(letters.choices(ascii_lowercase, k=count)) for name, count in lengths.items()}
            for _ in range(PAIRS)]


def rows_of_pairs(number: int) -> Rollout:
    return stack([encode_pair(row, f"pair {i}", ByteTokenizer(), "auto") for i, row in enumerate(pairs(number))], 0)


def minirl_step(folder: str, count: int, precomputed: bool, spent: dict[str, list[float]]) -> Step:
    """One step after the other of train_dpo.py's loop; `spent` gets the seconds of its parts."""
    mesh, policy, reference, row = init_mesh("cpu"), load_model(folder), load_model(folder), PREFERENCES["dpo"]
    optimizer = AdamW(policy.named_parameters(), LR)
    batches = [rows_of_pairs(number) for number in range(count)]

    def with_reference(rows: Rollout) -> Rollout:
        return rows.replace(ref_logprobs=rollout_logprobs(reference, rows, 2 * PAIRS))

    if precomputed:
        batches = [with_reference(rows) for rows in batches]
    batches = iter(batches)

    def step() -> tuple[float, float]:
        clock = [perf_counter()]
        rows = next(batches)
        if rows.ref_logprobs is None:
            rows = with_reference(rows)
        clock.append(perf_counter())
        total = loss_total("sequence", rows.action_mask[0::2], mesh)

        def loss_fn(out: Output, mb: Rollout):
            sides = *answers(out.logprobs, mb, row, mesh), *answers(mb.ref_logprobs, mb, row, mesh)
            return preference_loss("dpo", *sides, beta=BETA).sum() / total, preference_stats(*sides, BETA)

        stats = forward_backward(policy, microbatches(rows, PAIRS), loss_fn, mesh)
        clock.append(perf_counter())
        clip_gradients(policy.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        clock.append(perf_counter())
        for name, began, ended in zip(("reference", "forward and backward", "clip and AdamW"), clock, clock[1:]):
            spent[name].append(ended - began)
        return stats["loss"], stats["row_logprob_chosen"] / stats["rows"]

    return step


def their_model(folder: str) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()


def plain_step(folder: str, count: int, precomputed: bool) -> Step:
    """The loop that one writes by hand around a transformers model."""
    model, reference = their_model(folder), their_model(folder)
    optimizer = torch.optim.AdamW(model.parameters(), LR, betas=(0.9, 0.95), weight_decay=0.0, foreach=True)

    def sums(model: torch.nn.Module, rows: Rollout) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(input_ids=rows.tokens[:, :-1], use_cache=False).logits
        logprobs = -F.cross_entropy(logits.transpose(1, 2), rows.tokens[:, 1:], reduction="none")
        total = (logprobs * rows.action_mask).sum(1)
        return total[0::2], total[1::2]

    def asked(rows: Rollout) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            return sums(reference, rows)

    batches = [rows_of_pairs(number) for number in range(count)]
    batches = iter([(rows, asked(rows) if precomputed else None) for rows in batches])

    def step() -> tuple[float, float]:
        rows, ref = next(batches)
        ref_chosen, ref_rejected = ref or asked(rows)
        chosen, rejected = sums(model, rows)
        loss = -F.logsigmoid(BETA * (chosen - ref_chosen - rejected + ref_rejected)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item(), chosen.mean().item()

    return step


def run(folder: str, precomputed: bool, rounds: int, spent: dict[str, list[float]]) -> dict[str, list[float]]:
    """TRL trains; whenever it has made a step, the others make one. Seconds of each, without the first two."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    count = WARM_UP + rounds
    steps = {"minirl": minirl_step(folder, count, precomputed, spent),
             "transformers": plain_step(folder, count, precomputed)}
    times, said = {name: [] for name in (*steps, "TRL")}, {name: [] for name in steps}
    noted = {name: lambda name=name, step=step: said[name].append(step()) for name, step in steps.items()}

    config = DPOConfig(
        output_dir=f"{folder}/trl", use_cpu=True, bf16=False, max_steps=count, per_device_train_batch_size=PAIRS,
        beta=BETA, precompute_ref_log_probs=precomputed, gradient_checkpointing=False, save_strategy="no",
        logging_first_step=True, logging_steps=count, report_to="none", disable_tqdm=True, learning_rate=LR,
        lr_scheduler_type="constant", max_grad_norm=MAX_NORM, adam_beta2=0.95, dataloader_drop_last=True)
    trainer = DPOTrainer(
        their_model(folder), their_model(folder), config,
        train_dataset=Dataset.from_list([row for number in range(count) for row in pairs(number)]),
        processing_class=AutoTokenizer.from_pretrained(folder), callbacks=[turns(times, noted, WARM_UP)])
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(trainer.train_dataset)
    trainer.train()
    first, rest = trainer.state.log_history[:2]
    for name, values in said.items():  # in the first step every loss is log 2: the log-probs tell more
        assert abs(values[0][1] - first["logps/chosen"]) < 1e-2, (name, values[0], first)
        assert abs(sum(loss for loss, _ in values[1:]) / (count - 1) - rest["loss"]) < 1e-3, (name, values, rest)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--precompute-ref", action="store_true", help="no reference model while it trains")
    parser.add_argument("--profile", action="store_true", help="medians of the parts of minirl's step")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all files are local
    spent: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        save_model(small_model(), folder, ByteTokenizer())
        try:
            times = run(folder, args.precompute_ref, args.rounds, spent)
        except ImportError as error:
            raise SystemExit(f"error: this benchmark compares with TRL ({error}): pip install trl") from None
        for theirs in list(times)[1:]:
            report({name: times[name] for name in ("minirl", theirs)}, "minirl", theirs)
        if args.profile:
            parts = {name: 1e3 * median(taken[WARM_UP:]) for name, taken in spent.items()}
            print("minirl:", ", ".join(f"{name} {milliseconds:.0f} ms" for name, milliseconds in parts.items()))


if __name__ == "__main__":
    main()
