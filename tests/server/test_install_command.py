"""`slotcache install`: a build by way of a registry that serves tarballs, checked by the lock, and what is tried next."""

from __future__ import annotations

import base64
import hashlib
import http.server
import io
import json
import shutil
import tarfile
from functools import partial
from threading import Thread

import pytest
from slotcache.models import builds
from slotcache.models.builds import InstalledBuilds
from slotcache.server import install_command
from slotcache.server.cli import main


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def packed(build: str) -> bytes:
    """A package of npm's with a library's name in it."""
    files = {"package.json": b'{"version": "3.22.1"}', f"bins/{builds.PACKAGES[build]}/libllama.v0.5.0.so": b"a library"}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in files.items():
            about = tarfile.TarInfo(f"package/{name}")
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """The address of a registry with the builds for the CPU and for Vulkan, and locks that name their bytes; no npm."""
    for build in ("cpu", "vulkan"):
        name = f"@node-llama-cpp/{builds.PACKAGES[build]}"
        file = tmp_path / f"registry/{name}/-/{builds.PACKAGES[build]}-3.22.1.tgz"
        file.parent.mkdir(parents=True)
        file.write_bytes(packed(build))
        integrity = f"sha512-{base64.b64encode(hashlib.sha512(packed(build)).digest()).decode()}"
        lock = tmp_path / f"locks/{build}/package-lock.json"
        lock.parent.mkdir(parents=True)
        rows = {"": {}, f"node_modules/{name}": {"version": "3.22.1", "integrity": integrity}}
        lock.write_text(json.dumps({"packages": rows}))
    monkeypatch.setattr(install_command, "LOCKS", tmp_path / "locks")
    monkeypatch.setattr(builds, "FOLDER", tmp_path / "llama.cpp")
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(builds, "failure_on_card", lambda build, again: "")
    monkeypatch.setenv("SLOTCACHE_ROOT", str(tmp_path / "no-card"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "registry"))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("npm_config_registry", f"http://127.0.0.1:{server.server_port}/")
        yield tmp_path / "registry"
        server.shutdown()


def test_a_build_is_fetched_once_and_that_for_the_cpu_beside_it(registry, capsys):
    assert main(["install", "vulkan"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "fetching vulkan (24 MB)" and said[-1].startswith("llama.cpp: npm's build for cards, by Vulkan, in ")
    assert (builds.library_folder("vulkan") / "libllama.v0.5.0.so").read_bytes() == b"a library"
    assert builds.library_folder("cpu").is_dir() and builds.installed_builds() == InstalledBuilds("vulkan", ("vulkan",))
    shutil.rmtree(registry)
    assert main(["install", "vulkan"]) == 0
    assert "fetching" not in capsys.readouterr().out


def test_a_build_that_failed_is_tried_again_when_it_is_asked_for(registry, monkeypatch):
    asked = []
    monkeypatch.setattr(builds, "failure_on_card", lambda build, again: asked.append((build, again)) or "")
    assert main(["install", "vulkan"]) == 0 and asked == [("vulkan", True)]


def test_without_a_card_it_is_the_cpu_s_and_packages_stay_first(registry, capsys):
    assert main(["install"]) == 0
    assert capsys.readouterr().out.splitlines()[:1] == ["fetching cpu (11 MB)"]
    assert builds.installed_builds() == InstalledBuilds("auto", ())
    assert main(["install", "cpu"]) == 0 and builds.installed_builds() == InstalledBuilds("cpu", ("cpu",))


def test_other_bytes_than_the_lock_s_are_refused(registry, capsys):
    (tarball,) = registry.glob("*/linux-x64-vulkan/-/*.tgz")
    tarball.write_bytes(packed("cpu"))
    assert main(["install", "vulkan"]) == 0
    out = capsys.readouterr().out
    assert "vulkan is not used: http://127.0.0.1:" in out and "does not have the SHA-512 in the lock file" in out
    assert not builds.package_folder("vulkan").exists() and builds.installed_builds().builds == ()


def test_each_build_that_fails_has_its_reason(registry, capsys, monkeypatch):
    monkeypatch.setattr(builds, "failure_on_card", lambda build, again: "it finds no card")
    assert main(["install", "vulkan"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "vulkan is not used: it finds no card" in lines and "npm's build for this CPU" in lines[-1]
    assert builds.installed_builds() == InstalledBuilds("vulkan", (), {"vulkan": "it finds no card"})


def test_without_a_network_each_step_is_a_line(registry, capsys, monkeypatch):
    monkeypatch.setenv("npm_config_registry", "http://127.0.0.1:9")
    assert main(["install", "vulkan"]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if "not used" in line]
    assert len(lines) == 2 and all(
        "cannot be fetched" in line and "SLOTCACHE_LLAMA names a folder" in line for line in lines
    )


def test_the_registry_is_npm_s(tmp_path, monkeypatch):
    for name in ("npm_config_registry", "NPM_CONFIG_REGISTRY", "npm_config_userconfig", "NPM_CONFIG_USERCONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(install_command, "GLOBAL", ())
    assert install_command.registry() == install_command.REGISTRY
    (tmp_path / "home").mkdir()
    (tmp_path / "home/.npmrc").write_text("cafile=/etc/x\nregistry = https://mirror.example/npm/\n")
    assert install_command.registry() == "https://mirror.example/npm"
    (tmp_path / "home/.npmrc").write_text("registry=https://a.example\n@node-llama-cpp:registry=https://${PLACE}/b\n")
    monkeypatch.setenv("PLACE", "b.example")
    assert install_command.registry() == "https://b.example/b"
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", "https://c.example/")
    assert install_command.registry() == "https://c.example"


def test_each_build_has_a_lock_of_its_own():
    for build, package in builds.PACKAGES.items():
        rows = list(install_command._locked(install_command.LOCKS / build / "package-lock.json"))
        assert (f"@node-llama-cpp/{package}", "3.22.1") in [row[:2] for row in rows]
        assert all(integrity.startswith("sha512-") for _, _, integrity in rows)
