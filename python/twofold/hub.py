"""Models named ``hf://org/repo/path/file.gguf``, fetched through huggingface_hub's own cache."""

from __future__ import annotations

import re
from pathlib import Path

from twofold import errors

SCHEME = "hf://"
_REFERENCE = re.compile(r"hf://(?P<repo>[\w.-]+/[\w.-]+)/(?P<file>[^?#]+\.gguf)")
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def resolve(reference: str) -> Path:
    """Return the local path of a model, fetching it if it is an ``hf://`` reference that is not cached.

    Parameters
    ----------
    reference
        A path, which is returned as it is, or ``hf://org/repo/path/file.gguf``. Of a split model, its first part;
        all parts are fetched.

    Raises
    ------
    ArgumentError
        for a reference of another form.
    FileAccessError
        if the hub has no such file or cannot be reached.
    """
    if "://" not in reference:
        return Path(reference)
    found = _REFERENCE.fullmatch(reference)
    if found is None or ".." in found["file"].split("/"):
        raise errors.ArgumentError(f"{reference}: a path or {SCHEME}ORG/REPO/FILE.gguf is allowed")
    paths = [_fetch(found["repo"], file, reference) for file in _part_files(found["file"], reference)]
    return paths[0]


def _part_files(file: str, reference: str) -> list[str]:
    found = _PART.search(file)
    if found is None:
        return [file]
    if int(found[1]) != 1:
        raise errors.ArgumentError(f"{reference}: part {int(found[1])}; give the first part (-00001-of-{found[2]})")
    return [f"{file[: found.start()]}-{i:05d}-of-{found[2]}.gguf" for i in range(1, int(found[2]) + 1)]


def _fetch(repo: str, file: str, reference: str) -> Path:
    import huggingface_hub

    try:
        return Path(huggingface_hub.hf_hub_download(repo, file))
    except huggingface_hub.errors.HFValidationError as error:
        raise errors.ArgumentError(f"{reference}: {error}") from error
    except Exception as error:  # its errors, and those of the HTTP library below it, have no common base
        raise errors.FileAccessError(f"{reference}: cannot fetch {file} of {repo}: {error}") from error
