"""The module that brings and proves weights: what is fetched, resumed, remembered, refused."""

import hashlib
import json
import os
from types import SimpleNamespace

import model_weights
import pytest
import weights_probe
from ansible.module_utils import proved_files
from file_server import serving
from host_tree import Tree

from kimi_runbook.weights import parse_manifest

BIG = bytes(range(256)) * 4000


def listed(**files):
    return {
        name.replace("__", "."): {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in files.items()
    }


WANTED = listed(config__json=b"{}", model__safetensors=BIG)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(model_weights, "_LONGEST_WAIT_S", 0)
    with serving() as files:
        files.content = {"/k3/config.json": b"{}", "/k3/model.safetensors": BIG}
        yield files


@pytest.fixture
def run(tmp_path):
    def run(source="", wanted=None, **more):
        params = {
            "path": str(tmp_path / "model"),
            "files": WANTED if wanted is None else wanted,
            "revision": "v1",
            "source": source,
            "workers": 2,
            "attempts": 3,
        }
        return model_weights.run(params, fallback=str(tmp_path / "records"), **more)

    return run


def put(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_bytes(content)
    return folder


def test_fetched_once_and_then_nothing(run, server, tmp_path):
    first = run(f"{server.url}/k3/")
    assert first["changed"] and first["fetched"] == ["config.json", "model.safetensors"]
    assert first["fetched_bytes"] == len(BIG) + 2
    assert (tmp_path / "model/model.safetensors").read_bytes() == BIG
    assert not (tmp_path / "model/.kimi-parts").exists()
    server.asked.clear()
    again = run(f"{server.url}/k3/")
    assert again == {"changed": False, "fetched": [], "fetched_bytes": 0, "hashed_bytes": 0, "remembered": 2}
    assert server.asked == []


def test_a_directory_is_a_source_too(run, tmp_path):
    source = put(tmp_path / "share", config__json=b"{}", model__safetensors=BIG)
    assert run(str(source))["fetched_bytes"] == len(BIG) + 2


def test_a_cut_transfer_goes_on_where_it_stopped(run, server):
    server.cut_after["/k3/model.safetensors"] = [300_000, 200_000]
    result = run(f"{server.url}/k3")
    assert result["fetched_bytes"] == len(BIG) + 2  # not one byte twice
    ranges = [line for line in server.asked if line.startswith("GET /k3/model")]
    assert ranges == [
        "GET /k3/model.safetensors",
        "GET /k3/model.safetensors bytes=300000-",
        "GET /k3/model.safetensors bytes=500000-",
    ]


def test_the_next_run_goes_on_with_the_parts_of_a_killed_one(run, server, tmp_path):
    put(tmp_path / "model/.kimi-parts", model__safetensors=BIG[:400_000])
    assert run(f"{server.url}/k3")["fetched_bytes"] == len(BIG) - 400_000 + 2


def test_a_server_without_ranges_is_read_from_the_beginning(run, server, tmp_path):
    server.ranges = False
    put(tmp_path / "model/.kimi-parts", model__safetensors=BIG[:400_000])
    assert run(f"{server.url}/k3")["fetched_bytes"] == len(BIG) + 2


def test_a_spoiled_part_is_fetched_once_more_from_the_beginning(run, server, tmp_path):
    put(tmp_path / "model/.kimi-parts", model__safetensors=b"?" * 400_000)
    run(f"{server.url}/k3")
    assert (tmp_path / "model/model.safetensors").read_bytes() == BIG


def test_an_error_of_the_server_is_tried_again(run, server):
    server.status["/k3/config.json"] = [503, 429]
    assert run(f"{server.url}/k3")["fetched"]


def test_a_wrong_content_never_gets_the_name(run, server, tmp_path):
    server.content["/k3/model.safetensors"] = BIG[:-1] + b"?"
    with pytest.raises(proved_files.FilesError, match=r"model.safetensors: .*has sha256 .*, expected"):
        run(f"{server.url}/k3")
    assert not (tmp_path / "model/model.safetensors").exists()
    assert (tmp_path / "model/config.json").exists()  # what was right is kept, and remembered
    server.content["/k3/model.safetensors"] = BIG
    assert run(f"{server.url}/k3")["remembered"] == 1


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        pytest.param(lambda files: files.content.pop("/k3/config.json"), "HTTP 404", id="absent"),
        pytest.param(lambda files: files.content.update({"/k3/config.json": b"{"}), "1 bytes there", id="other-size"),
        pytest.param(lambda files: files.status.update({"/k3/config.json": [500] * 9}), "HTTP 500", id="broken"),
        pytest.param(lambda files: files.cut_after.update({"/k3/config.json": [0] * 9}), "ends after 0|Inc", id="cut"),
    ],
)  # fmt: skip
def test_what_cannot_be_fetched_is_named(run, server, prepare, message):
    prepare(server)
    with pytest.raises(proved_files.FilesError, match=message):
        run(f"{server.url}/k3")


def test_no_room_is_told_before_the_first_byte(run, server, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=1, f_frsize=4096))
    with pytest.raises(proved_files.FilesError, match=r"4096 bytes free, expected 1034\d\d\d for 2 files"):
        run(f"{server.url}/k3")
    assert not any(line.startswith("GET") for line in server.asked)
    put(tmp_path / "model/.kimi-parts", model__safetensors=BIG[:-2000])
    run(f"{server.url}/k3")  # what is there already needs no room


