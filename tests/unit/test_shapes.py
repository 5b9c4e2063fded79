"""Value objects are read by their annotations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from kimi_runbook.errors import RunbookError
from kimi_runbook.reading import Fields
from kimi_runbook.shapes import read


@dataclass(frozen=True, kw_only=True)
class Part:
    name: str
    size: int | None = None


@dataclass(frozen=True, kw_only=True)
class Whole:
    part: Part | None = None
    parts: tuple[Part, ...] = ()
    named: Mapping[str, Part | None] = field(default_factory=dict)
    numbers: tuple[int, ...] | None = ()
    share: float = 0.5
    sure: bool = False
    anything: object = None


def whole(data: dict[str, Any]) -> Whole:
    return read(Whole, Fields(data, "here"))


def test_missing_takes_the_default_and_null_says_unknown() -> None:
    assert whole({}) == Whole()
    assert whole({"numbers": None, "share": None, "sure": None}) == Whole(numbers=None)


def test_everything_is_read() -> None:
    data = {
        "part": {"name": "a", "size": 1},
        "parts": [{"name": "b"}],
        "named": {"c": {"name": "c"}, "d": None},
        "numbers": [1, 2],
        "share": 1,
        "sure": True,
        "anything": {"x": [1]},
        "unknown": 1,
    }
    assert whole(data) == Whole(
        part=Part(name="a", size=1),
        parts=(Part(name="b"),),
        named={"c": Part(name="c"), "d": None},
        numbers=(1, 2),
        share=1.0,
        sure=True,
        anything={"x": [1]},
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"part": {}}, "here: part: name: absent"),
        ({"part": 1}, "here: part: 1; expected a mapping"),
        ({"parts": [3]}, r"here: parts\[0\]: 3; expected a mapping"),
        ({"named": {"c": []}}, "here: named: c: a list; expected a mapping"),
        ({"numbers": ["1"]}, "here: numbers: a list; expected a list of integers"),
        ({"share": "half"}, "here: share: 'half'; expected a number"),
        ({"sure": "yes"}, "here: sure: 'yes'; expected true or false"),
    ],
)
def test_a_wrong_type_names_its_place(data: dict[str, Any], message: str) -> None:
    with pytest.raises(RunbookError, match=message):
        whole(data)


def test_an_annotation_nobody_reads_is_a_mistake_of_ours() -> None:
    @dataclass(frozen=True)
    class Odd:
        value: bytes = b""

    with pytest.raises(TypeError, match="no reader"):
        read(Odd, Fields({}, "here"))
