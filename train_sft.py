"""Supervised fine-tuning: imitate the expert, token by token.

    1. take the next rows: an expert's actions in an environment, or conversations and texts from a file
    2. lay prompt, actions and tool output on one tape; only what the model itself would say carries a loss
    3. minimise the mean negative log-likelihood of those tokens

One denominator, the number of target tokens of the whole batch, serves all microbatches and ranks, so that the
gradient does not depend on how the batch is cut, padded or packed.

    torchrun train_sft.py                                          two-digit addition, from nothing
    torchrun --nproc_per_node 2 train_sft.py                       the same numbers on two ranks
    torchrun train_sft.py --task jsonl --data chats.jsonl --init FOLDER --epochs 2 --lr 1e-5 --pack
    torchrun train_sft.py --task jsonl --data chats.jsonl --init FOLDER --epochs 2 --lr 2e-4 --lora-rank 16 --qlora
"""

from dataclasses import dataclass, fields
from math import ceil, inf
from pathlib import Path
from time import perf_counter

import torch

from minirl.chat import speak
from minirl.checkpoint import FREE_TO_CHANGE, open_run
from minirl.config import UserError, check_not_negative, check_positive, run, save_config
from minirl.data.dataset import Demonstrations, read_rows
from minirl.env import make_env
from minirl.evaluate import evaluate, evaluate_loss, show_sample
from minirl.learner import Learner
from minirl.logprobs import Output
from minirl.losses import aggregate, loss_total, sft_loss
from minirl.metrics import MetricsLogger
from minirl.model import ModelConfig, Transformer
from minirl.optim import lr_at
from minirl.options import LayoutOptions, TrainerOptions, check_shared, make_mesh
from minirl.parallel import StopSignal, close_mesh, pick_dtype
from minirl.rollout import Rollout
from minirl.start import open_start, open_tokenizer, prepare


@dataclass(frozen=True)
class Config(TrainerOptions):
    # run
    run_dir: str = "runs/sft"  # folder of config.json, metrics.jsonl and the checkpoints
    save_every: int = 100  # steps between checkpoints
    # model
    init: str = ""  # folder of a checkpoint to start from; empty: a new byte-level model of the sizes below
    hidden_size: int = 96  # width of the residual stream
    layers: int = 2  # number of blocks
    heads: int = 4  # query heads
    kv_heads: int = 4  # key and value heads
    context: int = 0  # longest row or window in tokens; 0: the model's own (of a new one, twice what the rows need)
    # data
    task: str = "addition"  # a task of train_grpo.py: an expert's actions; jsonl: the rows of --data
    data: str = ""  # gsm8k: JSONL of {"question", "answer"}; jsonl: of messages, prompt and completion, or text
    eval_data: str = ""  # JSONL file of held-out rows; empty: the last tenth of --data
    template: str = "auto"  # chat template of messages; auto: the model's own
    pack: bool = False  # jsonl: put rows into full windows of the context; they do not see each other
    train_rows: int = 0  # learn only from the first so many rows or problems, over and over; 0: from all there are
    drop_long_rows: bool = False  # leave out rows of --data that do not fit the model's context
    difficulty: int = 2  # digits of an operand, hops, items, numbers or steps
    # optimisation
    steps: int = 1000  # optimizer updates
    epochs: float = 0.0  # passes over the rows, in place of --steps; 0: what --steps make
    batch_size: int = 64  # rows an update, over all ranks; with --pack windows
    microbatch_size: int = 64  # rows a forward pass
    lr: float = 2e-3  # peak learning rate
    warmup_steps: int = 20  # steps of linear warm-up
    # logging and evaluation
    log_every: int = 10  # steps between lines on the console; metrics.jsonl has every step
    eval_every: int = 100  # steps between evaluations; 0: only at the end
    eval_rows: int = 200  # held-out rows whose loss is measured; 0: none
    eval_problems: int = 500  # held-out problems of a task, answered greedily
    until_accuracy: float = 1.0  # stop early once an evaluation reaches this
    patience: int = 0  # stop after so many evaluations without a lower eval/loss; 0: never
    max_new_tokens: int = 0  # longest answer in an evaluation; 0: the task's own
    max_rows: int = 4096  # rows decoded at once in an evaluation

    def __post_init__(self):
        check_shared(self)
        check_positive(self, "steps", "batch_size", "microbatch_size", "log_every", "max_rows", "eval_problems",
                       "hidden_size", "layers", "heads", "kv_heads")
        check_not_negative(self, "context", "eval_every", "eval_rows", "max_new_tokens", "epochs", "patience",
                           "train_rows")
        if self.lora_rank and not self.init:
            raise UserError("--lora-rank adds to the weights of a checkpoint: give its folder with --init")
        if self.pack and self.task != "jsonl":
            raise UserError("--pack is for --task jsonl: an environment's rows are built when they are needed")
        if self.patience and not self.eval_rows:
            raise UserError("--patience watches the held-out loss: give --eval-rows")
        if self.patience and not self.eval_every:
            raise UserError("--patience counts evaluations: give --eval-every")


