"""PTX text to a cubin and its resource report: by nvJitLink (no driver needed) or by the driver's own linker.

OXIDNN_ASSEMBLER chooses: auto takes nvJitLink where it is installed. `assemble` always assembles; `cubin_for` asks the
process's memory and the cubin store first.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from .. import report, switches
from ..codegen.render import Source
from ..errors import AssemblyError, OxidnnError
from . import driver
from .cubin_store import CubinStore, write_atomically

# Part of every key: raise it when the options given to the assembler change.
_OPTIONS_VERSION = 1


@dataclass(frozen=True, slots=True)
class Assembled:
    """A cubin and what the assembler said of it. registers per thread; bytes of spill stores and loads together; stack bytes per
    thread; static shared memory per CTA. Of a text with several entries the largest figure stands."""

    cubin: bytes
    log: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    smem_bytes: int
    assembler: str  # "nvjitlink 13.5", "driver 13.0"


class _Refused(Exception):
    """The assembler's log for a text it does not take."""


def assemble(text: str, arch: str, name: str = "") -> Assembled:
    """Assembles PTX `text` for `arch` ("sm_90a"; not lower than its `.target`).

    name: what diagnostics and dumps call the kernel (default: the first entry's). Raises AssemblyError with the assembler's
    lines, the PTX around the first of them, the spec and the path under which the text was kept.
    """
    name = name or entry_name(text)
    _refuse_zero_count_barrier(text, name, arch)
    identity, run = _assembler()
    report_line = ("assemble", name, arch, identity)
    try:
        cubin, log = run(text, arch, name)
    except _Refused as refusal:
        raise _assembly_error(text, arch, name, identity, str(refusal)) from None
    assembled = Assembled(cubin, log, *_resources(log), identity)
    report.line(*report_line, f"{assembled.registers} registers", f"{assembled.spill_bytes} spill bytes", f"{len(cubin)} bytes")
    dump(text, assembled, name)
    return assembled


def cubin_for(text: str | Source, arch: str, name: str = "", store: CubinStore | None = None) -> tuple[Assembled, str]:
    """(assembled, origin): origin is "memory", "disk" or "assembled".

    Concurrency: threads that ask for one text at the same time assemble it once; processes at most once each.
    """
    key = cubin_key(text, arch, assembler_identity())
    found = _recall(key)
    if found is not None:
        return found, "memory"
    lock = _locks.setdefault(key, threading.Lock())
    try:
        with lock:
            found = _recall(key)
            if found is not None:
                return found, "memory"
            store = CubinStore() if store is None else store
            stored = store.get(key)
            if stored is not None:
                facts, cubin = stored
                found = Assembled(cubin, *(facts[f] for f in ("log", "registers", "spill_bytes", "stack_bytes", "smem_bytes", "assembler")))
                origin = "disk"
                if switches.get("OXIDNN_DUMP"):
                    dump(str(text), found, name or entry_name(str(text)))
            else:
                text = str(text)
                found = assemble(text, arch, name)
                facts = {k: v for k, v in asdict(found).items() if k != "cubin"} | {"name": name or entry_name(text), "arch": arch}
                store.put(key, facts, found.cubin)
                origin = "assembled"
            report.line("cache", name, arch, origin, key[:16])
            _memory[key] = found
            while len(_memory) > _MEMORY_ENTRIES:
                _memory.popitem(last=False)
    finally:
        _locks.pop(key, None)
    return found, origin


def cubin_key(text: str | Source, arch: str, identity: str) -> str:
    """SHA-256 (hex) of everything a cubin depends on; a Source counts by its digest."""
    content = text.digest if isinstance(text, Source) else text
    return hashlib.sha256(f"{_OPTIONS_VERSION}\n{arch}\n{identity}\n{content}".encode()).hexdigest()


def forget_cubins() -> None:
    """Empties the process's memory of cubins (the store on disk stays)."""
    _memory.clear()


_MEMORY_ENTRIES = 1024
_memory: OrderedDict[str, Assembled] = OrderedDict()
_locks: dict[str, threading.Lock] = {}
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_locks.clear)  # a lock another thread held would never be released in the child


def _recall(key: str) -> Assembled | None:
    found = _memory.get(key)
    if found is not None:
        try:
            _memory.move_to_end(key)
        except KeyError:  # another thread has just evicted it
            pass
    return found


# ---- the two assemblers ----


def assembler_identity() -> str:
    """Name and version of the assembler in use; part of every cubin's key."""
    return _assembler()[0]


def _assembler() -> tuple[str, Callable[[str, str, str], tuple[bytes, str]]]:
    choice = switches.get("OXIDNN_ASSEMBLER")
    if choice != "driver":
        version, reason = _nvjitlink_version()
        if version:
            return f"nvjitlink {version}", _run_nvjitlink
        if choice == "nvjitlink":
            raise AssemblyError(f"OXIDNN_ASSEMBLER=nvjitlink, but nvJitLink cannot be loaded ({reason}). pip install 'oxidnn[assembler]'.")
    try:
        version = driver.driver_version()
    except OxidnnError as error:
        raise AssemblyError(f"no assembler: nvJitLink is not installed (pip install 'oxidnn[assembler]') and {error}") from None
    return f"driver {version}", _run_driver


@cache
def _nvjitlink_version() -> tuple[str, str]:
    """("13.5", "") or ("", why not)."""
    try:
        from cuda.bindings import nvjitlink

        return ".".join(str(v) for v in nvjitlink.version()), ""
    except Exception as error:  # the loader of the library has exceptions of its own
        return "", f"{type(error).__name__}: {error}"


