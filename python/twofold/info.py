"""`twofold info`: versions, CPU, kernels and devices, for people and for bug reports."""

from __future__ import annotations

import os
import platform
import subprocess
from argparse import Namespace
from pathlib import Path
from typing import Any

import llama_cpp

import twofold
from twofold import blocks, decoder, device_arguments, devices, prompting
from twofold._native import lib, text
from twofold.engine import DeviceUse
from twofold.report import size
from twofold.units import binary
from twofold.whereabouts import use_line

# What llama.cpp's and twofold's kernels are chosen by, on x86 and on ARM.
_FEATURES = (
    *("sse4_2", "avx", "avx2", "fma", "f16c", "avx_vnni"),
    *("avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "amx_int8"),
    *("asimd", "asimddp", "i8mm", "sve"),
)


def collect() -> dict[str, Any]:
    """Return everything as plain values for JSON."""
    return {
        "twofold": twofold.__version__,
        "abi": int(lib.tf_abi()),
        "llama_cpp_python": llama_cpp.__version__,
        "ggml": {"loaded": text(lib.tf_ggml_version()), "built": text(lib.tf_ggml_version_built())},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu(),
        "kernels": blocks.kernels(),
        "kernel": blocks.default_kernel(),
        "devices": [vars(device) for device in devices.devices()],
        "llama_system_info": devices.llama_system_info(),
    }


def locate_pair(base: str, residual: str | None, ctx: int, arguments: Namespace) -> dict[str, Any]:
    """Load a pair as `generate` would and say where its parts lie (Whereabouts.as_dict, and its rows of text).

    Raises
    ------
    TwofoldError
        for everything that :class:`twofold.Llama` refuses.
    """
    options = device_arguments.options(arguments)
    llm = prompting.load(base, tell=False, residual_path=residual, n_ctx=ctx, preload=False, **options)
    try:
        return llm.whereabouts.as_dict() if llm.whereabouts is not None else {}
    finally:
        llm.close()


def cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, Any]:
    """Return model, cores and features of the CPU; where the system does not tell, model and features are unknown."""
    try:
        fields = _first_fields(cpuinfo.read_text())
    except OSError:
        fields = {}
    flags = set((fields.get("flags") or fields.get("Features", "")).split())
    return {
        "model": fields.get("model name", "unknown"),
        "cores": decoder.physical_cores(),
        "threads": len(os.sched_getaffinity(0)),
        "features": [name for name in _FEATURES if name in flags] if flags else "unknown",
    }


def available_ram(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Return the bytes of RAM that programs can still get; None where the system does not tell."""
    try:
        fields = _first_fields(meminfo.read_text())
    except OSError:
        return None
    return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else None


def checkout() -> dict[str, Any] | None:
    """Return the commit of the checkout that this package lies in, and whether it was changed; None elsewhere."""
    package = Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(package), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        top = Path(git("rev-parse", "--show-toplevel"))
        if (top / "python" / "twofold").resolve() != package.resolve():
            return None  # installed inside a checkout of something else
        return {"commit": git("rev-parse", "HEAD"), "modified": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return None


def _first_fields(cpuinfo: str) -> dict[str, str]:
    """Return the fields of the first CPU that has them."""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), value.strip())
    return fields


def render(found: dict[str, Any]) -> str:
    """Return what `collect` found as aligned lines."""
    about, features = found["cpu"], found["cpu"]["features"]
    rows = [
        ("twofold", f"{found['twofold']} (ABI {found['abi']})"),
        ("llama-cpp-python", found["llama_cpp_python"]),
        ("ggml", f"{found['ggml']['loaded']} loaded, built with {found['ggml']['built']}"),
        ("Python", f"{found['python']} on {found['platform']}"),
        ("CPU", f"{about['model']}, {about['cores']} cores usable ({about['threads']} threads)"),
        ("CPU features", features if isinstance(features, str) else " ".join(features)),
        ("kernels", f"{' '.join(found['kernels'])}; {found['kernel']} is in use"),
        *(("device", _device_line(device)) for device in found["devices"]),
        ("llama.cpp", found["llama_system_info"]),
        *_pair_rows(found.get("pair", {})),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {value}" for name, value in rows)


def _pair_rows(pair: dict[str, Any]) -> list[tuple[str, str]]:
    if not pair:
        return []
    rows = [
        (part["name"], f"{part['place']}: {binary(part['size'])}, {part['tensors']} tensors") for part in pair["parts"]
    ]
    rows.append(("residual", f"RAM: {binary(pair['residual_bytes'])} a check reads"))
    rows += [("computed by", f"{place}: {count} nodes of a graph") for place, count in pair["computed"].items()]
    rows += [("transfers", use_line(DeviceUse(**use))) for use in pair["devices"]]
    return rows + [("warning", warning) for warning in pair["warnings"]]


def _device_line(device: dict[str, Any]) -> str:
    memory = f"{size(device['free'])} free of {size(device['total'])}" if device["total"] else "memory unknown"
    return f"{device['name']} ({device['kind']}): {device['description']}, {memory}"
