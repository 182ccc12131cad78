"""DPO: learn from pairs of answers which is the better one, without a reward model (arXiv:2305.18290).

    1. the policy answers every problem several times; a verifier judges; the best and the worst answer are a pair
    2. log-probs of both answers, under the policy and under the frozen model that it started from: in each, how much
       likelier has the answer become? c for the chosen one, r for the rejected one
    3. minimise -log sigmoid(beta (c - r)), or another loss of the family (--loss, `minirl/preference_losses.py`)
    4. (not in the paper; --nll-coef 0 leaves it out) and the negative log-likelihood of the chosen answers, or both
       answers may fall together

No sampling while it learns, no critic: the pairs are those of the first model. Left out of the paper: nothing but its
data sets; --task jsonl reads such. With --loss reward the same pairs train a reward model instead, for train_ppo.py.

    torchrun train_dpo.py                                          two-digit addition from nothing, minutes on a laptop
    torchrun train_dpo.py --loss ipo                               or simpo, orpo, kto, ...: docs/preferences.md
    torchrun train_dpo.py --loss reward                            a reward model
    torchrun train_dpo.py --task jsonl --data pairs.jsonl --init FOLDER --lr 5e-7 --precompute-ref
    torchrun train_dpo.py --task jsonl --data pairs.jsonl --init FOLDER --lr 1e-5 --lora-rank 16
"""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from time import perf_counter
from typing import Literal

import torch

from minirl.adapters import is_adapter, open_policy, save_policy, tokenizer_folder
from minirl.chat import turn_ends
from minirl.checkpoint import (
    FREE_TO_CHANGE,
    check_tokenizer,
    load_checkpoint,
    load_model,
    open_run,
    restore_rng,
    rng_tensors,
    save_checkpoint,
)
from minirl.config import UserError, check_not_negative, check_positive, run, save_config
from minirl.data.preferences import Preferences, mismatched, read_preferences, sample_pairs
from minirl.env import make_env
from minirl.env.loop import fit_to_context
from minirl.evaluate import evaluate, sample_text
from minirl.jinja_templates import chat_template
from minirl.logprobs import Output, rollout_logprobs
from minirl.lora import adapters_off
from minirl.losses import aggregate, loss_total, sft_loss
from minirl.metrics import MetricsLogger
from minirl.optim import SkipCounter, adamw, clip_gradients, lr_at
from minirl.options import AdapterOptions, LayoutOptions, RunOptions, check_shared, make_mesh, open_reference, prepare
from minirl.pairs import (
    answers,
    evaluate_kl,
    evaluate_pairs,
    microbatches,
    mismatch_kl,
    pair_loss,
    pair_metrics,
    rows_of,
    with_reference,
)
from minirl.parallel import StopSignal, close_mesh, forward_backward, pick_dtype
from minirl.preference_losses import preference_loss, preference_stats, resolve
from minirl.reward_model import reward_model_of, score_inputs
from minirl.rollout import Rollout
from minirl.tokenizer import load_tokenizer
from train_sft import cold_start


