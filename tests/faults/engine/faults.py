"""Every way the fake engine can be told to misbehave, each the form of something seen in the field."""

from __future__ import annotations

from enum import StrEnum


class Fault(StrEnum):
    """One way to misbehave."""

    # the API as a whole
    HEALTH_KEPT = "/health is not passed on, as by a gateway: 403"
    GZIP_ANYWAY = "answers are said to be compressed, though nobody asked for that"
    KEY_REPEATED = "/version repeats the API key"
    REFUSAL_UNPRINTABLE = "a refusal holds half a surrogate pair and a terminal's commands"
    UNHEALTHY = "/health answers 503"
    PEER_KILLED = "the first request hangs, then every request answers 500 and /health 503"
    ERROR_IN_200 = "an error inside a 200"
    EMPTY_ANSWER = "an answer without text"
    FINISH_ERROR = "finish_reason error"
    USAGE_WRONG = "usage does not add up"
    COMPLETIONS_BROKEN = "/v1/completions answers 500, chat works"
    # streams
    STREAM_CUT = "a stream ends without [DONE]"
    STALL = "a stream stops sending and stays open"
    STREAM_BUFFERED = "a stream comes in one piece at its end, as behind a buffering proxy"
    NO_STREAM_USAGE = "a stream without usage"
    SLOW_FIRST_TOKEN = "the first token is late"  # noqa: S105 - a token of text
    # refusals
    BAD_REQUEST_ACCEPTED = "any model name and max_tokens are accepted"
    REFUSAL_WITHOUT_BODY = "bad requests are refused without an OpenAI error body"
    KEEP_ALIVE_CLOSE = "a connection is closed right after an answer, without saying so"
    # abilities
    TOOLS_REFUSED = "tools are refused, as without --enable-auto-tool-choice"
    TOOLS_LIMITED = "whoever asks for a tool is told to come back later, as by a gateway"
    TOOL_CALL_OBJECT = "a tool call's arguments are an object where the API promises a text"
    TOOL_CALL_MALFORMED = "a tool call's arguments are no JSON"
    TOOL_CALL_WRONG_TYPE = "a tool call's argument has another type than its schema says"
    TOOL_CALL_EMPTY = "finish_reason tool_calls without a call, vllm#53363"
    TOOL_STREAM_BROKEN = "a streamed tool call loses its last piece"
    REASONING_ABSENT = "the model has no reasoning channel"
    REASONING_LEAKS = "the reasoning comes as content, markers and all"
    REASONING_ALWAYS = "the model reasons though told not to"
    IMAGE_REFUSED = "images are refused, as by a text-only model"
    IMAGE_DROPPED = "images are taken and never reach the model"
    # the cache and its counters
    HITS_ZERO = "the cache never hits"
    HITS_STOP = "the cache stops hitting after a while"
    COUNTERS_FROZEN = "answers carry hits, counters stand still"
    CACHED_TOKENS_MISSING = "answers do not carry cached_tokens"
    CACHED_TOKENS_NULL = "answers carry cached_tokens: null"
    CACHED_TOKENS_WRONG = "answers carry one block too few"
    CACHING_OFF = "prefix caching is off"
    RECURRENT = "recurrent state is cached too"
    GEOMETRY_ABSENT = "no cache_config_info, as with the Rust front end"
    BLOCK_TOO_LARGE = "a block is longer than the context"
    SECOND_ENGINE = "a second engine reports"
    RESTART_IN_WINDOW = "counters and start time begin anew after a request"
    OTHER_TRAFFIC = "someone else's request runs beside each of ours"
    METRICS_500 = "/metrics answers 500"
    METRICS_TEXT = "/metrics answers a page"
    TOKENIZE_KEPT = "/tokenize is not passed on, as by a gateway"
    TEMPLATE_DIFFERS = "/tokenize renders a chat differently from the chat route"
    # load and time
    PREEMPTS = "requests are preempted"
    CACHE_FULL = "the KV cache is nearly full"
    KV_LEAKS = "every request leaves a piece of the KV cache taken"
    SLOWS_DOWN = "every first token is later than the one before"
    OOM_UNDER_LOAD = "the GPU is out of memory when several requests run at once"
    DIES_UNDER_LOAD = "the process is gone when several requests run at once"
    OTHER_TRAFFIC_UNDER_LOAD = "someone else's requests arrive while several of ours run"
    FEW_SLOTS = "fewer requests run at once than are sent, the others wait"
