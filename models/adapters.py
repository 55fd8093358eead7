"""Adapters of low rank (LoRA, Hu et al. 2021): which matrices of a family can have one, and how they are merged.

    found = places(family, shapes)                     # every matrix that can have one
    low = tree(family, found, make)                    # a family's Weights with make(place, 'a') and 'b' in its layers
    arrays = merged(arrays, saved_in(checkpoint, found, pool), scale)     # base + scale · a · b, read when asked for

The model multiplies with base + alpha / rank · a · b (`products.Adapted`, `products.product`). Folders of the package
PEFT are read and written here too: adapter_config.json and adapter_model.safetensors.
"""

import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from einops import EinopsError, rearrange
from jaxtyping import Float, Float32

from models import safetensors
from models.safetensors import Row, Tensor
from runtime.checkpoints.checkpoint import Bounds, Checkpoint, LazyArray, read_leaf
from runtime.terminal import RunError, run_errors
from shardlib.products import low_rank
from shardlib.shardtypes import fields, pytree_dataclass
from shardlib.spec import Spec

PREFIX = "base_model.model."  # all names in PEFT's files begin with it
# Fields of adapter_config.json that do not change the result. Any other field that is set is refused.
WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "fan_in_fan_out", "inference_mode", "lora_dropout", "megatron_core",
    "peft_version", "qalora_group_size", "revision", "target_modules", "task_type", "exclude_modules",
    "layers_pattern", "ensure_weight_tying", "target_parameters",
}  # fmt: skip
# Values of a field that do not either: ways to draw a and b that leave the base as it is.
ALLOWED = {"init_lora_weights": (True, "gaussian", "orthogonal")}


@pytree_dataclass
class LowRank:
    """An adapter, or the types of its two matrices."""

    a: Any
    b: Any


@dataclass(frozen=True)
class Place:
    stack: str  # the field of Weights with its layers: transformer
    name: str  # its name once gathered: w_k
    leaf: str  # the weight that holds it: w_kv
    part: tuple[int, ...]  # its index in the leaf, after the dim of layers: (0,)
    sizes: dict[str, int]  # by dim, 'layers' among them
    whole: Spec  # the matrices of all layers: 'layers M K/t D'
    a: Spec  # 'layers M rank'; for experts 'layers E/e M rank'
    b: Spec  # 'layers rank K/t D'

    @property
    def path(self) -> str:
        return f"{self.stack}/{self.name}"

    @property
    def is_of_experts(self) -> bool:
        return "E" in self.whole.names

    @property
    def fan_in(self) -> int:
        """The number of values that a product with a sums over."""
        return math.prod(self.sizes[name] for name in self.a.names[1:-1] if name != "E")

    def shape(self, which: str, rank: int) -> tuple[int, ...]:
        return tuple({**self.sizes, "rank": rank}[name] for name in getattr(self, which).names)


def places(family: ModuleType, weights: Any) -> list[Place]:
    """Every matrix that the layers multiply by; weights: a family's, or their shapes."""
    contracted, result = family.TABLE.contracted, []
    for stack, table in family.TABLE.stacks.items():
        layers = fields(family.Weights)[stack].dims
        for leaf, weight in table.items():
            array, spec = getattr(getattr(weights, stack), leaf), weight.type_in_use.spec
            for name, number in weight.parts(leaf).items():
                if array is None or name not in contracted:
                    continue
                part = () if number is None else (number,)
                a, b = low_rank(spec, contracted[name], of_x=["E"])
                whole, a, b = (Spec((*layers, *one.dims)) for one in (spec, a, b))
                sizes = dict(zip(whole.names, (array.shape[0], *array.shape[1 + len(part) :])))
                result.append(Place(stack, name, leaf, part, sizes, whole, a, b))
    return result


def chosen(places: list[Place], targets: str) -> list[Place]:
    """The places whose name matches; experts' only if the expression has 'expert'. Raises RunError if none does."""
    selected = [
        place
        for place in places
        if re.fullmatch(targets, place.name) and ("expert" in targets or not place.is_of_experts)
    ]
    if not selected:
        names = ", ".join(dict.fromkeys(place.name for place in places))
        raise RunError(f"lora.targets = {targets!r} is none of the matrices that can have an adapter: {names}")
    return selected


def tree(family: ModuleType, places: list[Place], make: Callable[[Place, str], Any]) -> Any:
    """A family's Weights with adapters in place of its layers, and nothing else."""

    def nothing(cls):
        return dict.fromkeys(field.name for field in dataclasses.fields(cls))

    stacks = {}
    for place in places:
        layer = stacks.setdefault(place.stack, nothing(family.Gathered))
        layer[place.name] = LowRank(make(place, "a"), make(place, "b"))
    return family.Weights(**nothing(family.Weights) | {name: family.Gathered(**w) for name, w in stacks.items()})


