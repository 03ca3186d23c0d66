"""Draws idea.png: two levels, and the two ways in which x moves f. Run: python docs/pictures/idea.py."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

y = np.linspace(-1.2, 2.6, 300)
figure, (upper, lower) = plt.subplots(2, 1, figsize=(5.4, 6.8), layout="constrained")

for x, colour, name in ((0.3, "tab:blue", "x"), (1.3, "tab:orange", "x + dx")):
    solution = np.tanh(1.2 * x)
    lower.plot(y, (y - solution) ** 2 + 0.3 * x, color=colour, label=f"g({name}, y)")
    lower.plot(solution, 0.3 * x, "o", color=colour)
    lower.annotate(f"y*({name})", (solution, 0.3 * x), xytext=(solution - 0.2, 0.3 * x - 0.42), color=colour)
lower.annotate(
    "",
    (np.tanh(1.56), 0.39),
    xytext=(np.tanh(0.36), 0.09),
    arrowprops={"arrowstyle": "->", "color": "k", "linewidth": 2, "shrinkA": 6, "shrinkB": 6},
)
lower.set(xlabel="y", title="Lower level: y minimises g.\nMoving x moves the solution", ylim=(-0.7, 3.2))
lower.legend()

xs, ys = np.meshgrid(np.linspace(-0.4, 2.2, 120), np.linspace(-0.8, 1.6, 120))
upper.contour(xs, ys, (ys - 1.4) ** 2 + 0.25 * (xs - 2.4) ** 2, levels=14, cmap="Greys_r", linewidths=0.8)
line = np.linspace(-0.4, 2.2, 100)
upper.plot(line, np.tanh(1.2 * line), "k", linewidth=2, label="the curve y*(x)")
start, end = (0.3, np.tanh(0.36)), (1.3, np.tanh(1.56))
for here, there, colour, text, place in (
    (start, (1.3, start[1]), "tab:green", "direct: x moves", (0.45, 0.12)),
    ((1.3, start[1]), end, "tab:red", "indirect: y*(x) moves", (0.42, 1.1)),
):
    upper.annotate("", there, xytext=here, arrowprops={"arrowstyle": "->", "color": colour, "linewidth": 2.5})
    upper.text(*place, text, color=colour, fontsize=11, backgroundcolor="white")
upper.plot(*start, "o", color="tab:blue")
upper.plot(*end, "o", color="tab:orange")
upper.set(xlabel="x", ylabel="y", title="Upper level: walk down f\nalong the curve y*(x)")
upper.legend(loc="lower right")
figure.savefig(Path(__file__).parents[1] / "idea.png", dpi=200)
