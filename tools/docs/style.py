"""How pictures look: transparent, with grey that can be read on white and on black."""

from cycler import cycler

GREY = "#808892"
ADAM, VOGN, THIRD = "#d9822b", "#4c6ef5", "#2b9a66"
STYLE = {
    "figure.dpi": 110,
    "figure.figsize": (7.2, 3.2),
    "figure.constrained_layout.use": True,
    "savefig.transparent": True,
    "font.size": 10,
    "text.color": GREY,
    "axes.labelcolor": GREY,
    "axes.edgecolor": GREY,
    "axes.titlecolor": GREY,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "legend.frameon": False,
    "legend.labelcolor": GREY,
    "axes.prop_cycle": cycler(color=[VOGN, ADAM, THIRD, "#c2255c", "#7048e8"]),
}
