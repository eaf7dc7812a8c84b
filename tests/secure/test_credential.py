"""Credentials: only a holder of the private key gets through the handshake."""

import socket
import ssl
import threading

import pytest

from varuna.secure.credential import JobCredential, make_credential


def handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[Exception | None, Exception | None]:
    """Connect a client with a server; return the error of each side."""
    left, right = socket.socketpair()
    errors: dict[str, Exception] = {}

    def serve() -> None:
        try:
            with server.wrap_socket(left, server_side=True) as accepted:
                accepted.sendall(b"ok")
        except OSError as error:
            errors["server"] = error
            left.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(right) as connected:
            assert connected.recv(2) == b"ok"
    except OSError as error:
        errors["client"] = error
    thread.join()
    return errors.get("server"), errors.get("client")


def test_members_of_a_job_connect() -> None:
    """SEC-2"""
    credential = make_credential("a-job")
    assert handshake(credential.server_context(), credential.client_context()) == (None, None)


def test_another_jobs_member_is_refused_by_both_sides() -> None:
    """SEC-2"""
    ours, other = make_credential("a-job"), make_credential("a-job")
    server, client = handshake(ours.server_context(), other.client_context())
    assert isinstance(client, ssl.SSLCertVerificationError) and server is not None


def test_a_caller_without_a_certificate_is_refused() -> None:
    """SEC-2: a client that trusts any server still has to prove that it has the key."""
    credential = make_credential("a-job")
    careless = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    careless.check_hostname = False
    careless.verify_mode = ssl.CERT_NONE
    server, _ = handshake(credential.server_context(), careless)
    assert isinstance(server, ssl.SSLError)


def test_a_credential_does_not_show_its_key() -> None:
    """SEC-3"""
    credential = make_credential("a-job")
    assert "PRIVATE" not in repr(credential) and "PRIVATE" not in f"{credential}"
    assert credential.fingerprint[:16] in repr(credential)


def test_derived_secrets_differ_by_purpose_and_job() -> None:
    one, other = make_credential("a-job"), make_credential("a-job")
    assert one.derive("links") == JobCredential(one.certificate, one.key).derive("links")
    assert len({one.derive("links"), one.derive("groups"), other.derive("links")}) == 3


@pytest.mark.parametrize("job", ["", "x" * 500, "a/b c"])
def test_any_job_name_will_do(job: str) -> None:
    assert make_credential(job).fingerprint
