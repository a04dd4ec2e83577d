"""The search on a real device, and candidates that fault: in the emulator they only lose, on a GPU they end the search cleanly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from oxidnn.dispatch import search
from oxidnn.dispatch.planning import plan_for
from oxidnn.dispatch.search import tune_problem
from oxidnn.dispatch.select import choose
from oxidnn.dispatch.tuning_db import TuningDb
from oxidnn.ops.case import parse_case
from oxidnn.runtime.backend import Backend
from oxidnn.runtime.emu_backend import EmulatedBackend

SMALL = (
    "gemm a=f32[9,5] b=f32[5,7]",
    "conv_fprop x=bf16[1,8,5,5]nhwc w=bf16[8,8,3,3]nhwc padding=1",
    "conv_wgrad x=f16[1,8,6,6]nhwc dy=f16[1,8,6,6]nhwc dw=f16[8,8,3,3]nhwc padding=1",
    "softmax x=bf16[3,57]",
)
LARGE = (
    "conv_fprop x=bf16[32,64,56,56]nhwc w=bf16[64,64,3,3]nhwc padding=1",
    "conv_dgrad dy=bf16[32,64,28,28]nhwc w=bf16[64,32,3,3]nhwc dx=bf16[32,64,56,56]nhwc padding=1 stride=2 groups=2",
    "conv_wgrad x=f16[32,64,28,28]nhwc dy=f16[32,128,28,28]nhwc dw=f16[128,64,1,1]nhwc",
    "gemm a=bf16[2048,1024] b=bf16[1000,1024] transpose_b=True bias=bf16[1000] epilogue=bias_relu",
    "gemm a=f32[1024,1024] b=f32[1024,1024]",
    "softmax x=f16[4096,4096]",
)


@pytest.mark.parametrize("line", SMALL)
@pytest.mark.parametrize("exact", [True, False], ids=["reference", "excerpts"])
def test_real_engines_pass_and_the_winner_is_taken(line: str, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not exact:
        monkeypatch.setattr(search, "EXACT_FLOPS", 0)
    backend, db, problem = EmulatedBackend("sm_80"), TuningDb(None, ()), parse_case(line)
    results = tune_problem(problem, backend, db, configs_per_engine=1)
    assert results and all(m.us is not None for m in results), [m.reason for m in results]
    engine, config, why = choose(problem, backend.info, db)
    assert (engine.id, config.name) == (results[0].engine, results[0].config) and why.startswith("tuned")


@pytest.mark.gpu
@pytest.mark.parametrize("line", (*SMALL, *LARGE))
def test_tuning_on_the_gpu(line: str, cuda: Backend) -> None:
    db, problem = TuningDb(None, ()), parse_case(line)
    results = tune_problem(problem, cuda, db)
    failed = [(m.engine, m.config, m.reason) for m in results if m.us is None]
    assert not failed, failed
    plan = plan_for(problem, cuda, tune="auto", db=db)
    assert (plan.engine.id, plan.config.name) == (results[0].engine, results[0].config)
    assert all(m.us is not None and 0.5 < m.us < 1e6 for m in results)


# A kernel that stores to address 64, as the most promising of two engines of gemm.
_TEMPLATE = """//% extends "skeleton/kernel.ptx.j2"
//% block body
    .reg .u64 %ptr_nowhere;
    mov.u64 %ptr_nowhere, 64;
    st.global.u32 [%ptr_nowhere], 1;
//% endblock
"""
_SCRIPT = """
import json, sys
from dataclasses import dataclass
from oxidnn.dispatch import registry
from oxidnn.dispatch.search import tune_problem
from oxidnn.dispatch.tuning_db import TuningDb
from oxidnn.codegen.spec import Target
from oxidnn.engines.base import SUPPORTED, Arg, Build, Engine, Step, TensorArg
from oxidnn.errors import LaunchError
from oxidnn.handle import open_backend
from oxidnn.ops.case import parse_case

@dataclass(frozen=True)
class Consts:
    pass

class Stray(Engine):
    id = "gemm.stray"
    def check_support(self, problem, device):
        return SUPPORTED
    def estimate(self, problem, config, device):
        return 0.001
    def build_steps(self, problem, config, device):
        target = Target.for_arch(device.arch)
        return Build((Step.of("bad/stray", "gemm", target, 32, [Arg("ptr_d", "u64", TensorArg("d"))], Consts(), grid=1),))

registry.ENGINES["gemm"] = (Stray(), registry.ENGINES["gemm"][-1])
db = TuningDb(sys.argv[2])
problem, backend = parse_case("gemm a=f32[9,5] b=f32[5,7]"), open_backend(sys.argv[1])
try:
    results = [(m.engine, m.us is not None, m.reason.split(":")[0]) for m in tune_problem(problem, backend, db)]
except LaunchError as error:
    results = "stopped: " + str(error)
print(json.dumps(results))
"""


def _tune_with_a_stray_engine(device: str, tmp_path: Path) -> object:
    (tmp_path / "templates" / "bad").mkdir(parents=True, exist_ok=True)
    (tmp_path / "templates" / "bad" / "stray.ptx.j2").write_text(_TEMPLATE)
    environment = os.environ | {"OXIDNN_TEMPLATE_PATH": str(tmp_path / "templates"), "OXIDNN_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", _SCRIPT, device, str(tmp_path / "tuning.sqlite")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_stray_store_loses_in_the_emulator(tmp_path: Path) -> None:
    assert _tune_with_a_stray_engine("emu:sm_80", tmp_path) == [["gemm.direct", True, ""], ["gemm.stray", False, "EmulatorFault"]]


@pytest.mark.gpu
def test_a_stray_store_ends_the_search_and_is_not_tried_again(tmp_path: Path) -> None:
    first = _tune_with_a_stray_engine("cuda:0", tmp_path)
    assert isinstance(first, str) and "gemm.stray default left the device unusable" in first
    assert _tune_with_a_stray_engine("cuda:0", tmp_path) == [["gemm.direct", True, ""]]
