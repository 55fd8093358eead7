"""The keys that every run has: each section a dataclass, each key a field, whose comment --help prints.

A field's type says which values are allowed; the type's last word is what messages say was expected.
"""

import re
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from annotated_types import Interval, MinLen, MultipleOf, Predicate

from runtime.config.rebuild import Origins


def is_regex(text: str) -> bool:
    try:
        return bool(re.compile(text))
    except re.error:
        return False


Count = Annotated[int, Interval(ge=1, lt=2**31), "a whole number from 1 to 2147483647"]
Even = Annotated[int, Interval(ge=2, lt=2**31), MultipleOf(2), "an even number from 2 to 2147483646"]
Steps = Annotated[int, Interval(ge=0, lt=2**31), "a whole number from 0 to 2147483647"]
Seed = Annotated[int, Interval(ge=0, lt=2**32), "a whole number from 0 to 4294967295"]
# Numbers for float32, in which smaller ones are 0 and larger ones infinite.
Positive = Annotated[float, Interval(ge=2**-126, lt=2**128), "a number above 0 that float32 holds"]
NotNegative = Annotated[float, Interval(ge=0, lt=2.0**128), "a number, 0 or more, that float32 holds"]
Fraction = Annotated[float, Interval(ge=0, le=1), "a number from 0 to 1"]
Share = Annotated[float, Interval(gt=0, le=1), "a number above 0, to 1"]
Decay = Annotated[float, Interval(ge=0, lt=1), "a number from 0 to below 1"]
Momentum = Annotated[float, Interval(ge=0, lt=1 - 2**-25), "a number from 0 to below 1 that float32 holds"]
NotEmpty = Annotated[str, MinLen(1), "text, not empty"]
Name = Annotated[str, Predicate(str.strip), "a name, in quotes that the shell keeps if it is a number"]
Regex = Annotated[str, Predicate(is_regex), "a regular expression"]


