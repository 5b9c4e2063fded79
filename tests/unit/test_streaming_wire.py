"""HTTP and server-sent events as bytes: every way a network may cut them."""

import random

import pytest
from scripted_server import DONE, LAST_CHUNK, chunk

from kimi_runbook.acceptance.streaming.sse import EventParser, events
from kimi_runbook.acceptance.streaming.wire import (
    BodyDecoder,
    EndOfBody,
    Head,
    IncompleteError,
    Read,
    WireError,
    parse_head,
    request_bytes,
    whole_body,
)

CHUNKED = Head(status=200, headers={}, length=None, chunked=True, keep_alive=True)
UNTIL_CLOSED = Head(status=200, headers={}, length=None, chunked=False, keep_alive=False)
EVENTS = [b'data: {"n":1}\n\n', b'data: {"n":"\xe2\x82\xac"}\n\n', DONE]
STREAM = b"".join(map(chunk, EVENTS)) + LAST_CHUNK


def of_length(length: int) -> Head:
    return Head(status=200, headers={}, length=length, chunked=False, keep_alive=True)


def reads(*pieces: bytes) -> list[Read]:
    """Return reads at 100, 200, ... ns."""
    return [(100 * (number + 1), 100 * (number + 1), 0, piece) for number, piece in enumerate(pieces)]


def two_pieces(data: bytes) -> list[tuple[bytes, bytes]]:
    return [(data[:at], data[at:]) for at in range(len(data) + 1)]


def test_a_request_is_one_block_of_bytes() -> None:
    made = request_bytes("POST", "/v1/x?a=1", {"Host": "h:1"}, b'{"a":1}')
    assert made == b'POST /v1/x?a=1 HTTP/1.1\r\nHost: h:1\r\nContent-Length: 7\r\n\r\n{"a":1}'
    assert request_bytes("GET", "/", {}, None) == b"GET / HTTP/1.1\r\n\r\n"


@pytest.mark.parametrize(("target", "headers"), [("/a\r\nX: y", {}), ("/", {"A": "b\nc"}), ("/\u20ac", {})])
def test_a_request_cannot_carry_a_second_one(target: str, headers: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"line break|latin-1"):
        request_bytes("GET", target, headers, None)


def test_a_head_is_read_wherever_it_is_cut() -> None:
    data = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\nrest"
    )
    for first, second in two_pieces(data[:-4]):
        assert parse_head(first) is None or not second
        parsed = parse_head(first + second)
        assert parsed is not None
    head, rest = parse_head(data) or pytest.fail("no head")
    assert (head.status, head.chunked, head.length, head.keep_alive, rest) == (200, True, None, True, b"rest")
    assert head.event_stream


