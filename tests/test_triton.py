"""The Triton kernels without a GPU: interpreted, and compiled for GPUs elsewhere; in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels import linear_logprob
from kernels.linear_logprob import pick

triton = pytest.importorskip("triton")
HERE = Path(__file__).parent
KERNELS = {"sums_kernel", "slope_kernel", "kl_kernel", "kl_slope_kernel"}


def run(*command, **environment):
    return subprocess.run([sys.executable, "-W", "ignore", *command], cwd=HERE.parent, capture_output=True, text=True,
                          timeout=300, env={**os.environ, **environment})


def test_kernels_equal_the_reference_in_the_interpreter():
    done = run("-m", "pytest", "-x", "tests/interpreted.py", TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.mark.parametrize("options, kernels, targets", [
    ("--fullest --dtypes bf16", KERNELS, {"sm_80", "sm_90", "gfx942"}),
    ("--fullest --dtypes fp32", KERNELS, {"sm_90"}),
    ("--dtypes bf16", {"sums_kernel"}, {"sm_80"}), ("--dtypes fp32", {"sums_kernel"}, {"sm_80"})])
def test_kernels_compile_without_spills_and_fit(tmp_path, options, kernels, targets):
    """Registers that do not fit go to memory, several times slower; a tile that does not fit does not start at all.
    All variants are looked at where least is left: 128 x 128 sums, in the registers of an sm_80."""
    done = run("-m", "kernels.compile", *options.split(), "--kernels", *kernels, "--targets", *targets,
               TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr[-5000:]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()[2:]]
    assert {(row[0], row[2]) for row in rows} == {(kernel, target) for kernel in kernels for target in targets}
    for kernel, _, target, _, registers, spilled, shared, limit in rows:
        assert int(shared) <= int(limit), f"{kernel} on {target}"
        if registers != "None":
            assert int(spilled) == 0, f"{kernel} on {target} spills {spilled}"


def test_the_implementation_is_an_argument():
    x = torch.zeros(1, 1)
    assert pick("auto", x) == pick("torch", x) == "torch"
    for impl, dtype, words in (("triton", torch.float32, "needs a GPU"), ("triton", torch.float64, "float64"),
                               ("cuda", torch.float32, "does not exist")):
        with pytest.raises(ValueError, match=words):
            linear_logprob(x.to(dtype), x.to(dtype), torch.tensor([0]), impl=impl)


def test_triton_is_imported_only_where_it_is_used():
    done = run("-c", "import sys, torch; import kernels, minirl.logprobs; print('triton' in sys.modules)")
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu(dtype):
    """With the products of the hardware, and the tiles that are used there."""
    g = torch.Generator().manual_seed(0)
    make = lambda n: torch.randn(n, 256, generator=g).mul(0.3).to("cuda", dtype).requires_grad_()
    hidden, weight = make(300), make(32003)
    targets = torch.randint(32003, (300,), generator=g).cuda()
    found = []
    for impl, cast in (("triton", dtype), ("torch", torch.float64)):
        inputs = hidden.to(cast), weight.to(cast)
        logprobs, entropy = linear_logprob(*inputs, targets, 0.7, True, impl=impl)
        found.append((logprobs, entropy, *torch.autograd.grad((logprobs + 0.3 * entropy).sum(), (hidden, weight))))
    close = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}[dtype]
    for ours, theirs in zip(*found):
        assert (ours.double() - theirs.double()).norm() <= close * theirs.double().norm()
