"""Training on preferences and rewards: DPO, IPO, ORPO and GRPO."""
