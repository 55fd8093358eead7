"""Types with sharding: `f32['B/d L M/t']`, pytrees of them (docs/notation.md has examples), and their check against
values.

Letters are sizes: within one scope (a call of a `typed` function, `with Scope():`, `@scope`) a letter is one global
size.
"""

import contextlib
import contextvars
import dataclasses
import functools
import types
import typing

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from shardlib.mesh import all_mapped_axes, current_mesh, mapped_axes, place
from shardlib.places import users_line
from shardlib.proof import claims, marks
from shardlib.spec import Dim, ShardingError, Spec, as_text, located, parse, parts

# -- Letters -----------------------------------------------------------------------------------------------------------
_letters: contextvars.ContextVar[dict[str, tuple[int, str]] | None] = contextvars.ContextVar("letters", default=None)


@contextlib.contextmanager
def Scope():
    """Fresh letters inside: `with Scope(): ...`."""
    token = _letters.set({})
    try:
        yield
    finally:
        _letters.reset(token)


def scope(function):
    """Gives each call of the function fresh letters."""
    return Scope()(function)


def mesh_text(axes: dict[str, int]) -> str:
    return "mesh " + " × ".join(f"{name}={size}" for name, size in axes.items()) if axes else "no mesh"


def bind(
    spec: Spec, shape: tuple[int, ...], axes: dict[str, int], letters: dict, *, local: bool = True
) -> tuple[int, ...]:
    """Checks one value's shape against its type and the letters met so far; returns the global shape and remembers new
    letters.

    Args:
      spec: the type.
      shape: what one device holds (`local`), or the whole.
      axes: the mesh's axes and their sizes.
      letters: size and origin of each letter in this scope; changed.
    Raises:
      ShardingError: another rank, pending axes out of the mesh's order, an integer or a letter of another size, a
        size that an axis does not divide, a dim with an axis' name and another size.
    """
    spec.require_mesh_order(axes)
    dims = (Dim("..."),) * len(shape) if spec.names == ("...",) else spec.dims
    if len(dims) != len(shape):
        raise ShardingError(f"'{spec}' has {len(spec.dims)} dims, the value has {len(shape)}")
    whole = []
    for dim, size in zip(dims, shape):
        if local:
            size = marks.whole_of(size, dim, axes, spec)
        elif dim.name not in axes:
            require_divisible(dim, size, axes)
        whole.append(size)
        if dim.name != "...":
            remember(dim, size, axes, letters, str(spec))
    return tuple(whole)


def remember(dim: Dim, size: int, axes: dict[str, int], letters: dict, text: str):
    """Binds a dim's letter to its size in the whole array; raises `ShardingError` if it has another size already."""
    known, origin = known_size(dim, axes, letters)
    if known is None:
        letters[dim.name] = size, f"'{text}'"
    elif known != size:
        raise ShardingError(f"dim {dim} of '{text}' is {size}, but {dim.name} is {known} in {origin}")


def known_size(dim: Dim, axes: dict[str, int], letters: dict) -> tuple[int | None, str]:
    """The size of a dim in the whole array, and what says it; None if nothing does."""
    if dim.name.isdigit():
        return int(dim.name), "the string"
    if dim.name not in axes:
        return letters.get(dim.name, (None, ""))
    if dim.axes not in ((), (dim.name,)):
        raise ShardingError(f"dim {dim}: one that is named like an axis counts its devices, and is split over no other")
    return axes[dim.name], "the mesh, whose axis has that name"


def require_divisible(dim: Dim, size: int, axes: dict[str, int]):
    """Raises `ShardingError` for a dim of the whole array that its axes cannot divide."""
    if size % parts(dim, axes):
        split = [f"{axis}={axes[axis]}" for axis in dim.axes if axes[axis] > 1]
        noun = "axis" if len(split) == 1 else "axes"
        raise ShardingError(f"dim {dim.name} has size {size}, which {noun} {' × '.join(split)} cannot divide")


