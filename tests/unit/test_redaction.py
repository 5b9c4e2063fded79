"""What looks like a secret is not shown; digests, UUIDs and names of models are."""

import pytest
import redaction

# Every secret here is constructed.
RANDOM = "q7WkL2pZx9Rt4VbN8mYc"


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("http://user:{}@proxy:3128", id="url"),
        pytest.param("Authorization: Bearer {}", id="header"),
        pytest.param("hf_{}", id="hugging-face"),
        pytest.param("curl -H 'Bearer {}'", id="bearer"),
        pytest.param("GET /v1?token={}&x=1", id="query"),
        pytest.param("password={}", id="assignment"),
        pytest.param("eyJhbGciOiJIUzI1NiJ9.{}.x", id="jwt"),
        pytest.param("process {} died", id="random-word"),
    ],
)
def test_secrets_go(text):
    shown = redaction.text(text.format(RANDOM))
    assert RANDOM not in shown
    assert redaction.NOT_SHOWN in shown
    assert redaction.text(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "registry.example:5000/vllm/vllm-openai@sha256:c2914767605584b6d8f45686b82de173ecc99e781897aa3d0a66dacd72c51ae1",
        "GPU-5cd30dc8-4a1b-9e77-aa10-0123456789ab",
        "KimiK3ForConditionalGeneration",
        "/models/models--moonshotai--Kimi-K3/snapshots/0123456789abcdef0123456789abcdef01234567",
        "NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        "nvidia-kernel-source-580-server-open",
        "3:580.95.05-1.el9_6.x86_64",
        "VLLM_ENGINE_READY_TIMEOUT_S=3600",
        "5.14.0-503.11.1.el9_5.x86_64",
        "2026-11-30T14:00:00.123456789Z",
        "400 Gb/sec (4X NDR)",
    ],
)
def test_what_is_no_secret_stays(text):
    assert redaction.text(text) == text


def test_daemon_json_keeps_its_meaning_and_loses_its_secrets():
    daemon = {
        "default-runtime": "nvidia",
        "log-opts": {"splunk-token": RANDOM, "max-size": "10m"},
        "proxies": {"http-proxy": f"http://me:{RANDOM}@proxy:3128"},
        "auths": {"registry.example": {"auth": RANDOM}},
        "features": {"cdi": True},
    }
    assert redaction.value(daemon) == {
        "default-runtime": "nvidia",
        "log-opts": {"splunk-token": "(not shown)", "max-size": "10m"},
        "proxies": {"http-proxy": "http://(not shown)@proxy:3128"},
        "auths": {"registry.example": {"auth": "(not shown)"}},
        "features": {"cdi": True},
    }


def test_the_environment_is_an_allow_list():
    pairs = ["NCCL_NET=IB", "VLLM_API_KEY=x", "HOME=/root", f"VLLM_X=hf_{RANDOM}", "no pair", "UCX_TLS=rc,cuda_copy"]
    assert redaction.environment(pairs) == {"NCCL_NET": "IB", "UCX_TLS": "rc,cuda_copy", "VLLM_X": "(not shown)"}


def test_docker_run_arguments_lose_their_secrets():
    args = ["docker", "run", "--env", "VLLM_API_KEY=x", "--api-key=x", "--api-key", "x", "--max-num-batched-tokens=9"]
    assert redaction.arguments(args) == [
        *("docker", "run", "--env", "VLLM_API_KEY=(not shown)", "--api-key=(not shown)", "--api-key", "(not shown)"),
        "--max-num-batched-tokens=9",
    ]
