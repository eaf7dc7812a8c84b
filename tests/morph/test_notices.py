"""Notices of clouds, from small services that behave like theirs."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.morph.hosts import clouds
from varuna.morph.notices import (
    CloudNotice,
    MetadataReply,
    MetadataService,
    NoticeError,
    aws_notice,
    azure_notice,
    gcp_notice,
    metadata_service,
)
from varuna.morph.run.cloud_poll import approve_notice, poll_notices

NOW = 5_000.0  # this machine's clock, which is far from the cloud's


@pytest.fixture
def aws() -> Iterator[clouds.Aws]:
    cloud = clouds.Aws()
    with clouds.running(cloud):
        yield cloud


@pytest.fixture
def azure() -> Iterator[clouds.Azure]:
    cloud = clouds.Azure()
    with clouds.running(cloud):
        yield cloud


@pytest.fixture
def gcp() -> Iterator[clouds.Gcp]:
    cloud = clouds.Gcp()
    with clouds.running(cloud):
        yield cloud


class PollResults:
    """Collects the notices and warnings of a poll, which continues when `again` is released."""

    def __init__(self) -> None:
        self.notices: asyncio.Queue[CloudNotice | None] = asyncio.Queue()
        self.warnings: asyncio.Queue[str] = asyncio.Queue()
        self.pauses: asyncio.Queue[float] = asyncio.Queue()
        self.again = asyncio.Semaphore(0)

    async def sleep(self, seconds: float) -> None:
        self.pauses.put_nowait(seconds)
        await self.again.acquire()


@asynccontextmanager
async def polling(
    to: MetadataService, url: str, *, reply_seconds: float = 10.0
) -> AsyncIterator[PollResults]:
    results = PollResults()
    poll = asyncio.create_task(
        poll_notices(
            to,
            results.notices.put_nowait,
            warn=results.warnings.put_nowait,
            url=url,
            reply_seconds=reply_seconds,
            now=lambda: NOW,
            sleep=results.sleep,
        )
    )
    try:
        yield results
    finally:
        poll.cancel()
        with pytest.raises(asyncio.CancelledError):
            await poll


def test_aws_reports_a_spot_interruption_once_with_its_deadline(aws: clouds.Aws) -> None:
    """V41: first the token of IMDSv2, then no notice, then a notice; the deadline uses our clock."""

    async def story() -> None:
        async with polling(metadata_service("aws"), aws.url) as results:
            await results.pauses.get()
            assert results.notices.empty()
            assert aws.requests == ["PUT /latest/api/token", "GET /latest/meta-data/spot/instance-action"]
            aws.action = {"action": "terminate", "time": "2027-01-15T08:02:00Z"}  # the cloud's clock + 2 min
            results.again.release()
            notice = await results.notices.get()
            assert notice == CloudNotice(NOW + 120, "AWS will terminate this machine at 08:02:00 UTC")
            results.again.release()
            assert [await results.pauses.get(), await results.pauses.get()] == [1.0, 1.0]
            assert results.notices.empty(), "reported twice"
            assert aws.requests.count("PUT /latest/api/token") == 1

    asyncio.run(story())


def test_aws_gets_a_new_token_when_the_old_one_has_expired(aws: clouds.Aws) -> None:
    async def story() -> None:
        async with polling(metadata_service("aws"), aws.url) as results:
            await results.pauses.get()
            aws.token = "token-2=="
            aws.action = {"action": "hibernate", "time": "2027-01-15T08:02:00Z"}
            results.again.release()
            notice = await results.notices.get()
            assert notice is not None and notice.deadline == NOW, "hibernation begins with its notice"

    asyncio.run(story())


def test_azure_reports_only_events_that_end_this_machine(azure: clouds.Azure) -> None:
    """V41: events of other machines and freezes are ignored; a withdrawn notice is reported."""

    async def story() -> None:
        async with polling(metadata_service("azure"), azure.url) as results:
            azure.schedule("Preempt", "trainer_8", seconds=30)
            azure.schedule("Freeze", "trainer_7", seconds=900)
            await results.pauses.get()
            assert results.notices.empty()
            azure.schedule("Preempt", "Trainer_7", seconds=30, name="E-2")
            results.again.release()
            notice = await results.notices.get()
            assert notice is not None and (notice.deadline, notice.event) == (NOW + 30, "E-2")
            assert "Preempt" in notice.reason
            azure.events.pop()
            results.again.release()
            assert await results.notices.get() is None

    asyncio.run(story())


def test_azure_gets_an_approval(azure: clouds.Azure) -> None:
    azure.schedule("Preempt", azure.machine, seconds=30)

    async def story() -> None:
        to = metadata_service("azure")
        async with polling(to, azure.url) as results:
            notice = await results.notices.get()
            assert notice is not None
            await approve_notice(to, notice, url=azure.url)
            results.again.release()
            started = await results.notices.get()
            assert started is not None and started.deadline == NOW
        azure.events.clear()
        with pytest.raises(NoticeError, match="no such event"):
            await approve_notice(to, notice, url=azure.url)

    asyncio.run(story())
    assert azure.events == []


def test_gcp_gets_one_request_that_waits_for_a_change(gcp: clouds.Gcp) -> None:
    """V41: not one request per second."""

    async def story() -> None:
        async with polling(metadata_service("gcp"), gcp.url) as results:
            await results.pauses.get()
            results.again.release()
            await asyncio.to_thread(gcp.wait_for_requests, 2)
            gcp.preempt()
            assert await results.notices.get() == CloudNotice(NOW + 30, "GCP preempts this machine")
            assert gcp.requests == [
                "GET /computeMetadata/v1/instance/preempted",
                "GET /computeMetadata/v1/instance/preempted"
                "?wait_for_change=true&timeout_sec=60&last_etag=etag-0",
            ]

    asyncio.run(story())


def test_a_cancelled_poll_ends_while_the_service_delays_its_reply(gcp: clouds.Gcp) -> None:
    async def story() -> None:
        async with polling(metadata_service("gcp"), gcp.url) as results:
            await results.pauses.get()
            results.again.release()
            await asyncio.to_thread(gcp.wait_for_requests, 2)

    asyncio.run(asyncio.wait_for(story(), 30))
    gcp.preempt()  # frees the stand-in's own thread


LONG = b"[" * ((1 << 20) + 1)
WRONG = {
    "no JSON": (200, {}, b"<html>"),
    "the wrong JSON": (200, {}, b'{"action": 3, "Events": 3}'),
    "no UTF-8": (200, {}, b"\xff\xfe"),
    "nothing": (200, {}, b""),
    "too long": (200, {}, LONG),
    "too deep": (200, {}, b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "an error of its own": (503, {}, b"try later"),
    "not there": (404, {}, b"not found"),
    "a strange date": (200, {"Date": "yesterday"}, b'{"action": "stop", "time": "2027-01-15T08:02:00Z"}'),
}


@pytest.mark.parametrize(
    ("name", "wrong"),
    # For AWS, 404 says that there is no notice.
    [pair for pair in product(["aws", "azure", "gcp"], WRONG) if pair != ("aws", "not there")],
)
def test_an_invalid_reply_is_logged_once_and_polled_again(
    name: str, wrong: str, aws: clouds.Aws, azure: clouds.Azure, gcp: clouds.Gcp
) -> None:
    cloud = {"aws": aws, "azure": azure, "gcp": gcp}[name]

    async def story() -> None:
        async with polling(metadata_service(name), cloud.url) as results:
            await results.pauses.get()
            cloud.broken += [WRONG[wrong]] * 2
            aws.action = {"action": "stop", "time": "2027-01-15T08:02:00Z"}
            azure.schedule("Terminate", azure.machine, seconds=300)
            gcp.preempt()
            results.again.release()
            assert "cannot be polled" in await results.warnings.get()
            assert await results.pauses.get() == 2.0
            results.again.release()
            assert await results.pauses.get() == 4.0
            results.again.release()
            assert await results.notices.get() is not None
            assert results.warnings.empty(), "the same warning came twice"

    asyncio.run(story())


def test_a_redirect_is_refused(aws: clouds.Aws, gcp: clouds.Gcp) -> None:
    async def story() -> None:
        async with polling(metadata_service("gcp"), gcp.url) as results:
            gcp.broken.append((302, {"Location": f"{aws.url}/elsewhere"}, b""))
            assert "302" in await results.warnings.get()

    asyncio.run(story())
    assert aws.requests == []


def test_proxies_are_not_used(aws: clouds.Aws, gcp: clouds.Gcp, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ["http_proxy", "HTTP_PROXY", "all_proxy"]:
        monkeypatch.setenv(name, aws.url)
    gcp.preempt()

    async def story() -> None:
        async with polling(metadata_service("gcp"), gcp.url) as results:
            assert await results.notices.get() is not None

    asyncio.run(story())
    assert aws.requests == []


def test_a_service_that_sends_no_complete_reply_times_out() -> None:
    """Neither an open connection nor single bytes count as a reply."""
    silent = socket.create_server(("127.0.0.1", 0))

    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            writer.write(b"H")
            await asyncio.sleep(0.05)

    async def story() -> None:
        async with polling(
            metadata_service("gcp"), f"http://127.0.0.1:{silent.getsockname()[1]}", reply_seconds=0.2
        ) as results:
            assert "TimeoutError" in await results.warnings.get()
        server = await asyncio.start_server(trickle, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with polling(metadata_service("gcp"), url, reply_seconds=0.2) as results:
            assert "TimeoutError" in await results.warnings.get()
        server.close()

    with silent:
        asyncio.run(story())


def test_a_missing_service_is_logged() -> None:
    """The machine is in no cloud, or in another one."""

    async def story() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        async with polling(metadata_service("aws"), url) as results:
            assert "refused" in await results.warnings.get()

    asyncio.run(story())


def test_an_unknown_cloud_or_an_invalid_address_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown cloud 'oracle' \(expected one of aws, azure, gcp"):
        metadata_service("oracle")
    with pytest.raises(ValueError, match="http://host"):
        asyncio.run(
            poll_notices(metadata_service("aws"), lambda _: None, warn=print, url="file:///etc/passwd")
        )


@given(st.binary() | st.text().map(str.encode))
def test_any_reply_is_a_notice_or_a_notice_error(body: bytes) -> None:
    answer = MetadataReply(200, {"date": body.decode("latin-1")}, body, NOW)
    for parse in [
        lambda: aws_notice(body, sent=0.0, now=NOW),
        lambda: azure_notice(body, machine="m", sent=0.0, now=NOW),
        lambda: gcp_notice(body, now=NOW),
        lambda: answer.sent,
    ]:
        try:
            parse()
        except NoticeError as error:
            assert len(str(error)) < 1000
