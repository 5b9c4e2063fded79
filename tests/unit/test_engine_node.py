"""What a node is told to run, and the ways it can run something else."""

import json

import pytest

from kimi_runbook import engine_node
from kimi_runbook.errors import RunbookError

IMAGE = "mirror.example/vllm/vllm-openai@sha256:" + "a" * 64
SPEC = {
    "image": IMAGE,
    "model": "/models/k3",
    "served_model_name": "moonshotai/Kimi-K3",
    "tensor_parallel_size": 2,
    "nnodes": 2,
    "node_rank": 0,
    "master_addr": "192.0.2.1",
    "host_ip": "192.0.2.1",
    "extra_args": [],
    "env": {"GLOO_SOCKET_IFNAME": "eth0"},
}
CONTAINER = {
    "name": "kimi-engine",
    "devices": [],
    "ulimits": ["nofile=65536"],
    "docker_args": [],
    "mounts": ["/models/k3"],
}
NCCL = {"path": "/etc/nccl.conf", "content": "NCCL_NET=Socket\n"}


@pytest.fixture
def launch():
    return engine_node.node_launch(SPEC, CONTAINER)


def running(launch, **changes):
    seen = {
        "image_reference": launch["image"],
        "args": ["serve", *launch["argv"]],
        "env": dict(launch["env"]),
        "files": {"/etc/nccl.conf": engine_node.content_sha256(NCCL["content"])},
    }
    return {**seen, **changes}


def test_a_container_that_runs_as_told_does_not_drift(launch):
    assert engine_node.drift(running(launch), launch, [NCCL]) == ""


@pytest.mark.parametrize(
    ("changes", "phrase"),
    [
        pytest.param({"image_reference": "x@sha256:" + "b" * 64}, "image is x@", id="image"),
        pytest.param({"args": ["serve", "/models/other"]}, "arguments differ", id="arguments"),
        pytest.param(
            {"env": {"VLLM_HOST_IP": "192.0.2.9", "GLOO_SOCKET_IFNAME": "eth0"}},
            "environment differs: VLLM_HOST_IP",
            id="environment",
        ),
        pytest.param(
            {"env": {"VLLM_HOST_IP": "192.0.2.1"}}, "environment differs: GLOO_SOCKET_IFNAME", id="variable-lost"
        ),
        pytest.param(
            {"files": {"/etc/nccl.conf": "0" * 64}}, "inside the container are older: /etc/nccl.conf", id="file"
        ),
    ],
)
def test_every_kind_of_drift_is_named(launch, changes, phrase):
    assert phrase in engine_node.drift(running(launch, **changes), launch, [NCCL])


def test_what_a_snapshot_does_not_report_is_no_drift():
    launch = engine_node.node_launch({**SPEC, "env": {"HF_HOME": "/models", "NCCL_NET_GDR_LEVEL": "SYS"}}, CONTAINER)
    seen = running(launch, env={"VLLM_HOST_IP": "192.0.2.1", "NCCL_NET_GDR_LEVEL": "SYS"})
    assert engine_node.drift(seen, launch, [NCCL]) == ""
    del seen["env"]["NCCL_NET_GDR_LEVEL"]
    assert engine_node.drift(seen, launch, [NCCL]) == "environment differs: NCCL_NET_GDR_LEVEL"


@pytest.mark.parametrize(
    ("container", "given"),
    [
        pytest.param(CONTAINER, [], id="absent"),
        pytest.param({**CONTAINER, "env_file": ""}, [], id="empty"),
        pytest.param({**CONTAINER, "env_file": "/etc/engine.env"}, ["--env-file", "/etc/engine.env"], id="named"),
    ],
)
def test_a_file_of_secrets_reaches_docker_by_its_path_only(container, given):
    argv = engine_node.node_launch(SPEC, container)["docker_argv"]
    assert [part for part in argv if part in ("--env-file", "/etc/engine.env")] == given


def test_no_container_is_drift_too(launch):
    assert engine_node.drift(None, launch) == "no container runs"


def test_the_unit_runs_the_container_command(launch):
    unit = engine_node.node_unit(launch, "kimi-engine", "on-failure")
    assert "ExecStart=/usr/bin/docker run --rm --name kimi-engine" in unit
    assert "--served-model-name moonshotai/Kimi-K3" in unit
    assert "Restart=on-failure" in unit


def test_settings_come_by_carrier():
    settings = engine_node.node_settings("ethernet", "eth0")
    assert "NCCL_SOCKET_IFNAME==eth0" in settings["nccl_conf"]
    assert settings["environment"]["GLOO_SOCKET_IFNAME"] == "eth0"


def test_contradicting_settings_stop_before_anything_is_written():
    with pytest.raises(RunbookError, match="interconnect profile ethernet"):
        engine_node.node_settings("ethernet", "eth0", variables={"NCCL_NET": "IB"})


@pytest.mark.parametrize("rank", [0, 1])
def test_a_node_is_held_to_what_it_is_given(rank):
    places = {"unit": "kimi-engine.service", "launch_file": "/etc/l.json", "restart": "no", "ports": [8000, 29501]}
    wish = engine_node.node_wish({**SPEC, "node_rank": rank}, CONTAINER, places)
    assert wish["launch"] == engine_node.node_launch({**SPEC, "node_rank": rank}, CONTAINER)
    assert [file["path"] for file in wish["files"]] == ["/etc/l.json", "/etc/systemd/system/kimi-engine.service"]
    assert json.loads(wish["files"][0]["content"]) == wish["launch"]
    assert "Restart=no" in wish["files"][1]["content"]
    assert wish["expected"]["files"] == wish["files"]
    engine = wish["expected"]["engine"]
    assert (engine["serves_http"], engine["port"], engine["ports"]) == (rank == 0, 8000, [8000, 29501])
    assert (engine["args"], engine["env"]) == (wish["launch"]["argv"], wish["launch"]["env"])


def test_settings_files_go_where_each_library_looks():
    settings = engine_node.node_settings("ethernet", "eth0")
    files = engine_node.settings_files(settings, ["/etc/nccl.conf", "/etc/ucx/ucx.conf"])
    assert {file["path"]: file["content"] for file in files} == {
        "/etc/nccl.conf": settings["nccl_conf"],
        "/etc/ucx/ucx.conf": settings["ucx_conf"],
    }
