"""@typed: what it checks in a call, in which scope of letters, and at which line it says so."""

import functools
import inspect
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typeguard
from jax import lax
from parts import says
from prove import each_row, refusal, table

from shardlib.places import is_users
from shardlib.shardtypes import Array, Scope, f32, pytree_dataclass, scope
from shardlib.spec import ShardingError
from shardlib.typed import typed

x = np.zeros((4, 6), np.float32)
row = np.zeros(6, np.float32)


@pytree_dataclass
class Layer:
    w: f32['M F']
    b: f32['F']


@pytree_dataclass
class Weights:
    embed: f32['V M']
    layers: Array['layers', Layer]


def line(text) -> str:
    """'file:line' of the line of this file that ends with a comment."""
    with open(__file__) as file:
        (found,) = [number for number, code in enumerate(file, 1) if code.endswith(f"  # {text}\n")]
    return f"{__file__}:{found}"


@typed
def product(a: f32['B M'], b: f32['M'], *, scale: float = 2.0, other: f32['B'] = None) -> f32['B']:
    c: f32['B M'] = a * b[None]
    return jnp.sum(c, axis=1) * scale


@typed
def pair(a: f32['B M']) -> tuple[f32['B M'], f32['M'], int]:
    return a, a[:, 0] if a.shape[0] != 5 else a[0], 3


@typed
def nested(a: f32['B M'], wrong: bool) -> f32['B M']:
    def inner(b: f32['B']) -> f32['B']:
        c: f32['B'] = b[:-1] if wrong else b  # a nested local
        return c

    return a + inner(a[0])[None]


@typed
def scanned(a: f32['B M'], wrong: bool) -> f32['M']:
    def body(carry: f32['M'], r: f32['M']) -> tuple[f32['M'], f32['']]:
        total: f32['M'] = carry + r
        return total, jnp.sum(r) if not wrong else r  # a wrong item of a scan's body

    return lax.scan(body, jnp.zeros(a.shape[1]), a)[0]


@typed
def local(a: f32['B M']) -> f32['B']:
    b: f32['B'] = a[0]  # a wrong local
    return b


FIVE = np.zeros(5, np.float32)


@typed
def at_its_default(a: f32['B M'], b: f32['B'] = FIVE) -> f32['B']:
    return a[:, 0]


def test_right_calls():
    """Right calls pass, with defaults, keywords, closures, static arguments and trees, and return what the function
    returns. A letter is one size within a call; another call, or a nested function, has its own."""
    np.testing.assert_array_equal(product(x + 1, row + 1), np.full(4, 12))
    np.testing.assert_array_equal(product(b=row + 1, a=x + 1, scale=1.0, other=x[:, 0]), np.full(4, 6))
    assert pair(np.zeros((6, 6), np.float32))[2] == 3
    product(x[:2, :3], row[:3])
    nested(x, wrong=False)  # B is 4 outside and 6 inside
    scanned(x, wrong=False)
    assert first(weights, 0).b.shape == (3,)
    assert product.__name__ == "product" and "scale" in inspect.signature(product).parameters


WRONG = table(r"""
product(x, row[:5])
    | dim M of … is 5, but M is 6 in 'B M' … against argument b of product … f32['M'], value float32[5] globally
product(x.astype(np.int32), row)
    | the element type is int32 … against argument a of product … f32['B M'], value int32[4, 6]
product(3.0, row) | expected an array, got float … against argument a of product … f32['B M'], value float
product(x[0], row) | 'B M' has 2 dims, the value has 1 … against argument a of product
product(x, row, other=row) | dim B of … is 6, but B is 4 in 'B M' … against argument other of product
pair(x) | dim M of … is 4, but M is 6 in 'B M' … against item 1 of the result of pair (
at_its_default(x) | dim B of … is 5, but B is 4 in 'B M' … against argument b of at_its_default
local(x) | dim B of … is 6, but B is 4 in 'B M' … against local b: f32['B'], value float32[6]
nested(x, wrong=True) | dim B of … is 5, but B is 6 in 'B' … against local c
scanned(x, wrong=True) | '' has 0 dims, the value has 1 … against item 1 of the result of body (
Child().apply(x) | against argument a of apply
first(changed, 0) | dim layers of … is 4, but layers is 2 in 'layers M F' … against argument w of first … layers/b
first(weights.layers, 0) | expected Weights, got Layer … against argument w of first
typed(wrapped) | @typed stands next to `def` … decorators of product
typed(lambda x: x) | @typed stands next to `def` … decorators of <lambda>
typed(made) | @typed needs the source of made … define it in a file, a notebook
""")


@each_row(WRONG)
def test_wrong_calls(row):
    """A wrong argument, result, tuple item, local, local of a nested function, result of a scan's body, field of a
    tree: refused with this text; so is a function that cannot be read."""
    call, message = row
    with pytest.raises(ShardingError) as caught:
        eval(call, globals())
    assert says(message, str(caught.value)), caught.value
    assert "@typed" in message or "test_typed.py:" in str(caught.value).rsplit("\n", 1)[1]


def test_lines():
    """An error names the line of the annotated local, of the call, and of the function."""
    with pytest.raises(ShardingError) as caught:
        local(x)
    assert f"at {line('a wrong local')}" in str(caught.value)
    with pytest.raises(ShardingError) as caught:
        nested(x, wrong=True)
    assert f"at {line('a nested local')}" in str(caught.value)
    with pytest.raises(ShardingError) as caught:
        product(x, row[:5])  # the call
    assert f"at {line('the call')}" in str(caught.value)
    assert f"({__file__}:{product.__wrapped__.__code__.co_firstlineno})" in str(caught.value)


