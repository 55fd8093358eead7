"""The roofline as a picture, for ledger.html: what each phase of a step waits for, and how far from the roofs it is."""

import math
from html import escape

from ledger import hardware
from ledger.html_parts import amount, legend, percent, seconds, table

LANES = {"compute": "compute", "memory": "memory traffic", "communication": "communication"}
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 460, 300, 64, 44, 14, 14  # of the diagram, in its own units


def name_of(machine: hardware.Hardware) -> str:
    """The first name under which the table of hardware has these figures."""
    known = {**hardware.HARDWARE, **hardware.NAMES}
    return next((name for name, each in known.items() if each == machine), "this hardware")


def verdict(roofline) -> str:
    """The step's time in a sentence."""
    name = escape(name_of(roofline.hardware))
    if roofline.step_s is None:
        return f"How long a step takes on {name} is not said: its data sheet lacks a figure (n/a below)."
    return (
        f"On {name} a step takes at least <b>{seconds(roofline.step_s)}</b> (MFU at most "
        f"<b>{percent(roofline.mfu)}</b>), most of all for {LANES[roofline.bound]}; with no overlap at all "
        f"{seconds(roofline.step_alone_s)} ({percent(roofline.mfu_alone)})."
    )


def section(roofline) -> str:
    from ledger.roofline import ASSUMPTIONS  # imports ledger.step, which imports this

    machine, phases = roofline.hardware, [each for each in roofline.phases if any(each.times.values())]
    rates = [
        ("products", machine.peak_flops_per_s, "FLOP/s"),
        ("memory", machine.hbm_bytes, "B"),
        ("to and from it", machine.hbm_bytes_per_s, "B/s"),
        (f"to the other devices of its {roofline.devices_per_host}", machine.link_bytes_per_s, "B/s"),
        ("to other hosts", machine.network_bytes_per_s, "B/s"),
    ]
    figures = "; ".join(f"{name} {'n/a' if rate is None else amount(rate, unit)}" for name, rate, unit in rates)
    rows = [
        (each.name, LANES.get(each.bound, "n/a"), *(seconds(time) for time in each.times.values()))
        + (seconds(each.overlapped_s), seconds(each.alone_s))
        for each in phases
    ]
    columns = dict.fromkeys(("phase", "bound by", *LANES.values(), "overlapped", "one after another"), "")
    return f"""<p>{verdict(roofline)} One device: {escape(figures)}.</p>
<h3>A step in time</h3>
<p>In each phase the three go on at the same time, and the longest decides how long it takes. What is left blank is waiting.</p>
{_lanes(phases)}
{table("Seconds of a step, by phase", columns, rows)}
<h3>The roofs</h3>
<p>Each phase by the FLOPs it does for a byte: ● a byte to or from memory, ▲ a byte sent. On the flat roof
compute is the limit, on a slope that byte's path is.</p>
{_diagram(roofline, phases)}
<details><summary>What this assumes</summary><ul>{"".join(f"<li>{escape(each)}</li>" for each in ASSUMPTIONS)}</ul>
<p>Figures: {escape(machine.source) or "given by the user"}.</p></details>"""


def _lanes(phases) -> str:
    """For each of the three a row of bars, side by side by phase; a phase is as wide as its longest."""
    lengths = [max([time for time in each.times.values() if time] or [0]) for each in phases]
    whole = sum(lengths)
    heads = "".join(
        f'<span style="width:{100 * length / whole:.4g}%">{each.name} {seconds(length)}</span>'
        for each, length in zip(phases, lengths, strict=True)
    )
    lanes = [f'<div class="lane heads" aria-hidden="true"><b></b><div>{heads}</div></div>']
    for lane, label in LANES.items():
        cells = "".join(
            f'<span style="width:{100 * length / whole:.4g}%"><i class="{each.name}" '
            f'style="width:{100 * (each.times[lane] or 0) / length:.4g}%"></i></span>'
            for each, length in zip(phases, lengths, strict=True)
        )
        times = [each.times[lane] for each in phases]
        total = None if None in times else sum(times)
        lanes.append(f'<div class="lane"><b>{label} {seconds(total)}</b><div aria-hidden="true">{cells}</div></div>')
    return f'<div class="lanes">{"".join(lanes)}</div>' + legend(
        [(each.name, each.name, seconds(each.overlapped_s)) for each in phases]
    )


