"""Compile every streaming kernel for GPUs that need not be there, and count its machine code.

    python benchmarks/kernel_code.py                     all launches; minutes
    python benchmarks/kernel_code.py --arch 90 --only sweep_kernel
    python benchmarks/kernel_code.py --core              what the tests hold to its bounds
    python benchmarks/kernel_code.py --output benchmarks/results/kernel_code.json

It prints JSON, or adds it to a file as "after", beside what is there as "before": registers,
spilled bytes, shared memory, occupancy, loads of 128 bits, and SASS instructions a column. Launches
beyond ``machine_code/bounds.json`` are named on stderr, and the exit status is 1. The assembler and
the disassembler are those that come with triton for NVIDIA GPUs; without the second, loads are
counted in PTX and instructions are missing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))
# A kernel that is interpreted cannot be compiled; triton decides as it is imported.
os.environ["TRITON_INTERPRET"] = "0"

from benchmarks.machine_code.assembly import counted, instructions, occupancy, resources
from benchmarks.machine_code.bounds import broken
from benchmarks.machine_code.launches import CORE, KernelLaunch, launches

ARCHITECTURES: Final = (80, 90, 100)


def tool(name: str) -> Path | None:
    """A program that comes with triton, if it is there."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return path if path.exists() else None


def assembler(arch: int) -> Path | None:
    """The assembler that triton uses for an architecture, if it is there."""
    import triton

    # From 3.9 on, the one named after Blackwell is the newer one for Hopper, too.
    since = 90 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9) else 100
    return tool("ptxas-blackwell" if arch >= since else "ptxas")


def compiled(launch: KernelLaunch, arch: int) -> Any:
    """Triton's result for a launch."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megatron_ext.ops.kernel import KERNEL_OPTIONS

    kernel, types = launch.function(), launch.types()
    signature = dict.fromkeys(kernel.arg_names, "constexpr")
    signature |= {name: kind.removesuffix(":16") for name, kind in types.items()}
    multiples = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if types.get(name, "").endswith(":16")
    }
    source = ASTSource(kernel, signature, launch.constants, multiples)
    options = {**KERNEL_OPTIONS, "num_warps": launch.config.num_warps, **launch.options}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def report(launch: KernelLaunch, arch: int) -> dict[str, Any]:
    """Counts of one launch on one architecture."""
    code, ptxas, disassembler = compiled(launch, arch), assembler(arch), tool("cuobjdump")
    assert ptxas, "an assembler is checked for before"
    used = resources(ptxas, code.asm["ptx"])
    block, warps = launch.config
    shared = code.metadata.shared
    found: dict[str, Any] = {
        **used,
        "shared_bytes": shared,
        "occupancy": round(occupancy(arch, used["registers"], warps, shared), 2),
    }
    if disassembler is None or tool("nvdisasm") is None:
        missing = "triton has no cuobjdump and nvdisasm: instructions are not counted"
        return {**found, "wide_loads": code.asm["ptx"].count("ld.global.v4"), "missing": missing}
    listing = instructions(disassembler, code.asm["cubin"])
    columns = max(1, block // (32 * warps))
    counts = counted(
        listing,
        columns,
        has_parts=launch.has_parts,
    )
    counts.pop("loops")
    return found | counts


def write(path: Path, found: dict[str, dict[str, Any]]) -> None:
    """Write "after", with the versions that made it; "before" stays, or is the same at first."""
    import triton

    kept = json.loads(path.read_text()) if path.exists() else {"before": found}
    machine = {"machine": platform.machine(), "triton": triton.__version__}
    parts = {"machine": machine, "before": kept["before"], "after": found}
    lines = []
    for name, part in parts.items():
        if name == "machine":
            lines.append(f'"machine": {json.dumps(part)}')
            continue
        rows = ",\n".join(
            f" {json.dumps(arch)}: {{\n"
            + ",\n".join(f"  {json.dumps(key)}: {json.dumps(row)}" for key, row in launched.items())
            + "\n }"
            for arch, launched in part.items()
        )
        lines.append(f'"{name}": {{\n{rows}\n}}')
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> None:
    """Print the report of the chosen launches; say which break a bound or do not compile."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arch", type=int, action="append", choices=ARCHITECTURES)
    parser.add_argument("--only", default="", help="a part of the names of launches")
    parser.add_argument("--core", action="store_true", help="the launches that tests compile")
    parser.add_argument("--output", type=Path, help='JSON file with a part "before"')
    options = parser.parse_args()
    chosen = [launch for launch in launches() if options.only in launch.name]
    if options.core:
        chosen = [launch for launch in chosen if launch.name in CORE]
    found: dict[str, dict[str, Any]] = {}
    problems: list[str] = []
    for arch in options.arch or ARCHITECTURES:
        if assembler(arch) is None:
            print(f"CANNOT: this build of triton has no assembler for sm_{arch}", file=sys.stderr)
            sys.exit(2)
        found[f"sm_{arch}"] = reports = {}
        for launch in chosen:
            print(f"sm_{arch} {launch.name}", file=sys.stderr)
            try:
                reports[launch.name] = report(launch, arch)
                problems += [
                    f"sm_{arch} {text}" for text in broken(launch.name, reports[launch.name])
                ]
            except Exception as error:
                reports[launch.name] = {"error": f"{type(error).__name__}: {error}"[-500:]}
                problems.append(f"sm_{arch} {launch.name} does not compile")
    if options.output:
        write(options.output, found)
    else:
        print(json.dumps(found, indent=1))
    sys.exit("\n".join(problems) or 0)


if __name__ == "__main__":
    main()
