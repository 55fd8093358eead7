"""The small published models of tests/models/golden/, restored onto a mesh and run."""

import contextlib
import functools
import json
import math
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from pages import module_of
from safetensors.numpy import load_file, save_file

from models import foreign, huggingface
from models.context import ALONE, attention, deal_heads
from models.layers import TokenBatch
from runtime.run import with_shardings
from shardlib import shardops
from shardlib.mesh import make_mesh
from shardlib.shard_map import typed_shard_map
from shardlib.shardtypes import f32, i32, make_shardings, narrowed, pytree_dataclass, u32
from train import act

FOLDER = Path(__file__).parent / "models/golden"
NAMES = sorted(path.name for path in FOLDER.iterdir())
SIZES = {"d_model": 64, "n_kv": 8, "d_head": 8, "layers": 2, "vocab": 128, "d_ff": 96}  # of a model without weights
LENGTHS, READ = (9, 15), (13, 7)  # of the two sequences in each row, and of what an encoder reads


@contextlib.contextmanager
def on_mesh(d=1, t=1, dtype="float32", **others):
    """Five axes, of one device where nothing is said; with stages six."""
    act.dtype, axes = dtype, {"d": d, "t": t, **others}
    axes = {axis: axes.get(axis, 1) for axis in "prdcet" if axis != "p" or axis in axes}
    with jax.set_mesh(make_mesh(axes, devices=jax.devices()[: math.prod(axes.values())])):
        yield


def oracle_of(name):
    """What transformers computed: `targets`, `logits` of the first rows, `loss`, and `gradient/` of each tensor."""
    with np.load(FOLDER / name / "oracle.npz") as file:
        return dict(file)


def config_of(name):
    return json.loads((FOLDER / name / "config.json").read_text())


def published_as(folder, name, config=None, tensors=None):
    """Writes a golden folder with another config.json or other tensors; returns where."""
    shutil.copytree(FOLDER / name, folder, dirs_exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or config_of(name)))
    if tensors:
        save_file(tensors, folder / "model.safetensors")
    return folder


def batch_of(oracle, lengths=LENGTHS):
    """The rows of golden.py, in which two sequences follow each other."""
    targets = oracle["targets"]
    starts = np.zeros(targets.shape, bool)
    starts[:, [0, lengths[0]]] = True
    is_target = oracle.get("is_target", np.ones(targets.shape, bool))
    return jax.device_put(TokenBatch(targets, starts, is_target), make_shardings(TokenBatch))


def weights_of(source, pool, model=None):
    """The weights of a source on the current mesh, and their type."""
    shapes = jax.eval_shape(functools.partial(source.family.init, source.model), np.uint32(0))
    type_ = narrowed(source.family.Weights, shapes)
    return huggingface.restored(source, model or source.model, with_shardings(shapes, type_), pool), type_


@pytree_dataclass
class Read:
    """What T5's encoder reads, and the numbers of its segments."""

    tokens: u32["B/b S"]
    segment: i32["B/b S"]


@pytree_dataclass
class Masked:
    """What BERT reads: some tokens are masked; and their kinds."""

    tokens: u32["B/b L"]
    kinds: i32["B/b L"]


def read_of(oracle, lengths=READ):
    """The rows of golden.py that the encoder reads."""
    segment = np.broadcast_to(np.repeat([1, 2], lengths).astype(np.int32), oracle["read"].shape)
    return jax.device_put(Read(oracle["read"].astype(np.uint32), segment), make_shardings(Read))


def step_of(source, Weights, oracle, along_c=ALONE):
    """A function like `loss_and_logits`, for families that read too, and its arguments after the weights."""
    if "read" in oracle:
        return loss_and_logits_of_read(source, Weights), (batch_of(oracle), read_of(oracle))
    if "kinds" in oracle:
        masked = Masked(oracle["inputs"].astype(np.uint32), oracle["kinds"].astype(np.int32))
        masked = jax.device_put(masked, make_shardings(Masked))
        return loss_and_logits_of_masked(source, Weights), (batch_of(oracle), masked)
    return loss_and_logits(source, Weights, along_c=along_c), (batch_of(oracle),)


def loss_and_logits(source, Weights, bos_id=1, along_c=ALONE):
    """A function of weights and a batch: the mean loss, all logits, and the loss's gradient."""
    layers = source.family.layers  # of a changed copy its own

    def step(weights: Weights, batch: TokenBatch) -> tuple[f32[""], f32["B/b L/c V/t"], Weights]:
        def hidden(weights, ends):
            inputs = layers.inputs_of(batch, bos_id)
            return layers.hidden(source.family, source.model, weights, *inputs, ends=ends, along_c=along_c)[0]

        return differentiated(source, hidden, weights, batch, Weights, along_c)

    return step


def loss_and_logits_of_read(source, Weights, bos_id=1):
    """The same for a family that reads with an encoder."""

    def step(weights: Weights, batch: TokenBatch, read: Read) -> tuple[f32[""], f32["B/b L/c V/t"], Weights]:
        def hidden(weights, ends):
            inputs, segment, _ = source.family.layers.inputs_of(batch, bos_id)
            return source.family.hidden(source.model, weights, read.tokens, read.segment, inputs, segment, ends=ends)

        return differentiated(source, hidden, weights, batch, Weights)

    return step


def loss_and_logits_of_masked(source, Weights):
    """The same for a family that predicts masked tokens."""

    def step(weights: Weights, batch: TokenBatch, masked: Masked) -> tuple[f32[""], f32["B/b L/c V/t"], Weights]:
        def hidden(weights, ends):
            family, model = source.family, source.model
            family.layers.require_positions(model, masked.tokens.shape[1])
            _, segment, position = family.layers.inputs_of(batch, 0)
            tokens, kinds, place = map(ALONE.part, (masked.tokens, masked.kinds, position))
            x = family.embed(model, ends, tokens, place, "M/t", kinds)
            given = (weights.transformer,), None, None
            x, _ = family.layers.through(
                family, model, x, given, family.gather_layer, segment, position, family.layers.FORWARD, ALONE
            )
            return family.layers.ended(family.final, model, ends, x)

        return differentiated(source, hidden, weights, batch, Weights)

    return step


