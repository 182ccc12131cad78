"""ZeRO beside one process: the numbers, the bytes that are kept, the bytes that are sent, states for other worlds."""

import copy
import doctest
import gc
import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from ranks import Weigh, at_once, run_ranks
from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop

import minirl.parallel.zero as zero_module
from minirl.config import UserError
from minirl.costs import held
from minirl.generate import generate
from minirl.logprobs import token_logprobs
from minirl.lora import add_lora
from minirl.losses import aggregate, loss_total, sft_loss
from minirl.model import ModelConfig, Transformer
from minirl.optim import AdamW, ShardedAdamW, SkipCounter, clip_gradients, gradient
from minirl.parallel import Mesh, forward_backward, init_mesh
from minirl.parallel.placement import Placement, mark
from minirl.parallel.zero import Layout, gathered, layout_of, shard
from minirl.rollout import Rollout
from minirl.tokenizer import ByteTokenizer

pytestmark = pytest.mark.dist
LLAMA = ModelConfig(30, 8, 12, 3, 4, 2, max_position_embeddings=16)
QWEN3 = ModelConfig(29, 8, 10, 3, 4, 2, head_dim=6, qk_norm=True, tie_word_embeddings=False, max_position_embeddings=16)
LR, MAX_NORM, DECAY = 1e-2, 0.1, 0.1
# The rows of each rank: unequal numbers of microbatches, and a rank that has none.
SHARES = {1: [range(8)], 2: [range(5), range(5, 8)], 3: [[7, 1], range(2, 7), [0]],
          4: [[0, 1, 2], [], [3, 4, 5, 6], [7]]}


class Odd(Transformer):
    """With parameters whose sizes divide by nothing, and which some rows or all do not reach."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.spare = nn.Parameter(torch.empty(3, 1))  # row 0 alone has a loss on it
        self.layers[1].unused = nn.Parameter(torch.empty(7))
        for number in (0, 2):
            self.layers[number].mlp = Sometimes(self.layers[number].mlp, config.hidden_size)
        self.init_weights(torch.Generator().manual_seed(0))
        self.spare.data.fill_(1.0)
        self.layers[1].unused.data.fill_(1.0)


class Sometimes(nn.Module):
    """An MLP with an addition for some rows only, as an expert is."""

    def __init__(self, mlp: nn.Module, size: int):
        super().__init__()
        self.mlp, self.extra = mlp, nn.Parameter(torch.empty(size))

    def forward(self, x):
        chosen = x[:, :1, :1] > 0.9  # (B, 1, 1)
        return self.mlp(x) + chosen * self.extra if chosen.any() else self.mlp(x)


class Adapted(nn.Module):
    """A frozen linear layer with a trained low-rank addition."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        g = torch.Generator().manual_seed(base.in_features + base.out_features)
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(3, base.in_features, generator=g, dtype=base.weight.dtype))
        self.lora_B = nn.Parameter(torch.randn(base.out_features, 3, generator=g, dtype=base.weight.dtype))

    def forward(self, x):
        return self.base(x) + x @ self.lora_A.T @ self.lora_B.T


def make_model(config: ModelConfig = LLAMA, dtype: torch.dtype = torch.float64, lora: bool = False,
               checkpointing: bool = False) -> Transformer:
    model = (Odd(config) if not lora else Transformer(config).init_weights(torch.Generator().manual_seed(0))).to(dtype)
    if lora:
        model.requires_grad_(False)
        for block in model.layers[1:]:  # nothing is trained in the first block, nor before it
            block.self_attn.q_proj = Adapted(block.self_attn.q_proj)
            block.mlp.down_proj = Adapted(block.mlp.down_proj)
    model.gradient_checkpointing = checkpointing
    return model


def rows() -> Rollout:
    g = torch.Generator().manual_seed(1)
    lengths = torch.tensor([4, 5, 4, 6, 9, 8, 7, 10])
    tokens = torch.randint(0, 29, (8, 10), generator=g)
    mask = torch.arange(9) < lengths[:, None] - 1
    return Rollout(tokens, mask, lengths, torch.arange(8), torch.arange(8))


