"""The report's plots, each drawn from figures. Pure: values in, inline SVG out, None where there is nothing to draw."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from kimi_runbook.figures import FirstToken, PrefixRequest, Rung, Sample
from kimi_runbook.report.svg import WIDTH, Canvas, Scale, linear, short, ticks
from kimi_runbook.report.text import clipped, rounded

_LEFT, _RIGHT = 46.0, WIDTH - 14.0
_ROW = 24.0
_MOST_POINTS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class _Series:
    """One line of a panel: its name, its shape and class, its points; None is a gap."""

    name: str
    shape: str
    kind: str
    points: Sequence[tuple[float, float | None]]


def tokens_plot(requests: Sequence[PrefixRequest]) -> Markup | None:
    """Draw expected, counted and cached tokens of each request, one row each."""
    if not requests:
        return None
    agreeing = sum(agrees(request) for request in requests)
    canvas = Canvas(
        id="plot-tokens",
        height=42 + _ROW * len(requests) + 34,
        title="Tokens from the prefix cache: expected, counted, cached_tokens",
        description=f"{agreeing} of {len(requests)} requests have all three equal. One row per request, in order: "
        "a thin line for its prompt, a frame for the hits expected, a filled bar for those counted, a diamond for "
        "cached_tokens.",
    )
    left, right = 116.0, WIDTH - 92.0
    most = max((request.prompt_tokens or request.expected_hit_tokens or 0 for request in requests), default=0)
    marks = ticks(float(most))
    x = linear(0, marks[-1], left, right)
    _legend(canvas, 14, [("line", "prompt"), ("frame", "expected"), ("bar", "counted"), ("diamond", "cached_tokens")])
    bottom = 42 + _ROW * len(requests)
    for value in marks:
        canvas.line(x(value), 34, x(value), bottom, "grid")
        canvas.text(x(value), bottom + 14, short(value), anchor="middle")
    canvas.text((left + right) / 2, bottom + 30, "tokens", anchor="middle")
    for row, request in enumerate(requests):
        _token_row(canvas, request, 42 + _ROW * row + _ROW / 2, x)
    return canvas.markup()


def agrees(request: PrefixRequest) -> bool:
    """Return whether all three witnesses say the same; an absent cached_tokens agrees with an expectation of 0 only."""
    wanted = request.expected_hit_tokens
    cached = 0 if request.cached_tokens is None and wanted == 0 else request.cached_tokens
    return wanted is not None and request.counted_hit_tokens == wanted and cached == wanted


def _token_row(canvas: Canvas, request: PrefixRequest, y: float, x: Scale) -> None:
    zero = x(0)
    canvas.text(zero - 8, y + 4, clipped(request.label, 17), kind="label", anchor="end")
    if request.prompt_tokens is not None:
        canvas.line(zero, y, x(request.prompt_tokens), y, "prompt")
    if request.expected_hit_tokens is not None:
        canvas.box(zero, y - 8, max(0.0, x(request.expected_hit_tokens) - zero), 16, "frame")
    if request.counted_hit_tokens is not None:
        canvas.box(zero, y - 5, max(0.0, x(request.counted_hit_tokens) - zero), 10, "bar")
    if request.cached_tokens is not None:
        canvas.mark(x(request.cached_tokens), y, "diamond", "mark two", 4)
    if agrees(request):
        canvas.text(WIDTH - 84, y + 4, f"= {request.expected_hit_tokens}", kind="label")
        return
    canvas.text(WIDTH - 84, y + 4, "≠ they differ", kind="label strong")


def first_token_plot(requests: Sequence[PrefixRequest], ratio: FirstToken) -> Markup | None:
    """Draw time to first token of each request of the families that hit: without hits above, with hits below."""
    cold, warm = (
        [request.first_token_s for request in group if request.first_token_s is not None]
        for group in cold_and_warm(requests)
    )
    if not cold and not warm:
        return None
    canvas = Canvas(
        id="plot-first-token",
        height=136,
        title="Time to first token, cold and warm",
        description=f"{medians(ratio)} {len(cold)} cold and {len(warm)} warm requests, each a mark.",
    )
    left, right = 66.0, _RIGHT - 12
    known = [value for value in (*cold, *warm, ratio.cold_median_s, ratio.warm_median_s) if value is not None]
    marks = ticks(max(known))
    x = linear(0, marks[-1], left, right)
    for value in marks:
        canvas.line(x(value), 14, x(value), 100, "grid")
        canvas.text(x(value), 116, short(value), anchor="middle")
    canvas.text((left + right) / 2, 132, "seconds to the first token", anchor="middle")
    rows = (("cold", cold, ratio.cold_median_s, "circle", "one"), ("warm", warm, ratio.warm_median_s, "diamond", "two"))
    for row, (name, values, median, shape, kind) in enumerate(rows):
        y = 36.0 + 44 * row
        canvas.text(left - 8, y + 4, f"{name} ({len(values)})", kind="label", anchor="end")
        canvas.line(left, y, right, y, "axis")
        for value in values:
            canvas.mark(x(value), y, shape, f"mark {kind}", 4)
        if median is not None:
            canvas.line(x(median), y - 13, x(median), y + 13, f"median {kind}")
            beyond = x(median) > right - 90
            anchor, aside = ("end", -5) if beyond else ("start", 5)
            canvas.text(x(median) + aside, y - 9, f"median {rounded(median)} s", kind="label", anchor=anchor)
    return canvas.markup()


def medians(ratio: FirstToken) -> str:
    """Return step 3's comparison of first-token times as a sentence."""
    covers = f" at {ratio.coverage:.0%}" if ratio.coverage is not None else ""
    return (
        f"Median {rounded(ratio.cold_median_s)} s cold, {rounded(ratio.warm_median_s)} s warm; warm over cold is "
        f"{rounded(ratio.ratio)} (interval{covers} {rounded(ratio.low)} to {rounded(ratio.high)})."
    )