def decoded(source, Weights):
    """Hidden states by the layer as decoding calls it: the residual is whole, keys and values are kept."""
    family, model, layers = source.family, source.model, source.family.layers

    def forward(weights: Weights, batch: TokenBatch) -> tuple[act["B/b L/c M"], act["layers B/b S/c K/t D"]]:
        inputs, segment, position = layers.inputs_of(batch, 1)
        inputs, position = ALONE.part(inputs), ALONE.part(position)
        mask, ends = family.mask(model), family.gather_ends(weights)

        def layer(x, of_layer):
            w, window = of_layer

            def attend(q, k, v):
                whole = functools.partial(attention, "einsum", segment=segment, window=attend.window, cap=mask.cap)
                return deal_heads(whole, q, k, v), k

            attend.window = mask.of_layer(window)
            return family.layer(model, x, family.gather_layer(w), attend, position, "M")[:2]

        x, keys = jax.lax.scan(
            layer, family.embed(model, ends, inputs, position, "M"), (weights.transformer, mask.by_layer())
        )
        return family.final(model, ends, x, "M"), keys

    return forward


def differentiated(source, hidden, weights, batch, weights_type, along_c=ALONE):
    """The mean loss of hidden states, all logits, and the loss's gradient."""
    layers, cap = source.family.layers, source.family.mask(source.model).logits_cap
    count = shardops.psum("+b -> ", shardops.sum_unreduced("B/b L -> +b", batch.is_target.astype(jnp.float32)))

    def loss(weights, batch):
        ends = source.family.gather_ends(weights)
        x = hidden(weights, ends)
        loss = layers.loss_sum(ends.unembed, x, batch, cap, along_c=along_c)
        return loss / count, layers.logits_of(ends.unembed, x, cap)

    (value, logits), gradient = shardops.value_and_grad(loss, has_aux=True)(weights, batch)
    return shardops.psum("+b +c +t -> ", value), logits, reduced(weights_type, gradient)


def reduced(types, gradient):
    """Each gradient as its weight lies: over axes along which that is the same it is a sum."""

    def of_one(array, g):
        owed = " ".join(f"+{axis}" for axis in "rdcet" if axis not in array.spec.split)
        return shardops.psum(f"{array.spec} {owed} -> {array.spec}", g) if owed else g

    return jax.tree.map(of_one, types, gradient)


def check_family(path, source, variants, steps, others=()):
    """Returns what `claims_of` does, for a changed text of a family's file."""
    return claims_of(module_of(path, source), variants, steps, *others)


def claims_of(family, variants, steps, *others):
    """Checks the steps of each variant of a family, such as `loss_and_logits`, on 4 x 2; returns the claims.

    `others` are their arguments after the weights and the batch.
    """
    proved = 0
    for variant in variants:
        act.dtype = jnp.bfloat16
        model = family.Model(**variant)
        shapes = jax.eval_shape(functools.partial(family.init, model), np.uint32(0))
        batch = TokenBatch(*(jax.ShapeDtypeStruct((16, 32), dtype) for dtype in (np.uint32, bool, bool)))
        given = type("Source", (), {"family": family, "model": model})
        mesh = jax.sharding.AbstractMesh((2, 2, 1, 1, 2), tuple("rdcet"))
        for step in steps:
            mapped = typed_shard_map(step(given, narrowed(family.Weights, shapes)))
            proved += mapped.check(mesh, shapes, batch, *others)
    return proved


def neighbours(values, heads):
    """A projection's rows as llama.cpp and Meta have them, where rotary turns neighbours."""
    return rearrange(values, "(H two D) M -> (H D two) M", H=heads, two=2)


def small_gguf(path, base=10000.0, is_causal=True, **more):
    """Writes the golden Llama as a GGUF file: w_o quantized, all else plain; its tokenizer; and more tensors."""
    import gguf

    tokenizer = json.loads(json.loads((FOLDER.parent / "tokenizer_record.json").read_text())["json"])
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in {
        "block_count": 2,
        "embedding_length": 16,
        "feed_forward_length": 24,
        "context_length": 64,
    }.items():
        writer.add_uint32(f"llama.{name}", value)
    for name, value in {"head_count": 4, "head_count_kv": 2, "key_length": 8}.items():
        writer.add_uint32(f"llama.attention.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32("llama.rope.freq_base", base)
    writer.add_causal_attention(is_causal)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    vocab = tokenizer["model"]["vocab"]
    writer.add_token_list(sorted(vocab, key=vocab.get))
    special = {token["content"] for token in tokenizer["added_tokens"]}
    writer.add_token_types([3 if token in special else 1 for token in sorted(vocab, key=vocab.get)])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(0)
    names = {theirs: ours for ours, theirs in foreign.GGUF.items()}
    for name, values in load_file(FOLDER / "llama/model.safetensors").items():
        inner = name.removesuffix(".weight")
        if inner.startswith("model.layers."):
            _, _, layer, inner = inner.split(".", 3)
            if names[inner] in ("attn_q", "attn_k"):
                values = neighbours(values, 4 if names[inner] == "attn_q" else 2)
            theirs = f"blk.{layer}.{names[inner]}.weight"
        else:
            theirs = names[name]
        if "attn_output" in theirs:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(theirs, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(theirs, np.ascontiguousarray(values))
    for name, values in more.items():
        writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