def update(model: Transformer, optimizer: AdamW, guard: SkipCounter, mesh: Mesh, mine: Rollout, poison: bool = False):
    """One update as in a trainer. Returns loss, norm before clipping, and this rank's gradients after it."""
    total = loss_total("token", mine.action_mask, mesh)

    def loss_fn(out, mb):
        loss = aggregate(sft_loss(out.logprobs), mb.action_mask, "token", total)
        if (mb.sample_ids == 0).any() and hasattr(model, "spare"):
            loss = loss + model.spare.square().sum()
        return loss * (math.nan if poison else 1), {"rows": torch.tensor(len(mb))}

    stats = forward_backward(model, mine.microbatches(2), loss_fn, mesh)
    assert stats["rows"] == 8, "rows that only keep step are not counted"
    norm = clip_gradients(model.parameters(), MAX_NORM, mesh)
    grads = {name: None if gradient(p) is None else gradient(p).clone() for name, p in model.named_parameters()}
    guard.step(optimizer, norm, LR, stats["loss"])
    optimizer.zero_grad()
    return stats["loss"], float(norm), grads


def make_optimizer(model: Transformer, offload: bool = False) -> AdamW:
    if hasattr(model, "zero"):
        return ShardedAdamW(model, LR, weight_decay=DECAY, offload=offload)
    return AdamW(model.named_parameters(), LR, weight_decay=DECAY, offload=offload)


def own_rows(mesh: Mesh) -> Rollout:
    return rows().rows(torch.tensor([*SHARES[mesh.dp][mesh.dp_rank]], dtype=torch.int64))


def train(stage: int, options: dict, steps: int = 5, offload: bool = False, start: dict | None = None,
          overlap: bool = False) -> dict:
    """`steps` updates on a rank; losses, norms, some gradients, and the weights and optimizer state at the end. Of
    gradients and state what this rank has: see `put_together`.

    start : what this function has returned, to go on from
    """
    mesh, model = init_mesh("cpu"), make_model(**options)
    mine = own_rows(mesh)
    if start:
        model.load_state_dict(start["weights"])
    shard(model, mesh, stage, overlap)
    optimizer, guard = make_optimizer(model, offload), SkipCounter()
    if start:
        optimizer.load_state_tensors(cut_state(start["state"], layout_of(model)) if stage else start["state"])
    losses, norms, grads = [], [], {}
    for step in range(steps):
        loss, norm, some = update(model, optimizer, guard, mesh, mine)
        losses.append(loss)
        norms.append(norm)
        if step in (0, steps - 1):
            grads |= {f"{step}: {name}": grad for name, grad in some.items() if grad is not None}
    with gathered(model):
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {"losses": losses, "norms": norms, "grads": grads, "weights": weights, "state": optimizer.state_tensors()}


def put_together(results: list[dict], stage: int) -> list[dict]:
    """What all ranks have returned, with the whole gradients and state in the place of their slices."""
    if not stage:
        return results
    state = merge_states([result["state"] for result in results])
    shapes = {name.partition(".")[2]: tensor.shape for name, tensor in state.items()}
    grads = {key: torch.cat([result["grads"][key] for result in results]).view(shapes[key.partition(" ")[2]])
             for key in results[0].get("grads", {})}
    return [result | {"grads": grads, "state": state} for result in results]


def merge_states(states: list[dict]) -> dict:
    """The states of all ranks as that of AdamW on the whole model."""
    return {"step": states[0]["step"]} | {
        key: torch.cat([state[key] for state in states]).view(states[0][f"shape.{name}"].tolist())
        for key in states[0] for kind, _, name in [key.partition(".")] if name and kind != "shape"}


def cut_state(whole: dict, layout: Layout) -> dict:
    """And one rank's part of that."""
    state = {"step": whole["step"], "ranks": torch.tensor([layout.rank, layout.ranks])}
    for key, tensor in whole.items():
        if (name := key.partition(".")[2]):
            start, stop = layout.spans[name]
            state |= {key: tensor.flatten()[start:stop], f"shape.{name}": torch.tensor(tensor.shape)}
    return state


CASES = {  # name -> options of the model
    "llama": {}, "recomputed": {"checkpointing": True}, "qwen3": {"config": QWEN3}, "lora": {"lora": True},
    "lora recomputed": {"lora": True, "checkpointing": True}, "offloaded": {}, "overlap": {},
}
STEPS = {name: 5 if name in ("llama", "qwen3") else 3 for name in CASES}
RUNS = {  # ranks -> (stage, case)
    2: [*((stage, "llama") for stage in range(4)),
        (3, "qwen3"), (3, "recomputed"), (3, "lora recomputed"), (1, "offloaded")],
    3: [(1, "llama"), (3, "llama"), (3, "overlap")],
    4: [(0, "qwen3"), (1, "lora"), (2, "qwen3"), (3, "llama"), (3, "offloaded"), (3, "lora")],
}


