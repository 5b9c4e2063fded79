"""The module that fetches an image's blobs, against a registry that behaves and misbehaves."""

import json
import os
import tarfile
import urllib.error
import urllib.request
from types import SimpleNamespace

import image_stage
import pytest
from ansible.module_utils import oci_blobs
from ansible.module_utils.proved_files import FilesError
from file_server import serving
from image_registry import Image, digest_of

NAME = "vllm/vllm-openai"


@pytest.fixture
def image():
    return Image("amd64", "arm64")


@pytest.fixture
def server(monkeypatch, image):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # a plain-HTTP registry must be reached past any proxy
    monkeypatch.setattr(image_stage, "_LONGEST_WAIT_S", 0)
    with serving() as files:
        files.content = image.paths(NAME)
        yield files


@pytest.fixture
def stage(tmp_path, server, image):
    def stage(check_mode=False, **more):
        host = server.url.removeprefix("http://")
        params = {
            "reference": f"{host}/{NAME}@{image.digest}",
            "mirrors": [],
            "archive": None,
            "architecture": "x86_64",
            "insecure": True,
            "folder": str(tmp_path / "stage"),
            "workers": 2,
            "attempts": 3,
            **more,
        }
        return image_stage.run(params, check_mode=check_mode)

    return stage


def layer_path(image):
    return f"/v2/{NAME}/blobs/{image.layer}"


def test_one_architecture_is_fetched_once(stage, server, image, tmp_path):
    first = stage()
    assert first["changed"] and first["source"].endswith(NAME)
    held = {f"sha256:{path.name}" for path in (tmp_path / "stage/blobs/sha256").glob("[0-9a-f]*")}
    assert held == image.of("amd64") | {image.digest, image.manifests["amd64"]}
    assert first["fetched_bytes"] == first["bytes"] == sum(len(image.blobs[name]) for name in image.of("amd64"))
    server.asked.clear()
    assert stage() == {"changed": False, "staged": True, "source": "", "bytes": first["bytes"], "fetched_bytes": 0}
    assert server.asked == []


def test_check_mode_asks_nobody(stage, server):
    assert (stage(check_mode=True)["changed"], stage(check_mode=True)["staged"]) == (True, False)
    assert server.asked == []


def test_an_image_without_an_index_is_known_by_its_configuration(stage, server, tmp_path):
    alone = Image("arm64", index=False)
    server.content = alone.paths(NAME)
    host = server.url.removeprefix("http://")
    assert stage(reference=f"{host}/{NAME}@{alone.digest}", architecture="aarch64")["changed"]
    with pytest.raises(FilesError, match=r"image\.arch_missing: the image is for arm64, expected amd64"):
        stage(reference=f"{host}/{NAME}@{alone.digest}", folder=str(tmp_path / "other"))


def test_an_architecture_that_the_index_lacks_stops_before_any_blob(stage, server):
    only = Image("amd64")
    server.content = only.paths(NAME)
    host = server.url.removeprefix("http://")
    with pytest.raises(FilesError, match=r"image\.arch_missing: the image exists for amd64, expected arm64"):
        stage(reference=f"{host}/{NAME}@{only.digest}", architecture="aarch64")
    assert not any("/blobs/" in line for line in server.asked)


def test_a_cut_layer_goes_on_where_it_stopped(stage, server, image):
    server.cut_after[layer_path(image)] = [100_000, 50_000]
    result = stage()
    assert result["fetched_bytes"] == result["bytes"]
    assert [line for line in server.asked if image.layer in line][1:] == [
        f"GET {layer_path(image)} bytes=100000-",
        f"GET {layer_path(image)} bytes=150000-",
    ]


def test_the_next_run_goes_on_with_what_was_fetched(stage, server, image):
    server.cut_after[layer_path(image)] = [100_000, 0, 0, 0]
    with pytest.raises(FilesError, match=r"ends after 100000 of 250000 bytes|IncompleteRead"):
        stage()
    server.asked.clear()
    server.cut_after.clear()
    assert stage()["fetched_bytes"] == len(image.blobs[image.layer]) - 100_000
    assert [line for line in server.asked if "/blobs/" in line] == [f"GET {layer_path(image)} bytes=100000-"]


@pytest.mark.parametrize("kind", ["index", "manifest", "layer"])
def test_content_that_was_altered_is_never_kept(stage, server, image, tmp_path, kind):
    digest = {"index": image.digest, "manifest": image.manifests["amd64"], "layer": image.layer}[kind]
    for path in server.content:
        if path.endswith(digest):
            server.content[path] = server.content[path][:-1] + b"?"
    with pytest.raises(FilesError, match=r"sha256.*expected"):
        stage()
    assert not (tmp_path / "stage/blobs/sha256" / digest.partition(":")[2]).exists()


