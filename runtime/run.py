"""The mechanics around the steps: devices and mesh, the run folder, and what is due when.

with jax.set_mesh(start(config)), Run(config, TokenBatch) as run:
    step = run.compile(jax.jit(training_step).trace(state, zero, zero, batch), __file__)
    state = run.first_state(state, init)
    for number in run.steps():
        state, metrics = step(state, skipped_steps, number, run.data.load(number))
        run.log(number, state, metrics)
        run.validate_if_due(number, validate, state.weights)
        run.save_if_due(number, state)
"""

import collections
import contextlib
import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import yaml
from jax.experimental import multihost_utils

from ledger.compiled.agreement import agreement, peak_bytes
from ledger.count.step import of_step
from ledger.machines.hardware import of_device_kind
from ledger.machines.roofline import roofline
from ledger.pages import files
from ledger.pages.contents import summary
from runtime import program
from runtime.checkpoints.directory import Checkpoints
from runtime.checkpoints.lock import Ownership
from runtime.cluster.processes import domain, host_names, sent_over_network
from runtime.cluster.processes import start as start  # train.py's name for it
from runtime.cluster.signals import STOPPED, StopSignals
from runtime.cluster.slow_hosts import SlowHosts
from runtime.cluster.tuning import has_bfloat16, options
from runtime.config import resume
from runtime.config.checks import check_dataset
from runtime.config.command_line import to_yaml
from runtime.data.batches import Loader
from runtime.data.sources import bytes_per_token, keep_tokenizer, open_data, tokenizer_of
from runtime.data.tokenizers import Tokenizer, tokenizer_identity
from runtime.files import MOST_BYTES, flat, parse_yaml, read_bytes, read_text, write_all, write_whole
from runtime.terminal import NothingToTrain, RunError, print_line, run_errors, wrapped
from runtime.tracking.bad_steps import BadSteps, not_finite
from runtime.tracking.best import Best
from runtime.tracking.followers import Followers
from runtime.tracking.metrics import Tracker
from runtime.tracking.profiling import Profiler
from runtime.tracking.report import environment
from shardlib.shardtypes import make_shardings, narrowed

# How far the host may be ahead: the device never runs dry of work. With 32 programs in flight simulated devices stop
# for ever (jax 0.10.2: the next program waits for a place in each device's queue while it already holds others').
PROGRAMS_IN_FLIGHT = 8
AHEAD_S = 2.0  # most seconds of steps in flight, since a signal waits for them; longer steps are not dispatched ahead

# XLA:CPU compiles the initialization, which runs once, in 2.3 s of CPU time with this and in 16.2 s without; the
# program draws the same bits (2.4M parameters, two cores, jax 0.10.2, 2026-11-21).
RUNS_ONCE = {"xla_backend_optimization_level": 1}

POLL_S = 0.2  # from one look for a signal to the next, while data are waited for
MOST_BAD_STEPS = 10  # in a row; after so many, continuing does not help


def with_shardings(shapes: Any, type_: Any) -> Any:
    """The tree of `ShapeDtypeStruct` with its type's shardings on the current mesh."""
    shardings = make_shardings(narrowed(type_, shapes))
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes, shardings
    )


def names(tree: Any) -> list[str]:
    """The leaves' names: 'transformer/w_q'."""
    return [
        jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]


