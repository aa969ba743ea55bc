"""Fetches a model from Hugging Face into the cache that llama.cpp and huggingface_hub share."""

from __future__ import annotations

import re
from pathlib import Path

from .errors import ModelError

PREFERRED = ("Q4_K_M", "Q4_0", "Q8_0")


def fetch(name: str, offline: bool = False, file: str = "") -> Path:
    """Return the file of `user/repo[:quant]`, downloaded with a progress bar unless it is cached. Raises ModelError.

    file: its path in the repository, instead of a quantisation.
    """
    try:
        import huggingface_hub as hub
    except ImportError:
        raise ModelError("-hf needs huggingface_hub: pip install 'slotcache[hf]'") from None
    repository, _, quantisation = name.partition(":")
    if repository.count("/") != 1:
        raise ModelError(f"-hf {name}: expected user/repo or user/repo:quant")
    try:
        files = _local_files(hub, repository) if offline else hub.list_repo_files(repository)
        parts = with_all_parts(files, named(files, file, name) if file else choose(files, quantisation, name))
        paths = [hub.hf_hub_download(repository, part, local_files_only=offline) for part in parts]
        return Path(paths[0])
    except ModelError:
        raise
    except Exception as error:  # the library has a dozen kinds, for the network and for the repository
        raise ModelError(f"-hf {name}: {str(error).splitlines()[0]}") from None


def choose(files: list[str], quantisation: str, name: str) -> str:
    """Choose the file to fetch: of the requested quantisation, else of the first preferred one that the repository has."""
    models = sorted(file for file in files if file.endswith(".gguf") and "mmproj" not in file)
    for wanted in [quantisation] if quantisation else PREFERRED:
        pattern = re.compile(rf"(?<![A-Za-z0-9]){re.escape(wanted)}(?![A-Za-z0-9_])", re.IGNORECASE)
        if found := [file for file in models if pattern.search(file)]:
            return found[0]
    if models and not quantisation:
        return models[0]
    raise ModelError(f"-hf {name}: no such GGUF file; there are {', '.join(models) or 'none'}")


def named(files: list[str], file: str, name: str) -> str:
    """Return a file that the repository has. Raises ModelError."""
    if file not in files:
        raise ModelError(f"-hf {name} has no file {file}; there are {', '.join(sorted(files)) or 'none'}")
    return file


def with_all_parts(files: list[str], first: str) -> list[str]:
    """Return a model's file, or all its files if it is split ("...-00001-of-00003.gguf"); llama.cpp finds the others."""
    found = re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", first)
    return sorted(file for file in files if found and file.startswith(found[1]) and found[2] in file) or [first]


def _local_files(hub, repository: str) -> list[str]:  # type: ignore[no-untyped-def]
    for cached in hub.scan_cache_dir().repos:
        if cached.repo_id == repository:
            return [str(file.file_name) for revision in cached.revisions for file in revision.files]
    raise ModelError(f"-hf {repository}: not in the local cache, and --offline is on")
