"""GRPO: reinforcement learning without a critic (DeepSeekMath, arXiv:2402.03300).

    1. the policy answers every prompt G times
    2. a verifier gives each answer a reward
    3. an answer's advantage is its reward relative to the other answers to the same prompt
    4. raise the probability of its tokens by the advantage, clipped where the policy has moved too far
    5. (optional) a KL term keeps the policy near the model it started from

Left out of the paper: the learned reward model (the task's verifier pays), process rewards, and replacing the
reference by the trained policy between rounds.

    torchrun train_grpo.py                                         two-digit addition from nothing, minutes on a laptop
    torchrun train_grpo.py --task calculator                       learns to call a tool
    torchrun train_grpo.py --recipe dapo                           another row of the table in minirl/recipes.py
    torchrun --nproc_per_node 2 train_grpo.py                      the same numbers on two ranks
    torchrun train_grpo.py --task gsm8k --data train.jsonl --init FOLDER --lr 1e-6
"""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Literal

import torch

from minirl.adapters import open_policy, save_policy, tokenizer_folder
from minirl.checkpoint import (
    check_tokenizer,
    load_checkpoint,
    open_run,
    restore_rng,
    rng_tensors,
    save_checkpoint,
)
from minirl.config import UserError, check_not_negative, check_positive, run, save_config
from minirl.env import make_env
from minirl.env.loop import fit_to_context
from minirl.env.rounds import collect_step, disturb
from minirl.evaluate import evaluate, rollout_metrics, sample_text, update_metrics
from minirl.logprobs import Output, rollout_logprobs
from minirl.lora import adapters_off
from minirl.losses import aggregate, loss_total, policy_stats, prompt_tokens
from minirl.metrics import MetricsLogger
from minirl.mixture import paid_by
from minirl.monitor import Monitor
from minirl.optim import SkipCounter, adamw, clip_gradients, lr_at
from minirl.options import (
    AdapterOptions,
    LayoutOptions,
    RunOptions,
    check_shared,
    make_mesh,
    open_reference,
    prepare,
)
from minirl.parallel import StopSignal, close_mesh, forward_backward, pick_dtype, share_of
from minirl.recipes import (
    RecipeOptions,
    by_token,
    fill_in,
    leave_out,
    look_again,
    make_advantages,
    recipe_loss,
    weigh,
)
from minirl.rollout import Rollout
from minirl.tokenizer import load_tokenizer
from train_sft import cold_start


@dataclass(frozen=True)
class Config(RecipeOptions, LayoutOptions, AdapterOptions, RunOptions):
    # run
    run_dir: str = "runs/grpo"  # folder of config.json, metrics.jsonl and the checkpoints
    save_rollouts: bool = False  # write every rollout to run_dir/rollouts
    replay: str = ""  # train on this saved rollout instead of sampling
    # model
    init: str = ""  # folder of a checkpoint to start from; empty: a new small model, after a cold start
    cold_start_steps: int = 1000  # most SFT updates on the expert's actions before RL; only without --init
    cold_start_accuracy: float = 0.41  # the cold start ends early at this accuracy
    # task
    task: str = "addition"  # addition, calculator, lookup, shop, countdown, code, walk or gsm8k
    rewards: Literal["task", "agentic", "maths"] = "task"  # what is paid: the task's verdict, or a mixture with it
    data: str = ""  # gsm8k: JSONL file of {"question", "answer"}
    eval_data: str = ""  # gsm8k: JSONL file of held-out problems; empty: a tenth of --data
    drop_long_rows: bool = False  # gsm8k: leave out problems that do not fit the model's context
    difficulty: int = 2  # digits of an operand; hops of lookup, items of shop, numbers of countdown, steps of code
    # rollout
    prompts_per_step: int = 128  # prompts a step, over all ranks
    group_size: int = 16  # answers to each prompt
    max_new_tokens: int = 0  # longest answer, all turns together; 0: the task's own
    temperature: float = 1.0  # of sampling, and of every log-probability in training
    max_rows: int = 4096  # rows decoded at once
    staleness: int = 0  # train on rollouts that the policy wrote so many steps ago; the first ones come from the start
    sampler_noise: float = 0.0  # nats by which the log-probs written down while sampling are wrong, to see what it does
    # optimisation
    steps: int = 300  # rollouts
    epochs: int = 1  # passes over each rollout
    minibatches: int = 4  # optimizer updates a pass
    microbatch_size: int = 512  # rows a forward pass
    lr: float = 1e-3  # peak learning rate
    warmup_steps: int = 10  # rollouts of linear warm-up
    schedule: Literal["cosine", "linear", "constant"] = "cosine"  # after the warm-up
    weight_decay: float = 0.0  # pulls matrices to zero, decoupled from the gradient
    max_grad_norm: float = 1.0  # clip the gradient to this norm; 0: never
    # evaluation
    eval_every: int = 20  # steps between evaluations; 0: only before and after
    eval_problems: int = 500  # held-out problems, answered greedily

    def __post_init__(self):
        fill_in(self)
        check_shared(self)
        check_positive(self, "prompts_per_step", "temperature", "steps", "epochs", "minibatches", "microbatch_size",
                       "max_rows", "lr", "eval_problems", "cold_start_steps")
        check_not_negative(self, "max_new_tokens", "warmup_steps", "weight_decay", "max_grad_norm", "eval_every",
                           "staleness", "sampler_noise")
        if self.group_size < 2:
            raise UserError(f"--group-size {self.group_size}: an answer is judged against the others to its prompt, "
                            "so a group needs at least 2")
        if self.prompts_per_step * self.group_size % self.minibatches:
            raise UserError(f"--minibatches {self.minibatches} does not divide the {self.prompts_per_step} x "
                            f"{self.group_size} rows of a rollout")