def refuse_beyond_memory(forecast: int) -> None:
    """Raises RunError: simulated devices, which share the host's memory, would need more bytes than it has."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if jax.default_backend() == "cpu" and forecast > there:
        fix = "lower training.tokens.batch, training.tokens.len or a size of the model"
        raise RunError(f"the step takes {forecast:,} bytes of host memory (forecast), there are {there:,}: {fix}")


class InFlight:
    """Programs that are dispatched and have perhaps not ended."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._outputs = clock, collections.deque[jax.Array]()
        self._ended: float | None = None  # when the last awaited program ended
        self._step_s = math.inf

    def add(self, output: jax.Array, most: int = PROGRAMS_IN_FLIGHT) -> None:
        """Takes a program's output, and waits until at most `most` programs, and AHEAD_S of them, are in flight."""
        self._outputs.append(output)
        while len(self._outputs) > min(most, AHEAD_S // max(self._step_s, 1e-9)):
            self._outputs.popleft().block_until_ready()
            now = self._clock()
            self._step_s = math.inf if self._ended is None else now - self._ended
            self._ended = now


class Run:
    """One run, between __enter__ and __exit__: its folder, data, checkpoints, metrics, profile and graph, and the steps
    that are left to do.

    The run owns its folder. With a URL as root_working_dir the checkpoints are there, and all else that a run leaves is
    in `runs` on the leader's disk.

    Args:
      batch_type: has the fields of `runtime.data.batches.Batch`.
      first_weights: opens `initial_weights` for a run without a checkpoint, given the `program.model_of` of its
        trainer. It checks that they fit, and returns their path and a function that reads them into a tree of
        `ShapeDtypeStruct`s with shardings; None: they are not the first weights of this state.
      about: more attributes of each checkpoint, JSON values; the run does not go on from a checkpoint with others.
      score: called with the weights at each validation; returns metrics, whose names are `score.metrics`, and a text.

    Raises:
      RunError: the data do not fit the config, another run owns the folder, the checkpoint was trained with another
        configuration, or the run has all its steps already. Nothing is written then.
      SystemExit: at the end, with the status STOPPED, if a signal stopped the run before its last step.
    """

    _best: Best | None = None  # with patience
    _compiled: Mapping[str, float | None]  # what `compile` saw of the step
    _slow_hosts: SlowHosts | None = None  # where there are several
    _read: Callable[[Any], Any] | None = None  # reads the first weights
    _step_began = 0.0
    _stopping = _is_stopped = _save_is_late = False
    _saved_step = 0  # the last step whose state this start has saved; 0: none yet
    _skipped_steps: Any = 0

    def __init__(
        self,
        config: Any,
        batch_type: Any,
        first_weights: Callable[[dict[str, str] | None], tuple[str, Callable | None]] | None = None,
        about: Mapping[str, Any] | None = None,
        score: Any = None,
    ):
        self._config, self._batch_type, self._first_weights = config, batch_type, first_weights
        self._about, self._score = dict(about or {}), score
        self._total = config.training.steps
        self._is_leader = jax.process_index() == 0
        root, name = config.paths.root_working_dir, config.paths.model_name
        self._store = f"{root.rstrip('/')}/{name}"  # where checkpoints and owner.json are
        self._program = program.recorded(config)
        self._recorded = {name: value for name, value in self._program.items() if name != "source"}
        self.folder = Path("runs" if "://" in root else root) / name
        self.compiler_options = options(jax.devices()[0], vars(config.mesh).get("p", 1))
        self._in_flight = InFlight()

    def __enter__(self) -> "Run":
        with contextlib.ExitStack() as opened:
            # The configuration, and checkpoints, pages and trackers, which repeat it, may hold a secret.
            opened.callback(os.umask, os.umask(0o077))
            # Followers start first and so end last: no checkpoint waits for a tracker.
            model, released = program.model_of({"program": self._program}) or {}, program.released("train", None)
            is_known = "family" in self._about or model == released
            followers = Followers(self._config, self.folder, is_leader=self._is_leader, is_known=is_known)
            self._followers = opened.enter_context(followers)
            tokenizer = self._open_data(opened)
            self._signals = opened.enter_context(StopSignals())
            self._open_checkpoints(opened)
            if self._config.initial_weights is not None and not self.done_steps:
                self._open_first_weights()
            self.data.begin()
            self.validation_data.begin()
            if self._is_leader:
                self._describe(tokenizer)
            is_changed = model.get("attention", released["attention"]) != released["attention"]
            if is_changed and getattr(self._config.model, "attention", "einsum") != "einsum":
                self.say("note: attention() was changed, but a kernel may run in its place: see model.attention")
            self._open = opened.pop_all()
        return self

    def __exit__(self, *error) -> None:
        self._open.__exit__(*error)
        if self._is_stopped and error[0] is None:
            sys.exit(STOPPED)

    def _open_data(self, opened: contextlib.ExitStack) -> Tokenizer | None:
        sharding = make_shardings(self._batch_type)
        self.data = open_data(self._config, "train", sharding)
        opened.callback(self.data.close)
        self.validation_data = open_data(self._config, "validation", sharding)
        opened.callback(self.validation_data.close)
        largest_id = max(self.data.max_token_id, self.validation_data.max_token_id)
        epochs = self.data.epochs_of(self._total)
        check_dataset(self._config, largest_id, self.data.steps, epochs, self.data.bos_id)
        tokenizer = tokenizer_of(self._config)
        self._identity = dict(self.data.identity)
        if tokenizer is not None:
            self._identity["tokenizer"] = tokenizer_identity(tokenizer)
        return tokenizer

    def _open_checkpoints(self, opened: contextlib.ExitStack) -> None:
        """Takes the folder and finds the step that the run goes on from. Raises NothingToTrain: it has ended; RunError:
        it has more steps than the config asks for."""
        self._owner = self._own(opened)
        self._checkpoints = Checkpoints(
            f"{self._store}/checkpoints",
            keep_last=self._config.checkpoint.keep_last,
            keep_every=self._config.checkpoint.keep_every,
            max_io_threads=self._config.io.max_io_threads,
        )
        opened.push(self._close_checkpoints)
        self._go_on_from(self._checkpoints.latest(last_step=self._total) or 0)
        if self._is_over():  # nobody restores it, so that it is read whole here
            self._go_on_from(self._checkpoints.latest(last_step=self.done_steps) or 0)
        is_over, done, total = self._is_over(), self.done_steps, self._total
        if is_over or done >= total:
            if done <= total:
                self._refuse_if_mostly_skipped(self.attributes.get("skipped_steps", 0))
            what = self._best_text() if is_over else f"the run in {self._store} has {done} of {total} steps"
            fix = f"raise {'patience' if is_over else 'training.steps'}, or give a new run its own paths.model_name"
            kind = NothingToTrain if is_over or done == total else RunError
            raise kind(f"nothing to train: {what}: {fix}")

    def _open_first_weights(self) -> None:
        if self._first_weights is None:
            raise RunError("initial_weights: this trainer's main was started without a function that reads them")
        path, self._read = self._first_weights(program.model_of({"program": self._program}))
        if self._read is not None:
            self.say(f"the first weights are those of {path}")

    def _describe(self, tokenizer: Tokenizer | None) -> None:
        """Writes config, program and tokenizer into the run folder, and prints what the data are."""
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / "config.yaml", to_yaml(vars(self._config).get("given", self._config)))
            write_whole(self.folder / "program.py", self._program["source"])
            if tokenizer is not None:
                keep_tokenizer(self.folder, tokenizer)
        self.say(f"training data: {self.data.summary}")
        self.say(f"validation data: {self.validation_data.summary}")

    def say(self, text: str) -> None:
        """Prints a line, once for all hosts."""
        if self._is_leader:
            print_line(wrapped(text))

    def compile(self, traced: jax.stages.Traced, source: str) -> jax.stages.Compiled:
        """Compiles the step and prints its costs: by its ledger before, and compared with XLA's program after. Writes
        the ledger, which annotates the file `source`, and the program as text; a follower draws the graph."""
        tokens = self._config.training.tokens
        mesh = vars(self._config.mesh)
        count, platform = tokens.batch * tokens.len, jax.default_backend()
        ledger = of_step(traced, mesh, source=source, tokens=count, platform=platform, has_bfloat16=has_bfloat16())
        self._flops = {"mfu": ledger.model_flops, "hfu": ledger.hardware_flops, "mfu_6nd": ledger.flops_6nd}
        if self._is_leader:
            devices = jax.sharding.get_mesh().devices.ravel()
            joined = [domain(device) for device in devices].count(domain(devices[0]))
            machine = of_device_kind(devices[0].device_kind)  # None: its figures are not known
            bound = roofline(ledger, machine, joined) if machine else None
            refuse_beyond_memory(ledger.memory.bytes * len(jax.local_devices()))
            lines = summary(ledger, machine.hbm_bytes if machine else None)
            lines += sent_over_network(ledger, jax.sharding.get_mesh())
            with self._writing():
                write_all(self.folder, files.pages(ledger, bound))
                about = {**environment(), **flat({"program": self._recorded}, separator="/"), "ledger": lines}
                write_whole(self.folder / "environment.json", json.dumps(about, indent=1))
            pages = f"Line by line: {self.folder}/ledger.html, and ledger.txt there."
            print_line("\n".join(map(wrapped, [*lines, pages])))
        began = time.perf_counter()
        compiled = traced.lower().compile(compiler_options=self.compiler_options)
        if self._is_leader:
            seen = {"compile_s": time.perf_counter() - began, "peak_memory_bytes": peak_bytes(compiled) or None}
            self._compiled = {**seen, "predicted_step_time_s": bound.step_s if bound else None}
            lines, rows = agreement(ledger, compiled)
            print_line("\n".join(map(wrapped, lines)))
            with self._writing():
                if rows:
                    with (self.folder / "ledger.txt").open("a", encoding="utf-8") as file:
                        print("\nWhat the compiled step sends in another way:", *rows, sep="\n  ", file=file)
                hlo, drawn, text = self.folder / "step.hlo.txt", self.folder / "step.svg", compiled.as_text().encode()
                if not drawn.exists() or (hlo.exists() and read_bytes(hlo, MOST_BYTES) != text):
                    write_whole(hlo, text)
                    drawn.unlink(missing_ok=True)  # shows the step of another mesh
        return compiled

    def first_state(self, shapes: Any, init: Callable[[jax.Array], Any]) -> Any:
        """The state of the newest checkpoint that reads whole, with `done_steps` and `attributes`; else what `init`
        draws from the seed, with the config's first weights. shapes: `ShapeDtypeStruct`s with shardings."""
        if self.done_steps:
            step, state = self._checkpoints.restore(shapes)
            if step != self.done_steps:
                self._go_on_from(step)
            self.say(f"going on after step {step} of {self._total}")
            return state
        shardings = jax.tree.map(lambda shape: shape.sharding, shapes)
        state = jax.jit(init, out_shardings=shardings, compiler_options=RUNS_ONCE)(
            np.uint32(self._config.training.seed)
        )
        if self._read is None:
            return state
        for drawn in jax.tree.leaves(state.weights):  # their memory, before the others are read
            drawn.delete()
        return dataclasses.replace(state, weights=self._read(shapes.weights))

    def save_if_due(self, step: int, state: Any) -> None:
        """Saves the state after this step: by steps, by minutes, at the end, and for a signal. Returns when the state
        is copied; the time does not count as a step's."""
        if step + 1 == self._saved_step or not self._save_is_due(step):
            return
        attributes = {
            "skipped_steps": int(self._skipped_steps),
            "seed": self._config.training.seed,
            **resume.description(self._config, self._identity),
            "program": self._program,
            "best": None if self._best is None else dataclasses.asdict(self._best),
            **self._about,
        }
        best = None if self._best is None else self._best.step
        with self._tracker.paused():
            stall_s = self._checkpoints.save(step + 1, state, attributes, best)
            self._tracker.log_checkpoint(step + 1, stall_s)
        self._saved_at, self._saved_step = time.monotonic(), step + 1

    def validate_if_due(self, step: int, add_batch: Callable, weights: Any) -> None:
        """Logs the validation split's mean loss and the scores of eval_tasks, every eval_interval steps and at the end.

        add_batch: a trainer's compiled validation step. A signal drops a validation; with `patience` it waits, so that
        the run ends where one that was left alone does. It waits for the last one too, which no later start would make.
        """
        interval, has_patience = self._config.eval_interval, self._best is not None
        waits = has_patience or step + 1 == self._total
        if not (self.due(step, interval) or (has_patience and (step + 1) % interval == 0)):
            return
        with self._tracker.paused():
            zero = jax.device_put(np.float32(0), jax.P())  # placed like results: add_batch is compiled once
            sums: dict[str, tuple[Any, Any]] = {}  # sums of losses and targets, by source
            for index in range(self.validation_data.steps or 0):  # None is only of training data without an end
                if self._stopping and not has_patience:
                    self.save_if_due(step, self._state)  # of the last step: whoever stops the run may not wait
                source = self.validation_data.source_of(index)
                if not waits and self._is_told_while_waiting(self.validation_data, index):
                    self._stopping = True
                    break
                before, batch = sums.get(source, (zero, zero)), self.validation_data.load(index)
                sums[source] = add_batch(weights, *before, batch)
                self._in_flight.add(sums[source][0], most=1)  # a signal waits for these
                self._stopping |= self._signals.stop()  # which is True only once
                if self._stopping and not waits:
                    break
            if self._stopping and not waits:
                return self.say(f"the validation after step {step + 1} is dropped: the run was told to stop")
            losses, targets = np.array([*sums.values(), (0, 0)], np.float64).T
            means = dict(zip(sums, (losses / np.where(targets > 0, targets, 1)).tolist()))
            total = losses.sum() / (targets.sum() or 1)
            self._tracker.log_validation(step + 1, total, means if len(means) > 1 else {})
            scores: dict[str, float] = {}
            if self._score is not None:
                scores, samples = self._score(weights)
                self._tracker.log_scores(step + 1, scores)
                if samples and self._is_leader:
                    with self._writing():
                        write_whole(self.folder / "samples.txt", f"after step {step + 1}\n\n{samples}")
            if self._best is not None:
                self._best.note(step + 1, {"validation_loss": total, **scores})

    def steps(self) -> Iterator[int]:
        """The steps to do, counted from 0, until all are done or a signal has come."""
        self._begin()
        for step in range(self.done_steps, self._total):
            self._checkpoints.raise_failure()
            if self._owner is not None:
                self._owner.require()
            self._profiler.before_step(step + 1)
            self._step_began = time.monotonic()
            if self._is_told_while_waiting(self.data, step):
                self._stopping = True
                if step > self.done_steps:
                    self.save_if_due(step - 1, self._state)
                return self._stop_after(step)
            yield step
            if self._is_over():
                self.say(f"ended after step {step + 1} of {self._total}: {self._best_text()}")
                break
            if self._stopping and step + 1 < self._total:
                return self._stop_after(step + 1)
        self._stop_if_bad()
        self._refuse_if_mostly_skipped(int(self._skipped_steps))

    def _is_told_while_waiting(self, data: Loader, index: int) -> bool:
        """Waits for a batch, whose store may be down, unless a signal comes. Several hosts wait on: they stop after the
        same step, which some may have begun."""
        while not data.is_there(index, POLL_S):
            if self._signals.is_alone_told():
                return True
        return False

    def _stop_after(self, steps: int) -> None:
        self._is_stopped = True
        then = "started again, the run goes on from there"
        if self._config.checkpoint_interval is None:
            then = "nothing was saved, since checkpoint_interval=null"
        self.say(f"stopped after step {steps} of {self._total}; {then}")

    def _refuse_if_mostly_skipped(self, skipped: int) -> None:
        if 2 * skipped > self._total:
            why = "since their loss or gradient was not finite: this is no trained model"
            fix = "Start a new run with other data or a lower training.learning_rate."
            raise RunError(f"{skipped} of {self._total} steps were skipped, {why}. {fix}")

    def due(self, step: int, interval: int | None) -> bool:
        """Whether work that comes every `interval` steps, and at the end, is due after this step; None: never. Nothing
        is due when a signal stops the run before its end, since whoever stops it may not wait long."""
        if interval is None or (self._stopping and step + 1 < self._total):
            return False
        return (step + 1) % interval == 0 or step + 1 == self._total

    def log(self, step: int, state: Any, metrics: Any) -> None:
        """Takes what a step that was just dispatched returns; its numbers are read later, when they are due.

        metrics: scalars, `loss`, `grad_norm` and `skipped_steps` among them, and vectors: one whose name ends with
          '_of' has a number for each of the weights, and is logged under their names.
        """
        own_s, self._state = time.monotonic() - self._step_began, state
        outputs, metrics, weights = (state, metrics), flat(metrics, separator="/"), names(state.weights)
        # Before the profiler, which waits for the step that it ends with.
        self._tracker.log(step + 1, metrics, self.data.waited_s, self.data.metrics(step), weights)
        self._profiler.after_step(step + 1, outputs)
        if step % self._config.log_interval == 0:  # the tracker has just read the step before
            self._stop_if_bad()
        self._bad_steps.note(step + 1, metrics, weights)
        self._skipped_steps = metrics["skipped_steps"]
        self._in_flight.add(metrics["loss"])
        if self._slow_hosts is not None:
            self._slow_hosts.note(own_s)
            if (step + 1) % self._config.log_interval == 0:
                for line in self._slow_hosts.exchange(step + 1):
                    self.say(line)
        self._stopping = self._signals.stop()

    def _writing(self) -> contextlib.AbstractContextManager[None]:
        """Turns errors of writing at the start into a RunError; later a full disk stops checkpoints alone."""
        return run_errors(f"{self.folder} cannot be written; make room there, or set paths.root_working_dir")

    # ---- where the run stands

    def _own(self, opened: contextlib.ExitStack) -> Ownership | None:
        """Owns the folder, on the leader for all hosts. Raises RunError on all."""
        owner, refusal = None, None
        if self._is_leader:
            try:
                self._refuse_another_root()
                owner = opened.enter_context(Ownership(self._store))
            except RunError as error:
                refusal = error
        if jax.process_count() > 1 and multihost_utils.broadcast_one_to_all(np.array(refusal is not None)):
            refusal = refusal or RunError(f"{self._store} is in use by another run; the message of host 0 says which")
        if refusal is not None:
            raise refusal
        return owner

    def _refuse_another_root(self) -> None:
        """Raises RunError: the local folder of a run whose root is a URL has the metrics of another root's run."""
        file, root = self.folder / "config.yaml", self._config.paths.root_working_dir
        if "://" in root and file.exists():
            with run_errors(f"{file} cannot be read", ValueError, AttributeError, yaml.YAMLError):
                other = parse_yaml(read_text(file)).get("paths", {}).get("root_working_dir")
            if other != root:
                fix = "give this one another paths.model_name, or move that folder away"
                raise RunError(f"{self.folder} has the metrics of the run in {other}: {fix}")

    def _go_on_from(self, step: int) -> None:
        """Takes over from the checkpoint after `step` steps; 0: from none."""
        self.done_steps = step
        self.attributes = self._checkpoints.attributes(step) if step else {}
        if self._config.patience:
            known = ["validation_loss", *(self._score.metrics if self._score else ())]
            self._best = Best.of(getattr(self._config, "best_by", known[0]), known, self.attributes)
        where = f"checkpoint {self._store}/checkpoints/{step:010d}"
        others = program.differences(self.attributes, self._program)
        changes = resume.compare(self._config, self._identity, self.attributes, where, others, self._about)
        if changes and self._is_leader:
            print_line("\n".join([f"the configuration differs from that of {where}:", *changes]))
        if step and "program" not in self.attributes:
            self.say(f"{where} does not say which program saved it: nothing tells whether this is the same")

    def _begin(self) -> None:
        """Opens what depends on the step that the run goes on from, which is known once the state is restored."""
        config, tokens = self._config, self._config.training.tokens
        steps = {"start_step": self.done_steps, "total_steps": self._total, "is_leader": self._is_leader}
        machine = of_device_kind(jax.devices()[0].device_kind)
        peak = machine.peak_flops_per_s if machine else None
        if self._is_leader:
            start = {"after_step": self.done_steps, **environment(), "program": self._recorded}
            with self._writing(), (self.folder / "starts.jsonl").open("a", encoding="utf-8") as file:
                print(json.dumps(start | {"compiled": self._compiled}), file=file)
        with self._writing():
            self._tracker = Tracker(
                self.folder,
                **steps,
                tokens_per_step=tokens.batch * tokens.len,
                flops_per_step=self._flops,
                peak_flops_per_s=None if peak is None else peak * math.prod(vars(config.mesh).values()),
                log_interval=config.log_interval,
                bytes_per_token=bytes_per_token(config),
                part_of_batch=self.data.part_of_batch,
                on_line=self._followers.name_failed,
            )
        self._open.enter_context(self._tracker)
        self._followers.start()
        self._profiler = self._open.enter_context(Profiler(self.folder, **steps, paused=self._tracker.paused))
        self._bad_steps = BadSteps(MOST_BAD_STEPS, self.attributes.get("skipped_steps", 0))
        if jax.process_count() > 1:
            self._slow_hosts = SlowHosts(host_names())
        self._saved_at = time.monotonic()
        self._signals.training = True

    # ---- what is due, and what can end it early

    def _save_is_due(self, step: int) -> bool:
        """A save that is due by steps or minutes waits for a step that is not bad: the state may be what makes steps
        bad, and then the previous checkpoint is better and must not be deleted for it."""
        if self._config.checkpoint_interval is None:
            return False
        is_best = self._best is not None and self._best.step == step + 1
        if step + 1 == self._total or self._stopping or is_best or self._is_over():
            self._stop_if_bad()
            return True
        if self.due(step, self._config.checkpoint_interval) or self._save_is_late or self._minutes_are_over(step):
            self._stop_if_bad()
            self._save_is_late = bool(self._bad_steps.row)
            return not self._save_is_late
        return False

    def _is_over(self) -> bool:
        """Whether `patience` validations in a row were not better."""
        return self._best is not None and self._best.since >= self._config.patience

    def _best_text(self) -> str:
        best: Any = self._best
        if not best.step:
            return f"{best.by} was finite in none of {best.since} validations"
        where = f"{self._store}/checkpoints/{best.step:010d}"
        return f"the best {best.by}, {best.value:.4f}, is that of {where}; none was better in {best.since} after it"

    def _minutes_are_over(self, step: int) -> bool:
        """Goes by the leader's clock; other hosts ask for it at the logged steps."""
        minutes = self._config.checkpoint.interval_minutes
        if not minutes:
            return False
        are_over = time.monotonic() - self._saved_at >= 60 * minutes
        if jax.process_count() == 1:
            return are_over
        is_logged = (step + 1) % self._config.log_interval == 0
        return is_logged and bool(multihost_utils.broadcast_one_to_all(np.array(are_over)))

    def _stop_if_bad(self) -> None:
        """Reads the steps so far, which have ended. Raises RunError: too many in a row were bad."""
        bad = self._bad_steps.read()
        if not bad:
            return
        rows_of = [self.data.rows_of(int(step["step"]) - 1) for step in bad]
        first, rows, file = bad[0], rows_of[0], self.folder / "bad_steps.json"
        more = f"{file} has all rows of all these steps"
        if self._is_leader:
            try:
                write_whole(file, json.dumps([{**step, "rows": rows} for step, rows in zip(bad, rows_of)], indent=1))
            except OSError as error:
                more = f"{file}, of all rows of all these steps, cannot be written ({error.strerror})"
        saved, holds = self._checkpoints.latest(), not_finite(self._state)
        number, last = int(first["step"]), f"the last checkpoint is that after step {saved}"
        raise RunError(
            f"{len(bad)} steps in a row had a loss or a gradient that is not finite, the first of them step {number}: "
            f"loss {first['loss']}, gradient norm {first['grad_norm']}. None changed the weights; "
            f"{'no checkpoint was saved yet' if saved is None else last}.\n"
            f"Not finite on this host: {'; '.join(holds[:8]) or 'no weight or moment'}.\n"
            f"The {len(rows)} rows of step {number} are {', '.join(rows[:4])}{', …' * (len(rows) > 4)}: {more}. "
            "Look at them; then start again with other data or a lower training.learning_rate."
        )

    def _close_checkpoints(self, error_type: type[BaseException] | None, *_) -> None:
        try:
            self._checkpoints.close()
        except RunError as error:
            if error_type is None:
                raise
            print_line(f"error: {error}")  # besides the one that ends the run
