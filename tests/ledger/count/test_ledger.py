"""What the ledger counts is what one counts by hand from the sizes of the model."""

import collections
import dataclasses
import json
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import print_saved_residuals
from jax.experimental import pallas as pl
from ledgers import ledger_of, ledger_of_changed
from parts import says

import train
from jax_extra import explicit_activation_checkpointing, save_for_backward
from ledger.count.costs import Collective, HostCopy, Product, Saved, count, saved
from ledger.count.memory import GROUPS
from ledger.count.program import PHASES, read
from ledger.count.step import FORMAT
from ledger.pages import contents
from ledger.pages import text as page
from ledger.pages.differences import differences
from ledger.pages.files import pages
from runtime.config.command_line import load
from runtime.files import write_all
from tools import compare

SOURCE = Path(train.__file__).read_text().splitlines()
CASES = [
    ("local_test_synthetic", ()),
    ("local_test_synthetic", ("mesh.d=1", "mesh.t=2", "training.microbatches=4", "model.compute_dtype=float32")),
    ("local_test_synthetic", ("training.save_for_backward=inputs",)),
    ("c4_a100x8_1b", ()),
    ("c4_a100x8_1b", ("mesh.d=2", "mesh.t=4", "training.microbatches=2")),
    ("c4_a100x8_2b", ("mesh.d=512", "mesh.t=8", "training.tokens.batch=4096")),
]
cases = pytest.mark.parametrize("name, overrides", CASES, ids=lambda value: value if isinstance(value, str) else "")


def line_of(snippet: str, after: str = "") -> str:
    """The first line of train.py that has a snippet, after the first that has another."""
    start = next(number for number, text in enumerate(SOURCE) if after in text)
    number = next(number for number, text in enumerate(SOURCE) if number >= start and snippet in text)
    return f"train.py:{number + 1}"


class Sizes:
    """The sizes of a config on one device, by the letters of the legend."""

    def __init__(self, name, overrides):
        config = load(train.Config, name, overrides)
        model, tokens = config.model, config.training.tokens
        self.d, self.t, self.m = config.mesh.d, config.mesh.t, config.training.microbatches
        self.b, self.L = tokens.batch // self.d // self.m, tokens.len
        self.M, self.V, self.F = model.d_model, model.vocab // self.t, model.d_ff // self.t
        self.Q, self.K, self.D, self.N = model.n_q_per_kv, model.n_kv // self.t, model.d_head, model.layers
        self.c = max(size for size in range(1, train.LOSS_CHUNK + 1) if self.L % size == 0)
        self.C = self.L // self.c
        self.dtype, self.a = model.compute_dtype, jnp.dtype(model.compute_dtype).itemsize
        self.kept = config.training.save_for_backward
        self.config = config


def products_by_hand(s: Sizes) -> collections.Counter:
    b, L, M, F, V, heads = s.b, s.L, s.M, s.F, s.V, s.Q * s.K * s.D
    scores = 2 * b * s.Q * s.K * L * L * s.D
    layer, chunks = s.N * s.m, s.C * s.m
    again = layer if s.kept == "inputs" else 0
    # Line, FLOPs, times forward, times recomputed: what save_for_backward keeps is not, nor what only the next layer
    # reads. The backward pass has two of each.
    rows = [
        (line_of("q = shardops.einsum"), 2 * b * L * M * heads, layer, again),
        (line_of("k = shardops.einsum"), 2 * b * L * M * s.K * s.D, layer, again),
        (line_of("v = shardops.einsum"), 2 * b * L * M * s.K * s.D, layer, again),
        (line_of("logits = shardops.einsum", after="def attention"), scores, layer, layer),
        (line_of("o = shardops.einsum_unreduced('B/d Q K/t L S, B/d S K/t D"), scores, layer, again),
        (line_of("y = shardops.einsum"), 2 * b * L * heads * M, layer, again),
        (line_of("gate = shardops.einsum"), 2 * b * L * M * F, layer, again),
        (line_of("up = shardops.einsum"), 2 * b * L * M * F, layer, again),
        (line_of("y = shardops.einsum", after="hidden = "), 2 * b * L * F * M, layer, 0),
        (line_of("logits = shardops.einsum", after="def chunk_loss"), 2 * s.b * s.c * M * V, chunks, 0),
    ]
    table = collections.Counter()
    attention = range(*(int(line_of(text).split(":")[1]) for text in ("def attention", "def forward")))
    for line, flops, forward, recomputed in rows:
        causal = int(line.split(":")[1]) in attention
        for phase, times in (("forward", forward), ("recomputed", recomputed), ("backward", 2 * forward)):
            table[Product(line, phase, flops, s.dtype, 0.5 if causal else 1.0)] += times
    return +table


