"""The roofline as a picture, for ledger.html: what each phase of a step waits for, and how near it is to the roofs."""

import math
from html import escape

from ledger.machines import hardware
from ledger.machines.roofline import ASSUMPTIONS
from ledger.pages.html_parts import amount, legend, percent, seconds, table

LANES = {"compute": "compute", "memory": "memory traffic", "communication": "communication"}


def verdict(roofline) -> str:
    """The step's time in a sentence."""
    known = {**hardware.HARDWARE, **hardware.NAMES}
    name = next((name for name, each in known.items() if each == roofline.hardware), "this hardware")
    if roofline.step_s is None:
        return f"How long a step takes on {escape(name)} is not said: a figure of it is not known."
    return (
        f"On {escape(name)} a step takes at least <b>{seconds(roofline.step_s)}</b> (MFU at most "
        f"<b>{percent(roofline.mfu)}</b>), most of all for {LANES[roofline.bound]}; without any overlap "
        f"{seconds(roofline.step_alone_s)} (MFU {percent(roofline.mfu_alone)})."
    )


def section(roofline) -> str:
    machine = roofline.hardware
    rates = {
        "matrix products": (machine.peak_flops_per_s, "FLOP/s"),
        "memory": (machine.hbm_bytes, "B"),
        "to and from memory": (machine.hbm_bytes_per_s, "B/s"),
        f"to the others of {roofline.devices_per_host} in a host": (machine.link_bytes_per_s, "B/s"),
        "to other hosts": (machine.network_bytes_per_s, "B/s"),
    }
    figures = ", ".join(
        f"{name} {'n/a' if rate is None else amount(rate, unit)}" for name, (rate, unit) in rates.items()
    )
    phases = [each for each in roofline.phases if any(each.times.values())]
    columns = {
        "phase": "",
        "bound by": "",
        **dict.fromkeys(LANES.values(), "s"),
        "overlapped": "s",
        "one after another": "s",
    }
    rows = [
        (each.name, LANES.get(each.bound, "n/a"), *each.times.values(), each.overlapped_s, each.alone_s)
        for each in phases
    ]
    return f"""<p>{verdict(roofline)} A device of this kind: {escape(figures)}.</p>
<h3>A step in time</h3>
<p>In each phase the three go on at the same time, and the longest decides how long it takes. Where a row is blank, it
waits.</p>
{_lanes(phases)}
{table("Time of each phase", columns, rows)}
<h3>The roofs</h3>
<p>Each phase by its FLOPs for each byte: ● that is read from memory or written to it, ▲ that is sent. On the flat roof
the phase can compute at full speed; on a slope it waits for bytes. A ▲ that lies between slopes sends at several
speeds.</p>
{_diagram(roofline, phases)}
<details><summary>What this assumes</summary><ul>{"".join(f"<li>{escape(each)}</li>" for each in ASSUMPTIONS)}</ul>
<p>Source of the figures: {escape(machine.source) or "given by the user"}.</p></details>"""


# -- A step in time ----------------------------------------------------------------------------------------------------
def _lanes(phases) -> str:
    """For each of the three a row of bars, one for each phase, which is as wide as its longest."""
    lengths = {each.name: max(time for time in each.times.values() if time) for each in phases}
    whole = sum(lengths.values())

    def row(label: str, cells: dict[str, str], kind: str = "") -> str:
        spans = "".join(
            f'<span style="width:{100 * lengths[name] / whole:.4g}%">{cell}</span>' for name, cell in cells.items()
        )
        return f'<div class="lane {kind}"><b>{label}</b><div aria-hidden="true">{spans}</div></div>'

    found = [row("", {name: name if length > whole / 12 else "" for name, length in lengths.items()}, "heads")]
    for lane, label in LANES.items():
        times = {each.name: each.times[lane] for each in phases}
        cells = {
            name: f'<i class="{name}" style="width:{100 * (time or 0) / lengths[name]:.4g}%"></i>'
            for name, time in times.items()
        }
        found.append(row(f"{label} {seconds(None if None in times.values() else sum(times.values()))}", cells))
    keys = legend([(each.name, each.name, seconds(each.overlapped_s)) for each in phases])
    return f'<div class="lanes">{"".join(found)}</div>{keys}'


# -- The roofs ---------------------------------------------------------------------------------------------------------
WIDTH, HEIGHT = 460, 300  # of the diagram, in its own units
LEFT, RIGHT, TOP, BOTTOM = 58, 436, 14, 256  # of its frame


