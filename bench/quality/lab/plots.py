"""SVG by hand: no plotting library, small files, readable on light and dark pages."""
from xml.sax.saxutils import escape

STYLE = """<style>
text{font:12px sans-serif;fill:#1f2328}.dim{fill:#59636e}.page{fill:#ffffff}.grid{stroke:#d1d9e0}.edge{fill:none;stroke:#d1d9e0}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.dim{fill:#9198a1}.page{fill:#0d1117}.grid,.edge{stroke:#3d444d}}
</style>"""
# Middle tones that stand out on white and on near-black; the dash tells apart what colours do not.
LOOK = {"full": ("#808890", ""), "global": ("#12a150", ""), "trimkv": ("#e8710a", ""), "streaming": ("#9558d6", ""),
        "gkv": ("#2f81f7", ""), "rkv": ("#2f81f7", "5 3"), "d2o": ("#d63384", ""), "ems": ("#d63384", "5 3"),
        "kvcompress": ("#b58900", ""), "cake": ("#b58900", "5 3"), "adakv": ("#0aa2a8", ""),
        "pyramidkv": ("#0aa2a8", "5 3"), "snapkv": ("#0aa2a8", "2 2"), "morphkv": ("#c0392b", ""), "h2o": ("#c0392b", "5 3"),
        "static": ("#6b4f2a", ""), "tova": ("#6b4f2a", "5 3"), "keydiff": ("#4c6a92", ""), "knorm": ("#4c6a92", "5 3"),
        "lagkv": ("#4c6a92", "2 2"), "expected_attention": ("#6b4f2a", "2 2")}
HUE = "#2f81f7"


def text(x, y, what, anchor="start", kind="", turn=None):
    turned = f' transform="rotate({turn} {x:.1f} {y:.1f})"' if turn is not None else ""
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{named}{turned}>{escape(str(what))}</text>'


def page(width, height, parts):
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {width:.0f} {height:.0f}">{STYLE}<rect class="page" width="100%" height="100%"/>\n'
            + "\n".join(parts) + "\n</svg>\n")


def legend(methods, x, y, width):
    """(svg, height): one swatch per method, wrapped."""
    out, at, row, step = [], x, y, 118
    for method in methods:
        colour, dash = LOOK[method]
        if at + step > x + width:
            at, row = x, row + 20
        out.append(f'<path d="M{at} {row - 4}h22" stroke="{colour}" stroke-width="{4 if method == "global" else 2.5}" '
                   f'stroke-dasharray="{dash}"/>' + text(at + 27, row, method))
        at += step
    return out, row - y + 20