def all_runs(ranks: int) -> dict:
    """Everything that needs so many ranks, in one start of them."""
    results = {}
    for stage, name in RUNS[ranks]:
        with set_checkpoint_early_stop(name != "recomputed"):  # to the block's end, as torch does not by itself
            results[stage, name] = train(stage, CASES[name], STEPS[name], name == "offloaded",
                                         overlap=name == "overlap")
    if ranks == 2:
        results |= {("sent", stage): sent(stage) for stage in range(4)}
        results |= {("poisoned", stage): poisoned(stage) for stage in range(1, 4)}
        results |= {("bfloat16", stage): bfloat16(stage) for stage in range(4)}
        results |= {"outside": outside()}
    if ranks == 4:
        results |= {("memory", name): memory(stage, **options) for name, (stage, options) in WEIGHED.items()}
        results |= {("tensor parallel", stage): with_tensor_parallelism(stage) for stage in range(4)}
    return results


@pytest.fixture(scope="module")
def alone() -> dict:
    return {name: train(0, options, STEPS[name]) for name, options in CASES.items()}


@pytest.fixture(scope="module")
def together() -> dict:
    found = dict(zip(RUNS, at_once(*(partial(run_ranks, all_runs, ranks, ranks) for ranks in RUNS)), strict=True))
    for ranks, results in found.items():
        for key in [*RUNS[ranks], *(key for key in results[0] if key[0] == "bfloat16")]:
            stage = key[1] if key[0] == "bfloat16" else key[0]
            for result, whole in zip(results, put_together([result[key] for result in results], stage), strict=True):
                result[key] = whole
    return found


def close(one: dict, other: dict, rtol: float, atol: float, where: str) -> None:
    assert one.keys() == other.keys(), where
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=rtol, atol=atol,
                                   msg=lambda text, name=name: f"{where} {name}: {text}")


@pytest.mark.parametrize(("ranks", "stage", "name"), [(n, *run) for n, runs in RUNS.items() for run in runs])
def test_losses_norms_gradients_and_updates_are_those_of_one_process(alone, together, ranks, stage, name):
    expected = alone[name]
    assert min(expected["norms"]) > MAX_NORM, "clipping must be at work"
    for rank, results in enumerate(together[ranks]):
        got, where = results[stage, name], f"rank {rank} of {ranks}, ZeRO-{stage}, {name}:"
        assert got["losses"] == pytest.approx(expected["losses"], rel=1e-12), where
        assert got["norms"] == pytest.approx(expected["norms"], rel=1e-12), where
        close(got["grads"], expected["grads"], 1e-9, 1e-13, f"{where} gradient")
        close(got["weights"], expected["weights"], 0, 1e-12, f"{where} weight")
        close(got["state"], expected["state"], 1e-9, 1e-12, f"{where} state")


def test_what_no_row_reaches_decays_alike_in_every_layout(alone):
    weights = alone["llama"]["weights"]
    assert (weights["layers.1.unused"] == 1).all(), "a vector never decays"
    assert (weights["spare"] < 0.97).all(), "row 0 reached it"


# ------------------------------------------------------------------ what is sent and what is kept


