"""Every kernel that the library ships, broken by small edits of its PTX: the emulator diagnoses them, or the results are wrong.

An edit is applied to lines that the run of the problem executes; a mutant counts as found if, under one of the schedules, a checker fires
or the outputs miss their tolerance. `python -m tests.emu.test_template_mutants [kernel ...] [--all]` lists the survivors.
"""

from __future__ import annotations

import argparse
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from oxidnn import emu
from oxidnn.codegen.render import render
from oxidnn.codegen.spec import KernelSpec
from oxidnn.dispatch.registry import ENGINES
from oxidnn.engines.base import Build, Engine, EngineConfig
from oxidnn.engines.matmul import MatmulEngine, lower
from oxidnn.errors import EmulatorFault, PtxError
from oxidnn.ops.case import parse_case
from oxidnn.ptx.parser import parse
from oxidnn.runtime.emu_backend import EmulatedBackend, EmulatedKernel
from oxidnn.testing.data import random_inputs, random_scalars, to_storage
from oxidnn.testing.harness import compare, exact, execute
from oxidnn.testing.reference import REFERENCES
from tests.emu import mutation, test_hazards, test_hopper_pipelines
from tests.emu import test_mutants as by_hand

SCHEDULES: tuple[Any, ...] = ("lowest_pc", ("random", 3))
PER_KERNEL = 26
LIMITS = (100, 400, 4000)  # control transfers; the longest of the kernels takes 3724, of warps that run one by one
ENDLESS = 3


class Fixed(MatmulEngine):
    """A matmul engine that takes configs its own list would not name for so small a problem: short rings, which wrap."""

    def build_steps(self, problem: Any, config: EngineConfig, device: Any) -> Build:
        (am,) = lower(problem)
        return self.algorithm.build(problem.op, am, config, device, 0)


@lru_cache(maxsize=16)
def decoded(text: str) -> emu.Program:
    return emu.load(parse(text))


class MutantBackend(EmulatedBackend):
    """Runs `programs[template]` in place of the rendered kernel, at most `limit` control transfers of it."""

    def __init__(self, programs: dict[str, emu.Program], schedule: Any, arch: str = "sm_90a", limit: int = LIMITS[-1]) -> None:
        super().__init__(arch, checkers="all", schedule=schedule)
        self.info = replace(self.info, num_sms=1)  # CTAs walk several tiles
        self.programs = programs
        self.limit = limit
        self.ran: dict[str, set[int]] = {}

    def load(self, text: Any, spec: KernelSpec) -> EmulatedKernel:
        program = self.programs.get(spec.template)
        limit = self.limit if program else LIMITS[-1]
        program = program or decoded(str(text))

        def launch(*args: Any, **options: Any) -> Any:
            counters = program.launch(*args, **options, step_limit=limit)
            self.ran.setdefault(spec.template, set()).update(counters.executions)
            return counters

        return EmulatedKernel(self, SimpleNamespace(launch=launch), spec, "mutant")


@dataclass
class Problem:
    """A case with its data, an engine and a config for it."""

    case: str
    engine: str
    knobs: dict[str, Any]
    arch: str = "sm_90a"

    def __post_init__(self) -> None:
        self.problem = problem = parse_case(self.case)
        engine = next(e for e in ENGINES[problem.op] if e.id == self.engine)
        info = MutantBackend({}, None, self.arch).info
        if isinstance(engine, MatmulEngine) and "stages" in self.knobs:
            self.config = EngineConfig.of(**self.knobs)
            engine = Fixed(problem.op, engine.algorithm)
        elif self.knobs.keys() & {"home", "team"}:  # arrangements that the list would not name for so short a row
            self.config = EngineConfig.of(**self.knobs)
        else:  # of the list, or what the list would not name for so small a problem
            listed = (c for c in engine.configs(problem, info) if self.knobs.items() <= dict(c.knobs).items())
            self.config = next(listed, EngineConfig.of(**self.knobs))
        self.by: Engine = engine
        self.specs = [s.spec for s in engine.build_steps(problem, self.config, info).steps]
        rng = np.random.default_rng(11)
        self.inputs, self.scalars = random_inputs(problem, rng), random_scalars(problem, rng)
        for operand in problem.inputs:  # constant rows and infinities hide much
            if operand.desc.dtype.is_float and operand.name not in ("mean", "rstd"):
                self.inputs[operand.name] = to_storage(rng.standard_normal(operand.desc.shape), operand.desc.dtype)
        self.want = REFERENCES[problem.op](problem, exact(problem, self.inputs), self.scalars)

    def text(self, template: str) -> str:
        """The rendered kernel; "" if the problem does not run it."""
        return next((render(s) for s in self.specs if s.template == template), "")

    def run(self, template: str, program: emu.Program, schedule: Any, limit: int = LIMITS[-1]) -> set[int]:
        """The lines executed of `program`, which stands for `template`. Raises what the emulator or the comparison does."""
        backend = MutantBackend({template: program}, schedule, self.arch, limit)
        with np.errstate(all="ignore"):
            got = execute(backend, self.problem, self.by, self.config, self.inputs, self.scalars)
            compare(self.problem, got, self.want)
        return backend.ran[template]


@dataclass
class Kernel:
    """A template by way of problems that run the same text of it. knobs: of the engine's config, those that matter."""

    template: str
    engine: str
    cases: tuple[str, ...]
    knobs: dict[str, Any] = field(default_factory=dict)
    equivalent: tuple[tuple[str, str, str], ...] = ()  # see EQUIVALENT
    arch: str = "sm_90a"

    @cached_property
    def problems(self) -> list[Problem]:
        first = Problem(self.cases[0], self.engine, self.knobs, self.arch)
        found = [first]
        for case in self.cases[1:]:
            knobs = dict(first.config.knobs) if "stages" in dict(first.config.knobs) else self.knobs
            found.append(Problem(case, self.engine, knobs, self.arch))
            assert found[-1].text(self.template) == first.text(self.template), f"{case} runs another kernel"
        return found

    @cached_property
    def text(self) -> str:
        return self.problems[0].text(self.template)

    @cached_property
    def own(self) -> dict[Any, list[tuple[int, Problem, set[int]]]]:
        """The kernel as it is under each schedule: of every problem the smallest of LIMITS that lets it end, the shortest first, and the
        lines executed. Raises what the emulator or the comparison does."""
        return {schedule: sorted((self._limited(p, schedule) for p in self.problems), key=lambda run: run[0]) for schedule in SCHEDULES}

    def _limited(self, problem: Problem, schedule: Any) -> tuple[int, Problem, set[int]]:
        for limit in LIMITS[:-1]:
            try:
                return limit, problem, problem.run(self.template, decoded(self.text), schedule, limit)
            except EmulatorFault as fault:
                if "control transfers" not in str(fault):
                    raise
        return LIMITS[-1], problem, problem.run(self.template, decoded(self.text), schedule, LIMITS[-1])

    def executed(self) -> set[int]:
        return set.union(*(lines for runs in self.own.values() for _, _, lines in runs))

    def fate(self, mutant: Mutant, schedules: Sequence[Any] = SCHEDULES) -> str:
        """"survived", or the name of what found it. What takes several times the transfers that the kernel as it is takes does not end."""
        try:
            program = mutant.program(self.text)
        except PtxError as found:
            return type(found).__name__
        return mutation.fate(partial(p.run, self.template, program, schedule, min(ENDLESS * limit, LIMITS[-1]))
                             for schedule in schedules for limit, p, _ in self.own[schedule])


def _wgmma(schedule: str, loader: str, tile_m: int, tile_n: int, **more: Any) -> dict[str, Any]:
    return {"schedule": schedule, "loader": loader, "tile_m": tile_m, "tile_n": tile_n, "stages": 2, "split_k": 1, **more}


def _decode(**more: Any) -> dict[str, Any]:
    return {"keys": 16, "team": 1, "warps": 2, "stages": 2, "splits": 1, **more}


DECODE = (("no clamp", "%limit", "a causal limit is never beyond the last key"),
          ("one further", "%last, %first_row", "rows beyond the tile see no more keys"),
          ("no guard|guard inverted", r"@%p_first st\.shared\.v2", "all lanes of a quad have the pair"),
          ("no xor", "%line_., 0", "nothing is changed"))
INSIDE = ("no guard|other comparison|one further|no choice", r"%column_first, (0|64|128|192|256|320|384); .*(%p_column|%column_first)",
          "all columns of these packs lie inside")
QUANTISED = (("no product", "%excess|%quotient", "but for quotients next to the middle of two codes, of which test_quantize has all"),
             ("branch inverted|other comparison", "%p_far", "of these scales both ways are right"),
             ("no choice|other comparison", "%p_(finite|nothing|nan|none|least|fp8_nan|known|older)", "all are finite, and some are not 0"),
             ("guard inverted", "%p_first ld.global.f32 %scale", "nor is the scale kept"),
             ("no choice|other comparison", "%p_live, %group|%p_outside, %first|0, %p_live", "groups fill the CTAs"),
             ("no guard|guard inverted", r"%p_leads st|%p_first st", "all threads of a scale hold it"),
             ("other comparison", "%p_fp8_small", "the least normal number is the same either way"),
             ("no guard|other comparison", r"%p_live\d", "a pack beyond the last is that one, and written alike"),
             ("no clamp", "%linear, %last", "what lies behind the codes is read, not used"),
             ("no guard|other comparison|one further", "%p_inside0|%index, %index", "a thread of one number is gone where that is outside"),
             ("no clamp", "%place", "0 lies within the range"), ("no clamp", "%group", "what threads without a group hold is not written"),
             ("no clamp", "%bits, %bits, 1258291203", "no scale saturates; test_nvfp4_by_any_global_scale has such"))
