"""Writes golden/harness.json: of 200 pairs of ids the log likelihoods that lm-eval-harness' own HFLM gives, with each
small model that has scores.json.

    .venv-oracle/bin/pip install lm_eval==0.4.13            # after `make golden-oracle`
    .venv-oracle/bin/python tests/golden_harness.py
"""

import json
import random
from pathlib import Path

import transformers
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, models

VOCAB = 40
FOLDER = Path(__file__).parent / "models/golden"


def pairs() -> list[tuple[list[int], list[int]]]:
    """Ten continuations of 1 to 12 tokens of each of 20 contexts of 1 to 30."""
    draw = random.Random(0)

    def ids(most: int) -> list[int]:
        return [draw.randrange(3, VOCAB) for _ in range(draw.randint(1, most))]

    return [(context, ids(12)) for context in [ids(30) for _ in range(20)] for _ in range(10)]


def main() -> None:
    words = Tokenizer(models.WordLevel({f"{number}": number for number in range(VOCAB)}, unk_token="0"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="0", eos_token="2", bos_token="1"
    )
    asked, found = pairs(), {}
    for folder in sorted(path.parent for path in FOLDER.glob("*/scores.json")):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype="float32", attn_implementation="eager", experts_implementation="eager"
        )
        judge = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=8, max_length=64)
        given = [(("", ""), *pair) for pair in asked]
        found[folder.name] = [
            [round(value, 7), bool(greedy)] for value, greedy in judge._loglikelihood_tokens(given, disable_tqdm=True)
        ]
    (Path(__file__).parent / "golden/harness.json").write_text(json.dumps({"pairs": asked, "found": found}) + "\n")


if __name__ == "__main__":
    main()
