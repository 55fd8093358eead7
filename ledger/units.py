"""Numbers with their units, as every room prints them. Imports nothing."""


def number(value: float) -> str:
    """Three digits and a prefix: 1.07G, 268M, 512; nothing for zero."""
    if not value:
        return ""
    for power, prefix in ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if value >= 0.9995 * 10**power:
            return f"{value / 10**power:#.3g}".rstrip(".") + prefix
    return f"{value:.3g}"


def gigabytes(value: float) -> str:
    """Two digits after the point: 1.23 GB, and below a tenth of one 12.34 MB."""
    return f"{value / 1e9:,.2f} GB" if value >= 1e8 else f"{value / 1e6:,.2f} MB"


def amount(value: float, unit: str) -> str:
    """Three digits with prefix and unit.

    >>> amount(4.4e12, "FLOP"), amount(512, "B"), amount(0, "B")
    ('4.40 TFLOP', '512 B', '0 B')
    """
    text = number(value) or "0"
    digits = text.rstrip("PTGMk")
    return f"{digits} {text[len(digits) :]}{unit}"


def seconds(value: float | None) -> str:
    """Three digits: 1.23 s, 45.6 ms, 7.89 µs; n/a for what is not known."""
    if value is None:
        return "n/a"
    for scale, unit in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= 0.9995 * scale:
            return f"{value / scale:#.3g}".rstrip(".") + f" {unit}"
    return "under 1 µs" if value else "0 s"


def percent(part: float | None) -> str:
    """A fraction as a percentage, 12.3%; n/a if it is not known."""
    if part is None:
        return "n/a"
    return "< 0.1%" if 0 < part < 0.001 else f"{part:.1%}"
