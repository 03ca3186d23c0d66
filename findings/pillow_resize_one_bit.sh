#!/bin/bash
# Pillow resizes images of mode "1" by nearest neighbour, whatever filter is asked for.
source "$(dirname "$0")/fresh.sh" numpy==2.4.6 pillow==13.0.0
"$PY" - <<'EOF'
import sys, numpy as np
from PIL import Image

ink = np.zeros((105, 105), bool)
ink[50:53, 10:95] = True  # a stroke of three pixels, as in Omniglot
image = Image.fromarray(ink)
small = {mode: np.asarray(image.convert(mode).resize((28, 28), Image.Resampling.BILINEAR), float) for mode in "1L"}
print("guess: the same picture up to rounding, because both ask for bilinear filtering")
for mode, found in small.items():
    print(f"seen: mode {mode}: {len(np.unique(found))} values, share of ink {found.mean() / found.max():.4f} of 1")
sys.exit(len(np.unique(small["1"])) > 2)
EOF
