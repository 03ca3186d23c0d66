"""What torch cannot fuse by itself: operators with a Triton program for GPUs and a reference in torch for the rest."""
