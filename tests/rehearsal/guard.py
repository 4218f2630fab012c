"""The library that a process which believes in a GPU is started with."""

import os
import subprocess
from pathlib import Path

import torch


def build_guard(folder: Path) -> Path:
    """The library of ``device_guard.cpp``, compiled once a folder; takes two seconds."""
    library = folder / "device_guard.so"
    if not library.exists():
        torch_folder = Path(torch.__file__).parent
        own = library.with_suffix(f".{os.getpid()}")
        source = Path(__file__).with_name("device_guard.cpp")
        places = [f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}"]
        linked = ["-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch_folder / 'lib'}"]
        flags = ["-shared", "-fPIC", "-std=c++20", "-o", str(own)]
        subprocess.run(["g++", *flags, str(source), *places, *linked], check=True)
        own.rename(library)
    return library
