"""DnnHandle: a device, its caches and policies, and one thin method per op; a file for each family of methods.

Shapes are logical everywhere: (N, C, spatial) for activations, (K, C/groups, spatial) for filters; how a tensor lies in memory is in
its strides. Array arguments are anything with DLPack or __cuda_array_interface__ (torch, cupy, jax, DeviceArray), and NumPy arrays on
an emulated device. Results come back in the framework of the first array, on its device, in the order of its stream. Every method
takes `out=` (written in place of a fresh result) and `stream=`. Bad arguments raise InvalidArgument, what no engine takes raises
Unsupported; either way nothing was launched and nothing written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import switches
from ..dispatch.optimisers import ListOps
from ..dispatch.planning import plan_for
from ..dispatch.select import Explanation
from ..dispatch.session import POLICY, BoundPlan, Session
from ..dispatch.tuning_db import TuningDb
from ..errors import expected
from ..ops.base import MATH, Policy, Problem
from ..ops.case import parse_case
from .attention import AttentionOps
from .calls import signature
from .convolution import ConvOps
from .device import open_backend
from .experts import ExpertOps
from .layout import LayoutOps
from .losses import LossOps
from .normalisation import NormOps
from .pointwise import PointwiseOps
from .pooling import PoolOps
from .products import ProductOps
from .quantisation import QuantisationOps
from .random import RandomOps
from .refusals import no_method, refusing
from .scans import ScanOps

__all__ = ["DnnHandle", "open_backend"]

TUNE = ("off", "db", "auto", "force")


@refusing
class DnnHandle(ConvOps, ProductOps, ExpertOps, PoolOps, NormOps, LossOps, PointwiseOps, LayoutOps, QuantisationOps, ScanOps,
                AttentionOps, RandomOps, ListOps):
    """oxidnn on one device.

    device: None (OXIDNN_DEVICE, else cuda:0, else the emulator with one warning), "cuda:N", "emu:sm_XY".
    stream: the raw stream for frameworks that have none (default: the legacy default stream).
    deterministic: only engines that give the same bits run to run. math: f32 arithmetic of convolution and GEMM, "ieee" | "tf32" |
    "tf32x3" | "bf16x3" | "fast". tune: "off" estimates only | "db" tuning database, else estimates | "auto" measures each new
    problem once | "force" always measures. workspace_limit: most scratch bytes of a plan. cache_dir: cubins and tuning database.

    Concurrency: one handle may serve several threads. Options set by `options()` hold for the calling context only.
    """

    def __init__(self, device: str | None = None, *, stream: int | None = None, deterministic: bool | None = None, math: str | None = None,
                 tune: str | None = None, workspace_limit: int | None = None, cache_dir: str | Path | None = None) -> None:
        tune = tune or switches.get("OXIDNN_TUNE")
        if tune not in TUNE:
            raise expected("DnnHandle", "tune", repr(tune), " | ".join(TUNE))
        if deterministic is None:
            deterministic = switches.get("OXIDNN_DETERMINISTIC") == "1"
        policy = _checked(Policy(deterministic, math or switches.get("OXIDNN_MATH"), workspace_limit))
        backend = open_backend(device, cache_dir)
        stream = backend.default_stream() if stream is None else stream
        self._session = Session(backend, policy=policy, tune=tune, db=TuningDb.open(cache_dir), stream=stream)

    if not TYPE_CHECKING:
        def __getattr__(self, name: str) -> Any:
            raise AttributeError(no_method(type(self), name))

    def __repr__(self) -> str:
        return f"DnnHandle({self.device!r}: {self.info.name})"

    @contextlib.contextmanager
    def options(self, **changes: Any) -> Iterator[None]:
        """Within the `with` block, and in this context only: deterministic=, math=, workspace_limit= as in the constructor."""
        current = self._session.current_policy()
        try:
            policy = _checked(replace(current, **changes))
        except TypeError:
            raise expected("options", "argument", sorted(changes), "deterministic, math, workspace_limit") from None
        token = POLICY.set({**(POLICY.get() or {}), id(self._session): policy})
        try:
            yield
        finally:
            POLICY.reset(token)

    def plan(self, op: str, /, *arrays: Any, out: Any = None, operands: Mapping[str, Any] | None = None, **attrs: Any) -> BoundPlan:
        """The bound plan of `op` on arrays like these: `plan(x, w, out=y)` then runs with no look-up, legally under graph capture.

        operands: further named operands of an epilogue; they follow the arrays when it is called. An expression's scalars are given by
        name with every call, and may not be called out or stream. Of "pointwise" the first argument is the expression.
        """
        call, padded, values = signature(op, arrays, attrs)
        return self._session.plan(call, padded, values, out, operands)

    def explain(self, op: str, /, *arrays: Any, operands: Mapping[str, Any] | None = None, **attrs: Any) -> Explanation:
        """Which engines take the problem, why the others do not, what they are estimated and measured at, and which is chosen."""
        call, padded, values = signature(op, arrays, attrs)
        return self._session.explain(call, padded, values, operands)

    def warmup(self, problems: str | Problem | Iterable[str | Problem]) -> int:
        """Builds the plans of problems (or lines of the case grammar) ahead of time, so their cubins are stored; with tune="auto"
        measures them. Returns how many were built."""
        count = 0
        for problem in (problems,) if isinstance(problems, (str, Problem)) else problems:
            if not isinstance(problem, (str, Problem)):
                raise expected("warmup", "problems", repr(problem), "lines of the case grammar or Problems")
            if isinstance(problem, str):
                problem = parse_case(problem)
            if not problem.is_empty:
                plan_for(problem, self._session.backend, tune=self._session.tune, db=self._session.db)
                count += 1
        return count


def _checked(policy: Policy) -> Policy:
    if not isinstance(policy.deterministic, bool):
        raise expected("DnnHandle", "deterministic", repr(policy.deterministic), "True or False")
    limit = policy.workspace_limit
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int)):
        raise expected("DnnHandle", "workspace_limit", repr(limit), "None or at least 0 bytes")
    if policy.math not in MATH:
        raise expected("DnnHandle", "math", repr(policy.math), " | ".join(MATH))
    if policy.workspace_limit is not None and policy.workspace_limit < 0:
        raise expected("DnnHandle", "workspace_limit", policy.workspace_limit, "None or at least 0 bytes")
    return policy
