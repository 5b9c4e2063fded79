"""The launch of each node, and the docker command that carries it."""

from __future__ import annotations

from typing import Any

import pytest
from judging import IMAGE

from kimi_runbook.errors import RunbookError
from kimi_runbook.launch import Launch, compose, docker_argv, same_arguments

SPEC: dict[str, Any] = {
    "image": IMAGE,
    "model": "/models/k3",
    "served_model_name": "moonshotai/Kimi-K3",
    "tensor_parallel_size": 2,
    "nnodes": 2,
    "node_rank": 0,
    "master_addr": "192.0.2.11",
    "host_ip": "192.0.2.11",
    "env": {"HF_HUB_OFFLINE": "1"},
    "extra_args": ["--load-format", "dummy", "--override", '{"a": "b c"}'],
}


def test_head() -> None:
    launch = compose(SPEC)
    assert launch.argv == (
        *("/models/k3", "--served-model-name", "moonshotai/Kimi-K3", "--tensor-parallel-size", "2"),
        *("--nnodes", "2", "--node-rank", "0", "--master-addr", "192.0.2.11", "--master-port", "29501"),
        *("--port", "8000", "--enable-prefix-caching", "--enable-prompt-tokens-details"),
        *("--load-format", "dummy", "--override", '{"a": "b c"}'),
    )
    assert launch.env == {"HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "192.0.2.11"}
    assert (launch.image, launch.port, launch.headless) == (IMAGE, 8000, False)
    assert Launch.from_json(launch.to_json()) == launch


def test_other_rank() -> None:
    head = compose(SPEC)
    worker = compose(SPEC | {"node_rank": 1, "host_ip": "192.0.2.12"})
    assert worker.headless and "--headless" in worker.argv and "--port" not in worker.argv
    assert worker.env["VLLM_HOST_IP"] == "192.0.2.12"
    differing = set(head.argv) ^ set(worker.argv)
    assert differing == {"0", "1", "--port", "8000", "--headless"}


def test_single_node_names_no_cluster() -> None:
    launch = compose({key: value for key, value in SPEC.items() if key not in ("nnodes", "node_rank", "master_addr")})
    assert not {"--nnodes", "--node-rank", "--master-addr", "--headless"} & set(launch.argv)


def test_choices_are_always_spelt_out() -> None:
    launch = compose(SPEC | {"prefix_caching": False, "block_size": 64, "port": 9000, "master_port": 30000})
    text = " ".join(launch.argv)
    assert "--no-enable-prefix-caching" in text and "--enable-prefix-caching " not in text
    assert "--block-size 64" in text and "--port 9000" in text and "--master-port 30000" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": "registry.example/vllm:v1"}, "expected a reference by digest"),
        ({"node_rank": 2}, "node_rank: 2; expected 0 to 1"),
        ({"node_rank": -1}, "node_rank: -1; expected 0 to 1"),
        ({"tensor_parallel_size": 3}, "a multiple of the 2 nodes"),
        ({"tensor_parallel_size": "2"}, "expected an integer"),
        ({"master_addr": None}, "master_addr: nothing"),
        ({"host_ip": "k3-a"}, "this node's own address"),
        ({"host_ip": None}, "host_ip: nothing"),
        ({"port": 0}, "a port, 1 to 65535"),
        ({"master_port": 70000}, "a port, 1 to 65535"),
        ({"block_size": 0}, "tokens per block"),
        ({"extra_args": ["--port=1"]}, "--port; expected only options"),
        ({"extra_args": ["--headless"]}, "--headless; expected only options"),
        ({"extra_args": "--x y"}, "extra_args: '--x y'; expected a list"),
        ({"env": {"VLLM_HOST_IP": "192.0.2.99"}}, "VLLM_HOST_IP=192.0.2.99"),
        ({"env": {"A B": "1"}}, "names of letters"),
        ({"tensor_parallel": 2}, "unknown key tensor_parallel"),
        ({"env": {"HF_TOKEN": "s3cret"}}, "env: HF_TOKEN, whose value looks like a secret.*engine_env_file"),
        ({"env": {"VLLM_API_KEY": "s3cret"}}, "VLLM_API_KEY.*engine_env_file"),
        ({"env": {"AWS_SECRET_ACCESS": "s3cret"}}, "AWS_SECRET_ACCESS.*engine_env_file"),
        ({"env": {"proxy_password": "s3cret"}}, "proxy_password.*engine_env_file"),
        ({"env": {"S3_CREDENTIALS": "s3cret"}}, "S3_CREDENTIALS.*engine_env_file"),
        ({"extra_args": ["--api-key", "s3cret"]}, "extra_args: --api-key; expected no secret.*engine_env_file"),
        ({"extra_args": ["--hf-token=s3cret"]}, "--hf-token; expected no secret.*engine_env_file"),
    ],
)
def test_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RunbookError, match=message) as caught:
        compose(SPEC | change)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["TOKENIZERS_PARALLELISM", "VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE", "NCCL_NET", "VLLM_KEEP_ALIVE"]
)
def test_counts_of_tokens_are_no_secrets(name: str) -> None:
    assert compose(SPEC | {"env": {name: "1"}}).env[name] == "1"


