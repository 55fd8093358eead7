"""Writes tests/models/peft/NAME: adapters as PEFT writes them, of a model in golden/, and the logits with them.

make golden-oracle          # in an environment of its own, with torch: requirements-oracle.txt
"""

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import peft
import torch
import transformers
from golden import model_of
from safetensors.torch import save_file

FOLDER = Path(__file__).parent
VARIANTS = {
    "llama": {"target_modules": ["q_proj", "v_proj", "o_proj", "down_proj", "up_proj"], "lora_dropout": 0.1},
    "gptj": {"target_modules": ["k_proj", "out_proj", "fc_in"], "lora_dropout": 0.1},
    # Arrays of all experts, which PEFT 0.21 has under the names of the array.
    "mixtral": {
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        "target_modules": ["q_proj"],
    },
}


def write(name: str, settings: dict) -> None:
    torch.manual_seed(0)
    base = model_of(name)
    lora = peft.LoraConfig(r=3, lora_alpha=5, task_type="CAUSAL_LM", **settings)
    model = peft.get_peft_model(base, lora).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "lora_" in key:
                weight.copy_(0.3 * torch.randn(weight.shape))
    folder = FOLDER / "peft" / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = name  # no path of this machine
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n")
    write_oracle(folder, base.config, model)


def write_each_expert(name: str) -> None:
    """Matrices of each expert, as models/adapters.py writes them and PEFT with transformers 4 did: PEFT 0.21 reads them
    into its arrays."""
    torch.manual_seed(0)
    base = model_of(name)
    folder, down = FOLDER / "peft" / name, base.model.layers[0].mlp.experts.down_proj
    experts, wide, narrow = down.shape
    sizes = {"gate_proj": (wide, narrow), "up_proj": (wide, narrow), "down_proj": (narrow, wide)}
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    tensors = {}
    for layer, expert, (matrix, (read, written)) in itertools.product(
        range(base.config.num_hidden_layers), range(experts), sizes.items()
    ):
        stem = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{matrix}.lora"
        tensors |= {f"{stem}_A.weight": 0.3 * torch.randn(3, read), f"{stem}_B.weight": 0.3 * torch.randn(written, 3)}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": name, "r": 3, "lora_alpha": 5}
    config |= {"lora_dropout": 0.0, "bias": "none", "target_modules": sorted(sizes)}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n")
    write_oracle(folder, base.config, peft.PeftModel.from_pretrained(base, folder).eval())


def write_oracle(folder: Path, config: transformers.PretrainedConfig, model: torch.nn.Module) -> None:
    tokens = torch.randint(0, config.vocab_size, (2, 12))
    np.savez_compressed(
        folder / "oracle.npz",
        tokens=tokens.numpy().astype(np.uint32),
        logits=model(input_ids=tokens).logits.detach().numpy(),
        versions=f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}",
    )


if __name__ == "__main__":
    for name, settings in VARIANTS.items():
        write(name, settings)
    write_each_expert("olmoe")