GROUPS = (("branch inverted", r"%p_holds bra \$tabulate", "of three groups a further round finds none"),
          ("no clamp", "%held, %held, %limit", "sizes are not beyond the rows; test_grouped_gemm has such"),
          ("other comparison", "%p_member, %index", "the size behind the last is of a round further, or of no group's rows"))
KERNELS = {
    "wgmma_coop": Kernel("matmul/wgmma_sm90", "gemm.wgmma_sm90",
                         ("gemm a=bf16[200,136] b=bf16[72,136] transpose_b=True",), _wgmma("coop", "boxes", 128, 64)),
    "wgmma_pingpong": Kernel("matmul/wgmma_sm90", "gemm.wgmma_sm90",
                             ("gemm a=f16[200,136] b=f16[136,72] bias=f32[72] epilogue=bias_relu",
                              "gemm a=f16[200,136] b=f16[136,120] bias=f32[120] epilogue=bias_relu"), _wgmma("pingpong", "boxes", 64, 64)),
    "wgmma_pair": Kernel("matmul/wgmma_sm90", "gemm.wgmma_sm90",
                         ("gemm a=bf16[600,136] b=bf16[72,136] transpose_b=True d=f32[600,72]",),
                         _wgmma("coop", "boxes", 128, 64, shares="b", lead=1)),
    "wgmma_defers": Kernel("matmul/wgmma_sm90", "gemm.wgmma_sm90",
                           ("gemm a=bf16[600,200] b=bf16[136,200] transpose_b=True",),
                           _wgmma("coop", "boxes", 128, 128, defers=True, group=2)),
    "wgmma_streams": Kernel("matmul/wgmma_sm90", "gemm.wgmma_sm90",
                            ("gemm a=bf16[200,456] b=bf16[72,456] transpose_b=True d=f32[200,72]",),
                            _wgmma("coop", "boxes", 128, 64, streams=7)),
    "wgmma_scales": Kernel("matmul/wgmma_sm90", "gemm.wgmma_sm90",
                           ("gemm a=s8[300,784] b=s8[128,784] transpose_b=True scale_a=f32[300,7] scale_b=f32[7,1] out_dtype=bf16",),
                           _wgmma("coop", "boxes", 128, 128, promotes=True)),
    "wgmma_groups": Kernel("matmul/wgmma_sm90", "grouped_gemm.wgmma_sm90",
                           ("grouped_gemm a=bf16[421,136] b=bf16[3,72,136] group_sizes=s32[3] transpose_b=True",),
                           _wgmma("coop", "boxes", 128, 64), GROUPS),
    "wgmma_gate": Kernel("matmul/wgmma_sm90", "gemm.wgmma_sm90",
                         ("gemm a=bf16[70,136] b=bf16[144,136] transpose_b=True gate=relu",), _wgmma("pingpong", "boxes", 64, 128)),
    "wgmma_group_terms": Kernel("matmul/wgmma_sm90", "grouped_gemm_wgrad.wgmma_sm90",
                                ("grouped_gemm_wgrad a=bf16[300,136] b=bf16[300,72] group_sizes=s32[3]",),
                                _wgmma("coop", "boxes", 128, 64), GROUPS),
    "skinny_parts": Kernel("matmul/skinny_wgmma_sm90", "gemm.skinny_wgmma",
                           ("gemm a=bf16[20,328] b=bf16[136,328] transpose_b=True bias=f32[136] epilogue=bias_relu",),
                           {"rows": 128, "stages": 2, "splits": 2}),
    "tiled_mma_groups": Kernel("matmul/tiled_mma_sm80", "grouped_gemm.mma_sm80",
                               ("grouped_gemm a=bf16[229,136] b=bf16[3,136,40] group_sizes=s32[3]",)),
    "tiled_mma_gate": Kernel("matmul/tiled_mma_sm80", "gemm.mma_sm80",
                             ("gemm a=bf16[70,136] b=bf16[48,136] transpose_b=True gate=silu bias=f32[48]",)),
    "wgmma_halo": Kernel("matmul/wgmma_sm90", "conv_fprop.igemm_wgmma_sm90",
                         ("conv_fprop x=bf16[2,64,9,10]nhwc w=bf16[72,64,3,3]nhwc padding=1",), _wgmma("coop", "halo", 128, 64), (
        ("stride up", "%origin_m, %consumer, 8192", "written again two lines on"),)),
    "strip": Kernel("matmul/strip_sm90", "conv_fprop.igemm_strip_sm90", (
        "conv_fprop x=bf16[28,3,18,16]nhwc w=bf16[64,3,7,7]nhwc padding=3 stride=2 bias=f32[64] epilogue=bias_relu",)),
    "strip_gradient": Kernel("matmul/strip_gradient_sm90", "conv_wgrad.igemm_strip_gradient_sm90", (
        "conv_wgrad x=bf16[9,3,16,24]nhwc dy=bf16[9,120,8,12]nhwc w_shape=(120,3,7,7) padding=3 stride=2",)),
    "halo_gradient": Kernel("matmul/halo_gradient_sm90", "conv_wgrad.igemm_halo_gradient_sm90", (
        "conv_wgrad dy=bf16[3,72,8,16]nhwc x=bf16[3,72,7,17]nhwc w_shape=(72,72,3,3) padding='((1,2),(0,1))'",),
                            {"splits": 2, "stages": 2}),
    "turned_gradient": Kernel("conv/turned_gradient_sm90", "conv_wgrad.turned_gradient", (
        "conv_wgrad x=f32[6,36,9,8]nhwc dy=f32[6,70,7,8]nhwc w_shape=(70,36,3,2) padding=((1,1),(0,2)) dilation=2 math=tf32",),
                              {"tile_m": 256, "tile_n": 128, "splits": 2}),
    "planes": Kernel("matmul/planes_sm90", "conv_fprop.igemm_planes_sm90", (
        "conv_fprop x=bf16[1,32,3,9,18]nhwc w=bf16[72,32,3,3,2]nhwc padding='((1,1),(0,2),(1,0))' bias=f32[72] epilogue=bias_relu",),
                     {"tile_n": 64}),
    "planes_gradient": Kernel("matmul/planes_sm90", "conv_dgrad.igemm_planes_sm90", (
        "conv_dgrad dy=bf16[1,56,6,9,17]nhwc w=bf16[56,40,3,3,2]nhwc x_shape=(1,40,6,9,16) padding=1",), {"tile_n": 32, "segments": 2}),
    "planes_sequence": Kernel("matmul/planes_sm90", "conv_fprop.igemm_planes_sm90", (
        "conv_fprop x=bf16[3,80,150]nhwc w=bf16[200,80,3]nhwc padding=1",), {"tile_n": 128}),
    "stream": Kernel("matmul/stream_sm90", "gemm.stream_sm90",
                     ("gemm a=bf16[333,24] b=bf16[24,40] bias=f32[40] epilogue=bias_relu",),
                     {"warps": 4, "slices": 1, "stages": 2, "streams": True}),
    "stream_gradient": Kernel("matmul/stream_gradient_sm90", "gemm.stream_gradient_sm90", (
        "gemm a=bf16[205,32] b=bf16[205,24] transpose_a=True",
        "gemm a=bf16[5,32] b=bf16[5,24] transpose_a=True"), {"groups": 2, "sharers": 2, "slices": 1, "stages": 2, "streams": True}, (
        ("other comparison", "%p_skip, %left, 0", "of no lines all are masked"),
        ("other lane", "shfl.sync.idx.b32 %warp, %warp", "all lanes have the same"))),
    "interleaved": Kernel("conv/interleaved_dgrad_sm90", "conv_dgrad.interleaved_sm90", (
        "conv_dgrad dy=bf16[3,72,9,11]nhwc w=bf16[72,3,7,7]nhwc x_shape=(3,3,17,22) padding=3 stride=2",)),
    "tiled_mma": Kernel("matmul/tiled_mma_sm80", "gemm.mma_sm80",
                        ("gemm a=bf16[70,136] b=bf16[136,40] bias=f32[40] epilogue=bias_relu",
                         "gemm a=bf16[5,40] b=bf16[40,24] bias=f32[24] epilogue=bias_relu")),
    "tiled_mma_conv": Kernel("matmul/tiled_mma_sm80", "conv_fprop.igemm_mma_sm80",
                             ("conv_fprop x=f16[1,8,7,6]nhwc w=f16[17,8,3,3]nhwc padding=1",
                              "conv_fprop x=f16[1,8,2,3]nhwc w=f16[17,8,3,3]nhwc padding=1",
                              "conv_fprop x=f16[1,8,5,10]nhwc w=f16[17,8,3,3]nhwc padding=1"), {"split_k": 1}),
    "attention_plain": Kernel("attention/plain", "attention.plain", (
        "attention q=f32[1,2,70,40]nchw k=f32[1,1,76,40]nchw v=f32[1,1,76,70]nchw causal=bottom_right sinks=f32[2] return_lse=True",)),
    "attention_backward": Kernel("attention/backward_sm90", "attention_backward.wgmma_sm90", (
        "attention_backward d_out=bf16[1,2,130,64]nchw q=bf16[1,2,130,64]nchw k=bf16[1,1,70,64]nchw v=bf16[1,1,70,64]nchw "
        "out=bf16[1,2,130,64]nchw lse=f32[1,2,130] causal=bottom_right",
        "attention_backward d_out=bf16[1,1,260,64]nchw q=bf16[1,1,260,64]nchw k=bf16[1,1,300,64]nchw v=bf16[1,1,300,64]nchw "
        "out=bf16[1,1,260,64]nchw lse=f32[1,1,260] causal=bottom_right",
        "attention_backward d_out=bf16[1,2,19,64]nchw q=bf16[1,2,19,64]nchw k=bf16[1,1,25,64]nchw v=bf16[1,1,25,64]nchw "
        "out=bf16[1,2,19,64]nchw lse=f32[1,2,19] causal=bottom_right")),
    "attention_backward_queries": Kernel("attention/backward_queries_sm90", "attention_backward.wgmma_apart_sm90", (
        "attention_backward d_out=bf16[1,1,70,64]nchw q=bf16[1,1,70,64]nchw k=bf16[1,1,331,64]nchw v=bf16[1,1,331,64]nchw "
        "out=bf16[1,1,70,64]nchw lse=f32[1,1,70] causal=bottom_right",
        "attention_backward d_out=bf16[1,2,19,64]nchw q=bf16[1,2,19,64]nchw k=bf16[1,1,25,64]nchw v=bf16[1,1,25,64]nchw "
        "out=bf16[1,2,19,64]nchw lse=f32[1,2,19] causal=bottom_right")),
    "attention_backward_wide": Kernel("attention/backward_wide_sm90", "attention_backward.wgmma_wide_sm90", (
        "attention_backward d_out=bf16[1,2,130,136]nchw q=bf16[1,2,130,136]nchw k=bf16[1,1,40,136]nchw v=bf16[1,1,40,136]nchw "
        "out=bf16[1,2,130,136]nchw lse=f32[1,2,130] causal=bottom_right",
        "attention_backward d_out=bf16[1,1,260,136]nchw q=bf16[1,1,260,136]nchw k=bf16[1,1,300,136]nchw v=bf16[1,1,300,136]nchw "
        "out=bf16[1,1,260,136]nchw lse=f32[1,1,260] causal=bottom_right",
        "attention_backward d_out=bf16[1,2,19,136]nchw q=bf16[1,2,19,136]nchw k=bf16[1,1,25,136]nchw v=bf16[1,1,25,136]nchw "
        "out=bf16[1,2,19,136]nchw lse=f32[1,2,19] causal=bottom_right")),
    "attention_backward_queries_wide": Kernel("attention/backward_queries_wide_sm90", "attention_backward.wgmma_wide_sm90", (
        "attention_backward d_out=bf16[1,1,40,136]nchw q=bf16[1,1,40,136]nchw k=bf16[1,1,331,136]nchw v=bf16[1,1,331,136]nchw "
        "out=bf16[1,1,40,136]nchw lse=f32[1,1,40] causal=bottom_right",
        "attention_backward d_out=bf16[1,2,19,136]nchw q=bf16[1,2,19,136]nchw k=bf16[1,1,25,136]nchw v=bf16[1,1,25,136]nchw "
        "out=bf16[1,2,19,136]nchw lse=f32[1,2,19] causal=bottom_right")),
    "attention_backward_mma": Kernel("attention/backward_mma", "attention_backward.mma_adding", (
        "attention_backward d_out=bf16[1,2,80,32]nchw q=bf16[1,2,80,32]nchw k=bf16[1,1,71,32]nchw v=bf16[1,1,71,32]nchw "
        "out=bf16[1,2,80,32]nchw lse=f32[1,2,80] causal=bottom_right",
        "attention_backward d_out=bf16[1,2,19,32]nchw q=bf16[1,2,19,32]nchw k=bf16[1,1,25,32]nchw v=bf16[1,1,25,32]nchw "
        "out=bf16[1,2,19,32]nchw lse=f32[1,2,19] causal=bottom_right")),
    "attention_backward_mma_bias": Kernel("attention/backward_mma_bias", "attention_backward.mma", (
        "attention_backward d_out=bf16[2,1,70,16]nchw q=bf16[2,1,70,16]nchw k=bf16[2,1,41,16]nchw v=bf16[2,1,41,16]nchw "
        "out=bf16[2,1,70,16]nchw lse=f32[2,1,70] bias=f32[1,1,1,41] causal=top_left",
        "attention_backward d_out=bf16[2,1,19,16]nchw q=bf16[2,1,19,16]nchw k=bf16[2,1,41,16]nchw v=bf16[2,1,41,16]nchw "
        "out=bf16[2,1,19,16]nchw lse=f32[2,1,19] bias=f32[1,1,1,41] causal=top_left")),
    "attention_backward_mma_dq": Kernel("attention/backward_mma_dq", "attention_backward.mma_adding", (
        "attention_backward d_out=bf16[2,1,70,32]nchw q=bf16[2,1,70,32]nchw k=bf16[2,1,40,32]nchw v=bf16[2,1,40,32]nchw "
        "out=bf16[2,1,70,32]nchw lse=f32[2,1,70]",)),
    "attention_delta": Kernel("attention/delta", "attention_backward.mma", (
        "attention_backward d_out=bf16[2,2,70,24]nchw q=bf16[2,2,70,24]nchw k=bf16[2,1,40,24]nchw v=bf16[2,1,40,24]nchw "
        "out=bf16[2,2,70,24]nchw lse=f32[2,2,70] lengths_q=s32[2]",)),
    "attention_sinks": Kernel("attention/sink_gradient", "attention_backward.mma", (
        "attention_backward d_out=bf16[2,2,70,24]nchw q=bf16[2,2,70,24]nchw k=bf16[2,1,40,24]nchw v=bf16[2,1,40,24]nchw "
        "out=bf16[2,2,70,24]nchw lse=f32[2,2,70] sinks=f32[2]",)),
    "attention_forward_mma": Kernel("attention/forward_mma", "attention.mma_sm80", (
        "attention q=bf16[1,2,19,40]nchw k=bf16[1,1,25,40]nchw v=bf16[1,1,25,40]nchw causal=bottom_right return_lse=True",
        "attention q=bf16[1,2,70,40]nchw k=bf16[1,1,170,40]nchw v=bf16[1,1,170,40]nchw causal=bottom_right return_lse=True"),
        {"warps": 2, "rows": 16, "tile_n": 32, "slots": 3, "swizzle": 0}, (
        ("no wait|weaker wait", "keys_done.*wait_group 0", "the last tiles have been waited for"),
        ("no choice", "%other, 0fFF800000, %p_some", "the logarithm of no weight is that"))),
    "attention_forward": Kernel("attention/forward_sm90", "attention.wgmma_sm90", (
        "attention q=bf16[1,1,30,64]nchw k=bf16[1,1,25,64]nchw v=bf16[1,1,25,64]nchw causal=top_left return_lse=True",
        "attention q=bf16[1,1,270,64]nchw k=bf16[1,1,150,64]nchw v=bf16[1,1,150,64]nchw causal=top_left return_lse=True"),
        {"warpgroups": 2, "keys": 32, "stages": 2}, (
        ("no choice", "%lse., 0fFF800000", "the logarithm of no weight is that"),
        ("no clamp", "%seen_end, %seen_end, %edge", "keys beyond the limit are masked, too"),
        ("stride up", "%row, %warpgroup, 64", "of 32 keys a tile, as many lie before row 80 as before row 64"))),
    "attention_decode": Kernel("attention/decode", "attention.decode", (
        "attention q=bf16[1,6,3,64]nchw k=bf16[1,2,30,64]nchw v=bf16[1,2,30,32]nchw causal=bottom_right window=(7,None) return_lse=True",
        "attention q=bf16[1,6,3,64]nchw k=bf16[1,2,159,64]nchw v=bf16[1,2,159,32]nchw causal=bottom_right window=(140,None) "
        "return_lse=True"),
        _decode(), (*DECODE, ("no clamp", "%rounds", "the keys are not split"),
                    ("no choice", "%address", "no byte is read of what is not seen"))),
    "attention_decode_boxes": Kernel("attention/decode", "attention.decode_sm90", (
        "attention q=bf16[1,6,3,72]nchw k=bf16[1,2,30,72]nchw v=bf16[1,2,30,64]nchw causal=bottom_right window=(7,None) return_lse=True",
        "attention q=bf16[1,6,3,72]nchw k=bf16[1,2,159,72]nchw v=bf16[1,2,159,64]nchw causal=bottom_right window=(140,None) "
        "return_lse=True"),
        _decode(), (*DECODE, ("no clamp", "%rounds", "the keys are not split"),
                    ("no fence", "fence.proxy.async", "what is cleared is a team's last step"))),
    "attention_decode_pages": Kernel("attention/decode", "attention.decode_sm90", (
        "paged_attention q=bf16[3,6,3,64]nchw k_cache=bf16[40,2,32,64]nchw v_cache=bf16[40,2,32,64]nchw page_table=s32[3,12] "
        "lengths_kv=s32[3] window=(200,None) causal=bottom_right",), _decode(splits=2), (*DECODE,
        ("no guard|guard inverted", r"@%p_first st\.global", "all threads of a row have its pair"),
        ("no clamp", "%last_page", "the table names pages that there are"))),
    "attention_decode_combine": Kernel("attention/decode_combine", "attention.decode", (
        "attention q=bf16[1,6,3,32]nchw k=bf16[1,2,320,32]nchw v=bf16[1,2,320,64]nchw sinks=f32[6] return_lse=True",),
        _decode(warps=1, splits=20)),
    "rope": Kernel("attention/rope", "rope.tokens", ("rope x=bf16[2,3,37,48](5760,1920,48,1) positions=s32[2,37] rotary_dim=32",)),
    "kv_cache_append": Kernel("attention/rope", "kv_cache.tokens", (
        "kv_cache_append k=bf16[2,2,9,64]nchw v=bf16[2,2,9,128]nchw slots=s64[2,9] k_cache=e4m3[5,2,8,64]nchw v_cache=e4m3[5,2,8,128]nchw "
        "positions=s32[2,9] rope=True k_scale=f32[1] v_scale=f32[1]",)),
    "moe_sort": Kernel("moe/sort", "moe_permute.sort", ("moe_permute x=f32[45,2] ids=s32[45,2] experts=40 first_expert=2",), {}, (
        ("one round less", "%warp, 0", "any warp may add up"), ("other comparison", "%base, 41", "rounds of 32"),
        ("one further", "%base, 32|%bucket, 128", "there is one round of assignments, and of experts"),
        ("no choice", "0xFFFFFFFF", "no lane follows those that have no assignment"))),
    "moe_route": Kernel("moe/route", "moe_route.warp",
                        ("moe_route logits=bf16[5,40] bias=f32[40] top_k=4 scoring=sigmoid groups=8 top_groups=3 scaling_factor=2.5",
                         "moe_route logits=bf16[40,40] bias=f32[40] top_k=4 scoring=sigmoid groups=8 top_groups=3 scaling_factor=2.5"),
                        {}, (
        ("no guard", "%p_expert[01]", "what does not exist is never chosen"), ("other comparison", "%p_group, %lane", "nor is its group"),
        ("other comparison", "%p_negative", "0 is never below"))),
    "moe_combine": Kernel("moe/combine", "moe_unpermute.rows", ("moe_unpermute ys=bf16[18,40] inverse=s32[9,2] weights=f32[9,2]",), {}, (
        ("no guard", "%word", "all of these assignments have rows"),
        ("other comparison", "%p_kept", "no row is the one behind the last"))),
    "moe_scatter": Kernel("moe/scatter", "moe_permute.sort", ("moe_permute x=bf16[9,40] ids=s32[9,2] experts=4 first_expert=1",)),
    "quantize_given": Kernel("quantize/map", "quantize.map", (
        "quantize x=bf16[70,72]nchw kind=s8 scale=f32[70]nchw zero_point=s8[70]nchw",), {"packs": 2}, QUANTISED),
    "dequantize": Kernel("quantize/map", "quantize.map", ("dequantize x=e4m3[99,60]nchw scale=f32[99]nchw dtype=f32",),
                         {"packs": 4}, QUANTISED),
    "dequantize_fp4": Kernel("quantize/map", "quantize.map", (
        "dequantize x=u8[133,24]nchw scale=e4m3[133,3]nchw global_scale=f32[]nchw scaling=nvfp4 dtype=f16",), {"packs": 2}, QUANTISED),
    "fake_quantize_gradient": Kernel("quantize/map", "quantize.map", (
        "fake_quantize_backward dy=f16[43,7]nchw x=f16[43,7]nchw kind=u8 scale=f32[7]nchw zero_point=s32[7]nchw axis=1",), {}, QUANTISED),
    "quantize_blocks": Kernel("quantize/groups", "quantize.groups", (
        'dynamic_quantize x=bf16[78,72]nchw kind=e4m3 scaling="(\'block\',(16,32))"',), {"packs": 2}, QUANTISED),
    "quantize_rows": Kernel("quantize/groups", "quantize.groups", (
        "dynamic_quantize x=f32[30,500]nchw kind=u8 scaling=token asymmetric=True",), {"packs": 1}, QUANTISED),
    "quantize_mxfp4": Kernel("quantize/groups", "quantize.groups", ("dynamic_quantize x=bf16[128,96]nchw kind=e2m1 scaling=mxfp4",), {},
                             QUANTISED),
    "quantize_nvfp4": Kernel("quantize/groups", "quantize.groups", (
        "dynamic_quantize x=bf16[128,96]nchw kind=e2m1 scaling=nvfp4 global_scale=f32[]nchw",), {}, QUANTISED),
    "delayed_scale": Kernel("quantize/delayed", "quantize.delayed", (
        "delayed_scale history=f32[40,9]nchw amax=f32[9]nchw scale=f32[9]nchw",), {}, QUANTISED),
    "fp8_by_integers": Kernel("quantize/map", "quantize.map", (
        "quantize x=f32[200,96]nchw kind=e4m3 scale=f32[200,96]nchw",), {}, QUANTISED, "sm_80"),
    "tiled_simt": Kernel("matmul/tiled_simt", "gemm.simt",
                         ("gemm a=f32[117,50] b=f32[50,21]", "gemm a=f32[37,10] b=f32[10,21]",
                          "gemm a=f32[96,10] b=f32[10,21]"), {"split_k": 1},
                         (("no clamp", "num_k_tiles", "k is not split"),)),
    "split_k_reduce": Kernel("matmul/split_k_reduce", "gemm.simt",
                             ("gemm a=f32[33,4320] b=f32[4320,9] bias=f32[9] epilogue=bias_relu",
                              "gemm a=f32[33,4200] b=f32[4200,9] bias=f32[9] epilogue=bias_relu"),
                             {"threads_m": 8, "threads_n": 4, "reg_m": 4, "reg_n": 4, "tile_k": 16, "stages": 2, "split_k": 300}),
    "direct": Kernel("matmul/direct", "conv_fprop.direct", ("conv_fprop x=f32[2,3,5,6]nchw w=f32[4,3,3,3]nchw padding=1",), {}, (
        ("other comparison", r"%p_inside3_[01]", "the first and the middle tap never lie beyond the last column"),
        ("no guard", r"ld\.global\.b32 %[ab]_value\d", "the product is guarded, too"))),
    "tree": Kernel("reduce/tree", "reduce.tree", ("reduce x=f32[3,5000] op=sum axes=1", "reduce x=f32[3,3572] op=sum axes=1",
                                                 "reduce x=f32[3,2560] op=sum axes=1"), {"path": "row", "along": 256, "splits": 1}, (
        ("no clamp", "%end", "the reduction is not split"), ("stride up", "%slot", "a CTA has one output"),
        ("other comparison", "%p_load0", "the loop ends before"), ("no guard", r"st\.global", "all threads hold the result"))),
    "tree_column": Kernel("reduce/tree", "reduce.tree", ("reduce x=f32[270,37] op=max axes=0",), {"path": "column", "splits": 1}, (
        ("no clamp", "%end", "the reduction is not split"),)),
    "tree_variance": Kernel("reduce/tree", "reduce.tree", ("reduce x=f32[17,203] op=var axes=1", "reduce x=f32[3,359] op=var axes=1"),
                            {"path": "row", "along": 32, "splits": 1}, (
        ("no clamp", "%end", "the reduction is not split"), ("other comparison", "%num_reduced, 0", "there are elements"))),
    "softmax": Kernel("rowwise/softmax", "softmax.row", ("softmax x=f32[7,99]",), {"lanes": 32}, (
        ("other lane", "%maximum", "the result does not depend on the shift"),
        ("no choice", "%shift", "the result does not depend on the shift"))),
    "softmax_cta": Kernel("rowwise/softmax", "softmax.row", ("softmax x=f32[3,501]",), {"lanes": 64}, (INSIDE,
        ("other lane|difference", "%maximum", "the result does not depend on the shift"),
        ("no choice", "%shift", "the result does not depend on the shift"),
        ("other comparison|no choice", "%p_row", "a CTA has one row"),
        ("no guard|guard inverted", "st.shared", "all lanes hold the sum of the warp"))),
    "norm": Kernel("rowwise/norm", "norm.row", ("layer_norm x=f32[3,501] gamma=f32[501] beta=f32[501]",), {"lanes": 64}, (INSIDE,
        ("difference|other lane|one further", "%mean|%other, %mean|%column_first, 0",
         "the second pass adds what the mean of the first is off by"),
        ("other comparison|no choice", "%p_row", "a CTA has one row"),
        ("no guard|guard inverted", "st.shared", "all lanes hold the sum of the warp"))),
    "cross_entropy": Kernel("rowwise/cross_entropy", "cross_entropy.row",
                            ("cross_entropy logits=f32[11,37] target=s64[11] reduction=none",),
                            {"home": "registers", "lanes": 16, "vec": 1, "threads": 128}, (
        ("other comparison", r"%ef_p", "the logarithm's special cases: no sum of exponentials is one"),)),
    "softmax_masked": Kernel("rowwise/softmax", "softmax.row", ("softmax x=f32[2,7,99] mask=f32[7,99] diagonal=94 scale=0.7",),
                             {"lanes": 32}, (
        ("other lane", "%maximum", "the result does not depend on the shift"), ("no clamp", "0x7FFFFFFF", "lines and diagonal are short"),
        ("no choice", "%shift", "the result does not depend on the shift"))),
    "sparsemax": Kernel("rowwise/sparsemax", "sparsemax.row", ("sparsemax x=f32[7,99]", "sparsemax x=f32[90,99]"), {"lanes": 32}, (
        ("other comparison", "setp.le.* %threshold", "at the threshold the result is 0 anyway"),)),
    "row_map": Kernel("rowwise/row_map", "row_map_backward.row", ("normalize_backward dy=f32[7,99] x=f32[7,99] g=f32[7]",), {"lanes": 32}),
    "norm_eight_bits": Kernel("rowwise/norm", "norm.row", ("rms_norm x=f32[7,99] gamma=f32[99] out_dtype=s8 return_scale=True",),
                              {"lanes": 32}, (("difference|other lane", "%unfinite", "0 in rows of finite results"),)),
    "sinkhorn": Kernel("rowwise/sinkhorn", "sinkhorn.matrix",
                       ("sinkhorn_backward dy=f32[130,3,3] x=f32[130,3,3] iterations=2 eps=0.125",), {}, (
        ("one further|no clamp", "%ef_", "the last place of powers, and numbers beyond their range"),
        ("no choice", "%p_empty", "no column is empty"))),
    "softmax_cluster": Kernel("rowwise/softmax", "softmax.row", ("softmax x=bf16[3,2504]",),
                              {"home": "shared", "lanes": 64, "vec": 8, "threads": 64, "cluster": 2}, (
        ("no choice", "%p_row", "a cluster has one row"), ("no guard", r"cp\.async", "the first packs lie inside"),
        ("other comparison", "%p_more", "a round more has no columns"),
        ("no guard|guard inverted", "st.shared", "all lanes hold the values of the warp"))),
    "norm_ring": Kernel("rowwise/norm_backward_ring", "norm_backward.row",
                        ("layer_norm_backward dy=bf16[69,136] x=bf16[69,136] mean=f32[69] rstd=f32[69] gamma=bf16[136]",),
                        {"home": "ring", "lanes": 32, "vec": 8, "threads": 64, "cluster": 1}),
    "norm_ring_cluster": Kernel("rowwise/norm_backward_ring", "norm_backward.row",
                                ("rms_norm_backward dy=f32[23,900] x=f32[23,900] rstd=f32[23] gamma=f32[900]",),
                                {"home": "ring", "lanes": 64, "vec": 4, "threads": 64, "cluster": 2}, (
        ("no choice", "%p_row", "a cluster has one row"), ("no guard", r"cp\.async.*slot\+0\]", "the first pack lies inside"))),
    "norm_stays": Kernel("rowwise/norm_ring", "norm.row", (
        "layer_norm x=bf16[23,1480] gamma=bf16[1480] beta=bf16[1480] return_stats=True",),
                         {"home": "ring", "lanes": 64, "vec": 8, "threads": 64, "cluster": 2, "behind": 1, "lead": 32}, (
        ("no choice", "%p_row", "a cluster has one row"), ("no guard", r"cp\.async.*slot\+0\]", "the first pack lies inside"),
        ("accumulators swapped|fragments swapped", "%part0", "all are added"),
        ("difference|other lane|guard inverted", "%mean", "the second pass adds what the mean of the first is off by"))),
    "softmax_stays": Kernel("rowwise/softmax_ring", "softmax.row", ("softmax x=bf16[23,520]",),
                            {"home": "ring", "lanes": 64, "vec": 8, "threads": 64, "cluster": 1, "behind": 1, "lead": 32}, (
        ("no choice", "%p_row", "a CTA has one row"), ("no choice", "%shift", "the result does not depend on the shift"))),
    "cross_entropy_stays": Kernel("rowwise/cross_entropy_backward_ring", "cross_entropy_backward.row", (
        "cross_entropy_backward logits=bf16[23,520] target=s64[23] d_loss=bf16[] ignore_index=3",),
        {"home": "ring", "lanes": 64, "vec": 8, "threads": 64, "cluster": 2, "behind": 1, "lead": 32}, (
            ("no choice", "%p_row", "a cluster has one row"), ("no choice", "%shift", "the result does not depend on the shift"))),
    "cross_entropy_weights": Kernel("rowwise/target_weight", "cross_entropy_backward.row", (
        "cross_entropy_backward logits=f32[20000,3] target=s64[20000] weight=f32[3]",),
                                    {"home": "registers", "lanes": 4, "vec": 1, "threads": 128}),
    "pool_window": Kernel("pool/window", "pool.window", ("max_pool x=f32[2,3,7,9]nchw window=3 stride=2 padding=1",
                                                        "max_pool x=f32[2,7,8,10]nchw window=3 stride=2 padding=1")),
    "pool_row": Kernel("pool/window", "pool.window", (
        "avg_pool x=f32[3,5,15,24]nchw window=(3,4) stride=2 padding=1 count_include_pad=False",
        "avg_pool x=f32[3,2,6,16]nchw window=(3,4) stride=2 padding=1 count_include_pad=False"), {"threads": 128, "along": 4}, (
        ("no choice", "%dm_q", "no extent is one"),
        ("other comparison|one further", "%p_inside1, %tap1|%tap1, %cell", "rows are whole packs"))),
    "pool_plane": Kernel("pool/plane", "pool.plane", (
        "max_pool_backward dy=f32[1,2,26,27]nchw x=f32[1,2,51,53]nchw window=3 stride=2 padding=1",), {"threads": 128}, (
        ("no choice", "%dm_q", "no extent is one"), ("other comparison", "%extent1", "of three taps two never lie behind the end"))),
    "pool_plane_indices": Kernel("pool/plane", "pool.plane", (
        "max_pool_backward dy=f16[2,8,10,11]nhwc indices=s64[2,8,10,11]nhwc window=3 stride=2 padding=1 x_shape=(2,8,20,21)",),
        {"group": 8, "threads": 128}, (
            ("no choice", "%dm_q", "no extent is one"), ("other comparison", "%limit64", "no index is one behind the last"),
            ("other comparison|one further", "%from", "packs begin and end with the images"),
            ("other comparison", "%p_has[013], %index", "the last output is another one's"))),
    "pool_plane_unpool": Kernel("pool/plane", "pool.unpool_plane", (
        "max_unpool x=f16[2,3,700]nchw indices=s64[2,3,700]nchw output_size=(1111,)",), {"threads": 128}, (
        ("one further", "%words", "sizes are rounded up"), ("other comparison", "%limit64", "no index is one behind the last"))),
    "multilabel": Kernel("rowwise/multilabel_margin", "row_loss.multilabel", (
        "row_loss_backward x=f32[2,701]nchw target=s64[2,701]nchw name=multilabel_margin",), {"lanes": 64, "vec": 1}, (
        ("no choice", "%p_row", "a CTA has one row"), ("other comparison", "%base, %length", "a turn more has no entries"),
        ("no guard|guard inverted", "st.shared", "all lanes hold what the warp found"))),
    "winograd_fused": Kernel("conv/winograd_fused", "conv_fprop.winograd_fused_f2x3", (
        "conv_fprop x=f32[2,9,5,9]nchw w=f32[61,9,3,3]nchw y=f32[2,61,5,9]nchw padding=1",), {"depth": 4}, arch="sm_80"),
    "winograd_fused_wgrad": Kernel("conv/winograd_fused_wgrad", "conv_wgrad.winograd_fused_f2x3", (
        "conv_wgrad x=f32[2,30,5,7]nchw dy=f32[2,61,5,7]nchw dw=f32[61,30,3,3]nchw padding=1",), {"splits": 1}, (
        ("no clamp", "%last_tile", "the tiles are not split"),
        ("no choice", "%live_x, %mask", "what lies behind the last channel goes into no result"),
        ("other comparison", "%filters_left, 0", "no thread begins one filter beyond the last"))),
    "winograd_ring": Kernel("conv/winograd_fused_sm90", "conv_fprop.winograd_fused_f2x3", (
        "conv_fprop x=f32[2,25,5,9]nchw w=f32[61,25,3,3]nchw y=f32[2,61,5,9]nchw padding=1",), {"depth": 8}),
    "depthwise_tma": Kernel("conv/depthwise_tma_sm90", "conv_fprop.depthwise_tma_sm90", (
        "conv_fprop x=bf16[2,32,29,20]nhwc w=bf16[32,1,3,3]nhwc y=bf16[2,32,29,20]nhwc padding=1 groups=32",), {}),
    "depthwise_tma_wgrad": Kernel("conv/depthwise_tma_wgrad_sm90", "conv_wgrad.depthwise_tma_sm90", (
        "conv_wgrad x=bf16[2,32,29,20]nhwc dy=bf16[2,32,29,20]nhwc dw=bf16[32,1,3,3]nhwc padding=1 groups=32",), {}),
    "depthwise_wgmma": Kernel("conv/depthwise_wgmma_sm90", "conv_fprop.depthwise_wgmma_sm90", (
        "conv_fprop x=bf16[3,16,18,12]nhwc w=bf16[16,1,3,5]nhwc y=bf16[3,16,21,12]nhwc padding='((4,1),(2,2))' groups=16",),
        {"groups": 2, "images": 2, "blocks": 2, "strip": 7, "stages": 2}),
    "depthwise_wgmma_wgrad": Kernel("conv/depthwise_wgmma_wgrad_sm90", "conv_wgrad.depthwise_wgmma_sm90", (
        "conv_wgrad x=bf16[3,16,19,12]nhwc dy=bf16[3,16,19,12]nhwc dw=bf16[16,1,5,3]nhwc padding='((2,2),(1,1))' groups=16",),
        {"groups": 2, "images": 2, "blocks": 2, "strip": 8, "stages": 5}),
    "depthwise_band": Kernel("conv/depthwise_band_sm90", "conv_fprop.depthwise_band_sm90", (
        "conv_fprop x=bf16[3,16,18,12]nhwc w=bf16[16,1,3,5]nhwc y=bf16[3,16,21,12]nhwc padding='((4,1),(2,2))' groups=16",),
        {"groups": 2, "own": 2, "strip": 7, "stages": 4}),
    "depthwise_band_wgrad": Kernel("conv/depthwise_band_wgrad_sm90", "conv_wgrad.depthwise_band_sm90", (
        "conv_wgrad x=bf16[3,16,19,12]nhwc dy=bf16[3,16,19,12]nhwc dw=bf16[16,1,5,3]nhwc padding='((2,2),(1,1))' groups=16",),
        {"groups": 2, "own": 2, "strip": 8, "stages": 4}),
    "unfold": Kernel("conv/unfold", "unfold.walk", ("unfold x=f32[2,3,7,6]nchw kernel=(3,2) padding=1",), {}),
    "fold": Kernel("conv/unfold", "unfold.walk", ("fold x=f32[2,18,238] output_size=(17,13) kernel=(3,2) padding=1",), {}),
    "causal": Kernel("conv/causal", "causal_conv1d.walk", ("causal_conv1d x=f32[2,3,700]nchw w=f32[3,4] bias=f32[3]",), {}),
    "lists": Kernel("foreach/map", "foreach.table", (
        "sgd_step param_0=f32[17000] param_1=f32[600]@4 param_2=f32[3,5] grad_0=f32[17000] grad_1=f32[600] grad_2=f32[3,5] "
        "momentum_buffer_0=f32[17000] momentum_buffer_1=f32[600] momentum_buffer_2=f32[3,5] lr=f32[] momentum=True",),
        {"vec": 4, "ctas": 8}),
    "lists_reduced": Kernel("foreach/map", "foreach.table", ("grad_norm grad_0=f32[17000] grad_1=f32[600]@4 grad_2=f32[3,5]",),
                            {"vec": 4, "ctas": 8}, (("no guard|guard inverted", "st.shared", "all lanes hold the sum of the warp"),)),
    "lists_combined": Kernel("foreach/combine", "foreach.table", ("grad_norm " + " ".join(f"grad_{i}=f32[1]" for i in range(1300)),),
                             {"vec": 1, "ctas": 8}, (("stride up", "%cta", "one CTA combines all"),
                                          ("no guard|guard inverted", "st.shared", "all lanes hold the sum of the warp"))),
    "lrn": Kernel("lrn/channels", "lrn.channels", (
        "lrn x=f32[3,11,40]nchw alpha=2.0 size=4",
        *(f"lrn x=f32[2,{c},3]nchw alpha=2.0 size=4" for c in (9, 10, 12, 13, 14, 15, 16, 18))), {},
        (("other comparison", "%p_is[01],", "the run's first channel is one"), ("no guard", "%p_is1 ", "the run's first channel is one"))),
    "lrn_gradient": Kernel("lrn/channels", "lrn.channels", tuple(
        f"lrn_backward dy=f32[{n},{c},{p}]nchw x=f32[{n},{c},{p}]nchw alpha=2.0 size=4"
        for n, c, p in ((3, 11, 40), *((2, c, 3) for c in (9, 10, 12, 13, 14, 15, 16, 18, 19)))), {},
        (("other comparison", "%p_is[0-3],", "the run's first channel is one"), ("no guard", "%p_is3 ", "the run's first channel is one"))),
    "layout_copy": Kernel("layout/copy", "layout.copy", tuple(
        f"pad x=f32[29,37]nchw padding=(({low},{high}),(0,0)) mode=reflect" for low, high in ((2, 3), (2, 4), (1, 3))), {"vec": 4}, (
        ("no choice", "%base_a, %p_second", "the first element is of the first row"), ("no guard", "mov.b32 %st_raw", "so is the store"),
        ("other comparison", "%at_linear0", "the first element is there"))),
    "layout_tile": Kernel("layout/tile", "layout.tile", ("permute x=f16[70,90]nchw", "permute x=f16[130,62]nchw"),
                          {"q": 1, "p": 1, "first": "p"}),
    "layout_pairs": Kernel("layout/sum", "layout.sum", ("pad_backward dy=f32[20,41]nchw padding=((2,3),(2,2)) mode=reflect",
                                                       "pad_backward dy=f32[12,41]nchw padding=((0,4),(3,1)) mode=reflect"), {"vec": 1}),
    "layout_sum": Kernel("layout/sum", "layout.sum", ("pad_backward dy=f32[20,41]nchw padding=((-1,3),(2,2)) mode=reflect",
                                                     "pad_backward dy=f32[10,41]nchw padding=((3,3),(2,2)) mode=reflect",
                                                     "pad_backward dy=f32[12,41]nchw padding=((3,-1),(2,2)) mode=reflect"), {}, (
        ("other comparison", "%p_single, %next", "the loops give the same"),
        ("other comparison", "%mirror, %end", "the loops leave out what lies at the end"))),
    "scan_row": Kernel("scan/block", "scan.block", tuple(f"cumsum x=f32[3,{n}]nchw" for n in (1501, 1499, 2047)),
                       {"path": "row", "threads": 128, "splits": 1}, (
        ("no choice", "%s_", "what lies behind the end counts for nothing that is stored"),)),
    "scan_column": Kernel("scan/block", "scan.block", ("cummax x=s32[150,33]nchw axis=0", "cummax x=s32[211,40](1,211) axis=0"),
                          {"path": "column", "threads": 128, "splits": 1}, (
        ("no choice", "%s_", "what lies behind the end counts for nothing that is stored"),)),
    "pack4": Kernel("pointwise/nibbles", "nibbles.map", tuple(
        f"pack4 x=f32[{rows},{n}](41,1) y=u8[{rows},{-(-n // 2)}](22,1) kind=e2m1"
        for rows, n in ((70, 39), *((3, n) for n in range(33, 39)))), {}, (
        ("no choice|no clamp|no product", "%p_number|%bits, (%bits, 1258291203|%other)|0f4B000000",
         "no NaN, little beyond 4: tests/emu/test_nibbles.py"),)),
    "pack4_integers": Kernel("pointwise/nibbles", "nibbles.map", ("pack4 x=s32[70,32]nchw", "pack4 x=s32[7,40]nchw")),
    "unpack4": Kernel("pointwise/nibbles", "nibbles.map", tuple(
        f"unpack4 x=u8[{rows},{-(-n // 2)}](22,1) y=f32[{rows},{n}](41,1) size={n} kind=e2m1"
        for rows, n in ((70, 39), *((3, n) for n in (33, 34, 35, 37, 38))))),
    "divisive": Kernel("lrn/within", "lrn.within", ("divisive_norm x=f32[3,2,7,9]nchw means=f32[3,2,7,9]nchw size=3",
                                                    "divisive_norm x=f32[1,3,4,6]nchw means=f32[1,3,4,6]nchw size=3"), {"strip": 1}),
    "divisive_strip": Kernel("lrn/within", "lrn.within", tuple(
        f"divisive_norm x=f32[{shape}]nchw means=f32[{shape}]nchw size=3" for shape in ("3,3,7,11", "1,3,5,6", "1,2,6,3", "2,2,9,4")),
        {"strip": 4, "along": 1}, (("no choice", "%dm_q", "no extent is one"),)),
    "divisive_packs": Kernel("lrn/within", "lrn.within", tuple(
        f"divisive_norm x=f32[{shape}]nchw means=f32[{shape}]nchw size=3" for shape in ("3,9,7,12", "1,3,5,8", "1,2,6,16", "2,2,9,12")),
        {"strip": 4, "along": 4}, (("no choice", "%dm_q", "no extent is one"),)),
    "adaptive_sums": Kernel("rowwise/norm_parameters", "norm_backward.row", tuple(
        f"layer_norm_backward dy=f32[{rows},33] x=f32[{rows},33] mean=f32[{rows}] rstd=f32[{rows}] gamma=f32[{rows[0]},1,33]"
        for rows in ("3,29", "5,9")), {"vec": 1}, (
        ("other comparison", "%row, %row_limit, %p_column", "every group has a row"),
        ("no guard", "%p_column ld.global", "threads without a group have gone"))),
    "map": Kernel("pointwise/map", "pointwise.map",
                  ('pointwise x=f32[3,5,7,7]nchw bias=f32[5]nchw expression="relu(x + bias[c])"',)),
    "map_packs": Kernel("pointwise/map", "pointwise.map", tuple(
        f'pointwise x=f32[{n}] y=f32[{n}] expression="x * y"' for n in (2045, 2046, 4095, 5001)),
                        {"packs": 2}, (("other comparison|no guard", "%p_element0", "every pack has an element"),)),
}  # fmt: skip


