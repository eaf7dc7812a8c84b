"""Hosts on one machine that can be killed, cut off and slowed down.

Each host is a network namespace with its own address, its own processes, its own name, its own clocks
and its own sshd. A bridge connects them with this machine, on which the manager runs. The file system is
shared. It takes root and Debian's iproute2 and openssh-server.
"""

import contextlib
import os
import select
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from varuna.chaos.hosts.box import Box, missing_tools, tool

ROOT = Path(__file__).parents[3]
CLOCK = Path(__file__).parent / "clock"
OWNED = "varuna hosts of process "  # the alias of a lab's bridge names its owner
MOST_LABS = 250
TOOLS = ("ip", "tc", "unshare", "nsenter", "ssh", "ssh-keygen", "sshd")


class Host:
    """One host of a `Lab`."""

    def __init__(self, lab: "Lab", number: int) -> None:
        self.name = f"n{number}"
        self.address = f"{lab.network}.{10 + number}"
        self._lab = lab
        self._namespace = f"{lab.name}-{self.name}"
        self._link = f"{lab.name}-{number}"
        self._key = lab.folder / f"{self.name}.key"
        self._clock = lab.folder / f"{self.name}.clock"
        self._boots = 0
        self._disks: dict[Path, int] = {}
        self._box: Box | None = None

    def boot(self) -> None:
        """Boot the host; return once sshd listens."""
        assert self._box is None, f"{self.name} is up already"
        variables = {
            **self._lab.environment,
            "PYTHONPATH": f"{CLOCK}:{ROOT}",
            "LAB_CLOCK": str(self._clock),
            "OMP_NUM_THREADS": "1",
            # A shell of the second level leaves the user's .bashrc alone, whatever that does, and waits for.
            "SHLVL": "1",
        }
        options = {
            "HostKey": self._key,
            "AuthorizedKeysFile": self._lab.folder / "authorized_keys",
            "PidFile": "none",
            "PermitRootLogin": "yes",
            "StrictModes": "no",
            "UsePAM": "no",
            "PasswordAuthentication": "no",
            "MaxStartups": "100",
            "SetEnv": " ".join(f'"{name}={value}"' for name, value in variables.items()),
        }
        sshd = [tool("sshd"), "-D", "-e", "-f", "/dev/null"]
        sshd += [f"-o{name}={value}" for name, value in options.items()]
        named = ["sh", "-c", 'hostname "$1" && shift && exec "$@"', "sh", self.name]
        self._boots += 1
        self._box = Box(
            [*named, *sshd],
            within=[tool("ip"), "netns", "exec", self._namespace],
            uptime_seconds=100_000 * int(self.name[1:]) + 1000 * self._boots,
        )
        output = self._box.outer.stdout
        assert output is not None
        said = []
        for line in output:
            said.append(line.decode())
            if b"Server listening on 0.0.0.0" in line:
                output.close()  # sshd does not mind that nobody reads on
                for folder, num_bytes in self._disks.items():
                    self.mount(folder, num_bytes)
                return
        self.kill()
        raise RuntimeError(f"host {self.name} did not come up: {''.join(said)}")

    def kill(self) -> None:
        """Kill all processes of the host at once; connections to it are reset."""
        if self._box is not None:
            self._box.kill()
            self._box = None

    def cut(self) -> None:
        """Drop all packets from and to the host, silently."""
        ip("link", "set", self._link, "down")

    def reconnect(self) -> None:
        ip("link", "set", self._link, "up")

    def slow(self, rate: str) -> None:
        """Limit the rate in both directions, in the units of tc: "50mbit"."""
        limit = ["root", "tbf", "rate", rate, "burst", "64kb", "latency", "50ms"]
        command([tool("tc"), "qdisc", "replace", "dev", self._link, *limit])
        command([tool("tc"), "-n", self._namespace, "qdisc", "replace", "dev", "eth0", *limit])

    def unslow(self) -> None:
        command([tool("tc"), "qdisc", "delete", "dev", self._link, "root"])
        command([tool("tc"), "-n", self._namespace, "qdisc", "delete", "dev", "eth0", "root"])

    def set_clock(self, seconds: float) -> None:
        """Set the wall clock off by `seconds`."""
        self._clock.write_text(str(seconds))

    def mount(self, folder: Path, num_bytes: int) -> None:
        """Mount a small disk on a folder that is otherwise shared."""
        self._inside("mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "lab", str(folder))

    def keep_mounted(self, folder: Path, num_bytes: int) -> None:
        """Mount a small disk now and, empty, after each boot."""
        self._disks[folder] = num_bytes
        self.mount(folder, num_bytes)

    def unmount(self, folder: Path) -> None:
        self._inside("umount", "--lazy", str(folder))

    def path(self, folder: Path) -> Path:
        """Return the path of a folder as the host sees it."""
        assert self._box is not None, f"{self.name} is down"
        return Path(f"/proc/{self._box.first}/root{folder}")

    def _inside(self, *argv: str) -> None:
        assert self._box is not None, f"{self.name} is down"
        command([tool("nsenter"), "-t", str(self._box.first), "-m", "-p", *argv])

    def outer_pid(self, pid: int) -> int:
        """Return the process id outside of the host's namespace."""
        for outer in processes_of(self._namespace):
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{outer}/status").read_text()
                if status.split("NSpid:")[1].splitlines()[0].split()[1:] == [str(pid)]:
                    return outer
        raise ProcessLookupError(f"no process {pid} on {self.name}")

    def command(self, argv: Sequence[str], environment: Mapping[str, str] | None = None) -> list[str]:
        """Return the command that runs `argv` on this host."""
        there = ["env", *(f"{name}={value}" for name, value in (environment or {}).items()), *argv]
        return [*self._lab.ssh, "-oBatchMode=yes", self.name, shlex.join(there)]

    def run(self, argv: Sequence[str]) -> str:
        return command(self.command(argv))

    def processes(self) -> dict[int, str]:
        """Return the processes of the host without its sshd: outer ids and command lines."""
        found = {}
        for pid in processes_of(self._namespace):
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except OSError:
                continue  # gone meanwhile
            if line and not line.startswith(("sshd: ", tool("unshare"), tool("sshd"))):
                found[pid] = line
        return found

    def _connect(self) -> None:
        lab = self._lab
        lab.make_key(self._key)
        public = self._key.with_suffix(".key.pub").read_text().split()[:2]
        with lab.known_hosts.open("a") as known:
            print(f"{self.address},{self.name}", *public, file=known)
        with lab.ssh_config.open("a") as config:
            print(f"Host {self.name}\n  HostName {self.address}\n  HostKeyAlias {self.name}", file=config)
        ip("netns", "add", self._namespace)
        # Mounted over /etc/hosts by `ip netns exec`, so it has to be there before.
        settings = Path("/etc/netns") / self._namespace
        shutil.rmtree(settings, ignore_errors=True)  # of a killed lab whose namespaces somebody has deleted
        settings.mkdir(parents=True)
        (settings / "hosts").symlink_to(lab.folder / "hosts")
        ip("link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", self._namespace)
        ip("link", "set", self._link, "master", lab.name, "up")
        ip("-n", self._namespace, "addr", "add", f"{self.address}/24", "dev", "eth0")
        ip("-n", self._namespace, "link", "set", "eth0", "up")
        ip("-n", self._namespace, "link", "set", "lo", "up")


class Lab:
    """`with Lab(3) as lab:` boots the hosts n1 to n3 and removes everything at the end."""

    def __init__(self, num_hosts: int, environment: Mapping[str, str] | None = None) -> None:
        """`environment` is for all processes that ssh starts."""
        require_tools()
        remove_orphans()
        self.environment = dict(environment or {})
        self.name, self.network = claim_network()
        self.address = f"{self.network}.1"  # of the manager's side
        self.folder = folder_of(self.name)
        self.ssh_config = self.folder / "ssh_config"
        self.known_hosts = self.folder / "known_hosts"
        self.ssh = ("ssh", "-F", str(self.ssh_config))
        self.hosts: list[Host] = []
        try:
            self._prepare()
            for _ in range(num_hosts):
                self.add()
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        self.folder.mkdir(mode=0o700)
        Path("/run/sshd").mkdir(exist_ok=True)
        ip("addr", "add", f"{self.address}/24", "dev", self.name)
        ip("link", "set", self.name, "up")
        self.make_key(self.folder / "id")
        (self.folder / "id.pub").rename(self.folder / "authorized_keys")
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{self.address} manager\n")
        self.known_hosts.touch()
        self.ssh_config.write_text(
            f"IdentityFile {self.folder / 'id'}\nIdentitiesOnly yes\nUser root\n"
            f"UserKnownHostsFile {self.known_hosts}\nGlobalKnownHostsFile /dev/null\n"
        )

    def add(self) -> Host:
        """Boot one more host."""
        host = Host(self, len(self.hosts) + 1)
        self.hosts.append(host)
        with (self.folder / "hosts").open("a") as hosts:
            print(host.address, host.name, file=hosts)
        host._connect()
        host.boot()
        return host

    def make_key(self, path: Path) -> None:
        command([tool("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", str(path)])

    def close(self) -> None:
        for host in self.hosts:
            host.kill()
        remove(self.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def require_tools() -> None:
    """Fail with the reason if hosts cannot be created."""
    if os.geteuid() != 0:
        raise RuntimeError("hosts are network namespaces, which only root may create (run this as root)")
    if missing := missing_tools(TOOLS):
        raise RuntimeError(
            f"hosts need {', '.join(missing)}, which this machine does not have "
            "(apt-get install iproute2 openssh-server openssh-client util-linux)"
        )


def claim_network() -> tuple[str, str]:
    """Return a name and a network that no other lab uses: the kernel accepts a link's name only once."""
    said = ""
    for number in range(MOST_LABS):
        name = f"vlab{number}"
        try:
            ip("link", "add", name, "type", "bridge")
        except RuntimeError as error:
            said = str(error)
            if "File exists" in said:
                continue
            break
        ip("link", "set", name, "alias", f"{OWNED}{os.getpid()}")
        return name, f"10.77.{number}"
    raise RuntimeError(f"no network could be created for hosts; the last error: {said}")


def remove_orphans() -> None:
    """Remove the hosts of processes that were killed."""
    for alias in Path("/sys/class/net").glob("vlab*/ifalias"):
        try:
            owner = alias.read_text().removeprefix(OWNED).strip()
        except OSError:
            continue  # removed by its owner meanwhile
        if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
            with contextlib.suppress(RuntimeError):  # another run does the same at this moment
                remove(alias.parent.name)


def remove(lab: str) -> None:
    for line in ip("netns", "list").splitlines():
        namespace = line.split()[0]
        if namespace.startswith(f"{lab}-"):
            for pid in processes_of(namespace):
                kill_and_wait(pid)
            ip("netns", "delete", namespace)
            shutil.rmtree(Path("/etc/netns") / namespace, ignore_errors=True)
            subprocess.run([tool("ip"), "link", "delete", namespace.replace("-n", "-")], capture_output=True)
    shutil.rmtree(folder_of(lab), ignore_errors=True)
    ip("link", "delete", lab)


def folder_of(lab: str) -> Path:
    return Path(tempfile.gettempdir()) / f"varuna-{lab}"


def processes_of(namespace: str) -> list[int]:
    return [int(pid) for pid in ip("netns", "pids", namespace).split()]


def kill_and_wait(pid: int) -> None:
    try:
        handle = os.pidfd_open(pid)
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    except ProcessLookupError:
        return
    gone = select.poll()
    gone.register(handle, select.POLLIN)
    gone.poll()
    os.close(handle)


def ip(*arguments: str) -> str:
    return command([tool("ip"), *arguments])


def command(argv: Sequence[str]) -> str:
    run = subprocess.run(argv, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{' '.join(argv)} failed: {run.stderr.strip() or run.stdout.strip()}")
    return run.stdout