def _diagram(roofline, phases) -> str:
    """The roofline proper, as SVG: FLOP/s over FLOPs a byte, both logarithmic."""
    peak = roofline.hardware.peak_flops_per_s
    if peak is None:
        return "<p>n/a: the peak rate of products is not known.</p>"
    roofs = [
        ("memory", roofline.hardware.hbm_bytes_per_s),
        ("links", roofline.hardware.link_bytes_per_s),
        ("network", roofline.hardware.network_bytes_per_s if any(s.crosses_hosts for s in roofline.sendings) else None),
    ]
    roofs = [(name, rate) for name, rate in roofs if rate]
    points = []  # phase, what a byte does, FLOPs a byte, FLOP/s
    for each in phases:
        for mark, moved, time in (("●", each.hbm_bytes, each.hbm_s), ("▲", each.sent_bytes, each.sent_s)):
            if each.flops and moved and time:
                points.append((each.name, mark, each.flops / moved, min(peak, each.flops / time)))
    across = [intensity for *_, intensity, _ in points] + [peak / rate for _, rate in roofs]
    if not across:
        return "<p>n/a: the speeds of memory and links are not known.</p>"
    low, high = math.floor(math.log10(min(across)) - 0.3), math.ceil(math.log10(max(across)) + 0.3)
    top = math.log10(peak) + 0.35
    bottom = min(math.floor(min([math.log10(rate) for *_, rate in points] or [top - 2])), math.floor(top - 1.5))

    def x(value):
        return LEFT + (math.log10(value) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(value):
        return HEIGHT - BOTTOM - (math.log10(value) - bottom) / (top - bottom) * (HEIGHT - BOTTOM - TOP)

    drawn = []
    for power in range(low, high + 1):
        drawn.append(f'<path class="grid" d="M{x(10**power):.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
        drawn.append(
            f'<text x="{x(10**power):.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{10**power:g}</text>'
        )
    for power in range(bottom, math.floor(top) + 1):
        drawn.append(f'<path class="grid" d="M{LEFT} {y(10.0**power):.1f}H{WIDTH - RIGHT}"/>')
        drawn.append(
            f'<text x="{LEFT - 5}" y="{y(10.0**power) + 4:.1f}" text-anchor="end">{amount(10.0**power, "")}</text>'
        )
    starts = [max(10.0**low, 10.0**bottom / rate) for _, rate in roofs]
    for (name, rate), start in zip(roofs, starts, strict=True):
        drawn.append(
            f'<path class="roof {name}" d="M{x(start):.1f} {y(start * rate):.1f}L{x(peak / rate):.1f} {y(peak):.1f}"/>'
        )
        middle = math.sqrt(start * peak / rate)
        angle = math.degrees(math.atan2(y(peak) - y(start * rate), x(peak / rate) - x(start)))
        drawn.append(
            f'<text class="name" text-anchor="middle" transform="translate({x(middle):.1f} {y(middle * rate) - 6:.1f}) '
            f'rotate({angle:.1f})">{name} {amount(rate, "B/s")}</text>'
        )
    ridge = min(peak / rate for _, rate in roofs) if roofs else 10.0**low
    drawn.append(f'<path class="roof" d="M{x(ridge):.1f} {y(peak):.1f}H{WIDTH - RIGHT}"/>')
    drawn.append(
        f'<text class="name" x="{WIDTH - RIGHT}" y="{y(peak) - 6:.1f}" text-anchor="end">peak {amount(peak, "FLOP/s")}</text>'
    )
    for name, mark, intensity, rate in points:
        at, up = x(intensity), y(rate)
        shape = (
            f'<circle cx="{at:.1f}" cy="{up:.1f}" r="5.5"'
            if mark == "●"
            else (f'<path d="M{at:.1f} {up - 6.5:.1f}l6.5 11h-13z"')
        )
        drawn.append(
            f'{shape} class="point {name}"><title>{name}: {intensity:.3g} FLOPs a byte, '
            f'{amount(rate, "FLOP/s")}</title></{"circle" if mark == "●" else "path"}>'
        )
    drawn.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">FLOPs a byte</text>')
    drawn.append(
        f'<text transform="translate(13 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" text-anchor="middle">FLOP/s</text>'
    )
    said = "; ".join(
        f"{name}, {'memory' if mark == '●' else 'sent'}: {intensity:.3g} FLOPs a byte"
        for name, mark, intensity, _ in points
    )
    return (
        f'<svg class="roofline" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Roofline. {said}.">'
        f"{''.join(drawn)}</svg>"
    )
