"""The strings of the notation: valid | invalid | message."""

from dataclasses import replace

import pytest
from parts import says
from prove import each_row, program, prove, refused, table

from shardlib.shardtypes import bind, f32  # noqa: F401 for what is evaluated
from shardlib.spec import Dim, ShardingError, Spec, groups, parse, parse_operation  # noqa: F401 for what is evaluated

MESH = dict(d=4, t=2)
SIX = dict(p=2, r=2, d=2, c=2, e=1, t=2)
groups('p r d c e t', b='r d e', w='d c e')  # as models/ has them

VALID = [
    ('', (), ()),
    ('B', (('B', ()),), ()),
    ('B/d L M/t', (('B', ('d',)), ('L', ()), ('M', ('t',))), ()),
    ('M/d/t', (('M', ('d', 't')),), ()),
    ('2 M/d K/t D', (('2', ()), ('M', ('d',)), ('K', ('t',)), ('D', ())), ()),
    ('B L +t', (('B', ()), ('L', ())), ('t',)),
    ('+d +t', (), ('d', 't')),
    ('  B/d   L ', (('B', ('d',)), ('L', ())), ()),
    ('layers d_model/d', (('layers', ()), ('d_model', ('d',))), ()),
]


@pytest.mark.parametrize("text, dims, pending", VALID)
def test_valid_types(text, dims, pending):
    """Each string is read as these dims and pending axes, and printed as it was written but for spaces."""
    spec = parse(text)
    assert spec == Spec(tuple(Dim(*dim) for dim in dims), pending)
    assert str(spec) == ' '.join(text.split())
    spec.require_mesh_order(MESH)


# What is evaluated with a spec's functions; what is said.
INVALID = table(r"""
parse('B/') | cannot read 'B/' in 'B/': a dim is a name or a number … 'B/d L 2 M/d/t +t'
parse('/d') | cannot read '/d' in '/d': a dim is a name or a number
parse('B//d') | cannot read 'B//d' in 'B//d'
parse('B,L') | cannot read 'B,L' in 'B,L'
parse('B+t') | cannot read 'B+t' in 'B+t'
parse('+') | cannot read '+' in '+'
parse('2B') | cannot read '2B' in '2B'
parse('[V/t M') | cannot read '[V/t' in '[V/t M'
parse('B -> B') | cannot read '->' in 'B -> B'
parse('+t B') | in '+t B' the dim 'B' … pending axes come last
parse('B/d M/d') | 'B/d M/d' uses mesh axis d twice … over one dim, or pending, or not mentioned
parse('B/d/d') | 'B/d/d' uses mesh axis d twice
parse('B/d +d') | 'B/d +d' uses mesh axis d twice
parse('+d +d') | '+d +d' uses mesh axis d twice
parse('B +t +d').require_mesh_order(MESH) | (d, t): write 'B +d +t', not 'B +t +d'
parse('M/x').require_mesh_order(MESH) | 'M/x' names mesh axis x … has d, t
parse('M +x').require_mesh_order(MESH) | 'M +x' names mesh axis x … has d, t
parse('B +t').partition_spec | 'B +t' is pending over t … outside of shard_map
parse_operation('M/d', 1) | string is 'operand -> result', with commas
parse_operation('M/d -> M -> M', 1) | string is 'operand -> result'
parse_operation('M/d -> M, M', 1) | 2 results, the operation takes 1
parse_operation('M/d, M -> M', 1) | 2 operands, the operation takes 1
parse_operation('M -> M', 2) | 1 operand, the operation takes 2
parse_operation('M/ -> M', 1) | cannot read 'M/' in 'M/'
bind(parse('B/d L'), (4,), MESH, {}) | 'B/d L' has 2 dims, the value has 1
bind(parse('2 B'), (3, 3), MESH, {}) | dim 2 of '2 B' is 3, but 2 is 2 in the string
bind(parse('B B'), (3, 4), MESH, {}) | dim B of 'B B' is 4, but B is 3 in 'B B'
bind(parse('B/d'), (4,), MESH, {'B': (8, "'B L'")}) | dim B/d of 'B/d' is 16, but B is 8 in 'B L'
bind(parse('B/d'), (6,), MESH, {}, local=False) | dim B has size 6 … axis d=4 cannot divide
bind(parse('M/d/t'), (12,), MESH, {}, local=False) | dim M has size 12 … axes d=4 × t=2 cannot divide
parse('B/b M/w') | 'B/b M/w' uses mesh axis d twice (b is r d e, w is d c e) … split over one dim
parse('B/b +d') | 'B/b +d' uses mesh axis d twice (b is r d e)
parse('M/w').require_mesh_order(MESH) | 'M/w' names mesh axis c (w is d c e) … has d, t
parse('L +c +r').require_mesh_order(SIX) | (p, r, d, c, e, t): write 'L +r +c', not 'L +c +r'
groups('p r d c e t', b='d') | the group b is 'r d e' already
groups('d t', x='d t') | groups have the order 'p r d c e t' already
f32['[V/t] M'] | in an operation's string; a type names
f32['... M'] | in an operation's string; a type names
""")


@each_row(INVALID)
def test_what_is_no_type_or_string_is_refused(row):
    """What cannot be read, pending axes out of the mesh's order, sizes that do not fit: this text."""
    call, message = row
    with pytest.raises(ShardingError) as caught:
        eval(call)
    assert says(message, str(caught.value)), caught.value


GROUPED = [
    ('B/b L/c', (('r', 'd', 'e'), ('c',)), ()),
    ('M/w/r F/t', (('d', 'c', 'e', 'r'), ('t',)), ()),
    ('[V/w] M', (('d', 'c', 'e'), ()), ()),
    ('L +b +c', ((),), ('r', 'd', 'c', 'e')),  # in the order of the mesh's axes
    ('M/t +w', (('t',),), ('d', 'c', 'e')),
]


@pytest.mark.parametrize("text, axes, pending", GROUPED)
def test_a_group_stands_for_its_axes(text, axes, pending):
    """The type is that of the axes written out, and is printed as it was written; what is made of it, with axes."""
    spec = parse(text)
    assert (tuple(dim.axes for dim in spec.dims), spec.pending, str(spec)) == (axes, pending, text)
    out = ' '.join(str(Dim(dim.name, dim.axes, dim.indexed)) for dim in spec.dims)
    assert spec == parse(' '.join([out, *(f'+{axis}' for axis in pending)]))
    spec.require_mesh_order(SIX)
    assert str(replace(spec.dims[0], axes=('t',))) in ('B/t', 'M/t', '[V/t]', 'L/t')


MEAN = "shardops.psum('+b -> ', shardops.sum_unreduced('B/b -> +b', x) / (x.shape[0] * shardops.axis_size('b')))"


def test_the_devices_of_a_group():
    """A part's size times the number of devices along a group is the whole's, where the dim is split over all of it."""
    assert prove(program("B/b -> ''", MEAN), SIX) > 3
    text = refused(program("B/d -> B/d", "x * (x.shape[0] * shardops.axis_size('b'))"), SIX)
    assert says("devices along r, d, e is not the whole's size", text)
    assert says("'b': … has no such axis", refused(program("B/b -> B/b", "x * shardops.index('b')[0]"), SIX))


def test_bytes_and_calls():
    """f32[b'...'], f32('...') and f32['...'] are one type."""
    assert f32[b'B/d L'] == f32['B/d L'] == f32('B/d L')
    assert repr(f32[b'B/d  L +t']) == "f32['B/d L +t']"
