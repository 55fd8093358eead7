"""Types with sharding: `f32['B/d L M/t']`, pytrees of them, their check against values, and `typed_shard_map`.

    @pytree_dataclass
    class Layer:
        w_up: f32['M/d F/t']

    @pytree_dataclass
    class Weights:
        embed: f32['V/t M/d']
        layers: Array['layers', Layer]      # every field with a leading dim

    make_shardings(Weights)                 # the same tree of NamedSharding on the current mesh

Letters are sizes: within one scope (a call of a `typed` function, `with Scope():`, `@scope`) a letter is one global
size.
"""

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from shardlib import check as _check
from shardlib.mesh import current_mesh, manual_axes, place, shard_map
from shardlib.spec import Dim, ShardingError, Spec, as_text, parse, users_line
from shardlib.states import State, require

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

    @functools.wraps(function)
    def scoped(*args, **kwargs):
        with Scope():
            return function(*args, **kwargs)

    return scoped


def mapped_axes() -> dict[str, int]:
    """The mesh axes, name to size, over which the code being traced is mapped; empty outside of shard_map."""
    return _check.checking() or manual_axes()


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
      ShardingError: another rank, an axis written out of the mesh's order, an integer or a letter of another size, a
        size that an axis does not divide.
    """
    spec.require_mesh_order(axes)
    dims = spec.dims
    if dims and dims[0].name == "...":
        dims = (Dim("..."),) * (len(shape) - len(dims) + 1) + dims[1:]
    if len(dims) != len(shape):
        raise ShardingError(f"'{spec}' has {len(spec.dims)} dims, the value has {len(shape)}")
    whole = []
    for dim, size in zip(dims, shape):
        parts = int(np.prod([axes[axis] for axis in dim.axes], dtype=int))
        if not local and size % parts:
            raise ShardingError(not_divisible(dim, size, axes))
        size = size * parts if local else size
        whole.append(size)
        if dim.name == "...":
            continue
        known, origin = (
            (int(dim.name), "the string") if dim.name.isdigit() else letters.setdefault(dim.name, (size, f"'{spec}'"))
        )
        if known != size:
            raise ShardingError(f"dim {dim} of '{spec}' is {size}, but {dim.name} is {known} in {origin}")
    return tuple(whole)


def not_divisible(dim: Dim, size: int, axes: dict[str, int]) -> str:
    parts = " × ".join(f"{axis}={axes[axis]}" for axis in dim.axes)
    return f"dim {dim.name} has size {size}, which {'axis' if len(dim.axes) == 1 else 'axes'} {parts} cannot divide"


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
    """An element type; `f32['B/d L']` (or `f32[b'B/d L']`, `f32('B/d L')`) is a type of arrays."""

    def __init__(self, name: str, dtype):
        self.name, self.dtype = name, jnp.dtype(dtype)

    def __getitem__(self, spec: str | bytes) -> "ArrayType":
        return ArrayType(self, _parse_type(spec))

    __call__ = __getitem__

    def __repr__(self):
        return self.name


class ComputeType(DType):
    """An element type with one name in the source that is chosen at run time: `act.dtype = jnp.float32` before anything
    is traced."""

    @property
    def dtype(self):
        return self._dtype

    @dtype.setter
    def dtype(self, dtype):
        self._dtype = jnp.dtype(dtype)


@dataclasses.dataclass(frozen=True)
class ArrayType:
    """A type of arrays: an element type and how the dims lie on the mesh."""

    element: DType
    spec: Spec

    def with_leading(self, dims: tuple[Dim, ...]) -> "ArrayType":
        return ArrayType(self.element, Spec((*dims, *self.spec.dims), self.spec.pending))

    def __repr__(self):
        return f"{self.element}['{self.spec}']"

    def __call__(self, *_):  # typing accepts only callables inside Optional[...], tuple[...] and the like
        raise TypeError(f"{self!r} is a type for annotations, it makes no arrays: use shardops.zeros or shardops.full")


f32, bf16 = DType("f32", jnp.float32), DType("bf16", jnp.bfloat16)
i32, u32 = DType("i32", jnp.int32), DType("u32", jnp.uint32)
i8, u8 = DType("i8", jnp.int8), DType("u8", jnp.uint8)
bool_ = DType("bool_", jnp.bool_)


@dataclasses.dataclass(frozen=True)
class Stacked:
    """`Array['layers', Layer]`: a pytree type with leading dims added to every field."""

    dims: tuple[Dim, ...]
    cls: typing.Any

    def __repr__(self):
        return f"Array['{' '.join(map(str, self.dims))}', {getattr(self.cls, '__name__', self.cls)}]"

    def __call__(self, *_):
        raise TypeError(f"{self!r} is a type for annotations")


class Array:
    """`Array['layers', Layer]`: Layer with a leading dim on every field."""

    def __class_getitem__(cls, parameters) -> Stacked:
        spec, inner = parameters
        return Stacked(parse(as_text(spec)).dims, inner)


def pytree_dataclass(cls):
    """A frozen dataclass that JAX sees as a pytree, with field names as keys."""
    cls = dataclasses.dataclass(frozen=True)(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    return jax.tree_util.register_dataclass(cls, data_fields=names, meta_fields=[])


def fields(cls) -> dict[str, typing.Any]:
    """Field names and types of a `pytree_dataclass`."""
    return {field.name: field.type for field in dataclasses.fields(cls)}


def map_type(function, type_, leading: tuple[Dim, ...] = ()):
    """The tree of `function(ArrayType)` for a type that is made of pytree dataclasses, `Array[...]`, tuples and array
    types."""
    if isinstance(type_, ArrayType):
        return function(type_.with_leading(leading))
    if isinstance(type_, Stacked):
        return map_type(function, type_.cls, leading + type_.dims)
    if dataclasses.is_dataclass(type_):
        return type_(**{name: map_type(function, inner, leading) for name, inner in fields(type_).items()})
    if typing.get_origin(type_) is tuple:
        return tuple(map_type(function, inner, leading) for inner in typing.get_args(type_))
    if typing.get_origin(type_) is dict or type_ in (None, type(None)):
        raise ShardingError(f"{type_}: name the leaves in a pytree_dataclass")
    raise ShardingError(
        f"{type_!r} is no type of sharded arrays: use f32['...'], Array['...', cls], tuple[...] or a pytree_dataclass of them"
    )


def make_partition_specs(cls):
    """The same tree of `PartitionSpec`."""
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
    """The same tree of `NamedSharding` on the current mesh.

    Raises:
      ShardingError: without a mesh, or if a type's axes are not in the mesh's order.
    """
    mesh = current_mesh()
    if mesh is None:
        raise ShardingError("make_shardings needs a mesh: call it under `with jax.set_mesh(mesh):`")
    map_type(lambda array: array.spec.require_mesh_order(mesh.axis_names), cls)
    return place(mesh, make_partition_specs(cls))


# -- Checking values ---------------------------------------------------------------------------------------------------
def check(dtype, shape_spec: str | bytes | Spec, value, *, what: str = "the annotation"):
    """Checks that an array is of the type `dtype[shape_spec]`; returns it.

    Inside `shard_map`: element type, sizes against the scope's letters, and, while a function is being checked, how it
    lies on the mesh. Outside: the actual sharding of arrays that are on devices.

    Raises:
      ShardingError: where it is not so.
    """
    spec = shape_spec if isinstance(shape_spec, Spec) else _parse_type(shape_spec)
    try:
        if not hasattr(value, "dtype") or not hasattr(value, "shape"):
            raise ShardingError(f"expected an array, got {type(value).__name__}")
        wanted = dtype.dtype if isinstance(dtype, DType) else jnp.dtype(dtype)
        if value.dtype != wanted:
            raise ShardingError(f"the element type is {value.dtype}")
        axes = mapped_axes()
        if axes:
            bind(spec, value.shape, axes, letters_of_scope())
        else:
            _check_outside(spec, value)
    except ShardingError as error:
        raise ShardingError(f"{error}\n  {_against(dtype, spec, value, what)}\n  at {users_line()}") from None
    if _check.checking() is None:
        return value

    context = _against(dtype, spec, value, what)  # now: the walk comes when the trace is over

    def rule(states):
        try:
            require(spec, states[0], strict=False)
        except ShardingError as error:
            raise ShardingError(f"{error}\n  {context}") from None
        return [State.of(spec)]

    return _check.mark_value(rule, value)


def _against(dtype, spec, value, what) -> str:
    shape = f"{value.dtype}{list(value.shape)}" if hasattr(value, "dtype") else type(value).__name__
    axes = mapped_axes()
    where = "on each device" if axes else "globally"
    if not axes and (mesh := current_mesh()) is not None:
        axes = dict(mesh.shape)
    return f"against {what}: {dtype}['{spec}'], value {shape} {where}, {mesh_text(axes)}"


def _check_outside(spec: Spec, value):
    if spec.pending:
        raise ShardingError(f"'{spec}' is pending, which has a meaning only inside shard_map")
    mesh = current_mesh()
    if mesh is None:
        mesh = getattr(getattr(value, "sharding", None), "mesh", None)
    if mesh is not None and mesh.axis_names:
        axes = dict(mesh.shape)
    else:  # no mesh to compare with: any order of axes will do
        axes = {axis: 1 for dim in spec.dims for axis in dim.axes}
    bind(spec, value.shape, axes, letters_of_scope(), local=False)
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
        raise ShardingError(
            f"the array lies as {lies}, the type says {wanted.spec}: place it with jax.device_put(x, make_shardings(...))"
        )


def check_tree(type_, value, leading: tuple[Dim, ...] = (), *, what: str = "the annotation"):
    """Checks a value against a type made of array types; returns it. Raises `ShardingError` with the field's name."""
    if isinstance(type_, ArrayType):
        array = type_.with_leading(leading)
        return check(array.element, array.spec, value, what=what)
    if isinstance(type_, Stacked):
        return check_tree(type_.cls, value, leading + type_.dims, what=what)
    if typing.get_origin(type_) is tuple:
        items = typing.get_args(type_)
        if not isinstance(value, tuple) or len(value) != len(items):
            got = f"{len(value)} items" if isinstance(value, tuple) else type(value).__name__
            raise ShardingError(
                f"expected a tuple of {len(items)} items, got {got}\n  against {what}\n  at {users_line()}"
            )
        return tuple(
            check_tree(inner, item, leading, what=f"item {index} of {what}")
            for index, (inner, item) in enumerate(zip(items, value))
        )
    if not isinstance(value, type_):
        raise ShardingError(
            f"expected {type_.__name__}, got {type(value).__name__}\n  against {what}\n  at {users_line()}"
        )
    checked = {}
    for name, inner in fields(type_).items():
        checked[name] = getattr(value, name)
        if is_array_type(inner):
            checked[name] = check_tree(inner, checked[name], leading, what=f"{what}, {type_.__name__}.{name}")
    return type_(**checked)


