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

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Literal

from minirl.checkpoint import open_run
from minirl.config import UserError, check_not_negative, run, save_config
from minirl.env import fill_sizes
from minirl.env.loop import fit_to_context
from minirl.env.posing import pose
from minirl.env.rounds import Collector, replayed
from minirl.evaluate import evaluate, rollout_metrics, show_sample, update_metrics
from minirl.learner import Learner
from minirl.logprobs import Output, rollout_logprobs
from minirl.losses import aggregate, loss_total, policy_stats, prompt_tokens
from minirl.metrics import MetricsLogger
from minirl.monitor import Monitor
from minirl.objective import by_token, leave_out, look_again, make_advantages, recipe_loss, weigh
from minirl.optim import lr_at
from minirl.options import RLOptions, TrainerOptions, check_rl, make_mesh
from minirl.parallel import StopSignal, close_mesh, pick_dtype
from minirl.recipes import RecipeOptions, fill_in
from minirl.rollout import Rollout
from minirl.start import open_reference, open_start, open_tokenizer, prepare
from train_sft import cold_start


@dataclass(frozen=True)
class Config(RLOptions, RecipeOptions, TrainerOptions):
    # run
    run_dir: str = "runs/grpo"  # folder of config.json, metrics.jsonl and the checkpoints
    # model
    cold_start_steps: int | None = None  # most SFT updates on an expert before RL, without --init; none: the task's own
    cold_start_accuracy: float | None = None  # the cold start ends early at this accuracy; none: the task's own
    # task
    rewards: Literal["task", "agentic", "maths", "r1"] = "task"  # what is paid: the task's verdict, or a mixture
    curriculum: int = 0  # problems of difficulty 1, then as many of 2, .. up to --difficulty; 0: all of that at once
    # rollout
    prompts_per_step: int | None = None  # prompts a step, over all ranks; none: the task's own
    group_size: int = 16  # answers to each prompt
    staleness: int = 0  # train on rollouts that the policy wrote so many steps ago; the first ones come from the start
    sampler_noise: float = 0.0  # nats by which the log-probs written down while sampling are wrong, to see what it does
    # optimisation
    steps: int | None = None  # rollouts; none: the task's own
    microbatch_size: int | None = None  # rows a forward pass; none: the task's own
    # evaluation
    eval_problems: int | None = None  # held-out problems, answered greedily; none: the task's own

    def __post_init__(self):
        fill_in(self)
        fill_sizes(self)
        check_rl(self)
        check_not_negative(self, "staleness", "sampler_noise", "curriculum")
        if self.group_size < 2:
            raise UserError(f"--group-size {self.group_size}: an answer is judged against the others to its prompt, "
                            "so a group needs at least 2")


