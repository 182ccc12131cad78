"""Every layout is the same run: losses, weights after five updates, samples and checkpoints of one process.

`pytest tests/test_layouts.py --every-model` tries all layouts with all models, five updates each.
"""

import copy
import gc
import shutil
from functools import partial
from math import prod
from pathlib import Path

import pytest
import torch
from ranks import at_once, bytes_in_memory, run_ranks
from safetensors.torch import load_file, save_file

from minirl import checkpoint
from minirl.architectures import Stored
from minirl.checkpoint import load_checkpoint, load_model, save_checkpoint, save_model
from minirl.config import UserError
from minirl.env import make_env
from minirl.env.loop import collect
from minirl.evaluate import evaluate
from minirl.logprobs import Output, rollout_logprobs
from minirl.losses import aggregate, clipped_surrogate, loss_total, policy_stats
from minirl.model import ModelConfig, Transformer
from minirl.optim import adamw, clip_gradients
from minirl.parallel import Mesh, forward_backward, init_mesh, tensor, zero
from minirl.parallel.layout import Saved, parallelize, read_training
from minirl.parallel.placement import Placement
from minirl.parallel.zero import gathered
from minirl.rollout import Rollout
from minirl.tokenizer import ByteTokenizer, load_tokenizer

pytestmark = pytest.mark.dist
LLAMA = ModelConfig(258, 32, 48, 4, 4, 2, max_position_embeddings=64, tie_word_embeddings=True, rope_theta=100.0)
QWEN3 = ModelConfig(258, 24, 40, 4, 4, 2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=False,
                    qk_norm=True, rope_theta=100.0)
STORIES = Path(__file__).resolve().parents[2] / "shared/models/stories260k"
MODELS = {  # a trained model of 5 layers, 8 heads, 4 key heads and 512 words; without the file one of its kind
    "stories260k": str(STORIES) if STORIES.is_dir() else LLAMA,
    "qwen3": QWEN3,  # 2 key heads, its output matrix not tied
    "llama": LLAMA,
}
FIVE = (range(1), range(1, 5))  # updates, with a checkpoint at the end of each part
STEPS = {"stories260k": FIVE, "qwen3": (range(1),)}
BOTH, ONE = ("stories260k", "qwen3"), ("stories260k",)
LAYOUTS = {  # ranks -> layout, models. One axis over four ranks is tried with others in the tests of that axis
    1: [(dict(), BOTH)],
    2: [(dict(dp=2), BOTH),
        (dict(tp=2), BOTH),
        (dict(tp=2, sequence=True), BOTH),
        (dict(pp=2, schedule="gpipe"), BOTH),
        (dict(pp=2, schedule="1f1b"), BOTH),
        (dict(pp=2, schedule="interleaved", chunks=2), BOTH),
        (dict(cp=2, context_kind="ring"), BOTH),
        (dict(cp=2, context_kind="ulysses"), BOTH),
        (dict(dp=2, zero_stage=1), BOTH),
        (dict(dp=2, zero_stage=2), BOTH),
        (dict(dp=2, zero_stage=3), BOTH)],
    4: [(dict(dp=4), ONE),
        (dict(tp=4), ONE),
        (dict(pp=4), ONE),
        (dict(cp=4, context_kind="ring"), ONE),
        (dict(cp=4, context_kind="ulysses"), BOTH),  # 2 key heads for 4 ranks: copies
        (dict(dp=4, zero_stage=1), ONE),
        (dict(dp=4, zero_stage=2), ONE),
        (dict(dp=4, zero_stage=3), ONE),
        (dict(dp=2, tp=2), BOTH),
        (dict(dp=2, tp=2, sequence=True, zero_stage=2), BOTH),
        (dict(dp=2, pp=2, zero_stage=1), BOTH),
        (dict(dp=2, pp=2, zero_stage=3, schedule="interleaved", chunks=2), BOTH),
        (dict(dp=2, cp=2, zero_stage=3), BOTH),
        (dict(tp=2, pp=2), BOTH),
        (dict(tp=2, cp=2, sequence=True), BOTH),
        (dict(pp=2, cp=2), BOTH)],
    8: [(dict(dp=2, tp=2, pp=2), ONE),
        (dict(dp=2, tp=2, pp=2, sequence=True, zero_stage=1), BOTH)],
}
AXES = ("dp", "pp", "cp", "tp")


