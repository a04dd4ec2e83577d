"""Shared by all tests: the backends, and the skip of `gpu` tests with the reason where there is no device."""

from __future__ import annotations

import gc
import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

gc.set_threshold(50_000, 20, 20)  # tests and decoded kernels live long, and neither these nor launches are garbage in cycles

import pytest  # noqa: E402

from oxidnn.runtime.driver import why_no_cuda  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = why_no_cuda() if marked else ""
    if reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=f"no CUDA device: {reason}"))


def pytest_collection_finish() -> None:
    gc.freeze()  # thousands of tests and all modules: no collection need look at them again


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests neither read nor fill the user's cache."""
    os.environ.setdefault("OXIDNN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def cuda():  # type: ignore[no-untyped-def]
    from oxidnn.runtime.cuda_backend import CudaBackend

    return CudaBackend(0)
