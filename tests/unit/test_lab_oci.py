import hashlib
import io
import json
import os
import tarfile
from pathlib import Path

import pytest

from lab.oci import (
    Blob,
    blob_of,
    config_document,
    index_document,
    manifest_document,
    size_of,
    tree_entries,
    write_layer,
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "pkg").mkdir(parents=True)
    (root / "pkg" / "a.py").write_text("x = 1\n")
    (root / "pkg" / "tool").write_text("#!/bin/sh\n")
    (root / "pkg" / "tool").chmod(0o700)
    (root / "link").symlink_to("pkg/a.py")
    return root


def layer(tree: Path) -> bytes:
    stream = io.BytesIO()
    write_layer(tree_entries(tree, "usr/lib/x"), stream)
    return stream.getvalue()


def test_a_layer_depends_on_content_alone(tree: Path) -> None:
    first = layer(tree)
    os.utime(tree / "pkg" / "a.py", (0, 0))
    (tree / "pkg" / "a.py").chmod(0o600)
    assert layer(tree) == first
    (tree / "pkg" / "a.py").write_text("x = 2\n")
    assert layer(tree) != first


def test_a_layer_has_parents_first_and_plain_modes(tree: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(layer(tree))) as archive:
        members = {member.name: member for member in archive.getmembers()}
    names = list(members)
    assert names[:4] == ["usr", "usr/lib", "usr/lib/x", "usr/lib/x/link"]
    assert members["usr/lib/x/link"].linkname == "pkg/a.py"
    assert (members["usr/lib/x/pkg/a.py"].mode, members["usr/lib/x/pkg/tool"].mode) == (0o644, 0o755)
    assert {(member.uid, member.gid) for member in members.values()} == {(0, 0)}


def test_size_is_close_to_the_stream(tree: Path) -> None:
    assert 0 <= len(layer(tree)) - size_of(tree_entries(tree, "usr/lib/x")) <= 1 << 20


def test_documents_are_deterministic_and_chained() -> None:
    layers = [Blob("sha256:aa", 10), Blob("sha256:bb", 20)]
    config = config_document(
        layers, architecture="amd64", entrypoint=["vllm", "serve"], env=["A=1"], labels={"b": "1", "a": "2"}
    )
    again = config_document(
        layers, architecture="amd64", entrypoint=["vllm", "serve"], env=["A=1"], labels={"a": "2", "b": "1"}
    )
    assert config == again
    content = json.loads(config)
    assert content["config"]["Entrypoint"] == ["vllm", "serve"]
    assert content["rootfs"]["diff_ids"] == ["sha256:aa", "sha256:bb"]  # layers are not compressed

    manifest = manifest_document(blob_of(config), layers)
    assert json.loads(manifest)["config"]["digest"] == f"sha256:{hashlib.sha256(config).hexdigest()}"

    index = json.loads(index_document({"arm64": Blob("sha256:dd", 2), "amd64": blob_of(manifest)}))
    assert [entry["platform"]["architecture"] for entry in index["manifests"]] == ["amd64", "arm64"]
    assert index["manifests"][0]["digest"] == blob_of(manifest).digest
    assert index["mediaType"] == "application/vnd.oci.image.index.v1+json"
