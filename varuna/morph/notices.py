"""Notices of AWS, Azure and GCP that a machine will be taken away.

This module does no I/O. A service yields requests, receives the replies, and returns the current notice
or None. `varuna.morph.run.cloud_poll` sends the requests.
"""

import email.utils
from collections.abc import Callable, Generator, Mapping
from datetime import datetime
from typing import TypeVar
from urllib.parse import urlencode

import msgspec

from varuna.codec import UNDECODABLE
from varuna.errors import VarunaError


class NoticeError(VarunaError, ValueError):
    """A metadata service sent an invalid reply."""


class CloudNotice(msgspec.Struct, frozen=True):
    """A notice that this machine will be taken away."""

    deadline: float  # in seconds, by the clock of this machine
    reason: str
    event: str = ""  # event id of the cloud, for the approval


class MetadataRequest(msgspec.Struct, frozen=True):
    path: str
    method: str = "GET"
    headers: Mapping[str, str] = {}
    body: bytes = b""
    wait_seconds: float = 0.0  # the service may delay its reply for this long


class MetadataReply(msgspec.Struct, frozen=True):
    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes
    received: float  # by the clock of this machine

    @property
    def sent(self) -> float:
        """Time of the reply by the service's clock; by ours if it sends no date."""
        return http_date(self.headers["date"]) if "date" in self.headers else self.received


MetadataPoll = Generator[MetadataRequest, MetadataReply, CloudNotice | None]
"""One poll: yields requests, receives replies, returns the current notice."""


class MetadataService:
    url: str

    def poll(self) -> MetadataPoll:
        raise NotImplementedError

    def approval(self, notice: CloudNotice) -> MetadataRequest | None:
        """Return the request that allows the cloud to act before the deadline; None if it has none."""
        return None


