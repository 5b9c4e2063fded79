"""Redaction of text whose format is not known: logs, command lines, units, anything a command prints. Pure.

Rules that know their place go first (keys in PEM, URLs, headers, netrc, options, assignments), then known shapes of
tokens, then whatever looks random and is not public.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial

from kimi_runbook.environment import SECRET_OPTIONS
from kimi_runbook.evidence import rules
from kimi_runbook.evidence.people import hide_people
from kimi_runbook.evidence.public import hex_spans, public_blocks, public_spans
from kimi_runbook.evidence.randomness import decoded, random_spans
from kimi_runbook.reading import data_file

Tag = Callable[[str, str], str]
"""Gives the stand-in of a value: ``tag("secret", value)``."""

_PEM = re.compile(
    r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
    r"(?:[\s\S]{0,16384}?-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----|(?:.*\n?){1,100})"
)
_USERINFO = re.compile(
    r"\b([a-zA-Z][a-zA-Z0-9+.-]*://)(?:([^\s/@:\"'<>\[]*):(?!\d+/)([^\s@\"'<>]+)|([^\s/@\"'<>?\[]+))@(?!sha256:)"
)
_QUERY = re.compile(r"([?&;])([\w.%-]+)=([^\s&;\"'<>#]+)")
_QUERY_SECRET = re.compile(
    r"(?i)token|secret|passw|pwd|key|sig(?:nature)?$|auth|credential|code$|session|jwt|assertion|security"
)
_HEADER = re.compile(
    r"(?i)\b((?:proxy-)?authorization|(?:set-)?cookie)(\\*[\"']?[ \t]*[:=,][ \t]*(?:b(?=[\"']))?)(\\*[\"']?)([^\n]*)"
)
_SCHEME = re.compile(r"(?i)(basic|bearer|token|negotiate|digest|apikey|aws4-hmac-sha256)([ \t]+)")
_BEARER = re.compile(r"(?i)\b((?:bearer|basic)[ \t]+)([A-Za-z0-9._~+/=-]{6,})")
_NETRC = re.compile(
    r"(?i)\b((?:machine[ \t]+\S+|default)\s+login[ \t]+)(\S+)((?:\s+account[ \t]+\S+)?\s+password[ \t]+)(\S+)"
)
_NETRC_LINE = re.compile(r"(?im)^([ \t]*password[ \t]+)(\S+)[ \t]*$")
_CURL_USER = re.compile(r"(\bcurl\b[^\n]{0,400}?[ \t](?:-u|--user|--proxy-user)[ =]?[\"']?)([^\s:\"']+):([^\s\"']+)")
_PASS_OPTION = re.compile(
    r"(\b(?:docker|podman|nerdctl|helm)[^\n]{0,80}?login[^\n]{0,200}?[ \t]-p[ =]?|\bsshpass[ \t]+-p[ ]?)([^\s\"']+)"
)
_OPTION = re.compile(
    r"(?<![\w-])(--?[A-Za-z][\w-]*)([ \t]+|[\"'],\s*[\"']|\x00|[\"']?\n[ \t]*-[ \t]+[\"']?)([^\s\"'\x00-][^\s\"'\x00]*)"
)
_OPTION_LIST = re.compile(rf"(?<![\w-])((?:{'|'.join(SECRET_OPTIONS)})(?:=|[ \t]+))((?:[^\s\"'-][^\s\"']*[ \t]*)+)")
_VARIABLE = re.compile(
    r"((?<![\w-])(?:-e|--env)(?:=|[ \t]+|[\"'],\s*[\"'])[\"']?)([A-Za-z_]\w*)=((?:\"[^\"\n]*\"|'[^'\n]*'|[^\s\"'])+)"
)
_UNIT = re.compile(r"(?m)^([ \t]*(?:Pass)?Environment=)(.*(?:\\\n.*)*)$")
_UNIT_VARIABLE = re.compile(r"(\"|')?([A-Za-z_]\w*)=((?(1)(?:(?!\1)[^\n])*|[^\s\"']*))")
_ASSIGNMENT = re.compile(
    r"([A-Za-z_][\w.-]*)"
    r"(\\*[\"']?[ \t]*(?:=>|[=:])[ \t]*(?:b(?=[\"']))?)"
    r"(?:(\\+[\"'])(.*?)\3|\"((?:[^\"\\\n]|\\.)*)\"|'((?:[^'\\\n]|\\.)*)'|([\[(][^\]\)\n]*[\])])|(?=[^\s,;)}\]&]))"
)
_WORD = re.compile(r"[^\s,;\"')}\]&]+")
_IN_LIST = re.compile(r"[^\s,\[\]()\"']+")
_BASE64 = re.compile(r"(?<![\w+/=-])[A-Za-z0-9+/_-]{12,}={0,2}(?![\w+/=-])")
_ENDS = "_-+=~"
_FAR = 1 << 14  # characters of a value that is one word
_SENTENCE = re.compile(r"(?i)passw|passphrase")


def redact_text(text: str, tag: Tag) -> str:
    """Return the text with stand-ins for secrets and for people's account names."""
    for hints, rule, replace in _RULES:
        lowered = text.lower()
        if any(hint in lowered for hint in hints):
            text = rule.sub(partial(replace, tag=tag), text)
    text = "\n".join(_assignments(line, tag) for line in text.split("\n"))
    for literals, shape in shapes():
        if any(literal in text for literal in literals):
            text = shape.sub(lambda match: tag("secret", match[0]), text)
    return hide_people(_hide_random(text, tag), tag)


