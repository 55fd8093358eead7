"""The nearest multiples and divisors of a number, which errors propose. Imports no JAX."""

import math


def nearest_multiples(size: int, factor: int) -> str:
    """The multiples of `factor` nearest to a size.

    >>> nearest_multiples(63, 4)
    '60 or 64'
    """
    below = size // factor * factor
    return f"{below} or {below + factor}" if below else f"{factor}"


def nearest_divisors(size: int, wanted: int) -> str:
    """The divisors of a size nearest to `wanted`.

    >>> nearest_divisors(3, 2), nearest_divisors(64, 2**31 - 1)
    ('1 or 3', '64')
    """
    small = [n for n in range(1, min(math.isqrt(size), 2**20) + 1) if size % n == 0]  # sizes may be absurd
    divisors = [*small, *(size // n for n in reversed(small))]
    below = max((n for n in divisors if n < wanted), default=None)
    above = min((n for n in divisors if wanted < n <= 64 * wanted), default=None)
    return " or ".join(str(n) for n in (below, above) if n)
