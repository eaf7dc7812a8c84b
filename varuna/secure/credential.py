"""The credential of a job: a certificate and its private key, made when the job starts.

Every process of a job has both. A connection is TLS, and each end must prove that it has the private key;
there is no other certificate that it accepts. So a process that has the key is a member of the job; no other
can send a message. The credential travels on stdin of an agent, on pipes to workers, and in a file that only
the user can read. It never appears in an argument list, the environment or a log.
"""

import hashlib
import hmac
import os
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import msgspec

VALID_DAYS = 3650


class JobCredential(msgspec.Struct, frozen=True):
    """A self-signed certificate and its private key, as PEM."""

    certificate: str
    key: str

    def __repr__(self) -> str:
        return f"JobCredential({self.fingerprint[:16]}...)"  # without the key: values are printed in errors

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the certificate. May be shown."""
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(self.certificate)).hexdigest()

    def derive(self, purpose: str) -> bytes:
        """Return a secret of 32 bytes for one purpose. It does not reveal the key or other secrets."""
        return hmac.digest(self.key.encode(), b"varuna " + purpose.encode(), "sha256")

    def server_context(self) -> ssl.SSLContext:
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def client_context(self) -> ssl.SSLContext:
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # addresses change; the certificate itself is what is trusted
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.certificate)
        with _as_file(self.certificate + self.key) as path:
            context.load_cert_chain(path)
        return context


def make_credential(job: str) -> JobCredential:
    """Make the credential of a new job. Takes about a millisecond."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"varuna {job}"[:64])])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=2))  # clocks of other machines may be behind
        .not_valid_after(now + timedelta(days=VALID_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    return JobCredential(
        certificate.public_bytes(pem).decode(),
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()).decode(),
    )


@contextmanager
def _as_file(text: str) -> Iterator[str]:
    """Yield the path of a file in memory, because `load_cert_chain` reads only files."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("varuna-credential", os.MFD_CLOEXEC)
        try:
            os.write(fd, text.encode())
            yield f"/proc/self/fd/{fd}"
        finally:
            os.close(fd)
    else:
        with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:  # readable only by this user
            file.write(text)
            file.flush()
            yield file.name


_own: JobCredential | None = None


def adopt_credential(credential: JobCredential) -> None:
    """Make this process a member of the job. Its starter calls it before the script runs."""
    global _own
    _own = credential


def own_credential() -> JobCredential | None:
    """Return the credential of this process's job; None if another launcher, such as torchrun, started it."""
    return _own
