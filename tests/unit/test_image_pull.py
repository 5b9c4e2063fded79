"""The modules that make Docker hold an image and let it go again, against a daemon on a socket."""

import base64
import json
import os
from types import SimpleNamespace

import image_prune
import image_pull
import image_stage
import pytest
from ansible.module_utils import docker_socket
from ansible.module_utils.docker_socket import DockerError, login_header, names_of, store_path
from image_registry import Image, daemon_at

REPOSITORY = "registry.example:5000/vllm/vllm-openai"
A, B, C = ("sha256:" + letter * 64 for letter in "abc")
TAG = f"kimi-runbook/engine:sha256-{'a' * 16}"


@pytest.fixture
def daemon(tmp_path, monkeypatch):
    monkeypatch.setattr(image_pull, "_LONGEST_WAIT_S", 0)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    with daemon_at(tmp_path / "docker.sock") as daemon:
        yield daemon


@pytest.fixture
def pull(tmp_path, daemon):
    def pull(check_mode=False, **more):
        params = {
            "reference": f"{REPOSITORY}@{A}",
            "mirrors": ["mirror.example/vllm"],
            "architecture": "x86_64",
            "staged": str(tmp_path / "stage"),
            "port": 0,
            "bytes_needed": 0,
            "inodes_needed": 0,
            "attempts": 3,
            "silence_s": 5,
            "timeout_s": 60,
            "socket": str(tmp_path / "docker.sock"),
            **more,
        }
        return image_pull.Pull(params).run(check_mode=check_mode)

    return pull


def pulls(daemon):
    return [line for line in daemon.asked if line.startswith("POST /images/create")]


def test_pulled_once_and_tagged(pull, daemon):
    first = pull()
    assert (first["changed"], first["source"], first["name"]) == (True, REPOSITORY, f"{REPOSITORY}@{A}")
    assert (first["bytes"], first["layers_held"], first["attempts"]) == (100, 1, 1)
    assert daemon.images[0]["RepoTags"] == [TAG]  # docker image prune takes images that have digests alone
    again = pull()
    assert (again["changed"], again["source"], len(pulls(daemon))) == (False, "", 1)


def test_an_image_that_was_there_only_gets_the_tag(pull, daemon):
    daemon.hold(f"{REPOSITORY}@{A}")
    assert pull(check_mode=True)["changed"] is True
    assert daemon.images[0]["RepoTags"] == []
    assert pull()["changed"] and daemon.images[0]["RepoTags"] == [TAG]


def test_the_same_digest_under_another_name_is_held(pull, daemon):
    daemon.hold(f"mirror.example/vllm@{A}", tags=(TAG,))
    held = pull()
    assert (held["changed"], held["name"]) == (False, f"mirror.example/vllm@{A}")


def test_an_id_or_a_tag_proves_nothing(pull, daemon):
    daemon.hold(f"{REPOSITORY}@{B}", tags=("vllm:kimi-k3",))
    daemon.images[0]["Id"] = A  # the containerd store uses digests as ids
    assert pull()["source"] == REPOSITORY


def test_check_mode_asks_no_registry(pull, daemon):
    assert pull(check_mode=True)["changed"] is True
    assert pulls(daemon) == []


def test_what_may_pass_is_tried_again(pull, daemon):
    daemon.refuse["registry.example:5000"] = ["net/http: TLS handshake timeout", "unexpected EOF"]
    assert (pull()["attempts"], pull()["source"]) == (3, "")


def test_what_cannot_pass_is_not(pull, daemon):
    daemon.refuse["registry.example:5000"] = ["manifest unknown: manifest unknown"]
    result = pull()
    assert (result["source"], result["name"], result["attempts"]) == (
        "mirror.example/vllm",
        f"mirror.example/vllm@{A}",
        2,
    )


def test_when_no_source_gives_it_all_are_named(pull, daemon):
    daemon.refuse = {"registry.example:5000": ["EOF"] * 3, "mirror.example": ["denied: no access"]}
    with pytest.raises(image_pull.PullError, match=r"registry\.example:5000/.*: EOF; mirror\.example/vllm: denied"):
        pull()


def test_a_pull_that_leaves_no_such_digest_is_no_pull(pull, daemon):
    daemon.forgets = True
    with pytest.raises(image_pull.PullError, match=r"no image has sha256:aaa.* among its RepoDigests"):
        pull()


