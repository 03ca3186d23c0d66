#!/bin/bash
# fetch_20newsgroups(remove=("footers",)) removes the last paragraph, whatever it is.
source "$(dirname "$0")/fresh.sh" numpy==2.4.6 scipy==1.17.1 scikit-learn==1.9.1
"$PY" - <<'EOF'
import codecs, pickle, sys, tempfile
from pathlib import Path
import numpy as np
from sklearn.datasets import fetch_20newsgroups
from sklearn.utils import Bunch

answer = "The answer is a whole paragraph of the text and nothing like a signature. " * 20
text = f"Here is my question.\n\n{answer}\n"
part = Bunch(data=[text], target=np.array([0]), target_names=["a"], filenames=np.array(["1"]))
with tempfile.TemporaryDirectory() as folder:  # a cache with one text in place of a download
    cache = codecs.encode(pickle.dumps({"train": part, "test": part}), "zlib_codec")
    Path(folder, "20news-bydate_py3.pkz").write_bytes(cache)
    found = fetch_20newsgroups(data_home=folder, remove=("footers",), download_if_missing=False).data[0]
print(f"guess: a text of two paragraphs without a signature stays, {len(text)} characters")
print(f"seen: {found!r}")
sys.exit(int(found != "Here is my question."))
EOF