def curve(method, points, stroke=2.0):
    """points: [(x, y, y of the low end, y of the high end)]."""
    colour, dash = LOOK[method]
    thick = 3.5 if method == "global" else stroke
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y, *_ in points)
    out = [f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{thick}" stroke-dasharray="{dash}"/>']
    for x, y, low, high in points:
        out.append(f'<path d="M{x:.1f} {low:.1f}V{high:.1f}" stroke="{colour}" stroke-opacity="0.55"/>'
                   f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{3 if method == "global" else 2}" fill="{colour}"/>')
    return out


def panel(x0, y0, width, height, title, categories, series):
    """One chart of percentages. series: {method: {category: (mean, low, high)}}."""
    out = [text(x0, y0 - 8, title)]
    for p in range(0, 101, 25):
        y = y0 + height * (1 - p / 100)
        out.append(f'<path class="grid" d="M{x0} {y:.1f}h{width}"/>' + text(x0 - 5, y + 4, p, "end", "dim"))
    place = {c: x0 + width * (i + 0.5) / len(categories) for i, c in enumerate(categories)}
    out += [text(x, y0 + height + 15, c, "middle", "dim") for c, x in place.items()]
    ordered = sorted(series.items(), key=lambda item: item[0] == "global")      # global on top
    for i, (method, values) in enumerate(ordered):
        shift = (i - len(ordered) / 2) * min(3.0, 0.3 * width / len(categories) / max(1, len(ordered)))
        points = [(place[c] + shift, *(y0 + height * (1 - v) for v in values[c])) for c in categories if c in values]
        if points:
            out += curve(method, points)
    return out


def charts(panels, methods, heading):
    """panels: [(title, categories, series)], three in a row."""
    width, height, gap_x, gap_y, left, top = 270, 190, 60, 62, 50, 60
    out = [text(20, 24, heading)]
    for i, (title, categories, series) in enumerate(panels):
        out += panel(left + (i % 3) * (width + gap_x), top + (i // 3) * (height + gap_y), width, height, title,
                     categories, series)
    rows = -(-len(panels) // 3)
    below = top + rows * (height + gap_y) - 6
    total = left + 3 * width + 2 * gap_x + 20
    keys, used = legend(methods, 20, below, total - 40)
    return page(total, below + used, out + keys)


def heat(x0, y0, grid, cell, top):
    """Cells, (value, label), shaded by value / top; None stays empty."""
    w, h = cell
    out = []
    for r, row in enumerate(grid):
        for c, at in enumerate(row):
            x, y = x0 + c * w, y0 + r * h
            out.append(f'<rect class="edge" x="{x}" y="{y}" width="{w}" height="{h}"/>')
            if at is None:
                continue
            out.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" fill="{HUE}" '
                       f'fill-opacity="{max(0.0, min(1.0, at[0] / top)) * 0.85:.3f}"/>'
                       + text(x + w / 2, y + h / 2 + 4, at[1], "middle"))
    return out


def heats(maps, heading, columns, rows, cell, top=None, per_row=4):
    """Several heat maps: {title: grid of (value, label)}; `top` is the value of the full colour, None = the largest of all."""
    w, h = cell
    left, gap = 74, 26
    box_w, box_h = len(columns) * w + left + gap, len(rows) * h + 58
    out = [text(20, 24, heading)]
    largest = top or max((at[0] for grid in maps.values() for row in grid for at in row if at is not None), default=1) or 1
    for i, (title, grid) in enumerate(maps.items()):
        x0, y0 = left + (i % per_row) * box_w, 66 + (i // per_row) * box_h
        out.append(text(x0, y0 - 20, title))
        out += [text(x0 + (c + 0.5) * w, y0 - 5, label, "middle", "dim") for c, label in enumerate(columns)]
        out += [text(x0 - 5, y0 + (r + 0.5) * h + 4, label, "end", "dim") for r, label in enumerate(rows)]
        out += heat(x0, y0, grid, cell, largest)
    count = max(1, len(maps))
    return page(min(count, per_row) * box_w + 20, 66 + -(-count // per_row) * box_h - 10, out)


def densities(curves, heading):
    """{method: [density per bin]}: where in the text the kept entries stand; 1 = evenly spread."""
    width, height, per_row = 190, 90, 5
    top = max([4.0] + [max(v) for v in curves.values()])
    out = [text(20, 24, heading)]
    for i, (method, values) in enumerate(curves.items()):
        x0, y0 = 40 + (i % per_row) * (width + 30), 60 + (i // per_row) * (height + 52)
        colour, _ = LOOK[method]
        scale = [y0 + height * (1 - (v / top) ** 0.5) for v in values]
        even = y0 + height * (1 - (1 / top) ** 0.5)
        step = width / len(values)
        path = f"M{x0} {y0 + height}" + "".join(f"L{x0 + j * step:.1f} {y:.1f}h{step:.1f}" for j, y in enumerate(scale))
        out += [text(x0, y0 - 6, method),
                f'<path d="{path}V{y0 + height}Z" fill="{colour}" fill-opacity="0.55" stroke="{colour}"/>',
                f'<path class="grid" d="M{x0} {even:.1f}h{width}" stroke-dasharray="3 3"/>',
                text(x0 - 4, even + 4, 1, "end", "dim"), text(x0, y0 + height + 14, "start", "start", "dim"),
                text(x0 + width, y0 + height + 14, "end", "end", "dim")]
    count = max(1, len(curves))
    return page(40 + min(count, per_row) * (width + 30), 60 + -(-count // per_row) * (height + 52), out)


def step_axes(box, most, every):
    """Percentages over steps: (svg, place of a step, height of a share). box: (x, y, width, height)."""
    x0, y0, width, height = box

    def place(step):
        return x0 + width * step / most

    def level(share):
        return y0 + height * (1 - share)
    out = []
    for p in range(0, 101, 25):
        y = level(p / 100)
        out.append(f'<path class="grid" d="M{x0} {y:.1f}h{width}"/>' + text(x0 - 5, y + 4, p, "end", "dim"))
    out += [text(place(s), y0 + height + 15, s, "middle", "dim") for s in range(0, most + 1, every)]
    return out, place, level


def line_of_steps(points, means, colour, place, level):
    """Single shares as dots, moving means as a line through them; both [(step, share)]."""
    path = "M" + "L".join(f"{place(s):.1f} {level(v):.1f}" for s, v in means)
    return [f'<circle cx="{place(s):.1f}" cy="{level(v):.1f}" r="2" fill="{colour}" fill-opacity="0.55"/>' for s, v in points] + [
        f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="3"/>']


def bars(x0, step, entries, level):
    """Shares with intervals side by side, [(label, colour, (mean, low, high))]."""
    out = []
    for i, (label, colour, (mean, low, high)) in enumerate(entries):
        x = x0 + step * (i + 0.5)
        out.append(f'<path d="M{x:.1f} {level(low):.1f}V{level(high):.1f}" stroke="{colour}" stroke-width="2"/>'
                   f'<circle cx="{x:.1f}" cy="{level(mean):.1f}" r="4.5" fill="{colour}"/>'
                   + text(x + 8, level(mean) + 4, f"{100 * mean:.0f}") + text(x, level(0) + 15, label, "middle", "dim"))
    return out
