"""The planner: hand-computed numbers, then what real ranks hold, keep and send.

    a parameter counted on no stage, or on two      the tied embedding; NF4's scales
    a collective that is not in the formula         recomputation does a block's forward collectives once more
    activations off by the layers of a stage        the peak of the schedule is in slices, not in stages
"""

from dataclasses import replace

import pytest
import torch
from ranks import run_ranks

from minirl import costs, plan
from minirl.config import UserError
from minirl.costs import Layout, Memory
from minirl.logprobs import token_logprobs
from minirl.lora import add_lora
from minirl.model import ModelConfig, Transformer
from minirl.optim import ShardedAdamW
from minirl.parallel import forward_backward, init_mesh
from minirl.parallel.layout import parallelize
from minirl.rollout import Rollout

LLAMA = ModelConfig(258, 16, 30, 4, 4, 2, max_position_embeddings=64)
LLAMA_8B, LLAMA_70B = plan.SHAPES["llama-3.1-8b"], plan.SHAPES["llama-3.1-70b"]


# ---- hand-computed ----

def test_the_shapes_have_the_parameters_of_their_checkpoints():
    counts = {"qwen3-0.6b": 596_049_920, "qwen3-4b": 4_022_468_096, "llama-3.2-1b": 1_235_814_400,
              "llama-3.1-8b": 8_030_261_248, "llama-3.1-70b": 70_553_706_496}
    assert {name: costs.parameter_count(plan.SHAPES[name]) for name in counts} == counts


def test_sixteen_bytes_a_parameter():
    assert costs.state_memory(1) == Memory(2, 2, 12)
    assert costs.state_memory(1, itemsize=4) == Memory(4, 4, 8)
    assert costs.state_memory(1, itemsize=8) == Memory(8, 8, 16)
    assert costs.state_memory(1, frozen=10) == Memory(22, 2, 12)


@pytest.mark.parametrize("stage, expected", [(0, 120), (1, 31.4), (2, 16.6), (3, 1.88)])
def test_zero_saves_what_figure_1_of_the_paper_says(stage, expected):
    """7.5 billion parameters on 64 GPUs (arXiv:1910.02054)."""
    assert costs.state_memory(7.5e9, 0, 7.5e9 / 64, stage=stage).total / 1e9 == pytest.approx(expected, rel=3e-3)


def test_bytes_a_parameter_on_four_ranks():
    """ZeRO's stages 0 to 3. Tables with 80, 38 and 21 go round, and are wrong."""
    found = [costs.state_memory(1000, 0, 250, stage=stage).total / 1000 for stage in range(4)]
    assert found == [16, 7, 5.5, 4]


def test_kv_cache_of_a_token():
    assert costs.cache_bytes(LLAMA_8B) == 131_072  # 2 x 32 layers x 8 key heads x 128 x 2 bytes
    assert costs.cache_bytes(LLAMA_70B, layers=20, kv_heads=1) == 10_240


def test_bubbles():
    """(P - 1) / (M + P - 1), and with v slices a stage (P - 1) / (v M + P - 1)."""
    layout = Layout(pp=4, rows_per_step=8)
    assert costs.bubble(layout) == pytest.approx(3 / 11)
    assert costs.bubble(replace(layout, schedule="gpipe")) == pytest.approx(3 / 11)
    assert costs.bubble(replace(layout, schedule="interleaved", chunks=2)) == pytest.approx(3 / 19)
    assert costs.bubble(Layout()) == 0


def test_days():
    """6 x 8.03e9 x 1e12 operations, at 8 x 400 x 0.5 TFLOP/s. With recomputation a third more, with LoRA less."""
    arguments = 1e12, 400, 0.5
    plain = costs.seconds(LLAMA_8B, Layout(dp=8), *arguments)
    assert plain == pytest.approx(6 * 8_030_261_248 * 1e12 / 1.6e15)
    recomputed = costs.seconds(LLAMA_8B, Layout(dp=8, gradient_checkpointing=True), *arguments)
    assert recomputed == pytest.approx(plain * 4 / 3)
    assert costs.seconds(LLAMA_8B, Layout(dp=8, lora_rank=8), *arguments) == pytest.approx(plain * 2 / 3)
    assert costs.seconds(LLAMA_8B, Layout(pp=8, rows_per_step=7), *arguments) == pytest.approx(plain * 2)  # half idle


