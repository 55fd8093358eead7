"""Every wrong communication program made by mutation is refused, with its line: of train.py, of the notebook, and of
the copies of train.py that docs/changing.md makes.

No mutant means the same as the original: even a maximum taken twice is refused, since its dim is gone after the first.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
import small
from mutation import mutants, refuse_all
from pages import MESH_OF_RECIPE, RECIPES, cells_of_the_notebook, module_of, recipe, train_py

from shardlib.shard_map import typed_shard_map

D_T = dict(d=4, t=2)
MESHES = [D_T, dict(d=8, t=1), dict(d=2, t=2), dict(d=1, t=1)]


def shown(mesh):
    return " x ".join(map(str, mesh.values()))


def abstract(mesh):
    """A mesh that needs no devices."""
    return jax.sharding.AbstractMesh(tuple(mesh.values()), tuple(mesh))


# -- train.py ----------------------------------------------------------------------------------------------------------
def check_steps(path, source, mesh, **training):
    """Checks the training step and the validation step of a train.py; returns the number of claims."""
    module = module_of(path, source)
    module.act.dtype = jnp.bfloat16
    return sum(
        typed_shard_map(step).check(abstract(mesh), *given) for step, given in small.steps_of(module, training=training)
    )


@pytest.mark.parametrize("unroll_layers", [False, True], ids=["loop", "unrolled"])
@pytest.mark.parametrize("mesh", [D_T, *small.slow(*MESHES[1:])], ids=shown)
def test_the_program_itself_passes(mesh, unroll_layers, tmp_path):
    """train.py as it is is accepted on each mesh: the mutants are refused for their mutation."""
    assert check_steps(tmp_path / "train.py", train_py(), mesh, unroll_layers=unroll_layers) > 100


def test_mutants_are_refused(tmp_path):
    """Every seventh of those below, of each kind some."""
    made = mutants(train_py())[::7]
    assert all(any(kind in name for name, _, _ in made) for kind in (" removed", " twice", " as ", " without "))
    refuse_all(made, functools.partial(check_steps, mesh=D_T), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=shown)
def test_every_mutant_is_refused(mesh, tmp_path, record_property):
    """Each collective removed, doubled, with its axes exchanged or one axis too few, and each '+axis' dropped."""
    count = refuse_all(mutants(train_py()), functools.partial(check_steps, mesh=mesh), tmp_path)
    record_property("summary", f"{count} mutants of train.py on the mesh {shown(mesh)}: none accepted")
    assert count > 100


# -- docs/learn_sharding.ipynb -----------------------------------------------------------------------------------------
def check_notebook(path, source):
    """Checks its programs; returns the number of claims of each."""
    module = module_of(path, source)
    x, w, stream = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((16, 32), (32, 64), (8, 4, 32)))
    types = module.SplitOverD, module.SplitOverT, module.SplitOverBoth
    over_d, over_t, over_both = (type_(w_in=w, w_out=w) for type_ in types)
    programs = {
        "rows_apart": (D_T, x, w),
        "matrix_apart": (D_T, x, w),
        "contraction_apart": (D_T, x, w),
        "sum_apart": (D_T, x, w),
        "fsdp_step": ({"d": 8}, over_d, x, x),
        "tensor_parallel_step": ({"t": 8}, over_t, x, x),
        "step": (D_T, over_both, x, x),
        "feed_forward": (D_T, stream, w, w, w),
    }
    return [
        typed_shard_map(getattr(module, name)).check(abstract(mesh), *given)
        for name, (mesh, *given) in programs.items()
    ]


@pytest.mark.parametrize("every", [4, *small.slow(1)])
def test_mutants_of_the_notebook_are_refused(every, tmp_path, record_property):
    """Its programs are accepted as they are, and none of their mutants is; quickly, none of every fourth."""
    source = "\n\n\n".join(code for code, _ in cells_of_the_notebook("step"))
    assert min(check_notebook(tmp_path / "notebook.py", source)) > 2
    count = refuse_all(mutants(source)[::every], check_notebook, tmp_path, "notebook.py")
    record_property("summary", f"{count} mutants of docs/learn_sharding.ipynb: none accepted")
    assert count > 60 / every


# -- docs/changing.md --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "title", [pytest.param(title, marks=[] if title == "A new weight" else pytest.mark.slow) for title in RECIPES]
)
def test_every_mutant_of_a_recipe_is_refused(title, tmp_path, record_property):
    """train.py changed as the section says is accepted, and no mutant of the lines that are new in it is."""
    mesh, before = MESH_OF_RECIPE.get(title, D_T), set(train_py().splitlines())
    source = recipe(title, tmp_path / "recipe")
    assert check_steps(tmp_path / "recipe" / "train.py", source, mesh) > 100
    lines = source.splitlines()
    made = [mutant for mutant in mutants(source, tuple(mesh)) if lines[mutant[1] - 1] not in before]
    count = refuse_all(made, functools.partial(check_steps, mesh=mesh), tmp_path)
    record_property("summary", f"{count} mutants of docs/changing.md, {title}: none accepted")
    assert count > 100 or title not in MESH_OF_RECIPE
