"""Names that promise a secret."""

from __future__ import annotations

import pytest

from llmgw.domain.secret_names import hide_keys, line_sounds_secret, sounds_secret

SECRET = (
    "HF_TOKEN", "hf_token", "GITHUB_TOKEN_2", "HFTOKEN", "API_TOKENS", "AWS_SECRET_ACCESS_KEY", "SECRET_KEY_BASE",
    "PASSWORD", "DB_PASSWORD", "DBPASSWD", "DB_PASS", "BASIC_AUTH", "OPENAI_API_KEY", "OPENAI_APIKEY", "API_KEY_PROD",
    "GOOGLE_APPLICATION_CREDENTIALS", "api_key", "--api-key", "ssh.passphrase", "KEY", "api-keys",
)  # fmt: skip
PLAIN = (
    "PATH", "PWD", "KEYBOARD", "TOKENIZERS_PARALLELISM", "--max-num-batched-tokens", "--tokenizer-mode", "MAX_TOKENS",
    "SSH_AUTH_SOCK", "HF_TOKEN_PATH", "LLAMA_ARG_API_KEY_FILE", "--speculative-token-map", "AUTHOR", "BYPASS", "", "--",
)  # fmt: skip


@pytest.mark.parametrize("name", SECRET)
def test_a_name_that_promises_a_secret_is_known(name: str) -> None:
    assert sounds_secret(name)
    assert line_sounds_secret(f"{name} = x")


@pytest.mark.parametrize("name", PLAIN)
def test_a_name_that_only_resembles_one_is_not(name: str) -> None:
    assert not sounds_secret(name)


def test_a_key_is_hidden_by_its_shape_under_any_name() -> None:
    assert hide_keys('_-OKEN = "sk-0123456789abcdef"') == '_-OKEN = "*******************"'
    assert hide_keys("hf_abcdefghij task-sk-short risk-0123456789") == "************* task-sk-short risk-0123456789"
