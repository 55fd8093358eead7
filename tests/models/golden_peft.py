"""Writes tests/models/peft/NAME: adapters as PEFT writes them, of a model in golden/, and the logits with them.

make golden-oracle          # in an environment of its own, with torch: requirements-oracle.txt
"""

import json
import shutil
from pathlib import Path

import numpy as np
import peft
import torch
import transformers

FOLDER = Path(__file__).parent
VARIANTS = {
    "llama": ["q_proj", "v_proj", "o_proj", "down_proj", "up_proj"],
    "gptj": ["k_proj", "out_proj", "fc_in"],
}


def write(name: str, modules: list[str]) -> None:
    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_pretrained(
        FOLDER / "golden" / name, dtype=torch.float32, attn_implementation="eager"
    )
    lora = peft.LoraConfig(r=3, lora_alpha=5, target_modules=modules, lora_dropout=0.1, task_type="CAUSAL_LM")
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
    tokens = torch.randint(0, base.config.vocab_size, (2, 12))
    np.savez_compressed(
        folder / "oracle.npz",
        tokens=tokens.numpy().astype(np.uint32),
        logits=model(input_ids=tokens).logits.detach().numpy(),
        versions=f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}",
    )


if __name__ == "__main__":
    for name, modules in VARIANTS.items():
        write(name, modules)
