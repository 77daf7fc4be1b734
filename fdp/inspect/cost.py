"""What an instruction costs: matrix-product flops and bytes of memory touched, calls and loops included."""

from __future__ import annotations

import dataclasses

from fdp.inspect import flops, graph
from fdp.inspect.hlo import Computation, Instruction, Module

# They name, regroup or await values; nothing is read or written.
BOOKKEEPING = frozenset(
    {
        "parameter",
        "constant",
        "iota",
        "get-tuple-element",
        "tuple",
        "bitcast",
        "after-all",
        "add-dependency",
        "opt-barrier",
        "domain",
        "partition-id",
        "replica-id",
        "get-dimension-size",
        "rng-get-and-update-state",
    }
)
# Custom calls of the TPU compiler that are annotations, not work.
_NO_WORK = (
    "ConcatBitcast",
    "AllocateBuffer",
    "Sharding",
    "AsyncCollectiveStart",
    "AsyncCollectiveDone",
)
_SLICES = ("slice", "dynamic-slice", "gather")
# Inside a fusion: a tuple hands a value on untouched, and a collective is charged to the wire.
_HANDED_ON = ("tuple", "all-reduce", "reduce-scatter", "all-gather", "custom-call")


@dataclasses.dataclass(frozen=True)
class Cost:
    """Work of an instruction.

    Attributes:
      flops: of matrix products and convolutions.
      nbytes: read and written in device memory, where nothing stays in a cache.
      elements: the largest number of elements that any step of it computes; a measure of significance.
      is_matmul: whether there is a matrix product or convolution in it.
      element_type: XLA's type of the operands of its largest product, or an empty string.
    """

    flops: int = 0
    nbytes: int = 0
    elements: int = 0
    is_matmul: bool = False
    element_type: str = ""


NOTHING = Cost()


