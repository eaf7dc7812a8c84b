"""What clouds tell a machine that they are about to take away, and how each of them wants to be asked.

Nothing here talks to anyone: a service says what to ask next, is handed the answer, and ends with the notice
that stands, or with none. `varuna.morph.run.cloud_poll` carries the questions.
"""

import email.utils
from collections.abc import Generator, Mapping
from datetime import datetime
from typing import Literal, Protocol, TypeVar
from urllib.parse import urlencode

import msgspec

from varuna.errors import VarunaError

Cloud = Literal["aws", "azure", "gcp"]


class NoticeError(VarunaError, ValueError):
    """A metadata service answered what it should not."""


class Notice(msgspec.Struct, frozen=True):
    """This machine will be taken away."""

    deadline: float  # by the asking machine's own clock, in seconds
    reason: str
    event: str = ""  # the cloud's own name for it, where it wants to be told that we are done


class Request(msgspec.Struct, frozen=True):
    path: str
    method: str = "GET"
    headers: Mapping[str, str] = {}
    body: bytes = b""
    wait_seconds: float = 0.0  # the service may hold its answer back for so long


class Answer(msgspec.Struct, frozen=True):
    status: int
    headers: Mapping[str, str]  # names in small letters
    body: bytes
    received: float  # by the asking machine's own clock

    @property
    def sent(self) -> float:
        """By the service's clock; by ours where it does not say."""
        return http_date(self.headers["date"]) if "date" in self.headers else self.received


Round = Generator[Request, Answer, Notice | None]
"""One look at a service: yields questions, is sent answers, returns the notice that stands."""


class Service(Protocol):
    url: str  # where the cloud has it

    def look(self) -> Round: ...

    def done(self, notice: Notice) -> Request | None:
        """How to tell the cloud that it need not wait for the deadline; None where it does not ask."""


