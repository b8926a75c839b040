"""twofold.hub, against a cache of huggingface_hub that is laid out by hand; no network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from twofold import errors, hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"
RESOLVE = "import sys; from twofold import hub; print(hub.resolve(sys.argv[1]))"


def cached(home: Path, *files: str) -> Path:
    """Lay out org/repo with these files; return its snapshot."""
    repo = home / "hub" / "models--org--repo"
    snapshot = repo / "snapshots" / COMMIT
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    for file in files:
        (snapshot / file).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / file).write_bytes(b"GGUF")
    return snapshot


def offline(home: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a new process: huggingface_hub reads its settings when it is imported."""
    unset = {"HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN"}
    env = {key: value for key, value in os.environ.items() if key not in unset}
    env |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(home)}
    whole = [sys.executable, *command]
    return subprocess.run(whole, check=False, env=env, capture_output=True, text=True, timeout=120)


def test_a_file_is_found(tmp_path: Path) -> None:
    snapshot = cached(tmp_path, "deep/er/model.gguf")
    done = offline(tmp_path, "-c", RESOLVE, "hf://org/repo/deep/er/model.gguf")
    assert done.stdout.strip() == str(snapshot / "deep/er/model.gguf"), done.stderr


def test_all_parts_of_a_split_model_are_fetched(tmp_path: Path) -> None:
    parts = [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    snapshot = cached(tmp_path, *parts)
    done = offline(tmp_path, "-c", RESOLVE, f"hf://org/repo/{parts[0]}")
    assert done.stdout.strip() == str(snapshot / parts[0]), done.stderr
    (snapshot / parts[2]).unlink()
    done = offline(tmp_path, "-c", RESOLVE, f"hf://org/repo/{parts[0]}")
    assert f"FileAccessError: hf://org/repo/{parts[0]}: cannot fetch {parts[2]} of org/repo" in done.stderr


def test_what_is_neither_cached_nor_reachable(tmp_path: Path) -> None:
    cached(tmp_path, "model.gguf")
    done = offline(tmp_path, "-m", "twofold", "convert", "hf://org/repo/other.gguf", str(tmp_path / "out"))
    assert done.returncode == 1
    assert done.stderr.startswith("twofold: hf://org/repo/other.gguf: cannot fetch other.gguf of org/repo: ")
    assert "Traceback" not in done.stderr


def test_convert_takes_a_reference(tiny_llama: Path, tmp_path: Path) -> None:
    snapshot = cached(tmp_path, "tiny.gguf")
    (snapshot / "tiny.gguf").write_bytes(tiny_llama.read_bytes())
    done = offline(tmp_path, "-m", "twofold", "convert", "hf://org/repo/tiny.gguf", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.base.gguf").exists()


@pytest.mark.parametrize("path", ["model.gguf", "/not/there.gguf", "hf:/model.gguf", "org/repo/model.gguf"])
def test_ordinary_paths_pass_through(path: str) -> None:
    assert hub.resolve(path) == Path(path)


@pytest.mark.parametrize(
    "reference",
    [
        "hf://",
        "hf://org/repo",
        "hf://org/model.gguf",
        "hf://org/repo/model.bin",
        "hf://org/repo/../model.gguf",
        "hf://org/repo/model.gguf?download=true",
        "https://example.org/org/repo/model.gguf",
    ],
)
def test_bad_references_say_what_is_allowed(reference: str) -> None:
    with pytest.raises(errors.ArgumentError) as caught:
        hub.resolve(reference)
    assert str(caught.value) == f"{reference}: a path or hf://ORG/REPO/FILE.gguf is allowed"


def test_a_name_the_hub_does_not_allow() -> None:
    with pytest.raises(errors.ArgumentError, match=r"^hf://or--g/repo/model\.gguf: "):
        hub.resolve("hf://or--g/repo/model.gguf")


def test_another_part_than_the_first_is_refused() -> None:
    with pytest.raises(errors.ArgumentError, match="part 2; give the first part"):
        hub.resolve("hf://org/repo/m-00002-of-00003.gguf")
