"""Places that cannot be: each refused by what is wrong with it and what to do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from accel_shard import SnapshotError
from accel_shard.checkpoint.places import RemotePath, place
from accel_shard.checkpoint.stores import store_of


def test_paths_stay_paths_and_urls_become_places_below_them() -> None:
    assert place("runs/a") == Path("runs/a")
    assert place(Path("/runs/a")) == Path("/runs/a")
    assert place("C:/runs") == Path("C:/runs")
    where = place("memory://bucket/a/")
    assert isinstance(where, RemotePath)
    child = where / "step-1" / "x"
    assert (str(child), child.name, child.parent.name) == ("memory://bucket/a/step-1/x", "x", "step-1")
    assert child.with_name("y") == RemotePath("memory://bucket/a/step-1/y")
    assert place(where) is where
    assert type(store_of(where)) is not type(store_of(Path("runs")))


@pytest.mark.parametrize("where", [Path("s3://bucket/run"), "s3:/bucket/run"])
def test_a_url_that_lost_a_slash_is_no_folder_called_s3(where: str | Path) -> None:
    with pytest.raises(ValueError, match=r"looks like a URL that was made a Path.*Pass URLs as str"):
        place(where)


def test_what_fsspec_cannot_do_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec import register_implementation

    with pytest.raises(ValueError, match=r"chains URLs. Allowed: one URL"):
        place("simplecache::memory://a")
    with pytest.raises(SnapshotError, match=r"'nosuch://a' is no URL that fsspec knows: .*nosuch"):
        place("nosuch://a")
    register_implementation("absent", "no_such_module.System", clobber=True, errtxt="pip install no_such_module")
    with pytest.raises(SnapshotError, match=r"'absent://a' needs a package that is not installed: .*no_such_module"):
        place("absent://a")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(SnapshotError, match=r"needs fsspec: pip install 'accel_shard\[remote\]'"):
        place("memory://a")


def test_what_a_library_raises_becomes_an_error_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    class CredentialsError(Exception):
        """As those of botocore: no kind of OSError."""

    def refused(*_: object, **__: object) -> None:
        raise CredentialsError("who are you")

    monkeypatch.setattr(MemoryFileSystem, "cat_file", refused)
    with pytest.raises(OSError, match=r"CredentialsError: who are you") as error:
        RemotePath("memory://a/b").read_bytes()
    assert error.value.filename == "memory://a/b"
