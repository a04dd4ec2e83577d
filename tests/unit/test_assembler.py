"""The assembler: resource reports, diagnostics, the choice of assembler, dumps, and assembling once."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from pathlib import Path

import pytest

from oxidnn.errors import AssemblyError, InvalidArgument
from oxidnn.runtime import assembler, driver
from oxidnn.runtime.assembler import assemble, cubin_for, cubin_key, disassemble, entry_name
from oxidnn.runtime.cubin_store import CubinStore

from .kernels import scale_spec, scale_text

HEAD = ".version 7.0\n.target sm_80\n.address_size 64\n"
SPEC = scale_spec()
TEXT = scale_text(SPEC)


def spilling_kernel(live: int, registers: int) -> str:
    """`live` values loaded, then a barrier, then stored in reverse: all are alive at the barrier."""
    loads = "".join(f"ld.volatile.global.f32 %v{i}, [%p + {4 * i}];\n" for i in range(live))
    stores = "".join(f"st.volatile.global.f32 [%p + {4 * i}], %v{live - 1 - i};\n" for i in range(live))
    return f"""{HEAD}.visible .entry spills(.param .u64 p) .maxntid 128, 1, 1 .maxnreg {registers} {{
.reg .u64 %p; .reg .f32 %v<{live}>; ld.param.u64 %p, [p];\n{loads}bar.sync 0;\n{stores}ret; }}"""


@pytest.fixture
def empty_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembler, "_memory", type(assembler._memory)())


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100a", "sm_120a"])
def test_assembles_for_the_target_and_everything_above(arch: str) -> None:
    done = assemble(TEXT, arch)
    assert done.cubin[:4] == b"\x7fELF"
    assert 1 <= done.registers <= 32 and done.spill_bytes == done.stack_bytes == done.smem_bytes == 0
    assert done.assembler.startswith("nvjitlink 13")


def test_report_counts_static_shared_memory_and_spills() -> None:
    smem = f"""{HEAD}.visible .entry k(.param .u64 p) {{ .shared .align 4 .b8 tile[644]; .reg .u64 %p; .reg .u32 %s, %v;
    ld.param.u64 %p, [p]; mov.u32 %s, %tid.x; shl.b32 %s, %s, 2; mov.u32 %v, tile; add.u32 %s, %s, %v; ld.shared.u32 %v, [%s];
    st.global.u32 [%p], %v; ret; }}"""
    assert assemble(smem, "sm_80").smem_bytes == 644
    roomy, tight = assemble(spilling_kernel(100, 168), "sm_80"), assemble(spilling_kernel(100, 64), "sm_80")
    assert roomy.registers > 100 and roomy.spill_bytes == 0
    assert tight.registers <= 64 and tight.spill_bytes >= 2 * 4 * (100 - 64) and tight.stack_bytes > 0


def test_sass_is_the_kernels() -> None:
    sass = disassemble(assemble(TEXT, "sm_90a").cubin)
    if sass is None:
        pytest.skip("nvdisasm is not installed")
    assert "FMUL" in sass and "HMMA" not in sass and SPEC.symbol in sass


def test_refusal_names_line_text_spec_and_kept_file() -> None:
    lines = TEXT.splitlines()
    at = next(i for i, line in enumerate(lines) if "mul.rn.f32" in line)
    broken = TEXT.replace("mul.rn.f32", "mull.rn.f32")
    with pytest.raises(AssemblyError) as refused:
        assemble(broken, "sm_90a")
    message = str(refused.value)
    assert f"line {at + 1}" in message and "mull" in message and "sm_90a" in message and SPEC.symbol in message
    shown = [line.partition("|")[2].strip() for line in message.splitlines() if " | " in line]
    assert shown == [line.strip() for line in broken.splitlines()[at - 2 : at + 3]]
    assert SPEC.describe() in message
    kept = Path(message.rpartition("text kept at ")[2])
    assert kept.read_text() == broken


def test_target_above_the_arch_is_refused() -> None:
    spec = scale_spec("sm_90a")
    with pytest.raises(AssemblyError, match="sm_80"):
        assemble(scale_text(spec), "sm_80")


@pytest.mark.parametrize("count", ["0", "0x0", "00"])
def test_zero_count_barrier_is_refused_before_any_assembler(count: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: str) -> tuple[bytes, str]:
        raise AssertionError("the text reached an assembler")

    text = f"""{HEAD}.visible .entry k() {{ .shared .align 8 .b64 bar;\n// mbarrier.init.shared.b64 [bar], 1;
    mbarrier.init.shared.b64 [bar], {count};\nret; }}"""
    monkeypatch.setattr(assembler, "_run_nvjitlink", never)
    with pytest.raises(AssemblyError, match="mbarrier.init"):
        assemble(text, "sm_80")


def test_barrier_with_a_count_passes() -> None:
    text = f"{HEAD}.visible .entry k() {{ .shared .align 8 .b64 bar;\n// [bar], 0;\nmbarrier.init.shared.b64 [bar], 10;\nret; }}"
    assert assemble(text, "sm_80").smem_bytes >= 8


def test_switch_chooses_the_assembler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OXIDNN_ASSEMBLER", "gcc")
    with pytest.raises(InvalidArgument, match="OXIDNN_ASSEMBLER: 'gcc'.*auto . nvjitlink . driver"):
        assemble(TEXT, "sm_80")
    monkeypatch.setenv("OXIDNN_ASSEMBLER", "driver")
    monkeypatch.setattr(driver, "driver_version", lambda: "13.0")
    monkeypatch.setattr(driver, "link_ptx", lambda text, arch, name: (b"cubin", "ptxas info : Used 7 registers, 12 bytes smem"))
    done = assemble(TEXT, "sm_80")
    assert (done.cubin, done.registers, done.smem_bytes, done.assembler) == (b"cubin", 7, 12, "driver 13.0")
    monkeypatch.setattr(driver, "link_ptx", lambda text, arch, name: (None, "ptxas fatal, line 3; no"))
    with pytest.raises(AssemblyError, match="line 3"):
        assemble(TEXT, "sm_80")


def test_no_assembler_at_all_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembler, "_nvjitlink_version", lambda: ("", "not installed"))
    monkeypatch.setattr(driver, "why_no_cuda", lambda: "no NVIDIA driver is installed")
    with pytest.raises(AssemblyError, match=r"oxidnn\[assembler\].*no NVIDIA driver"):
        assemble(TEXT, "sm_80")


def test_key_depends_on_text_target_and_assembler() -> None:
    keys = {cubin_key(t, a, i) for t in (TEXT, TEXT + "\n") for a in ("sm_80", "sm_90a") for i in ("nvjitlink 13.5", "driver 13.0")}
    assert len(keys) == 8 and all(len(k) == 64 for k in keys)


def test_origin_is_assembled_then_memory_then_disk(tmp_path: Path, empty_memory: None) -> None:
    store = CubinStore((tmp_path,), "rw")
    first, origin = cubin_for(TEXT, "sm_90a", store=store)
    assert origin == "assembled"
    assert cubin_for(TEXT, "sm_90a", store=store) == (first, "memory")
    assembler.forget_cubins()
    assert cubin_for(TEXT, "sm_90a", store=store) == (first, "disk")
    assembler.forget_cubins()
    assert cubin_for(TEXT, "sm_80", store=store)[1] == "assembled"
    assert {(e.name, e.arch) for e in store.entries()} == {(SPEC.symbol, "sm_90a"), (SPEC.symbol, "sm_80")}


def test_threads_assemble_a_text_once(tmp_path: Path, empty_memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    together = threading.Barrier(8)

    def counted(text: str, arch: str, name: str = "") -> assembler.Assembled:
        calls.append(text)
        return assemble(text, arch, name)

    monkeypatch.setattr(assembler, "assemble", counted)
    store = CubinStore((tmp_path,), "rw")
    texts = [scale_text(SPEC, comment=f"variant {i}") for i in range(3)]
    results: list[list[bytes]] = []

    def work() -> None:
        together.wait()
        results.append([cubin_for(t, "sm_80", store=store)[0].cubin for t in texts])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(calls) == sorted(texts)
    assert len(results) == 8 and all(r == results[0] for r in results)
    assert not assembler._locks


def test_failure_leaves_no_lock_and_no_entry(tmp_path: Path, empty_memory: None) -> None:
    store = CubinStore((tmp_path,), "rw")
    for _ in range(2):
        with pytest.raises(AssemblyError):
            cubin_for(TEXT.replace("mul.rn", "mul.xx"), "sm_80", store=store)
    assert not assembler._locks and not store.entries()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_assembles(tmp_path: Path, empty_memory: None) -> None:
    store = CubinStore((tmp_path,), "rw")
    cubin_for(TEXT, "sm_80", store=store)
    assembler._locks[cubin_key(scale_text(SPEC, "child"), "sm_80", assembler.assembler_identity())] = held = threading.Lock()
    held.acquire()  # as if another thread of the parent were assembling the very text
    try:
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        child = context.Process(target=lambda: queue.put(cubin_for(scale_text(SPEC, "child"), "sm_80", store=store)[1]))
        child.start()
        child.join(60)
        assert child.exitcode == 0 and queue.get() == "assembled"
    finally:
        assembler._locks.clear()


@pytest.mark.parametrize(("request_text", "kinds"),
                         [("{}", {"ptx", "cubin", "sass", "log"}), ("{}:ptx", {"ptx"}), ("{}:ptx,log", {"ptx", "log"})])
def test_dump(request_text: str, kinds: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OXIDNN_DUMP", request_text.format(tmp_path / "dump"))
    done = assemble(TEXT, "sm_80")
    found = {p.suffix[1:]: p for p in (tmp_path / "dump").iterdir()}
    if disassemble(done.cubin) is None:
        kinds = kinds - {"sass"}
    assert set(found) == kinds
    assert found["ptx"].read_text() == TEXT
    if "cubin" in found:
        assert found["cubin"].read_bytes() == done.cubin


def test_unwritable_dump_does_not_fail_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("OXIDNN_DUMP", str(blocker / "dump"))
    with pytest.warns(UserWarning, match="OXIDNN_DUMP"):
        assert assemble(TEXT, "sm_80").cubin


def test_entry_name() -> None:
    assert entry_name(TEXT) == SPEC.symbol and entry_name("") == "kernel"


def test_importing_the_runtime_touches_no_cuda() -> None:
    import subprocess

    code = ("import sys, oxidnn, oxidnn.runtime.cuda_backend, oxidnn.runtime.assembler, oxidnn.array, oxidnn.interchange; "
            "print([m for m in sys.modules if m.split('.')[0] in ('cuda', 'torch', 'cupy', 'jax')])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
