"""The control library: cost, acceptance, tiers, hysteresis, survival planning and agreement; no torch, no sglang, no clock."""