def main(config: Config) -> Path | None:
    """Train; the folder of the best checkpoint, or None when the run was stopped before its end."""
    # ---- setup
    mesh = make_mesh(config)
    dtype = pick_dtype(config.dtype, mesh.device)
    share = mesh.share(config.batch_size, "rows of --batch-size")

    # ---- task
    start_folder = open_run(config, mesh, FREE_TO_CHANGE | {"epochs"})
    init = start_folder or config.init
    tokenizer = open_tokenizer(init)
    if config.task == "jsonl":
        data = read_rows(config.data, config.eval_data, tokenizer, config.template, config.seed, config.batch_size,
                         config.train_rows)
        speak(tokenizer, data.template)
    else:
        env = make_env(config.task, config.data, config.eval_data, config.difficulty, config.seed)
        data = Demonstrations(env, tokenizer, config.train_rows, config.seed)

    # ---- policy
    if init:
        policy = open_start(init, tokenizer, dtype, config, mesh)
    else:
        shape = ModelConfig(tokenizer.vocab_size, config.hidden_size, 8 * config.hidden_size // 3, config.layers,
                            config.heads, config.kv_heads, max_position_embeddings=config.context or 2 * data.longest(),
                            rope_theta=100.0)  # rows are short: even the slow pairs should turn
        policy = Transformer(shape).init_weights(torch.Generator().manual_seed(config.seed))
        policy = policy.to(mesh.device, dtype)
    policy = prepare(policy, config, mesh, None if start_folder else init)
    context = min(config.context or policy.config.context, policy.config.context)
    everything = data.size("train")
    data = data.fit(context, config.drop_long_rows)
    if mesh.is_main and data.size("train") != everything:
        print(f"left out: {everything - data.size('train')} of {everything} rows, longer than {context} tokens")
    if config.pack:
        data = data.packed(context)

    # ---- optimizer
    learner = Learner(policy, mesh, config.lr, config.max_grad_norm, weight_decay=config.weight_decay)
    if config.epochs and not data.size("train"):
        raise UserError(f"--epochs {config.epochs:g}: task {config.task} makes problems without end; give --steps, or "
                        "--train-rows")
    steps = config.steps
    if config.epochs:
        steps = ceil(round(config.epochs * data.size("train") / config.batch_size, 6))  # 0.1 * 30 / 1 is above 3
    if mesh.is_main and config.warmup_steps >= steps:
        print(f"hint: --warmup-steps {config.warmup_steps}, but there are {steps} updates: --lr is never reached")

    # ---- resume
    best = {"loss": inf, "step": 0, "stale": 0}  # the lowest eval/loss, its step, and how many evaluations ago
    state = {"best": best, "solved": False} | learner.resume(start_folder, config.seed)
    start, end, best = state["step"], steps, state["best"]
    if start and not (Path(config.run_dir) / f"step_{best['step']}").is_dir():  # somebody made room
        best |= {"loss": inf, "step": 0}
    if state["solved"] or 0 < config.patience <= best["stale"]:
        end = start
    if mesh.is_main:
        save_config(config, config.run_dir)
    columns = ["loss", "grad_norm", "lr", "tokens", "eval/loss", "eval/accuracy"]
    logger = MetricsLogger(config.run_dir, columns, steps, start, mesh.is_main, config.log_every)
    stop = StopSignal()

    # ---- loop
    last, stopping = start, False
    for step in range(start + 1, end + 1):
        began = perf_counter()

        # (1) the next rows, and what the expert says in them
        batch = data.batch((step - 1) * config.batch_size + share.start, len(share)).to(mesh.device)

        # (2) the gradient of the loss, clipped, and a step of AdamW
        total = loss_total("token", batch.action_mask, mesh)

        def loss_fn(out: Output, mb: Rollout, total=total):
            loss = aggregate(sft_loss(out.logprobs), mb.action_mask, "token", total)
            return loss, {"tokens": mb.action_mask.sum()}

        lr = lr_at(step - 1, steps, config.lr, config.warmup_steps, config.schedule)
        stats = learner.update(loss_fn, batch.microbatches(config.microbatch_size), lr, by_token=True)

        # (3) evaluate, log, save
        metrics = {
            "loss": stats["loss"],
            "tokens": int(stats["tokens"]),
            "grad_norm": stats["grad_norm"],
            "lr": lr,
            "skipped_steps": learner.guard.skipped,
            "time/tokens_per_second": stats["tokens"] / (perf_counter() - began),
        }
        last, solved, improved = step, False, False
        if step == end or (config.eval_every and step % config.eval_every == 0):
            if data.env:
                metrics |= evaluate(policy, tokenizer, data.env, config.eval_problems, mesh, config.max_new_tokens,
                                    config.max_rows)
                solved = metrics["eval/accuracy"] >= config.until_accuracy
            if config.eval_rows:
                metrics |= evaluate_loss(policy, data, config.eval_rows, mesh, config.microbatch_size)
                improved = metrics["eval/loss"] < best["loss"]
                best = {"loss": metrics["eval/loss"], "step": step, "stale": 0} if improved else (
                    best | {"stale": best["stale"] + 1})
        stopping = stop.requested(mesh)
        over = stopping or solved or 0 < config.patience <= best["stale"] or step == end
        logger.log(step, metrics)
        if over or improved or step % config.save_every == 0:
            learner.save(config.run_dir, step, tokenizer, config.keep, best["step"], solved=solved, best=best)
        if over:
            break

    stop.close()
    if stopping:
        return None
    if mesh.is_main and best["step"]:
        print(f"best: {config.run_dir}/step_{best['step']}, eval/loss {best['loss']:.4f}")
    if data.env:
        show_sample("a held-out problem:", policy, tokenizer, data.env, mesh, config.max_new_tokens)
    return Path(config.run_dir) / f"step_{best['step'] or last}"


