"""`typed_shard_map`: a function over the mesh as its annotations say, checked before it runs."""

import functools
import inspect

import jax

from shardlib.mesh import all_mapped_axes, current_mesh, shard_map
from shardlib.places import users_line
from shardlib.proof.verify import verify
from shardlib.shardtypes import Scope, check_tree, make_partition_specs, map_type, mesh_text
from shardlib.spec import ShardingError, Spec, located
from shardlib.typed import annotations_read, typed


class typed_shard_map:
    """Maps a function over the mesh as its annotations say, after proving them.

        @typed_shard_map
        def step(weights: Weights, batch: f32['B/d L']) -> tuple[Weights, f32['']]: ...

    The mesh is the current one (`with jax.set_mesh(mesh):`). Annotations give `shard_map` its specs. The check traces
    the function once more, abstractly, at each call: call it inside `jax.jit`, so that this happens once per
    compilation. An eager call is checked and compiled anew each time.

    Args:
      function: its arguments and result are annotated with types of sharded arrays; annotations within are read too,
        as under `typed`.
      check: False leaves out the check.
    Raises:
      ShardingError: without a mesh, for a missing annotation, and for every claim that is not so, with its line.
    """

    def __init__(self, function, check: bool = True):
        self.function, self.checked = _read(function), check
        functools.update_wrapper(self, function)
        self.signature = inspect.signature(function, eval_str=True)
        function = function.func if isinstance(function, functools.partial) else function
        self.name = getattr(function, "__name__", "the function")
        code = getattr(inspect.unwrap(function), "__code__", None)
        self.place = f"{code.co_filename}:{code.co_firstlineno}" if code else "unknown line"

    def __call__(self, *args, **kwargs):
        if all_mapped_axes():
            what = f"{self.name} is mapped over the mesh, inside of a function that is"
            raise ShardingError(f"{what}\n  fix: call it without typed_shard_map\n  at {users_line()}")
        mesh = current_mesh()
        if mesh is None:
            what = f"typed_shard_map needs a mesh: call {self.name} under `with jax.set_mesh(mesh):`"
            raise ShardingError(f"{what}\n  at {users_line()}")
        body, types, values = self._bind(mesh, args, kwargs)
        if self.checked:
            self.check(mesh, *args, **kwargs)
        in_specs, out_specs = tuple(map(make_partition_specs, types)), make_partition_specs(self._result_type)
        return shard_map(body, mesh, in_specs, out_specs)(*values)

    def check(self, mesh, *args, **kwargs) -> int:
        """Checks the function for arguments of these global shapes (arrays or `ShapeDtypeStruct`) on a mesh, which may
        be abstract.

        Returns the number of claims that were proved. Nothing runs and no device is used.
        """
        body, types, values = self._bind(mesh, args, kwargs)
        in_specs = [spec for type_ in types for spec in _specs(type_)]
        return verify(body, dict(mesh.shape), values, in_specs, self.place, annotations_read)

    @property
    def _result_type(self):
        result = self.signature.return_annotation
        if result is inspect.Signature.empty:
            raise ShardingError(f"typed_shard_map needs a return annotation on {self.name}")
        return result

    def _bind(self, mesh, args, kwargs):
        """The function of what one device holds, the arguments' types, and the arguments; checks their global shapes
        and all types' spelling."""
        arguments = self.signature.bind(*args, **kwargs).arguments
        for name in arguments:
            parameter = self.signature.parameters[name]
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise ShardingError(f"typed_shard_map needs named arguments, {self.name} takes {parameter}")
            if parameter.annotation is parameter.empty:
                raise ShardingError(f"typed_shard_map needs an annotation on argument {name} of {self.name}")
        types, axes = {name: self.signature.parameters[name].annotation for name in arguments}, dict(mesh.shape)
        with Scope():
            for name, value in arguments.items():
                what = f"argument {name} of {self.name}"
                check_tree(types[name], value, what=what, whole_on=axes)
                if len(_specs(types[name])) != len(jax.tree.leaves(value)):
                    text = f"{what} stands for a matrix with several arrays, and its type says how one lies"
                    fix = "pass the arrays, and make the products.Adapted or Quantized inside"
                    raise ShardingError(f"{text}\n  fix: {fix}\n  at {users_line()}")
        with located(lambda: f"  in the result of {self.name}, {mesh_text(axes)}\n  at {users_line()}"):
            for spec in _specs(self._result_type):
                spec.partition_spec, spec.require_mesh_order(axes)
        return functools.partial(self._body, types), list(types.values()), list(arguments.values())

    def _body(self, types, *args):
        with Scope():
            args = {
                name: check_tree(type_, value, what=f"argument {name} of {self.name}")
                for (name, type_), value in zip(types.items(), args)
            }
            bound = inspect.BoundArguments(self.signature, args)
            result = self.function(*bound.args, **bound.kwargs)
            return check_tree(self._result_type, result, what=f"the result of {self.name} ({self.place})")


def _specs(type_) -> list[Spec]:
    """The types of the leaves."""
    return jax.tree.leaves(map_type(lambda array: array.spec, type_))


def _read(function):
    """The function, or that of a partial, under `typed` if it is not already."""
    if isinstance(function, functools.partial):
        return functools.partial(_read(function.func), *function.args, **function.keywords)
    return typed(function) if inspect.isfunction(function) and not hasattr(function, "__wrapped__") else function
