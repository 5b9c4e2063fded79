"""Versions: grammar, order by dpkg's and rpm's rules, and what counts as the same build."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from kimi_runbook.versions import Version, branch_of, compare, compare_upstream, is_driver_version, parse, same_build


@pytest.mark.parametrize(
    ("text", "epoch", "upstream", "revision"),
    [
        pytest.param("580.178.04", None, "580.178.04", None, id="driver"),
        pytest.param("595.84", None, "595.84", None, id="two-parts"),
        pytest.param("580.178.04-1ubuntu1", None, "580.178.04", "1ubuntu1", id="ubuntu"),
        pytest.param("3:580.95.05-1.el9", 3, "580.95.05", "1.el9", id="rpm-epoch"),
        pytest.param("5:28.3.2-1~debian.12~bookworm", 5, "28.3.2", "1~debian.12~bookworm", id="docker"),
        pytest.param("6.8.0-88-generic", None, "6.8.0-88", "generic", id="last-hyphen"),
        pytest.param("2025.10.14-1", None, "2025.10.14", "1", id="nvlsm"),
        pytest.param("1:2:3-1", 1, "2:3", "1", id="only-the-first-colon-is-the-epoch"),
    ],
)
def test_parse(text: str, epoch: int | None, upstream: str, revision: str | None) -> None:
    parsed = parse(text)
    assert parsed == Version(epoch=epoch, upstream=upstream, revision=revision)
    assert str(parsed) == text


@pytest.mark.parametrize("text", ["", " ", "580 178", "580.178.04-", "-1", "3:", ">=580", "580.*", "580.178.04\n"])
def test_no_version(text: str) -> None:
    with pytest.raises(ValueError, match="is no version"):
        parse(text)


ORDERED = [  # older, newer, schemes
    pytest.param("580.95.05", "580.126.20", ("deb", "rpm"), id="numbers-not-text"),
    pytest.param("595.84", "595.91.07", ("deb", "rpm"), id="two-parts-older"),
    pytest.param("595.84", "595.84.01", ("deb", "rpm"), id="third-part-is-newer"),
    pytest.param("580.126.20", "580.142", ("deb", "rpm"), id="two-parts-newer"),
    pytest.param("580.105.08-0ubuntu1", "580.105.08-1ubuntu1", ("deb",), id="revision"),
    pytest.param("1.20.0~rc.1-1", "1.20.0-1", ("deb", "rpm"), id="tilde-before-the-end"),
    pytest.param("1.20.0-1", "1.20.0-1+b1", ("deb",), id="rebuild"),
    pytest.param("620.70.06-1", "3:580.95.05-1", ("deb", "rpm"), id="epoch-above-all"),
    pytest.param("3:580.95.05-1.el9", "3:580.95.05-2.el9", ("rpm",), id="release"),
    pytest.param("1.0", "1.0^git1", ("rpm",), id="caret-after-the-end"),
    pytest.param("1.0^git1", "1.0.1", ("rpm",), id="caret-before-another-number"),
    pytest.param("1.0a", "1.0.1", ("rpm",), id="rpm-numbers-above-letters"),
    pytest.param("1.0a", "1.0+1", ("deb",), id="deb-letters-before-signs"),
    pytest.param("2025.06.6-1", "2025.10.14-1", ("deb", "rpm"), id="nvlsm-dates"),
]


@pytest.mark.parametrize(("older", "newer", "schemes"), ORDERED)
def test_order(older: str, newer: str, schemes: tuple[str, ...]) -> None:
    for scheme in schemes:
        assert compare(older, newer, scheme) == -1  # type: ignore[arg-type] # the table holds only the two schemes
        assert compare(newer, older, scheme) == 1  # type: ignore[arg-type] # as above
        assert compare(newer, newer, scheme) == 0  # type: ignore[arg-type] # as above


@pytest.mark.skipif(shutil.which("dpkg") is None, reason="dpkg is not installed here")
@pytest.mark.parametrize(("older", "newer"), [p.values[:2] for p in ORDERED if "deb" in p.values[2]])
def test_dpkg_orders_them_the_same_way(older: str, newer: str) -> None:
    assert subprocess.run(["dpkg", "--compare-versions", older, "lt", newer], check=False).returncode == 0


def test_equal_though_written_differently() -> None:
    assert compare("580.95.05", "580.95.5") == 0
    assert compare("0:1.0-1", "1.0-1") == 0
    assert compare("1.0", "1.0-0", "deb") == 0
    assert compare("3:580.95.05", "3:580.95.05-1.el9", "rpm") == 0  # a missing release matches any
    assert compare_upstream("3:580.95.05-1.el9", "580.95.05-0ubuntu1") == 0
    assert compare_upstream("3:580.95.05-1.el9", "580.178.04") == -1


@pytest.mark.parametrize(
    ("observed", "wanted", "same"),
    [
        ("3:580.95.05-1.el9", "580.95.05", True),
        ("3:580.95.05-1.el9", "580.95.05-1.el9", True),
        ("3:580.95.05-1.el9", "3:580.95.05-1.el9", True),
        ("3:580.95.05-1.el9", "580.95.05-1.el10", False),
        ("580.95.05-1.el9", "3:580.95.05-1.el9", False),
        ("580.178.04-1ubuntu1", "580.178.04-1", False),
        ("580.178.04-1ubuntu1", "580.178.0", False),
        ("595.84.01", "595.84", False),
        ("580.178.04", "580.178.04-1", False),
        ("not a version", "not a version", True),
        ("not a version", "580.178.04", False),
    ],
)
def test_same_build(observed: str, wanted: str, same: bool) -> None:
    assert same_build(observed, wanted) is same


def test_branch() -> None:
    assert branch_of("580.178.04") == branch_of("3:580.178.04-1.el9") == "580"
    assert branch_of("595.84") == "595"
    for text in ("580", "580.1.2.3", "v580.1", "2025.10.14a-1"):
        with pytest.raises(ValueError, match="is no driver version"):
            branch_of(text)
    assert is_driver_version("595.84") and not is_driver_version("595.84-1") and not is_driver_version("595")
