"""The picture of a comparison: what each candidate gains at equal cost, with its interval."""

from matplotlib.figure import Figure


def write_figure(report, path):
    """Draw the gains at equal cost. An earlier figure at `path` is removed."""
    path.unlink(missing_ok=True)
    drawn = [facts for facts in report.facts if facts["equal_cost"]]
    if not drawn:
        return
    figure = Figure(figsize=(7, 1.3 + 0.4 * len(drawn)), dpi=120, layout="constrained")
    axis = figure.subplots()
    gains, halves = zip(*(facts["equal_cost"].values() for facts in drawn))
    axis.errorbar(gains, range(len(drawn)), xerr=halves, fmt="o", capsize=2.5)
    axis.axvline(0, color="#888888", linewidth=0.8, zorder=0)
    labels = [f"{facts['name']}, {facts['operations']:.2f}×: {facts['verdict']}" for facts in drawn]
    axis.set_yticks(range(len(drawn)), labels, parse_math=False)
    axis.invert_yaxis()
    axis.set_xlabel(f"gain at equal cost over {report.base.name} (nats per token)", parse_math=False)
    figure.savefig(path)
    print(f"figure: {path}")
