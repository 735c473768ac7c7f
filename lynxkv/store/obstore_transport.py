"""The transport `obstore`: S3 and HTTP in compiled code, with the settings that s3fs and fsspec have found."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from lynxkv.errors import FetchError, InputError
from lynxkv.store.prefix import Store
from lynxkv.store.problems import is_past_end
from lynxkv.store.transport import CHUNK_BYTES, NO_RANGES_HINT, Answer, chunks_of

# Time limits and retries are the caller's, so that both transports behave the same.
# Connections stay open for the next reader, by the session that fsspec keeps for the same.
_POOLS: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
# botocore knows when credentials expire; it is asked this often.
ASK_AGAIN = timedelta(minutes=5)
CLIENT: Any = {"allow_http": True, "timeout": timedelta(hours=1)}
RETRIES: Any = {"max_retries": 0}


class ObstoreTransport:
    """Ranges through obstore, for objects on S3 and HTTP."""

    is_remote = True

    def __init__(self, store: Store) -> None:
        try:
            import obstore
        except ImportError as error:
            raise InputError(
                "the transport obstore is not installed", hint="pip install 'lynxkv[obstore]', or use fsspec"
            ) from error
        if store.protocol not in ("s3", "http"):
            raise InputError(f"the transport obstore does not reach {store.url}", hint="it takes s3:// and http(s)://")
        self.store, self._obstore = store, obstore
        self._objects: Any = None
        self._folder = ""

    @asynccontextmanager
    async def get(self, name: str, start: int, stop: int) -> AsyncIterator[Answer]:
        """Chunks as the socket gives them."""
        objects = await self._open()
        try:
            result = await self._obstore.get_async(objects, self._folder + name, options={"range": (start, stop)})
        except self._obstore.exceptions.NotSupportedError as error:
            raise FetchError(f"{self.store.url}/{name}: {error}", hint=NO_RANGES_HINT) from error
        except self._obstore.exceptions.GenericError as error:
            if not is_past_end(error):
                raise
            yield Answer(chunks=chunks_of(b""))
            return
        yield Answer(chunks=result.stream(min_chunk_size=CHUNK_BYTES // 4), size=int(result.meta["size"]))

    async def size(self, name: str) -> int:
        """As the server says."""
        return int((await self._obstore.head_async(await self._open(), self._folder + name))["size"])

    async def keep(self, name: str) -> None:
        """No store promises that."""

    def close(self) -> None:
        """Connections are kept for the next reader."""

    async def _open(self) -> Any:
        if self._objects is None:
            session = await self.store.fs.set_session()
            pools = _POOLS.setdefault(session, {})
            self._objects = self._s3(session, pools) if self.store.protocol == "s3" else self._http(pools)
        return self._objects

    def _http(self, pools: dict[str, Any]) -> Any:
        parts = urlsplit(self.store.path)
        origin, self._folder = f"{parts.scheme}://{parts.netloc}", f"{parts.path.lstrip('/')}/"
        if origin not in pools:
            make = self._obstore.store.HTTPStore.from_url
            pools[origin] = make(origin, client_options=CLIENT, retry_config=RETRIES)
        return pools[origin]

    def _s3(self, client: Any, pools: dict[str, Any]) -> Any:
        """With endpoint, region and credentials as s3fs has them from its settings, the environment or a profile."""
        fs = self.store.fs
        bucket, key, _ = fs.split_path(self.store.path)
        self._folder = f"{key}/"
        if bucket not in pools:
            signing: Any = {"skip_signature": True} if fs.anon else {"credential_provider": _credentials_of(client)}
            pools[bucket] = self._obstore.store.S3Store(
                bucket,
                endpoint=client.meta.endpoint_url,
                region=client.meta.region_name,
                client_options=CLIENT,
                retry_config=RETRIES,
                **signing,
            )
        return pools[bucket]


def _credentials_of(client: Any) -> Callable[[], Coroutine[Any, Any, dict[str, Any]]]:
    async def credentials() -> dict[str, Any]:
        found = await client._request_signer._credentials.get_frozen_credentials()
        return {
            "access_key_id": found.access_key,
            "secret_access_key": found.secret_key,
            "token": found.token,
            "expires_at": datetime.now(UTC) + ASK_AGAIN,
        }

    return credentials