def test_a_mirror_with_the_same_digest_helps_out(stage, server, image):
    host = server.url.removeprefix("http://")
    result = stage(
        reference=f"127.0.0.1:9/{NAME}@{image.digest}", mirrors=["127.0.0.1:9/b/c", f"{host}/{NAME}"], attempts=1
    )
    assert result["source"] == f"{host}/{NAME}"


def test_when_nobody_has_it_everybody_is_named(stage, server, image):
    host = server.url.removeprefix("http://")
    with pytest.raises(FilesError, match=rf"{host}/v2/none/manifests/.*HTTP 404.*; .*{host}/v2/other.*HTTP 404"):
        stage(reference=f"{host}/none@{image.digest}", mirrors=[f"{host}/other"])


def test_no_room_is_told_before_the_first_blob(stage, server, monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=1, f_frsize=4096))
    with pytest.raises(FilesError, match=r"4096 bytes free, expected 505\d\d\d"):
        stage()
    assert not any("/blobs/" in line for line in server.asked)


def test_an_archive_keeps_the_digest(stage, server, image, tmp_path):
    result = stage(archive=str(image.archive(tmp_path / "image.tar")))
    assert result["source"].endswith("image.tar") and result["fetched_bytes"] == result["bytes"]
    assert server.asked == []


def test_archives_that_lost_it_are_refused(stage, image, tmp_path):
    with tarfile.open(tmp_path / "saved.tar", "w") as tar:
        member = tarfile.TarInfo("manifest.json")
        tar.addfile(member)
    with pytest.raises(FilesError, match=r"keeps no digest .*skopeo copy --all --preserve-digests"):
        stage(archive=str(tmp_path / "saved.tar"))
    other = Image("amd64", layer=b"other")
    with pytest.raises(FilesError, match=f"no blob {image.digest}; expected the locked digest"):
        stage(archive=str(other.archive(tmp_path / "other.tar")))
    with pytest.raises(FilesError, match=f"1 blobs are missing, {image.layer} for one"):
        stage(archive=str(image.archive(tmp_path / "half.tar", without=image.layer)))
    (tmp_path / "text.tar").write_text("no tar file", encoding="utf-8")
    with pytest.raises(FilesError, match="expected an OCI archive"):
        stage(archive=str(tmp_path / "text.tar"))


class Answer:
    """What an opened URL gives."""

    def __init__(self, body):
        self.read = lambda count: body

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


def test_a_token_is_asked_for_and_a_login_is_not_made(monkeypatch, image):
    asked = []
    challenges = ['Bearer realm="https://auth/token",service="s",scope="repository:x:pull"', 'Basic realm="x"']

    def request(registry, url, headers, token):
        asked.append((url, token))
        if "/token" in url:
            return Answer(b'{"token": "t"}')
        if token is None:
            raise urllib.error.HTTPError(url, 401, "Unauthorized", {"WWW-Authenticate": challenges.pop(0)}, None)
        return Answer(image.blobs[image.digest])

    monkeypatch.setattr(oci_blobs.Registry, "_request", request)
    registry = oci_blobs.Registry("registry.example/x")
    assert digest_of(registry.manifest(image.digest)) == image.digest
    assert asked[1:] == [
        ("https://auth/token?service=s&scope=repository%3Ax%3Apull", None),
        (f"https://registry.example/v2/x/manifests/{image.digest}", "t"),
    ]
    with pytest.raises(FilesError, match="a login is asked for; expected anonymous"):
        oci_blobs.Registry("registry.example/x").manifest(image.digest)


def test_the_loopback_registry_answers_as_docker_asks(stage, image, tmp_path):
    stage()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with oci_blobs.Loopback(oci_blobs.Blobs(tmp_path / "stage"), 0) as registry:
        base = f"http://127.0.0.1:{registry.port}/v2"

        def ask(path, method="GET", **headers):
            request = urllib.request.Request(f"{base}{path}", method=method, headers=headers)  # noqa: S310 - loopback
            try:
                return opener.open(request)
            except urllib.error.HTTPError as error:
                return error

        assert ask("/").status == 200
        top = ask(f"/x/y/manifests/{image.digest}")
        assert top.headers["Content-Type"].endswith("index.v1+json")
        assert top.headers["Docker-Content-Digest"] == image.digest and json.loads(top.read())["manifests"]
        head = ask(f"/x/y/blobs/{image.layer}", "HEAD")
        assert int(head.headers["Content-Length"]) == len(image.blobs[image.layer]) and head.read() == b""
        part = ask(f"/x/y/blobs/{image.layer}", Range="bytes=5-8")
        assert (part.status, part.read()) == (206, image.blobs[image.layer][5:9])
        assert ask(f"/x/y/blobs/{image.layer}", Range="bytes=999999999-").status == 416
        assert ask(f"/x/y/manifests/{image.manifests['arm64']}").status == 404  # not this host's
        assert ask("/x/y/manifests/latest").status == 404
        assert ask("/x/../../../etc/passwd").status == 404
