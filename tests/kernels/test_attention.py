"""The attention kernels of kernels/: each that can run here equals the reference, and all lower for their platforms."""

import dataclasses
import functools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import small

from jax_extra import explicit_activation_checkpointing
from kernels import blockwise, splash
from kernels.attention import KERNELS, able, suited
from ledger.count.program import read

RUNNABLE = {
    "blockwise": KERNELS["blockwise"],
    "splash": functools.partial(splash.attention, save_as="save_for_backward", interpret=True),
}


def operands(length, batch=2, Q=2, K=2, D=8, seed=0, dtype=jnp.float32, segments=4.0):
    """q, k, v, segment, the gradient of o; q·k has a deviation of one."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    segment = np.cumsum(rng.random((batch, length)) < segments / length, axis=1)
    q = normal(batch, length, Q, K, D) * jnp.asarray(D**-0.5, dtype)
    k, v = normal(batch, length, K, D), normal(batch, length, K, D)
    return q, k, v, jnp.asarray(segment, jnp.int32), normal(batch, length, Q, K, D)


def with_gradient(attention):
    """(q, k, v, segment, gradient of o) -> o and the gradients of q, k, v."""

    def both(q, k, v, segment, gradient):
        o, backward = jax.vjp(lambda q, k, v: attention(q, k, v, segment), q, k, v)
        return o, *backward(gradient)

    return jax.jit(both)


_of_reference = with_gradient(functools.partial(reference.attention, dtype=jnp.float64))


def truth(q, k, v, segment, gradient):
    """The same by tests/reference.py in float64."""
    position = np.arange(segment.shape[1])
    same = np.asarray(segment)[:, :, None] == np.asarray(segment)[:, None, :]
    allowed = same & (position[:, None] >= position[None])[None]
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        q, k, v, gradient = (jnp.asarray(np.asarray(x, np.float64)) for x in (q, k, v, gradient))
        return [np.asarray(x) for x in _of_reference(q, k, v, jnp.asarray(allowed), gradient)]


def distances(results, expected):
    """The relative distance of o and of each gradient, in the 2-norm."""
    results, expected = ([np.asarray(x, np.float64) for x in arrays] for arrays in (results, expected))
    return [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(results, expected, strict=True)]


@pytest.mark.parametrize("name, block, length, Q, K", [
    ("blockwise", 128, 33, 2, 2), ("blockwise", 16, 40, 1, 2), ("blockwise", 16, 33, 2, 1), ("blockwise", 16, 64, 3, 2),
    ("splash", 0, 100, 2, 1),
], ids=["one block", "uneven blocks", "one key head", "even blocks", "splash"])  # fmt: skip
def test_a_kernel_equals_the_reference(name, block, length, Q, K, monkeypatch):
    """In float32, o and the gradients of q, k and v on ragged segments are those of float64 to 2e-6; the TPU's kernel
    is interpreted, on a row that is no multiple of its lanes."""
    monkeypatch.setattr(blockwise, "BLOCK", block)
    given = operands(length, Q=Q, K=K)
    assert max(distances(with_gradient(RUNNABLE[name])(*given), truth(*given))) < 2e-6


def products(q, k, v, segment, window=2**30, cap=None):
    """Attention as train.py and models/layers.py write it out, on one device."""
    position = jnp.arange(segment.shape[1])
    distance = position[:, None] - position[None]
    allowed = (segment[:, :, None] == segment[:, None, :]) & ((distance >= 0) & (distance < window))[None]
    logits = jnp.einsum('BLQKD,BSKD->BQKLS', q, k, preferred_element_type=jnp.float32)
    logits = logits if cap is None else cap * jnp.tanh(logits / cap)
    probabilities = jax.nn.softmax(jnp.where(allowed[:, None, None], logits, -1e30), axis=-1)
    return jnp.einsum('BQKLS,BSKD->BLQKD', probabilities.astype(q.dtype), v)


@pytest.mark.parametrize("name, block, length, window, cap", [
    ("blockwise", 16, 40, 7, 0.5), ("blockwise", 16, 40, 20, None), ("blockwise", 128, 20, 7, 0.5),
    ("splash", 0, 150, 7, 0.5),
], ids=["window within a block", "beyond one", "one block", "splash"])  # fmt: skip
def test_a_window_and_a_cap(name, block, length, window, cap, monkeypatch):
    """o and the gradients are those of plain products in float32, to 2e-6; by blocks also with the window as an
    array."""
    monkeypatch.setattr(blockwise, "BLOCK", block)
    given = operands(length, batch=1, Q=2, K=1, segments=2.0)
    with jax.default_matmul_precision("highest"):
        expected = with_gradient(functools.partial(products, window=window, cap=cap))(*given)
        for width in [window] + [jnp.int32(window)] * (name == "blockwise"):
            found = with_gradient(functools.partial(RUNNABLE[name], window=width, cap=cap))(*given)
            assert max(distances(found, expected)) < 2e-6


@pytest.mark.parametrize("kernel, window, cap, name", [
    ("cudnn_masked", np.int32(5), None, "cudnn_masked"),
    ("cudnn_masked", 5, 2.0, "blockwise"),
    ("splash", 5, 2.0, "splash"),
    ("splash", np.int32(5), None, "blockwise"),
])  # fmt: skip
def test_a_kernel_without_a_window_or_a_cap_is_replaced(kernel, window, cap, name):
    """Blockwise, which has both, takes its place."""
    assert able(kernel, window, cap) == name


def test_bfloat16_is_about_as_near_as_the_plain_products(monkeypatch):
    """Over eight batches in bfloat16, o is nearer to float64 than the einsum's, v's gradient as near, q's and k's at
    most 1.3 times as far, since the backward pass reads o as it was kept, in bfloat16."""
    monkeypatch.setattr(blockwise, "BLOCK", 16)
    ours, plain = [], []
    kernel, written_out = with_gradient(KERNELS["blockwise"]), with_gradient(products)
    for seed in range(8):
        given = operands(length=40, seed=seed, dtype=jnp.bfloat16)
        expected = truth(*given)
        ours.append(distances(kernel(*given), expected))
        plain.append(distances(written_out(*given), expected))
    ours, plain = (np.sqrt(np.mean(np.square(rows), axis=0)) for rows in (ours, plain))
    assert (ours < np.array([1, 1.3, 1.3, 1.02]) * plain).all() and (ours < 5e-3).all(), (ours, plain)


def arrays(block):
    """The results of all operations."""
    for op in block.operations:
        yield from op.outputs
        for inner in op.blocks:
            yield from arrays(inner)


def test_nothing_of_length_squared():
    """No array of blockwise attention, forward and backward, has the length 4096 in two dims or as many elements."""
    shapes = jax.eval_shape(functools.partial(operands, 4096, batch=1, Q=1, K=1, D=64, dtype=jnp.bfloat16))

    def layers(q, k, v, segment):
        @explicit_activation_checkpointing
        def layer(q, _):
            return KERNELS["blockwise"](q, k, v, segment), None

        return jax.lax.scan(layer, q, length=2)[0]

    for shape in {value.shape for value in arrays(read(jax.make_jaxpr(with_gradient(layers))(*shapes)))}:
        assert list(shape).count(4096) < 2 and math.prod(shape) < 4096**2 / 2


SHAPES = dict(length=1000, batch=2, Q=2, K=4, D=64, dtype=jnp.bfloat16)


def lowered(name, platform, **given) -> str:
    shapes = jax.eval_shape(functools.partial(operands, **SHAPES))
    return (
        with_gradient(functools.partial(KERNELS[name], **given))
        .trace(*shapes)
        .lower(lowering_platforms=(platform,))
        .as_text()
    )


def test_splash_lowers_for_tpus():
    """Forward, gradient of q, and gradient of k and v are three kernels, with a window and a cap too."""
    assert lowered("splash", "tpu", window=100, cap=30.0).count("stablehlo.custom_call @tpu_custom_call") == 3
    assert lowered("splash", "tpu").count("stablehlo.custom_call @tpu_custom_call") == 3


def test_cudnn_lowers_for_nvidia():
    """Forward and backward are one call each, with the settings and operands that cuDNN reads; a window is in the mask,
    and no other call or setting."""
    text = lowered("cudnn_masked", "cuda")
    pattern = r'custom_call @(__cudnn\$\w+)\(.*?\) \{(.*?)\} : \((.*?)\) -> '
    calls, windowed = re.findall(pattern, text), lowered("cudnn_masked", "cuda", window=100)
    assert re.findall(pattern, windowed) == calls and "dense<100>" in windowed
    names = ["__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"]
    assert sorted(call[0] for call in calls) == names
    for _, attributes, types in calls:
        config = json.loads(re.search(r'backend_config = "(.*?[^\\])"', attributes)[1].replace('\\22', '"'))
        settings = config["cudnn_fmha_backend_config"]
        assert settings["fmha_scale"] == 1.0
        assert settings["mask_type"] == "CAUSAL" and settings["max_seg_per_batch"] == 1
        assert settings["intermediate_tensor_shape"]["dimensions"] == ["2", "8", "1000", "1000"]
        assert "tensor<2x1x1000x1000xbf16>" in types
        assert "tensor<2x1000x8x64xbf16>" in types and "tensor<2x1000x4x64xbf16>" in types


@pytest.mark.parametrize("platform, capability, dtype, d_head, name", [
    ("cpu", 0, "bfloat16", 128, "blockwise"),
    ("tpu", 0, "float32", 128, "splash"),
    ("gpu", 9.0, "bfloat16", 128, "cudnn_masked"),
    ("gpu", 9.0, "bfloat16", 256, "cudnn_masked"),
    ("gpu", 8.0, "bfloat16", 128, "cudnn_masked"),
    ("gpu", 8.0, "bfloat16", 256, "blockwise"),
    ("gpu", 7.5, "bfloat16", 128, "blockwise"),
    ("gpu", 9.0, "float32", 128, "blockwise"),
    ("gpu", 9.0, "bfloat16", 100, "blockwise"),
    ("gpu", 0, "bfloat16", 128, "blockwise"),
])  # fmt: skip
def test_the_platform_chooses(platform, capability, dtype, d_head, name):
    """The kernel depends on platform, compute capability (AMD has none), type and head size."""
    assert suited(platform, capability, dtype, d_head) == name


@pytest.mark.usefixtures("proved_elsewhere")
def test_a_step_with_the_kernel_is_the_steps_with_the_products():
    """Loss and gradient of train.py's step by blocks are those by plain products, to rounding in float32."""
    weights = reference.random_weights(small.MODEL, seed=0)
    results = []
    for name in ("einsum", "blockwise"):
        model = dataclasses.replace(small.MODEL, attention=name)
        with small.on_mesh(4, 2):
            results.append(small.loss_and_gradient(model, small.TRAINING, weights, small.BATCH))
    (plain, expected), (loss, gradient) = results
    assert abs(loss - plain) < 1e-6 * abs(plain)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected)):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)


@pytest.mark.parametrize("parts", [(3, 48), *small.slow((1, 48), (4, 40))], ids=str)
def test_parts_of_a_row_with_all_its_keys(parts, monkeypatch):
    """What devices find for their parts of rows that are dealt out, put together, is the result for whole rows, and so
    are the gradients."""
    monkeypatch.setattr(blockwise, "BLOCK", 4)
    devices, length = parts
    q, k, v, segment, gradient = operands(length)
    expected = truth(q, k, v, segment, gradient)
    order = blockwise.dealt(length, devices)
    assert sorted(order) == list(range(length))
    found = [np.zeros(operand.shape, np.float32) for operand in (q, q, k, v)]
    kernel = with_gradient(KERNELS["blockwise"])
    for part in np.split(order, devices):
        places = part, order, segment[:, part], segment[:, order]
        o, dq, dk, dv = kernel(q[:, part], k[:, order], v[:, order], places, gradient[:, part])
        found[0][:, part], found[1][:, part] = o, dq
        found[2][:, order] += dk
        found[3][:, order] += dv
    for ours, true in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, true, atol=2e-6)
