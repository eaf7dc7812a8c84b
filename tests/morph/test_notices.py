"""Notices of the clouds, asked of small services that speak as theirs do."""

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


class Heard:
    """All that a listener tells and warns of, as it comes; it asks again whenever `again` lets it."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[CloudNotice | None] = asyncio.Queue()
        self.warned: asyncio.Queue[str] = asyncio.Queue()
        self.pauses: asyncio.Queue[float] = asyncio.Queue()
        self.again = asyncio.Semaphore(0)

    async def sleep(self, seconds: float) -> None:
        self.pauses.put_nowait(seconds)
        await self.again.acquire()


@asynccontextmanager
async def listening(to: MetadataService, url: str, *, reply_seconds: float = 10.0) -> AsyncIterator[Heard]:
    heard = Heard()
    listener = asyncio.create_task(
        poll_notices(
            to,
            heard.told.put_nowait,
            warn=heard.warned.put_nowait,
            url=url,
            reply_seconds=reply_seconds,
            now=lambda: NOW,
            sleep=heard.sleep,
        )
    )
    try:
        yield heard
    finally:
        listener.cancel()
        with pytest.raises(asyncio.CancelledError):
            await listener


def test_aws_tells_a_spot_interruption_once_with_the_time_that_is_left(aws: clouds.Aws) -> None:
    """V41: the token of IMDSv2 first; nothing, then a notice; the deadline is by our clock."""

    async def story() -> None:
        async with listening(metadata_service("aws"), aws.url) as heard:
            await heard.pauses.get()
            assert heard.told.empty()
            assert aws.asked == ["PUT /latest/api/token", "GET /latest/meta-data/spot/instance-action"]
            aws.action = {"action": "terminate", "time": "2027-01-15T08:02:00Z"}  # the cloud's clock + 2 min
            heard.again.release()
            notice = await heard.told.get()
            assert notice == CloudNotice(NOW + 120, "AWS will terminate this machine at 08:02:00 UTC")
            heard.again.release()
            assert [await heard.pauses.get(), await heard.pauses.get()] == [1.0, 1.0]
            assert heard.told.empty(), "told twice"
            assert aws.asked.count("PUT /latest/api/token") == 1

    asyncio.run(story())


def test_aws_asks_for_a_new_token_when_the_old_one_has_expired(aws: clouds.Aws) -> None:
    async def story() -> None:
        async with listening(metadata_service("aws"), aws.url) as heard:
            await heard.pauses.get()
            aws.token = "token-2=="
            aws.action = {"action": "hibernate", "time": "2027-01-15T08:02:00Z"}
            heard.again.release()
            notice = await heard.told.get()
            assert notice is not None and notice.deadline == NOW, "hibernation begins with its notice"

    asyncio.run(story())


def test_azure_tells_of_this_machine_alone_and_of_what_ends_it(azure: clouds.Azure) -> None:
    """V41: events of the neighbours and short freezes are no notice; a withdrawn one is taken back."""

    async def story() -> None:
        async with listening(metadata_service("azure"), azure.url) as heard:
            azure.schedule("Preempt", "trainer_8", seconds=30)
            azure.schedule("Freeze", "trainer_7", seconds=900)
            await heard.pauses.get()
            assert heard.told.empty()
            azure.schedule("Preempt", "Trainer_7", seconds=30, name="E-2")
            heard.again.release()
            notice = await heard.told.get()
            assert notice is not None and (notice.deadline, notice.event) == (NOW + 30, "E-2")
            assert "Preempt" in notice.reason
            azure.events.pop()
            heard.again.release()
            assert await heard.told.get() is None

    asyncio.run(story())


def test_azure_is_told_that_it_need_not_wait_for_the_deadline(azure: clouds.Azure) -> None:
    azure.schedule("Preempt", azure.machine, seconds=30)

    async def story() -> None:
        to = metadata_service("azure")
        async with listening(to, azure.url) as heard:
            notice = await heard.told.get()
            assert notice is not None
            await approve_notice(to, notice, url=azure.url)
            heard.again.release()
            started = await heard.told.get()
            assert started is not None and started.deadline == NOW
        azure.events.clear()
        with pytest.raises(NoticeError, match="no such event"):
            await approve_notice(to, notice, url=azure.url)

    asyncio.run(story())
    assert azure.events == []


def test_gcp_answers_when_its_flag_changes_and_is_not_asked_meanwhile(gcp: clouds.Gcp) -> None:
    """V41: one question that waits for the change, not one a second."""

    async def story() -> None:
        async with listening(metadata_service("gcp"), gcp.url) as heard:
            await heard.pauses.get()
            heard.again.release()
            await asyncio.to_thread(gcp.wait_until_asked, 2)
            gcp.preempt()
            assert await heard.told.get() == CloudNotice(NOW + 30, "GCP preempts this machine")
            assert gcp.asked == [
                "GET /computeMetadata/v1/instance/preempted",
                "GET /computeMetadata/v1/instance/preempted"
                "?wait_for_change=true&timeout_sec=60&last_etag=etag-0",
            ]

    asyncio.run(story())


def test_a_listener_that_is_cancelled_while_a_service_holds_its_answer_ends_at_once(gcp: clouds.Gcp) -> None:
    async def story() -> None:
        async with listening(metadata_service("gcp"), gcp.url) as heard:
            await heard.pauses.get()
            heard.again.release()
            await asyncio.to_thread(gcp.wait_until_asked, 2)

    asyncio.run(asyncio.wait_for(story(), 30))
    gcp.preempt()  # frees the stand-in's own thread


LONG = b"[" * ((1 << 20) + 1)
WRONG = {
    "no JSON": (200, {}, b"<html>"),
    "the wrong JSON": (200, {}, b'{"action": 3, "Events": 3}'),
    "no UTF-8": (200, {}, b"\xff\xfe"),
    "nothing": (200, {}, b""),
    "too long": (200, {}, LONG),
    "an error of its own": (503, {}, b"try later"),
    "not there": (404, {}, b"not found"),
    "a strange date": (200, {"Date": "yesterday"}, b'{"action": "stop", "time": "2027-01-15T08:02:00Z"}'),
}


@pytest.mark.parametrize(
    ("name", "wrong"),
    # For AWS, 404 says that there is no notice.
    [pair for pair in product(["aws", "azure", "gcp"], WRONG) if pair != ("aws", "not there")],
)
def test_a_wrong_answer_is_told_once_and_asked_again(
    name: str, wrong: str, aws: clouds.Aws, azure: clouds.Azure, gcp: clouds.Gcp
) -> None:
    cloud = {"aws": aws, "azure": azure, "gcp": gcp}[name]

    async def story() -> None:
        async with listening(metadata_service(name), cloud.url) as heard:
            await heard.pauses.get()
            cloud.broken += [WRONG[wrong]] * 2
            aws.action = {"action": "stop", "time": "2027-01-15T08:02:00Z"}
            azure.schedule("Terminate", azure.machine, seconds=300)
            gcp.preempt()
            heard.again.release()
            assert "cannot be polled" in await heard.warned.get()
            assert await heard.pauses.get() == 2.0
            heard.again.release()
            assert await heard.pauses.get() == 4.0
            heard.again.release()
            assert await heard.told.get() is not None
            assert heard.warned.empty(), "warned twice of the same"

    asyncio.run(story())


def test_a_redirect_is_refused(aws: clouds.Aws, gcp: clouds.Gcp) -> None:
    async def story() -> None:
        async with listening(metadata_service("gcp"), gcp.url) as heard:
            gcp.broken.append((302, {"Location": f"{aws.url}/elsewhere"}, b""))
            assert "302" in await heard.warned.get()

    asyncio.run(story())
    assert aws.asked == []


def test_proxies_are_not_asked(aws: clouds.Aws, gcp: clouds.Gcp, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ["http_proxy", "HTTP_PROXY", "all_proxy"]:
        monkeypatch.setenv(name, aws.url)
    gcp.preempt()

    async def story() -> None:
        async with listening(metadata_service("gcp"), gcp.url) as heard:
            assert await heard.told.get() is not None

    asyncio.run(story())
    assert aws.asked == []


def test_a_service_that_never_answers_or_trickles_is_given_up() -> None:
    """An open connection is no answer, and neither is a byte now and then."""
    silent = socket.create_server(("127.0.0.1", 0))

    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            writer.write(b"H")
            await asyncio.sleep(0.05)

    async def story() -> None:
        async with listening(
            metadata_service("gcp"), f"http://127.0.0.1:{silent.getsockname()[1]}", reply_seconds=0.2
        ) as heard:
            assert "TimeoutError" in await heard.warned.get()
        server = await asyncio.start_server(trickle, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with listening(metadata_service("gcp"), url, reply_seconds=0.2) as heard:
            assert "TimeoutError" in await heard.warned.get()
        server.close()

    with silent:
        asyncio.run(story())


def test_no_service_at_all_ends_nothing() -> None:
    """A machine that is in no cloud, or not in this one."""

    async def story() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        async with listening(metadata_service("aws"), url) as heard:
            assert "refused" in await heard.warned.get()

    asyncio.run(story())


def test_an_unknown_cloud_or_a_strange_address_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown cloud 'oracle' \(expected one of aws, azure, gcp"):
        metadata_service("oracle")
    with pytest.raises(ValueError, match="http://host"):
        asyncio.run(
            poll_notices(metadata_service("aws"), lambda _: None, warn=print, url="file:///etc/passwd")
        )


@given(st.binary() | st.text().map(str.encode))
def test_whatever_a_service_says_is_a_notice_or_a_named_error(body: bytes) -> None:
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
