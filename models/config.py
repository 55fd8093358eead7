"""A table that reads a family's `Model` from a published config.json, and writes it.

    CONFIG = ConfigJson(Model, {'granite': Kind('GraniteForCausalLM')}, {
        **LLAMA,                                                  # the lines that most decoders share
        'embed_factor': Key('embedding_multiplier', 1.0),         # our field: its name there, and its default
    }, hidden_act='silu', attention_bias=False)                   # the only values that the family computes
    model_of, config_of = CONFIG.functions

A field of config.json that is set and that no line names is refused, unless it is in WITHOUT_EFFECT: the model might
compute something else.
"""

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from kernels.attention import KernelName
from runtime.config.keys import Count, Positive
from runtime.terminal import RunError

# Fields that do not change what a trained model computes.
WITHOUT_EFFECT = {
    'architectures', 'attention_dropout', 'bos_token_id', 'dtype', 'eos_token_id', 'initializer_range',
    'max_position_embeddings', 'pad_token_id', 'torch_dtype', 'transformers_version', 'use_cache', 'max_window_layers',
    'attn_pdrop', 'cache_implementation', 'dropout', 'embd_pdrop', 'gradient_checkpointing', 'init_std', 'layerdrop',
    'n_ctx', 'prefix', 'resid_pdrop', 'summary_activation', 'summary_first_dropout', 'summary_proj_to_labels',
    'summary_type', 'summary_use_proj', 'task_specific_params', 'tokenizer_class',
    '_name_or_path', 'unsloth_version', 'unsloth_fixed', 'rope_interleaved', 'is_llama_config',
    'transformers.js_config', 'classifier_dropout', 'dropout_rate',
    'initializer_factor', 'n_positions', 'output_past', 'decoder_start_token_id', 'max_length', '_flash_attn_2_enabled',
    'attention_probs_dropout_prob', 'hidden_dropout_prob', 'directionality', '_num_labels', 'id2label', 'label2id',
    'output_router_logits', 'router_aux_loss_coef', 'sliding_window_size', '_attn_implementation',
    'pooler_fc_size', 'pooler_num_attention_heads', 'pooler_num_fc_layers', 'pooler_size_per_head', 'pooler_type',
    '_attn_implementation_autoset',
}  # fmt: skip
# Settings that are not part of the model: where weights come from and where they go they may differ.
SETTINGS = ('compute_dtype', 'attention', 'capacity', 'capacity_parts')
REQUIRED = object()  # in place of a default: the field must be there


def brief(value: Any) -> str:
    """The value as Python writes it, if it is short."""
    text = repr(value)
    return text if len(text) <= 200 else f'{text[:60]}… ({len(text):,} characters)'


class Fields:
    """A published config.json, which records the fields that were read."""

    def __init__(self, content: dict[str, Any], where: str):
        self.content, self.where, self.read = content, where, set()

    def take(self, key: str, default: Any = REQUIRED) -> Any:
        self.read.add(key)
        if key not in self.content and default is REQUIRED:
            raise RunError(f'{self.where} has no field {key}, which this family needs')
        return self.content.get(key, default)

    def require(self, **values: Any) -> None:
        """Raises RunError if a field has another value than this, the only one that the family computes."""
        for key, value in values.items():
            if self.take(key, value) != value:
                self.refuse(key, f'expected {value!r}')

    def refuse(self, key: str, why: str) -> None:
        value = brief(self.content[key])
        raise RunError(f'{self.where}: {key} = {value} is not what models/ computes for this family: {why}')

    def unread(self) -> dict[str, Any]:
        """The fields that nobody read and that may matter; null, false and 0 do not."""
        unread = sorted(self.content.keys() - self.read - WITHOUT_EFFECT)
        return {key: self.content[key] for key in unread if self.content[key]}

    def finish(self) -> None:
        """Raises RunError for fields of `unread`."""
        if unread := self.unread():
            fields = ', '.join(f'{key} = {json.dumps(value)[:80]}' for key, value in unread.items())
            raise RunError(f"{self.where}: this family does not compute {fields}: delete what changes no result")


# == What every model has ==============================================================================================
@dataclass(frozen=True, kw_only=True)
class Sizes:
    d_model: Count  # M, length of the vector that each token has between layers
    n_kv: Count  # K, heads of keys and values
    d_head: Count  # D, length of a head's vectors
    layers: Count  # how many
    vocab: Count  # V, token ids are 0 to vocab - 1
    d_ff: Count  # F, length of the feed-forward network's hidden vector
    compute_dtype: Literal['bfloat16', 'float32'] = 'bfloat16'  # type of activations and matrix products


@dataclass(frozen=True, kw_only=True)
class DecoderSizes(Sizes):
    attention: KernelName = 'auto'  # a kernel of kernels/attention.py; einsum: written out; auto: by device


