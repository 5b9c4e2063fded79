"""Rules about the container runtime, what is inside the image, and the weights on the host."""

from __future__ import annotations

import re

from kimi_runbook.host_facts import ImageStack
from kimi_runbook.reading import Fields, data_file
from kimi_runbook.rules import Case, Check, Outcome, Unknown
from kimi_runbook.rules.arguments import option
from kimi_runbook.versions import compare_upstream, upstream_of

_TB = 10**12
_CUDA_WHEEL = re.compile(r"-cu(?P<major>\d{2})$")
_CUDA_LIBRARY = re.compile(r"^lib(cudart|cublas|cublasLt|nvrtc|cusparse)\.so\.(?P<major>\d+)")
_NIGHTLY = re.compile(r"\.dev\d|nightly|\+git", re.IGNORECASE)
_DMABUF_MLX5 = "1.25"  # of libmlx5.so.1.25.*: the first with mlx5dv_reg_dmabuf_mr (rdma-core debian/libmlx5-1.symbols)


def _toolkit(case: Case) -> Outcome:
    installed, declared = case.snapshot.runtime.toolkit, {package.name for package in case.expected.packages}
    if installed is None:
        yield Unknown("runtime: toolkit")
        return
    ours = data_file("lock_rules.yml").texts("toolkit_packages")
    others = {
        name: version
        for name, version in installed.items()
        if name in ours and name not in declared and not _same(version, case.lock.toolkit.version)
    }
    for name, version in others.items():
        yield case.finding(
            "runtime.toolkit_mixed", observed=f"{name} {version}", expected=case.lock.toolkit.version, subject=name
        )


def _same(left: str, right: str) -> bool:
    try:
        return upstream_of(left) == upstream_of(right)
    except ValueError:
        return left == right


def silent(case: Case) -> str:
    """Return why Docker, which is there, does not answer; empty where it answers, is not installed or is stopped.

    A stopped or missing Docker has a finding of its own where a role wants it to run.
    """
    unit = case.snapshot.units.get("docker.service")
    told = [error for error in case.snapshot.errors if error.probe.partition(" ")[0] == "docker"]
    running = unit is not None and unit.active == "active"
    declared = any(one.name == "docker.service" for one in case.expected.units)
    if case.snapshot.runtime.docker_version is not None or (unit is not None and not running and declared):
        return ""
    if told:
        return f"{told[0].probe}: {told[0].message or 'no answer'}"
    return "docker.service is active, docker info says no version" if running else ""


def _pair(case: Case) -> Outcome:
    """A Docker that does not answer, versions known for trouble, alone or with a toolkit; one that takes no CDI."""
    if silent(case) and (case.expected.engine or case.expected.image):
        yield case.finding("runtime.silent", observed=silent(case), expected="an answer from Docker")
    docker, cuda = case.snapshot.runtime.docker_version, case.lock.image.cuda is not None
    toolkit = (case.snapshot.runtime.toolkit or {}).get("nvidia-container-toolkit")
    if not cuda:
        return
    if docker is None or case.snapshot.runtime.toolkit is None:
        yield Unknown("runtime: docker_version")
        return
    for note in data_file("lock_rules.yml").each("runtime_notes"):
        only = note.texts("toolkit")
        if _within(docker, note.fields("docker")) and (not only or any(_same(toolkit or "", one) for one in only)):
            yield case.finding(
                "runtime.known_pair",
                observed=f"Docker {docker}" + (f" with toolkit {toolkit}" if only else "") + f" {note.text('note')}",
                expected="a pair nothing is known against",
            )
    if case.snapshot.runtime.cdi_enabled is False:
        yield case.finding("runtime.cdi_off", observed="Docker injects no CDI devices", expected="features.cdi: true")


def _within(version: str, limits: Fields) -> bool:
    """Whether a version lies in a range, both ends included; text that is no version lies in none."""
    since, until = limits.optional_text("since"), limits.optional_text("until")
    try:
        return (since is None or compare_upstream(version, since) >= 0) and (
            until is None or compare_upstream(version, until) <= 0
        )
    except ValueError:
        return False


def is_older(version: str, than: str) -> bool:
    """Whether a version is older than another; text that is no version is not."""
    try:
        return compare_upstream(version, than) < 0
    except ValueError:
        return False


