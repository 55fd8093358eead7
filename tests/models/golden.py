"""Writes what tests/models/ compares with: small random models of each family, and what transformers computes of them.

    make golden-oracle          # in an environment of its own, with torch: requirements-oracle.txt

Each variant is a folder golden/NAME, whose config.json is written first; of a new one `model_type` and what is no
default are enough. Added are model.safetensors, and oracle.npz with rows of two sequences, their logits, the mean loss
and its gradient. The settings are those that a tiny default leaves off: a window that is shorter than the row, a
scaling of rotary angles past the original length, biases and norms other than 0 and 1; and no pad_token_id for an
encoder, whose row of the embedding would have no gradient in torch.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file

FOLDER = Path(__file__).parent / "golden"
ROWS, LENGTHS = 8, (9, 15)  # of the two sequences in each row
READ = (13, 7)  # what an encoder reads of them, where it is other than what is predicted
KINDS = {"t5": transformers.AutoModelForSeq2SeqLM, "bert": transformers.AutoModelForMaskedLM}


def model_of(name: str, is_new: bool = False) -> torch.nn.Module:
    """The model of a folder, with the folder's weights or with new ones."""
    config = transformers.AutoConfig.from_pretrained(FOLDER / name)
    kind = KINDS.get(config.model_type, transformers.AutoModelForCausalLM)
    given = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = kind.from_config(config, **given) if is_new else kind.from_pretrained(FOLDER / name, **given)
    if getattr(config, "is_gated_act", False):  # T5 1.1, which this release of transformers ties all the same
        table = torch.empty(config.vocab_size, config.d_model)
        if not is_new:
            table = torch.tensor(load_file(FOLDER / name / "model.safetensors")["lm_head.weight"])
        model.lm_head.weight = torch.nn.Parameter(table)
    return model.eval()


def write(name: str) -> None:
    torch.manual_seed(0)
    model = model_of(name, is_new=True)
    config, family = model.config, model.config.model_type
    with torch.no_grad():
        for key, weight in model.named_parameters():
            drawn = torch.randn(weight.shape)
            if weight.ndim == 1:  # biases, and norms around one, which Gemma's are at 0
                is_norm = any(part in key for part in ("norm", "ln", "LayerNorm")) and not family.startswith("gemma")
                weight.copy_(0.3 * drawn + (1.0 if is_norm else 0.0))
            else:
                weight.copy_(drawn / weight.shape[-1] ** 0.5)
    folder = FOLDER / name
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    targets = torch.randint(0, config.vocab_size, (ROWS, sum(LENGTHS)))
    is_target, others = torch.ones(targets.shape, dtype=torch.bool), {}
    if family == "t5":
        others["read"] = torch.randint(0, config.vocab_size, (ROWS, sum(READ)))
    if family == "bert":  # every third token is masked, and is a target
        is_target = torch.rand(targets.shape) < 1 / 3
        others = {"inputs": torch.where(is_target, 3, targets), "kinds": torch.randint(0, 2, targets.shape)}
        others["is_target"] = is_target
    logits = []
    for n, part in enumerate(targets.split(LENGTHS, dim=1)):
        given = {"input_ids": torch.cat([torch.full((ROWS, 1), 1), part[:, :-1]], dim=1)}
        if family == "t5":
            given = {"input_ids": others["read"].split(READ, dim=1)[n], "decoder_input_ids": given["input_ids"]}
        if family == "bert":
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
    drawn, texts, model = torch.Generator().manual_seed(0), [], model_of(name)
    reads = model.config.model_type == "t5"
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
    (FOLDER / name / "texts.json").write_text(json.dumps(texts) + "\n")


def write_scores(name: str) -> None:
    """The log likelihoods of continuations of three contexts, in nats, and whether greedy decoding writes them: of each
    context two drawn ones and the greedy one."""
    drawn, scores, model = torch.Generator().manual_seed(1), [], model_of(name)
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
    (FOLDER / name / "scores.json").write_text(json.dumps(scores) + "\n")


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(path.name for path in FOLDER.iterdir()):
        write(name)
        kind = json.loads((FOLDER / name / "config.json").read_text())["model_type"]
        if kind != "bert":
            write_texts(name)
        if kind not in KINDS:
            write_scores(name)
        size = sum(file.stat().st_size for file in (FOLDER / name).iterdir())
        print(f"{name}: {size:,} bytes, {kind}")