def test_tracebacks_keep_their_lines():
    """What a typed function raises by itself has the line of the source."""

    @typed
    def fails(a: f32['B']) -> f32['B']:
        text = """
text without an indent"""
        raise ValueError(text)  # here

    with pytest.raises(ValueError, match=r"^\ntext without an indent$") as caught:
        fails(row)
    assert caught.traceback[-1].lineno + 1 == int(line("here").rsplit(":", 1)[1])


def test_other_types_go_to_typeguard():
    """int, str, tuple[...] of mixed types, None and the like are typeguard's."""
    with pytest.raises(typeguard.TypeCheckError, match=r"argument scale of product .*: str is neither float or int"):
        product(x, row, scale="2")

    @typed
    def local_int(a: f32['B']) -> f32['B']:
        n: int = a.shape
        return a[:n]

    with pytest.raises(typeguard.TypeCheckError, match=r"local n: tuple is not an instance of int"):
        local_int(row)


def test_scopes():
    """`with Scope()` and `@scope` open fresh letters; afterwards the old ones hold again."""
    from shardlib.shardtypes import check

    with Scope():
        check(f32, 'M', row)
        with Scope():
            check(f32, 'M', x[:, 0])
        scope(lambda: check(f32, 'M', x[:, 0]))()
        with pytest.raises(ShardingError, match=r"dim M of 'M' is 4, but M is 6 in 'M'"):
            check(f32, 'M', x[:, 0])
    check(f32, 'M', x[:, 0])  # outside of any scope each check is by itself


def zeros(*shape):
    return np.zeros(shape, np.float32)


@typed
def first(w: Weights, layer: int) -> Layer:
    return jax.tree.map(lambda a: a[layer], w.layers)


weights = Weights(embed=zeros(5, 6), layers=Layer(w=zeros(2, 6, 3), b=zeros(2, 3)))
changed = Weights(embed=zeros(5, 6), layers=Layer(w=zeros(2, 6, 3), b=zeros(4, 3)))


class Base:
    def scale(self):
        return 3.0


class Child(Base):
    @typed
    def apply(self, a: f32['B']) -> f32['B']:
        b: f32['B'] = a * super().scale()
        return b

    @staticmethod
    @typed
    def static(a: f32['B']) -> f32['B']:
        return a


def test_closures_methods_and_recursion():
    """A typed function may close over names, be a method, use super and itself."""
    factor = 3.0

    @typed
    def countdown(a: f32['B'], n: int) -> f32['B']:
        return a if n == 0 else countdown(a * factor, n - 1)

    np.testing.assert_array_equal(Child().apply(row + 1), row + 3)
    Child.static(row)
    np.testing.assert_array_equal(countdown(row + 1, 2), row + 9)


exec("def made(a: f32['B']): return a")
wrapped = functools.wraps(product)(lambda a: a)


def test_inside_the_check():
    """A typed function's annotations are claims to the check: a local that is still owed is refused at its line."""
    from shardlib import shardops

    @typed
    def program(a: f32['B/d F/t'], w: f32['M F/t']) -> f32['B/d M']:
        y: f32['B/d M'] = shardops.einsum_unreduced('B/d F/t, M F/t -> B/d M +t', a, w)  # owed
        return y

    text = refusal(program)
    value = "f32['B/d M'], value float32[4, 64] … mesh d=4 × t=2"
    assert says(f"'B/d M' says the same along t … still a sum over t … against local y: {value}", text)
    assert text.endswith(f"at {line('owed')}")


CELLS = """
import jax
import jax.numpy as jnp
from shardlib.shard_map import typed_shard_map
from shardlib.shardtypes import f32
from shardlib.typed import typed

@typed
def helper(x: f32['B/d M']) -> f32['B/d M']:
    y: f32['B/d M'] = jnp.tanh(x)
    return y

def program(x: f32['B/d M']) -> f32['B/d M']:
    return helper(x)

def by_size(x: f32['B/d M']) -> f32['B/d M']:
    return helper(x) if x.shape[0] == 4 else x

mesh = jax.sharding.AbstractMesh((4, 2), ("d", "t"))
x = jax.ShapeDtypeStruct((16, 8), jnp.float32)
print(typed_shard_map(program).check(mesh, x), "claims")
try:
    typed_shard_map(by_size).check(mesh, x)
except Exception as error:
    print(type(error).__name__, error)
"""


def test_in_a_notebook():
    """In IPython a cell's functions are checked, their locals too, and what a cell asks of a size is refused with its
    line."""
    run = f"from IPython.core.interactiveshell import InteractiveShell as S; S.instance().run_cell({CELLS!r})"
    told = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, check=True).stdout
    assert "7 claims" in told
    assert re.search(r"ShardingError what is computed must not .*\n  at <ipython-input-\S+>:16", told), told


@pytest.mark.parametrize("file, is_ones", [
    ("/home/me/my_trainer.py", True), ("<ipython-input-1>", True), ("/tmp/ipykernel_7/1.py", True), ("<string>", False),
    ("/home/me/.local/lib/python3.11/site-packages/einops/einops.py", False), (jax.__file__, False),
    ("/usr/lib/python3/dist-packages/numpy/__init__.py", False), (functools.__file__, False),
])  # fmt: skip
def test_whose_a_frame_is(file, is_ones):
    """The user's own file, or a cell; no installed package's, wherever packages are installed."""
    assert is_users(file) is is_ones
