"""Redaction: secrets planted in every place they are known to lie in, and what has to stay readable."""

import base64
import json
import re

import pytest
import yaml

from kimi_runbook.errors import RunbookError
from kimi_runbook.evidence import Pseudonyms, Redactor, run_key, scan_text
from kimi_runbook.evidence.pseudonyms import KEY_BYTES

RANDOM_STRING = "Zk3jR9xQpL7vT2mW8nY4"  # shaped like a token, and of no issuer
KEY = Pseudonyms(b"k" * KEY_BYTES)
STAND_IN = re.compile(r"\[(?:secret|value|user)-[0-9a-f]{8}\]")


def redact(text, form="text", **options):
    return Redactor(KEY, **options).redact_all({"part": (text, form)})["part"]


# The ten places of a planted secret, and what is left of the line around it.
@pytest.mark.parametrize(
    ("form", "text", "secret", "left"),
    [
        pytest.param("env", "SITE_LICENCE=opensesame\nNCCL_NET=IB", "opensesame", "NCCL_NET=IB", id="environment"),
        pytest.param(
            "text", '[Service]\nEnvironment="HF_X=opensesame" NCCL_NET=IB', "opensesame", "NCCL_NET=IB", id="unit-file"
        ),
        pytest.param(
            "text", "vllm serve /m --api-key opensesame --port 80", "opensesame", "--port 80", id="command-line"
        ),
        pytest.param("text", "GET http://bob:opensesame@mirror.example/x", "opensesame", "@mirror.example/x", id="url"),
        pytest.param("text", "ERROR login failed, password=opensesame, retry 2", "opensesame", ", retry 2", id="log"),
        pytest.param(
            "json",
            json.dumps({"mtu": 1400, "auths": {"r.example": {"auth": base64.b64encode(b"bob:opensesame").decode()}}}),
            base64.b64encode(b"bob:opensesame").decode(),
            '"mtu": 1400',
            id="daemon.json-auth",
        ),
        pytest.param("text", "machine r.example login bob password opensesame", "opensesame", "r.example", id="netrc"),
        pytest.param(
            "text", f"INFO using {RANDOM_STRING} for mirror", RANDOM_STRING, "INFO using", id="token-like-in-log-line"
        ),
        pytest.param(
            "text", "> Authorization: Bearer opensesame", "opensesame", "> Authorization: Bearer", id="header"
        ),
        pytest.param("text", "hf_" + "abCdEfGhIj" * 3, "hf_" + "abCdEfGhIj" * 3, "", id="hf-token"),
    ],
)
def test_a_planted_secret_is_hidden_and_the_rest_of_its_line_stays(form, text, secret, left):
    redacted = redact(text, form)
    assert secret not in redacted
    assert STAND_IN.search(redacted)
    assert left in redacted
    assert scan_text(redacted, "part") == []


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        pytest.param("non-default args: {'api_key': ['opensesame', 'two words'], 'port': 1}", "opensesame", id="args"),
        pytest.param("non-default args: {'api_key': ['opensesame', 'two words'], 'port': 1}", "two words", id="args-2"),
        pytest.param("cut: {'api_key': ['opensesame', 'bey", "opensesame", id="cut-off-list"),
        pytest.param("vllm serve --api-key first opensesame --port 8000", "opensesame", id="several-keys"),
        pytest.param("['serve', '--hf-token', 'opensesame']", "opensesame", id="python-list"),
        pytest.param('  "--api-key",\n  "opensesame",', "opensesame", id="json-list-over-lines"),
        pytest.param("- --api-key\n- opensesame", "opensesame", id="yaml-list-over-lines"),
        pytest.param("vllm\x00serve\x00--api-key\x00opensesame\x00", "opensesame", id="proc-cmdline"),
        pytest.param('{\\"token\\": \\"opensesame\\"}', "opensesame", id="json-in-json"),
        pytest.param("password: open sesame now", "sesame", id="words"),
        pytest.param("(b'authorization', b'Basic b3BlbjpzZXNhbWU=')", "b3BlbjpzZXNhbWU=", id="bytes-header"),
        pytest.param("Authorization: Digest username=bob, response=opensesame", "opensesame", id="digest"),
        pytest.param("Cookie: a=1; session=opensesame", "opensesame", id="cookie"),
        pytest.param("curl -u bob:opensesame http://x/", "opensesame", id="curl-user"),
        pytest.param("docker login -u bob -p opensesame r.example", "opensesame", id="docker-login"),
        pytest.param("docker run -e SITE_X=opensesame -e NCCL_NET=IB image", "opensesame", id="docker-env"),
        pytest.param("GET /v1?access_token=opensesame&x=1", "opensesame", id="query"),
        pytest.param("https://x.example/b?sv=1&sig=opensesame", "opensesame", id="signed-url"),
        pytest.param("git clone https://opensesame@github.com/x/y but-not-a-user-name", "opensesame@", id="url-token"),
        pytest.param("AKIAIOSFODNN7ABCDEFG", "AKIAIOSFODNN7ABCDEFG", id="aws"),
        pytest.param("nvapi-abcdefghijklmnopqrst", "nvapi-abcdefghijklmnopqrst", id="ngc"),
        pytest.param("eyJhbGciOi.eyJzdWIi.c2ln", "eyJhbGciOi", id="jwt"),
        pytest.param("root:$6$saltsalt$abcdefghijklmnop:1", "$6$saltsalt", id="crypt"),
        pytest.param("seen dXNlcjpvcGVuc2VzYW1l", "dXNlcjpvcGVuc2VzYW1l", id="base64-of-user-and-password"),
        pytest.param("WANDB_API_KEY=" + "0123456789abcdef" * 2, "0123456789abcdef", id="hexadecimal-by-name"),
        pytest.param("found " + "0123456789abcdef" * 2, "0123456789abcdef", id="hexadecimal-of-nothing-known"),
        pytest.param("token=bob-the-secret", "ob-the-secret", id="value-that-begins-with-b"),
    ],
)
def test_secrets_are_hidden_in_places_a_line_can_have(text, secret):
    assert secret not in redact(text)


PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEA7bq\nabcdefghijklmnopqr+/\n-----END RSA PRIVATE KEY-----"


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(f"before\n{PEM}\nafter", id="lines"),
        pytest.param("before\n" + json.dumps(PEM) + "\nafter", id="escaped"),
        pytest.param("before\n" + PEM.rsplit("\n", 1)[0] + "\nafter", id="cut-off"),
        pytest.param("before\n" + PEM.replace("\n", "\nNov 30 10:00:00 host app[1]: ") + "\nafter", id="in-a-log"),
    ],
)
def test_private_keys_are_hidden_whole(text):
    redacted = redact(text)
    assert "MIIEpAIBAAKCAQEA7bq" not in redacted
    assert "abcdefghijklmnopqr" not in redacted
    assert redacted.startswith("before")
    assert redacted.endswith("after")


@pytest.mark.parametrize(
    "line",
    [
        "Avg prompt throughput: 12.0 tokens/s, NCCL_SOCKET_IFNAME==eth0, Prefix cache hit rate: 50.0%",
        "KeyError: 'model.layers.61.mlp.experts.w13_weight'",
        "max_num_batched_tokens=8192, num_key_value_heads=64, eos_token='<|im_end|>', prompt_tokens: 12, api_key: None",
        "Chunked prefill is enabled with max_num_batched_tokens=16384.",
        "vllm/vllm-openai@sha256:" + "0123456789abcdef" * 4,
        "docker://registry:5000/vllm@sha256:" + "0123456789abcdef" * 4,
        "GPU 0: NVIDIA H200 (UUID: GPU-1b2c3d4e-1111-2222-3333-444455556666)",
        "/var/lib/docker/overlay2/" + "0123456789abcdef" * 4 + "/merged",
        "boot_id: 3f2a8c1de4b54f0f9f0c7a1b2c3d4e5f commit 8959cf64189c71d36e11c6a30335f923f261b1f7",
        "8959cf64189c71d36e11c6a30335f923f261b1f7  model-00001-of-00064.safetensors",
        "ED25519 SHA256:nThbg6kXUpJWGl7E1IGOCspRomTxdCARLviKw6E5SY8",
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl",
        "nvidia-kernel-open-dkms_580.126.20-1_amd64.deb docker.io 20.10.24+dfsg1-1+deb12u1+b6",
        "vllm 0.33.1.dev12+gabcdef012",
        "cuMemcpyDtoDAsync_v2 failed in DeepseekV4ForCausalLM, mlx5dv_reg_dmabuf_mr",
        "undefined symbol: _ZN3c106detail14torchCheckFailEPKcS2_jRKSs",
        "key: node-role.kubernetes.io/control-plane, bearer token expired, basic authentication",
        "link/infiniband 00:00:10:49:fe:80:00:00:00:00:00:00:5c:25:73:03:00:12:ab:cd brd 00:ff",
        "2026-11-30T14:53:03.100000001Z started getty@tty1.service",
        "aGVsbG8gd29ybGQsIHRoaXMgaXMgcHVibGlj",  # base64 of plain words
    ],
)
def test_what_explains_a_failure_stays(line):
    assert redact(line) == line


