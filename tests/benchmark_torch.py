"""What PyTorch and transformers take for the same model on the device at hand, a JSON line each; it needs both.

    python -m tests.benchmark_torch                                  # a step of c4_h200x1_1b, by torch.compile
    python -m tests.benchmark_torch what=draw rows=1 folder=/tmp/135m d_model=576 layers=30 heads=9 key_heads=3 \
        d_head=64 d_ff=1536 vocab=49152                              # tokens from random weights, which it writes there
    python -m tests.benchmark_torch what=draw_ours rows=1 folder=/tmp/135m vocab=49152          # the same weights, here

A step: `LlamaForCausalLM` with causal attention (PyTorch's own kernels, no documents), compiled, in autocast to
bfloat16 from float32 weights, the norm of all gradients, and fused AdamW, on one batch of random tokens; seconds are
the median of ten. Drawing: greedily in bfloat16 after 128 random tokens; seconds a token are the median of three
differences between 129 tokens and 33.
"""

import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from runtime.config import command_line
from runtime.config.keys import Count

PROMPT, FEW, MANY = 128, 33, 129


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    what: Literal["step", "draw", "draw_ours"] = "step"  # what is timed
    folder: str | None = None  # of the weights that tokens are drawn from; made if it is not there
    rows: Count = 64  # of a batch
    length: Count = 1024  # tokens of a row
    d_model: Count = 2048  # as the keys of the same name in configs/size
    layers: Count = 8  # of the model
    heads: Count = 16  # of queries
    key_heads: Count = 16  # of keys
    d_head: Count = 128  # size of a head
    d_ff: Count = 16384  # of the feed-forward network
    vocab: Count = 32768  # tokens that there are


def model_of(config, torch, **more):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": config.d_model, "num_hidden_layers": config.layers, "vocab_size": config.vocab}
    sizes |= {"num_attention_heads": config.heads, "num_key_value_heads": config.key_heads, "head_dim": config.d_head}
    sizes |= {"intermediate_size": config.d_ff, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    with torch.device(device_of(torch)):
        return LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="sdpa", **more))


def device_of(torch):
    return "cuda" if torch.cuda.is_available() else "cpu"


def wait(torch):
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def step(config, torch):
    device = device_of(torch)
    torch.backends.cuda.matmul.allow_tf32 = True
    model = model_of(config, torch, tie_word_embeddings=False, use_cache=False).train()
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    ids = torch.randint(0, config.vocab, (config.rows, config.length), device=device)

    def one():
        began = wait(torch)
        with torch.autocast(device, torch.bfloat16):
            loss = compiled(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return wait(torch) - began

    first, times = one(), [one() for _ in range(13)][3:]
    memory = torch.cuda.max_memory_allocated() if device == "cuda" else None
    parameters = sum(weight.numel() for weight in model.parameters())
    return {"first_s": first, "step_s": statistics.median(times), "memory_bytes": memory, "parameters": parameters}


def timed_draw(config, call):
    """Seconds a token and of the first call; call(prompts, tokens) draws and returns the seconds."""
    prompts = np.random.default_rng(0).integers(0, config.vocab, (config.rows, PROMPT))
    first, _ = call(prompts, FEW), call(prompts, MANY)
    times = [call(prompts, MANY) - call(prompts, FEW) for _ in range(3)]
    return {"first_s": first, "token_s": statistics.median(times) / (MANY - FEW)}


def draw(config, torch):
    from transformers import LlamaForCausalLM

    if not Path(config.folder).exists():
        model = model_of(config, torch, tie_word_embeddings=True, max_position_embeddings=8192)
        model.to(torch.bfloat16).save_pretrained(config.folder)
    model = LlamaForCausalLM.from_pretrained(config.folder, dtype=torch.bfloat16).to(device_of(torch)).eval()

    def call(prompts, tokens):
        ids, began = torch.tensor(prompts, device=model.device), wait(torch)
        with torch.no_grad():
            how = {"do_sample": False, "min_new_tokens": tokens, "max_new_tokens": tokens, "pad_token_id": 0}
            model.generate(ids, attention_mask=torch.ones_like(ids), **how)
        return wait(torch) - began

    return timed_draw(config, call)


def draw_ours(config):
    import jax

    from tools.ready import OnDevices, Writing, ready_model, start_mesh, write

    given = OnDevices(model=config.folder, compute_dtype="bfloat16")
    with jax.set_mesh(start_mesh(given)):
        ready = ready_model(given)

        def call(prompts, tokens):
            how, began = Writing(tokens=tokens, temperature=0.0, rows=config.rows), time.perf_counter()
            list(write(ready, how, prompts.tolist(), [0] * config.rows))
            return time.perf_counter() - began

        return timed_draw(config, call)


def main(config: Benchmark) -> None:
    if config.what == "draw_ours":
        line = draw_ours(config)
    else:
        import torch
        import transformers

        line = {"step": step, "draw": draw}[config.what](config, torch)
        line |= {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({**vars(config), **line}), flush=True)


if __name__ == "__main__":
    command_line.run(main, Benchmark)
