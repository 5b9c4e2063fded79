"""The model's files on a host, in constructed folders laid out as huggingface_hub lays them out."""

import weights_probe
from host_tree import Tree

REVISION = "0123456789abcdef0123456789abcdef01234567"
OTHER = "f" * 40
SUM = "c2914767605584b6d8f45686b82de173ecc99e781897aa3d0a66dacd72c51ae1"
PATH = "/var/lib/models/kimi-k3"


def a_model(tree: Tree, path: str = PATH) -> None:
    tree.put(f"{path}/config.json", "{}")
    tree.put(f"{path}/model-00001-of-00002.safetensors", "x" * 1000)
    tree.put(f"{path}/.cache/huggingface/lock", "hidden")
    tree.say(f"df {path}", "     Avail     IFree\n  5000000000   -\n")


def metadata(tree: Tree, name: str, revision: str, etag: str) -> None:
    tree.put(f"{PATH}/.cache/huggingface/download/{name}.metadata", f"{revision}\n{etag}\n1764500000.0\n")


def test_a_downloaded_folder(tmp_path):
    tree = Tree(tmp_path)
    a_model(tree)
    metadata(tree, "config.json", REVISION, "a" * 40)  # a small file: git's hash, no SHA-256
    metadata(tree, "model-00001-of-00002.safetensors", REVISION, SUM)
    probe = tree.probe()
    assert weights_probe.weights(probe, PATH) == {
        "path": PATH,
        "revision": REVISION,
        "files": 2,
        "bytes": 1002,
        "checksums": {"model-00001-of-00002.safetensors": SUM},
        "proved": None,
        "free_bytes": 5000000000,
    }
    assert probe.errors == []


def test_files_of_two_revisions_are_mixed(tmp_path):
    tree = Tree(tmp_path)
    a_model(tree)
    metadata(tree, "config.json", REVISION, SUM)
    metadata(tree, "other.json", OTHER, SUM)
    assert weights_probe.weights(tree.probe(), PATH)["revision"] == "mixed"


def test_the_cache_names_revision_and_checksums(tmp_path):
    tree = Tree(tmp_path)
    path = f"/hub/models--moonshotai--Kimi-K3/snapshots/{REVISION}"
    tree.put(f"/hub/models--moonshotai--Kimi-K3/blobs/{SUM}", "x" * 7)
    tree.link(f"{path}/model.safetensors", f"../../blobs/{SUM}")
    seen = weights_probe.weights(tree.probe(), path)
    assert (seen["revision"], seen["files"], seen["bytes"]) == (REVISION, 1, 7)
    assert seen["checksums"] == {"model.safetensors": SUM}
    assert seen["free_bytes"] is None


def test_a_list_of_sums_and_a_revision_beside_the_files(tmp_path):
    tree = Tree(tmp_path)
    a_model(tree)
    tree.put(f"{PATH}/SHA256SUMS", f"{SUM}  ./config.json\nnot a sum\n")
    tree.put(f"{PATH}/REVISION", "v2\n")
    seen = weights_probe.weights(tree.probe(), PATH)
    assert (seen["revision"], seen["checksums"]) == ("v2", {"config.json": SUM})


def test_nothing_asked_is_no_answer(tmp_path):
    assert weights_probe.weights(Tree(tmp_path).probe(), "") is None


def test_nothing_there_is_no_file(tmp_path):
    probe = Tree(tmp_path).probe()
    seen = weights_probe.weights(probe, "/nothing/there")
    assert (seen["files"], seen["bytes"], seen["revision"]) == (0, 0, None)
    assert probe.errors == []


def test_a_link_whose_blob_is_gone_is_no_file(tmp_path):
    tree = Tree(tmp_path)
    a_model(tree)
    tree.link(f"{PATH}/model-00002-of-00002.safetensors", "../blobs/gone")
    assert weights_probe.weights(tree.probe(), PATH)["files"] == 2
