"""Tokenizers and policies whose every move is known beforehand."""

import torch

from minirl.model import ModelConfig, Transformer
from minirl.tokenizer import Tokenizer


class Pieces(Tokenizer):
    """Tokens are the given byte strings, then EOS and the padding. Encodes by the longest piece that fits."""

    bos_id = None

    def __init__(self, *pieces, pad_is_eos=False):
        self.pieces = [piece if isinstance(piece, bytes) else piece.encode() for piece in pieces]
        self.eos_id = len(pieces)
        self.pad_id = self.eos_id + (not pad_is_eos)
        self.vocab_size = len(pieces) + 2

    def encode(self, text, continued=False, special=False):
        data, ids = text.encode(), []
        while data:
            piece = max((piece for piece in self.pieces if data.startswith(piece)), key=len)
            ids.append(self.pieces.index(piece))
            data = data[len(piece):]
        return ids

    def token_bytes(self, token):
        return self.pieces[token] if token < len(self.pieces) else b""

    def save(self, folder):
        raise AssertionError("not needed")


def small_config(vocab_size, context=64):
    return ModelConfig(vocab_size=vocab_size, hidden_size=16, intermediate_size=20, num_hidden_layers=2,
                       num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=context, rope_theta=100.0)


def random_policy(vocab_size, context=64, seed=0, dtype=torch.float64):
    """Weights large enough that what is sampled depends on every earlier token."""
    policy, generator = Transformer(small_config(vocab_size, context)).double(), torch.Generator().manual_seed(seed)
    for name, parameter in policy.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.5, generator=generator)
    return policy.to(dtype)


class Stub(Transformer):
    """A policy that is told what to say. `fed` holds the shape of every forward, `headed` the rows of every head."""

    def __init__(self, vocab_size, context=64):
        super().__init__(small_config(vocab_size, context))
        self.fed, self.headed = [], []

    def forward(self, tokens, positions=None, documents=None, cache=None):
        self.fed.append(tuple(tokens.shape))
        choice = self.choose(tokens, positions)  # (B, T)
        return 100.0 * torch.nn.functional.one_hot(choice, self.config.vocab_size).to(self.head_weight.dtype)

    def logits(self, hidden):
        self.headed.append(len(hidden))
        return hidden


class Chain(Stub):
    """After token t comes following[t], or t again."""

    def __init__(self, vocab_size, following, context=64):
        super().__init__(vocab_size, context)
        self.following = torch.arange(vocab_size)
        for token, after in following.items():
            self.following[token] = after

    def choose(self, tokens, positions):
        return self.following[tokens]


class Reader(Stub):
    """Continues one row at a time (max_rows=1) as a list of known rows does; in the middle of nowhere it fails."""

    def __init__(self, vocab_size, rows, context=256):
        super().__init__(vocab_size, context)
        self.after = {tuple(row[:n]): row[n] for row in rows for n in range(1, len(row))}
        self.row = []

    def choose(self, tokens, positions):
        assert len(tokens) == 1
        for token, position in zip(tokens[0].tolist(), positions[0].tolist()):
            assert position <= len(self.row), "a token was left out"
            self.row[position:] = [token]
        choice = torch.zeros_like(tokens)
        choice[0, -1] = self.after.get(tuple(self.row), 0)
        return choice
