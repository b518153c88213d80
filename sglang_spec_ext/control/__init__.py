"""The control library: cost, acceptance, tiers, hysteresis, verification, ranks; no torch, no clock."""
