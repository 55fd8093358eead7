"""Checks the array types of host code, `UInt32[np.ndarray, "rows length"]`, while the tests run.

pyproject.toml hands `checked` to jaxtyping's import hook, which wraps every function of the modules named there and
binds the dims of one call together. typeguard's own decorator cannot stand there: it looks for the source of the
function that jaxtyping has generated, finds none, and checks nothing (typeguard 4.6).

The hook leaves functions under `@typed` alone, and those in them: shardlib checks these in its own notation, and stands
next to `def`, where the hook would. Imported, and so said to the hook, before any module that has both.
"""

import ast
import functools
import inspect

import typeguard
from jaxtyping import _import_hook

_is_no_type_check = _import_hook._is_no_type_check  # of a decorator; the hook has no public way to leave functions out
_import_hook._is_no_type_check = lambda node: _is_no_type_check(node) or ast.unparse(node) == "typed"


def checked(function):
    """The function, with `typeguard.check_type` for each argument and result that an array type annotates."""
    signature = inspect.signature(function)
    types = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    types["return"] = signature.return_annotation
    types = {name: annotation for name, annotation in types.items() if "jaxtyping" in repr(annotation)}

    @functools.wraps(function)
    def call(*args, **kwargs):
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            if name in types:
                typeguard.check_type(value, types[name])
        result = function(*args, **kwargs)
        return typeguard.check_type(result, types["return"]) if "return" in types else result

    return call if types else function
