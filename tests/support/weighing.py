"""Measures the memory of an object and of everything that it refers to."""

import gc
import sys
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

import numpy as np

SHARED = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)  # code and its owners


def weight(*roots, apart=()):
    """Return the bytes of these objects and of everything they refer to, each counted once. apart: objects to exclude."""
    seen, total, pending = {id(one) for one in apart}, 0, list(roots)
    while pending:
        one = pending.pop()
        if id(one) in seen or isinstance(one, SHARED):
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        pending += gc.get_referents(one)
        if isinstance(one, np.ndarray) and one.base is not None:
            pending.append(one.base)
    return total