def _step(by: int) -> Callable[[re.Match[str]], str]:
    """Adds `by` to the number that is the last group."""
    def edit(m: re.Match[str]) -> str:
        at = m.start(m.lastindex or 0) - m.start()
        return f"{m[0][:at]}{int(m[m.lastindex or 0]) + by}{m[0][m.end(m.lastindex or 0) - m.start():]}"
    return edit


def _other_comparison(m: re.Match[str]) -> str:
    return m[1] + {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt"}[m[2]] + m[3]


COPY = r"(?:ld\.(?:global|shared)|st\.|cp\.async\.(?:c[ag]|bulk\.(?:tensor|shared))|ldmatrix|stmatrix|red|atom|mbarrier\.arrive|mov)"
NOTHING = ""
EDITS: dict[str, tuple[str, str | Callable[[re.Match[str]], str]]] = {
    "no barrier": (r"^bar(rier)?\.(sync|warp\.sync|cta\.sync).*", NOTHING),
    "no wait": (r"^(@\S+ )?((cp\.async|wgmma)\.\S*wait_\S+.*|griddepcontrol\.wait;)", NOTHING),
    "weaker wait": (r"^((?:@\S+ )?(?:cp\.async|wgmma)\S*wait_group\S* )(\d+);", _step(1)),
    "no commit": (r"^(cp\.async|wgmma)\S*commit_group\S*", NOTHING),
    "no fence": (r"^(fence|membar|wgmma\.fence)\S*.*", NOTHING),
    "no wait for a phase": (r"^(@!\S+ bra \$wait_.*)", NOTHING),
    "other parity": (r"^(mbarrier\.\w+\.parity\S* \S+ \[[^]]+\], )(%?\w+);",
                     r"{ .reg .b32 %flipped; xor.b32 %flipped, \2, 1; \1%flipped; }"),
    "one arrival more": (r"^(mbarrier\.init\S* \[[^]]+\], )(\d+);", _step(1)),
    "one arrival less": (r"^(mbarrier\.init\S* \[[^]]+\], )(\d+);", _step(-1)),
    "no arrival": (r"^(@\S+ )?mbarrier\.arrive\S* .*", NOTHING),
    "more bytes": (r"^(mbarrier\.arrive\.expect_tx\S* _, \[[^]]+\], )(\d+);", _step(16)),
    "fewer bytes": (r"^(mbarrier\.arrive\.expect_tx\S* _, \[[^]]+\], )(\d+);", _step(-16)),
    "no guard": (r"^@!?%\w+ (" + COPY + ".*)", r"\1"),
    "guard inverted": (r"^@(%\w+) (" + COPY + ".*)", r"@!\1 \2"),
    "ring longer": (r"^(setp\.eq\.u32 %p_wrap, %\w*(?:stage|slot)\w*, )(\d+);", _step(1)),
    "ring shorter": (r"^(setp\.eq\.u32 %p_wrap, %\w*(?:stage|slot)\w*, )(\d+);", _step(-1)),
    "no wrap": (r"^@%p_wrap .*", NOTHING),
    "no xor": (r"^xor\.b(\d+) (%\w+), (%\w+), .*;", r"mov.b\1 \2, \3;"),
    "other lane": (r"^(shfl\.sync\.\w+\.b32 [^,]+, %\w+, )(\d+)(?=,)", lambda m: m[1] + str(int(m[2]) // 2 or 2)),
    "address up": (r"^((?:@\S+ )?(?:ld\.(?:global|shared)|st|ldmatrix|stmatrix|cp\.async\.c)\S* (?:[^[]*, )?\[%\w+)(\+\d+)?\]",
                   lambda m: f"{m[1]}+{int(m[2] or 0) + 16}]"),
    "address down": (r"^((?:@\S+ )?(?:ld\.(?:global|shared)|st|ldmatrix|stmatrix|cp\.async\.c)\S* (?:[^[]*, )?\[%\w+)(\+\d+)?\]",
                     lambda m: f"{m[1]}+{int(m[2] or 0) - 4}]"),
    "stride up": (r"^(mad\.(?:lo|wide)\.[us]\d+ %\w+, %\w+, )(\d+)(?=,)", _step(16)),
    "descriptor up": (r"^(add\.s64 %operand_\w+, %\w+, )(\d+);", _step(2)),
    "operands swapped": (r"^(wgmma\.mma_async.*\}, )(%\w+), (%\w+)", r"\1\3, \2"),
    "fragments swapped": (r"^(mma\.sync.*?\}, \{)(%\w+), (%\w+)", r"\1\3, \2"),
    "accumulators swapped": (r"^((?:wgmma\.mma_async|mma\.sync)\S* \{)(%\w+), (%\w+)", r"\1\3, \2"),
    "no product": (r"^(wgmma\.mma_async|mma\.sync|fma\.rn).*", NOTHING),
    "one round less": (r"^(setp\.ne\.u32 %p_more, %\w+, )(\d+);", _step(1)),
    "other comparison": (r"^(setp\.)(lt|le|gt|ge)(\.\S+ .*)", _other_comparison),
    "branch inverted": (r"^@(%\w+) (bra .*)", r"@!\1 \2"),
    "no clamp": (r"^min\.(\w+) (%\w+), (%\w+), .*;", r"mov.\1 \2, \3;"),
    "no choice": (r"^selp\.(\w+) (%\w+), (\S+), .*;", r"mov.\1 \2, \3;"),
    "one further": (r"^(add\.[us](?:32|64) %\w+, %\w+, )(\d+);", _step(1)),
    "no access": (r"^(@\S+ )?(ld\.(global|shared)|st\.|cp\.async\.c|ldmatrix|stmatrix|cp\.async\.bulk\.tensor).*", NOTHING),
    "difference": (r"^add\.(rn\.)?f32", r"sub.\1f32"),
}

# Edits that leave a correct kernel, or one whose fault no run of one problem can show.
# (edit, pattern of "label place line", reason); the place is the last line that went on to another pack of a row
EQUIVALENT: tuple[tuple[str, str, str], ...] = (
    ("no choice", r"selp\.s32 %off, ", "nothing is read there: the copy is of 0 bytes, or the load predicated off"),
    ("other comparison", r"setp\.gt\.s32 %p_more, %tiles_to_compute, 0", "a round more multiplies a stage of zeros"),
    ("no choice|other comparison", r"%[ab]_p_k", "a tile of the other operand is zero there"),
    ("no clamp", r"min\.s32 %edge, %edge, %len_q", "the keys that more queries would see are masked"),
    ("no clamp", r"min\.s32 %(last_key|last_query|to_row|end), ", "tiles that more rows would see are masked"),
    ("no guard", r"%p_piece ld\.shared\.v4\.b32 ", "what lies behind the columns is not stored"),
    ("no guard|guard inverted", r"%p_lead st\.shared\.f32 ", "all lanes hold the same number"),
    ("no guard|guard inverted", r"%p_first st\.shared\.f32 \[%smem_value", "all lanes of the warp hold the same sum"),
    ("ring longer|ring shorter|no wrap", r"^\$fill", "the first loads fill all stages but one, and never wrap"),
)


@dataclass
class Mutant:
    edit: str
    line: int  # counted from 1
    was: str
    now: str

    def program(self, text: str) -> emu.Program:
        """The kernel of that text, broken; decoded as a whole only where the edit is of more than one instruction."""
        if re.fullmatch(r"[@a-z][^;]*;", self.was):
            try:
                return decoded(text).edited(self.line, self.now)
            except PtxError:  # the whole knows whether it is one
                pass
        return emu.load(parse(self.text(text)))

    def text(self, text: str) -> str:
        lines = text.split("\n")
        lines[self.line - 1] = self.now
        return "\n".join(lines)


def unused(text: str) -> set[int]:
    """Lines whose one instruction computes what nobody reads: overwritten in the same straight run of instructions, or read there only by
    instructions that are unused themselves."""
    ops = decoded(text).ops
    dead: set[int] = set()
    for pc in range(len(ops) - 1, -1, -1):
        op = ops[pc]
        if op.kind != "op" or not op.writes or "access" in op.info or op.ins.opcode in ("ld", "st", "cp", "atom", "red", "mbarrier"):
            continue
        waiting = set(op.writes)
        for later, following in enumerate(ops[pc + 1 :], pc + 1):
            reads = {*following.reads, *((following.guard.slot,) if following.guard else ())}
            if following.kind != "op" or (later not in dead and not waiting.isdisjoint(reads)):
                break
            if following.guard is None:
                waiting -= set(following.writes)
            if not waiting:
                dead.add(pc)
                break
    alive = {op.ins.line for pc, op in enumerate(ops) if pc not in dead}
    return {ops[pc].ins.line for pc in dead} - alive


def mutants(kernel: Kernel, executed: set[int]) -> Iterator[Mutant]:
    """All edits of all executed lines, in the order of the text, but for those that are unused."""
    lines = kernel.text.split("\n")
    executed = executed - unused(kernel.text)
    label = place = ""
    for index, line in enumerate(lines):
        if line.startswith("$"):
            label = line
        if "%column_first, " in line:
            place = line.strip()
        if index + 1 not in executed:
            continue
        was = line.strip()
        for edit, (pattern, replacement) in EDITS.items():
            now, count = re.subn(pattern, replacement, was, count=1)
            if count and now != was and not any(
                    re.fullmatch(e, edit) and re.search(p, f"{label} {place} {was}") for e, p, _ in EQUIVALENT + kernel.equivalent):
                yield Mutant(edit, index + 1, was, now)


def sample(found: list[Mutant], count: int) -> list[Mutant]:
    """Some of each edit, one in turn; which ones depends on their own lines alone."""
    seen: Counter[tuple[str, str]] = Counter()
    ranked = []
    for m in found:
        place = seen[m.edit, m.was]
        seen[m.edit, m.was] += 1
        ranked.append((zlib.crc32(f"{m.edit} {m.was} {place}".encode()), m))
    ranked.sort(key=lambda pair: pair[0])
    turn: Counter[str] = Counter()
    order = []
    for rank, m in ranked:
        order.append((turn[m.edit], rank, m))
        turn[m.edit] += 1
    return [m for _, _, m in sorted(order, key=lambda entry: entry[:2])[:count]]


# (found, of the sample), by kernel: a floor, which may only rise. Running this file as a module names the survivors.
FLOOR = {
    "stream": (25, 26), "stream_gradient": (25, 26),
    "strip": (24, 26), "strip_gradient": (23, 26), "interleaved": (25, 26), "halo_gradient": (25, 26),
    "turned_gradient": (23, 26), "planes": (26, 26), "planes_gradient": (26, 26), "planes_sequence": (26, 26),
    "wgmma_coop": (26, 26), "wgmma_pingpong": (26, 26), "wgmma_halo": (26, 26), "wgmma_pair": (26, 26), "wgmma_defers": (24, 26),
    "wgmma_streams": (25, 26), "wgmma_scales": (26, 26), "wgmma_groups": (23, 26), "wgmma_group_terms": (25, 26), "wgmma_gate": (26, 26),
    "skinny_parts": (25, 26),
    "tiled_mma_groups": (24, 26), "tiled_mma_gate": (24, 26),
    "tiled_mma": (26, 26), "tiled_mma_conv": (25, 26),
    "attention_plain": (25, 26), "attention_backward": (23, 26), "attention_backward_queries": (25, 26),
    "attention_backward_wide": (24, 26), "attention_backward_queries_wide": (25, 26),
    "attention_backward_mma": (21, 26), "attention_backward_mma_bias": (23, 26),
    "attention_backward_mma_dq": (23, 26), "attention_delta": (25, 26), "attention_sinks": (25, 26),
    "attention_forward_mma": (26, 26), "attention_forward": (24, 26), "attention_decode": (25, 26), "attention_decode_boxes": (25, 26),
    "attention_decode_pages": (25, 26), "attention_decode_combine": (23, 26), "rope": (25, 26), "kv_cache_append": (24, 26),
    "moe_sort": (25, 26), "moe_route": (25, 26), "moe_combine": (25, 25), "moe_scatter": (24, 24),
    "quantize_given": (26, 26), "dequantize": (26, 26), "dequantize_fp4": (26, 26), "fake_quantize_gradient": (24, 26),
    "quantize_blocks": (26, 26), "quantize_rows": (26, 26), "quantize_mxfp4": (26, 26), "quantize_nvfp4": (25, 26),
    "delayed_scale": (24, 26), "fp8_by_integers": (26, 26),
    "tiled_simt": (25, 26), "split_k_reduce": (25, 26), "direct": (26, 26), "tree": (24, 26), "tree_column": (25, 26),
    "tree_variance": (26, 26),
    "softmax_masked": (25, 26), "sparsemax": (26, 26), "row_map": (25, 26), "norm_eight_bits": (26, 26), "sinkhorn": (26, 26),
    "softmax": (26, 26), "softmax_cta": (26, 26), "norm": (25, 26), "cross_entropy": (26, 26), "pool_window": (24, 26),
    "lists": (26, 26), "lists_reduced": (25, 26), "lists_combined": (26, 26), "lrn": (26, 26), "lrn_gradient": (26, 26),
    "pack4": (24, 26), "pack4_integers": (20, 20), "unpack4": (24, 26), "divisive": (25, 26), "adaptive_sums": (26, 26),
    "layout_copy": (23, 26), "layout_tile": (22, 26), "layout_pairs": (26, 26),
    "pool_plane": (25, 26), "pool_plane_indices": (25, 26), "pool_plane_unpool": (23, 26), "multilabel": (23, 26), "layout_sum": (26, 26),
    "winograd_fused": (26, 26), "winograd_fused_wgrad": (25, 26),
    "winograd_ring": (24, 26), "depthwise_tma": (22, 26), "depthwise_tma_wgrad": (19, 26),
    "depthwise_wgmma": (22, 26), "depthwise_wgmma_wgrad": (23, 26), "depthwise_band": (21, 26), "depthwise_band_wgrad": (22, 26),
    "unfold": (25, 26), "fold": (22, 26), "causal": (26, 26),
    "scan_row": (24, 26), "scan_column": (26, 26),
    "map_packs": (25, 26), "pool_row": (23, 26), "divisive_strip": (26, 26), "divisive_packs": (25, 26),
    "norm_stays": (24, 26), "softmax_stays": (24, 26), "cross_entropy_stays": (24, 26), "cross_entropy_weights": (23, 26),
    "map": (18, 18), "softmax_cluster": (26, 26), "norm_ring": (24, 26), "norm_ring_cluster": (24, 26),
}


BY_HAND = 165  # a floor, too: of test_mutants, test_hopper_pipelines and test_hazards


@pytest.mark.parametrize("name", KERNELS)
def test_mutants(name: str, record_property: Callable[[str, object], None]) -> None:
    kernel = KERNELS[name]
    chosen = sample(list(mutants(kernel, kernel.executed())), PER_KERNEL)  # as it is, it raises no alarm
    found, count = FLOOR[name]
    assert len(chosen) >= count, "fewer lines to edit than there were"
    fates = [kernel.fate(m, SCHEDULES[:1]) for m in chosen]
    for i, m in enumerate(chosen):  # another schedule takes several times as long: no further than the floor asks for
        if fates[i] == "survived" and fates.count("survived") > count - found:
            fates[i] = kernel.fate(m, SCHEDULES[1:])
    survivors = [f"{m.edit}: {m.was} -> {m.now}" for m, fate in zip(chosen, fates, strict=True) if fate == "survived"]
    record_property("found", f"{len(chosen) - len(survivors)} of {len(chosen)}")
    print(f"{name}: {dict(Counter(fates))}", *survivors, sep="\n    ")
    assert len(survivors) <= count - found, "\n".join(survivors)


@pytest.mark.parametrize("name", ["pool_window", "lists"])
def test_edited_kernels_meet_the_fate_of_those_decoded_whole(name: str) -> None:
    kernel = KERNELS[name]
    shared = 0
    for m in sample(list(mutants(kernel, kernel.executed())), PER_KERNEL):
        whole = emu.load(parse(m.text(kernel.text)))
        program = m.program(kernel.text)
        shared += program.ops[0] is decoded(kernel.text).ops[0]
        for problem in kernel.problems:
            fates = [mutation.fate([partial(problem.run, kernel.template, p, "lowest_pc")]) for p in (whole, program)]
            assert fates[0] == fates[1], f"{m.edit}: {m.was} -> {m.now}"
    assert shared


def test_score() -> None:
    assert FLOOR.keys() == KERNELS.keys()
    found, count = (sum(numbers) for numbers in zip(*FLOOR.values(), strict=True))
    written = sum(len(module.MUTANTS) for module in (by_hand, test_hopper_pipelines, test_hazards))  # each must be diagnosed
    print(f"{found + written} of {count + written} mutants found: {found} of {count} of shipped kernels, {written} written by hand")
    assert count >= 400 and found >= 0.95 * count and written >= BY_HAND


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--all", action="store_true", help="all mutants rather than the sample")
    options = parser.parse_args()
    for name in options.names or KERNELS:
        kernel = KERNELS[name]
        start = time.perf_counter()
        found = list(mutants(kernel, kernel.executed()))
        chosen = found if options.all else sample(found, PER_KERNEL)
        fates = []
        for m in chosen:
            fates.append(kernel.fate(m))
            if fates[-1] == "survived":
                print(f"    {m.line}: {m.edit}: {m.was[:100]} -> {m.now[:100]}")
        print(f"{name}: {len(chosen)} of {len(found)} mutants, {dict(Counter(fates))}, {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
