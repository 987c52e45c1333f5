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
