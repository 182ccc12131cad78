"""What a run starts from: its tokenizer, its policy, and the frozen model that the policy is compared with.

    tokenizer = open_tokenizer(folder)
    policy = open_start(folder, tokenizer, dtype, config, mesh)
    policy = prepare(policy, config, mesh, folder)          adapters put on, spread over the ranks
    frozen = open_reference(config, policy, dtype, mesh)
    with frozen() as reference: ...                         the policy as it was before the first update

`config` has the options of `minirl.options`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import torch

from kernels.linear_logprob import pick
from minirl.adapters import open_policy, tokenizer_folder
from minirl.checkpoint import check_tokenizer
from minirl.config import UserError
from minirl.lora import adapters_off, add_lora
from minirl.lora_config import read_targets
from minirl.model import Transformer
from minirl.parallel.layout import parallelize
from minirl.parallel.mesh import Mesh
from minirl.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer


def open_tokenizer(folder: str | Path | None) -> Tokenizer:
    """That of the policy in a folder; of a new one, which has none, bytes. Before a cold start, to check input with."""
    return load_tokenizer(tokenizer_folder(folder)) if folder else ByteTokenizer()


def open_start(folder: str | Path, tokenizer: Tokenizer, dtype: torch.dtype, config, mesh: Mesh,
               scores: bool = False) -> Transformer:
    """The model of a folder. UserError: not the tokenizer's, or with a score in the place of words unless `scores`."""
    policy = open_policy(folder, dtype, mesh.device, config.qlora, scores)
    check_tokenizer(tokenizer, policy.config.vocab_size)
    return policy


def prepare(policy: Transformer, config, mesh: Mesh, base: str | Path | None) -> Transformer:
    """A model ready to be trained, in place: new adapters if asked for, its activations kept or not, spread out.

    base : the folder that the model came from, for new adapters to name; None: a checkpoint of this run, which has its
           adapters on
    """
    if config.lora_rank and base is not None:
        add_lora(policy, config.lora_rank, config.lora_alpha, read_targets(config.lora_targets),
                 base_model=str(Path(base).absolute()), generator=torch.Generator().manual_seed(config.seed),
                 modules_to_save=["score"] if policy.config.num_labels else [])
        if policy.value_head is not None:
            policy.value_head.requires_grad_(True)  # new as the adapters are
    policy.gradient_checkpointing = config.gradient_checkpointing
    try:
        impl = pick(config.impl, policy.norm.weight)
    except ValueError as error:
        raise UserError(f"--{error}") from None
    if mesh.is_main and not policy.config.num_labels:
        print(f"log-probs: {impl}")
    return spread(policy, config, mesh, config.zero)


def open_reference(config, policy: Transformer, dtype: torch.dtype,
                   mesh: Mesh) -> Callable[[], AbstractContextManager[Transformer]]:
    """What opens the frozen model that the run started from: `with frozen() as reference`.

    With `--lora-rank` that is the policy with its adapters off, and no second copy; else the run's step_0, spread as
    the policy is.
    """
    if config.lora_rank:
        return partial(adapters_off, policy)
    folder = Path(config.run_dir) / "step_0"
    reference = open_policy(folder, dtype, mesh.device, config.qlora).requires_grad_(False)
    return partial(nullcontext, spread(reference, config, mesh, 3 if config.zero == 3 else 0))  # no optimizer to slice


def spread(model: Transformer, config, mesh: Mesh, zero_stage: int) -> Transformer:
    """`parallelize` by the flags."""
    model.head_impl = config.impl
    return parallelize(model, mesh, sequence=config.sp, zero_stage=zero_stage, zero_overlap=config.zero_overlap,
                       schedule=config.pipeline, chunks=config.chunks, context_kind=config.cp_kind)
