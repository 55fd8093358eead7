"""Trains any family of models/, from random or given weights: all of them, some, or adapters beside them (LoRA).

    python -m train_any family=qwen3                         # a small one, from random weights
    python -m train_any --config-name=finetune_smollm2       # fine-tunes SmolLM2 on invented chats
    python -m train_any --config-name=any_pipeline           # layers on four stages of a pipeline
    python -m train_any check_only=true                      # proves the types below on the mesh, without a device

The keys of `model`, or initial_weights (a run, a checkpoint or a published folder), say what the model is. Frozen
weights have no gradient and no moments, and are not saved. docs/models.md begins with random weights;
docs/finetuning.md leads from conversations to a model that answers like them.
The legend is train.py's; rank is an adapter's. Types name groups of axes (models/mesh.py). Families do not know the
mesh: attention over c is in models/context.py, the schedule of stages in pipeline.py, replicas are here.
"""

import dataclasses
import functools
import importlib
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import optimizers
import pipeline
from jax_extra import fold_in_str
from models import adapters, bert, huggingface, layers, mesh, t5
from models.context import Context, context_of
from models.dropout import Dropout
from models.experts import Routing
from models.layers import act, stored
from optimizers import State
from runtime.check import batch_shapes, check_sizes, report_check
from runtime.config.command_line import run
from runtime.config.keys import Count, Decay, Name, NotNegative, PairTokens, Positive, Regex, RunConfig, Share, Steps
from runtime.config.rebuild import all_keys, as_tree, rebuild, shown
from runtime.config.sizes import nearest_multiples
from runtime.data.sources import tokenizer_of
from runtime.run import Run, names, start, with_shardings
from runtime.terminal import RunError
from shardlib import shardops
from shardlib.products import Adapted
from shardlib.shard_map import typed_shard_map
from shardlib.shardtypes import Array, ArrayType, f32, i32, make_shardings, map_type, narrowed, pytree_dataclass, u32
from shardlib.typed import typed
from tools.harness import Harness, Judge
from tools.tasks import InRun
from train import Metrics

TRAINED = sorted(set(huggingface.families().values()))
TokenBatch = layers.WeightedBatch  # weights are 1 where the data have none; T5's batch has more


# == Hyperparameters ===================================================================================================
@dataclass(frozen=True, kw_only=True)
class Stages:
    p: Count = 1  # stages of a pipeline; each holds some of the layers (pipeline.py)


@dataclass(frozen=True, kw_only=True)
class Mesh(mesh.Mesh, Stages):  # p is the outermost axis: the least is sent along it
    pass


@dataclass(frozen=True, kw_only=True)
class Lora:  # Hu et al. 2021
    rank: Steps = 0  # 0: no adapters; the weights themselves are trained
    alpha: Positive = 16.0  # a matrix W becomes W + alpha / rank · a · b
    dropout: Decay = 0.0  # drops elements of a's input, in training
    targets: Regex = '.*'  # a regular expression of the layer's matrices that get an adapter: 'w_q|w_v'


@dataclass(frozen=True, kw_only=True)
class Masking:  # the objective of encoders
    share: Share = 0.15  # share of the tokens that are predicted
    token: Steps | None = None  # the id that replaces them; null: the tokenizer's mask_token


@dataclass(frozen=True, kw_only=True)
class Training(optimizers.Training):
    tokens: PairTokens
    # A layer keeps for the backward pass what it names, on the device or in the host's memory; or only its input.
    save_for_backward: Literal['everything', 'on_host', 'inputs'] = 'everything'
    balance_loss: NotNegative = 0.0  # factor of the loss that is least where all experts get equally many tokens
    router_z_loss: NotNegative = 0.0  # factor of the loss that keeps the router's logits small
    # Parts of a stage's layers. 1: 1F1B; more: interleaved, stages wait less and send as many times more.
    pieces: Count = 1


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    CONFIG: ClassVar[str] = 'any_synthetic'

    mesh: Mesh
    # `family`, a file of models/ (llama by default), and the keys of its Model, which family=NAME --help explains. With
    # initial_weights, only what differs from theirs: model.compute_dtype=float32.
    model: dict[str, Any] = field(default_factory=dict)
    training: Training
    lora: Lora = field(default_factory=Lora)
    masking: Masking = field(default_factory=Masking)
    # A regular expression of the weights that are trained, 'transformer/w_q|.*norm'; null: all.
    train: Regex | None = None
    # Files of tasks to score at each validation (docs/evaluation.md): [exam.jsonl, questions.jsonl]
    eval_tasks: tuple[str, ...] = ()
    eval: Harness = field(default_factory=Harness)
    best_by: Name = 'validation_loss'  # the metric that patience watches; or score/exam.jsonl/acc
    # How attention crosses mesh.c. auto: by heads or, with more devices than heads, by gathered keys; ring: keys rotate
    # from device to device.
    context: Literal['auto', 'ring'] = 'auto'
    fp8: bool = False  # layers multiply by their matrices in 8 bits, and gather half as many bytes
    initial_adapter: Name | None = None  # a folder that PEFT wrote, of this rank; null: drawn by the seed


@pytree_dataclass
class MixtureMetrics(Metrics):
    balance_loss: f32['']  # mean over layers, without its factor; 1 where all experts get as many tokens
    router_z_loss: f32['']  # mean over layers, without its factor
    dropped: f32['']  # share of the tokens' choices that found no slot
    largest_load: f32['']  # the largest share of any expert in any layer, over the even share
    load: f32['E']  # each expert's share of the choices over the even share, mean over layers


# == What is trained ===================================================================================================
@pytree_dataclass
class Tuned:
    """The weights in two trees, each with None for what the other holds; or adapters, and all weights."""

    trained: Any  # float32
    frozen: Any


