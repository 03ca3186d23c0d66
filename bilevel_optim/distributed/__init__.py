"""Several processes: the only code that uses ``torch.distributed``."""
