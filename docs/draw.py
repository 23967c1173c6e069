"""Draw the pictures of the documentation: plain SVG text, computed from the code they show.

    python docs/draw.py        # rewrites docs/pictures/*.svg

A test draws them again and compares, so a picture cannot fall behind the code.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from oarlock.batches import split

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "oarlock"
PICTURES = Path(__file__).resolve().parent / "pictures"

INK, SOFT, LINE = "#1f2933", "#52606d", "#9aa5b1"
FILLS = ("#cfe3f7", "#fbdfc0", "#d2ecd0", "#e5d8f2")  # one a rank
EDGES = ("#3b7cb8", "#c77d2a", "#4b944b", "#8458b0")
PALE = "#f3f5f7"


class Svg:
    """An SVG file under construction: a few shapes, rounded to a tenth of a pixel."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
            f'viewBox="0 0 {width:g} {height:g}" font-family="system-ui, Helvetica, Arial, '
            f'sans-serif" font-size="13" role="img">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{SOFT}"/>'
            "</marker></defs>",
            f'<rect width="{width:g}" height="{height:g}" rx="8" fill="#ffffff"/>',
        ]

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        fill: str = PALE,
        edge: str = LINE,
        dashed: bool = False,
    ) -> None:
        """A rectangle with slightly round corners."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" rx="4" '
            f'fill="{fill}" stroke="{edge}"{dash}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        anchor: str = "start",
        size: float = 13,
        color: str = INK,
        bold: bool = False,
        mono: bool = False,
    ) -> None:
        """One line of text; ``y`` is its baseline."""
        style = ' font-weight="600"' if bold else ""
        style += ' font-family="ui-monospace, Menlo, Consolas, monospace"' if mono else ""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size:g}" '
            f'fill="{color}"{style}>{escape(text, quote=False)}</text>'
        )

    def line(self, points: Sequence[tuple[float, float]], arrow: bool = False) -> None:
        """Straight pieces from point to point."""
        path = " L".join(f"{x:.1f},{y:.1f}" for x, y in points)
        head = ' marker-end="url(#head)"' if arrow else ""
        self.parts.append(f'<path d="M{path}" fill="none" stroke="{SOFT}"{head}/>')

    def curve(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """An arrow downward that leaves and arrives vertically."""
        bend = (y2 - y1) * 0.5
        self.parts.append(
            f'<path d="M{x1:.1f},{y1:.1f} C{x1:.1f},{y1 + bend:.1f} {x2:.1f},{y2 - bend:.1f} '
            f'{x2:.1f},{y2:.1f}" fill="none" stroke="{LINE}" marker-end="url(#head)"/>'
        )

    def __str__(self) -> str:
        return "\n".join([*self.parts, "</svg>"]) + "\n"


# -- one global batch on several worlds -----------------------------------------------------------


def draw_batch() -> str:
    """Nine micro-batches, dealt by the very function that the Loader uses."""
    count, cell, left, top, row = 9, 58, 218, 74, 58
    worlds: list[tuple[str, list[float]]] = [
        ("1 rank", [1]),
        ("2 ranks", [1, 1]),
        ("3 ranks", [1, 1, 1]),
        ("4 ranks", [1, 1, 1, 1]),
        ("2 ranks, shares=[2, 1]", [2, 1]),
    ]
    svg = Svg(left + count * cell + 30, top + len(worlds) * row + 12, "One global batch")
    svg.text(24, 32, "One global batch of 9 micro-batches, on any world", size=16, bold=True)
    svg.text(24, 52, "The order never changes; a rank takes a contiguous range.", color=SOFT)
    for i, (name, shares) in enumerate(worlds):
        y = top + i * row
        svg.text(24, y + 19, name)
        for rank, part in enumerate(split(count, shares)):
            for index in part:
                x = left + index * cell
                svg.box(x, y, cell - 6, 28, FILLS[rank], EDGES[rank])
                svg.text(x + cell / 2 - 3, y + 19, str(index), anchor="middle")
            middle = left + (part.start + part.stop) / 2 * cell - 3
            svg.text(middle, y + 43, f"rank {rank}", anchor="middle", size=11, color=EDGES[rank])
    return str(svg)


# -- the time line of one step --------------------------------------------------------------------


def bucket_fractions() -> list[float]:
    """How a real model's gradients fall into buckets: each one's share, in sending order."""
    import torch
    from torch import nn

    from oarlock.engine.buckets import fill_buckets
    from oarlock.engine.exchange import FIRST_BUCKET_BYTES

    with torch.device("meta"):
        layers: list[nn.Module] = []
        for _ in range(10):
            layers += [nn.Linear(512, 2048, bias=False), nn.Linear(2048, 512, bias=False)]
        model = nn.Sequential(*layers)
    members = list(reversed(list(model.named_parameters())))
    buckets = fill_buckets(members, 25 << 20, FIRST_BUCKET_BYTES)
    total = sum(b.bytes for b in buckets)
    return [b.bytes / total for b in buckets]


def draw_step() -> str:
    """Two ranks with two micro-batches each; buckets leave during the last backward."""
    forward, backward, wire, update = 80.0, 180.0, 185.0, 54.0
    left, top, lane = 136.0, 92.0, 62.0
    fractions = bucket_fractions()
    ranges = split(4, [1, 1])
    svg = Svg(900, 400, "The time line of one step")
    svg.text(24, 32, "One step on two ranks", size=16, bold=True)
    svg.text(
        24,
        52,
        "Forward (F) and backward (B) of each micro-batch; buckets of gradients travel while the "
        "last backward still runs.",
        color=SOFT,
    )
    start_last = left + forward + backward + forward
    end = start_last + backward
    for rank, part in enumerate(ranges):
        y = top + rank * lane
        svg.text(24, y + 25, f"rank {rank}")
        x = left
        for index in part:
            for word, width in (("F", forward), ("B", backward)):
                svg.box(x, y, width - 3, 38, FILLS[rank], EDGES[rank])
                svg.text(x + width / 2 - 2, y + 24, f"{word} {index}", anchor="middle")
                x += width
    # Each bucket is full when backward has come so far, and the wire carries one after another.
    y = top + 2 * lane
    svg.text(24, y + 25, "exchange")
    full, free = start_last, 0.0
    for number, fraction in enumerate(fractions):
        full += fraction * backward
        begin = max(full, free)
        free = begin + fraction * wire
        svg.line([(full, top + lane + 38), (full, y)], arrow=begin == full)
        svg.box(begin, y, free - begin - 2, 38, "#e8e8e8", SOFT)
        if fraction * wire > 18:
            svg.text((begin + free) / 2 - 1, y + 24, str(number), anchor="middle")
    # What backward did not hide
    svg.line([(end, top - 8), (end, y + 58)])
    svg.line([(free, y + 38), (free, y + 58)])
    svg.text(end - 5, y + 68, "hidden behind backward", anchor="end", size=11, color=SOFT)
    svg.text(end + 4, y + 68, "wait_seconds", size=11, color=SOFT, mono=True)
    for rank in range(2):
        y_rank = top + rank * lane
        svg.box(free + 14, y_rank, update, 38, FILLS[rank], EDGES[rank])
        svg.text(free + 14 + update / 2, y_rank + 24, "update", anchor="middle", size=11)
        svg.line(
            [(free, y + 19), (free + 7, y + 19), (free + 7, y_rank + 19), (free + 14, y_rank + 19)]
        )
    y = top + 3 * lane + 40
    svg.text(24, y + 17, "small messages")
    for at, width, name in (
        (left, 226.0, "agreement: same step, batch, rows?"),
        (end, 222.0, "totals: Σ loss, Σ weight, used, stop"),
    ):
        svg.box(at, y, width, 27, "#ffffff", LINE, dashed=True)
        svg.text(at + 8, y + 18, name, size=11)
    svg.text(
        24,
        380,
        "The agreement is compared before the first bucket leaves; the totals travel together with "
        "the last buckets. Then: ÷ Σ weight, once.",
        size=12,
        color=SOFT,
    )
    return str(svg)


# -- where a gradient goes ------------------------------------------------------------------------

# (what happens, file, symbol); the symbols are looked up, so that a renamed one fails the drawing.
WAY = (
    ("your loss function gives a sum and its weight", "engine/step.py", "DataParallel._runner"),
    ("backward on the sum: autograd computes a gradient", "engine/step.py", "DataParallel.step"),
    ("a hook puts it into its place in a flat bucket", "engine/exchange.py", "Exchange._hook"),
    ("later micro-batches add to the same memory", "engine/buckets.py", "Slot"),
    (
        "last micro-batch: a full bucket leaves, in fixed order",
        "engine/exchange.py",
        "Exchange._send",
    ),
    ("the bucket now holds the sum over all ranks", "engine/exchange.py", "Exchange.finish"),
    (".grad points into the bucket, or is None if unused", "engine/exchange.py", "Exchange.attach"),
    ("one norm over everything; finite?", "engine/norm.py", "global_norm"),
    (
        "× clip ÷ total weight, once; then optimizer.step()",
        "engine/step.py",
        "DataParallel._update",
    ),
)
BESIDE = {
    3: (
        "before the last backward: same step on all ranks?",
        "engine/agreement.py",
        "Agreement.reach",
    ),
    4: ("Σ loss, Σ weight, used", "engine/totals.py", "Closing"),
    5: ("BatchNorm and other buffers", "engine/buffers.py", "Buffers.finish"),
    7: ("not finite: who, which rows", "engine/nonfinite.py", "NonFinite.handle"),
    8: ("replicas still identical?", "engine/guard.py", "check_replicas"),
}


def has_symbol(file: str, symbol: str) -> bool:
    """Whether ``symbol`` ('name' or 'Class.name') is defined in a file of the package."""
    body: list[ast.stmt] = ast.parse((SOURCE / file).read_text("utf-8")).body
    for name in symbol.split("."):
        found = [
            n for n in body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == name
        ]
        if not found:
            return False
        body = found[0].body
    return True


def draw_gradient() -> str:
    """From the loss to the update, with the place in the code beside each station."""
    left, top, row, width = 24.0, 76.0, 54.0, 372.0
    svg = Svg(830, top + len(WAY) * row + 8, "Where a gradient goes")
    svg.text(24, 32, "Where a gradient goes", size=16, bold=True)
    svg.text(24, 52, "Left: its way. Right: what happens beside it at that moment.", color=SOFT)
    for i, (what, file, symbol) in enumerate(WAY):
        if not has_symbol(file, symbol):
            raise SystemExit(f"docs/draw.py: {file} has no {symbol} any more.")
        y = top + i * row
        on_wire = i in (4, 5)
        svg.box(left, y, width, 40, FILLS[1 if on_wire else 0], EDGES[1 if on_wire else 0])
        svg.text(left + 10, y + 17, what)
        svg.text(left + 10, y + 33, f"{file} · {symbol}", size=11, color=SOFT, mono=True)
        if i + 1 < len(WAY):
            svg.line([(left + 40, y + 40), (left + 40, y + row)], arrow=True)
        if i in BESIDE:
            what, file, symbol = BESIDE[i]
            if not has_symbol(file, symbol):
                raise SystemExit(f"docs/draw.py: {file} has no {symbol} any more.")
            x = left + width + 70
            svg.box(x, y, 340, 40, FILLS[2], EDGES[2])
            svg.text(x + 10, y + 17, what)
            svg.text(x + 10, y + 33, f"{file} · {symbol}", size=11, color=SOFT, mono=True)
            svg.line([(left + width, y + 20), (x, y + 20)])
    return str(svg)


# -- the layers of the package ---------------------------------------------------------------------


def part_of(module: str) -> str:
    """'oarlock.engine.step' -> 'engine'; '' for the package itself."""
    names = module.split(".")
    return names[1] if len(names) > 1 else ""


def imports(path: Path) -> set[str]:
    """All modules of the package that a file imports, wherever in the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
            found |= {f"{node.module}.{a.name}" for a in node.names}
    return {m for m in found if m.split(".")[0] == "oarlock"}


