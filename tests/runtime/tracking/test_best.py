"""The best of a run's validations, and how long none was better."""

import dataclasses
import math

from parts import assert_refuses

from runtime.tracking.best import Best


def test_the_best_and_how_long_ago_it_was():
    """The best is the smallest loss or the largest score, never nan; a checkpoint keeps it."""
    best = Best.of("validation_loss", ["validation_loss"], {})
    for step, loss in enumerate([math.inf, 3.0, 2.0, math.nan, 2.0, 2.5], 1):
        best.note(step, {"validation_loss": loss, "other": -step})
        best = Best.of("validation_loss", ["validation_loss"], {"best": dataclasses.asdict(best)})
    assert (best.step, best.value, best.since) == (3, 2.0, 3)
    # With "loss" in a file's name, and two metrics of lm-eval-harness of which less is better.
    largest, smallest = (3, 0.75, 1), (2, 0.25, 2)
    cases = {
        "glossary.jsonl/acc": largest,
        "wmt16/ter": smallest,
        "x/brier_score,loss": smallest,
        "x/acc,loss": largest,
    }
    for metric, expected in cases.items():
        name = f"score/{metric}"
        score = Best.of(name, [name], {"best": dataclasses.asdict(best)})  # of another one
        for step, value in enumerate([0.5, 0.25, 0.75, 0.75], 1):
            score.note(step, {name: value})
        assert (score.step, score.value, score.since) == expected, name
    assert_refuses("best_by = loss: … gives validation_loss, x", Best.of, "loss", ["validation_loss", "x"], {})
