import pytest

from kimi_runbook.errors import RunbookError
from lab import prerequisites
from lab.prerequisites import DOCKER_CLIENT, DOCKER_ENGINE, IPTABLES, TOOLS, Decision, Situation, decide

EVERYTHING = frozenset(tool.program for tool in (*TOOLS, DOCKER_CLIENT, DOCKER_ENGINE, IPTABLES))


@pytest.mark.parametrize(
    ("seen", "decision"),
    [
        pytest.param(
            Situation(programs=EVERYTHING, is_root=True, has_apt=True, engine_answers=True),
            Decision(packages=(), start_engine=False),
            id="all-there",
        ),
        pytest.param(
            Situation(programs=EVERYTHING, is_root=False, has_apt=True, engine_answers=True),
            Decision(packages=(), start_engine=False),
            id="docker-group-without-root",
        ),
        pytest.param(
            Situation(programs=EVERYTHING, is_root=True, has_apt=True, engine_answers=False),
            Decision(packages=(), start_engine=True),
            id="root-starts-an-engine",
        ),
        pytest.param(
            Situation(
                programs=EVERYTHING - {"mmdebstrap", "docker", "dockerd"},
                is_root=True,
                has_apt=True,
                engine_answers=False,
            ),
            Decision(packages=("mmdebstrap", "docker.io"), start_engine=True),
            id="root-on-debian-installs-each-package-once",
        ),
        pytest.param(
            Situation(programs=EVERYTHING - {"dockerd", "iptables"}, is_root=True, has_apt=True, engine_answers=True),
            Decision(packages=(), start_engine=False),
            id="no-engine-package-where-an-engine-answers",
        ),
    ],
)
def test_decide(seen: Situation, decision: Decision) -> None:
    assert decide(seen) == decision


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        pytest.param(
            Situation(programs=EVERYTHING - {"mmdebstrap"}, is_root=False, has_apt=True, engine_answers=True),
            ["mmdebstrap (builds", "Run: sudo apt-get install mmdebstrap"],
            id="not-root",
        ),
        pytest.param(
            Situation(programs=EVERYTHING - {"gpg"}, is_root=True, has_apt=False, engine_answers=True),
            ["gpg (signs", "Install the equivalents of: apt-get install gnupg"],
            id="no-apt",
        ),
        pytest.param(
            Situation(programs=EVERYTHING, is_root=False, has_apt=True, engine_answers=False, docker_group=True),
            ["docker info", "usermod -aG docker"],
            id="not-in-the-docker-group",
        ),
        pytest.param(
            Situation(programs=EVERYTHING, is_root=False, has_apt=True, engine_answers=False),
            ["docker info", "or run `make lab` as root"],
            id="no-engine-and-not-root",
        ),
    ],
)
def test_decide_names_what_would_help(seen: Situation, words: list[str]) -> None:
    with pytest.raises(RunbookError) as caught:
        decide(seen)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_the_tools_of_the_unit_tests_are_named_by_package(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(prerequisites, "DNF_PLUGINS", tmp_path / "absent.py")
    assert prerequisites.missing_test_tools(lambda name: None) == ("dnf", "rpm", "createrepo-c", "dnf-plugins-core")
    (tmp_path / "absent.py").touch()
    assert prerequisites.missing_test_tools(lambda name: f"/usr/bin/{name}") == ()