def docker(**changes: Any) -> list[str]:
    options: dict[str, Any] = {
        "container": "kimi-engine",
        "mounts": [{"source": "/etc/nccl.conf"}, {"source": "/cache", "target": "/root/.cache", "read_only": False}],
        "devices": ["nvidia.com/gpu=all"],
        "ulimits": ["memlock=-1"],
        "ipc": "host",
        "docker_args": ["--cap-add", "SYS_NICE"],
    }
    return docker_argv(compose(SPEC | {"extra_args": []}), **(options | changes))


def test_docker_command() -> None:
    argv = docker()
    assert argv == [
        *("/usr/bin/docker", "run", "--rm", "--name", "kimi-engine", "--pull", "never", "--network", "host"),
        *("--ipc", "host", "--ulimit", "memlock=-1", "--device", "nvidia.com/gpu=all"),
        *("--mount", "type=bind,source=/etc/nccl.conf,target=/etc/nccl.conf,readonly"),
        *("--mount", "type=bind,source=/cache,target=/root/.cache"),
        *("--env", "HF_HUB_OFFLINE=1", "--env", "VLLM_HOST_IP=192.0.2.11", "--cap-add", "SYS_NICE"),
        *(IMAGE, *compose(SPEC | {"extra_args": []}).argv),
    ]


def test_secrets_come_from_a_file_of_the_host_and_lose_against_the_launch() -> None:
    argv = docker(env_file="/etc/kimi-runbook/engine.env")
    assert argv[argv.index("--env-file") + 1] == "/etc/kimi-runbook/engine.env"
    assert argv.index("--env-file") < argv.index("--env")
    assert docker(env_file=None) == docker()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"env_file": "engine.env"}, "env_file: engine.env; expected an absolute path"),
        ({"docker_args": ["--env", "HF_TOKEN=s3cret"]}, "docker_args: --env;"),
        ({"docker_args": ["--env=HF_TOKEN=s3cret"]}, "docker_args: --env;"),
        ({"docker_args": ["-e", "A=1", "--env-file", "/x"]}, "docker_args: --env-file, -e;"),
    ],
)
def test_environment_comes_by_its_own_variables(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RunbookError, match=message):
        docker(**change)


@pytest.mark.parametrize("mount", [{"source": "relative"}, {"source": "/a,b"}, {"source": "/a", "mode": "ro"}, {}])
def test_mounts_refused(mount: dict[str, Any]) -> None:
    with pytest.raises(RunbookError):
        docker(mounts=[mount])


@pytest.mark.parametrize(
    ("actual", "same"),
    [
        (["serve", "/m", "--port", "1"], True),
        (["/m", "--port", "1"], True),
        (["serve", "/m", "--port", "2"], False),
        (["other", "/m", "--port", "1"], False),
        (["--port", "1"], False),
    ],
)
def test_arguments_behind_the_entry_point(actual: list[str], same: bool) -> None:
    assert same_arguments(actual, ["/m", "--port", "1"]) is same
