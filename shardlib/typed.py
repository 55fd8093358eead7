"""`@typed`: checks a function's arguments, its result, its annotated locals, and those of functions nested in it, at
each call.

    @typed
    def up(x: bf16['B/d L M'], w: bf16['M F/t']) -> bf16['B/d L F/t']:
        h: bf16['B/d L F/t'] = shardops.einsum_unreduced('B/d L M, M F/t -> B/d L F/t', x, w)
        return h

What it really does: it reads the function's source, turns each annotated local `x: T = v` into `x: T = check(v, T)` and
each `return v` into `return check(v, ...)`, gives each nested function the same treatment, and compiles the result
under the same file name and lines. A call opens a fresh scope of letters and checks the arguments by the signature.
Types that are not of sharded arrays go to typeguard.
"""

import ast
import contextvars
import functools
import inspect
import sys
import types

import typeguard

from shardlib.shardtypes import Scope, check_tree, holds_arrays, register_with_typeguard
from shardlib.spec import ShardingError

_LOCAL, _RETURN, _NESTED = "__shardlib_local__", "__shardlib_return__", "__shardlib_nested__"
annotations_read: set[tuple[str, int]] = set()  # (file, line of `def`) of the functions whose annotations are checked
register_with_typeguard()


def typed(function):
    """Checks each call of the function; see the module's docstring.

    Raises:
      ShardingError: at decoration, if another decorator stands between it and `def`, if the source cannot be read, or
        if a local is annotated without a value; at a call, for what contradicts an annotation.
      typeguard.TypeCheckError: for annotations that are not of sharded arrays.
    """
    name = getattr(function, "__name__", function)
    if hasattr(function, "__wrapped__") or not isinstance(function, types.FunctionType) or name == "<lambda>":
        raise ShardingError(f"@typed stands next to `def`, under the other decorators of {name}")
    return _check_call(_rewritten(function))


