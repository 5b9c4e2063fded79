"""What may leave a host: variables that steer the engine, and text with what looks like a secret blotted out.

Runs on the node, which has no library, so the patterns stand in kimi_runbook/environment.py as well; a unit test holds
them together.
"""

from __future__ import annotations

import re

# Only names that steer the engine leave the container; anything else could be a secret.
ENGINE_ENV = re.compile(
    r"(NCCL|UCX|GLOO|VLLM|CUDA|NVIDIA|TORCH|TORCHDYNAMO|PYTORCH|OMP|TP|MASTER)_[A-Z0-9_]+|HF_HUB_OFFLINE"
)
SECRET_NAME = re.compile(
    r"KEY|(?<!MAX_)(?<!NUM_)TOKEN(?!IZ|S_PER)|SECRET|PASSW|PASSPHRASE|PASS$|CREDENTIAL|AUTH", re.IGNORECASE
)
SECRET_OPTIONS = ("--api-key", "--hf-token")
NOT_SHOWN = "(not shown)"

# Kernel parameters whose values bear on GPUs, RDMA, memory and boot; the value of any other is not shown.
_KERNEL_PARAMETER = re.compile(
    r"(intel_|amd_|arm-smmu)?[\w.-]*iommu[\w.]*|pci|pcie_\w+|nvidia[\w.-]*|nouveau[\w.]*|mlx5\w*[\w.]*|modprobe\.blacklist"
    r"|rd\.driver\.\w+|module_blacklist|module\.\w+|lockdown|(default_)?hugepage(s|sz)|transparent_hugepage"
    r"|numa_balancing|mitigations|init_on_\w+|isolcpus|nohz_full|processor\.\w+|intel_idle\.\w+|cgroup\w*"
    r"|systemd\.unified_cgroup_hierarchy|memhp_default_state|crashkernel|console|BOOT_IMAGE",
    re.IGNORECASE,
)
_KERNEL_FLAG = re.compile(r"[a-z0-9_.-]{1,24}")

# Shapes of secrets in free text, wherever they turn up.
_SHAPES = (
    re.compile(r"(?<=://)[^/\s:@\"']*:[^/\s@\"']+(?=@)"),  # user:password in a URL
    re.compile(r"(?i)(?<=authorization: )(?!\(not shown)\S+( \S+)?|(?<=bearer )[\w.~+/=-]{8,}"),
    re.compile(r"\b(hf|ghp|gho|ghs|github_pat|glpat|xox[abps]|nvapi|sk|pk)[-_][A-Za-z0-9_-]{16,}"),
    re.compile(r"\b(AKIA|ASIA)[A-Z0-9]{16}\b"),
    re.compile(r"\beyJ[\w-]{8,}\.[\w-]{4,}(\.[\w-]*)?"),
    re.compile(r"(?i)((?<=token=)|(?<=password=)|(?<=api_key=)|(?<=api-key=)|(?<=secret=))(?!\(not shown)[^\s&\"']+"),
)
# The same where what comes before tells it, at whatever length and however plain: the first group stays.
_AFTER = (
    re.compile(
        r"""(?i)((?:password|passwd|secret|api[_-]?key|hf[_-]token)["']?\s*:\s*["']?)(?!\(not shown)[^\s"',}]+"""
    ),
    re.compile(r"(?i)(\blogin\s+\S+\s+password\s+)(?!\(not shown)\S+"),  # netrc
    re.compile(r"(?i)(--[\w-]*(?:api-key|token|password|secret)[ =])(?!\(not shown)[^\s-]\S*"),
    re.compile(r"(\s(?:-u|--user)[ =]?[^\s:]+:)(?!\(not shown)(?!\d+(?:\s|$))\S+"),  # curl; docker's uid:gid stays
)
_WORD = re.compile(r"[A-Za-z0-9_+-]{20,}")
_BASE64 = re.compile(r"[A-Za-z0-9+/]{24,}")
_UUID = re.compile(r"((GPU|MIG|NIC)-)?[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}")
_HEX = re.compile(r"[0-9a-f]+|[0-9A-F]+")
# Kinds of characters (digits, lower case, upper case) to the changes between them, as a share of the length, from which
# a word counts as random. Drawn at random, they change in 0.6 of the places, 0.4 without capitals, 0.5 without digits;
# words joined by capitals change in up to 0.36 of them (GrdmaPciTopoCheckOverride). Of tokens drawn in tests one in
# some thousands is taken for a name; what is known by its place or prefix is hidden whatever it looks like.
_CHANGES = {"dlu": 0.31, "dl": 1 / 8, "lu": 2 / 5}
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")


