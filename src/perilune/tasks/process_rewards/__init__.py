"""Process rewards: rewards for parts of an answer, and the calibration that says whether to trust them."""
