"""An S3 object store on this machine: moto's server on a free loopback port, and an empty bucket in it for each test
that asks.

    def test_something(object_store):                   # "s3://bucket-0"
        write_split(f"{object_store}/data.zarr", ...)

Everything that opens s3:// URLs through fsspec then talks to it: the environment says where it is.
"""

import itertools
import os
from collections.abc import Iterator

import fsspec.asyn
import pytest
import zarr

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
    "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
}
_numbers = itertools.count()


@pytest.fixture(scope="session")
def object_store_server() -> Iterator[str]:
    """The server's address."""
    server_module = pytest.importorskip("moto.server", reason="needs moto: pip install 'moto[server]' s3fs")
    pytest.importorskip("s3fs", reason="needs s3fs: pip install 's3fs'")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def object_store(object_store_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty bucket, which s3fs finds by the environment, in this process and in those that it starts."""
    import s3fs

    for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": object_store_server}.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()  # one that was made before knows another address
    bucket = f"bucket-{os.getpid()}-{next(_numbers)}"
    s3fs.S3FileSystem().mkdir(bucket)
    yield f"s3://{bucket}"
    # Sessions that stay open, and zarr's do, are warned of by aiohttp when they are collected, in whatever test runs
    # then.
    for file_system in list(s3fs.S3FileSystem._cache.values()):
        if file_system._s3 is not None:
            if file_system.asynchronous:
                zarr.core.sync.sync(file_system._s3.close())
            else:
                fsspec.asyn.sync(file_system.loop, file_system._s3.close)
    s3fs.S3FileSystem.clear_instance_cache()