def main(config: Config) -> Path | None:
    """Train; the folder of the last checkpoint, or None when the run was stopped before its end."""
    # ---- setup
    mesh = make_mesh(config)
    dtype = pick_dtype(config.dtype, mesh.device)
    mesh.share(config.prompts_per_step, "prompts of --prompts-per-step")  # a bad number is found before any work
    stop = StopSignal()

    # ---- task
    env = pose(config)
    max_new_tokens = config.max_new_tokens or env.max_new_tokens
    start_folder = open_run(config, mesh)
    tokenizer = open_tokenizer(start_folder or config.init)
    replay = replayed(config.replay, tokenizer, mesh)

    # ---- policy
    init = start_folder or config.init or cold_start(config, mesh.is_main)
    if init is None:
        return None  # stopped during the cold start, which --resume goes on with
    policy = open_start(init, tokenizer, dtype, config, mesh)
    policy = prepare(policy, config, mesh, None if start_folder else init)
    env = fit_to_context(env, tokenizer, policy.config.context, config.drop_long_rows)
    first_token = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id

    # ---- optimizer
    learner = Learner(policy, mesh, config.lr, config.max_grad_norm, weight_decay=config.weight_decay)

    # ---- frozen reference
    if mesh.is_main:
        save_config(config, config.run_dir)
    if start_folder is None:  # step_0 is kept for good: it is the reference of a resumed run
        learner.save(config.run_dir, 0, tokenizer, config.keep)
    frozen = open_reference(config, policy, dtype, mesh) if config.kl_coef > 0 else None

    # ---- resume
    start = learner.resume(start_folder, config.seed)["step"]
    columns = ["reward_mean", "reward_std", "zero_variance_groups", "approx_kl", "clip_frac", "kl_ref", "entropy",
               "response_length", "grad_norm", "eval/accuracy"]
    collector = Collector(config, env, tokenizer, mesh, max_new_tokens, start, replay)
    logger = MetricsLogger(config.run_dir, columns, config.steps, start, mesh.is_main, expected=collector.expected)
    monitor = Monitor(config.run_dir)
    measure = partial(evaluate, policy, tokenizer, env, config.eval_problems, mesh, max_new_tokens, config.max_rows)
    if start == 0:
        show_sample("before:", policy, tokenizer, env, mesh, max_new_tokens)
        logger.log(0, measure())

    # ---- loop
    last, stopping = start, False
    for step in range(start + 1, config.steps + 1):
        began = perf_counter()

        # (1) rollout: every prompt is answered group_size times; with --staleness, for a later step
        rollout = collector.next(policy, step)
        monitor.add(step, rollout, mesh)
        sampling_ended = perf_counter()

        # (2) advantages: better or worse than the other answers to the same prompt?
        rollout = look_again(policy, rollout, config, first_token, config.microbatch_size, config.temperature, mesh)
        rollout = rollout.replace(advantages=make_advantages(rollout, config, max_new_tokens, mesh))

        # (3) the rows to train on, and their log-probs under the frozen reference
        trained = leave_out(rollout, config, mesh)
        if config.kl_coef > 0:
            with frozen() as reference:
                ref_logprobs = rollout_logprobs(reference, trained, config.microbatch_size, config.temperature, mesh)
            trained = trained.replace(ref_logprobs=ref_logprobs)
        if config.save_rollouts:  # beside the one to replay: for minirl.view
            collector.save(rollout.replace(turns=[], ref_logprobs=trained.ref_logprobs), f"step_{step}/scored")

        # (4) policy updates: for each minibatch the gradient of the loss, clipped, and a step of AdamW
        updates = []
        lr = lr_at(step - 1, config.steps, config.lr, config.warmup_steps, config.schedule)
        for minibatch in trained.minibatches(config.minibatches, config.epochs):
            mode, mask = config.aggregate, minibatch.action_mask
            minibatch = weigh(minibatch, config, config.seed, mesh).replace(
                prompt_tokens=prompt_tokens(mask, minibatch.group))
            total = loss_total(mode, mask, mesh, minibatch.group, config.constant_length or max_new_tokens)

            def loss_fn(out: Output, mb: Rollout, mode=mode, total=total):
                per_token, clipped = recipe_loss(out.logprobs, mb, config, mesh.cp_group, out.entropy)
                loss = aggregate(per_token, mb.action_mask, mode, total, mb.prompt_tokens, mb.row_tokens)
                return loss, policy_stats(out.logprobs, mb.old_logprobs, mb.ref_logprobs, out.entropy, mb.advantages,
                                          mb.action_mask, config.eps_low, config.eps_high, clipped, mb.row_tokens)

            updates.append(learner.update(loss_fn, minibatch.acting().microbatches(config.microbatch_size), lr,
                                          temperature=config.temperature, entropy=True, by_token=by_token(config)))

        # (5) evaluate, log, save
        seconds = perf_counter() - began
        metrics = rollout_metrics(rollout, mesh) | update_metrics(updates) | {
            "lr": lr,
            "skipped_steps": learner.guard.skipped,
            "time/rollout": sampling_ended - began,
            "time/update": seconds - (sampling_ended - began),
        }
        metrics["time/tokens_per_second"] = metrics["tokens"] / seconds
        if step == config.steps or (config.eval_every and step % config.eval_every == 0):
            metrics |= measure()
        last, stopping = step, stop.requested(mesh)
        logger.log(step, metrics)
        if stopping or step == config.steps or step % config.save_every == 0:
            learner.save(config.run_dir, step, tokenizer, config.keep)
        if stopping:
            break

    stop.close()
    show_sample("after:", policy, tokenizer, env, mesh, max_new_tokens)
    return None if stopping else Path(config.run_dir) / f"step_{last}"


if __name__ == "__main__":
    run(main, Config, description=__doc__)
    close_mesh()