# == A table of fields =================================================================================================
@dataclass(frozen=True)
class Key:
    """A field of config.json that holds one field of `Model`.

    Args:
      name: its name in config.json; '': it is not there, and has its default.
      default: its value if absent. A function, default(config, fields of Model read before), also replaces null.
      read: read(value in config.json, fields read before) -> our value; the same by default.
      write: write(Model) -> the value in config.json; the same by default.
    """

    name: str
    default: Any = REQUIRED
    read: Callable[[Any, dict], Any] = lambda value, before: value
    write: Callable[[Any], Any] | None = None

    def read_in(self, config: Fields, ours: str, before: dict[str, Any]) -> dict[str, Any]:
        if not callable(self.default):
            return {ours: self.read(config.take(self.name, self.default), before)}
        value = config.take(self.name, None) if self.name else None
        return {ours: self.default(config, before) if value is None else self.read(value, before)}

    def write_out(self, model: Any, ours: str) -> dict[str, Any]:
        if not self.name:
            return {}
        return {self.name: getattr(model, ours) if self.write is None else self.write(model)}


@dataclass(frozen=True)
class Keys:
    """Several fields of config.json that hold several of `Model`: read(config, fields read before), write(model)."""

    read: Callable[[Fields, dict], dict[str, Any]]
    write: Callable[[Any], dict[str, Any]]

    def read_in(self, config: Fields, ours: str, before: dict[str, Any]) -> dict[str, Any]:
        return self.read(config, before)

    def write_out(self, model: Any, ours: str) -> dict[str, Any]:
        return self.write(model)


@dataclass(frozen=True)
class Kind:
    """The keys that a model_type adds to its family's table."""

    architecture: str  # 'LlamaForCausalLM'
    model: dict[str, Any] = field(default_factory=dict)  # fields of Model that follow from the model_type
    keys: dict[str, Any] = field(default_factory=dict)  # lines that are added to the table, or replace its own
    only: dict[str, Any] = field(default_factory=dict)  # further values that must be as they are here


class ConfigJson:
    """The table of a family.

    Args:
      kinds: by model_type; a model is published as the first one that computes it.
      keys: by field of Model a `Key`, or a `Keys` under any name. They are read in this order.
      only: fields of config.json, and the value of each that the family computes.
    """

    def __init__(self, Model: type, kinds: dict[str, Kind], keys: dict[str, Key | Keys], **only: Any):
        self.Model, self.kinds, self.keys, self.only = Model, kinds, keys, only

    @property
    def functions(self) -> tuple[Callable, Callable]:
        return self.model_of, self.config_of

    def model_of(self, config: Fields) -> Any:
        """The Model that a config.json describes."""
        kind = self.kinds[config.take('model_type')]
        config.require(**self.only | kind.only)
        model = dict(kind.model)
        for ours, key in (self.keys | kind.keys).items():
            model |= key.read_in(config, ours, model)
        return self.Model(**model)

    def config_of(self, model: Any) -> dict[str, Any]:
        """The config.json of a Model. Raises RunError where no kind computes it."""
        differing = []
        for name, kind in self.kinds.items():
            content = {'model_type': name, 'architectures': [kind.architecture], **self.only, **kind.only}
            for ours, key in (self.keys | kind.keys).items():
                content |= key.write_out(model, ours)
            differing.append(different(self.model_of(Fields(content, 'config.json')), model))
            if not differing[-1]:
                return content
        what = ', '.join(f'model.{key} = {brief(getattr(model, key))}' for key in min(differing, key=len))
        raise RunError(f'no published architecture has {what}: this model cannot be published')


def different(first: Any, second: Any) -> list[str]:
    """The keys in which two models differ; both compute the same, up to a factor in w_q, where there are none."""
    first, second = dataclasses.asdict(first), dataclasses.asdict(second)
    return [key for key in first if key not in (*SETTINGS, 'logits_scale') and first[key] != second[key]]