@dataclass(frozen=True)
class Task:
    """A config as it is trained: the model, types and shapes."""

    family: ModuleType
    model: Any
    mesh: Mesh
    lora: Lora
    along_c: Context
    in_step: Tuned  # types within a step: the same along r
    State: Any  # types at rest: a State of ArrayTypes, whose weights are Tuned
    decayed: Any  # like `trained`: a factor of training.weight_decay
    places: list[adapters.Place]  # where adapters are
    fp8: bool
    pieces: int  # pieces in each stage of a pipeline; 0: there are no stages

    @property
    def Batch(self) -> type:
        return pipeline.StagedBatch if self.pieces else {'both': t5.PairBatch}.get(self.family.KIND, TokenBatch)

    @property
    def Part(self) -> type:
        """The type of a microbatch and of its rows' numbers in the whole batch."""
        return tuple[{'encoder': bert.MaskedBatch}.get(self.family.KIND, self.Batch), u32['B/b']]

    @property
    def trained(self) -> Any:
        """Types at rest of what is trained."""
        return self.State.weights.trained

    @property
    def saved(self) -> Any:
        """Types of the state that checkpoints hold: nothing frozen."""
        return replace(self.State, weights=self.trained)


def resolved(config: Config) -> Config:
    """The config whose `model` is its family's Model. Raises RunError for keys that do not go together."""
    if not isinstance(config.model, dict):
        return config
    if config.lora.rank and config.train is not None:
        raise RunError('train and lora.rank: expected one of them, since with adapters all weights are frozen')
    if config.initial_adapter and not config.lora.rank:
        raise RunError('initial_adapter: set lora.rank and lora.alpha to those of its adapter_config.json')
    if not config.lora.rank and config.lora != Lora():
        raise RunError('lora.rank = 0: without adapters all weights are trained: set it, or leave the rest of lora out')
    if config.training.optimizer == 'muon' and config.lora.rank:
        raise RunError('training.optimizer = muon: it is for the matrices of layers; of adapters set it to adamw')
    if config.initial_weights is None and (config.lora.rank or config.train is not None):
        raise RunError('lora.rank, train: what is frozen would stay random: set initial_weights, or leave them out')
    if config.fp8 and config.lora.rank:
        raise RunError('fp8 = true: adapters have no 8-bit form: leave fp8 or lora.rank out')
    model = model_of(config)
    if config.fp8 and getattr(model, 'experts', 0):
        raise RunError('fp8 = true: experts have no 8-bit form: set it to false')
    if not getattr(model, 'experts', 0) and (config.training.balance_loss or config.training.router_z_loss):
        raise RunError('training.balance_loss, training.router_z_loss: only mixtures have routers: leave them out')
    check_encoder(config, family_of(model).KIND, model)
    check_stages(config, family_of(model).KIND)
    for key, by in ('model.attention', getattr(model, 'attention', 'auto')), ('context', config.context):
        if config.training.dropout and by not in ('auto', 'einsum'):
            raise RunError(f'{key} = {by} has no probabilities for training.dropout: set it to auto')
    new = replace(config, model=model)
    for key, value in {'origins': config.origins, 'given': config}.items():  # given: what the run's config.yaml says
        object.__setattr__(new, key, value)  # frozen for everyone else
    return new


def model_of(config: Config) -> Any:
    """The Model that the keys of `model` describe; with initial_weights, theirs with these keys replaced."""
    keys, path = dict(config.model), config.initial_weights
    name, source = keys.pop('family', None), None
    if path is not None:
        with ThreadPoolExecutor() as pool:
            source = huggingface.open_weights(path, pool)
        if source.family is None:
            raise RunError(f'initial_weights = {path}: no family of models/ computes this model')
        name, keys = name or name_of(source.family), {**as_tree(source.model), **keys}
    elif not name and not keys.keys() - set(huggingface.SETTINGS):
        raise RunError('model: expected a family and its sizes (+family=llama, say), or initial_weights')
    said = f'{config.origins.of("model.family")}: model.family = {shown(name)}'
    if source is not None and name != name_of(source.family):
        raise RunError(f'{said}: initial_weights = {path} are of {name_of(source.family)}: set it to that')
    if (file := f'models.{name or "llama"}') not in TRAINED:
        raise RunError(f'{said}: expected {", ".join(key.partition(".")[2] for key in TRAINED)}')
    family = importlib.import_module(file)
    model = rebuild(section_of(family.Model), {'model': keys}, config.origins).model
    if source is not None:
        huggingface.require_same(source, model)
    return model


@functools.cache
def section_of(Model: type) -> type:
    """A config of this section alone, so that messages name the key, model.d_ff, and where it was set."""
    return dataclasses.make_dataclass('Section', [('model', Model)], frozen=True, kw_only=True)


def has_key(key: str) -> bool:
    """Whether the key can be set here, for some family."""
    of_models = (all_keys(importlib.import_module(file).Model, 'model.') for file in TRAINED)
    return key == 'model.family' or any(key in keys for keys in (all_keys(Config), *of_models))


def explained(keys: dict[str, Any]) -> type:
    """The Config with the keys of its family's Model, for --help. keys: those of `model`."""
    if (file := f'models.{keys.get("family")}') not in TRAINED:
        return Config
    Model: Any = importlib.import_module(file).Model

    @dataclass(frozen=True, kw_only=True)
    class Explained(Config):
        model: Model  # `family`, a file of models/, and the keys of its Model, here of the chosen one

    return Explained


def family_of(model: Any) -> ModuleType:
    return sys.modules[type(model).__module__]


def name_of(family: ModuleType) -> str:
    """The name that `model.family` gives it."""
    return family.__name__.rpartition('.')[2]


def check_encoder(config: Config, kind: str, model: Any) -> None:
    """Raises RunError for keys that are only for models with an encoder, or only for others."""
    key = f'training.tokens.read_len = {config.training.tokens.read_len}'
    if kind == 'both' and not config.training.tokens.read_len:
        raise RunError(f'{key}: expected how many tokens of a row the encoder reads')
    if kind != 'both' and config.training.tokens.read_len:
        raise RunError(f'{key}: only models with an encoder and a decoder read a row apart: leave it out')
    if kind != 'encoder' and config.masking != Masking():
        raise RunError('masking: only encoders predict masked tokens: leave it out')
    if kind == 'encoder' and config.masking.token is not None and config.masking.token >= model.vocab:
        raise RunError(f'masking.token = {config.masking.token}: expected an id below model.vocab = {model.vocab}')
    if kind != 'decoder' and context_of(config.mesh, model.n_kv, config.context).way != 'deal':
        expected = f'expected auto, and model.n_kv = {model.n_kv} a multiple of mesh.t · mesh.c'
        raise RunError(f'mesh.c = {config.mesh.c}, context = {config.context}: an encoder deals heads out: {expected}')


