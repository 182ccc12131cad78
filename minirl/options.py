"""What all trainers have in common: options of the run, of its adapters and of its layout, and the model they give.

    @dataclass(frozen=True)
    class Config(LayoutOptions, AdapterOptions, RunOptions):        a trainer adds its own

    policy = prepare(open_policy(folder, ...), config, mesh, folder)    adapters put on, spread over the ranks
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from kernels.linear_logprob import Impl, pick
from minirl.adapters import is_adapter, open_policy
from minirl.config import UserError, check_not_negative, check_positive
from minirl.lora import add_lora
from minirl.lora_config import read_targets
from minirl.model import Transformer
from minirl.parallel.layout import parallelize
from minirl.parallel.mesh import Mesh, init_mesh


@dataclass(frozen=True)
class RunOptions:
    # run
    run_dir: str = "runs/run"  # folder of config.json, metrics.jsonl and the checkpoints
    resume: bool = False  # go on from the newest checkpoint in run_dir
    seed: int = 0  # of the initial weights, the order of the rows, the problems and the sampling
    device: str = "auto"  # cuda, mps or cpu; auto takes the first there is
    dtype: str = "auto"  # float32, float64 or bfloat16; auto is bfloat16 where the hardware has it
    impl: Impl = "auto"  # what computes log-probs: torch or triton; auto is triton on a GPU
    save_every: int = 20  # steps between checkpoints
    keep: int = 2  # newest checkpoints to keep, besides step_0 and the best


@dataclass(frozen=True)
class AdapterOptions:
    # model
    init: str = ""  # folder of a checkpoint to start from; empty: a new small model
    lora_rank: int = 0  # train low-rank additions of this rank instead of the weights; 0: the weights
    lora_alpha: float = 32.0  # the addition counts alpha / rank times
    lora_targets: str = "all-linear"  # which layers: q_proj,v_proj, a regular expression for whole names, or all-linear
    qlora: bool = False  # hold the frozen weights in 4 bits (NF4)
    gradient_checkpointing: bool = False  # compute each block again in the backward pass: less memory, more time


@dataclass(frozen=True)
class LayoutOptions:
    # parallelism
    dp: int = 0  # replicas, each with its share of the rows; 0: what the other axes leave of the ranks
    tp: int = 1  # ranks that share every matrix
    sp: bool = False  # ranks of --tp share the tokens between matrices as well
    pp: int = 1  # stages that share the layers
    pipeline: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"  # the order of the microbatches in the stages
    chunks: int = 1  # slices of the model in each stage, with --pipeline interleaved
    cp: int = 1  # ranks that share the columns of every row
    cp_kind: Literal["ring", "ulysses"] = "ring"  # keys travel, or columns are exchanged for heads
    zero: int = 0  # spread over dp and cp: 1 the optimizer, 2 gradients too, 3 weights too
    timeout: float = 600.0  # seconds that a rank waits for another; then the job ends with an error


def check_shared(config) -> None:
    """UserError for a shared option that cannot be, by the name of its flag."""
    if not config.run_dir:
        raise UserError("--run-dir is empty: name a folder")
    if not 0 <= config.seed < 2**63:
        raise UserError(f"--seed is {config.seed}: it must lie between 0 and 2^63 - 1")
    check_positive(config, "save_every", "keep", "lora_alpha", "timeout")
    check_not_negative(config, "lora_rank")
    if config.qlora and not config.lora_rank and not is_adapter(config.init):
        raise UserError("--qlora freezes the weights: say what is trained with --lora-rank")


def make_mesh(config) -> Mesh:
    """The ranks of this run in the layout that was asked for."""
    return init_mesh(config.device, config.dp, config.pp, config.cp, config.tp, config.timeout)


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


def open_reference(folder: str | Path, dtype: torch.dtype, config, mesh: Mesh) -> Transformer:
    """The frozen model of a folder, spread as the policy is."""
    reference = open_policy(folder, dtype, mesh.device, config.qlora).requires_grad_(False)
    return spread(reference, config, mesh, 3 if config.zero == 3 else 0)  # it has no optimizer to slice


def spread(model: Transformer, config, mesh: Mesh, zero_stage: int) -> Transformer:
    """`parallelize` by the flags."""
    model.head_impl = config.impl
    return parallelize(model, mesh, sequence=config.sp, zero_stage=zero_stage, schedule=config.pipeline,
                       chunks=config.chunks, context_kind=config.cp_kind)