# ---- merged ----------------------------------------------------------------------------------------------------------


def letters(*specs: Spec) -> list[str]:
    """The dims of each spec as letters, for einsum."""
    known: dict[str, str] = {}
    return ["".join(known.setdefault(name, chr(97 + len(known))) for name in spec.names) for spec in specs]


Factor = Float32[np.ndarray, "layers ..."]  # a or b of all layers
Adapter = tuple[Place, Factor, Factor]


def saved_in(checkpoint: Checkpoint, places: list[Place], pool: Executor) -> tuple[Adapter, ...]:
    """The adapters in a checkpoint. They are a few percent of the base, so they are read now."""
    there = [place for place in places if f"weights/{place.path}/a" in checkpoint.arrays]
    return tuple(
        (place, *(read_leaf(checkpoint, f"weights/{place.path}/{which}", pool) for which in "ab")) for place in there
    )


def merged(arrays: dict[str, LazyArray], trained: Sequence[Adapter], scale: float) -> dict[str, LazyArray]:
    """The arrays of a base, with a · b added to those that have adapters."""
    arrays = dict(arrays)
    for place, a, b in trained:
        name = f"weights/{place.stack}/{place.leaf}"
        arrays[name] = arrays[name].changed(functools.partial(_added, place, scale * a, b), np.float32)
    return arrays


def _added(
    place: Place, a: Factor, b: Factor, values: Float[np.ndarray, "*chunk"], bounds: Bounds
) -> Float[np.ndarray, "*chunk"]:
    """A chunk of an array, plus its part of a · b."""
    start = len(place.part)
    edges = bounds[1 : 1 + start]
    if any(not low <= part < high for part, (low, high) in zip(place.part, edges)):
        return values
    bounds_of_part = (bounds[0], *bounds[1 + start :])
    cut = {name: slice(*bound) for name, bound in zip(place.whole.names, bounds_of_part)} | {"rank": slice(None)}
    a, b = (factor[tuple(cut[name] for name in spec.names)] for factor, spec in ((a, place.a), (b, place.b)))
    one, other, whole = letters(place.a, place.b, place.whole)
    values = values.astype(np.float32)  # a copy
    change = np.einsum(f"{one},{other}->{whole}", a, b, optimize=True)
    values[(slice(None), *(part - low for part, (low, _) in zip(place.part, edges)))] += change
    return values


# ---- PEFT ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Named:
    """PEFT's name and layout of an adapter."""

    place: Place
    name: str  # the module's, with {} for the layer and for the expert: model.layers.{}.self_attn.q_proj
    read: str  # the published dims that products sum over: '(K Q D)'
    written: str

    @property
    def numbered(self) -> tuple[int, ...]:
        return tuple(self.place.sizes[name] for name in self.place.whole.names[: self.name.count("{}")])

    def rows(self, which: str, rank: int) -> dict[tuple[int, ...], Row]:
        """The published tensors of a or b, by layer and expert."""
        dims = getattr(self.place, which).names[len(self.numbered) :]
        sizes = {dim: rank if dim == "rank" else self.place.sizes[dim] for dim in dims}
        pattern = (f"rank {self.read}" if which == "a" else f"{self.written} rank") + f" -> {' '.join(dims)}"
        name = f"{PREFIX}{self.name}.lora_{which.upper()}.weight"
        return {at: Row(name.format(*at), pattern, sizes) for at in np.ndindex(self.numbered)}


def named(family: ModuleType, model: Any, places: list[Place]) -> list[Named]:
    """Raises RunError for a matrix that is published as part of a larger one: PEFT has one adapter for all of that."""
    table, result = family.published(model), []
    for place in places:
        rows = table[f"{place.stack}/{place.leaf}"]
        if bool(place.part) != (len(rows) > 1):
            raise RunError(f"{place.path}: PEFT has one adapter for all of {rows[0][0]}: leave adapter=true out")
        name, pattern = rows[place.part[0] if place.part else 0]
        groups = re.findall(r"\([^)]*\)|\S+", pattern.partition(" -> ")[0])
        is_read = [set(group.strip("()").split()) <= set(place.a.names) for group in groups]
        if sorted(is_read) != [False, True]:
            raise AssertionError(f"{name}: {pattern} is no matrix")
        read, written = (group for _, group in sorted(zip(is_read, groups), reverse=True))
        result.append(Named(place, name.removesuffix(".weight"), read, written))
    return result