def cold_start(config, is_main: bool, name: str = "cold_start", **options) -> Path | None:
    """A policy that succeeds now and then: what RL makes likelier, and a pair is made of. DeepSeek-R1 began so too.

    A short SFT run in run_dir/cold_start, ended as soon as it solves `cold_start_accuracy` of the held-out problems.

    config        : that of train_grpo.py, train_ppo.py or train_dpo.py
    name, options : of another run than this one, and what is different there
    returns       : the folder of its last checkpoint; None: the run was stopped
    """
    folder = Path(config.run_dir) / name
    options = dict(steps=config.cold_start_steps, schedule="constant", eval_every=5,
                   until_accuracy=config.cold_start_accuracy) | options
    if is_main:
        print(f"{name.replace('_', ' ')}: SFT on the expert's answers until {options['until_accuracy']:.0%} are right, "
              f"in {folder}")
    same = ("seed", "device", "dtype", "impl", "task", "data", "eval_data", "drop_long_rows", "difficulty",
            "eval_problems", "max_new_tokens", "max_rows", *(option.name for option in fields(LayoutOptions)))
    return main(Config(run_dir=str(folder), resume=config.resume, eval_rows=0, **options,
                       **{option: getattr(config, option) for option in same}))


if __name__ == "__main__":
    run(main, Config, description=__doc__)
    close_mesh()
