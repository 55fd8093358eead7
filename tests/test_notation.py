"""docs/notation.md, "What is proved, and what is not": each sentence is tried, on the mesh 4 x 2."""

import re

import prove
import pytest
import test_refused
from pages import text_of
from parts import says
from prove import each_row, program, refused, table

SECTION = " ".join(text_of("notation.md").partition("## What is proved, and what is not\n")[2].split())
SENTENCES = [text for text in re.split(r"(?<=\.) |- (?=\*\*)", SECTION) if text not in ("", "Not proved: ")]
# Words of a sentence; a program (tests/prove.py says how it is written); what its refusal says, or 'accepted'.
ROWS = table(r"""
# Proved
every mesh that divides the sizes, including sizes like `x.shape[0] // 4` | 8/d
    | x * ((x.shape[0] // 4) * shardops.axis_size('d')) | 8/d // 4 … 2/d, which d=4 cannot divide
One verdict holds | B/d | x if x.shape[0] > 4 else -x | must not depend on … a device's part
has the layout of its annotation | M -> M/t | x | 'M/t' says M/t … whole in the value: write M
of an operation that of its string | M | shardops.all_gather('Z/d -> Z', x) | 'Z/d' says Z/d … whole in the value
An operation under `jax.vmap` | B M/d | jax.vmap(lambda row: shardops.all_gather('M/d -> M', row))(x)
    | an operation … annotation under jax.vmap … fix: write the dim in the string
put through any linear function | B/d M/t -> B/d
    | shardops.psum('B/d +t -> B/d', 2 * forgotten(x) + forgotten(-x)) | accepted
`silu` of it is an error | B/d M/t -> B/d | jax.nn.silu(forgotten(x))
    | 'silu' (logistic) … not linear … pending over t: a function of a sum
adding it to a value that is the same | B/d M/t, B/d -> B/d | forgotten(x) + y
    | 'add' … pending over t and one that is not … add it again
Only an operation with a string reduces | B/d M | x - jnp.max(x, axis=0)[None]
    | 'max' (reduce_max) reduces … split over d
reduces, indexes | B/d M | x - x[0][None] | changes the length … split over d
reduces, indexes, sorts | B/d M | jnp.sort(x, axis=0) | 'sort' runs along … split over d
reduces, indexes, sorts, shifts | M/d | jnp.roll(x, 1)
    | changes the length … split over d
reduces, indexes, sorts, shifts or loops over a split dim | L/d M | lax.map(jnp.tanh, x)
    | a scan over … split over d … fix: all_gather it first, scan another dim
A `lax` collective | M/d | lax.pmean(x, 'd') | over d outside of shardops
A `lax` collective, `lax.axis_index` | M/d | x * lax.axis_index('d') | over d outside of shardops
an operation that the check does not know | M/d
    | jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    | 'pure_callback': what it does cannot be seen fix: call it through shardops.local
transfer that not all devices reach | M | lax.cond(at('d') > 0, hop, lambda x: x, x) | some devices would wait for ever
depends on what differs between them, also in a gradient | M | lax.cond(at('d') > 0, pulled, lambda x: x, x)
    | under a branch that depends on what differs there
A loss is pending over every axis | M -> M | shardops.grad(lambda w: jnp.sum(w * w))(x) | the loss is the same along d
a gradient has the type of the table | M, B/d M -> M | shardops.grad(lambda w: squares(y * w[None]))(x)
    | still a sum over d
`jax.grad`, `jax.vjp` and | M | jax.grad(lambda y: jnp.sum(y))(x) | a jax.grad, vjp, jvp or linear_transpose
`jax.vjp` and `jax.jvp` are errors | M | jax.jvp(jnp.sin, (x,), (x,))[1] | may stand in shardops.local alone
the gradient of a literal zero | M, B/d M -> M | reduced(lambda z: squares(y + z[None]), jnp.zeros(64))
    | a constant zero … is differentiated
`shardops.zeros` has one | M, B/d M -> M | x + reduced(lambda z: squares(y + z[None]), shardops.zeros('M', f32))
    | accepted
`jax.custom_jvp` send nothing | M/d -> M | own_vjp(lambda x: shardops.all_gather('M/d -> M', x), lambda _, g: (g,))(x)
    | a transfer over d inside a jax.custom_vjp
A forward rule computes the function's value | M | own_rule(jnp.sin, lambda x: (jnp.cos(x), x), lambda r, g: (g,))(x)
    | forward rule of a jax.custom_vjp has another value
in a backward rule's types *same* and *pending* change places | M | own_vjp(jnp.sin, lambda r, g: (g + r[0],))(x)
    | 'add' … pending over d and one that is not
is linear in its tangents | M | own_jvp(jnp.sin, lambda x, t: (jnp.sin(x[0]), t[0] * t[0]))(x)
    | rule of a jax.custom_jvp is not linear
They do not depend on what is differentiated | M | by_perturbed(x) | rules with symbolic_zeros
may not compare the size | M/d | x * (x.shape[0] == 16) | 64/d is another number
may not compare the size of a device's part, look it up | M/d | x * {16: 2.0}[x.shape[0]]
    | is another number on each mesh
look it up, loop over it | M/d | sum(x for _ in range(x.shape[0])) | the size of a device's part
make a NumPy array of it | M/d | x * np.ones(x.shape, np.float32) | fix: jnp.ones(x.shape), not np.ones
gets no type | M/d | x / x.shape[0] | is said of a number … how many devices
is the size of the whole | M/d | x / (x.shape[0] * shardops.axis_size('d')) | accepted
a term of a sum over t | M -> M | shardops.psum('M +t -> M', x / shardops.axis_size('t')) | accepted
Any other use of it is an error | M | x * shardops.axis_size('d') | the number of devices along d is another
# Not proved
of a block that `regroup` makes | B/d | x * shardops.regroup('B/d -> d/d R', x).shape[1] | accepted
**Plain numbers of the mesh** | M | x * int(shardops.axis_size('d')) * jax.device_count() | accepted
the length of a dim that counts devices | M
    | x * shardops.all_gather('d/d -> d', shardops.index('d')).shape[0] | accepted
`index`, the length | M -> '' | shardops.psum('+d -> ', shardops.sum_unreduced('d/d -> +d',
    shardops.index('d').astype(jnp.float32))) | accepted
What a program computes with these numbers | M | shardops.psum('M +d -> M', shardops.sum_unreduced('d/d M -> M +d',
    shardops.zeros('d/d M', f32) + x[None])) | accepted
is proved for this mesh only | M | x if int(shardops.axis_size('d')) > 1 else forgotten(x)
    | accepted
**What a size is** | M/d | x if isinstance(x.shape[0], int) else 2 * x | accepted
`f"{x.shape}"` | M/d | x * len(f'{x.shape}') | accepted
`str(axis_size)` | M | x * float(str(shardops.axis_size('d'))) | accepted
**Branches of Python** | M | x if jax.default_backend() == 'cpu' else forgotten(x) | accepted
also by a caught error | M | x * caught(lambda: lax.axis_size('d')) | accepted
*when* a device does something | d/d M | shardops.ppermute('d/d M -> d/d M', x, 0) | accepted
A ring with a turn too few | d/d M | shardops.ppermute('d/d M -> d/d M', x, 2) | accepted
which rows are in a part depends on the mesh | B/d -> 2 R/d | shardops.regroup('B/d -> 2 R/d', x) | accepted
a maximum for each part does | B/d -> 2 | shardops.pmax('2 R/d -> 2', shardops.regroup('B/d -> 2 R/d', x)) | accepted
A sum over all rows does not depend on it | B/d -> 2
    | shardops.psum('2 +d -> 2', shardops.sum_unreduced('2 R/d -> 2 +d',
    shardops.regroup('B/d -> 2 R/d', x))) | accepted
**Random numbers** | M/d | x * jax.random.normal(jax.random.key(0), x.shape) | accepted
**What is inside `local`** | M/d | shardops.local('M/d -> M/d', lambda x: x / jnp.sum(x), x) | accepted
No operation with a string stands in it | M/d
    | shardops.local('M/d -> M/d', lambda x: shardops.slice('M -> M/d', shardops.all_gather('M/d -> M', x)), x)
    | an operation with a string in a function that is local
numbers that are not finite | M | shardops.psum('M +t -> M', shardops.pending('M -> M +t', x) / jnp.zeros(64))
    | accepted
and the mathematics | M/d | x.astype(jnp.bfloat16).astype(jnp.float32) | accepted
""")


@each_row(ROWS)
def test_what_is_said_is_so(row):
    """The program is refused with these words, or accepted, as the sentence says."""
    _, types, body, verdict = row
    function = program(types, body, vars(test_refused))
    if verdict == "accepted":
        assert prove.prove(function) > 0
    else:
        assert says(verdict, text := refused(function)), text


@pytest.mark.parametrize("sentence", SENTENCES, ids=lambda sentence: re.sub(r"\W+", "-", sentence)[:60])
def test_each_sentence_is_tried(sentence):
    """A row has words of it; no row has words that the page does not have."""
    assert any(words in sentence for words, *_ in ROWS)
    assert all(words in SECTION for words, *_ in ROWS)
