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

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

from minirl.checkpoint import open_run
from minirl.config import UserError, run, save_config
from minirl.critic import add_value_head, check_folders, open_critic, save_actor_critic
from minirl.data.preferences import best_and_worst
from minirl.env import make_env
from minirl.env.loop import fit_to_context
from minirl.env.rounds import collect_step, replayed
from minirl.evaluate import critic_metrics, evaluate, rollout_metrics, show_sample, update_metrics
from minirl.gae import replica_mean
from minirl.kl_control import next_kl_coef
from minirl.learner import Learner
from minirl.logprobs import rollout_logprobs
from minirl.losses import kl_estimate, loss_total, prompt_tokens, right_tokens, row_sum
from minirl.metrics import MetricsLogger
from minirl.optim import lr_at
from minirl.options import RLOptions, TrainerOptions, check_rl, make_mesh
from minirl.pairs import pair_metrics, pair_update
from minirl.parallel import StopSignal, close_mesh, pick_dtype
from minirl.ppo import PPOOptions, critic_loss, fill_in, policy_loss, rewards_of_tokens, with_advantages
from minirl.reward_model import open_reward_model, score_rows
from minirl.start import open_reference, open_start, open_tokenizer, prepare
from train_sft import cold_start


@dataclass(frozen=True)
class Config(RLOptions, PPOOptions, TrainerOptions):
    # run
    run_dir: str = "runs/ppo"  # folder of config.json, metrics.jsonl, the checkpoints and those of the critic

    def __post_init__(self):
        fill_in(self)
        check_rl(self)
        if self.value_pretraining >= self.steps:
            raise UserError(f"--steps {self.steps} leaves the policy nothing behind {self.value_pretraining} rollouts "
                            "of value pretraining: give more, or a lower --value-pretraining")


