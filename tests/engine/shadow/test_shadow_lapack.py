"""The switch that makes LAPACK calls raise, for CPU and shadow tensors."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from auto_research.shadow import lapack

CALLS = {
    "linalg.cholesky": torch.linalg.cholesky,
    "cholesky": torch.cholesky,
    "linalg.svd": torch.linalg.svd,
    "svd": torch.svd,
    "svdvals": torch.linalg.svdvals,
    "eigh": torch.linalg.eigh,
    "eigvalsh": torch.linalg.eigvalsh,
    "eig": torch.linalg.eig,
    "qr": torch.linalg.qr,
    "inv": torch.linalg.inv,
    "inverse": torch.inverse,
    "det": torch.linalg.det,
    "slogdet": torch.slogdet,
    "pinv": torch.linalg.pinv,
    "solve": lambda a: torch.linalg.solve(a, a),
    "solve_triangular": lambda a: torch.linalg.solve_triangular(a, a, upper=True),
    "lstsq": lambda a: torch.linalg.lstsq(a, a),
    "lu": torch.linalg.lu,
    "lu_factor": torch.linalg.lu_factor,
    "matrix_rank": torch.linalg.matrix_rank,
    "nuclear norm": lambda a: torch.linalg.matrix_norm(a, "nuc"),
    "cholesky_inverse": torch.cholesky_inverse,
    "cholesky_solve": lambda a: torch.cholesky_solve(a, a),
    "normal": lambda a: torch.distributions.MultivariateNormal(a[0], covariance_matrix=a).sample(),
}


@pytest.mark.parametrize("device", ["cpu", "shadow"])
@pytest.mark.parametrize("name", CALLS)
def test_every_call_raises_while_the_switch_is_off_and_passes_after(name, device):
    matrix = torch.eye(3, device=device) * 2
    with lapack.without_lapack(), pytest.raises(RuntimeError, match="requires compiling PyTorch with LAPACK"):
        CALLS[name](matrix)
    CALLS[name](matrix)


def test_norms_and_products_need_no_lapack():
    x = torch.ones(2, 2, device="shadow")
    with lapack.without_lapack():
        assert torch.linalg.vector_norm(x).item() == 2.0
        assert torch.linalg.matrix_norm(x).item() == 2.0
        assert torch.linalg.multi_dot([x, x, x]).sum().item() == 16.0


def test_blocks_nest():
    with lapack.without_lapack():
        with lapack.without_lapack():
            assert not lapack.available()
        assert not lapack.available()
    assert lapack.available()


def test_decomposition_equals_cpu():
    torch.manual_seed(0)
    a = torch.randn(4, 4)
    a = a @ a.T + torch.eye(4)
    torch.testing.assert_close(torch.linalg.cholesky(a.to("shadow")).cpu(), torch.linalg.cholesky(a))
    torch.testing.assert_close(torch.linalg.eigh(a.to("shadow"))[0].cpu(), torch.linalg.eigh(a)[0])


def test_environment_turns_it_off():
    code = "\n".join(
        (
            "from auto_research.shadow import accelerator",
            "import torch",
            "accelerator.activate()",
            "try: torch.linalg.inv(torch.eye(2, device='shadow'))",
            "except RuntimeError as error: print(error)",
        )
    )
    environment = os.environ | {lapack.VARIABLE: "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "requires compiling PyTorch with LAPACK" in done.stdout
