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

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from time import perf_counter

from minirl.adapters import is_adapter
from minirl.checkpoint import FREE_TO_CHANGE, open_run
from minirl.config import UserError, check_not_negative, check_positive, fill, run, save_config
from minirl.data.preferences import PairOptions, ask_reference, check_pairs, ready_pairs, sample_preferences
from minirl.env import Env, make_env
from minirl.env.loop import fit_to_context
from minirl.evaluate import evaluate, show_sample
from minirl.learner import Learner
from minirl.logprobs import rollout_logprobs
from minirl.losses import loss_total
from minirl.metrics import MetricsLogger
from minirl.model import Transformer
from minirl.optim import lr_at
from minirl.options import TrainerOptions, check_shared, make_mesh
from minirl.pairs import (
    evaluate_kl,
    evaluate_pairs,
    microbatches,
    mismatch_kl,
    pair_loss,
    pair_metrics,
    policy_pair_loss,
)
from minirl.parallel import Mesh, StopSignal, close_mesh, pick_dtype
from minirl.preference_losses import PreferenceOptions, objective
from minirl.reward_model import new_reward_model, pair_inputs
from minirl.rollout import Rollout
from minirl.start import open_reference, open_start, open_tokenizer, prepare
from minirl.tokenizer import Tokenizer
from train_sft import cold_start


@dataclass(frozen=True)
class Config(PreferenceOptions, PairOptions, TrainerOptions):
    # run
    run_dir: str = "runs/dpo"  # folder of config.json, metrics.jsonl, the pairs and the checkpoints
    save_every: int = 50  # steps between checkpoints
    # model
    cold_start_steps: int = 1000  # most SFT updates on the expert's actions before the pairs; only without --init
    cold_start_accuracy: float = 0.41  # the cold start ends early at this accuracy
    # optimisation
    steps: int = 0  # optimizer updates; 0: what --epochs make
    epochs: float | None = None  # passes over the pairs; none: 8, 4 for a reward model
    batch_size: int = 64  # pairs an update, over all ranks
    microbatch_size: int = 64  # pairs a forward pass
    lr: float = 5e-4  # peak learning rate
    # logging and evaluation
    log_every: int = 10  # steps between lines on the console; metrics.jsonl has every step
    eval_every: int = 50  # steps between evaluations; 0: only before and after

    def __post_init__(self):
        fill(self, dict(pairs_per_problem=4, epochs=4.0) if self.loss == "reward" else
             dict(pairs_per_problem=1, epochs=8.0))
        check_shared(self)
        check_pairs(self)
        objective(self)
        check_positive(self, "batch_size", "microbatch_size", "log_every", "cold_start_steps")
        check_not_negative(self, "steps", "epochs", "eval_every", "centring")
        if not self.steps and not self.epochs:
            raise UserError("--steps and --epochs are both 0: say how long to train")
        if self.task == "jsonl" and not self.init:
            raise UserError("--task jsonl compares answers of a model that can write: give its folder with --init")
        if self.loss == "reward" and (self.lora_rank or self.qlora or is_adapter(self.init)):
            raise UserError("--loss reward trains all weights of a reward model: leave --lora-rank and --qlora out, "
                            "and merge an adapter first (python -m minirl.merge)")


