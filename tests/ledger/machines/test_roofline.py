"""The roofline: bytes moved, counted by hand on small programs, and times of a ledger by hand."""

import collections
import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from ledgers import f32, forecast_of, ledger_of

import train
from ledger.count.program import PHASES
from ledger.machines.hardware import Hardware, named, of_device_kind
from ledger.machines.roofline import Sending, roofline, speed
from ledger.pages import contents

PLAIN = Hardware(100.0, 1000, 10.0, link_bytes_per_s=8.0, network_bytes_per_s=1.0)


def adam(w, m, n, g):
    m, n = 0.9 * m + 0.1 * g, 0.9 * n + 0.1 * g * g
    return w - m / jnp.sqrt(n), m, n


def layers(x, w):
    return lax.scan(lambda x, w: (x @ w, None), x, w)[0]


X, W, V = f32(8, 16), f32(16, 32), f32(32, 4)
MOVED = {
    "a product moves its operands and its result once": (lambda x, w: x @ w, (X, W), 8 * 16 + 16 * 32 + 8 * 32),
    "an operand that is there twice once": (lambda x: x @ x, (f32(8, 8),), 2 * 8 * 8),
    "a chain between two products is read and written once": (lambda x, w, v: jnp.sin(2 * (x @ w) + 1) @ v, (X, W, V),
     (8 * 16 + 16 * 32 + 8 * 32) + 2 * 8 * 32 + (8 * 32 + 32 * 4 + 8 * 4)),
    "before a sum it is read alone": (lambda x: jnp.sum(jnp.sin(x)), (f32(64),), 64 + 1),
    "Adam's results are computed together: 4 read, 3 written": (adam, (f32(64),) * 4, 7 * 64),
    "a loop moves what its body does each time": (layers, (X, f32(5, 16, 16)), 5 * (8 * 16 + 16 * 16 + 8 * 16)),
}  # fmt: skip


@pytest.mark.parametrize("function, shapes, elements", MOVED.values(), ids=MOVED)
def test_bytes_moved(function, shapes, elements):
    """Bytes moved by small programs are what one counts by hand."""
    assert forecast_of(function, *shapes).moved_bytes() == 4 * elements


def test_gathers_and_scatters_touch_rows():
    """A gather reads, and a scatter adds to, as many rows of a table as it is given."""
    rows = jax.ShapeDtypeStruct((5,), jnp.int32)
    table, read_rows = f32(1000, 16), 4 * 5 * 16
    taken = forecast_of(lambda table, rows: jnp.sum(table[rows]), table, rows)
    added = forecast_of(lambda table, rows, x: table.at[rows].add(x), table, rows, f32(5, 16))
    assert taken.moved_bytes() < 2 * read_rows and 3 * read_rows <= added.moved_bytes() <= 3 * read_rows + 100


def test_the_update_of_the_model_moves_28_bytes_a_parameter():
    """The line of c4_a100x8_1b that writes the state reads weights, gradient and two moments and writes three."""
    ledger = ledger_of("c4_a100x8_1b")
    source = Path(train.__file__).read_text().splitlines()
    (number,) = [number for number, text in enumerate(source, 1) if "jnp.where(finite, new, old)" in text]
    update = ledger.memory.moved[f"train.py:{number}", "update"]
    assert update - 28 * ledger.parameters // 8 < 11 * 16  # and some scalars for each of the eleven arrays


@pytest.mark.parametrize(
    "axes, mesh, joined, crosses, rate",
    [
        (("d",), {"d": 8, "t": 1}, 8, False, 8.0),
        (("d",), {"d": 8, "t": 1}, 4, True, 4.0),  # four of a group in each host: the adapters of four
        (("t",), {"d": 4, "t": 8}, 8, False, 8.0),
        (("d",), {"d": 4, "t": 8}, 8, True, 1.0),  # one of a group in each host
        (("d", "t"), {"d": 4, "t": 8}, 8, True, 8.0),  # the adapters of eight are as fast as a link
        (("d", "t"), {"d": 2, "t": 16}, 16, True, 8.0),  # here faster: the link bounds
        (("t",), {"d": 2, "t": 16}, 8, True, 8.0),
        (("t",), {"d": 8, "t": 2}, 1, True, 1.0),
        (("t",), {"d": 8, "t": 3}, 8, True, 1.5),  # the first group of three is in one host, the third in two
    ],
)
def test_speed_of_a_collective(axes, mesh, joined, crosses, rate):
    """A link's speed bounds it within a host; between hosts the host's adapters do, divided over the rings that leave
    it."""
    assert speed("all-gather", axes, mesh, PLAIN, joined) == (crosses, rate)


@pytest.mark.parametrize("axes, mesh, joined, rate", [
    (("d",), {"d": 8, "t": 1}, 8, 8.0), (("d",), {"d": 4, "t": 8}, 8, 1.0), (("d",), {"d": 64, "t": 1}, 8, 63 / 56),
    (("d",), {"d": 16, "t": 2}, 8, 15 / 12),
])  # fmt: skip
def test_an_all_to_all_goes_through_a_devices_own_adapter(axes, mesh, joined, rate):
    """Of the parts that a device sends, those for other hosts pass its share of the network: 56 of 63 on eight hosts
    of eight."""
    assert speed("all-to-all", axes, mesh, PLAIN, joined)[1] == pytest.approx(rate)