def is_array_type(type_) -> bool:
    """Whether `check_tree` takes it: an array type, `Array[...]`, or a pytree dataclass."""
    if isinstance(type_, (ArrayType, Stacked)):
        return True
    return (
        isinstance(type_, type)
        and dataclasses.is_dataclass(type_)
        and any(is_array_type(inner) for inner in fields(type_).values())
    )


def register_with_typeguard():
    """Makes `typeguard.typechecked` check annotations like `f32[b'B/d L']` (bytes: typeguard evaluates strings)."""
    import typeguard

    def lookup(origin, args, extras):
        if not is_array_type(origin):
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


# -- typed_shard_map ---------------------------------------------------------------------------------------------------
class typed_shard_map:
    """Maps a function over the mesh as its annotations say, after checking that what they say is so.

        @typed_shard_map
        def step(weights: Weights, batch: f32['B/d L']) -> tuple[Weights, f32['']]: ...

    The mesh is the current one (`with jax.set_mesh(mesh):`). Annotations give `shard_map` its specs. The check traces
    the function once more, abstractly, at each call: call it inside `jax.jit`, so that this happens once per
    compilation. An eager call is checked and compiled anew each time.

    Args:
      function: its arguments and result are annotated with types of sharded arrays.
      check: False leaves out the check.
    Raises:
      ShardingError: without a mesh, for a missing annotation, and for every claim that is not so, with its line.
    """

    def __init__(self, function, check: bool = True):
        self.function, self.checked = function, check
        functools.update_wrapper(self, function)
        self.signature = inspect.signature(function, eval_str=True)

    def __call__(self, *args, **kwargs):
        mesh = current_mesh()
        if mesh is None:
            raise ShardingError(
                f"typed_shard_map needs a mesh: call {self.name} under `with jax.set_mesh(mesh):`\n  at {users_line()}"
            )
        names, types, values = self._bind(args, kwargs)
        self._global(mesh, names, types, values)
        if self.checked:
            self.check(mesh, *args, **kwargs)
        body = functools.partial(self._body, names, types)
        return shard_map(body, mesh, tuple(map(make_partition_specs, types)), make_partition_specs(self._result_type))(
            *values
        )

    def check(self, mesh, *args, **kwargs) -> int:
        """Checks the function for arguments of these global shapes (arrays or `ShapeDtypeStruct`) on a mesh, which may
        be abstract.

        Returns the number of claims that were proved. Nothing runs and no device is used.
        """
        axes = dict(mesh.shape)
        names, types, values = self._bind(args, kwargs)
        in_specs = self._global(mesh, names, types, values)

        def localize(spec, leaf):
            parts = [int(np.prod([axes[axis] for axis in dim.axes], dtype=int)) for dim in spec.dims]
            return jax.ShapeDtypeStruct(tuple(size // part for size, part in zip(leaf.shape, parts)), leaf.dtype)

        leaves, tree = jax.tree.flatten(values)
        local_values = jax.tree.unflatten(tree, map(localize, in_specs, leaves))
        return _check.verify(functools.partial(self._body, names, types), axes, local_values, in_specs)

    def _global(self, mesh, names, types, values) -> list[Spec]:
        """Checks the arguments' global shapes and the spelling of all types; returns the types of the arguments'
        leaves."""
        axes, letters, specs = dict(mesh.shape), {}, []

        def check_leaf(array, leaf, name):
            specs.append(array.spec)
            try:
                if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
                    raise ShardingError(f"expected an array, got {type(leaf).__name__}")
                if leaf.dtype != array.element.dtype:
                    raise ShardingError(f"the element type is {leaf.dtype}")
                make_partition_specs(array)  # refuses pending types
                bind(array.spec, leaf.shape, axes, letters, local=False)
            except ShardingError as error:
                got = f"{leaf.dtype}{list(leaf.shape)} globally" if hasattr(leaf, "dtype") else type(leaf).__name__
                raise ShardingError(
                    f"{error}\n  in argument {name} of {self.name}: {array!r}, value {got}, {mesh_text(axes)}\n  at {users_line()}"
                ) from None

        for name, type_, value in zip(names, types, values):
            wanted = map_type(lambda array: array, type_)
            if jax.tree.structure(wanted) != jax.tree.structure(value):
                got = type(value).__name__ if jax.tree.structure(value).num_nodes == 1 else jax.tree.structure(value)
                raise ShardingError(f"argument {name} of {self.name} is no {type_!r} but {got}\n  at {users_line()}")
            jax.tree.map(functools.partial(check_leaf, name=name), wanted, value)
        try:
            for spec in jax.tree.leaves(
                map_type(lambda array: array.spec, self._result_type), is_leaf=lambda x: isinstance(x, Spec)
            ):
                spec.partition_spec, spec.require_mesh_order(axes)
        except ShardingError as error:
            raise ShardingError(
                f"{error}\n  in the result of {self.name}, {mesh_text(axes)}\n  at {users_line()}"
            ) from None
        return specs

    @property
    def name(self) -> str:
        return getattr(self._unwrapped, "__name__", "the function")

    @property
    def _unwrapped(self):
        return self.function.func if isinstance(self.function, functools.partial) else self.function

    @property
    def _result_type(self):
        result = self.signature.return_annotation
        if result is inspect.Signature.empty:
            raise ShardingError(f"typed_shard_map needs a return annotation on {self.name}")
        return result

    def _bind(self, args, kwargs):
        arguments = self.signature.bind(*args, **kwargs).arguments
        for name in arguments:
            parameter = self.signature.parameters[name]
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise ShardingError(f"typed_shard_map needs named arguments, {self.name} takes {parameter}")
            if parameter.annotation is parameter.empty:
                raise ShardingError(f"typed_shard_map needs an annotation on argument {name} of {self.name}")
        return (
            list(arguments),
            [self.signature.parameters[name].annotation for name in arguments],
            list(arguments.values()),
        )

    def _body(self, names, types, *args):
        code = getattr(inspect.unwrap(self._unwrapped), "__code__", None)
        place = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
        with Scope():
            args = [
                check_tree(type_, value, what=f"argument {name} of {self.name}")
                for name, type_, value in zip(names, types, args)
            ]
            bound = inspect.BoundArguments(self.signature, dict(zip(names, args)))
            result = self.function(*bound.args, **bound.kwargs)
            return check_tree(self._result_type, result, what=f"the result of {self.name}{place}")
