"""PPO: a critic says what an answer was expected to earn, token by token (arXiv:1707.06347, 2203.02155).

    1. the policy answers every prompt
    2. an answer is scored, by the task's verifier or a reward model, and pays for its distance from the reference
    3. the critic has a value for every state on the way; GAE makes advantages of values and rewards
    4. raise the probability of tokens that went better than expected, clipped where the policy has moved too far
    5. teach the critic what was earned

Left out of the papers: several environments stepped in parallel, the pretraining mix of InstructGPT, a learning rate
that follows the KL.

    torchrun train_ppo.py                                          two-digit addition from nothing, minutes on a laptop
    torchrun train_ppo.py --advantage reinforce                    without a critic; or --advantage baseline
    torchrun train_ppo.py --vapo                                   VAPO, arXiv:2504.05118
    torchrun train_ppo.py --critic joint                           one network with two heads
    torchrun train_ppo.py --init FOLDER --reward-model FOLDER --kl-coef 0.05
"""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
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
from minirl.critic import add_value_head, open_critic, save_actor_critic, state_values
from minirl.data.preferences import best_and_worst
from minirl.env import make_env
from minirl.env.loop import collect, fit_to_context
from minirl.evaluate import critic_metrics, evaluate, rollout_metrics, sample_text, update_metrics
from minirl.gae import (
    explained_variance,
    gae,
    length_adaptive_lambda,
    replica_mean,
    reward_to_go,
    token_rewards,
    whiten,
)
from minirl.kl_control import next_kl_coef
from minirl.logprobs import rollout_logprobs
from minirl.lora import adapters_off
from minirl.losses import kl_estimate, loss_total, prompt_tokens, right_tokens, row_sum
from minirl.metrics import MetricsLogger
from minirl.optim import Learner, clip_gradients, learner, lr_at
from minirl.options import (
    AdapterOptions,
    LayoutOptions,
    RunOptions,
    check_shared,
    make_mesh,
    open_reference,
    prepare,
    spread,
)
from minirl.pairs import microbatches as pair_microbatches
from minirl.pairs import pair_loss, pair_metrics
from minirl.parallel import StopSignal, close_mesh, forward_backward, pick_dtype, share_of
from minirl.ppo import PPOOptions, critic_loss, fill_in, policy_loss
from minirl.reward_model import load_reward_model, score_inputs, score_rows
from minirl.rewards import missing_eos_penalty
from minirl.rollout import Rollout
from minirl.tokenizer import load_tokenizer
from train_sft import cold_start


@dataclass(frozen=True)
class Config(PPOOptions, LayoutOptions, AdapterOptions, RunOptions):
    # run
    run_dir: str = "runs/ppo"  # folder of config.json, metrics.jsonl, the checkpoints and those of the critic
    save_rollouts: bool = False  # write every rollout to run_dir/rollouts
    replay: str = ""  # train on this saved rollout instead of sampling
    # model
    init: str = ""  # folder of a checkpoint to start from; empty: a new small model, after a cold start
    cold_start_steps: int = 1000  # most SFT updates on the expert's actions before RL; only without --init
    cold_start_accuracy: float = 0.41  # the cold start ends early at this accuracy
    # task
    task: str = "addition"  # a task of train_grpo.py
    data: str = ""  # gsm8k: JSONL file of {"question", "answer"}
    eval_data: str = ""  # gsm8k: JSONL file of held-out problems; empty: a tenth of --data
    drop_long_rows: bool = False  # gsm8k: leave out problems that do not fit the model's context
    difficulty: int = 2  # digits of an operand
    # rollout
    max_new_tokens: int = 0  # longest answer, all turns together; 0: the task's own
    temperature: float = 1.0  # of sampling, and of every log-probability in training
    max_rows: int = 4096  # rows decoded at once
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
        check_positive(self, "temperature", "steps", "epochs", "minibatches", "microbatch_size", "max_rows", "lr",
                       "eval_problems", "cold_start_steps")
        check_not_negative(self, "max_new_tokens", "warmup_steps", "weight_decay", "max_grad_norm", "eval_every")
        if self.value_pretraining >= self.steps:
            raise UserError(f"--value-pretraining {self.value_pretraining} leaves nothing of --steps {self.steps} to "
                            "the policy: give it more steps")
        if self.prompts_per_step * self.group_size % self.minibatches:
            raise UserError(f"--minibatches {self.minibatches} does not divide the {self.prompts_per_step} x "
                            f"{self.group_size} rows of a rollout")


