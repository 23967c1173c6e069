"""A sum whose bits do not depend on who adds: one fixed binary tree over the micro-batches.

Floating-point addition is not associative, so the same gradients added in another order give other
bits. Here leaf i is micro-batch i, and node (level, index) is the sum of the leaves from
``index << level`` up to ``(index + 1) << level``: left child plus right child. Where the right
child would lie wholly past the last leaf, the left one is passed up as it is. Which rank computed
a leaf or a node plays no part.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

Node = tuple[int, int]  # level, index


def parent(node: Node) -> Node:
    """The node above."""
    return node[0] + 1, node[1] // 2


def sibling(node: Node) -> Node:
    """The node that it is added to."""
    return node[0], node[1] ^ 1


def merges(held: Sequence[Node], leaf: int) -> tuple[int, Node]:
    """What a rank that holds the nodes ``held`` of its earlier leaves makes of the next one.

    Returns how many of them, from the last backwards, the leaf is added to one after the other,
    and the node that comes out: adding to a binary counter.
    """
    node, count = (0, leaf), 0
    while count < len(held) and node[1] % 2 and held[-1 - count] == sibling(node):
        node, count = parent(node), count + 1
    return count, node


def nodes_of(first: int, end: int) -> list[Node]:
    """The nodes that remain when leaves ``first`` to ``end`` have been added up, in order."""
    held: list[Node] = []
    for leaf in range(first, end):
        count, node = merges(held, leaf)
        del held[len(held) - count :]
        held.append(node)
    return held


class Tree:
    """Adds nodes up to the root, in whatever order they come.

    Args:
        leaves: how many leaves there are.
    """

    def __init__(self, leaves: int) -> None:
        self._leaves = leaves
        self._nodes: dict[Node, Tensor] = {}
        self.root: Tensor | None = None

    def add(self, node: Node, value: Tensor) -> None:
        """Take a node's value; the memory is the tree's own from here on, and is written to."""
        while node[1] or 1 << node[0] < self._leaves:
            right = sibling(node)
            if node[1] % 2 or right[1] << right[0] < self._leaves:
                other = self._nodes.pop(right, None)
                if other is None:
                    self._nodes[node] = value
                    return
                value = value.add_(other)  # a + b and b + a are the same bits
            node = parent(node)
        self.root = value