@pytest.mark.parametrize(
    ("data", "length", "keep_alive"),
    [
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 5", 5, True, id="length"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 5, 5", 5, True, id="length-told-twice"),
        pytest.param(b"HTTP/1.1 200\r\ncontent-length:5", 5, True, id="no-reason-no-space"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close", 5, False, id="close"),
        pytest.param(b"HTTP/1.0 200 OK\r\nContent-Length: 5", 5, False, id="http-1.0"),
        pytest.param(b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\nConnection: Keep-Alive", 5, True, id="1.0-keep-alive"),
        pytest.param(b"HTTP/1.1 200 OK\r\nX: y", None, False, id="until-closed"),
        pytest.param(b"HTTP/1.1 204 No Content", 0, True, id="no-content"),
        pytest.param(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5", 5, True, id="interim"),
    ],
)
def test_a_head_says_where_the_body_ends(data: bytes, length: int | None, keep_alive: bool) -> None:
    head, rest = parse_head(data + b"\r\n\r\n") or pytest.fail("no head")
    assert (head.length, head.keep_alive, rest) == (length, keep_alive, b"")


def test_an_answer_to_head_has_no_body() -> None:
    head, _ = parse_head(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", method="HEAD") or pytest.fail("no head")
    assert head.length == 0


@pytest.mark.parametrize(
    ("data", "said"),
    [
        pytest.param(b"\x15\x03\x03\x00\x02\x02\x46", "use https://", id="tls"),
        pytest.param(b"\x00\x00\x12\x04\x00", "HTTP/2", id="http2"),
        pytest.param(b"SSH-2.0-OpenSSH_9.2\r\n", "SSH-2.0", id="ssh"),
        pytest.param(b"HTTP/1.1 OK\r\n\r\n", "status line", id="no-status"),
        pytest.param(b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n", "header", id="no-colon"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "Content-Length", id="negative-length"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 5, 6\r\n\r\n", "Content-Length", id="two-lengths"),
        pytest.param(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", "gzip", id="coded"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n", "gzip", id="compressed"),
        pytest.param(b"HTTP/1.1 101 Switching Protocols\r\n\r\n", "101", id="switched"),
        pytest.param(b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000, "headers of more", id="endless"),
    ],
)
def test_what_is_no_http_answer_is_told_from_one(data: bytes, said: str) -> None:
    with pytest.raises(WireError, match=said):
        parse_head(data)


def test_chunks_are_put_together_wherever_they_are_cut() -> None:
    for pieces in [*two_pieces(STREAM), tuple(STREAM[at : at + 1] for at in range(len(STREAM)))]:
        assert whole_body(CHUNKED, reads(*pieces)) == b"".join(EVENTS)


def test_chunk_extensions_and_trailers_are_passed_over() -> None:
    data = b"3;name=value\r\nabc\r\n2 \r\nde\r\n0;last\r\nTrailer: x\r\nOther: y\r\n\r\n"
    for pieces in two_pieces(data):
        assert whole_body(CHUNKED, reads(*pieces)) == b"abcde"


def test_a_large_chunk_and_many_chunks_in_one_read() -> None:
    large = bytes(range(256)) * 1000
    assert whole_body(CHUNKED, reads(chunk(large)[:100_000], chunk(large)[100_000:], LAST_CHUNK)) == large
    assert whole_body(CHUNKED, reads(b"".join(chunk(b"x" * n) for n in range(1, 300)) + LAST_CHUNK)) == b"x" * 44_850


@pytest.mark.parametrize(
    "data",
    [b"zz\r\nabc\r\n", b"0x3\r\nabc\r\n", b"1_0\r\n", b"-3\r\nabc\r\n", b"3\r\nabcd\r\n", b"3\r\nabc\n\n4", b"\r\n"],
)
def test_chunks_that_are_none_are_refused(data: bytes) -> None:
    with pytest.raises(WireError, match="chunk"):
        whole_body(CHUNKED, reads(data))
    with pytest.raises(WireError, match="chunk"):
        whole_body(CHUNKED, reads(*(data[at : at + 1] for at in range(len(data)))))


def test_a_body_that_ends_early_says_how_far_it_came() -> None:
    for cut in range(len(STREAM)):
        with pytest.raises(IncompleteError, match="final chunk"):
            whole_body(CHUNKED, reads(STREAM[:cut]))
    with pytest.raises(IncompleteError, match="3 bytes of the body came, of the 5 announced"):
        whole_body(of_length(5), reads(b"a", b"bc"))


def test_other_bodies() -> None:
    assert whole_body(of_length(5), reads(b"ab", b"cde")) == b"abcde"
    assert whole_body(of_length(0), []) == b""
    assert whole_body(UNTIL_CLOSED, reads(b"ab", b"cde")) == b"abcde"


@pytest.mark.parametrize("head", [CHUNKED, of_length(3)], ids=["chunked", "length"])
def test_bytes_after_the_end_are_counted(head: Head) -> None:
    decoder = BodyDecoder(head)
    assert decoder.feed((b"3\r\nabc\r\n0\r\n\r\n" if head.chunked else b"abc") + b"more") == b"abc"
    assert decoder.feed(b"!") == b""
    assert (decoder.complete, decoder.excess) == (True, 5)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(STREAM, id="stream-with-done"),
        pytest.param(chunk(b'{"a":1}') + LAST_CHUNK, id="chunked-json"),
        pytest.param(chunk(b"tricky\r\n0\r\n\r\n") + chunk(b"0\r\n\r\n") + LAST_CHUNK, id="looks-like-its-end"),
        pytest.param(chunk(b"data: a\r\n\r\n") + chunk(b"data: [DONE]\r\n\r\n") + LAST_CHUNK, id="crlf-events"),
        pytest.param(chunk(b"a") + b"0\r\nTrailer: x\r\n\r\n", id="trailer"),
    ],
)
def test_the_end_of_a_chunked_body_is_seen_with_its_last_byte(data: bytes) -> None:
    for first, second in two_pieces(data):
        for third in (1, 2, 5):
            end = EndOfBody(CHUNKED)
            pieces = [first, *(second[at : at + third] for at in range(0, len(second), third))]
            seen = [end.see(piece) for piece in pieces if piece]
            assert seen == [False] * (len(seen) - 1) + [True]
            assert end.complete
            assert not end.excess


def test_the_end_of_a_body_with_a_length() -> None:
    end = EndOfBody(of_length(5))
    assert [end.see(b"abc"), end.see(b"de"), end.excess] == [False, True, False]
    end = EndOfBody(of_length(2))
    assert [end.see(b"abc"), end.excess] == [True, True]
    assert EndOfBody(of_length(0)).complete
    end = EndOfBody(UNTIL_CLOSED)
    assert [end.see(b"abc"), end.complete] == [False, False]


def test_bytes_after_a_chunked_end_forbid_to_use_the_connection_again() -> None:
    end = EndOfBody(CHUNKED)
    assert end.see(b"1\r\na\r\n0\r\n\r\n\r\n\r\n")
    assert end.excess


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        pytest.param(b"data: a\n\ndata: b\n\n", [(b"", b"a"), (b"", b"b")], id="two"),
        pytest.param(b"data: a\r\n\r\ndata: b\r\n\r\n", [(b"", b"a"), (b"", b"b")], id="crlf"),
        pytest.param(b"data:a\n\n", [(b"", b"a")], id="no-space"),
        pytest.param(b"data:  a\n\n", [(b"", b" a")], id="one-space-is-dropped"),
        pytest.param(b"data: a\ndata: b\n\n", [(b"", b"a\nb")], id="two-lines"),
        pytest.param(b"data\n\n", [(b"", b"")], id="field-without-colon"),
        pytest.param(b": ping\n\ndata: a\n\n", [(b"", b"a")], id="comment"),
        pytest.param(b"event: error\ndata: a\n\ndata: b\n\n", [(b"error", b"a"), (b"", b"b")], id="named"),
        pytest.param(b"event: lost\n\ndata: a\n\n", [(b"", b"a")], id="name-without-data"),
        pytest.param(b"id: 7\nretry: 5\nother: x\ndata: a\n\n", [(b"", b"a")], id="other-fields"),
        pytest.param(b"\n\n\ndata: a\n\n\n", [(b"", b"a")], id="blank-lines"),
    ],
)
def test_events_are_the_same_wherever_they_are_cut(stream: bytes, expected: list[tuple[bytes, bytes]]) -> None:
    for pieces in [*two_pieces(stream), tuple(stream[at : at + 1] for at in range(len(stream)))]:
        parser = EventParser()
        assert [event for piece in pieces for event in parser.feed(piece)] == expected


