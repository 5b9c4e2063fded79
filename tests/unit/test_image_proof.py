"""The proof that CUDA initialises in the service's image: what is run, and what its answer means."""

import image_proof
import pytest

from kimi_runbook.engine_node import held_reference, node_launch, proof_argv

DIGEST = "sha256:" + "a" * 64
LOCKED = f"registry.example:5000/vllm/vllm-openai@{DIGEST}"
MIRROR = f"mirror.example/vllm@{DIGEST}"
SPEC = {
    "model": "/models/k3",
    "served_model_name": "kimi-k3",
    "image": LOCKED,
    "nnodes": 1,
    "node_rank": 0,
    "host_ip": "192.0.2.11",
    "port": 8000,
    "tensor_parallel_size": 8,
    "env": {"VLLM_X": "1"},
}
CONTAINER = {
    "name": "kimi-engine",
    "devices": ["nvidia.com/gpu=all"],
    "ulimits": ["memlock=-1"],
    "docker_args": ["--cap-add", "SYS_NICE"],
    "mounts": ["/models/k3"],
}


def test_the_proof_is_the_service_with_python_in_place_of_the_engine():
    launch = node_launch(SPEC, CONTAINER)
    argv = proof_argv(launch, "kimi-engine", "libcuda.so.1", "cuInit")
    service = launch["docker_argv"]
    image = service.index(LOCKED)
    shared = [word if word != "kimi-engine" else "kimi-engine-proof" for word in service[:image]]
    assert argv[: len(shared)] == shared
    assert {"nvidia.com/gpu=all", "memlock=-1", "SYS_NICE", "VLLM_X=1"} <= set(argv)
    assert argv[len(shared) : len(shared) + 4] == ["--entrypoint", "python3", LOCKED, "-c"]
    assert argv[-2:] == ["libcuda.so.1", "cuInit"] and "serve" not in argv
    assert service == node_launch(SPEC, CONTAINER)["docker_argv"]  # the launch itself stays as it was


def test_the_code_that_is_run_calls_the_function(capfd):
    code = proof_argv(node_launch(SPEC, CONTAINER), "kimi-engine", "libc.so.6", "abs")[-3]
    done = image_proof.run(["python3", "-c", code, "libc.so.6", "abs"], 20)
    assert image_proof.judge(done.returncode, done.stdout, done.stderr, "abs") == ""
    done = image_proof.run(["python3", "-c", code, "libnothing.so.1", "cuInit"], 20)
    with pytest.raises(image_proof.ProofError, match=r"libnothing\.so\.1: cannot open shared object file"):
        image_proof.judge(done.returncode, done.stdout, done.stderr, "cuInit")


@pytest.mark.parametrize(
    ("rc", "out", "err", "message"),
    [
        pytest.param(0, "result 3\n", "", r"cuInit\(0\) returned 3, expected 0: .*nvidia_uvm", id="no-uvm"),
        pytest.param(0, "result 100\n", "", "no device", id="no-device"),
        pytest.param(0, "result 803\n", "", "different versions", id="mismatch"),
        pytest.param(0, "result 802\n", "", "fabric manager", id="fabric"),
        pytest.param(0, "result 42\n", "", "see CUresult", id="unlisted"),
        pytest.param(125, "", "docker: Error response from daemon: CDI device injection failed.\n", "CDI", id="cdi"),
        pytest.param(137, "", "", "exit 137, no output", id="killed"),
        pytest.param(1, "result 0\n", "boom\n", "boom|returned 0", id="fails-after-its-answer"),
    ],
)
def test_every_other_answer_is_no(rc, out, err, message):
    """C65: a container that starts, and nvidia-smi that answers, prove nothing about CUDA."""
    with pytest.raises(image_proof.ProofError, match=message):
        image_proof.judge(rc, out, err, "cuInit")


def test_an_image_without_python_is_skipped_with_the_reason():
    err = 'docker: Error: OCI runtime create failed: exec: "python3": executable file not found in $PATH: unknown.'
    assert image_proof.judge(127, "", err, "cuInit") == "the image has no python3"


def test_mounts_that_are_not_there_yet_are_left_out(tmp_path):
    there = f"type=bind,source={tmp_path},target=/x,readonly"
    gone = "type=bind,source=/nothing/nccl.conf,target=/etc/nccl.conf,readonly"
    argv, left_out = image_proof.without_missing_mounts(["docker", "--mount", there, "--mount", gone, "IMAGE"])
    assert argv == ["docker", "--mount", there, "IMAGE"] and left_out == ["/nothing/nccl.conf"]


@pytest.mark.parametrize(
    ("image", "name"),
    [
        pytest.param({"repo_digests": [MIRROR, LOCKED]}, LOCKED, id="locked-name-first"),
        pytest.param({"repo_digests": [f"x@sha256:{'b' * 64}", MIRROR]}, MIRROR, id="mirror"),
        pytest.param({"repo_digests": []}, LOCKED, id="none"),
        pytest.param(None, LOCKED, id="nobody-asked"),
    ],
)
def test_the_engine_is_started_by_the_name_the_host_has(image, name):
    assert held_reference(image, LOCKED) == name
