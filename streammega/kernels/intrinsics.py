"""Instructions that numba does not offer by name."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

# What llvm.prefetch is told.
_READ = 0
_ALL_CACHES = 3
_DATA = 1
LINE_BYTES = 64
"""What processors write to memory at once."""
LINE_IDS = 8
"""int64 elements of it."""
REGISTER_FLOATS = 8
"""float64 elements that are compared at once: the widest vector registers have so many, and where
they are narrower the compiler takes several.
"""
FLOAT_BYTES = 8
"""Of a float64, a multiple of which all arrays of them lie at."""
_REGISTER = ir.VectorType(ir.DoubleType(), REGISTER_FLOATS)
_WORD = ir.IntType(64)
_LANE = ir.IntType(32)
"""What LLVM numbers lanes by."""


def _float_bits(typing_context: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        """The same 64 bits, read as an integer."""
        return builder.bitcast(arguments[0], context.get_value_type(types.int64))

    return types.int64(types.float64), codegen


def _prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        """The address of an element, handed to the instruction that LLVM has for it."""
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        byte_pointer = ir.IntType(8).as_pointer()
        word = ir.IntType(32)
        element = builder.gep(data, [arguments[1]])
        address = builder.bitcast(element, byte_pointer)
        signature_of_prefetch = ir.FunctionType(ir.VoidType(), [byte_pointer, word, word, word])
        prefetch_of_llvm: Any = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
            builder.module, signature_of_prefetch, "llvm.prefetch"
        )
        builder.call(prefetch_of_llvm, [address, word(_READ), word(_ALL_CACHES), word(_DATA)])
        return context.get_dummy_value()

    return types.none(array, index), codegen


def _pointer_to(typing_context: Any, address: Any, like: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        """The number, taken for an address."""
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    pointer: Any = types.CPointer
    return pointer(like.dtype)(types.int64, like), codegen


def _widened(builder: Any, elements: Any, dtype: Any, wide: Any) -> Any:
    """A vector of elements of a numba dtype as one of int64, as assigning each would make it."""
    if isinstance(dtype, types.Float):
        return builder.fptosi(elements, wide)
    if dtype.bitwidth == 64:
        return elements
    return builder.sext(elements, wide) if dtype.signed else builder.zext(elements, wide)


def _write_line(typing_context: Any, like: Any, source: Any, target: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        """A line of elements, loaded, widened and stored past the caches."""
        dtype = signature.args[0].dtype
        stored = ir.VectorType(context.get_data_type(dtype), LINE_IDS)
        wide = ir.VectorType(ir.IntType(64), LINE_IDS)
        source_pointer = builder.inttoptr(arguments[1], stored.as_pointer())
        target_pointer = builder.inttoptr(arguments[2], wide.as_pointer())
        elements = builder.load(source_pointer, align=dtype.bitwidth // 8)
        ids = _widened(builder, elements, dtype, wide)
        store = builder.store(ids, target_pointer, align=LINE_BYTES)
        past_caches = builder.module.add_metadata([ir.IntType(32)(1)])
        store.set_metadata("nontemporal", past_caches)
        return context.get_dummy_value()

    return types.none(like, types.int64, types.int64), codegen


def _fence(typing_context: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        """What was written before is seen before what follows."""
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.none(), codegen


def _largest(builder: Any, first: Any, second: Any) -> Any:
    """The larger one of each lane of two vectors."""
    return builder.select(builder.fcmp_ordered(">", first, second), first, second)


def _largest_everywhere(builder: Any, vectors: list[Any]) -> Any:
    """The largest element of several vectors, in every lane of one."""
    while len(vectors) > 1:
        # Pairs, and not one after the other: each waits for the result before.
        pairs = zip(vectors[::2], vectors[1::2], strict=False)
        left_over = vectors[len(vectors) // 2 * 2 :]
        vectors = [_largest(builder, first, second) for first, second in pairs] + left_over
    (largest,) = vectors
    distance = REGISTER_FLOATS // 2
    while distance:
        lanes = [lane ^ distance for lane in range(REGISTER_FLOATS)]
        turned = builder.shuffle_vector(largest, largest, _lanes(lanes))
        largest = _largest(builder, largest, turned)
        distance //= 2
    return largest


def _lanes(numbers: list[int]) -> Any:
    """Which lane each lane of a shuffled vector is to have."""
    return ir.Constant(ir.VectorType(_LANE, REGISTER_FLOATS), numbers)


def _everywhere(builder: Any, element: Any) -> Any:
    """A float64 in every lane of a register."""
    alone = builder.insert_element(ir.Constant(_REGISTER, ir.Undefined), element, _LANE(0))
    return builder.shuffle_vector(alone, alone, _lanes([0] * REGISTER_FLOATS))


def _registers(context: Any, builder: Any, array: Any, kind: Any, number: int) -> list[Any]:
    """Pointers to the first registers of a float64 array."""
    data = context.make_array(kind)(context, builder, array).data
    first = builder.bitcast(data, _REGISTER.as_pointer())
    return [builder.gep(first, [_WORD(k)]) for k in range(number)]


def _count_best(typing_context: Any, weights: Any, counts: Any, registers: Any, target: Any) -> Any:
    number = registers.literal_value

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        """Errors of all registers, their largest, and one more for each count that has it."""
        weights_at = _registers(context, builder, arguments[0], signature.args[0], number)
        counts_at = _registers(context, builder, arguments[1], signature.args[1], number)
        counts_before = [builder.load(place, align=FLOAT_BYTES) for place in counts_at]
        targets = _everywhere(builder, arguments[3])
        errors = []
        for place, count in zip(weights_at, counts_before, strict=True):
            weight = builder.load(place, align=FLOAT_BYTES)
            share = builder.fmul(weight, targets)
            errors.append(builder.fsub(share, count))
        best = _largest_everywhere(builder, errors)
        one = ir.Constant(_REGISTER, [1.0] * REGISTER_FLOATS)
        none = ir.Constant(_REGISTER, [0.0] * REGISTER_FLOATS)
        hits = _WORD(0)
        for k in range(number):
            hit = builder.fcmp_ordered("==", errors[k], best)
            count = builder.fadd(counts_before[k], builder.select(hit, one, none))
            # Whole registers: a single element would hold up the next call's loads.
            builder.store(count, counts_at[k], align=FLOAT_BYTES)
            bits = builder.zext(builder.bitcast(hit, ir.IntType(REGISTER_FLOATS)), _WORD)
            bits = builder.shl(bits, _WORD(REGISTER_FLOATS * k))
            hits = builder.or_(hits, bits)
        best_error = builder.extract_element(best, _LANE(0))
        return context.make_tuple(builder, signature.return_type, [hits, best_error])

    result = types.Tuple((types.uint64, types.float64))  # type: ignore[no-untyped-call]
    return result(weights, counts, registers, target), codegen


def _lowest_bit(typing_context: Any, word: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        """How many zeros stand below it."""
        return builder.cttz(arguments[0], ir.IntType(1)(1))

    return types.int64(types.uint64), codegen


def _highest_bit(typing_context: Any, word: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        """The bits of a word less the zeros above it, less one."""
        zeros = builder.ctlz(arguments[0], ir.IntType(1)(1))
        return builder.sub(_WORD(_WORD.width - 1), zeros)

    return types.int64(types.uint64), codegen


float_bits: Any = intrinsic(_float_bits)
"""float_bits(x): the bits of a float64 as int64."""
prefetch: Any = intrinsic(_prefetch)
"""prefetch(array, index): ask for array[index] (one-dimensional, contiguous) ahead of its use.

