"""Adapters of low rank (LoRA, Hu et al. 2021): which matrices of a family can have one, and their sums.

    found = places(family, shapes)                     # of all matrices that can have one
    low = tree(family, found, make)                    # a family's Weights with make(place, 'a') and 'b' in its layers
    merged = Merged(base, saved, found, scale, pool)   # base + scale · a · b, as a checkpoint

The model multiplies with base + alpha / rank · a · b (`products.Adapted`, `products.product`). Folders of the package
PEFT are read and written here too: adapter_config.json and adapter_model.safetensors.
"""

import dataclasses
import json
import re
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from einops import rearrange

from models import safetensors
from runtime.checkpoints.checkpoint import Bounds, Grid, read_leaf
from runtime.terminal import RunError
from shardlib.products import low_rank
from shardlib.shardtypes import Stacked, fields, inner_of_optional, pytree_dataclass
from shardlib.spec import Dim, Spec

# Of a layer's matrices those that lead back to the residual: products with them take the sum over all dims but M.
INWARD = ("w_o", "w_down", "cross_o")
PREFIX = "base_model.model."  # of PEFT's names
# Of an adapter_config.json: what changes nothing of what it computes. Any other field that is set is refused.
WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "fan_in_fan_out", "inference_mode", "lora_dropout", "megatron_core",
    "peft_version", "qalora_group_size", "revision", "target_modules", "task_type", "exclude_modules",
    "layers_pattern", "ensure_weight_tying",
}  # fmt: skip


@pytree_dataclass
class LowRank:
    """An adapter, or what is said of one."""

    a: Any
    b: Any


@dataclass(frozen=True)
class Place:
    """A matrix that an adapter can stand beside."""

    stack: str  # the field of Weights with its layers: transformer
    name: str  # once it is gathered: w_k
    leaf: str  # of the weights: w_kv
    part: tuple[int, ...]  # which one of the leaf, behind the dim of layers: (0,)
    sizes: dict[str, int]  # of its dims, and of that of the layers
    whole: Spec  # of the matrices of all layers: 'layers M K/t D'
    a: Spec  # 'layers M rank'
    b: Spec  # 'layers rank K/t D'

    @property
    def path(self) -> str:
        return f"{self.stack}/{self.name}"

    @property
    def count(self) -> int:
        """Of layers."""
        return self.sizes[self.whole.names[0]]

    def shape(self, which: str, rank: int) -> tuple[int, ...]:
        return tuple({**self.sizes, "rank": rank}[name] for name in getattr(self, which).names)


def places(family: ModuleType, weights: Any) -> list[Place]:
    """All of them, of a family's weights or their shapes: the matrices with a dim M that its layers multiply with by
    `product`, not experts."""
    gathered, found = fields(family.Gathered), []
    for stack, stacked in fields(family.Weights).items():
        if not isinstance(stacked, Stacked):
            continue
        for leaf, array in vars(getattr(weights, stack)).items():
            prefix, _, letters = leaf.rpartition("_")
            parts = {leaf: ()} if leaf in gathered else {f"{prefix}_{x}": (i,) for i, x in enumerate(letters)}
            for name, part in parts.items() if array is not None else ():
                type_ = gathered.get(name)
                spec = getattr(inner_of_optional(type_) or type_, "spec", Spec(()))
                if type_ is None or "M" not in spec.names or len(spec.names) < 2 or "E" in spec.names:
                    continue
                if (inner_of_optional(type_) or type_).element.name != "act":
                    continue
                is_inward = name in INWARD
                a, b = low_rank(spec, [dim for dim in spec.names if (dim != "M") == is_inward])
                whole = Spec((*stacked.dims, *spec.dims))
                sizes = dict(zip(whole.names, (array.shape[0], *array.shape[1 + len(part) :])))
                # The rank has a name of its own: in T5's weights N is a number of buckets.
                a, b = (Spec(tuple(Dim("rank") if dim.name == "N" else dim for dim in each.dims)) for each in (a, b))
                a, b = (Spec((*stacked.dims, *each.dims)) for each in (a, b))
                found.append(Place(stack, name, leaf, part, sizes, whole, a, b))
    return found


def chosen(found: list[Place], targets: str) -> list[Place]:
    """Those whose name, 'w_q', is what the regular expression says. Raises RunError for one that says none."""
    some = [place for place in found if re.fullmatch(targets, place.name)]
    if not some:
        names = ", ".join(dict.fromkeys(place.name for place in found))
        raise RunError(f"lora.targets = {targets!r} is none of the matrices that can have an adapter: {names}")
    return some