def letters_of_scope() -> dict:
    """The letters of the scope that is open, or fresh ones for a single use."""
    letters = _letters.get()
    return {} if letters is None else letters


def _parse_type(text: str | bytes) -> Spec:
    """Parses a type, in which the marks that belong to operations alone have no place."""
    spec = parse(as_text(text))
    for dim in spec.dims:
        if dim.indexed or dim.name == "...":
            raise ShardingError(f"'{spec}': '{dim}' belongs in an operation's string; a type names each dim")
    return spec


# -- Array types -------------------------------------------------------------------------------------------------------
class DType:
    """An element type, also for `jnp.dtype`; `f32['B/d L']` (`f32[b'B/d L']`, `f32('B/d L')`) is a type of arrays."""

    def __init__(self, name: str, dtype):
        self.name, self.dtype = name, jnp.dtype(dtype)

    def __getitem__(self, spec: str | bytes) -> "ArrayType":
        return ArrayType(self, _parse_type(spec))

    __call__ = __getitem__

    def __repr__(self):
        return self.name


class ComputeType(DType):
    """An element type that is chosen at run time: `act.dtype = jnp.float32` before anything is traced."""

    @property
    def dtype(self):
        return self._dtype

    @dtype.setter
    def dtype(self, dtype):
        self._dtype = jnp.dtype(dtype)


class _Annotation:
    """Operators that annotations use on a type: `f32['B'] | None`, tuple[f32['B'], ...] and the like."""

    def __or__(self, other):
        return typing.Union[self, other]  # noqa: UP007 this is what `|` means here

    def __ror__(self, other):
        return typing.Union[other, self]  # noqa: UP007

    def __call__(self, *_):  # typing accepts only callables
        raise TypeError(f"{self!r} is a type for annotations, it makes no arrays: use shardops.zeros")


@dataclasses.dataclass(frozen=True)
class ArrayType(_Annotation):
    """A type of arrays: an element type and how the dims lie on the mesh."""

    element: DType
    spec: Spec

    def with_leading(self, dims: tuple[Dim, ...]) -> "ArrayType":
        # Parsed again, for what a spec may not say: an axis twice.
        return ArrayType(self.element, parse(str(Spec((*dims, *self.spec.dims), self.spec.pending)))) if dims else self

    def __repr__(self):
        return f"{self.element}['{self.spec}']"


f32, bf16 = DType("f32", jnp.float32), DType("bf16", jnp.bfloat16)
i32, u32 = DType("i32", jnp.int32), DType("u32", jnp.uint32)
i8, u8 = DType("i8", jnp.int8), DType("u8", jnp.uint8)
bool_ = DType("bool_", jnp.bool_)


@dataclasses.dataclass(frozen=True)
class Stacked(_Annotation):
    """What `Array['layers', Layer]` is."""

    dims: tuple[Dim, ...]
    cls: typing.Any

    def __repr__(self):
        return f"Array['{' '.join(map(str, self.dims))}', {getattr(self.cls, '__name__', self.cls)}]"


class Array:
    """`Array['layers', Layer]`: Layer with a leading dim on every field."""

    def __class_getitem__(cls, parameters) -> Stacked:
        spec, inner = parameters
        spec = _parse_type(spec)
        if spec.pending:
            raise ShardingError(f"Array['{spec}', ...] adds dims to fields: pending axes stand in the fields' types")
        stacked = Stacked(spec.dims, inner)
        map_type(lambda array: array, stacked, like=_ALL)  # each field can have these dims
        return stacked


