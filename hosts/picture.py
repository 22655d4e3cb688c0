"""The picture of programs that nearly fit: pages read over the group's share of the plain peak."""

import math
import re

WIDTH, HEIGHT, MARGIN = 330, 240, 45
COLOURS = {"farheap": "#dc6e1e", "swap": "#326098"}


def curve(rows, path):
    """Draws a chart for each program of rows `NAME at SHARE %: pages in`; the scale of pages is logarithmic."""
    points = {}
    for work, value, base, _, _ in rows:
        match = re.fullmatch(r"(.*) at (\d+) %: pages in", work)
        if match:
            points.setdefault(match[1], []).append((int(match[2]), {"farheap": value, "swap": base}))
    charts = [chart(name, sorted(of, key=lambda point: point[0]), WIDTH * at) for at, (name, of) in enumerate(points.items())]
    legend = "".join(f'<text x="{MARGIN + 70 * at}" y="{HEIGHT + 25}" fill="{colour}">{side}</text>'
                     for at, (side, colour) in enumerate(COLOURS.items()))
    note = f'<text x="{MARGIN + 150}" y="{HEIGHT + 25}">pages in, thousands, over % of the plain peak</text>'
    size = f'width="{WIDTH * max(1, len(charts))}" height="{HEIGHT + 35}"'
    style = 'font-family="sans-serif" font-size="13"'
    path.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{"".join(charts)}{legend}{note}</svg>\n')


def chart(name, points, left):
    known = [value for _, sides in points for value in sides.values() if value is not None]
    # Nothing is drawn at the lower edge.
    low, high = -2, max(0, math.ceil(math.log10(max(known, default=1) or 1)))
    shares = [share for share, _ in points]
    first, last = min(shares), max(max(shares), min(shares) + 1)
    x = lambda share: left + MARGIN + (share - first) / (last - first) * (WIDTH - MARGIN - 20)
    y = lambda value: HEIGHT - 20 - (max(math.log10(value), low) - low if value else 0) / (high - low) * (HEIGHT - MARGIN - 20)
    parts = [f'<text x="{left + MARGIN}" y="20">{name}</text>']
    for power in range(low, high + 1):
        at = y(10**power)
        parts.append(f'<line x1="{left + MARGIN}" x2="{left + WIDTH - 20}" y1="{at}" y2="{at}" stroke="#ddd"/>'
                     f'<text x="{left}" y="{at + 4}">{10**power if power > low else 0:g}</text>')
    parts += [f'<text x="{x(share) - 10}" y="{HEIGHT}">{share}</text>' for share in shares]
    for side, colour in COLOURS.items():
        line = [f"{x(share)},{y(sides[side])}" for share, sides in points if sides[side] is not None]
        parts.append(f'<polyline points="{" ".join(line)}" fill="none" stroke="{colour}" stroke-width="2"/>')
    return "".join(parts)


def bars(rows, path):
    """Draws a bar for each row (work, ratio, goal) that has a ratio, from 1 to it on a logarithmic scale; more is better."""
    left, span, line, octaves = 420, 400, 20, 4
    x = lambda ratio: left + span * (min(max(math.log2(ratio), -octaves), octaves) + octaves) / (2 * octaves)
    known = [row for row in rows if row[1] and math.isfinite(row[1])]
    parts = []
    for power in range(-octaves, octaves + 1):
        at = x(2.0**power)
        parts.append(f'<line x1="{at}" x2="{at}" y1="25" y2="{30 + line * len(known)}" stroke="{"#000" if power == 0 else "#ddd"}"/>'
                     f'<text x="{at - 8}" y="18">{2.0**power:g}</text>')
    for at, (work, ratio, goal) in enumerate(known):
        colour = "#888" if not goal else "#3c8c5a" if ratio >= goal else "#be503c"
        top, ends = 30 + line * at, sorted((x(1), x(ratio)))
        parts.append(f'<text x="5" y="{top + 13}">{work}</text><text x="{left + span + 10}" y="{top + 13}">{ratio:.2f}</text>'
                     f'<rect x="{ends[0]}" y="{top + 2}" width="{max(1, ends[1] - ends[0])}" height="{line - 5}" fill="{colour}"/>')
    size = f'width="{left + span + 70}" height="{40 + line * len(known)}" font-family="sans-serif" font-size="13"'
    path.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(parts)}</svg>\n')
