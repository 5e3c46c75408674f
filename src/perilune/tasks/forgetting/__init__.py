"""forgetting: what training cost a pretrained model elsewhere."""
