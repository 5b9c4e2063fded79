"""The lab's model: a tiny Llama without weights and a byte-level tokenizer, written by pure Python.

The engine fills the weights at random (``--load-format dummy``), so answers are gibberish of the right form. One token
is one byte of text, so the length of a prompt in tokens is known before it is sent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from lab.files import write_atomically

# One token per byte, then these, each of which the chat template below uses or a request may name.
SPECIAL_TOKENS = (
    "<|begin|>",
    "<|end|>",
    "<|pad|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|im_sep|>",
    "<|media|>",
    "<|think|>",
)

# Tools are rendered as the hermes tool parser of vLLM expects a model to have seen them.
CHAT_TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system<|im_sep|>Tools: ' }}{{ tools | tojson }}{{ '<|im_end|>' }}{% endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '<|im_sep|>' }}
{%- if message['content'] is string -%}
{{ message['content'] }}
{%- elif message['content'] -%}
{%- for part in message['content'] -%}{{ part['text'] if part['type'] == 'text' else '<|media|>' }}{%- endfor -%}
{%- endif -%}
{%- if message['tool_calls'] -%}
{%- for call in message['tool_calls'] -%}
{{ '<tool_call>' }}{{ call['function'] | tojson }}{{ '</tool_call>' }}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant<|im_sep|>' }}{%- endif -%}
"""


def byte_alphabet() -> list[str]:
    """Return the 256 printable stand-ins for the bytes 0 to 255, in byte order.

    The table is GPT-2's ``bytes_to_unicode`` (openai/gpt-2, src/encoder.py), which the ``ByteLevel`` pre-tokenizer and
    decoder of the tokenizers library apply.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


def tokenizer() -> dict[str, object]:
    """Return the content of tokenizer.json: one token per byte, ids 0 to 255, then the special tokens."""
    vocabulary = {symbol: byte for byte, symbol in enumerate(byte_alphabet())}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": 256 + n,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for n, token in enumerate(SPECIAL_TOKENS)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }


def token_id(token: str) -> int:
    """Return the id of a special token."""
    return 256 + SPECIAL_TOKENS.index(token)


def model_files() -> dict[str, str]:
    """Return the model directory as {file name: text}; the same on every machine, byte for byte."""
    ids = {
        "bos_token_id": token_id("<|begin|>"),
        "eos_token_id": token_id("<|im_end|>"),
        "pad_token_id": token_id("<|pad|>"),
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 256 + len(SPECIAL_TOKENS),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,  # divisible by tensor parallel 2, as the key/value heads are
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        **ids,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "model_max_length": 32768,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    return {
        "config.json": _text(config),
        "generation_config.json": _text(ids),
        "tokenizer.json": _text(tokenizer()),
        "tokenizer_config.json": _text(tokenizer_config),
    }


def revision(files: dict[str, str]) -> str:
    """Return the SHA-256 over the files' names and contents, names in order: what "same model" means in the lab."""
    digest = hashlib.sha256()
    for name in sorted(files):
        content = files[name].encode()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def write_model(directory: Path) -> str:
    """Write the model to a directory, its revision in the file ``revision`` beside it, and return the revision."""
    files = model_files()
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_atomically(directory / name, text)
    value = revision(files)
    write_atomically(directory / "revision", value + "\n")
    return value


def _text(value: Mapping[str, object]) -> str:
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
