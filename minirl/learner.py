"""A model and what trains it: the update and the checkpoint that the four trainers share.

    learner = Learner(policy, mesh, config.lr, config.max_grad_norm, weight_decay=config.weight_decay)
    start = learner.resume(start_folder, config.seed)["step"]
    stats = learner.update(loss_fn, microbatches, lr)                           gradients, clip, step
    learner.save(config.run_dir, step, tokenizer, config.keep)

PPO has several: critic and reward model learn beside the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from minirl.adapters import save_policy
from minirl.checkpoint import load_checkpoint, restore_rng, rng_tensors, save_checkpoint
from minirl.logprobs import LossFn
from minirl.model import Transformer
from minirl.optim import SkipCounter, adamw, clip_gradients
from minirl.parallel import Mesh, forward_backward
from minirl.rollout import Rollout
from minirl.tokenizer import Tokenizer


class Learner:
    """A model, spread over the mesh as `options.prepare` does it, with its optimizer and the guard of both.

    max_grad_norm : gradients are clipped to this norm; 0: never
    options       : of AdamW

    `beside` : those that learn beside it, by the folder of their checkpoints in run_dir; saved and resumed together
    """

    def __init__(self, model: Transformer, mesh: Mesh, lr: float, max_grad_norm: float = 0.0, **options: Any):
        self.model, self.mesh, self.max_grad_norm = model, mesh, max_grad_norm
        self.optimizer, self.guard = adamw(model, lr, **options), SkipCounter()
        self.beside: dict[str, Learner] = {}

    def update(self, loss_fn: LossFn, microbatches: Iterable[Rollout], lr: float, **options: Any) -> dict[str, float]:
        """One step of the optimizer, or none where loss or gradient are not finite: `SkipCounter`.

        loss_fn, options : of `forward_backward`
        returns          : its stats, with "grad_norm", that before clipping
        """
        stats = forward_backward(self.model, microbatches, loss_fn, self.mesh, **options)
        grad_norm = clip_gradients(self.model.parameters(), self.max_grad_norm, self.mesh)
        self.guard.step(self.optimizer, grad_norm, lr, stats["loss"])
        self.optimizer.zero_grad()
        return stats | {"grad_norm": float(grad_norm)}

    def skipped(self) -> int:
        """Updates that were left out so far, here and beside."""
        return self.guard.skipped + sum(other.skipped() for other in self.beside.values())

    def save(self, run_dir: str | Path, step: int, tokenizer: Tokenizer, keep: int, protect: int = 0,
             write: Callable[..., None] = save_policy, **state: Any) -> Path:
        """`save_checkpoint` of model, optimizer, guard, random numbers, and `state` (JSON values).

        What is beside it comes first, and one more of it is kept: whatever the newest checkpoint here is, theirs is
        there.
        """
        for name, other in self.beside.items():
            other.save(Path(run_dir) / name, step, tokenizer, keep + 1)
        tensors = self.optimizer.state_tensors() | rng_tensors() if step else {}  # step_0: nothing has been learnt
        state = {"step": step, "skipped": self.guard.skipped, "skipped_in_a_row": self.guard.in_a_row} | state
        return save_checkpoint(run_dir, step, self.model, tokenizer, tensors, state, keep, protect, write, self.mesh)

    def resume(self, folder: Path | None, seed: int) -> dict[str, Any]:
        """Go on where `save` left off, in place, but for the weights, which the model has already; its `state`.

        folder : a checkpoint; None, or step_0: a run that begins, with the random numbers of its seed. It forgets what
                 a cold start drew, since one that is resumed at step_0 has not drawn it
        """
        for name, other in self.beside.items():
            other.resume(folder and folder.parent / name / folder.name, seed)
        torch.manual_seed(seed)
        if folder is None or folder.name == "step_0":
            return {"step": 0}
        tensors, state = load_checkpoint(folder, self.model, self.mesh)
        self.optimizer.load_state_tensors(restore_rng(tensors))
        self.guard.skipped, self.guard.in_a_row = state["skipped"], state["skipped_in_a_row"]
        return state
