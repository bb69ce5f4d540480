"""CachingAllocator: what PyTorch's CUDA allocator does with a sequence of requests. Plain Python, no torch, no card."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping

from vramlab.units import MiB, format_bytes, round_up

BLOCK = 512  # every request is rounded up to a multiple of this
SMALL = MiB  # requests up to this size come from the small pool
SMALL_SEGMENT = 2 * MiB  # what the small pool takes from the driver, and its page with expandable segments
LARGE_SEGMENT = 20 * MiB  # what larger requests below 10 MiB share, and the large pool's page
OWN_SEGMENT = 10 * MiB  # requests from here on get a segment of their own...
OWN_ROUNDING = 2 * MiB  # ...rounded up to a multiple of this
ADDRESSES = 1 << 46  # room for one expandable segment: more than any card


class OutOfMemoryError(MemoryError):
    """No room, even after all cached segments went back to the driver.

    ``requested`` is what was asked for, ``segment`` what the driver was asked for (the number in PyTorch's message),
    both in bytes.
    """

    def __init__(self, requested: int, segment: int, allocator: CachingAllocator) -> None:
        self.requested, self.segment = requested, segment
        super().__init__(
            f"Tried to allocate {format_bytes(segment)} for {format_bytes(requested)}: "
            f"{format_bytes(allocator.capacity or 0)} capacity, {format_bytes(allocator.reserved)} reserved, "
            f"{format_bytes(allocator.allocated)} of that allocated."
        )


Pool = tuple[bool, int]
"""Whether it serves small requests, and for which stream."""


class Block:
    """A piece of a segment: handed out, free, or (with expandable segments) an address range without memory."""

    __slots__ = ("address", "free", "mapped", "next", "pool", "previous", "size")

    def __init__(self, address: int, size: int, pool: Pool, mapped: bool = True) -> None:
        self.address, self.size, self.pool, self.mapped = address, size, pool, mapped
        self.free = True
        self.previous: Block | None = None
        self.next: Block | None = None


class CachingAllocator:
    """PyTorch's CUDA caching allocator with default options.

    Args:
        capacity: bytes that may be taken from the driver; None for no limit.
        expandable_segments: as ``PYTORCH_ALLOC_CONF=expandable_segments:True``.

    ``allocated`` are bytes in blocks that are handed out (a block may be larger than its request), ``reserved`` bytes
    taken from the driver; ``peak_allocated`` and ``peak_reserved`` their highest values. Each stream has memory of its own: what was
    allocated on one and released is used again on that one only.

    Raises:
        ValueError: a capacity that is not positive.

    Reference: ``c10/cuda/CUDACachingAllocator.cpp``: ``malloc``, ``get_free_block``, ``should_split``,
    ``try_merge_blocks``, ``release_cached_blocks``, ``find_expandable_block``, ``map_block``, ``unmap_block``. Not
    modelled: ``record_stream``, private pools, rounding to powers of two, ``max_split_size``, garbage collection.
    """

    def __init__(self, capacity: int | None = None, expandable_segments: bool = False) -> None:
        if capacity is not None and capacity <= 0:
            raise ValueError(f"A capacity is a positive number of bytes, or None for no limit; got {capacity}.")
        self.capacity, self.expandable = capacity, expandable_segments
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = self.retries = 0
        self._live: dict[Hashable, Block] = {}
        self._replayed: dict[Hashable, int] = {}  # bytes of each handle that a replay knows
        self._blocks: dict[int, Block] = {}  # by address
        self._free: defaultdict[Pool, list[tuple[int, int]]] = defaultdict(list)  # sorted (size, address)
        self._unmapped: defaultdict[Pool, list[int]] = defaultdict(list)  # sorted addresses
        self._next_address = 1 << 40

    def malloc(self, handle: Hashable, nbytes: int, stream: int = 0) -> None:
        """Hand out a block of a stream's memory; 0 bytes need none.

        Raises:
            ValueError: a negative size, or a handle that has a block already.
            OutOfMemoryError: no room.
        """
        if nbytes < 0:
            raise ValueError(f"A request is at least 0 bytes, got {nbytes}.")
        if handle in self._live:
            raise ValueError(f"Handle {handle!r} has a block already; free it first.")
        if nbytes == 0:
            return
        size = round_up(nbytes, BLOCK)
        pool = size <= SMALL, stream
        block = self._best_fit(size, pool) or self._from_driver(size, pool)
        if block is None:
            self.release_cached()
            self.retries += 1
            block = self._from_driver(size, pool)
        if block is None:
            raise OutOfMemoryError(nbytes, _segment_size(size), self)
        self._split(block, size)
        block.free = False
        self._live[handle] = block
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def free(self, handle: Hashable) -> None:
        """Take a block back and merge it with free neighbours; a handle without one (0 bytes) is nothing."""
        block = self._live.pop(handle, None)
        if block is not None:
            self.allocated -= block.size
            self._give_back(block)

    def move(self, old: Hashable, new: Hashable) -> None:
        """What belonged to one handle belongs to another."""
        if old in self._live:
            self._live[new] = self._live.pop(old)

    def replay(
        self, events: Iterable[tuple[Hashable, int]], moves: Collection[int] = (), streams: Mapping[Hashable, int] | None = None
    ) -> None:
        """Hand out and take back the memory of a trace, or of the next part of one.

        Args:
            events: a handle and its bytes, negative where they are released; a handle with bytes that gets more is resized.
            moves: the numbers of the events whose handle takes over the block that the event before it has released.
            streams: of handles whose memory is not that of stream 0.

        Raises:
            OutOfMemoryError: no room.
        """
        held, streams = self._replayed, streams or {}
        waiting: Hashable = None
        for i, (handle, nbytes) in enumerate(events):
            before = held.pop(handle, 0)
            if i in moves:
                self.move(waiting, handle)
            elif i + 1 in moves:
                waiting = handle
                continue
            else:
                self.free(handle)
                self.malloc(handle, before + nbytes, streams.get(handle, 0))
            held[handle] = before + nbytes

    def reset_peaks(self) -> None:
        """The peaks start again from what is allocated and reserved now."""
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def release_cached(self) -> None:
        """Give back to the driver what is wholly free: segments, or pages of expandable ones (``empty_cache``)."""
        for (small, _), free in list(self._free.items()):
            for _, address in list(free):
                block = self._blocks[address]
                if self.expandable:
                    self._unmap(block, _page(small))
                elif block.previous is None and block.next is None:
                    free.remove((block.size, address))
                    del self._blocks[address]
                    self.reserved -= block.size

    @property
    def largest_hole(self) -> int:
        """Bytes of the largest free block."""
        return max((free[-1][0] for free in self._free.values() if free), default=0)

    @property
    def segments(self) -> list[int]:
        """Sizes of the segments taken from the driver, in the order of their addresses; of expandable ones what is mapped."""
        sizes = []
        for first in sorted(address for address, block in self._blocks.items() if block.previous is None):
            block: Block | None = self._blocks[first]
            mapped = 0
            while block is not None:
                mapped += block.size if block.mapped else 0
                block = block.next
            sizes.append(mapped)
        return sizes

    # Finding a block

    def _best_fit(self, size: int, pool: Pool) -> Block | None:
        """The smallest free block that is large enough, of equal ones that with the lowest address."""
        free = self._free[pool]
        i = bisect_left(free, (size, 0))
        if i == len(free):
            return None
        if self.expandable:  # rather one that cannot grow much: the end of the segment stays free for large requests
            while i + 1 < len(free) and self._growable(free[i + 1]) < self._growable(free[i]):
                i += 1
        _, address = free.pop(i)
        return self._blocks[address]

    def _growable(self, entry: tuple[int, int]) -> int:
        size, address = entry
        after = self._blocks[address].next
        return size + (after.size if after is not None and not after.mapped else 0)

    def _from_driver(self, size: int, pool: Pool) -> Block | None:
        """Memory for a request from the driver; None if the capacity does not allow it."""
        if self.expandable:
            return self._expand(size, pool)
        segment = _segment_size(size)
        if not self._reserve(segment):
            return None
        return self._segment(segment, pool)

    def _reserve(self, nbytes: int) -> bool:
        if self.capacity is not None and self.reserved + nbytes > self.capacity:
            return False
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def _segment(self, size: int, pool: Pool, mapped: bool = True) -> Block:
        block = Block(self._next_address, size, pool, mapped)
        self._next_address += size + BLOCK  # segments never touch
        self._blocks[block.address] = block
        return block

    # Splitting and merging

    def _split(self, block: Block, size: int) -> None:
        """Keep the low addresses, and put the rest back if it is worth it."""
        rest = block.size - size
        if rest >= BLOCK if block.pool[0] or self.expandable else rest > SMALL:
            self._insert(self._cut(block, size))

    def _cut(self, block: Block, size: int) -> Block:
        """Cut a block in two; returns the part after ``size`` bytes, which is in no list yet."""
        tail = Block(block.address + size, block.size - size, block.pool, block.mapped)
        tail.previous, tail.next, block.next = block, block.next, tail
        if tail.next is not None:
            tail.next.previous = tail
        self._blocks[tail.address] = tail
        block.size = size
        return tail

    def _give_back(self, block: Block) -> None:
        block.free = True
        for neighbour in (block.previous, block.next):
            if neighbour is not None and neighbour.free and neighbour.mapped == block.mapped:
                self._remove(neighbour)
                block = self._join(*sorted((block, neighbour), key=lambda b: b.address))
        self._insert(block)

    def _join(self, first: Block, second: Block) -> Block:
        first.size += second.size
        first.next = second.next
        if second.next is not None:
            second.next.previous = first
        del self._blocks[second.address]
        return first

    def _insert(self, block: Block) -> None:
        if block.mapped:
            insort(self._free[block.pool], (block.size, block.address))
        else:
            insort(self._unmapped[block.pool], block.address)

    def _remove(self, block: Block) -> None:
        if block.mapped:
            free = self._free[block.pool]
            free.pop(bisect_left(free, (block.size, block.address)))
        else:
            addresses = self._unmapped[block.pool]
            addresses.pop(bisect_left(addresses, block.address))

    # Expandable segments

    def _expand(self, size: int, pool: Pool) -> Block | None:
        """Map pages behind a free block, or at the first place where free and unmapped ranges add up to the size."""
        start = self._room(size, pool)
        if not start.mapped:
            mapped = self._map(start, min(start.size, size))
            if mapped is None:
                return None
            start = mapped
        while start.size < size:
            following = start.next
            assert following is not None
            mapped = self._map(following, min(size - start.size, following.size))
            if mapped is None:
                return None
            start = mapped
        self._remove(start)
        return start

    def _room(self, size: int, pool: Pool) -> Block:
        for address in self._unmapped[pool]:
            start = self._blocks[address]
            if start.previous is not None and start.previous.free:
                start = start.previous
            available, block = 0, start
            while block is not None and block.free and available < size:
                available += block.size
                block = block.next  # type: ignore[assignment]
            if available >= size:
                return start
        reservation = self._segment(ADDRESSES, pool, mapped=False)
        self._insert(reservation)
        return reservation

    def _map(self, block: Block, size: int) -> Block | None:
        """Give the start of an unmapped range memory, in whole pages; returns the free block it is part of then."""
        nbytes = round_up(size, _page(block.pool[0]))
        if not self._reserve(nbytes):
            return None
        self._remove(block)
        if nbytes < block.size:
            self._insert(self._cut(block, nbytes))
        block.mapped = True
        before = block.previous
        joined = before if before is not None and before.free and before.mapped else block
        self._give_back(block)
        return joined

    def _unmap(self, block: Block, page: int) -> None:
        """Return the whole pages inside a free block to the driver."""
        start = self._first_address(block)
        begin = start + round_up(block.address - start, page)
        end = start + (block.address + block.size - start) // page * page
        if begin >= end:
            return
        self._remove(block)
        if begin > block.address:
            inner = self._cut(block, begin - block.address)
            self._insert(block)
            block = inner
        if end < block.address + block.size:
            self._insert(self._cut(block, end - block.address))
        self.reserved -= block.size
        block.mapped = False
        self._give_back(block)

    @staticmethod
    def _first_address(block: Block) -> int:
        while block.previous is not None:
            block = block.previous
        return block.address


def _segment_size(size: int) -> int:
    """What is taken from the driver for a rounded request."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < OWN_SEGMENT else round_up(size, OWN_ROUNDING)


def _page(small: bool) -> int:
    return SMALL_SEGMENT if small else LARGE_SEGMENT
