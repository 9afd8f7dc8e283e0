"""The picture of a comparison: what each candidate gains at equal cost, with its interval."""

from matplotlib.figure import Figure

COLORS = {"operations": "#1f5fa8", "time": "#c46210"}


def write_figure(report, path):
    """Draw the gains at equal cost. An earlier figure at `path` is removed."""
    path.unlink(missing_ok=True)
    drawn = [(one["name"], price, each) for one in report.facts for price, each in one["prices"].items()]
    if not drawn:
        return
    figure = Figure(figsize=(7, 1.3 + 0.4 * len(drawn)), dpi=120, layout="constrained")
    axis = figure.subplots()
    for y, (_, price, each) in enumerate(drawn):
        axis.errorbar(each["gain"], y, xerr=each["half"], fmt="o", color=COLORS[price], capsize=2.5)
    axis.axvline(0, color="#888888", linewidth=0.8, zorder=0)
    axis.set_yticks(range(len(drawn)), [label(*one) for one in drawn])
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel(f"gain at equal cost over {report.base.name} (nats per token)".replace("$", r"\$"))
    figure.savefig(path)
    print(f"figure: {path}")


def label(name, price, each):
    return f"{name}, {each['cost']:.2f}× by {price}: {each['verdict']}".replace("$", r"\$")
