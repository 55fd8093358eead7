"""Numbers near a given one that divide, or are divided: what an error proposes. Imports no JAX."""


def nearest_multiples(size: int, factor: int) -> str:
    """The multiples of `factor` next to a size.

    >>> nearest_multiples(63, 4)
    '60 or 64'
    """
    below = size // factor * factor
    return f"{below} or {below + factor}" if below else f"{factor}"


def nearest_divisors(size: int, near: int) -> str:
    """The divisors of a size next to `near`.

    >>> nearest_divisors(3, 2)
    '1 or 3'
    """
    below = next((n for n in range(near - 1, 0, -1) if size % n == 0), None)
    above = next((n for n in range(near + 1, min(size, 64 * near) + 1) if size % n == 0), None)
    return " or ".join(str(n) for n in (below, above) if n)