def test_an_image_for_another_machine_is_refused(pull, daemon):
    daemon.architecture = "arm64"
    with pytest.raises(image_pull.PullError, match=r"image\.architecture: .* is for arm64, expected amd64"):
        pull()


def test_silence_has_an_end(pull, daemon):
    daemon.silent.set()
    with pytest.raises(image_pull.PullError, match=r"no sign of life for 0\.2 s"):
        pull(silence_s=0.2, attempts=1, mirrors=[])


def test_the_whole_has_an_end(pull):
    with pytest.raises(image_pull.PullError, match="not done after 0 s"):
        pull(timeout_s=0, mirrors=[])


@pytest.mark.parametrize(
    ("room", "message"),
    [
        pytest.param({"f_bavail": 1, "f_files": 9, "f_favail": 9}, "/: 4096 bytes free, expected 5000", id="bytes"),
        pytest.param({"f_bavail": 9, "f_files": 9, "f_favail": 1}, "/: 1 inodes free, expected 5", id="inodes"),
    ],
)
def test_the_room_is_looked_at_where_the_store_is(pull, daemon, monkeypatch, room, message):
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_frsize=4096, **room))
    with pytest.raises(image_pull.PullError, match=message):
        pull(bytes_needed=5000, inodes_needed=5)
    assert pulls(daemon) == []
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_frsize=4096, f_bavail=9, f_files=0, f_favail=0))
    assert pull(bytes_needed=5000, inodes_needed=5)["changed"]  # btrfs counts no inodes


def test_containerds_store_lies_elsewhere():
    assert (
        store_path({"DriverStatus": [["driver-type", "io.containerd.snapshotter.v1"]]}, "/x") == "/var/lib/containerd"
    )
    assert store_path({"DriverStatus": [["Supports d_type", "true"]]}, "/x") == "/x"


def test_docker_that_does_not_answer(pull, tmp_path):
    with pytest.raises(DockerError, match=r"absent\.sock does not answer GET /images/json"):
        pull(socket=str(tmp_path / "absent.sock"))


@pytest.mark.parametrize("reference", ["vllm/vllm-openai:kimi-k3", "x@sha256:abc", "x"])
def test_a_reference_without_a_digest(pull, reference):
    with pytest.raises(image_pull.PullError, match="no digest in it"):
        pull(reference=reference)


def test_a_staged_image_needs_no_network_and_keeps_its_digest(pull, daemon, tmp_path):
    """C63: loading an archive would lose the digest, so the staged blobs are pulled from a loopback registry."""
    image = Image("amd64", "arm64")
    stage = {
        "reference": f"{REPOSITORY}@{image.digest}",
        "mirrors": [],
        "archive": str(image.archive(tmp_path / "image.tar")),
        "architecture": "x86_64",
        "insecure": False,
        "folder": str(tmp_path / "stage"),
        "workers": 1,
        "attempts": 1,
    }
    image_stage.run(stage)
    daemon.refuse = {"registry.example:5000": ["no route to host"] * 9, "mirror.example": ["no route to host"] * 9}
    result = pull(reference=f"{REPOSITORY}@{image.digest}")
    assert result["source"] == str(tmp_path / "stage")
    assert result["name"].startswith("127.0.0.1:") and result["name"].endswith(f"/vllm/vllm-openai@{image.digest}")
    assert result["bytes"] == sum(len(image.blobs[name]) for name in image.of("amd64"))
    assert not (tmp_path / "stage").exists()
    assert pull(reference=f"{REPOSITORY}@{image.digest}")["changed"] is False


def test_a_stage_that_was_spoiled_is_passed_over(pull, daemon, tmp_path):
    image = Image("amd64")
    stage = {
        "reference": f"{REPOSITORY}@{image.digest}",
        "mirrors": [],
        "archive": str(image.archive(tmp_path / "image.tar")),
        "architecture": "x86_64",
        "insecure": False,
        "folder": str(tmp_path / "stage"),
        "workers": 1,
        "attempts": 1,
    }
    image_stage.run(stage)
    layer = tmp_path / "stage/blobs/sha256" / image.layer.partition(":")[2]
    layer.write_bytes(b"?" * layer.stat().st_size)  # same size: Docker itself finds out
    assert pull(reference=f"{REPOSITORY}@{image.digest}")["source"] == REPOSITORY
    layer.unlink()
    daemon.images.clear()
    daemon.asked.clear()
    assert pull(reference=f"{REPOSITORY}@{image.digest}")["source"] == REPOSITORY
    assert len(pulls(daemon)) == 1  # what is not whole is not tried


