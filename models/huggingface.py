"""Reads published weights as a checkpoint, and writes them: a folder of safetensors with config.json.

    source = open_weights("meta-llama/Llama-3.2-1B", pool)     # a published folder, a run, or a checkpoint
    weights = restored(source, config.model, shapes, pool)     # onto any mesh; each host reads what it needs
    export(source, Path("out"), "bfloat16", pool)              # a tensor at a time

A family's table (`published`) has an einops pattern for each tensor, published layout -> ours. A tensor that no row
names, a missing one, and a field of config.json that the family does not compute are errors.
"""

import dataclasses
import difflib
import functools
import hashlib
import importlib
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Float32

from models import adapters, safetensors
from models.adapters import Adapter
from models.config import SETTINGS, WITHOUT_EFFECT, Fields, brief, different
from models.safetensors import Row, Tensor, read_json
from runtime import program
from runtime.checkpoints.checkpoint import Bounds, Checkpoint, LazyArray, named_leaves, open_newest, read_block, restore
from runtime.config.rebuild import Origins, as_tree, rebuild
from runtime.terminal import RunError, needs_package

# Fields of config.json that count parts with separate tensors.
NUMBERED = {
    "num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", "num_experts", "num_local_experts",
}  # fmt: skip
# Buffers in old files, T5's copies of the embedding and a bias that it does not add, BERT's other heads.
UNUSED = re.compile(
    r".*\.rotary_emb\.inv_freq|.*\.attn\.(masked_)?bias|(en|de)coder\.embed_tokens\.weight"
    r"|decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"
    r"|bert\.(pooler|embeddings\.position_ids).*|cls\.(seq_relationship|predictions\.decoder)\..*"
)
LARGEST_SIZE = 2**31 - 1
ROWS = 4096  # rows of an embedding that are read and written at once


def rows_of(family: ModuleType, model: Any) -> dict[str, dict[tuple[int, ...], Row]]:
    """The published tensors of each weight, by their index in its first dims: one dim for each `{}`, and one more if
    the weight is a stack of several tensors."""
    shapes = jax.eval_shape(functools.partial(family.init, model), np.uint32(0))
    shapes = {names[0]: leaf.shape for names, leaf in named_leaves(shapes)}
    table, rows = family.published(model), {}
    if table.keys() != shapes.keys():
        raise AssertionError(f"{family.__name__}.published has not the weights' names: {table.keys() ^ shapes.keys()}")
    for leaf, parts in table.items():
        numbered, rows[leaf] = shapes[leaf][: parts[0][0].count("{}")], {}
        for index in itertools.product(*map(range, numbered)):
            for part, (name, pattern) in enumerate(parts):
                place = (*index, part) if len(parts) > 1 else index
                sizes = dict(zip(pattern.partition(" -> ")[2].split(), shapes[leaf][len(place) :], strict=True))
                rows[leaf][place] = Row(name.format(*index), pattern, sizes)
    return rows


def require_tensors(path: str, tensors: dict[str, Tensor], rows: dict[str, dict[tuple[int, ...], Row]]) -> None:
    """Raises RunError with the first tensor that is missing, has another shape, or belongs to no weight."""
    expected = {row.name: row.shape for places in rows.values() for row in places.values()}
    problems = [f"{name}: missing, expected {list(expected[name])}" for name in expected.keys() - tensors.keys()]
    for name in expected.keys() & tensors.keys():
        if tensors[name].shape != expected[name]:
            problems.append(f"{name}: is {list(tensors[name].shape)}, config.json says {list(expected[name])}")
    tied = {"lm_head.weight"} if "unembed" not in rows else set()  # a copy of the embedding, or unused
    unknown = [name for name in tensors.keys() - expected.keys() - tied if not UNUSED.fullmatch(name)]
    problems += [f"{name}: belongs to none of the weights of this family" for name in unknown]
    if problems:
        first, *others = sorted(problems)
        more = f", and {len(others)} more" if others else ""
        raise RunError(f"the tensors in {path} are not those of its config.json: {first}{more}")


