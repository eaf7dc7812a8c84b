"""Makes the screenshots of the documentation from a real job: `python docs/_site/screenshots.py`.

It profiles a small GPT, trains it on loopback machines that join, fail and leave, and writes, while the job
runs, docs/images/page-*.png by Chromium and docs/images/terminal.svg. The layers sleep for the time that a
device would compute, so six machines fit on one computer, and the prediction holds.
"""

import fcntl
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby, takewhile
from pathlib import Path

import pyte
from playwright.sync_api import Browser, Page, sync_playwright
from rich.console import CONSOLE_SVG_FORMAT, Console
from rich.style import Style
from rich.text import Text

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
COLUMNS, LINES = 104, 24
STEPS = 2000
WIDE, PHONE = (1280, 1138), (390, 844)
UNDISTURBED = """() => {
    const titles = [...document.querySelectorAll("#timeline h3 small")];
    const ends = titles.map((one) => one.textContent.trim().split(" ")); // such as "205 ms"
    return ends.length === 2 && ends[0][1] === ends[1][1] && Number(ends[0][0]) < 1.1 * Number(ends[1][0]);
}"""
"""The last step did not wait for the browser, which shares the cores with the workers."""

SCRIPT = f"""
import time
import torch
import torch.nn.functional as F
from torch import nn
import varuna
from varuna import CutPoint, SampleOrder

SECONDS = 0.002  # of a forward of one layer and one sample


class OnDevice(torch.autograd.Function):
    '''Takes as long as a layer on a device.'''

    @staticmethod
    def forward(ctx, x):
        time.sleep(SECONDS * len(x))
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(2 * SECONDS * len(grad))
        return grad.clone()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(32), nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x):
        return OnDevice.apply(x + self.mlp(self.norm(x).cummax(1).values))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 32)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.cuts = nn.ModuleList(CutPoint() for _ in range(3))
        self.head = nn.Linear(32, 32)

    def forward(self, tokens):
        x = self.embed(tokens[:, :-1])
        for number, layer in enumerate(self.layers):
            x = layer(x)
            x = self.cuts[number](x) if number < 3 else x
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def sequences(count):
    start, stride = torch.randint(32, (count, 1)), torch.randint(1, 4, (count, 1))
    noise = torch.randint(32, (count, 17)) * (torch.rand(count, 17) < 0.05)
    return (start + stride * torch.arange(17) + noise) % 32


def make_optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def make():
    return GPT(), lambda size: {{"tokens": sequences(size)}}, make_optimizer


if __name__ == "__main__":
    torch.manual_seed(1)
    data = sequences(4096)
    net = GPT()
    optimizer = make_optimizer(net.parameters())
    model = varuna.wrap(net, optimizer, batch_size=32, sample={{"tokens": data[:2]}}, device="cpu", seed=1)
    model.resume("store")
    order = SampleOrder(len(data), batch_size=32, seed=1)
    varuna.log({{}}, num_steps={STEPS})
    while model.iteration < {STEPS}:
        loss, _ = model.step(lambda samples: {{"tokens": data[samples]}}, order=order)
        optimizer.step()
        model.zero_grad()
        varuna.log({{"learning_rate": 1e-3}})
        if model.iteration % 10 == 0 and model.rank == 0:
            print(f"step {{model.iteration}}: loss {{loss:.4f}}", flush=True)
"""


