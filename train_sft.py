"""Supervised fine-tuning: imitate the expert, token by token.

    1. take the next examples of a task, with an expert's actions
    2. lay prompt, actions and tool output on one tape; only the actions carry a loss
    3. minimise the mean negative log-likelihood of the action tokens

One denominator, the number of action tokens of the whole batch, serves all microbatches and ranks, so that the
gradient does not depend on how the batch is cut. Left out: packing several examples into one row.

    torchrun train_sft.py                                          two-digit addition, from nothing
    torchrun --nproc_per_node 2 train_sft.py                       the same numbers on two ranks
    torchrun train_sft.py --task gsm8k --data train.jsonl --init FOLDER --lr 1e-5
"""

from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Literal

import torch

from minirl.checkpoint import load_checkpoint, load_model, open_run, restore_rng, rng_tensors, save_checkpoint
from minirl.config import check_not_negative, check_positive, check_run, run, save_config
from minirl.env import make_env
from minirl.env.loop import demonstrate, fit_to_context, longest_row
from minirl.evaluate import evaluate, sample_text
from minirl.logprobs import Output
from minirl.losses import aggregate, loss_total, sft_loss
from minirl.metrics import MetricsLogger
from minirl.model import ModelConfig, Transformer
from minirl.optim import AdamW, SkipCounter, clip_gradients, lr_at
from minirl.parallel import StopSignal, barrier, close_mesh, forward_backward, init_mesh, pick_dtype
from minirl.rollout import Rollout
from minirl.tokenizer import ByteTokenizer, load_tokenizer


@dataclass(frozen=True)
class Config:
    # run
    run_dir: str = "runs/sft"  # folder of config.json, metrics.jsonl and the checkpoints
    resume: bool = False  # go on from the newest checkpoint in run_dir
    seed: int = 0  # of the initial weights and the problems
    device: str = "auto"  # cuda, mps or cpu; auto takes the first there is
    dtype: str = "auto"  # float32, float64 or bfloat16; auto is bfloat16 where the hardware has it
    save_every: int = 100  # steps between checkpoints
    keep: int = 2  # newest checkpoints to keep, besides step_0
    # model
    init: str = ""  # folder of a checkpoint to start from; empty: a new byte-level model of the sizes below
    hidden_size: int = 96  # width of the residual stream
    layers: int = 2  # number of blocks
    heads: int = 4  # query heads
    kv_heads: int = 4  # key and value heads
    context: int = 0  # longest row in tokens; 0: twice what the task's examples need
    # task
    task: str = "addition"  # addition, calculator or gsm8k
    data: str = ""  # gsm8k: JSONL file of {"question", "answer"}
    eval_data: str = ""  # gsm8k: JSONL file of held-out problems; empty: a tenth of --data
    drop_long_rows: bool = False  # gsm8k: leave out problems that do not fit the model's context
    difficulty: int = 2  # digits of an operand
    # optimisation
    steps: int = 1000  # optimizer updates
    batch_size: int = 64  # examples an update, over all ranks
    microbatch_size: int = 64  # examples a forward pass
    lr: float = 2e-3  # peak learning rate
    warmup_steps: int = 20  # updates of linear warm-up
    schedule: Literal["cosine", "linear", "constant"] = "cosine"  # after the warm-up
    weight_decay: float = 0.0  # pulls matrices to zero, decoupled from the gradient
    max_grad_norm: float = 1.0  # clip the gradient to this norm; 0: never
    # logging and evaluation
    log_every: int = 10  # steps between lines on the console; metrics.jsonl has every step
    eval_every: int = 100  # steps between evaluations; 0: only at the end
    eval_problems: int = 500  # held-out problems, answered greedily
    until_accuracy: float = 1.0  # stop early once an evaluation reaches this
    max_new_tokens: int = 0  # longest answer in an evaluation; 0: the task's own
    max_rows: int = 4096  # rows decoded at once in an evaluation

    def __post_init__(self):
        check_run(self)
        check_positive(self, "steps", "batch_size", "microbatch_size", "lr", "save_every", "keep", "log_every",
                       "max_rows", "eval_problems", "hidden_size", "layers", "heads", "kv_heads")
        check_not_negative(self, "context", "warmup_steps", "weight_decay", "max_grad_norm", "eval_every",
                           "max_new_tokens")


