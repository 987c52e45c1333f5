"""Three instructions that numba does not offer by name."""

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


def _float_bits(typing_context: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(types.int64))

    return types.int64(types.float64), codegen


def _prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
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
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    pointer: Any = types.CPointer
    return pointer(like.dtype)(types.int64, like), codegen


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
