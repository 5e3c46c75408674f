"""forgetting: the losses of a pretrained model on other tasks than the trained one."""