def require_tied(folder: Path, tensors: dict[str, Tensor], rows: dict[str, dict[tuple[int, ...], Row]]) -> None:
    """Raises RunError if the first rows of an unembedding that config.json ties are not the embedding's: transformers 5
    then takes both tables."""
    embed, head = tensors[rows["embed"][()].name], tensors.get("lm_head.weight")
    if "unembed" in rows or head is None:
        return
    start = slice(min(ROWS, *embed.shape[:1], *head.shape[:1]))
    same = np.array_equal(embed.read(start).astype(np.float32), head.read(start).astype(np.float32), equal_nan=True)
    if embed.shape != head.shape or not same:
        what = f'lm_head.weight is not {rows["embed"][()].name}, which "tie_word_embeddings": true says'
        raise RunError(f"{folder}: {what}: set that to false, or delete the tensor")


def array_of(rows: dict[tuple[int, ...], Row], tensors: dict[str, Tensor]) -> LazyArray:
    """A weight, in float32; its chunks are published tensors, or rows of one."""
    leading = [max(numbers) + 1 for numbers in zip(*rows)]
    row = next(iter(rows.values()))
    inner = list(row.sizes.values())
    chunk = [1] * len(leading) + inner
    is_cut = row.is_plain and not leading
    if is_cut and len(inner) > 1:  # into equal chunks, unless the size has no good divisor
        count = max(n for n in range(1, min(ROWS, inner[0]) + 1) if inner[0] % n == 0)
        chunk[0] = count if count >= ROWS // 64 else inner[0]

    def read(bounds: Bounds) -> Float32[np.ndarray, "..."]:
        row = rows[tuple(start for start, _ in bounds[: len(leading)])]
        values = tensors[row.name].read(slice(*bounds[0]) if is_cut else slice(None))
        return row.read_in(values).astype(np.float32).reshape([stop - start for start, stop in bounds])

    return LazyArray((*leading, *inner), np.dtype(np.float32), tuple(chunk), read)


def weights_in(checkpoint: Checkpoint) -> dict[str, LazyArray]:
    return {name: array for name, array in checkpoint.arrays.items() if re.match(r"\.?weights\b", name)}


def scaled(arrays: dict[str, LazyArray], factors: dict[str, float]) -> dict[str, LazyArray]:
    def product(array: LazyArray, factor: float) -> LazyArray:
        return array.changed(lambda values, _: values * np.float32(factor))

    return {name: product(array, factors[name]) if name in factors else array for name, array in arrays.items()}


