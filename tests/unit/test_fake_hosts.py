"""A matrix of fake GPU hosts, each with a twin one value away: what the probes see of it, and what the judge says."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from kimi_runbook.cli import main
from kimi_runbook.findings import Finding
from kimi_runbook.host_verdict import host_verdict
from kimi_runbook.judge import judge_host
from kimi_runbook.snapshot import Snapshot
from tests.hosts.__main__ import write
from tests.hosts.build import build, shapes
from tests.hosts.described import DATA, Host, changed, host_names, load_host, load_twin, matrix, merged
from tests.hosts.snapshots import snapshot
from tests.hosts.wanted import expected_of, lock_data, lock_name, lock_of, questions_of

HOSTS = tuple(matrix())


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, dict[str, Any]]:
    """Every host's snapshot, taken once."""
    folder = tmp_path_factory.mktemp("hosts")
    return {host.name: snapshot(build(host, folder), questions_of(host)) for host in HOSTS}


def audited(host: Host, taken: Mapping[str, dict[str, Any]]) -> tuple[Finding, ...]:
    return judge_host(Snapshot.from_json(taken[host.name]), expected_of(host), lock_of(host))


def case(host: Host) -> Any:
    """Return a host as a case."""
    return pytest.param(host, id=host.name)


@pytest.mark.parametrize("host", [case(host) for host in HOSTS])
def test_verdict_and_codes(host: Host, taken: Mapping[str, dict[str, Any]]) -> None:
    findings = audited(host, taken)
    codes = sorted({finding.code for finding in findings if finding.severity in ("stop", "change")})
    assert (host_verdict(findings).name, codes) == (host.judged["verdict"], sorted(host.judged["codes"]))
    unknown = [finding.observed for finding in findings if finding.code == "snapshot.unknown"]
    assert bool(unknown) == bool(host.judged.get("unanswered"))


@pytest.mark.parametrize("host", [case(host) for host in HOSTS if "message" in host.judged])
def test_one_message_in_full(host: Host, taken: Mapping[str, dict[str, Any]]) -> None:
    """A message says where, what was observed, what was expected, and what to do next."""
    wanted = host.judged["message"]
    found = next(finding for finding in audited(host, taken) if finding.code == wanted["code"])
    told = {"code": found.code, "observed": found.observed, "expected": found.expected, "next_step": found.next_step}
    assert (found.host, told) == (host.values["hostname"], wanted)


@pytest.mark.parametrize("host", [pytest.param(host, id=host.name) for host in HOSTS])
def test_the_probes_have_an_answer_to_everything(host: Host, taken: Mapping[str, dict[str, Any]]) -> None:
    """A verdict on a host that could not be read would be worth nothing."""
    assert [error["probe"] for error in taken[host.name]["errors"]] == host.judged.get("unanswered", [])
    assert taken[host.name]["hostname"] == host.values["hostname"]


@pytest.mark.parametrize("name", host_names())
def test_a_host_that_is_to_change_says_why_in_full(name: str) -> None:
    messages = [host.judged.get("message") for host in (load_host(name), load_twin(name))]
    assert any(messages), f"{name}: neither it nor its twin has a message in full"


@pytest.mark.parametrize("name", host_names())
def test_a_twin_is_one_value_away_and_judged_otherwise(name: str) -> None:
    host, twin = load_host(name), load_twin(name)
    assert len(differing(host.values, twin.values)) == 1
    assert host.judged["verdict"] != twin.judged["verdict"]


def differing(left: object, right: object, path: str = "") -> list[str]:
    """Return the paths of the values in which two descriptions differ."""
    if isinstance(left, Mapping) and isinstance(right, Mapping) and set(left) == set(right):
        return [found for key in left for found in differing(left[key], right[key], f"{path}|{key}")]
    return [] if left == right else [path]


def test_hosts_of_one_name_of_a_lock_have_one_lock() -> None:
    locks: dict[str, set[str]] = {}
    for host in HOSTS:
        locks.setdefault(lock_name(host), set()).add(json.dumps(lock_data(host), sort_keys=True))
    assert {name: len(found) for name, found in locks.items()} == dict.fromkeys(locks, 1)