class ScreenshotJob:
    """`varuna run` in a terminal of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("VARUNA_")},
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": str(ROOT),
            "TERM": "xterm-256color",
            "VARUNA_HOME": str(folder / "home"),
        }
        (folder / "train_gpt.py").write_text(SCRIPT)
        self.screen = pyte.Screen(COLUMNS, LINES)
        self._lock = threading.Lock()

    def profile(self) -> None:
        """Measure the model. The machines are this one, so links between them are like those within it."""
        command = ["profile", "train_gpt.py:make", "--sizes", "1,2,4", "--device", "cpu", "--out", "profiles"]
        subprocess.run(
            [sys.executable, "-m", "varuna", *command], cwd=self.folder, env=self.environment, check=True
        )
        file = self.folder / "profiles" / "profile.json"
        found = json.loads(file.read_text())
        found["between"] = found["within"]
        found["reductions"] += [{**one, "between_machines": True} for one in found["reductions"]]
        file.write_text(json.dumps(found))

    @contextmanager
    def running(self) -> Iterator[None]:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        self.process = subprocess.Popen(
            [
                *[
                    sys.executable,
                    "-m",
                    "varuna",
                    "run",
                    "--machine-list",
                    "machines",
                    "--gpus-per-node",
                    "1",
                ],
                *["--batch-size", "32", "--nstages", "2", "--chunk-size", "4", "--save-every", "30"],
                *["--profile-folder", "profiles", "--page-port", "0", "train_gpt.py"],
            ],
            cwd=self.folder,
            env=self.environment,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        threading.Thread(target=self._read, args=(ours,), daemon=True).start()
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGINT)
            self.process.wait()

    def _read(self, terminal: int) -> None:
        stream = pyte.ByteStream(self.screen)
        try:
            while data := os.read(terminal, 65536):
                with self._lock:
                    stream.feed(data)
        except OSError:  # the terminal is closed
            pass

    def page_address(self) -> str:
        """Wait for the page, and return its address."""
        while not (found := list(self.folder.glob("varuna_logs/*/page.url"))):
            assert self.process.poll() is None, "\n".join(self.screen.display)
            time.sleep(0.2)
        return found[0].read_text().strip()

    def list_machines(self, *numbers: int) -> None:
        (self.folder / "machines").write_text("".join(f"127.0.0.{number}\n" for number in numbers))

    def kill_worker(self, machine: int) -> None:
        """Kill the worker of a machine."""
        status = subprocess.run(
            [sys.executable, "-m", "varuna", "status", "--json"],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        (found,) = (one for one in json.loads(status)["machines"] if one["machine"] == f"127.0.0.{machine}")
        os.kill(found["workers"][0]["pid"], signal.SIGKILL)

    def shows_short_lines(self) -> bool:
        """Return whether all output above the status is of the script: reports are wider than the picture."""
        above = takewhile(lambda line: not line.startswith("──"), self.screen.display)
        return all(re.match(r"\[rank 0\] step \d+: loss ", line) for line in above)

    def terminal_picture(self) -> str:
        """Return the terminal as an SVG that loads no fonts."""
        with self._lock:
            rows = [[self.screen.buffer[y][x] for x in range(COLUMNS)] for y in range(LINES)]
        lines = [
            Text.assemble(
                *(("".join(one.data for one in run), style) for style, run in groupby(row, style_of))
            )
            for row in rows
        ]
        with open(os.devnull, "w") as nowhere:
            console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True)
            console.print(Text("\n").join(lines), highlight=False)
        template = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
        return console.export_svg(title="varuna run", code_format=template)


def style_of(one: pyte.screens.Char) -> Style:
    colour = {"default": None, "brown": "yellow"}.get(one.fg, one.fg)
    is_hex = colour is not None and re.fullmatch(r"[0-9a-f]{6}", colour)
    return Style(color=f"#{colour}" if is_hex else colour, bold=one.bold, reverse=one.reverse)


def wait_for(tab: Page, condition: str, argument: object = None) -> None:
    tab.wait_for_function(condition, arg=argument, timeout=300_000)


def wait_for_steps(tab: Page, count: int) -> None:
    step = "Number(document.querySelector('#facts .value').textContent.replace(/,/g, ''))"
    wait_for(tab, f"(least) => {step} >= least", tab.evaluate(step) + count)


def wait_for_machines(tab: Page, count: int) -> None:
    wait_for(tab, "(count) => document.querySelectorAll('#layout button.good').length === count", count)


def change_machines(job: ScreenshotJob, tab: Page) -> None:
    """Two machines; two more join; a worker is killed; two more join. Six are at work at the end."""
    wait_for_machines(tab, 2)
    wait_for_steps(tab, 60)
    job.list_machines(1, 2, 3, 4)
    wait_for_machines(tab, 4)
    wait_for_steps(tab, 60)
    job.kill_worker(4)
    wait_for_steps(tab, 40)
    wait_for_machines(tab, 4)
    wait_for_steps(tab, 40)
    job.list_machines(1, 2, 3, 4, 5, 6)
    wait_for_machines(tab, 6)
    wait_for_steps(tab, 100)


def open_tab(browser: Browser, url: str, size: tuple[int, int], colours: str) -> Page:
    scale = 2 if size == PHONE else 1
    viewport = {"width": size[0], "height": size[1]}
    tab = browser.new_context(viewport=viewport, color_scheme=colours, device_scale_factor=scale).new_page()  # type: ignore[arg-type]
    tab.goto(url)
    wait_for(tab, "() => document.querySelector('#chart .loss .line')")
    wait_for(tab, "() => document.querySelector('#log').textContent.includes('loss')")
    wait_for(tab, UNDISTURBED)
    return tab


def show_loss(tab: Page) -> None:
    """Put the cursor on the mark of the killed worker."""
    mark = tab.locator("#chart circle.event.bad").first
    tab.locator("#chart svg").hover(position={"x": float(mark.get_attribute("cx") or 0), "y": 200})


def take_pictures(browser: Browser, url: str) -> None:
    tab = open_tab(browser, url, WIDE, "light")
    show_loss(tab)
    tab.screenshot(path=IMAGES / "page-light.png")
    place = "(one) => one.getBoundingClientRect()"
    top = tab.locator("section", has=tab.locator("#machines-title")).evaluate(place)["top"]
    bottom = tab.locator("footer").evaluate(place)["top"]
    clip = {"x": 0, "y": top - 14, "width": WIDE[0], "height": bottom - top + 20}
    tab.screenshot(path=IMAGES / "page-lower.png", full_page=True, clip=clip)  # type: ignore[arg-type]
    tab.close()
    for name, size, colours in (("dark", WIDE, "dark"), ("phone", PHONE, "light")):
        tab = open_tab(browser, url, size, colours)
        tab.screenshot(path=IMAGES / f"page-{name}.png")
        tab.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium") or "chromium", args=["--no-sandbox", "--disable-gpu"]
        )
        job = ScreenshotJob(Path(folder))
        job.profile()
        job.list_machines(1, 2)
        with job.running():
            url = job.page_address()
            tab = browser.new_page()
            tab.goto(url)
            change_machines(job, tab)
            tab.close()
            while not job.shows_short_lines():
                time.sleep(0.5)
            (IMAGES / "terminal.svg").write_text(job.terminal_picture())
            take_pictures(browser, url)
        browser.close()


if __name__ == "__main__":
    main()