def collectives_by_hand(s: Sizes) -> collections.Counter:
    table = collections.Counter()

    def add(kind, axes, dtype, size, phase, line, times):
        axes = tuple(axis for axis in axes if getattr(s, axis) > 1)
        if axes:
            table[Collective(kind, axes, dtype, size, phase, line)] += times

    def gather(snippet, axes, dtype, whole, times, again=True, after="", reduce_dtype="float32"):
        """An all_gather of an array of `whole` elements: forward, again for the backward pass, and its transpose."""
        line, parts = line_of(snippet, after), math.prod(getattr(s, axis) for axis in axes)
        size = whole * jnp.dtype(dtype).itemsize // parts
        add("all-gather", axes, dtype, size, "forward", line, times)
        add("all-gather", axes, dtype, size, "recomputed", line, times * again)
        reduced = whole * jnp.dtype(reduce_dtype).itemsize
        add("reduce-scatter", axes, reduce_dtype, reduced, "backward", line, times)

    def scatter(snippet, whole, times, after="", again=False):
        line = line_of(snippet, after)
        add("reduce-scatter", "t", s.dtype, whole * s.a, "recomputed", line, times * again)
        add("reduce-scatter", "t", s.dtype, whole * s.a, "forward", line, times)
        add("all-gather", "t", s.dtype, whole * s.a // s.t, "backward", line, times)

    layer, rows, heads = s.N * s.m, s.b * s.L * s.M, s.Q * s.K * s.D
    gather("table = gather(", "d", s.dtype, s.V * s.M, s.m, again=False)
    scatter("return shardops.psum_scatter(", rows, s.m)
    for norm in ("ln1 = ", "ln2 = "):
        gather(norm, "dt", "float32", s.N * s.M, s.m, again=False, after="def forward")
    again = s.kept != "everything"
    gather("gathered = ", "t", s.dtype, rows, layer, again=again, after="def layer", reduce_dtype=s.dtype)
    gather("gathered = ", "t", s.dtype, rows, layer, again=again, after="named_scope('ffn')", reduce_dtype=s.dtype)
    for snippet, size in (("w_q", heads), ("w_o", heads), ("w_gate", s.F), ("w_up", s.F), ("w_down", s.F)):
        gather(f"{snippet} = gather(", "d", s.dtype, s.M * size, layer)
    gather("w_k, w_v = [gather(", "d", s.dtype, s.M * s.K * s.D, 2 * layer)
    scatter("x = x + shardops.psum_scatter(", rows, layer, again=s.kept == "inputs")
    scatter("return x + shardops.psum_scatter(", rows, layer)
    gather("scale = shardops.all_gather(", "dt", "float32", s.M, s.m, again=False)
    gather("gathered = ", "t", s.dtype, rows, s.m, again=False, after="scale = shardops", reduce_dtype=s.dtype)
    gather("unembed = gather(", "d", s.dtype, s.V * s.M, s.m, again=False)
    for snippet, phases in (
        ("largest = shardops.pmax(", ("forward",)),
        ("total = shardops.psum('B/d L +t -> B/d L'", ("forward", "backward")),
    ):
        for phase in phases:
            line = line_of(snippet, after="def chunk_loss")
            add("all-reduce", "t", "float32", s.b * s.c * 4, phase, line, s.C * s.m)
    add("all-reduce", "d", "float32", 4, "update", line_of("shardops.psum('+d -> '"), 1)
    add("all-reduce", "dt", "float32", 4, "update", line_of("value: f32[''] = shardops.psum("), 1)
    # The norms of the eleven arrays of weights: of the gradient, the weights and the update.
    add("all-reduce", "dt", "float32", 44, "update", line_of("shardops.psum('weights +d +t -> weights'"), 3)
    return +table


def saved_by_hand(s: Sizes) -> list[Saved]:
    b, L, t = s.b, s.L, s.t
    kept = "save_for_backward"
    whole = (b, L, s.M)
    heads, keys, width = (b, L, s.Q, s.K, s.D), (b, L, s.K, s.D), (b, L, s.F)
    before = ("lax.scan(layer", "input", (b, L, s.M // t))
    of_layer = [before]
    if s.kept != "inputs":
        of_layer = [("gathered = save", kept, whole), ("gathered = save", kept, whole, "'ffn'")]
        of_layer += [("q = save", kept, heads), ("k = save", kept, keys), ("v = save", kept, keys)]
        of_layer += [("return save_for_backward(o)", kept, heads), ("gate = save", kept, width)]
        of_layer += [("up = save", kept, width)]
    rows = [
        ("inputs: u32['B/d L'] =", "input", "uint32", (b, L), 1),
        ("segment: i32['B/d L'] =", "input", "int32", (b, L), 1),
        ("ln1 = ", "input", "float32", (s.N, s.M), 1),
        ("ln2 = ", "input", "float32", (s.N, s.M), 1),
        ("scale = shardops.all_gather", "input", "float32", (s.M,), 1),
        # Over an axis of one device nothing is gathered: it is the last layer's result.
        ("gathered = " if t > 1 else "return x + shardops.psum_scatter", "input", s.dtype, (b, L, s.M), 1),
        # The loss's chunks keep their gradients, in place of what these would be computed from.
        ("logits = shardops.einsum", "gradient", s.dtype, (b, s.c, s.M), s.C),
        ("return shardops.sum_over_chunks", "gradient", "float32", (s.V, s.M), 1),
    ]
    after = {"gathered = ": "scale = shardops"}
    after |= {"logits = shardops.einsum": "def chunk_loss", "ln1 = ": "def forward", "ln2 = ": "def forward"}
    rows = [(line_of(text, after.get(text, "")), *others) for text, *others in rows]
    rows += [(line_of(text, *after), why, s.dtype, shape, s.N) for text, why, shape, *after in of_layer]
    sizes = [math.prod(shape) * jnp.dtype(dtype).itemsize for _, _, dtype, shape, _ in rows]
    return sorted(Saved(*row[:4], size, row[4]) for row, size in zip(rows, sizes, strict=True))


@cases
def test_products_are_those_by_hand(name, overrides):
    """Line, phase, FLOPs and number of every matrix product are exact; model FLOPs count forward and backward once and
    half of attention."""
    s, ledger = Sizes(name, overrides), ledger_of(name, *overrides)
    expected = products_by_hand(s)
    assert ledger.costs.products == expected
    layer = 2 * s.M * (s.Q * s.K * s.D + s.K * s.D) + 3 * s.M * s.F
    products = s.N * layer + s.V * s.M
    scores = s.N * s.Q * s.K * s.D * s.L
    assert ledger.model_flops == 6 * (products + scores) * s.b * s.m * s.L * s.d * s.t
    again = 2 * scores  # once more
    if s.kept == "inputs":  # and all else of the layer but its last product
        again += 2 * scores + s.N * 2 * (layer - s.M * s.F)
    assert ledger.hardware_flops == (6 * products + 12 * scores + again) * s.b * s.m * s.L * s.d * s.t
    parameters = s.t * (2 * s.V * s.M + s.N * layer) + s.M * (2 * s.N + 1)
    assert ledger.parameters == parameters and ledger.flops_6nd == 6 * parameters * s.b * s.m * s.L * s.d


@cases
def test_collectives_are_those_by_hand(name, overrides):
    """Line, phase, kind, axes, type, bytes and number of every collective are exact."""
    assert ledger_of(name, *overrides).costs.collectives == collectives_by_hand(Sizes(name, overrides))


@cases
def test_what_is_kept_is_what_the_source_says(name, overrides):
    """Line, reason, type, local shape and number of everything kept for the backward pass are exact: nothing is kept
    that nobody asked for."""
    assert sorted(ledger_of(name, *overrides).saved) == saved_by_hand(Sizes(name, overrides))


@cases
def test_no_more_is_sent_than_must_be(name, overrides):
    """A device sends the least bytes for weights that are split and gathered for each pass, to the last byte
    (docs/performance.md has the formula), and what policies that keep less repeat."""
    s, ledger = Sizes(name, overrides), ledger_of(name, *overrides)
    again = {"everything": 0, "inputs": 3}[s.config.training.save_for_backward]
    layers = s.N * (2 * s.M * (s.Q * s.K * s.D + s.K * s.D) + 3 * s.M * s.F)  # of a device of t
    gathered = (2 * s.a + 4) * layers + (s.a + 4) * 2 * s.V * s.M
    over_d = (s.d - 1) / s.d * (s.m * gathered + 2 * 4)  # and the number of targets
    tokens = s.b * s.m * s.L
    over_t = (s.t - 1) / s.t * tokens * (((8 + again) * s.N + 4) * s.a * s.M + 3 * 2 * 4)
    over_both = (s.d * s.t - 1) / (s.d * s.t) * (s.m * 2 * 4 * (2 * s.N + 1) * s.M + 2 * (4 + 3 * 44))
    axes = {"d": s.d, "t": s.t}
    sent = sum(row.sent_bytes(axes) * times for row, times in ledger.costs.collectives.items())
    assert sent == pytest.approx(over_d + over_t + over_both, abs=0.5)


def test_bytes_that_leave_a_device():
    """The ring's formulas hold for 8 bytes over 2 × 4 devices."""
    axes = {"d": 2, "t": 4}
    sent = {
        (kind, over): Collective(kind, over, "float32", 8, "forward", "").sent_bytes(axes)
        for kind in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
        for over in (("t",), ("d", "t"))
    }
    assert sent["all-gather", ("t",)] == 24 and sent["all-gather", ("d", "t")] == 56
    assert sent["reduce-scatter", ("t",)] == sent["all-to-all", ("t",)] == 6 and sent["all-to-all", ("d", "t")] == 7
    assert sent["all-reduce", ("t",)] == 12 and sent["all-reduce", ("d", "t")] == 14
    assert sent["collective-permute", ("t",)] == 8


def test_what_is_kept_is_what_jax_says(capsys):
    """Shapes of a function without loops are those of jax.ad_checkpoint.print_saved_residuals, without arguments."""

    @explicit_activation_checkpointing
    def layer(x, w):
        h = save_for_backward(jnp.sin(x @ w))
        return jnp.cos(h) @ w

    def loss(w, x):
        y = layer(jnp.tanh(x @ w), w)
        return jnp.sum(y * y)

    shapes = jnp.ones((16, 16)), jnp.ones((4, 16))
    print_saved_residuals(loss, *shapes)
    theirs = collections.Counter()
    for text in capsys.readouterr().out.splitlines():
        if "from the argument" not in text:
            theirs[re.match(r"\w+\[([\d,]*)\]", text)[1]] += 1
    rows = saved(read(jax.make_jaxpr(jax.value_and_grad(loss))(*shapes)))
    ours = collections.Counter(",".join(map(str, row.shape)) for row in rows)
    assert ours == theirs and sum(ours.values()) > 2
    assert {row.why for row in rows} == {"save_for_backward", "input", ""}


def test_kernels_are_listed():
    """A kernel counts with what it declares, and is listed if it declares nothing."""

    def kernel(x, out):
        out[...] = x[...] @ x[...]

    def called(declared):
        call = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((8, 8), jnp.float32), cost_estimate=declared)
        return count(read(jax.make_jaxpr(call)(jnp.ones((8, 8)))), {})

    declared = called(pl.CostEstimate(flops=1000, transcendentals=0, bytes_accessed=0))
    assert declared.flops() == 1000 and not declared.kernels
    assert called(None).flops() == 0 and list(called(None).kernels.values()) == [1]


def test_branches_and_dead_code():
    """The branch with the most FLOPs counts; a product whose result nobody reads does not."""

    def f(x, flag):
        _ = x @ x @ x
        return lax.cond(flag, lambda x: x @ x, lambda x: x, x)

    assert count(read(jax.make_jaxpr(f)(jnp.ones((4, 4)), True)), {}).flops() == 2 * 4**3


# -- The page ----------------------------------------------------------------------------------------------------------
def test_the_page_fits_a_terminal_and_says_what_costs(tmp_path):
    """ledger.txt has the source's lines with their costs, no line beyond 160 columns, and the sums; ledger.json says
    the same."""
    ledger = ledger_of("c4_a100x8_1b")
    write_all(tmp_path, pages(ledger))
    text = (tmp_path / "ledger.txt").read_text()
    assert max(map(len, text.splitlines())) <= page.WIDTH
    (row,) = [line for line in text.splitlines() if "gate = shardops.einsum" in line]
    # 2 · 8 rows · 1024 · 2048 · 16384 FLOPs in each of 8 layers, twice that backward, nothing again.
    assert row.startswith("   ×8   4.40T       8.80T │")
    (row,) = [line for line in text.splitlines() if "gate = save" in line]
    assert row[: row.index(" gate")].split() == ["×8", "│", "│", "2.15G", "│", line_of("gate = save").split(":")[1]]
    (row,) = [line for line in text.splitlines() if "w_gate = gather" in line]
    assert row.split("│")[1].split() == ["470M", "470M", "940M"]  # 7 parts of 8.4 MB in 8 layers; backward in float32
    assert "8 devices" in text and "To need less" in text
    read_back = json.loads((tmp_path / "ledger.json").read_text())
    assert read_back == json.loads(json.dumps(ledger.to_json()))
    products = sum(row["flops"] * row["times"] for row in read_back["products"])
    assert products == sum(read_back["flops_per_device"].values())
    assert read_back["memory"]["bytes"] == sum(value["bytes"] for value in read_back["memory"]["held"])


def nested(value) -> set[str]:
    """The keys of a JSON value's rows, at any depth; not those that are data: axes, phases, files, kinds of memory."""
    if isinstance(value, list):
        return set().union(*map(nested, value))
    if not isinstance(value, dict):
        return set()
    keys = {key for key in value if key not in ("d", "t", "train.py", *PHASES, *GROUPS)}
    return keys.union(*map(nested, value.values()))


def test_the_keys_of_the_json_are_documented():
    """docs/ledger.md has a table with every key of ledger.json and of its rows, in backticks, and no other."""
    ledger = ledger_of("local_test_synthetic")
    kernels = collections.Counter({("train.py:1", "a_kernel"): 1})
    copies = collections.Counter({HostCopy("train.py:1", "forward", True, "float32", 4): 1})
    ledger = dataclasses.replace(ledger, costs=dataclasses.replace(ledger.costs, kernels=kernels, host_copies=copies))
    text = (Path(train.__file__).parent / "docs" / "ledger.md").read_text()
    table = text[text.index("| key | what |") :].split("\n\n")[0].splitlines()[2:]
    documented: dict[str, set[str]] = {}
    for row in table:
        _, keys, what, _ = row.split("|")
        for key in re.findall(r"`(\w+)`", keys):
            documented[key] = set(re.findall(r"`(\w+)`", what))
    assert documented == {key: nested(value) for key, value in json.loads(json.dumps(ledger.to_json())).items()}


def test_the_summary_says_what_to_change_if_it_does_not_fit():
    """The summary is one line if the forecast fits, else it lists the parts and what would make them smaller."""
    ledger = ledger_of("c4_a100x8_1b")
    (line,) = contents.summary(ledger, 80 * 2**30)
    assert re.fullmatch(
        r"A step: \S+ model FLOPs, \S+ with what is recomputed; each device sends [\d.]+ GB and needs [\d.]+ GB "
        r"of 85.90 GB \(forecast\).",
        line,
    )
    lines = contents.summary(ledger, 8 * 2**30)
    assert lines[1].startswith("It will not fit: weights 0.54 GB, optimizer state 1.07 GB, ")
    kinds = ledger.memory.by_kind()
    of_rows = kinds["saved activations"] + kinds["other values"]
    shared = kinds["weights"] + kinds["optimizer state"] + kinds["gradients"]
    assert lines[2].startswith(f"  twice the microbatches, or half the batch: about {of_rows / 2e9:.2f} GB less (")
    assert lines[3].startswith(f"  twice the devices: about {shared / 2e9:.2f} GB less (")
    less = f"  without gate kept at {line_of('gate = save')}: up to 2.15 GB less"
    assert any(text.startswith(less) for text in lines)


# -- Comparing two ledgers ---------------------------------------------------------------------------------------------
def changed(tmp_path, text: str) -> list[str]:
    """What the difference to train.py's ledger says after a change, without the sums."""
    before = ledger_of("local_test_synthetic").to_json()
    after = ledger_of_changed(tmp_path, "local_test_synthetic", text).to_json()
    lines = differences(json.loads(json.dumps(before)), json.loads(json.dumps(after)))
    return lines[: lines.index("altogether")] if "altogether" in lines else lines


def test_a_copy_under_another_name_is_the_same():
    text = json.dumps(ledger_of("local_test_synthetic").to_json())
    copy = json.loads(text.replace('"train.py:', '"my_train.py:').replace('"train.py"', '"my_train.py"'))
    assert copy["source"] == "my_train.py" and "my_train.py" in copy["texts"]
    assert differences(json.loads(text), copy) == differences(copy, json.loads(text)) == []


def test_a_deleted_save_for_backward_is_the_difference(tmp_path):
    """Without `gate = save_for_backward(gate)` that line keeps nothing and the product before it runs once more a
    layer; no other line differs."""
    text = "\n".join(line for line in SOURCE if "gate = save_for_backward" not in line) + "\n"
    lines = changed(tmp_path, text)
    product, kept = line_of("gate = shardops.einsum"), line_of("gate = save")
    assert [line for line in lines if not line.startswith(" ")] == [
        f"{product}  {SOURCE[int(product.split(':')[1]) - 1].strip()}",
        f"{kept} (deleted)  {SOURCE[int(kept.split(':')[1]) - 1].strip()}",
    ]
    assert lines[1] == "    FLOPs, recomputed: 0 -> 537M"  # 2 · 16 · 64 · 256 · 512 in 2 layers
    assert lines[3:] == ["    bytes kept for the backward pass (save_for_backward): 2.10M -> 0"]


def test_an_added_collective_is_the_difference(tmp_path):
    """Only the line of the new collective differs, although all lines after it have moved."""
    after = "            up = save_for_backward(up)"
    index = next(number for number, line in enumerate(SOURCE) if line.startswith(after)) + 1
    blocks = "shardops.regroup('B/d L F/t -> B/d L t/t f', up)"
    passed = f"shardops.ppermute('B/d L t/t f -> B/d L t/t f', {blocks}, 1)"
    new = f"            up = shardops.regroup('B/d L t/t f -> B/d L F/t', {passed})"
    lines = changed(tmp_path, "\n".join([*SOURCE[:index], new, *SOURCE[index:]]) + "\n")
    assert lines[0] == f"train.py:{index + 1} (new)  {new.strip()}"
    assert lines[1:] == [
        f"    collective-permute over t of bfloat16, {phase}: {what}"
        for phase in ("backward", "forward", "recomputed")
        for what in ("times: 0 -> 2", "bytes sent: 0 -> 2.10M")
    ]


def test_compared_ledgers(tmp_path, called):
    """tools.compare: the exit status says whether two ledgers differ, in digits that differ too; a file that is no
    ledger is one line of error; one of format 1 is read."""
    ledger = ledger_of("local_test_synthetic")
    write_all(tmp_path, pages(ledger))
    same, other = str(tmp_path / "ledger.json"), tmp_path / "other.json"
    old = {**ledger.to_json(), "format": 1, "text": SOURCE}
    old = json.dumps({key: value for key, value in old.items() if key != "texts"})
    fewer = old.replace('"model_flops": ', '"model_flops": 1', 1)
    flops = ledger.model_flops
    for text, status, shown in [
        (old.replace(str(flops), str(flops + 1)), 1, f"model FLOPs: {flops:,.0f} -> {flops + 1:,.0f}"),
        (old, 0, "The ledgers say the same."),
        (fewer, 1, "altogether"),
        (None, 1, f"error: {other} is no ledger: … ledger.json … FileNotFoundError"),
        ("{", 1, f"{other} is no ledger: … ledger.json … JSONDecodeError"),
        ('{"format": 0}', 1, f"expected a ledger of format {FORMAT}, found 0"),
    ]:
        other.unlink(missing_ok=True) if text is None else other.write_text(text)
        found, out, error = called(compare.main, compare.Compare, same, str(other))
        assert found == status and says(shown, out + error)
