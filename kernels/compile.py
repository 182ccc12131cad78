"""What each Triton kernel takes on a GPU that need not be here: `python -m kernels.compile`.

Compiled ahead of time for sm_80 (A100), sm_90 (H100, H200) and gfx942 (MI300), as they are launched for contiguous
tensors, with and without bias, soft cap and entropy, for each kind of KL. A register too many goes to local memory,
and a tile too large to nowhere: both show here, as STACK or spilled registers above 0, and as shared memory above the
limit.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import triton_linear_kl
from kernels.triton_linear_kl import KINDS, kl_kernel, kl_slope_kernel
from kernels.triton_linear_logprob import LOWEST, Tiles, slope_kernel, sums_kernel, tiles_of

TARGETS = {"sm_80": GPUTarget("cuda", 80, 32), "sm_90": GPUTarget("cuda", 90, 32),
           "gfx942": GPUTarget("hip", "gfx942", 64)}
SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024}  # bytes a block may have
KERNELS = {fn.__name__: fn for fn in (sums_kernel, slope_kernel, kl_kernel, kl_slope_kernel)}
FLAGS = {"HAS_BIAS": (False, True), "SOFTCAP": (False, True), "ENTROPY": (False, True),
         "KIND": (KINDS["js"], KINDS["forward"], KINDS["reverse"])}
DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4}


class Resources(NamedTuple):
    """A row of the table: of several variants of a kernel the most that one of them takes."""

    kernel: str
    dtype: str
    target: str
    tiles: Tiles
    registers: int | None  # of a thread; None: cuobjdump is not here
    spilled: int | None  # bytes of local memory (STACK), on gfx942 registers
    shared: int  # bytes


def signature(fn: triton.JITFunction, dtype: str) -> tuple[dict[str, str], dict, dict]:
    """(types, constants, divisible arguments) of a launch on contiguous tensors."""
    of_inputs = {"hidden", "weight", "bias", "ref_hidden", "ref_weight", "ref_bias"}
    floats = {"softcap", "inverse_temperature"}
    counts = {"N", "V", "D", "ref_D", "start", "run", "first", "width", "stride_n", "stride_v", "ref_stride_n",
              "ref_stride_v"}
    types, constants, attrs = {}, {}, {}
    for i, name in enumerate(fn.arg_names):
        if fn.params[i].is_constexpr:
            types[name] = "constexpr"
        elif name in ("stride_hd", "stride_wd", "ref_stride_hd", "ref_stride_wd"):
            types[name], constants[name] = "constexpr", 1
        elif name in floats:
            types[name] = "fp32"
        elif name in counts:
            types[name] = "i32"
            if "stride" in name or name in ("D", "ref_D"):
                attrs[(i,)] = [["tt.divisibility", 16]]
        else:
            kind = dtype if name in of_inputs else "i64" if name == "targets" else "fp32"
            if name == "grad":
                kind = "bf16" if dtype == "bf16" else "fp32"
            types[name] = f"*{kind}"
            attrs[(i,)] = [["tt.divisibility", 16]]
    return types, constants, attrs


def variants(fn: triton.JITFunction) -> list[dict[str, int]]:
    """A kernel is compiled anew for each head and result: with bias or not, ... The last has all, and reverse KL."""
    flags = {name: values for name, values in FLAGS.items() if name in fn.arg_names}
    return [dict(zip(flags, values)) for values in product(*flags.values())]


def compile_one(fn: triton.JITFunction, dtype: str, target: str, variant: dict[str, int]) -> Resources:
    """One kernel with the tiles that it has on that GPU, one of its `variants`: what it takes there."""
    of_kernel = triton_linear_kl.tiles_of if fn in (kl_kernel, kl_slope_kernel) else tiles_of
    tiles = of_kernel(DTYPES[dtype], TARGETS[target].backend)
    types, constants, attrs = signature(fn, dtype)
    given = {**variant, "HAS_REF_BIAS": variant["HAS_BIAS"], "UPCAST": False, "LOWEST": LOWEST,
             "BLOCK_N": tiles.block_n, "BLOCK_V": tiles.block_v, "BLOCK_D": tiles.block_d}
    constants |= {name: value for name, value in given.items() if name in fn.arg_names}
    compiled = triton.compile(ASTSource(fn, types, constants, attrs), target=TARGETS[target],
                              options={"num_warps": tiles.num_warps, "num_stages": tiles.num_stages})
    registers, spilled = used(compiled, target)
    return Resources(fn.__name__, dtype, target, tiles, registers, spilled, compiled.metadata.shared)


def used(compiled, target: str) -> tuple[int | None, int | None]:
    """(registers of a thread, what did not fit in them)."""
    if "amdgcn" in compiled.asm:
        find = lambda name: int(re.search(rf"\.{name}:\s*(\d+)", compiled.asm["amdgcn"])[1])
        return find("vgpr_count"), find("vgpr_spill_count")
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.is_file():
        return None, None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"REG:(\d+)", text)[1]), int(re.search(r"STACK:(\d+)", text)[1])


def compile_all(kernels: Iterable[str], dtypes: Iterable[str], targets: Iterable[str],
                fullest: bool = False) -> Iterator[Resources]:
    """fullest: of the variants only the one with everything."""
    for name, dtype, target in product(kernels, dtypes, targets):
        fn = KERNELS[name]
        found = [compile_one(fn, dtype, target, variant) for variant in variants(fn)[-1 if fullest else 0:]]
        most = [None if None in values else max(values) for values in zip(*(row[-3:] for row in found))]
        yield Resources(name, dtype, target, found[0].tiles, *most)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES, help="of the inputs")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=TARGETS)
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=KERNELS)
    parser.add_argument("--fullest", action="store_true", help="of the variants the one with everything")
    options = parser.parse_args()
    print("| kernel | inputs | GPU | tile N x V x D, warps, stages | registers | spilled | shared memory | limit |")
    print("|---|---|---|---|---|---|---|---|")
    for found in compile_all(options.kernels, options.dtypes, options.targets, options.fullest):
        n, v, d, warps, stages = found.tiles
        print(f"| {found.kernel} | {found.dtype} | {found.target} | {n} x {v} x {d}, {warps}, {stages} "
              f"| {found.registers} | {found.spilled} | {found.shared} | {SHARED_LIMIT[found.target]} |", flush=True)
