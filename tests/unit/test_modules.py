"""The pure parts of the modules that run on nodes."""

import apt_preflight
import docker_daemon_config
import engine_start_mark
import engine_wait
import preflight
import pytest

SIMULATION = """\
Inst libnvidia-ml1 [570.133.20-1] (580.178.04-1 lab:stable [amd64])
Inst nvidia-driver-cuda (595.91.07-1 lab:stable [amd64]) []
Conf libnvidia-ml1 (580.178.04-1 lab:stable [amd64])
"""


def test_resolved_versions_reads_installs_and_upgrades():
    assert apt_preflight.resolved_versions(SIMULATION) == {
        "libnvidia-ml1": "580.178.04-1",
        "nvidia-driver-cuda": "595.91.07-1",
    }


def test_drifted_names_every_pin_that_comes_out_otherwise():
    pins = ["libnvidia-ml1=580.178.04-1", "nvidia-driver-cuda=580.178.04-1", "libcuda1=580.178.04-1", "nvlsm=1"]
    wrong = preflight.drifted(pins, apt_preflight.resolved_versions(SIMULATION), {"libcuda1": "580.178.04-1"})
    assert wrong == [
        "nvidia-driver-cuda resolves to 595.91.07-1, expected 580.178.04-1",
        "nvlsm resolves to nothing, expected 1",
    ]


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        pytest.param(
            "Get:1 x\nW: GPG error: NO_PUBKEY 1\nE: not signed.\n", "GPG error: NO_PUBKEY 1; not signed.", id="both"
        ),
        pytest.param("something odd\n", "something odd", id="no-prefix"),
        pytest.param("", "no output", id="silent"),
    ],
)
def test_complaints_quote_apt(output, expected):
    assert apt_preflight.complaints(output) == expected


def test_merge_keeps_foreign_keys():
    present, wanted = docker_daemon_config.merge('{"mtu": 9000, "log-driver": "journald"}', {"log-driver": "local"})
    assert present == {"mtu": 9000, "log-driver": "journald"}
    assert wanted == {"mtu": 9000, "log-driver": "local"}


def test_merge_adds_to_lists_and_objects_of_the_site():
    _, wanted = docker_daemon_config.merge(
        '{"insecure-registries": ["site:5000"], "features": {"buildkit": true}}',
        {"insecure-registries": ["lab:5000"], "features": {"cdi": True}},
    )
    assert wanted == {
        "insecure-registries": ["site:5000", "lab:5000"],
        "features": {"buildkit": True, "cdi": True},
    }


def test_merge_of_an_equal_file_means_no_change():
    present, wanted = docker_daemon_config.merge('{ "a":[1] }', {"a": [1]})
    assert present == wanted


@pytest.mark.parametrize("text", ["{broken", "[1]"])
def test_merge_refuses_what_is_no_object(text):
    with pytest.raises(ValueError):
        docker_daemon_config.merge(text, {})


@pytest.mark.parametrize(
    ("log", "line"),
    [
        pytest.param(
            "INFO start\n(Worker pid=9) ERROR 11-30 10:00:00 [x.py:1] boom\n(EngineCore) ERROR later\n",
            "(Worker pid=9) ERROR 11-30 10:00:00 [x.py:1] boom",
            id="first-of-two",
        ),
        pytest.param("INFO a\nRuntimeError: x\n", "RuntimeError: x", id="bare-exception"),
        pytest.param("INFO a\nINFO b\n", "INFO b", id="no-error"),
        pytest.param(
            'Traceback (most recent call last):\n  File "x", line 1\nRuntimeError:\n    no main guard\nException: x\n',
            "RuntimeError: no main guard",
            id="bare-traceback-with-its-text-on-the-next-line",
        ),
        pytest.param(
            "(W pid=1) Traceback (most recent call last):\n(W pid=1)   File x\n(W pid=1) KeyError: 'k'\nERROR late\n",
            "KeyError: 'k'",
            id="prefixed-traceback",
        ),
        pytest.param(
            "(W pid=2) ERROR 11-30 [m.py:9] WorkerProc failed to start.\n"
            "(W pid=2) ERROR 11-30 [m.py:9] Traceback (most recent call last):\n"
            '(W pid=2) ERROR 11-30 [m.py:9]   File "x.py", line 1\n'
            "(W pid=2) ERROR 11-30 [m.py:9] ValueError: Unknown load format\n",
            "ValueError: Unknown load format",
            id="announced-traceback",
        ),
        pytest.param("", "no output", id="empty"),
    ],
)
def test_first_error_is_the_first_and_not_the_last(log, line):
    assert engine_wait.first_error(log) == line


@pytest.mark.parametrize(
    ("mark", "state", "invocation", "joint"),
    [
        pytest.param({"start_id": "r1", "invocation": "a"}, "active", "a", True, id="as-started"),
        pytest.param({"start_id": "r1", "invocation": "a"}, "active", "b", False, id="restarted-alone"),
        pytest.param({"start_id": "r1", "invocation": "a"}, "inactive", "a", False, id="stopped"),
        pytest.param({}, "active", "a", False, id="no-mark-after-a-reboot"),
        pytest.param({}, "active", "", False, id="never-started"),
    ],
)
def test_a_rank_is_joint_only_as_it_was_started_with_the_others(mark, state, invocation, joint):
    assert engine_start_mark.judge(mark, state, invocation)["joint"] is joint
