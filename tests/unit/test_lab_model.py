import json
from pathlib import Path

import pytest

from lab.model import SPECIAL_TOKENS, byte_alphabet, model_files, revision, token_id, write_model


def test_every_byte_has_its_own_printable_symbol() -> None:
    symbols = byte_alphabet()
    assert len(set(symbols)) == 256
    assert all(symbol.isprintable() for symbol in symbols)
    assert symbols[ord("A")] == "A"
    assert symbols[ord(" ")] == "Ġ"  # as GPT-2's vocabulary has it


def test_tokens_and_vocabulary_agree() -> None:
    files = model_files()
    config, tokenizer = json.loads(files["config.json"]), json.loads(files["tokenizer.json"])
    assert config["vocab_size"] == len(tokenizer["model"]["vocab"]) + len(tokenizer["added_tokens"])
    assert [token["id"] for token in tokenizer["added_tokens"]] == [token_id(name) for name in SPECIAL_TOKENS]
    assert config["eos_token_id"] == token_id("<|im_end|>")


@pytest.mark.parametrize("key", ["num_attention_heads", "num_key_value_heads", "intermediate_size"])
def test_model_divides_by_tensor_parallel_2(key: str) -> None:
    assert json.loads(model_files()["config.json"])[key] % 2 == 0


def test_chat_template_renders_text_parts_and_tools() -> None:
    jinja2 = pytest.importorskip("jinja2")
    template = jinja2.Environment(autoescape=False).from_string(
        json.loads(model_files()["tokenizer_config.json"])["chat_template"]
    )
    text = template.render(
        messages=[
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        ],
        tools=[{"name": "t"}],
        add_generation_prompt=True,
    )
    assert text == (
        '<|im_start|>system<|im_sep|>Tools: [{"name": "t"}]<|im_end|><|im_start|>system<|im_sep|>be brief<|im_end|>'
        "<|im_start|>user<|im_sep|>hi<|im_end|><|im_start|>assistant<|im_sep|>"
    )


def test_revision_is_stable_and_follows_content(tmp_path: Path) -> None:
    files = model_files()
    assert write_model(tmp_path) == revision(files) == (tmp_path / "revision").read_text().strip()
    assert revision({**files, "config.json": "{}"}) != revision(files)
