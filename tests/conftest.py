"""The repository root on sys.path, one thread, and a tiny model: what several test files need."""

import os
import signal
import sys

import pytest
import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def signals_as_before():
    """A run that ends in the middle (SystemExit) leaves its handlers; a process would be gone by then."""
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    yield
    for s, handler in before.items():
        signal.signal(s, handler)


@pytest.fixture
def tiny_model():
    """A random Qwen3: 2 layers, width 32, 40 words, float32; the same weights in every test."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3Config(
        vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=128, initializer_range=0.2, bos_token_id=None,
        eos_token_id=1, pad_token_id=0,
    ))  # fmt: skip
    return model.eval()
