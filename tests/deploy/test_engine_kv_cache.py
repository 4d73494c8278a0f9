"""Slots of rows being decoded, and the cache of prefixes."""

import pytest
import torch

from deploy.local_service.base_model import ModelShape
from deploy.local_service.kv_cache import BLOCK_TOKENS, DecodeSlots, PrefixCache, block_names

SHAPE = ModelShape(
    hidden=4, layers=2, heads=2, kv_heads=1, head_dim=2, mlp=4, vocab=9, max_positions=99,
    norm_eps=1e-5, rope_theta=1e4,
)  # fmt: skip


@pytest.fixture
def slots():
    return DecodeSlots(SHAPE, dtype=torch.float32)


def test_memory_starts_as_zeros_and_in_whole_quanta(slots):
    slots.reserve(slots=3, tokens=40)
    assert (slots.slots, slots.capacity) == (8, 64)
    assert not slots.keys.any()
    assert not slots.values.any()


def test_growing_keeps_what_was_written(slots):
    slots.reserve(slots=1, tokens=2)
    k = torch.arange(1.0, 5.0).view(1, 2, 1, 2)
    slots.write(1, torch.tensor([3]), k, k + 10)
    slots.reserve(slots=9, tokens=33)
    assert (slots.slots, slots.capacity) == (16, 64)
    assert slots.keys[1, 3, 0, :2].tolist() == [[1, 2], [3, 4]]
    assert slots.values[1, 3, 0, :2].tolist() == [[11, 12], [13, 14]]
    assert slots.keys.sum() == 10


def test_moved_slot_is_read_back(slots):
    slots.reserve(slots=2, tokens=2)
    k = torch.arange(1.0, 5.0).view(1, 2, 1, 2)
    slots.write(0, torch.tensor([1]), k, -k)
    slots.move(1, 0, tokens=2)
    block = slots.read(0, start=1, end=2)
    assert block.shape == (2, 2, 1, 1, 2)
    assert block[0, 0].flatten().tolist() == [3, 4]
    assert block[0, 1].flatten().tolist() == [-3, -4]


def test_bytes_are_those_of_the_reservation(slots):
    slots.reserve(slots=9, tokens=33)
    expected = slots.keys.nbytes + slots.values.nbytes
    assert slots.bytes_for(slots=9, tokens=33) == expected


def test_block_name_covers_all_tokens_before():
    tokens = list(range(BLOCK_TOKENS * 2))
    names = block_names("w", tokens)
    assert len(names) == 2
    assert block_names("w", tokens[:-1]) == names[:1]
    assert block_names("other", tokens)[0] != names[0]
    assert block_names("w", [99, *tokens[1:]])[1] != names[1]


def filled(cache, weights, tokens):
    for name, _ in cache.missing(weights, tokens):
        cache.put(name, torch.zeros(2, 2, BLOCK_TOKENS, 1, 2))


def test_longest_known_prefix_is_found_and_a_token_left_over():
    cache = PrefixCache()
    tokens = list(range(BLOCK_TOKENS * 3))
    filled(cache, "w", tokens)
    assert len(cache.find("w", [*tokens, 5])) == 3
    assert len(cache.find("w", tokens)) == 2
    assert len(cache.find("w", [*tokens[:20], 77, *tokens[21:]])) == 1
    assert cache.find("v", tokens) == []


def test_least_recently_used_blocks_go_first():
    size = 2 * 2 * BLOCK_TOKENS * 2 * 4
    cache = PrefixCache(max_bytes=2 * size)
    prompts = [[n] * (BLOCK_TOKENS + 1) for n in range(3)]
    filled(cache, "w", prompts[0])
    filled(cache, "w", prompts[1])
    assert len(cache.find("w", prompts[0])) == 1
    filled(cache, "w", prompts[2])
    assert [len(cache.find("w", prompt)) for prompt in prompts] == [1, 0, 1]
    assert cache.size_bytes == 2 * size
