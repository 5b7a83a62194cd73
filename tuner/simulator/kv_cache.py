"""KV cache blocks with a prefix cache, by count: no tensors, only who holds what."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field


def hash_blocks(token_ids: Sequence[int], *, block_size: int) -> tuple[int, ...]:
    """Return the hash chain over the full blocks of a prompt.

    Each hash covers its block and everything before it, so equal hashes mean equal prefixes.
    """
    hashes: list[int] = []
    parent = 0
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = hash((parent, tuple(token_ids[start : start + block_size])))
        hashes.append(parent)
    return tuple(hashes)


@dataclass(slots=True)
class HeldBlocks:
    """The blocks one request holds: `private` ones by count, `shared` ones by hash, in order."""

    private: int = 0
    shared: list[int] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Blocks held in all."""
        return self.private + len(self.shared)


class KvCache:
    """Blocks of a KV cache: blank, held by one request, or holding a known prefix.

    Blocks whose prefix is known and that nobody holds stay cached until their space is needed;
    the least recently released goes first, and of one request its tail goes before its head.
    One deviation from vLLM: blank blocks are always taken before cached ones are evicted.
    Output tokens are not put into the prefix cache, prompts are.
    """

    def __init__(self, *, n_blocks: int, block_size: int, prefix_caching: bool = True) -> None:
        if n_blocks < 1 or block_size < 1:
            raise ValueError(
                f"a KV cache needs at least one block of one token, got {n_blocks=}, {block_size=}"
            )
        self.n_blocks = n_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._private = 0
        self._holders: dict[int, int] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def free_blocks(self) -> int:
        """Blocks that can be taken, cached ones that nobody holds included."""
        return self.n_blocks - self._private - len(self._holders)

    @property
    def cached_blocks(self) -> int:
        """Blocks that hold a known prefix, held or not."""
        return len(self._holders) + len(self._evictable)

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1."""
        return 1.0 - self.free_blocks / self.n_blocks

    def blocks_for(self, n_tokens: int) -> int:
        """Return how many blocks `n_tokens` tokens need."""
        return -(-n_tokens // self.block_size)

    def matched_blocks(self, hashes: Sequence[int], *, at_most: int) -> int:
        """Return how many leading blocks of a prompt are cached."""
        if not self.prefix_caching:
            return 0
        n = 0
        for block in hashes[:at_most]:
            if block not in self._holders and block not in self._evictable:
                break
            n += 1
        return n

    def evictable_among(self, hashes: Sequence[int]) -> int:
        """Return how many of these cached blocks nobody holds: holding them uses free blocks."""
        return sum(1 for block in hashes if block in self._evictable)

    def hold_cached(self, held: HeldBlocks, hashes: Sequence[int]) -> None:
        """Let a request share cached blocks that `matched_blocks` found."""
        for block in hashes:
            self._holders[block] = self._holders.get(block, 0) + 1
            self._evictable.pop(block, None)
            held.shared.append(block)

    def take(self, held: HeldBlocks, n_blocks: int) -> None:
        """Give a request `n_blocks` blocks of its own, evicting cached prefixes as needed.

        Raises:
            RuntimeError: fewer blocks are free; ask `free_blocks` first.
        """
        if n_blocks > self.free_blocks:
            raise RuntimeError(f"{n_blocks} KV blocks wanted, {self.free_blocks} are free")
        blank = self.free_blocks - len(self._evictable)
        for _ in range(n_blocks - blank):
            self._evictable.popitem(last=False)
        self._private += n_blocks
        held.private += n_blocks

    def publish(self, held: HeldBlocks, block: int) -> bool:
        """Make one of the request's own blocks findable by its hash.

        Returns False, and leaves the block private, where the prefix is already cached.
        """
        if not self.prefix_caching or block in self._holders or block in self._evictable:
            return False
        self._private -= 1
        held.private -= 1
        self._holders[block] = 1
        held.shared.append(block)
        return True

    def release(self, held: HeldBlocks) -> None:
        """Take back all blocks of a request; its known prefixes stay cached while space lasts."""
        self._private -= held.private
        for block in reversed(held.shared):
            remaining = self._holders[block] - 1
            if remaining:
                self._holders[block] = remaining
            else:
                del self._holders[block]
                self._evictable[block] = None
        held.private = 0
        held.shared.clear()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; refused (False) while any block is held, as in vLLM."""
        if self._private or self._holders:
            return False
        self._evictable.clear()
        return True
