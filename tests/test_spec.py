"""The strings of the notation: valid | invalid | message."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

from shardlib.shardtypes import ShardingError, bind, f32
from shardlib.spec import Dim, Spec, parse, parse_operation

MESH = dict(d=4, t=2)

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


CANNOT = "a dim is a name or an integer, then /axis for each axis it is split over, as in 'B/d L 2 M/d/t'; pending "
         "axes come last, as in '+t'"
INVALID = [
    ('B/', f"cannot read 'B/' in 'B/': {CANNOT}"),
    ('/d', f"cannot read '/d' in '/d': {CANNOT}"),
    ('B//d', "cannot read 'B//d' in 'B//d'"),
    ('B,L', "cannot read 'B,L' in 'B,L'"),
    ('B+t', "cannot read 'B+t' in 'B+t'"),
    ('+', "cannot read '+' in '+'"),
    ('2B', "cannot read '2B' in '2B'"),
    ('[V/t M', "cannot read '[V/t' in '[V/t M'"),
    ('B -> B', "cannot read '->' in 'B -> B'"),
    ('+t B', "in '+t B' the dim 'B' stands after a pending axis: pending axes come last"),
    ('B/d M/d', "'B/d M/d' uses mesh axis d twice: an axis is split over one dim, or pending, or not mentioned"),
    ('B/d/d', "'B/d/d' uses mesh axis d twice"),
    ('B/d +d', "'B/d +d' uses mesh axis d twice"),
    ('+d +d', "'+d +d' uses mesh axis d twice"),
]


@pytest.mark.parametrize("text, message", INVALID)
def test_invalid_types(text, message):
    """Each string is refused with this text."""
    with pytest.raises(ShardingError) as caught:
        parse(text)
    assert message in str(caught.value)


ON_THE_MESH = [
    ('M/t/d', "axes are written in the order of the mesh's axes (d, t): write 'M/d/t', not 'M/t/d'"),
    ('B +t +d', "axes are written in the order of the mesh's axes (d, t): write 'B +d +t', not 'B +t +d'"),
    ('M/x', "'M/x' names mesh axis x, but the mesh has d, t"),
    ('M +x', "'M +x' names mesh axis x, but the mesh has d, t"),
]


@pytest.mark.parametrize("text, message", ON_THE_MESH)
def test_one_legal_spelling(text, message):
    """Axes stand in the mesh's order; the message shows the legal spelling."""
    with pytest.raises(ShardingError) as caught:
        parse(text).require_mesh_order(MESH)
    assert message in str(caught.value)


OPERATIONS = [
    ('M/d', 1, "an operation's string is 'operand -> result', with commas between operands"),
    ('M/d -> M -> M', 1, "an operation's string is 'operand -> result'"),
    ('M/d -> M, M', 1, "the string has 2 results, the operation takes 1"),
    ('M/d, M -> M', 1, "the string has 2 operands, the operation takes 1"),
    ('M -> M', 2, "the string has 1 operand, the operation takes 2"),
    ('M/ -> M', 1, "cannot read 'M/' in 'M/'"),
]


@pytest.mark.parametrize("text, operands, message", OPERATIONS)
def test_invalid_operations(text, operands, message):
    """What is no operation's string is refused with this text."""
    with pytest.raises(ShardingError) as caught:
        parse_operation(text, operands)
    assert message in str(caught.value)


def test_operations_are_parsed_once():
    """A string's recipe is cached."""
    assert parse_operation('M/d -> M', 1) is parse_operation('M/d -> M', 1)
    assert parse('B/d L') is parse('B/d L')


BIND = [
    ('B/d L', (4, 3), {}, (16, 3)),
    ('M/d/t', (2,), {}, (16,)),
    ('2 B', (2, 3), {}, (2, 3)),
    ('+t', (), {}, ()),
    ('B B', (3, 3), {}, (3, 3)),
    ('B/d', (4,), {'B': (16, "'B'")}, (16,)),
]


@pytest.mark.parametrize("text, local, letters, whole", BIND)
def test_sizes(text, local, letters, whole):
    """Global sizes follow from local ones and the mesh's axes."""
    assert bind(parse(text), local, MESH, dict(letters)) == whole


BIND_WRONG = [
    ('B/d L', (4,), {}, True, "'B/d L' has 2 dims, the value has 1"),
    ('2 B', (3, 3), {}, True, "dim 2 of '2 B' is 3, but 2 is 2 in the string"),
    ('B B', (3, 4), {}, True, "dim B of 'B B' is 4, but B is 3 in 'B B'"),
    ('B/d', (4,), {'B': (8, "'B L'")}, True, "dim B/d of 'B/d' is 16, but B is 8 in 'B L'"),
    ('B/d', (6,), {}, False, "dim B has size 6, which axis d=4 cannot divide"),
    ('M/d/t', (12,), {}, False, "dim M has size 12, which axes d=4 × t=2 cannot divide"),
]


@pytest.mark.parametrize("text, shape, letters, local, message", BIND_WRONG)
def test_wrong_sizes(text, shape, letters, local, message):
    """A rank, a letter or an integer of another size, or a size that an axis does not divide: refused with this
    text."""
    with pytest.raises(ShardingError) as caught:
        bind(parse(text), shape, MESH, dict(letters), local=local)
    assert message in str(caught.value)


PARTITION = [('', P()), ('B', P(None)), ('B/d L M/t', P('d', None, 't')), ('M/d/t', P(('d', 't')))]


@pytest.mark.parametrize("text, spec", PARTITION)
def test_partition_specs(text, spec):
    """The PartitionSpec of a type."""
    assert parse(text).partition_spec == spec


def test_a_pending_type_has_no_partition_spec():
    """Pending values do not exist outside of shard_map."""
    with pytest.raises(
        ShardingError, match=r"'B \+t' is pending over t: a pending value has no meaning outside of shard_map"
    ):
        assert parse('B +t').partition_spec is None


@pytest.mark.parametrize("text", ['[V/t] M', '... M', '...'])
def test_types_hold_no_marks_of_operations(text):
    """'[ ]' and '...' belong in an operation's string."""
    with pytest.raises(ShardingError, match=r"belongs in an operation's string; a type names each dim"):
        f32[text]


def test_bytes_and_calls():
    """f32[b'...'], f32('...') and f32['...'] are one type."""
    assert f32[b'B/d L'] == f32['B/d L'] == f32('B/d L')
    assert repr(f32[b'B/d  L +t']) == "f32['B/d L +t']"


def test_no_private_names():
    """shardlib uses public JAX names only."""
    import pathlib

    import shardlib.spec

    for file in pathlib.Path(shardlib.spec.__file__).parent.glob("*.py"):
        assert "_src" not in file.read_text(), file
    assert jax.__version__ >= "0.10"