def main(config: Config) -> Path | None:
    """Train; the folder of the last checkpoint, or None when the run was stopped before its end."""
    # ---- setup
    mesh = init_mesh(config.device)
    dtype = pick_dtype(config.dtype, mesh.device)
    share = mesh.share(config.batch_size, "examples of --batch-size")
    start_folder = open_run(config, mesh)

    # ---- task
    env = make_env(config.task, config.data, config.eval_data, config.difficulty, config.seed)
    max_new_tokens = config.max_new_tokens or env.max_new_tokens

    # ---- model
    if start_folder or config.init:
        policy = load_model(start_folder or config.init, dtype, mesh.device)
        tokenizer = load_tokenizer(start_folder or config.init)
        context = policy.config.context
    else:
        tokenizer = ByteTokenizer()
        context = config.context or 2 * longest_row(env, tokenizer)
        shape = ModelConfig(tokenizer.vocab_size, config.hidden_size, 8 * config.hidden_size // 3, config.layers,
                            config.heads, config.kv_heads, max_position_embeddings=context,
                            rope_theta=100.0)  # rows are short: even the slow pairs should turn
        policy = Transformer(shape).init_weights(torch.Generator().manual_seed(config.seed))
        policy = policy.to(mesh.device, dtype)
    env = fit_to_context(env, tokenizer, context, config.drop_long_rows, solutions=True)

    # ---- optimizer
    optimizer = AdamW(policy.named_parameters(), config.lr, weight_decay=config.weight_decay)
    guard = SkipCounter()

    # ---- resume
    start, end = 0, config.steps
    torch.manual_seed(config.seed)
    if start_folder:
        tensors, state = load_checkpoint(start_folder)
        optimizer.load_state_tensors(restore_rng(tensors))
        start, guard = state["step"], SkipCounter(state["skipped"], state["skipped_in_a_row"])
        end = start if state["solved"] else end  # a run that ended early is over
    if mesh.is_main:
        save_config(config, config.run_dir)
    columns = ["loss", "grad_norm", "lr", "tokens", "eval/accuracy"]
    logger = MetricsLogger(config.run_dir, columns, config.steps, start, mesh.is_main, config.log_every)
    stop = StopSignal()

    # ---- loop
    folder, stopping = start_folder, False
    for step in range(start + 1, end + 1):
        began = perf_counter()

        # (1) the next examples, and what an expert did
        position = (step - 1) * config.batch_size + share.start
        batch = demonstrate(tokenizer, env, env.sample(len(share), start=position), first=position).to(mesh.device)

        # (2) gradients
        total = loss_total("token", batch.action_mask, mesh)

        def loss_fn(out: Output, mb: Rollout, total=total):
            loss = aggregate(sft_loss(out.logprobs), mb.action_mask, "token", total)
            return loss, {"tokens": mb.action_mask.sum()}

        stats = forward_backward(policy, batch.microbatches(config.microbatch_size), loss_fn, mesh)

        # (3) update
        lr = lr_at(step - 1, config.steps, config.lr, config.warmup_steps, config.schedule)
        grad_norm = clip_gradients(policy.parameters(), config.max_grad_norm)
        guard.step(optimizer, grad_norm, lr, stats["loss"])
        optimizer.zero_grad()

        # (4) evaluate, log, save
        metrics = {
            "loss": stats["loss"],
            "tokens": int(stats["tokens"]),
            "grad_norm": grad_norm,
            "lr": lr,
            "skipped_steps": guard.skipped,
            "time/tokens_per_second": stats["tokens"] / (perf_counter() - began),
        }
        solved = False
        if step == end or (config.eval_every and step % config.eval_every == 0):
            metrics |= evaluate(policy, tokenizer, env, config.eval_problems, mesh, max_new_tokens, config.max_rows)
            solved = metrics["eval/accuracy"] >= config.until_accuracy
        stopping = stop.requested(mesh)
        last = stopping or solved or step == end
        logger.log(step, metrics)
        if last or step % config.save_every == 0:
            folder = Path(config.run_dir) / f"step_{step}"
            if mesh.is_main:
                tensors = optimizer.state_tensors() | rng_tensors()
                state = {"step": step, "solved": solved, "skipped": guard.skipped, "skipped_in_a_row": guard.in_a_row}
                save_checkpoint(config.run_dir, step, policy, tokenizer, tensors, state, config.keep)
            barrier(mesh)
        if last:
            break

    stop.close()
    if stopping:
        return None
    if mesh.is_main:
        print("a held-out problem:", sample_text(policy, tokenizer, env, max_new_tokens))
    return folder


if __name__ == "__main__":
    run(main, Config, description=__doc__)
    close_mesh()