def improvised(stack: ImageStack, cuda: str) -> tuple[str, ...]:
    """Return what in an image speaks for another CUDA major version than the one it is locked for, in words."""
    major = cuda.partition(".")[0]
    found = (
        [f"torch is built for CUDA {stack.torch_cuda}"] if (stack.torch_cuda or major).split(".")[0] != major else []
    )
    wheels = [item for item in stack.python if (match := _CUDA_WHEEL.search(item.name)) and match["major"] != major]
    libraries = [
        item for item in stack.libraries if (match := _CUDA_LIBRARY.match(_name(item.path))) and match["major"] != major
    ]
    found += [f"{item.name} {item.version or ''}".strip() for item in wheels]
    return (*found, *(item.path for item in libraries))


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _stack(case: Case) -> Outcome:
    image, lock = case.snapshot.image, case.lock.image
    stack = None if image is None else image.stack
    if image is None or not image.present:
        return
    if stack is None:
        yield Unknown("image: stack")
        return
    if lock.cuda is not None:
        foreign = improvised(stack, lock.cuda)
        if foreign:
            yield case.finding(
                "image.stack_mixed",
                observed=", ".join(foreign[:4]) + (f" and {len(foreign) - 4} more" if len(foreign) > 4 else ""),
                expected=f"CUDA {lock.cuda} throughout",
                subject=lock.cuda,
            )
        yield from _copies(case, stack)
    for name, version in (("torch", stack.torch), ("vllm", stack.vllm)):
        if version is not None and _NIGHTLY.search(version):
            yield case.finding("image.stack_nightly", observed=f"{name} {version}", expected="a release", subject=name)
    if stack.vllm is not None and stack.vllm.partition("+")[0] != lock.engine.version:
        yield case.finding("image.stack_engine", observed=f"vllm {stack.vllm}", expected=lock.engine.version)


def _copies(case: Case, stack: ImageStack) -> Outcome:
    versions: dict[str, set[str]] = {}
    for library in stack.libraries:
        if library.version is not None:
            versions.setdefault(library.name.partition(".so")[0], set()).add(library.version)
    for name, found in sorted(versions.items()):
        if len(found) > 1 and name != "libcuda":
            yield case.finding(
                "image.stack_copied", observed=f"{name} {', '.join(sorted(found))}", expected="one", subject=name
            )
        if name == "libmlx5" and all(is_older(version, _DMABUF_MLX5) for version in found):
            yield case.finding("image.libmlx5", observed=f"libmlx5 {', '.join(sorted(found))}", expected=_DMABUF_MLX5)
        loaded = case.snapshot.driver.loaded
        if name == "libcuda" and loaded and any(is_older(version, loaded) for version in found):
            yield case.finding(
                "image.compat_libcuda", observed=f"libcuda {', '.join(sorted(found))}", expected=f"{loaded}, injected"
            )


def _weights(case: Case) -> Outcome:
    """What lies where the engine looks for the model; an engine with dummy weights needs none."""
    engine, weights = case.expected.engine, case.snapshot.weights
    model = data_file("models.yml").optional_fields(case.lock.model.name)
    if engine is None or case.simulated or option(engine.args or (), "--load-format") == "dummy":
        return
    if weights is None:
        yield Unknown("weights")
        return
    needed = model.integer("checkpoint_bytes") if model else 0
    there = weights.bytes or 0
    if not weights.files:
        yield case.finding(
            "weights.missing", observed=f"{weights.path}: no files", expected=case.lock.model.name, subject=weights.path
        )
    elif there < needed:
        yield case.finding(
            "weights.incomplete",
            observed=f"{weights.path}: {weights.files} files, {there / _TB:.3f} TB",
            expected=f"{needed / _TB:.3f} TB",
            subject=weights.path,
        )
    if weights.files and weights.revision not in (None, case.lock.model.revision):
        yield case.finding(
            "weights.revision",
            observed=f"{weights.path}: revision {weights.revision}",
            expected=case.lock.model.revision,
            subject=weights.path,
        )
    elif weights.files and weights.revision is None:
        yield Unknown("weights: revision")
    if weights.free_bytes is None and there < needed:
        yield Unknown("weights: free_bytes")
    elif weights.free_bytes is not None and there + weights.free_bytes < needed:
        yield case.finding(
            "weights.room",
            observed=f"{weights.path}: {weights.free_bytes / _TB:.3f} TB free",
            expected=f"{(needed - there) / _TB:.3f} TB",
            subject=weights.path,
        )


def _proved(case: Case) -> Outcome:
    """Whether every file of the inventory's list was hashed here and has not changed since."""
    wanted, weights = case.expected.weights, case.snapshot.weights
    if wanted is None:
        return
    if weights is None:
        yield Unknown("weights: proved")
    elif weights.proved != wanted.proved:
        seen = f"files with the digest {weights.proved[:12]} are proved" if weights.proved else "no file is proved"
        yield case.finding(
            "weights.unproved",
            observed=f"{weights.path}: {seen}",
            expected=f"the list's {wanted.files} files, {wanted.proved[:12]}",
            subject=weights.path,
        )


CHECKS = (
    Check("runtime.toolkit", _toolkit),
    Check("runtime.pair", _pair),
    Check("image.stack", _stack),
    Check("weights", _weights),
    Check("weights.proved", _proved),
)
