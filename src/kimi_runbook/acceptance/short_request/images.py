"""Image input: taken where the model has it, and really given to the model."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

from kimi_runbook.acceptance.http import EngineError
from kimi_runbook.acceptance.plan import Ability, Wanted
from kimi_runbook.acceptance.result import Check, verify
from kimi_runbook.acceptance.short_request.look import LOG, Look, not_offered, refused, settings

_EVIDENCE = "POST /v1/chat/completions with an image as a data URI"
_RGB = 2  # PNG colour type
_TWO = (b"\xd0\x30\x30", b"\x30\x30\xd0")  # red above blue


def check_images(look: Look) -> list[Check]:
    """Return whether an image is taken, and whether it makes the prompt longer, which a dropped one does not."""
    wanted = look.wants(Ability.IMAGES)
    if wanted is Wanted.OFF:
        look.abilities[Ability.IMAGES] = "off"
        return []
    rules = settings().fields("images")
    text = {"type": "text", "text": rules.text("ask")}
    image = {"type": "image_url", "image_url": {"url": data_uri(png(rules.integer("side")))}}
    answer = look.ask(lambda: look.context.client.chat(look.context.chat_body(_message([text, image]))))
    if isinstance(answer, EngineError):
        if refused(answer):
            look.abilities[Ability.IMAGES] = "refused"
            next_step = "Look for --language-model-only or --limit-mm-per-prompt in the launch."
            return [
                not_offered(
                    "image-input",
                    wanted,
                    what="image input",
                    observed=str(answer),
                    evidence=_EVIDENCE,
                    next_step=next_step,
                )
            ]
        look.abilities[Ability.IMAGES] = "unknown"
        return [look.failed("image-input-answer", answer, expected="an answer", evidence=_EVIDENCE)]
    plain = look.ask(lambda: look.context.client.chat(look.context.chat_body(_message([text]), max_tokens=1)))
    if isinstance(plain, EngineError):
        look.abilities[Ability.IMAGES] = "unknown"
        return [look.failed("image-input-answer", plain, expected="an answer to the text alone", evidence=_EVIDENCE)]
    with_image = answer.usage.prompt_tokens if answer.usage else 0
    without = plain.usage.prompt_tokens if plain.usage else 0
    arrived = with_image > without > 0
    look.abilities[Ability.IMAGES] = "valid" if arrived else "dropped"
    return [
        verify(
            "image-input",
            arrived and bool(answer.text or answer.reasoning),
            observed=f"{with_image} prompt tokens with the image, {without} without; {len(answer.text)} characters",
            expected="more prompt tokens with the image, and an answer that is not empty",
            evidence=_EVIDENCE,
            next_step=f"An image that costs no tokens never reached the model. {LOG}",
        )
    ]


def png(side: int) -> bytes:
    """Return a square RGB picture of so many pixels a side, red above blue, as a PNG."""
    rows = b"".join(b"\x00" + _TWO[row * 2 // side] * side for row in range(side))  # each row begins with its filter
    header = struct.pack(">IIBBBBB", side, side, 8, _RGB, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def data_uri(picture: bytes) -> str:
    """Return a picture as a URI that holds it, so that the engine fetches nothing."""
    return "data:image/png;base64," + base64.b64encode(picture).decode("ascii")


def _message(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]