def main(config: Config) -> None:
    # ---- setup
    mesh = make_mesh(config)
    dtype = pick_dtype(config.dtype, mesh.device)
    share = mesh.share(config.prompts_per_step, "prompts of --prompts-per-step")
    stop = StopSignal()

    # ---- task
    env = make_env(config.task, config.data, config.eval_data, config.difficulty, config.seed)
    max_new_tokens = config.max_new_tokens or env.max_new_tokens
    replayed = share_of(Rollout.load(config.replay), mesh).to(mesh.device) if config.replay else None

    # ---- policy, critic, reward model and frozen reference
    start_folder, run_dir = open_run(config, mesh), Path(config.run_dir)
    init = start_folder or config.init or cold_start(config, mesh.is_main)
    if init is None:
        return  # stopped during the cold start, which --resume goes on with
    tokenizer = load_tokenizer(tokenizer_folder(init))
    policy = open_policy(init, dtype, mesh.device, config.qlora)
    check_tokenizer(tokenizer, policy.config.vocab_size)
    has_critic = config.advantage == "gae"
    own_critic = has_critic and config.critic == "own"
    if has_critic and not own_critic:
        add_value_head(policy, config.critic == "detached", start_folder)
    policy = prepare(policy, config, mesh, None if start_folder else init)
    env = fit_to_context(env, tokenizer, policy.config.context, config.drop_long_rows)
    reward_model = None
    if config.reward_model:
        of_run = start_folder and config.reward_model_every  # one that learns is part of the run
        source = run_dir / "reward_model" / start_folder.name if of_run else config.reward_model
        reward_model = load_reward_model(source, tokenizer, dtype, mesh.device)
        reward_model = spread(reward_model.requires_grad_(config.reward_model_every > 0), config, mesh, config.zero)
    critic = policy
    if own_critic:
        saved = run_dir / "critic" / start_folder.name if start_folder else None
        critic = open_critic(config, saved, init, tokenizer, dtype, mesh)
    if mesh.is_main:
        save_config(config, config.run_dir)

    # ---- optimizers
    actor, kl_coef = learner(policy, config.lr, weight_decay=config.weight_decay), config.kl_coef
    beside = {}  # what learns beside the policy, by the name of the folder of its checkpoints
    if own_critic:
        beside["critic"] = learner(critic, config.critic_lr, weight_decay=config.weight_decay)
    if config.reward_model_every:
        beside["reward_model"] = learner(reward_model, config.reward_lr)

    def save(step: int) -> None:
        """The policy last, and one less of it: whatever its newest checkpoint is, those of the others are there."""
        for name, other in beside.items():
            tensors = other.optimizer.state_tensors() if step else {}
            save_checkpoint(run_dir / name, step, other.model, tokenizer, tensors, other.state(), config.keep + 1, 0,
                            save_policy, mesh)
        tensors = actor.optimizer.state_tensors() | rng_tensors() if step else {}
        state = {"step": step, "kl_coef": kl_coef} | actor.state()
        save_checkpoint(run_dir, step, policy, tokenizer, tensors, state, config.keep, 0,
                        save_actor_critic if policy.value_head else save_policy, mesh)

    if start_folder is None:  # step_0 is kept for good: it is the reference of a resumed run
        save(0)
    ref_policy = None
    if config.kl_coef > 0 and not config.lora_rank:  # with adapters the base is the reference: no second copy
        ref_policy = open_reference(run_dir / "step_0", dtype, config, mesh)

    # ---- resume
    start = 0
    torch.manual_seed(config.seed)  # forget what the cold start drew: a run resumed at step_0 has not drawn it
    if start_folder and start_folder.name != "step_0":  # before the first update there is no state to restore
        tensors, state = load_checkpoint(start_folder, policy, mesh)
        actor.load(restore_rng(tensors), state)
        start, kl_coef = state["step"], state["kl_coef"]
        for name, other in beside.items():
            other.load(*load_checkpoint(run_dir / name / start_folder.name, other.model, mesh))
    columns = ["reward_mean", *(["score_mean"] if config.reward_model else []),
               *(["explained_variance", "value_loss"] if has_critic else []), "approx_kl", "clip_frac", "kl_ref",
               "entropy", "response_length", "truncated", "grad_norm", "eval/accuracy"]
    logger = MetricsLogger(config.run_dir, columns, config.steps, start, mesh.is_main)
    if start == 0:
        text = sample_text(policy, tokenizer, env, max_new_tokens)
        if mesh.is_main:
            print("before:", text)
        logger.log(0, evaluate(policy, tokenizer, env, config.eval_problems, mesh, max_new_tokens, config.max_rows))

    def update(learner: Learner, loss_fn, microbatches, lr: float) -> dict[str, float]:
        """One step of its optimizer; the stats."""
        stats = forward_backward(learner.model, microbatches, loss_fn, mesh, config.temperature,
                                 entropy=learner is actor, by_token=learner is actor)
        grad_norm = clip_gradients(learner.model.parameters(), config.max_grad_norm, mesh)
        learner.guard.step(learner.optimizer, grad_norm, lr, stats["loss"])
        learner.optimizer.zero_grad()
        return stats | {"grad_norm": float(grad_norm)}

    # ---- loop
    for step in range(start + 1, config.steps + 1):
        began = perf_counter()
        pretraining = step <= config.value_pretraining

        # (1) rollout: every prompt is answered group_size times
        if replayed is not None:
            rollout = replayed
        else:
            first = (step - 1) * config.prompts_per_step + share.start
            examples = env.sample(len(share), start=first)
            rollout = collect(policy, tokenizer, env, examples, config.group_size, first, mesh, seed=config.seed,
                              max_new_tokens=max_new_tokens, temperature=config.temperature, max_rows=config.max_rows)
        if config.save_rollouts and mesh.leads_replica:
            rollout.save(run_dir / "rollouts" / f"step_{step}" / f"rank_{mesh.dp_rank}.safetensors")
        sampled, mask = perf_counter(), rollout.action_mask

        # (2) rewards of tokens: the answer's score on the last, and on each what it costs to leave the reference
        scores, kl = rollout.rewards, None
        if reward_model is not None:
            scores = score_rows(reward_model, rollout, config.microbatch_size, mesh)
        paid = missing_eos_penalty(scores, rollout.finished, config.missing_eos_penalty)
        if config.kl_coef > 0:
            with nullcontext(ref_policy) if ref_policy else adapters_off(policy) as reference:
                ref_logprobs = rollout_logprobs(reference, rollout, config.microbatch_size, config.temperature, mesh)
            rollout = rollout.replace(ref_logprobs=ref_logprobs)
            kl = kl_estimate(rollout.old_logprobs, ref_logprobs, config.kl_kind)
        earned = token_rewards(paid, mask, kl if config.kl == "reward" else None, kl_coef)
        if config.whiten_rewards:
            earned = whiten(earned, mask, mesh, shift_mean=False)

        # (3) advantages: what was earned from a token on, compared with what the critic expected there
        if has_critic:
            values, bootstrap = state_values(critic, rollout, config.microbatch_size, mesh)
            bootstrap = bootstrap if config.bootstrap_cut else None
            lam = length_adaptive_lambda(mask.sum(1), config.lam_alpha) if config.lam_alpha else config.lam
            value_lam = 1.0 if pretraining else config.value_lam
            advantages, _ = gae(earned, values, mask, config.gamma, lam, bootstrap)
            _, returns = gae(earned, values, mask, config.gamma, value_lam, bootstrap)
            rollout = rollout.replace(values=values, returns=returns)
        else:
            advantages = reward_to_go(earned, mask, config.gamma)
        if config.whiten:
            advantages = whiten(advantages, mask, mesh, shift_mean=config.advantage != "reinforce")
        rollout = rollout.replace(advantages=advantages)

        # (4) updates of critic and policy
        updates, critic_updates = [], []
        before = config.value_pretraining  # the policy's warm-up begins behind it: Adam's first steps are its largest
        lr = lr_at(max(0, step - 1 - before), config.steps - before, config.lr, config.warmup_steps, config.schedule)
        critic_lr = lr_at(step - 1, config.steps, config.critic_lr, config.warmup_steps, config.schedule)
        for minibatch in rollout.minibatches(config.minibatches, config.epochs):
            mode, mask = config.aggregate, minibatch.action_mask
            minibatch = minibatch.replace(prompt_tokens=prompt_tokens(mask, minibatch.group))
            total = loss_total(mode, mask, mesh, minibatch.group, max_new_tokens)
            microbatches = list(minibatch.microbatches(config.microbatch_size))
            if own_critic:
                loss_fn = partial(critic_loss, config=config, total=total)
                critic_updates.append(update(beside["critic"], loss_fn, microbatches, critic_lr))
            if not pretraining:
                right = loss_total("token", right_tokens(mask, minibatch.rewards), mesh)
                loss_fn = partial(policy_loss, config=config, kl_coef=kl_coef, total=total, right_total=right)
                updates.append(update(actor, loss_fn, microbatches, lr))
                if config.target_kl and updates[-1]["approx_kl"] / updates[-1]["tokens"] > config.target_kl:
                    break

        # (5) the reward model learns, too: pairs of what the policy writes by now, judged by the task
        pair_stats = None
        if config.reward_model_every and step % config.reward_model_every == 0:
            pairs = best_and_worst(rollout)
            total = loss_total("sequence", pairs.action_mask[0::2], mesh)
            if total:  # else all answers to each prompt were equally good
                pieces = list(pair_microbatches(score_inputs(pairs), config.microbatch_size))
                pair_stats = update(beside["reward_model"], partial(pair_loss, total=total, mesh=mesh), pieces,
                                    config.reward_lr)

        # (6) evaluate, log, save
        seconds = perf_counter() - began
        metrics = rollout_metrics(rollout, mesh) | {
            "lr": lr,
            "updates": len(updates),
            "skipped_steps": sum(learner.guard.skipped for learner in (actor, *beside.values())),
            "time/rollout": sampled - began,
            "time/update": seconds - (sampled - began),
        }
        if updates:
            metrics |= update_metrics(updates)
        if has_critic:
            metrics |= critic_metrics(critic_updates or updates)
            metrics["explained_variance"] = explained_variance(values, returns, rollout.action_mask, mesh)
        if reward_model is not None:
            metrics["score_mean"] = replica_mean(scores, mesh)
        if pair_stats:
            metrics |= pair_metrics(pair_stats)
        if kl is not None:
            metrics["kl_coef"] = kl_coef
            distance = replica_mean(row_sum(kl, rollout.action_mask), mesh)  # nats a response
            kl_coef = next_kl_coef(config.kl_control, kl_coef, distance, config.kl_target)
        metrics["time/tokens_per_second"] = metrics["tokens"] / seconds
        if step == config.steps or (config.eval_every and step % config.eval_every == 0):
            metrics |= evaluate(policy, tokenizer, env, config.eval_problems, mesh, max_new_tokens, config.max_rows)
        stopping = stop.requested(mesh)
        logger.log(step, metrics)
        if stopping or step == config.steps or step % config.save_every == 0:
            save(step)
        if stopping:
            break

    stop.close()
    text = sample_text(policy, tokenizer, env, max_new_tokens)
    if mesh.is_main:
        print("after:", text)


if __name__ == "__main__":
    run(main, Config, description=__doc__)
    close_mesh()