def pytree_dataclass(cls):
    """A frozen dataclass that JAX sees as a pytree, with field names as keys."""
    cls = dataclasses.dataclass(frozen=True)(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    return jax.tree_util.register_dataclass(cls, data_fields=names, meta_fields=[])


@functools.cache
def fields(cls) -> dict[str, typing.Any]:
    """Field names and types of a `pytree_dataclass`, also where annotations are strings."""
    try:
        said = typing.get_type_hints(cls, include_extras=True)
    except NameError as error:
        raise ShardingError(f"a field's type in {cls.__name__} cannot be read: {error}") from None
    return {field.name: said[field.name] for field in dataclasses.fields(cls)}


_NOTHING, _ALL = object(), object()  # stand for an unknown value: optional fields are refused; all count as present


def map_type(function, type_, like=_NOTHING):
    """The tree of `function(ArrayType)` for a type that is made of pytree dataclasses, `Array[...]`, tuples and array
    types. Of `X | None` the tree `like` says whether the value is there."""
    return _walk(lambda array, value, path: function(array), type_, like)


def narrowed(type_, like):
    """The type of a tree whose fields may be absent (`f32['M'] | None`), with the fields that the tree `like` has: a
    tree of array types, and None for what is absent. It is a type wherever one is asked for.

        shapes = jax.eval_shape(init, np.uint32(0))
        make_shardings(narrowed(Weights, shapes))
    """
    return map_type(lambda array: array, type_, like)


def _walk(leaf, type_, value, what: str = "", leading: tuple[Dim, ...] = (), path: tuple = ()):
    """The tree of `leaf(ArrayType, value, path)`: of a type, and of the value that stands in each place of it.

    `what`, the value's name in messages: it is checked too, and may be a list or a dict. Else it only says which
    optional fields are there.
    """

    def wrong(text):
        return ShardingError(f"{text}\n  against {_place(what, path)}\n  at {users_line()}" if what else text)

    def inside(inner, item, key):
        return _walk(leaf, inner, item, what, leading, (*path, key))

    if isinstance(type_, ArrayType):
        try:
            array = type_.with_leading(leading)
        except ShardingError as error:
            raise wrong(str(error)) from None
        return leaf(array, value, path)
    if isinstance(type_, Stacked):
        return _walk(leaf, type_.cls, value, what, leading + type_.dims, path)
    if (inner := inner_of_optional(type_)) is not None:
        if value is _NOTHING:
            fix = "shardtypes.narrowed(Weights, shapes) is the type with the fields that `shapes` has"
            raise wrong(f"{type_}: nothing says here whether the value is there\n  fix: {fix}")
        return None if value is None else _walk(leaf, inner, value, what, leading, path)
    if dataclasses.is_dataclass(type_):
        cls, parts = (type_, fields(type_)) if isinstance(type_, type) else (type(type_), vars(type_))
        if what and not isinstance(value, cls):
            raise wrong(f"expected {cls.__name__}, got {type(value).__name__}")
        return cls(**{name: inside(inner, getattr(value, name, value), name) for name, inner in parts.items()})
    container, items = typing.get_origin(type_), typing.get_args(type_)
    if what and container in (tuple, list, dict) and not isinstance(value, container):
        raise wrong(f"expected a {container.__name__}, got {type(value).__name__}")
    if container is tuple and items[-1:] != (Ellipsis,):
        values = value if isinstance(value, tuple) else (value,) * len(items)
        if len(values) != len(items):
            raise wrong(f"expected a tuple of {len(items)} items, got {len(values)} items")
        return tuple(inside(inner, item, index) for index, (inner, item) in enumerate(zip(items, values)))
    if type_ is None and (value is None or not what):  # a field that this model's type lacks
        return None
    if not what:
        fix = "use f32['...'], Array['...', cls], tuple[...] or a pytree_dataclass of them"
        raise ShardingError(f"{_name_of(type_)} is no type of sharded arrays: {fix}")
    if container is dict:
        return {key: inside(items[1], item, key) for key, item in value.items()}
    if container in (tuple, list):
        return container(inside(items[0], item, index) for index, item in enumerate(value))
    if not holds_arrays(type_) and not any(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(value)):
        return value  # a setting beside the arrays
    raise wrong(f"{_name_of(type_)} says nothing of how its arrays lie, or is a container that cannot be checked")


def _place(what: str, path: tuple) -> str:
    if len(path) == 1 and isinstance(path[0], int):
        return f"item {path[0]} of {what}"
    return f"{what}, {'/'.join(map(str, path))}" if path else what


def inner_of_optional(type_):
    """X of `X | None`; else None."""
    container, items = typing.get_origin(type_), typing.get_args(type_)
    if container in (typing.Union, types.UnionType) and type(None) in items and len(items) == 2:
        return items[0] if items[1] is type(None) else items[1]
    return None


def is_tree_of_types(type_) -> bool:
    """Whether this is what `narrowed` returns: an instance of a pytree dataclass, of array types."""
    is_instance = dataclasses.is_dataclass(type_) and not isinstance(type_, (type, ArrayType, Stacked))
    return is_instance and all(isinstance(leaf, ArrayType) for leaf in jax.tree.leaves(type_))


class StandIn:
    """A dataclass of several arrays that may stand for a matrix: the matrix's type is that of one field, typed_field.
    The stand-ins, and the product with them, are in `shardlib/products.py`."""

    typed_field: str
    element: DType | None = None  # the typed field's element type, if it is not the type's
    sent_as = None  # the type that `shardops.all_gather` rounds it to for sending

    def map(self, function) -> "StandIn":
        """A copy with `function` applied to the typed field."""
        return dataclasses.replace(self, **{self.typed_field: function(getattr(self, self.typed_field))})


def make_partition_specs(cls):
    """The type's tree with a `PartitionSpec` for each array."""
    return map_type(lambda array: array.spec.partition_spec, cls)


def is_fully_sharded(spec) -> bool:
    """Whether a `PartitionSpec` (or an array type) uses every axis of the current mesh, so that no two devices hold the
    same.

    all(map(is_fully_sharded, jax.tree.leaves(make_partition_specs(Weights))))
    """
    axes = mapped_axes()
    if not axes:
        mesh = current_mesh()
        if mesh is None:
            raise ShardingError("is_fully_sharded needs a mesh: call it under `with jax.set_mesh(mesh):`")
        axes = mesh.shape
    entries = spec.spec.partition_spec if isinstance(spec, ArrayType) else spec
    used = {
        axis for entry in entries if entry is not None for axis in (entry if isinstance(entry, tuple) else (entry,))
    }
    return used == set(axes)


def make_shardings(cls):
    """The type's tree with a `NamedSharding` on the current mesh for each array.

    Raises:
      ShardingError: without a mesh, or if a type names an axis that it lacks.
    """
    mesh = current_mesh()
    if mesh is None:
        raise ShardingError("make_shardings needs a mesh: call it under `with jax.set_mesh(mesh):`")
    map_type(lambda array: array.spec.require_mesh_order(mesh.axis_names), cls)
    return place(mesh, make_partition_specs(cls))


# -- Checking values ---------------------------------------------------------------------------------------------------
def check(dtype, shape_spec: str | bytes | Spec, value, *, what: str = "the annotation", whole_on=None):
    """Checks that an array is of the type `dtype[shape_spec]`; returns it, or raises `ShardingError`.

    Inside `shard_map`: element type, sizes against the scope's letters, and, while a function is being checked, how it
    lies on the mesh. Outside: the actual sharding of arrays that are on devices. Of a whole array that `shard_map` will
    split, the sizes on the mesh whose axes and sizes are `whole_on`.
    """
    spec = shape_spec if isinstance(shape_spec, Spec) else _parse_type(shape_spec)
    with located(lambda: f"  {_against(dtype, spec, value, what, whole_on)}\n  at {users_line()}"):
        if not hasattr(value, "dtype") or not hasattr(value, "shape"):
            raise ShardingError(f"expected an array, got {type(value).__name__}")
        if value.dtype != jnp.dtype(dtype):
            raise ShardingError(f"the element type is {value.dtype}")
        if whole_on is not None:
            _check_whole(spec, value, whole_on)
        elif axes := mapped_axes():
            bind(spec, value.shape, axes, letters_of_scope())
        else:
            _check_outside(spec, value)
    if whole_on is not None or marks.marking() is None:
        return value

    where = f"  {_against(dtype, spec, value, what, None)}\n  at {users_line()}"
    return claims.annotation((what, repr(dtype), str(spec)), spec, value, where)


def _against(dtype, spec, value, what, whole_on) -> str:
    shape = f"{value.dtype}{marks.on_this_mesh(value.shape)}" if hasattr(value, "dtype") else type(value).__name__
    axes, where = (all_mapped_axes(), "on each device") if whole_on is None else (whole_on, "globally")
    if not axes:
        mesh, where = current_mesh(), "globally"
        axes = {} if mesh is None else dict(mesh.shape)
    return f"against {what}: {dtype}['{spec}'], value {shape} {where}, {mesh_text(axes)}"


def _check_whole(spec: Spec, value, axes: dict[str, int]):
    _ = spec.partition_spec  # refuses a pending type
    bind(spec, value.shape, axes, letters_of_scope(), local=False)


def _check_outside(spec: Spec, value):
    mesh = current_mesh()
    if mesh is None:
        mesh = getattr(getattr(value, "sharding", None), "mesh", None)
    if mesh is not None and mesh.axis_names:
        axes = dict(mesh.shape)
    else:  # no mesh to compare with: any order of axes will do
        axes = {axis: 1 for dim in spec.dims for axis in dim.axes}
    _check_whole(spec, value, axes)
    if (
        isinstance(value, jax.core.Tracer)
        or not isinstance(value, jax.Array)
        or not isinstance(mesh, jax.sharding.Mesh)
        or mesh.empty
    ):
        return  # inside jit XLA chooses; a numpy array is not placed yet
    wanted = NamedSharding(mesh, spec.partition_spec)
    if not value.sharding.is_equivalent_to(wanted, value.ndim):
        lies = getattr(value.sharding, "spec", value.sharding)
        fix = "place it with jax.device_put(x, make_shardings(...))"
        raise ShardingError(f"the array lies as {lies}, the type says {wanted.spec}: {fix}")


def check_tree(type_, value, *, what: str = "the annotation", whole_on=None):
    """Checks a value against a type made of array types, in pytree dataclasses, `Array[...]`, tuple, list, dict and
    `... | None`; returns it, or raises `ShardingError`. `what` is its name in messages; `whole_on` as of `check`."""

    def leaf(array, value, path):
        def checked(element, value):
            return check(element, array.spec, value, what=_place(what, path), whole_on=whole_on)

        if isinstance(value, StandIn):
            return value.map(functools.partial(checked, value.element or array.element))
        return checked(array.element, value)

    return _walk(leaf, type_, value, what)


def holds_arrays(type_) -> bool:
    """Whether a type has array types anywhere in it: such a value is for `check_tree`."""
    if isinstance(type_, (ArrayType, Stacked)) or is_tree_of_types(type_):
        return True
    if isinstance(type_, type) and dataclasses.is_dataclass(type_):
        return any(map(holds_arrays, fields(type_).values()))
    return any(map(holds_arrays, typing.get_args(type_)))


def _name_of(type_) -> str:
    return getattr(type_, "__name__", None) or repr(type_)


def register_with_typeguard():
    """Makes `typeguard.typechecked` check annotations like `f32[b'B/d L']` (bytes: typeguard evaluates strings)."""
    import typeguard

    def lookup(origin, args, extras):
        if not holds_arrays(origin):
            return None

        def checker(value, origin_type, args, memo):
            try:
                check_tree(origin_type, value)
            except ShardingError as error:
                raise typeguard.TypeCheckError(str(error)) from None

        return checker

    if not any(getattr(known, "of_shardlib", False) for known in typeguard.checker_lookup_functions):
        lookup.of_shardlib = True
        typeguard.checker_lookup_functions.insert(0, lookup)
