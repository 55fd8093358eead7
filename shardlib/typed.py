"""`@typed`: checks a function's arguments, its result, its annotated locals, and those of functions nested in it, at
each call.

    @typed
    def up(x: bf16['B/d L M'], w: bf16['M F/t']) -> bf16['B/d L F/t']:
        h: bf16['B/d L F/t'] = shardops.einsum_unreduced('B/d L M, M F/t -> B/d L F/t', x, w)
        return h

What it really does: it reads the function's source, turns each annotated local `x: T = v` into `x: T = check(v, T)`,
gives each nested function the same treatment, and compiles the result under the same file name and lines. A call opens
a fresh scope of letters and checks arguments and result by the signature. Types that are not of sharded arrays go to
typeguard.
"""

import ast
import functools
import inspect
import types
import typing

import typeguard

from shardlib.shardtypes import Scope, ShardingError, check_tree, is_array_type, register_with_typeguard

_CHECK, _NESTED = "__shardlib_check_local__", "__shardlib_check_call__"
register_with_typeguard()


def typed(function):
    """Checks each call of the function; see the module's docstring.

    Raises:
      ShardingError: at decoration, if another decorator stands between it and `def`, or the source cannot be read; at
        a call, for what
        contradicts an annotation.
      typeguard.TypeCheckError: for annotations that are not of sharded arrays.
    """
    if hasattr(function, "__wrapped__") or not isinstance(function, types.FunctionType):
        raise ShardingError(
            f"@typed stands next to `def`, under the other decorators of {getattr(function, '__name__', function)}"
        )
    return _check_call(_rewritten(function))


def _rewritten(function):
    try:
        lines, first = inspect.getsourcelines(function)
    except OSError:
        raise ShardingError(
            f"@typed needs the source of {function.__name__}, which cannot be read: define it in a file"
        ) from None
    # Under an `if`, a function that is indented parses as it stands; to remove the indent would change its strings.
    indented = lines[0][0].isspace()
    tree = ast.parse("if True:\n" * indented + "".join(lines))
    ast.increment_lineno(tree, first - 1 - indented)
    definition = tree.body[0].body[0] if indented else tree.body[0]
    definition.decorator_list = []
    definition.args.defaults = [ast.Constant(None)] * len(definition.args.defaults)  # the function keeps its own
    definition.args.kw_defaults = [default and ast.Constant(None) for default in definition.args.kw_defaults]
    definition.body = [_Rewrite().visit(statement) for statement in definition.body]
    # An outer function makes the names that the body closes over (and our own two) free variables, as they were.
    names = sorted({*function.__code__.co_freevars, _CHECK, _NESTED})
    outer = ast.parse(f"def outer({', '.join(names)}):\n    pass").body[0]
    for argument in (
        *definition.args.posonlyargs,
        *definition.args.args,
        *definition.args.kwonlyargs,
        definition.args.vararg,
        definition.args.kwarg,
    ):
        if argument is not None:
            argument.annotation = None  # evaluated once already
    definition.returns = None
    outer.body = [definition]
    code = compile(ast.fix_missing_locations(ast.Module([outer], [])), inspect.getfile(function), "exec")
    outer_code = next(constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    inner = next(constant for constant in outer_code.co_consts if isinstance(constant, types.CodeType))
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
    cells |= {_CHECK: types.CellType(_check_local), _NESTED: types.CellType(_check_call)}
    closure = tuple(cells[name] for name in inner.co_freevars)
    rewritten = types.FunctionType(inner, function.__globals__, function.__name__, function.__defaults__, closure)
    rewritten.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(rewritten, function)


class _Rewrite(ast.NodeTransformer):
    def visit_AnnAssign(self, node):
        self.generic_visit(node)
        if node.value is not None and isinstance(node.target, ast.Name):
            call = ast.Call(
                ast.Name(_CHECK, ast.Load()), [node.value, node.annotation, ast.Constant(node.target.id)], []
            )
            node.value = ast.copy_location(call, node.value)
        return node

    def visit_FunctionDef(self, node):
        self.generic_visit(node)
        node.decorator_list.append(ast.copy_location(ast.Name(_NESTED, ast.Load()), node))
        return node

    def visit_ClassDef(self, node):
        return node  # its annotations are fields, no values


def _check_local(value, annotation, name):
    return _checked(annotation, value, f"local {name}")


def _check_call(function):
    signature = inspect.signature(function)
    place = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
    annotations = inspect.get_annotations(function, eval_str=True) if hasattr(function, "__annotations__") else {}

    @functools.wraps(function)
    def call(*args, **kwargs):
        with Scope():
            bound = signature.bind(*args, **kwargs)
            for name, value in bound.arguments.items():
                if name in annotations and signature.parameters[name].kind not in (
                    inspect.Parameter.VAR_POSITIONAL,
                    inspect.Parameter.VAR_KEYWORD,
                ):
                    bound.arguments[name] = _checked(
                        annotations[name], value, f"argument {name} of {function.__name__} ({place})"
                    )
            result = function(*bound.args, **bound.kwargs)
            if "return" in annotations:
                result = _checked(annotations["return"], result, f"the result of {function.__name__} ({place})")
            return result

    return call


def _checked(annotation, value, what):
    if is_array_type(annotation):
        return check_tree(annotation, value, what=what)
    items = typing.get_args(annotation)
    if (
        typing.get_origin(annotation) is tuple
        and type(value) is tuple
        and len(items) == len(value)
        and Ellipsis not in items
    ):
        return tuple(
            _checked(inner, item, f"item {index} of {what}") for index, (inner, item) in enumerate(zip(items, value))
        )
    try:
        return typeguard.check_type(value, annotation)
    except typeguard.TypeCheckError as error:
        raise typeguard.TypeCheckError(f"{what}: {error}") from None