def main(config: Config) -> Path | None:
    """Train; the folder of the last checkpoint, or None when the run was stopped before its end."""
    # ---- setup
    mesh = make_mesh(config)
    dtype = pick_dtype(config.dtype, mesh.device)
    mesh.share(config.prompts_per_step, "prompts of --prompts-per-step")  # a bad number is found before any work
    stop = StopSignal()

    # ---- task
    env = make_env(config.task, config.data, config.eval_data, config.difficulty, config.seed)
    max_new_tokens = config.max_new_tokens or env.max_new_tokens
    start_folder, run_dir = open_run(config, mesh), Path(config.run_dir)
    tokenizer = open_tokenizer(start_folder or config.init)
    replay = replayed(config.replay, tokenizer, mesh)
    if start_folder is None:
        check_folders(config, env, tokenizer)  # here, since a cold start takes minutes

    # ---- policy, critic and reward model
    init = start_folder or config.init or cold_start(config, mesh.is_main)
    if init is None:
        return None  # stopped during the cold start, which --resume goes on with
    policy = open_start(init, tokenizer, dtype, config, mesh)
    if config.advantage == "gae" and config.critic != "own":
        add_value_head(policy, config.critic == "detached", start_folder)
    policy = prepare(policy, config, mesh, None if start_folder else init)
    env = fit_to_context(env, tokenizer, policy.config.context, config.drop_long_rows)
    reward_model = open_reward_model(config, start_folder, tokenizer, dtype, mesh)
    critic = open_critic(config, policy, start_folder, init, tokenizer, dtype, mesh)

    # ---- optimizers
    learner = Learner(policy, mesh, config.lr, config.max_grad_norm, weight_decay=config.weight_decay)
    if critic not in (None, policy):
        learner.beside["critic"] = Learner(critic, mesh, config.critic_lr, config.max_grad_norm,
                                           weight_decay=config.weight_decay)
    if config.reward_model_every:
        learner.beside["reward_model"] = Learner(reward_model, mesh, config.reward_lr, config.max_grad_norm)

    # ---- frozen reference
    if mesh.is_main:
        save_config(config, config.run_dir)
    if start_folder is None:  # step_0 is kept for good: it is the reference of a resumed run
        learner.save(run_dir, 0, tokenizer, config.keep, write=save_actor_critic)
    frozen = open_reference(config, policy, dtype, mesh) if config.kl_coef > 0 else None

    # ---- resume
    state = {"kl_coef": config.kl_coef} | learner.resume(start_folder, config.seed)
    start, kl_coef = state["step"], state["kl_coef"]
    columns = ["reward_mean", *(["score_mean"] if config.reward_model else []),
               *(["explained_variance", "value_loss"] if critic is not None else []), "approx_kl", "clip_frac",
               "kl_ref", "entropy", "response_length", "truncated", "grad_norm", "eval/accuracy"]
    logger = MetricsLogger(config.run_dir, columns, config.steps, start, mesh.is_main)
    measure = partial(evaluate, policy, tokenizer, env, config.eval_problems, mesh, max_new_tokens, config.max_rows)
    if start == 0:
        show_sample("before:", policy, tokenizer, env, mesh, max_new_tokens)
        logger.log(0, measure())

    # ---- loop
    last, stopping = start, False
    for step in range(start + 1, config.steps + 1):
        began = perf_counter()
        pretraining = step <= config.value_pretraining

        # (1) rollout: every prompt is answered group_size times
        rollout = replay or collect_step(policy, tokenizer, env, step, config.prompts_per_step, config.group_size, 0,
                                         mesh, seed=config.seed, max_new_tokens=max_new_tokens,
                                         temperature=config.temperature, max_rows=config.max_rows)
        if config.save_rollouts and mesh.leads_replica:
            rollout.save(run_dir / "rollouts" / f"step_{step}" / f"rank_{mesh.dp_rank}.safetensors")
        sampled = perf_counter()

        # (2) rewards of tokens: the answer's score on the last, and on each what it costs to leave the reference
        scores, kl = rollout.rewards, None
        if reward_model is not None:  # the task looks on
            scores = score_rows(reward_model, rollout, config.microbatch_size, mesh)
        if config.kl_coef > 0:
            with frozen() as reference:
                ref_logprobs = rollout_logprobs(reference, rollout, config.microbatch_size, config.temperature, mesh)
            rollout = rollout.replace(ref_logprobs=ref_logprobs)
            kl = kl_estimate(rollout.old_logprobs, ref_logprobs, config.kl_kind)
        earned = rewards_of_tokens(config, rollout, scores, kl, kl_coef, mesh)

        # (3) advantages: what was earned from a token on, compared with what the critic expected there
        rollout = with_advantages(config, rollout, earned, critic, pretraining, mesh)

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
            if "critic" in learner.beside:
                loss_fn = partial(critic_loss, config=config, total=total)
                critic_updates.append(learner.beside["critic"].update(loss_fn, microbatches, critic_lr))
            if not pretraining:
                right = loss_total("token", right_tokens(mask, minibatch.rewards), mesh)
                loss_fn = partial(policy_loss, config=config, kl_coef=kl_coef, total=total, right_total=right)
                updates.append(learner.update(loss_fn, microbatches, lr, temperature=config.temperature, entropy=True,
                                              by_token=True))
                if config.target_kl and updates[-1]["approx_kl"] / updates[-1]["tokens"] > config.target_kl:
                    break

        # (5) the reward model learns, too: pairs of what the policy writes by now, judged by the task
        judged = {}
        if config.reward_model_every and step % config.reward_model_every == 0:
            judged = pair_update(learner.beside["reward_model"], best_and_worst(rollout), config.microbatch_size,
                                 config.reward_lr)

        # (6) evaluate, log, save
        seconds = perf_counter() - began
        metrics = rollout_metrics(rollout, mesh) | update_metrics(updates) | pair_metrics(judged) | {
            "lr": lr,
            "updates": len(updates),
            "skipped_steps": learner.skipped(),
            "time/rollout": sampled - began,
            "time/update": seconds - (sampled - began),
        }
        if critic is not None:
            metrics |= critic_metrics(critic_updates or updates, rollout, mesh)
        if reward_model is not None:
            metrics["score_mean"] = replica_mean(scores, mesh)
        if kl is not None:
            metrics["kl_coef"] = kl_coef
            distance = replica_mean(row_sum(kl, rollout.action_mask), mesh)  # nats a response
            kl_coef = next_kl_coef(config.kl_control, kl_coef, distance, config.kl_target)
        metrics["time/tokens_per_second"] = metrics["tokens"] / seconds
        if step == config.steps or (config.eval_every and step % config.eval_every == 0):
            metrics |= measure()
        last, stopping = step, stop.requested(mesh)
        logger.log(step, metrics)
        if stopping or step == config.steps or step % config.save_every == 0:
            learner.save(run_dir, step, tokenizer, config.keep, write=save_actor_critic, kl_coef=kl_coef)
        if stopping:
            break

    stop.close()
    show_sample("after:", policy, tokenizer, env, mesh, max_new_tokens)
    return None if stopping else run_dir / f"step_{last}"


if __name__ == "__main__":
    run(main, Config, description=__doc__)
    close_mesh()