def test_events_carry_the_read_that_completed_them() -> None:
    first, second = chunk(EVENTS[0]), chunk(EVENTS[1])
    found = list(
        events(
            CHUNKED, reads(first[:5], first[5:] + second[:9], second[9:], chunk(DONE)[:3], chunk(DONE)[3:], LAST_CHUNK)
        )
    )
    assert [event.read[0] for event in found] == [200, 300, 500]
    assert [event.data for event in found] == [event.removeprefix(b"data: ").strip() for event in EVENTS]


def test_two_events_in_one_read_share_its_stamp() -> None:
    found = list(events(CHUNKED, reads(b"".join(map(chunk, EVENTS[:2])), chunk(DONE) + LAST_CHUNK)))
    assert [event.read[0] for event in found] == [100, 100, 200]


def test_a_stream_cut_anywhere_is_incomplete() -> None:
    for cut in range(len(STREAM)):
        with pytest.raises(IncompleteError, match="final chunk"):
            list(events(CHUNKED, reads(STREAM[:cut])))


def test_a_stream_without_done_is_incomplete_however_well_its_body_ends() -> None:
    with pytest.raises(IncompleteError, match=r"after 2 events without \[DONE\]"):
        list(events(CHUNKED, reads(*map(chunk, EVENTS[:2]), LAST_CHUNK)))


@pytest.mark.parametrize("end", [b"data: [DONE]\n\n", b"data: [DONE]\n", b"data: [DONE]"])
def test_done_counts_without_the_blank_line_after_it(end: bytes) -> None:
    assert [event.data for event in events(UNTIL_CLOSED, reads(b"data: a\n\n", end))] == [b"a", b"[DONE]"]


def test_half_an_event_at_the_end_is_none() -> None:
    found = []
    with pytest.raises(IncompleteError):
        for event in events(UNTIL_CLOSED, reads(b'data: a\n\ndata: {"half')):
            found.append(event.data)
    assert found == [b"a"]


def test_random_cuts_give_the_same_events() -> None:
    rng = random.Random(20261130)  # noqa: S311 - cuts, no secrets
    texts = [b'{"text":"%b"}' % (b"\xc3\xa9" * rng.randrange(400)) for _ in range(60)]
    stream = b"".join(chunk(b"data: " + text + b"\n\n") for text in texts) + chunk(DONE) + LAST_CHUNK
    for _ in range(50):
        cuts = sorted(rng.sample(range(1, len(stream)), rng.randrange(1, 40)))
        pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
        assert [event.data for event in events(CHUNKED, reads(*pieces))] == [*texts, b"[DONE]"]
        end = EndOfBody(CHUNKED)
        assert [end.see(piece) for piece in pieces] == [False] * len(cuts) + [True]