def tree(family: ModuleType, some: list[Place], make: Callable[[Place, str], Any]) -> Any:
    """A family's Weights, with adapters in the place of its layers, and nothing else."""

    def nothing(cls):
        return dict.fromkeys(field.name for field in dataclasses.fields(cls))

    stacks = {}
    for place in some:
        layer = stacks.setdefault(place.stack, nothing(family.Gathered))
        layer[place.name] = LowRank(make(place, "a"), make(place, "b"))
    return family.Weights(**nothing(family.Weights) | {name: family.Gathered(**each) for name, each in stacks.items()})


# ---- merged ----------------------------------------------------------------------------------------------------------


def letters(*specs: Spec) -> list[str]:
    """For einsum: a letter a dim."""
    known: dict[str, str] = {}
    return ["".join(known.setdefault(name, chr(97 + len(known))) for name in spec.names) for spec in specs]


@dataclass(frozen=True)
class Overlaid:
    """Stands for a checkpoint: a base, some of whose arrays another one replaces, or adds adapters to."""

    base: Any
    over: Any
    adapters: dict[str, list[tuple[Place, np.ndarray, np.ndarray]]]  # by the name of the array that they add to
    scale: float

    @property
    def path(self) -> str:
        return self.over.path

    @property
    def attributes(self) -> dict[str, Any]:
        return self.over.attributes

    @property
    def arrays(self) -> dict[str, Any]:
        return {name: each for name, each in self.base.arrays.items() if name.startswith("weights")}

    def of(self, name: str) -> Any:
        return self.over if name in self.over.arrays else self.base

    def grid(self, name: str) -> Grid:
        return self.of(name).grid(name)

    def read_chunk(self, name: str, number: tuple[int, ...], bounds: Bounds) -> np.ndarray:
        values = self.of(name).read_chunk(name, number, bounds)
        for place, a, b in self.adapters.get(name, ()):
            values = self.added(values, bounds, place, a, b)
        return values

    def added(self, values: np.ndarray, bounds: Bounds, place: Place, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Of a chunk of an array, with the part of an adapter's product that lies in it."""
        start = len(place.part)
        edges = bounds[1 : 1 + start]
        if any(not low <= part < high for part, (low, high) in zip(place.part, edges)):
            return values
        own = (bounds[0], *bounds[1 + start :])
        cut = {name: slice(*each) for name, each in zip(place.whole.names, own)} | {"rank": slice(None)}
        a, b = (each[tuple(cut[name] for name in spec.names)] for each, spec in ((a, place.a), (b, place.b)))
        one, other, whole = letters(place.a, place.b, place.whole)
        change = np.float32(self.scale) * np.einsum(f"{one},{other}->{whole}", a, b, optimize=True)
        values = values.astype(np.float32)  # a copy
        values[(slice(None), *(part - low for part, (low, _) in zip(place.part, edges)))] += change
        return values


def overlaid(base: Any, family: ModuleType, shapes: Any, saved: Any, scale: float, pool: Executor) -> Overlaid:
    """The weights of a fine-tuning run. The adapters, a few percent of the base, are read at once."""
    adapters: dict[str, list] = {}
    for place in places(family, shapes):
        name = f"weights/{place.path}"
        if f"{name}/a" in saved.arrays:
            a, b = (read_leaf(saved, f"{name}/{which}", pool) for which in "ab")
            adapters.setdefault(f"weights/{place.stack}/{place.leaf}", []).append((place, a, b))
    return Overlaid(base, saved, adapters, scale)


# ---- PEFT ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Named:
    """How PEFT names an adapter, and how it lies there."""

    place: Place
    name: str  # of the module, with {} for the layer: model.layers.{}.self_attn.q_proj
    read: str  # the published dims that products take the sum over: '(K Q D)'
    written: str

    def out(self, which: str, values: np.ndarray) -> np.ndarray:
        """One layer's a or b, as PEFT has it."""
        ours = " ".join(getattr(self.place, which).names[1:])
        return rearrange(values, f"{ours} -> {self.theirs(which)}")

    def theirs(self, which: str) -> str:
        return f"rank {self.read}" if which == "a" else f"{self.written} rank"

    def in_(self, which: str, values: np.ndarray) -> np.ndarray:
        ours = " ".join(getattr(self.place, which).names[1:])
        return rearrange(values, f"{self.theirs(which)} -> {ours}", **self.dims(which))

    def dims(self, which: str) -> dict[str, int]:
        return {name: self.place.sizes[name] for name in getattr(self.place, which).names[1:] if name != "rank"}

    def shape(self, which: str, rank: int) -> list[int]:
        size = int(np.prod(list(self.dims(which).values())))
        return [rank, size] if which == "a" else [size, rank]


def named(family: ModuleType, model: Any, some: list[Place]) -> list[Named]:
    """Raises RunError for a matrix that is published as a part of another: PEFT has one adapter for both."""
    table, found = family.published(model), []
    for place in some:
        rows = table[f"{place.stack}/{place.leaf}"]
        if bool(place.part) != (len(rows) > 1):
            raise RunError(
                f"{place.path} is a part of the published {rows[0][0]}, for which PEFT has a single adapter: merge the "
                "adapters into the weights instead, by leaving adapter=true out"
            )
        name, pattern = rows[place.part[0] if place.part else 0]
        groups = re.findall(r"\([^)]*\)|\S+", pattern.partition(" -> ")[0])
        is_read = [set(group.strip("()").split()) <= set(place.a.names) for group in groups]
        if sorted(is_read) != [False, True]:
            raise AssertionError(f"{name}: {pattern} is no matrix")
        read, written = (group for _, group in sorted(zip(is_read, groups), reverse=True))
        found.append(Named(place, name.removesuffix(".weight"), read, written))
    return found


def write_peft(folder: Path, names: list[Named], read: Callable[[Place, str], np.ndarray], about: dict) -> None:
    """Writes a folder that PEFT loads.

    Args:
      read: a or b of all layers, float32.
      about: rank, alpha, dropout, base, what the adapters belong to, and task, PEFT's task_type.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, np.ndarray] = {}
    for each in names:
        for which in "ab":
            for layer, values in enumerate(read(each.place, which)):
                name = f"{PREFIX}{each.name.format(layer)}.lora_{which.upper()}.weight"
                tensors[name] = each.out(which, values)
    shapes = {name: values.shape for name, values in sorted(tensors.items())}
    safetensors.write(folder, shapes, "float32", lambda name: iter([tensors[name]]), "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": about["task"], "base_model_name_or_path": about["base"], "r": about["rank"],
        "lora_alpha": about["alpha"], "lora_dropout": about["dropout"], "bias": "none", "inference_mode": True,
        "target_modules": sorted({each.name.rpartition(".")[2] for each in names}),
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_peft(folder: Path, names: list[Named], rank: int, alpha: float) -> Callable[[Place, str], np.ndarray]:
    """Of a place its a or b of all layers, from a folder that PEFT wrote.

    Raises:
      RunError: they are adapters of another rank or scale, of other matrices, or of a kind that is not computed.
    """
    file = folder / "adapter_config.json"
    config = safetensors.read_json(file)
    expected = {"peft_type": "LORA", "bias": "none", "init_lora_weights": True, "r": rank, "lora_alpha": alpha}
    others = sorted(config.keys() - WITHOUT_EFFECT - expected.keys())
    problems = [f"{key} = {config[key]!r} is not computed" for key in others if config[key]]
    keys = {"r": "lora.rank", "lora_alpha": "lora.alpha"}
    for key, value in expected.items():
        if config.get(key, value) != value:
            fix = f": set {keys[key]}={config[key]}" if key in keys else ""
            problems.append(f"{key} = {config[key]!r}, expected {value!r}{fix}")
    if problems:
        raise RunError("\n  ".join([f"the adapters in {folder} cannot be taken:", *problems]))
    tensors = safetensors.read(folder)
    wanted = {
        f"{PREFIX}{each.name.format(layer)}.lora_{which.upper()}.weight": each.shape(which, rank)
        for each in names
        for layer in range(each.place.count)
        for which in "ab"
    }
    wrong = sorted(name for name in wanted if name not in tensors or list(tensors[name].shape) != wanted[name])
    problems = [f"{name}: expected {wanted[name]}" for name in wrong]
    problems += [f"{name}: lora.targets leaves it out" for name in sorted(tensors.keys() - wanted.keys())]
    if problems:
        more = [f"and {len(problems) - 10} more"] if len(problems) > 10 else []
        raise RunError("\n  ".join([f"the adapters in {folder} are not those of this run:", *problems[:10], *more]))
    by_place = {each.place.path: each for each in names}

    def read(place: Place, which: str) -> np.ndarray:
        each = by_place[place.path]
        stem = f"{PREFIX}{each.name}.lora_{which.upper()}.weight"
        found = [tensors[stem.format(layer)].read(slice(None)) for layer in range(place.count)]
        return np.stack([each.in_(which, values.astype(np.float32)) for values in found])

    return read