def check_stages(config: Config, kind: str) -> None:
    """Raises RunError for keys that do not go with stages, or only with them."""
    stages = f'mesh.p = {config.mesh.p}'
    if config.mesh.p == 1 and config.training.pieces > 1:
        raise RunError(f'training.pieces = {config.training.pieces}: {stages} has no stages to cut: leave it out')
    if config.mesh.p > 1 and (config.fp8 or kind != 'decoder'):
        what = 'products in 8 bits' if kind == 'decoder' else 'a model with an encoder'
        raise RunError(f'{stages}: {what} cannot be dealt out to stages: set it to 1')


def task_of(config: Config) -> Task:
    """The task of a resolved config. Also sets the types of activations (`act`) and of matrices at rest (`stored`)."""
    family, model, lora = family_of(config.model), config.model, config.lora
    act.dtype = model.compute_dtype
    stored.dtype = act.dtype if lora.rank else jnp.float32
    shapes = jax.eval_shape(functools.partial(family.init, model), np.uint32(0))
    types, places = narrowed(family.Weights, shapes), []
    if lora.rank:
        places = adapters.chosen(adapters.places(family, shapes), lora.targets)
        if lora.dropout and any(place.is_of_experts for place in places):
            raise RunError("lora.dropout: expected 0 for adapters of experts, as PEFT does")
        trained = adapters.tree(family, places, lambda place, which: f32[str(getattr(place, which))])
        frozen, decayed = types, jax.tree.map(lambda _: 1.0, trained)
    else:
        is_trained = [re.fullmatch('.*' if config.train is None else config.train, name) for name in names(types)]
        if not any(is_trained):
            raise RunError(f'train = {config.train!r} matches no weight: {", ".join(names(types))}')
        trained, frozen = [
            jax.tree.unflatten(
                jax.tree.structure(types),
                [leaf if bool(has) == want else None for leaf, has in zip(jax.tree.leaves(types), is_trained)],
            )
            for want in (True, False)
        ]
        # Only the layers' matrices decay, as in train.py: no norms, biases or embeddings.
        factors = [float('/' in name and w.element is stored) for name, w in zip(names(trained), leaves(trained))]
        decayed = jax.tree.unflatten(jax.tree.structure(trained), factors)
    in_step = Tuned(trained, frozen)
    rest = jax.tree.map(at_rest, in_step)
    state = replace(optimizers.state_type(config.training, rest.trained), weights=rest)
    along_c = context_of(config.mesh, model.n_kv, config.context)
    pieces = config.training.pieces if config.mesh.p > 1 else 0
    return Task(family, model, config.mesh, lora, along_c, in_step, state, decayed, places, config.fp8, pieces)


def at_rest(array: ArrayType) -> ArrayType:
    """The type at rest: the dim that is split over d is split over r and p too, 'M/w/r/p F/t'."""
    return array.element[' '.join(f'{dim}/r/p' if 'd' in dim.axes else str(dim) for dim in array.spec.dims)]


def state_type(config: Config) -> Any:
    """The state's types, for a resolved config."""
    return task_of(config).State


def leaves(types: Any) -> list[ArrayType]:
    return jax.tree.leaves(types)


def first_weights(task: Task, seed: jax.Array) -> Any:
    """The trained weights as drawn: adapters whose b is zero, so they change nothing; or the model's weights, which
    initial_weights then replace."""
    if not task.lora.rank:
        drawn = task.family.init(task.model, seed)
        return jax.tree.map(lambda type_, w: w if type_ else None, task.trained, drawn, is_leaf=is_none)

    def draw(place, which):
        shape = place.shape(which, task.lora.rank)
        if which == 'b':
            return jnp.zeros(shape, jnp.float32)
        key = fold_in_str(jax.random.key(seed), place.path)
        return jax.random.uniform(key, shape, jnp.float32, -1, 1) / np.float32(place.fan_in**0.5)

    return adapters.tree(task.family, task.places, draw)


def init_state(task: Task, seed: jax.Array) -> State:
    """The first state of what is trained."""
    return optimizers.first_state(task.saved, first_weights(task, seed))


def drawn_state(config: Config, seed: jax.Array) -> State:
    """The whole first state of a resolved config, frozen weights included, with weights drawn, not read."""
    task = task_of(config)
    state, drawn = init_state(task, seed), task.family.init(task.model, seed)
    frozen = jax.tree.map(
        lambda type_, w: type_ and w.astype(type_.element.dtype), task.State.weights.frozen, drawn, is_leaf=is_none
    )
    return replace(state, weights=Tuned(state.weights, frozen))


# == Loss ==============================================================================================================
Drops = tuple[Dropout | None, Dropout | None]  # the model's, and that of adapters' inputs


def drops_of(task: Task, training: Training, step: jax.Array | None, rows: jax.Array | None) -> Drops:
    """The dropouts of these rows in this step; None in validation, which has no step."""

    def of(name, rate):
        if not rate or step is None:
            return None
        return Dropout(rate, optimizers.seed_of(training, name, step), rows, task.along_c.in_order)

    return of('dropout', training.dropout), of('lora.dropout', task.lora.dropout)


def joined(task: Task, weights: Tuned) -> Any:
    """The model's weights in one tree; adapters stay apart."""
    return weights.frozen if task.lora.rank else whole(task, weights)


def options_of(training: Training, dropout: Dropout | None, fp8: bool = False) -> layers.Options:
    how = {'reduce_dtype': training.gradient_reduce_dtype, 'kept': training.save_for_backward}
    return layers.Options(**how, unroll=training.unroll_layers, fp8=fp8, dropout=dropout)


