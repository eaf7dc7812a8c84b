"""The page opens for its token alone, and says nothing to anyone else."""

import asyncio
import http.client
import os
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.cli.commands import Cli
from tests.page.browsing import ServedPage, served
from tests.page.folders import write_folder
from varuna.morph.protocol.messages import ManagerReply
from varuna.page.address_file import ADDRESS_FILE
from varuna.page.job_reader import JobReader
from varuna.page.manager_link import ManagerLink
from varuna.page.security import PageSecrets
from varuna.page.serve import open_listener, serve_page
from varuna.page.server import ADMIT_SECONDS, MAX_CONNECTIONS, MAX_UNVERIFIED, PageServer


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPage]:
    folder = write_folder(tmp_path_factory.mktemp("job"), machines=4, stages=2, steps=100)
    with served(folder) as (found, _):
        assert stat.S_IMODE((folder / ADDRESS_FILE).stat().st_mode) == 0o600
        yield found
    assert not (folder / ADDRESS_FILE).exists()


def enter(page: ServedPage) -> dict[str, str]:
    """The headers of a browser that has opened the address."""
    status, headers, body = page.get(f"/?token={page.token}")
    assert (status, headers["location"], body) == (303, f"/#{page.token}", b"")
    cookie, *attributes = headers["set-cookie"].split("; ")
    assert {"HttpOnly", "SameSite=Lax", "Path=/"} <= set(attributes)
    assert page.token not in cookie  # browsers send cookies to all ports of a host: also to strangers
    return {"Cookie": cookie}


def test_without_the_token_nothing_is_shown(page: ServedPage) -> None:
    """SEE-2"""
    cookie = enter(page)
    wrong = page.token[:-1] + ("a" if page.token[-1] != "a" else "b")
    strangers: list[tuple[str, dict[str, str]]] = [
        ("/", {}),
        (f"/?token={wrong}", {}),
        ("/?token=", {}),
        ("/?token=%ff%00", {}),
        (f"/static/main.js?token={page.token}", {}),  # the token opens one address only
        ("/static/main.js", {"Cookie": f"{cookie['Cookie'].partition('=')[0]}={page.token}"}),
        ("/no/such/page", {}),
        ("/api/curve", cookie),  # the cookie opens the empty page, not the data
        ("/api/curve", {"Authorization": f"Bearer {wrong}"}),
        ("/api/curve", {"Authorization": page.token}),
        (f"/api/stream?token={page.token}", cookie),
    ]
    for path, headers in strangers:
        status, answered, body = page.get(path, headers)
        shown = b"This address has no valid token. Open the address that Varuna printed last.\n"
        wanted = shown if path.startswith("/?") or path == "/" else b""
        assert (status, body, answered["connection"]) == (403, wanted, "close"), path


def test_pages_of_two_jobs_are_open_side_by_side(page: ServedPage, tmp_path: Path) -> None:
    """SEE-2: a browser sends the cookies of a host to all of its ports, and keeps one of each name."""
    folder = write_folder(tmp_path / "job", machines=1, stages=1, steps=1)
    with served(folder) as (other, _):
        jar = dict(enter(one)["Cookie"].split("=", 1) for one in (page, other))
        cookies = {"Cookie": "; ".join(f"{name}={value}" for name, value in jar.items())}
        for one in (page, other):
            assert one.get("/", cookies)[0] == one.get("/static/main.js", cookies)[0] == 200


def test_the_token_opens_the_page_and_its_data(page: ServedPage) -> None:
    cookie = enter(page)
    status, headers, body = page.get("/", cookie)
    assert (status, b"train" in body) == (200, False)  # the page itself holds nothing of the job
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert (headers["referrer-policy"], headers["cache-control"]) == ("no-referrer", "no-store")
    assert page.get("/static/main.js", cookie)[0] == 200
    assert (
        page.get("/static/../security.py", cookie)[0]
        == page.get("/static/%2e%2e%2fserver.py", cookie)[0]
        == 404
    )
    assert b'"loss"' in page.data("/api/curve")


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "", "localhost@evil.example", "[::1"]
)
def test_a_rebound_name_of_a_website_is_refused(page: ServedPage, host: str) -> None:
    headers = {"Host": host, "Authorization": f"Bearer {page.token}"}
    assert page.get("/api/curve", headers)[0] == 403
    assert page.get("/api/curve", {**headers, "Host": "localhost:9000"})[0] == 200  # of ssh -L 9000:...


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"])
def test_the_page_only_reads(page: ServedPage, method: str) -> None:
    assert page.get("/api/curve", method=method)[0] == 403
    assert page.get("/api/curve", {"Authorization": f"Bearer {page.token}"}, method=method)[0] == 405