class Aws(MetadataService):
    """AWS: the spot interruption notice of IMDSv2, about two minutes ahead."""

    url = "http://169.254.169.254"

    def __init__(self) -> None:
        self._token = ""

    def poll(self) -> MetadataPoll:
        reply = (yield self._request()) if self._token else None
        if reply is None or reply.status == 401:  # the token has expired
            token = yield MetadataRequest(
                "/latest/api/token", "PUT", {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
            )
            self._token = header_text(expect(token, 200), "AWS token")
            reply = yield self._request()
        if reply.status == 404:
            return None
        return aws_notice(expect(reply, 200), sent=reply.sent, now=reply.received)

    def _request(self) -> MetadataRequest:
        return MetadataRequest(
            "/latest/meta-data/spot/instance-action", headers={"X-aws-ec2-metadata-token": self._token}
        )


AZURE_HEADERS = {"Metadata": "true"}


class Azure(MetadataService):
    """Azure: Scheduled Events, 30 seconds ahead of a preemption and minutes ahead of other events.

    Each machine also receives events of other machines, so events are filtered by machine name.
    """

    url = "http://169.254.169.254"
    _path = "/metadata/scheduledevents?api-version=2020-07-01"

    def __init__(self) -> None:
        self._machine = ""

    def poll(self) -> MetadataPoll:
        if not self._machine:
            name = yield MetadataRequest(
                "/metadata/instance/compute/name?api-version=2021-02-01&format=text", headers=AZURE_HEADERS
            )
            self._machine = header_text(expect(name, 200), "Azure machine name")
        reply = yield MetadataRequest(self._path, headers=AZURE_HEADERS)
        body = expect(reply, 200)
        return azure_notice(body, machine=self._machine, sent=reply.sent, now=reply.received)

    def approval(self, notice: CloudNotice) -> MetadataRequest | None:
        approval = msgspec.json.encode({"StartRequests": [{"EventId": notice.event}]})
        return MetadataRequest(
            self._path, "POST", {**AZURE_HEADERS, "Content-Type": "application/json"}, approval
        )


class Gcp(MetadataService):
    """GCP: the flag `preempted`, 30 seconds ahead; the service replies when it changes or after a time."""

    url = "http://metadata.google.internal"

    def __init__(self, *, wait_seconds: int = 60) -> None:
        self._etag = ""
        self._wait_seconds = wait_seconds

    def poll(self) -> MetadataPoll:
        # The first request does not wait: the flag may already be set.
        known: dict[str, object] = {}
        if self._etag:
            known = {"wait_for_change": "true", "timeout_sec": self._wait_seconds, "last_etag": self._etag}
        reply = yield MetadataRequest(
            "/computeMetadata/v1/instance/preempted" + (f"?{urlencode(known)}" if known else ""),
            headers={"Metadata-Flavor": "Google"},
            wait_seconds=self._wait_seconds if known else 0,
        )
        body = expect(reply, 200)
        if reply.headers.get("metadata-flavor") != "Google":
            raise NoticeError(
                "this is not Google's metadata service: its reply lacks `Metadata-Flavor: Google`"
            )
        notice = gcp_notice(body, now=reply.received)
        self._etag = reply.headers.get("etag", "")
        return notice


SERVICES: dict[str, Callable[[], MetadataService]] = {"aws": Aws, "azure": Azure, "gcp": Gcp}


def metadata_service(cloud: str) -> MetadataService:
    if cloud not in SERVICES:
        raise ValueError(f"unknown cloud {cloud!r} (expected one of {', '.join(SERVICES)})")
    return SERVICES[cloud]()


class AwsAction(msgspec.Struct, frozen=True):
    action: str
    time: datetime


def aws_notice(body: bytes, *, sent: float, now: float) -> CloudNotice:
    """Parse a notice. Its time is relative to `sent`, the service's clock, because ours may be wrong."""
    found = parse_body(body, AwsAction, "AWS instance action")
    if found.time.tzinfo is None:
        raise NoticeError(f"the time of the AWS instance action has no time zone: {found.time}")
    left = found.time.timestamp() - sent
    if found.action == "hibernate":
        left = 0.0  # it starts with the notice
    return CloudNotice(
        now + max(left, 0.0), f"AWS will {found.action} this machine at {found.time:%H:%M:%S} UTC"
    )


class AzureEvent(msgspec.Struct, frozen=True, rename="pascal"):
    event_id: str
    event_type: str
    resources: tuple[str, ...]
    event_status: str = "Scheduled"
    not_before: str = ""


class AzureEvents(msgspec.Struct, frozen=True, rename="pascal"):
    events: tuple[AzureEvent, ...]


AZURE_ENDS = {"Preempt", "Terminate", "Redeploy", "Reboot"}
"""Events that end a machine. A Freeze lasts only seconds and loses nothing."""


def azure_notice(body: bytes, *, machine: str, sent: float, now: float) -> CloudNotice | None:
    """Return the first event that ends this machine; names are compared without case, like in Azure."""
    notices = []
    for event in parse_body(body, AzureEvents, "Azure scheduled event").events:
        if event.event_type not in AZURE_ENDS:
            continue
        if machine.casefold() not in (name.casefold() for name in event.resources):
            continue
        # An event without a time has started.
        left = http_date(event.not_before) - sent if event.not_before else 0.0
        when = event.not_before or "now"
        reason = f"Azure has {event.event_status.lower()} a {event.event_type} of this machine, {when}"
        notices.append(CloudNotice(now + max(left, 0.0), reason, event.event_id))
    return min(notices, key=lambda notice: notice.deadline, default=None)


GCP_SECONDS = 30.0


def gcp_notice(body: bytes, *, now: float) -> CloudNotice | None:
    flag = body.strip()
    if flag not in (b"TRUE", b"FALSE"):
        raise NoticeError(f"expected TRUE or FALSE for GCP's flag `preempted`, found {flag[:80]!r}")
    return CloudNotice(now + GCP_SECONDS, "GCP preempts this machine") if flag == b"TRUE" else None


Kind = TypeVar("Kind")


def parse_body(body: bytes, kind: type[Kind], what: str) -> Kind:
    try:
        return msgspec.json.decode(body, type=kind)
    except UNDECODABLE as error:
        raise NoticeError(f"invalid {what}: {error}; found {body[:80]!r}") from None


def expect(reply: MetadataReply, status: int) -> bytes:
    if reply.status != status:
        raise NoticeError(
            f"expected status {status} from the metadata service, found {reply.status}: {reply.body[:80]!r}"
        )
    return reply.body


def header_text(body: bytes, what: str) -> str:
    """Return the body as one token that is safe in a header."""
    text = body.decode("ascii", "replace").strip()
    if not text or not all("!" <= letter <= "~" for letter in text) or len(text) > 1024:
        raise NoticeError(f"invalid {what}: found {body[:80]!r}")
    return text


def http_date(text: str) -> float:
    try:
        return email.utils.parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError):
        raise NoticeError(
            f"expected a date like 'Mon, 19 Sep 2026 18:29:47 GMT', found {text[:80]!r}"
        ) from None