def test_docker_inspect_keeps_ids_and_steering_variables_and_hides_the_rest():
    container_id = "0123456789abcdef" * 4
    row = {
        "Id": container_id,
        "Args": ["serve", "/m", "--api-key", "opensesame", "--port", "8000"],
        "Config": {
            "Env": ["NCCL_NET=IB", "HF_TOKEN=opensesame", "SITE=opensesame", "PATH=/bin", "VLLM_API_KEY=opensesame"],
            "Image": "vllm/vllm-openai:kimi-k3",
            "Labels": {"maintainer": "bob@example.org"},
        },
        "State": {"Pid": 12, "Running": True, "Error": ""},
    }
    seen = json.loads(redact(json.dumps([row]), "json"))[0]
    assert "opensesame" not in json.dumps(seen)
    assert seen["Id"] == container_id
    assert seen["Args"][-2:] == ["--port", "8000"]
    assert seen["Config"]["Env"][0] == "NCCL_NET=IB"
    assert seen["Config"]["Env"][3] == "PATH=/bin"
    assert seen["State"] == row["State"]
    assert seen["Config"]["Labels"]["maintainer"].endswith("@example.org")


def test_a_pod_keeps_its_meaning_and_hides_variables_and_secrets_within_annotations():
    applied = json.dumps({"spec": {"containers": [{"env": [{"name": "SITE", "value": "opensesame"}]}]}})
    pod = {
        "apiVersion": "v1",
        "metadata": {
            "annotations": {"kubectl.kubernetes.io/last-applied-configuration": applied},
            "creationTimestamp": "2026-11-30T10:00:00Z",
        },
        "spec": {
            "containers": [
                {
                    "args": ["serve", "--api-key", "opensesame"],
                    "env": [
                        {"name": "SITE", "value": "opensesame"},
                        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}},
                        {"name": "NCCL_NET", "value": "IB"},
                    ],
                    "image": "vllm/vllm-openai:kimi-k3",
                }
            ]
        },
        "status": {"containerStatuses": [{"imageID": "docker.io/vllm@sha256:" + "0123456789abcdef" * 4}]},
    }
    seen = yaml.safe_load(redact(yaml.safe_dump(pod), "yaml"))
    assert "opensesame" not in yaml.safe_dump(seen)
    env = seen["spec"]["containers"][0]["env"]
    assert env[1:] == pod["spec"]["containers"][0]["env"][1:]
    assert seen["status"] == pod["status"]


@pytest.mark.parametrize("form", ["json", "yaml", "env"])
def test_a_document_that_was_cut_is_redacted_as_text(form):
    whole = json.dumps({"auths": {"r": {"auth": "b3BlbjpzZXNhbWU="}}, "password": "opensesame", "more": [1, 2, 3]})
    redacted = redact(whole[:-8], form)
    assert "opensesame" not in redacted
    assert "b3BlbjpzZXNhbWU=" not in redacted


def test_a_secret_named_in_one_part_is_hidden_in_all_of_them_in_every_encoding():
    parts = {
        "env.txt": ("HF_TOKEN=open+sesame/42", "env"),
        "engine.log": (f"sent open+sesame/42 and {base64.b64encode(b'open+sesame/42').decode()}", "text"),
        "access.log": ("GET /open%2Bsesame%2F42", "text"),
    }
    redacted = Redactor(KEY).redact_all(parts)
    stand_in = KEY.of("secret", "open+sesame/42")
    assert redacted == {
        "env.txt": f"HF_TOKEN={stand_in}",
        "engine.log": f"sent {stand_in} and {stand_in}",
        "access.log": f"GET /{stand_in}",
    }


def test_people_have_one_pseudonym_in_all_parts_and_system_accounts_their_names():
    log = "sshd[1]: Accepted publickey for alice from 10.0.0.1 port 22\nsudo: alice : PWD=/home/alice ; USER=root"
    redacted = redact(log)
    assert "alice" not in redacted
    assert redacted.count(KEY.of("user", "alice")) == 3
    assert "USER=root" in redacted
    assert redact(log, hide=()) == log


def test_hosts_and_addresses_are_hidden_only_where_asked():
    text = "http://mirror.example:5000/x from 10.1.2.3 and fe80::1 to k3-a, 127.0.0.1, http://k3-a/x, driver 580.126.20"
    assert redact(text) == text
    hidden = redact(text, hide=("hosts", "ips"), hosts=("k3-a",))
    assert not {"mirror.example", "10.1.2.3", "fe80::1"} & set(re.split(r"[ /,]|:5000", hidden))
    assert hidden.endswith("to k3-a, 127.0.0.1, http://k3-a/x, driver 580.126.20")


def test_pseudonyms_belong_to_their_run():
    assert KEY.of("secret", "x") == Pseudonyms(b"k" * KEY_BYTES).of("secret", "x")
    assert KEY.of("secret", "x") != Pseudonyms(b"q" * KEY_BYTES).of("secret", "x")


def test_a_run_keeps_its_key_for_its_owner_alone(tmp_path):
    path = tmp_path / "runs/.pseudonyms/20261130T120000Z-0000"
    key = run_key(path)
    assert len(key) == KEY_BYTES
    assert run_key(path) == key
    assert path.stat().st_mode & 0o077 == 0
    assert [item.name for item in path.parent.iterdir()] == [path.name]
    path.write_bytes(b"short")
    with pytest.raises(RunbookError, match="5 bytes; expected a key of 32 bytes"):
        run_key(path)
