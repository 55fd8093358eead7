"""The keys that every run has, whatever it trains: a dataclass a section, a field a key, a comment for --help."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from runtime.config.rebuild import Origins, as_tree


@dataclass(frozen=True, kw_only=True)
class Paths:
    root_working_dir: str = "runs"  # folder or URL that holds the run folders; `~` is expanded
    model_name: str  # the run's folder under root_working_dir; the config's name where none is given


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Who the processes of a job are, where the launcher that starts them does not say it (docs/hosts.md)."""

    coordinator: str | None = None  # HOST:PORT, where process 0 listens and all others reach it; null: found
    process_id: int | None = None  # of this process, from 0; null: found
    num_processes: int | None = None  # of the job, the same as num_hosts; null: found


@dataclass(frozen=True, kw_only=True)
class IO:
    max_io_threads: int = 64  # threads that read the data set and read and write checkpoints, per host
    max_data_bytes: int = (
        4 * 2**30
    )  # host memory for reading flat tokens; what would need more is refused (docs/data.md)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    interval_minutes: float | None = (
        None  # saves also when the last one is so old; null: checkpoint_interval alone says when
    )
    keep_last: int | None = None  # newest checkpoints that are kept; null keeps all
    keep_every: int | None = (
        None  # with keep_last, also those whose step is a multiple of this; null keeps none besides
    )
    async_: bool = True  # written while training goes on; false: training waits until it is written
    timeout_s: float = 600.0  # a save that takes longer, because a host died or the disk hangs, stops the run


@dataclass(frozen=True, kw_only=True)
class FlatTokens:
    filespec: str | None = (
        None  # folder or URL of a data set (groups `train` and `validation`), unless `mixture` or `hf_dataset`
    )
    seed: int = 0  # of the order of the training data; each epoch draws a new one from it
    sequence_packing: bool = (
        True  # rows are cut from the joined sequences; false: a row holds tokens of one sequence, padded
    )
    long_sequences: str = (
        "split"  # unpacked, one that is longer than a row: split into several rows, or truncate to the first
    )
    epochs: int = 1  # passes over the training data that the run may make; a mixture has no such end
    # Blocks whose rows are shuffled together. Two such buffers, of each source, are in memory: 5 bytes a token, of this
    # host's rows.
    read_blocks_per_shuffle_buffer: int = 64
    sequences_per_read_block: int = (
        128  # neighbouring rows that are read at once, best a chunk's worth of tokens (docs/data.md)
    )


@dataclass(frozen=True, kw_only=True)
class Source:
    filespec: str  # folder or URL of a flat-tokens data set; `~` is expanded
    weight: float  # share of the rows, relative to the other sources'


@dataclass(frozen=True, kw_only=True)
class HuggingFaceDataset:
    # Of a data set on the Hugging Face hub (allenai/c4), or a folder of .txt, .jsonl or .parquet files; read as it is.
    path: str | None = None
    name: str | None = None  # which of its configurations (en)
    tokenizer: str | None = None  # as tools.tokenize_text takes it: bytes_utf8, a tokenizer.json, a name on the hub
    text_field: str = "text"  # of each document
    train_split: str = "train"  # what the data set calls it
    validation_split: str = "validation"  # of which validation_batches batches are read
    num_workers: int = 2  # threads that tokenize, per host


@dataclass(frozen=True, kw_only=True)
class Tracking:
    """Besides metrics.jsonl and report.html, which there always are (docs/runs.md)."""

    tensorboard: bool = False  # event files in the run folder: tensorboard --logdir runs
    wandb: bool = False  # Weights & Biases
    clearml: bool = False  # ClearML, of ~/clearml.conf
    trackio: bool = False  # trackio: a database in the run folder
    project: str = "clearshard"  # under which the last three show the run
    offline: bool = False  # Weights & Biases and ClearML write into the run folder and send nothing


@dataclass(frozen=True, kw_only=True)
class Tokens:
    batch: int  # rows a step, over all devices
    len: int  # tokens a row


@dataclass(frozen=True, kw_only=True)
class RunTraining:
    """What every trainer's section `training` has."""

    seed: int
    steps: int
    tokens: Tokens
    microbatches: int = 1  # parts of a step's batch that are computed one after another
    max_consecutive_bad_steps: int = 10  # so many in a row whose loss or gradient is not finite stop the run


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All of a run but what its trainer's file adds: `mesh`, a size for each axis in the mesh's order; `model`, which has
    `vocab`; and `training`, a RunTraining."""

    # Where each key was set, for messages: the loader fills it in. Not a key, and no part of equality.
    origins: ClassVar[Origins] = Origins()

    paths: Paths
    num_hosts: int = 1  # processes that run this job together, one a host
    cluster: Cluster = field(default_factory=Cluster)
    checkpoint_interval: int  # steps from one checkpoint to the next; the last step is always saved
    eval_interval: int  # steps from one validation loss to the next; there is always one at the end
    log_interval: int  # steps from one logged line to the next: numbers are read from the device only then
    check_only: bool = False  # check the step's sharding on the configured mesh, without devices, and stop
    allow_config_change: bool = False  # resume although the model, the data or the seed are not those of the checkpoint
    io: IO = field(default_factory=IO)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    validation_batches: int | None = None  # that a validation loss reads, the first of the split; null reads all of it
    flat_tokens: FlatTokens = field(default_factory=FlatTokens)
    mixture: tuple[
        Source, ...
    ] = ()  # several data sets, read as flat_tokens says, by weight: [{filespec: a.zarr, weight: 0.7}, …]
    hf_dataset: HuggingFaceDataset = field(default_factory=HuggingFaceDataset)
    tracking: Tracking = field(default_factory=Tracking)

    def tree(self) -> dict[str, Any]:
        """All keys as nested dicts and lists, as they stand in a yaml."""
        return as_tree(self)


# Published keys that are not needed here, and keys of earlier programs. Refused, since ignoring a key would run
# something else than was asked for.
REFUSED_KEYS = {
    "training.interleave": "a layer computes all its rows at once: delete the key",
    "flat_tokens.streams": "the order of the data is a computed permutation of all of it, so there are no independent "
    "streams to mix: delete the key",
    "hf_dataset.sequences_packed_per_batch": "documents are packed without gaps, and what a batch has no room for begins the next "
    "one, so that no number of sequences has to be guessed: delete the key",
}