def main(config: Config) -> None:
    # ---- setup
    mesh = make_mesh(config)
    dtype = pick_dtype(config.dtype, mesh.device)
    mesh.share(config.prompts_per_step, "prompts of --prompts-per-step")  # a bad number is found before any work
    stop = StopSignal()

    # ---- task
    env = make_env(config.task, config.data, config.eval_data, config.difficulty, config.seed)
    max_new_tokens = config.max_new_tokens or env.max_new_tokens
    replayed = share_of(Rollout.load(config.replay), mesh).to(mesh.device) if config.replay else None

    # ---- policy and frozen reference
    start_folder = open_run(config, mesh)
    init = start_folder or config.init or cold_start(config, mesh.is_main)
    if init is None:
        return  # stopped during the cold start, which --resume goes on with
    tokenizer = load_tokenizer(tokenizer_folder(init))
    policy = open_policy(init, dtype, mesh.device, config.qlora)
    first_token = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
    check_tokenizer(tokenizer, policy.config.vocab_size)
    policy = prepare(policy, config, mesh, None if start_folder else init)
    env = fit_to_context(env, tokenizer, policy.config.context, config.drop_long_rows)
    if mesh.is_main:
        save_config(config, config.run_dir)
    if start_folder is None:  # step_0 is kept for good: it is the reference of a resumed run
        save_checkpoint(config.run_dir, 0, policy, tokenizer, {}, {"step": 0}, config.keep, 0, save_policy, mesh)
    ref_policy = None
    if config.kl_coef > 0 and not config.lora_rank:  # with adapters the base is the reference: no second copy
        ref_policy = open_reference(Path(config.run_dir) / "step_0", dtype, config, mesh)

    # ---- optimizer
    optimizer = adamw(policy, config.lr, weight_decay=config.weight_decay)
    guard = SkipCounter()

    # ---- resume
    start = 0
    torch.manual_seed(config.seed)  # forget what the cold start drew: a run resumed at step_0 has not drawn it
    if start_folder and start_folder.name != "step_0":  # before the first update there is no state to restore
        tensors, state = load_checkpoint(start_folder, policy, mesh)
        optimizer.load_state_tensors(restore_rng(tensors))
        start, guard = state["step"], SkipCounter(state["skipped"], state["skipped_in_a_row"])
    columns = ["reward_mean", "reward_std", "zero_variance_groups", "approx_kl", "clip_frac", "kl_ref", "entropy",
               "response_length", "grad_norm", "eval/accuracy"]
    rollouts, ahead = Path(config.run_dir) / "rollouts", []  # sampled and not yet trained on, with --staleness
    for number in range(start + 1, start + 1 + config.staleness if start else 0):
        ahead.append(share_of(Rollout.load(rollouts / f"step_{number}"), mesh).to(mesh.device))
    logger = MetricsLogger(config.run_dir, columns, config.steps, start, mesh.is_main)
    monitor = Monitor(config.run_dir)
    if start == 0:
        text = sample_text(policy, tokenizer, env, max_new_tokens)
        if mesh.is_main:
            print("before:", text)
        logger.log(0, evaluate(policy, tokenizer, env, config.eval_problems, mesh, max_new_tokens, config.max_rows))

    # ---- loop
    for step in range(start + 1, config.steps + 1):
        began = perf_counter()

        # (1) rollout: every prompt is answered group_size times; with --staleness, for a later step
        while len(ahead) <= config.staleness:
            number = step + len(ahead)
            paid = paid_by(env, config.rewards, (number - 1) / config.steps)
            sampled = replayed or collect_step(
                policy, tokenizer, paid, number, config.prompts_per_step, config.group_size, config.resample, mesh,
                seed=config.seed, max_new_tokens=max_new_tokens, temperature=config.temperature,
                max_rows=config.max_rows)
            ahead.append(disturb(sampled, config.sampler_noise, config.seed) if config.sampler_noise else sampled)
            if (config.save_rollouts or config.staleness) and mesh.leads_replica:
                ahead[-1].save(rollouts / f"step_{number}" / f"rank_{mesh.dp_rank}.safetensors")
        rollout, ahead = ahead[0], ahead[1:]
        if mesh.is_main:
            monitor.add(step, rollout)
        sampling_ended = perf_counter()

        # (2) advantages: better or worse than the other answers to the same prompt?
        rollout = look_again(policy, rollout, config, first_token, config.microbatch_size, config.temperature, mesh)
        rollout = rollout.replace(advantages=make_advantages(rollout, config, max_new_tokens, mesh))

        # (3) log-probs under the frozen reference
        if config.kl_coef > 0:
            with nullcontext(ref_policy) if ref_policy else adapters_off(policy) as reference:
                ref_logprobs = rollout_logprobs(reference, rollout, config.microbatch_size, config.temperature, mesh)
            rollout = rollout.replace(ref_logprobs=ref_logprobs)
        if config.save_rollouts and mesh.leads_replica:  # beside the one to replay: for minirl.view
            rollout.replace(turns=[]).save(rollouts / f"step_{step}" / "scored" / f"rank_{mesh.dp_rank}.safetensors")

        # (4) policy updates
        updates = []
        for minibatch in leave_out(rollout, config).minibatches(config.minibatches, config.epochs):
            mode, mask = config.aggregate, minibatch.action_mask
            minibatch = weigh(minibatch, config, config.seed, mesh).replace(
                prompt_tokens=prompt_tokens(mask, minibatch.group))
            total = loss_total(mode, mask, mesh, minibatch.group, config.constant_length or max_new_tokens)

            def loss_fn(out: Output, mb: Rollout, mode=mode, total=total):
                per_token, clipped = recipe_loss(out.logprobs, mb, config, mesh.cp_group)
                loss = aggregate(per_token, mb.action_mask, mode, total, mb.prompt_tokens, mb.row_tokens)
                return loss, policy_stats(out.logprobs, mb.old_logprobs, mb.ref_logprobs, out.entropy, mb.advantages,
                                          mb.action_mask, config.eps_low, config.eps_high, clipped)

            stats = forward_backward(policy, minibatch.microbatches(config.microbatch_size), loss_fn, mesh,
                                     config.temperature, entropy=True, by_token=by_token(config))
            lr = lr_at(step - 1, config.steps, config.lr, config.warmup_steps, config.schedule)
            grad_norm = clip_gradients(policy.parameters(), config.max_grad_norm, mesh)
            guard.step(optimizer, grad_norm, lr, stats["loss"])
            optimizer.zero_grad()
            updates.append(stats | {"grad_norm": float(grad_norm)})

        # (5) evaluate, log, save
        seconds = perf_counter() - began
        metrics = rollout_metrics(rollout, mesh) | update_metrics(updates) | {
            "lr": lr,
            "skipped_steps": guard.skipped,
            "time/rollout": sampling_ended - began,
            "time/update": seconds - (sampling_ended - began),
        }
        metrics["time/tokens_per_second"] = metrics["tokens"] / seconds
        if step == config.steps or (config.eval_every and step % config.eval_every == 0):
            metrics |= evaluate(policy, tokenizer, env, config.eval_problems, mesh, max_new_tokens, config.max_rows)
        stopping = stop.requested(mesh)
        logger.log(step, metrics)
        if stopping or step == config.steps or step % config.save_every == 0:
            tensors = optimizer.state_tensors() | rng_tensors()
            state = {"step": step, "skipped": guard.skipped, "skipped_in_a_row": guard.in_a_row}
            save_checkpoint(config.run_dir, step, policy, tokenizer, tensors, state, config.keep, 0, save_policy, mesh)
        if stopping:
            break

    stop.close()
    text = sample_text(policy, tokenizer, env, max_new_tokens)
    if mesh.is_main:
        print("after:", text)


if __name__ == "__main__":
    run(main, Config, description=__doc__)
    close_mesh()