class Costs:
    """Costs of the instructions of one module, computed on demand and kept."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._known: dict[tuple[str, str], Cost] = {}

    def of(self, computation: Computation, instruction: Instruction) -> Cost:
        """Cost of one instruction, with everything it calls; loops count all their iterations.

        A loop whose trip count is not in the program counts once; of a conditional the dearest branch counts.
        """
        key = (computation.name, instruction.name)
        if key not in self._known:
            self._known[key] = self._compute(computation, instruction)
        return self._known[key]

    def total(self, computation: Computation) -> Cost:
        """Cost of all instructions of a computation."""
        return _sum([self.of(computation, i) for i in computation.instructions])

    def _compute(self, computation: Computation, instruction: Instruction) -> Cost:
        opcode = instruction.opcode
        if (
            opcode in BOOKKEEPING
            or opcode.endswith(("-done", "-update"))
            or instruction.target in _NO_WORK
        ):
            return Cost()
        called = self._module.called_by(instruction)
        if opcode == "while":
            body = [c for c in called if c.name in instruction.called.get("body", ())]
            trips = graph.trip_count(self._module, computation, instruction) or 1
            return _sum([self.total(c) for c in body] * min(trips, 1), times=trips)
        if opcode == "conditional":
            branches = [self.total(c) for c in called]
            return max(branches, key=lambda cost: (cost.flops, cost.nbytes), default=Cost())
        if opcode in ("call", "async-start"):
            return _sum([self.total(c) for c in called])
        if opcode == "fusion" and called:
            return self._fusion(computation, instruction, called[0])
        own = flops.matmul_flops(computation, instruction)
        return Cost(
            own,
            _own_bytes(computation, instruction),
            _work(computation, instruction),
            flops.is_matmul(instruction),
            _operand_type(computation, instruction),
        )

    def _fusion(self, outer: Computation, instruction: Instruction, body: Computation) -> Cost:
        """The products inside, but memory only for what goes in and out."""
        inner = [self.of(body, i) for i in body.instructions]
        inside = _sum(inner)
        largest = max(inner, key=lambda cost: cost.flops, default=Cost())
        nbytes = _written(body) + sum(
            _read(body, i) for i in body.instructions if i.opcode == "parameter"
        )
        elements = max((cost.elements for cost in inner), default=0)
        return Cost(inside.flops, nbytes, elements, inside.is_matmul, largest.element_type)


def _sum(costs: list[Cost], times: int = 1) -> Cost:
    return Cost(
        times * sum(cost.flops for cost in costs),
        times * sum(cost.nbytes for cost in costs),
        max((cost.elements for cost in costs), default=0),
        any(cost.is_matmul for cost in costs),
        max(costs, key=lambda cost: cost.flops, default=Cost()).element_type,
    )


def _operand_type(computation: Computation, instruction: Instruction) -> str:
    arrays = [a for o in computation.operands(instruction)[:1] for a in o.shape.arrays[:1]]
    return arrays[0].element_type if arrays and flops.is_matmul(instruction) else ""


def _own_bytes(computation: Computation, instruction: Instruction) -> int:
    operands = computation.operands(instruction)
    if instruction.opcode in _SLICES:
        return 2 * instruction.shape.device_nbytes
    if instruction.opcode == "dynamic-update-slice" and len(operands) > 1:
        return 2 * operands[1].shape.device_nbytes
    result = instruction.shape.device_nbytes
    if instruction.opcode in ("copy-start", "slice-start"):
        # (destination, source, flag), or ((source), destination, flag): the source is an operand too.
        result -= sum(operand.shape.device_nbytes for operand in operands)
    elif instruction.opcode == "custom-call" and instruction.shape.is_tuple:
        # Behind the result come a library's scratch bytes, of which it touches what it likes.
        result = sum(
            a.nbytes for a in instruction.shape.arrays if a.element_type not in ("s8", "u8")
        )
    return result + sum(operand.shape.device_nbytes for operand in operands)


def _work(computation: Computation, instruction: Instruction) -> int:
    """Elements computed. Copies and slices compute nothing; an update computes what it writes."""
    if instruction.opcode in ("copy", "copy-start", "slice-start", *_SLICES, "broadcast"):
        return 0
    operands = computation.operands(instruction)
    if instruction.opcode == "dynamic-update-slice" and len(operands) > 1:
        return operands[1].shape.elements
    if instruction.opcode in ("reduce", "reduce-window", "sort", "scatter", "select-and-scatter"):
        return max((operand.shape.elements for operand in operands), default=0)
    return max((array.elements for array in instruction.shape.arrays), default=0)


def _users(body: Computation, name: str) -> list[Instruction]:
    """What uses a value, looking through bitcasts."""
    found = list[Instruction]()
    for user in body.users.get(name, ()):
        found.extend(_users(body, user.name) if user.opcode == "bitcast" else [user])
    return found


def _read(body: Computation, parameter: Instruction) -> int:
    """Bytes read of a fusion's parameter: only the slices, where only slices are taken."""
    whole = parameter.shape.device_nbytes
    total = 0
    for user in _users(body, parameter.name):
        if user.opcode in _SLICES:
            total += user.shape.nbytes
        elif user.opcode in _HANDED_ON or _is_updated(body, user, parameter):
            continue
        else:
            return whole
    return min(total, whole)


def _is_updated(body: Computation, update: Instruction, parameter: Instruction) -> bool:
    """Whether the user writes a slice into ``parameter``, in place, and reads nothing of it."""
    if update.opcode != "dynamic-update-slice":
        return False
    target = body.operands(update)[0]
    while target.opcode == "bitcast":
        target = body.operands(target)[0]
    return target is parameter


def _written(body: Computation) -> int:
    """Bytes a fusion writes: only the update, where it updates a slice in place."""
    root = body.root
    outputs = body.operands(root) if root.opcode == "tuple" else (root,)
    total = 0
    for output in outputs:
        while output.opcode == "bitcast" and body.operands(output):
            output = body.operands(output)[0]
        if output.opcode == "dynamic-update-slice":
            total += body.operands(output)[1].shape.nbytes
        elif output.opcode != "parameter" and output.opcode not in _HANDED_ON:
            total += output.shape.device_nbytes
    return total
