"""The secret scan: what it stops, and everything a healthy host prints that it must not stop."""

import base64
import random
import uuid

import pytest

from kimi_runbook.errors import RunbookError
from kimi_runbook.evidence import scan_folder, scan_text


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        pytest.param("-----BEGIN OPENSSH PRIVATE KEY-----", "private key", id="pem"),
        pytest.param(
            base64.b64encode(b"-----BEGIN PRIVATE KEY-----\nMIIE").decode(), "private key in base64", id="pem-64"
        ),
        pytest.param(
            base64.b64encode(b"-----BEGIN EC PRIVATE KEY-----\n").decode(), "private key in base64", id="ec-64"
        ),
        pytest.param("hf_" + "abCdEfGhIj" * 3, "token of a known issuer", id="hf"),
        pytest.param("see sk-proj-abcdefghijklmnopqrstuv", "token of a known issuer", id="sk"),
        pytest.param("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJib2IifQ.c2ln", "JSON Web Token", id="jwt"),
        pytest.param("http://bob:hunter2@x/", "password in a URL", id="url"),
        pytest.param("GET /?access_token=abcdef", "token in a URL", id="query"),
        pytest.param("Authorization: Bearer abcd", "Authorization header", id="header"),
        pytest.param("sent bearer abcdef123456", "bearer token", id="bearer"),
        pytest.param("machine x login bob password hunter2", "netrc", id="netrc"),
        pytest.param('"auth": "b3BlbjpzZXNhbWU="', "registry login", id="auth"),
        pytest.param("password: hunter", "password", id="password"),
        pytest.param("HF_TOKEN=sesame42x", "value of a secret name", id="variable"),
        pytest.param("--api-key=sesame42x", "value of a secret name", id="option"),
        pytest.param("found Zk3jR9xQpL7vT2mW8nY4Bd6F", "random string", id="random"),
    ],
)
def test_the_scan_names_the_line_and_the_rule(text, rule):
    findings = scan_text(f"first\nsecond\n{text}\nlast\n", "part.txt")
    assert [(found.file, found.line) for found in findings] == [("part.txt", 3)] * len(findings)
    assert rule in {found.rule for found in findings}
    assert all(text not in str(found) for found in findings)


def public_lines(seed):
    """Return lines such as logs and inspections are full of, with random figures in them."""
    rng = random.Random(seed)  # noqa: S311 - repeatable, not secret
    hexa = lambda digits: "".join(rng.choices("0123456789abcdef", k=digits))  # noqa: E731 - one line, used below
    mac = ":".join(hexa(2) for _ in range(6))
    gpu = uuid.UUID(int=rng.getrandbits(128))
    blob = rng.randbytes(51)
    return [
        f"vllm/vllm-openai@sha256:{hexa(64)}",
        f'"uuid": "GPU-{gpu}", "mig": "MIG-{gpu}", "ClusterUUID": "{gpu}"',
        f"container {hexa(64)} exited, image {hexa(12)}, /docker/{hexa(64)}/{hexa(64)}-json.log",
        f"commit {hexa(40)} HEAD is now at {hexa(7)}",
        f"{hexa(64)}  model-00001-of-00064.safetensors",
        f"boot_id {gpu} machine-id {hexa(32)} link/ether {mac} node_guid 0x{hexa(16)}",
        f"ED25519 SHA256:{base64.b64encode(rng.randbytes(32)).decode().rstrip('=')} (key fingerprint)",
        f"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI{base64.b64encode(rng.randbytes(32)).decode().rstrip('=')} bob",
        f"integrity sha512-{base64.b64encode(rng.randbytes(64)).decode()}",
        f"-----BEGIN CERTIFICATE-----\n{base64.b64encode(blob).decode()}\n-----END CERTIFICATE-----",
        base64.b64encode(f"plain words, only number {rng.randrange(10**6)}".encode()).decode(),
        f"distributed_init_method=file:///tmp/vllm_dist_{hexa(32)} backend=gloo",
        f"prompt_tokens={rng.randrange(10**5)}, token: {rng.randrange(10**6)}, max_num_batched_tokens: 16384",
        f"[  {rng.random() * 1e4:.6f}] NVRM: Xid (PCI:0000:{hexa(2)}:00): 79, pid={rng.randrange(10**5)}",
        "secretKeyRef: {name: hf-token-secret, key: token}, imagePullSecrets, unexpected token: identifier",
        "/usr/local/lib/python3.12/dist-packages/vllm/v1/executor/multiproc_executor.py, DeepseekV4ForCausalLM",
        "HF_TOKEN=[secret-1a2b3c4d] https://[user-1a2b3c4d]:[secret-1a2b3c4d]@x Bearer [secret-1a2b3c4d]",
        "password: None, api_key=${API_KEY}, token=<redacted>, passwd: files systemd",
    ]


@pytest.mark.parametrize("seed", range(40))
def test_what_hosts_print_does_not_stop_a_file(seed):
    for line in public_lines(seed):
        assert scan_text(line, "part") == [], line


def test_logs_of_real_engines_do_not_stop_a_file(project_root):
    logs = sorted((project_root / "tests/data/engine_logs").glob("*.log"))
    assert logs
    assert [found for log in logs for found in scan_text(log.read_text(encoding="utf-8"), log.name)] == []


def test_a_folder_is_scanned_with_all_its_folders(tmp_path):
    (tmp_path / "evidence/k3-a").mkdir(parents=True)
    (tmp_path / "evidence/k3-a/engine.log").write_text("fine\npassword=hunter2\n")
    (tmp_path / "record.json").write_text('{"tokens": 12}')
    assert [str(found) for found in scan_folder(tmp_path)] == ["evidence/k3-a/engine.log:2: password"]


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(RunbookError, match="no such folder"):
        scan_folder(tmp_path / "nowhere")
