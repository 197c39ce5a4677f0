"""Building: the kernels and their programs without CMake, because machines with a GPU often lack the daemon's
libraries; and the daemon with it, where they are. bench/gpu/carry brings them along."""
import concurrent.futures
import glob
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import time

from harness import KEPT_OUTPUT, ROOT, LeftOut, find_capability, run_group

CASES = ["cache", "attend", "classes", "evict", "experts", "packed", "policy", "ranks", "rows", "sample", "snapshot"]
BASE = ["check", "clock", "err", "log", "mem"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"]
PATHS = {  # as in kernels/cpu/CMakeLists.txt; test_gpu_check compares
    "portable": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": AVX512,
    "vnni": [*AVX512, "-mavx512vnni"],
    "bf16": [*AVX512, "-mavx512vnni", "-mavx512bf16"],
}
BLOCKS = ("portable", "avx2", "vnni")
PAIRS = ("portable", "avx2", "avx512", "bf16")
PATHS_OF = {"vec_block": BLOCKS, "vec_round": BLOCKS, "vec_matmul": PAIRS, "vec_attend": PAIRS}
AMX = [*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"]
C_FLAGS = ["-std=gnu17", "-O3", "-g", "-D_GNU_SOURCE", "-ffp-contract=off", f"-I{ROOT}"]
LIBRARIES = ["libmicrohttpd", "gnutls", "libcjson", "libuv", "libpcre2-8", "inih", "nettle"]
CARRIED = ROOT / "build" / "gpu-carry"
# Loaded when a GPU is opened; the last one only for several.
CUDA_LIBRARIES = ["libcublasLt.so.13", "libnccl.so.2"]


def cuda_places(environment):
    """Folders that may hold CUDA's libraries, the toolkit's first: its own, the loader's, and those of pip's packages for
    every Python here."""
    nvcc = shutil.which("nvcc", path=environment.get("PATH"))
    homes = [environment.get("CUDA_HOME"), environment.get("CUDA_PATH"), nvcc and pathlib.Path(nvcc).resolve().parents[1],
             *sorted(glob.glob("/usr/local/cuda*"), reverse=True)]
    places = [pathlib.Path(home) / part for home in homes if home for part in ("lib64", "lib", "targets/x86_64-linux/lib")]
    places += [pathlib.Path(p) for p in environment.get("LD_LIBRARY_PATH", "").split(os.pathsep) if p]
    places += [pathlib.Path("/usr/lib") / f"{platform.machine()}-linux-gnu", pathlib.Path("/usr/lib64")]
    pythons = [sys.prefix, ROOT / ".venv", ROOT / "training/.venv", environment.get("VIRTUAL_ENV"), environment.get("TRAINING_PYTHON") and
               pathlib.Path(environment["TRAINING_PYTHON"]).parents[1], "/usr", "/usr/local"]
    for prefix in filter(None, pythons):
        for packages in ("site-packages", "dist-packages"):
            places += [pathlib.Path(p) for p in sorted(glob.glob(f"{prefix}/lib/python3*/{packages}/nvidia/*/lib"))]
    return list(dict.fromkeys(places))


def find_cuda(environment):
    """{library: folder} of CUDA_LIBRARIES that are here."""
    found = {}
    for place in cuda_places(environment):
        for name in CUDA_LIBRARIES:
            if name not in found and (place / name).exists():
                found[name] = place
    return found


def headers_of(found):
    """Folders of headers beside the libraries: pip's packages have them apart from the toolkit."""
    return [f"-I{folder.parent / 'include'}" for folder in dict.fromkeys(found.values()) if (folder.parent / "include").is_dir()]


def use_cuda(check, environment):
    """Makes programs find CUDA's libraries by rpath, wherever they are. What was found."""
    found = find_cuda(environment)
    for name in CUDA_LIBRARIES:
        check.echo(f"   {name}: {found.get(name, 'not found')}")
    if CUDA_LIBRARIES[0] not in found:
        check.left(f"a daemon on the GPU: {CUDA_LIBRARIES[0]} is in none of {len(cuda_places(environment))} folders (CUDA_HOME names another toolkit)")
    rpaths = [f"-Wl,-rpath,{folder}" for folder in dict.fromkeys(found.values())]
    environment["LDFLAGS"] = " ".join(filter(None, [environment.get("LDFLAGS"), *rpaths]))
    return found


def architecture(capability):
    """The architecture to compile for, one of those of the preset cuda-all; the PTX of 9.0 serves all later devices."""
    return 90 if capability >= 90 else 89 if capability == 89 else 80


def gencode(capability):
    arch = architecture(capability)
    return ["-gencode", f"arch=compute_{arch},code=[sm_{arch},compute_{arch}]"]


def units(out, emulate, found=()):
    """(object, command) of every translation unit."""
    def c(source, name, *flags):
        target = out / f"{name}.o"
        return target, ["gcc", *C_FLAGS, *flags, "-c", source, "-o", target]
    for name in BASE:
        yield c(ROOT / f"base/{name}.c", f"base_{name}")
    for source in sorted((ROOT / "kernels").glob("*.c")):
        yield c(source, f"kernels_{source.stem}")
    yield c(ROOT / "paging/policy.c", "policy")
    x86 = platform.machine() == "x86_64"
    for source in sorted((ROOT / "kernels/cpu").glob("*.c")):
        if source.name.startswith("vec_"):
            for path in PATHS_OF.get(source.stem, ("portable", "avx2", "avx512")):
                if x86 or path == "portable":
                    yield c(source, f"{source.stem}_{path}", f"-DCPU_PATH={path}", *PATHS[path])
        elif source.name.startswith("amx_"):
            if x86:
                yield c(source, source.stem, *AMX)
        else:
            yield c(source, source.stem)
    yield from emulated_units(out) if emulate else device_units(out, dict(found))


def device_units(out, found):
    target_of = gencode(find_capability())
    for source in sorted((ROOT / "kernels/cuda").glob("*.cu")):
        target = out / f"cuda_{source.stem}.o"
        yield target, ["nvcc", "-std=c++17", "-O3", "-lineinfo", *target_of, f"-I{ROOT}", *headers_of(found), "-D_GNU_SOURCE",
                       "-c", source, "-o", target]
    target = out / "no_seed.o"
    yield target, ["gcc", *C_FLAGS, "-c", ROOT / "bench/gpu/no_seed.c", "-o", target]


def emulated_units(out):
    cpp = ["g++", "-std=c++17", "-O2", "-g", "-DKEEPD_EMU", "-D_GNU_SOURCE", "-ffp-contract=off", f"-I{ROOT}",
           "-include", f"{ROOT}/tests/emu/emu.h", "-Wno-unknown-pragmas"]
    for source in sorted((ROOT / "kernels/cuda").glob("*.cu")):
        if not source.stem.startswith("device"):  # device_emu.cc takes the place of those
            target = out / f"cuda_{source.stem}.o"
            yield target, [*cpp, "-x", "c++", "-c", source, "-o", target]
    for name in ("emu", "device_emu"):
        target = out / f"{name}.o"
        yield target, [*cpp, "-c", ROOT / f"tests/emu/{name}.cc", "-o", target]


def run_all(check, commands, limit):
    """All at once, as many as there are cores. What those that failed said, or an empty text."""
    def one(command):
        seconds = check.seconds_for(limit)
        if seconds < 1:
            return f"{command[-1]}: no time was left\n"
        code, _, both = run_group([str(x) for x in command], seconds, check.environment)
        return both or f"{command[-1]}: status {code}\n" if code else ""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return "".join(pool.map(one, commands))


def kernels(check, emulate):
    """The case list and bench_gpu, in check.out. True if all of them are there."""
    start = time.monotonic()
    found = {} if emulate else find_cuda(check.environment)
    built = list(units(check.out, emulate, found))
    programs = {f"cases_{name}": ROOT / f"tests/emu/emu_{name}.c" for name in CASES}
    programs["bench_gpu"] = ROOT / "bench/gpu/bench_gpu.c"
    compiled = [["gcc", *C_FLAGS, f"-I{ROOT}/bench/gpu/criterion", "-c", source, "-o", check.out / f"{name}_main.o"]
                for name, source in programs.items()]
    linker = ["g++"] if emulate else ["nvcc", *gencode(find_capability())]
    libraries = ["-lm", "-lpthread"]
    if not emulate:  # cuBLASLt is loaded when a device is opened, like NCCL
        libraries += ["-ldl", *(f"-Xlinker=-rpath,{folder}" for folder in dict.fromkeys(found.values()))]
    linked = [[*linker, check.out / f"{name}_main.o", *(target for target, _ in built), *libraries, "-o", check.out / name]
              for name in programs]
    # The slowest first: nvcc's files.
    commands = [c for _, c in sorted(built, key=lambda u: u[1][0] == "gcc")] + compiled
    errors = run_all(check, commands, 240) or run_all(check, linked, 120)
    check.record(f"build the kernels, {len(built)} files, {len(programs)} programs", not errors, time.monotonic() - start,
                 errors[-KEPT_OUTPUT:])
    return not errors


def use_carried(environment, folder=CARRIED):
    """Libraries that came along, in front of the machine's own. True if there are any."""
    if not (folder / "lib").is_dir():
        return False
    # By rpath, so that no other program of the machine finds them.
    rpath = f"-Wl,--disable-new-dtags,-rpath,{folder / 'lib'} -Wl,-rpath-link,{folder / 'lib'}"
    environment["LDFLAGS"] = " ".join(filter(None, [environment.get("LDFLAGS"), rpath]))
    environment["PKG_CONFIG_PATH"] = os.pathsep.join(filter(None, [str(folder / "lib/pkgconfig"), environment.get("PKG_CONFIG_PATH")]))
    if not shutil.which("pkg-config", path=environment.get("PATH")):
        environment["PATH"] = os.pathsep.join(filter(None, [environment.get("PATH"), str(folder / "bin")]))
    return True


def missing_libraries(environment):
    tool = shutil.which("pkg-config", path=environment.get("PATH"))
    if not tool:
        return ["pkg-config"]
    return [name for name in LIBRARIES if subprocess.run([tool, "--exists", name], check=False, env=environment).returncode]


def daemon(check, emulate):
    """Builds it and the comparison of models; (keepd, gpu_model)."""
    missing = missing_libraries(check.environment) + ([] if shutil.which("cmake") else ["cmake"])
    if missing:
        raise LeftOut(f"missing: {', '.join(missing)} (bench/gpu/carry brings libraries along)")
    build = check.out / "cmake"
    flags = ["--preset", "dev" if emulate else "cuda", "-DKEEPD_WERROR=OFF"]
    if not emulate and find_capability() < 90:
        flags += [f"-DKEEPD_CUDA_ARCHITECTURES={architecture(find_capability())}-real"]
    if not shutil.which("ninja"):
        flags += ["-G", "Unix Makefiles"]
    targets = ["keepd-emu", "emu_model"] if emulate else ["keepd", "gpu_model"]
    if check.step("configure the daemon", ["cmake", *flags, "-B", build], 60) is None:
        raise LeftOut("it was not configured")
    command = ["cmake", "--build", build, "--parallel", str(os.cpu_count()), "--target", *targets]
    if check.step("build the daemon", command, 300) is None:
        raise LeftOut("it was not built")
    return [build / path for path in (("tests/emu/keepd-emu", "tests/emu/emu_model") if emulate else
                                      ("server/keepd", "bench/gpu/gpu_model"))]
