"""report.html: one file that loads nothing and runs nothing, for eyes, keyboards, screen readers and paper."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from test_report import EVERY, EVERY_ID, OLD

from kimi_runbook.acceptance.result import State, StepResult
from kimi_runbook.record import Record, load_record
from kimi_runbook.report import html, palette, verdict_of
from kimi_runbook.report.text import clean
from tests.unit import records
from tests.unit.hostile import EVIL, hostile

VOID = {"meta", "link", "br", "line", "rect", "circle", "polyline", "polygon"}
LOADS = {
    "script",
    "iframe",
    "object",
    "embed",
    "img",
    "image",
    "audio",
    "video",
    "source",
    "track",
    "use",
    "form",
    "base",
}
REPORTS = pytest.mark.parametrize("make", EVERY, ids=EVERY_ID)


@dataclass(slots=True)
class Element:
    tag: str
    attributes: dict[str, str]
    children: "list[Element | str]" = field(default_factory=list)

    def all(self, *tags: str) -> "list[Element]":
        found = [self] if self.tag in tags else []
        for child in self.children:
            if isinstance(child, Element):
                found += child.all(*tags)
        return found

    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text() for child in self.children)


class Tree(HTMLParser):
    """Builds the tree and fails on an element that is closed in the wrong place or never."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("root", {})
        self._open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"{tag} has an attribute twice: {names}"
        element = Element(tag, {name: value or "" for name, value in attrs})
        self._open[-1].children.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open[-1].children.append(Element(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1].tag == tag, f"</{tag}> closes <{self._open[-1].tag}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self._open[-1].children.append(data)

    def close(self) -> None:
        super().close()
        assert [element.tag for element in self._open] == ["root"]


@cache
def tree(make: Callable[[], Record]) -> Element:
    parser = Tree()
    parser.feed(html(make()))
    parser.close()
    return parser.root


def page_one(root: Element) -> Element:
    (sheet,) = [e for e in root.all("div") if e.attributes.get("class") == "sheet"]
    return sheet


def said(element: Element) -> str:
    return " ".join(element.text().split())


@REPORTS
def test_nothing_is_loaded_and_nothing_runs(make: Callable[[], Record]) -> None:
    root = tree(make)
    assert not root.all(*LOADS)
    for element in root.all(*{e.tag for e in every(root)}):
        for name, value in element.attributes.items():
            assert not name.startswith("on"), f"{element.tag} {name}"
            if name in ("href", "src", "xlink:href", "action", "style", "background"):
                assert value.startswith(("#", "data:,")), f"{element.tag} {name}={value}"
    (style,) = root.all("style")
    assert not re.search(r"url\(|@import|@font-face|expression|http", style.text())
    policy = [m.attributes["content"] for m in root.all("meta") if m.attributes.get("http-equiv")]
    assert policy == [
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    ]


def every(element: Element) -> list[Element]:
    children = [child for child in element.children if isinstance(child, Element)]
    return [element, *(deeper for child in children for deeper in every(child))]


@REPORTS
def test_headings_go_down_one_at_a_time(make: Callable[[], Record]) -> None:
    levels = [int(heading.tag[1]) for heading in tree(make).all("h1", "h2", "h3", "h4", "h5", "h6")]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert all(said(heading) for heading in tree(make).all("h1", "h2", "h3"))


@REPORTS
def test_every_table_has_a_caption_and_scopes(make: Callable[[], Record]) -> None:
    tables = tree(make).all("table")
    assert len(tables) >= 4
    for one in tables:
        (caption,) = one.all("caption")
        assert said(caption)
        columns = [cell for head in one.all("thead") for cell in head.all("th")]
        assert columns
        assert {cell.attributes.get("scope") for cell in columns} == {"col"}
        for row in [row for body in one.all("tbody") for row in body.all("tr")]:
            cells = [cell for cell in row.children if isinstance(cell, Element)]
            if cells[0].attributes.get("colspan"):
                continue
            assert (cells[0].tag, cells[0].attributes.get("scope")) == ("th", "row")
            assert len(cells) == len(columns), said(row)


@REPORTS
def test_the_page_can_be_walked_by_landmark_and_by_key(make: Callable[[], Record]) -> None:
    root = tree(make)
    (page,) = root.all("html")
    assert page.attributes["lang"] == "en"
    assert [len(root.all(tag)) for tag in ("header", "nav", "main", "footer")] == [1] * 4
    assert said(root.all("head")[0].all("title")[0])
    first = next(e for e in every(root.all("body")[0]) if e.tag in ("a", "button", "input"))
    assert (first.attributes["href"], root.all("main")[0].attributes["id"]) == ("#main", "main")
    ids = [e.attributes["id"] for e in every(root) if "id" in e.attributes]
    assert len(ids) == len(set(ids))
    for link in root.all("a"):
        assert link.attributes["href"].removeprefix("#") in ids, link.attributes["href"]
        assert said(link)
    for element in every(root):
        for name in ("aria-labelledby", "aria-describedby"):
            assert all(ref in ids for ref in element.attributes.get(name, "").split()), element.attributes
    for section in root.all("section"):
        assert section.attributes.get("aria-labelledby")
    for box in [e for e in root.all("div") if e.attributes.get("class") == "scroll"]:
        if box.all("table")[0].attributes.get("class") != "stack":  # it may scroll sideways, so keys must reach it
            assert (box.attributes["tabindex"], box.attributes["role"]) == ("0", "group")
            assert box.attributes["aria-labelledby"]
    (style,) = root.all("style")
    assert ":focus-visible { outline: 3px" in style.text()


@REPORTS
def test_every_picture_says_what_it_shows_and_has_a_table_beside_it(make: Callable[[], Record]) -> None:
    root = tree(make)
    for picture in root.all("svg"):
        title, description = picture.all("title"), picture.all("desc")
        assert picture.attributes["role"] == "img"
        assert picture.attributes["aria-labelledby"] == title[0].attributes["id"]
        assert picture.attributes["aria-describedby"] == description[0].attributes["id"]
        assert said(title[0])
        assert len(said(description[0])) > 40
    for beside in [e for e in root.all("div") if e.attributes.get("class") == "beside"]:
        assert beside.all("table"), "a picture without its figures"


def test_a_whole_run_has_all_four_pictures() -> None:
    ids = [picture.attributes["id"] for picture in tree(records.accepted).all("svg")]
    assert ids == ["plot-tokens", "plot-first-token", "plot-ladder", "plot-observation"]


@pytest.mark.parametrize(
    ("make", "section", "says"),
    [
        (records.rejected, "load", "No ladder: step 4 concurrency is NOT_RUN: step 3 (shared prefix) is NOT_RUN"),
        (records.rejected, "over-time", "No samples over time: step 6 observation was not planned."),
        (records.inconclusive, "prefix-cache", "step 3 shared prefix is INCONCLUSIVE and recorded none."),
        (records.endpoint, "over-time", "No samples over time: step 6 observation was not planned."),
    ],
)
def test_a_section_without_figures_says_why(make: Callable[[], Record], section: str, says: str) -> None:
    (found,) = [e for e in tree(make).all("section") if e.attributes["aria-labelledby"] == section]
    assert says in said(found)
    assert not found.all("svg")


@pytest.mark.parametrize(
    ("make", "verdict", "tone"),
    [
        (records.accepted, "accept", "pass"),
        (records.rejected, "fix_environment", "fail"),
        (records.inconclusive, "inconclusive", "unknown"),
    ],
)
def test_page_one_has_what_is_signed(make: Callable[[], Record], verdict: str, tone: str) -> None:
    sheet = page_one(tree(make))
    assert f"Verdict: {verdict}" in said(sheet)
    assert sheet.all("section")[0].attributes["class"] == f"verdict {tone}"
    assert [said(heading) for heading in sheet.all("h2")] == ["Reasons", "Campaign sheet", "Steps", "Signatures"]
    for reason in verdict_of(make()).reasons:
        assert reason.text in said(sheet)
    (fields,) = [e for e in sheet.all("table") if e.attributes.get("class") == "fields"]
    assert [said(row.all("th")[0]) for row in fields.all("tbody")[0].all("tr")] == [e.title for e in make().campaign]
    assert all(word in said(sheet) for word in ("Simulated: every figure", "platform", "service owner", "signature"))


def test_steps_left_out_are_told_from_steps_not_run() -> None:
    rows = {said(row.all("th")[0]): said(row) for row in page_one(tree(records.rejected)).all("tr") if row.all("th")}
    assert rows["6 observation"].endswith("not planned")
    assert "NOT_RUN" in rows["5 multi-node"]
    assert "step 4 (concurrency) is NOT_RUN" in rows["5 multi-node"]


def test_no_meaning_by_colour_alone() -> None:
    """Each state is a word with a mark of its own; the marks of pass, fail and unknown differ."""
    marks = set()
    for state in [e for e in tree(hostile).all("span") if e.attributes.get("class", "").startswith("state ")]:
        (mark,) = [e for e in state.all("span") if e.attributes.get("class") == "mark"]
        assert mark.attributes["aria-hidden"] == "true"
        word = said(state).removeprefix(said(mark)).strip()
        assert word
        marks.add((state.attributes["class"], said(mark)))
    assert len({mark for _, mark in marks}) == len(marks) >= 4


def test_hostile_text_is_text() -> None:
    source = html(hostile())
    assert "<script" not in source
    assert "<img" not in source
    assert "49" not in re.findall(r"\\\| (\S+)", source)  # {{ 7*7 }} is not evaluated
    assert clean(source) == source
    shown = said(tree(hostile))
    assert shown.count("<script src=//evil.example>alert(1)</script>") > 100
    assert "{{ 7*7 }}" in shown
    assert "\N{REPLACEMENT CHARACTER}evil\N{REPLACEMENT CHARACTER}" in shown  # direction marks are gone


def test_nothing_hostile_keeps_page_one_from_being_one_page() -> None:
    """What does not fit is cut on page one and stands in full behind it."""
    root = tree(hostile)
    sheet = page_one(root)
    assert len(said(sheet)) < 4200
    assert "3 of" not in said(sheet)
    assert re.search(r"\d+ more, and all in full: appendix, every reason", said(sheet))
    (everything,) = [e for e in root.all("section") if e.attributes["aria-labelledby"] == "all-reasons"]
    assert len(everything.all("li")) == len(verdict_of(hostile()).reasons)


def test_every_check_and_every_figure_is_in_the_appendix() -> None:
    made, root = records.accepted(), tree(records.accepted)
    (checks,) = [e for e in root.all("section") if e.attributes["aria-labelledby"] == "checks"]
    assert len([row for row in checks.all("tr") if row.all("td")]) == sum(len(step.checks) for step in made.steps)
    (figures,) = [e for e in root.all("section") if e.attributes["aria-labelledby"] == "figures"]
    told = said(figures)
    for step in made.steps:
        tabled = {3: "requests", 4: "ladder", 6: "samples"}.get(step.step)
        assert all(name in told for name in step.figures if name != tabled)


def test_boxes_say_how_they_stand() -> None:
    (checklist,) = [e for e in tree(records.accepted).all("section") if e.attributes["aria-labelledby"] == "checklist"]
    assert "4 ticked, 1 open, 5 not measured" in said(checklist)
    assert [said(item).split()[1] for item in checklist.all("li")].count("ticked") == 4
    assert "measured by a request set recorded from the service" in said(checklist)


def test_an_earlier_record_has_a_report_without_a_sheet() -> None:
    root = tree(lambda: load_record(OLD))
    text = said(page_one(root))
    assert "Older record. This record is of schema version 1" in text
    assert "Campaign sheet This record has none." in text
    assert not [e for e in root.all("section") if e.attributes["aria-labelledby"] in ("checklist", "sources")]


def test_witnesses_that_differ_are_said_to() -> None:
    row = {"label": "second", "expected_hit_tokens": 256, "counted_hit_tokens": 0, "cached_tokens": None}
    step = StepResult(step=3, name="shared prefix", state=State.FAIL, figures={"requests": [row]})
    made = records.record(records.plan(steps=(2, 3, 4)), [step], observation="not planned")
    root = tree(lambda: made)
    assert "≠ they differ" in said(root.all("svg")[0])
    (table,) = [t for t in root.all("table") if "Requests of step 3" in said(t.all("caption")[0])]
    assert said(table.all("tbody")[0]) == "second - 256 0 - - differ"


def test_a_record_with_nothing_in_it_has_a_report() -> None:
    of = records.plan(steps=(2, 3, 4))
    made = records.record(of, records.not_run(3, 4, after=2, state="NOT_RUN"), observation="not planned")
    assert "not observed" in said(page_one(tree(lambda: made)))


@pytest.mark.parametrize("name", ["LIGHT", "DARK"])
def test_colours_can_be_told_apart(name: str) -> None:
    colours = getattr(palette, name)
    for text, ground in palette.TEXT_ON:
        assert palette.contrast(colours[text], colours[ground]) >= palette.TEXT_CONTRAST, (text, ground)
    for mark, ground in palette.GRAPHIC_ON:
        assert palette.contrast(colours[mark], colours[ground]) >= palette.GRAPHIC_CONTRAST, (mark, ground)


def test_contrast_is_that_of_wcag() -> None:
    assert palette.contrast("#000000", "#ffffff") == pytest.approx(21)
    assert palette.contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)
    assert palette.contrast("#123456", "#123456") == 1


def test_only_colours_of_the_palette_are_used() -> None:
    (style,) = tree(records.accepted).all("style")
    used = set(re.findall(r"var\(--([a-z-]+)\)", style.text()))
    assert used <= set(palette.LIGHT) == set(palette.DARK)
    outside = re.sub(r"--[a-z-]+: #[0-9a-f]{6};", "", style.text())
    assert not re.findall(r"#[0-9a-f]{3,8}\b|rgb\(|hsl\(", outside)


def test_dark_is_for_screens_and_paper_is_light() -> None:
    (style,) = tree(records.accepted).all("style")
    dark = style.text().index("prefers-color-scheme: dark")
    paper = style.text().index("@media print")
    assert dark < paper  # the later rule wins
    assert f"--page: {palette.LIGHT['page']};" in style.text()[paper:]
    assert EVIL not in style.text()
