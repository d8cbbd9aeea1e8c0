"""Matrix instructions (AMX) that a processor announces and cannot be used: some hypervisors leave out half of it.

The flags say that there are tiles, while leaf 0x1D of CPUID, from which oneDNN learns how large they are, is empty. It
then sets up tiles of no size, and the first product in bfloat16 or int8 ends the process with "Illegal instruction".

Parts: `avoid_unusable_amx`, called before torch is imported. Source: Intel's architecture instruction set extensions,
CPUID leaf 1DH; oneDNN's documentation of ONEDNN_MAX_CPU_ISA.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from pathlib import Path
from typing import Final

VARIABLE: Final = "ONEDNN_MAX_CPU_ISA"
BELOW_AMX: Final = "AVX512_CORE_FP16"
"""The richest set of instructions without tiles; oneDNN takes less where there is less."""
_CPUINFO: Final = Path("/proc/cpuinfo")
_TILE_LEAF: Final = 0x1D
# push rbx; mov eax, [rdi]; mov ecx, [rdi+8]; cpuid; mov [rdi], eax; mov [rdi+4], ebx; mov [rdi+8], ecx;
# mov [rdi+12], edx; pop rbx; ret
_CODE: Final = bytes.fromhex("538b078b4f080fa28907895f04894f0889570c5bc3")


def avoid_unusable_amx() -> None:
    """Have oneDNN do without tiles where they cannot work. What a person has set in the environment stays."""
    if VARIABLE not in os.environ and _announces_tiles() and not _has_palette():
        os.environ[VARIABLE] = BELOW_AMX


def _announces_tiles() -> bool:
    if platform.machine() != "x86_64":
        return False
    try:
        with _CPUINFO.open() as file:
            flags = next((line for line in file if line.startswith("flags")), "")
    except OSError:
        return False
    return "amx_tile" in flags.split()


def _has_palette() -> bool:
    """Whether the processor tells how large its tiles are; taken to be so where it may not be asked."""
    try:
        return cpuid(_TILE_LEAF)[0] > 0
    except OSError:  # a system that lets no process write its own instructions
        return True


def cpuid(leaf: int, part: int = 0) -> tuple[int, int, int, int]:
    """The registers eax, ebx, ecx and edx that an x86-64 processor answers with. Raises: OSError where none may ask."""
    code = mmap.mmap(-1, len(_CODE), prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(_CODE)
    start = ctypes.c_char.from_buffer(code)
    registers = (ctypes.c_uint32 * 4)(leaf, 0, part, 0)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(ctypes.addressof(start))(ctypes.addressof(registers))
    del start
    code.close()
    return registers[0], registers[1], registers[2], registers[3]