def loss_sum(
    task: Task, training: Training, special_id: int, weights: Tuned, batch: TokenBatch, drops: Drops, z_loss: float
):  # fmt: skip
    """The sum of weight · -log softmax over all targets, pending over all axes, and what routers did (None without
    experts).

    weights: as in a step. drops, z_loss: (None, None) and 0 in validation.
    """
    family, model, (dropout, of_adapters) = task.family, task.model, drops
    reduce_dtype = training.gradient_reduce_dtype
    how = options_of(training, dropout, fp8=task.fp8)
    all_weights = joined(task, weights)
    if task.lora.rank:
        adapt = functools.partial(adapted, task.lora, of_adapters)
        how = replace(how, adapt=adapt, low=numbered(task, weights.trained))
    ends = family.TABLE.gather_first(all_weights, reduce_dtype)
    if family.KIND == 'both':
        x, routing = family.hidden(model, all_weights, *family.pairs_of(batch, special_id), ends=ends, how=how), None
    else:
        inputs, *places = layers.inputs_of(batch, special_id)
        inputs = batch.inputs if family.KIND == 'encoder' else inputs
        x, routing = layers.hidden(
            family, model, all_weights, inputs, *places, ends=ends, along_c=task.along_c, how=how
        )
    cap = family.mask(model).logits_cap
    unembed = over_stages(family.TABLE.gather_unembed(all_weights, ends, reduce_dtype))
    return layers.loss_sum(unembed, x, batch, cap, batch.weight, z_loss, task.along_c, V='V/u'), routing


@typed
def over_stages(unembed: Any) -> Any:
    """Each stage's part of the vocabulary, 'V/u M' (Yeung et al. 2024); with one stage, all of it."""
    strings = {2: 'V/t M -> V/u M', 1: 'V/t -> V/u'}  # for the table, and for a bias
    return jax.tree.map(lambda w: shardops.slice(strings[w.ndim], w), unembed)


@typed
def loss_of_routers(training: Any, parts: int, routing: Array['layers', Routing]) -> f32['+b +c']:
    balance = shardops.sum_unreduced('layers +b +c -> +b +c', routing.balance)
    z = shardops.sum_unreduced('layers +b +c -> +b +c', routing.z)
    return (training.balance_loss * balance + training.router_z_loss * z) / parts


def no_routing(spec: str, E: int, **sizes: int) -> Routing | None:
    """Zeros to add routers' reports to; `spec`: the dims before a router's own. None without experts."""
    if not E:
        return None
    scalars = [shardops.zeros(f'{spec} +b +c', f32, **sizes) for _ in range(3)]
    return Routing(scalars[0], scalars[1], shardops.zeros(f'{spec} E', f32, E=E, **sizes), scalars[2])


def row_numbers(batch: Any, spec: str) -> jax.Array:
    """The numbers in the whole batch of a device's rows, u32['B/b']; `spec` says how the rows are split."""
    count = batch.targets.shape[0] * shardops.axis_size('b') * (shardops.axis_size('p') if '/p' in spec else 1)
    return shardops.slice(f'B -> {spec}', jnp.arange(count, dtype=jnp.uint32))


def loss_and_gradient(
    task: Task, training: Training, special_id: int, parts: int, in_step: Tuned, batch: Any, step: jax.Array,
    target_count: jax.Array,
):  # fmt: skip
    """The loss, pending over all axes; what routers did, summed over microbatches; and the gradient of what is trained,
    pending over the axes along which its weight is the same."""
    Part = task.Part

    @typed
    def loss(trained: task.in_step.trained, weights: task.in_step, part: Part):
        batch, rows = part
        drops = drops_of(task, training, step, rows)
        value, routing = loss_sum(
            task, training, special_id, replace(weights, trained=trained), batch, drops, training.z_loss
        )
        value = total = value / target_count
        if routing is not None:
            of_routers = loss_of_routers(training, parts, routing)
            total = value + shardops.pending(f'+b +c -> {ALL}', of_routers)
        return total, (value, routing)

    @typed
    def add_microbatch(sums, part: Part):
        # Without the barrier XLA gathers what no layer owns before the loop, and holds it throughout.
        weights, part = lax.optimization_barrier((in_step, part))
        (_, reports), gradient = shardops.value_and_grad(loss, has_aux=True)(weights.trained, weights, part)
        return jax.tree.map(jnp.add, sums, (reports, gradient)), None

    def regroup(array, x):  # 'B/b', 'B/b L', or an encoder's 'B/b S'
        columns = ' '.join(array.spec.names[1:])
        return shardops.regroup(f'B/b {columns} -> parts R/b {columns}', x, parts=parts)

    batches = jax.tree.map(regroup, map_type(lambda array: array, Part), (batch, row_numbers(batch, 'B/b')))
    routing = no_routing('layers', getattr(task.model, 'experts', 0), layers=task.model.layers)
    zero = (shardops.zeros(ALL, f32), routing), jax.tree.map(jnp.zeros_like, in_step.trained)
    ((value, routing), gradient), _ = lax.scan(add_microbatch, zero, batches)
    return value, routing, gradient