# == Rotary angles =====================================================================================================
@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Slower rotations, for texts longer than those of training. Pairs of dims that turn less than `low` times within
    original_length are slowed by factor; those that turn more than `high` times are not."""

    kind: Literal['linear', 'llama3', 'yarn']  # linear slows all; the others differ between low and high
    factor: Positive  # by which rotations are slowed
    original_length: Count = 8192  # of the rows before it was trained for longer ones
    low: Positive = 1.0  # turns within original_length: pairs with fewer are slowed by the whole factor
    high: Positive = 4.0  # pairs with more are not slowed
    attention_factor: Positive = 1.0  # times q and times k


def between(low: str, high: str, most: float) -> dict[str, Key]:
    return {
        'original_length': Key('original_max_position_embeddings', lambda config, before: before['longest']),
        'low': Key(low, lambda *_: 1.0),
        'high': Key(high, lambda *_: most),
    }


SCALINGS = {
    'linear': {},
    'llama3': between('low_freq_factor', 'high_freq_factor', 4.0),
    'yarn': {
        **between('beta_slow', 'beta_fast', 32.0),
        'attention_factor': Key('attention_factor', lambda config, before: 0.1 * math.log(before['factor']) + 1),
    },
}


def base_and_scaling(config: Fields, rope: dict[str, Any], kinds: Any) -> tuple[float, RopeScaling | None]:
    """The base and the scaling, from rope_parameters (transformers 5) or rope_scaling (earlier releases)."""
    rope = {'rope_type': rope.get('type', 'default'), **rope}
    inner = Fields(rope, config.where)
    kind = inner.take('rope_type')
    where = 'rope_scaling' if config.content.get('rope_scaling') else 'rope_parameters'
    if kind not in ('default', *kinds):
        fix = '. Of rows up to max_position_embeddings it changes nothing: delete it' if kind == 'dynamic' else ''
        config.refuse(where, f'the kinds are {", ".join(kinds)}{fix}')
    base = inner.take('rope_theta')
    inner.require(type=kind)
    values: dict[str, Any] = {}
    if kind != 'default':
        inner.require(truncate=True)
        values |= {'factor': inner.take('factor'), 'longest': config.take('max_position_embeddings', 8192)}
        for ours, key in SCALINGS[kind].items():
            values |= key.read_in(inner, ours, values)
        del values['longest']
    if unread := inner.unread():
        config.refuse(where, f'{", ".join(unread)} is not known')
    return base, RopeScaling(kind=kind, **values) if values else None


def rope_from(config: Fields, before: dict, base: float = 10000.0, kinds: Any = tuple(SCALINGS)) -> dict[str, Any]:
    rope = {'rope_theta': config.take('rope_theta', base)}
    rope |= {**(config.take('rope_scaling', None) or {}), **(config.take('rope_parameters', None) or {})}
    return dict(zip(('rope_max_timescale', 'rope_scaling'), base_and_scaling(config, rope, kinds)))


def rope_to(base: float, scaling: RopeScaling | None) -> dict[str, Any]:
    if scaling is None:
        return {'rope_theta': base, 'rope_type': 'default'}
    rope = {'rope_theta': base, 'rope_type': scaling.kind, 'factor': scaling.factor}
    for ours, key in SCALINGS[scaling.kind].items():
        rope |= key.write_out(scaling, ours)
    return rope


ROPE = Keys(rope_from, lambda model: {'rope_parameters': rope_to(model.rope_max_timescale, model.rope_scaling)})


# == What many families share ==========================================================================================
def heads_of(model: Any) -> int:
    return model.n_q_per_kv * model.n_kv


def head_size(config: Fields, before: dict[str, Any]) -> int:
    """The size of a head, where config.json does not say it."""
    return before['d_model'] // (before['n_kv'] * before.get('n_q_per_kv', 1))


LLAMA: dict[str, Key | Keys] = {
    'd_model': Key('hidden_size'),
    'n_kv': Key('num_key_value_heads', lambda config, before: config.take('num_attention_heads')),
    'n_q_per_kv': Key('num_attention_heads', read=lambda heads, before: heads // before['n_kv'], write=heads_of),
    'd_head': Key('head_dim', head_size),
    'logits_scale': Key('', lambda config, before: before['d_head'] ** -0.5),
    'layers': Key('num_hidden_layers'),
    'vocab': Key('vocab_size'),
    'd_ff': Key('intermediate_size'),
    'norm_eps': Key('rms_norm_eps', 1e-6),
    'tied': Key('tie_word_embeddings', False),
    'rope': ROPE,
}
# One head of keys for each head of queries, with the names of GPT-2 and GPT-J.
GPT = {
    'd_model': Key('n_embd'),
    'n_kv': Key('n_head'),
    'd_head': Key('', head_size),
    'layers': Key('n_layer'),
    'vocab': Key('vocab_size'),
    'd_ff': Key('n_inner', lambda config, before: 4 * before['d_model']),
    'norm_eps': Key('layer_norm_epsilon', 1e-5),
}
# The keys above under the names that BERT and OPT use.
BERT = {
    'd_model': Key('hidden_size'),
    'n_kv': Key('num_attention_heads'),
    'd_head': Key('', head_size),
    'layers': Key('num_hidden_layers'),
    'vocab': Key('vocab_size'),
}


def windows_from(config: Fields, before: dict[str, Any]) -> dict[str, Any]:
    """The window of all layers, or as in Qwen of those from max_window_layers on."""
    window = config.take('sliding_window', None)
    window = window if config.take('use_sliding_window', False) else None
    first = config.take('max_window_layers', 28) if window else 0
    slides = ['sliding_attention' if window and n >= first else 'full_attention' for n in range(before['layers'])]
    if config.take('layer_types', None) not in (None, slides):
        config.refuse('layer_types', 'the window is that of all layers, or of those from max_window_layers on')
    return {'window': window, 'window_from': first}


def windows_to(model: Any) -> dict[str, Any]:
    window = {'sliding_window': model.window, 'use_sliding_window': bool(model.window)}
    return window | {'max_window_layers': model.window_from}


QWEN_WINDOW = Keys(windows_from, windows_to)
