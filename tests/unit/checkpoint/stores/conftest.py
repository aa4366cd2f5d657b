"""A server of S3, and folders for checkpoints in object stores."""

import fsspec
import pytest
from object_stores import COUNT, FILE, PIECE
from s3_server import BUCKET, Server, use

from megaframe.checkpoint import parse_path, shard_file
from megaframe.checkpoint.stores import object_store as remote_module
from megaframe.io import remote_requests as retry


@pytest.fixture(scope="module")
def server():
    started = Server()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in started.environment.items():
            patch.setenv(name, value)
        use(started.environment)
        yield started
    started.close()
    # The next file has a server of its own, at another address.
    retry._open_filesystem.cache_clear()
    fsspec.get_filesystem_class("s3").clear_instance_cache()


@pytest.fixture(scope="module")
def small_files():
    """Use small pieces and files, and short retries."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_file, "MAX_ENTRY_BYTES", PIECE)
        patch.setattr(remote_module, "FILE_BYTES", FILE)
        patch.setattr(retry, "RETRY_SECONDS", 20.0)
        patch.setattr(retry, "FIRST_PAUSE", 0.02)
        yield


@pytest.fixture
def s3(server):
    yield parse_path(f"s3://{BUCKET}/run{next(COUNT)}/checkpoints")
    server.clear()


@pytest.fixture
def memory():
    return parse_path(f"memory://run{next(COUNT)}/checkpoints")


@pytest.fixture(params=["s3", "memory"])
def home(request):
    return request.getfixturevalue(request.param)
