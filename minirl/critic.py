"""The critic of PPO: what the rest of an answer is expected to earn, for every state on the way.

Three kinds, `train_ppo.py --critic`:

    own        a transformer of its own with one number a token in the place of words (`num_labels` 1, as a reward model
               is), started from the policy's layers, or from a reward model (`--critic-init`); its own optimizer
    joint      a second head on the policy's last hidden state. The value loss shapes the layers too
    detached   the same head, which only reads: the policy is trained as if there were no critic

Column s of `values` has read tokens[:, : s + 1]: the state in which tokens[:, s + 1] is chosen, not the one after it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from minirl.adapters import is_adapter, open_policy, save_policy
from minirl.checkpoint import check_model, check_tokenizer, load_model, read_model_config, save_model
from minirl.config import UserError, usual_mode
from minirl.env.base import Env
from minirl.env.loop import prompt_tokens
from minirl.logprobs import rollout_values
from minirl.losses import row_sum
from minirl.model import Transformer
from minirl.parallel.data import barrier
from minirl.parallel.layout import Whole
from minirl.reward_model import check_same_tokens, check_scores, reward_model_of, score_inputs
from minirl.rollout import Rollout
from minirl.start import prepare
from minirl.tokenizer import Tokenizer

if TYPE_CHECKING:
    from minirl.parallel.mesh import Mesh


@torch.no_grad()
def state_values(critic: Transformer, rollout: Rollout, microbatch_size: int, mesh: Mesh | None = None,
                 bootstrap: bool = True) -> tuple[Tensor, Tensor | None]:
    """Values (B, S) of the states in which tokens were chosen, and what a row would still have earned (B,).

    The second is the value of the state after the last token, for rows that were cut at a limit; 0 for those that ended
    by themselves: `bootstrap` of `gae`. It takes one more column, so it is None where nobody wants it. No gradient.
    """
    if not bootstrap:
        return rollout_values(critic, rollout, microbatch_size, mesh), None
    rows = score_inputs(rollout)
    values = rollout_values(critic, rows, microbatch_size, mesh)  # (B, T)
    return values[:, :-1], torch.where(rollout.finished, 0.0, row_sum(values, rows.action_mask))


# ---- a network of its own ----

def critic_of(policy: Transformer) -> Transformer:
    """The policy's layers under a head of zeros: of what it does not know yet, a critic says nothing."""
    critic = reward_model_of(policy, torch.Generator())
    nn.init.zeros_(critic.score.weight)
    return critic


def check_folders(config: Any, env: Env, tokenizer: Tokenizer) -> None:
    """UserError if `--reward-model` or `--critic-init` cannot be opened or do not go with the policy.

    For a run that begins: a cold start takes minutes, and nothing of it should be lost.
    """
    for folder, check in ((config.reward_model, check_scores), (config.critic_init, check_source)):
        if folder:
            check(folder, tokenizer)
            if not config.init:  # broken weights, too, are found before a cold start; without one they soon are
                load_model(folder)
            if not config.drop_long_rows:
                check_length(folder, env, tokenizer, config.max_new_tokens or env.max_new_tokens)


def check_length(folder: str | Path, env: Env, tokenizer: Tokenizer, max_new_tokens: int) -> None:
    """UserError if answers of max_new_tokens are too long for the model in this folder; tools may add to them."""
    context = read_model_config(folder).context
    longest = max(len(prompt_tokens(tokenizer, example.prompt)) for split in ("train", "eval")
                  for example in env.sample(env.size(split) or 1000, split=split))
    if longest + max_new_tokens > context:
        raise UserError(f"{folder} has a context of {context} tokens, but prompts have up to {longest} and answers "
                        f"{max_new_tokens}: give a model with a longer context, or lower --max-new-tokens")


def check_source(source: str | Path, tokenizer: Tokenizer) -> None:
    """UserError unless a critic of this policy may start from the folder; reads no weights."""
    if is_adapter(source):
        raise UserError(f"{source} is an adapter, and a critic starts from a whole model: name one with --critic-init, "
                        "or let it share the policy's layers with --critic joint")
    check_tokenizer(tokenizer, check_model(source).vocab_size)
    check_same_tokens(source, tokenizer, "critic")  # else it would mean other words by the policy's ids


def open_critic(config: Any, policy: Transformer, start_folder: Path | None, init: str | Path, tokenizer: Tokenizer,
                dtype: torch.dtype, mesh: Mesh) -> Transformer | None:
    """The critic of a run: the policy that `add_value_head` gave a head; None: --advantage has no critic; or a network
    of its own, ready to be trained as the policy is: its layout, adapters, 4 bits.

    start_folder : the policy's checkpoint that the run goes on from, and so does its critic; None: a new one, from the
                   folder `config.critic_init` (a language model, or a reward model with its head) or else from that of
                   the policy, `init`

    With `--lora-rank` its frozen layers are those of run_dir/critic/base, written here, which its adapters name.
    UserError: a critic that reads another vocabulary, or adapters to start from.
    """
    if config.advantage != "gae":
        return None
    if config.critic != "own":
        return policy
    if start_folder:
        saved = Path(config.run_dir) / "critic" / start_folder.name
        return prepare(open_policy(saved, dtype, mesh.device, config.qlora, scores=True), config, mesh, None)
    source, base = config.critic_init or init, Path(config.run_dir) / "critic" / "base"
    check_source(source, tokenizer)
    critic = load_model(source, dtype, mesh.device)
    critic = critic if critic.config.num_labels else critic_of(critic)
    if config.lora_rank:
        if mesh.is_main:
            save_model(critic, base, tokenizer)
        barrier(mesh)
        critic = open_policy(base, dtype, mesh.device, config.qlora, scores=True)
    return prepare(critic, config, mesh, base)


# ---- a head on the policy ----

class ValueHead(nn.Linear):
    """Hidden states (..., D) -> values (...), in float32 or wider; zeros at the start.

    detached : the layers below get no gradient from it
    """

    def __init__(self, hidden_size: int, detached: bool):
        super().__init__(hidden_size, 1, bias=False)
        self.detached = detached
        nn.init.zeros_(self.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        hidden = hidden.detach() if self.detached else hidden
        return F.linear(hidden.to(dtype), self.weight.to(dtype))[..., 0]


HEAD_FILE = "training/value_head.safetensors"  # not among the weights: other programs would not know what it is


def add_value_head(policy: Transformer, detached: bool, saved: Path | None = None) -> Transformer:
    """Put the critic's head on a policy, in place, before `prepare`; returns the policy.

    saved : the checkpoint whose head it is; None: a new one
    """
    head = ValueHead(policy.config.hidden_size, detached)
    if saved:
        head.load_state_dict(load_file(saved / HEAD_FILE))
    policy.value_head = head.to(policy.device, policy.dtype)
    return policy


def save_actor_critic(policy: Transformer, folder: str | Path, tokenizer: Tokenizer | None = None,
                      mesh: Mesh | None = None) -> None:
    """`save_policy`, and a head beside it if there is one: the folder is that of the policy alone."""
    head, policy.value_head = policy.value_head, None
    try:
        save_policy(policy, folder, tokenizer, mesh=mesh)
    finally:
        policy.value_head = head
    if head is None:
        return
    mine = {} if mesh is not None and not policy.has_head else {"weight": head.weight.detach()}
    if mesh is not None and mesh.size > 1:
        mine = dict(Whole(mine, {"weight": head.weight} if mine else {}, mesh))
        if not mesh.is_main:
            return
    save_file(mine, str(Path(folder) / HEAD_FILE))
    usual_mode(Path(folder) / HEAD_FILE)
