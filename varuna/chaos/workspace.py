"""The folder of a chaos run, and the environment of its processes: nothing is written outside of it."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from varuna.chaos.hosts.lab import ROOT
from varuna.environment import PREFIX, VarunaEnvironment

CHECKPOINT = "varuna_ckpt_*"


class Workspace:
    """Folders of the disturbed and the undisturbed run. Both see the files of the code's folder."""

    def __init__(self, code_dir: Path, base: Mapping[str, str]) -> None:
        """`base`: the environment of this process."""
        self.folder = Path(tempfile.mkdtemp(prefix="varuna-chaos-"))
        self._base = base
        self.left_out: list[str] = []  # entries of the code's folder that hold checkpoints
        for name in ("job", "plain", "home", "tmp", "plain-tmp", "logs", "losses", "plain-losses"):
            (self.folder / name).mkdir()
        for entry in sorted(code_dir.iterdir()):
            if entry.is_dir() and any(entry.glob(CHECKPOINT)):
                self.left_out.append(entry.name)
                continue
            for run in ("job", "plain"):
                (self.folder / run / entry.name).symlink_to(entry.resolve())

    @property
    def machine_list(self) -> Path:
        return self.folder / "machines"

    def environment(self, run: str) -> dict[str, str]:
        """Return the environment of a run, "job" or "plain": that of this process without VARUNA_*."""
        kept = {name: value for name, value in self._base.items() if not name.startswith(PREFIX)}
        path = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH", "")]))
        return {"OMP_NUM_THREADS": "1", **kept, "PYTHONPATH": path, **self.variables(run)}

    def variables(self, run: str) -> dict[str, str]:
        """Return the variables that are the workspace's own."""
        extra = "" if run == "job" else "plain-"
        ours = VarunaEnvironment(
            home=str(self.folder / "home"),
            cache=str(self.folder / "cache"),
            losses=str(self.folder / f"{extra}losses"),
        )
        temporary = str(self.folder / f"{extra}tmp")
        return {**ours.write(), "TMPDIR": temporary, "PYTHONDONTWRITEBYTECODE": "1"}

    def keep(self, out: Path) -> None:
        """Copy logs, ledger and losses to a folder."""
        out.mkdir(parents=True, exist_ok=True)
        for name in ("logs", "losses", "plain-losses", "played.csv"):
            source = self.folder / name
            if source.is_dir():
                shutil.copytree(source, out / name, dirs_exist_ok=True)
            elif source.exists():
                shutil.copy2(source, out / name)

    def remove(self) -> None:
        with suppress(OSError):
            shutil.rmtree(self.folder)
