"""An aarch64 system in build/arm: Debian's Python with its libraries, and the packages that tests
import.

Both come from where this machine has its own: the suite of its apt, and the index of its pip. apt
gets lists, a cache and a status of its own here, so that nothing of this machine changes, and any
user can do it.
"""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "arm"
SYSROOT = FOLDER / "sysroot"
PACKAGES = FOLDER / "packages"
DEBIAN = ("python3", "libpython3-dev", "libstdc++6")
TEST_PACKAGES = ("gguf", "hypothesis", "pytest", "pytest-xdist")
PLATFORMS = ("manylinux2014_aarch64", *(f"manylinux_2_{minor}_aarch64" for minor in range(17, 29)))
COMMANDS = {
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
    "qemu-aarch64": "qemu-user",
    "apt-get": "apt",
    "dpkg-deb": "dpkg",
}
"""What this machine must have, and the Debian package that brings it."""
WRAPPER = """#!/bin/sh
# Python finds its library beside this file, and runs this file where it starts itself again.
exec qemu-aarch64 -L '{sysroot}' -0 "$0" '{python}' "$@"
"""


def run(*command: object, cwd: Path = ROOT, env: dict[str, str] | None = None) -> None:
    """Run a command to its end, or end with it."""
    print("+", *command, flush=True)
    if code := subprocess.run([str(part) for part in command], cwd=cwd, env=env).returncode:
        sys.exit(f"this ended with {code}")


def check_commands() -> None:
    """End with a sentence that says what to install, where something has to be."""
    if packages := [package for command, package in COMMANDS.items() if not shutil.which(command)]:
        sys.exit(
            "make test-arm needs Debian and these packages of it: apt-get install "
            f"{' '.join(packages)}"
        )


def python() -> Path:
    """An aarch64 Python that runs here: unpacked once, and started through qemu."""
    if not SYSROOT.exists():
        unpack(FOLDER / "unpacked")
        (FOLDER / "unpacked").rename(SYSROOT)
    program = next(
        path
        for path in sorted((SYSROOT / "usr/bin").iterdir())
        if re.fullmatch(r"python3\.\d+", path.name)
    )
    wrapper = program.with_name("python-by-qemu")
    wrapper.write_text(WRAPPER.format(sysroot=SYSROOT, python=program))
    wrapper.chmod(0o755)
    return wrapper


def unpack(folder: Path) -> None:
    """Fill a folder with Debian's packages for aarch64, and all that they depend on."""
    apt = FOLDER / "apt"
    for old in (folder, apt):
        shutil.rmtree(old, ignore_errors=True)
    for part in ("lists/partial", "cache/archives/partial"):
        (apt / part).mkdir(parents=True)
    (apt / "status").touch()
    places = {
        "Dir::State::Lists": apt / "lists",
        "Dir::State::status": apt / "status",
        "Dir::Cache": apt / "cache",
    }
    settings = {
        "APT::Architecture": "arm64",
        "APT::Architectures::": "arm64",
        "APT::Sandbox::User": "root",
        **places,
    }
    options = [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]
    run("apt-get", "-qq", *options, "update")
    run(
        "apt-get",
        "-qq",
        *options,
        "--yes",
        "--download-only",
        "--no-install-recommends",
        "install",
        *DEBIAN,
    )
    for archive in sorted((apt / "cache/archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "--extract", archive, folder], check=True)
    if not (folder / "lib").exists():  # in newer suites a link of a package that is not among these
        (folder / "lib").symlink_to("usr/lib")
    shutil.rmtree(apt)


def install(interpreter: Path) -> None:
    """Install wheels for aarch64 into a folder, once for each list of them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = [line for lines in project["optional-dependencies"].values() for line in lines]
    wanted = [
        *project["dependencies"],
        *(line for line in optional if re.split(r"[^\w-]", line)[0] in TEST_PACKAGES),
        "nanobind",
    ]
    stamp, text = PACKAGES / "installed", "\n".join(wanted)
    if stamp.exists() and stamp.read_text() == text:
        return
    shutil.rmtree(PACKAGES, ignore_errors=True)
    version = subprocess.run(
        [interpreter, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    target = [
        "--target",
        PACKAGES,
        "--only-binary=:all:",
        "--implementation",
        "cp",
        "--python-version",
        version,
    ]
    platforms = [f"--platform={platform}" for platform in PLATFORMS]
    run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "-qq",
        "--disable-pip-version-check",
        *target,
        *platforms,
        *wanted,
    )
    stamp.write_text(text)
