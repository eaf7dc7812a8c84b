"""Draws the pictures of the documentation: `python docs/_site/pictures.py` writes docs/images/*.svg."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from varuna.schedule import build

IMAGES = Path(__file__).parents[1] / "images"
INK, GREY, PAPER = "#1f2937", "#6b7280", "#ffffff"
FILLS = {"F": "#93c5fd", "B": "#fca5a5", "reduce": "#fcd34d", "update": "#86efac"}
LAYERS = (  # from the top; tests compare them with those that files must keep
    ("commands", ("cli",), "argv, terminal, exit codes", "#ddd6fe"),
    (
        "checks",
        ("verification", "chaos", "lightning", "demo"),
        "layouts against one process; faults; Lightning",
        "#e9d5ff",
    ),
    ("interfaces", ("pyrannc", "hf"), "RaNNCModule; Hugging Face", "#c7d2fe"),
    (
        "scripts",
        ("train", "profile", "simulate", "page"),
        "Varuna, Profiler; simulated jobs; the live page",
        "#bfdbfe",
    ),
    (
        "parts",
        ("capture", "measure", "plan", "execute", "checkpoint", "morph"),
        "none imports another",
        "#bbf7d0",
    ),
    ("values", ("schedule", "observe"), "pure functions", "#fde68a"),
    (
        "base",
        ("types", "errors", "units", "codec", "files", "environment", "secure"),
        "import nothing above",
        "#e5e7eb",
    ),
)


def svg(width: int, height: int, shapes: Sequence[str], title: str) -> str:
    """Return a picture on white paper, readable on light and dark pages."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" font-family="DejaVu Sans, Verdana, sans-serif" role="img">',
            f"<title>{title}</title>",
            box(0, 0, width, height, PAPER, radius=8),
            *shapes,
            "</svg>\n",
        ]
    )


def box(x: float, y: float, width: float, height: float, fill: str, *, radius: int = 3) -> str:
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {place} rx="{radius}" fill="{fill}"/>'


def text(x: float, y: float, words: str, *, size: int = 13, anchor: str = "start", fill: str = INK) -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{fill}">{words}</text>'


def line(x1: float, y1: float, x2: float, y2: float, *, color: str = GREY, dashes: str = "") -> str:
    style = f'stroke="{color}" stroke-width="1.5"' + (f' stroke-dasharray="{dashes}"' if dashes else "")
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" {style}/>'


def draw_layers() -> str:
    shapes = []
    for number, (name, packages, meaning, fill) in enumerate(LAYERS):
        top = 20 + 52 * number
        shapes += [
            text(20, top + 26, name, fill=GREY),
            box(110, top, 630, 42, fill, radius=6),
            text(125, top + 18, " · ".join(packages), size=14),
            text(125, top + 35, meaning, size=11, fill="#4b5563"),
        ]
    bottom = 20 + 52 * len(LAYERS)
    shapes.append(text(110, bottom + 14, "A file imports only from lower layers.", size=12, fill=GREY))
    return svg(760, bottom + 28, shapes, "Layers of the library")


def timeline(stages: int, microbatches: int) -> Iterator[tuple[int, str, int, float, float]]:
    """Yield (stage, F or B, micro-batch, start, end) of a step in the order 1f1b; B takes two units."""
    rows = [list(map(str, row)) for row in build("1f1b", stages=stages, microbatches=microbatches).rows]
    ends: dict[tuple[int, str, int], float] = {}
    free = [0.0] * stages
    while any(rows):
        for stage, row in enumerate(rows):
            if not row:
                continue
            what, number = row[0][1], int(row[0][2:])
            last = stage == stages - 1
            needs = (
                (stage - 1, "F", number)
                if what == "F"
                else (stage, "F", number)
                if last
                else (stage + 1, "B", number)
            )
            if needs[0] >= 0 and needs not in ends:
                continue
            start = max(free[stage], ends.get(needs, 0.0))
            free[stage] = ends[stage, what, number] = start + (1 if what == "F" else 2)
            row.pop(0)
            yield stage, what, number, start, free[stage]


def draw_step(stages: int = 3, microbatches: int = 4) -> str:
    unit, left, top, height = 34, 80, 50, 40
    found = list(timeline(stages, microbatches))
    shapes = [text(left, 24, "one step of one replica, time from left to right", size=12, fill=GREY)]
    for stage in range(stages):
        y = top + stage * (height + 14)
        shapes.append(text(12, y + 25, f"stage {stage}"))
        shapes.append(box(left, y, unit * 20, height, "#f3f4f6"))
        end = 0.0
        for _, what, number, start, stop in (one for one in found if one[0] == stage):
            shapes.append(box(left + unit * start + 1, y, unit * (stop - start) - 2, height, FILLS[what]))
            middle = left + unit * (start + stop) / 2
            shapes.append(text(middle, y + 25, f"{what}{number}", anchor="middle"))
            end = stop
        for name in ("reduce", "update"):
            shapes.append(box(left + unit * end + 1, y, unit - 2, height, FILLS[name]))
            end += 1
    y = top + stages * (height + 14) + 16
    legend = [
        ("F", "forward"),
        ("B", "backward"),
        ("reduce", "sum of gradients over replicas"),
        ("update", "optimizer"),
    ]
    x = float(left)
    for key, words in legend:
        shapes += [box(x, y - 12, 16, 16, FILLS[key]), text(x + 22, y + 1, words, size=12)]
        x += 60 + 7.2 * len(words)
    return svg(left + unit * 20 + 20, int(y) + 22, shapes, "Timeline of one step")


def draw_morph() -> str:
    left, unit, top, height = 110, 24, 60, 34
    # machine: (first step, stop, share of the 12 samples) in each period
    machines = (
        ("machine a", ((0, 8, 6), (8, 16, 4), (16, 24, 6))),
        ("machine b", ((0, 8, 6), (8, 16, 4))),
        ("machine c", ((8, 16, 4), (16, 24, 6))),
    )
    shapes = [text(12, 18, "12 samples in each step", size=12, fill=GREY)]
    for number, (name, periods) in enumerate(machines):
        y = top + number * (height + 12)
        shapes.append(text(12, y + 22, name))
        for first, stop, share in periods:
            shapes.append(box(left + unit * first + 1, y, unit * (stop - first) - 2, height, "#93c5fd"))
            middle = left + unit * (first + stop) / 2
            shapes.append(text(middle, y + 22, f"{share} samples", anchor="middle"))
    bottom = top + 3 * (height + 12)
    for step, words in ((8, "c joins"), (16, "b is lost")):
        x = left + unit * step
        shapes += [line(x, 42, x, bottom + 78, dashes="4 4"), text(x, 38, words, size=12, anchor="middle")]
    shapes.append(
        text(
            left + unit * 4.5,
            top + 2 * (height + 12) + 22,
            "builds the model",
            size=12,
            anchor="middle",
            fill=GREY,
        )
    )
    shapes.append(text(12, bottom + 44, "loss"))
    curve = [(left + unit * step, bottom + 10 + 60 * (1 - 0.88**step)) for step in range(25)]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in curve)
    shapes.append(f'<polyline points="{points}" fill="none" stroke="#f87171" stroke-width="2"/>')
    shapes += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{INK}"/>' for x, y in curve]
    words = "dots: this job, one per step; line: one plain process"
    shapes.append(text(left, bottom + 100, words, size=12, fill=GREY))
    return svg(left + unit * 24 + 20, bottom + 114, shapes, "A morph: machines change, the losses do not")


PICTURES = {"layers.svg": draw_layers, "step.svg": draw_step, "morph.svg": draw_morph}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (IMAGES / name).write_text(draw())
