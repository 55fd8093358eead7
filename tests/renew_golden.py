"""Writes the losses that a small run should have, tests/golden/<platform>.jsonl, for the platform that JAX finds.

    python -m tests.renew_golden          # or: make golden
    git diff tests/golden                 # what has changed, to be explained in the commit

To be done when a change is meant to alter the numbers, and where a platform has none yet. One device and float32, so
that little but the mathematics is in them; of each line only what the training decides."""

import json
import sys
import tempfile
from pathlib import Path

import jax

import train
from runtime.config.command_line import run
from tools.compare import is_measured

FOLDER = Path(__file__).resolve().parent / "golden"
NAME = "golden"
RUN = [
    "--config-name=local_test_synthetic", f"paths.model_name={NAME}", "mesh.d=1", "mesh.t=1",
    f"flat_tokens.filespec={FOLDER.parent.parent / 'synthetic_dataset.zarr'}",
    "model.compute_dtype=float32", "model.d_model=64", "model.n_kv=4", "model.d_head=8", "model.d_ff=64",
    "training.tokens.batch=16", "training.tokens.len=32", "training.steps=10", "training.steps_for_lr=10",
    "training.warmup_steps=2", "log_interval=1", "eval_interval=5", "validation_batches=2", "checkpoint_interval=10",
]  # fmt: skip


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        sys.argv[1:] = [*RUN, f"paths.root_working_dir={folder}"]
        run(train.main, train.Config)
        lines = (Path(folder) / NAME / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    path = FOLDER / f"{jax.default_backend()}.jsonl"
    path.write_text("".join(f"{line}\n" for line in map(decided, lines) if line), encoding="utf-8")
    print(f"{path} is written.")


def decided(line: str) -> str:
    """A line of metrics without what the machine decides; nothing where nothing is left. `time` is 0."""
    kept = {name: value for name, value in json.loads(line).items() if not is_measured(name)}
    return json.dumps({"step": kept.pop("step"), "time": 0, **kept}) if len(kept) > 1 else ""


if __name__ == "__main__":
    main()
