"""What a trace under the check records: each operation of shardops and each annotation, as a *mark* with a rule.

`shardlib/verify.py` makes the traces, `shardlib/walk.py` goes through them; docs/notation.md says what is proved.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shardlib.spec import users_line


@dataclass(frozen=True)
class Mark:
    """An operation or an annotation in the trace.

    Attributes:
      said: what the source says there: the operation, its string, and numbers that are neither operands nor sizes.
      rule: from the states of the operands' leaves to those of the results'; it refuses.
      moves: the axes over which it sends.
      ranks: of the operands' leaves.
      sealed: it runs a function of the user's, which must not send.
      line: the user's.
    """

    said: tuple
    rule: Callable
    moves: frozenset[str]
    ranks: list[int]
    sealed: bool
    line: str


@dataclass
class Check:
    """One trace in progress.

    Attributes:
      axes: the mesh's axes, of the trace.
      shown: those of the user's mesh, for messages.
      marking: whether operations and annotations become marks; else the program is traced as it runs.
      marks: every mark that the trace has met, by name.
      proved: the number of those that were walked, each of which is a claim.
      schedule: whether the program names its devices, as in 'p/p': sizes that its operations are given may then depend
        on how many there are, and in a loop that sends how many turns it takes, and which slot is used in which.
      gradients: whether it takes one.
    """

    axes: dict[str, int]
    shown: dict[str, int]
    marking: bool = True
    marks: dict[str, Mark] = field(default_factory=dict)
    schedule: bool = False
    gradients: bool = False
    proved: int = 0


_current: contextvars.ContextVar[Check | None] = contextvars.ContextVar("check", default=None)
# The axes along which what is traced runs on each device by itself, as if the mesh did not have them.
_apart: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar("apart", default=frozenset())


def current() -> Check | None:
    """The check that is being traced."""
    return _current.get()


def marking() -> bool:
    """Whether operations and annotations are to be marked."""
    check = _current.get()
    return check is not None and check.marking


def note(what: str):
    """Notes in the check that is being traced, if any, that the program has a `schedule` or takes `gradients`."""
    if (check := _current.get()) is not None:
        setattr(check, what, True)


def mark(said, rule, implementation, *operands, moves: tuple[str, ...] = (), sealed: bool = False):
    """Calls `implementation(*operands)`; in a check, as a mark with `rule(states of the operands' leaves) -> states of
    the results' leaves`, of what the source `said`.

    `moves` are the axes over which devices exchange data: all of them must get there, so a mark under a branch that
    depends on them is refused. A `sealed` implementation is the user's own, and must not send anything.
    """
    if not marking():
        return implementation(*operands)

    def call(*operands):
        return implementation(*operands)

    call.__name__ = _record(said, rule, moves, jax.tree.leaves(operands), sealed)
    return jax.jit(call)(*operands)


def mark_value(said, rule, value):
    """In a check, marks one value with a rule, and returns it marked (an annotation: nothing is computed)."""
    return checkpoint_name(value, _record(said, rule, (), [value], False)) if marking() else value


def mark_of(eqn, check: Check) -> Mark | None:
    """The mark that an equation of a check's trace is, if it is one."""
    return check.marks.get(str(eqn.params.get("name"))) if eqn.primitive.name in ("jit", "pjit", "name") else None


@contextlib.contextmanager
def during(check: Check):
    """What is traced inside is traced for this check."""
    token = _current.set(check)
    try:
        yield
    finally:
        _current.reset(token)


def apart() -> frozenset[str]:
    """The axes that are not there for what is traced."""
    return _apart.get()


@contextlib.contextmanager
def on_each(axis: str):
    """What is traced inside runs on each device along an axis by itself."""
    token = _apart.set(_apart.get() | {axis})
    try:
        yield
    finally:
        _apart.reset(token)


def _by_itself(rule, axes, states):
    """What a rule that does not know these axes says: of one device's own values, one device's own results."""
    own = frozenset().union(*(state.alone & axes for state in states))
    known = [replace(state, split=state.split - own, alone=state.alone - own) for state in states]
    return [replace(state, split=state.split | own, alone=state.alone | own) for state in rule(known)]


def _record(said, rule, moves, operands, sealed) -> str:
    marks = _current.get().marks
    if _apart.get():
        rule = functools.partial(_by_itself, rule, _apart.get())
    name = f"shardlib mark {len(marks)}"
    marks[name] = Mark(said, rule, frozenset(moves), [jnp.ndim(operand) for operand in operands], sealed, users_line())
    return name
