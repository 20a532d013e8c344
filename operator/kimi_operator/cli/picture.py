"""Pictures of a plan as SVG text: memory of a GPU, throughput and TPOT against concurrency, requests against context.

Pure. Sizes are in pixels of the view box; colours are classes, which the page gives values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from xml.sax.saxutils import escape

from msgspec import Struct

from kimi_operator.cli.figures import number, with_band
from kimi_operator.cli.outlook import ContextPoint, Outlook, RoleOutlook, Speed
from kimi_operator.cli.text import segments
from kimi_operator.planner.predict import CurvePoint, Prediction
from kimi_operator.planner.units import binding, bytes_text, counted

WIDTH, HEIGHT = 720, 320
LEFT, RIGHT, TOP, BOTTOM = 76, 44, 16, 52
BAR_HEIGHT, NARROWEST_LABEL = 44, 80
CLASSES = {"weights": "weights", "reserved": "reserved", "state slots": "slots", "KV pages": "pages", "free": "free"}
MOST_TICKS = 8


class Axis(Struct, frozen=True):
    """Values to pixels, by ratio or by difference."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool

    def at(self, value: float) -> float:
        """Pixel of a value."""
        if self.is_log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values within the axis, few enough to read."""
        if not self.is_log:
            step = 10 ** math.floor(math.log10((self.high - self.low) / 2))
            while (self.high - self.low) / step > MOST_TICKS:
                step *= 2 if str(step)[0] in "15" else 2.5
            first = math.ceil(self.low / step)
            return [step * i for i in range(first, math.floor(self.high / step) + 1)]
        factor = 2.0
        while math.log(self.high / self.low) / math.log(factor) > MOST_TICKS:
            factor *= 2
        count = math.floor(math.log(self.high / self.low) / math.log(factor) + 1e-9)
        return [self.low * factor**i for i in range(count + 1)]


def _axis(values: Iterable[float], start: float, end: float, *, is_log: bool) -> Axis:
    found = [value for value in values if value > 0] or [1.0]
    if is_log:
        low = 2.0 ** math.floor(math.log2(min(found)))
        return Axis(low, max(2 * low, *found), start, end, is_log=True)
    return Axis(0.0, 1.05 * max(found), start, end, is_log=False)


def memory_picture(each: RoleOutlook) -> str:
    """What the memory of one GPU of a role is spent on."""
    sizes = segments(each.plan.lines)
    total, left, parts = sum(sizes.values()), 0.0, []
    for name, size in sizes.items():
        width = (WIDTH - 2) * size / total
        text = f"{name}: {bytes_text(size)}, {size / total:.1%}"
        parts.append(
            f'<rect class="{CLASSES[name]}" x="{1 + left:.2f}" y="1" width="{width:.2f}" height="{BAR_HEIGHT}">'
            f"<title>{escape(text)}</title></rect>"
        )
        if width >= NARROWEST_LABEL:
            parts.append(_text(1 + left + width / 2, 1 + BAR_HEIGHT / 2 + 4, bytes_text(size), "inside", "middle"))
        left += width
    title = f"Memory of a {each.plan.role} GPU, {bytes_text(total)}"
    return _svg(title, parts, BAR_HEIGHT + 2)


def legend(each: RoleOutlook) -> Iterator[tuple[str, str, str]]:
    """Class, name and bytes of what the bar tells apart."""
    for name, size in segments(each.plan.lines).items():
        yield CLASSES[name], name, bytes_text(size)


def throughput_picture(speed: Speed) -> str:
    """Output tokens a second against concurrency, with band, knee and the load that was asked about."""
    title = "Output tokens a second against requests at once"
    return _curve(title, speed, lambda point: point.tokens_per_second, "output tokens/s")


def tpot_picture(speed: Speed) -> str:
    """Time between two tokens against concurrency, with its band."""
    return _curve("Time between two tokens against requests at once", speed, lambda point: point.tpot, "TPOT, ms")


def _curve(title: str, speed: Speed, of: Callable[[CurvePoint], Prediction], label: str) -> str:
    points = speed.curve
    x = _axis((point.concurrency for point in points), LEFT, WIDTH - RIGHT, is_log=True)
    y = _axis((of(point).high for point in points), HEIGHT - BOTTOM, TOP, is_log=False)
    upper = [(x.at(point.concurrency), y.at(of(point).high)) for point in points]
    lower = [(x.at(point.concurrency), y.at(of(point).low)) for point in reversed(points)]
    parts = [
        *_axes(x, y, "requests at once", label),
        f'<polygon class="band" points="{_points(upper + lower)}"/>',
        _line([(x.at(point.concurrency), y.at(of(point).value)) for point in points], "value"),
    ]
    for point in points:
        text = f"{point.concurrency:,} at once: {with_band(of(point))}; {binding(point.binds)}"
        parts.append(_dot(x.at(point.concurrency), y.at(of(point).value), 2.5, "value", text))
    for name, point in (("knee", speed.knee), ("asked", speed.at)):
        at = x.at(point.concurrency)
        parts.append(f'<line class="{name}" x1="{at:.2f}" x2="{at:.2f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
    parts += _marks(speed, x)
    return _svg(title, parts)


def _marks(speed: Speed, x: Axis) -> Iterator[str]:
    """Names of the two upright lines; one name where they are one."""
    marks = {"knee": speed.knee.concurrency, "load": speed.at.concurrency}
    if marks["knee"] == marks["load"]:
        marks = {"load and knee": marks["knee"]}
    for row, (name, concurrency) in enumerate(marks.items()):
        at = x.at(concurrency)
        anchor, shift = ("end", -5) if at > WIDTH / 2 else ("start", 5)
        yield _text(at + shift, TOP + 12 + 15 * row, f"{name} at {concurrency:,}", "mark", anchor)


def context_picture(points: Sequence[ContextPoint]) -> str:
    """Requests that all decode lanes hold at once, against the context of each."""
    x = _axis((point.context_tokens for point in points), LEFT, WIDTH - RIGHT, is_log=True)
    counts = [count for point in points for count in (point.planned, point.cut_for_it)]
    y = _axis(counts, HEIGHT - BOTTOM, TOP, is_log=True)
    parts = list(_axes(x, y, "tokens a request", "requests at once"))
    cut = [(point.context_tokens, point.cut_for_it) for point in points]
    planned = [(point.context_tokens, point.planned) for point in points]
    for name, pairs in (("cut", cut), ("value", planned)):
        parts.append(_line([(x.at(tokens), y.at(count)) for tokens, count in pairs if count], name))
    for point in points:
        each = counted(point.context_tokens, "token")
        text = f"{each} each: {point.planned:,} as planned, {point.cut_for_it:,} if cut for it"
        parts.append(_dot(x.at(point.context_tokens), y.at(point.planned or y.low), 2.5, "value", text))
    return _svg("Requests at once on all decode lanes, against the tokens of each", parts)


def pictures(outlook: Outlook, points: Sequence[ContextPoint]) -> Iterator[tuple[str, str]]:
    """The charts of a plan with what they show in words."""
    if outlook.speed is not None:
        speed = outlook.speed
        words = f"Band: {speed.at.tokens_per_second.calibrated_on}."
        yield throughput_picture(speed), f"Output tokens a second against requests at once. {words}"
        yield (
            tpot_picture(speed),
            "Time between two tokens against requests at once. Band: of decode, as above.",
        )
    yield (
        context_picture(points),
        (
            "Requests that all decode lanes hold at once, against the tokens of each: solid as planned, dashed if "
            "slots and pages were cut for that context alone."
        ),
    )


def _axes(x: Axis, y: Axis, x_label: str, y_label: str) -> Iterator[str]:
    bottom = HEIGHT - BOTTOM
    for value in y.ticks():
        at = y.at(value)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.2f}" y2="{at:.2f}"/>'
        yield _text(LEFT - 8, at + 4, _tick(value), "tick", "end")
    for value in x.ticks():
        at = x.at(value)
        yield f'<line class="grid" x1="{at:.2f}" x2="{at:.2f}" y1="{TOP}" y2="{bottom}"/>'
        yield _text(at, bottom + 18, _tick(value), "tick", "middle")
    yield _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x_label, "label", "middle")
    middle = (TOP + bottom) / 2
    yield (
        f'<text class="label" text-anchor="middle" transform="translate(16 {middle:.0f}) rotate(-90)">'
        f"{escape(y_label)}</text>"
    )


def _tick(value: float) -> str:
    if value >= 1000:
        return f"{value / 1000:g}k" if value < 1_000_000 and value % 100 == 0 else f"{value:,.0f}"
    return f"{value:g}" if value == round(value) else number(value)


def _points(pairs: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.2f},{y:.2f}" for x, y in pairs)


def _line(pairs: Iterable[tuple[float, float]], name: str) -> str:
    return f'<polyline class="line {name}" points="{_points(pairs)}"/>'


def _dot(x: float, y: float, radius: float, name: str, text: str) -> str:
    return f'<circle class="dot {name}" cx="{x:.2f}" cy="{y:.2f}" r="{radius}"><title>{escape(text)}</title></circle>'


def _text(x: float, y: float, text: str, name: str, anchor: str) -> str:
    return f'<text class="{name}" x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(title: str, parts: Iterable[str], height: int = HEIGHT) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(title, {chr(34): "&quot;"})}">\n<title>{escape(title)}</title>\n'
        + "\n".join(parts)
        + "\n</svg>"
    )