def test_bad_requests_get_a_short_answer(page: ServedPage) -> None:
    key = {"Authorization": f"Bearer {page.token}"}
    for query in ("points=x", "first=1e9x", "points=-1", "points=99999999999999999999"):
        assert page.get(f"/api/curve?{query}", key)[0] == 400
    for query in ("rank=../../etc/passwd", "generation=-1", "rank=%D9%A3", "start=1.5"):
        assert page.get(f"/api/log?{query}", key)[0] == 400
    assert page.get("/api/curve", key, body=b"x" * 10)[0] == 405
    assert page.get(f"/api/curve?x={'y' * 5000}", key)[0] == 400
    assert page.get("/api/curve?first=nan&last=-inf&points=2", key)[0] == 200


def test_strangers_cannot_keep_connections(page: ServedPage) -> None:
    """Of more than the limit, the oldest are closed at once, and silent ones after some seconds."""
    silent = [
        socket.create_connection(("127.0.0.1", page.port), timeout=30) for _ in range(MAX_UNVERIFIED + 1)
    ]
    assert closed_by_server(silent[0])
    slow = silent[-1]
    slow.sendall(b"GET / HTTP/1.1\r\nHost: ")  # a request that never ends
    assert all(closed_by_server(connection) for connection in silent), f"after {ADMIT_SECONDS} s"
    for connection in silent:
        connection.close()
    assert page.data("/api/curve")


def test_the_owner_is_served_while_strangers_open_connections(page: ServedPage) -> None:
    """However many they open, and also to an owner with many connections."""
    key = {"Authorization": f"Bearer {page.token}"}
    kept: list[http.client.HTTPConnection] = []
    silent: list[socket.socket] = []
    try:
        for _ in range(MAX_CONNECTIONS + 8):
            kept.append(http.client.HTTPConnection("127.0.0.1", page.port, timeout=30))
            kept[-1].request("GET", "/api/curve", headers=key)
            silent += [socket.create_connection(("127.0.0.1", page.port), timeout=30) for _ in range(8)]
            answer = kept[-1].getresponse()
            assert answer.status == 200 and answer.read()
        assert [connection.sock is None for connection in kept] == [False] * MAX_CONNECTIONS + [True] * 8
        kept[0].request("GET", "/api/curve", headers=key)  # the first one is still open
        assert kept[0].getresponse().status == 200
    finally:
        for connection in (*kept, *silent):
            connection.close()


def test_a_machine_that_does_not_answer_stops_no_other_part_of_the_page(tmp_path: Path) -> None:
    """The logs of other machines have threads of their own."""
    folder = write_folder(tmp_path / "job", machines=1, stages=1, steps=10)
    (folder / "rank_0.out").write_text("hello")
    machine_answers = threading.Event()

    class SlowLink(ManagerLink):
        def request(self, what: str, **fields: object) -> ManagerReply:
            if what == "logs":
                assert machine_answers.wait(60)
            return ManagerReply(False, "no such log")

    keys = PageSecrets()
    server = PageServer(JobReader(folder, SlowLink(folder, tmp_path)), keys)

    async def get(port: int, path: str) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {keys.token}\r\n"
            "Connection: close\r\n\r\n".encode()
        )
        answer = await reader.read()
        writer.close()
        return answer

    async def check() -> None:
        over = asyncio.Event()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            serving = asyncio.create_task(server.serve(listener, over))
            remote = [asyncio.create_task(get(port, f"/api/log?rank={rank}")) for rank in range(1, 20)]
            async with asyncio.timeout(60):
                await get(port, "/api/curve")
                for path, text in (
                    ("/api/curve", b'"loss"'),
                    ("/api/log?rank=0", b"hello"),
                    ("/api/logs", b"ranks"),
                ):
                    assert text in await get(port, path)
                assert not any(task.done() for task in remote)
                machine_answers.set()
                assert all(b"no such log" in answer for answer in await asyncio.gather(*remote))
                over.set()
                await serving

    asyncio.run(check())