def test_a_login_of_the_host_is_used_and_none_is_stored(pull, daemon, tmp_path):
    config = tmp_path / "docker/config.json"
    config.parent.mkdir()
    login = base64.b64encode(b"reader:s3cret").decode()
    config.write_text(json.dumps({"auths": {"registry.example:5000": {"auth": login}}}), encoding="utf-8")
    before = config.read_bytes()
    pull()
    told = json.loads(base64.urlsafe_b64decode(daemon.logins[0]))
    assert (told["username"], told["password"]) == ("reader", "s3cret")
    assert config.read_bytes() == before and [path.name for path in config.parent.iterdir()] == ["config.json"]
    assert login_header("mirror.example/vllm") == {}


@pytest.mark.parametrize("text", ["", "[]", '{"auths": {"https://index.docker.io/v1/": {}}}', '{"credsStore": "x"}'])
def test_a_configuration_without_a_login_is_none(tmp_path, text):
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    assert login_header("vllm/vllm-openai", tmp_path / "config.json") == {}


def test_names_of_a_digest_are_docker_names():
    images = [{"RepoDigests": [f"vllm/vllm-openai@{A}", f"x@{B}"]}, {"RepoDigests": None}, {}]
    assert names_of(images, A) == ["vllm/vllm-openai"]
    assert docker_socket.familiar("docker.io/library/debian") == "debian"
    assert docker_socket.familiar("docker.io/vllm/vllm-openai") == "vllm/vllm-openai"


@pytest.fixture
def prune(tmp_path, daemon):
    def prune(digest, check_mode=False):
        params = {
            "reference": f"{REPOSITORY}@{digest}",
            "note": str(tmp_path / "var/accepted.json"),
            "keep": 2,
            "socket": str(tmp_path / "docker.sock"),
        }
        return image_prune.run(params, check_mode=check_mode)

    return prune


def held(daemon):
    return [row["RepoDigests"][0].partition("@")[2] for row in daemon.images]


def test_only_what_was_never_accepted_goes(pull, prune, daemon):
    pull(reference=f"{REPOSITORY}@{A}")
    assert prune(A) == {"changed": True, "kept": [A], "removed": [], "in_use": []}
    pull(reference=f"{REPOSITORY}@{B}")  # pulled and never accepted
    pull(reference=f"{REPOSITORY}@{C}")
    assert held(daemon) == [A, B, C]  # nothing goes before a verdict
    assert prune(C, check_mode=True)["removed"] == [B] and held(daemon) == [A, B, C]
    assert prune(C) == {"changed": True, "kept": [C, A], "removed": [B], "in_use": []}
    assert held(daemon) == [A, C]
    assert prune(C)["changed"] is False


def test_images_of_others_stay(prune, daemon):
    daemon.hold(f"{REPOSITORY}@{B}")
    daemon.hold("x@sha256:1", tags=("x:1",))
    assert prune(A)["removed"] == [] and len(daemon.images) == 2


def test_of_an_image_somebody_tagged_only_our_tag_goes(prune, daemon):
    daemon.hold(f"{REPOSITORY}@{B}", tags=("kimi-runbook/engine:sha256-b", "site/keep:1"))
    assert prune(A)["removed"] == [B]
    assert daemon.images[0]["RepoTags"] == ["site/keep:1"] and daemon.images[0]["RepoDigests"]


def test_an_image_a_container_uses_stays_whole_and_is_named(prune, daemon):
    daemon.hold(f"{REPOSITORY}@{B}", tags=("kimi-runbook/engine:sha256-b",))
    daemon.containers = [{"ImageID": "id0"}]
    result = prune(A)
    assert (result["removed"], result["in_use"]) == ([], [B])
    assert daemon.images[0]["RepoTags"] and daemon.images[0]["RepoDigests"]


def test_what_docker_will_not_remove_is_told_in_its_words(prune, daemon):
    daemon.hold(f"{REPOSITORY}@{B}", tags=("kimi-runbook/engine:sha256-b",))
    daemon.used = {"kimi-runbook/engine:sha256-b"}
    result = prune(A)
    assert result["removed"] == [] and "container abc is using" in result["in_use"][0]
    assert len(daemon.images) == 1


@pytest.mark.parametrize("text", ["", "[]", '{"accepted": 1}'])
def test_a_note_that_cannot_be_read_is_none(tmp_path, text):
    (tmp_path / "note").write_text(text, encoding="utf-8")
    assert image_prune.read_note(tmp_path / "note") == []
