"""Mixtures through the loader: whose rows a batch holds, over epochs, meshes and hosts; validation, and what is
refused."""

import contextlib
import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from parts import assert_refuses
from ragged import FlatTokens, as_numpy, assert_equal, ragged, read_all, read_from_chunks, sharding

from runtime.config.keys import Source
from runtime.data.batches import Loader
from runtime.data.split_writer import write_split
from runtime.run import Run

LENGTH = 8


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Three data sets whose rows of 8 tokens say whose they are: of 40, 25 and 200 rows; tokens 1000 · source + row."""
    paths = [tmp_path_factory.mktemp("mixture") / name for name in "abc"]
    for source, (path, count) in enumerate(zip(paths, (40, 25, 200))):
        for split, rows in (("train", count), ("validation", count // 5)):
            write_split(path, split, [np.full(LENGTH, 1000 * source + row) for row in range(rows)], chunk_tokens=64)
    return [Source(filespec=str(path), weight=weight) for path, weight in zip(paths, (0.5, 0.2, 0.3))]


def loader(sources, split="train", mesh=(1, 1), batch=8, **options):
    config = FlatTokens(None, sequence_packing=options.pop("packing", True))
    shape = {"batch": batch, "length": LENGTH, "sharding": sharding(*mesh)}
    return Loader(config, split, **shape, mixture=sources, shuffle=split == "train", **options)


def rows_of(data, steps):
    """Source and row of each row of these steps."""
    return np.divmod(np.concatenate([as_numpy(data.load(step))[0][:, 0] for step in steps]).astype(int), 1000)


@pytest.mark.parametrize("packing", [True, False])
def test_shares_and_epochs(sources, packing):
    """Each source has its share of any first steps to within a row, which the metrics count in tokens; each goes
    through all its rows before any comes again, in another order each time."""
    with loader(sources, packing=packing) as data:
        assert data.steps is None
        source, row = rows_of(data, range(60))
        assert data.load(10**12).targets.shape == (8, LENGTH)  # without end, and no further away than any other step
    for steps in (1, 7, 60):
        counts = np.bincount(source[: steps * 8], minlength=3)
        assert (np.abs(counts - steps * 8 * np.array([0.5, 0.2, 0.3])) < 1).all()
        tokens = dict(zip([dataset.filespec for dataset in sources], (counts * LENGTH).tolist()))
        assert data.metrics(steps - 1) == {"tokens_per_source": tokens}
    for index, size in enumerate((40, 25, 200)):
        taken = row[source == index]
        epochs = [tuple(taken[begin : begin + size].tolist()) for begin in range(0, len(taken), size)]
        whole = [epoch for epoch in epochs if len(epoch) == size]
        assert all(sorted(epoch) == list(range(size)) for epoch in whole) and len(set(whole)) == len(whole)
        assert len(set(epochs[-1])) == len(epochs[-1])


def test_what_is_said_of_a_mixture(sources, tmp_path):
    """A checkpoint can tell other sources, weights or orders of a source's texts; the line at the start says shares,
    rows and that there is no end; `rows_of` names the tokens of each row, of the right data set; the largest id is that
    of all sources."""
    with loader(sources) as data, loader([dataclasses.replace(sources[0], weight=1), *sources[1:]]) as other:
        assert data.identity["shares"] == [5, 2, 3] and data.identity["rows"] == [40, 25, 200]
        write_split(tmp_path / "c", "train", [np.full(LENGTH, 2000 + row) for row in reversed(range(200))])
        with loader([*sources[:2], dataclasses.replace(sources[2], filespec=str(tmp_path / "c"))]) as reordered:
            assert len({str(each.identity) for each in (data, other, reordered)}) == 3
        assert (data.max_token_id, data.bos_id) == (2199, 0)
        where = f"50.00% from 320 tokens of {sources[0].filespec}/train in 40 rows of 8, 0 at its end"
        assert data.summary.startswith(where)
        assert "; 30.00% from 1,600 tokens" in data.summary and "; without end; at most " in data.summary
        source, row = rows_of(data, [13])
        expected = [f"tokens {8 * r} to {8 * r + 7} of {sources[s].filespec}/train" for s, r in zip(source, row)]
        assert data.rows_of(13) == expected


def test_validation_ends_with_the_first_source(sources):
    """Validation splits are mixed by the same weights, each in its stored order and in batches of its own, until one
    has no more rows; or only their first batches."""
    with loader(sources, "validation") as data:
        assert data.steps == 3  # 8 of 40 rows, 5 of 25, 40 of 200: the first ends at row 16
        assert "; 3 batches of 8 are read: 8, 3, 5 rows; at most " in data.summary
        assert [data.source_of(step) for step in range(3)] == [dataset.filespec for dataset in sources]
        assert [len(data.rows_of(step)) for step in range(3)] == [8, 3, 5]
        source, row = rows_of(data, range(3))
        is_target = read_all(data)[2][:, 0]
    source, row = source[is_target], row[is_target]
    for index in range(3):
        np.testing.assert_array_equal(row[source == index], np.arange(np.sum(source == index)))
    assert np.bincount(source).tolist() == [8, 3, 5]
    with loader(sources, "validation", batches=1) as data:  # 8 rows
        source, row = (array[read_all(data)[2][:, 0]] for array in rows_of(data, range(data.steps)))
        assert source.tolist() == [0, 0, 0, 0, 1, 1, 2, 2] and row.tolist() == [0, 1, 2, 3, 0, 1, 0, 1]
    with loader(sources, "validation", mesh=(8, 1)) as data, loader(sources, "validation") as one:
        for step in range(3):
            assert_equal(data.load(step), one.load(step))


@pytest.mark.parametrize("weight", [1, 2**-10])
def test_the_validation_loss_of_each_source(sources, weight):
    """Each source's loss is its own mean; the loss of all is the mean over all targets, whatever these weigh."""
    logged = []
    with loader(sources, "validation") as data:
        run = SimpleNamespace(
            due=lambda *_: True,
            _in_flight=SimpleNamespace(add=lambda *_, most: None),
            validation_data=data,
            _config=SimpleNamespace(eval_interval=1),
            _score=None,
            _best=None,
            _total=7,
            _stopping=False,
            _signals=SimpleNamespace(stop=lambda: False),
            _tracker=SimpleNamespace(paused=contextlib.nullcontext, log_validation=lambda *given: logged.append(given)),
        )

        def add_batch(weights, loss, targets, batch):  # the loss of a target is its row, from 1
            counted = np.asarray(batch.is_target)
            losses = weights * (np.asarray(batch.targets) % 1000 + 1)[counted]
            return loss + np.float32(weight * losses.sum()), targets + np.float32(weight * counted.sum())

        with jax.set_mesh(sharding().targets.mesh):
            Run.validate_if_due(run, 6, add_batch, 2)
    ((step, loss, of_sources),) = logged
    assert step == 7 and of_sources == {sources[0].filespec: 9.0, sources[1].filespec: 4.0, sources[2].filespec: 6.0}
    assert loss == (8 * 9 + 3 * 4 + 5 * 6) / 16


