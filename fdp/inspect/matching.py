"""Which collective carries which bucket. A compiled program has no names for buckets, so sizes and order must do."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

from fdp.inspect.collectives import REDUCTIONS, Collective
from fdp.plan import Bucket, BucketPlan


@dataclasses.dataclass(frozen=True)
class Match:
    """What became of one bucket in the compiled program.

    Attributes:
      bucket: its index in the plan.
      verdict: ``"alone"`` (a reduction of its own), ``"in loop"`` (a reduction of its own in the iterations of a
        loop), ``"in parts"`` (leaves that are stacked over a loop are reduced in it, the others elsewhere),
        ``"merged"`` (one reduction with other buckets), ``"split"`` (several reductions), ``"not found"``.
      collectives: indices of the reductions that carry it.
      merged_with: the other buckets in them.
    """

    bucket: int
    verdict: str
    collectives: tuple[int, ...] = ()
    merged_with: tuple[int, ...] = ()


def match_buckets(plan: BucketPlan, collectives: Sequence[Collective]) -> tuple[Match, ...]:
    """Finds, by numbers of elements, the reductions that carry each bucket of a plan.

    Types play no part, since a hook may send another type than the gradients'. Buckets of equal size are told apart
    by order: what is launched first is taken to be reduced first.
    """
    matching = _Matching(plan.buckets, collectives)
    matching.in_launch_order()
    matching.in_any_order()
    matching.remainders()
    return tuple(
        matching.found.get(index) or matching.split(index) for index in range(len(plan.buckets))
    )


class _Matching:
    """Buckets that are matched, and reductions that are not yet."""

    def __init__(self, buckets: Sequence[Bucket], collectives: Sequence[Collective]) -> None:
        self.buckets = buckets
        self.collectives = collectives
        self.found: dict[int, Match] = {}
        self.free = {
            i: _operand_sizes(c) for i, c in enumerate(collectives) if c.kind in REDUCTIONS
        }

    def in_launch_order(self) -> None:
        """Walks along both lists; a reduction that fits nothing, such as that of a loss, is passed over."""
        following = 0
        for i in tuple(self.free):
            following += self._take(i, list(range(following, len(self.buckets))))

    def in_any_order(self) -> None:
        """What the compiler has moved."""
        for i in tuple(self.free):
            left = [index for index in range(len(self.buckets)) if index not in self.found]
            for start in range(len(left)):
                if self._take(i, left[start:]):
                    break

    def remainders(self) -> None:
        """A reduction that comes one iteration late has a last one behind the loop."""
        for index, match in self.found.items():
            if match.verdict == "in loop":
                rest = [i for i in self.free if self._carries_slices(index, i)]
                self.found[index] = dataclasses.replace(
                    match, collectives=(*match.collectives, *rest)
                )
                for i in rest:
                    del self.free[i]

    def split(self, index: int) -> Match:
        """Reductions that each carry some of the leaves, and together all of them."""
        left, taken = Counter(_sizes(self.buckets[index])), list[int]()
        for i, sizes in self.free.items():
            if not Counter(sizes) - left:
                left -= Counter(sizes)
                taken.append(i)
        if left or not taken:
            return self.in_parts(index)
        for i in taken:
            del self.free[i]
        return Match(index, "split", tuple(taken))

    def in_parts(self, index: int) -> Match:
        """Reductions in loops that carry slices of all leaves stacked over them, and others that carry the rest."""
        left = [shape for shape in self.buckets[index].shapes if math.prod(shape)]
        taken: list[int] = []
        late: list[int] = []  # slices of a last iteration, behind their loop
        for i, sizes in self.free.items():
            runs = self.collectives[i].runs
            for length in (runs, runs + 1) if self.collectives[i].in_loop and runs else ():
                stacked = [shape for shape in left if shape and shape[0] == length > 1]
                slices = [math.prod(shape[1:]) for shape in stacked]
                if stacked and _fits(slices, sizes):
                    left = [shape for shape in left if shape not in stacked]
                    taken.append(i)
                    late += self._behind_loops(slices, [*taken, *late])
                    break
        whole = [math.prod(shape) for shape in left]
        # What looks like the slices of a last iteration may be the other leaves.
        for used in ([*taken, *late], taken):
            rest = self._behind_loops(whole, used) if whole else []
            if taken and (rest or not whole):
                for i in (*used, *rest):
                    del self.free[i]
                return Match(index, "in parts", tuple(sorted((*used, *rest))))
        return Match(index, "not found")

    def _behind_loops(self, leaves: list[int], used: list[int]) -> list[int]:
        """The reduction in no loop that carries these leaves with the least left over; empty if there is none."""
        fitting = [
            (sum(sizes), i)
            for i, sizes in self.free.items()
            if i not in used and not self.collectives[i].in_loop and _fits(leaves, sizes)
        ]
        return [min(fitting)[1]] if fitting else []

    def _take(self, i: int, indices: list[int]) -> int:
        """Gives reduction ``i`` to the first of these buckets, or to the first few; returns to how many."""
        if not indices:
            return 0
        if self.collectives[i].in_loop:
            group = indices[:1] if self._carries_slices(indices[0], i) else []
            verdict = "in loop"
        else:
            group = self._best_group(i, indices)
            verdict = "alone" if len(group) == 1 else "merged"
        for member in group:
            others = tuple(other for other in group if other != member)
            self.found[member] = Match(member, verdict, (i,), others)
        if group:
            del self.free[i]
        return len(group)

    def _best_group(self, i: int, indices: list[int]) -> list[int]:
        """The first few of these buckets that fill reduction ``i`` with the least left over."""
        best: list[int] = []
        total, whole = 0, sum(self.free[i])
        for count, index in enumerate(indices, start=1):
            total += sum(_sizes(self.buckets[index]))
            if total > whole:
                break
            if _fits_together([self.buckets[b] for b in indices[:count]], self.free[i]):
                best = indices[:count]
        return best

    def _carries_slices(self, index: int, i: int) -> bool:
        """Whether this is the reduction of one iteration's slices of leaves that are stacked over a loop."""
        bucket, collective = self.buckets[index], self.collectives[i]
        lengths = {shape[0] if shape else 0 for shape in bucket.shapes}
        if len(lengths) != 1:
            return False
        (length,) = lengths
        if length < 2 or (collective.in_loop and collective.runs not in (None, length, length - 1)):
            return False
        return _fits([size // length for size in _sizes(bucket)], self.free[i])


def _operand_sizes(collective: Collective) -> list[int]:
    return [math.prod(shape) for shape in collective.operand_shapes]


def _sizes(bucket: Bucket) -> list[int]:
    return [size for size in map(math.prod, bucket.shapes) if size]


def _slack(elements: int) -> int:
    """Elements that may ride along: padding of a flat buffer to a tile, a few scalars."""
    return 64 + min(1024, elements // 8)


def _fits(leaves: list[int], sizes: list[int]) -> bool:
    """Whether operands of these sizes are these leaves, or one flat buffer of them, plus a little."""
    extra = sum(sizes) - sum(leaves)
    if not 0 <= extra <= _slack(sum(leaves)):
        return False
    return len(sizes) == 1 or not Counter(leaves) - Counter(sizes)


def _fits_together(buckets: list[Bucket], sizes: list[int]) -> bool:
    flat = sorted(sum(_sizes(bucket)) for bucket in buckets)
    if len(sizes) == len(flat) > 1:
        pairs = zip(flat, sorted(sizes), strict=True)
        if all(0 <= size - elements <= _slack(elements) for elements, size in pairs):
            return True
    return _fits([size for bucket in buckets for size in _sizes(bucket)], sizes)