Never faults.
"""
pointer_to: Any = intrinsic(_pointer_to)
"""pointer_to(address, like): an int64 address as a pointer to elements of the dtype of array
`like`.
"""
write_line: Any = intrinsic(_write_line)
"""write_line(like, source, target): `LINE_IDS` elements of the dtype of array `like` from address
`source` on, widened to int64, to address `target`, a multiple of `LINE_BYTES`, past the caches.

Other threads see them after a `fence`.
"""
fence: Any = intrinsic(_fence)
"""fence(): everything written before is seen by other threads before anything written after."""
count_best: Any = intrinsic(prefer_literal=True)(_count_best)
"""count_best(weights, counts, registers, target): of the first `registers` times `REGISTER_FLOATS`
places of float64 arrays, the largest of all `weights * target - counts`, and which places have it,
as bits of a uint64: (bits, largest). The counts of those places become larger by one.

`registers`: a constant from 1 to 8. Multiplied and subtracted one after the other, so with the bits
that any other code for it gives; nothing may be NaN.
"""
lowest_bit: Any = intrinsic(_lowest_bit)
"""lowest_bit(word): the number of the lowest bit of a uint64 that is set; there must be one."""
highest_bit: Any = intrinsic(_highest_bit)
"""highest_bit(word): the same of the highest."""
