"""The options that trainers have in common, and what can be wrong with them.

    @dataclass(frozen=True)
    class Config(TrainerOptions):                       a trainer adds its own
    class Config(RLOptions, PPOOptions, TrainerOptions)     the last ones come first in --help
"""

from dataclasses import dataclass
from typing import Literal

from kernels.linear_logprob import Impl
from minirl.adapters import is_adapter
from minirl.config import UserError, check_not_negative, check_positive
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
    init: str = ""  # folder of a checkpoint to start from; empty: a new small model, after a cold start
    lora_rank: int = 0  # train low-rank additions of this rank instead of the weights; 0: the weights
    lora_alpha: float = 32.0  # the addition counts alpha / rank times
    lora_targets: str = "all-linear"  # which layers: q_proj,v_proj, a regular expression for whole names, or all-linear
    qlora: bool = False  # hold the frozen weights in 4 bits (NF4)
    gradient_checkpointing: bool = False  # compute each block again in the backward pass: less memory, more time


@dataclass(frozen=True)
class OptimizerOptions:
    # optimisation
    lr: float = 1e-3  # peak learning rate
    warmup_steps: int = 10  # steps of linear warm-up
    schedule: Literal["cosine", "linear", "constant"] = "cosine"  # after the warm-up
    weight_decay: float = 0.0  # pulls matrices to zero, decoupled from the gradient
    max_grad_norm: float = 1.0  # clip the gradient to this norm; 0: never


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
    zero_overlap: bool = False  # --zero 3 computes while it sends, for the memory of two blocks more
    timeout: float = 600.0  # seconds that a rank waits for another; then the job ends with an error


@dataclass(frozen=True)
class TrainerOptions(LayoutOptions, OptimizerOptions, AdapterOptions, RunOptions):
    """Of all four trainers."""


@dataclass(frozen=True)
class RLOptions:
    """Of those whose policy samples while it learns: GRPO and PPO."""

    # run
    save_rollouts: bool = False  # write every rollout to run_dir/rollouts
    replay: str = ""  # train on this saved rollout instead of sampling
    # model
    cold_start_steps: int = 1000  # most SFT updates on the expert's actions before RL; only without --init
    cold_start_accuracy: float = 0.41  # the cold start ends early at this accuracy
    # task
    task: str = "addition"  # addition, thought, calculator, lookup, shop, countdown, code, walk or gsm8k
    data: str = ""  # gsm8k: JSONL file of {"question", "answer"}
    eval_data: str = ""  # gsm8k: JSONL file of held-out problems; empty: a tenth of --data
    drop_long_rows: bool = False  # gsm8k: leave out problems that do not fit the model's context
    difficulty: int = 2  # digits of an operand; hops of lookup, items of shop, numbers of countdown, steps of code
    # rollout
    max_new_tokens: int = 0  # longest answer, all turns together; 0: the task's own
    temperature: float = 1.0  # of sampling, and of every log-probability in training
    max_rows: int = 4096  # rows decoded at once
    # optimisation
    steps: int = 300  # rollouts
    epochs: int = 1  # passes over each rollout
    minibatches: int = 4  # optimizer updates a pass
    microbatch_size: int = 512  # rows a forward pass
    # evaluation
    eval_every: int = 20  # steps between evaluations; 0: only before and after
    eval_problems: int = 500  # held-out problems, answered greedily


def check_shared(config) -> None:
    """UserError for a shared option that cannot be, by the name of its flag."""
    if not config.run_dir:
        raise UserError("--run-dir is empty: name a folder")
    if not 0 <= config.seed < 2**63:
        raise UserError(f"--seed is {config.seed}: it must lie between 0 and 2^63 - 1")
    check_positive(config, "save_every", "keep", "lora_alpha", "timeout", "lr")
    check_not_negative(config, "lora_rank", "warmup_steps", "weight_decay", "max_grad_norm")
    if config.qlora and not config.lora_rank and not is_adapter(config.init):
        raise UserError("--qlora freezes the weights: say what is trained with --lora-rank")
    if config.zero_overlap and config.zero != 3:
        raise UserError(f"--zero-overlap is about gathered weights: use --zero 3, not {config.zero}")


def check_rl(config) -> None:
    """`check_shared`, and the same for RLOptions."""
    check_shared(config)
    check_positive(config, "prompts_per_step", "temperature", "steps", "epochs", "minibatches", "microbatch_size",
                   "max_rows", "eval_problems", "cold_start_steps")
    check_not_negative(config, "max_new_tokens", "eval_every")
    if config.prompts_per_step * config.group_size % config.minibatches:
        raise UserError(f"--minibatches {config.minibatches} does not divide the {config.prompts_per_step} x "
                        f"{config.group_size} rows of a rollout")


def make_mesh(config) -> Mesh:
    """The ranks of this run in the layout that was asked for."""
    return init_mesh(config.device, config.dp, config.pp, config.cp, config.tp, config.timeout)
