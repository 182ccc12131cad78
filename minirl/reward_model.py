"""A reward model: a transformer that gives an answer one number, learnt from which of two answers was preferred.

    P(chosen is preferred to rejected) = sigmoid(score(chosen) - score(rejected))        Bradley and Terry, 1952

It is an ordinary `Transformer` whose config has `num_labels` 1: in the place of the words' logits stands one score for
each token. That of an answer is read at its last real token, its EOS or where it was cut, which has seen all of it.

    model = reward_model_of(policy, generator)                              the policy's layers under a new head
    scores = row_sum(model's values, score_inputs(rows).action_mask)        in `forward_backward`, with gradient
    rewards = score_rows(model, rollout, microbatch_size, mesh)             (B,), without: what PPO is paid
    save_model(model, folder, tokenizer)                                    opens as AutoModelForSequenceClassification
    model = load_reward_model(folder, tokenizer)

`train_dpo.py --loss reward` trains one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minirl.adapters import is_adapter
from minirl.checkpoint import check_model, load_model
from minirl.config import UserError
from minirl.logprobs import rollout_values
from minirl.losses import row_sum
from minirl.model import Transformer
from minirl.preference_losses import wins
from minirl.rollout import Rollout
from minirl.start import prepare, spread
from minirl.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from minirl.parallel.mesh import Mesh


def reward_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0, centring: float = 0.0) -> Tensor:
    """-log sigmoid(chosen - rejected - margin) + centring (chosen + rejected)^2 of each pair, (P,), unreduced.

    chosen, rejected : (P,) scores
    margin           : (P,) or a number: how much better a pair's chosen answer is known to be (arXiv:2307.09288 eq. 2)
    centring         : the loss itself looks at differences only, so that scores may wander off together; this keeps
                       their mean at 0 (arXiv:2312.09244 sec. 2; 0.01 there)
    """
    loss = -F.logsigmoid(chosen - rejected - margin)  # and not log(sigmoid(x)), which is -inf from x = -104 on
    return loss + centring * (chosen + rejected).square() if centring else loss


@torch.no_grad()
def reward_stats(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Sums over P pairs of scores (P,), under the names that `preference_losses.preference_stats` has for them."""
    right = wins(chosen, rejected, torch.maximum(chosen.abs(), rejected.abs()))
    return {"rows": chosen.new_full((), len(chosen)), "row_reward_chosen": chosen.sum(),
            "row_reward_rejected": rejected.sum(), "row_margin": (chosen - rejected).sum(), "row_accuracy": right.sum()}


# ---- the model ----

def reward_model_of(policy: Transformer, generator: torch.Generator) -> Transformer:
    """A new reward model (or critic) with a copy of the policy's layers and a random head; adapters must be merged.

    generator : of the head, on the CPU: normal, std 1 / sqrt(D), so that the first scores are of order 1
    """
    model = Transformer(replace(policy.config, num_labels=1)).to(policy.device, policy.dtype)
    state = {name: tensor for name, tensor in policy.state_dict().items() if name != "lm_head.weight"}
    head = torch.randn(1, policy.config.hidden_size, generator=generator) * policy.config.hidden_size**-0.5
    model.load_state_dict(state | {"score.weight": head})
    model.generation_config = policy.generation_config
    return model


def new_reward_model(folder: str | Path, dtype: torch.dtype, config: Any, mesh: Mesh) -> Transformer:
    """The layers of this folder's model under a new head, ready to be trained by train_dpo.py."""
    generator = torch.Generator().manual_seed(config.seed)
    return prepare(reward_model_of(load_model(folder, dtype, mesh.device), generator), config, mesh, folder)


def load_reward_model(folder: str | Path, tokenizer: Tokenizer | None = None, dtype: torch.dtype | None = torch.float32,
                      device: str | torch.device = "cpu") -> Transformer:
    """Open a folder that `save_model` wrote, or any sequence classifier of Hugging Face with one label.

    tokenizer : of the policy whose rows will be scored; they are passed on as token ids, never as text
    UserError : a language model; another vocabulary than the tokenizer's
    """
    check_scores(folder, tokenizer)
    return load_model(folder, dtype, device)