def arguments(args):
    """Return command-line arguments without the values of secret options and of ``NAME=value`` with a secret's name."""
    kept, hiding = [], False
    for argument in args:
        name, equals, _ = argument.partition("=")
        if argument.startswith("-"):
            hiding = argument in SECRET_OPTIONS
        if equals and (name in SECRET_OPTIONS or (_VARIABLE.fullmatch(name) and SECRET_NAME.search(name))):
            kept.append(f"{name}={NOT_SHOWN}")
        else:
            kept.append(NOT_SHOWN if hiding and argument not in SECRET_OPTIONS else argument)
    return kept


def environment(pairs):
    """Return the variables of ``NAME=value`` pairs that steer the engine and are no secret, sorted by name."""
    named = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    return {
        name: text(value)
        for name, value in sorted(named.items())
        if ENGINE_ENV.fullmatch(name) and not SECRET_NAME.search(name)
    }


def kernel_command_line(line):
    """Return a kernel command line; only known parameters show their values."""
    words = []
    for word in line.split():
        name, equals, _ = word.partition("=")
        if equals:
            words.append(word if _KERNEL_PARAMETER.fullmatch(name) else f"{name[:40]}={NOT_SHOWN}")
        else:
            words.append(word if _KERNEL_FLAG.fullmatch(word) else NOT_SHOWN)
    return text(" ".join(words))


def text(value):
    """Return free text with everything that has the shape of a secret blotted out."""
    for shape in _SHAPES:
        value = shape.sub(NOT_SHOWN, value)
    for shape in _AFTER:
        value = shape.sub(rf"\1{NOT_SHOWN}", value)
    return _WORD.sub(_random, _BASE64.sub(_slashed, value)) if len(value) >= 20 else value


def _slashed(match):
    """Blot out base64 that holds slashes: what lies between them is too short to tell, and no path changes so often."""
    parts = [_kinds(part) for part in match[0].split("/")]
    kinds = [kind for told, _ in parts for kind in told]
    changes = sum(count for _, count in parts)
    return NOT_SHOWN if len(parts) > 1 and len(set(kinds)) == 3 and changes * 5 >= len(kinds) * 2 else match[0]


def _kinds(word):
    """Return the kind of each letter and digit of a word, and how often it changes from one to the next."""
    kinds = ["d" if c.isdigit() else "u" if c.isupper() else "l" for c in word if c.isalnum()]
    return kinds, sum(left != right for left, right in zip(kinds, kinds[1:]))


def _random(match):
    """Blot out a word that looks drawn at random: letters, capitals and digits, changing often.

    Names of classes and models change rarely, digests and UUIDs are hexadecimal, constants have no lower case, and
    names of packages and kernels are short between their separators.
    """
    word = match[0]
    if _UUID.fullmatch(word) or _HEX.fullmatch(word):
        return word
    told, changes = _kinds(word)
    share = _CHANGES.get("".join(sorted(set(told))))
    plain = len(told) >= 24 and not {"-", "_"} & set(word)
    return NOT_SHOWN if share and (plain or len(set(told)) == 3) and changes >= share * len(told) else word


def value(found, name=""):
    """Return a JSON value with secrets blotted out: everything below a secret's name, and every text by its shape."""
    if isinstance(found, dict):
        return {str(key): value(item, str(key)) for key, item in found.items()}
    if name and SECRET_NAME.search(name) and found not in (None, True, False):
        return NOT_SHOWN
    if isinstance(found, list):
        return [value(item) for item in found]
    return text(found) if isinstance(found, str) else found


def shapes(found):
    """Return a JSON value with every text in it blotted out by shape alone, whatever the name above it."""
    if isinstance(found, dict):
        return {key: shapes(item) for key, item in found.items()}
    if isinstance(found, (list, tuple)):
        return [shapes(item) for item in found]
    return text(found) if isinstance(found, str) and len(found) >= 12 else found