def _rewritten(function):
    if inspect.isgeneratorfunction(function):
        raise ShardingError(f"{function.__name__} is a generator: what it yields cannot be typed")
    try:
        lines, first = inspect.getsourcelines(function)
    except OSError:
        what = f"@typed needs the source of {function.__name__}, which Python's own prompt does not keep"
        raise ShardingError(f"{what}: define it in a file, a notebook or IPython") from None
    # Under an `if`, a function that is indented parses as it stands; to remove the indent would change its strings.
    indented = lines[0][0].isspace()
    tree = ast.parse("if True:\n" * indented + "".join(lines))
    ast.increment_lineno(tree, first - 1 - indented)
    definition = tree.body[0].body[0] if indented else tree.body[0]
    definition.decorator_list = []
    definition.args.defaults = [ast.Constant(None)] * len(definition.args.defaults)  # the function keeps its own
    definition.args.kw_defaults = [default and ast.Constant(None) for default in definition.args.kw_defaults]
    file = inspect.getfile(function)
    annotations_read.add((file, definition.lineno))
    rewrite = _Rewrite(file)
    definition.body = rewrite.body(definition)
    # An outer function makes the names that the body closes over (and our own) free variables, as they were.
    names = sorted({*function.__code__.co_freevars, _LOCAL, _RETURN, _NESTED})
    outer = ast.parse(f"def outer({', '.join(names)}):\n    pass").body[0]
    arguments = definition.args
    named = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    for argument in (*named, arguments.vararg, arguments.kwarg):
        if argument is not None:
            argument.annotation = None  # evaluated once already
    definition.returns = None
    outer.body = [definition]
    code = compile(ast.fix_missing_locations(ast.Module([outer], [])), file, "exec")
    outer_code = next(constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    inner = next(constant for constant in outer_code.co_consts if isinstance(constant, types.CodeType))
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
    checks = {_LOCAL: _check_local, _RETURN: _check_return, _NESTED: _check_call}
    cells |= {name: types.CellType(value) for name, value in checks.items()}
    closure = tuple(cells[name] for name in inner.co_freevars)
    rewritten = types.FunctionType(inner, function.__globals__, function.__name__, function.__defaults__, closure)
    rewritten.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(rewritten, function)


class _Rewrite(ast.NodeTransformer):
    def __init__(self, file: str):
        self.file = file

    def visit_AnnAssign(self, node):
        self.generic_visit(node)
        target = ast.unparse(node.target)
        if node.value is None:
            fix = f"annotate {target} where it is assigned\n  at {self.file}:{node.lineno}"
            raise ShardingError(f"'{ast.unparse(node)}' has no value here: {fix}")
        node.value = self.call(_LOCAL, node, node.value, node.annotation, ast.Constant(target))
        return node

    def visit_Return(self, node):
        self.generic_visit(node)
        node.value = self.call(_RETURN, node, node.value or ast.Constant(None))
        return node

    def body(self, node) -> list[ast.stmt]:
        """The statements of a function, and the `return None` that Python adds at their end."""
        last = ast.copy_location(ast.Return(None), node.body[-1])
        return [self.visit(statement) for statement in (*node.body, last)]

    def visit_FunctionDef(self, node):
        if any(isinstance(inner, (ast.Yield, ast.YieldFrom)) for inner in ast.walk(node)):
            return node  # a generator: annotations of arrays on it are refused as unread
        annotations_read.add((self.file, node.lineno))
        node.body = self.body(node)
        node.decorator_list = [item for item in node.decorator_list if ast.unparse(item).rpartition(".")[2] != "typed"]
        node.decorator_list.append(ast.copy_location(ast.Name(_NESTED, ast.Load()), node))
        return node

    def visit_Lambda(self, node):
        return node

    def visit_ClassDef(self, node):
        return node  # its annotations are fields, no values

    @staticmethod
    def call(name, node, *arguments):
        return ast.copy_location(ast.Call(ast.Name(name, ast.Load()), list(arguments), []), node)


def _check_local(value, annotation, name):
    if isinstance(annotation, str):
        frame = sys._getframe(1)
        annotation = eval(annotation, frame.f_globals, frame.f_locals)
    return _checked(annotation, value, f"local {name}")


# The running function's annotation of its result, and the result's name in messages.
_result: contextvars.ContextVar[tuple[object, str]] = contextvars.ContextVar("result")


def _check_return(value):
    annotation, what = _result.get()
    return value if annotation is inspect.Signature.empty else _checked(annotation, value, what)


def _check_call(function):
    signature = inspect.signature(function, eval_str=True)
    place = f"{function.__name__} ({function.__code__.co_filename}:{function.__code__.co_firstlineno})"
    annotations = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    result = signature.return_annotation

    @functools.wraps(function)
    def call(*args, **kwargs):
        with Scope():
            bound = signature.bind(*args, **kwargs)
            passed = set(bound.arguments)
            bound.apply_defaults()
            for name, value in bound.arguments.items():
                if annotations[name] is inspect.Parameter.empty:
                    continue
                if name not in passed and (value is None or not holds_arrays(annotations[name])):
                    continue  # `size: int = None` is nobody's mistake
                kind, what = signature.parameters[name].kind, f"argument {name} of {place}"
                if kind is inspect.Parameter.VAR_POSITIONAL:
                    value = tuple(_checked(annotations[name], item, what) for item in value)
                elif kind is inspect.Parameter.VAR_KEYWORD:
                    value = {key: _checked(annotations[name], item, what) for key, item in value.items()}
                else:
                    value = _checked(annotations[name], value, what)
                bound.arguments[name] = value
            token = _result.set((result, f"the result of {place}"))
            try:
                return function(*bound.args, **bound.kwargs)
            finally:
                _result.reset(token)

    return call


def _checked(annotation, value, what):
    if holds_arrays(annotation):
        return check_tree(annotation, value, what=what)
    try:
        return typeguard.check_type(value, annotation)
    except typeguard.TypeCheckError as error:
        raise typeguard.TypeCheckError(f"{what}: {error}") from None
