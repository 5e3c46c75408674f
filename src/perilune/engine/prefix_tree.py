"""The prefix cache: a tree of full blocks by the hash of their tokens, and the order of eviction.

A node stands for the tokens of one full block. It holds one block in each pool that caches their keys and
values. Its parent is the node of the preceding tokens. A request can continue a prefix if the layers without
a window have all of its blocks, and the layers with a window have the blocks that the next query sees. Two
rules keep the cache free of blocks that no request can use again (compare SGLang's unified radix tree):

* Layers without a window evict the end of a branch before its beginning.
* Layers with a window first evict blocks that lie outside the last window of every *end*. An end is a leaf,
  or a node from which several requests continued. When the last window of a leaf is evicted, its branch is
  removed up to the next end.

The least recently used leaf is evicted first. A request may announce in how many seconds its session returns,
for example because a tool is running. Until three times this time has passed, its leaf is evicted after all
other leaves. Among such leaves, the one whose session returns last is evicted first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from perilune.engine.blocks import BLOCK, NULL_BLOCK, BlockPool, Blocks, window_start
from perilune.engine.offload import OffloadStore

_PATIENCE_FACTOR = 2.0  # a late session keeps its priority for this many times the announced pause


@dataclass(slots=True, eq=False)
class Node:
    """The tokens of a full block.

    Attributes:
        digest: hash of these tokens and all tokens before.
        parent: the node of the preceding block; None for the first.
        column: index of the block in the sequence.
        blocks: the block in each pool, or the null block.
        pins: by pool, the number of ends whose last window contains the node.
        children: number of nodes that continue this one.
        last_used: value of the release counter when the node was last released.
        expected_return: time in seconds at which the session is expected, and time until which it is
            expected; 0 if unknown.
        heap_entry: number of the node's entry in the heap of leaves, or 0.
    """

    digest: bytes
    parent: Node | None
    column: int
    blocks: list[int]
    pins: list[int]
    children: int = 0
    last_used: int = 0
    expected_return: tuple[float, float] = (0.0, 0.0)
    heap_entry: int = 0


Leaf = tuple[int, float, int, Node]
"""Priority class (1 with an announced return), order in the class, number of the entry, and the node."""


@dataclass(slots=True)
class PrefixTree:
    """The nodes of all pools. The tree updates the number of cached blocks of each pool.

    Args:
        windows: by pool, the number of tokens that a query sees in its layers; None for all preceding tokens.
        clock: returns seconds; used for announced returns.
        store: receives the evicted blocks.
        block_size: tokens per block.
    """

    windows: tuple[int | None, ...]
    pools: tuple[BlockPool, ...]
    clock: Callable[[], float]
    store: OffloadStore | None = None
    block_size: int = BLOCK
    _nodes: dict[bytes, Node] = field(default_factory=dict)
    _node_of_block: list[dict[int, Node]] = field(default_factory=list)  # by pool and block
    _spare: list[dict[int, Node]] = field(default_factory=list)  # unreferenced, not pinned, oldest first
    _leaves: list[Leaf] = field(default_factory=list)  # a heap, including outdated entries
    _expected: list[tuple[float, int, Node]] = field(default_factory=list)  # a heap by the end of patience
    _forks: dict[Node, int] = field(default_factory=dict)  # with the last use, oldest first
    _evicted: list[dict[bytes, int]] = field(default_factory=list)  # to store, before they are overwritten
    _releases: int = 0
    _entries: int = 0

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Empty the tree. Blocks with references keep them."""
        for pool, holders in zip(self.pools, self._node_of_block, strict=False):
            for block in holders:
                if not pool.references[block]:
                    pool.free(block)
            pool.cached = 0
        self._node_of_block = [{} for _ in self.pools]
        self._spare = [{} for _ in self.pools]
        for kept in (self._nodes, self._leaves, self._expected, self._forks):
            kept.clear()
        self._evicted = [{} for _ in self.pools]
        if self.store is not None:
            self.store.clear()

    # -- finding -----------------------------------------------------------------------------------------

    def match_nodes(self, digests: Sequence[bytes]) -> list[Node | None]:
        """Return the nodes of the longest prefix that a request with these digests can continue."""
        path = [self._nodes.get(digest) for digest in digests]
        return path[: self._longest_usable(self._find_missing(path))]

    def _find_missing(self, path: Sequence[Node | None]) -> list[list[bool]]:
        """Return, for each pool, which columns have no block in it."""
        return [
            [node is None or node.blocks[index] == NULL_BLOCK for node in path]
            for index in range(len(self.windows))
        ]

    def _longest_usable(self, missing: Sequence[Sequence[bool]]) -> int:
        """Return the length of the longest prefix that can be continued, given missing columns by pool."""
        lengths = np.arange(len(missing[0]) + 1)
        possible = np.ones(len(lengths), dtype=np.bool_)
        for window, absent in zip(self.windows, missing, strict=True):
            # For each length, the start of the unbroken run of blocks that ends there.
            begins = np.maximum.accumulate(np.where([False, *absent], lengths, 0))
            possible &= begins <= window_start(window, lengths * self.block_size, self.block_size)
        return int(np.flatnonzero(possible)[-1])

    def window_starts(self, computed: int) -> list[int]:
        """Return the first column that a query at position `computed` sees, for each pool."""
        return [int(window_start(window, np.array(computed), self.block_size)) for window in self.windows]

    def acquire_prefix(self, digests: Sequence[bytes]) -> Blocks:
        """Reference and return the blocks int32[W, C] of the longest cached prefix; null outside a window."""
        self._pin_fork(digests)
        path = [self._nodes.get(digest) for digest in digests]
        missing = self._find_missing(path)
        known = self._longest_usable(missing)
        loaded = None if self.store is None else self._load_stored(self.store, digests, path, missing, known)
        return self._reference_path(path[:known], missing) if loaded is None else loaded

    def _load_stored(
        self,
        store: OffloadStore,
        digests: Sequence[bytes],
        path: Sequence[Node | None],
        missing: Sequence[Sequence[bool]],
        known: int,
    ) -> Blocks | None:
        """Extend the prefix of `known` columns with offloaded blocks.

        Return None if the store lacks a needed block, loading would be slower than computing, or not enough
        blocks are free.
        """
        unavailable = [
            [absent and (index, key) not in store for absent, key in zip(columns, digests, strict=True)]
            for index, columns in enumerate(missing)
        ]
        length = self._longest_usable(unavailable)
        wanted = [
            [column for column in range(start, length) if absent[column]]
            for start, absent in zip(self.window_starts(length * self.block_size), missing, strict=True)
        ]
        keys = [(index, digests[column]) for index, columns in enumerate(wanted) for column in columns]
        if length <= known or not store.is_worth_loading(keys, (length - known) * self.block_size):
            return None
        # Read everything first: allocating evicts blocks, and storing them may drop others from the store.
        contents = [
            store.read(index, [digests[column] for column in columns]) for index, columns in enumerate(wanted)
        ]
        if any(content is None for content in contents):
            return None
        table = self._reference_path(path[:length], missing)
        if any(len(columns) > pool.num_available for columns, pool in zip(wanted, self.pools, strict=True)):
            for index, blocks in enumerate(table):
                self.release(index, blocks)
            return None
        for index, (columns, content) in enumerate(zip(wanted, contents, strict=True)):
            table[index, columns] = self.allocate(index, len(columns))
            store.write(index, table[index, columns], content or [])
        self.insert(table, digests)
        return table

    def _reference_path(self, path: Sequence[Node | None], missing: Sequence[Sequence[bool]]) -> Blocks:
        """Add a reference to each block that the next query sees, and return the tables int32[W, C]."""
        table = np.full((len(self.pools), len(path)), NULL_BLOCK, dtype=np.int32)
        for index, start in enumerate(self.window_starts(len(path) * self.block_size)):
            for column, node in enumerate(path[start:], start):
                if node is not None and not missing[index][column]:
                    table[index, column] = self._add_reference(index, node)
        return table

    def allocate(self, index: int, count: int) -> Blocks:
        """Allocate blocks int32[count] of a pool, evicting others if necessary.

        The caller has checked `num_available`.
        """
        pool = self.pools[index]
        assert count <= pool.num_available, "more blocks were allocated than are available"
        while pool.num_free < count:
            self.evict(index)
        for number, evicted in enumerate(self._evicted):
            if evicted and self.store is not None:
                self.store.save(number, list(evicted.values()), list(evicted))
                evicted.clear()
        return pool.allocate(count)

    def insert(self, table: Blocks, digests: Sequence[bytes]) -> None:
        """Add the full blocks of a referenced table int32[W, C] under the digests of its columns.

        Where the tree already has a block of the same tokens, the table uses that block and releases its own.
        """
        parent: Node | None = None
        for column, (blocks, digest) in enumerate(zip(table.T.tolist(), digests, strict=False)):
            node = self._nodes.get(digest)
            if node is None and any(blocks):
                node = self._add_node(digest, parent, column)
            for index, block in enumerate(blocks if node is not None else ()):
                if block == NULL_BLOCK or node is None or node.blocks[index] == block:
                    continue
                if node.blocks[index] == NULL_BLOCK:
                    node.blocks[index] = block
                    self._node_of_block[index][block] = node
                else:
                    table[index, column] = self._add_reference(index, node)
                    self.release(index, np.array([block], dtype=np.int32))
            parent = node

    def _add_reference(self, index: int, node: Node) -> int:
        pool, block = self.pools[index], node.blocks[index]
        pool.references[block] += 1
        if pool.references[block] == 1:
            pool.cached -= 1
            self._spare[index].pop(block, None)
            if node.heap_entry:
                self._unmark_leaf(node)
        return block

    def _add_node(self, digest: bytes, parent: Node | None, column: int) -> Node:
        empty = [NULL_BLOCK] * len(self.pools)
        node = self._nodes[digest] = Node(digest, parent, column, empty, [0] * len(self.pools))
        if parent is not None:
            parent.children += 1
            if parent.heap_entry:
                self._unmark_leaf(parent)
        return node

    # -- releasing ---------------------------------------------------------------------------------------

    def release(self, index: int, blocks: Blocks, returns_in: float = 0.0) -> None:
        """Remove a reference from each of `blocks` of one pool, distinct except for the null block.

        Args:
            returns_in: seconds until the session of these blocks is expected again; 0 if unknown.
        """
        pool = self.pools[index]
        self._releases += 1
        ends: list[Node] = []
        for block in pool.release(blocks):
            node = self._node_of_block[index].get(block)
            if node is None:
                pool.free(block)
                continue
            pool.cached += 1
            node.last_used = self._releases
            self._update_spare(index, node)
            if not node.children and not self._is_referenced(node):
                ends.append(node)
        for node in ends:
            if node.heap_entry or self._nodes.get(node.digest) is not node:
                continue  # already handled with another end
            if returns_in:
                due = self.clock() + returns_in
                node.expected_return = due, due + _PATIENCE_FACTOR * returns_in
            self._make_leaf(node)

    def evict(self, index: int) -> None:
        """Free at least one block of a pool that has cached blocks."""
        pool, spare = self.pools[index], self._spare[index]
        before = pool.num_free
        while pool.num_free == before:
            if spare:
                block = next(iter(spare))
                node = spare.pop(block)
                node.blocks[index] = NULL_BLOCK
                del self._node_of_block[index][block]
                pool.cached -= 1
                pool.free(block)
                continue
            leaf = self._oldest_leaf()
            fork = next(iter(self._forks), None) if self.windows[index] is not None else None
            if fork is not None and (leaf is None or self._forks[fork] < leaf.last_used):
                self._unpin_fork(fork)
            else:
                assert leaf is not None, "a cached block belongs to no leaf"
                self._remove_branch(leaf)

    def _make_leaf(self, node: Node) -> None:
        """Make an unreferenced node without children a leaf; remove its branch if it cannot be continued."""
        if not self._is_continuable(node):
            self._remove_branch(node)
            return
        self._unpin_fork(node)
        self._change_pins(node, 1)
        self._push_leaf(node)

    def _push_leaf(self, leaf: Node) -> None:
        """Add a leaf to the heap of those that can be evicted."""
        self._entries += 1
        leaf.heap_entry = self._entries
        due, until = leaf.expected_return
        order = (1, -due) if due else (0, float(leaf.last_used))
        heapq.heappush(self._leaves, (*order, leaf.heap_entry, leaf))
        if due:
            heapq.heappush(self._expected, (until, leaf.heap_entry, leaf))
        if len(self._leaves) > 2 * len(self._nodes) + 64:
            self._leaves = [entry for entry in self._leaves if entry[3].heap_entry == entry[2]]
            heapq.heapify(self._leaves)

    def _unmark_leaf(self, node: Node) -> None:
        node.heap_entry, node.expected_return = 0, (0.0, 0.0)
        self._change_pins(node, -1)

    def _oldest_leaf(self) -> Node | None:
        while self._expected and self._expected[0][0] < self.clock():
            _, entry, node = heapq.heappop(self._expected)
            if node.heap_entry == entry:
                node.expected_return = 0.0, 0.0
                self._push_leaf(node)
        while self._leaves:
            _, _, entry, node = self._leaves[0]
            if node.heap_entry == entry:
                return node
            heapq.heappop(self._leaves)
        return None

    def _remove_branch(self, leaf: Node) -> None:
        """Remove a leaf and its ancestors, up to a node that is in use or that a request can continue."""
        expected_return = leaf.expected_return
        if leaf.heap_entry:
            self._unmark_leaf(leaf)
            self._offload_windows(leaf)
        node: Node | None = leaf
        while node is not None:
            parent = node.parent
            self._unpin_fork(node)
            self._remove_node(node)
            if parent is None:
                return
            parent.children -= 1
            if parent.children or self._is_referenced(parent):
                return
            parent.last_used, parent.expected_return = max(parent.last_used, leaf.last_used), expected_return
            if self._is_continuable(parent):
                self._make_leaf(parent)
                return
            node = parent

    def _offload_windows(self, leaf: Node) -> None:
        """Mark the last window of a leaf for offloading."""
        if self.store is not None:
            for index, window in enumerate(self.windows):
                if window is not None:
                    for node in self._last_window(leaf, window):
                        self._evicted[index][node.digest] = node.blocks[index]

    def _remove_node(self, node: Node) -> None:
        for index, block in enumerate(node.blocks):
            if block != NULL_BLOCK:
                if self.store is not None and self.windows[index] is None:
                    self._evicted[index][node.digest] = block
                del self._node_of_block[index][block]
                self._spare[index].pop(block, None)
                self.pools[index].cached -= 1
                self.pools[index].free(block)
        del self._nodes[node.digest]

    # -- windows -----------------------------------------------------------------------------------------

    def _pin_fork(self, digests: Sequence[bytes]) -> None:
        """Pin the last window of the node at which a request with these digests diverges from others."""
        if not any(self.windows):
            return
        known = [self._nodes[digest] for digest in takewhile(self._nodes.__contains__, digests)]
        if known and known[-1].children:
            if self._forks.pop(known[-1], None) is None:
                self._change_pins(known[-1], 1)
            self._forks[known[-1]] = self._releases

    def _unpin_fork(self, node: Node) -> None:
        if self._forks.pop(node, None) is not None:
            self._change_pins(node, -1)

    def _change_pins(self, end: Node, by: int) -> None:
        """Add `by` to the pins of the last window before `end`."""
        for index, window in enumerate(self.windows):
            if window is not None:
                for node in self._last_window(end, window):
                    node.pins[index] += by
                    self._update_spare(index, node)

    def _update_spare(self, index: int, node: Node) -> None:
        """Add an unreferenced block to the spare blocks if it has no pins, otherwise remove it."""
        block = node.blocks[index]
        if self.windows[index] is None or block == NULL_BLOCK or self.pools[index].references[block]:
            return
        if node.pins[index]:
            self._spare[index].pop(block, None)
        else:
            self._spare[index].setdefault(block, node)

    def _is_continuable(self, end: Node) -> bool:
        """Return whether layers with a window have all blocks that a query after `end` sees."""
        for index, window in enumerate(self.windows):
            if window is not None:
                nodes = list(self._last_window(end, window))
                if nodes[-1].column > self._window_start(end, window) or any(
                    node.blocks[index] == NULL_BLOCK for node in nodes
                ):
                    return False
        return True

    def _last_window(self, end: Node, window: int) -> Iterator[Node]:
        """Yield the nodes that a query after `end` sees, from `end` backwards."""
        start = self._window_start(end, window)
        node: Node | None = end
        while node is not None and node.column >= start:
            yield node
            node = node.parent

    def _is_referenced(self, node: Node) -> bool:
        return any(
            block != NULL_BLOCK and pool.references[block]
            for block, pool in zip(node.blocks, self.pools, strict=True)
        )

    def _window_start(self, end: Node, window: int) -> int:
        """Return the first column that a query after `end` sees."""
        computed = np.array((end.column + 1) * self.block_size)
        return int(window_start(window, computed, self.block_size))
