"""The roofline for ledger.html: how near each phase of a step is to the roofs."""

import math
import re

from ledger.machines.roofline import Roofline
from ledger.pages.render import shown
from ledger.units import number

LEFT, RIGHT, TOP, BOTTOM = 58, 440, 24, 250  # the frame's edges, in the units of the diagram


def diagram(roofline: Roofline) -> dict[str, list[tuple]] | None:
    """FLOP/s over FLOPs a byte, both logarithmic, in the coordinates of an SVG: grid lines with what stands at them,
    roofs as path and label, points as phase, path and what a tooltip says. None where a figure that it needs is not
    known."""
    peak, rates = roofline.hardware.peak_flops_per_s or 0, _roofs(roofline)
    points = []  # phase, whether memory, FLOPs a byte, FLOP/s
    for phase in roofline.phases:
        for is_memory, moved, took in ((True, phase.hbm_bytes, phase.hbm_s), (False, phase.sent_bytes, phase.sent_s)):
            if peak and phase.flops and moved and took:
                points.append((phase.name, is_memory, phase.flops / moved, min(peak, phase.flops / took)))
    if not points:
        return None
    intensities = [intensity for _, _, intensity, _ in points] + [peak / rate for rate in rates.values()]
    low, high = math.floor(math.log10(min(intensities) / 2)), math.ceil(math.log10(max(intensities) * 2))
    bottom = math.floor(math.log10(min(min(rate for *_, rate in points), peak / 30)))
    top = math.log10(peak * 1.6)

    def x(intensity: float) -> float:
        return round(LEFT + (math.log10(intensity) - low) / (high - low) * (RIGHT - LEFT), 1)

    def y(rate: float) -> float:
        return round(BOTTOM - (math.log10(rate) - bottom) / (top - bottom) * (BOTTOM - TOP), 1)

    roofs = []
    for label, rate in rates.items():
        start = max(10.0**low, 10.0**bottom / rate)
        path = f"M{x(start)} {y(start * rate)}L{x(peak / rate)} {y(peak)}H{RIGHT}"
        roofs.append((path, f"{label}: {shown(rate, 'B/s')}"))
    drawn = []
    for name, is_memory, intensity, rate in points:
        triangle, circle = "m0 -7l6.5 11.5h-13z", "m-5.5 0a5.5 5.5 0 1 0 11 0a5.5 5.5 0 1 0 -11 0z"
        what = f"{name}, {'memory' if is_memory else 'sent'}: {intensity:.3g} FLOPs a byte, {shown(rate, 'FLOP/s')}"
        drawn.append((name, f"M{x(intensity)} {y(rate)}{circle if is_memory else triangle}", what))
    across = [(x(10.0**power), _power(power)) for power in range(low, high + 1)]
    up = [(y(10.0**power), _power(power)) for power in range(bottom, math.floor(top) + 1)]
    return {"across": across, "up": up, "roofs": roofs, "points": drawn}


def _roofs(roofline: Roofline) -> dict[str, float]:
    """The slopes: bytes/s of memory, and of each link that carries more than 0.1 % of the bytes."""
    speeds: dict[float, set[str]] = {}
    sent = sum(sending.sent_bytes for sending in roofline.sendings)
    for sending in roofline.sendings:
        if sending.bytes_per_s and sending.sent_bytes > sent / 1000:
            speeds.setdefault(sending.bytes_per_s, set()).add(" × ".join(sending.axes))
    memory = roofline.hardware.hbm_bytes_per_s
    rates = {"memory": memory} if memory else {}
    return rates | {f"over {', '.join(sorted(axes))}": rate for rate, axes in sorted(speeds.items(), reverse=True)}


def _power(power: int) -> str:
    """10 to a power: 100G."""
    return re.sub(r"\.0+", "", number(10.0**power))