def some_rows(words: int = 256, rows: int = 8) -> Rollout:
    """Rows of different lengths, half their tokens chosen, as if sampled by a policy a little different from this."""
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(4, 14, (rows,), generator=generator)
    T = int(lengths.max())
    tokens = torch.randint(words, (rows, T), generator=generator)
    column = torch.arange(1, T)
    mask = (torch.rand(rows, T - 1, generator=generator) < 0.6) & (column < lengths[:, None])
    old = torch.empty(rows, T - 1, dtype=torch.float64).uniform_(-6.5, -4.5, generator=generator)
    advantages = torch.randn(rows, 1, dtype=torch.float64, generator=generator)
    ids = torch.arange(rows)
    return Rollout(tokens=tokens, action_mask=mask, lengths=lengths, group=ids // 2, sample_ids=ids, old_logprobs=old,
                   advantages=advantages)


def model_of(source: ModelConfig | str) -> Transformer:
    if isinstance(source, str):
        return load_model(source, torch.float64)
    return Transformer(source).init_weights(torch.Generator().manual_seed(1)).double()


def train(model: Transformer, mesh: Mesh, steps: range, optimizer=None) -> tuple[list, object]:
    """Some GRPO updates on fixed rows; each step's stats."""
    optimizer = optimizer or adamw(model, 1e-2, weight_decay=0.1)
    rows, history = some_rows(model.config.vocab_size - 2), []
    share = mesh.share(len(rows))
    mine = rows.rows(torch.arange(share.start, share.stop))
    for step in steps:
        mode = ("token", "sequence", "constant")[step % 3]
        total = loss_total(mode, mine.action_mask, mesh, mine.group, 9)

        def loss_fn(out: Output, mb: Rollout, mode=mode, total=total):
            per_token = clipped_surrogate(out.logprobs, mb.old_logprobs, mb.advantages, 0.2, 0.3)
            loss = aggregate(per_token, mb.action_mask, mode, total, None, mb.row_tokens)
            return loss, policy_stats(out.logprobs, mb.old_logprobs, None, out.entropy, mb.advantages, mb.action_mask,
                                      0.2, 0.3, row_tokens=mb.row_tokens)

        stats = forward_backward(model, mine.microbatches(max(2, len(mine) // 2)), loss_fn, mesh, 0.7, entropy=True)
        stats["grad_norm"] = float(clip_gradients(model.parameters(), 0.5, mesh))
        optimizer.step()
        optimizer.zero_grad()
        history.append(stats)
    return history, optimizer


def cases(world: int, every: bool) -> list[tuple[int, dict, dict[str, tuple[range, ...]]]]:
    """(number, layout, the models that it is tried with and their updates)."""
    return [(number, layout, dict.fromkeys(MODELS, FIVE) if every else {name: STEPS[name] for name in names})
            for number, (layout, names) in enumerate(LAYOUTS[world])]


def every_layout(folder: str, world: int, every: bool) -> list:
    """On each rank: what every layout and model came to, and its checkpoints in a folder of their own."""
    found, env = [], make_env("addition", difficulty=1)
    opened = {name: model_of(source) for name, source in MODELS.items()}
    tokenizer = load_tokenizer(STORIES) if MODELS["stories260k"] == str(STORIES) else ByteTokenizer()
    for number, layout, models in cases(world, every):
        mesh = init_mesh("cpu", **{axis: layout.get(axis, 1) for axis in AXES})
        options = {name: value for name, value in layout.items() if name not in AXES}
        for name, parts in models.items():
            model = parallelize(copy.deepcopy(opened[name]), mesh, **options)
            history, optimizer = [], None
            for steps in parts:
                more, optimizer = train(model, mesh, steps, optimizer)
                history += more
                out = Path(folder) / f"{number}_{name}"
                save_checkpoint(out, steps.stop, model, None, optimizer.state_tensors(), {}, mesh=mesh)
            with torch.no_grad(), gathered(model):
                logprobs = rollout_logprobs(model, some_rows(), 3, 0.7, mesh)
                sampled, metrics = (), {}
                if name == "stories260k":  # of two models one is enough
                    rows = collect(model, tokenizer, env, env.sample(4), 2, 0, mesh, max_new_tokens=4, seed=3)
                    sampled = (rows.tokens, rows.rewards, rows.old_logprobs)
                    metrics = evaluate(model, tokenizer, env, 5, mesh, 3)
            found.append((number, name, history, logprobs, sampled, metrics))
    return found


def saved(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Weights, and AdamW's averages: `exp_avg` after the first step is a tenth of each clipped gradient."""
    return load_file(run / f"step_{step}/model.safetensors") | load_checkpoint(run / f"step_{step}")[0]


@pytest.fixture(scope="module")
def every(request) -> bool:
    return request.config.getoption("--every-model")


@pytest.fixture(scope="module")
def spread(tmp_path_factory, every) -> dict[int, tuple[Path, list]]:
    """By the number of ranks: the folder of their checkpoints, and what each rank returned."""
    folders = {world: tmp_path_factory.mktemp(f"ranks_{world}") for world in LAYOUTS}
    jobs = [partial(run_ranks, every_layout, world, str(folder), world, every, timeout=900 if every else 280)
            for world, folder in folders.items()]
    return {world: (folder, found) for (world, folder), found in zip(folders.items(), at_once(*jobs), strict=True)}


@pytest.fixture(scope="module")
def alone(spread, every) -> dict[str, tuple]:
    """Of one process, by the model."""
    folder, [results] = spread[1]
    parts = cases(1, every)[0][2]
    return {name: (*found, {steps.stop: saved(folder / f"0_{name}", steps.stop) for steps in parts[name]})
            for _, name, *found in results}


@pytest.mark.parametrize("world", [2, 4, 8])
def test_every_layout_is_the_run_of_one_process(world, spread, alone, every):
    close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-10)
    layouts, (folder, ranks) = [layout for layout, _ in LAYOUTS[world]], spread[world]
    for found in ranks:
        for number, name, history, logprobs, sampled, metrics in found:
            where = f"{layouts[number]}, {name}"
            history1, logprobs1, sampled1, metrics1, _ = alone[name]
            for step, (stats, stats1) in enumerate(zip(history, history1, strict=True)):
                assert stats == pytest.approx(stats1, rel=1e-9, abs=1e-11), (where, step)
            mask = some_rows().action_mask
            close(logprobs[mask], logprobs1[mask], msg=where)
            for x, x1 in zip(sampled, sampled1):
                close(x, x1, msg=where)
            assert metrics == pytest.approx(metrics1 if metrics else {}), where
    for number, name in [(number, name) for number, _, models in cases(world, every) for name in models]:
        for step, theirs in alone[name][-1].items():
            ours, where = saved(folder / f"{number}_{name}", step), f"{layouts[number]}, {name}, step {step}"
            assert ours.keys() == theirs.keys(), where
            for key in theirs:
                close(ours[key], theirs[key], msg=f"{where}: {key}",
                      atol=1e-12 if step == 1 and key.startswith("exp_avg") else 1e-10)


def go_on(layout: dict, start: str, folder: str) -> list:
    """Three more updates from a checkpoint in another layout; and then two from the beginning, with a checkpoint."""
    mesh = init_mesh("cpu", **{axis: layout.get(axis, 1) for axis in AXES})
    options = {name: value for name, value in layout.items() if name not in AXES}
    history = []
    if start:
        model = parallelize(load_model(start, torch.float64), mesh, **options)
        optimizer = adamw(model, 1e-2, weight_decay=0.1)
        optimizer.load_state_tensors(load_checkpoint(start, model, mesh)[0])
        history = train(model, mesh, range(3), optimizer)[0]
    write(folder, layout)
    return history


def write(folder: str, layout: dict) -> None:
    mesh = init_mesh("cpu", **{axis: layout.get(axis, 1) for axis in AXES})
    options = {name: value for name, value in layout.items() if name not in AXES}
    model = parallelize(model_of(LLAMA), mesh, **options)
    _, optimizer = train(model, mesh, range(2))
    save_checkpoint(folder, 2, model, None, optimizer.state_tensors(), {"step": 2}, mesh=mesh)


def test_a_run_goes_on_in_another_layout(tmp_path):
    model = model_of(LLAMA)
    _, optimizer = train(model, Mesh(), range(2))
    wanted, _ = train(model, Mesh(), range(3), optimizer)
    chain = [(4, dict(tp=4)), (2, dict(dp=2, zero_stage=3)), (4, dict(dp=2, pp=2, zero_stage=1)), (1, {}),
             (4, dict(tp=2, pp=2)), (4, dict(tp=4))]
    start = ""
    for number, (world, layout) in enumerate(chain):
        folder = tmp_path / str(number)
        for found in run_ranks(go_on, world, layout, start, str(folder)):
            for stats, stats1 in zip(found, wanted if start else [], strict=True):
                assert stats == pytest.approx(stats1, rel=1e-9, abs=1e-11), (layout, chain[number - 1])
        if layout.get("zero_stage") == 3:
            part = shutil.copytree(folder, tmp_path / "part") / "step_2"
            (part / "training/state_pp0_tp0_data1.safetensors").unlink()
            with pytest.raises(UserError, match=r"state_pp0_tp0_data1\.safetensors"):
                load_checkpoint(part)
        start = str(folder / "step_2")


SPREAD = [(dict(tp=4), 1), (dict(pp=4), 5), (dict(tp=2, pp=2), 5), (dict(dp=4, zero_stage=3), 1)]  # in how many files


def weighed(folder: str, layout: dict, shard_bytes: int) -> dict[str, int]:
    """Bytes in memory on this rank: at most while a model is opened, then, and at most while it is saved."""
    mesh = init_mesh("cpu", **{axis: layout.get(axis, 1) for axis in AXES})
    options = {name: value for name, value in layout.items() if name not in AXES}
    gc.collect()
    gc.freeze()
    seen = []

    def watched(call):
        def wrapped(*args, **kwargs):
            seen.append(bytes_in_memory())
            result = call(*args, **kwargs)
            seen.append(bytes_in_memory())
            return result
        return wrapped

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((Stored, "join"), (Stored, "split"), (checkpoint, "save_file"), (tensor, "cut"),
                            (zero, "flats_of"), (Transformer, "load_state_dict")):
            patch.setattr(owner, name, watched(getattr(owner, name)))
        model = parallelize(load_model(folder), mesh, **options)
        opened = max(seen)
        gc.collect()
        seen.clear()
        kept = bytes_in_memory()
        write = partial(save_model, shard_bytes=shard_bytes)
        save_checkpoint(Path(folder) / "run", 1, model, None, {"step": torch.tensor(1)}, {}, write=write, mesh=mesh)
    gc.unfreeze()
    return {"opened": opened, "kept": kept, "saved": max(seen)}


def weighed_in_every_layout(folder: str, size: int) -> list[dict[str, int]]:
    return [weighed(folder, layout, size // files) for layout, files in SPREAD]


def test_no_rank_holds_two_copies_of_the_model_while_it_is_opened_or_saved(tmp_path):
    model = Transformer(ModelConfig(258, 32, 80, 8, 4, 4, max_position_embeddings=16)).init_weights(torch.Generator())
    save_model(model, tmp_path)
    P, embedding = (sum(p.nbytes for p in part.parameters()) for part in (model, model.embed_tokens))
    for rank, results in enumerate(run_ranks(weighed_in_every_layout, 4, str(tmp_path), P, timeout=150)):
        for found, (layout, files) in zip(results, SPREAD, strict=True):
            where = f"{layout}, rank {rank}, {files} files: {found}, model {P}"
            assert P / 7 < found["kept"] < 0.45 * P, where
            assert found["opened"] < P + found["kept"] + 2 * embedding < 2 * P, where
            file = P if "zero_stage" in layout else 0 if rank else P // files  # ZeRO-3 gathers all of it, to read
            assert found["saved"] < found["kept"] + file + 3 * embedding < 2 * P, where


# ------------------------------------------------------------------ the optimizer's state, in slices


def state_of_57() -> dict:
    """AdamW's state of a matrix of 35 numbers and a vector of 22, each number another one."""
    state = {"step": torch.tensor(3), "rng.torch": torch.arange(5)}
    for i, kind in enumerate(("exp_avg", "exp_avg_sq", "master")):
        numbers = 100.0 * i + torch.arange(57)
        state |= {f"{kind}.a.weight": numbers[:35].view(5, 7), f"{kind}.b": numbers[35:]}
    return state


def save_57(folder: Path, ranks: int, cuts: dict | None = None) -> tuple[dict, list[int]]:
    """Write it as `ranks` ranks of ZeRO do, each of `cuts`' parts over tp for itself; its layout, and slices' sizes."""
    tp = len(next(iter(cuts.values()))[1]) if cuts else 1
    layout, sizes = {"pp": 1, "tp": tp, "data": ranks, "cut": cuts or {}}, []
    for part in range(tp):
        whole = dict(state_of_57())
        for key in whole:
            dim, parts, _ = layout["cut"].get(key.partition(".")[2], (None, (), 1))
            if dim is not None:
                whole[key] = whole[key].narrow(dim, sum(parts[:part]), parts[part])
        shapes = {key.partition(".")[2]: x.shape for key, x in whole.items() if key.startswith("exp_avg.")}
        size = -(-sum(map(prod, shapes.values())) // ranks)
        for rank in range(ranks):
            mine, offset = {"step": whole["step"], "rng.torch": whole["rng.torch"]}, 0
            for name, shape in shapes.items():
                start, stop = zero.span(offset, prod(shape), size, rank)
                mine |= {f"{kind}.{name}": whole[f"{kind}.{name}"].flatten()[start:stop].clone()
                         for kind in ("exp_avg", "exp_avg_sq", "master")}
                mine |= {f"shape.{name}": torch.tensor(shape), "ranks": torch.tensor([rank, ranks])}
                offset += prod(shape)
            sizes.append(sum(len(mine[f"exp_avg.{name}"]) for name in shapes))
            save_file(mine, folder / (f"state_pp0_tp{part}_data{rank}.safetensors" if tp * ranks > 1 else
                                      "state.safetensors"))
    return layout, sizes


CUTS = {"a.weight": (1, (3, 2, 2), 1), "b": (0, (8, 7, 7), 1)}


@pytest.mark.parametrize(("ranks", "sizes", "cuts"), [
    (2, [29, 28], {}), (4, [15, 15, 15, 12], {}), (6, [10] * 5 + [7], {}), (20, [3] * 19 + [0], {}),
    (2, [12, 11, 9, 8, 9, 8], CUTS), (3, [9, 9, 7, 6, 6, 5, 6, 6, 5], CUTS | {"a.weight": (0, (2, 2, 1), 1)})])
def test_57_numbers_are_cut_into_even_slices_and_come_back_without_padding(ranks, sizes, cuts, tmp_path):
    layout, found = save_57(tmp_path, ranks, cuts)
    if not cuts:
        assert found == sizes
    merged = read_training(tmp_path, layout)
    assert merged.keys() == state_of_57().keys()
    assert all(torch.equal(tensor, merged[name]) for name, tensor in state_of_57().items())
    saved = Saved(tmp_path, layout)
    for start in range(35):  # any numbers of it, whole or of a part of its columns or rows
        for stop in range(start, 36):
            numbers = saved.read("exp_avg.a.weight", Placement(), 0, (start, stop))
            assert torch.equal(numbers, torch.arange(35.0)[start:stop])
    for dim, sizes_now in ((1, (4, 3)), (0, (3, 2))):
        if cuts and cuts["a.weight"][0] != dim:
            continue
        for part, whole in enumerate(torch.arange(35.0).view(5, 7).split(sizes_now, dim)):
            now = Placement(dim, sizes_now)
            assert torch.equal(saved.read("exp_avg.a.weight", now, part, None), whole)
            for start in range(whole.numel() + 1):
                numbers = saved.read("exp_avg.a.weight", now, part, (start, min(start + 5, whole.numel())))
                assert torch.equal(numbers, whole.flatten()[start : start + 5])


def test_states_that_are_not_complete_or_not_of_one_save_are_refused(tmp_path):
    layout, _ = save_57(tmp_path, 4)
    file = tmp_path / "state_pp0_tp0_data1.safetensors"
    state = load_file(file)
    save_file(state | {"step": torch.tensor(4)}, file)
    with pytest.raises(UserError, match=r"not of one save: they have steps \[3, 4\]"):
        read_training(tmp_path, layout)
    save_file(state | {"exp_avg.a.weight": state["exp_avg.a.weight"][1:].clone()}, file)
    with pytest.raises(UserError, match=r"exp_avg.a.weight has 34 numbers in 4 parts, but \[5, 7\] needs 35"):
        read_training(tmp_path, layout)


def read_in_slices(folder: str, layout: dict) -> dict[str, int]:
    """On a rank in another layout: bytes in memory while its share of a state is read, and bytes read in all."""
    mesh = init_mesh("cpu", **{axis: layout.get(axis, 1) for axis in AXES})
    model = parallelize(model_of(LLAMA), mesh, **{name: value for name, value in layout.items() if name not in AXES})
    gc.collect()
    gc.freeze()
    seen, read, box = [], [], Saved.box

    def watched(*args):
        part = box(*args)
        seen.append(bytes_in_memory())
        read.append(part.nbytes)
        return part

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Saved, "box", watched)
        state, _ = load_checkpoint(folder, model, mesh)
    gc.unfreeze()
    return {"state": sum(x.nbytes for x in state.values()), "peak": max(seen), "read": sum(read)}


SHARES = [(dict(dp=4, zero_stage=1), 4), (dict(dp=2, tp=2, zero_stage=3), 4), (dict(tp=4), 3)]  # and of how many parts


def write_and_read(folder: str) -> list[dict[str, int]]:
    write(folder, dict(tp=2, pp=2))
    return [read_in_slices(f"{folder}/step_2", layout) for layout, _ in SHARES]


def test_no_rank_holds_or_reads_the_whole_optimizer_to_go_on_in_another_layout(tmp_path):
    ranks = run_ranks(write_and_read, 4, str(tmp_path))
    whole = sum(x.nbytes for x in load_checkpoint(tmp_path / "step_2")[0].values())
    largest = 8 * 258 * 32  # the embedding's, float64
    for results in ranks:
        for found, (layout, parts) in zip(results, SHARES, strict=True):
            assert found["state"] < 1.3 * whole / parts, (layout, found, whole)
            assert found["peak"] < found["state"] + largest, (layout, found, whole)
            assert found["read"] < 1.05 * found["state"], (layout, found, whole)