def main(config: Config) -> Path | None:
    """Train; the folder of the last checkpoint, or None when the run was stopped before its end."""
    # ---- setup
    mesh = make_mesh(config)
    dtype = pick_dtype(config.dtype, mesh.device)
    share = mesh.share(config.batch_size, "pairs of --batch-size")
    stop = StopSignal()
    scoring = config.loss == "reward"

    # ---- task
    env = None
    if config.task != "jsonl":
        env = make_env(config.task, config.data, config.eval_data, config.difficulty, config.seed)
    start_folder, run_dir = open_run(config, mesh, FREE_TO_CHANGE | {"epochs"}), Path(config.run_dir)
    tokenizer = open_tokenizer(start_folder or config.init)
    data = ready_pairs(config, start_folder, tokenizer)  # looked at here, since a cold start takes minutes

    # ---- policy, and whose layers a reward model has
    init, backbone = start_folders(config, start_folder, data is None, mesh.is_main)
    if init is None or backbone is None:
        return None  # stopped during a cold start, which --resume goes on with
    policy = open_start(init, tokenizer, dtype, config, mesh, scores=scoring and start_folder is not None)
    context = policy.config.context
    policy = prepare(policy, config, mesh, None if start_folder else init)
    if env:
        env = fit_to_context(env, tokenizer, context, config.drop_long_rows)

    # ---- pairs
    if data is None:
        data = sample_preferences(policy, tokenizer, env, config, config.seed, mesh)
    everything = data.size()
    data = data.fit(context, config.drop_long_rows)
    left_out = f", {everything - data.size()} more do not fit" if everything > data.size() else ""
    if mesh.is_main:
        print(f"pairs: {data.size()} to learn, {len(data.held_out) // 2} held out{left_out}")

    # ---- optimizer, of the policy, or of its layers under the head of a reward model
    if scoring and start_folder is None:
        policy = new_reward_model(backbone, dtype, config, mesh)
    learner = Learner(policy, mesh, config.lr, config.max_grad_norm, weight_decay=config.weight_decay)
    steps = config.steps or ceil(round(config.epochs * data.size() / config.batch_size, 6))
    if mesh.is_main and config.warmup_steps >= steps:
        print(f"hint: --warmup-steps {config.warmup_steps}, but there are {steps} updates: --lr is never reached")

    # ---- frozen reference, and what it says about the pairs
    if mesh.is_main:
        save_config(config, config.run_dir)
    if start_folder is None:  # step_0 is kept for good: it is the reference of a resumed run
        if env and mesh.is_main:
            data.save(run_dir / "pairs")
        learner.save(run_dir, 0, tokenizer, config.keep)
    data = data.flipped(config.flip_labels)
    row, others = objective(config)[0], None
    has_reference = row is not None and row.reference
    frozen = open_reference(config, policy, dtype, mesh) if has_reference and config.reference == "start" else None
    if has_reference:
        data, others = ask_reference(frozen, data, config, context, mesh)
    if config.precompute_ref and not config.lora_rank:
        frozen = None  # and its memory is free

    # ---- resume
    state = {"shift": 0.0} | learner.resume(start_folder, config.seed)
    start, shift = state["step"], state["shift"]  # the latter of kto and bco, `preference_losses.Options`
    columns = ["loss", "preference_accuracy", "reward_margin", *(["reward_chosen"] if scoring else ["logprob_chosen"]),
               "grad_norm", "eval/preference_accuracy", *([] if scoring else ["eval/kl_ref", "eval/accuracy"])]
    logger = MetricsLogger(config.run_dir, columns, steps, start, mesh.is_main, config.log_every)
    measure = partial(evaluate_policy, config, policy, tokenizer, data.held_out, env, frozen, mesh)
    if start == 0:
        logger.log(0, measure())

    # ---- loop
    last, stopping = start, False
    for step in range(start + 1, steps + 1):
        began = perf_counter()

        # (1) the next pairs
        numbers = data.numbers((step - 1) * config.batch_size + share.start, len(share))
        batch = data.batch(numbers).to(mesh.device)

        # (2) what the frozen reference says about them
        if frozen and batch.ref_logprobs is None:
            with frozen() as reference:
                ref_logprobs = rollout_logprobs(reference, batch, 2 * config.microbatch_size, mesh=mesh)
            batch = batch.replace(ref_logprobs=ref_logprobs)
        if others is not None:
            shift = mismatch_kl(policy, others.rows(numbers).to(mesh.device), 2 * config.microbatch_size, mesh)

        # (3) the gradient of the loss, clipped, and a step of AdamW
        total, total_tokens = (loss_total(mode, batch.action_mask[0::2], mesh) for mode in ("sequence", "token"))
        if scoring:
            batch = pair_inputs(batch, config.prefixes)
            loss_fn = partial(pair_loss, total=total, mesh=mesh, centring=config.centring, margins=config.margins)
        else:
            loss_fn = partial(policy_pair_loss, config=config, shift=shift, total=total, total_tokens=total_tokens,
                              mesh=mesh)
        lr = lr_at(step - 1, steps, config.lr, config.warmup_steps, config.schedule)
        stats = learner.update(loss_fn, microbatches(batch, config.microbatch_size), lr)
        if config.loss == "bco":  # a running mean over all updates so far, of both answers
            shift += ((stats["row_reward_chosen"] + stats["row_reward_rejected"]) / 2 / stats["rows"] - shift) / step

        # (4) evaluate, log, save
        metrics = pair_metrics(stats) | {
            "loss": stats["loss"],
            "tokens": int(stats["rows_length"]),
            "grad_norm": stats["grad_norm"],
            "lr": lr,
            "skipped_steps": learner.guard.skipped,
            "time/tokens_per_second": stats["rows_length"] / (perf_counter() - began),
        }
        if step == steps or (config.eval_every and step % config.eval_every == 0):
            metrics |= measure()
        last, stopping = step, stop.requested(mesh)
        logger.log(step, metrics)
        if stopping or step == steps or step % config.save_every == 0:
            learner.save(run_dir, step, tokenizer, config.keep, shift=float(shift))
        if stopping:
            break

    stop.close()
    if stopping:
        return None
    if env and not scoring:
        show_sample("a held-out problem:", policy, tokenizer, env, mesh, config.max_new_tokens)
    return run_dir / f"step_{last}"


def start_folders(config: Config, start_folder: Path | None, asks: bool,
                  is_main: bool) -> tuple[str | Path | None, str | Path | None]:
    """Folders of the model that answers, if `asks`, and of the one whose layers are trained; None: it was stopped.

    For a policy they are the same. A reward model without --init has layers of its own, of an expert: to check a sum is
    to make it, and then to compare. On the layers of the novice who answered, and is wrong about most, it learns the
    pairs by heart.
    """
    given = start_folder or config.init
    if given or config.loss != "reward" or not config.backbone_layers:
        return (given or cold_start(config, is_main),) * 2
    expert = cold_start(config, is_main, "backbone", layers=config.backbone_layers, schedule="cosine",
                        until_accuracy=0.99, eval_every=50)
    return cold_start(config, is_main) if expert and asks else expert, expert


def evaluate_policy(config: Config, policy: Transformer, tokenizer: Tokenizer, held_out: Rollout, env: Env | None,
                    frozen: Callable[[], AbstractContextManager[Transformer]] | None, mesh: Mesh) -> dict[str, float]:
    """Of held-out pairs; and of a policy with a task, the problems that it solves, with `frozen` how far it went."""
    row, options, _ = objective(config)
    metrics = evaluate_pairs(policy, held_out, row, options, mesh, config.microbatch_size)
    if env is None or row is None:
        return metrics
    limits = dict(max_new_tokens=config.max_new_tokens or env.max_new_tokens, max_rows=config.max_rows)
    metrics |= evaluate(policy, tokenizer, env, config.eval_problems, mesh, **limits)
    if frozen:
        metrics |= evaluate_kl(policy, frozen, tokenizer, env, config.eval_problems, mesh, 2 * config.microbatch_size,
                               seed=config.seed, **limits)
    return metrics


if __name__ == "__main__":
    run(main, Config, description=__doc__)
    close_mesh()