def _run_nvjitlink(text: str, arch: str, name: str) -> tuple[bytes, str]:
    from cuda.bindings import nvjitlink

    source = text.encode()
    options = [f"-arch={arch}", "-verbose"]
    handle = nvjitlink.create(len(options), options)
    try:
        try:
            nvjitlink.add_data(handle, nvjitlink.InputType.PTX, source, len(source), f"{name}.ptx")
            nvjitlink.complete(handle)
            cubin = bytearray(nvjitlink.get_linked_cubin_size(handle))
            nvjitlink.get_linked_cubin(handle, cubin)
        except nvjitlink.nvJitLinkError as error:
            log = _log(nvjitlink.get_error_log_size(handle), lambda b: nvjitlink.get_error_log(handle, b))
            raise _Refused(log or str(error)) from None
        return bytes(cubin), _log(nvjitlink.get_info_log_size(handle), lambda b: nvjitlink.get_info_log(handle, b))
    finally:
        nvjitlink.destroy(handle)


def _log(size: int, read: Callable[[bytearray], object]) -> str:
    buffer = bytearray(size)
    if size:
        read(buffer)
    return buffer.split(b"\0", 1)[0].decode(errors="replace").strip()


def _run_driver(text: str, arch: str, name: str) -> tuple[bytes, str]:
    cubin, log = driver.link_ptx(text, arch, name)
    if cubin is None:
        raise _Refused(log)
    return cubin, log


# ---- reading texts and logs ----


def entry_name(text: str) -> str:
    match = re.search(r"\.entry\s+([\w$]+)", text)
    return match[1] if match else "kernel"


def _resources(log: str) -> tuple[int, int, int, int]:
    """(registers, spill bytes, stack bytes, static shared bytes) of a verbose ptxas log."""
    registers = max((int(n) for n in re.findall(r"Used (\d+) registers", log)), default=0)
    spills = max((int(a) + int(b) for a, b in re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)), default=0)
    stack = max((int(n) for n in re.findall(r"(\d+) bytes stack frame", log)), default=0)
    smem = max((int(n) for n in re.findall(r"Used \d+ registers.*?(\d+) bytes smem", log)), default=0)
    return registers, spills, stack, smem


def _refuse_zero_count_barrier(text: str, name: str, arch: str) -> None:
    # ptxas takes it, but the driver's assembler dies of it and the whole process with it.
    match = re.search(r"mbarrier\.init[\w.:]*\s*\[[^\]]*\]\s*,\s*(?:0x0+|0+)\s*;", re.sub(r"//[^\n]*", "", text))
    if match:
        line = text.count("\n", 0, text.find(match[0])) + 1 if match[0] in text else 0
        raise _assembly_error(text, arch, name, "oxidnn",
                              f"line {line}; error : mbarrier.init with the constant count 0 crashes the driver's assembler")


def _assembly_error(text: str, arch: str, name: str, identity: str, log: str) -> AssemblyError:
    lines = text.splitlines()
    numbers = [int(n) for n in re.findall(r"line (\d+)", log)]
    excerpt = ""
    if numbers and 1 <= numbers[0] <= len(lines):
        at = numbers[0]
        around = range(max(1, at - 2), min(len(lines), at + 2) + 1)
        excerpt = "".join(f"\n  {'>' if n == at else ' '} {n:5} | {lines[n - 1]}" for n in around)
    spec = next((line.partition("spec:")[2].strip() for line in lines if line.startswith("// spec:")), "")
    stored = f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:12]}.ptx"
    kept = CubinStore().keep(stored, text)
    said = "\n  ".join(log.splitlines()[:12])
    return AssemblyError(f"{name} was refused by {identity} for {arch}:\n  {said}{excerpt}\n"
                         f"  spec: {spec or '(none in the text)'}\n  text kept at {kept}")


# ---- dumps ----

_DUMPS = ("ptx", "cubin", "sass", "log")


def dump_request() -> tuple[Path, frozenset[str]] | None:
    """(directory, kinds) of OXIDNN_DUMP, or None."""
    text = switches.get("OXIDNN_DUMP")
    if not text:
        return None
    head, _, tail = text.rpartition(":")
    kinds = frozenset(k.strip() for k in tail.split(",") if k.strip())
    if head and kinds and kinds <= set(_DUMPS):
        return Path(head).expanduser(), kinds
    return Path(text).expanduser(), frozenset(_DUMPS)


def dump(text: str, assembled: Assembled | None, name: str) -> None:
    """Writes what OXIDNN_DUMP asks for: NAME_<digits of the text's hash>.{ptx,cubin,sass,log}. Never fails a run."""
    request = dump_request()
    if request is None:
        return
    directory, kinds = request
    stem = f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    try:
        if "ptx" in kinds:
            write_atomically(directory / f"{stem}.ptx", text.encode())
        if assembled is None:
            return
        if "cubin" in kinds:
            write_atomically(directory / f"{stem}.cubin", assembled.cubin)
        if "log" in kinds:
            write_atomically(directory / f"{stem}.log", f"{assembled.assembler}\n{assembled.log}\n".encode())
        if "sass" in kinds:
            code = disassemble(assembled.cubin)
            if code is not None:
                write_atomically(directory / f"{stem}.sass", code.encode())
    except OSError as error:
        report.warn_once(f"dump:{directory}", f"OXIDNN_DUMP: {directory} cannot be written ({error.strerror or error}).")


@cache
def _nvdisasm() -> str | None:
    installed = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    found = sorted(installed.glob("*/bin/nvdisasm*"))
    return str(found[-1]) if found else shutil.which("nvdisasm")


def disassemble(cubin: bytes) -> str | None:
    """SASS of a cubin, or None where nvdisasm is not installed (pip install 'oxidnn[inspect]')."""
    tool = _nvdisasm()
    if tool is None:
        return None
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([tool, "-c", str(path)], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None
