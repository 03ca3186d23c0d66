"""Draws tree.png, the decision tree of choosing.md. Run: python docs/pictures/tree.py."""

from pathlib import Path

import matplotlib.pyplot as plt

QUESTIONS = [  # place, text
    (0.00, 5, "One loss:\nmin over x, max over y?"),
    (0.00, 4, "Does f or the lower solver\nlack a derivative?"),
    (0.00, 3, "Few-shot tasks, or many\nlower problems?"),
    (0.00, 2, "Second derivatives of g\ntoo expensive, unavailable?"),
    (0.00, 1, "Small batches:\nnoisy gradients?"),
    (0.00, 0, "Few lower steps, or stopping\nearly is part of the model?"),
]
ANSWERS = [
    (5, "GDA (baseline); RAGDA: ill conditioned;\nPRAGDA: saddle points"),
    (4, "PZOBO, HOZOG, for few upper parameters"),
    (
        3,
        "few-shot: MAML, ANIL, iMAML;  a state for each task: RSVRB;\ntoo many to meet twice: RTMLMC;  any with tasks=",
    ),
    (2, "F2SA (order 2; not convex: order 1); BOME: full batches"),
    (1, "SOBA (cheapest step); SABA: data in fixed batches;\nMRBO: averages; SVRB: small lower problem"),
    (0, "ITD"),
]
LAST = "AID;  full batches and bad conditioning: RAHGD, with saddle points PRAHGD"

figure, axis = plt.subplots(figsize=(9.6, 7.6), layout="constrained")
box = {"boxstyle": "round,pad=0.45", "facecolor": "#e8f0fe", "edgecolor": "#3b6fb6"}
leaf = {"boxstyle": "round,pad=0.45", "facecolor": "#e9f7ec", "edgecolor": "#2e8b57"}
arrow = {"arrowstyle": "->", "color": "#444444", "linewidth": 1.5}
for place, height, text in QUESTIONS:
    axis.text(place, height, text, ha="center", va="center", bbox=box, fontsize=10.5)
    axis.annotate("", (1.02, height), xytext=(0.58, height), arrowprops=arrow)
    axis.text(0.8, height + 0.1, "yes", ha="center", fontsize=10)
    axis.annotate("", (0, height - 0.68), xytext=(0, height - 0.3), arrowprops=arrow)
    axis.text(0.05, height - 0.52, "no", fontsize=10)
for height, text in ANSWERS:
    axis.text(1.05, height, text, ha="left", va="center", bbox=leaf, fontsize=10.5)
axis.text(-0.55, -0.95, LAST, ha="left", va="center", bbox=leaf, fontsize=10.5)
axis.set(xlim=(-0.65, 3.2), ylim=(-1.3, 5.5))
axis.axis("off")
figure.savefig(Path(__file__).parents[1] / "tree.png", dpi=110)
