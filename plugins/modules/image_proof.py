#!/usr/bin/python
"""Call one function of a library inside the service's image, started the way the service starts it."""

from __future__ import annotations

DOCUMENTATION = r"""
module: image_proof
short_description: Prove that a container started as the service is can initialise CUDA
description:
  - Runs the given C(docker run), which has Python in place of the engine, and reads what C(cuInit(0)) returned.
    nvidia-smi passes on hosts where this fails, since it needs no C(nvidia_uvm) (NVIDIA/gpu-operator#2685).
  - Bind mounts whose source is not there yet are left out and named, so that the proof can be had before every settings
    file is written.
options:
  argv:
    description: The whole command.
    type: list
    elements: str
    required: true
  symbol:
    description: The function that is called, for messages.
    type: str
    default: cuInit
  timeout_s:
    description: Seconds it may take.
    type: int
    default: 120
author:
  - kimi-runbook authors (@kimi-runbook)
attributes:
  check_mode:
    support: full
    description: Starts nothing.
  diff_mode:
    support: none
    description: Nothing changes.
"""

EXAMPLES = r"""
- name: Prove that CUDA initialises
  image_proof:
    argv: [docker, run, --rm, --name, proof, --entrypoint, python3, IMAGE, -c, "...", libcuda.so.1, cuInit]
"""

RETURN = r"""
proved:
  description: Whether the function returned 0.
  returned: success
  type: bool
skipped_because:
  description: Why nothing could be proved; empty when it was.
  returned: success
  type: str
left_out:
  description: Mounts whose source is not there.
  returned: success
  type: list
"""

import os
import re
import subprocess

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.command_run import TooMuchOutputError, run

_RESULT = re.compile(r"^result (-?\d+)$", re.MULTILINE)
# CUDA Driver API, cuInit and CUresult.
MEANINGS = {
    3: "not initialised: nvidia_uvm is missing or its device node is not in the container",
    100: "no device: the container got none (CDI specification, engine_devices)",
    101: "invalid device",
    802: "system not ready: NVLink fabric or fabric manager is not up",
    803: "libcuda and the loaded driver are of different versions (CDI specification older than the driver)",
    804: "forward compatibility on a GPU that has none: the image's own libcuda was loaded",
    999: "unknown error: read dmesg for NVRM",
}


class ProofError(Exception):
    """What came instead of a 0."""


def without_missing_mounts(argv):
    """Return ``(argv, sources left out)``: Docker refuses a bind mount whose source does not exist."""
    kept, left_out, words = [], [], iter(argv)
    for word in words:
        if word != "--mount":
            kept.append(word)
            continue
        mount = next(words, "")
        told = re.search(r"(?:^|,)(?:source|src)=([^,]+)", mount)
        if told and not os.path.exists(told[1]):
            left_out.append(told[1])
        else:
            kept += [word, mount]
    return kept, left_out


def judge(rc, out, err, symbol):
    """Return why nothing could be proved, empty when it was; ProofError where the answer is no."""
    told = _RESULT.search(out)
    if told and int(told[1]) == 0 and rc == 0:
        return ""
    if told:
        meaning = MEANINGS.get(int(told[1]), "see CUresult in the CUDA Driver API")
        raise ProofError(f"{symbol}(0) returned {told[1]}, expected 0: {meaning}")
    if rc == 127 and "python3" in err:
        return "the image has no python3"
    last = (err.strip() or out.strip() or "no output").splitlines()[-1]
    raise ProofError(f"exit {rc}, {last}; expected {symbol}(0) to return 0")


def main():
    """Remove what an earlier proof left, run, judge."""
    module = AnsibleModule(
        argument_spec={
            "argv": {"type": "list", "elements": "str", "required": True},
            "symbol": {"type": "str", "default": "cuInit"},
            "timeout_s": {"type": "int", "default": 120},
        },
        supports_check_mode=True,
    )
    params = module.params
    argv, left_out = without_missing_mounts(params["argv"])
    name = argv[argv.index("--name") + 1]
    if module.check_mode:
        module.exit_json(changed=False, proved=False, skipped_because="check mode", left_out=left_out)
    docker = argv[0]
    try:
        done = run([docker, "rm", "--force", name], 30)  # a killed run may have left it; absent is fine
        done = run(argv, params["timeout_s"])
        reason = judge(done.returncode, done.stdout, done.stderr, params["symbol"])
    except (ProofError, TooMuchOutputError, OSError, subprocess.TimeoutExpired) as error:
        if isinstance(error, subprocess.TimeoutExpired):
            run([docker, "rm", "--force", name], 30)
            error = f"no answer within {params['timeout_s']} s"
        module.fail_json(
            msg=f"container started as the service is: {error}. Compare the CDI specification with the loaded driver, "
            "and /dev/nvidia-uvm with the modules; nothing was left running."
        )
    module.exit_json(changed=False, proved=not reason, skipped_because=reason, left_out=left_out)


if __name__ == "__main__":
    main()
