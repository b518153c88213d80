"""Checkpoints: prepare the demo target and tiny test models, check draft folders, train drafts."""