def test_requests_of_strangers_write_nothing_to_the_log(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """They would fill the disk of the log folder. An error of the page itself is printed once."""
    folder = write_folder(tmp_path / "job", machines=1, stages=1, steps=10)
    keys, reader = PageSecrets(), JobReader(folder, ManagerLink(folder, tmp_path))
    server = PageServer(reader, keys)

    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("this is broken")

    monkeypatch.setattr(reader, "curve", fail)
    head = b"Host: localhost\r\nConnection: close\r\n"
    token = f"Authorization: Bearer {keys.token}\r\n".encode()
    wrong = [
        b"GET /?token=\xff HTTP/1.1\r\n" + head,
        b"GET http://[::1/ HTTP/1.1\r\n" + head,
        b"GET / HTTP/1.1\r\n" + head + b"Host: localhost\r\n",
        b"GET / HTTP/1.1\r\n" + head + b"Expect: \xff\r\n",
    ]

    async def status(port: int, request: bytes) -> int:
        stream, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request + b"\r\n")
        answer = await stream.read()
        writer.close()
        return int(answer.split()[1])

    async def check() -> None:
        over = asyncio.Event()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            serving = asyncio.create_task(server.serve(listener, over))
            async with asyncio.timeout(60):
                for request in wrong:
                    assert await status(port, request) in (400, 500)
                for _ in range(2):
                    assert await status(port, b"GET /api/curve HTTP/1.1\r\n" + head + token) == 500
                over.set()
                await serving

    asyncio.run(check())
    assert not caplog.records
    assert capfd.readouterr().err.count("RuntimeError: this is broken") == 1


def closed_by_server(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_second_server_leaves_the_address_of_the_first(tmp_path: Path) -> None:
    """`varuna page` beside `varuna run --page`: the file of each holds its own address while it runs."""
    folder = write_folder(tmp_path / "job", machines=1, stages=1, steps=1)
    with served(folder) as (first, _):
        with served(folder) as (second, _):
            assert (first.file.name, second.file.name) == ("page.url", "page-2.url")
            assert stat.S_IMODE(second.file.stat().st_mode) == 0o600
            assert first.token != second.token and second.data("/api/curve")
        assert not second.file.exists()
        assert ServedPage(folder / ADDRESS_FILE).url == first.url and first.data("/api/curve")
    assert list(folder.glob("page*.url")) == []


def test_the_server_yields_to_workers(tmp_path: Path) -> None:
    """SEE-2: workers that train go first on a busy core, and it does not interrupt them."""
    folder = write_folder(tmp_path / "job", machines=1, stages=1, steps=1)
    with served(folder) as (_, pid):
        assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 5)
        assert os.sched_getscheduler(pid) == os.SCHED_BATCH


def test_the_address_file_of_a_killed_server_is_used_again(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "job", machines=1, stages=1, steps=1)
    (folder / ADDRESS_FILE).write_text(f"http://127.0.0.1:1/?token={'x' * 200}\n")
    with served(folder) as (page, _):
        assert page.file.name == ADDRESS_FILE and page.data("/api/curve")


def test_bad_input_has_a_clear_answer(tmp_path: Path, cli: Cli) -> None:
    folder = write_folder(tmp_path / "job", machines=1, stages=1, steps=1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli("page", folder, "--port", port) == 2
        assert f"cannot listen on port {port}: Address already in use (choose another" in cli.err
    assert cli("page", folder, "--port", 65536) == 2 and "ports are 0 to 65535" in cli.err
    assert cli("page", tmp_path) == 2 and f"{tmp_path} is not the log folder of a job" in cli.err


def test_without_aiohttp_the_advice_is_to_install_it(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    assert cli("page", tmp_path) == 2 and "pip install 'varuna-torch[page]'" in cli.err


def test_a_server_whose_manager_has_ended_needs_no_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SEE-2: it sends the last update, and a closed pipe stays readable meanwhile."""
    ends: list[asyncio.Event] = []

    class CountedEvent(asyncio.Event):
        def set(self) -> None:
            ends.append(self)
            super().set()

    monkeypatch.setattr(asyncio, "Event", CountedEvent)
    reader, writer = os.pipe()
    monkeypatch.setattr(asyncio.SelectorEventLoop, "add_signal_handler", lambda *arguments: None)
    serve = partial(serve_page, announce=lambda url, file: os.close(writer), parent=reader)
    thread = threading.Thread(target=serve, args=(tmp_path, open_listener(0)), kwargs={"home": tmp_path})
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    os.close(reader)
    assert 1 <= len(ends) < 10
