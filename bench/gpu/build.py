"""The programs that bench/gpu/check runs: those that bench/gpu/carry brought along, if they start here; otherwise CMake builds
them here. CMake alone knows their sources: target gpu_programs of bench/gpu/CMakeLists.txt."""
import glob
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tarfile

from harness import ROOT, LeftOut, find_capability

LIBRARIES = ["libmicrohttpd", "gnutls", "libcjson", "libuv", "libpcre2-8", "inih", "nettle", "libjpeg", "libpng", "libwebp"]
ARCHIVE = ROOT / "build" / "gpu-carry.tar.xz"
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
    python = shutil.which("python3", path=environment.get("PATH"))
    pythons = [sys.prefix, python and pathlib.Path(python).absolute().parents[1], ROOT / ".venv", ROOT / "training/.venv",
               environment.get("VIRTUAL_ENV"), environment.get("TRAINING_PYTHON") and
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


def use_cuda(check):
    """Makes our programs find CUDA's libraries wherever they are: `check.ours` is their environment. What was found."""
    found = find_cuda(check.environment)
    for name in CUDA_LIBRARIES:
        check.echo(f"   {name}: {found.get(name, 'not found')}")
    if CUDA_LIBRARIES[0] not in found:
        check.left(f"a daemon on the GPU: {CUDA_LIBRARIES[0]} is in none of {len(cuda_places(check.environment))} folders (CUDA_HOME names another toolkit)")
    folders = [str(folder) for folder in dict.fromkeys(found.values())]
    known = check.environment.get("LD_LIBRARY_PATH")
    check.ours = {"LD_LIBRARY_PATH": os.pathsep.join(folders + ([known] if known else []))} if folders else {}
    return found


def architecture(capability):
    """The architecture to compile for, one of those of the preset cuda-all; the PTX of 9.0 serves all later devices."""
    return 90 if capability >= 90 else 89 if capability == 89 else 80


# --- the archive --------------------------------------------------------------------------------


def kind(emulate):
    """The folder of an archive, and of build/, that has the programs."""
    return "emulated" if emulate else "device"


def unpack(archive, folder):
    """The archive's content in `folder`, unless it is there already; False: there is no archive."""
    if not archive.exists():
        return False
    stamp, now = folder / "stamp", f"{archive.stat().st_size} {archive.stat().st_mtime_ns}\n"
    if not stamp.exists() or stamp.read_text() != now:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        stamp.write_text(now)
    return True


def daemon_name(emulate):
    return "keepd-emu" if emulate else "keepd"


def does_not_start(folder, emulate, environment):
    """Why the programs in the folder do not run here; an empty text if they do."""
    for name, argument in (("gpu_cases", None), ("gpu_bench", "--help"), (daemon_name(emulate), "--version")):
        try:
            done = subprocess.run([str(folder / name), *([argument] if argument else [])], text=True, capture_output=True, timeout=60,
                                  check=False, env=environment)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{name}: {error}"
        if done.returncode not in (0, 64):  # 64: it was not told what to do
            return f"{name}: status {done.returncode} {done.stderr.strip()}"
    return ""


def does_not_fit(emulate):
    """Why carried programs have no kernels for this device; an empty text if they have."""
    capability = 90 if emulate else find_capability()
    return "" if capability >= 90 else f"they are for compute capability 9.0 and later, and the device has {capability / 10}"


def use_carried(environment, folder):
    """Headers and libraries that came along, in front of the machine's own. True if there are any."""
    if not (folder / "lib/pkgconfig").is_dir():
        return False
    # By rpath, so that no other program of the machine finds them.
    rpath = f"-Wl,--disable-new-dtags,-rpath,{folder / 'lib'} -Wl,-rpath-link,{folder / 'lib'}"
    environment["LDFLAGS"] = " ".join(filter(None, [environment.get("LDFLAGS"), rpath]))
    environment["PKG_CONFIG_PATH"] = os.pathsep.join(filter(None, [str(folder / "lib/pkgconfig"), environment.get("PKG_CONFIG_PATH")]))
    if not shutil.which("pkg-config", path=environment.get("PATH")):
        environment["PATH"] = os.pathsep.join(filter(None, [environment.get("PATH"), str(folder / "bin")]))
    return True


# --- building here ----------------------------------------------------------------------------------


def missing_libraries(environment):
    tool = shutil.which("pkg-config", path=environment.get("PATH"))
    if not tool:
        return ["pkg-config"]
    return [name for name in LIBRARIES if subprocess.run([tool, "--exists", name], check=False, env=environment).returncode]


def configure_flags(emulate, capability=90):
    """CMake's, for the programs: optimised, without tests."""
    flags = ["--preset", "release", "-DKEEPD_EMU=ON"] if emulate else ["--preset", "cuda"]
    if not emulate and capability < 90:
        flags += [f"-DKEEPD_CUDA_ARCHITECTURES={architecture(capability)}-real"]
    if not shutil.which("ninja"):
        flags += ["-G", "Unix Makefiles"]
    return flags


def build_commands(build, emulate, capability=90, extra=()):
    """The two of CMake: configure, build."""
    return (["cmake", *configure_flags(emulate, capability), *extra, "-B", build],
            ["cmake", "--build", build, "--parallel", str(os.cpu_count()), "--target", "gpu_programs"])


def build_here(check, emulate):
    missing = missing_libraries(check.environment) + [tool for tool in ("cmake", "gcc", *([] if emulate else ["nvcc"])) if not shutil.which(tool)]
    if missing:
        raise LeftOut(f"missing: {', '.join(missing)} (bench/gpu/carry brings programs and libraries along)")
    build = check.out / "cmake"
    configure, make = build_commands(build, emulate, 90 if emulate else find_capability(), ["-DKEEPD_WERROR=OFF", "-DKEEPD_CPU_PATHS=native"])
    if check.step("configure", configure, 60) is None:
        raise LeftOut("they were not configured")
    if check.step("build the programs", make, 400) is None:
        raise LeftOut("they were not built")
    return build / "programs"


def programs(check, emulate, archive=ARCHIVE):
    """The folder of the programs. LeftOut: there are none."""
    carried = check.out / "carried"
    came = unpack(archive, carried)
    if came and (carried / "commit").exists():
        built_from = (carried / "commit").read_text().strip()
        check.echo(f"   carried programs: built from {built_from}")
        check.commit = check.commit or built_from
    folder = carried / kind(emulate)
    if came and folder.is_dir():
        why = does_not_fit(emulate) or does_not_start(folder, emulate, {**check.environment, **check.ours})
        if not why:
            return folder
        check.left(f"the programs that were carried, which are built here instead: {why}")
    if use_carried(check.environment, carried):
        check.echo(f"   libraries of {carried}")
    return build_here(check, emulate)
