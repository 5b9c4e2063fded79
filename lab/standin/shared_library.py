"""The smallest shared library that ldconfig and the dynamic loader accept: a soname, no code, no symbols.

The userspace packages ship it under NVIDIA's file names. A text file there would make every ldconfig run on the host
complain about wrong magic bytes.
"""

from __future__ import annotations

import struct

# ELF constants from the System V gABI and its x86-64 supplement.
ET_DYN, EM_X86_64, PT_LOAD, PT_DYNAMIC, READ = 3, 62, 1, 2, 4
DT_NULL, DT_HASH, DT_STRTAB, DT_SYMTAB, DT_STRSZ, DT_SYMENT, DT_SONAME = 0, 4, 5, 6, 10, 11, 14
HEADER, PROGRAM_HEADER, SYMBOL, DYNAMIC = 64, 56, 24, 16


def shared_library(soname: str, notice: str) -> bytes:
    """Return an x86-64 ELF shared object with the given soname; the notice lies readable among its strings."""
    strings = b"\0" + soname.encode() + b"\0" + notice.encode() + b"\0"
    dynamic_at = HEADER + 2 * PROGRAM_HEADER
    hash_at = dynamic_at + 7 * DYNAMIC
    symbols_at = hash_at + 24  # nbucket, nchain, one bucket, one chain, padding to 8
    strings_at = symbols_at + SYMBOL
    size = strings_at + len(strings)
    entries = [
        (DT_SONAME, 1),
        (DT_HASH, hash_at),
        (DT_STRTAB, strings_at),
        (DT_SYMTAB, symbols_at),
        (DT_STRSZ, len(strings)),
        (DT_SYMENT, SYMBOL),
        (DT_NULL, 0),
    ]
    identification = b"\x7fELF" + bytes([2, 1, 1]) + bytes(9)  # 64-bit, little-endian, version 1
    header = identification + struct.pack(
        "<HHIQQQIHHHHHH", ET_DYN, EM_X86_64, 1, 0, HEADER, 0, 0, HEADER, PROGRAM_HEADER, 2, 0, 0, 0
    )
    load = struct.pack("<IIQQQQQQ", PT_LOAD, READ | 2, 0, 0, 0, size, size, 0x1000)
    dynamic_size = len(entries) * DYNAMIC
    dynamic = struct.pack(
        "<IIQQQQQQ", PT_DYNAMIC, READ | 2, dynamic_at, dynamic_at, dynamic_at, dynamic_size, dynamic_size, 8
    )
    table = b"".join(struct.pack("<QQ", tag, value) for tag, value in entries)
    hashes = struct.pack("<IIII", 1, 1, 0, 0) + bytes(8)
    return header + load + dynamic + table + hashes + bytes(SYMBOL) + strings
