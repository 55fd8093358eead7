"""The check's verdict on a program is the same on every mesh."""

import inspect
import random

import prove
import pytest
import small
import test_notation
import test_refused
from prove import MESHES, OF_D_AND_T, OF_EIGHT, SINGLE, SIZES, program, table
from right_programs import OF_DEVICES
from test_differential import WRITTEN

from shardlib.spec import ShardingError

# Function, whether it is accepted, and sizes of its letters.
PROGRAMS = [
    *((program(types, body, vars(test_refused)), False, (SIZES, SINGLE)) for types, body, _ in test_refused.ROWS),
    *(
        (program(types, body, vars(test_refused)), False, (SIZES, SINGLE))
        for words, types, body, verdict in test_notation.ROWS
        if verdict != "accepted" and "mesh that divides" not in words
    ),
    *((program(*row), True, (SIZES, SINGLE)) for row in table(OF_DEVICES)),
    *((written.function, True, written.sizes) for written in WRITTEN),
]


def is_accepted(function, mesh, sizes) -> bool:
    try:
        return prove.prove(function, mesh, sizes) > 0
    except ShardingError:
        return False


@pytest.mark.parametrize("count", [40, *small.slow(len(PROGRAMS))])
def test_the_verdict_is_the_same_on_every_mesh(count, record_property):
    """It is so on 1 x 1, 2 x 1, 4 x 2, 2 x 4, 8 x 1 and 1 x 8, for every program of the tests, also where a device
    holds one row; quickly, for some of them. What is refused is so on a mesh with another axis too, on which a loss
    '+d +t' is none."""
    for function, expected, several in random.Random(0).sample(PROGRAMS, count):
        for sizes in several:
            for mesh in OF_EIGHT if sizes is SINGLE else OF_D_AND_T if expected else MESHES:
                assert is_accepted(function, mesh, sizes) == expected, (
                    inspect.getsource(function),
                    mesh,
                    sizes is SINGLE,
                )
    record_property("summary", f"{count} of {len(PROGRAMS)} programs have the same verdict on every mesh")
