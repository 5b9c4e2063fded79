"""Rules about the engine image: architecture, presence, room for a pull."""

from __future__ import annotations

from kimi_runbook.expected import ExpectedImage
from kimi_runbook.registry import oci_architecture
from kimi_runbook.rules import Case, Check, Outcome, Unknown
from kimi_runbook.rules.service import silent

_GIB = 2**30


def _writable(case: Case) -> Outcome:
    """A file system that an error has made read-only takes no image, no package and no file."""
    runtime = case.snapshot.runtime
    store = runtime.store_path or runtime.root_dir or "the image store"
    if runtime.root_read_only or runtime.read_only:
        place = "/" if runtime.root_read_only else store
        yield case.finding(
            "disk.read_only", observed=f"{place} is mounted read-only", expected="mounted read-write", subject=place
        )
    elif case.complete and None in (runtime.root_read_only, runtime.read_only):
        yield Unknown("runtime: read_only")


def _image(case: Case) -> Outcome:
    """Yield the findings about the image and the file systems it is to lie on."""
    yield from _writable(case)
    wanted = case.expected.image
    if wanted is None:
        return
    machine = case.snapshot.os.arch
    architecture = oci_architecture(machine) if machine else None
    offered = wanted.architectures or tuple(case.lock.image.manifests)
    if architecture is not None and architecture not in offered:
        yield case.finding(
            "image.arch_missing",
            observed=f"{wanted.reference} exists for {', '.join(sorted(offered))}",
            expected=architecture,
            subject=architecture,
        )
        return
    if image_present(case, wanted):
        image = case.snapshot.image
        if image and image.architecture and architecture and image.architecture != architecture:
            yield case.finding(
                "image.architecture", observed=f"an image for {image.architecture}", expected=architecture
            )
        return
    if silent(case):
        yield Unknown("image: present")
        return
    yield from _room(case, wanted)
    yield case.finding("image.absent", observed="not in the host's store", expected=wanted.reference)


def image_present(case: Case, wanted: ExpectedImage) -> bool:
    """Whether the host's store has the pinned digest; the image id proves nothing, only RepoDigests do."""
    image = case.snapshot.image
    return (
        image is not None
        and image.present
        and any(entry.partition("@")[2] == wanted.digest for entry in image.repo_digests)
    )


def _room(case: Case, wanted: ExpectedImage) -> Outcome:
    runtime = case.snapshot.runtime
    store = runtime.store_path or runtime.root_dir or "the image store"
    if runtime.free_bytes is None:
        yield Unknown("runtime: free_bytes")
    elif runtime.free_bytes < wanted.bytes_needed:
        yield case.finding(
            "disk.short",
            observed=f"{store}: {runtime.free_bytes / _GIB:.2f} GiB free",
            expected=f"{wanted.bytes_needed / _GIB:.2f} GiB",
            subject=store,
        )
    if runtime.free_inodes is not None and runtime.free_inodes < wanted.inodes_needed:
        yield case.finding(
            "disk.short",
            observed=f"{store}: {runtime.free_inodes} inodes free",
            expected=f"{wanted.inodes_needed} inodes",
            subject=store,
        )


CHECKS = (Check("image.present", _image),)
