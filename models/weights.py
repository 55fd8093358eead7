"""A family's weights as a table, one line each; types, first values, gathers and published names follow from it.

    TABLE = Table({
        'embed': matrix('V/t M/w -> V/t M', 'M', 'model.embed_tokens.weight', 'V M'),
        'transformer': {     # a stack of layers
            'ln1': exact('M/w/t -> M', 1, 'model.layers.{}.input_layernorm.weight', 'M'),
            'w_kv': matrix('2 M/w K/t D -> M K/t D', 'M', ('….k_proj.weight', '….v_proj.weight'), '(K D) M'),
            'b_o': bias('M/w/t -> M', 0, '….o_proj.bias', 'M', lambda model: model.has_biases),
        },
    })
    Layer, Weights, Gathered, Ends = TABLE.types
    init, gather_layer, gather_ends, published = TABLE.functions

A line says how the weight lies at rest -> in use, which is the string of its all-gather; its first values, a constant
or the letters of a matrix's fan-in; the published tensor, or the tensors that it is a stack of, and how one lies; and
which models have it. Weights with M, F or V are divided over d, c, e and t at rest; others are small, and lie as in
use: 'D'. `w_kv`, a stack of 2, is gathered as `w_k` and `w_v`: a result whose first dim were the 2 would have to be
transposed.
"""

import functools
import math
import pathlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from jax_extra import fold_in_str
from shardlib import shardops
from shardlib.places import is_users, users_line
from shardlib.products import Float8, float8_scale
from shardlib.shardtypes import Array, ArrayType, ComputeType, DType, Scope, check_tree, f32, pytree_dataclass
from shardlib.spec import ShardingError
from train import act

# The type of matrices at rest: float32, or bfloat16 where they are not trained.
stored = ComputeType('stored', jnp.float32)
# The field of `Model` that is a letter's size.
SIZES = dict(M='d_model', Q='n_q_per_kv', K='n_kv', D='d_head', V='vocab', F='d_ff', P='positions')
Ready = Mapping[str, jax.Array]  # what `Table.of_all_layers` has gathered of a layer
NOTHING: Ready = MappingProxyType({})


