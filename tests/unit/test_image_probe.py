"""The image's stack, read from constructed layer directories in the layout of vllm/vllm-openai."""

import json

import image_probe
import pytest
from host_tree import Tree

SITE = "usr/local/lib/python3.12/dist-packages"
REFERENCE = "registry.example/vllm/vllm-openai@sha256:2"
BASE = {
    f"{SITE}/torch-2.13.0+cu130.dist-info/METADATA": "",
    f"{SITE}/torch/version.py": "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\n",
    f"{SITE}/nvidia_nccl_cu13-2.30.7.dist-info/METADATA": "",
    f"{SITE}/nvidia/nccl/lib/libnccl.so.2": "",
    f"{SITE}/vllm-0.32.0.dist-info/METADATA": "",
    f"{SITE}/requests-2.32.0.dist-info/METADATA": "",
    "usr/lib/x86_64-linux-gnu/libmlx5.so.1.25.56.0": "",
    "usr/lib/x86_64-linux-gnu/libz.so.1.3": "",
}


def layers(tree: Tree, *contents: dict[str, str]) -> list[str]:
    """Write layers, the top one first, and return their folders as the host names them."""
    folders = [f"/var/lib/docker/overlay2/{number}/diff" for number in range(len(contents))]
    for folder, content in zip(folders, contents, strict=True):
        (tree.root / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
        for name, text in content.items():
            tree.put(f"{folder}/{name}", text)
    return folders


def image(tree: Tree, folders: list[str]) -> None:
    data = {"UpperDir": folders[0], "LowerDir": ":".join(folders[1:]), "MergedDir": "/merged"}
    row = [{"RepoDigests": [REFERENCE], "GraphDriver": {"Name": "overlay2", "Data": data}}]
    tree.say(f"docker image inspect {REFERENCE}", json.dumps(row))


def test_the_stack_of_one_layer(tmp_path):
    tree = Tree(tmp_path)
    image(tree, layers(tree, BASE))
    probe = tree.probe()
    assert image_probe.stack(probe, REFERENCE) == {
        "python": [
            {"name": "nvidia-nccl-cu13", "version": "2.30.7"},
            {"name": "torch", "version": "2.13.0+cu130"},
            {"name": "vllm", "version": "0.32.0"},
        ],
        "libraries": [
            {
                "path": "/usr/lib/x86_64-linux-gnu/libmlx5.so.1.25.56.0",
                "name": "libmlx5.so.1.25.56.0",
                "version": "1.25.56.0",
            },
            {"path": f"/{SITE}/nvidia/nccl/lib/libnccl.so.2", "name": "libnccl.so.2", "version": None},
        ],
        "torch": "2.13.0+cu130",
        "torch_cuda": "13.0",
        "vllm": "0.32.0",
        "nccl": "2.30.7",
    }
    assert probe.errors == []


def test_a_layer_on_top_replaces_and_deletes(tmp_path):
    tree = Tree(tmp_path)
    top = {
        f"{SITE}/.wh.vllm-0.32.0.dist-info": "",
        f"{SITE}/vllm-0.33.1.dev7.dist-info/METADATA": "",
        f"{SITE}/nvidia_nccl_cu12-2.27.3.dist-info/METADATA": "",
        "usr/local/lib/libnccl.so.2.27.3": "",
    }
    image(tree, layers(tree, top, BASE))
    seen = image_probe.stack(tree.probe(), REFERENCE)
    assert (seen["vllm"], seen["torch_cuda"], seen["nccl"]) == ("0.33.1.dev7", "13.0", "2.27.3")
    assert {row["name"]: row["version"] for row in seen["python"]} == {
        "nvidia-nccl-cu12": "2.27.3",
        "nvidia-nccl-cu13": "2.30.7",
        "torch": "2.13.0+cu130",
        "vllm": "0.33.1.dev7",
    }
    assert "/usr/local/lib/libnccl.so.2.27.3" in [row["path"] for row in seen["libraries"]]


def test_without_layers_the_running_container_shows_its_files(tmp_path):
    tree = Tree(tmp_path)
    tree.say("docker image inspect", json.dumps([{"RepoDigests": [REFERENCE], "GraphDriver": None}]))
    for name, text in BASE.items():
        tree.put(f"/proc/77/root/{name}", text)
    assert image_probe.stack(tree.probe(), REFERENCE, pid=77)["torch"] == "2.13.0+cu130"


@pytest.mark.parametrize(
    "driver",
    [
        pytest.param(None, id="containerd-store"),
        pytest.param({"Data": {"UpperDir": "/gone", "LowerDir": ""}}, id="layers-not-there"),
        pytest.param("text", id="of-another-shape"),
    ],
)
def test_an_image_without_files_is_unknown_and_says_so(tmp_path, driver):
    tree = Tree(tmp_path)
    tree.say("docker image inspect", json.dumps([{"GraphDriver": driver}]))
    probe = tree.probe()
    assert image_probe.stack(probe, REFERENCE) is None
    assert [error["probe"] for error in probe.errors] == ["image stack"]


def test_an_absent_image_has_no_stack_and_no_error(tmp_path):
    tree = Tree(tmp_path)
    tree.say("docker image inspect", "[]\n", rc=1, err="Error response from daemon: No such image: x\n")
    probe = tree.probe()
    assert image_probe.stack(probe, REFERENCE) is None
    assert probe.errors == []
