"""PTX through nvJitLink, which needs no device."""

from __future__ import annotations

from cuda.bindings import nvjitlink


def assemble(text: str, target: str) -> str:
    """The assembler's complaint about `text`, "" if it assembles."""
    source = text.encode()
    handle = nvjitlink.create(2, [f"-arch={target}", "-O0"])
    try:
        nvjitlink.add_data(handle, nvjitlink.InputType.PTX, source, len(source), "test")
        nvjitlink.complete(handle)
        return ""
    except nvjitlink.nvJitLinkError as error:
        log = bytearray(nvjitlink.get_error_log_size(handle))
        nvjitlink.get_error_log(handle, log)
        return log.decode(errors="replace").strip("\0\n ") or str(error)
    finally:
        nvjitlink.destroy(handle)