class Aws:
    """The spot interruption notice, about two minutes ahead (IMDSv2)."""

    url = "http://169.254.169.254"

    def __init__(self) -> None:
        self._token = ""

    def look(self) -> Round:
        answer = (yield self._question()) if self._token else None
        if answer is None or answer.status == 401:  # the token has expired
            token = yield Request(
                "/latest/api/token", "PUT", {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
            )
            self._token = header_text(expect(token, 200), "AWS token")
            answer = yield self._question()
        if answer.status == 404:
            return None
        return aws_notice(expect(answer, 200), sent=answer.sent, now=answer.received)

    def _question(self) -> Request:
        return Request(
            "/latest/meta-data/spot/instance-action", headers={"X-aws-ec2-metadata-token": self._token}
        )

    def done(self, notice: Notice) -> Request | None:
        return None


AZURE_HEADERS = {"Metadata": "true"}


class Azure:
    """Scheduled Events, 30 seconds ahead for a preemption and minutes for the rest.

    They name machines, since each hears of those of its neighbours too.
    """

    url = "http://169.254.169.254"
    _path = "/metadata/scheduledevents?api-version=2020-07-01"

    def __init__(self) -> None:
        self._machine = ""

    def look(self) -> Round:
        if not self._machine:
            name = yield Request(
                "/metadata/instance/compute/name?api-version=2021-02-01&format=text", headers=AZURE_HEADERS
            )
            self._machine = header_text(expect(name, 200), "Azure machine name")
        answer = yield Request(self._path, headers=AZURE_HEADERS)
        body = expect(answer, 200)
        return azure_notice(body, machine=self._machine, sent=answer.sent, now=answer.received)

    def done(self, notice: Notice) -> Request | None:
        approval = msgspec.json.encode({"StartRequests": [{"EventId": notice.event}]})
        return Request(self._path, "POST", {**AZURE_HEADERS, "Content-Type": "application/json"}, approval)


class Gcp:
    """The flag `preempted`, 30 seconds ahead. The service answers when it changes, or after a while."""

    url = "http://metadata.google.internal"

    def __init__(self, *, wait_seconds: int = 60) -> None:
        self._etag = ""
        self._wait_seconds = wait_seconds

    def look(self) -> Round:
        # The first question is answered at once: the flag may have changed before we came.
        known: dict[str, object] = {}
        if self._etag:
            known = {"wait_for_change": "true", "timeout_sec": self._wait_seconds, "last_etag": self._etag}
        answer = yield Request(
            "/computeMetadata/v1/instance/preempted" + (f"?{urlencode(known)}" if known else ""),
            headers={"Metadata-Flavor": "Google"},
            wait_seconds=self._wait_seconds if known else 0,
        )
        body = expect(answer, 200)
        if answer.headers.get("metadata-flavor") != "Google":
            raise NoticeError(
                "this is not Google's metadata service: its answer lacks `Metadata-Flavor: Google`"
            )
        notice = gcp_notice(body, now=answer.received)
        self._etag = answer.headers.get("etag", "")
        return notice

    def done(self, notice: Notice) -> Request | None:
        return None


SERVICES: dict[Cloud, type[Aws] | type[Azure] | type[Gcp]] = {"aws": Aws, "azure": Azure, "gcp": Gcp}


def service(cloud: str) -> Service:
    for name, kind in SERVICES.items():
        if cloud == name:
            return kind()
    raise ValueError(f"notices can be heard from {', '.join(SERVICES)}, not from {cloud!r}")


# ---------------------------------------------------------------- what they say


class AwsAction(msgspec.Struct, frozen=True):
    action: str
    time: datetime


def aws_notice(body: bytes, *, sent: float, now: float) -> Notice:
    """Counted from `sent`, the service's own time of its answer: our clock may be wrong."""
    found = read(body, AwsAction, "AWS instance action")
    if found.time.tzinfo is None:
        raise NoticeError(f"the AWS instance action has a time without a zone: {found.time}")
    left = found.time.timestamp() - sent
    if found.action == "hibernate":
        left = 0.0  # it begins with the notice
    return Notice(now + max(left, 0.0), f"AWS will {found.action} this machine at {found.time:%H:%M:%S} UTC")


class AzureEvent(msgspec.Struct, frozen=True, rename="pascal"):
    event_id: str
    event_type: str
    resources: tuple[str, ...]
    event_status: str = "Scheduled"
    not_before: str = ""


class AzureEvents(msgspec.Struct, frozen=True, rename="pascal"):
    events: tuple[AzureEvent, ...]


AZURE_ENDS = {
    "Preempt",
    "Terminate",
    "Redeploy",
    "Reboot",
}  # a Freeze is over after seconds, and nothing is lost


def azure_notice(body: bytes, *, machine: str, sent: float, now: float) -> Notice | None:
    """The first that ends this machine; names are compared as Azure does, without regard to case."""
    notices = []
    for event in read(body, AzureEvents, "Azure scheduled event").events:
        if event.event_type not in AZURE_ENDS:
            continue
        if machine.casefold() not in (name.casefold() for name in event.resources):
            continue
        # Without a time it has started.
        left = http_date(event.not_before) - sent if event.not_before else 0.0
        when = event.not_before or "now"
        reason = f"Azure has {event.event_status.lower()} a {event.event_type} of this machine, {when}"
        notices.append(Notice(now + max(left, 0.0), reason, event.event_id))
    return min(notices, key=lambda notice: notice.deadline, default=None)


GCP_SECONDS = 30.0


def gcp_notice(body: bytes, *, now: float) -> Notice | None:
    said = body.strip()
    if said not in (b"TRUE", b"FALSE"):
        raise NoticeError(f"GCP's flag `preempted` is TRUE or FALSE, found {said[:80]!r}")
    return Notice(now + GCP_SECONDS, "GCP preempts this machine") if said == b"TRUE" else None


# ---------------------------------------------------------------- reading


Kind = TypeVar("Kind")


def read(body: bytes, kind: type[Kind], what: str) -> Kind:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise NoticeError(f"no {what}: {error}; found {body[:80]!r}") from None


def expect(answer: Answer, status: int) -> bytes:
    if answer.status != status:
        raise NoticeError(
            f"the metadata service answered {answer.status}, expected {status}: {answer.body[:80]!r}"
        )
    return answer.body


def header_text(body: bytes, what: str) -> str:
    """One word that may go back in a header or be compared."""
    text = body.decode("ascii", "replace").strip()
    if not text or not all("!" <= letter <= "~" for letter in text) or len(text) > 1024:
        raise NoticeError(f"no {what}: found {body[:80]!r}")
    return text


def http_date(text: str) -> float:
    try:
        return email.utils.parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError):
        raise NoticeError(
            f"a date like 'Mon, 19 Sep 2026 18:29:47 GMT' was expected, found {text[:80]!r}"
        ) from None
