"""Several processes: the only code that names ``torch.distributed``."""
