"""The prefix cache: full blocks by the hash of their tokens, and which of them are evicted first.

A node is a full block of tokens, in every pool that has its keys and values; its parent is the block before.
A prefix can be continued if layers without a window have all of its blocks, and layers with a window those
that the next query sees. So two rules keep the cache free of blocks that no request can use again
(compare SGLang's unified radix tree):

* Layers without a window evict the end of a branch before its beginning.
* Layers with a window first evict blocks that lie outside the last window of every *end*: a leaf, or a node
  from which several requests continued. When the last window of a leaf is evicted, its branch goes with it,
  up to the next end.

The least recently used leaf goes first. A request may say when its session returns (a tool is running): such
a leaf goes after all others until that time, the one that returns last first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from perilune.engine.blocks import BLOCK, NULL_BLOCK, BlockPool, Blocks, columns_behind
from perilune.engine.offload import OffloadStore

_PATIENCE = 2.0  # a session that is late keeps its priority for this many times the announced pause


@dataclass(slots=True, eq=False)
class Node:
    """A full block.

    Attributes:
        column: its place in the sequence.
        blocks: its block in each pool, or the null block.
        needed: by pool, the number of ends whose last window contains it.
        children: nodes that continue it.
        used: when it was last released, in releases.
        returns: when its session is expected, and until when to believe that, in seconds; 0 if unknown.
        entry: number of its entry among the leaves, or 0.
    """

    digest: bytes
    parent: Node | None
    column: int
    blocks: list[int]
    needed: list[int]
    children: int = 0
    used: int = 0
    returns: tuple[float, float] = (0.0, 0.0)
    entry: int = 0


Leaf = tuple[int, float, int, Node]
"""Class (1 with an announced return), order in it, number of the entry, and the node."""


@dataclass(slots=True)
class PrefixTree:
    """Nodes of all pools, in which it counts the cached blocks.

    Args:
        windows: tokens that a query sees in the layers of each pool; None for all before it.
        clock: seconds, for announced returns.
        store: takes the evicted blocks.
        block_size: tokens per block.
    """

    windows: tuple[int | None, ...]
    pools: tuple[BlockPool, ...]
    clock: Callable[[], float]
    store: OffloadStore | None = None
    block_size: int = BLOCK
    _nodes: dict[bytes, Node] = field(default_factory=dict)
    _holders: list[dict[int, Node]] = field(default_factory=list)  # by pool and block
    _spare: list[dict[int, Node]] = field(default_factory=list)  # unreferenced and not needed, oldest first
    _leaves: list[Leaf] = field(default_factory=list)  # a heap, with entries that no longer hold
    _expected: list[tuple[float, int, Node]] = field(default_factory=list)  # a heap by the end of patience
    _forks: dict[Node, int] = field(default_factory=dict)  # with the last use, oldest first
    _evicted: list[dict[bytes, int]] = field(default_factory=list)  # to store, before they are overwritten
    _clocked: int = 0
    _entries: int = 0

    def __post_init__(self) -> None:
        self.forget_all()

    def forget_all(self) -> None:
        """Empty the tree. Blocks with references keep them."""
        for pool, holders in zip(self.pools, self._holders, strict=False):
            for block in holders:
                if not pool.references[block]:
                    pool.put_back(block)
            pool.cached = 0
        self._holders = [{} for _ in self.pools]
        self._spare = [{} for _ in self.pools]
        for kept in (self._nodes, self._leaves, self._expected, self._forks):
            kept.clear()
        self._evicted = [{} for _ in self.pools]
        if self.store is not None:
            self.store.forget_all()

    # -- finding -----------------------------------------------------------------------------------------

    def path(self, digests: Sequence[bytes]) -> list[Node | None]:
        """The nodes of a sequence, as far as a prefix that ends at one could be continued."""
        path = [self._nodes.get(digest) for digest in digests]
        return path[: self._longest(self._lacks(path))]

    def _lacks(self, path: Sequence[Node | None]) -> list[list[bool]]:
        """For each pool, the columns of which it has no block."""
        return [
            [node is None or node.blocks[index] == NULL_BLOCK for node in path]
            for index in range(len(self.windows))
        ]

    def _longest(self, missing: Sequence[Sequence[bool]]) -> int:
        """The longest prefix that can be continued, from the columns that each pool lacks."""
        lengths = np.arange(len(missing[0]) + 1)
        possible = np.ones(len(lengths), dtype=np.bool_)
        for window, lacks in zip(self.windows, missing, strict=True):
            # For each length, the start of the unbroken run of blocks that ends there.
            begins = np.maximum.accumulate(np.where([False, *lacks], lengths, 0))
            possible &= begins <= columns_behind(window, lengths * self.block_size, self.block_size)
        return int(np.flatnonzero(possible)[-1])

    def behind(self, computed: int) -> list[int]:
        """For each pool, the number of columns that no query from position `computed` on sees."""
        return [int(columns_behind(window, np.array(computed), self.block_size)) for window in self.windows]

    def find(self, digests: Sequence[bytes]) -> Blocks:
        """int32[W, C] of the longest prefix with one more reference each; null behind a window."""
        self._keep_fork(digests)
        path = [self._nodes.get(digest) for digest in digests]
        lacks = self._lacks(path)
        known = self._longest(lacks)
        loaded = None if self.store is None else self._load(self.store, digests, path, lacks, known)
        return self._refer_to(path[:known], lacks) if loaded is None else loaded

    def _load(
        self,
        store: OffloadStore,
        digests: Sequence[bytes],
        path: Sequence[Node | None],
        lacks: Sequence[Sequence[bool]],
        known: int,
    ) -> Blocks | None:
        """What `find` returns, with stored blocks; None if there are no more, or loading does not pay."""
        length = self._longest(
            [
                [lack and (index, digest) not in store for lack, digest in zip(of_pool, digests, strict=True)]
                for index, of_pool in enumerate(lacks)
            ]
        )
        wanted = [
            [column for column in range(start, length) if of_pool[column]]
            for start, of_pool in zip(self.behind(length * self.block_size), lacks, strict=True)
        ]
        keys = [(index, digests[column]) for index, columns in enumerate(wanted) for column in columns]
        if length <= known or not store.pays(keys, (length - known) * self.block_size):
            return None
        # All is read first, because allocating evicts blocks, for which the store may drop others.
        contents = [
            store.read(index, [digests[column] for column in columns]) for index, columns in enumerate(wanted)
        ]
        if any(content is None for content in contents):
            return None
        table = self._refer_to(path[:length], lacks)
        if any(len(columns) > pool.available for columns, pool in zip(wanted, self.pools, strict=True)):
            for index, blocks in enumerate(table):
                self.release(index, blocks)
            return None
        for index, (columns, content) in enumerate(zip(wanted, contents, strict=True)):
            table[index, columns] = self.allocate(index, len(columns))
            store.write(index, table[index, columns], content or [])
        self.record(table, digests)
        return table

    def _refer_to(self, path: Sequence[Node | None], lacks: Sequence[Sequence[bool]]) -> Blocks:
        """Tables int32[W, C] of the blocks that the next query sees, with one more reference each."""
        table = np.full((len(self.pools), len(path)), NULL_BLOCK, dtype=np.int32)
        for index, start in enumerate(self.behind(len(path) * self.block_size)):
            for column, node in enumerate(path[start:], start):
                if node is not None and not lacks[index][column]:
                    table[index, column] = self._refer(index, node)
        return table

    def allocate(self, index: int, count: int) -> Blocks:
        """int32[count] blocks of a pool with one reference each; the caller checked `available`."""
        pool = self.pools[index]
        assert count <= pool.available, "more blocks were allocated than are available"
        while pool.free < count:
            self.evict(index)
        for number, evicted in enumerate(self._evicted):
            if evicted and self.store is not None:
                self.store.put(number, list(evicted.values()), list(evicted))
                evicted.clear()
        return pool.take(count)

    def record(self, table: Blocks, digests: Sequence[bytes]) -> None:
        """Add the full blocks of a referenced table int32[W, C] under the digests of its columns.

        Where the tree has a block of the same tokens, the table takes it and gives up its own.
        """
        parent: Node | None = None
        for column, (blocks, digest) in enumerate(zip(table.T.tolist(), digests, strict=False)):
            node = self._nodes.get(digest)
            if node is None and any(blocks):
                node = self._add(digest, parent, column)
            for index, block in enumerate(blocks if node is not None else ()):
                if block == NULL_BLOCK or node is None or node.blocks[index] == block:
                    continue
                if node.blocks[index] == NULL_BLOCK:
                    node.blocks[index] = block
                    self._holders[index][block] = node
                else:
                    table[index, column] = self._refer(index, node)
                    self.release(index, np.array([block], dtype=np.int32))
            parent = node

    def _refer(self, index: int, node: Node) -> int:
        pool, block = self.pools[index], node.blocks[index]
        pool.references[block] += 1
        if pool.references[block] == 1:
            pool.cached -= 1
            self._spare[index].pop(block, None)
            if node.entry:
                self._leave_leaves(node)
        return block

    def _add(self, digest: bytes, parent: Node | None, column: int) -> Node:
        empty = [NULL_BLOCK] * len(self.pools)
        node = self._nodes[digest] = Node(digest, parent, column, empty, [0] * len(self.pools))
        if parent is not None:
            parent.children += 1
            if parent.entry:
                self._leave_leaves(parent)
        return node

    # -- releasing ---------------------------------------------------------------------------------------

    def release(self, index: int, blocks: Blocks, returns_in: float = 0.0) -> None:
        """Drop a reference to each of `blocks` of one pool, distinct except for the null block.

        Args:
            returns_in: seconds until the session of these blocks is expected again; 0 if unknown.
        """
        pool = self.pools[index]
        self._clocked += 1
        ends: list[Node] = []
        for block in pool.drop(blocks):
            node = self._holders[index].get(block)
            if node is None:
                pool.put_back(block)
                continue
            pool.cached += 1
            node.used = self._clocked
            self._sort(index, node)
            if not node.children and not self._referenced(node):
                ends.append(node)
        for node in ends:
            if node.entry or self._nodes.get(node.digest) is not node:
                continue  # it was reached from another end
            if returns_in:
                at = self.clock() + returns_in
                node.returns = at, at + _PATIENCE * returns_in
            self._end_at(node)

    def evict(self, index: int) -> None:
        """Free at least one block of a pool that has cached blocks."""
        pool, spare = self.pools[index], self._spare[index]
        before = pool.free
        while pool.free == before:
            if spare:
                block = next(iter(spare))
                node = spare.pop(block)
                node.blocks[index] = NULL_BLOCK
                del self._holders[index][block]
                pool.cached -= 1
                pool.put_back(block)
                continue
            leaf = self._oldest_leaf()
            fork = next(iter(self._forks), None) if self.windows[index] is not None else None
            if fork is not None and (leaf is None or self._forks[fork] < leaf.used):
                self._forget_fork(fork)
            else:
                assert leaf is not None, "a cached block belongs to no leaf"
                self._cut(leaf)

    def _end_at(self, node: Node) -> None:
        """Keep the last window of an unreferenced node without children; without one, remove its branch."""
        if not self._continuable(node):
            self._cut(node)
            return
        self._forget_fork(node)
        self._need(node, 1)
        self._enter(node)

    def _enter(self, leaf: Node) -> None:
        """Add a leaf to the heap of those that can be evicted."""
        self._entries += 1
        leaf.entry = self._entries
        at, until = leaf.returns
        order = (1, -at) if at else (0, float(leaf.used))
        heapq.heappush(self._leaves, (*order, leaf.entry, leaf))
        if at:
            heapq.heappush(self._expected, (until, leaf.entry, leaf))
        if len(self._leaves) > 2 * len(self._nodes) + 64:
            self._leaves = [entry for entry in self._leaves if entry[3].entry == entry[2]]
            heapq.heapify(self._leaves)

    def _leave_leaves(self, node: Node) -> None:
        node.entry, node.returns = 0, (0.0, 0.0)
        self._need(node, -1)

    def _oldest_leaf(self) -> Node | None:
        while self._expected and self._expected[0][0] < self.clock():
            _, entry, node = heapq.heappop(self._expected)
            if node.entry == entry:
                node.returns = 0.0, 0.0
                self._enter(node)
        while self._leaves:
            _, _, entry, node = self._leaves[0]
            if node.entry == entry:
                return node
            heapq.heappop(self._leaves)
        return None

    def _cut(self, leaf: Node) -> None:
        """Remove a leaf, and the nodes before it up to one in use or one that a request can continue."""
        returns = leaf.returns
        if leaf.entry:
            self._leave_leaves(leaf)
            self._evict_windows(leaf)
        node: Node | None = leaf
        while node is not None:
            parent = node.parent
            self._forget_fork(node)
            self._remove(node)
            if parent is None:
                return
            parent.children -= 1
            if parent.children or self._referenced(parent):
                return
            parent.used, parent.returns = max(parent.used, leaf.used), returns
            if self._continuable(parent):
                self._end_at(parent)
                return
            node = parent

    def _evict_windows(self, leaf: Node) -> None:
        """Mark the last window of a leaf for the store."""
        if self.store is not None:
            for index, window in enumerate(self.windows):
                if window is not None:
                    for node in self._last_window(leaf, window):
                        self._evicted[index][node.digest] = node.blocks[index]

    def _remove(self, node: Node) -> None:
        for index, block in enumerate(node.blocks):
            if block != NULL_BLOCK:
                if self.store is not None and self.windows[index] is None:
                    self._evicted[index][node.digest] = block
                del self._holders[index][block]
                self._spare[index].pop(block, None)
                self.pools[index].cached -= 1
                self.pools[index].put_back(block)
        del self._nodes[node.digest]

    # -- windows -----------------------------------------------------------------------------------------

    def _keep_fork(self, digests: Sequence[bytes]) -> None:
        """Keep the last window of the node from which a request goes on beside another one."""
        if not any(self.windows):
            return
        known = [self._nodes[digest] for digest in takewhile(self._nodes.__contains__, digests)]
        if known and known[-1].children:
            if self._forks.pop(known[-1], None) is None:
                self._need(known[-1], 1)
            self._forks[known[-1]] = self._clocked

    def _forget_fork(self, node: Node) -> None:
        if self._forks.pop(node, None) is not None:
            self._need(node, -1)

    def _need(self, end: Node, by: int) -> None:
        """Count the last window before `end` as needed once more, or once less."""
        for index, window in enumerate(self.windows):
            if window is not None:
                for node in self._last_window(end, window):
                    node.needed[index] += by
                    self._sort(index, node)

    def _sort(self, index: int, node: Node) -> None:
        """Put an unreferenced block among the spare ones if no end needs it."""
        block = node.blocks[index]
        if self.windows[index] is None or block == NULL_BLOCK or self.pools[index].references[block]:
            return
        if node.needed[index]:
            self._spare[index].pop(block, None)
        else:
            self._spare[index].setdefault(block, node)

    def _continuable(self, end: Node) -> bool:
        """Whether every layer has what a query after `end` sees. Layers without a window always have it."""
        for index, window in enumerate(self.windows):
            if window is not None:
                nodes = list(self._last_window(end, window))
                if nodes[-1].column > self._first_seen(end, window) or any(
                    node.blocks[index] == NULL_BLOCK for node in nodes
                ):
                    return False
        return True

    def _last_window(self, end: Node, window: int) -> Iterator[Node]:
        """The nodes from `end` back to the first that a query after it sees."""
        start = self._first_seen(end, window)
        node: Node | None = end
        while node is not None and node.column >= start:
            yield node
            node = node.parent

    def _referenced(self, node: Node) -> bool:
        return any(
            block != NULL_BLOCK and pool.references[block]
            for block, pool in zip(node.blocks, self.pools, strict=True)
        )

    def _first_seen(self, end: Node, window: int) -> int:
        """The first column that a query after `end` sees."""
        computed = np.array((end.column + 1) * self.block_size)
        return int(columns_behind(window, computed, self.block_size))
