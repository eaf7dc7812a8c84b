"""A store in an S3 bucket, through obstore.

write    a multipart upload in blocks, several at once; aborted if it fails
replace  one PUT, which S3 makes atomic
read     ranges of the file, several at once
claim    a record that is written with conditional PUTs, so that two jobs cannot claim at once
"""

import errno
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from typing import Any

from varuna.checkpoint.store.claim import RECORD, ClaimConflict, RecordClaim, disown_record
from varuna.checkpoint.store.spans import check_spans, cut_span, requests_for
from varuna.checkpoint.store.store import MANIFEST, OWN_PREFIX, Buffer, Claim, Entry, Owner, checked

try:
    import obstore
    from obstore import exceptions
    from obstore import store as obstore_store
except ImportError as error:
    raise ImportError(
        f"s3:// needs a package that is not installed: {error} (pip install 'varuna-torch[s3]')"
    ) from error

BLOCK_BYTES = 32 << 20  # S3 accepts at most 10,000 blocks per file
PARALLEL_UPLOADS, PARALLEL_READS = 4, 8
CONNECT_SECONDS, REQUEST_SECONDS = 5, 120
CLIENT_RETRIES = 2  # of one request; `retrying` repeats whole operations and logs it


class S3Store:
    """A folder of an S3 bucket. `options` are keyword arguments of obstore's S3Store."""

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any] | None = None,
        *,
        block_bytes: int = BLOCK_BYTES,
        request_seconds: float = REQUEST_SECONDS,
        client_retries: int = CLIENT_RETRIES,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._url = url.rstrip("/")
        bucket, _, prefix = self._url.partition("://")[2].partition("/")
        self._bucket = obstore_store.S3Store(
            bucket,
            prefix=prefix or None,
            client_options={
                "allow_http": True,  # for an endpoint that starts with http://
                "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
                "timeout": timedelta(seconds=request_seconds),
            },
            retry_config={
                "max_retries": client_retries,
                "retry_timeout": timedelta(seconds=3 * request_seconds),
            },
            **(options or _credentials(os.environ)),
        )
        self._block_bytes = block_bytes
        self._now = now

    @property
    def url(self) -> str:
        return self._url

    def list(self, folder: str = "") -> list[Entry]:
        try:
            with self._errors(folder):
                found = obstore.list_with_delimiter(self._bucket, checked(folder) if folder else None)
        except FileNotFoundError:
            return []
        entries = [Entry(_name(path), is_folder=True, size=0) for path in found["common_prefixes"]]
        entries += [
            Entry(_name(item["path"]), is_folder=False, size=item["size"])
            for item in found["objects"]
            if item["path"].strip("/") != folder  # the folder's own marker
        ]
        return sorted((e for e in entries if not e.name.startswith(OWN_PREFIX)), key=lambda e: e.name)

    def size(self, path: str) -> int:
        with self._errors(path):
            return obstore.head(self._bucket, checked(path))["size"]

    def read(self, path: str) -> bytes:
        with self._errors(path):
            return bytes(obstore.get(self._bucket, checked(path)).bytes())

    def read_spans(self, path: str, spans: Sequence[tuple[int, int]]) -> Sequence[memoryview]:
        check_spans(spans, size=self.size(path), place=self._place(path))
        ranges = requests_for(spans, longest=self._block_bytes)
        with self._errors(path), ThreadPoolExecutor(PARALLEL_READS) as pool:
            fetch = partial(obstore.get_range, self._bucket, path)
            pieces: Any = list(pool.map(lambda piece: fetch(start=piece[0], end=piece[1]), ranges))
        return [cut_span(span, ranges, pieces) for span in spans]

    def write(self, path: str, chunks: Callable[[], Iterable[Buffer]]) -> None:
        file = obstore.open_writer(
            self._bucket, checked(path), buffer_size=self._block_bytes, max_concurrency=PARALLEL_UPLOADS
        )
        failure: BaseException | None = None
        with self._errors(path):
            try:
                with file:  # aborts the upload after an exception
                    try:
                        for chunk in chunks():
                            file.write(memoryview(chunk).tobytes())  # obstore keeps a reference to it
                    except BaseException as error:
                        failure = error
                        raise
            except BaseException as error:
                if failure is None or failure is error:
                    raise
                raise failure from error  # the abort has failed, too

    def replace(self, path: str, data: bytes) -> None:
        with self._errors(path):
            obstore.put(self._bucket, checked(path), data, use_multipart=False)

    def remove(self, path: str) -> None:
        with self._errors(path):
            files = [item["path"] for item in obstore.list(self._bucket, checked(path)).collect()]
            manifests = [file for file in files if file.endswith(f"/{MANIFEST}")]
            obstore.delete(self._bucket, manifests)
            obstore.delete(self._bucket, [file for file in files if file not in manifests] or [path])

    def claim(self, owner: Owner, *, force: bool = False) -> Claim:
        return S3Claim(self, owner, self._now).take(force=force)

    def disown(self, launch: str = "") -> None:
        disown_record(self, launch)

    def read_version(self, path: str) -> tuple[bytes, str | None]:
        """Return a file's content and its version."""
        with self._errors(path):
            found = obstore.get(self._bucket, path)
            return bytes(found.bytes()), found.meta["e_tag"]

    def replace_version(self, path: str, data: bytes, version: str | None) -> None:
        """Replace a file only if it still has this version (None: only if there is no file).

        Raises ClaimConflict otherwise. A server without conditional PUTs replaces the file in any case.
        """
        mode: Any = "create" if version is None else {"e_tag": version}
        with self._errors(path):
            try:
                obstore.put(self._bucket, path, data, mode=mode)
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
                raise ClaimConflict from None
            except (exceptions.NotSupportedError, NotImplementedError):
                obstore.put(self._bucket, path, data, use_multipart=False)

    def _place(self, path: str) -> str:
        return f"{self._url}/{path}".rstrip("/")

    @contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        """Convert errors of obstore to OSErrors that name the path."""
        try:
            yield
        except (exceptions.BaseError, OSError) as error:
            raise as_os_error(error, self._place(path)) from error


class S3Claim(RecordClaim):
    """A claim whose record is written with conditional PUTs."""

    def __init__(self, store: S3Store, owner: Owner, now: Callable[[], float]) -> None:
        super().__init__(store, owner, now)
        self._bucket = store
        self._version: str | None = None

    def _read_record(self) -> bytes:
        self._version = None
        data, self._version = self._bucket.read_version(RECORD)
        return data

    def _write_record(self, data: bytes) -> None:
        self._bucket.replace_version(RECORD, data, self._version)


def as_os_error(error: Exception, place: str) -> OSError:
    text = str(error)
    if isinstance(error, OSError) and error.errno:  # from the source of the data
        return error
    code = errno.EIO  # also for NoSuchUpload: the server lost the blocks, and a new upload can succeed
    if isinstance(error, FileNotFoundError) and "NoSuchUpload" not in text:
        code = errno.ENOENT
    elif isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
        code = errno.EACCES
    message = re.search(r"<Message>(.*?)</Message>", text)
    reason = message[1] if message else text.partition("\n")[0]
    if "error sending request" in reason:
        reason = f"the server cannot be reached or does not answer ({reason})"
    return OSError(code, reason, place)


def _name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _credentials(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return credentials from the profiles in ~/.aws, through boto3 if it is installed.

    obstore itself reads the AWS_* variables, web identities and the metadata of an instance.
    """
    if "AWS_ACCESS_KEY_ID" in environment or find_spec("boto3") is None:
        return {}
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        return {"credential_provider": Boto3CredentialProvider()}
    except ValueError:  # boto3 found none
        return {}