@dataclass(frozen=True)
class Config(LayoutOptions, AdapterOptions, RunOptions):
    # run
    run_dir: str = "runs/dpo"  # folder of config.json, metrics.jsonl, the pairs and the checkpoints
    save_every: int = 50  # steps between checkpoints
    # model
    init: str = ""  # folder of a checkpoint to start from; empty: a new small model, after a cold start
    cold_start_steps: int = 1000  # most SFT updates on the expert's actions before the pairs; only without --init
    cold_start_accuracy: float = 0.41  # the cold start ends early at this accuracy
    # pairs
    task: str = "addition"  # a task of train_grpo.py: pairs are sampled; jsonl: they are the rows of --data
    data: str = ""  # gsm8k: JSONL of {"question", "answer"}; jsonl: of prompt, chosen and rejected, or the last two
    eval_data: str = ""  # JSONL file of held-out rows; empty: a tenth of --data
    template: str = "auto"  # chat template of messages; auto: the model's own
    drop_long_rows: bool = False  # leave out problems or pairs that do not fit the model's context
    difficulty: int = 2  # digits of an operand
    problems: int = 8192  # problems that the first model answers
    eval_problems: int = 500  # held-out problems that it answers; and, greedily, the trained one
    samples: int = 8  # answers to each; the best and the worst are a pair
    pairs_per_problem: int = 1  # most pairs of a problem: the best answer with so many of the worst
    temperature: float = 1.0  # of these answers
    max_new_tokens: int = 0  # longest answer, all turns together; 0: the task's own
    max_rows: int = 4096  # rows decoded at once
    pairs: str = ""  # folder of pairs that another run has sampled (runs/dpo/pairs), in place of all that
    flip_labels: float = 0.0  # share of pairs whose two answers are exchanged, to see what a loss makes of it
    # objective
    loss: Literal["dpo", "cdpo", "robust", "ipo", "hinge", "simpo", "orpo", "cpo", "kto", "apo_zero", "apo_down", "exo",
                  "nca", "bco", "sppo", "reward"] = "dpo"  # a row of docs/preferences.md; reward: a reward model
    beta: float | None = 1.0  # strength of the preference; less for longer answers; none: the row's own
    label_smoothing: float | None = None  # share of pairs believed to be the wrong way round; none: the row's own
    gamma: float | None = None  # simpo: margin between the two answers; none: the row's own
    logprobs: Literal["auto", "sum", "mean"] = "auto"  # of an answer's tokens; auto: the row's own
    nll_coef: float | None = 1.0  # weight of the chosen answers' negative log-likelihood; 0 is DPO alone; none: the
                                  # row's own
    reference: Literal["start", "uniform"] = "start"  # the model before the first update, or all answers alike
    precompute_ref: bool = False  # ask the reference about all pairs once, then let its memory go
    centring: float = 0.01  # reward: keeps the mean score of a pair at 0
    margins: bool = False  # reward: a pair's scores must differ by as much as its rewards
    # optimisation
    steps: int = 0  # optimizer updates; 0: what --epochs make
    epochs: float = 8.0  # passes over the pairs
    batch_size: int = 64  # pairs an update, over all ranks
    microbatch_size: int = 64  # pairs a forward pass
    lr: float = 5e-4  # peak learning rate
    warmup_steps: int = 10  # updates of linear warm-up
    schedule: Literal["cosine", "linear", "constant"] = "cosine"  # after the warm-up
    weight_decay: float = 0.0  # pulls matrices to zero, decoupled from the gradient
    max_grad_norm: float = 1.0  # clip the gradient to this norm; 0: never
    # logging and evaluation
    log_every: int = 10  # steps between lines on the console; metrics.jsonl has every step
    eval_every: int = 50  # steps between evaluations; 0: only before and after

    def __post_init__(self):
        check_shared(self)
        check_positive(self, "problems", "pairs_per_problem", "temperature", "batch_size", "microbatch_size", "lr",
                       "max_rows", "log_every", "eval_problems", "cold_start_steps")
        check_not_negative(self, "steps", "epochs", "max_new_tokens", "warmup_steps", "weight_decay", "max_grad_norm",
                           "eval_every", "centring", "flip_labels")
        if not self.steps and not self.epochs:
            raise UserError("--steps and --epochs are both 0: say how long to train")
        if self.samples < 2:
            raise UserError(f"--samples {self.samples}: a pair is made of two answers, so take at least 2")
        if self.flip_labels > 1:
            raise UserError(f"--flip-labels is {self.flip_labels}: a share lies between 0 and 1")
        if self.task == "jsonl" and not self.init:
            raise UserError("--task jsonl compares answers of a model that can write: give its folder with --init")
        if self.loss != "reward":
            resolve(self.loss, self.beta, self.label_smoothing, self.gamma)
        elif self.lora_rank or self.qlora or is_adapter(self.init):
            raise UserError("--loss reward trains all weights of a reward model: leave --lora-rank and --qlora out, "
                            "and merge an adapter first (python -m minirl.merge)")
        if self.pairs and self.task == "jsonl":
            raise UserError(f"--pairs {self.pairs} and --task jsonl: pairs come from one of the two")


