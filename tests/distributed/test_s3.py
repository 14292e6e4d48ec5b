"""Snapshots in a bucket, by s3fs and moto's server on this machine: python -m pytest -m s3, with the extra s3-test."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rank_pool import RankError, RankPool
from test_remote import held, resumed_step, steps_of
from test_snapshot import resume, save

pytestmark = pytest.mark.s3


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an empty bucket; ranks started after this find it by their environment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = (tmp_path_factory.mktemp("moto") / "log").open("w+")
    # One line a request, unbuffered: the first says that it listens.
    server = subprocess.Popen(
        [sys.executable, "-u", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    kept = dict(os.environ)
    try:
        assert server.stderr is not None
        said = []
        while "Running on" not in (line := server.stderr.readline()):
            said.append(line)
            assert line, f"moto's server ended: {said}"
        subprocess.Popen(["cat"], stdin=server.stderr, stdout=log)  # so that it is never held up by a full pipe
        os.environ.update(
            AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}", AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b",
            AWS_DEFAULT_REGION="us-east-1",
        )  # fmt: skip
        files().mkdir("bucket")
        yield "s3://bucket"
    finally:
        os.environ.clear()
        os.environ.update(kept)
        server.kill()
        server.wait()


def files() -> Any:
    import fsspec

    return fsspec.filesystem("s3", use_listings_cache=False)


@pytest.fixture(scope="module")
def pools(bucket: str) -> Iterator[tuple[RankPool, RankPool]]:
    """Pools of 2 and 4 ranks that know the server."""
    made = RankPool(2), RankPool(4)
    yield made
    for pool in made:
        pool.stop()


def test_a_run_goes_on_from_a_bucket_under_another_policy_and_number_of_ranks(
    bucket: str, pools: tuple[RankPool, RankPool]
) -> None:
    two, four = pools
    losses, weights, drawn, saved = two.run(save, "fsdp2", f"{bucket}/run", dropout=0.2)[0]
    again, reached, redrawn = two.run(resume, "fsdp2", f"{bucket}/run", dropout=0.2)[0]
    assert (again, redrawn) == (losses, drawn)
    assert all(torch.equal(reached[name], weights[name]) for name in weights)
    loaded = four.run(held, "zero2", f"{bucket}/run")[0]
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[key], saved[key]) for key in saved)


def test_a_bucket_is_pruned_checked_and_searched(
    bucket: str, pools: tuple[RankPool, RankPool], capsys: pytest.CaptureFixture[str]
) -> None:
    from accel_shard.cli import main

    two, url = pools[0], f"{bucket}/keep"
    two.run(steps_of, url, keep=2, last=4, pinned=1)
    names = ["step-000000001", "step-000000003", "step-000000004"]
    assert [entry.rpartition("/")[2] for entry in files().ls(url, detail=False)] == names
    assert two.run(resumed_step, url) == [4, 4]
    flipped = f"{url}/step-000000004/rank-00001.safetensors"
    content = bytearray(files().cat_file(flipped))
    content[-5] ^= 4
    files().pipe_file(flipped, bytes(content))
    assert two.run(resumed_step, url) == [3, 3]
    assert main(["checkpoints", "verify", f"{url}/step-000000004"]) == 2
    assert "is not what was written" in capsys.readouterr().err
    files().rm_file(f"{url}/step-000000003/rank-00000.json")
    with pytest.raises(RankError, match=r"rank-00000.json' cannot be read"):
        two.run(resumed_step, url, f"{url}/step-000000003")
    files().rm_file(f"{url}/step-000000003/manifest.json")
    assert two.run(resumed_step, url) == [1, 1]
    assert main(["checkpoints", "prune", url, "--keep", "1"]) == 0
    assert capsys.readouterr().out.strip() == "", "the other is pinned"
    assert main(["checkpoints", "ls", url]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["step-000000004", "step-000000001"]


def test_a_bucket_that_is_not_there_fails_the_save_on_every_rank(pools: tuple[RankPool, RankPool]) -> None:
    with pytest.raises(RankError, match=r"could not write 's3://nobody-made-this/run/step-000000001'"):
        pools[0].run(steps_of, "s3://nobody-made-this/run", last=1)