def cold_and_warm(requests: Sequence[PrefixRequest]) -> tuple[list[PrefixRequest], list[PrefixRequest]]:
    """Return the timed requests without and with expected hits, of the families in which hits are expected at all.

    A control is no member: it is of another length, and its time says nothing about the cache.
    """
    families = {request.family for request in requests if request.expected_hit_tokens}
    timed = [request for request in requests if request.family in families and request.first_token_s is not None]
    cold = [request for request in timed if not request.expected_hit_tokens]
    return cold, [request for request in timed if request.expected_hit_tokens]


def ladder_plot(rungs: Sequence[Rung], nominal: int | None, peak: int | None, knee: int | None) -> Markup | None:
    """Draw throughput and time to first token over concurrency, one rung after the other at equal distances."""
    if not rungs:
        return None
    named = {
        at: [
            name for name, value in zip(("nominal", "knee", "peak"), (nominal, knee, peak), strict=True) if value == at
        ]
        for at in (rung.concurrency for rung in rungs)
    }
    marked = {at: ", ".join(names) for at, names in named.items() if names}
    places = ", ".join(f"{names} {at}" for at, names in marked.items())
    canvas = Canvas(
        id="plot-ladder",
        height=374,
        title="Throughput and time to first token over concurrency",
        description=f"Concurrency {', '.join(str(rung.concurrency) for rung in rungs)}"
        + (f"; {places}. " if places else ". ")
        + "Above, output tokens per second; below, median and 99th percentile of time to first token.",
    )
    place = linear(0, max(1, len(rungs) - 1), _LEFT + 14, _RIGHT - 10)
    x = {rung.concurrency: place(n) for n, rung in enumerate(rungs)}
    for row, (at, names) in enumerate(marked.items()):
        y = 14.0 + 14 * (row % 2)  # neighbours do not write over each other
        canvas.text(x[at], y, names, anchor="end" if x[at] > _RIGHT - 40 else "middle")
        canvas.line(x[at], y + 4, x[at], 334, "guide")
    throughput = [(x[rung.concurrency], rung.output_tokens_per_s) for rung in rungs]
    _panel(
        canvas, 58, 172, "output tokens per second", [_Series(name="", shape="circle", kind="one", points=throughput)]
    )
    latencies = [
        _Series(
            name=key,
            shape=shape,
            kind=kind,
            points=[(x[rung.concurrency], rung.ttft_s.get(key)) for rung in rungs],
        )
        for key, shape, kind in (("p50", "circle", "one"), ("p99", "square", "two dashed"))
    ]
    _panel(canvas, 214, 334, "time to first token, s", latencies)
    for rung in rungs:
        canvas.text(x[rung.concurrency], 350, str(rung.concurrency), anchor="middle")
    canvas.text((_LEFT + _RIGHT) / 2, 367, "requests in flight at once", anchor="middle")
    return canvas.markup()