def test_the_written_matrix_can_be_audited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write("b200_ubuntu", [load_host("hgx-b200-roce"), load_twin("hgx-b200-roce")], tmp_path, tmp_path / "trees")
    seen = sorted(str(path) for path in (tmp_path / "b200_ubuntu").glob("*.json"))
    expected, lock = (str(tmp_path / f"b200_ubuntu.{ending}") for ending in ("expected.json", "lock.yml"))
    assert main(["audit", *seen, "--expected", expected, "--lock", lock, "--json"]) == 1
    verdicts = json.loads(capsys.readouterr().out)["verdicts"]
    assert {host: verdict["name"] for host, verdict in verdicts.items()} == {
        "hgx-b200-roce": "ok",
        "hgx-b200-roce-twin": "install",
    }


def test_the_matrix_has_every_kind_of_host() -> None:
    seen = {(host.values["os"]["id"], host.values["os"]["version_id"].partition(".")[0]) for host in HOSTS}
    assert seen == {
        *(("ubuntu", "22"), ("ubuntu", "24"), ("debian", "12"), ("debian", "13"), ("rhel", "9"), ("rhel", "10"))
    }
    models = {host.values["gpus"]["name"] if host.values["gpus"] else "none" for host in HOSTS}
    assert {"NVIDIA H200", "NVIDIA B200", "NVIDIA B300 SXM6 AC", "NVIDIA GB300", "NVIDIA H200 NVL", "none"} <= models
    assert {host.judged["verdict"] for host in HOSTS} == {"ok", "reload", "reboot", "install", "repair", "stop"}


def test_every_shape_says_where_its_form_was_read() -> None:
    lacking = [shape for shape in shapes() if not (shape.get("source") and shape.get("tool") and shape.get("as_of"))]
    assert lacking == []
    assert {shape["source"][-3:] for shape in shapes()} == {"[V]", "[S]", "[I]"}, (
        "a source ends with how far it is to be trusted"
    )
    outputs = {path.name for path in (DATA / "output").iterdir()}
    assert {shape["output"] for shape in shapes() if "output" in shape} == outputs


def test_every_description_uses_names_the_base_has() -> None:
    """A difference under a misspelt name would be laid beside the value it was meant to replace."""
    base = yaml.safe_load((DATA / "base.yml").read_text(encoding="utf-8"))
    for host in HOSTS:
        assert set(host.values) == set(base), host.name
        for name in ("driver", "docker", "fabric", "kernel", "secure_boot"):
            assert set(host.values[name]) == set(base[name]), f"{host.name}: {name}"


def test_a_tree_shows_a_value_wherever_a_host_would(tmp_path: Path) -> None:
    root = build(load_host("mid-upgrade"), tmp_path)
    told = (root / "proc/driver/nvidia/version").read_text(encoding="utf-8")
    assert told.startswith("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.133.20")
    assert (root / "sys/module/nvidia/version").read_text(encoding="utf-8") == "570.133.20\n"
    assert (root / "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1").readlink() == Path("libnvidia-ml.so.580.178.04")
    assert (root / ".commands/nvidia-smi.rc").read_text(encoding="utf-8") == "18"
    assert not (root / ".commands/nvidia-smi -q -x").exists()


def test_a_change_to_a_value_no_host_has_is_refused() -> None:
    with pytest.raises(KeyError, match="colour"):
        changed({"driver": {"loaded": None}}, "driver|colour", "green")


@pytest.mark.parametrize(
    ("over", "result"),
    [
        pytest.param({"a": {"b": 2}}, {"a": {"b": 2, "c": 3}}, id="mappings-merge"),
        pytest.param({"a": {"only": {"d": 4}}}, {"a": {"d": 4}}, id="only-replaces"),
        pytest.param({"a": None}, {"a": None}, id="anything-else-replaces"),
    ],
)
def test_differences_are_laid_over_the_base(over: dict[str, Any], result: dict[str, Any]) -> None:
    assert merged({"a": {"b": 1, "c": 3}}, over) == result
