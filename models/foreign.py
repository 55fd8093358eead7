"""Reads weights in files of llama.cpp (GGUF) and of Meta (consolidated.*.pth) like a published folder.

Both have other names and another layout: rotary turns neighbouring dims there, and dims i and i + D/2 here.
"""

import contextlib
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from pickle import PickleError
from typing import Any

import numpy as np
from einops import rearrange
from jaxtyping import Float32

from models.huggingface import Source, described
from models.layers import RopeScaling, frequencies
from models.safetensors import Tensor, read_json
from runtime.files import open_file
from runtime.terminal import RunError, needs_package, run_errors

# The exceptions that gguf and torch raise for a damaged file: nearly any, because they check little.
WRONG = (
    ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError, EOFError, PickleError,
)  # fmt: skip
LAYER = "model.layers.{}"
HALVES_TO_NEIGHBOURS = "(H D two) ... -> (H two D) ..."  # from their order of a head's rows to ours

# ---- GGUF ------------------------------------------------------------------------------------------------------------
GGUF = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "output_norm.weight": "model.norm.weight",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GGUF_FIELDS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attention.causal": "is_causal",
    "rope.freq_base": "rope_theta",
}
GGUF_NO_EFFECT = {"rope.dimension_count", "attention.value_length", "rope.scaling.original_context_length"}


def open_gguf(file: Path) -> Source:
    """A GGUF file of the architectures llama (Mistral too), qwen2 and qwen3, in any quantization."""
    with needs_package(f"{file.name} is in GGUF, and reading it", "gguf"):
        import gguf
    with _readable(file):
        config, tensors = _gguf_parts(gguf, file)
    return described(config, tensors, file)


