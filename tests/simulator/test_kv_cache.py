"""The KV cache: who holds which blocks, and what stays cached."""

import pytest

from tuner.simulator.kv_cache import HeldBlocks, KvCache, hash_blocks


def test_hash_chain_covers_everything_before() -> None:
    """Equal prefixes have equal hashes, and a change in front changes all that follow."""
    same = hash_blocks([1, 2, 3, 4, 5, 6], block_size=2)
    assert len(same) == 3
    assert hash_blocks([1, 2, 3, 4, 9, 9], block_size=2)[:2] == same[:2]
    assert not set(hash_blocks([0, 2, 3, 4, 5, 6], block_size=2)) & set(same)
    assert hash_blocks([1], block_size=2) == ()


def test_least_recently_released_prefix_goes_first() -> None:
    """Space is taken from the oldest released prefix, its tail before its head."""
    kv = KvCache(n_blocks=4, block_size=2)
    for hashes in ((1, 2), (3, 4)):
        held = HeldBlocks()
        kv.take(held, 2)
        for block in hashes:
            assert kv.publish(held, block)
        kv.release(held)
    assert kv.free_blocks == 4
    kv.take(HeldBlocks(), 1)
    assert kv.matched_blocks((1, 2), at_most=2) == 1
    assert kv.matched_blocks((3, 4), at_most=2) == 2


def test_shared_blocks_are_counted_once() -> None:
    """A block two requests share is free only when both have released it."""
    kv = KvCache(n_blocks=3, block_size=2)
    first, second = HeldBlocks(), HeldBlocks()
    kv.take(first, 1)
    kv.publish(first, 7)
    kv.hold_cached(second, [7])
    assert kv.free_blocks == 2
    kv.release(first)
    assert kv.free_blocks == 2
    kv.release(second)
    assert kv.free_blocks == 3
    assert kv.evictable_among([7]) == 1


def test_reset_is_refused_while_blocks_are_held() -> None:
    """Resetting the prefix cache works only on an idle engine."""
    kv = KvCache(n_blocks=3, block_size=2)
    held = HeldBlocks()
    kv.take(held, 1)
    kv.publish(held, 7)
    assert not kv.reset_prefix_cache()
    kv.release(held)
    assert kv.reset_prefix_cache()
    assert kv.cached_blocks == 0


def test_prefix_caching_off_finds_nothing() -> None:
    """With prefix caching off nothing is published or found."""
    kv = KvCache(n_blocks=3, block_size=2, prefix_caching=False)
    held = HeldBlocks()
    kv.take(held, 1)
    assert not kv.publish(held, 7)
    assert kv.matched_blocks([7], at_most=1) == 0


def test_misuse_is_refused() -> None:
    """A cache without blocks, and taking more than is free, are errors."""
    with pytest.raises(ValueError, match="at least one block"):
        KvCache(n_blocks=0, block_size=16)
    kv = KvCache(n_blocks=1, block_size=16)
    with pytest.raises(RuntimeError, match="1 are free"):
        kv.take(HeldBlocks(), 2)
