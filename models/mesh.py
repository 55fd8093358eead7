"""The mesh of every program on models/: five axes, of one device where nothing is said; and the groups of them that
types name.

    'B/b L/c M/t'       activations: rows over b = r d e, positions over c, dims within matrices over t
    'M/w F/t'           weights in a step: over w = d c e beside t; at rest over r too, 'M/w/r F/t'
    'E/e M/v H/t'       experts': over e, and over v = d c beside it; 'B/g' are the rows of all devices along e
    'B/b L Q K/h D'     within attention: whole rows of some heads, over h = t c
    'B/b L/c V/u'       logits while training: over u = t p, p being the stages of train_any.py

An axis of one device sends nothing. With it absent the check could not see what is forgotten along it.
"""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from runtime.config.keys import Count
from shardlib.shardtypes import make_shardings
from shardlib.spec import groups

groups('p r d c e t', b='r d e', w='d c e', v='d c', g='r d', h='t c', u='t p')


@dataclass(frozen=True, kw_only=True)
class Mesh:  # in the order of its axes: neighbours along the last one are nearest to each other
    r: Count = 1  # replicas of the weights of a step, best one a host; master weights and moments are split over it
    d: Count = 1  # rows, and weights
    c: Count = 1  # context: the positions of a row, and weights as over d
    e: Count = 1  # experts; rows and all other weights as over d
    t: Count = 1  # within matrices: heads, d_ff and the vocabulary


def placed(tree: Any, type_: Any) -> Any:
    """Puts host arrays, equal on every process, on the current mesh's devices as the type says; others stay there."""
    leaves = jax.tree.leaves(tree)
    if not leaves or not isinstance(leaves[0], np.ndarray):
        return tree
    return jax.tree.map(
        lambda x, sharding: jax.make_array_from_callback(x.shape, sharding, lambda place: x[place]),
        tree,
        make_shardings(type_),
    )