@pytest.mark.parametrize("axes, mesh, share", [
    (("d",), {"d": 64, "t": 1}, 3), (("d",), {"d": 16, "t": 4}, 2), (("t",), {"d": 16, "t": 4}, 1),
    (("d", "t"), {"d": 16, "t": 4}, 3), (("t",), {"d": 4, "t": 16}, 2),
])  # fmt: skip
def test_speed_on_a_torus(axes, mesh, share):
    """A collective has the links of its axes' dims: all three of a 3D torus for the only axis, one for the smaller of
    two."""
    torus = Hardware(1.0, 1, 1.0, link_bytes_per_s=9.0, slice_devices=1000, torus_dims=3)
    assert speed("all-gather", axes, mesh, torus, 64) == (False, 3.0 * share)


@pytest.mark.parametrize("shape", [(2,), (8,), (4, 4), (2, 2, 2), (8, 8, 8)], ids=str)
def test_an_all_to_all_on_a_torus(shape):
    """It takes as long as a device's parts on their shortest ways, which the links of all dims share evenly."""
    torus = Hardware(1.0, 1, 1.0, link_bytes_per_s=2.0 * len(shape), torus_dims=len(shape))
    devices = math.prod(shape)
    passed = sum(min(place, size - place) for ways in np.ndindex(shape) for place, size in zip(ways, shape))
    seconds = passed / torus.link_bytes_per_s
    assert speed("all-to-all", ("d",), {"d": devices}, torus, devices)[1] == pytest.approx((devices - 1) / seconds)


def test_times_of_a_ledger():
    """Each phase of c4_a100x8_1b on eight A100s takes what its counts say; MFU uses the longest times."""
    ledger, a100 = ledger_of("c4_a100x8_1b"), named("a100_80gb")
    estimate = roofline(ledger, a100, devices_per_host=8)
    assert [phase.name for phase in estimate.phases] == list(PHASES)
    longest = []
    for phase in estimate.phases:
        assert phase.compute_s == ledger.costs.flops(phase.name) / 312e12
        assert phase.hbm_s == ledger.memory.moved_bytes(phase.name) / 2039e9
        assert phase.sent_s == pytest.approx(ledger.sent_bytes(phase.name) / 300e9)
        assert phase.alone_s == pytest.approx(phase.compute_s + phase.hbm_s + phase.sent_s)
        longest.append(max(phase.compute_s, phase.hbm_s, phase.sent_s))
    assert estimate.step_s == sum(longest) and estimate.bound == "compute"
    assert estimate.phases[0].bound == "compute" and estimate.phases[1].bound == "memory"
    assert estimate.mfu == ledger.model_flops / (8 * 312e12) / sum(longest)
    assert estimate.mfu_alone < estimate.mfu < 1
    two_hosts = roofline(ledger, a100, devices_per_host=4)
    assert two_hosts.totals["communication"] == pytest.approx(3 * estimate.totals["communication"])  # 4 × 25 GB/s
    assert two_hosts.totals["compute"] == estimate.totals["compute"]


@pytest.mark.parametrize("name, share", [("h200", 0.5), ("b200", 0.5), ("a100_80gb", 1), ("tpu_v5p", 1)])
def test_products_of_8_bits(name, share):
    """They take half the time where the vendor says so."""
    ledger = ledger_of("c4_a100x8_1b")
    rows = {dataclasses.replace(row, dtype="float8_e4m3fn"): n for row, n in ledger.costs.products.items()}
    costs = dataclasses.replace(ledger.costs, products=collections.Counter(rows))
    narrow = roofline(dataclasses.replace(ledger, costs=costs), named(name), 8).totals["compute"]
    assert narrow == pytest.approx(share * roofline(ledger, named(name), 8).totals["compute"])


def test_a_slice_joins_hosts():
    """Hosts of a TPU slice are joined by its links: how many devices each has does not matter."""
    ledger = ledger_of("c4_a100x8_1b")
    one, two = (roofline(ledger, named("tpu_v5p"), devices_per_host) for devices_per_host in (8, 4))
    assert one.phases == two.phases and not any(sending.crosses_hosts for sending in two.sendings)


def test_slices_are_of_one_size():
    """Two slices, of at most 5 chips, have 4 each of a mesh of 8: replicas are on one of each."""
    ledger = dataclasses.replace(ledger_of("c4_a100x8_1b"), mesh={"r": 2, "d": 4})
    slices = dataclasses.replace(named("tpu_v5p"), slice_devices=5)
    assert not any(sending.crosses_hosts for sending in roofline(ledger, slices, 4).sendings)


def test_what_is_not_known_is_not_guessed():
    """A time that needs a missing figure is None and printed n/a; the rest is there."""
    ledger = ledger_of("c4_a100x8_1b")
    nothing = roofline(ledger, Hardware(None, None, None), 8)
    assert nothing.step_s is nothing.mfu is nothing.bound is None
    assert "n/a" in contents.times(nothing).text()[2]
    no_links = roofline(ledger, named("NVIDIA H100 PCIe"), 8)
    assert no_links.totals["compute"] > 0 and no_links.totals["communication"] is None and no_links.mfu is None
    assert named("gtx") is None and of_device_kind("cpu") is None


def test_the_text():
    """Each phase and each collective has a row, in a terminal of 80 columns."""
    estimate = roofline(ledger_of("c4_a100x8_1b"), named("a100_80gb"), 4)
    times, sent = contents.times(estimate).text(), contents.sendings(estimate).text()
    assert [line.split()[0] for line in times[2:]] == [*PHASES, "all"]
    assert times[2].split()[1:3] == ["54.6", "ms"] and times[2].endswith("compute")
    assert any("reduce-scatter" in line and "100 GB/s" in line and line.endswith("network") for line in sent)
    wide = Sending("recomputed", "reduce-scatter", ("c", "e", "t"), 2.02e11, True, 5e10, 0.395)
    sent += contents.sendings(dataclasses.replace(estimate, sendings=(wide,))).text()
    assert max(map(len, [*times, *sent])) <= 80
