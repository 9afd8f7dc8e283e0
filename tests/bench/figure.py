"""The picture of a comparison: what each candidate gains, over what it costs."""

from itertools import product

import numpy as np
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

LINE, POINT, PAYS = "#222222", "#1f5fa8", "#e9f4e6"  # colors
TICKS = (0.25, 0.5, 0.7, 1, 1.2, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32)
DIRECTIONS = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, -1), (-1, 1))


def write_figure(reports, path):
    """Draw the first two comparisons that have a ladder. An earlier figure at `path` is removed."""
    path.unlink(missing_ok=True)
    drawn = [report for report in reports if any(len(fit.rungs) > 1 for fit in report.fits.values())][:2]
    if not drawn:
        return
    figure = Figure(figsize=(5.9 * len(drawn), 4.5), dpi=120, layout="constrained")
    panels = figure.subplots(1, len(drawn), squeeze=False)
    for axis, report in zip(panels[0], drawn):
        draw(axis, report)
    panels[0, 0].set_ylabel("reduction of validation loss at equal steps (nats)")
    figure.draw_without_rendering()  # which settles where the axes lie
    for axis, report in zip(panels[0], drawn):
        write_names(axis, report)
    figure.savefig(path, pil_kwargs={"optimize": True})
    print(f"figure: {path}")


def plain(name):
    """Return a name as matplotlib writes it, where a $ would begin a formula, and `standard` in full."""
    return "the standard model" if name == "standard" else name.replace("$", r"\$")


def draw(axis, report):
    """Draw what the baseline gains by longer training as a line, and every candidate as a point."""
    fits = list(report.fits.values())
    candidates = [fit.cost for fit in fits]
    low, high = max(fits[0].rungs[0], 0.85 * min(1, *candidates)), fits[0].rungs[-1]
    costs = np.geomspace(low, high, 200)
    gains = fits[0].loss({1.0: 1}) - fits[0].curve(costs)
    axis.plot(costs, gains, color=LINE, linewidth=1.6)
    for cost, gain, half in points_of(report).values():
        axis.errorbar(cost, gain, half, fmt="o", color=POINT, markersize=6.5, elinewidth=1.3, capsize=2.5)
    axis.axhline(0, color="#d0d0d0", linewidth=0.8, zorder=0)
    bottom, top = axis.get_ylim()
    axis.fill_between(costs, np.maximum.accumulate(gains), top, color=PAYS, linewidth=0, zorder=-1)
    axis.set(xscale="log", xlim=(low, max(high, 1.05 * max(candidates))), ylim=(bottom, top))
    axis.set_xticks([tick for tick in TICKS if low <= tick <= axis.get_xlim()[1]])
    axis.minorticks_off()
    axis.xaxis.set_major_formatter("{x:g}×")
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel(f"training compute, relative to {plain(report.base)}")
    axis.set_title(plain(report.comparison.title), loc="left", fontweight="bold", fontsize=11)


def points_of(report):
    """Return {name: (cost, gain at equal steps, half its interval's width, or 0 if that is not known)}."""
    gains = {name: fit.gain({1.0: 1}) for name, fit in report.fits.items()}
    return {name: (report.fits[name].cost, gain, np.nan_to_num(half)) for name, (gain, _, half, _) in gains.items()}


def write_names(axis, report):
    """Write what the line is, and the name of each candidate next to its point if there is room."""
    def around(low, high, margin):
        """Return the pixels between two points, and some more on all sides."""
        return Bbox(axis.transData.transform([low, high])).padded(margin)

    light = {"color": "#7c8a78", "transform": axis.transAxes, "fontsize": 12, "style": "italic"}
    corners = [axis.text(0.02, 0.97, "pays", va="top", **light), axis.text(0.02, 0.03, "does not pay", **light)]
    costs, gains = axis.lines[0].get_data()
    taken = [corner.get_window_extent() for corner in corners]
    taken += [around(point, point, 2) for point in zip(costs, gains)]
    points = points_of(report)
    for cost, gain, half in points.values():
        taken += [around((cost, gain - half), (cost, gain + half), 12), around((cost, gain), (cost, gain), 9)]
    middle = int(0.6 * len(costs))
    write(axis, f"train {plain(report.base)} longer", (costs[middle], gains[middle]), LINE, taken, DIRECTIONS[::-1])
    for name in sorted(points, key=points.get, reverse=True):
        write(axis, plain(name), points[name][:2], POINT, taken, DIRECTIONS)


def write(axis, words, point, color, taken, directions):
    """Write words in the nearest place around a point that is free, and add it to those that are taken."""
    text = axis.annotate(words, point, (0, 0), textcoords="offset points", color=color, in_layout=False)
    frame = axis.get_window_extent()
    for distance, (right, up) in product((8, 14, 20, 28, 38, 50), directions):
        text.set(position=(distance * right, distance * up))
        text.set(ha=("center", "left", "right")[right], va=("center", "bottom", "top")[up])
        box = text.get_window_extent()
        if frame.contains(box.x0, box.y0) and frame.contains(box.x1, box.y1) and not box.count_overlaps(taken):
            taken.append(box)
            break
    else:
        text.remove()
        return
    if distance > 8:
        thin = {"arrowstyle": "-", "color": color, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 4}
        axis.annotate("", point, text.get_position(), textcoords="offset points", arrowprops=thin)