def check_scores(folder: str | Path, tokenizer: Tokenizer | None = None) -> None:
    """UserError unless the folder holds a whole reward model for rows of this tokenizer; reads no weights."""
    if is_adapter(folder):
        raise UserError(f"{folder} is an adapter, and a reward model is opened whole: merge it first (python -m "
                        "minirl.merge)")
    if not check_model(folder).num_labels:
        raise UserError(f"{folder} is a language model, which gives no score: train a reward model with train_dpo.py "
                        "--loss reward, and give its checkpoint")
    if tokenizer is not None:
        check_same_tokens(folder, tokenizer, "reward model")


def open_reward_model(config: Any, start_folder: Path | None, tokenizer: Tokenizer, dtype: torch.dtype,
                      mesh: Mesh) -> Transformer | None:
    """The reward model that pays in a run of train_ppo.py, spread as the policy is; None: the task pays.

    start_folder : the policy's checkpoint that the run goes on from; a reward model that learns too does so as well
    """
    folder, learns = config.reward_model, config.reward_model_every > 0
    if not folder:
        return None
    if start_folder and learns:
        folder = Path(config.run_dir) / "reward_model" / start_folder.name
    model = load_reward_model(folder, tokenizer, dtype, mesh.device)
    return spread(model.requires_grad_(learns), config, mesh, config.zero)


def check_same_tokens(folder: str | Path, tokenizer: Tokenizer, kind: str) -> None:
    """UserError if the model in this folder means other tokens by its ids than the policy, whose tokenizer is given."""
    if (difference := unlike(load_tokenizer(folder), tokenizer)) is not None:
        raise UserError(f"the {kind} {folder} has another vocabulary than the policy ({difference}): train one on the "
                        "policy's own tokens")


def unlike(ours: Tokenizer, theirs: Tokenizer) -> str | None:
    """In what two tokenizers differ; None: the same ids mean the same."""
    if ours.vocab_size != theirs.vocab_size:
        return f"{ours.vocab_size} tokens and {theirs.vocab_size}"
    if ours.eos_id != theirs.eos_id:
        return f"EOS is {ours.eos_id} and {theirs.eos_id}"
    for token in range(ours.vocab_size):
        if ours.token_bytes(token) != theirs.token_bytes(token):
            return f"token {token} is {ours.token_bytes(token)!r} and {theirs.token_bytes(token)!r}"
    return None


# ---- scores ----

def score_inputs(rollout: Rollout) -> Rollout:
    """The same rows, made so that the score of each is `row_sum(values, action_mask)`.

    A column of padding is added, since the model reads tokens[:, :-1]: so it reads the last real token too. The mask is
    True in the one column of each row that has read all of it. Training and scoring both take their rows from here.
    """
    tokens = F.pad(rollout.tokens, (0, 1))  # (B, T + 1)
    column = torch.arange(tokens.shape[1] - 1, device=tokens.device)  # (T,)
    return rollout.replace(tokens=tokens, action_mask=column == rollout.lengths[:, None] - 1,
                           lengths=rollout.lengths + 1)


def pair_inputs(pairs: Rollout, prefixes: bool = False) -> Rollout:
    """`score_inputs` of rows in pairs, to learn from. `prefixes`: and what both answers were worth on the way.

    Beginnings of the two are compared like the whole, in each column from where they part to where the shorter one
    ends. `weights` are the shares of these comparisons in the loss of the pair, (2P, T): equal, and equal to what is
    left for the whole answers. So Cobbe et al. train a verifier, on every token (arXiv:2110.14168 sec. 4.2): it learns
    what is wrong where it is, and not from the end of an answer alone.
    """
    rows = score_inputs(pairs)
    if not prefixes:
        return rows
    T = rows.action_mask.shape[1]
    parted = (rows.tokens[0::2] != rows.tokens[1::2]).cumsum(1)[:, :T] > 0  # (P, T); column t has read token t
    ends = pairs.lengths.view(-1, 2).amin(1) - 1
    both = parted & (torch.arange(T, device=ends.device) < ends[:, None])
    weights = both / (both.sum(1, keepdim=True) + 1)
    return rows.replace(weights=weights.repeat_interleave(2, 0).to(torch.float32))


@torch.no_grad()
def score_rows(model: Transformer, rollout: Rollout, microbatch_size: int, mesh: Mesh | None = None) -> Tensor:
    """The score of each row of a rollout: (B,) float32 or wider, no gradient. Padding and neighbours change nothing."""
    rows = score_inputs(rollout)
    return row_sum(rollout_values(model, rows, microbatch_size, mesh), rows.action_mask)