def test_a_function_of_the_step(sources, monkeypatch):
    """A fresh loader, one that jumps about, any mesh and chunks give the same batches as one loader that walks."""
    with loader(sources) as data:
        walked = [data.load(step) for step in range(40)]
    read_from_chunks(monkeypatch)
    with loader(sources, mesh=(4, 2)) as jumper:
        for step in np.random.default_rng(0).permutation(40).tolist():
            assert_equal(jumper.load(step), walked[step])
    with loader(sources, mesh=(8, 1)) as fresh:
        assert_equal(fresh.load(33), walked[33])


def test_what_does_not_go_together(sources, tmp_path):
    """Sources with different bos_ids, and one without a row, are refused with their paths."""
    write_split(tmp_path / "bos", "train", ragged(0), bos_id=7)
    other = Source(filespec=str(tmp_path / "bos"), weight=1)
    message = f"differ in bos_id … 0 in {sources[0].filespec}/train, 7 in {other.filespec}/train … one tokenizer"
    assert_refuses(message, loader, [sources[0], other])
    write_split(tmp_path / "short", "train", [np.arange(5)])
    message = f"5 tokens of {tmp_path}/short/train … 0 rows of 8, 5 at its end … at least one row; lower training."
    assert_refuses(message, loader, [sources[0], dataclasses.replace(other, filespec=str(tmp_path / "short"))])
