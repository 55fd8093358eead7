"""Writes tests/golden/adafactor.npz: three steps of torch.optim.Adafactor on a stack of matrices and on a vector.

make golden-oracle          # in an environment of its own, with torch: requirements-oracle.txt
"""

from pathlib import Path

import numpy as np
import torch

FILE = Path(__file__).parent / "golden/adafactor.npz"
SHAPES = {"matrices": (3, 8, 16), "vector": (8,)}
DECAY = {"matrices": 0.1, "vector": 0.0}


def main():
    rng = np.random.default_rng(0)
    found = {"torch": torch.__version__}
    for name, shape in SHAPES.items():
        start = rng.normal(size=shape).astype(np.float32)
        gradients = [(size * rng.normal(size=shape)).astype(np.float32) for size in (1, 3, 0.1)]
        # torch takes the root mean square of a tensor: each matrix is one.
        weights = [
            torch.tensor(matrix, dtype=torch.float64, requires_grad=True) for matrix in start.reshape(-1, *shape[-2:])
        ]
        optimizer = torch.optim.Adafactor(weights, lr=0.01, weight_decay=DECAY[name])
        for gradient in gradients:
            for weight, its in zip(weights, gradient.reshape(-1, *shape[-2:])):
                weight.grad = torch.tensor(its, dtype=torch.float64)
            optimizer.step()
        end = np.stack([weight.detach().numpy() for weight in weights]).reshape(shape)
        found |= {f"{name}/start": start, f"{name}/gradients": np.stack(gradients), f"{name}/end": end}
    np.savez(FILE, **found)


if __name__ == "__main__":
    main()
