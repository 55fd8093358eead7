"""Products with a matrix that is not an array: with an adapter, of 8-bit integers, of 8-bit floats.

    y = product('B/d L F/t, M F/t -> B/d L M +t', h, w_down)

A layer that multiplies by `product` is the same whatever its matrices are.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from shardlib import shardops
from shardlib.shardops import SAVED
from shardlib.shardtypes import StandIn, i8
from shardlib.spec import Dim, Spec, as_text, parse_operation

# -- What may stand for a matrix ---------------------------------------------------------------------------------------


@functools.partial(jax.tree_util.register_dataclass, data_fields=["base", "a", "b"], meta_fields=["scale", "drop"])
@dataclasses.dataclass(frozen=True)
class Adapted(StandIn):
    """A matrix, of the type of `base`, to which `scale` · a · b is added, of low rank (Hu et al. 2021)."""

    base: jax.Array
    a: jax.Array  # the dims that a product contracts, then the rank
    b: jax.Array  # the rank, then the other dims
    scale: float
    drop: Callable[[str, Any], Any] | None = None  # dropout of what is multiplied with a: drop('B/d L M', x)

    typed_field = "base"


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values", "scale"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Quantized(StandIn):
    """8-bit integers with a factor for each column: values · scale. A type is said of `values`. It has no gradient."""

    values: jax.Array  # i8
    scale: jax.Array  # f32, of the dims that a product keeps, in their order

    typed_field, element = "values", i8


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values", "scale"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Float8(StandIn):
    """A matrix, values · scale, whose products are of 8-bit numbers: `all_gather` sends `values` in 8 bits, `product`
    rounds both operands. Its gradient is that of the matrix as it is, unrounded. `float8_scale` finds the scale."""

    values: jax.Array
    scale: jax.Array

    typed_field, sent_as = "values", jnp.float8_e4m3fn


# -- Products ----------------------------------------------------------------------------------------------------------
def product(spec: str | bytes, x, w, **jnp_kwargs):
    """`einsum_unreduced(spec, x, w)`; of a matrix with an adapter the product with its sum.

        product('B/d L F/t, M F/t -> B/d L M +t', h, w_down)

    For an adapted w_down that is, with the adapter's rank, the two thin products

        thin = shardops.einsum_unreduced('B/d L F/t, F/t rank -> B/d L rank +t', h, w_down.a)
        change = shardops.einsum_unreduced('B/d L rank +t, rank M -> B/d L M +t', thin, w_down.b)

    besides the one with `base`: they join its pending sum, so no more is sent. Dims that all three have, as experts,
    stay in front in a and in b. The layer that calls this is the same with adapters and without.

    With `Quantized` it multiplies by the 8-bit values in x's type, then by the factor of each column in float32. With
    `Float8` it multiplies 8-bit numbers and sums in float32, with a scale for each of x's rows that the result has; its
    gradient's products are in x's type.

    Sends: nothing, except for `Float8` if x's contracted dims are split: an all-reduce of the largest of each row."""
    if isinstance(w, Float8):
        return _product_of_float8(spec, x, w, **jnp_kwargs)
    if isinstance(w, Quantized):
        recipe = parse_operation(as_text(spec), 2)
        kept = [name for name in recipe.operands[1].names if name in recipe.result.names]
        y = shardops.einsum_unreduced(spec, x, w.values.astype(x.dtype), **jnp_kwargs)
        axes = [axis for axis, name in enumerate(recipe.result.names) if name not in kept]
        return (y.astype(jnp.float32) * jnp.expand_dims(w.scale, axes)).astype(y.dtype)
    if not isinstance(w, Adapted):
        return shardops.einsum_unreduced(spec, x, w, **jnp_kwargs)
    recipe = parse_operation(as_text(spec), 2)
    (of_x, of_w), result = recipe.operands, recipe.result
    a, b = low_rank(of_w, [name for name in of_w.names if name not in result.names], of_x.names)
    kept = (dim for dim in of_x.dims if dim.name not in a.names or dim.name in b.names)
    low = Spec((*kept, Dim("rank")), result.pending)
    dropped = x if w.drop is None else w.drop(str(of_x), x)
    thin = shardops.einsum_unreduced(f"{of_x}, {a} -> {low}", dropped, w.a)
    thin = checkpoint_name(thin, SAVED)  # spares the product with a
    change = shardops.einsum_unreduced(f"{low}, {b} -> {result}", thin, w.b, x_is_thin=True, **jnp_kwargs)
    return shardops.einsum_unreduced(spec, x, w.base, **jnp_kwargs) + w.scale * change


def low_rank(w: Spec, contracted, of_x=()) -> tuple[Spec, Spec]:
    """The types of an adapter's a and b for a matrix of this type.

    Args:
      contracted: names of the dims that a product takes the sum over.
      of_x: names of the other operand's dims: what w shares with it, uncontracted, both parts have.
    """
    both = tuple(dim for dim in w.dims if dim.name in of_x and dim.name not in contracted)
    summed = tuple(dim for dim in w.dims if dim.name in contracted)
    rest = tuple(dim for dim in w.dims if dim not in both and dim not in summed)
    return Spec((*both, *summed, Dim("rank"))), Spec((*both, Dim("rank"), *rest))


def float8_scale(spec: str | bytes, x):
    """For each element of the result, in float32, the power of two by which the largest of x that belongs to it is
    192 to 384: float8_e4m3fn has numbers up to 448 (Micikevicius et al. 2022, section 3). Dividing by it is exact.

        float8_scale('layers M/d F/t -> layers', w)

    Sends: as `pmax`.
    """
    largest = shardops.pmax(spec, jnp.abs(lax.stop_gradient(x))).astype(jnp.float32)
    return lax.reduce_precision(jnp.maximum(largest, 1e-30), exponent_bits=8, mantissa_bits=0) / 256


def _product_of_float8(spec, x, w: Float8, **jnp_kwargs):
    """A scale for each row and one for the matrix: both leave the sum over the contracted dims."""
    (of_x, _), result = (recipe := parse_operation(as_text(spec), 2)).operands, recipe.result
    kept = [dim for dim in of_x.dims if dim.name in result.names]
    scale = float8_scale(f"{of_x} -> {Spec(tuple(kept))}", x)
    if any(dim.axes for dim in of_x.dims if dim not in kept):
        scale = checkpoint_name(scale, SAVED)  # 4 bytes a row, spares sending it again

    def wide(names):
        rows = {dim.name for dim in kept}
        return jnp.expand_dims(scale, [axis for axis, name in enumerate(names) if name not in rows])

    x = x * (1 / wide(of_x.names)).astype(x.dtype)
    y = shardops.einsum_unreduced(
        spec, x, w.values, rounded_to=jnp.float8_e4m3fn, **{**jnp_kwargs, "preferred_element_type": jnp.float32}
    )
    return (y * (wide(result.names) * w.scale)).astype(jnp_kwargs.get("preferred_element_type", x.dtype))
