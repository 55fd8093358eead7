"""The ledger of the training step with each attention kernel in the place of the products that train.py writes out."""

import dataclasses

import pytest
from ledgers import ledger_of

import train
from kernels.attention import KERNELS
from ledger.pages import text as page
from ledger.pages.contents import array
from runtime.config.command_line import load

# Two query heads for a key head, rows of three blocks, heads split over t; nothing is compiled.
NAME, OVERRIDES = (
    "local_test_synthetic",
    ("mesh.d=4", "mesh.t=2", "model.n_kv=4", "model.n_q_per_kv=2", "model.d_head=64", "training.tokens.len=384"),
)
BLOCKS = 3
# What runs, in products of length²: two forward and four backward, the logits once more, of half of the pairs of
# positions or, in blocks, of 2/3; on TPUs the logits and the probabilities' gradient in both of two kernels.
RUNS = {
    "einsum": 7, "blockwise": 7 * (BLOCKS + 1) / (2 * BLOCKS), "cudnn_masked": 7 / 2, "splash": 9 / 2,
}  # fmt: skip


CONFIG = load(train.Config, NAME, OVERRIDES)


def ledger_with(kernel):
    """The ledger with a kernel; 'einsum' is what train.py writes out."""
    return ledger_of(NAME, *OVERRIDES, f"model.attention={kernel}")


@pytest.mark.parametrize("name", KERNELS)
def test_flops_are_the_models_and_what_the_kernel_runs(name):
    """The model defines MFU: its FLOPs are the same with each kernel, and nothing is left uncounted. Attention runs
    what RUNS says, times layers; everything else runs the same."""
    ledger, plain = ledger_with(name), ledger_with("einsum")
    assert ledger.model_flops == pytest.approx(plain.model_flops, rel=1e-12) and not ledger.costs.kernels
    model, tokens = CONFIG.model, CONFIG.training.tokens
    product = 2 * tokens.batch * model.n_q_per_kv * model.n_kv * tokens.len**2 * model.d_head * model.layers
    besides = plain.hardware_flops - RUNS["einsum"] * product
    extra = model.n_q_per_kv * model.n_kv * tokens.batch * tokens.len * model.d_head * model.layers * 2
    # Splash has besides a product of o and its gradient, of length and not of length².
    assert ledger.hardware_flops - besides - RUNS[name] * product == pytest.approx(
        extra if name == "splash" else 0, abs=1
    )


@pytest.mark.parametrize("name", KERNELS)
def test_what_the_kernel_keeps_is_said(name):
    """The kernel's line keeps o and the logits' log-sum-exp under save_for_backward, times layers, and ledger.txt has
    both. Nothing else is kept, and what is sent is the same."""
    ledger, tokens, model = ledger_with(name), CONFIG.training.tokens, CONFIG.model
    assert all(row.why for row in ledger.saved)
    o_bytes = 2 * tokens.batch // 4 * tokens.len * model.n_q_per_kv * model.n_kv // 2 * model.d_head
    heads = model.n_q_per_kv * model.n_kv // 2
    new = [row for row in ledger.saved if row.why == "save_for_backward" and row.dtype == "float32"]
    (log_sum_exp,) = new
    assert log_sum_exp.times == model.layers and log_sum_exp.line.startswith("t")
    assert log_sum_exp.bytes == 4 * tokens.batch // 4 * tokens.len * heads
    kept = [row for row in ledger.saved if row.line == log_sum_exp.line and row is not log_sum_exp]
    assert [row.bytes for row in kept] == [o_bytes] and kept[0].times == model.layers
    text = page.text(ledger)
    for row in (*kept, log_sum_exp):
        assert any(array(row) in line and "save_for_backward" in line for line in text.splitlines())
    bare = [
        {dataclasses.replace(row, line=""): times for row, times in costs.collectives.items()}
        for costs in (ledger.costs, ledger_with("einsum").costs)
    ]
    assert bare[0] == bare[1]


@pytest.mark.parametrize("name", ["blockwise", "splash"])
def test_the_forecast_has_no_scores(name):
    """Some of the einsum's values have the length in two dims; none of these kernels' values has."""
    length = CONFIG.training.tokens.len
    scores = {
        attention: [value.shape for value in ledger_with(attention).memory.largest if value.shape.count(length) > 1]
        for attention in ("einsum", name)
    }
    assert scores["einsum"] and not scores[name]
