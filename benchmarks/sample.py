"""Sampling: `minirl.generate` beside `transformers` generate, on the same weights, in turns.

    python benchmarks/sample.py                 needs the optional package transformers
    python benchmarks/sample.py --profile       where minirl's time goes

64 rows of 16 prompt tokens, 64 new tokens each at temperature 1, in float32. Both sides sample the whole distribution
with their key/value cache; nobody draws an end of text, so each row really gets its 64 tokens. minirl also returns the
log-probability of each. Rounds alternate and the ratio is taken round by round: another program on the machine slows
both sides alike.

The floor is what the linear layers of the same forward passes cost with nothing in between.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from time import perf_counter

import torch
from torch import nn

from minirl.checkpoint import load_model, save_model
from minirl.generate import generate
from minirl.model import ModelConfig, Transformer
from minirl.tokenizer import ByteTokenizer

ROWS, PROMPT, NEW = 64, 16, 64


class EndlessTokenizer(ByteTokenizer):
    """512 tokens of which none ends a text."""

    vocab_size, eos_id, pad_id = 512, -1, 0


def small_model() -> Transformer:
    config = ModelConfig(vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=4,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256)
    return Transformer(config).init_weights(torch.Generator().manual_seed(0))


def seconds(function: Callable[[], object]) -> float:
    start = perf_counter()
    function()
    return perf_counter() - start


def alternate(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each function in each round: A B A B ...; one round before them warms up and is not counted."""
    times = {name: [] for name in functions}
    for r in range(rounds + 1):
        for name, function in functions.items():
            taken = seconds(function)
            if r:
                times[name].append(taken)
    return times


def turns(times: dict[str, list[float]], steps: dict[str, Callable[[], object]], warm_up: int) -> object:
    """A callback for one of TRL's trainers: whenever that has made a step, each of the others makes one.

    times : gets the seconds of each, and of "TRL", in the steps behind the first `warm_up`
    """
    from transformers import TrainerCallback

    class TakeTurns(TrainerCallback):
        def on_train_begin(self, *args, **kwargs) -> None:
            self.began = perf_counter()

        def on_step_end(self, args, state, control, **kwargs) -> None:
            taken = {"TRL": perf_counter() - self.began} | {name: seconds(step) for name, step in steps.items()}
            if state.global_step > warm_up:
                for name, value in taken.items():
                    times.setdefault(name, []).append(value)
            self.began = perf_counter()

    return TakeTurns()


def report(times: dict[str, list[float]], ours: str, theirs: str) -> None:
    """Median and fastest round of each, then the ratio: median and quartiles of the rounds, and of the fastest."""
    for name, values in times.items():
        print(f"{name:24} median {1e3 * statistics.median(values):8.1f} ms   fastest {1e3 * min(values):8.1f} ms")
    ratios = [b / a for a, b in zip(times[ours], times[theirs], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"{theirs} / {ours}: {middle:.2f} times (quartiles {low:.2f} to {high:.2f}), "
          f"fastest rounds {min(times[theirs]) / min(times[ours]):.2f} times, {len(ratios)} rounds")


def transformers_sampler(folder: str, prompts: list[list[int]]) -> Callable[[], None]:
    """transformers' own loop with its defaults for speed: dynamic cache, fused attention, inference mode."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise SystemExit("error: this benchmark compares with transformers: pip install transformers") from None
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    tokens = torch.tensor(prompts)
    mask = torch.ones_like(tokens)

    def run() -> None:
        with torch.inference_mode():
            out = model.generate(tokens, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                                 max_new_tokens=NEW, min_new_tokens=None, eos_token_id=None, pad_token_id=0)
        assert out.shape == (ROWS, PROMPT + NEW), out.shape

    return run


@torch.inference_mode()
def linear_layers(model: Transformer) -> None:
    """The matrix products of one run: the prompts, then a step for each new token, then the head of each."""
    layers = [module for block in model.layers for module in block.modules() if isinstance(module, nn.Linear)]
    inputs = {size: torch.randn(ROWS, size) for size in {layer.in_features for layer in layers}}
    for rows in (ROWS * (PROMPT - 1), *[ROWS] * NEW):
        for layer in layers:
            layer(inputs[layer.in_features].expand(rows // ROWS, -1, -1) if rows > ROWS else
                  inputs[layer.in_features])
    for _ in range(NEW):
        model.logits(inputs[model.config.hidden_size])


GROUPS = {  # of operations, by what they are for
    "linear layers": ("aten::mm", "aten::addmm", "aten::linear"),
    "attention": ("aten::bmm", "aten::baddbmm", "aten::_softmax", "aten::_scaled_dot_product"),
    "cache writes": ("aten::index_put_", "aten::_index_put_impl_", "aten::scatter_", "aten::index_copy_"),
    "sampling": ("aten::_log_softmax", "aten::exp", "aten::sum", "aten::cumsum", "aten::searchsorted", "aten::gather",
                 "aten::bitwise", "aten::__rshift__", "aten::minimum"),
}


def profile(run: Callable[[], object]) -> None:
    """Self time by group of operations. The profiler itself costs about a microsecond an operation."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    run()
    with torch_profile(activities=[ProfilerActivity.CPU]) as trace:
        wall = seconds(run)
    operations = [event for event in trace.key_averages() if event.key.startswith("aten::")]
    rest = "norms, rotation, elementwise"
    totals = dict.fromkeys([*GROUPS, rest], 0.0)
    for event in operations:
        group = next((name for name, keys in GROUPS.items() if event.key.startswith(keys)), rest)
        totals[group] += event.self_cpu_time_total / 1e6
    totals["Python"] = wall - sum(totals.values())
    for name, value in totals.items():
        print(f"{name:30} {1e3 * value:8.1f} ms  {value / wall:6.1%}")
    print(f"\n{'operation':30} {'calls':>7} {'self ms':>9}")
    for event in sorted(operations, key=lambda e: -e.self_cpu_time_total)[:25]:
        print(f"{event.key:30} {event.count:7} {event.self_cpu_time_total / 1e3:9.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    prompts = torch.randint(512, (ROWS, PROMPT), generator=torch.Generator().manual_seed(1)).tolist()
    tokenizer = EndlessTokenizer()
    with tempfile.TemporaryDirectory() as folder:
        save_model(small_model(), folder)
        model = load_model(folder)

        def ours() -> None:
            rollout = generate(model, prompts, tokenizer, max_new_tokens=NEW)
            assert rollout.action_mask.sum() == ROWS * NEW

        if args.profile:
            return profile(ours)
        theirs = transformers_sampler(folder, prompts)
    report(alternate({"minirl": ours, "transformers": theirs, "linear layers alone": lambda: linear_layers(model)},
                     args.rounds), "minirl", "transformers")


if __name__ == "__main__":
    main()