def _gguf_parts(gguf: Any, file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The content of a config.json, and the tensors by their published names."""
    reader = gguf.GGUFReader(file)
    about = {key: _plain(field.contents()) for key, field in reader.fields.items() if not key.startswith("tokenizer.")}
    kind = about["general.architecture"]
    if kind not in ("llama", "qwen2", "qwen3"):
        raise RunError(f"{file}: its architecture is {kind}: expected llama, qwen2 or qwen3")
    config: dict[str, Any] = {"model_type": kind}
    for key, value in about.items():
        name = key.removeprefix(f"{kind}.")
        if name in GGUF_FIELDS:
            config[GGUF_FIELDS[name]] = value
        elif name != key and name not in GGUF_NO_EFFECT and value not in (None, 0, "none"):
            raise RunError(f"{file}: {key} = {value!r} is not known here: take the published folder")
    tensors = {}
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            factors = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            config["rope_scaling"] = _llama3_scaling(factors, config.get("rope_theta", 10000.0), file)
            continue
        part = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", tensor.name)
        name = GGUF.get(part[2] if part else tensor.name)
        name = f"{LAYER.format(part[1])}.{name}.{part[3]}" if part and name else name or tensor.name
        shape = tuple(int(size) for size in reversed(tensor.shape))
        heads = None
        if kind == "llama" and part and part[2] in ("attn_q", "attn_k"):
            heads = config["num_attention_heads" if part[2] == "attn_q" else "num_key_value_heads"]
        tensors[name] = Tensor(shape, functools.partial(_dequantized, gguf, file, tensor, shape, heads))
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    config["vocab_size"] = tensors["model.embed_tokens.weight"].shape[0]
    for name in ("bos", "eos"):
        if field := reader.fields.get(f"tokenizer.ggml.{name}_token_id"):
            config[f"{name}_token_id"] = int(field.contents())
    return config, tensors


def _llama3_scaling(factors: Float32[np.ndarray, "values"], base: float, file: Path) -> dict[str, Any]:
    """The scaling of Llama 3.1 to 3.3; a GGUF file holds each pair's divisor."""
    about = {"factor": float(factors.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling = RopeScaling(kind="llama3", factor=about["factor"])
    expected = np.divide(*(frequencies(2 * factors.size, base, scale) for scale in (None, scaling)))
    if not np.allclose(factors, expected, rtol=1e-4):
        raise RunError(f"{file}: rope_freqs is not the scaling of Llama 3.1 to 3.3: take the published folder")
    return {"rope_type": "llama3", **about, "original_max_position_embeddings": scaling.original_length}


@contextlib.contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Turns what WRONG lists into a RunError while a file, or a folder of files, is read."""
    with run_errors(f"{file} cannot be read", *WRONG):
        for part in [file] if not file.is_dir() else file.glob("consolidated.*.pth"):
            open_file(part).close()
        yield


# How texts are split before byte pairs are merged, by llama.cpp's name.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GGUF_WORDS = {"gpt-2": None, "smollm": None, "llama-bpe": _WORDS % "{1,3}", "qwen2": _WORDS % ""}


def gguf_tokenizer(file: Path) -> tuple[str, dict[str, Any]] | None:
    """The content of tokenizer.json and of tokenizer_config.json, from a file that open_gguf has read; None if its
    tokenizer is no BPE of bytes. Raises RunError if it is damaged."""
    with _readable(file):
        return _byte_bpe(file)


def _byte_bpe(file: Path) -> tuple[str, dict[str, Any]] | None:
    import gguf
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    fields = {
        key: field.contents() for key, field in gguf.GGUFReader(file).fields.items() if key.startswith("tokenizer.")
    }
    about = {key.removeprefix("tokenizer.ggml."): value for key, value in fields.items()}
    if about.get("model") != "gpt2" or about.get("pre", "gpt-2") not in GGUF_WORDS:
        return None
    tokens, words = about["tokens"], GGUF_WORDS[about.get("pre", "gpt-2")]
    merges = [tuple(merge.split(" ")) for merge in about["merges"]]
    vocab = {token: n for n, token in enumerate(tokens)}
    if any(len(pair) != 2 or not {*pair, "".join(pair)} <= vocab.keys() for pair in merges):
        raise ValueError("its merges are not those of its tokens")
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    cut = [pre_tokenizers.Digits(individual_digits=True)] if about.get("pre") == "smollm" else []
    cut += [pre_tokenizers.Split(tokenizers.Regex(words), "isolated")] if words else []
    cut.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence(cut), decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, about["token_type"]) if kind == 3]  # control tokens
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in special])
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    config = {name: tokens[about[f"{key}_token_id"]] for key, name in names.items() if f"{key}_token_id" in about}
    if "tokenizer.chat_template" in fields:
        config["chat_template"] = fields["tokenizer.chat_template"]
    return tokenizer.to_str(), {"tokenizer_class": "PreTrainedTokenizerFast", **config}


def _plain(value: Any) -> Any:
    """A float as it was written, 1e-05, not the nearest float32."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _dequantized(
    gguf: Any, file: Path, tensor: Any, shape: tuple[int, ...], heads: int | None, rows: slice
) -> Float32[np.ndarray, "rows ..."]:
    with _readable(file):
        if heads is None:  # a quantized row is a row of blocks
            data = tensor.data.reshape(shape[0], -1)[rows]
            return gguf.quants.dequantize(data, tensor.tensor_type).reshape(-1, *shape[1:])
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        return rearrange(values, HALVES_TO_NEIGHBOURS, H=heads, two=2)[rows]


# ---- Meta ------------------------------------------------------------------------------------------------------------
META = {
    "tok_embeddings": "model.embed_tokens",
    "output": "lm_head",
    "norm": "model.norm",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
META_FIELDS = {
    "dim", "n_layers", "n_heads", "n_kv_heads", "multiple_of", "ffn_dim_multiplier", "norm_eps", "rope_theta",
    "vocab_size", "use_scaled_rope", "rope_scaling_factor",
}  # fmt: skip
COLUMNS = ("attention.wo", "feed_forward.w2")  # split by columns; others by rows


def open_meta(folder: Path) -> Source:
    """A Llama as Meta publishes it: params.json, and a consolidated.NN.pth for each part."""
    with needs_package(f"{folder} holds *.pth, and reading them", "torch", "pip install torch"):
        import torch
    with _readable(folder):
        config, tensors = _meta_parts(torch, folder)
    return described(config, tensors, folder)


def _meta_parts(torch: Any, folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Like `_gguf_parts`, from Meta's files."""
    params = read_json(folder / "params.json")
    if unknown := params.keys() - META_FIELDS:
        raise RunError(f"{folder / 'params.json'}: this family does not compute {', '.join(sorted(unknown))}")
    files = sorted(folder.glob("consolidated.*.pth"))
    if not files:
        raise RunError(f"there is no consolidated.*.pth in {folder}")
    parts = [torch.load(file, map_location="cpu", mmap=True, weights_only=True) for file in files]
    heads = params["n_heads"]
    config: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": params["dim"],
        "num_hidden_layers": params["n_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": params.get("n_kv_heads") or heads,
        "rms_norm_eps": params["norm_eps"],
        "rope_theta": params.get("rope_theta", 10000.0),
    }
    if params.get("use_scaled_rope"):
        # Meta's code takes the factor from the model's size: 32 for 1 and 3 billion, 8 for the larger ones.
        factor = params.get("rope_scaling_factor") or (32.0 if params["dim"] < 4096 else 8.0)
        scaling = {"rope_type": "llama3", "factor": float(factor), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        config["rope_scaling"] = scaling | {"original_max_position_embeddings": 8192}
    tensors = {}
    for key in parts[0]:
        layer = re.fullmatch(r"layers\.(\d+)\.([\w.]+)\.weight", key)
        inner = layer[2] if layer else key.removesuffix(".weight")
        if key == "rope.freqs":
            continue
        name = META.get(inner)
        name = f"{LAYER.format(layer[1])}.{name}.weight" if layer and name else f"{name}.weight" if name else key
        shape = list(parts[0][key].shape)
        # Llama 1 and 2 split the columns of the embedding, Llama 3 its rows.
        axis = int(inner in COLUMNS or (inner == "tok_embeddings" and shape[1] != params["dim"]))
        if len(shape) > 1:
            shape[axis] *= len(parts)
        turned = {"attention.wq": heads, "attention.wk": config["num_key_value_heads"]}.get(inner)
        tensors[name] = Tensor(tuple(shape), functools.partial(_joined, parts, key, axis, turned))
    config["vocab_size"] = tensors["model.embed_tokens.weight"].shape[0]
    config["head_dim"] = tensors["model.layers.0.self_attn.q_proj.weight"].shape[0] // heads
    config["intermediate_size"] = tensors["model.layers.0.mlp.gate_proj.weight"].shape[0]
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    return config, tensors


def _joined(
    parts: list[dict[str, Any]], key: str, axis: int, heads: int | None, rows: slice
) -> Float32[np.ndarray, "rows ..."]:
    arrays = [part[key].float().numpy() for part in parts]
    values = arrays[0] if arrays[0].ndim == 1 else np.concatenate(arrays, axis)
    return (rearrange(values, HALVES_TO_NEIGHBOURS, H=heads, two=2) if heads else values)[rows]
