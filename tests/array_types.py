"""Checks the array types of host code, `UInt32[np.ndarray, "rows length"]`, while the tests run.

pyproject.toml hands `checked` to jaxtyping's import hook, which wraps every function of the modules named there and
binds the dims of one call together. typeguard's own decorator cannot stand there: it looks for the source of the
function that jaxtyping has generated, finds none, and checks nothing (typeguard 4.6).
"""

import functools
import inspect

import typeguard


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
