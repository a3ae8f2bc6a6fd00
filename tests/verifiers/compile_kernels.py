"""Compiles every kernel for an H100-class GPU, without one, as its own host function launches it; prints their names.

Run by test_kernels_choice in a process of its own, because the tests' process interprets kernels instead.
"""

from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specdec.kernels import philox
from specdec.streams import Purpose
from tests.verifiers.kernel_cases import random_step
from verifiers.kernels.block import block
from verifiers.kernels.choice import coupled, greedy
from verifiers.kernels.inputs import Warp
from verifiers.kernels.rejection import rejection

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float64: "*fp64", torch.int64: "*i64", torch.int32: "*i32",
    torch.uint8: "*u8",
}  # fmt: skip
COMPILED = set()


def type_of(name, value):
    if value is None or name.isupper() and len(name) > 1:
        return "constexpr"
    return TYPES[value.dtype] if isinstance(value, torch.Tensor) else "i64" if name == "seed" else "i32"


def compile_instead(function, *args, grid, warmup, num_warps=4, enable_fp_fusion=True, **kwargs):
    """In place of a launch."""
    arguments = dict(zip(function.arg_names, args, strict=False)) | kwargs
    arguments = {name: arguments[name] for name in function.arg_names}
    signature = {name: type_of(name, value) for name, value in arguments.items()}
    constants = {name: arguments[name] for name, kind in signature.items() if kind == "constexpr"}
    options = {"num_warps": num_warps, "enable_fp_fusion": enable_fp_fusion}
    triton.compile(ASTSource(function, signature, constants), target=TARGET, options=options)
    COMPILED.add(function.__name__)


def main():
    with mock.patch.object(triton.JITFunction, "run", compile_instead):
        for kind, dtype in (("mixed", torch.bfloat16), ("one-hot", torch.float32)):
            step = random_step([2, 1], 20_000, kind, dtype)
            ones = torch.ones(len(step.p.logits))
            for warp in (None, Warp(ones, ones)):
                rejection(*step.arguments, warp)
                block(*step.arguments, warp)
            ids = torch.arange(2)
            greedy(step.draft, step.p)
            coupled(step.draft, step.p, 0, ids, ids)
        philox.gumbel_noise(philox.words(0, ids, ids, Purpose.PICK, 0, 5))
        philox.uniforms(0, ids, ids, Purpose.PICK, 0, 5)
    print(*sorted(COMPILED))


if __name__ == "__main__":
    main()
