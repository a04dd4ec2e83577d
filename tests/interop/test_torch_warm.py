"""The short way of a warm call on torch tensors: taken when it may be, and never for tensors that only look like the planned ones.

The plans of this file compute y = 2 x from addresses and strides alone, so a wrong shortcut gives wrong numbers. No GPU is needed.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from oxidnn.dispatch import session as session_module  # noqa: E402
from oxidnn.dispatch.session import Call, Session  # noqa: E402
from oxidnn.dispatch.tuning_db import TuningDb  # noqa: E402
from oxidnn.dtypes import F64  # noqa: E402
from oxidnn.errors import InvalidArgument  # noqa: E402
from oxidnn.ops import OPS  # noqa: E402
from oxidnn.ops.base import OpDef, Operand, Policy, Problem  # noqa: E402
from oxidnn.tensor import TensorDesc  # noqa: E402

from ..unit.fakes import INFO, FakeBackend, FakeEngine, double_op  # noqa: E402, F401

CALL = Call("double", ("x", "z"))


def memory(ptr: int, desc: TensorDesc) -> np.ndarray:
    low, high = desc.offset_range
    size = desc.dtype.num_bytes
    kind = desc.dtype.numpy
    raw = np.ctypeslib.as_array((ctypes.c_uint8 * ((high - low + 1) * size)).from_address(ptr + low * size)).view(kind)
    return np.lib.stride_tricks.as_strided(raw[-low:], desc.shape, [s * size for s in desc.strides])


class MemoryPlan:
    """Outputs = 2 x, by the addresses given and the problem's strides."""

    workspace_bytes = 0

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def execute(self, pointers: list[int], workspace: int, stream: int, scalars: tuple[float, ...] = ()) -> None:
        assert bool(workspace) == bool(self.workspace_bytes)
        x, *outputs = (memory(p, o.desc) for p, o in zip(pointers, self.problem.operands, strict=True))
        for y in outputs:
            y[...] = 2 * x


@pytest.fixture
def session(double_op, monkeypatch) -> Session:  # type: ignore[no-untyped-def]  # noqa: F811
    double_op(FakeEngine("double.right", "right"))
    monkeypatch.setattr(session_module, "plan_for", lambda problem, *a, **k: MemoryPlan(problem))
    backend = FakeBackend(info=replace(INFO, is_emulated=False), device="cpu")
    return Session(backend, policy=Policy(), tune="off", db=TuningDb(None, ()), stream=0)  # type: ignore[arg-type]


def run(session: Session, x: Any, out: Any = None, z: Any = None, attrs: tuple[Any, ...] = ()) -> Any:
    return session.run(CALL, (x, z), attrs, out, None)


def is_short(session: Session, monkeypatch: pytest.MonkeyPatch, call: Any) -> bool:
    """Whether `call` asks for no plan: it took the short way."""
    asked = []
    prepared = Session.prepared
    with monkeypatch.context() as patch:
        patch.setattr(Session, "prepared", lambda self, *a, **k: asked.append(1) or prepared(self, *a, **k))
        call()
    return not asked