def write_peft(folder: Path, names: list[Named], read: Callable[[Place, str], Factor], about: dict) -> None:
    """Writes adapters as a folder that PEFT can load.

    Args:
      read: returns a or b of all layers.
      about: rank, alpha, dropout, base (the model that they were trained on) and task (PEFT's task_type).
    """
    if len({"expert_gate", "expert_up"} & {entry.place.name for entry in names}) == 1:
        raise RunError("PEFT has adapters of experts' gate and up together: set lora.targets to both, or merge them")
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, np.ndarray] = {}
    for entry in names:
        for which in "ab":
            values, rows = read(entry.place, which), entry.rows(which, about["rank"])
            tensors |= {row.name: row.read_out(values[at]) for at, row in rows.items()}
    shapes = {name: values.shape for name, values in sorted(tensors.items())}
    safetensors.write(folder, shapes, "float32", lambda name: iter([tensors[name]]), "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": about["task"], "base_model_name_or_path": about["base"], "r": about["rank"],
        "lora_alpha": about["alpha"], "lora_dropout": about["dropout"], "bias": "none", "inference_mode": True,
        "target_modules": sorted({entry.name.rpartition(".")[2] for entry in names}),
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _of_each_expert(tensors: dict[str, Tensor], names: list[Named], rank: int, targets: list[str]) -> dict[str, Tensor]:
    """Adapters of `target_parameters`, the arrays in which transformers 5 keeps all experts, under the names of one
    expert's matrices. In gate_up_proj gate and up share a."""
    by_expert, fused = {}, set()
    for entry in names:
        if not entry.place.is_of_experts:
            continue
        is_down, (layers, experts) = entry.place.name == "expert_down", entry.numbered
        of_both = [entry.rows(which, rank) for which in "ab"]
        # PEFT wraps a module's second array, down_proj, around the first.
        inner = "base_layer." if not is_down and any(target.endswith("down_proj") for target in targets) else ""
        for layer in range(layers):
            module = entry.name.format(layer, 0).rpartition(".0.")[0].replace("block_sparse_moe", "mlp")
            parts = [f"{PREFIX}{module}.{inner}lora_{which}.weight" for which in "AB"]
            if not tensors.keys() >= set(parts):
                continue
            a, b = (tensors[part].read(slice(None)) for part in parts)
            a = rearrange(a, "(E rank) read -> E rank read", E=experts)
            b = rearrange(b, "written (rank E) -> E written rank", E=experts)
            b = b if is_down else np.split(b, 2, axis=1)[entry.place.name == "expert_up"]
            fused |= set(parts)
            for expert in range(experts):
                for rows, values in zip(of_both, (a[expert], b[expert])):
                    by_expert[rows[layer, expert].name] = Tensor(values.shape, values.__getitem__)
    return by_expert | {name: tensor for name, tensor in tensors.items() if name not in fused}


def read_peft(folder: Path, names: list[Named], rank: int, alpha: float) -> Callable[[Place, str], Factor]:
    """Opens a folder that PEFT wrote; returns a function that reads a or b of all layers of a place.

    Raises:
      RunError: the adapters have another rank or scale, belong to other matrices, or are of a kind not computed here.
    """
    file = folder / "adapter_config.json"
    config = safetensors.read_json(file)
    expected = {"peft_type": "LORA", "bias": "none", "r": rank, "lora_alpha": alpha}
    others = sorted(key for key in config.keys() - WITHOUT_EFFECT - expected.keys() if config[key])
    problems = [f"{key} = {config[key]!r} is not computed" for key in others if config[key] not in ALLOWED.get(key, ())]
    keys = {"r": "lora.rank", "lora_alpha": "lora.alpha"}
    for key, value in expected.items():
        if config.get(key, value) != value:
            fix = f": set {keys[key]}={config[key]}" if key in keys else ""
            problems.append(f"{key} = {config[key]!r}, expected {value!r}{fix}")
    if problems:
        raise RunError("\n  ".join([f"the adapters in {folder} cannot be taken:", *problems]))
    tensors = safetensors.read(folder)
    if config.get("target_parameters"):
        with run_errors(f"{folder} cannot be read", ValueError, TypeError, AttributeError, EinopsError):
            tensors = _of_each_expert(tensors, names, rank, config["target_parameters"])
    rows = {(entry.place.path, which): entry.rows(which, rank) for entry in names for which in "ab"}
    wanted = {row.name: row.shape for of_place in rows.values() for row in of_place.values()}
    wrong = sorted(name for name in wanted if name not in tensors or tensors[name].shape != wanted[name])
    problems = [f"{name}: expected {list(wanted[name])}" for name in wrong]
    problems += [f"{name}: lora.targets leaves it out" for name in sorted(tensors.keys() - wanted.keys())]
    if problems:
        more = [f"and {len(problems) - 10} more"] if len(problems) > 10 else []
        raise RunError("\n  ".join([f"the adapters in {folder} are not those of this run:", *problems[:10], *more]))

    def read(place: Place, which: str) -> Factor:
        of_place = rows[place.path, which].values()
        parts = [row.read_in(tensors[row.name].read(slice(None)).astype(np.float32)) for row in of_place]
        return np.stack(parts).reshape(place.shape(which, rank))

    return read
