"""`python -m tools.plan program=generate`: memory and tokens a second of decoding, by hand; and the compiled step."""

import functools
import re
from dataclasses import replace

import jax
import numpy as np
import pytest
from published import FOLDER, on_mesh
from safetensors.numpy import load_file

from ledger.compiled import agreement
from ledger.count.step import of_step
from ledger.machines import hardware, roofline
from ledger.units import gigabytes, number
from models import decoding, huggingface, llama
from models.decoding import Programs, Slots, cache_sizes, traced_step
from runtime.config.command_line import load
from runtime.terminal import RunError
from tools import plan, plan_generate
from tools.ready import ready_model


def config_of(name, *overrides):
    given = ["program=generate", f"model={FOLDER / name}", *overrides]
    return load(plan_generate.PlanGenerate, None, given)


def test_memory_and_time_are_those_by_hand():
    """Weights, cache, bytes moved and tokens a second of the golden llama on 2 × 2 H200s are what one counts by
    hand."""
    config = config_of("llama", "hardware=h200", "mesh.d=2", "mesh.t=2", "rows=6", "length=200")
    ledger, cache = plan_generate.ledger_of(config)
    V, M, F, K, Q, D, layers, slots = 40, 16, 24, 2, 2, 8, 2, 512  # 200, 1 and a chunk of 256
    matrices = layers * (2 * Q * K * D * M + 2 * K * D * M + 3 * M * F) + 2 * V * M
    norms = (2 * layers + 1) * M
    assert ledger.memory.by_kind()["weights"] == 2 * matrices // 2 + 4 * norms
    small, _ = plan_generate.ledger_of(replace(config, weights="int8"))
    scales = layers * ((Q * K * D + 2 * K * D + 2 * F) // 2 + 2 * M)
    of_layers = matrices - 2 * V * M
    assert small.memory.by_kind()["weights"] == of_layers // 2 + 4 * scales + 2 * V * M + 4 * norms
    split, _ = plan_generate.ledger_of(replace(config, weights="split"))
    of_norms = 4 * 2 * layers * M // 4  # which are split over d · t
    assert split.memory.by_kind()["weights"] == of_layers // 2 + 2 * V * M + of_norms + 4 * M
    assert split.sent_bytes() - ledger.sent_bytes() == of_layers // 2 + 3 * of_norms
    assert cache == 2 * 2 * layers * (6 // 2) * K // 2 * slots * D
    estimate = roofline.roofline(ledger, hardware.named("h200"), 8)
    read = (2 * (matrices - V * M) // 2 + cache) / 4.8e12  # of the embedding a row for each token
    assert read < estimate.totals["memory"] < 4 * read
    priced = replace(config, total_tokens=1e15, price=2.0)
    text = "\n".join(plan.lines_of(priced, ledger, estimate))
    assert f" to {number(6 / estimate.step_s)}. 1.00P tokens: {1e15 / 6 * estimate.step_s / 86400:,.3g} to " in text
    assert f"; cache {gigabytes(cache)} a device." in plan_generate.title_of(config, ledger, cache)
    assert "Memory of one device: forecast of the peak" in text and "It will not fit" not in text


@pytest.mark.parametrize("name, mesh, length", [
    ("llama", (1, 1), 100), ("llama", (2, 2), 128), ("llama", (1, 1), 1000), ("t5_gated", (1, 1), 100),
    ("t5_gated", (1, 1), 128),
])  # fmt: skip
def test_the_cache_is_that_of_a_server(name, mesh, length):
    """Its bytes are those of the arrays that tools.serve allocates for rows of this length."""
    axes = [f"mesh.{axis}={size}" for axis, size in zip("dt", mesh)]
    config = config_of(name, "rows=2", f"length={length}", "compute_dtype=float32", *axes)
    _, planned = plan_generate.ledger_of(config)
    with on_mesh(*mesh):
        cache = Slots(ready_model(config).generator, config.rows, length, length + 1).cache
    arrays = [cache.k, cache.v] if cache.memory is None else [cache.k, cache.v, cache.memory]
    assert planned == sum(array.addressable_shards[0].data.nbytes for array in arrays)


@pytest.mark.parametrize("name", ["gemma", "llama_linear_tied", "llama"])
def test_one_table_at_both_ends_counts_once(name):
    """The ledger has as many parameters as the published file."""
    ledger, _ = plan_generate.ledger_of(config_of(name))
    tensors = load_file(FOLDER / name / "model.safetensors")
    assert ledger.parameters == sum(tensor.size for tensor in tensors.values())


def test_the_page_and_what_does_not_fit(capsys, tmp_path):
    """A folder gets a ledger of the family's lines; a cache beyond the device's memory is said."""
    overrides = ("hardware=h200", "rows=1000000", "length=10000", f"folder={tmp_path}/plan", "compute_dtype=float32")
    plan.main(config_of("gemma3", *overrides))
    text = capsys.readouterr().out
    assert "It will not fit: " in text and f"\n  {plan_generate.FIXES[0]}\n" in text and "microbatches" not in text
    page = (tmp_path / "plan/ledger.txt").read_text()
    assert page.startswith("gemma.py on the mesh r=1 × d=1 × c=1 × e=1 × t=1: one step of 1,000,000 tokens")
    files = re.findall(r"^-- (\S+) -", page, re.M)
    assert files[0] == "gemma.py" and "decoding.py" in files, files
    with pytest.raises(RunError, match=r"rows = 3 cannot be divided among mesh\.d = 2"):
        plan.main(config_of("llama", "mesh.d=2", "rows=3"))
    with pytest.raises(RunError, match=r"length = 65: the model has 64 positions: lower length"):
        plan.main(config_of("gpt2", "length=65"))
    assert not decoding.is_planned  # what is decoded afterwards is for this machine


@pytest.mark.usefixtures("proved_elsewhere")
@pytest.mark.parametrize("name, kept", [("llama", "split"), ("t5", None)])
def test_the_compiled_step_sends_what_is_written(name, kept):
    """Compiled and written collectives are equal on 4 × 2, for a Llama whose layers are gathered each time and for a
    T5."""
    family = huggingface.family_of(name, "here")
    sizes = dict(d_model=64, n_kv=8, d_head=8, layers=3, vocab=128, d_ff=96)
    others = dict(n_q_per_kv=2, rope_max_timescale=256) if family is llama else dict(encoder_layers=1)
    model = family.Model(**sizes, **others, compute_dtype="float32")
    weights = jax.eval_shape(functools.partial(family.init, model), np.uint32(0))
    with on_mesh(4, 2):
        _, sizes = cache_sizes(64, 64, has_encoder=name == "t5")
        traced = traced_step(Programs(family, model, weights, kept), weights, 8, sizes)
        ledger = of_step(traced, {"d": 4, "t": 2}, source=family.__file__, tokens=8, platform="cpu")
        lines, _ = agreement.agreement(ledger, traced.lower().compile())
    assert lines[0].startswith("The compiled step sends what is written: "), "\n".join(lines)