def variable(name: str, value: str, tag: Tag) -> str:
    """Return an environment variable's value as it may be written: by the allow-list, and then by what it holds."""
    bare = value.strip("\"'")
    if rules.is_empty(bare) or bare == "":
        return value
    if rules.is_secret_name(name) and not (rules.may_show(name) and not rules.is_secret(name, bare)):
        return tag("secret", bare)
    return redact_text(value, tag) if rules.may_show(name) else tag("value", bare)


def named(name: str, value: str, tag: Tag) -> str:
    """Return a value by its name alone."""
    return tag("secret", value) if rules.is_secret(name, value) else value


@cache
def shapes() -> tuple[tuple[tuple[str, ...], re.Pattern[str]], ...]:
    """Return the shapes of known keys and tokens, each with what a text must hold to be searched (data/secrets.yml)."""
    found = data_file("secrets.yml").each("shapes")
    return tuple((item.texts("hints"), re.compile(item.text("pattern"))) for item in found)


def _pem(match: re.Match[str], tag: Tag) -> str:
    if "-----END" in match[0]:
        return tag("secret", _body(match[0]))
    first, *rest = match[0].split("\n")  # cut off: what follows is kept from where it is no longer base64
    body = [first]
    while rest and re.search(r"(?:^|[\s:])[A-Za-z0-9+/=]{16,}\s*$|^\s*$", rest[0]):
        body.append(rest.pop(0))
    return "\n".join([tag("secret", _body("\n".join(body))), *rest])


def _body(pem: str) -> str:
    """Return a key without its line ends, so that it has one stand-in however it is wrapped."""
    return re.sub(r"\\n|\\r|\s", "", pem)


def _userinfo(match: re.Match[str], tag: Tag) -> str:
    scheme, user, password, alone = match.groups()
    if alone is not None:
        return f"{scheme}{alone if alone.startswith('[') else _user_or_secret(alone, tag)}@"
    return f"{scheme}{_user(user, tag)}:{_secret(password, tag)}@"


def _user_or_secret(word: str, tag: Tag) -> str:
    """Return the stand-in of what stands alone before the @ of a URL: ssh has a user there, https a token."""
    return _user(word, tag) if re.fullmatch(r"[a-z_][a-z0-9_.-]{0,15}", word) else _secret(word, tag)


def _query(match: re.Match[str], tag: Tag) -> str:
    mark, name, value = match.groups()
    return f"{mark}{name}={_secret(value, tag) if _QUERY_SECRET.search(name) else value}"


def _header(match: re.Match[str], tag: Tag) -> str:
    name, between, quote, rest = match.groups()
    end = rest.find(quote) if quote else -1
    value, after = (rest[:end], rest[end:]) if end >= 0 else (rest, "")
    if not quote:  # up to the next quote or the line's end; a known scheme has one word
        value, after = _split(value, r"[\"']") if not after else (value, after)
    scheme = _SCHEME.match(value)
    lead = scheme[0] if scheme else ""
    value = value[len(lead) :]
    if scheme and scheme[1].lower() not in ("digest", "aws4-hmac-sha256"):
        value, tail = _split(value, r"[\s,;)}\]]")
        after = tail + after
    if rules.is_empty(value) or not value.strip():
        return match[0]
    return f"{name}{between}{quote}{lead}{tag('secret', value.strip())}{after}"


def _split(text: str, at: str) -> tuple[str, str]:
    found = re.search(at, text)
    return (text[: found.start()], text[found.start() :]) if found else (text, "")


def _assignments(line: str, tag: Tag) -> str:
    """Return a line with the values of secret names hidden; looks again behind each value that is kept."""
    if not _hint().search(line):
        return line
    done, place = [], 0
    while match := _ASSIGNMENT.search(line, place):
        name = match[1]
        done.append(line[place : match.end(2)])
        place = match.end(2)
        if not rules.is_secret_name(name):
            continue
        value, place = _assigned(line, match, tag)
        done.append(value)
    return "".join(done) + line[place:]