def observation_plot(samples: Sequence[Sample]) -> Markup | None:
    """Draw cache usage, requests and time to first token over the observation."""
    if not samples:
        return None
    span = samples[-1].at_s - samples[0].at_s
    drawn, each = thinned(samples, _MOST_POINTS)
    canvas = Canvas(
        id="plot-observation",
        height=438,
        title="The service over time",
        description=f"{len(samples)} samples over {rounded(span, 0)} seconds"
        + (f", each point the highest of {each} samples" if each > 1 else "")
        + ". From above: share of the KV cache in use, requests running and waiting, time to first token.",
    )
    marks = ticks(samples[-1].at_s)
    x = linear(0, marks[-1], _LEFT + 4, _RIGHT - 10)

    def series(name: str, shape: str, kind: str, values: Sequence[float | None]) -> _Series:
        points = [(x(sample.at_s), value) for sample, value in zip(drawn, values, strict=True)]
        return _Series(name=name, shape=shape, kind=kind, points=points)

    usage = [None if sample.kv_usage is None else sample.kv_usage * 100 for sample in drawn]
    _panel(canvas, 32, 130, "KV cache in use, %", [series("", "", "one", usage)])
    running = [sample.running for sample in drawn]
    waiting = [sample.waiting for sample in drawn]
    _panel(
        canvas,
        168,
        266,
        "requests",
        [series("running", "", "one", running), series("waiting", "", "two dashed", waiting)],
    )
    _panel(canvas, 304, 402, "time to first token, s", [series("", "", "one", [sample.ttft_s for sample in drawn])])
    for value in marks:
        canvas.text(x(value), 416, short(value), anchor="middle")
    canvas.text((_LEFT + _RIGHT) / 2, 433, "seconds since the observation began", anchor="middle")
    return canvas.markup()


def thinned(samples: Sequence[Sample], most: int) -> tuple[list[Sample], int]:
    """Return at most so many samples, each with the highest values of its neighbours, and of how many it is made."""
    each = max(1, -(-len(samples) // most))
    groups = [samples[start : start + each] for start in range(0, len(samples), each)]
    names = [name for name in Sample.__dataclass_fields__ if name != "at_s"]
    return [
        Sample(at_s=group[-1].at_s, **{name: _highest(getattr(sample, name) for sample in group) for name in names})
        for group in groups
    ], each


def _highest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _panel(canvas: Canvas, top: float, bottom: float, label: str, series: Sequence[_Series]) -> None:
    """Draw one panel: grid, axis labels, lines with their marks, and a key where there is more than one line."""
    values = [y for one in series for _, y in one.points if y is not None]
    marks = ticks(max(values, default=0.0), 3)
    y = linear(0, marks[-1], bottom, top)
    for value in marks:
        canvas.line(_LEFT, y(value), _RIGHT, y(value), "axis" if value == 0 else "grid")
        canvas.text(_LEFT - 6, y(value) + 4, short(value), anchor="end")
    canvas.text(_LEFT - 40, top - 10, label, kind="label")
    if not values:
        canvas.text((_LEFT + _RIGHT) / 2, (top + bottom) / 2, "not observed", anchor="middle")
    key = _RIGHT
    for one in reversed([one for one in series if one.name]):
        canvas.text(key, top - 10, one.name, kind="label", anchor="end")
        key -= 6.4 * len(one.name) + 8
        canvas.line(key - 22, top - 14, key, top - 14, f"series {one.kind}")
        if one.shape:
            canvas.mark(key - 11, top - 14, one.shape, f"mark {one.kind.split()[0]}")
        key -= 34
    for one in series:
        for unbroken in _runs(one.points):
            placed = [(at, y(value)) for at, value in unbroken]
            canvas.path(placed, f"series {one.kind}")
            for at, height in placed if one.shape or len(placed) == 1 else ():
                canvas.mark(at, height, one.shape or "circle", f"mark {one.kind.split()[0]}")


def _runs(points: Sequence[tuple[float, float | None]]) -> list[list[tuple[float, float]]]:
    """Return the points in runs without a gap: a value nobody saw breaks the line, it is not drawn as 0."""
    found: list[list[tuple[float, float]]] = [[]]
    for at, value in points:
        if value is None:
            found.append([])
        else:
            found[-1].append((at, value))
    return [unbroken for unbroken in found if unbroken]


def _legend(canvas: Canvas, y: float, entries: Sequence[tuple[str, str]]) -> None:
    at = 14.0
    for shape, name in entries:
        if shape == "line":
            canvas.line(at, y, at + 20, y, "prompt")
        elif shape == "frame":
            canvas.box(at, y - 7, 20, 14, "frame")
        elif shape == "bar":
            canvas.box(at, y - 5, 20, 10, "bar")
        else:
            canvas.mark(at + 10, y, shape, "mark two", 4)
        canvas.text(at + 26, y + 4, name, kind="label")
        at += 40 + 7.4 * len(name)