def _diagram(roofline, phases) -> str:
    """FLOP/s over FLOPs a byte, both logarithmic, as SVG."""
    peak, roofs = roofline.hardware.peak_flops_per_s, _roofs(roofline)
    points = []  # phase, mark, FLOPs a byte, FLOP/s
    for each in phases:
        for mark, moved, time in (("●", each.hbm_bytes, each.hbm_s), ("▲", each.sent_bytes, each.sent_s)):
            if peak and each.flops and moved and time:
                points.append((each.name, mark, each.flops / moved, min(peak, each.flops / time)))
    if not points:
        return "<p>n/a: a figure of this hardware is not known.</p>"
    across = [intensity for _, _, intensity, _ in points] + [peak / rate for rate in roofs.values()]
    low, high = math.floor(math.log10(min(across) / 2)), math.ceil(math.log10(max(across) * 2))
    bottom = math.floor(math.log10(min(min(rate for *_, rate in points), peak / 30)))
    top = math.log10(peak * 2.2)

    def x(intensity: float) -> float:
        return LEFT + (math.log10(intensity) - low) / (high - low) * (RIGHT - LEFT)

    def y(rate: float) -> float:
        return BOTTOM - (math.log10(rate) - bottom) / (top - bottom) * (BOTTOM - TOP)

    drawn = []
    for power in range(low, high + 1):
        drawn.append(f'<path class="grid" d="M{x(10.0**power):.1f} {TOP}V{BOTTOM}"/>')
        drawn.append(_text(x(10.0**power), BOTTOM + 15, _power(power)))
    for power in range(bottom, math.floor(top) + 1):
        drawn.append(f'<path class="grid" d="M{LEFT} {y(10.0**power):.1f}H{RIGHT}"/>')
        drawn.append(_text(LEFT - 5, y(10.0**power) + 4, _power(power), "end"))
    taken = [(x(intensity), y(rate)) for _, _, intensity, rate in points]  # where no name should be written
    for number, (name, rate) in enumerate(roofs.items()):
        start, ridge = max(10.0**low, 10.0**bottom / rate), peak / rate
        line = f"M{x(start):.1f} {y(start * rate):.1f}L{x(ridge):.1f} {y(peak):.1f}H{RIGHT}"
        drawn.append(f'<path class="roof{number}" d="{line}"/>')
        angle = math.degrees(math.atan2(y(peak) - y(start * rate), x(ridge) - x(start)))
        places = [start ** (1 - along) * ridge**along for along in (0.3, 0.45, 0.6, 0.72)]
        spots = [(x(at), y(at * rate) - 8) for at in places]
        spot = max(spots, key=lambda spot: min(math.dist(spot, each) for each in taken))
        taken.append(spot)
        place = f"translate({spot[0]:.1f} {spot[1]:.1f}) rotate({angle:.1f})"
        drawn.append(f'<text class="name" text-anchor="middle" transform="{place}">{escape(name)}</text>')
    drawn.append(_text(RIGHT, y(peak) - 11, f"peak {amount(peak, 'FLOP/s')}", "end"))
    for name, mark, intensity, rate in points:
        at, up = x(intensity), y(rate)
        shape = f"M{at:.1f} {up - 7:.1f}l6.5 11.5h-13z"
        if mark == "●":
            shape = f"M{at - 5.5:.1f} {up:.1f}a5.5 5.5 0 1 0 11 0a5.5 5.5 0 1 0 -11 0z"
        said = f"{name}, {'memory' if mark == '●' else 'sent'}: {intensity:.3g} FLOPs a byte, {amount(rate, 'FLOP/s')}"
        drawn.append(f'<path class="point {name}" d="{shape}"><title>{said}</title></path>')
    drawn.append(_text((LEFT + RIGHT) / 2, HEIGHT - 8, "FLOPs a byte"))
    middle = (TOP + BOTTOM) / 2
    drawn.append(f'<text transform="translate(13 {middle}) rotate(-90)" text-anchor="middle">FLOP/s</text>')
    label = "The roofline of the phases; the table above has its times."
    return (
        f'<svg class="roofline" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(drawn)}</svg>'
    )


def _roofs(roofline) -> dict[str, float]:
    """The slopes, by what is written on them: bytes/s of memory, and of each speed at which a part of the bytes is sent
    that is not negligible."""
    speeds, sent = {}, sum(each.sent_bytes for each in roofline.sendings)
    for each in roofline.sendings:
        if each.bytes_per_s and each.sent_bytes > sent / 1000:
            speeds.setdefault(each.bytes_per_s, set()).add(" × ".join(each.axes))
    roofs = {f"{', '.join(sorted(axes))}: {amount(rate, 'B/s')}": rate for rate, axes in sorted(speeds.items())[::-1]}
    memory = roofline.hardware.hbm_bytes_per_s
    return ({f"memory: {amount(memory, 'B/s')}": memory} if memory else {}) | roofs


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _power(power: int) -> str:
    """10 to a power: 100 G."""
    prefixes = {0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P", 18: "E"}
    thousands = power - power % 3
    return f"{10 ** (power % 3)} {prefixes[thousands]}".strip() if thousands in prefixes else f"{10.0**power:g}"