def parts_and_arrows() -> dict[str, set[str]]:
    """Which part (a folder or a single module) imports which others."""
    names = {p.stem if p.is_file() else p.name for p in SOURCE.iterdir() if p.name[0] not in "_."}
    names -= {"py"}
    arrows: dict[str, set[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if own == "__init__":
            continue
        targets = {part_of(m) for m in imports(path)} & names
        arrows.setdefault(own, set()).update(targets - {own})
    return arrows


def level_of(part: str, arrows: dict[str, set[str]], below: tuple[str, ...] = ()) -> int:
    """The longest way down to a part: one more than the lowest of those that import it."""
    if part in below:
        raise SystemExit(f"docs/draw.py: imports go in a circle: {' ← '.join([*below, part])}")
    importers = [p for p, targets in arrows.items() if part in targets]
    return max((1 + level_of(p, arrows, (*below, part)) for p in importers), default=0)


def reachable(parts: Iterable[str], arrows: dict[str, set[str]]) -> set[str]:
    """Everything below ``parts``."""
    found: set[str] = set()
    todo = list(parts)
    while todo:
        for target in arrows[todo.pop()] - found:
            found.add(target)
            todo.append(target)
    return found


WHAT = {
    "cli": "commands, thin",
    "demo": "the packaged example",
    "finetune": "data, recipe, export",
    "config": "the run file",
    "launch": "local processes",
    "checkpoint": "save, verify, load",
    "engine": "the step",
    "batches": "global batches",
    "rendezvous": "the ranks meet",
    "devices": "device and backend",
    "world": "ranks, groups, messages",
    "randomness": "keyed random numbers",
    "environment": "launchers' variables",
    "processes": "ties between processes",
}


# Where parts stand, as a share of the width, so that no arrow passes behind a box.
COLUMNS = {
    "checkpoint": 0.5,
    "config": 0.16,
    "launch": 0.84,
    "processes": 0.84,
    "world": 0.4,
    "environment": 0.4,
}
COLUMNS |= {"randomness": 0.62, "rendezvous": 0.4, "devices": 0.16}
FOOT = {"errors", "words"}  # everybody's: a bar at the foot instead of arrows


def draw_layers() -> str:
    """The parts and the arrows of their imports; an arrow that follows from others is left out."""
    arrows = parts_and_arrows()
    levels: dict[int, list[str]] = {}
    for part in arrows:
        levels.setdefault(level_of(part, arrows), []).append(part)
    del levels[level_of("errors", arrows)]
    width, height, gap, box = 900.0, 42.0, 30.0, 160.0
    top = 76.0
    tallest = max(levels)
    svg = Svg(width, top + (tallest + 1) * (height + gap) + 48, "The parts of Oarlock")
    svg.text(24, 32, "The parts, and who imports whom", size=16, bold=True)
    svg.text(24, 52, "Arrows run downward only; the engine knows nothing above it.", color=SOFT)
    centre: dict[str, float] = {}
    for row in levels.values():
        for i, part in enumerate(sorted(row)):
            centre[part] = width * COLUMNS.get(part, (i + 1) / (len(row) + 1))
    y_of = {part: top + level * (height + gap) for level, row in levels.items() for part in row}
    for part in sorted(arrows):
        indirect = reachable(arrows[part], arrows)
        for target in sorted(arrows[part] - indirect - FOOT):
            svg.curve(centre[part], y_of[part] + height, centre[target], y_of[target] - 2)
    foot = top + (tallest + 1) * (height + gap)
    svg.box(24, foot, width - 48, 28, PALE, LINE)
    svg.text(
        width / 2, foot + 18, "errors, words: what a person reads (used by all)", anchor="middle"
    )
    for part in sorted(set(arrows) - FOOT):
        color = 1 if part == "engine" else 0
        svg.box(centre[part] - box / 2, y_of[part], box, height, FILLS[color], EDGES[color])
        svg.text(centre[part], y_of[part] + 19, part, anchor="middle", bold=True)
        svg.text(
            centre[part], y_of[part] + 35, WHAT.get(part, ""), anchor="middle", size=11, color=SOFT
        )
    return str(svg)


def draw() -> dict[str, str]:
    """Every picture: file name to content."""
    return {
        "batch.svg": draw_batch(),
        "step.svg": draw_step(),
        "gradient.svg": draw_gradient(),
        "layers.svg": draw_layers(),
    }


def main() -> None:
    """Write the pictures."""
    PICTURES.mkdir(exist_ok=True)
    for name, content in draw().items():
        (PICTURES / name).write_text(content, "utf-8")
        print(f"docs/pictures/{name}")


if __name__ == "__main__":
    main()
