"""Libraries that stand for those of torch with CUDA, so that a build with CUDA is one without.

A library that is already loaded under the name of another is taken for it. What torch's Python part
links to is therefore defined here by name, without content: no operator, allocator or hook of CUDA
is registered, and whoever calls what is not there ends, with its name.
"""

import subprocess
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_NAMES = ("libtorch_cuda.so", "libc10_cuda.so", "libtorch_nvshmem.so")
"""The first has the symbols of all."""
_FUNCTIONS = "TWi"
"""How `nm` marks them."""
_REFERENCES = {"_ZN4c10d15get_gil_checkerEv"}
"""What torch 2.11 and 2.13 call at import: returns a variable, which the importer sets."""
_CONSTRUCTORS = {"_ZN4c10d16ProcessGroupNCCL7OptionsC1Eb": "N4c10d16ProcessGroupNCCL7OptionsE"}
"""The same of torch 2.13, with the type of the object, which nobody uses before it is destroyed."""


def build_stubs(libraries, folder):
    """Write stubs of torch's libraries with CUDA to a folder.

    Args:
        libraries: torch's folder of libraries.
        folder: where the stubs are written.

    Returns:
        Words for the linker that make a library load them; none for a build without CUDA.
    """
    names = [name for name in _NAMES if (libraries / name).exists()]
    for name in names:
        source = _define_symbols(libraries, names) if name == names[0] else ""
        command = ["g++", "-x", "c++", "-", f"-I{_HERE}", "-fPIC", "-shared", "-o", folder / name]
        subprocess.run([*command, f"-Wl,-soname,{name}"], input=source, text=True, check=True)
    # Searched before torch's own folder, where the real ones are.
    stubs = [str(folder / name) for name in names]
    return ["-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN", *stubs] if names else []


def _define_symbols(libraries, names):
    """Return the source of what torch's Python part takes from these libraries."""
    wanted = _list_symbols(libraries / "libtorch_python.so", "--undefined-only")
    lines = []
    for name in names:
        defined = _list_symbols(libraries / name, "--defined-only")
        for symbol in sorted(defined.keys() & wanted.keys()):
            lines.append(_define(f"symbol{len(lines)}", symbol, *defined[symbol]))
    return "\n".join(('#include "stubs.h"', 'extern "C" {', *lines, "}\n"))


def _list_symbols(path, which):
    """Return the kind, as `nm` writes it, and the size of a library's symbols."""
    command = ["nm", "--dynamic", "--print-size", which, str(path)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    symbols = {}
    for line in output.splitlines():
        *numbers, kind, name = line.split()
        symbols[name.partition("@")[0]] = kind, int(numbers[1], 16) if len(numbers) > 1 else 0
    return symbols


def _define(name, symbol, kind, size):
    """Return a definition in C++ of `symbol`, which is called `name` there."""
    if symbol.startswith("_ZTI"):  # a type's description: Python's bindings ask for its name
        return f'TYPE({name}, "{symbol}", "{symbol.removeprefix("_ZTI")}")'
    if kind not in _FUNCTIONS:
        return f'VARIABLE({name}, "{symbol}", {size})'
    if symbol in _CONSTRUCTORS:
        return f'CONSTRUCTOR({name}, "{symbol}", "{_CONSTRUCTORS[symbol]}")'
    return f'{"REFERENCE" if symbol in _REFERENCES else "MISSING"}({name}, "{symbol}")'
