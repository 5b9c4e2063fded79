#!/usr/bin/python
"""Bring a model's files to one host, or only prove those that are there."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_weights
short_description: Bring a model's files to a host and prove every one of them once
description:
  - Holds a folder to a list of files with SHA-256. What is missing is fetched from O(source) when one is named; a
    transfer that was cut goes on where it stopped, and a file gets its name only when its sum is right.
  - Sums are remembered beside the files (C(.kimi-proved.json)) with size, time of change and inode, and a file is read
    again only when one of those differs. Where the files lie read-only, the record lies in
    C(/var/lib/kimi-runbook/proved).
  - Nothing is deleted, and files that are not in the list are left alone.
options:
  path:
    description: The folder.
    type: path
    required: true
  files:
    description: Name to C(sha256) and, where known, C(size).
    type: dict
    required: true
  revision:
    description: Revision these files are, kept in the record.
    type: str
    default: ""
  source:
    description: A directory on this host or an HTTP address to fetch missing files from; empty only verifies.
    type: str
    default: ""
  workers:
    description: Files fetched or read at the same time.
    type: int
    default: 4
  attempts:
    description: Attempts without a byte more before a file is given up.
    type: int
    default: 5
author:
  - kimi-runbook authors (@kimi-runbook)
attributes:
  check_mode:
    support: full
    description: Says what would be fetched and read.
  diff_mode:
    support: none
    description: The files are too large to show.
"""

EXAMPLES = r"""
- name: Prove the weights on shared storage
  model_weights:
    path: /srv/models/kimi-k3
    files: {config.json: {size: 1184, sha256: 0ab1...}}
    revision: 4f2c...
"""

RETURN = r"""
fetched:
  description: Files that were fetched.
  returned: success
  type: list
fetched_bytes:
  description: Bytes that came from the source.
  returned: success
  type: int
hashed_bytes:
  description: Bytes of files already there that were read to prove them.
  returned: success
  type: int
remembered:
  description: Files whose sum was known from an earlier run.
  returned: success
  type: int
"""

import os
import threading

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.proved_files import SPARE, FilesError, Store, in_threads, sort_out, source_of

_SHOWN = 5
_LONGEST_WAIT_S = 30


def few(names):
    """Return some names in words, and how many more there are."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def main():
    """Sort out, check the room, fetch, prove, remember."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "files": {"type": "dict", "required": True},
            "revision": {"type": "str", "default": ""},
            "source": {"type": "str", "default": ""},
            "workers": {"type": "int", "default": 4},
            "attempts": {"type": "int", "default": 5},
        },
        supports_check_mode=True,
    )
    try:
        result = run(module.params, check_mode=module.check_mode)
    except (FilesError, OSError) as error:
        module.fail_json(
            msg=f"weights in {module.params['path']}: {error}. What was fetched and proved is kept; correct the cause "
            "and run again."
        )
    module.exit_json(**result)


def run(params, *, check_mode=False, fallback=None):
    """Bring the folder to the list; FilesError says what is in the way."""
    store = Store(params["path"], params["revision"] or None, **({"fallback": fallback} if fallback else {}))
    wanted = params["files"]
    if not wanted:
        raise FilesError("an empty list; expected the model's files (model_weights_manifest)")
    found = sort_out(store.folder, wanted, store.record)
    if found["missing"] and not params["source"]:
        raise FilesError(
            f"{len(found['missing'])} of {len(wanted)} files are missing or of another size "
            f"({few(found['missing'])}), expected all of the list, and no source is named; mount the storage or set "
            "model_weights_source"
        )
    if check_mode:
        pending = found["missing"] + found["unproved"]
        return {
            "changed": bool(pending),
            "fetched": found["missing"],
            "fetched_bytes": 0,
            "hashed_bytes": 0,
            "remembered": len(found["proved"]),
        }
    spoiled = _prove(store, wanted, found["unproved"], params["workers"])
    if spoiled and not params["source"]:
        raise FilesError(
            f"{few(spoiled)}: content differs from the list's sha256, and no source is named; bring the files again "
            "from where they are right, or set model_weights_source"
        )
    fetched = sorted([*found["missing"], *spoiled])
    if fetched:
        _fetch(store, wanted, fetched, params)
    changed = store.settle(wanted)
    return {
        "changed": changed or bool(fetched),
        "fetched": fetched,
        "fetched_bytes": store.fetched_bytes,
        "hashed_bytes": store.hashed_bytes,
        "remembered": len(found["proved"]),
    }


def _prove(store, wanted, names, workers):
    """Read the files nobody has read yet; return those whose content is another."""
    spoiled = []
    for name, digest in in_threads(names, workers, store.hash):
        if isinstance(digest, Exception):
            raise FilesError(f"{name}: {digest}")
        if digest == wanted[name]["sha256"]:
            store.remember(name, digest)
        else:
            spoiled.append(name)
    return sorted(spoiled)


def _fetch(store, wanted, names, params):
    source = source_of(params["source"])
    sizes = {}
    for name in names:
        sizes[name] = source.size(name)
        size = wanted[name].get("size")
        if size is not None and sizes[name] != size:
            raise FilesError(f"{params['source']}: {name} has {sizes[name]} bytes there, expected {size}")
    needed, free = int(store.still_needed(names, sizes) * SPARE), store.room()
    if needed > free:
        raise FilesError(f"{free} bytes free, expected {needed} for {len(names)} files; free space there")
    os.makedirs(store.folder, mode=0o755, exist_ok=True)
    patience = threading.Event()

    def bring(name):
        return store.fetch(
            source,
            name,
            wanted[name]["sha256"],
            params["attempts"],
            lambda failures: patience.wait(min(2**failures, _LONGEST_WAIT_S)),
        )

    failures = []
    for name, result in in_threads(names, params["workers"], bring):
        if isinstance(result, Exception):
            failures.append(f"{name}: {result}")
        else:
            store.remember(name, result)
    store.tidy()
    if failures:
        raise FilesError("; ".join(sorted(failures)[:_SHOWN]))


if __name__ == "__main__":
    main()
