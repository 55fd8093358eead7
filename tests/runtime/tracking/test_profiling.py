"""The profile of a few steps."""

import contextlib
import gzip
import json
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from parts import says

from runtime.tracking.profiling import Profiler


class Trace:
    """Stands in for jax.profiler's start_trace and stop_trace: notes the steps between them."""

    def __init__(self, monkeypatch):
        self.starts = self.stops = 0
        monkeypatch.setattr(jax.profiler, "start_trace", self.start)
        monkeypatch.setattr(jax.profiler, "stop_trace", self.stop)

    @property
    def is_on(self) -> bool:
        return self.starts > self.stops

    def start(self, folder, create_perfetto_trace, profiler_options):
        assert create_perfetto_trace
        self.starts += 1
        place = folder / "plugins" / "profile" / "now"
        place.mkdir(parents=True)
        (place / "perfetto_trace.json.gz").touch()

    def stop(self):
        self.stops += 1


def run(folder, start_step: int, total_steps: int, trace: Trace | None = None, is_leader: bool = True) -> dict:
    """The loop of a run; returns the steps that were traced and those that were waited for."""
    seen = {"traced": [], "waited": []}
    with Profiler(folder, start_step=start_step, total_steps=total_steps, is_leader=is_leader) as profiler:
        for step in range(start_step + 1, total_steps + 1):
            profiler.before_step(step)
            if trace is not None and trace.is_on:
                seen["traced"].append(step)
            outputs = mock.Mock()
            profiler.after_step(step, (outputs, outputs))
            if outputs.block_until_ready.called:
                seen["waited"].append(step)
    return seen


@pytest.mark.parametrize("start_step, total_steps, is_profiled", [
    (0, 50, True), (20, 50, True), (0, 5, False), (0, 6, True), (44, 50, True), (45, 50, False), (50, 50, False),
])  # fmt: skip
def test_three_steps_a_little_after_the_start(tmp_path, monkeypatch, start_step, total_steps, is_profiled):
    """Steps 4 to 6 of this process are profiled, and only the last is waited for; the trace stands at the top of
    `profile`. No profile starts that could not end; other processes and a resumed run make none."""
    trace = Trace(monkeypatch)
    run(tmp_path, start_step, total_steps, trace, is_leader=False)
    assert trace.starts == 0
    seen = run(tmp_path, start_step, total_steps, trace)
    if is_profiled:
        assert seen["traced"][:3] == [start_step + 4, start_step + 5, start_step + 6]
        assert seen["waited"] == [start_step + 6] and (tmp_path / "profile" / "perfetto_trace.json.gz").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["profile"] * is_profiled
    run(tmp_path, total_steps, total_steps + 50 * is_profiled, trace)
    assert (trace.starts, trace.stops) == (is_profiled, is_profiled)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_exception_ends_the_profile(tmp_path, monkeypatch, error):
    """The tracer is stopped, nobody waits, no half profile is left, and the next start profiles."""
    trace = Trace(monkeypatch)
    with pytest.raises(error), Profiler(tmp_path, start_step=0, total_steps=50, is_leader=True) as profiler:
        for step in range(1, 51):
            profiler.before_step(step)
            if step == 5:
                raise error
            profiler.after_step(step, None)
    assert (trace.starts, trace.stops) == (1, 1)
    assert list(tmp_path.iterdir()) == []
    run(tmp_path, 0, 50, trace)
    assert (trace.starts, trace.stops) == (2, 2)


def test_an_error_in_writing_is_one_line(tmp_path, monkeypatch, capsys):
    """A full disk does not end training, and is not lost."""
    trace = Trace(monkeypatch)

    def full():
        trace.stops += 1
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(jax.profiler, "stop_trace", full)
    run(tmp_path, 0, 10)
    said = capsys.readouterr().out
    assert says(f"{tmp_path}/profile is not written: OSError: [Errno 28]", said) and said.count("\n") == 1


def test_the_writing_is_not_timed(tmp_path, monkeypatch):
    """The profile is written while the run is paused, and before the next step begins: else steps would seem slow, and
    those after them faster than the device."""
    trace, seen = Trace(monkeypatch), []

    @contextlib.contextmanager
    def paused():
        seen.append("paused")
        assert trace.is_on
        yield
        assert not trace.is_on and (tmp_path / "profile" / "perfetto_trace.json.gz").exists()
        seen.append("goes on")

    with Profiler(tmp_path, start_step=0, total_steps=50, is_leader=True, paused=paused) as profiler:
        for step in range(1, 11):
            profiler.before_step(step)
            seen.append(step)
            profiler.after_step(step, None)
    assert seen == [1, 2, 3, 4, 5, 6, "paused", "goes on", 7, 8, 9, 10]


def test_a_real_profile_shows_the_steps_and_their_collectives(tmp_path, capsys):
    """The trace of 8 simulated devices is JSON that Perfetto reads, with steps 4 to 6 and the all-reduce by name."""
    mesh = jax.make_mesh((8,), ("d",))

    @jax.jit
    def step(x):
        return jax.shard_map(
            lambda x: x + jax.lax.psum(x @ x.T, "d") @ x, mesh=mesh, in_specs=P("d"), out_specs=P("d")
        )(x)

    x = jax.device_put(jnp.eye(64), jax.NamedSharding(mesh, P("d")))
    with Profiler(tmp_path, start_step=0, total_steps=8, is_leader=True) as profiler:
        for number in range(1, 9):
            profiler.before_step(number)
            x = step(x)
            profiler.after_step(number, x)
    path = tmp_path / "profile" / "perfetto_trace.json.gz"
    assert capsys.readouterr().out.split() == f"profile of steps 4 to 6: {path} (https://ui.perfetto.dev)".split()
    events = json.loads(gzip.open(path).read())["traceEvents"]
    steps = {event["args"]["step_num"] for event in events if "step_num" in event.get("args", {})}
    assert steps == {"4", "5", "6"}
    assert any("psum" in event.get("name", "") or "all-reduce" in event.get("name", "") for event in events)
    assert list(tmp_path.glob("profile/plugins/profile/*/*.xplane.pb"))
