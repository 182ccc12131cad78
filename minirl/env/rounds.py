"""The rollouts of a run: to which problems, how many rounds it takes, and what is carried over to the next step.

    resample    groups that have nothing to teach make room for others            DAPO, arXiv:2503.14476 sec. 3.2
    partial     rows that take long are set aside and go on in the next step      Kimi k1.5, arXiv:2501.12599
    staleness   what is sampled now is trained on in a later step

A group whose answers all earn the same gives every one of them the advantage 0: it is left out and another prompt takes
its place. It asks what the task paid, before any penalty for length: that would tell wrong answers apart by their
lengths (a mixture, --rewards, is asked as a whole). And it is not a schedule of how many samples to draw.
It always ends: after `resample` more rounds the places that are still empty go to the first groups that had nothing to
teach, so that a step has the same number of groups everywhere. How the rows of a group come about: groups.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minirl.advantages import constant_groups
from minirl.belief import belief_gains
from minirl.env.base import Env, Example
from minirl.env.groups import begin, go_on, sample_groups
from minirl.env.loop import at_prompt, collect, play
from minirl.generate import uniform
from minirl.mixture import paid_by
from minirl.model import Transformer
from minirl.parallel.context import gather_rollouts
from minirl.parallel.data import share_of
from minirl.parallel.mesh import Mesh
from minirl.parallel.zero import gathered
from minirl.rollout import Rollout
from minirl.tokenizer import Tokenizer


class Collector:
    """The rollouts of a run, one after the other: sampled or replayed, ahead of their time with --staleness.

    config   : of train_grpo.py
    start    : steps that are done; a resumed run reads from run_dir/rollouts what was sampled ahead
    replayed : this replica's rows of a saved rollout, which stands in for all
    """

    def __init__(self, config: Any, env: Env, tokenizer: Tokenizer, mesh: Mesh, max_new_tokens: int, start: int = 0,
                 replayed: Rollout | None = None):
        self.config, self.env, self.tokenizer, self.mesh = config, env, tokenizer, mesh
        self.max_new_tokens, self.replayed = max_new_tokens, replayed
        self.folder, self.ahead = Path(config.run_dir) / "rollouts", []  # what has been sampled, and not trained on
        for number in range(start + 1, start + 1 + config.staleness if start else 0):
            self.ahead.append(own_rows(self.folder / f"step_{number}", mesh))
        off_policy = config.staleness or config.partial or config.sampler_noise
        # Metrics that look ill on purpose; and an expert teaches where no sample differs.
        self.expected = ("ratio_max_deviation",) * bool(off_policy) + ("reward_std",) * config.expert
        self.pool: Rollout | None = None  # groups with rows that were set aside, of all replicas, with --partial
        if start and config.partial:
            self.pool = Rollout.load(self.pool_file(start + config.staleness))

    def next(self, policy: Transformer, step: int) -> Rollout:
        """This replica's rows to train on in a step (1, 2, ..), in the order of the steps."""
        config = self.config
        while len(self.ahead) <= config.staleness:
            number = step + len(self.ahead)
            with gathered(policy):  # a replica may have nothing to write, or to look at, while others have
                rollout = self.replayed or self.sample(policy, number)
            if config.sampler_noise:
                rollout = disturb(rollout, config.sampler_noise, config.seed)
            if config.save_rollouts or config.staleness:
                self.save(rollout, f"step_{number}")
            self.ahead.append(rollout)
        return self.ahead.pop(0)

    def save(self, rollout: Rollout, folder: str) -> None:
        """Write this replica's rows to run_dir/rollouts/FOLDER."""
        if self.mesh.leads_replica:
            rollout.replace(vectors=None).save(self.folder / folder / f"rank_{self.mesh.dp_rank}.safetensors")

    def sample(self, policy: Transformer, number: int) -> Rollout:
        """Rollout `number` (1, 2, ..) of the run, from the policy as it is."""
        config = self.config
        env = paid_by(self.env, config.rewards, (number - 1) / config.steps)
        sampling = dict(seed=config.seed, max_new_tokens=self.max_new_tokens, temperature=config.temperature,
                        max_rows=config.max_rows)
        if config.partial:
            rollout = self.sample_partly(policy, env, number, **sampling)
        else:
            rollout = collect_step(policy, self.tokenizer, env, number, config.prompts_per_step, config.group_size,
                                   config.resample, self.mesh, config, **sampling)
        if config.process == "belief":
            prompts = rollout.group // (2 if config.retry == "srpo" else 1)
            answers = [example.answer for example in examples_of(env, prompts)]
            rollout = rollout.replace(gains=belief_gains(policy, self.tokenizer, rollout, answers,
                                                         config.microbatch_size, config.temperature, self.mesh))
        return rollout

    def sample_partly(self, policy: Transformer, env: Env, number: int, **sampling) -> Rollout:
        """Rows are written `partial` tokens at a time, until all rows of P groups are over; others go on next time.

        Half a step's prompts are in flight beside those of the step, so that a few long rows hold nobody up. The oldest
        groups leave first, and no row is longer than ever, so none waits for good. `shared` says how much of a row is
        from earlier steps, by an older policy: it has the log-probs of that time.
        """
        config, mesh = self.config, self.mesh
        P, G = config.prompts_per_step, config.group_size
        share, extra = mesh.share(P, "prompts of --prompts-per-step"), max(1, P // 2)
        fresh = range(extra * (number > 1) + (number - 1) * P, extra + number * P)
        write = partial(play, policy, self.tokenizer, env, mesh=mesh, **sampling)
        mine = torch.tensor(part_of(fresh, mesh))
        new = None
        if len(mine):
            starts, ids, group = begin(self.tokenizer, env.sample(len(mine), start=int(mine[0])), mine, G, range(G))
            new = write(starts, ids, group, pause=config.partial)
            new = new.replace(shared=torch.zeros_like(new.lengths), texts=[])
        new = gather_rollouts(new, mesh.dp_group)
        pool = new if self.pool is None else Rollout.join([self.pool, new])
        while True:
            pool = pool.rows(pool.sample_ids.argsort())
            waiting = pool.group[pool.begins >= 0].unique()
            done = pool.group.unique()
            done = done[~torch.isin(done, waiting)]
            if len(done) >= P:
                break
            mine = torch.isin(pool.group, torch.tensor(part_of(waiting.tolist(), mesh), dtype=torch.int64))
            own = pool.rows(mine.nonzero()[:, 0]) if mine.any() else None
            if own is not None:
                own = go_on(write, self.tokenizer, own.to(mesh.device), examples_of(env, own.group),
                            pause=config.partial)
            idle = pool.rows((~torch.isin(pool.group, waiting)).nonzero()[:, 0])
            pool = Rollout.join([part for part in (idle, gather_rollouts(own, mesh.dp_group)) if len(part)])
        chosen = torch.isin(pool.group, done[:P])
        rollout = pool.rows(torch.isin(pool.group, done[share.start : share.stop]).nonzero()[:, 0])
        self.pool = pool.rows((~chosen).nonzero()[:, 0])
        self.pool = self.pool.replace(shared=self.pool.lengths.clone(), texts=[])
        if mesh.is_main:
            self.pool.save(self.pool_file(number))
        texts = [self.tokenizer.decode(row[at_prompt(self.tokenizer, example).prompt : length], continued=True)
                 for row, length, example in zip(rollout.tokens.tolist(), rollout.lengths.tolist(),
                                                 examples_of(env, rollout.group), strict=True)]
        return rollout.replace(texts=texts, begins=None).to(mesh.device)

    def pool_file(self, number: int) -> Path:
        return self.folder / f"pool_{number}.safetensors"


def own_rows(folder: Path, mesh: Mesh) -> Rollout:
    """This replica's rows of a saved rollout: the very ones that it wrote, if there were as many replicas."""
    own = folder / f"rank_{mesh.dp_rank}.safetensors"
    alike = own.is_file() and len(list(folder.glob("rank_*.safetensors"))) == mesh.dp
    return (Rollout.load(own) if alike else share_of(Rollout.load(folder), mesh)).to(mesh.device)


def part_of(numbers: Sequence[int], mesh: Mesh) -> Sequence[int]:
    """This replica's part of some prompts: behind one another, as even as it goes."""
    return numbers[len(numbers) * mesh.dp_rank // mesh.dp : len(numbers) * (mesh.dp_rank + 1) // mesh.dp]


def examples_of(env: Env, prompts: Tensor) -> list[Example]:
    """The problem of each row, by its number over the run."""
    known = {number: env.sample(1, start=number)[0] for number in prompts.unique().tolist()}
    return [known[number] for number in prompts.tolist()]


def collect_step(policy: Transformer, tokenizer: Tokenizer, env: Env, number: int, prompts: int, group_size: int,
                 rounds: int, mesh: Mesh, columns: Any = None, **sampling) -> Rollout:
    """Rollout `number` (1, 2, ..) of a run: this replica's share of `prompts` groups of answers.

    rounds   : at most so many after the first; 0: every group is kept
    columns  : options of the recipe, for `sample_groups`; None: G rows that begin at the prompt
    sampling : passed to `generate` (max_new_tokens, temperature, seed, ...)

    Rollout n has the problems (n - 1) prompts (rounds + 1) .. of the endless stream to itself, whether it needs all of
    them or not: a resumed run need not remember how many were drawn.
    """
    share = mesh.share(prompts, "prompts of --prompts-per-step")
    kept: list[Rollout] = []
    for i in range(rounds + 1):
        first = ((number - 1) * (rounds + 1) + i) * prompts + share.start
        examples = env.sample(len(share), start=first)
        if columns is None:
            rollout = collect(policy, tokenizer, env, examples, group_size, first, mesh, **sampling)
        else:
            rollout = sample_groups(policy, tokenizer, env, examples, group_size, first, mesh, columns, **sampling)
        if rounds == 0:
            return rollout
        # Every rank looks at the groups of all, and so all choose the same and stop together.
        kept.append(gather_rollouts(rollout, mesh.dp_group))
        whole = Rollout.join(kept)
        chosen, complete = choose_groups(whole.rewards, whole.group, prompts)
        if complete:
            break
    mine = torch.isin(whole.group, chosen[share.start : share.stop])
    return whole.rows(mine.nonzero()[:, 0]).to(mesh.device)


def replayed(path: str, tokenizer: Tokenizer, mesh: Mesh) -> Rollout | None:
    """This replica's share of a saved rollout that stands for those of every step; None: no path, they are sampled."""
    return share_of(Rollout.load_sampled(path, tokenizer.vocab_size), mesh).to(mesh.device) if path else None


def choose_groups(rewards: Tensor, group: Tensor, count: int) -> tuple[Tensor, bool]:
    """(ids (count,) of the groups to keep, ascending; whether every one of them has unequal rewards (B,))."""
    ids, constant = group.unique(), constant_groups(rewards, group)
    teaching, rest = ids[~constant][:count], ids[constant]
    return torch.cat((teaching, rest[: count - len(teaching)])).sort().values, len(teaching) == count


def disturb(rollout: Rollout, std: float, seed: int) -> Rollout:
    """The rollout as of a sampler whose log-probs are wrong by noise of `std` nats a token: another kernel or dtype.

    The noise belongs to sample and column, so that it is the same in every layout.
    """
    columns = torch.arange(rollout.action_mask.shape[1], device=rollout.action_mask.device)
    u = uniform(seed + 2, rollout.sample_ids[:, None], columns)  # the tokens themselves were drawn with `seed`
    noise = std * 2**0.5 * torch.erfinv((2 * u - 1).clamp(-1 + 1e-12, 1 - 1e-12))
    old = rollout.old_logprobs
    return rollout.replace(old_logprobs=torch.where(rollout.action_mask, old + noise.to(old.dtype), old))