def test_a_disk_that_fills_up_ends_the_attempt(run, server, monkeypatch):
    def full(store, source, name, had, digest):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(proved_files.Store, "_receive", full)
    with pytest.raises(proved_files.FilesError, match="No space left on device"):
        run(f"{server.url}/k3")
    assert not any(line.startswith("GET") for line in server.asked)


def test_shared_storage_is_only_verified(run, tmp_path):
    folder = put(tmp_path / "model", config__json=b"{}", model__safetensors=BIG, other=b"kept")
    first = run()
    assert first["changed"] and first["hashed_bytes"] == len(BIG) + 2 and first["fetched"] == []
    assert run() == {"changed": False, "fetched": [], "fetched_bytes": 0, "hashed_bytes": 0, "remembered": 2}
    assert (folder / "other").read_bytes() == b"kept"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        pytest.param({}, "2 of 2 files are missing", id="not-mounted"),
        pytest.param({"config__json": b"{}", "model__safetensors": BIG[:-1]}, r"1 of 2 .*\(model", id="short"),
        pytest.param({"config__json": b"[]", "model__safetensors": BIG}, "config.json: content differs", id="content"),
    ],
)
def test_what_is_wrong_and_has_no_source_stops(run, tmp_path, files, message):
    put(tmp_path / "model", **files)
    with pytest.raises(proved_files.FilesError, match=message):
        run()


def test_a_file_that_changed_is_read_again(run, tmp_path):
    folder = put(tmp_path / "model", config__json=b"{}", model__safetensors=BIG)
    run()
    changed = BIG[:-1] + b"?"
    (folder / "model.safetensors").write_bytes(changed)
    os.utime(folder / "model.safetensors", ns=(1, 1))
    with pytest.raises(proved_files.FilesError, match="content differs"):
        run()


def test_a_touched_file_with_the_same_content_is_proved_again(run, tmp_path):
    folder = put(tmp_path / "model", config__json=b"{}", model__safetensors=BIG)
    run()
    os.utime(folder / "model.safetensors", ns=(1, 1))
    again = run()
    assert again["hashed_bytes"] == len(BIG) and again["changed"]


def test_content_that_is_wrong_is_replaced_from_a_source(run, server, tmp_path):
    folder = put(tmp_path / "model", config__json=b"[]", model__safetensors=BIG)
    assert run(f"{server.url}/k3")["fetched"] == ["config.json"]
    assert (folder / "config.json").read_bytes() == b"{}"


def test_check_mode_says_what_would_be_done_and_does_nothing(run, server, tmp_path):
    put(tmp_path / "model", config__json=b"{}")
    told = run(f"{server.url}/k3", check_mode=True)
    assert told["changed"] and told["fetched"] == ["model.safetensors"]
    assert server.asked == [] and [path.name for path in (tmp_path / "model").iterdir()] == ["config.json"]


def test_a_list_without_sizes_asks_the_source(run, server):
    wanted = {name: {"sha256": file["sha256"]} for name, file in WANTED.items()}
    assert run(f"{server.url}/k3", wanted)["fetched_bytes"] == len(BIG) + 2


def test_a_record_goes_elsewhere_where_the_storage_is_read_only(run, tmp_path, monkeypatch):
    folder = put(tmp_path / "model", config__json=b"{}", model__safetensors=BIG)
    real = proved_files.tempfile.mkstemp

    def mkstemp(dir, prefix):  # root writes past any mode, so the refusal is played
        if dir == folder:
            raise OSError(30, "Read-only file system")
        return real(dir=dir, prefix=prefix)

    monkeypatch.setattr(proved_files.tempfile, "mkstemp", mkstemp)
    run()
    assert not (folder / proved_files.RECORD_NAME).exists()
    assert len(list((tmp_path / "records").iterdir())) == 1
    assert run()["hashed_bytes"] == 0


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema_version": 9}', '{"schema_version": 1, "files": []}'])
def test_a_record_that_cannot_be_read_is_none(tmp_path, text):
    path = tmp_path / "record"
    path.write_text(text, encoding="utf-8")
    assert proved_files.read_record([tmp_path / "absent", path]) == {"revision": None, "files": {}}


def test_sources_that_are_none(run):
    with pytest.raises(proved_files.FilesError, match="expected an absolute path on the host, or http"):
        run("huggingface.co/moonshotai/Kimi-K3")
    with pytest.raises(proved_files.FilesError, match="an empty list"):
        run(wanted={})


def test_the_snapshot_shows_what_is_proved_as_the_controller_computes_it(run, tmp_path):
    folder = put(tmp_path / "model", config__json=b"{}", model__safetensors=BIG)
    run()
    seen = weights_probe.weights(Tree(tmp_path / "model").probe(), "/")
    text = json.dumps({"schema_version": 1, "files": WANTED})
    assert seen["proved"] == parse_manifest(text, "m").digest()
    assert seen["revision"] == "v1"
    assert seen["checksums"] == {name: file["sha256"] for name, file in WANTED.items()}
    (folder / "config.json").write_bytes(b"{ }")
    seen = weights_probe.weights(Tree(tmp_path / "model").probe(), "/")
    assert seen["proved"] != parse_manifest(text, "m").digest() and "config.json" not in seen["checksums"]