def main(config: Config) -> Path | None:
    """Train; the folder of the last checkpoint, or None when the run was stopped before its end."""
    # ---- setup
    mesh = make_mesh(config)
    dtype = pick_dtype(config.dtype, mesh.device)
    share = mesh.share(config.batch_size, "pairs of --batch-size")
    stop = StopSignal()
    scoring = config.loss == "reward"

    # ---- task
    env, max_new_tokens = None, config.max_new_tokens
    if config.task != "jsonl":
        env = make_env(config.task, config.data, config.eval_data, config.difficulty, config.seed)
        max_new_tokens = config.max_new_tokens or env.max_new_tokens

    # ---- policy
    start_folder = open_run(config, mesh, FREE_TO_CHANGE | {"epochs"})
    init = start_folder or config.init or cold_start(config, mesh.is_main)
    if init is None:
        return None  # stopped during the cold start, which --resume goes on with
    policy = open_policy(init, dtype, mesh.device, config.qlora)
    tokenizer = load_tokenizer(tokenizer_folder(init))
    check_tokenizer(tokenizer, policy.config.vocab_size)
    context = policy.config.context
    policy = prepare(policy, config, mesh, None if start_folder else init)
    if env:
        env = fit_to_context(env, tokenizer, context, config.drop_long_rows)

    # ---- pairs
    pairs_dir = Path(config.run_dir) / "pairs"
    if env is None:
        data = read_preferences(config.data, config.eval_data, tokenizer, config.template, config.seed)
        if data.template:
            tokenizer.chat_template = chat_template(data.template)  # written beside the model, for whoever talks to it,
            tokenizer.add_stops(turn_ends(tokenizer, data.template))  # with the end of a turn, where its answers stop
    elif start_folder is None and not config.pairs:
        ask = partial(sample_pairs, policy, tokenizer, env, samples=config.samples, most=config.pairs_per_problem,
                      mesh=mesh, max_new_tokens=max_new_tokens, temperature=config.temperature,
                      max_rows=config.max_rows, seed=config.seed)
        train, held_out = ask(split="train", problems=config.problems), ask(split="eval", problems=config.eval_problems)
        data = Preferences(train, held_out, tokenizer.pad_id, config.seed)
    else:
        data = Preferences.load(pairs_dir if start_folder else config.pairs, tokenizer.pad_id, config.seed)
    if config.margins and data.train.rewards is None:
        raise UserError(f"--margins needs a score of each answer, and {config.data} has none: add a column margin, or "
                        "score_chosen and score_rejected")
    everything = data.size()
    data = data.fit(context, config.drop_long_rows)
    if mesh.is_main:
        left_out = f", {everything - data.size()} more do not fit" if everything > data.size() else ""
        print(f"pairs: {data.size()} to learn, {len(data.held_out) // 2} held out{left_out}")

    # ---- what is trained: the policy, or its layers under the head of a reward model
    if scoring and start_folder is None:
        generator = torch.Generator().manual_seed(config.seed)
        policy = prepare(reward_model_of(load_model(init, dtype, mesh.device), generator), config, mesh, init)
    row, options = (None, None) if scoring else resolve(config.loss, config.beta, config.label_smoothing, config.gamma)
    if row and config.logprobs != "auto":
        row = row._replace(reduce=config.logprobs)
    nll_coef = config.nll_coef if config.nll_coef is not None else row.nll if row else 0.0
    if mesh.is_main:
        save_config(config, config.run_dir)
    if start_folder is None:  # step_0 is kept for good: it is the reference of a resumed run
        if env and mesh.is_main:
            data.save(pairs_dir)
        save_checkpoint(config.run_dir, 0, policy, tokenizer, {}, {"step": 0}, config.keep, 0, save_policy, mesh)
    data = data.flipped(config.flip_labels)

    # ---- frozen reference, and what it says about the pairs
    ref_policy, has_reference = None, row is not None and row.reference
    asks = has_reference and config.reference == "start"
    if asks and not config.lora_rank:  # with adapters the base is the reference: no second copy
        ref_policy = open_reference(Path(config.run_dir) / "step_0", dtype, config, mesh)

    def frozen():
        return nullcontext(ref_policy) if ref_policy else adapters_off(policy)

    others = None  # kto: answers to other questions
    if has_reference:
        with frozen() if asks else nullcontext() as reference:
            ask = partial(with_reference, reference, microbatch_size=2 * config.microbatch_size, mesh=mesh)
            data = data.replace(held_out=ask(data.held_out))
            if config.loss == "kto":
                others = ask(mismatched(data.train, tokenizer.pad_id, context))
            if config.precompute_ref or not asks:
                data = data.replace(train=ask(data.train))
    if config.precompute_ref:
        ref_policy, asks = None, asks and config.lora_rank > 0

    # ---- optimizer
    optimizer = adamw(policy, config.lr, weight_decay=config.weight_decay)
    guard = SkipCounter()
    steps = config.steps or ceil(round(config.epochs * data.size() / config.batch_size, 6))
    if mesh.is_main and config.warmup_steps >= steps:
        print(f"hint: --warmup-steps {config.warmup_steps}, but there are {steps} updates: --lr is never reached")

    # ---- resume
    start, shift = 0, 0.0  # of kto and bco, `preference_losses.Options`
    torch.manual_seed(config.seed)  # forget what the cold start drew: a run resumed at step_0 has not drawn it
    if start_folder and start_folder.name != "step_0":  # before the first update there is no state to restore
        tensors, state = load_checkpoint(start_folder, policy, mesh)
        optimizer.load_state_tensors(restore_rng(tensors))
        start, shift, guard = state["step"], state["shift"], SkipCounter(state["skipped"], state["skipped_in_a_row"])
    columns = ["loss", "preference_accuracy", "reward_margin", *(["reward_chosen"] if scoring else ["logprob_chosen"]),
               "grad_norm", "eval/preference_accuracy", *([] if scoring else ["eval/kl_ref", "eval/accuracy"])]
    logger = MetricsLogger(config.run_dir, columns, steps, start, mesh.is_main, config.log_every)

    def measure() -> dict[str, float]:
        metrics = evaluate_pairs(policy, data.held_out, row, options, mesh, config.microbatch_size)
        if env and not scoring:
            limits = dict(max_new_tokens=max_new_tokens, max_rows=config.max_rows)
            metrics |= evaluate(policy, tokenizer, env, config.eval_problems, mesh, **limits)
            if asks:
                metrics |= evaluate_kl(policy, frozen, tokenizer, env, config.eval_problems, mesh,
                                       2 * config.microbatch_size, seed=config.seed, **limits)
        return metrics

    if start == 0:
        logger.log(0, measure())

    # ---- loop
    last, stopping = start, False
    for step in range(start + 1, steps + 1):
        began = perf_counter()

        # (1) the next pairs
        numbers = data.numbers((step - 1) * config.batch_size + share.start, len(share))
        batch = data.train.rows(rows_of(numbers)).to(mesh.device)

        # (2) what the frozen reference says about them
        if has_reference and batch.ref_logprobs is None:
            with frozen() as reference:
                ref_logprobs = rollout_logprobs(reference, batch, 2 * config.microbatch_size, mesh=mesh)
            batch = batch.replace(ref_logprobs=ref_logprobs)
        if others is not None:
            shift = mismatch_kl(policy, others.rows(numbers).to(mesh.device), 2 * config.microbatch_size, mesh)

        # (3) gradients
        total = loss_total("sequence", batch.action_mask[0::2], mesh)
        total_tokens = loss_total("token", batch.action_mask[0::2], mesh)

        def preference_fn(out: Output, mb: Rollout, total=total, total_tokens=total_tokens, shift=shift):
            chosen, rejected = answers(out.logprobs, mb, row, mesh)
            ref = answers(mb.ref_logprobs, mb, row, mesh) if has_reference else (None, None)
            losses = preference_loss(config.loss, chosen, rejected, *ref, **options._replace(shift=shift)._asdict())
            loss = losses.sum() / total / mesh.cp  # all ranks of cp have the whole sums, and each a share of the loss
            if nll_coef:
                nll = aggregate(sft_loss(out.logprobs[0::2]), mb.action_mask[0::2], "token", total_tokens)
                loss = loss + nll_coef * nll
            return loss, preference_stats(chosen, rejected, *ref, options.beta) | {"rows_length": mb.lengths.sum()}

        rows, loss_fn = batch, preference_fn
        if scoring:
            rows = score_inputs(batch)
            loss_fn = partial(pair_loss, total=total, mesh=mesh, centring=config.centring, margins=config.margins)
        stats = forward_backward(policy, microbatches(rows, config.microbatch_size), loss_fn, mesh)
        if config.loss == "bco":  # a running mean over all updates so far, of both answers
            shift += ((stats["row_reward_chosen"] + stats["row_reward_rejected"]) / 2 / stats["rows"] - shift) / step

        # (4) update
        lr = lr_at(step - 1, steps, config.lr, config.warmup_steps, config.schedule)
        grad_norm = clip_gradients(policy.parameters(), config.max_grad_norm, mesh)
        guard.step(optimizer, grad_norm, lr, stats["loss"])
        optimizer.zero_grad()

        # (5) evaluate, log, save
        metrics = pair_metrics(stats) | {
            "loss": stats["loss"],
            "tokens": int(stats["rows_length"]),
            "grad_norm": grad_norm,
            "lr": lr,
            "skipped_steps": guard.skipped,
            "time/tokens_per_second": stats["rows_length"] / (perf_counter() - began),
        }
        if step == steps or (config.eval_every and step % config.eval_every == 0):
            metrics |= measure()
        last, stopping = step, stop.requested(mesh)
        logger.log(step, metrics)
        if stopping or step == steps or step % config.save_every == 0:
            tensors = optimizer.state_tensors() | rng_tensors()
            state = {"step": step, "shift": float(shift), "skipped": guard.skipped,
                     "skipped_in_a_row": guard.in_a_row}
            save_checkpoint(config.run_dir, step, policy, tokenizer, tensors, state, config.keep, 0, save_policy, mesh)
        if stopping:
            break

    stop.close()
    if stopping:
        return None
    if env and not scoring:
        text = sample_text(policy, tokenizer, env, max_new_tokens)
        if mesh.is_main:
            print("a held-out problem:", text)
    return Path(config.run_dir) / f"step_{last}"


if __name__ == "__main__":
    run(main, Config, description=__doc__)
    close_mesh()