def sizes(model: Transformer, ranks: int) -> tuple[int, int]:
    """Bytes of the flat vectors of all blocks, and of both ends, each padded to a multiple of the ranks."""
    numels: dict[str, int] = {}
    for name, p in model.named_parameters():
        unit = name.split(".")[1] if name.startswith("layers.") else "front" if name.startswith("embed") else "head"
        numels[unit] = numels.get(unit, 0) + p.numel()
    padded = {unit: -(-numel // ranks) * ranks * model.norm.weight.itemsize for unit, numel in numels.items()}
    ends = padded["front"] + padded["head"]
    return sum(padded.values()) - ends, ends


def sent(stage: int) -> dict:
    """Bytes of one update, by collective."""
    mesh, model = init_mesh("cpu"), make_model()
    blocks, ends = sizes(model, mesh.dp)
    plain = sum(p.nbytes for p in model.parameters())
    optimizer = make_optimizer(shard(model, mesh, stage))
    mesh.ledger.clear()
    update(model, optimizer, SkipCounter(), mesh, own_rows(mesh))
    return {"blocks": blocks, "ends": ends, "plain": plain} | {
        operation: total for (operation, group), total in mesh.ledger.bytes.items() if group == "dp_cp"}


def test_bytes_of_an_update_are_those_of_the_docstring(together):
    for result in together[2]:
        found, M = {stage: result["sent", stage] for stage in range(4)}, 3  # of 5 rows, two at a time
        blocks, ends = found[0]["blocks"], found[0]["ends"]
        assert blocks + ends > found[0]["plain"], "padding is sent too"
        statistics = found[1]["all_reduce"]
        assert found[0]["all_reduce"] - statistics + 8 == found[0]["plain"]  # 8: the norm is one sum more over slices
        assert "all_gather" not in found[0] and "reduce_scatter" not in found[0]
        assert (found[1]["reduce_scatter"], found[1]["all_gather"]) == (blocks + ends, blocks + ends)
        assert (found[2]["reduce_scatter"], found[2]["all_gather"]) == (M * (blocks + ends), blocks + ends)
        assert (found[3]["reduce_scatter"], found[3]["all_gather"]) == (M * (blocks + ends), (2 * blocks + ends) * M)


N, NARROW = 4, ModelConfig(300, 64, 160, 4, 4, 2, max_position_embeddings=16, tie_word_embeddings=False)
WEIGHED = {  # what is weighed: stage, options
    **{f"ZeRO-{stage}": (stage, {}) for stage in range(4)}, "overlap": (3, {"overlap": True}),
    "tied": (3, {"tied": True}), "recomputed": (3, {"checkpointing": True}), "frozen": (3, {"frozen": True}),
    "large ends": (3, {"vocab": 900}),
}


def memory(stage: int, vocab: int = 300, tied: bool = False, overlap: bool = False, checkpointing: bool = False,
           frozen: bool = False) -> dict:
    """Bytes of parameters, gradients and optimizer: at rest, with gradients, and at most during an update.

    Every storage is counted that is alive after any operation, but for activations: those that autograd keeps are told
    apart, and those on the way to the next operation are of three tokens. What gloo copies for itself is its own.
    """
    mesh, weigh = init_mesh("cpu"), Weigh()
    watched = mesh.dp_rank == 0  # all hold alike
    config = replace(NARROW, vocab_size=vocab, tie_word_embeddings=tied)
    ids = torch.arange(3)
    mine = Rollout(torch.zeros(3, 3, dtype=torch.int64), torch.ones(3, 2, dtype=torch.bool), ids * 0 + 3, ids, ids)

    def begin(part, whole, group, real=zero_module.begin_reduce_scatter):
        wait = real(part, whole, group)

        def wait_blindly():
            weigh.blind = True
            wait()
            weigh.blind = False
        return wait_blindly

    with pytest.MonkeyPatch.context() as patch, weigh if watched else nullcontext():
        patch.setattr(zero_module, "begin_reduce_scatter", begin)
        model = Transformer(config).init_weights(torch.Generator().manual_seed(0))
        model.gradient_checkpointing = checkpointing
        model.layers.requires_grad_(not frozen)
        optimizer = make_optimizer(shard(model, mesh, stage, overlap))
        gc.collect()
        rest, weigh.most = weigh.now(), 0
        weigh.weights = {p.untyped_storage()._cdata for p in model.parameters()}
        with weigh.activations() if watched else nullcontext():
            forward_backward(model, mine.microbatches(1), lambda out, mb: (out.logprobs.sum(), {}), mesh)
        gc.collect()
        whole, block, ends = (4 * sum(p.numel() for p in part.parameters())
                              for part in (model, model.layers[0], nn.ModuleList([model.embed_tokens])))
    return {"P": whole, "block": block, "embedding": ends, "rest": rest, "with gradients": weigh.now(),
            "peak": weigh.most, "planned": 4 * held(model).passing if stage else 0, "optimizer": optimizer.updates}


@pytest.mark.parametrize("name", WEIGHED)
def test_storages_are_those_of_the_docstring(together, name):
    """Steady: a quarter of parameters, gradients and optimizer. On the way, with ZeRO-3, two units; and planned so."""
    stage, options = WEIGHED[name]
    found = together[N][0]["memory", name]
    P, block, embedding = found["P"], found["block"], found["embedding"]
    trained = P - 4 * block if "frozen" in options else P
    parameters, gradients = P / N if stage == 3 else P, trained / N if stage else trained
    optimizer = 2 * (trained / N if stage else trained)
    where = f"{name}: {found}"
    assert found["rest"] == pytest.approx(parameters + optimizer, rel=0.01), where
    assert found["with gradients"] == pytest.approx(parameters + optimizer + gradients, rel=0.01), where
    steady = found["with gradients"] if stage > 1 else found["rest"] + P  # gradients are whole until the end
    if stage:
        assert found["peak"] < steady + found["planned"] + 0.05 * block, where
    if stage == 3:
        units = 4 + 1 / N if "overlap" in options else 2
        planned = units * max(block, embedding) + embedding * ("tied" in options)
        assert found["planned"] == pytest.approx(planned, rel=0.01), where
        assert found["peak"] > steady + 0.9 * planned, where


# ------------------------------------------------------------------ numbers that are not finite, or not exact


def poisoned(stage: int) -> list:
    """Three updates, NaN on the last rank in the second. Weights after each."""
    mesh, model = init_mesh("cpu"), make_model()
    optimizer, guard, states, mine = make_optimizer(shard(model, mesh, stage)), SkipCounter(), [], own_rows(mesh)
    for step in range(3):
        _, norm, _ = update(model, optimizer, guard, mesh, mine, poison=step == 1 and mesh.dp_rank == mesh.dp - 1)
        with gathered(model):
            states.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        assert math.isfinite(norm) == (step != 1)
    return [guard.skipped, optimizer.updates, *states]


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_a_nan_on_one_rank_skips_the_update_on_all(together, stage):
    for result in together[2]:
        skipped, updates, first, second, third = result["poisoned", stage]
        assert (skipped, updates) == (1, 2)
        assert torch.equal(first, second) and not torch.equal(second, third) and third.isfinite().all()


def bfloat16(stage: int) -> dict:
    mesh, model = init_mesh("cpu"), make_model(dtype=torch.bfloat16)
    optimizer, guard, mine = make_optimizer(shard(model, mesh, stage)), SkipCounter(), own_rows(mesh)
    assert all(master.dtype == torch.float32 for master in optimizer.master.values())
    for _ in range(3):
        update(model, optimizer, guard, mesh, mine)
    with gathered(model):
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {"weights": weights, "state": optimizer.state_tensors()}


def test_bfloat16_weights_are_their_float32_masters_rounded_and_those_of_plain_data_parallelism(together):
    for result in together[2]:
        for stage in range(4):
            found, plain = result["bfloat16", stage], result["bfloat16", 0]
            for name, weight in found["weights"].items():
                master = found["state"][f"master.{name}"]
                assert torch.equal(weight, master.bfloat16()), (stage, name)
                # Three steps of 1e-2 each, along gradients that are summed in another order and rounded at each sum.
                off = (master - plain["state"][f"master.{name}"]).abs()
                assert off.median() < 1e-3 and off.max() < 3e-2, (stage, name)


# ------------------------------------------------------------------ with tensor parallelism


def with_tensor_parallelism(stage: int) -> dict:
    """The norm before clipping, in a job of two replicas of two ranks. Each of the two has a half of q_proj (in name
    only), the same k_proj, a part of the norm's gradient, and the same of all else."""
    mesh, model = init_mesh("cpu", dp=2, tp=2), make_model(QWEN3)
    mark(model.norm.weight, Placement(partial=True))
    for block in model.layers:
        mark(block.self_attn.q_proj.weight, Placement(0, (24, 24)))
        mark(block.self_attn.k_proj.weight, Placement(0, (12,), copies=2))
    mine = rows().rows(torch.tensor([2 * mesh.dp_rank, 4]))
    shard(model, mesh, stage)
    scale = 1.0 + mesh.tp_rank  # what differs between the ranks of tp

    def loss_fn(out, mb):
        attentions = [block.self_attn for block in model.layers]
        parts = sum(a.q_proj.weight.sum() + a.k_proj.weight.sum() for a in attentions) + model.norm.weight.sum()
        return out.logprobs.sum() * 0 + parts * scale + model.layers[1].mlp.up_proj.weight.sum(), {}

    with gathered(model):  # the loss reads weights of the blocks
        forward_backward(model, mine.microbatches(1), loss_fn, mesh)
    return float(clip_gradients(model.parameters(), 1.0, mesh))


def test_the_norm_counts_every_number_once_over_tensor_parallel_ranks_and_slices(together):
    # Two replicas of two microbatches: everything is summed 4 times. q_proj: 3 layers of 24 x 8 on each of two ranks,
    # gradients 4 and 8. k_proj: the same 12 x 8 on both, 4 (1 + 2), as the norm's 8. up_proj: 10 x 8, 4, on both.
    expected = 3 * 24 * 8 * (4**2 + 8**2) + (3 * 12 * 8 + 8) * 12**2 + 80 * 4**2
    for result in together[4]:
        for stage in range(4):
            norm = result["tensor parallel", stage]
            assert norm == pytest.approx(math.sqrt(expected), rel=1e-12), f"ZeRO-{stage}"


# ------------------------------------------------------------------ outside of an update


def outside() -> list[str]:
    """What a model in slices says to those who use it as a whole."""
    mesh, said = init_mesh("cpu"), []
    config = ModelConfig(258, 8, 12, 2, 4, 2, max_position_embeddings=32)
    plain, model = (Transformer(config).init_weights(torch.Generator().manual_seed(0)) for _ in range(2))
    shard(model, mesh, 3)
    tokens = torch.arange(12).view(1, 12)
    norm = model.layers[0].input_layernorm.weight
    reads = (lambda: model(tokens), model.state_dict, norm.sum, lambda: norm + 1, lambda: norm.T, lambda: norm.data,
             lambda: torch.ones(8) @ norm, lambda: norm[0], norm.tolist, lambda: str(norm), lambda: copy.deepcopy(norm))
    for use in (*reads, lambda: shard(model, mesh, 3), lambda: shard(plain, mesh, 4), lambda: add_lora(model)):
        with pytest.raises((RuntimeError, UserError)) as error:
            use()
        said.append(str(error.value))
    assert norm.shape == (8,) and norm.grad is None and norm.requires_grad and isinstance(norm, nn.Parameter)
    with gathered(model), gathered(model):
        torch.testing.assert_close(token_logprobs(model, tokens), token_logprobs(plain, tokens), rtol=0, atol=0)
        drawn, expected = (generate(m, [[1, 2, 3]], ByteTokenizer(), max_new_tokens=8).tokens for m in (model, plain))
        assert torch.equal(drawn, expected)
        state = model.state_dict()
        assert all(torch.equal(tensor, state[name]) for name, tensor in plain.state_dict().items())
    assert all(not flat.here for flats in model.zero.units.values() for flat in flats)
    optimizer, other = ShardedAdamW(model, LR), AdamW(plain.named_parameters(), LR)
    for state in (optimizer.state_tensors() | {"ranks": torch.tensor([0, 3])}, other.state_tensors()):
        with pytest.raises(UserError) as error:
            optimizer.load_state_tensors(state)
        said.append(str(error.value))
    return said


def test_a_model_in_slices_says_so_and_is_whole_inside_gathered(together):
    said = [result["outside"] for result in together[2]]
    assert said[0][:14] == said[1][:14] == 11 * [
        "the model's parameters lie in slices: use it in forward_backward, or in `with gathered(model)` on every rank"
    ] + ["the model is sharded already, by ZeRO-3: load it anew to change that",
         "--zero 4 is unknown: use 0 (off), 1, 2 or 3",
         "the model is spread over ranks already: put adapters on before parallelize"]
    assert said[1][14:] == [f"optimizer state of {whose}, but this is rank 1 of 2: load_checkpoint(folder, model, "
                           "mesh) reads what this rank needs" for whose in ("rank 0 of 3", "the whole model")]


# ------------------------------------------------------------------ states


def test_a_run_goes_on_over_4_then_2_then_1_then_3_ranks_as_if_it_had_not_stopped():
    whole, losses, result = train(0, {}, steps=8), [], None
    for ranks, stage in ((4, 2), (2, 3), (1, 1), (3, 1)):
        arguments = stage, {}, 2, False, result
        found = run_ranks(train, ranks, *arguments) if ranks > 1 else [train(*arguments)]
        result = put_together(found, stage)[0]
        losses += result["losses"]
    assert losses == pytest.approx(whole["losses"], rel=1e-9)
    close(result["weights"], whole["weights"], 0, 1e-10, "after 8 updates, weight")
    close(result["state"], whole["state"], 1e-9, 1e-12, "after 8 updates, state")


def test_the_example_in_the_docstring_of_span():
    assert doctest.testmod(zero_module).failed == 0
