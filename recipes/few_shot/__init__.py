"""Few-shot learning: meta-learners on N-way K-shot episodes of real images."""