@dataclass(frozen=True)
class Staged:
    """The parts of the loss that `pipeline.pipelined` runs on stages."""

    task: Task
    training: Training
    special_id: int
    parts: int
    in_step: Tuned  # layers lie as stages have them, 'p/p v n M/w F/t'
    stage_rows: Any  # a device's rows by microbatches, 'p/p groups R/b L', and their numbers, which dropout needs
    all_rows: Any  # the rows of all stages
    step: jax.Array | None  # None: no dropout
    target_count: jax.Array
    z_loss: float

    def weights(self, trained: Any) -> Any:
        return joined(self.task, replace(self.in_step, trained=trained))

    def ends(self, trained: Any) -> Any:
        return self.task.family.gather_ends(self.weights(trained), self.training.gradient_reduce_dtype)

    def layers(self, trained: Any) -> tuple[Any, Any]:
        """The layers' trained weights and their frozen ones, each a tree with None for the others, gathered once a
        step, 'p/p v n M F/t': 2 bytes for each of the stage's parameters / t are sent and held, and 4 for each in the
        gradient."""
        gather = functools.partial(self.task.family.gather_layer, reduce_dtype=self.training.gradient_reduce_dtype)
        of_pieces = functools.partial(lax.map, functools.partial(lax.map, gather))
        gathered = shardops.each('p', of_pieces, self.weights(trained).transformer)
        table, at_rest = self.task.family.TABLE.layer, self.in_step.frozen.transformer
        is_frozen = {x: getattr(at_rest, name) is not None for name, w in table.items() for x in w.parts(name)}

        def without(frozen: bool):
            return replace(gathered, **{name: None for name, is_ in is_frozen.items() if is_ == frozen})

        return without(frozen=True), without(frozen=False)

    def embed(self, ends: Any) -> Any:
        """Each device embeds its own rows, 'p/p groups B/b L/c M/t'."""
        task, groups = self.task, self.parts // self.task.mesh.p

        @typed
        def of_rows(batch: Any):
            batch = jax.tree.map(functools.partial(shardops.regroup, 'groups B/b L -> R/b L'), batch)
            inputs, _, position = map(task.along_c.part, layers.inputs_of(batch, self.special_id))
            x = task.family.embed(task.model, ends, inputs, position, 'M/t')
            return shardops.regroup('R/b L/c M/t -> groups B/b L/c M/t', x, groups=groups)

        return shardops.each('p', of_rows, self.stage_rows[0])

    def stage(self, piece: Any, fixed: Any, x: jax.Array, number: jax.Array) -> Any:
        """The stage of `pipelined`. fixed, by layer: frozen weights, the window, the layer's number."""
        task, training, (frozen, window, numbers) = self.task, self.training, fixed
        batch, rows = pipeline.microbatch(self.all_rows, number)
        dropout, of_adapters = drops_of(task, training, self.step, rows)
        if task.lora.rank:
            weights, in_use = (frozen, (piece, numbers)), functools.partial(adapted, task.lora, of_adapters)
        else:
            weights, in_use = (filled(piece, frozen),), lambda w: w
        stack = weights, window, None if dropout is None else numbers
        _, segment, position = layers.inputs_of(batch, self.special_id)
        how = options_of(training, dropout)
        x, routing = layers.through(task.family, task.model, x, stack, in_use, segment, position, how, task.along_c)
        if routing is None:
            return (x, None), None
        loss = loss_of_routers(training, self.parts, routing)
        return (x, shardops.pending('+b +c -> +b +c +t', loss)), routing

    def head(self, ends: Any, frozen: Any, shared: Any, y: jax.Array, number: jax.Array) -> jax.Array:
        (trained, norms), family, model = shared, self.task.family, self.task.model
        unembed = frozen if trained is None else trained
        batch, _ = pipeline.microbatch(self.all_rows, number)
        x = layers.ended(family.final, model, replace(ends, **norms), pipeline.from_last(y))
        cap, along_c = family.mask(model).logits_cap, self.task.along_c
        value = layers.loss_sum(unembed, x, batch, cap, batch.weight, self.z_loss, along_c, V='V/u')
        return value / self.target_count


def of_head(is_trained: bool, ends: Any) -> Any:
    """A stage's part of the unembedding, in float32 so that its gradient adds up in float32 over microbatches; and the
    other ends, without the embedding. An unembedding that is not trained comes apart from them."""
    norms = {name: w for name, w in vars(ends).items() if name not in ('embed', 'unembed') and w is not None}
    unembed = over_stages(ends.unembed).astype(jnp.float32)
    return ((unembed, norms), None) if is_trained else ((None, norms), unembed)


