"""Tells the ledger what it cannot see in a kernel's products, by the names of scopes around them.

    with declared.share(9, 16): ...               # of the products in here the model needs 9 of 16 FLOPs
    with declared.kernel_flops(my_kernel=(5, 4)): # one run of `my_kernel` computes 5 FLOPs, of which the model needs 4
    with declared.recomputed(): ...               # again what the forward pass has computed: the model needs none of it

Model FLOPs are the definition of MFU and do not depend on the kernel: half of each of the two products of length² that
attention has, and twice that in the backward pass. What runs is counted apart (HFU).
"""

import jax


def share(needed: int, run: int):
    """The model needs `needed` of `run` FLOPs of the matrix products in this scope."""
    return jax.named_scope(f"needed={needed}:{run}")


def kernel_flops(**kernels: tuple[int, int]):
    """FLOPs of each run of the kernels in this scope, by the ends of their names: (all that it computes, the model's).

    The name is a Pallas kernel's, or the target of a foreign function.
    """
    return jax.named_scope(" ".join(f"flops:{name}={run}:{needed}" for name, (run, needed) in kernels.items()))


def recomputed():
    """Products that the forward pass has computed before; JAX's own checkpoints use the same name."""
    return jax.named_scope("rematted_computation")