def fresh(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def test_the_second_call_is_short_with_and_without_out(session, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    x, y = fresh(8, 8), torch.full((8, 8), torch.nan)
    assert torch.equal(run(session, x), 2 * x)
    run(session, x, out=y)
    for _ in range(3):
        x = fresh(8, 8)  # new values at a new address
        result = []
        assert is_short(session, monkeypatch, lambda x=x, result=result: result.append(run(session, x)))
        assert torch.equal(result[0], 2 * x) and result[0].stride() == (8, 1)
        y.fill_(torch.nan)
        assert is_short(session, monkeypatch, lambda x=x: run(session, x, out=y))
        assert torch.equal(y, 2 * x)


def others() -> dict[str, Any]:
    """Tensors of 64 elements that are not as a dense f32 one of shape (8, 8)."""
    wide = torch.zeros(8 * 8 + 1)
    wide[1:] = torch.randn(64)
    return {
        "transposed": fresh(8, 8).t(), "columns of a wider one": fresh(8, 16)[:, ::2], "rows repeated": fresh(1, 8).expand(8, 8),
        "float64": fresh(8, 8, dtype=torch.float64), "float16": fresh(8, 8, dtype=torch.float16),
        "another shape": fresh(4, 16), "another rank": fresh(64), "ones between": fresh(8, 1, 8), "misaligned": wide[1:].view(8, 8),
        "parameter": torch.nn.Parameter(fresh(8, 8), requires_grad=False),
    }


@pytest.mark.parametrize("name", list(others()))
def test_tensors_that_are_not_as_the_planned_ones(session, name: str) -> None:  # type: ignore[no-untyped-def]
    plain, other = fresh(8, 8), others()[name]
    for x in (plain, other, plain, other, other, plain):
        assert torch.equal(run(session, x), 2 * x)
        y = torch.empty(x.shape, dtype=x.dtype).fill_(torch.nan)
        run(session, x, out=y)
        assert torch.equal(y, 2 * x)


def test_a_tensor_changed_in_place(session) -> None:  # type: ignore[no-untyped-def]
    x = fresh(8, 8)
    run(session, x)
    for change in (lambda: x.t_(), lambda: x.resize_(4, 4), lambda: x.resize_(16, 4), lambda: x.set_(fresh(3, 5)),
                   *(lambda data=data: setattr(x, "data", data) for data in (fresh(8, 8), fresh(8, 8).t(), fresh(2, 2).half()))):
        change()
        x.copy_(fresh(*x.shape))
        for _ in range(2):
            assert torch.equal(run(session, x), 2 * x)


def test_what_is_refused_stays_refused(session) -> None:  # type: ignore[no-untyped-def]
    for x in (fresh(8, 8), fresh(8, 8)):
        run(session, x)
    dense = fresh(8, 8)
    for x in (torch._neg_view(dense), dense.to_sparse(), dense.to("meta"), dense.to(torch.complex64), dense.tolist(), 3):
        for _ in range(2):
            with pytest.raises(InvalidArgument):
                run(session, x)
    y = torch.empty(8, 8)
    run(session, dense, out=y)
    for out in (dense, torch._neg_view(y), y.to_sparse(), y.to("meta"), dense.t()):
        for _ in range(2):
            with pytest.raises(InvalidArgument):
                run(session, dense, out=out)


def test_roles_and_attributes_are_told_apart(session, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    a, b = fresh(8, 8), fresh(8, 8)
    run(session, a)
    with pytest.raises(InvalidArgument, match="x"):  # the same tensors, in another role
        session.run(CALL, (None, b), (), None, None)


def test_with_scratch(session, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(MemoryPlan, "workspace_bytes", 512)
    run(session, fresh(8, 8))
    x, result = fresh(8, 8), []
    assert is_short(session, monkeypatch, lambda: result.append(run(session, x)))
    assert torch.equal(result[0], 2 * x)


def test_several_outputs(session, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    def make(tensors: Any, attrs: Any, policy: Policy) -> Problem:
        x = tensors["x"]
        y, wide = TensorDesc.packed(x.dtype, x.shape), TensorDesc.packed(F64, x.shape)
        return Problem("pair", (Operand("x", x), Operand("y", y, True), Operand("wide", wide, True)), policy=policy)

    monkeypatch.setitem(OPS, "pair", OpDef("pair", ("x",), ("y", "wide"), make))
    call = Call("pair", ("x",))
    session.run(call, (fresh(8, 8),), (), None, None)
    x, result = fresh(8, 8), []
    assert is_short(session, monkeypatch, lambda: result.extend(session.run(call, (x,), (), None, None)))
    assert torch.equal(result[0], 2 * x) and torch.equal(result[1], 2 * x.double())
    y, wide = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan, dtype=torch.float64)
    for _ in range(2):
        session.run(call, (x,), (), (y, wide), None)
        assert torch.equal(y, 2 * x) and torch.equal(wide, 2 * x.double())
    for out in (y, (y,), (y, wide, wide)):
        with pytest.raises(InvalidArgument):
            session.run(call, (x,), (), out, None)


def test_few_ways_are_kept_and_the_rest_is_still_right(session) -> None:  # type: ignore[no-untyped-def]
    tensors = [fresh(*shape) for shape in ((64,), (2, 32), (4, 16), (8, 8), (16, 4), (32, 2), (2, 2, 16), (2, 4, 8), (4, 4, 4), (2, 32, 1))]
    for _ in range(3):
        for x in tensors:
            assert torch.equal(run(session, x), 2 * x)
    assert all(len(ways) <= session_module.MAX_WAYS for ways in session._ways.values())


def test_autograd_and_inference_mode_change_nothing(session) -> None:  # type: ignore[no-untyped-def]
    x = fresh(8, 8)
    run(session, x)
    with torch.inference_mode():
        y = run(session, x)
        assert y.is_inference() and torch.equal(y, 2 * x)
    needs_grad = fresh(8, 8).requires_grad_()
    for _ in range(3):
        y = run(session, needs_grad)
        assert not y.requires_grad and torch.equal(y, 2 * needs_grad.detach())


def test_a_bound_plan_takes_the_short_way_and_refuses_other_arrays(session, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    plan = session.plan(CALL, (fresh(8, 8), None), ())
    asked: list[int] = []
    raw = Session.raw
    monkeypatch.setattr(Session, "raw", lambda self, *a: asked.append(1) or raw(self, *a))
    y = torch.empty(8, 8)
    for _ in range(3):
        x = fresh(8, 8)
        asked.clear()
        assert torch.equal(plan(x), 2 * x)
    assert not asked
    for _ in range(3):
        x = fresh(8, 8)
        asked.clear()
        y.fill_(torch.nan)
        assert plan(x, out=y) is y and torch.equal(y, 2 * x)
    assert not asked
    for bad in (fresh(8, 8).t(), fresh(8, 8, dtype=torch.float64), torch._neg_view(x), fresh(4, 4), others()["misaligned"]):
        with pytest.raises(InvalidArgument):
            plan(bad, out=y)
    for bad in (x, torch._neg_view(y), x.t()):
        with pytest.raises(InvalidArgument):
            plan(x, out=bad)
    with pytest.raises(InvalidArgument):
        plan(x, y)
    assert torch.equal(plan(x), 2 * x)


def test_nothing_keeps_the_tensors_alive(session) -> None:  # type: ignore[no-untyped-def]
    x, y = fresh(8, 8), torch.empty(8, 8)
    plan = session.plan(CALL, (x, None), ())
    plan(x, out=y), run(session, x), run(session, x, out=y)
    left = [weakref.ref(x), weakref.ref(y)]
    del x, y
    gc.collect()
    assert [r() for r in left] == [None, None]
