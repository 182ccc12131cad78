"""What will a layout cost? Memory, bytes sent, idle time and days, before anything is started. No process, no weights.

    python -m minirl.plan --model llama-3.1-8b --dp 8 --zero 1
    python -m minirl.plan --model llama-3.1-70b --tp 8 --pp 4 --dp 16 --sp --zero 1 --gradient-checkpointing
    python -m minirl.plan --model llama-3.1-70b --gpus 512              look for a layout, and show it
    python -m minirl.plan --model FOLDER --lora-rank 16 --qlora         FOLDER with a config.json

The formulas stand in `costs.py`; here is the search for a layout that fits, and what is printed.

GB is 10^9 bytes. What is left out: the framework's own memory and fragmentation (`SPARE`), sums of a few numbers (loss,
gradient norm, statistics), attention's share of the operations, and all that waiting for a network costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

from minirl.checkpoint import read_model_config
from minirl.config import UserError, check_not_negative, check_positive, run
from minirl.costs import (
    Layout,
    Memory,
    Traffic,
    bubble,
    fullest,
    held,
    local_model,
    on_wire,
    parameter_count,
    role_memory,
    seconds,
    traffic,
)
from minirl.model import ModelConfig
from minirl.parallel.schedule import gantt

SPARE = 0.1  # of the memory, kept free for what is not counted
NODE = 8  # GPUs of one machine: tensor parallelism stays inside
GANTT_STAGES, GANTT_MICROBATCHES = 8, 16  # larger pictures do not fit a terminal


def shape(vocab: int, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, tied: bool, **more) -> ModelConfig:
    return ModelConfig(vocab, hidden, mlp, layers, heads, kv_heads, tie_word_embeddings=tied, **more)


SHAPES = {
    "toy": shape(258, 96, 256, 2, 4, 4, True),  # what train_grpo.py begins with
    "qwen3-0.6b": shape(151936, 1024, 3072, 28, 16, 8, True, head_dim=128, qk_norm=True),
    "qwen3-4b": shape(151936, 2560, 9728, 36, 32, 8, True, head_dim=128, qk_norm=True),
    "llama-3.2-1b": shape(128256, 2048, 8192, 16, 32, 8, True),
    "llama-3.1-8b": shape(128256, 4096, 14336, 32, 32, 8, False),
    "llama-3.1-70b": shape(128256, 8192, 28672, 80, 64, 8, False),
}


# ---- which layout? ----

def fits(memory: Memory, memory_gb: float) -> bool:
    return memory.total <= (1 - SPARE) * memory_gb * 1e9


def ladder(config: ModelConfig, start: Layout, memory_gb: float) -> Iterator[tuple[str, Layout, Memory]]:
    """From a layout towards one that fits, a step at a time: (what was done, layout, memory), the start first.

    What costs least comes first: recomputation and ZeRO-1; tensor parallelism inside a machine; pipeline stages;
    context parallelism; the rest of the ranks is dp. At last ZeRO-3, with no pipeline. The number of ranks stays, as
    long as there are replicas to take them from. A step that frees less than a twentieth is taken back.
    """
    now, memory = start, fullest(config, start)[1]
    yield "as asked", now, memory

    def steps() -> Iterator[tuple[str, dict]]:
        """What could be changed next about the layout `now`, the cheapest first."""
        if not now.gradient_checkpointing:
            yield "recompute blocks", {"gradient_checkpointing": True}
        if now.zero == 0 and now.replicas > 1:
            yield "ZeRO-1", {"zero": 1}
        for axis, most in (("tp", NODE), ("pp", config.num_hidden_layers), ("cp", 64)):
            while getattr(now, axis) * 2 <= most:
                size, before = 2 * getattr(now, axis), now
                yield f"{axis} {size}", {axis: size, "sp": now.sp or axis == "tp",
                                         "dp": now.dp // 2 if now.dp % 2 == 0 else now.dp}
                if now is before:  # it did not help, or is not possible
                    break
        if now.zero < 3:
            yield "ZeRO-3, no pipeline", {"zero": 3, "dp": now.dp * now.pp, "pp": 1, "schedule": "1f1b", "chunks": 1}

    for name, changes in steps():
        if fits(memory, memory_gb):
            return
        try:
            found = replace(now, **changes)
            needs = fullest(config, found)[1]
        except UserError:
            continue
        if needs.total <= 0.95 * memory.total:
            now, memory = found, needs
            yield name, now, memory


def recommend(config: ModelConfig, layout: Layout, gpus: int, memory_gb: float) -> tuple[Layout, Memory]:
    """The first layout of the ladder that fits so many GPUs. UserError: none does.

    Of `layout` the work counts (rows, length, dtype, adapters), not the sizes. UserError, too: its rows do not divide.
    """
    start = replace(layout, dp=gpus, tp=1, pp=1, cp=1, sp=False, zero=0, schedule="1f1b", chunks=1, rows_per_step=0)
    for _, found, memory in ladder(config, start, memory_gb):
        if fits(memory, memory_gb) and found.size <= gpus:
            return replace(found, rows_per_step=layout.rows_per_step), memory
    raise UserError(f"no layout of {gpus} GPUs with {memory_gb:g} GB fits; {found.size} ranks need {gb(memory.total)} "
                    f"GB each ({found.describe()}): use more GPUs, shorter rows, or --lora-rank 16")


# ---- the command line ----

@dataclass(frozen=True)
class Config(Layout):
    # model
    model: str = "llama-3.1-8b"  # toy, qwen3-0.6b, qwen3-4b, llama-3.2-1b, llama-3.1-8b, llama-3.1-70b, or a folder
    # hardware
    gpus: int = 0  # look for a layout of so many; 0: the layout as given
    memory_gb: float = 80.0  # of a GPU
    tflops: float = 989.0  # of a GPU, at best (H100, bfloat16, dense)
    mfu: float = 0.4  # the share of it that is reached while a GPU works; a pipeline's bubble comes on top
    # what for
    train_tokens: float = 1e9  # tokens to train on
    rollout_rows: int = 64  # rows that a replica samples at once
    rollout_length: int = 0  # their length; 0: --sequence-length

    def __post_init__(self):
        super().__post_init__()
        check_positive(self, "memory_gb", "tflops", "mfu", "train_tokens", "rollout_rows")
        check_not_negative(self, "gpus", "rollout_length")

    @property
    def layout(self) -> Layout:
        return Layout(**{field.name: getattr(self, field.name) for field in fields(Layout)})


def gb(count: float) -> str:
    return f"{count / 1e9:.3g}" if count < 1e9 else f"{count / 1e9:.1f}"


def table(rows: list[tuple[str, ...]]) -> str:
    """Columns as wide as they must be; the first to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in
                                                          zip(row[1:], widths[1:], strict=True))]) for row in rows)


