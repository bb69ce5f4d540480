"""Compile the judge: PyTorch's own C++ over a CUDA runtime that gives out addresses and starts no kernels.

    python benchmarks/judge/build.py [FOLDER]

Needs gcc and a CUDA 13 build of torch, with whose wheels the CUDA headers come; no driver, no card.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

SOURCES = Path(__file__).parent
FOLDER = SOURCES / "build"

# The wheels lack this header: it gives names to what is meant for nvcc.
HOST_DEFINES = """
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __host__
#define __device__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __CUDA_DEPRECATED
#define CUDARTAPI
#define CUDART_CB
"""


def headers() -> Path:
    """The folder of CUDA's headers among the installed packages.

    Raises:
        FileNotFoundError: this Python has no CUDA 13 build of torch.
    """
    folder = Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13" / "include"
    if not (folder / "driver_types.h").exists():
        raise FileNotFoundError(f"The judge needs the headers of a CUDA 13 build of torch, and {folder} has none: pip install torch.")
    return folder


def build(folder: Path = FOLDER) -> Path:
    """Compile into a folder, unless what is there is newer than its sources; returns the folder.

    Raises:
        FileNotFoundError: no gcc, no headers.
        subprocess.CalledProcessError: gcc found an error.
    """
    libraries = [folder / "shim.so", folder / "blas.so"]
    sources = [SOURCES / "shim.c", SOURCES / "blas.c"]
    newest = max(source.stat().st_mtime for source in (*sources, Path(__file__)))
    if all(library.exists() and library.stat().st_mtime > newest for library in libraries):
        return folder
    if shutil.which("gcc") is None:
        raise FileNotFoundError("The judge is compiled with gcc, and there is none: apt install gcc.")
    (folder / "crt").mkdir(parents=True, exist_ok=True)
    (folder / "crt" / "host_defines.h").write_text(HOST_DEFINES)
    for source, library in zip(sources, libraries, strict=True):
        command = ["gcc", "-w", "-O1", "-shared", "-fPIC", f"-I{folder}", f"-I{headers()}", "-o", str(library), str(source), "-ldl"]
        subprocess.run(command, check=True)
    link = folder / "libcuda.so.1"  # the driver, loaded by this name
    if not link.is_symlink():
        link.symlink_to("shim.so")
    return folder


def environment(folder: Path = FOLDER) -> dict[str, str]:
    """The environment of a process in which torch finds the judge's card."""
    preload = f"{folder / 'shim.so'} {folder / 'blas.so'}"
    paths = os.pathsep.join(filter(None, (str(folder), os.environ.get("LD_LIBRARY_PATH"))))
    return {**os.environ, "LD_PRELOAD": preload, "LD_LIBRARY_PATH": paths, "OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    print(build(parser.parse_args().folder.resolve()))
