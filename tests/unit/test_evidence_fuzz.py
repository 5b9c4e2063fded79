"""Random strings shaped like tokens, in random fields of every format: none may be in a file that is written."""

import base64
import json
import random
import string
import time

import pytest
import yaml

from kimi_runbook.evidence import Part, Pseudonyms, Redactor, freeze, scan_text

ALNUM = string.ascii_letters + string.digits
KINDS = {
    "alnum": lambda rng: "".join(rng.choices(ALNUM, k=rng.randint(24, 64))),
    "urlsafe": lambda rng: base64.urlsafe_b64encode(rng.randbytes(rng.randint(24, 48))).decode().rstrip("="),
    "base64": lambda rng: base64.b64encode(rng.randbytes(rng.randint(24, 48))).decode(),
    "lower": lambda rng: "".join(rng.choices(string.ascii_lowercase + string.digits, k=rng.randint(32, 48))),
    "hex": lambda rng: rng.randbytes(rng.choice((16, 20, 24, 32))).hex(),
    "like-a-symbol": lambda rng: "_Z7aAD1EwJl1h1Nh" + "".join(rng.choices(ALNUM, k=22)),  # Itanium's _Z and a length
    "hf": lambda rng: "hf_" + "".join(rng.choices(string.ascii_letters, k=34)),
    "github": lambda rng: "ghp_" + "".join(rng.choices(ALNUM, k=36)),
    "aws": lambda rng: "AKIA" + "".join(rng.choices(string.ascii_uppercase + "234567", k=16)),
    "jwt": lambda rng: ".".join(
        base64.urlsafe_b64encode(data).decode().rstrip("=")
        for data in (b'{"alg":"HS256"}', b'{"sub":"%d"}' % rng.getrandbits(40), rng.randbytes(32))
    ),
}
WORDS = ("worker", "replica", "mirror", "note", "site", "cache", "value", "data", "label", "extra", "info")


def text_fields(rng, token):
    word, other = rng.choice(WORDS), rng.choice(WORDS)
    return rng.choice(
        (
            f"2026-11-30T10:00:00 INFO {word} {token} {other}",
            f"(Worker pid=1) ERROR [core.py:1] {word}={token}, {other}=3",
            f"{word}: {token}",
            f'{{"{word}": "{token}", "{other}": 1}}',
            f"--{word} {token} --{other}",
            f"--{word}={token}",
            f"https://{word}.example/{token}/{other}?x=1",
            f"https://{word}.example/x?{other}={token}&y=2",
            f"https://{token}@{word}.example/",
            f"Environment=SITE_{word.upper()}={token} NCCL_NET=IB",
            f"docker run -e SITE_{word.upper()}={token} image",
            f"{word}('{token}', \"{other}\")",
            f"[{token}] <{other}>",
            f"X-{word.title()}: {token}",
            f"ValueError: {word} {token!r} is not a {other}",
        )
    )


def document(rng, tokens):
    """Return a nested document with the tokens at random places, as keys of labels too."""
    root = {"name": "x", "items": []}
    for token in tokens:
        place = rng.randrange(5)
        word = rng.choice(WORDS)
        if place == 0:
            root.setdefault("labels", {})[f"{word}-{len(root['items'])}"] = token
        elif place == 1:
            root["items"].append({word: {"deep": [1, token, True]}})
        elif place == 2:
            root["items"].append({"env": [f"SITE_{word.upper()}={token}", "NCCL_NET=IB"]})
        elif place == 3:
            root["items"].append({"args": ["serve", f"--{word}", token, f"--{word}={token}"]})
        else:
            root["items"].append({"message": f"failed with {token} at {word}"})
    return root


@pytest.mark.parametrize("seed", range(6))
def test_no_token_shaped_string_reaches_a_file(seed, tmp_path):
    rng = random.Random(seed)  # noqa: S311 - repeatable, not secret
    tokens = [KINDS[kind](rng) for kind in KINDS for _ in range(80)]
    rng.shuffle(tokens)
    logs, rest = tokens[:400], tokens[400:]
    variables = "\n".join(f"SITE_{rng.choice(WORDS).upper()}={token}" for token in rest[:80])
    parts = [
        Part(name="engine.log", text="\n".join(text_fields(rng, token) for token in logs)),
        Part(name="inspect.json", text=json.dumps(document(rng, rest[80:200])), form="json"),
        Part(name="pods.yml", text=yaml.safe_dump(document(rng, rest[200:])), form="yaml"),
        Part(name="environment.txt", text=variables, form="env"),
        Part(name="missing.txt", text=None, reason=f"exit 1: {rest[0]}"),
        Part(name="cut.txt", text="x", notes=(f"exit 2: bad {rest[1]}",)),
    ]
    frozen = freeze(tmp_path / "k3-a", parts, Redactor(Pseudonyms(rng.randbytes(32))))
    assert set(frozen.kept) == {"engine.log", "inspect.json", "pods.yml", "environment.txt", "cut.txt"}
    written = "\n".join(path.read_text() for path in (tmp_path / "k3-a").iterdir())
    assert [token for token in tokens if token in written or token.rstrip("=") in written] == []


REPEATED = (
    *(
        "-",
        '"',
        "a",
        "\n",
        '\\"',
        "key=x, ",
        "password: ",
        "://a:",
        "token=['",
        "-e ",
        "curl ",
        "docker login ",
        "a.b-c_",
    ),
    *(
        "-----BEGIN RSA PRIVATE KEY-----\n",
        '"token": "',
        "authorization: ",
        "machine x login ",
        "--api-key a ",
        "a@b.c ",
    ),
    *("Environment=A=b \\\n", "ab12ab12ab12ab12ab12ab12ab12ab12 ", "eyJaaaaaaaa."),
)


@pytest.mark.parametrize("piece", REPEATED)
def test_no_text_takes_longer_than_its_length_allows(piece):
    """A log is written by others: one that makes a rule go back over it again and again must not stop a run."""
    text = piece * (60_000 // len(piece))
    begun = time.process_time()
    redacted = Redactor(Pseudonyms(b"k" * 32)).redact_all({"engine.log": (text, "text")})["engine.log"]
    scan_text(redacted, "engine.log")
    scan_text(text, "engine.log")
    assert time.process_time() - begun < 5  # about 0.2 s; a rule that goes back takes minutes