def memory_table(config: ModelConfig, layout: Layout) -> str:
    """Training all weights, with LoRA, with QLoRA; each with and without recomputation. GB on the fullest rank."""
    rank = layout.lora_rank or 16
    kinds = [("all weights", {"lora_rank": 0, "qlora": False}), (f"LoRA {rank}", {"lora_rank": rank, "qlora": False})]
    if layout.tp == 1:
        kinds.append((f"QLoRA {rank}", {"lora_rank": rank, "qlora": True}))
    rows = [("GB on the fullest rank", *(part.name for part in fields(Memory)), "total")]
    for name, kind in kinds:
        for recompute in (False, True):
            memory = fullest(config, replace(layout, **kind, gradient_checkpointing=recompute))[1]
            rows.append((name + ", recomputation" * recompute,
                         *(gb(getattr(memory, part.name)) for part in fields(Memory)), gb(memory.total)))
    return table(rows)


def traffic_table(layout: Layout, sent: Traffic) -> str:
    sizes, rows = layout.groups, [("GB an update", "group", "ranks", "tensors", "on the wire")]
    rows += [(operation, group, str(sizes[group]), gb(count), gb(on_wire(operation, sizes[group], count)))
             for (operation, group), count in sorted(sent.items())]
    return table(rows)


def open_shape(name: str) -> ModelConfig:
    if name in SHAPES:
        return SHAPES[name]
    if not Path(name).is_dir():
        raise UserError(f"--model {name} is neither a folder nor one of {', '.join(SHAPES)}")
    return read_model_config(name)


def duration(count: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if count >= 2 * size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.1f} seconds"


def main(config: Config) -> None:
    """Print the plan: memory, bytes, idle time, and what would fit if this does not."""
    shape, layout = open_shape(config.model), config.layout
    if config.gpus:
        layout, _ = recommend(shape, layout, config.gpus, config.memory_gb)
    stage, memory = fullest(shape, layout)
    count = parameter_count(shape)
    print(f"{config.model}: {count:,} parameters on {layout.size} rank{'s' * (layout.size > 1)}: {layout.describe()}")
    one = held(local_model(shape, layout, stage))
    print(f"fullest rank (stage {stage}): {one.trained + one.frozen:,} parameters, {one.own_trained:,} of which it "
          "trains itself")
    print("\n" + memory_table(shape, layout))
    roles = role_memory(shape, layout, config.rollout_rows, config.rollout_length or config.sequence_length)
    print("\n" + table([("RL, GB a rank", *roles), ("", *map(gb, roles.values()))]))
    sent = traffic(shape, layout, stage)
    print("\n" + (traffic_table(layout, sent) if sent else "one rank sends nothing"))
    if layout.pp > 1:
        print(f"\npipeline: idle {bubble(layout):.1%} of the time")
        if layout.pp <= GANTT_STAGES and layout.microbatches <= GANTT_MICROBATCHES:
            print(gantt(layout.schedule, layout.pp, layout.microbatches, layout.chunks))
    step = layout.rows * layout.sequence_length
    times = [seconds(shape, layout, tokens, config.tflops, config.mfu) for tokens in (step, config.train_tokens)]
    print(f"\n{step:,} tokens an update: {duration(times[0])}; {config.train_tokens:.3g} tokens: {duration(times[1])} "
          f"({layout.size} x {config.tflops:g} TFLOP/s x {config.mfu:g})")
    if fits(memory, config.memory_gb):
        print(f"fits: {gb(memory.total)} of {config.memory_gb:g} GB, {SPARE:.0%} of which stay free")
        return
    print(f"does not fit: {gb(memory.total)} of {config.memory_gb:g} GB, {SPARE:.0%} of which stay free. What to "
          "change, in this order:")
    steps = list(ladder(shape, layout, config.memory_gb))[1:]
    for name, found, needs in steps:
        print(f"  {name:20} {gb(needs.total):>6} GB   on {found.size}: {found.describe()}")
    if not steps or not fits(steps[-1][2], config.memory_gb):
        print("  and then: shorter rows, smaller microbatches, or --lora-rank 16")


if __name__ == "__main__":
    run(main, Config, description=__doc__)
