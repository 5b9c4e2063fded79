"""What the fake engine makes of a request's body: tokens, and a tool call that fits its schema. Pure."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from typing import Any

TOKENS_PER_IMAGE = 16
_MESSAGE, _END, _IMAGE, _TOOLS, _EXTRA = 256, 257, 258, 259, 300
_PNG = b"\x89PNG\r\n\x1a\n"
# as Kimi K3 writes them (vllm#54273)
THINK_CLOSE = "<|close|>think<|sep|>"


def render(body: Mapping[str, Any], *, extra: bool = False, drop_images: bool = False) -> list[int]:
    """Return a chat's tokens: one byte of text is one token, ids above 255 begin and end a message.

    Args:
        body: The request: ``messages``, and ``tools`` where it has them.
        extra: Begin with one more token, as a template that differs would.
        drop_images: Leave images out.
    """
    tokens: list[int] = [_EXTRA] if extra else []
    if body.get("tools"):
        tokens += [_TOOLS, *json.dumps(body["tools"], sort_keys=True).encode(), _END]
    for message in body["messages"]:
        tokens += [_MESSAGE, *message["role"].encode(), 10, *_content(message["content"], drop_images), _END]
    return [*tokens, _MESSAGE, *b"assistant", 10]


def prompt_tokens(prompt: str | Sequence[int]) -> list[int]:
    """Return a text completion's tokens; a prompt may be given as token ids."""
    return list(prompt.encode()) if isinstance(prompt, str) else list(prompt)


def _content(content: Any, drop_images: bool) -> list[int]:
    if isinstance(content, str):
        return list(content.encode())
    tokens: list[int] = []
    for part in content:
        if part["type"] == "text":
            tokens += part["text"].encode()
        elif not drop_images:
            tokens += [_IMAGE] * TOKENS_PER_IMAGE
    return tokens


def images(body: Mapping[str, Any]) -> list[str]:
    """Return the URLs of the images in a chat."""
    contents = [message["content"] for message in body.get("messages", ()) if not isinstance(message["content"], str)]
    return [part["image_url"]["url"] for content in contents for part in content if part["type"] == "image_url"]


def is_png(url: str) -> bool:
    """Return whether a data URI holds a PNG whose first chunk has the right checksum."""
    head, _, data = url.partition(",")
    if head != "data:image/png;base64":
        return False
    try:
        raw = base64.b64decode(data, validate=True)
    except binascii.Error:
        return False
    size = int.from_bytes(raw[8:12], "big")
    chunk, checksum = raw[12 : 16 + size], raw[16 + size : 20 + size]
    return raw[:8] == _PNG and chunk[:4] == b"IHDR" and binascii.crc32(chunk) == int.from_bytes(checksum, "big")


def thinks(body: Mapping[str, Any]) -> bool:
    """Return whether a chat asks for reasoning; unlike Kimi K3 this model does not reason unless asked."""
    return bool((body.get("chat_template_kwargs") or {}).get("thinking"))


def tool_arguments(tool: Mapping[str, Any], *, wrong_type: bool = False) -> str:
    """Return arguments that fit a tool's schema, as JSON text; with ``wrong_type`` a number or flag becomes a text."""
    value = fitting(tool["function"]["parameters"])
    if wrong_type:
        key = next(name for name, item in value.items() if not isinstance(item, str))
        value[key] = str(value[key])
    return json.dumps(value)


def fitting(schema: Mapping[str, Any]) -> Any:
    """Return the first value that comes to mind for a JSON schema, as far as the tests' tools go."""
    if "enum" in schema:
        return schema["enum"][0]
    makers: dict[str, Any] = {
        "object": lambda: {name: fitting(item) for name, item in schema.get("properties", {}).items()},
        "array": lambda: [fitting(schema["items"])],
        "string": lambda: "x",
        "integer": lambda: int(schema.get("minimum", 1)),
        "number": lambda: float(schema.get("minimum", 1)),
        "boolean": lambda: True,
    }
    return makers[schema["type"]]()