@dataclass(frozen=True, kw_only=True)
class Paths:
    root_working_dir: Name = "runs"  # folder or URL that holds the run folders; `~` is expanded
    model_name: Name  # the run's folder under root_working_dir; by default the config's name


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The processes of a job, for launchers that do not name them (docs/hosts.md)."""

    coordinator: str | None = None  # HOST:PORT, where process 0 listens and all others reach it; null: found
    process_id: int | None = None  # this process's number, from 0; null: found


@dataclass(frozen=True, kw_only=True)
class IO:
    max_io_threads: Count = 64  # threads that read the data set and read and write checkpoints, per host


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    interval_minutes: Positive | None = None  # also saves when the last one is this old; null: only by steps
    keep_last: Count | None = None  # newest checkpoints that are kept; null keeps all
    keep_every: Count | None = None  # with keep_last, also keeps each step that is a multiple of this

    def __post_init__(self) -> None:
        if self.keep_every and not self.keep_last:
            raise ValueError("keep_every: checkpoint.keep_last is null and keeps all: set that too, or this to null")


@dataclass(frozen=True, kw_only=True)
class FlatTokens:
    filespec: Name | None = None  # folder or URL of a data set, with the groups `train` and `validation`
    seed: Seed = 0  # each epoch draws its order of the training data from it
    sequence_packing: bool = True  # rows are cut from the joined sequences; false: one sequence a row, padded
    epochs: Count = 1  # most passes over the training data; a mixture has no such limit
    # Blocks whose rows are shuffled together. Two such buffers a source are in memory, with 5 bytes a token of this
    # host's rows.
    read_blocks_per_shuffle_buffer: Count = 64
    # Neighbouring rows that are read at once, best a chunk's worth of tokens (docs/data.md).
    sequences_per_read_block: Count = 128


@dataclass(frozen=True, kw_only=True)
class Source:
    filespec: Name  # folder or URL of a flat-tokens data set, or hf_dataset.path; `~` is expanded
    weight: Positive  # share of the rows, relative to the other sources'


@dataclass(frozen=True, kw_only=True)
class HuggingFaceDataset:
    # A data set on the Hugging Face hub (allenai/c4), or a folder of .txt, .jsonl or .parquet files; tokenized into the
    # run folder while the run reads it.
    path: Name | None = None
    name: str | None = None  # the data set's configuration (en)
    tokenizer: str | None = None  # as for tools.tokenize_text: bytes_utf8, a tokenizer.json, a name on the hub
    text_field: str = "text"  # the document's field that is trained on
    validation_split: str = "validation"  # validation_batches batches of it are read
    # tokens that may be written to the run folder before training wants them, up to the end of a block of 1 MB of
    # text; each takes at most 4 bytes
    tokens_ahead: Count = 50_000_000


@dataclass(frozen=True, kw_only=True)
class Tracking:
    """Trackers besides metrics.jsonl and report.html, which every run has (docs/runs.md)."""

    to: tuple[Literal["tensorboard", "wandb", "clearml", "trackio"], ...] = ()  # what else shows the run: [wandb]
    project: Name = "clearshard"  # the project in Weights & Biases, ClearML and trackio


@dataclass(frozen=True, kw_only=True)
class Tokens:
    batch: Count  # rows a step, over all devices
    len: Count  # tokens a row


@dataclass(frozen=True, kw_only=True)
class PairTokens(Tokens):
    """Rows of a model that may have an encoder."""

    read_len: Steps = 0  # tokens per row for the encoder (`len` is the decoder's); 0: there is no encoder


@dataclass(frozen=True, kw_only=True)
class RunTraining:
    """The keys that every trainer's section `training` has."""

    seed: Seed = 0  # draws the first weights; flat_tokens.seed draws the order of the data
    steps: Count  # updates of the weights, counted from the run's beginning
    tokens: Tokens
    microbatches: Count = 1  # parts of a step's batch, computed one after another


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The keys of a run. A trainer's file adds `mesh`, a size for each axis in the mesh's order; `model`, which has
    `vocab`; and `training`, a RunTraining."""

    # Where keys were set, for messages: the loader fills it in. It is no key, and does not count in comparisons.
    origins: ClassVar[Origins] = Origins()
    CONFIG: ClassVar[str] = "local_test_synthetic"  # the config in configs/ that is used by default
    OTHER: ClassVar[str | None] = None  # a program whose keys may be meant: its has_key(key) knows them

    paths: Paths
    num_hosts: Count = 1  # processes that run this job together, one a host
    cluster: Cluster = field(default_factory=Cluster)
    # steps from one checkpoint to the next; the last step is always saved. null: nothing is saved, to time steps
    checkpoint_interval: Count | None = 1000
    # steps from one validation loss to the next; there is always one at the end. null: there is none
    eval_interval: Count | None = 1000
    # The run ends after so many validations in a row that are not better than the best, whose checkpoint is kept. null:
    # it does not.
    patience: Count | None = None
    log_interval: Count = 10  # steps between logged lines: only then are numbers read from the device
    check_only: bool = False  # check the step's sharding on the configured mesh, without devices, and stop
    allow_config_change: bool = False  # resume although program, model, data or seed differ from the checkpoint's
    io: IO = field(default_factory=IO)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    # The first weights: a run, a checkpoint or a folder of published weights (docs/models.md). All else begins anew.
    initial_weights: Name | None = None
    validation_batches: Count | None = None  # batches of the split that a validation loss is the mean of; null: all
    flat_tokens: FlatTokens = field(default_factory=FlatTokens)
    # Several data sets, mixed by weight, and read as flat_tokens says: [{filespec: a.zarr, weight: 0.7}, …]
    mixture: tuple[Source, ...] = ()
    hf_dataset: HuggingFaceDataset = field(default_factory=HuggingFaceDataset)
    tracking: Tracking = field(default_factory=Tracking)


# Keys that published configs may still set: the value still accepted (what it asks for always happens now), and what to
# do instead of any other, which is refused.
DROPPED_KEYS = {
    "checkpoint.async": (True, "checkpoints are always written while training goes on: delete the key"),
    "training.interleave": (1, "a layer computes all its rows at once: delete the key"),
    "training.adam_eps_root": (0.0, "nothing is added under the root: use training.adam_eps"),
    "training.max_consecutive_bad_steps": (10, "10 bad steps in a row stop a run: delete the key"),
    "flat_tokens.streams": (1, "the order of the data is one permutation of all of it: delete the key"),
    "flat_tokens.long_sequences": ("split", "a sequence longer than a row makes several rows: delete the key"),
    "hf_dataset.sequences_packed_per_batch": (None, "documents are packed without gaps: delete the key"),
    "hf_dataset.train_split": ("train", "training reads the split `train`: delete the key"),
    "hf_dataset.num_workers": (2, "half of the cores tokenize: delete the key"),
    "io.max_data_bytes": (4 * 2**30, "reading takes at most 4 GiB: delete the key"),
    "checkpoint.timeout_s": (600.0, "a save may take 600 s: delete the key"),
    "cluster.num_processes": (None, "it is num_hosts: delete the key"),
    "tracking.tensorboard": (False, "write tracking.to=[tensorboard]"),
    "tracking.wandb": (False, "write tracking.to=[wandb]"),
    "tracking.clearml": (False, "write tracking.to=[clearml]"),
    "tracking.trackio": (False, "write tracking.to=[trackio]"),
    "tracking.offline": (False, "set the environment's WANDB_MODE=offline or CLEARML_OFFLINE_MODE=1"),
    "allow_code_in_config": (False, "write allow_code_in_config=true on the command line"),
}
