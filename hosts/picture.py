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