def table_line() -> str:
    """'file:line' of the entry of a family's table that is being made; inside a function, of the caller's line."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != '<module>':
        frame = frame.f_back
    is_table = frame is not None and is_users(frame.f_code.co_filename)
    return f'{frame.f_code.co_filename}:{frame.f_lineno}' if is_table else users_line()


@dataclass(frozen=True)
class Weight:
    """A line of the table. `matrix`, `bias` and `exact` give the two types."""

    at_rest: DType
    in_use: DType
    lies: str  # 'M/w F/t -> M F/t'
    first: Any  # first values: a number, one for each of the first dim, or the letters of the fan-in
    published: Any  # a name, or several that the first dim is a stack of; or a function of the model; '': not published
    layout: Any  # the published tensor's dims: '(K Q D) M'; or a function of the model
    only_if: Callable[[Any], bool] = lambda model: True
    plus: float = 0.0  # added where it is used
    scale: Callable[[Any], float] = lambda model: 1.0  # factor of first values that are drawn
    line: str = field(default_factory=table_line, compare=False)  # its place in the table, for messages and the ledger

    @property
    def rest(self) -> str:
        return self.lies.partition(' -> ')[0]

    @property
    def use(self) -> str:
        return self.lies.partition(' -> ')[2]

    @property
    def type_at_rest(self) -> ArrayType:
        array = self.typed(self.at_rest, self.rest)
        missing = [axis for axis in 'dcet' if axis not in array.spec.split]
        if missing and {'M', 'F', 'V'} & set(letters(self.rest)):
            fix = "split a dim over w, or experts' over v, and what is no matrix over t too"
            error = ShardingError(f"'{self.rest}' lies whole along {', '.join(missing)}: {fix}")
            raise error.extended(f'  at {self.line}')
        return array

    @property
    def type_in_use(self) -> ArrayType:
        return self.typed(self.in_use, self.use)

    def typed(self, element: DType, dims: str) -> ArrayType:
        try:
            return element[dims]
        except ShardingError as error:
            raise error.extended(f"  for a weight that lies '{self.lies}'\n  at {self.line}") from None

    @property
    def is_optional(self) -> bool:
        return self.only_if is not Weight.only_if

    def parts(self, name: str) -> dict[str, int | None]:
        """The names under which it is gathered; of a stack, each with its number there."""
        if self.rest[0].isdigit() and not self.use[0].isdigit():
            stem, _, letters = name.rpartition('_')
            return {f'{stem}_{letter}': number for number, letter in enumerate(letters)}
        return {name: None}

    def gathered(
        self, name: str, w: jax.Array | None, reduce_dtype: str, ready: jax.Array | None = None
    ) -> dict[str, Any]:
        """The weight in use, by name; gradients of matrices and biases travel in reduce_dtype.

        ready: what `Table.of_all_layers` has for it: the weight itself, if w is None; for a matrix the scale of
          `Float8`.
        """
        options = {} if self.in_use is f32 else {'dtype': self.in_use, 'reduce_dtype': reduce_dtype}
        parts = self.parts(name)
        if w is None:
            return dict.fromkeys(parts, ready)
        with jax.named_scope(f'{name}={pathlib.Path(self.line).name}'):  # the ledger counts it at this line
            return {part: self._in_use(w, number, options, ready) for part, number in parts.items()}

    def _in_use(self, w: jax.Array, number: int | None, options: dict[str, Any], scale: jax.Array | None) -> Any:
        """The weight, or the part of a stack with this number, gathered."""
        string, one = (self.lies, w) if number is None else (self.lies.partition(' ')[2], w[number])
        one = one if scale is None else Float8(one / scale, scale)
        used = one.astype(self.in_use.dtype) if self.rest == self.use else shardops.all_gather(string, one, **options)
        return used + self.plus if self.plus else used

    def drawn(self, key: str, model: Any, layers: tuple[int, ...], size: Callable[[str], int], seed) -> jax.Array:
        shape = *layers, *map(size, letters(self.rest))
        if not isinstance(self.first, str):
            first = jnp.asarray(self.first, jnp.float32)
            return jnp.broadcast_to(first.reshape(*first.shape, *[1] * (len(shape) - len(layers) - first.ndim)), shape)
        fan_in = math.prod(map(size, self.first.split()))
        # 0.8796 is the standard deviation of a normal distribution that is cut at 2.
        factor = self.scale(model) / 0.87962566 / fan_in**0.5
        return jax.random.truncated_normal(fold_in_str(jax.random.key(seed), key), -2, 2, shape, jnp.float32) * factor


matrix = functools.partial(Weight, stored, act)  # used in the type of activations
bias = functools.partial(Weight, f32, act)
exact = functools.partial(Weight, f32, f32)  # norms, routers


@pytree_dataclass
class Biased:
    """An unembedding with a bias: `Ends.unembed` of a family whose table has `unembed_bias`."""

    table: act['V/t M']
    bias: f32['V/t']

    def astype(self, dtype) -> 'Biased':
        """The table in this type, the bias in float32."""
        return Biased(self.table.astype(dtype), self.bias)


def letters(dims: str) -> list[str]:
    """Without axes: 'M/w F/t' has M and F."""
    return [dim.partition('/')[0] for dim in dims.split()]


def tree_type(name: str, doc: str, types: dict[str, Any], optional: set[str]) -> type:
    """A pytree_dataclass; optional fields may be None, which they are by default."""
    members = {key: field(default=None, kw_only=True) for key in optional}
    annotations = {key: type_ | None if key in optional else type_ for key, type_ in types.items()}
    return pytree_dataclass(type(name, (), {'__doc__': doc, '__annotations__': annotations, **members}))


class Table:
    """A family's weights. `types` and `functions` are the types and functions of a family (models/layers.py)."""

    def __init__(self, table: dict[str, Any], sizes: dict[str, Any] = {}, counts: dict[str, str] = {}):  # noqa: B006
        """
        Args:
          table: by name `Weight`s, and stacks of layers, which are such tables.
          sizes: further letters, as in SIZES; or functions of the model.
          counts: fields of `Model` with the number of layers of each stack; `layers` by default.
        """
        self.table, self.sizes, self.counts = table, SIZES | sizes, counts
        self.stacks = {name: stack for name, stack in table.items() if isinstance(stack, dict)}
        self.ends = {name: weight for name, weight in table.items() if name not in self.stacks}
        self.layer = {name: weight for stack in self.stacks.values() for name, weight in stack.items()}
        everywhere = set.intersection(*map(set, self.stacks.values()))
        optional = {name for name, weight in self.layer.items() if weight.is_optional or name not in everywhere}
        of_ends = {name for name, weight in self.ends.items() if weight.is_optional}

        self.Layer = tree_type('Layer', 'At rest.', {x: w.type_at_rest for x, w in self.layer.items()}, optional)
        types = {
            name: Array[counts.get(name, 'layers'), self.Layer] if name in self.stacks else weight.type_at_rest
            for name, weight in table.items()
        }
        self.Weights = tree_type('Weights', 'At rest.', types, of_ends)

        parts = {part: (weight, name) for name, weight in self.layer.items() for part in weight.parts(name)}
        types = {part: weight.type_in_use for part, (weight, _) in parts.items()}
        doc = 'What a layer multiplies with; a matrix may be `Adapted`.'
        self.Gathered = tree_type('Gathered', doc, types, {x for x, (_, name) in parts.items() if name in optional})
        # How the heads of q lie: 'Q K/t D', or 'K/t D' if no heads share keys.
        self.Gathered.heads = self.layer['w_o'].use.removeprefix('M ')

        unembed = Biased if 'unembed_bias' in self.ends else self.ends['embed'].type_in_use
        types = {name: weight.type_in_use for name, weight in self.ends.items() if name != 'unembed_bias'}
        doc = 'What stands before the first layer and after the last, gathered.'
        self.Ends = tree_type('Ends', doc, types | {'unembed': unembed}, of_ends - {'unembed'})

    @property
    def types(self) -> tuple[type, ...]:
        return self.Layer, self.Weights, self.Gathered, self.Ends

    @property
    def functions(self) -> tuple[Callable, ...]:
        return self.init, self.gather_layer, self.gather_ends, self.published

    @property
    def contracted(self) -> dict[str, list[str]]:
        """The layers' matrices, by the names that they are gathered under: the dims that a product sums over."""
        matrices = [(name, w) for name, w in self.layer.items() if w.at_rest is stored and isinstance(w.first, str)]
        return {part: w.first.split() for name, w in matrices for part in w.parts(name)}

    def size(self, model: Any, letter: str) -> int:
        where = self.sizes.get(letter)
        return int(letter) if letter.isdigit() else where(model) if callable(where) else getattr(model, where)

    def init(self, model: Any, seed: jax.Array) -> Any:
        """The first `Weights`; train.py's model has train.py's for that seed."""

        def draw(weight: Weight, key: str, layers: tuple[int, ...] = ()):
            size = functools.partial(self.size, model)
            return weight.drawn(key, model, layers, size, seed) if weight.only_if(model) else None

        weights = {name: draw(weight, name) for name, weight in self.ends.items()}
        for stack, table in self.stacks.items():
            prefix = '' if len(self.stacks) == 1 else f'{stack}/'
            count = (getattr(model, self.counts.get(stack, 'layers')),)
            weights[stack] = self.Layer(**{x: draw(weight, prefix + x, count) for x, weight in table.items()})
        return self.Weights(**weights)

    def gather_layer(self, w: Any, reduce_dtype: str = 'float32', ready: Ready = NOTHING) -> Any:
        """`Gathered` of a `Layer`: an all-gather of each of its weights, of matrices and biases in act's type. ready:
        the layer's part of `of_all_layers`."""
        return self._gathered(self.layer, self.Gathered, w, reduce_dtype, ready)

    def of_all_layers(self, stack: str, layers: Any, reduce_dtype: str, fp8: bool) -> tuple[Any, dict[str, jax.Array]]:
        """A stack without the norms and biases of d_model; and these by name, gathered: they are small, and those of
        all layers travel together. With fp8 also each matrix's scale for each layer: 4 bytes, all-reduced."""
        ready: dict[str, jax.Array] = {}
        with Scope():
            for name, weight in self.stacks[stack].items():
                w = getattr(layers, name)
                if w is None:
                    continue
                if weight.rest.endswith('M/w/t'):
                    of_stack = replace(weight, lies=f'layers {weight.rest} -> layers {weight.use}')
                    ready |= of_stack.gathered(name, w, reduce_dtype)
                    layers = replace(layers, **{name: None})
                elif fp8 and weight.at_rest is stored:
                    ready[name] = float8_scale(f'layers {weight.rest} -> layers', w)
        return layers, ready

    def gather_ends(self, weights: Any, reduce_dtype: str = 'float32') -> Any:
        """`Ends` of `Weights`; without `unembed` they have the embedding there."""
        return self._gathered(self.ends, self.Ends, weights, reduce_dtype)

    def gather_first(self, weights: Any, reduce_dtype: str) -> Any:
        """`gather_ends` with the embedding in place of any unembedding: all that the layers need before them."""
        return self.gather_ends(replace(weights, unembed=None) if 'unembed' in self.ends else weights, reduce_dtype)

    def gather_unembed(self, weights: Any, ends: Any, reduce_dtype: str) -> Any:
        """`Ends.unembed`, gathered after the layers: its gradient, 4VM/t bytes, is scattered before theirs."""
        table_at_rest = getattr(weights, 'unembed', None)
        if table_at_rest is None:
            return ends.unembed
        with Scope():
            table = self.ends['unembed'].gathered('unembed', table_at_rest, reduce_dtype)['unembed']
        return Biased(table, ends.unembed.bias) if isinstance(ends.unembed, Biased) else table

    def _gathered(
        self, table: dict[str, Weight], type_: type, w: Any, reduce_dtype: str, ready: Ready = NOTHING
    ) -> Any:
        used = {}
        with Scope():  # letters are the table's
            for name, weight in table.items():
                try:
                    used |= weight.gathered(name, getattr(w, name), reduce_dtype, ready.get(name))
                except ShardingError as error:
                    raise error.extended(f"  for the weight {name}, '{weight.lies}'\n  at {weight.line}") from None
            if table is self.ends:
                used['unembed'] = used['embed'] if used.get('unembed') is None else used['unembed']
            if 'unembed_bias' in used:
                used['unembed'] = Biased(used['unembed'], used.pop('unembed_bias'))
            return check_tree(type_, type_(**used))

    def published(self, model: Any) -> dict[str, list[tuple[str, str]]]:
        """The published tensors that make up each weight, and the layout of one there -> here."""
        rows = {}
        for stack, table in {'': self.ends, **self.stacks}.items():
            for name, weight in table.items():
                names, layout = (x(model) if callable(x) else x for x in (weight.published, weight.layout))
                if names and weight.only_if(model):
                    names = names if isinstance(names, tuple) else (names,)
                    ours = ['N' if letter.isdigit() else letter for letter in letters(weight.rest)]
                    ours = ours[1:] if len(names) > 1 else ours
                    ours = ours[names[0].count('{}') - 1 :] if stack else ours  # a second {} is the first dim's number
                    key = f'{stack}/{name}' if stack else name
                    rows[key] = [(tensor, f'{layout} -> {" ".join(ours)}') for tensor in names]
        return rows


def q_scale(model: Any) -> float:
    """The scale of w_q's first values. Attention's logits get variance 1, wherever their factor is applied."""
    return model.d_head**-0.5 / model.logits_scale


def of_each_head(model: Any) -> bool:
    return model.qk_norm == 'head'


def of_all_heads(model: Any) -> bool:
    return model.qk_norm == 'all'


def qk_norms(attention: str, plus: float = 0.0) -> dict[str, Weight]:
    """Scales of RMSNorm of q and k, per head or over all heads."""
    q, k = [f'{attention}.{x}_norm.weight' for x in 'qk']
    return {
        'q_norm': exact('D -> D', 1 - plus, q, 'D', of_each_head, plus),
        'k_norm': exact('D -> D', 1 - plus, k, 'D', of_each_head, plus),
        'q_norm_all': exact('Q K/t D -> Q K/t D', 1 - plus, q, '(K Q D)', of_all_heads, plus),
        'k_norm_all': exact('K/t D -> K/t D', 1 - plus, k, '(K D)', of_all_heads, plus),
    }
