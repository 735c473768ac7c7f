"""The contract of stores, held by real servers, through each transport."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

import pytest

from lynxkv.fetch import FetchOptions
from lynxkv.testing.contract import ReadOnlyStoreContract, StoreContract
from lynxkv.testing.servers import Server


class TestS3(StoreContract):
    """SeaweedFS, read through s3fs."""

    @pytest.fixture
    def root(self, s3: str) -> str:
        return f"{s3}/{uuid.uuid4().hex}"

    @pytest.fixture
    def options(self) -> FetchOptions:
        return FetchOptions(transport="fsspec")


class TestS3ThroughObstore(TestS3):
    """SeaweedFS, read through obstore."""

    @pytest.fixture
    def options(self) -> FetchOptions:
        pytest.importorskip("obstore")
        return FetchOptions(transport="obstore")


class TestHttp(ReadOnlyStoreContract):
    """nginx, read through fsspec."""

    served: Path

    @pytest.fixture
    def root(self, http: Server) -> str:
        self.served = http.folder
        return http.url

    def put(self, root: str, folder: Path, name: str) -> None:
        shutil.copytree(folder, self.served / name)


class TestHttpThroughObstore(TestHttp):
    """nginx, read through obstore."""

    @pytest.fixture
    def options(self) -> FetchOptions:
        pytest.importorskip("obstore")
        return FetchOptions(transport="obstore")
