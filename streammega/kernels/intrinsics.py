"""Instructions that numba does not offer by name."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

# Arguments of llvm.prefetch.
_READ = 0
_ALL_CACHES = 3
_DATA = 1


def _prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        """Pass the address of an element to LLVM's instruction."""
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
        """The number as an address."""
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    pointer: Any = types.CPointer
    return pointer(like.dtype)(types.int64, like), codegen


prefetch: Any = intrinsic(_prefetch)
"""prefetch(array, index): load array[index] (one-dimensional, contiguous) into the caches.

Never faults.
"""
pointer_to: Any = intrinsic(_pointer_to)
"""pointer_to(address, like): an int64 address as a pointer to elements of the dtype of array
`like`.
"""
