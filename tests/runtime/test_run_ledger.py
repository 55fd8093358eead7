"""What a run says of its step before and after it is compiled."""

import contextlib
import dataclasses
import functools
import re
import types

import jax
import numpy as np
import reference
import small
from jax import lax

import runtime.run
import train
from ledger.machines.hardware import Hardware
from shardlib.shard_map import typed_shard_map


@small.proved_elsewhere()
def compiled(tmp_path, capsys) -> str:
    """What `Run.compile` prints, without its line breaks, of the small float32 step in two microbatches on the mesh 4 ×
    2."""
    training = dataclasses.replace(small.TRAINING, microbatches=2)
    mesh = types.SimpleNamespace(d=4, t=2)
    (tmp_path / "step.svg").touch()  # the graph is drawn already
    with small.on_mesh(4, 2, "float32"):
        config = types.SimpleNamespace(training=training, mesh=mesh)
        run = types.SimpleNamespace(_config=config, _is_leader=True, folder=tmp_path, compiler_options={}, _recorded={})
        run._writing = contextlib.nullcontext
        step = typed_shard_map(functools.partial(train.training_step, small.MODEL, training, 0))
        state, zero = small.state_of(reference.random_weights(small.MODEL, seed=0)), np.uint32(0)
        traced = jax.jit(step, donate_argnums=0).trace(state, zero, zero, small.batch_of(small.BATCH))
        assert isinstance(runtime.run.Run.compile(run, traced, train.__file__), jax.stages.Compiled)
    assert set(run._flops) == {"mfu", "hfu", "mfu_6nd"}
    return " ".join(capsys.readouterr().out.split())


def test_a_step_that_sends_what_is_written(tmp_path, capsys):
    """What it costs, where each line's costs stand, that compiled and written agree, and memory: a sentence each. Of a
    CPU no figure is known: nothing is said of how long the step takes, and none is guessed. The picture of another
    mesh's step goes, to be drawn anew."""
    (tmp_path / "step.hlo.txt").write_text("another mesh's")
    text = compiled(tmp_path, capsys)
    assert (tmp_path / "step.hlo.txt").read_text().startswith("HloModule ") and not (tmp_path / "step.svg").exists()
    assert text.startswith("A step: ") and re.search(r" needs [\d.]+ MB \(forecast\)\. Line by line: ", text)
    assert f" {tmp_path}/ledger.html, and ledger.txt there. The compiled step sends what" in text
    agreement = r"The compiled step sends what is written: \d+ collectives, equal by kind, axes, type and bytes\."
    assert re.search(agreement, text)
    assert re.search(r" Memory of a device: forecast [\d.]+ MB, XLA says [\d.]+ MB \(ratio \d\.\d\d\)\.$", text)
    page = (tmp_path / "ledger.html").read_text(encoding="utf-8")
    assert "How long a step takes is not said: the hardware is not known." in page and "<svg" not in page


def test_a_known_device_and_a_step_that_does_not_send_what_is_written(tmp_path, capsys, monkeypatch):
    """The summary compares the forecast with the device's memory before it compiles, and says what to change where it
    does not fit; ledger.html has the roofline. Of what XLA does in another way there is a warning with the rows, which
    ledger.txt keeps."""
    monkeypatch.setattr(runtime.run, "of_device_kind", lambda kind: Hardware(1e12, 10**5, 1e11, 1e10))
    monkeypatch.setattr(lax, "optimization_barrier", lambda x: x)  # XLA takes gathers out of the loop then
    text = compiled(tmp_path, capsys)
    summary, _, rows = text.partition("warning: the compiled step does not send what is written: ")
    assert " of 0.10 MB (forecast). It will not fit: weights " in summary
    assert " To need less: twice the microbatches, or half the batch: about " in summary
    assert rows.startswith("all-gather over d") and "taken out of the loop at train.py:" in rows
    assert "The compiled step sends what is written" not in text
    _, _, kept = (tmp_path / "ledger.txt").read_text().partition("\nWhat the compiled step sends in another way:\n")
    assert " ".join(kept.split()) == rows.partition(" Memory of a device: ")[0]
    page = (tmp_path / "ledger.html").read_text(encoding="utf-8")
    assert '<svg class="roofline"' in page and "It will not fit." in page
