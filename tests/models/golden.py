"""Writes what tests/models/ compares with: small random models of each family, and what transformers computes of them.

    make golden-oracle          # in an environment of its own, with torch: requirements-oracle.txt

Each variant is a folder golden/NAME: config.json and model.safetensors as transformers writes them, and oracle.npz with
rows of two sequences, their
logits, the mean loss and its gradient. Its settings are those that a tiny default leaves off: a window
that is shorter than the row, a scaling of rotary angles past the original length, biases and norms other than 0 and 1.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file

FOLDER = Path(__file__).parent / "golden"
SMALL = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": None,
}  # fmt: skip
OLD = {
    "vocab_size": 40, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_inner": 24, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
OF_T5 = {
    "vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_decoder_layers": 2, "num_heads": 2,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 10,
}  # fmt: skip
ROWS, LENGTHS = 8, (9, 15)  # of the two sequences in each row
READ = (13, 7)  # what an encoder reads of them, where it is other than what is predicted
LLAMA3 = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 2.0, "beta_slow": 0.5}
VARIANTS = {
    "llama": ("Llama", {}),
    "llama3": ("Llama", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 8}, "rms_norm_eps": 1e-5}),
    "llama_linear_tied": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}, "tie_word_embeddings": True},
    ),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "qwen2": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "tie_word_embeddings": True},
    ),
    "qwen3": ("Qwen3", {"rope_parameters": {**YARN, "original_max_position_embeddings": 8}}),
    "olmo2": ("Olmo2", {"num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "intermediate_size": 8, "sliding_window": 5}),
    "olmoe": ("Olmoe", {"num_attention_heads": 2, "num_experts": 4, "num_experts_per_tok": 3, "intermediate_size": 8}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 5,
        },
    ),
    "gemma": ("Gemma", {"hidden_size": 24, "rms_norm_eps": 1e-5}),
    "gemma2": (
        "Gemma2",
        {
            "hidden_size": 24,
            "query_pre_attn_scalar": 3,
            "sliding_window": 5,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 1.0,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "hidden_size": 24,
            "intermediate_size": 16,
            "num_attention_heads": 2,
            "query_pre_attn_scalar": 3,
            "sliding_window": 5,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
            },
        },
    ),
    "gpt2": ("GPT2", {**OLD, "layer_norm_epsilon": 1e-3}),
    "gpt2_gelu": ("GPT2", {**OLD, "activation_function": "gelu"}),
    "opt": (
        "OPT",
        {
            "vocab_size": 40,
            "hidden_size": 16,
            "ffn_dim": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": None,
        },
    ),
    "gptj": ("GPTJ", {**OLD, "rotary_dim": 4, "layer_norm_epsilon": 1e-3}),
    "bert": (
        "Bert",
        {
            "vocab_size": 40,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": 24,
            "layer_norm_eps": 1e-3,
            "pad_token_id": None,  # else its row has no gradient in torch
        },
    ),
    "t5": ("T5", {**OF_T5, "layer_norm_epsilon": 1e-3}),
    "t5_gated": ("T5", {**OF_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
}


def write(name: str, family: str, settings: dict) -> None:
    torch.manual_seed(0)
    shared = {} if family in ("GPT2", "OPT", "GPTJ", "T5", "Bert") else SMALL  # which have other names for the same
    config = getattr(transformers, f"{family}Config")(**{**shared, **settings})
    kind = {"T5": transformers.AutoModelForSeq2SeqLM, "Bert": transformers.AutoModelForMaskedLM}.get(
        family, transformers.AutoModelForCausalLM
    )
    model = kind.from_config(config, attn_implementation="eager").float().eval()
    if settings.get("tie_word_embeddings") is False:  # T5 1.1, which this release of transformers ties all the same
        model.lm_head.weight = torch.nn.Parameter(torch.empty(config.vocab_size, config.d_model))
    with torch.no_grad():
        for key, weight in model.named_parameters():
            drawn = torch.randn(weight.shape)
            if weight.ndim == 1:  # biases, and norms around one, which Gemma's are at 0
                is_norm = any(part in key for part in ("norm", "ln", "LayerNorm")) and not family.startswith("Gemma")
                weight.copy_(0.3 * drawn + (1.0 if is_norm else 0.0))
            else:
                weight.copy_(drawn / weight.shape[-1] ** 0.5)
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    targets = torch.randint(0, config.vocab_size, (ROWS, sum(LENGTHS)))
    is_target, others = torch.ones(targets.shape, dtype=torch.bool), {}
    if family == "T5":
        others["read"] = torch.randint(0, config.vocab_size, (ROWS, sum(READ)))
    if family == "Bert":  # every third token is masked, and is a target
        is_target = torch.rand(targets.shape) < 1 / 3
        others = {"inputs": torch.where(is_target, 3, targets), "kinds": torch.randint(0, 2, targets.shape)}
        others["is_target"] = is_target
    logits = []
    for n, part in enumerate(targets.split(LENGTHS, dim=1)):
        given = {"input_ids": torch.cat([torch.full((ROWS, 1), 1), part[:, :-1]], dim=1)}
        if family == "T5":
            given = {"input_ids": others["read"].split(READ, dim=1)[n], "decoder_input_ids": given["input_ids"]}
        if family == "Bert":
            inputs, kinds = [others[key].split(LENGTHS, dim=1)[n] for key in ("inputs", "kinds")]
            given = {"input_ids": inputs, "token_type_ids": kinds}
        logits.append(model(**given).logits)
    logits = torch.cat(logits, dim=1)
    loss = torch.nn.functional.cross_entropy(logits[is_target], targets[is_target])
    loss.backward()
    with torch.no_grad():  # gradients under the names, and lying, as the weights are published
        for weight in model.parameters():
            weight.copy_(weight.grad)
    with tempfile.TemporaryDirectory() as published:
        model.save_pretrained(published)
        gradients = load_file(Path(published) / "model.safetensors")
    np.savez_compressed(
        folder / "oracle.npz",
        targets=targets.numpy().astype(np.uint32),
        logits=logits[:2].detach().numpy(),
        loss=loss.item(),
        versions=f"torch {torch.__version__}, transformers {transformers.__version__}",
        **{key: value.numpy() for key, value in others.items()},
        **{f"gradient/{key}": value for key, value in gradients.items()},
    )


def write_texts(name: str) -> None:
    """What transformers generates after four prompts: greedy, by four beams, and with a repetition penalty."""
    folder, drawn, texts = FOLDER / name, torch.Generator().manual_seed(0), []
    reads = name.startswith("t5")
    kind = transformers.AutoModelForSeq2SeqLM if reads else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    unembed = load_file(folder / "model.safetensors").get("lm_head.weight") if reads else None
    if unembed is not None:  # of T5 1.1, which this release of transformers ties all the same
        model.lm_head.weight = torch.nn.Parameter(torch.tensor(unembed))
    for length in (3, 17, 1, 9):
        prompt = torch.randint(3, model.config.vocab_size, (1, length), generator=drawn)
        given = dict(max_new_tokens=20, do_sample=False, pad_token_id=0, eos_token_id=2)
        # Its cache has as many layers as the encoder, of which there are fewer here.
        given |= {"decoder_start_token_id": 0, "use_cache": False} if reads else {}
        ways = {
            "greedy": {},
            "beams": {"num_beams": 4, "length_penalty": 0.7},
            "penalized": {"repetition_penalty": 1.4},
        }
        said = {
            way: model.generate(prompt, attention_mask=torch.ones_like(prompt), **given, **settings)[
                0, 1 if reads else length :
            ].tolist()
            for way, settings in ways.items()
        }
        texts.append({"prompt": prompt[0].tolist(), **said})
    (folder / "texts.json").write_text(json.dumps(texts) + "\n")


def write_scores(name: str) -> None:
    """The log likelihoods of continuations of three contexts, in nats, and whether greedy decoding writes them: of each
    context two drawn ones and the greedy one."""
    folder, drawn, scores = FOLDER / name, torch.Generator().manual_seed(1), []
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    for length in (1, 7, 20):
        context = torch.randint(3, model.config.vocab_size, (length,), generator=drawn)
        given = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=2)
        (greedy,) = model.generate(context[None], attention_mask=torch.ones_like(context[None]), **given)
        drawn_ones = [torch.randint(0, model.config.vocab_size, (n,), generator=drawn) for n in (1, 9)]
        for continuation in (*drawn_ones, greedy[length:]):
            ids = torch.cat([context, continuation])
            with torch.no_grad():
                log_probs = model(ids[None, :-1]).logits[0, length - 1 :].double().log_softmax(-1)
            found = log_probs.gather(1, continuation[:, None]).sum().item()
            is_greedy = bool((log_probs.argmax(-1) == continuation).all())
            pair = {"context": context.tolist(), "continuation": continuation.tolist()}
            scores.append({**pair, "log_likelihood": found, "is_greedy": is_greedy})
    (folder / "scores.json").write_text(json.dumps(scores) + "\n")


if __name__ == "__main__":
    for name, variant in VARIANTS.items():
        if not sys.argv[1:] or name in sys.argv[1:]:
            write(name, *variant)
            if variant[0] != "Bert":
                write_texts(name)
                write_scores(name)
            size = sum(file.stat().st_size for file in (FOLDER / name).iterdir())
            print(f"{name}: {size:,} bytes, {json.loads((FOLDER / name / 'config.json').read_text())['model_type']}")