def averaged(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint with the average of its weights in their place, if its training.ema_decay says that it has one."""
    arrays, training = checkpoint.arrays, checkpoint.attributes["config"].get("training")
    if not isinstance(training, dict) or not training.get("ema_decay"):
        return checkpoint
    averages = {name: arrays.get(re.sub("^weights", "ema", name), array) for name, array in arrays.items()}
    return dataclasses.replace(checkpoint, arrays=averages)


# ---- weights and their model -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Source:
    """Weights, wherever they come from, and their model."""

    checkpoint: Any  # a Checkpoint; None: the weights are on the devices already
    family: ModuleType | None  # in models/; None: another trainer's weights
    model: Any  # the family's Model, or another trainer's keys
    folder: Path  # with the tokenizer's files
    config: dict[str, Any] | None = None  # the published config.json, if they come with one
    adapters: tuple[Adapter, ...] = ()  # already merged in `checkpoint`

    @property
    def is_published(self) -> bool:
        """Whether they come from a published folder or file, which has no attributes as a checkpoint has."""
        return not self.checkpoint.attributes

    @property
    def decoder_start(self) -> int:
        """The first token that the decoder reads, in a model with an encoder."""
        config = self.config or {}
        start = config.get("decoder_start_token_id")  # null is as if it was not there
        return (config.get("pad_token_id") or 0) if start is None else start


def require_same_program(source: Source, at_hand: dict[str, str] | None, key: str, *, is_published=False) -> None:
    """Raises RunError if what the weights' program is made of is not what takes them: it may compute another model.

    Args:
      at_hand: `program.model_of` the trainer that takes them; None: a family in models/ takes them.
      key: what a user may set to take them anyway.
      is_published: they become files that another program reads as the family's.
    """
    attributes = source.checkpoint.attributes
    trainer, made_by = "train_any" if "family" in attributes else program.DEFAULT, program.model_of(attributes)
    is_own = at_hand is not None and made_by is not None and trainer == program.DEFAULT
    is_published |= at_hand is not None  # then the files of models/ compute nothing here
    expected = at_hand if is_own else program.released(trainer, source.family, is_published=is_published)
    who, different = "the program of that run", program.changed(made_by, expected) if made_by else []
    if not different and at_hand is not None and not is_own:
        who, different = "train.py here", program.changed(program.released(program.DEFAULT, None), at_hand)
    if different:
        names = ", ".join(different[:8]) + " ..." * (len(different) > 8)
        what = f"{who} and {'train.py here' if is_own else 'models/'} differ ({names})"
        fix = "a changed model needs a family (docs/recipes/family.md)"
        fix += "" if "family" in attributes else " (tools.score program=run only scores it)"
        raise RunError(f"{source.checkpoint.path}: {what}: {fix}; only if they compute the same, add {key}")


@functools.cache
def families() -> dict[str, str]:
    """The module of each model_type: the files of models/ that say their KIND. They are imported late, since a family
    imports train.py, which imports this module."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    names = [f"models.{file.stem}" for file in files if re.search("^KIND = ", file.read_text("utf-8"), re.M)]
    by_kind = dict[str, str]()
    for name in names:
        family = importlib.import_module(name)
        if family.Model.__module__ != name:
            raise RunError(f"{name}: Model is that of {family.Model.__module__}: give it its own, class Model(...)")
        for kind in family.CONFIG.kinds:
            if by_kind.setdefault(kind, name) != name:
                raise RunError(f"{by_kind[kind]} and {name} are both of the kind {kind}: give one of them another")
    return by_kind


def family_of(name: str, where: str) -> ModuleType:
    """The family with this model_type or module name."""
    module = families().get(str(name), f"models.{name}")
    if module not in families().values():
        raise RunError(f"{where}: model_type = {brief(name)} is none of the families: {', '.join(sorted(families()))}")
    return importlib.import_module(module)


def as_family(keys: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The family of a model of train.py or of an earlier trainer, and its keys, but for how it is computed."""
    model = {key: value for key, value in keys.items() if key not in ("context", "fp8")}
    if model.get("experts"):
        # The weight of a single expert is its probability.
        return "mixtral", {"weights_add_to_one": model.get("experts_per_token") != 1, **model, "capacity": None}
    of_experts = ("experts", "experts_per_token", "shared_experts", "capacity")
    return "llama", {key: value for key, value in model.items() if key not in of_experts}


def open_weights(path: str, pool: Executor) -> Source:
    """The weights of a published folder, of a run (its newest checkpoint), or of a checkpoint; their average if it has
    one.

    Raises:
      RunError: there are none, or no family in models/ has these tensors and fields.
    """
    folder = downloaded(str(path))
    if folder is not None and folder.suffix == ".gguf":
        return importlib.import_module("models.foreign").open_gguf(folder)
    if folder is not None and not os.path.exists(folder / "checkpoints"):  # Path.exists raises for a long name
        if os.path.exists(folder / "config.json"):
            return described(_published_config(folder), safetensors.read(folder, UNUSED), folder)
        if os.path.exists(folder / "params.json"):
            return importlib.import_module("models.foreign").open_meta(folder)
        if os.path.exists(folder / "adapter_config.json"):
            raise RunError(f"{folder} holds adapters: a run takes them with initial_adapter, beside their base")
        if any(folder.glob("*.safetensors")):
            raise RunError(f"{folder} has no config.json, which says what its weights are: give the whole folder")
    checkpoint = open_newest(str(path), pool)
    attributes = checkpoint.attributes
    config = attributes.get("config") or {}
    if not isinstance(config.get("model"), dict):
        raise RunError(f"checkpoint {checkpoint.path} does not say which model it is of: another program wrote it")
    checkpoint = averaged(checkpoint)
    folder, model = Path(checkpoint.path).parents[1], config["model"]
    name = attributes.get("family") or config.get("family")
    if name is None:
        name, known = as_family(model)
        if not known.keys() <= {field.name for field in dataclasses.fields(family_of(name, "").Model)}:
            return Source(checkpoint, None, model, folder)
        model = known
    family = family_of(name, checkpoint.path)
    model = rebuild(family.Model, model, Origins(checkpoint.path))
    source = Source(checkpoint, family, model, folder, attributes.get("published"))
    return with_base(source, pool) if attributes.get("base") else source


def _published_config(folder: Path) -> dict[str, Any]:
    """config.json, with the ends of a text that generation_config.json has, such as a chat's end of turn: these count,
    and a run that begins with these weights keeps no other file of theirs."""
    config, file = read_json(folder / "config.json"), folder / "generation_config.json"
    ends = read_json(file).get("eos_token_id") if file.exists() else None
    return config if ends is None else config | {"eos_token_id": ends}


def with_base(source: Source, pool: Executor) -> Source:
    """The weights of a train_any.py run that saves only what it trains. Raises RunError if the rest is gone."""
    saved, lora = source.checkpoint, source.checkpoint.attributes["config"]["lora"]
    path = saved.attributes["config"]["initial_weights"]
    try:
        base = open_weights(path, pool)
    except RunError as error:
        fix = f"the rest is in its initial_weights = {path}: put that back there"
        raise RunError(f"{saved.path} holds only what was trained, and {fix} ({error})") from error
    if fingerprint(base, pool) != saved.attributes["base"]:
        raise RunError(f"{saved.path} was trained from other weights than those that are now in {path}")
    scale = lora["alpha"] / lora["rank"] if lora["rank"] else 0.0
    shapes = jax.eval_shape(functools.partial(source.family.init, source.model), np.uint32(0))
    trained = adapters.saved_in(saved, adapters.places(source.family, shapes), pool)
    frozen = scaled(weights_in(base.checkpoint), rescaled(base, getattr(source.model, "logits_scale", 1.0)))
    arrays = frozen | {name: array for name, array in saved.arrays.items() if name in frozen}
    arrays = adapters.merged(arrays, trained, scale)
    return dataclasses.replace(source, checkpoint=dataclasses.replace(saved, arrays=arrays), adapters=trained)


def fingerprint(source: Source, pool: Executor) -> str:
    """A hash of each weight's first and last values, of which it reads two chunks; equal for a folder's checkpoint."""
    digest = hashlib.sha256()
    for name, array in sorted(weights_in(source.checkpoint).items()):
        *sizes, last = array.shape
        for at in ([0] * len(sizes), [size - 1 for size in sizes]):
            values = read_block(source.checkpoint, name, (*((n, n + 1) for n in at), (0, last)), pool)
            digest.update(name.encode() + np.ascontiguousarray(values, np.float32).tobytes())
    return digest.hexdigest()[:16]


def downloaded(path: str) -> Path | None:
    """A path that is there; for a name on the Hugging Face hub the folder that it is downloaded to; for a URL None.

    Raises RunError where there is none: a name whose first part is a folder here, or `runs`, is none of the hub's."""
    if "://" in path:
        return None
    folder = Path(os.path.expanduser(path))
    if os.path.exists(folder):
        return folder
    is_hub_name = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path) and not path.startswith("runs/")
    if not is_hub_name or folder.parent.is_dir():
        there = os.listdir(folder.parent) if os.path.isdir(folder.parent) else []
        near = difflib.get_close_matches(folder.name, there, n=1)
        fix = "".join(f"; the nearest is {folder.parent / name}" for name in near)
        raise RunError(f"there is no run, checkpoint or folder {path}{fix}")
    with needs_package(f"downloading {path}", "huggingface_hub"):
        from huggingface_hub import snapshot_download
    wanted = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.pth"]
    try:
        return Path(snapshot_download(path, allow_patterns=wanted))
    except (OSError, ValueError) as error:  # among them what the hub refuses, and no network
        reason = str(error).strip().partition("\n")[0]
        raise RunError(f"there is no folder {path}, and it cannot be downloaded from the hub ({reason})") from error


def described(content: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> Source:
    """Weights from the content of a config.json and its tensors. Raises RunError if they do not fit."""
    fields = Fields(content, str(folder / "config.json"))
    family = family_of(fields.take("model_type"), fields.where)
    for key in NUMBERED & content.keys():
        if isinstance(content[key], int) and content[key] > len(tensors):  # before that many rows are made
            raise RunError(f"{fields.where}: {key} = {content[key]}, and {folder} has {len(tensors)} tensors")
    for key in {"dtype", "torch_dtype"} & content.keys():
        if content[key] not in (None, *safetensors.CODES):
            raise RunError(f"{fields.where}: {key} = {brief(content[key])}: expected {', '.join(safetensors.CODES)}")
    for key in content.keys() - WITHOUT_EFFECT:  # before other sizes are made of it, each of which would be a problem
        if isinstance(content[key], int) and abs(content[key]) > LARGEST_SIZE:
            raise RunError(f"{fields.where}: {key} = {brief(content[key])}: expected at most {LARGEST_SIZE}")
    if family.KIND == "decoder":
        fields.require(is_causal=True)  # transformers 5 computes false, which `finish` would pass over
    model = model_of(family, fields)
    fields.finish()
    rows = rows_of(family, model)
    tensors = as_published(tensors, rows)
    require_tensors(str(folder), tensors, rows)
    require_tied(folder, tensors, rows)
    arrays = {f"weights/{leaf}": array_of(places, tensors) for leaf, places in rows.items()}
    return Source(Checkpoint(str(folder), {}, arrays), family, model, folder, content)


def model_of(family: ModuleType, fields: Fields) -> Any:
    """The family's Model that a config.json describes. Raises RunError if a value is of another type."""
    try:
        model = family.model_of(fields)
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        what = f"a field is not what a {fields.content['model_type']} has"
        raise RunError(f"{fields.where}: {what}: {str(error)[:200]}") from error
    return rebuild(family.Model, as_tree(model), Origins(fields.where), is_derived=True)


def as_published(tensors: dict[str, Tensor], rows: dict[str, dict[tuple[int, ...], Row]]) -> dict[str, Tensor]:
    """The tensors under today's names, with the prefix that files without the head (gpt2, opt-6.7b) leave out."""
    tensors = {
        name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias"): tensor
        for name, tensor in tensors.items()  # BERT's old files
    }
    prefix = next(row.name for parts in rows.values() for row in parts.values()).partition(".")[0] + "."
    if any(name.startswith(prefix) for name in tensors):
        return tensors
    return {name if name.startswith("lm_head.") else prefix + name: tensor for name, tensor in tensors.items()}


def require_same(source: Source, model: Any) -> None:
    """Raises RunError, with the keys, if the weights belong to another model than this, train.py's or a family's."""
    theirs, ours = as_tree(source.model), as_tree(model)
    ours |= as_family(ours)[1]
    is_family = dataclasses.is_dataclass(source.model)
    defaults = {field.name: as_tree(field.default) for field in dataclasses.fields(source.model)} if is_family else {}
    problems = []
    for key, value in theirs.items():
        if key in (*SETTINGS, "logits_scale") or (key == "tied" and key not in ours):
            continue  # train.py's model has two tables, which begin equal
        expected = ours.get(key, defaults.get(key))  # without a key the model computes the default
        if value != expected or (key not in ours and key not in defaults):
            is_ours = f"has {json.dumps(expected)}" if key in ours else "has no such key"
            problems.append(f"  model.{key} = {json.dumps(value)}: this run's model {is_ours}")
    if problems:
        where = f"initial_weights = {source.checkpoint.path}"
        raise RunError("\n".join([f"{where} are weights of another model:", *problems]))
    rescaled(source, ours.get("logits_scale", 1.0))


def restored(source: Source, model: Any, like: Any, pool: Executor, *, is_part: bool = False) -> Any:
    """The weights of a trainer's model, as `like` says, a tree of `ShapeDtypeStruct`s with shardings.

    Args:
      is_part: `like` may have only some of the weights.
    Raises:
      RunError: as in `require_same` and `restore`.
    """
    require_same(source, model)
    like = {"weights": like}
    dtypes = {name: leaf.dtype for names, leaf in named_leaves(like) for name in names}
    arrays = scaled(weights_in(source.checkpoint), rescaled(source, getattr(model, "logits_scale", 1.0)))
    if getattr(source.model, "tied", False) and not hasattr(model, "tied"):
        arrays["weights/unembed"] = arrays["weights/embed"]
    arrays = {name: array for name, array in arrays.items() if name in dtypes or not is_part}
    arrays = {name: array.changed(lambda w, _: w, dtypes.get(name)) for name, array in arrays.items()}
    return restore(dataclasses.replace(source.checkpoint, arrays=arrays), like, pool)["weights"]


def first_weights(config: Any, at_hand: dict[str, str] | None, threads: int = 16) -> tuple[str, Callable[[Any], Any]]:
    """A config's initial_weights, for `runtime.run.Run`: their path, and a function that reads them into a tree of
    `ShapeDtypeStruct`s with shardings.

    Args:
      at_hand: `program.model_of` the trainer that takes them.
    Raises:
      RunError: as in `require_same` and `require_same_program`.
    """
    with ThreadPoolExecutor(threads) as pool:
        source = open_weights(config.initial_weights, pool)
    require_same(source, config.model)
    if not config.allow_config_change:
        require_same_program(source, at_hand, "allow_config_change=true")

    def read(like: Any) -> Any:
        with ThreadPoolExecutor(threads) as pool:
            return restored(source, config.model, like, pool)

    return source.checkpoint.path, read


def rescaled(source: Source, logits_scale: float) -> dict[str, float]:
    """Factors of weights, by name, for a model whose attention logits have this scale: where q is normed, the factor
    goes into the norm's scale, to which Gemma adds 1."""
    theirs = getattr(source.model, "logits_scale", 1.0)
    if source.family is None or math.isclose(theirs, logits_scale, rel_tol=1e-6):  # a yaml rounds it
        return {}
    is_normed = source.model.qk_norm != "none"
    if is_normed and source.family.TABLE.table["transformer"]["q_norm"].plus:
        where = f"model.logits_scale of {source.checkpoint.path}"
        raise RunError(f"{where} is {theirs}: with qk_norm it must be {logits_scale}")
    names = ("q_norm", "q_norm_all") if is_normed else ("w_q", "b_q")
    return {f"weights/transformer/{name}": theirs / logits_scale for name in names}


# ---- out -------------------------------------------------------------------------------------------------------------


def export(source: Source, folder: Path, dtype: str, pool: Executor, fields: dict[str, Any] | None = None) -> None:
    """Writes a folder that transformers loads: config.json, and the weights, a tensor at a time.

    Args:
      dtype: float32, bfloat16 or float16.
      fields: further fields of config.json, for weights that were never published.
    """
    family, model = source.family, source.model
    if family is None:
        raise RunError(f"{source.checkpoint.path} is of no family in models/: write one (docs/recipes/family.md)")
    config = config_for(source, dtype) | (fields or {})
    arrays = scaled(source.checkpoint.arrays, to_published(source))
    checkpoint = dataclasses.replace(source.checkpoint, arrays=arrays)
    rows = rows_of(family, model)
    if others := sorted({f"weights/{leaf}" for leaf in rows} ^ weights_in(checkpoint).keys()):
        has = "has" if others[0] in checkpoint.arrays else "lacks"
        raise RunError(f"{checkpoint.path} is of another model than models/ computes: it {has} {others[0]}")
    for leaf, places in rows.items():
        saved, shape = arrays[f"weights/{leaf}"].shape, array_of(places, {}).shape
        if saved != shape:
            what = "is of another model than its config says"
            raise RunError(f"{checkpoint.path} {what}: {leaf} is {saved}, not {shape}")
    named = {row.name: (leaf, place, row) for leaf, places in rows.items() for place, row in places.items()}
    folder.mkdir(parents=True, exist_ok=True)
    shapes = {name: row.shape for name, (_, _, row) in sorted(named.items())}
    safetensors.write(folder, shapes, dtype, lambda name: values_of(checkpoint, *named[name], pool))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def export_adapters(source: Source, folder: Path) -> None:
    """Writes the adapters of a run as PEFT's two files, for the published base. Raises RunError if it has none."""
    if not source.adapters:
        raise RunError(f"adapter=true: {source.checkpoint.path} has no adapters, it is no run with lora.rank")
    factors = to_published(source)
    pairs = {
        place.path: (a, b * np.float32(factors.get(f"weights/{place.path}", 1.0))) for place, a, b in source.adapters
    }
    names = adapters.named(source.family, source.model, [place for place, _, _ in source.adapters])
    config = source.checkpoint.attributes["config"]
    about = {**config["lora"], "base": config["initial_weights"]}
    about["task"] = {"both": "SEQ_2_SEQ_LM", "decoder": "CAUSAL_LM"}.get(source.family.KIND)  # null for an encoder
    adapters.write_peft(folder, names, lambda place, which: pairs[place.path]["ab".index(which)], about)


def to_published(source: Source) -> dict[str, float]:
    """Factors of weights, by name, for the model that an export's config.json describes."""
    target = source.family.model_of(Fields(config_for(source, "float32"), "config.json"))
    return rescaled(source, getattr(target, "logits_scale", 1.0))


def config_for(source: Source, dtype: str) -> dict[str, Any]:
    """The config.json of an export: the one that the weights came with, if it still describes the model."""
    family, config = source.family, source.config
    if config is None or different(family.model_of(Fields(config, "config.json")), source.model):
        config = {**(config or {}), **family.config_of(source.model)}
        if keys := different(family.model_of(Fields(config, "config.json")), source.model):
            what = f"no published architecture computes what {source.checkpoint.path} does"
            raise RunError(f"{what}: {', '.join(f'model.{key}' for key in keys)}")
    return config | dict.fromkeys({"dtype", "torch_dtype"} & config.keys() or {"dtype"}, dtype)


def values_of(
    checkpoint: Checkpoint, leaf: str, place: tuple[int, ...], row: Row, pool: Executor
) -> Iterator[Float[np.ndarray, "..."]]:
    """The values of a published tensor, in pieces if it can be cut into rows."""
    sizes, at = list(row.sizes.values()), tuple((n, n + 1) for n in place)
    step = ROWS if row.is_plain and not place else sizes[0]
    for start in range(0, sizes[0], step):
        bounds = (*at, (start, min(start + step, sizes[0])), *((0, size) for size in sizes[1:]))
        values = read_block(checkpoint, f"weights/{leaf}", bounds, pool)
        yield row.read_out(values.reshape(values.shape[len(place) :]))
