"""A random Llama of a few thousand weights with its own tokenizer, small enough to be made and served in a test."""

from __future__ import annotations

import random
from pathlib import Path

WORDS = ("water", "stone", "light", "north", "seven", "bread", "under", "green", "paper", "often", "river", "glass")


def random_text(num_words: int, seed: int = 0) -> str:
    """Words in random order, with a full stop now and then."""
    choose = random.Random(seed)
    return " ".join(choose.choice(WORDS) + ("." if choose.random() < 0.1 else "") for _ in range(num_words))


def save_tiny_llama(directory: Path, num_layers: int = 2, num_heads: int = 4, num_kv_heads: int = 2) -> Path:
    """Write config, float32 weights and tokenizer of a model with heads of size 64 and 512 positions.

    Args:
        directory: where; must exist.
        num_layers: decoder layers.
        num_heads: query heads.
        num_kv_heads: KV heads.

    Returns:
        The directory.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([random_text(2000)], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(directory)

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=64 * num_heads,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=64,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        # larger than the default, so that attention is not uniform
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(directory)
    return directory