def _assigned(line: str, match: re.Match[str], tag: Tag) -> tuple[str, int]:
    """Return what stands for the value of a secret name, and where in the line to go on."""
    name = match[1]
    for group, quote in ((4, match[3]), (5, '"'), (6, "'")):
        if match[group] is not None:
            return quote + named(name, match[group], tag) + quote, match.end()
    if match[7] is not None:
        return match[7] if rules.is_empty(match[7]) else _listed(name, match[7], tag), match.end()
    start = match.end(2)
    rest = line[start : start + _FAR]
    if rest[0] in "[(":  # a list that does not end on this line
        return _listed(name, line[start:], tag), len(line)
    if rest[0] == "{" or rules.is_empty(rest.split(maxsplit=1)[0].rstrip(",;")):
        return rest[:1], start + 1
    sentence = rest[0] in "\"'" or (_SENTENCE.search(name) and ":" in match[2])
    word = line[start:] if sentence else _first_word(rest)
    return named(name, word, tag), start + len(word)


def _listed(name: str, words: str, tag: Tag) -> str:
    return _IN_LIST.sub(lambda word: named(name, word[0], tag), words)


def _first_word(text: str) -> str:
    found = _WORD.match(text)
    return found[0] if found else text[:1]


def _hide_random(text: str, tag: Tag) -> str:
    """Return the text with random-looking strings and long hexadecimal numbers hidden, unless they are public."""
    found = sorted([*_base64_secrets(text), *random_spans(text), *hex_spans(text)])
    blocks = public_blocks(text) if found else []
    pieces, done = [], 0
    for start, end in found:
        value = text[start:end]
        bare = start + len(value) - len(value.lstrip(_ENDS)), end - len(value) + len(value.rstrip(_ENDS))
        if start < done or any(a <= bare[0] and bare[1] <= b for a, b in [*blocks, *public_spans(text, start, end)]):
            continue
        plain = decoded(value)
        if plain is not None and redact_text(plain, tag) == plain and ":" not in plain:
            continue
        pieces += [text[done:start], tag("secret", value)]
        done = end
    return "".join(pieces) + text[done:]


def _base64_secrets(text: str) -> list[tuple[int, int]]:
    """Return where base64 hides ``user:password`` or a private key."""
    found = []
    for match in _BASE64.finditer(text):
        plain = decoded(match[0])
        if plain and (re.fullmatch(r"[\w.@+-]+:\S+", plain) or "PRIVATE KEY" in plain):
            found.append(match.span())
    return found


def _login(match: re.Match[str], tag: Tag) -> str:
    return match[1] + _user(match[2], tag) + match[3] + _secret(match[4], tag)


def _curl(match: re.Match[str], tag: Tag) -> str:
    return f"{match[1]}{_user(match[2], tag)}:{_secret(match[3], tag)}"


def _last(match: re.Match[str], tag: Tag) -> str:
    return match[1] + _secret(match[2], tag)


def _bearer(match: re.Match[str], tag: Tag) -> str:
    """Return the stand-in of a bearer's word unless it is prose: ``bearer token``, ``basic latin``."""
    return match[0] if re.fullmatch(r"[A-Za-z]{1,15}\.?", match[2]) else match[1] + _secret(match[2], tag)


def _environment(match: re.Match[str], tag: Tag) -> str:
    return match[1] + _UNIT_VARIABLE.sub(partial(_quoted_variable, tag=tag), match[2])


def _quoted_variable(match: re.Match[str], tag: Tag) -> str:
    quote, name, value = match.groups()
    return f"{quote or ''}{name}={variable(name, value, tag)}"


def _given_variable(match: re.Match[str], tag: Tag) -> str:
    return f"{match[1]}{match[2]}={variable(match[2], match[3], tag)}"


def _option_list(match: re.Match[str], tag: Tag) -> str:
    return match[1] + _IN_LIST.sub(lambda word: _secret(word[0], tag), match[2])


def _option(match: re.Match[str], tag: Tag) -> str:
    return match[1] + match[2] + named(match[1], match[3], tag)


def _secret(value: str, tag: Tag) -> str:
    return value if rules.is_empty(value) else tag("secret", value)


def _user(name: str, tag: Tag) -> str:
    return name if not name or rules.is_empty(name) or rules.is_account(name) else tag("user", name)


@cache
def _hint() -> re.Pattern[str]:
    return re.compile(r"(?i)key|token|secret|pass|pwd|credential|auth|cookie|bearer|webhook|jwt|sig|dsn|conn|private")


_RULES: tuple[tuple[tuple[str, ...], re.Pattern[str], Callable[..., str]], ...] = (
    # small letters one of which a text must hold for the rule to apply, what to look for, what to put there
    (("private key",), _PEM, _pem),
    (("@",), _USERINFO, _userinfo),
    (("?", "&"), _QUERY, _query),
    (("authorization", "cookie"), _HEADER, _header),
    (("bearer", "basic"), _BEARER, _bearer),
    (("login",), _NETRC, _login),
    (("password",), _NETRC_LINE, _last),
    (("curl",), _CURL_USER, _curl),
    (("login", "sshpass"), _PASS_OPTION, _last),
    (("environment=",), _UNIT, _environment),
    (("-e", "--env"), _VARIABLE, _given_variable),
    (SECRET_OPTIONS, _OPTION_LIST, _option_list),
    (("-",), _OPTION, _option),
)