def test_bytes_on_the_wire():
    """Of 800 bytes over 4 ranks: an all-reduce sends 2 x 3/4 of them, its two halves 3/4 each."""
    found = {operation: costs.on_wire(operation, 4, 800) for operation in
             ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")}
    assert found == {"all_reduce": 1200, "all_gather": 600, "reduce_scatter": 600, "all_to_all": 600, "send": 800}


def test_traffic_by_hand():
    """D 16, float32, rows of 8 tokens: hidden states of a microbatch of 2 rows are 2 x 8 x 16 x 4 = 1,024 bytes."""
    layout = Layout(dtype="float32", microbatch_size=2, sequence_length=8, rows_per_step=6)  # 3 microbatches
    find = lambda **changes: costs.traffic(LLAMA, replace(layout, **changes))
    # 4 layers: 2 x 4 + 1 all-reduces forward and as many backward; 3 numbers a token of the log-probs
    assert find(tp=2) == {("all_reduce", "tp"): 3 * (18 * 1024 + 3 * 16 * 4)}
    assert find(tp=2, gradient_checkpointing=True) == {("all_reduce", "tp"): 3 * (22 * 1024 + 3 * 16 * 4)}
    norms = 9 * 16 * 4 - 16 * 4  # two a block; the last one sees whole rows
    assert find(tp=2, sp=True) == {("all_gather", "tp"): 3 * 18 * 1024, ("reduce_scatter", "tp"): 3 * 17 * 1024,
                                   ("all_reduce", "tp"): 3 * (1024 + 3 * 16 * 4) + norms}
    # the first stage sends 3 hidden states, and the tied embedding's gradient
    assert find(pp=2) == {("send", "pp"): 3 * 1024 + 258 * 16 * 4}
    # a layer: k and v of 8 heads x tokens x 4 numbers ..., forward k and v once, backward again, dk and dv twice
    assert find(cp=2) == {("send", "cp"): 3 * 4 * (2 * 2 * 2 * 4 * 4 * 4) * 4} | find_data(2)
    assert find(cp=2, context="ulysses") == {("all_to_all", "cp"): 3 * 4 * 2 * (8 + 4) * 8 * 4 * 4} | find_data(2)


def find_data(replicas: int) -> costs.Traffic:
    return {("all_reduce", "dp_cp"): costs.parameter_count(LLAMA) * 4}


def test_a_layout_that_makes_no_sense_is_refused():
    for values, message in [({"zero": 4}, "--zero 4"), ({"zero_overlap": True}, "--zero 3"),
                            ({"sp": True}, "--sp"), ({"tp": 2, "qlora": True}, "--qlora"),
                            ({"dp": 3, "rows_per_step": 4}, "--rows-per-step 4"), ({"pp": 0}, "--pp"),
                            ({"pp": 2, "chunks": 2}, "interleaved")]:
        with pytest.raises(UserError, match=message):
            Layout(**values)
    with pytest.raises(UserError, match="do not divide"):
        costs.local_model(LLAMA, Layout(tp=3))
    with pytest.raises(UserError, match="nothing"):
        plan.open_shape("nothing")


# ---- a model that is really there ----

@pytest.mark.parametrize("changes", [{}, {"qk_norm": True}, {"gated_mlp": False}, {"num_key_value_heads": 4}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recompute", [False, True])
def test_activations_are_what_autograd_keeps(changes, dtype, recompute):
    config = replace(ModelConfig(258, 64, 176, 4, 4, 2), **changes)
    model = Transformer(config).to(getattr(torch, dtype))
    model.gradient_checkpointing = recompute
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in weights:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        token_logprobs(model, torch.zeros(3, 65, dtype=torch.int64))
    measured = sum(x.untyped_storage().nbytes() for x in kept.values())
    layout = Layout(microbatch_size=3, sequence_length=64, dtype=dtype, gradient_checkpointing=recompute)
    planned, _ = costs.activation_memory(config, layout, costs.local_model(config, layout), 0)
    if recompute:  # the one block that backward makes again is not there yet
        planned -= costs.block_bytes(config, layout, 4, config.num_key_value_heads, 176)
    assert measured == pytest.approx(planned, rel=0.02)


def test_recomputation_holds_a_block_at_a_time():
    """4 layers: a block's 6 D + 2 (H + K) E + 4 I + H + 2 = 1,286 numbers a token, or its D = 64 inputs."""
    config, layout = ModelConfig(258, 64, 176, 4, 4, 2), Layout(sequence_length=1, dtype="float32")
    find = lambda layout: costs.rank_memory(config, layout, 0).activations
    assert find(layout) == 4 * (4 * 1286 + 129 + 64 + 1 + 2 + 258)
    assert find(replace(layout, gradient_checkpointing=True)) == 4 * (4 * 64 + 1286 + 129 + 64 + 1 + 2 + 258)


def test_a_pipeline_keeps_what_its_schedule_has_under_way():
    """4 stages of one layer, 8 microbatches: the first of 1F1B keeps 4 of them, that of GPipe all 8."""
    layout = Layout(pp=4, sequence_length=1, dtype="float32", rows_per_step=8)
    block = 4 * (6 * 16 + 2 * 6 * 4 + 4 * 30 + 4 + 2)
    assert costs.rank_memory(LLAMA, layout, 0).activations == 4 * block
    assert costs.rank_memory(LLAMA, layout, 2).activations == 2 * block
    assert costs.rank_memory(LLAMA, replace(layout, schedule="gpipe"), 0).activations == 8 * block


def test_the_stages_have_every_parameter_once():
    for config in (LLAMA, replace(LLAMA, tie_word_embeddings=False)):
        layout = Layout(pp=2, schedule="interleaved", chunks=2)
        found = sum(costs.held(costs.local_model(config, layout, stage)).trained for stage in range(2))
        tied = 258 * 16 * config.tie_word_embeddings  # is on the first and on the last
        assert found == costs.parameter_count(config) + tied


def test_zero_3_has_two_units_on_the_way():
    """A block 2,240, embedding and head 258 x 16 each, the last norm 16: the largest as weights and as gradients."""
    find = lambda **changes: costs.rank_memory(LLAMA, Layout(dp=4, zero=3, dtype="float32", **changes), 0).buffers
    assert find() == 4 * 3 * 4128, "tied: one matrix more"
    assert find(zero_overlap=True) == 4 * (4 * 4128 + 4128 // 4 + 4128), "four units, and the slice that comes back"
    untied = replace(LLAMA, tie_word_embeddings=False)
    assert costs.rank_memory(untied, Layout(dp=4, zero=3, dtype="float32"), 0).buffers == 4 * 2 * (4128 + 16)


def test_nf4():
    nf4 = pytest.importorskip("minirl.nf4")
    layer = nf4.NF4Linear(torch.nn.Linear(176, 99, bias=False))
    buffers = sum(buffer.nbytes for buffer in layer.buffers())
    assert costs.nf4_bytes(176 * 99) == buffers
    plain, small = (costs.rank_memory(LLAMA_8B, Layout(lora_rank=16, qlora=qlora), 0) for qlora in (False, True))
    linears = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert plain.parameters - small.parameters == pytest.approx(linears * (2 - 4.127 / 8), rel=1e-3)
    assert plain.optimizer == small.optimizer


# ---- layouts ----

def test_seventy_billion_on_512_gpus():
    layout, memory = plan.recommend(LLAMA_70B, Layout(), 512, 80)
    assert layout.size == 512 and layout.tp <= 8 and plan.fits(memory, 80)
    assert not plan.fits(costs.fullest(LLAMA_70B, Layout(dp=512, zero=1, gradient_checkpointing=True))[1], 80)


def test_what_fits_stays_plain_and_what_cannot_is_said():
    layout, _ = plan.recommend(plan.SHAPES["qwen3-0.6b"], Layout(), 1, 80)
    assert layout == Layout(dp=1)
    with pytest.raises(UserError, match="no layout of 1 GPUs"):
        plan.recommend(LLAMA_8B, Layout(), 1, 80)


def test_the_command(capsys):
    plan.main(plan.Config(model="toy", pp=2, sequence_length=16, dtype="float32"))
    text = capsys.readouterr().out
    assert "246,432 parameters on 2 ranks" in text and "idle 11.1% of the time" in text and "stage 1  .aAAbBB" in text
    assert "fits" in text and "send" in text
    plan.main(plan.Config(model="llama-3.1-8b", dp=8))
    assert "does not fit" in (text := capsys.readouterr().out) and "recompute blocks" in text and "ZeRO-1" in text


# ---- real ranks ----

LAYOUTS = {
    "dp": Layout(dp=4),
    "dp, tp": Layout(dp=2, tp=2),
    "tp with copies of key heads": Layout(tp=4, gradient_checkpointing=True),
    "tp, sp, recomputation": Layout(dp=2, tp=2, sp=True, gradient_checkpointing=True),
    "pp, tp, sp": Layout(pp=2, tp=2, sp=True),
    "pp": Layout(pp=4),
    "interleaved": Layout(dp=2, pp=2, schedule="interleaved", chunks=2),
    "ring": Layout(dp=2, cp=2),
    "ring of 4, recomputation": Layout(cp=4, gradient_checkpointing=True),
    "ulysses, key heads in copies": Layout(cp=4, context="ulysses"),
    "ulysses, tp": Layout(cp=2, tp=2, context="ulysses"),
    "zero 1": Layout(dp=4, zero=1),
    "zero 2": Layout(dp=4, zero=2),
    "zero 2, tp, sp": Layout(dp=2, tp=2, sp=True, zero=2),
    "zero 3": Layout(dp=4, zero=3),
    "zero 3, cp, recomputation": Layout(dp=2, cp=2, zero=3, gradient_checkpointing=True),
    "zero 2, pp": Layout(dp=2, pp=2, zero=2),
    "lora, tp": Layout(dp=2, tp=2, lora_rank=2),
    "lora, tp, sp, recomputation": Layout(dp=2, tp=2, sp=True, lora_rank=2, gradient_checkpointing=True),
    "lora, zero 3": Layout(dp=4, zero=3, lora_rank=2),
    "lora, pp, tp, sp": Layout(pp=2, tp=2, sp=True, lora_rank=2),
}


def measure() -> list[tuple]:
    found = []
    for name, layout in LAYOUTS.items():
        layout = replace(layout, microbatch_size=2, sequence_length=9, dtype="float32",
                         rows_per_step=layout.dp * 2 * 2)
        mesh = init_mesh("cpu", layout.dp, layout.pp, layout.cp, layout.tp)
        model = Transformer(LLAMA).init_weights(torch.Generator().manual_seed(0))
        model.gradient_checkpointing = layout.gradient_checkpointing
        if layout.lora_rank:
            add_lora(model, layout.lora_rank)
        parallelize(model, mesh, sequence=layout.sp, zero_stage=layout.zero, schedule=layout.schedule,
                    chunks=layout.chunks, context_kind=layout.context)
        ids, tokens = torch.arange(2), torch.zeros(2, 10, dtype=torch.int64)
        batch = Rollout(tokens, tokens[:, 1:] == 0, ids * 0 + 10, ids, ids)
        mesh.ledger.clear()
        forward_backward(model, [batch] * layout.microbatches, lambda out, _: (out.logprobs.sum() / 36, {}), mesh)
        if layout.zero:
            ShardedAdamW(model, 1e-3).step()
        if mesh.tp_rank:  # the others may have a word or a component less
            continue
        own = costs.local_model(LLAMA, layout, mesh.pp_rank)
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        pieces = sum(flat.size for flat in model.zero.buckets) if layout.zero else 0
        found.append((name, mesh.pp_rank, dict(mesh.ledger.bytes), costs.traffic(LLAMA, layout, mesh.pp_rank),
                      shapes, {name: tuple(p.shape) for name, p in own.named_parameters()}, pieces,
                      costs.held(own).own_trained))
    return found


@pytest.mark.dist
def test_real_ranks_hold_and_send_what_was_planned():
    for rank in run_ranks(measure, 4, timeout=180):
        for name, stage, sent, planned, shapes, planned_shapes, pieces, own in rank:
            where = f"{name}, stage {stage}"
            assert shapes == planned_shapes, where
            assert not pieces or pieces == own, where
            for key in sent.keys() | planned.keys():  # up to sums of a few numbers: loss, counts
                assert abs(sent.get(key, 0) - planned.get(key, 0)) < 200, (where, key, sent, planned)