def staged_loss_and_gradient(
    task: Task, training: Training, special_id: int, parts: int, in_step: Tuned, batch: Any, step: jax.Array | None,
    target_count: jax.Array, z_loss: float, backward: bool = True,
):  # fmt: skip
    """`loss_and_gradient` on the stages of a pipeline. backward=False: no gradient."""
    family, model, p, v = task.family, task.model, task.mesh.p, task.pieces
    layers.require_positions(model, batch.targets.shape[1])
    has_dropout = (training.dropout or task.lora.dropout) and step is not None
    rows = layers.WeightedBatch(**vars(batch)), row_numbers(batch, 'B/p/b') if has_dropout else None
    stage_rows = jax.tree.map(functools.partial(pipeline.stage_rows, groups=parts // p), rows)
    all_rows = jax.tree.map(pipeline.all_rows, stage_rows)
    staged = Staged(task, training, special_id, parts, in_step, stage_rows, all_rows, step, target_count, z_loss)

    trained = names(task.in_step.trained)
    trains_ends = any('/' not in name for name in trained)
    table = 'unembed' if 'unembed' in trained + names(task.in_step.frozen) else 'embed'
    trains_unembed = table in trained or 'unembed_bias' in trained

    with jax.named_scope('embed'):
        ends, pull_ends = shardops.vjp(staged.ends, in_step.trained)
        stream, pull_stream = shardops.vjp(staged.embed, ends)
        shared, pull_shared, unembed = shardops.vjp(functools.partial(of_head, trains_unembed), ends, has_aux=True)
    with jax.named_scope('stages'):
        if task.lora.rank:
            pieces, (_, frozen) = in_step.trained.transformer, staged.layers(in_step.trained)
        else:
            pieces, pull_layers, frozen = shardops.vjp(staged.layers, in_step.trained, has_aux=True)
        of_layers = family.mask(model).by_layer(), jnp.arange(model.layers, dtype=jnp.uint32)
        fixed = frozen, *jax.tree.map(functools.partial(pipeline.dealt_out, 'layers', v), of_layers)

    def head(trained_ends, y, number):
        return staged.head(ends, unembed, trained_ends or shared, y, number)

    seen = no_routing('p/p v n', getattr(model, 'experts', 0), v=v, n=model.layers // (p * v))
    arguments = pieces, fixed, shared if trains_ends else (), stream, seen, backward
    value, seen, of_pieces, of_shared, of_stream = pipeline.pipelined(staged.stage, head, *arguments)
    types = map_type(lambda array: array, Routing)
    routing = seen and jax.tree.map(lambda array, x: pipeline.collected(f'layers {array.spec}', x), types, seen)
    if not backward:
        return value, routing, None

    def like(gradients, weights):
        return jax.tree.map(lambda g, w: g.astype(w.dtype), gradients, weights)

    with jax.named_scope('stages'):
        of_pieces = like(of_pieces, pieces)
        gradient = replace(in_step.trained, transformer=of_pieces) if task.lora.rank else pull_layers(of_pieces)[0]
    if trains_ends:
        with jax.named_scope('embed'):
            of_ends = pull_stream(of_stream)[0], pull_shared(like(of_shared, shared))[0]
            (of_ends,) = pull_ends(jax.tree.map(jnp.add, *of_ends))
        gradient = replace(of_ends, transformer=gradient.transformer)
    return value, routing, gradient


def is_none(x: Any) -> bool:
    return x is None


def filled(trained: Any, frozen: Any) -> Any:
    """The trained weights, and the frozen ones where they are None."""
    return jax.tree.map(lambda w, other: other if w is None else w, trained, frozen, is_leaf=is_none)


def numbered(task: Task, trained: Any) -> Any:
    """The layers' adapters with the layers' numbers; a decoder's numbers go on where its encoder's end."""
    numbers = functools.partial(jnp.arange, dtype=jnp.uint32)
    if task.family.KIND != 'both':
        return trained.transformer, numbers(task.model.layers)
    first, last = task.model.encoder_layers, task.model.encoder_layers + task.model.layers
    return (trained.encoder, numbers(first)), (trained.decoder, numbers(first, last))


def whole(task: Task, weights: Tuned) -> Any:
    """The model's weights with the adapters' products added; of global arrays, outside of the mapped step."""
    if not task.lora.rank:
        return filled(weights.trained, weights.frozen)
    merged = weights.frozen
    for place in task.places:
        pair, stack = getattr(getattr(weights.trained, place.stack), place.name), getattr(merged, place.stack)
        one, other, all_ = adapters.letters(place.a, place.b, place.whole)
        change = task.lora.alpha / task.lora.rank * jnp.einsum(f'{one},{other}->{all_}', pair.a, pair.b)
        w, part = getattr(stack, place.leaf), (slice(None), *place.part)
        w = w.at[part].set((w[part] + change).astype(w.dtype))
        merged = replace(merged, **{place.stack: replace(stack, **{place.leaf: w})})
    return merged


def adapted(lora: Lora, dropout: Dropout | None, w: Any, low: tuple[Any, jax.Array]) -> Any:
    """A gathered layer with its adapters, whose products join its sums: no transfer is added (`products.product`)."""
    (pairs, layer), matrices = low, {}
    drop = None if dropout is None else dropout.of_layer(layer)
    for name, pair in vars(pairs).items() if pairs else ():
        if pair is not None:
            a, b = pair.a.astype(act.dtype), pair.b.astype(act.dtype)
            matrices[name] = Adapted(getattr(w, name), a, b, lora.alpha / lora.rank, drop)
    return replace(w, **matrices)


# == Replicas ==========================================================================================================
AXES = [field.name for field in dataclasses.fields(Mesh)]
ALL = ' '.join(f'+{axis}' for axis in AXES)


def pending_over(axes: Any) -> str:
    return ' '.join(f'+{axis}' for axis in AXES if axis in axes)


def owed(array: ArrayType) -> set[str]:
    """The axes along which all devices hold the same: the gradient is a sum over them."""
    return set(AXES) - array.spec.split


def on_stages(task: Task, array: ArrayType) -> bool:
    """Whether the array belongs to layers that are dealt out to stages."""
    return bool(task.pieces) and array.spec.names[:1] == ('layers',)


@typed
def gathered_over_replicas(task: Task, weights: Tuned) -> Any:
    """The weights of a step, the same along r, and along p but for stages' layers. Matrices travel in the type in which
    they are used: between hosts 2 bytes a parameter of the devices' share, 4 for norms. A step holds 4 bytes a
    parameter of the share."""

    def gather(in_step, w):
        rest, use = str(at_rest(in_step).spec), str(in_step.spec)
        # With one replica nothing is sent, so nothing is rounded.
        dtype = act if task.mesh.p * task.mesh.r > 1 and in_step.element is stored else None
        if on_stages(task, in_step):
            w = pipeline.dealt_out(rest, task.pieces, w if dtype is None else w.astype(act.dtype))
            rest, use = pipeline.staged(rest), pipeline.staged(use)
        w = w if rest == use else shardops.all_gather(f'{rest} -> {use}', w, dtype=dtype)
        return w.astype(in_step.element.dtype)

    return jax.tree.map(gather, task.in_step, weights)


@typed
def reduced(task: Task, gradient: Any) -> Any:
    """Sums each gradient over the axes that it is pending over, and splits it as its weight at rest. Once a step: 4
    bytes a parameter of the share over r and p, and an all-reduce for what is small."""

    def of_one(in_step, g):
        rest, use, over = str(at_rest(in_step).spec), str(in_step.spec), owed(in_step)
        scattered = {'r', 'p'} if rest != use else set()
        if on_stages(task, in_step):
            rest, use, over, scattered = pipeline.staged(rest), pipeline.staged(use), over - {'p'}, scattered - {'p'}
        if scattered:
            rests = pending_over(over - scattered)
            g = shardops.psum_scatter(f'{use} {pending_over(over)} -> {rest} {rests}', g)
            over = over - scattered
        g = shardops.psum(f'{rest} {pending_over(over)} -> {rest}', g) if over else g
        return pipeline.collected(str(at_rest(in_step).spec), g) if on_stages(task, in_step) else g

    return jax.tree.map(of_one, task.in_step.trained, gradient)


# == Optimizer and step ================================================================================================
@typed
def squared_norms(types: Any, tree: Any) -> f32['weights']:
    """The squared norm of each weight, gradient or change, all layers together; one sum over all devices."""
    squares = []
    for array, w in zip(leaves(types), jax.tree.leaves(tree), strict=True):
        split = pending_over(array.spec.split)
        square = shardops.sum_unreduced(f'{array.spec} -> {split}', w * w)
        squares.append(shardops.pending(f'{split} -> {ALL}', square) if owed(array) else square)
    return shardops.psum(f'weights {ALL} -> weights', jnp.stack(squares))


@typed
def updated(
    task: Task, training: optimizers.Training, state: State, value: f32[''], gradient, skipped: u32[''], step: u32['']
):
    """The state after an update, and its metrics, as in train.py."""
    Trained = task.trained
    with jax.named_scope('clip'):
        grad_squares: f32['weights'] = squared_norms(Trained, gradient)
        grad_norm: f32[''] = jnp.sqrt(shardops.sum_unreduced('weights -> ', grad_squares))
        clip = jnp.minimum(1.0, training.max_grad_norm / jnp.maximum(grad_norm, 1e-30))
        clipped: Trained = jax.tree.map(lambda g: clip * g, gradient)

    with jax.named_scope('optimizer'):
        before = replace(state, weights=state.weights.trained)
        moved = optimizers.step(training, task.saved, task.decayed, before, clipped, step)
        finite = jnp.isfinite(value) & jnp.isfinite(grad_norm)  # else the step changes nothing
        new = jax.tree.map(lambda new, old: jnp.where(finite, new, old), moved, before)

    with jax.named_scope('metrics'):
        weight_squares = squared_norms(Trained, new.weights)
        change_squares = squared_norms(Trained, jax.tree.map(jnp.subtract, new.weights, before.weights))
        metrics = Metrics(
            loss=value,
            learning_rate=optimizers.learning_rate(training, step),
            grad_norm=grad_norm,
            weight_norm=jnp.sqrt(shardops.sum_unreduced('weights -> ', weight_squares)),
            skipped_steps=skipped + jnp.where(finite, jnp.uint32(0), jnp.uint32(1)),
            grad_norm_of=jnp.sqrt(grad_squares),
            weight_norm_of=jnp.sqrt(weight_squares),
            update_ratio_of=jnp.sqrt(change_squares / jnp.maximum(weight_squares, 1e-30)),
        )
    return replace(new, weights=replace(state.weights, trained=new.weights)), metrics


@jax.named_scope('metrics')
@typed
def mixture_metrics(model: Any, parts: int, metrics: Metrics, routing: Array['layers', Routing]) -> MixtureMetrics:
    """A mixture's metrics. routing: what its routers did, summed over microbatches."""
    scalars = jnp.stack([routing.balance, routing.z, routing.dropped])
    scalars = shardops.psum('metrics layers +b +c -> metrics layers', scalars) / parts
    balance, z, dropped = shardops.sum_unreduced('metrics layers -> metrics', scalars) / model.layers
    load = routing.load / parts * model.experts
    return MixtureMetrics(
        **vars(metrics),
        balance_loss=balance,
        router_z_loss=z,
        dropped=dropped,
        largest_load=shardops.pmax('layers E -> ', load),
        load=shardops.sum_unreduced('layers E -> E', load) / model.layers,
    )


@typed
def count_of(batch: Any) -> f32['']:
    """The sum of the targets' weights over all devices."""
    if isinstance(batch, pipeline.StagedBatch):
        return shardops.psum('+p +b -> ', shardops.sum_unreduced('B/p/b L -> +p +b', batch.weight))
    return shardops.psum('+b -> ', shardops.sum_unreduced('B/b L -> +b', batch.weight))


def read_masked(task: Task, config: Config, mask: int, batch: Any, step: jax.Array) -> Any:
    """The batch with masked inputs for an encoder; unchanged for other families."""
    if task.family.KIND != 'encoder':
        return batch
    seed, share = optimizers.seed_of(config.training, 'masking', step), config.masking.share
    return bert.masked(batch, row_numbers(batch, 'B/b'), seed, share, mask, task.model.vocab)


def mapped_steps(config: Config, special_id: int, part: float = 1.0) -> tuple[typed_shard_map, typed_shard_map]:
    """The training step, on a part of the batch, and the validation step over the mesh, for a resolved config.

    special_id: a decoder's input where no token comes before: at the start of a sequence, or of what T5 writes; for an
      encoder, the token that masks.
    """
    task, training = task_of(config), config.training
    parts = round(part * training.microbatches)
    StateType, Weights, Batch = task.State, task.State.weights, task.Batch
    AllMetrics = MixtureMetrics if getattr(config.model, 'experts', 0) else Metrics

    @typed
    def training_step(state: StateType, skipped: u32[''], step: u32[''], batch: Batch) -> tuple[StateType, AllMetrics]:
        """The state after update number `step`, from 0, and its metrics."""
        with jax.named_scope('count_targets'):
            batch = read_masked(task, config, special_id, batch, step)
            target_count = count_of(batch)
            target_count = jnp.where(target_count > 0, target_count, 1.0)
        with jax.named_scope('replicas'):
            in_step = gathered_over_replicas(task, state.weights)
        with jax.named_scope('gradient'):
            args = task, training, special_id, parts, in_step, batch, step, target_count
            if task.pieces:
                value, routing, gradient = staged_loss_and_gradient(*args, training.z_loss)
            else:
                value, routing, gradient = loss_and_gradient(*args)
            value: f32[''] = shardops.psum(f'{ALL} -> ', value)
        with jax.named_scope('replicas'):
            gradient: task.trained = reduced(task, gradient)
        new, metrics = updated(task, training, state, value, gradient, skipped, step)
        return new, metrics if routing is None else mixture_metrics(task.model, parts, metrics, routing)

    @typed
    def validation_step(weights: Weights, loss: f32[''], targets: f32[''], batch: Batch) -> tuple[f32[''], f32['']]:
        """Adds a batch's losses and its targets' weights to the sums so far."""
        batch = read_masked(task, config, special_id, batch, jnp.uint32(0))
        in_step = gathered_over_replicas(task, weights)
        if task.pieces:
            args = task, training, special_id, training.microbatches, in_step, batch, None, jnp.float32(1)
            value, _, _ = staged_loss_and_gradient(*args, 0.0, backward=False)
        else:
            value, _ = loss_sum(task, training, special_id, in_step, batch, (None, None), 0.0)
        return loss + shardops.psum(f'{ALL} -> ', value), targets + count_of(batch)

    return typed_shard_map(training_step), typed_shard_map(validation_step)


# == Main loop =========================================================================================================
def shapes(config: Config) -> tuple[State, Any]:
    """The global shapes of state and batch, for a resolved config. Raises RunError: the mesh cannot split them."""
    task, mesh, tokens = task_of(config), config.mesh, config.training.tokens
    if task.pieces:
        of_stages = 'model.layers', config.model.layers, mesh.p * task.pieces, 'mesh.p · training.pieces'
        doubled = 2 ** len(config.training.batch_doubles_at)  # the smallest batch has so many times fewer microbatches
        what = 'mesh.p' if doubled == 1 else f'mesh.p · {doubled}, for training.batch_doubles_at,'
        of_batch = 'training.microbatches', config.training.microbatches, mesh.p * doubled, what
        for key, size, count, what in of_stages, of_batch:
            if size % count:
                fix = nearest_multiples(size, count)
                raise RunError(f'{key} = {size}: dealt out to {what} = {count}: set it to {fix}')
        check_sizes(config, f32['V/u'], jax.ShapeDtypeStruct((config.model.vocab,), jnp.float32))
    if getattr(config.model, 'capacity', None):
        key, parts = 'model.capacity_parts', config.model.capacity_parts
        if tokens.len % parts:
            raise RunError(f'{key} = {parts}: of rows of training.tokens.len = {tokens.len}: set it to a divisor')
        if mesh.c > 1 and parts % (2 * mesh.c):
            fix = nearest_multiples(parts, 2 * mesh.c)
            raise RunError(f'{key} = {parts}: expected a multiple of 2 · mesh.c = {2 * mesh.c}: set it to {fix}')
    for length in filter(None, (tokens.len, tokens.read_len)):
        check_sizes(config, i32['L/c'], jax.ShapeDtypeStruct((length,), jnp.int32))
    if task.along_c.way != 'deal':  # each device has positions from the front and from the end
        check_sizes(config, i32['2 l/c'], jax.ShapeDtypeStruct((2, tokens.len // 2), jnp.int32))
    state = jax.eval_shape(functools.partial(drawn_state, config), np.uint32(0))
    check_sizes(config, task.State, state)
    batch = batch_shapes(config, TokenBatch if task.pieces else task.Batch)  # a microbatch passes all stages
    return state, task.Batch(**vars(batch))


def reader(config: Config, task: Task) -> Callable | None:
    """A function that reads the trained weights, with huggingface.restored's arguments; None: they are drawn."""
    if not task.lora.rank:
        return functools.partial(huggingface.restored, is_part=True)
    if config.initial_adapter is None:
        return None
    named = adapters.named(task.family, task.model, task.places)
    read = adapters.read_peft(Path(config.initial_adapter).expanduser(), named, task.lora.rank, task.lora.alpha)

    def read_adapters(source, model, like, pool):
        # PEFT's are beside the published base, whose logits may have another scale than this model's.
        factors = huggingface.to_published(replace(source, model=model))

        def scaled(place, which):
            return read(place, which) / np.float32(factors.get(f'weights/{place.path}', 1.0) if which == 'b' else 1.0)

        read_all = adapters.tree(task.family, task.places, scaled)
        return jax.tree.map(lambda w, like: jax.device_put(w, like.sharding), read_all, like)

    return read_adapters


def scorer_of(config: Config, task: Task, special_id: int) -> InRun | None:
    """The scorer of eval_tasks and eval.harness; None: there are none."""
    if not config.eval_tasks and not config.eval.harness:
        return None
    join = functools.partial(whole, task)
    if task.lora.rank:
        join = jax.jit(join, out_shardings=make_shardings(task.in_step.frozen))
    judge = Judge(config.eval, 'eval.harness') if config.eval.harness else None
    return InRun(config, tokenizer_of(config), join, special_id, judge)


def special_of(config: Config, task: Task, source: huggingface.Source | None) -> int:
    """The special_id of `mapped_steps`; a decoder's comes from its data, later. Raises RunError where nothing says
    which token masks."""
    if task.family.KIND != 'encoder':
        return source.decoder_start if source and task.family.KIND == 'both' else 0
    tokenizer = None if config.masking.token is not None else tokenizer_of(config)
    mask = config.masking.token if tokenizer is None else tokenizer.id_of('mask_token')
    if mask is None or mask >= config.model.vocab:
        raise RunError(f'masking.token = {shown(mask)}: expected the id, below model.vocab, of the token that masks')
    return mask


def main(config: Config) -> None:
    """Trains a model on a flat-tokens data set, as a config in configs/ says."""
    config = resolved(config)
    state, batch = shapes(config)
    if config.check_only:
        return report_check(config, mapped_steps(config, special_id=0), state, batch)
    task = task_of(config)
    read = reader(config, task)
    mesh = start(config)
    with jax.set_mesh(mesh), ThreadPoolExecutor(config.io.max_io_threads) as pool:
        source = config.initial_weights and huggingface.open_weights(config.initial_weights, pool)
        is_part = bool(jax.tree.leaves(task.State.weights.frozen))
        about = {'family': name_of(task.family), 'published': source and source.config}
        about['base'] = huggingface.fingerprint(source, pool) if is_part else None
        special_id = special_of(config, task, source)

        def first_weights(at_hand: dict[str, str] | None) -> tuple[str, Callable | None]:
            if not config.allow_config_change:
                huggingface.require_same_program(source, None, 'allow_config_change=true')
            return source.checkpoint.path, read and (lambda like: read(source, config.model, like, pool))

        score = scorer_of(config, task, special_id)
        with Run(config, task.Batch, first_weights, about, score) as run:
            special_id = run.data.bos_id if task.family.KIND == 'decoder' else special_id
            step, validate = mapped_steps(config, special_id)
            state, batch = with_shardings(state, task.State), with_shardings(batch, task.Batch)
            zero, count = np.uint32(0), sum(array.size for array in jax.tree.leaves(state.weights.trained))
            of = sum(array.size for array in jax.tree.leaves(state.weights.frozen))
            run.say(f'{count:,} parameters are trained' + (f', {of:,} are frozen' if is_part else ''))
            steps = {1.0: run.compile(jax.jit(step, donate_argnums=0).trace(state, zero, zero, batch), __file__)}
            for part in (0.5**n for n, _ in enumerate(config.training.batch_doubles_at, 1)):
                smaller, _ = mapped_steps(config, special_id, part)
                steps[part] = jax.jit(smaller, donate_argnums=0, compiler_options=run.compiler_options)
            validate = jax.jit(validate, compiler_options=run.compiler_options)
            kept = replace(state, weights=state.weights.trained)
            kept = run.first_state(kept, functools.partial(init_state, task))
            if kept.ema is not None and not run.done_steps:  # the average begins at the weights that were read
                kept = replace(kept, ema=jax.tree.map(jnp.copy, kept.weights))
            frozen = state.weights.frozen
            if is_part:
                frozen = huggingface.restored(source, config.model, frozen, pool, is_part=True)
            state = replace(kept, weights=Tuned(kept.weights, frozen))
            skipped_steps = np.uint32(run.attributes.get('skipped_steps', 0))

            for number in run.steps():
                step = steps[run.data.part_of_batch(number)]
                state, metrics = step(state, skipped_steps, np.uint32(number), run.data.load(number))
                skipped_steps = metrics.skipped_steps
                kept = replace(state, weights=state.weights.trained)
                run.log(number, kept, metrics)
                run.validate_if_due(number, validate, replace(state.weights, trained=optimizers.averaged(kept)))
                run.save_if_due(number, kept)


if __name__ == '__main__':
    run(main, Config)
