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
        '{{"registry": {{"password": "{}"}}}}',
        "password: {}",
        "machine h login bob password {}",
        "serve /models/k3 --hf-token {}",
        "serve /models/k3 --some-api-key={}",
        "curl -u bob:{} https://h",
    ],
)
def test_a_plain_word_goes_where_what_stands_before_it_tells(text):
    assert "hunter2" not in redaction.text(text.format("hunter2") + " and on")


def test_options_about_tokens_of_text_stay():
    said = "serve --max-num-batched-tokens 8192 --tokenizer /models/k3 --user 1000:1000 --token-budget 5 no secret"
    assert redaction.text(said) == said


@pytest.mark.parametrize(
    "word",
    [
        "uxr9ia8lkov9zltqspgooh3mfu42w0mfjm",
        "AyYkxVbzjVsigmRhcocTVHucSpI",
        "PZf+BDhJcQYpRPfStVPFUuAflYIDRvIA",
        "z1RwN0S17K7T+uIIq/WUfiJWNLQ/t1tsnASd2sw",
    ],
)
def test_random_words_of_two_kinds_of_characters_go(word):
    assert word not in redaction.text(f"unit {word} failed")


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
        "libnvidia-container-tools libnvidia-compute-580-server linux-modules-nvidia-580-open-6.8.0-90-generic",
        "0a1b2c3d4e5f60718293a4b5c6d7e8f90a1b2c3d4e5f60718293a4b5c6d7e8f9",
        "NVreg_GrdmaPciTopoCheckOverride CoherentGPUMemoryMode EnableGpuFirmware ib_register_peer_memory_client",
        "VLLM::Worker_TP0_EP12 nvidia-modeset.ko.zst model-00001-of-000096.safetensors",
        "Qwen2_5_VLForConditionalGeneration DeepseekForCausalLM KimiK25ForConditionalGeneration",
        "/opt/Site/Models/Kimi/K3/FP4/Rev2/Shards/A1/B2 /usr/local/lib/python3/dist/Torch2/Lib64",
        "/sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/net/enp22s0f0np0 mlx5_bond_0 roceP2p1s0f1",
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
