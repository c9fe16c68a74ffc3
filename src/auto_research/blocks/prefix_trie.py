"""Prefix trie over the semantic ids of a catalogue, with exact counts of what is left below a node.

Nodes are numbered level by level, inside a level in lexicographic order of their prefixes; node 0 is the root and the
last S nodes are the leaves of the `SIDTable`, in its order. So the children of a node are consecutive, and the leaves
below it too:

    children(v) = first[v] .. first[v + 1] - 1,    leaves(v) = low[v] .. low[v] + leaves[v] - 1

Children are kept as ranges, not as a table child[node, code]: at 100,000 random items of 3 x 256 codes the table would
take 53 MB (int32; 155 MB with a suffix level) and a beam would look at 256 codes per node, where all tensors here take
9 MB (13 MB) and a node of the second level has at most about 10 children. `child_table` builds the table on demand.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from auto_research.blocks.semantic_ids import SIDTable


@dataclass(frozen=True, eq=False)
class PrefixTrie:
    """Trie of a table; every tensor is int64 and lies on one device.

    sizes: codes per level.  starts: first node of the levels 0..L (root: 0), then the number of nodes.
    widest: largest number of children of a node at the levels 0..L-1.
    code: [nodes] last code of the prefix, -1 for the root.  first: [inner nodes + 1] first child.
    low, leaves: [nodes] first leaf below and number of leaves below (a leaf has 1).
    path: [S, L] nodes of every leaf at the levels 1..L.  leaf_of: [n_items + 1] leaf of every item, -1 for padding.
    group: [S, largest group] items of a leaf, the order of the table (most popular first), filled up with 0.
    group_size: [S].  hash: content hash of the table.
    """

    sizes: tuple[int, ...]
    starts: tuple[int, ...]
    widest: tuple[int, ...]
    code: Tensor
    first: Tensor
    low: Tensor
    leaves: Tensor
    path: Tensor
    leaf_of: Tensor
    group: Tensor
    group_size: Tensor
    hash: str

    @classmethod
    def of(cls, table: SIDTable, device: torch.device | str = "cpu") -> PrefixTrie:
        """Trie of every item of the table."""
        tuples, n_leaves = table.leaves, len(table.leaves)
        new = np.zeros(n_leaves, dtype=bool)
        new[0] = True
        starts, code, low, path = [0], [np.array([-1])], [np.array([0])], []
        for level in range(table.levels):
            new[1:] |= tuples[1:, level] != tuples[:-1, level]
            begin = np.flatnonzero(new)  # first leaf of every prefix of this length
            starts.append(starts[-1] + len(low[-1]))
            path.append(starts[-1] + np.cumsum(new) - 1)
            code.append(tuples[begin, level])
            low.append(begin)
        starts.append(starts[-1] + n_leaves)
        leaves = [np.diff(np.append(begin, n_leaves)) for begin in low]
        children = [
            np.diff(np.append(np.searchsorted(low[level + 1], low[level]), len(low[level + 1])))
            for level in range(table.levels)
        ]
        first = 1 + np.concatenate([[0], np.cumsum(np.concatenate(children))])
        arrays = {
            "code": np.concatenate(code),
            "first": first,
            "low": np.concatenate(low),
            "leaves": np.concatenate(leaves),
            "path": np.stack(path, axis=1),
            "leaf_of": table.leaf_of,
            "group": table.group_items,
            "group_size": np.diff(table.leaf_starts),
        }
        return cls(
            sizes=tuple(table.sizes),
            starts=tuple(starts),
            widest=tuple(int(count.max()) for count in children),
            hash=table.content_hash,
            **{name: torch.from_numpy(array.astype(np.int64)).to(device) for name, array in arrays.items()},
        )

    def to(self, device: torch.device | str) -> PrefixTrie:
        """The same trie on another device."""
        moved = {
            f.name: getattr(self, f.name).to(device) for f in fields(self) if torch.is_tensor(getattr(self, f.name))
        }
        return replace(self, **moved)

    @property
    def levels(self) -> int:
        return len(self.sizes)

    @property
    def n_nodes(self) -> int:
        return self.starts[-1]

    @property
    def n_leaves(self) -> int:
        return self.starts[-1] - self.starts[-2]

    @property
    def n_items(self) -> int:
        return len(self.leaf_of) - 1

    @property
    def device(self) -> torch.device:
        return self.code.device

    def bytes(self) -> int:
        """Size of all tensors."""
        values = (getattr(self, f.name) for f in fields(self))
        return sum(t.numel() * t.element_size() for t in values if torch.is_tensor(t))

    def child_table(self) -> Tensor:
        """child[inner nodes, K_max], -1 where a node has no such child. Large; a beam does not need it."""
        inner = self.starts[-2]
        table = self.code.new_full((inner, max(self.sizes)), -1)
        parent = torch.repeat_interleave(torch.arange(inner, device=self.device), self.first.diff())
        node = torch.arange(1, self.n_nodes, device=self.device)
        table[parent, self.code[1:]] = node
        return table

    def leaf_codes(self, leaf: Tensor) -> Tensor:
        """Codes [.., L] of leaves [..]."""
        return self.code[self.path[leaf]]

    def leaf(self, node: Tensor) -> Tensor:
        """Leaf of nodes of the last level; -1 for anything else."""
        return (node - self.starts[-2]).clamp(min=-1)

    def children(self, node: Tensor, level: int) -> tuple[Tensor, Tensor]:
        """Children of nodes [..] of a level (0 = root): node ids [.., C] and bool [.., C] which of them exist.

        C is the largest number of children at the level, in order of the codes. Node -1 has none. An entry that does not
        exist holds another node of the same level of children, so that it may be used as an index.
        """
        inside = node.clamp(min=0)
        begin, end = self.first[inside], self.first[inside + 1]
        child = begin.unsqueeze(-1) + torch.arange(self.widest[level], device=self.device)
        exists = (child < end.unsqueeze(-1)) & (node >= 0).unsqueeze(-1)
        return child.clamp(max=self.starts[level + 2] - 1), exists

    def step(self, node: Tensor, code: Tensor, level: int) -> Tensor:
        """Child of nodes [..] of a level for codes [..], -1 where there is none (or the node is -1)."""
        child, exists = self.children(node, level)
        hit = exists & (self.code[child] == code.unsqueeze(-1))
        return torch.where(hit, child + 1, 0).amax(-1) - 1

    def alive(self, seen: Tensor | None = None, *, inventory: Tensor | None = None) -> Tensor:
        """Number of leaves below every node that still have an item to offer: int32 [B, nodes].

        seen: int [B, *] items not to be offered, any order, repeats and padding (0) allowed; S columns cost
        B * S * L, not B * nodes.  inventory: bool [B, n_items + 1], the items a request may be offered at all
        (column 0 is ignored). At least one of them. A leaf shared by several items counts while one of them is left;
        a node with 0 is forbidden.
        """
        if inventory is None:
            if seen is None:
                raise ValueError("alive() needs the seen items, the inventory, or both")
            return self._alive_without(seen)
        offered = inventory.clone()
        if seen is not None:
            offered.scatter_(1, seen.long(), False)
        offered = (offered[:, self.group] & (self.group > 0)).any(2)  # (B, S)
        before = torch.nn.functional.pad(offered.int().cumsum(1, dtype=torch.int32), (1, 0))
        inner = slice(0, self.starts[-2])
        end = self.low[inner] + self.leaves[inner]
        return torch.cat([before[:, end] - before[:, self.low[inner]], offered.int()], dim=1)

    def _alive_without(self, seen: Tensor) -> Tensor:
        batch = len(seen)
        alive = self.leaves.int().expand(batch, -1).clone()
        if not seen.shape[1]:
            return alive
        item = seen.long().sort(1).values
        distinct = item > 0
        distinct[:, 1:] &= item[:, 1:] != item[:, :-1]
        leaf = self.leaf_of[item].clamp(min=0)
        gone = distinct
        if self.group.shape[1] > 1:  # a leaf is gone when all its items are seen; counted at one of them only
            taken = alive.new_zeros(batch, self.n_leaves).scatter_add_(1, leaf, distinct.int())
            leaf = torch.where(distinct, leaf, self.n_leaves).sort(1).values
            gone = leaf < self.n_leaves
            gone[:, 1:] &= leaf[:, 1:] != leaf[:, :-1]
            leaf = leaf.clamp(max=self.n_leaves - 1)
            gone &= taken.gather(1, leaf) == self.group_size[leaf]
        alive[:, 0] -= gone.sum(1, dtype=torch.int32)
        nodes = self.path[leaf].flatten(1)  # (B, S * L)
        return alive.scatter_add_(1, nodes, -gone.int().repeat_interleave(self.levels, dim=1))

    def allowed(self, node: Tensor, level: int, alive: Tensor | None = None) -> Tensor:
        """Mask bool [B, beam, K_level] over the codes of the next level: those with a live leaf below.

        node: int64 [B, beam] at `level` (0 = root), -1 allows nothing.  alive: of `alive`, default all leaves.
        """
        child, exists = self.children(node, level)
        if alive is not None:
            exists = exists & (alive.gather(1, child.flatten(1)).view_as(child) > 0)
        count = torch.zeros(*node.shape, self.sizes[level], dtype=torch.int32, device=self.device)
        return count.scatter_add_(-1, self.code[child], exists.int()) > 0

    def path_masks(self, codes: Tensor, alive: Tensor | None = None) -> list[Tensor]:
        """Masks [B, w, K_l] of every level along given paths [B, w, L]: what a constrained policy could choose from."""
        node = torch.zeros(codes.shape[:2], dtype=torch.int64, device=self.device)
        masks = []
        for level in range(self.levels):
            masks.append(self.allowed(node, level, alive))
            node = self.step(node, codes[..., level], level)
        return masks

    def expand(
        self, leaf: Tensor, count: int, *, seen: Tensor | None = None, inventory: Tensor | None = None
    ) -> Tensor:
        """The first `count` items of ranked leaves int64 [B, w] (-1 = none): int64 [B, count], filled up with 0.

        Items of a shared leaf come in the order of the table. seen and inventory as in `alive`: such items are left out.
        """
        items = self.group[leaf.clamp(min=0)].masked_fill((leaf < 0).unsqueeze(-1), 0).flatten(1)  # (B, w * G)
        offered = inventory
        if seen is not None:
            if offered is None:
                offered = torch.ones(len(leaf), self.n_items + 1, dtype=torch.bool, device=self.device)
            offered = offered.scatter(1, seen.long(), False)
        keep = items > 0
        if offered is not None:
            keep = keep & offered.gather(1, items)
        order = torch.sort((~keep).int(), dim=1, stable=True).indices[:, :count]
        items = torch.where(keep, items, 0).gather(1, order)
        return torch.nn.functional.pad(items, (0, count - items.shape[1]))
